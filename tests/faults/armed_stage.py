"""What rounds are played on: an armed server, its clients, cuts at which to kill, and batches to look at afterwards.

A cut is a set of points at which processes stand still, so that it is known exactly what was sent,
applied, written and synced, and by whom.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from sepp import EnqueueAck, SeppClient
from sepp.errors import BatchValidationError, ClientError, QueueFull

from common.wire import Op
from shard.store import Family
from shard.store_rocks import RocksStore, StoreOptions
from tests.faults.armed_harness import LAUNCHER, Harness, Hold
from tests.faults.armed_points import point
from tests.integration.clients import channel_to, job, reserve, texts
from tests.integration.conftest import StartServer
from tests.integration.server import WAIT_S, Server

COORDINATOR, OTHER_ROUTER = "router-0", "router-1"
HOME, PARTICIPANT, BYSTANDER = "shard-0", "shard-1", "shard-2"
# Jobs that a queue takes. A batch has two for each of its queues.
CAP = 5
# Longer than anything takes: a deadline would be one more way for a call to end.
CLIENT_PATIENCE = timedelta(seconds=4 * WAIT_S)
# What the server says when it knows that nothing was or will be stored.
NOTHING_STORED = "nothing was stored"

Where = tuple[str, str, str]  # process, point, other side
Call = asyncio.Task[list[EnqueueAck]]
Got = TypeVar("Got")


async def soon(awaited: Awaitable[Got]) -> Got:
    """What is certain to come."""
    return await asyncio.wait_for(awaited, WAIT_S)


@contextmanager
def noted(where: str) -> Iterator[None]:
    """A failure in a round says in which one it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the round: {where}")
        raise


# -- cuts -----------------------------------------------------------------------------------------


def at_home(kind: Op, stage: str) -> Where:
    return HOME, point(kind, stage), ""


def at_participant(kind: Op, stage: str) -> Where:
    return PARTICIPANT, point(kind, stage), ""


def at_coordinator(kind: Op, stage: str, of: str) -> Where:
    return COORDINATOR, point(kind, stage), of


UNASKED_HOME = at_home(Op.PREPARE, "arrived")


@dataclass(frozen=True)
class Cut:
    """Where processes stand when somebody is killed, and without whom the batch is whole all the same."""

    name: str
    holds: tuple[Where, ...]
    whole_without: frozenset[str] = frozenset()
    home_is_last: bool = False  # the participant has voted before the home gets its PREPARE
    home_has_voted: bool = False  # and the coordinator knows it
    is_answered: bool = False  # the client has its answer by then


NO_COMMIT_SENT = Cut("it is decided, no COMMIT has left", (at_coordinator(Op.COMMIT, "sending", PARTICIPANT),))
NO_DECIDE_SENT = Cut("all votes are in, no DECIDE has left", (at_coordinator(Op.DECIDE, "sending", HOME),))


# -- what a client is told ------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """How a call ended for its client: with the ids of its jobs, with the word that nothing is stored, or neither."""

    ids: tuple[str, ...] = ()
    is_refused: bool = False

    @property
    def is_open(self) -> bool:
        return not self.ids and not self.is_refused


# What a call may end with when it is not told how the batch ended.
OPEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL})


async def told(call: Awaitable[list[EnqueueAck]], allowed: frozenset[grpc.StatusCode] = OPEN) -> Told:
    """Raises AssertionError for a status that an atomic batch may not end with."""
    try:
        acks = await soon(call)
    except BatchValidationError:
        return Told(is_refused=True)
    except ClientError as error:
        assert isinstance(error.__cause__, grpc.aio.AioRpcError)
        code, text = error.__cause__.code(), error.__cause__.details() or ""
        assert code in allowed, error
        return Told(is_refused=code == grpc.StatusCode.UNAVAILABLE and NOTHING_STORED in text)
    return Told(ids=tuple(ack.job_id for ack in acks))


# -- a server and its clients ---------------------------------------------------------------------


