"""The last places of capped queues, wanted by many at once over several shards.

Two routers and two shards, the real cores of both, and messages that arrive in any order that their
links allow. A turn is on the disk at once here; what crashes do to it is the simulation's business.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from google.protobuf.message import Message

from common import queue_pb2 as pb
from common import wire
from common.slots import SlotMap
from router.core import Core, Moment, Reply
from router.front import WATCHED_METHODS, Status
from shard.machine import Machine
from shard.participant import WAIT_MAX_MS
from shard.state import Instant
from shard.store import Family
from shard.store_memory import MemoryStore
from tests.unit.router_driver import MONO_MS, WALL_MS, FakeCall, assert_idle, configured, milliseconds, queue_on
from tests.unit.shard_driver import recount, rows

SHARDS = 2
ROUTERS = 2
LEFT, RIGHT = queue_on(0, 0, SHARDS), queue_on(1, 0, SHARDS)
FREE = queue_on(1, 1, SHARDS)
LONG_MS = 600_000

Done = Callable[[Reply], None]


class World:
    """Everything together. `caps` are the depths that queues may have."""

    def __init__(self, seed: int, caps: dict[str, int]) -> None:
        self.random = Random(seed)
        self.mono_ms = MONO_MS
        self.caps = caps
        queues = [{"name": name, "max_queue_depth": cap} for name, cap in caps.items()]
        config = configured(limits={"default_max_attempts": 100}, queues=queues)
        names = [f"router-{index}" for index in range(ROUTERS)]
        self.stores = [MemoryStore() for _ in range(SHARDS)]
        self.machines = [
            Machine(store, config, Instant(WALL_MS, MONO_MS), index, names) for index, store in enumerate(self.stores)
        ]
        self.routers = [
            Core(name, "1", config, SlotMap.even(SHARDS), (index + 1) << 32, self.random.randbytes)
            for index, name in enumerate(names)
        ]
        self._to_shard: dict[tuple[int, int], deque[bytes]] = {}  # by router and shard
        self._to_router: dict[tuple[int, int], deque[bytes]] = {}
        self._applied: dict[tuple[int, int], int] = {}  # number of the last envelope of a router at a shard
        self._done: dict[int, Done] = {}  # by id() of the call
        self.silent: set[int] = set()  # routers that neither send nor receive
        for router in range(ROUTERS):
            for shard in range(SHARDS):
                self._to_shard[router, shard] = deque()
                self._to_router[router, shard] = deque()
                self.routers[router].shard_up(shard, shard + 1, self.now)

    @property
    def now(self) -> Moment:
        return Moment(WALL_MS + self.mono_ms - MONO_MS, self.mono_ms)

    # -- calls --------------------------------------------------------------------------------

    def call(self, router: int, method: str, request: Message, done: Done) -> None:
        call = FakeCall(method, request.SerializeToString(), None, math.inf)
        self._done[id(call)] = done
        self.routers[router].arrived(call, self.now)
        self._take_from_router(router)

    def enqueue(self, router: int, *queues: str, method: str = "EnqueueBatch") -> list[Reply]:
        """A batch of one job for each queue; its reply will be in the list."""
        replies: list[Reply] = []
        jobs = [pb.EnqueueRequest(queue=queue, job_type="t") for queue in queues]
        self.call(router, method, pb.EnqueueBatchRequest(jobs=jobs), replies.append)
        return replies

    def enqueue_atomic(self, router: int, *queues: str) -> list[Reply]:
        return self.enqueue(router, *queues, method="EnqueueAtomic")

    def _take_from_router(self, router: int) -> None:
        core = self.routers[router]
        for outbound in core.shards:
            self._to_shard[router, outbound.index].extend(outbound.messages)
            outbound.messages.clear()
        replies, core.replies = core.replies, []
        for reply in replies:
            if reply.call.method in WATCHED_METHODS:
                core.answer_left(reply.call, True, self.now)
            self._done.pop(id(reply.call))(reply)

    # -- messages -----------------------------------------------------------------------------

    def to_shard(self, router: int, shard: int) -> None:
        """The next message of a router arrives at a shard, and is a turn of it."""
        envelope = wire.unpack(self._to_shard[router, shard].popleft())
        for operation in envelope.items:
            self.machines[shard].apply(envelope.sender, operation, Instant(*self.now))
        self._applied[router, shard] = envelope.number
        self._turn(shard, router)

    def _turn(self, shard: int, answered: int | None = None) -> None:
        machine, store = self.machines[shard], self.stores[shard]
        while machine.tick(Instant(*self.now)):
            pass
        results: dict[int, list[Any]] = {} if answered is None else {answered: []}
        for name, result in machine.results:
            results.setdefault(int(name.removeprefix("router-")), []).append(result)
        machine.results.clear()
        machine.end_turn()
        store.write()
        store.sync()
        for router, found in results.items():
            number = self._applied.get((router, shard), 0)
            self._to_router[router, shard].append(wire.pack(shard + 1, f"shard-{shard}", number, found))
        self.check_caps(shard)

    def check_caps(self, shard: int) -> None:
        for queue in self.machines[shard]._queues.values():
            assert queue.depth <= self.caps.get(queue.name, queue.depth), f"{queue.name} is over its cap"

    def to_router(self, router: int, shard: int) -> None:
        """The next message of a shard arrives at a router."""
        self.routers[router].envelope(self._to_router[router, shard].popleft(), self.now)
        self._take_from_router(router)

    def deliver(self) -> bool:
        """A message that is on its way arrives, any of them; False when there is none."""
        links = [
            partial(arrive, *link)
            for arrive, messages in ((self.to_shard, self._to_shard), (self.to_router, self._to_router))
            for link, waiting in messages.items()
            if waiting and link[0] not in self.silent
        ]
        if links:
            self.random.choice(links)()
        return bool(links)

    def settle(self) -> None:
        while self.deliver():
            pass

    def pass_time(self, ms: int) -> None:
        """Time passes for everybody at once."""
        self.mono_ms += ms
        for router, core in enumerate(self.routers):
            if router not in self.silent:
                core.tick(self.now)
                self._take_from_router(router)
        for shard in range(SHARDS):
            self._turn(shard)

    def run(self) -> None:
        """Until nothing is under way and no timer is set."""
        for _ in range(10_000):
            self.settle()
            timers = [
                timer
                for router, core in enumerate(self.routers)
                if router not in self.silent and (timer := core.next_timer_ms()) is not None
            ]
            if not timers:
                return
            self.pass_time(max(0, min(timers) - self.mono_ms))
        raise AssertionError("it does not come to rest")

    # -- the end ------------------------------------------------------------------------------

    def depth(self, queue: str) -> int:
        return sum(sum(machine.counts().get(queue, (0, 0, 0, 0))[:3]) for machine in self.machines)

    def check(self) -> None:
        """Nothing is under way, and nothing of what was is left."""
        for core in self.routers:
            assert_idle(core)
        for machine, store in zip(self.machines, self.stores, strict=True):
            participant = machine._participant
            assert rows(store, Family.TRANSACTIONS) == []
            assert (participant._prepared, participant._decided, participant._refused) == ({}, {}, {})
            assert (participant._held, participant._blocked, participant._by_key) == ({}, {}, {})
            assert participant.lines == {}
            assert [queue.name for queue in machine._queues.values() if queue.reserved] == []
            assert recount(store) == {name: each for name, each in machine.counts().items() if any(each)}


def verdict(replies: list[Reply]) -> str:
    """What one EnqueueAtomic was told."""
    (reply,) = replies
    if reply.answer is None:
        return reply.status.name
    answer = pb.EnqueueAtomicResponse.FromString(reply.answer)
    return "stored" if answer.HasField("success") else reasons(answer)


def reasons(answer: pb.EnqueueAtomicResponse) -> str:
    found = {error.rejection.WhichOneof("reason") or "" for error in answer.rejection.errors}
    return " ".join(sorted(found))


def results(replies: list[Reply]) -> list[str]:
    """What one EnqueueBatch was told of each job."""
    (reply,) = replies
    assert reply.answer is not None, reply
    found = pb.EnqueueBatchResponse.FromString(reply.answer).results
    return ["stored" if each.HasField("success") else each.rejection.WhichOneof("reason") or "" for each in found]


# ---- two batches


def test_of_two_batches_that_hold_each_others_last_places_one_goes_through() -> None:
    world = World(0, {LEFT: 1, RIGHT: 1})
    first, second = world.enqueue_atomic(0, LEFT, RIGHT), world.enqueue_atomic(1, RIGHT, LEFT)
    world.to_shard(0, 0)
    world.to_shard(1, 1)
    assert [world.machines[0]._queues[LEFT].reserved, world.machines[1]._queues[RIGHT].reserved] == [1, 1]
    world.run()
    assert sorted([verdict(first), verdict(second)]) == ["queue_full", "stored"]
    assert (world.depth(LEFT), world.depth(RIGHT)) == (1, 1)
    world.check()


@pytest.mark.parametrize("seed", range(40))
def test_two_batches_for_the_same_last_places_are_never_both_refused(seed: int) -> None:
    world = World(seed, {LEFT: 2, RIGHT: 2})
    batches = [world.enqueue_atomic(router, *[LEFT, RIGHT] * 2) for router in range(ROUTERS)]
    world.run()
    assert sorted(verdict(batch) for batch in batches) == ["queue_full", "stored"]
    assert (world.depth(LEFT), world.depth(RIGHT)) == (2, 2)
    world.check()


@pytest.mark.parametrize("seed", range(40))
def test_of_many_batches_as_many_go_through_as_there_are_places(seed: int) -> None:
    world = World(seed, {LEFT: 3, RIGHT: 3})
    batches = [world.enqueue_atomic(number % ROUTERS, *[LEFT, RIGHT][:: 1 - number % 2 * 2]) for number in range(6)]
    world.run()
    assert sorted(verdict(batch) for batch in batches) == ["queue_full"] * 3 + ["stored"] * 3
    world.check()


# ---- a batch and an enqueue


def test_an_enqueue_has_the_place_of_a_batch_that_another_shard_refuses() -> None:
    world = World(0, {LEFT: 1, RIGHT: 0})
    batch = world.enqueue_atomic(0, LEFT, RIGHT)
    world.to_shard(0, 0)
    for method in ("EnqueueBatch", "EnqueueAtomic"):
        replies = world.enqueue(1, LEFT, method=method)
        world.to_shard(1, 0)
        assert replies == []
    assert len(world.machines[0]._participant.lines[LEFT]) == 2
    world.run()
    assert verdict(batch) == "queue_full"
    assert world.depth(LEFT) == 1
    world.check()


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_and_an_enqueue_for_one_last_place_are_never_both_refused(seed: int) -> None:
    world = World(seed, {LEFT: 1})
    batch, single = world.enqueue_atomic(0, LEFT, RIGHT), world.enqueue(1, LEFT)
    world.run()
    assert sorted([verdict(batch), *results(single)]) == ["queue_full", "stored"]
    assert world.depth(LEFT) == 1
    world.check()


def test_what_a_silent_router_holds_is_unavailable_to_others_after_a_while_and_its_decision_counts() -> None:
    world = World(0, {LEFT: 1})
    batch = world.enqueue_atomic(0, LEFT, RIGHT)
    world.to_shard(0, 0)
    world.to_shard(0, 1)
    world.silent.add(0)
    single, over_both, elsewhere = world.enqueue(1, LEFT), world.enqueue(1, LEFT, FREE), world.enqueue(1, FREE)
    another_batch = world.enqueue_atomic(1, LEFT, FREE)
    world.run()
    assert results(elsewhere) == ["stored"]
    assert another_batch[0].status == Status.UNAVAILABLE
    assert "idempotency key" in another_batch[0].text and "last places" in another_batch[0].text
    assert (single, over_both) == ([], [])
    world.pass_time(WAIT_MAX_MS)
    world.run()
    assert single[0].status == Status.UNAVAILABLE
    assert over_both[0].status == Status.ABORTED, "a part of it was stored"
    assert (batch, world.depth(LEFT), world.depth(FREE)) == ([], 0, 2)
    world.silent.clear()
    world.run()
    assert verdict(batch) == "stored"
    assert (world.depth(LEFT), world.depth(RIGHT)) == (1, 1)
    world.check()


# ---- many producers

PRODUCERS = 50
ROUNDS = 3
CAPS = {LEFT: 4, RIGHT: 5}


class Factory:
    """Producers that want all their jobs stored, and workers that finish them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.idle = {producer: ROUNDS for producer in range(PRODUCERS)}  # rounds to go
        self.unfinished = PRODUCERS * ROUNDS
        self.accepted: set[str] = set()
        self.acked: set[str] = set()
        self.refusals = 0
        self.jobs_made = 0

    def run(self) -> None:
        for step in range(200_000):
            if not self.unfinished and self.acked == self.accepted:
                break
            action = self.random.random()
            if action < 0.05 and self.idle:
                self.produce(self.random.choice(list(self.idle)))
            elif action < 0.07:
                self.work()
            elif not self.world.deliver() or step % 20 == 0:
                self.world.pass_time(1)
        self.world.run()

    def produce(self, producer: int) -> None:
        rounds = self.idle.pop(producer)
        jobs = []
        for _ in range(self.random.randint(1, 4)):
            self.jobs_made += 1
            queue = self.random.choice([LEFT, RIGHT, FREE])
            one = pb.EnqueueRequest(queue=queue, job_type="t", idempotency_key=f"{producer}-{rounds}-{self.jobs_made}")
            if self.random.random() < 0.2:
                one.scheduled_at.FromMilliseconds(self.world.now.wall_ms + self.random.randint(1, 30))
            jobs.append(one)
        method = self.random.choice(["EnqueueBatch", "EnqueueAtomic"])
        done = partial(self.answered, producer, rounds)
        self.world.call(self.random.randrange(ROUTERS), method, pb.EnqueueBatchRequest(jobs=jobs), done)

    def answered(self, producer: int, rounds: int, reply: Reply) -> None:
        """A refusal is followed by another try, so all is stored only if room comes back."""
        if self.is_stored(reply):
            rounds -= 1
            self.unfinished -= 1
        else:
            self.refusals += 1
        if rounds:
            self.idle[producer] = rounds

    def is_stored(self, reply: Reply) -> bool:
        if reply.answer is None:
            assert reply.status == Status.UNAVAILABLE, reply
            return False
        if reply.call.method == "EnqueueAtomic":
            answer = pb.EnqueueAtomicResponse.FromString(reply.answer)
            assert answer.HasField("success") or reasons(answer) == "queue_full"
            self.accepted |= {response.job_id for response in answer.success.responses}
            return answer.HasField("success")
        found = pb.EnqueueBatchResponse.FromString(reply.answer).results
        self.accepted |= {each.success.job_id for each in found if each.HasField("success")}
        return all(each.HasField("success") for each in found)

    def work(self) -> None:
        lease_ms = self.random.choice([2, LONG_MS, LONG_MS])
        request = pb.ReserveRequest(queues=[RIGHT, LEFT, FREE], max_jobs=5, lease_duration=milliseconds(lease_ms))
        router = self.random.randrange(ROUTERS)
        self.world.call(router, "Reserve", request, partial(self.reserved, router, lease_ms))

    def reserved(self, router: int, lease_ms: int, reply: Reply) -> None:
        assert reply.answer is not None, reply
        for leased in pb.ReserveResponse.FromString(reply.answer).jobs:
            assert leased.id not in self.acked, "redelivered after its ack"
            if lease_ms != LONG_MS:  # the worker dies, and the job comes back
                continue
            if self.random.random() < 0.2:
                nack = pb.NackRequest(job_id=leased.id, attempt=leased.attempt)
                self.world.call(router, "Nack", nack, self.nacked)
            else:
                ack = pb.AckRequest(job_id=leased.id, attempt=leased.attempt)
                self.world.call(router, "Ack", ack, partial(self.ack_answered, leased.id))

    def nacked(self, reply: Reply) -> None:
        assert reply.answer is not None, "a job that comes back is not refused for the cap"

    def ack_answered(self, job_id: str, reply: Reply) -> None:
        assert reply.answer is not None, reply
        self.acked.add(job_id)


@pytest.mark.parametrize("seed", range(6))
def test_fifty_producers_at_the_last_places_store_all_their_jobs_and_none_is_dropped(seed: int) -> None:
    world = World(seed, CAPS)
    factory = Factory(world)
    factory.run()
    assert factory.unfinished == 0
    assert factory.acked == factory.accepted, "what was accepted was delivered, and nothing else"
    assert factory.refusals > 50, "the queues were full now and then"
    assert [world.depth(queue) for queue in (LEFT, RIGHT, FREE)] == [0, 0, 0]
    world.check()
