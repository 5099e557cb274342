"""A slot moves, and SIGKILL at every named point of that, on real processes: field cases 18 and 19.

A round fills a queue of the slot, brings a move to a cut, and has calls on their way when somebody is killed.
Then the slot has one owner, whose name is written beside each cut, what the clients were told is so, and the
same move once more finishes what was begun. One slot goes to and fro, so what a round has left behind in it
goes through all that follow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import grpc
import grpc.aio
import pytest
from sepp import EnqueueAck, EnqueueRequest, Job, Payload, RetryDirective
from sepp.errors import ClientError, LeaseError

from common import admin_pb2 as pb
from common.admin_client import AdminClient, AdminUnavailableError
from common.slots import SlotMap, slot_of
from common.wire import MoveCommand
from tests.faults.armed_harness import Hold
from tests.faults.armed_points import COMMIT_MOVE, LAST_CHANGES, SLOT_MAP, STARTING, SUPERVISOR, point
from tests.faults.armed_stage import COORDINATOR, OTHER_ROUTER, Stage, noted, soon, stage_of
from tests.integration.clients import LEASE, job, park, reserve, reserve_one, texts
from tests.integration.conftest import StartServer
from tests.integration.server import WAIT_S, wait_until_gone

# Who takes part in a move. Which shard is the source is another one in each round.
SOURCE, TARGET, ROUTER = "source", "target", "router"
EVERYBODY = "everybody"
SLOT = 7
KEY = "key"
# Of a poll whose answer can get lost with everybody who knows of it: then its job is out as long as this.
SHORT_LEASE = timedelta(seconds=2)
# Between two tries, or two looks.
AGAIN_S = 0.02
SETTINGS = {"SEPP_LIMITS__MAX_QUEUE_DEPTH": "100", "SEPP_STORAGE__DEAD_LETTER_RETENTION_MS": "3600000"}
NOT_MOVED = "the slots were not moved"
names = (name for name in (f"queue-{number}" for number in count()) if slot_of(name) == SLOT)


@dataclass(frozen=True)
class Cut:
    """Where processes stand when somebody is killed, and who owns the slot afterwards.

    `victims` are those that are killed one at a time. With `is_late` something has changed since the last
    CHANGES that the source answered while it served, so there are rows in the last one.
    """

    name: str
    holds: tuple[tuple[str, str], ...]  # role, point
    victims: tuple[str, ...] = (SOURCE, TARGET, ROUTER)
    is_late: bool = False
    is_switched: bool = False

    @property
    def stops_supervisor(self) -> bool:
        return any(role == SUPERVISOR for role, _ in self.holds)

    def has_moved(self, victim: str) -> bool:
        """Whether the slot has moved: if the map says so, or if a supervisor that lives is about to say so."""
        return self.is_switched or (self.stops_supervisor and victim in (SOURCE, TARGET, ROUTER))


def at_source(kind: str, stage: str) -> tuple[str, str]:
    return SOURCE, point(kind, stage)


def at_target(kind: str, stage: str) -> tuple[str, str]:
    return TARGET, point(kind, stage)


NO_REQUEST = Cut("all is at the target, no request for the map has left", ((ROUTER, point(COMMIT_MOVE, "sending")),))
REPLACING = Cut("the map is about to be replaced", ((SUPERVISOR, point(SLOT_MAP, "replacing")),))
REPLACED = Cut("the map is replaced, nobody was told", ((SUPERVISOR, point(SLOT_MAP, "replaced")),), is_switched=True)
MAP_SENT = Cut(
    "the new map was sent to all",
    (at_source(SLOT_MAP, "arrived"), at_target(SLOT_MAP, "arrived"), (ROUTER, point(SLOT_MAP, "arrived"))),
    is_switched=True,
)
CUTS = (
    Cut("CLEAR was sent", (at_target(MoveCommand.CLEAR, "arrived"),), (TARGET, ROUTER)),
    Cut("the target has cleared, and not said so", (at_target(MoveCommand.CLEAR, "synced"),), (SOURCE, TARGET)),
    Cut("OPEN was sent", (at_source(MoveCommand.OPEN, "arrived"),), (SOURCE, ROUTER)),
    Cut("READ was sent", (at_source(MoveCommand.READ, "arrived"),)),
    Cut("the source has read, and not answered", (at_source(MoveCommand.READ, "synced"),), (SOURCE, TARGET)),
    Cut("RECEIVE was sent", (at_target(MoveCommand.RECEIVE, "arrived"),)),
    Cut("the target has applied RECEIVE, not written", (at_target(MoveCommand.RECEIVE, "applied"),), (TARGET,)),
    Cut("the target has written RECEIVE, not synced", (at_target(MoveCommand.RECEIVE, "written"),), (TARGET, ROUTER)),
    Cut("the target has synced RECEIVE, not said so", (at_target(MoveCommand.RECEIVE, "synced"),), (SOURCE, TARGET)),
    Cut("CHANGES was sent", (at_source(MoveCommand.CHANGES, "arrived"),)),
    Cut("HOLD was sent", (at_source(MoveCommand.HOLD, "arrived"),)),
    Cut("the source holds, and has not said so", (at_source(MoveCommand.HOLD, "synced"),)),
    Cut("the last CHANGES was sent", (at_source(LAST_CHANGES, "arrived"),), is_late=True),
    Cut("the source has not sent the last changes", (at_source(LAST_CHANGES, "synced"),), is_late=True),
    Cut("the last RECEIVE was sent", (at_target(MoveCommand.RECEIVE, "arrived"),), is_late=True),
    Cut("the target has written the last RECEIVE", (at_target(MoveCommand.RECEIVE, "written"),), is_late=True),
    Cut("the target has synced the last RECEIVE", (at_target(MoveCommand.RECEIVE, "synced"),), is_late=True),
    NO_REQUEST,
    REPLACING,
    REPLACED,
    MAP_SENT,
    Cut(
        "the source has applied the new map, the target has not",
        (at_source(SLOT_MAP, "applied"), at_target(SLOT_MAP, "arrived")),
        is_switched=True,
    ),
    Cut(
        "the target has applied the new map, the source has not",
        (at_target(SLOT_MAP, "applied"), at_source(SLOT_MAP, "arrived")),
        is_switched=True,
    ),
    Cut(
        "both have written the new map, the router has not heard of it",
        (at_target(SLOT_MAP, "written"), at_source(SLOT_MAP, "written"), (ROUTER, point(SLOT_MAP, "arrived"))),
        is_switched=True,
    ),
)


# -- what clients are told ------------------------------------------------------------------------


def code_of(error: ClientError) -> grpc.StatusCode:
    assert isinstance(error.__cause__, grpc.aio.AioRpcError), error
    code: grpc.StatusCode = error.__cause__.code()
    return code


async def told(call: Awaitable[EnqueueAck], allowed: frozenset[grpc.StatusCode]) -> bool:
    """Whether the job is certain to be stored. Raises AssertionError for an error that nothing explains."""
    try:
        await soon(call)
    except ClientError as error:
        assert code_of(error) in allowed, error
        return False
    return True


def explained_by(victim: str, has_moved: bool) -> frozenset[grpc.StatusCode]:
    """Which errors of an enqueue at the other router the death of a victim explains."""
    if victim in (SUPERVISOR, EVERYBODY):
        return frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED})
    if victim == SOURCE or (victim == TARGET and has_moved):
        return frozenset({grpc.StatusCode.ABORTED})
    return frozenset()


# -- what an operator does ------------------------------------------------------------------------


def move(data: Path, target: int) -> str:
    """Why the slot has not moved; an empty text when it has."""
    with AdminClient(data) as admin:
        try:
            admin.move_slots([SLOT], target, 0)
        except AdminUnavailableError as error:
            return str(error)
    return ""


def move_again(data: Path, target: int) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while why_not := move(data, target):
        assert time.monotonic() < give_up_at, why_not
        time.sleep(AGAIN_S)


def wait_until_up(data: Path) -> None:
    """Until the router that operators talk to has heard that all shards are back."""
    give_up_at = time.monotonic() + WAIT_S
    with AdminClient(data) as admin:
        while not all(shard.up for shard in admin.shards()):
            assert time.monotonic() < give_up_at, "a shard does not come back"
            time.sleep(AGAIN_S)


def owner(data: Path) -> int:
    """Of the slot, as the server says and the file."""
    with AdminClient(data) as admin:
        found = admin.slot_map(False).owners[SLOT]
    stored = SlotMap.load(data)
    assert stored is not None and stored.owners[SLOT] == found
    return found


def findings(data: Path, shards: int) -> list[str]:
    """What VERIFY finds, once the router that is asked has heard of all shards."""
    give_up_at = time.monotonic() + WAIT_S
    while True:
        try:
            with AdminClient(data) as admin:
                return [
                    found for shard in range(shards) for step in admin.verify_shard(shard) for found in step.findings
                ]
        except AdminUnavailableError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.01)


# -- a round --------------------------------------------------------------------------------------


@dataclass
class Round:
    """A queue of the slot with jobs in every state, and an empty one with a poll that waits, while the slot moves."""

    stage: Stage
    cut: Cut
    victim: str
    queue: str = field(default_factory=lambda: next(names))
    empty: str = field(default_factory=lambda: next(names))
    source: int = 0
    target: int = 1
    due: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0) + timedelta(days=1))
    ids: dict[str, str] = field(default_factory=dict)  # by text
    leased: Job = field(init=False)

    @property
    def is_of_one(self) -> bool:
        return self.victim in (SOURCE, TARGET, ROUTER)

    def process(self, role: str) -> str:
        roles = {SOURCE: f"shard-{self.source}", TARGET: f"shard-{self.target}", ROUTER: COORDINATOR}
        return roles.get(role, role)

    async def play(self) -> None:
        stage, data = self.stage, self.stage.server.data
        self.source = await asyncio.to_thread(owner, data)
        self.target = 1 - self.source
        await self.fill()
        client = await stage.client_at(OTHER_ROUTER)
        poll = await park(client, self.empty, lease=LEASE if self.is_of_one else SHORT_LEASE)
        moving, holds = await self.bring_to_cut()
        calls = [
            asyncio.create_task(client.enqueue(job(queue, text, priority=5)))
            for queue, text in ((self.queue, "during 1"), (self.queue, "during 2"), (self.empty, "for the poll"))
        ]
        # They came to the router before this one, so they are on their way to a shard, or almost.
        await asyncio.sleep(0)
        await soon(client.get_server_info())
        await self.kill(holds)
        has_moved = self.cut.has_moved(self.victim)
        why_not = await soon(moving)
        allowed = explained_by(self.victim, has_moved)
        first, second, third = [await told(call, allowed) for call in calls]
        if self.is_of_one:
            await stage.wait_until_back(self.process(self.victim))
        else:
            ended = finished(await end_of_poll(poll))
            await stage.close()
            await stage.restart()
        await asyncio.to_thread(wait_until_up, data)
        self.check_move_told(has_moved, why_not)
        assert await asyncio.to_thread(owner, data) == (self.target if has_moved else self.source)
        await self.check_at_rest()
        await self.take(["high", "first"])
        await self.check_lease()
        if not has_moved:
            await asyncio.to_thread(move_again, data, self.target)
            assert await asyncio.to_thread(owner, data) == self.target
            await self.check_at_rest()
        await self.check_poll(poll if self.is_of_one else ended, third)
        await self.check_rest(first, second)
        stage.harness.forget()

    async def fill(self) -> None:
        client = await self.stage.client_at(OTHER_ROUTER)
        jobs = [
            job(self.queue, "leased", priority=9),
            job(self.queue, "dead", priority=8),
            job(self.queue, "high", priority=7),
            job(self.queue, "first", priority=5),
            job(self.queue, "keyed", priority=5, key=KEY),
            job(self.queue, "low", priority=2),
            EnqueueRequest(self.queue, "letter", Payload(b"scheduled", "text"), scheduled_at=self.due),
        ]
        acks = await soon(client.enqueue_batch(jobs))
        self.ids = dict(
            zip(("leased", "dead", "high", "first", "keyed", "low", "scheduled"), map(id_of, acks), strict=True)
        )
        self.leased = await reserve_one(client, self.queue)
        dead = await reserve_one(client, self.queue)
        assert await soon(client.nack(dead.ctx, RetryDirective.DEAD_LETTER))
        assert texts([self.leased, dead]) == ["leased", "dead"]

    async def bring_to_cut(self) -> tuple[asyncio.Task[str], list[Hold]]:
        """Begin the move, and wait until everybody stands where the cut wants them."""
        harness = self.stage.harness
        wanted = [(self.process(role), name) for role, name in self.cut.holds]
        late = harness.hold(COORDINATOR, point(MoveCommand.CHANGES, "answered")) if self.cut.is_late else None
        holds = [] if late else [harness.hold(*where) for where in wanted]
        moving = asyncio.create_task(asyncio.to_thread(move, self.stage.server.data, self.target))
        if late is not None:
            await asyncio.to_thread(late.wait)
            client = await self.stage.client_at(OTHER_ROUTER)
            await soon(client.enqueue(job(self.queue, "late", priority=5)))
            holds = [harness.hold(*where) for where in wanted]
            late.release()
        for hold in holds:
            await asyncio.to_thread(hold.wait)
        return moving, holds

    async def kill(self, holds: Iterable[Hold]) -> None:
        """Kill the victim, and have the others go on once its death is known."""
        stage = self.stage
        if self.victim == EVERYBODY:
            await stage.kill_all()
            release(holds)
        elif self.victim == SUPERVISOR:
            everybody = await asyncio.to_thread(stage.server.processes)
            await asyncio.to_thread(stage.server.kill_supervisor)
            release(holds)
            for pid in everybody:
                await asyncio.to_thread(wait_until_gone, pid)
        else:
            process = self.process(self.victim)
            back = stage.harness.hold(process, STARTING)
            await stage.kill(process)
            if self.cut.stops_supervisor:
                release(holds)
            await asyncio.to_thread(back.wait)
            release(holds)
            back.release()

    def check_move_told(self, has_moved: bool, why_not: str) -> None:
        if self.victim in (SOURCE, TARGET):
            assert bool(why_not) != has_moved, why_not
        if not why_not or NOT_MOVED in why_not:
            assert has_moved == (not why_not), why_not

    async def check_at_rest(self) -> None:
        """What nobody has touched is there, and all records of all shards are where they belong."""
        await asyncio.to_thread(self._check_at_rest)
        client = await self.stage.client_at(OTHER_ROUTER)
        again = await soon(client.enqueue(job(self.queue, "keyed again", key=KEY)))
        assert (again.deduplicated, again.job_id) == (True, self.ids["keyed"])

    def _check_at_rest(self) -> None:
        data = self.stage.server.data
        assert findings(data, 2) == []
        with AdminClient(data) as admin:
            check_left_behind(admin, self)

    async def take(self, wanted: list[str]) -> None:
        """Reserve as many jobs as these, and finish them."""
        client = await self.stage.client_at(OTHER_ROUTER)
        found = await soon(reserve(client, self.queue, max_jobs=len(wanted)))
        assert texts(found) == wanted
        assert {one.ctx.attempt for one in found} == {1}
        for one in found:
            await soon(client.ack(one.ctx))

    async def check_lease(self) -> None:
        client = await self.stage.client_at(OTHER_ROUTER)
        assert self.leased.ctx.attempt == 1
        await soon(client.ack(self.leased.ctx))

    async def check_poll(self, poll: asyncio.Future[list[Job]], is_certain: bool) -> None:
        """The poll, or whoever comes after it, gets what was enqueued for it, and all of it once."""
        client = await self.stage.client_at(OTHER_ROUTER)
        await soon(client.enqueue(job(self.empty, "probe", priority=5)))
        found = await soon(poll)
        assert len(found) == 1 or not self.is_of_one
        done: list[str] = []
        while True:
            for one in found:
                try:
                    await soon(client.ack(one.ctx))
                except LeaseError:  # its lease has run out meanwhile: it comes again
                    assert not self.is_of_one
                else:
                    done += texts([one])
            if not await asyncio.to_thread(self._has_jobs):
                break
            found = await soon(reserve(client, self.empty, wait=SHORT_LEASE))
        assert sorted(done) in ([["for the poll", "probe"]] if is_certain else [["for the poll", "probe"], ["probe"]])

    def _has_jobs(self) -> bool:
        """Whether anything is left of the queue with the poll."""
        with AdminClient(self.stage.server.data) as admin:
            found = admin.queue(self.empty)
        return bool(found.ready + found.scheduled + found.leased)

    async def check_rest(self, *are_certain: bool) -> None:
        """All that is left is there once and in order, and then nothing is."""
        client = await self.stage.client_at(OTHER_ROUTER)
        found = await soon(reserve(client, self.queue, max_jobs=100))
        during = [text for text in texts(found) if text.startswith("during")]
        certain = [text for text, is_certain in zip(("during 1", "during 2"), are_certain, strict=True) if is_certain]
        # They were under way at the same time, and gRPC may have handed the router the second one first.
        assert len(during) == len(set(during)) and set(certain) <= set(during) <= {"during 1", "during 2"}
        assert texts(found) == ["keyed", *(["late"] if self.cut.is_late else []), *during, "low"]
        assert {one.ctx.attempt for one in found} == {1}
        for one in found:
            await soon(client.ack(one.ctx))
        assert not await asyncio.to_thread(self._has_ready_or_leased)

    def _has_ready_or_leased(self) -> bool:
        with AdminClient(self.stage.server.data) as admin:
            found = admin.queue(self.queue)
        return bool(found.ready + found.leased)


def id_of(ack: object) -> str:
    assert isinstance(ack, EnqueueAck), ack
    return ack.job_id


def release(holds: Iterable[Hold]) -> None:
    for hold in holds:
        hold.release()


def finished(jobs: list[Job]) -> asyncio.Future[list[Job]]:
    future: asyncio.Future[list[Job]] = asyncio.get_running_loop().create_future()
    future.set_result(jobs)
    return future


async def end_of_poll(poll: Awaitable[list[Job]]) -> list[Job]:
    """What a poll was given before its router died, if anything."""
    try:
        return await soon(poll)
    except ClientError as error:
        assert code_of(error) == grpc.StatusCode.UNAVAILABLE, error
        return []


def check_left_behind(admin: AdminClient, one: Round) -> None:
    """What a round leaves behind: its scheduled job and its dead letter."""
    (scheduled,) = admin.jobs(one.queue, pb.JOB_STATE_SCHEDULED, 10)
    assert scheduled.job.id == one.ids["scheduled"]
    assert scheduled.due_at.ToDatetime(UTC) == one.due
    (dead,) = admin.dead_letters(one.queue, 10)
    assert (dead.job.id, dead.job.attempt) == (one.ids["dead"], 1)


async def play_all(new_server: StartServer, rounds: Iterable[tuple[Cut, str]]) -> None:
    """One round after another on one server."""
    played: list[Round] = []
    begun = time.monotonic()
    async with stage_of(new_server, shards=2, routers=2, settings=SETTINGS) as stage:
        for cut, victim in rounds:
            with noted(f"{cut.name}, {victim} is killed"):
                played.append(Round(stage, cut, victim))
                await played[-1].play()
        assert await asyncio.to_thread(findings, stage.server.data, 2) == []
        with AdminClient(stage.server.data) as admin:
            for one in played:
                await asyncio.to_thread(check_left_behind, admin, one)
        await stage.close()
        assert await asyncio.to_thread(stage.server.stop) == 0
    print(f"{len(played)} rounds took {time.monotonic() - begun:.1f} s")


@pytest.mark.parametrize("victim", [SOURCE, TARGET, ROUTER])
async def test_a_slot_has_one_owner_and_all_its_jobs_at_whatever_point_one_process_is_killed(
    new_server: StartServer, victim: str
) -> None:
    await play_all(new_server, [(cut, victim) for cut in CUTS if victim in cut.victims])


# A start of the whole server costs as much as those of five processes: before anybody asks for the map it is
# killed at every other point in one way, and at those between in the other. When only the supervisor is killed
# its children go on for a moment.
SHARED_CUTS = tuple(cut for cut in CUTS if len(cut.victims) == 3)
COPYING_CUTS = SHARED_CUTS[: SHARED_CUTS.index(NO_REQUEST)]
SWITCHING_CUTS = SHARED_CUTS[SHARED_CUTS.index(NO_REQUEST) :]
SUPERVISOR_CUTS = (*COPYING_CUTS[1::2], NO_REQUEST, REPLACING, REPLACED, MAP_SENT)
EVERYBODY_CUTS = (*COPYING_CUTS[::2], *SWITCHING_CUTS)


@pytest.mark.parametrize(
    ("victim", "cuts"), [(SUPERVISOR, SUPERVISOR_CUTS), (EVERYBODY, EVERYBODY_CUTS)], ids=[SUPERVISOR, EVERYBODY]
)
async def test_a_slot_has_one_owner_and_all_its_jobs_at_whatever_point_the_server_is_killed(
    new_server: StartServer, victim: str, cuts: tuple[Cut, ...]
) -> None:
    await play_all(new_server, [(cut, victim) for cut in cuts])
