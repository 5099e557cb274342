"""Router cores and the state machines of shards in one small world with a seeded chance.

Messages take their time, calls are cancelled, shards die and lose what was not synced, syncs fail,
and now and then a router dies. A seed gives the same run every time; a failing test names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any, NamedTuple

import pytest

from common import job_ids, wire
from common import queue_pb2 as pb
from common.config import Config
from common.slots import SlotMap, slot_of
from router.core import Core, Moment, Reply
from router.front import WATCHED_METHODS, Status
from shard import keys
from shard.commit import Answers
from shard.machine import Machine
from shard.state import Instant
from shard.store import Family
from shard.store_memory import MemoryStore
from tests.unit.router_driver import MONO_MS, WALL_MS, assert_idle, configured, milliseconds, queue_on

SEEDS = 120
STEPS = 120
ROUTERS = 2
SHARDS = 3
QUEUES = [queue_on(0, 0, SHARDS), queue_on(0, 1, SHARDS), queue_on(1, 0, SHARDS), queue_on(2, 0, SHARDS)]
CONFIG = configured(
    limits={"max_response_bytes": 65_536, "default_max_attempts": 100},
    storage={"dead_letter_retention_ms": 3_600_000, "command_queue_capacity": 24},
)
OWNERS = SlotMap.even(SHARDS).owners
LONG_MS = 60_000  # longer than a run


class Chances(NamedTuple):
    """How probable mishaps are, per step, the last one per sync."""

    shard_dies: float = 0.02
    router_dies: float = 0.004
    sync_fails: float = 0.004


CHANCES = Chances()


class World:
    """Time, chance, and what is on its way."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.mono_ms = MONO_MS
        self.under_way = 0  # events other than timers
        self._events: list[tuple[int, int, bool, Callable[[], None]]] = []
        self._count = 0
        self._generation = 0

    @property
    def wall_ms(self) -> int:
        return WALL_MS + self.mono_ms - MONO_MS

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def at(self, mono_ms: int, event: Callable[[], None], timer: bool = False) -> None:
        self._count += 1
        self.under_way += not timer
        heappush(self._events, (max(mono_ms, self.mono_ms), self._count, timer, event))

    def later(self, longest_ms: int, event: Callable[[], None]) -> None:
        self.at(self.mono_ms + self.random.randint(0, longest_ms), event)

    def run(self, duration_ms: int) -> None:
        until = self.mono_ms + duration_ms
        while self._events and self._events[0][0] <= until:
            self._next()
        self.mono_ms = until

    def settle(self) -> None:
        """Until nothing is under way."""
        for _ in range(50_000):
            if not self.under_way:
                return
            self._next()
        raise AssertionError("it does not come to rest")

    def next(self) -> None:
        """The next event happens, unless nothing is under way but timers."""
        if self.under_way:
            self._next()

    def _next(self) -> None:
        self.mono_ms, _, timer, event = heappop(self._events)
        self.under_way -= not timer
        event()


class Link:
    """Messages in one direction, in their order. `longest_ms` is how long one may take."""

    def __init__(self, world: World, longest_ms: int = 4) -> None:
        self.cut = False
        self._world = world
        self._longest_ms = longest_ms
        self._last_ms = 0

    def send(self, event: Callable[[], None]) -> None:
        self._last_ms = max(self._last_ms, self._world.mono_ms + self._world.random.randint(0, self._longest_ms))
        self._world.at(self._last_ms, lambda: None if self.cut else event())