class Stage:
    """An armed server, its points, and a client at each of its routers."""

    def __init__(self, server: Server, harness: Harness) -> None:
        self.server = server
        self.harness = harness
        self._clients: dict[str, tuple[grpc.aio.Channel, SeppClient]] = {}
        self._cut_off: list[grpc.aio.Channel] = []  # their routers were killed

    async def client_at(self, router: str) -> SeppClient:
        """A client whose connection is served by a certain router. A new one is made while all routers live."""
        while router not in self._clients:
            await self._close_cut_off()
            before = self.server.connections()
            channel = channel_to(self.server.address)
            await soon(channel.channel_ready())
            client = SeppClient.from_channel(channel, rpc_timeout=CLIENT_PATIENCE)
            await client.get_server_info()  # the router has accepted it
            (mine,) = self.server.connections().items() - before.items()
            if mine[1] in self._clients:
                await channel.close()
            else:
                self._clients[mine[1]] = channel, client
        return self._clients[router][1]

    async def close(self) -> None:
        """All clients close their connections."""
        self._cut_off += [channel for channel, _ in self._clients.values()]
        self._clients.clear()
        await self._close_cut_off()

    async def _close_cut_off(self) -> None:
        while self._cut_off:
            await self._cut_off.pop().close()

    async def kill(self, victim: str) -> None:
        """A call that was sent to a killed router ends by itself: closing its connection here would cancel it."""
        await asyncio.to_thread(self.server.kill, victim)
        if victim in self._clients:
            self._cut_off.append(self._clients.pop(victim)[0])

    async def kill_children(self, children: Sequence[str]) -> None:
        """Several at once: the supervisor sees it, and tells anybody, when all of them have ended."""
        with self.server.paused_supervisor():
            for child in children:
                await self.kill(child)

    async def kill_all(self) -> None:
        """The whole server, as if in one instant."""
        await asyncio.to_thread(self.server.kill_all)
        self._cut_off += [channel for channel, _ in self._clients.values()]
        self._clients.clear()

    async def wait_until_back(self, victim: str) -> None:
        await asyncio.to_thread(self.server.wait_until_back, victim)

    async def restart(self) -> None:
        await asyncio.to_thread(self.server.restart)

    async def end(self) -> None:
        """An orderly stop, after which nothing of any batch or transaction may be stored."""
        await self.close()
        assert await asyncio.to_thread(self.server.stop) == 0
        assert self.server.shards is not None
        assert [left_on(self.server.data, shard) for shard in range(self.server.shards)] == [{}] * self.server.shards


def left_on(data: Path, shard: int) -> dict[str, int]:
    """How many records a shard of a stopped server has of jobs and transactions, by family; families without any
    are left out."""
    store = RocksStore.open(data / f"shard-{shard}", StoreOptions())
    try:
        families = (Family.JOBS, Family.SCHEDULED, Family.LEASES, Family.DEAD, Family.TRANSACTIONS)
        found = {family.name: len(store.scan(family, b"", b"\xff" * 64, 1 << 62)) for family in families}
    finally:
        store.close()
    return {name: number for name, number in found.items() if number}


@asynccontextmanager
async def stage_of(
    new_server: StartServer, shards: int, routers: int, settings: Mapping[str, str] | None = None
) -> AsyncIterator[Stage]:
    """A running server, and a client at each router."""
    with Harness() as harness:
        ours = {**harness.settings, "SEPP_LIMITS__MAX_QUEUE_DEPTH": str(CAP), **(settings or {})}
        server = new_server(shards=shards, routers=routers, launcher=LAUNCHER, settings=ours)
        stage = Stage(server, harness)
        try:
            await asyncio.to_thread(server.start)
            for router in range(routers):
                await stage.client_at(f"router-{router}")
            yield stage
        finally:
            await stage.close()
            await asyncio.to_thread(server.kill_all)


# -- a batch --------------------------------------------------------------------------------------