class SimShard:
    """A shard's process: turns, syncs that take time, answers that wait for them."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.index = index
        self.generation = 0
        self.store = MemoryStore()
        self.machine: Machine
        self._cluster = cluster
        self._world = cluster.world

    def start(self) -> None:
        self.generation = self._world.next_generation()
        routers = [router.name for router in self._cluster.routers]
        self.machine = Machine(self.store, self._cluster.config, self._now(), self.index, routers)
        self._control = Link(self._world, 10)
        self._gathering = Answers()
        self._in_air: Answers | None = None
        self._unsynced = False
        self._gone: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._links: dict[str, Link] = {}
        for router in self._cluster.routers:
            router.control.send(partial(router.shard_up, self.index, self.generation))
        self._turn()

    def envelope(self, generation: int, message: bytes) -> None:
        """A message from a router to one generation of this shard."""
        envelope = wire.unpack(message)
        if generation == self.generation and envelope.sender not in self._gone:
            assert envelope.generation == generation
            self._turn(envelope)

    def tell_of_router(self, name: str, lives: bool) -> None:
        """A router has been started or has ended; a shard that is down hears it when it starts."""
        if self.generation:
            self._control.send(partial(self._router_came if lives else self._router_gone, name))

    def _router_came(self, name: str) -> None:
        self.machine.router_came(name)
        self._turn()

    def _router_gone(self, name: str) -> None:
        self._gone.add(name)
        self._gathering.results.pop(name, None)
        self._gathering.numbers.pop(name, None)
        self.machine.router_gone(name, self._now())
        self._turn()

    def die(self) -> None:
        if not self.generation:
            return
        self._cluster.has_lost_parts = True
        self._control.cut = True
        for link in self._links.values():
            link.cut = self._world.chance(0.5)
        for router in self._cluster.routers:
            router.control.send(partial(router.shard_down, self.index, self.generation))
        self.generation = 0
        self.store = self.store.crash(self._world.random.randint(0, self.store.unsynced))
        self._world.later(30, self.start)

    def _now(self) -> Instant:
        return Instant(self._world.wall_ms, self._world.mono_ms)

    def _turn(self, envelope: wire.Envelope | None = None) -> None:
        machine, now = self.machine, self._now()
        while machine.tick(now):
            pass
        if envelope is not None:
            for operation in envelope.items:
                machine.apply(envelope.sender, operation, now)
            self._gathering.envelope_applied(envelope.sender, envelope.number)
        for router, result in machine.results:
            self._gathering.add(router, result)
        machine.results.clear()
        assert machine.reports == []
        machine.end_turn()
        self._unsynced = self.store.write() or self._unsynced
        if self._in_air is None:
            self._commit()
        sleep_ms = machine.next_wake_ms(now)
        if sleep_ms is not None:
            self._world.at(now.mono_ms + sleep_ms, partial(self._wake, self.generation), timer=True)

    def _wake(self, generation: int) -> None:
        due = self.machine.next_wake_ms(self._now()) if generation == self.generation else None
        if due == 0:
            self._turn()

    def _commit(self) -> None:
        answers, self._gathering = self._gathering, Answers()
        if self._unsynced:
            self._unsynced = False
            self._in_air = answers
            self._world.later(5, partial(self._synced, self.generation, self.store.begin_sync()))
        else:
            self._send(answers)

    def _synced(self, generation: int, reach: int) -> None:
        if generation != self.generation:
            return
        assert self._in_air is not None
        if self._world.chance(self._cluster.chances.sync_fails):
            self._refuse()
            return
        self.store.end_sync(reach)
        answers, self._in_air = self._in_air, None
        self._send(answers)
        self._commit()

    def _refuse(self) -> None:
        """The sync has failed: nothing is answered but that the outcome is unknown."""
        assert self._in_air is not None
        for answers in (self._in_air, self._gathering):
            for results in answers.results.values():
                for result in results:
                    result[1:] = [Status.INTERNAL, "the write failed"]
            answers.numbers.clear()  # what an envelope gave back may not be on the disk either
            self._send(answers)
        self.die()

    def _send(self, answers: Answers) -> None:
        for name in sorted(answers.routers()):
            router = self._cluster.router_named(name)
            number = self._numbers[name] = answers.numbers.get(name, self._numbers.get(name, 0))
            message = wire.pack(self.generation, f"shard-{self.index}", number, answers.results.get(name, []))
            if router is not None:
                link = self._links.setdefault(name, Link(self._world))
                link.send(partial(router.envelope, message))


class SimCall:
    """One call of a client, and the front's part of it. `done` is told the answer, once, if it arrives."""

    def __init__(self, method: str, request: Any, deadline: float, done: Callable[[Reply | None], None]) -> None:
        self.method = method
        self.message = request
        self.request: bytes = request.SerializeToString()
        self.authorization = None
        self.deadline = deadline
        self.done = done
        self.is_answered = False
        self.has_ended = False

    def reply(self, answer: bytes) -> None:
        raise AssertionError("the core answers by its replies")

    def fail(self, status: Status, text: str) -> None:
        raise AssertionError("the core answers by its replies")


class SimRouter:
    """A router's process, with its front."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.name = f"router-{number}"
        self.is_alive = True
        self.control = Link(cluster.world)
        self.calls: list[SimCall] = []
        self._cluster = cluster
        self._world = cluster.world
        self._links: dict[int, Link] = {}  # by generation of the shard
        first_op_id = number << 32
        self.core = Core(self.name, "1", cluster.config, OWNERS, SHARDS, first_op_id, self._world.random.randbytes)

    def shard_up(self, index: int, generation: int) -> None:
        self._do(lambda now: self.core.shard_up(index, generation, now))

    def shard_down(self, index: int, generation: int) -> None:
        self._do(lambda now: self.core.shard_down(index, generation, now))

    def envelope(self, message: bytes) -> None:
        self._do(lambda now: self.core.envelope(message, now))

    def arrived(self, call: SimCall) -> None:
        self.calls.append(call)
        self._do(lambda now: self.core.arrived(call, now))

    def ended(self, call: SimCall) -> None:
        """The client has gone."""
        if call.has_ended or not self.is_alive:
            return
        call.has_ended = True
        call.done(None)
        if call.method in WATCHED_METHODS and not call.is_answered:
            self.calls.remove(call)
            self._do(lambda now: self.core.closed(call, now))

    def waiting(self) -> list[SimCall]:
        return [call for call in self.calls if not (call.is_answered or call.has_ended)]

    def drain(self) -> None:
        self._do(self.core.drain)

    def die(self) -> None:
        self.is_alive = False
        for call in self.calls:
            if not call.has_ended:
                call.has_ended = True
                call.done(None)
        self.calls.clear()

    def _do(self, event: Callable[[Moment], None]) -> None:
        if not self.is_alive:
            return
        event(Moment(self._world.wall_ms, self._world.mono_ms))
        for outbound in self.core.shards:
            for message in outbound.messages:
                link = self._links.setdefault(outbound.generation, Link(self._world))
                shard = self._cluster.shards[outbound.index]
                link.send(partial(shard.envelope, outbound.generation, message))
            outbound.messages.clear()
        replies, self.core.replies = self.core.replies, []
        for reply in replies:
            self._write(reply)
        timer_ms = self.core.next_timer_ms()
        if timer_ms is not None:
            self._world.at(timer_ms, self._tick, timer=True)

    def _tick(self) -> None:
        timer_ms = self.core.next_timer_ms()
        if timer_ms is not None and timer_ms <= self._world.mono_ms:
            self._do(self.core.tick)

    def _write(self, reply: Reply) -> None:
        call = reply.call
        assert isinstance(call, SimCall) and not call.is_answered
        call.is_answered = True
        self._world.later(3, partial(self._written, call, reply))

    def _written(self, call: SimCall, reply: Reply) -> None:
        if not self.is_alive:
            return
        left = not call.has_ended
        self.calls.remove(call)
        if left:
            call.has_ended = True
            call.done(reply)
        elif call.method in WATCHED_METHODS and self._world.chance(0.5):
            self._do(lambda now: self.core.closed(call, now))
        if call.method in WATCHED_METHODS:
            self._do(lambda now: self.core.answer_left(call, left, now))


class Clients:
    """What all clients together have done and seen, and what of it may not be."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._random = cluster.world.random
        self._number = 0
        self.types: dict[str, str] = {}  # job id: job type, unique to the job
        self.not_stored: set[str] = set()  # job types that a client was told are not stored
        self.delivered: set[tuple[str, int]] = set()
        self.acked: dict[str, int] = {}  # job id: attempt
        self.perhaps_acked: set[str] = set()
        self.drained: set[str] = set()

    def act(self) -> None:
        weights = {self.enqueue: 4, self.reserve: 6, self.drain: 1}
        (action,) = self._random.choices(list(weights), list(weights.values()))
        action()

    # -- calls ---------------------------------------------------------------------------------

    def _call(self, method: str, request: Any, done: Callable[[Reply | None], None], patience_ms: int = 0) -> None:
        """`patience_ms` is how long the client waits; 0: for ever."""
        router = self._random.choice(self._cluster.routers)
        deadline = math.inf
        cancelled_in_ms = 0
        if patience_ms and self._world.chance(0.5):
            deadline = (self._world.wall_ms + patience_ms) / 1000
        elif patience_ms:
            cancelled_in_ms = patience_ms
        call = SimCall(method, request, deadline, done)
        router.arrived(call)
        if patience_ms:
            in_ms = cancelled_in_ms or patience_ms
            self._world.at(self._world.mono_ms + in_ms, lambda: router.ended(call), timer=True)

    def _some_queues(self) -> list[str]:
        return self._random.sample(QUEUES, self._random.randint(1, len(QUEUES)))

    def _impatience(self) -> int:
        return self._random.choice([0, 0, 0, self._random.randint(1, 30), self._random.randint(30, 200)])

    def enqueue(self) -> None:
        jobs = []
        for _ in range(self._random.randint(1, 3)):
            self._number += 1
            payload = pb.Payload(data=bytes(40_000), encoding="e") if self._world.chance(0.05) else None
            jobs.append(
                pb.EnqueueRequest(queue=self._random.choice(QUEUES), job_type=f"job-{self._number}", payload=payload)
            )
        request = pb.EnqueueBatchRequest(jobs=jobs)
        self._call("EnqueueBatch", request, partial(self._enqueued, jobs), self._impatience())

    def _enqueued(self, jobs: Sequence[pb.EnqueueRequest], reply: Reply | None) -> None:
        if reply is None:
            return
        if reply.status in (Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED):
            self.not_stored |= {job.job_type for job in jobs}
        if reply.answer is not None:
            results = pb.EnqueueBatchResponse.FromString(reply.answer).results
            for job, result in zip(jobs, results, strict=True):
                assert result.success.job_id not in self.types
                self.types[result.success.job_id] = job.job_type

    def reserve(self) -> None:
        lease_ms = self._random.choice([self._random.randint(1, 100), LONG_MS, LONG_MS])
        wait_ms = self._random.choice([0, self._random.randint(1, 200), LONG_MS])
        request = pb.ReserveRequest(
            queues=self._some_queues(),
            max_jobs=self._random.randint(1, 3),
            lease_duration=milliseconds(lease_ms),
            wait_timeout=milliseconds(wait_ms),
        )
        self._call("Reserve", request, partial(self._reserved, lease_ms), self._impatience())

    def _reserved(self, lease_ms: int, reply: Reply | None) -> None:
        if reply is None or reply.answer is None:
            return
        for job in pb.ReserveResponse.FromString(reply.answer).jobs:
            assert (job.id, job.attempt) not in self.delivered, "two leases on one attempt"
            self.delivered.add((job.id, job.attempt))
            assert job.job_type not in self.not_stored
            assert self.types.get(job.id, job.job_type) == job.job_type
            assert job.attempt <= self.acked.get(job.id, job.attempt), "redelivered after its ack"
            assert job.id not in self.drained
            self._world.later(40, partial(self._work, job.id, job.attempt, lease_ms))

    def _work(self, job_id: str, attempt: int, lease_ms: int) -> None:
        done = partial(self._worked, job_id, attempt, lease_ms)
        match self._random.randint(0, 9):
            case 0:
                pass  # the worker dies
            case 1 | 2:
                self._call("Nack", pb.NackRequest(job_id=job_id, attempt=attempt), done)
            case 3:
                retry = pb.NackRetry(delay=milliseconds(self._random.randint(1, 50)))
                self._call("Nack", pb.NackRequest(job_id=job_id, attempt=attempt, retry=retry), done)
            case 4:
                retry = pb.NackRetry(dead_letter={})
                self._call("Nack", pb.NackRequest(job_id=job_id, attempt=attempt, retry=retry), done)
            case _:
                request = pb.AckRequest(job_id=job_id, attempt=attempt)
                self._call("Ack", request, partial(self._ack_answered, job_id, attempt, lease_ms), self._impatience())

    def _worked(self, job_id: str, attempt: int, lease_ms: int, reply: Reply | None) -> None:
        if reply is not None and lease_ms == LONG_MS and not self._cluster.has_lost_routers:
            assert reply.status not in (Status.NOT_FOUND, Status.FAILED_PRECONDITION), "a lease was taken away"

    def _ack_answered(self, job_id: str, attempt: int, lease_ms: int, reply: Reply | None) -> None:
        self._worked(job_id, attempt, lease_ms, reply)
        if reply is None or reply.status in (Status.ABORTED, Status.INTERNAL):
            self.perhaps_acked.add(job_id)
        elif reply.status == Status.OK:
            assert job_id not in self.acked, "acked twice"
            self.acked[job_id] = attempt

    def drain(self) -> None:
        queue = self._random.choice([None, *QUEUES])
        request = pb.DrainDeadLettersRequest(queue=queue, max=self._random.randint(1, 3))
        self._call("DrainDeadLetters", request, self._drained, self._impatience())

    def _drained(self, reply: Reply | None) -> None:
        if reply is None or reply.answer is None:
            return
        for record in pb.DrainDeadLettersResponse.FromString(reply.answer).records:
            assert record.job.id not in self.acked
            assert record.job.id not in self.drained or self._cluster.has_lost_parts, "drained twice"
            self.drained.add(record.job.id)