@dataclass
class Batch:
    """An atomic batch of two jobs, one of them with a key, for a queue on the home and one on the participant.

    `before` are jobs that each of these queues has already.
    """

    stage: Stage
    before: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home, self.participant = self.stage.server.queue_on(0), self.stage.server.queue_on(1)

    async def fill(self, queue: str, number: int) -> None:
        """Leave less room in a queue."""
        client = await self.stage.client_at(COORDINATOR)
        self.before[queue] = [f"before {place}" for place in range(number)]
        for text in self.before[queue]:
            await client.enqueue(job(queue, text))

    async def send(self) -> Call:
        client = await self.stage.client_at(COORDINATOR)
        jobs = [
            job(self.home, "first"),
            job(self.participant, "first"),
            job(self.home, "second", key="key"),
            job(self.participant, "second", key="key"),
        ]
        return asyncio.create_task(client.enqueue_atomic(jobs))

    async def check(self, client: SeppClient, is_whole: bool, outcome: Told) -> None:
        """Once everybody is back: the batch, its keys and the room in its queues. Leaves the queues empty.

        Raises AssertionError where they do not tell the same story.
        """
        at_home = await self._check_queue(client, self.home, is_whole)
        at_participant = await self._check_queue(client, self.participant, is_whole)
        if outcome.ids:
            assert is_whole
            assert outcome.ids == tuple(job_id for pair in zip(at_home, at_participant, strict=True) for job_id in pair)
        await asyncio.to_thread(self.stage.harness.wait_until_settled)

    async def _check_queue(self, client: SeppClient, queue: str, is_whole: bool) -> list[str]:
        """Ids of the last jobs in a queue that are either the batch's or the probe."""
        # Who holds the key is undecided until this is answered.
        probe = await soon(client.enqueue(job(queue, "probe", key="key")))
        assert probe.deduplicated == is_whole
        before, ours = self.before.get(queue, []), ["first", "second"] if is_whole else ["probe"]
        room = CAP - len(before) - len(ours)
        results = await soon(client.enqueue_batch([job(queue, f"{number}") for number in range(CAP)]))
        assert [isinstance(result, EnqueueAck) for result in results] == [True] * room + [False] * (CAP - room)
        assert results[room:] == [QueueFull(queue, CAP)] * (CAP - room)
        found = await soon(reserve(client, queue, max_jobs=2 * CAP))
        assert texts(found) == [*before, *ours, *(f"{number}" for number in range(room))]
        assert {one.ctx.attempt for one in found} == {1}
        for one in found:
            await soon(client.ack(one.ctx))
        ids = [one.ctx.id for one in found[len(before) : len(before) + len(ours)]]
        assert probe.job_id == ids[-1]
        return ids


async def bring_to(batch: Batch, cut: Cut) -> tuple[Call, list[Hold]]:
    """Send a batch and wait until everybody stands where the cut wants them."""
    harness = batch.stage.harness
    unasked = harness.hold(*UNASKED_HOME) if cut.home_is_last else None
    holds = [harness.hold(*where) for where in cut.holds]
    call = await batch.send()
    if unasked is not None:
        await asyncio.to_thread(harness.wait_until_passed, *at_coordinator(Op.PREPARE, "taken", PARTICIPANT))
        unasked.release()
    if cut.home_has_voted:
        await asyncio.to_thread(harness.wait_until_passed, *at_coordinator(Op.PREPARE, "taken", HOME))
    for hold in holds:
        await asyncio.to_thread(hold.wait)
    return call, holds


async def serve_bystander(stage: Stage) -> None:
    """Queues on the third shard are served by the other router, whatever goes on beside them."""
    client = await stage.client_at(OTHER_ROUTER)
    queue = stage.server.queue_on(2)
    ack = await soon(client.enqueue(job(queue)))
    (found,) = await soon(reserve(client, queue))
    assert found.ctx.id == ack.job_id
    await soon(client.ack(found.ctx))