class Cluster:
    """Everything together."""

    def __init__(self, seed: int, config: Config = CONFIG, chances: Chances = CHANCES) -> None:
        self.config = config
        self.chances = chances
        self.world = World(seed)
        self.has_lost_parts = False  # a shard or a router has died
        self.has_lost_routers = False
        self._routers_made = 0
        self.routers: list[SimRouter] = []
        self.shards = [SimShard(self, index) for index in range(SHARDS)]
        for _ in range(ROUTERS):
            self._start_router()
        for shard in self.shards:
            shard.start()
        self.clients = Clients(self)

    def router_named(self, name: str) -> SimRouter | None:
        return next((router for router in self.routers if router.name == name), None)

    def _start_router(self) -> None:
        self._routers_made += 1
        router = SimRouter(self, self._routers_made)
        self.routers.append(router)
        for shard in self.shards:
            shard.tell_of_router(router.name, lives=True)
            if shard.generation:
                router.control.send(partial(router.shard_up, shard.index, shard.generation))

    def step(self) -> None:
        self.world.run(self.world.random.randint(0, 4))
        self.clients.act()
        if self.world.chance(self.chances.shard_dies):
            self.world.random.choice(self.shards).die()
        if self.world.chance(self.chances.router_dies):
            self.replace_router(self.world.random.randrange(ROUTERS))

    def replace_router(self, place: int) -> None:
        """A router dies, and another one is started."""
        self.has_lost_parts = self.has_lost_routers = True
        router = self.routers.pop(place)
        router.die()
        for shard in self.shards:
            shard.tell_of_router(router.name, lives=False)
        self._start_router()

    def end_waits(self) -> None:
        """By the clients, by the server, or by time."""
        way = self.world.random.choice(["clients", "server", "time"])
        for router in self.routers:
            if way == "clients":
                for call in router.waiting():
                    router.ended(call)
            elif way == "server":
                router.drain()
        if way == "time":
            self.world.run(LONG_MS)
        self.world.settle()


# ---- what must hold


def check_that_no_poll_waits_for_a_job_that_is_ready(cluster: Cluster) -> None:
    for router in cluster.routers:
        for call in router.waiting():
            assert isinstance(call.message, pb.ReserveRequest)
            for queue in call.message.queues:
                counts = cluster.shards[OWNERS[slot_of(queue)]].machine.counts()
                assert counts.get(queue, (0,))[0] == 0, f"{queue} has a ready job and a waiting poll"


def check_that_nobody_waits_or_holds_what_was_not_delivered(cluster: Cluster) -> None:
    for router in cluster.routers:
        assert router.calls == []
        assert_idle(router.core)
    for shard in cluster.shards:
        machine = shard.machine
        assert len(machine._waiting) == 0 and machine._waiting._lines == {}
        assert [op_id for op_id, (owner, _) in machine._claims.items() if owner] == []
        assert machine._dead._handed_out == {} and machine._dead._out == set()
        if not cluster.has_lost_routers:  # what a dead router was given comes back by time alone after a restart
            held = {(job_ids.text(lease.job_id), lease.attempt) for lease in machine._leases.values()}
            assert held - cluster.clients.delivered == set(), "a lease that nobody holds"


def check_that_every_job_is_somewhere(cluster: Cluster) -> None:
    clients = cluster.clients
    stored = [job for shard in cluster.shards for job in _stored_jobs(shard.store)]
    ids = {job_id for job_id, _ in stored}
    assert len(ids) == len(stored), "a job in two places"
    assert {job_type for _, job_type in stored} & clients.not_stored == set()
    assert ids & clients.acked.keys() == set(), "acked and still there"
    gone = clients.types.keys() - ids - clients.acked.keys() - clients.perhaps_acked - clients.drained
    assert gone == set(), "lost"


def _stored_jobs(store: MemoryStore) -> list[tuple[str, str]]:
    """Id and type of every job, whatever its state."""
    found = []
    for family in (Family.JOBS, Family.SCHEDULED):
        for _, record in store.scan(family, b"", b"\xff" * 8, 1 << 62):
            found.append((record[:16], record[keys.JOB_HEAD_BYTES :]))
    for _, value in store.scan(Family.DEAD, b"", b"\xff" * 8, 1 << 62):
        dead = keys.read_dead_value(value)
        found.append((dead.job_id, dead.body))
    return [(job_ids.text(job_id), pb.Job.FromString(body).job_type) for job_id, body in found]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_jobs_are_neither_lost_nor_doubled_and_nothing_is_left_behind(seed: int) -> None:
    cluster = Cluster(seed)
    for _ in range(STEPS):
        cluster.step()
    cluster.world.settle()
    check_that_no_poll_waits_for_a_job_that_is_ready(cluster)
    cluster.end_waits()
    check_that_nobody_waits_or_holds_what_was_not_delivered(cluster)
    check_that_every_job_is_somewhere(cluster)
