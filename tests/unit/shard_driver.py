"""A shard's state machine without its process: every call is one turn, with a clock that tests set.

`Shard` speaks to a `Machine` as the process does, `recount` computes from the store alone what the
machine counts in memory. A test module takes the fixtures by naming them: `shard = shard_driver.shard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest

from common import job_ids
from common.config import Config, StorageSection
from common.slots import SLOT_COUNT, slot_of
from common.wire import DeadLetter, EnqueueJob, LeasedJob, MoveCommand, Op, Operation, Result, Strategy
from shard import keys
from shard.machine import FAILED_PRECONDITION, Machine
from shard.migration import FAMILIES
from shard.state import Instant
from shard.store import Family, Store
from shard.store_memory import MemoryStore
from shard.store_rocks import RocksStore, StoreOptions

WALL_START_MS = 1_700_000_000_000
MONO_START_MS = 5_000_000
LEASE_MS = 30_000
MIB = 1024 * 1024

ROUTER = "router-0"
OTHER_ROUTER = "router-1"

Counts = tuple[int, int, int, int]


class Home(Protocol):
    """Where a shard's store is kept, and what is left of it after a restart."""

    store: Store

    def reopen(self) -> None:
        """End the store in order and open it again."""


class MemoryHome:
    def __init__(self) -> None:
        self.store: MemoryStore = MemoryStore()

    def reopen(self) -> None:
        self.store.close()
        self.store = self.store.crash()


class RocksHome:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Waiting for the disk is the business of the store's own tests.
        self._options = StoreOptions(persist_mode="buffer")
        self.store: RocksStore = RocksStore.open(directory, self._options)

    def reopen(self) -> None:
        self.store.close()
        self.store = RocksStore.open(self._directory, self._options)


class Shard:
    """A machine on a store. Each method is a turn of its own unless it is called within `one_turn`."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.wall_ms = WALL_START_MS
        self.mono_ms = MONO_START_MS
        self.config = Config()
        # (router, op id, status, data), in the order in which they left.
        self.answers: list[tuple[str, int, int, Any]] = []
        self.reports: list[str] = []
        self.last_op = 0
        # Whether each turn waits for the disk; without it a crash may lose what was written.
        self.syncs = True
        self.turns_written = 0
        self._op_ids = count(1)
        self._within_turn = False
        self.machine = self.new_machine()

    def new_machine(self) -> Machine:
        return Machine(self.store, self.config, self.now)

    @property
    def now(self) -> Instant:
        return Instant(self.wall_ms, self.mono_ms)

    @property
    def store(self) -> Store:
        return self.home.store

    # -- turns --------------------------------------------------------------------------------

    @contextmanager
    def one_turn(self) -> Iterator[None]:
        """All calls within share a turn: nothing is written before its end."""
        self._within_turn = True
        try:
            yield
        finally:
            self._within_turn = False
        self._end_turn()

    def _end_turn(self) -> None:
        if self._within_turn:
            return
        self.machine.end_turn()
        self.turns_written += self.store.write()
        if self.syncs:
            self.store.sync()

    def _take(self) -> None:
        for router, (op_id, status, data) in self.machine.results:
            self.answers.append((router, op_id, status, data))
        self.machine.results.clear()
        self.reports += self.machine.reports
        self.machine.reports.clear()
        self._end_turn()

    def send(self, op: Op, *arguments: object, router: str = ROUTER) -> int:
        """Apply one operation; returns its op id."""
        self.last_op = next(self._op_ids)
        operation: Operation = [self.last_op, op, *arguments]
        self.machine.apply(router, operation, self.now)
        self._take()
        return self.last_op

    def answer(self, op_id: int) -> Result | None:
        """Status and data of an operation's result, None while there is none."""
        found = [[status, data] for _, other, status, data in self.answers if other == op_id]
        assert len(found) <= 1, f"operation {op_id} was answered {len(found)} times"
        return found[0] if found else None

    def tick(self) -> bool:
        more = self.machine.tick(self.now)
        self._take()
        return more

    def pass_time(self, ms: int = 0) -> None:
        """Both clocks go on, and all that is due by then happens."""
        self.wall_ms += ms
        self.mono_ms += ms
        for _ in range(10_000):
            if not self.tick():
                return
        raise AssertionError("what is due never ends")

    def next_wake_ms(self) -> int | None:
        return self.machine.next_wake_ms(self.now)

    def configure(self, queues: Sequence[dict[str, object]] = (), **values: object) -> None:
        """Keys of [limits] and [storage] by their names; what is not named has its default."""
        storage = {key: value for key, value in values.items() if key in StorageSection.model_fields}
        limits = {key: value for key, value in values.items() if key not in storage}
        self.config = Config.model_validate({"limits": limits, "storage": storage, "queues": queues})
        self.machine.configure(self.config)

    def restart(self, down_ms: int = 0) -> None:
        """A new machine on what is stored; what is not written is lost with the old one."""
        self.home.reopen()
        self.start(down_ms)

    def start(self, down_ms: int = 0) -> None:
        self.wall_ms += down_ms
        self.mono_ms += down_ms
        self.machine = self.new_machine()

    # -- operations ---------------------------------------------------------------------------

    def enqueue(self, queue: str = "q", body: bytes = b"", **fields: Any) -> Any:
        """One job; returns its id, or the outcome that is not simply an id."""
        return self.enqueue_all(job(queue, body, **fields))[0]

    def enqueue_all(self, *jobs: EnqueueJob) -> list[Any]:
        op_id = self.send(Op.ENQUEUE, b"\x01\x02\x03" * len(jobs), [list(each) for each in jobs])
        return self._data(op_id)

    def enqueue_atomic(self, *jobs: EnqueueJob) -> Any:
        """[True, outcomes], or [False, refusals by index]."""
        return self._data(self.send(Op.ENQUEUE_ATOMIC, b"\x01\x02\x03" * len(jobs), [list(each) for each in jobs]))

    def reserve(
        self,
        *queues: str,
        max_jobs: int = 1,
        lease_ms: int = LEASE_MS,
        max_bytes: int = 4 * MIB,
        settles: int = 0,
        router: str = ROUTER,
    ) -> list[LeasedJob]:
        """Without a wait; `last_op` is the op id of the claim."""
        names = list(queues) or ["q"]
        found: list[LeasedJob] = self._data(
            self.send(Op.RESERVE, names, max_jobs, lease_ms, False, max_bytes, settles, router=router)
        )
        return found

    def reserve_one(self, *queues: str, lease_ms: int = LEASE_MS) -> LeasedJob:
        (found,) = self.reserve(*queues, lease_ms=lease_ms)
        return found

    def park(
        self,
        *queues: str,
        max_jobs: int = 1,
        lease_ms: int = LEASE_MS,
        max_bytes: int = 4 * MIB,
        settles: int = 0,
        router: str = ROUTER,
    ) -> int:
        """A reserve that may wait; returns its op id."""
        names = list(queues) or ["q"]
        return self.send(Op.RESERVE, names, max_jobs, lease_ms, True, max_bytes, settles, router=router)

    def watch(self, *queues: str, router: str = ROUTER) -> int:
        return self.send(Op.WATCH, list(queues) or ["q"], router=router)

    def jobs_for(self, op_id: int) -> list[LeasedJob] | None:
        """What a parked reserve was given, None while it waits."""
        return None if self.answer(op_id) is None else self._data(op_id)

    def is_woken(self, op_id: int) -> bool:
        return self.answer(op_id) == [0, True]

    def cancel(self, op_id: int) -> None:
        assert self._data(self.send(Op.CANCEL, op_id)) is None

    def confirm(self, *op_ids: int) -> None:
        assert self.answer(self.send(Op.CONFIRM, list(op_ids))) is None

    def give_back(self, *op_ids: int) -> None:
        assert self.answer(self.send(Op.GIVE_BACK, list(op_ids))) is None

    def ack(self, leased: LeasedJob, attempt: int | None = None) -> int:
        """Returns the status."""
        attempt = leased.attempt if attempt is None else attempt
        return self._status(self.send(Op.ACK, leased.job_id, attempt))

    def nack(
        self,
        leased: LeasedJob,
        strategy: Strategy = Strategy.DEFAULT,
        delay_ms: int = 0,
        reason: str | None = None,
        attempt: int | None = None,
    ) -> Result:
        """Returns status and data: [0, dead lettered?] or a refusal."""
        attempt = leased.attempt if attempt is None else attempt
        answer = self.answer(self.send(Op.NACK, leased.job_id, attempt, strategy, delay_ms, reason))
        assert answer is not None
        return answer

    def extend(self, leased: LeasedJob, lease_ms: int, attempt: int | None = None) -> Result:
        """Returns status and data: [0, when the lease ends by wall time] or a refusal."""
        attempt = leased.attempt if attempt is None else attempt
        answer = self.answer(self.send(Op.EXTEND, leased.job_id, attempt, lease_ms))
        assert answer is not None
        return answer

    def drain_dead(
        self, queue: str | None = None, count: int = 100, max_bytes: int = 4 * MIB, router: str = ROUTER
    ) -> list[DeadLetter]:
        """Neither confirmed nor given back; `last_op` is the op id."""
        found: list[DeadLetter] = self._data(self.send(Op.DRAIN, queue, count, max_bytes, router=router))
        return found

    def keep(self, op_id: int, count: int) -> None:
        assert self._data(self.send(Op.KEEP, op_id, count)) is None

    def known(self, *queues: str) -> list[bool]:
        found: list[bool] = self._data(self.send(Op.KNOWN, list(queues)))
        return found

    def router_gone(self, router: str = ROUTER) -> None:
        self.machine.router_gone(router, self.now)
        self._take()

    def _status(self, op_id: int) -> int:
        answer = self.answer(op_id)
        assert answer is not None
        status: int = answer[0]
        return status

    def _data(self, op_id: int) -> Any:
        answer = self.answer(op_id)
        assert answer is not None, f"operation {op_id} was not answered"
        assert answer[0] == 0, answer[1]
        return answer[1]

    # -- state --------------------------------------------------------------------------------

    def counts(self, queue: str = "q") -> Counts:
        """Ready, scheduled, leased and dead jobs of a queue."""
        return self.machine.counts().get(queue, (0, 0, 0, 0))

    def drain(self, *queues: str) -> list[bytes]:
        """The bodies of all ready jobs in the order in which they are served, each acked."""
        bodies = []
        while jobs := self.reserve(*queues, max_jobs=100):
            bodies += [leased.body for leased in jobs]
            for leased in jobs:
                assert self.ack(leased) == 0
        return bodies

    def dead_letters(self, queue: str = "q") -> list[tuple[int, keys.DeadRecord]]:
        """`failed_at` and record of a queue's dead letters, oldest first."""
        names = queue_names(self.store)
        return [
            (failed_at_ms, keys.read_dead_value(value))
            for (slot, number, failed_at_ms, _), value in (
                (keys.read_dead_key(key), value) for key, value in rows(self.store, Family.DEAD)
            )
            if names[slot, number] == queue
        ]

    def check(self) -> None:
        """The machine's counters, and those stored with each queue, equal a full scan of the store."""
        counted = recount(self.store)
        counters = {name: each for name, each in self.machine.counts().items() if any(each)}
        assert counters == counted, f"{counters} in memory, {counted} in the store"


# -- slots that move ------------------------------------------------------------------------------


class OwningShard(Shard):
    """A shard that owns what a `Cluster` says."""

    def __init__(self, home: Home, index: int, cluster: Cluster) -> None:
        self.index = index
        self.cluster = cluster
        super().__init__(home)
        self._op_ids = cluster.op_ids

    def new_machine(self) -> Machine:
        cluster = self.cluster
        return Machine(
            self.store, self.config, self.now, self.index, cluster.routers, tuple(cluster.owners), cluster.epoch
        )

    def step(self, command: MoveCommand, *arguments: object, router: str = ROUTER) -> Any:
        """One step of a move; the data of its result."""
        return self._data(self.send(Op.MOVE, command, *arguments, router=router))

    def refusal(self, command: MoveCommand, *arguments: object, router: str = ROUTER) -> str:
        """The text with which a step is refused."""
        answer = self.answer(self.send(Op.MOVE, command, *arguments, router=router))
        assert answer is not None and answer[0] == FAILED_PRECONDITION
        text: str = answer[1]
        return text

    def told_map(self) -> None:
        self.machine.map_changed(self.cluster.epoch, tuple(self.cluster.owners), self.now)
        self._take()

    def rows_of(self, slots: Iterable[int]) -> list[tuple[Family, bytes, bytes]]:
        """All that is stored of some slots."""
        return [
            (family, key, value)
            for family in FAMILIES
            for slot in sorted(slots)
            for key, value in self.store.scan(family, keys.slot_prefix(slot), keys.slot_end(slot), 1 << 40)
        ]


class Cluster:
    """Shards of one slot map, in which shard 0 owns all at first, and the steps of the router that moves slots."""

    def __init__(self, homes: Sequence[Home]) -> None:
        self.routers = [ROUTER, OTHER_ROUTER]
        self.owners = [0] * SLOT_COUNT
        self.epoch = 1
        self.op_ids = count(1)
        self.shards = [OwningShard(home, index, self) for index, home in enumerate(homes)]

    def move(self, slots: Sequence[int], source: int = 0, target: int = 1, part_bytes: int = MIB) -> None:
        """All steps, with nothing in between."""
        self.clear(slots, target)
        self.shards[source].step(MoveCommand.OPEN, list(slots))
        self.copy(source, target, part_bytes)
        assert self.shards[source].step(MoveCommand.HOLD) is True
        self.copy_changes(source, target, part_bytes)
        self.switch(slots, target)

    def clear(self, slots: Sequence[int], target: int = 1) -> None:
        for _ in range(1_000):
            if self.shards[target].step(MoveCommand.CLEAR, list(slots)):
                return
            self.shards[target].tick()
        raise AssertionError("the target never becomes empty")

    def copy(self, source: int = 0, target: int = 1, part_bytes: int = MIB) -> None:
        """READ to its end."""
        while not self.copy_part(source, target, part_bytes):
            pass

    def copy_part(self, source: int = 0, target: int = 1, part_bytes: int = MIB) -> bool:
        """Whether it was the last one."""
        found, done = self.shards[source].step(MoveCommand.READ, part_bytes)
        self._pass_on(found, target)
        return bool(done)

    def copy_changes(self, source: int = 0, target: int = 1, part_bytes: int = MIB) -> None:
        """CHANGES to its end."""
        left = 1
        while left:
            found, left = self.shards[source].step(MoveCommand.CHANGES, part_bytes)
            self._pass_on(found, target)

    def _pass_on(self, found: list[Any], target: int) -> None:
        sent = [list(row) for row in found]
        self.shards[target].step(MoveCommand.RECEIVE, sent, self.shards[target].wall_ms)

    def switch(self, slots: Iterable[int], target: int = 1) -> None:
        """The map is replaced, and all shards hear of it."""
        self.replace_map(slots, target)
        for shard in self.shards:
            shard.told_map()

    def replace_map(self, slots: Iterable[int], target: int = 1) -> None:
        for slot in slots:
            self.owners[slot] = target
        self.epoch += 1

    def pass_time(self, ms: int = 0) -> None:
        for shard in self.shards:
            shard.pass_time(ms)

    def check(self) -> None:
        for shard in self.shards:
            shard.check()


def job(
    queue: str = "q",
    body: bytes = b"",
    priority: int = 0,
    max_attempts: int = 3,
    due_ms: int = 0,
    key: str | None = None,
) -> EnqueueJob:
    return EnqueueJob(queue, priority, max_attempts, due_ms, key, body)


def bodies(jobs: Iterable[LeasedJob] | None) -> list[bytes]:
    return [leased.body for leased in jobs or ()]


# -- what is stored -------------------------------------------------------------------------------


def rows(store: Store, family: Family) -> list[tuple[bytes, bytes]]:
    """Everything in a family, with the changes of the turn."""
    return store.scan(family, b"", b"\xff" * 64, 1 << 40)


def queue_names(store: Store) -> dict[tuple[int, int], str]:
    """Name of each queue by slot and number."""
    return {keys.read_queue_key(key): keys.read_queue_value(value).name for key, value in rows(store, Family.QUEUES)}


def recount(store: Store) -> dict[str, Counts]:
    """Ready, scheduled, leased and dead jobs of each queue that has any, by a scan of all records.

    Asserts on the way what must hold between the records: no job is in two places, every lease has
    its job, every idempotency key its timer, and the counters stored with a queue are right.
    """
    names = queue_names(store)
    found = {place: [0, 0, 0, 0] for place in names}
    seen: set[bytes] = set()
    first_ready: dict[tuple[int, int], dict[int, int]] = {place: {} for place in names}

    leased = dict(rows(store, Family.LEASES))
    for key, value in rows(store, Family.JOBS):
        slot, number, inverted, sequence = keys._JOB_KEY.unpack(key)
        _see(seen, value, slot, sequence)
        lease = leased.pop(keys.lease_key(slot, sequence), None)
        if lease is None:
            found[slot, number][0] += 1
            first_ready[slot, number].setdefault(inverted, sequence)
        else:
            record = keys.read_lease_value(lease)
            assert (record.job_id, record.queue, record.inverted) == (value[:16], number, inverted)
            assert (record.attempt, record.max_attempts) == keys.read_job_value(value)[1:]
            found[slot, number][2] += 1
    assert leased == {}, "leases without a job"
    for key, value in rows(store, Family.SCHEDULED):
        slot, _, number, _, sequence = keys.read_scheduled_key(key)
        _see(seen, value, slot, sequence)
        found[slot, number][1] += 1
    for key, value in rows(store, Family.DEAD):
        slot, number, _, sequence = keys.read_dead_key(key)
        _see(seen, value, slot, sequence)
        found[slot, number][3] += 1

    dedup = _dedup_counts(store)
    limits = {keys.slot_of_key(key): keys.read_slot_value(value) for key, value in rows(store, Family.SLOTS)}
    for key, value in rows(store, Family.QUEUES):
        place = keys.read_queue_key(key)
        queue = keys.read_queue_value(value)
        assert [queue.ready, queue.scheduled, queue.leased, queue.dead] == found[place], queue.name
        assert queue.keys == dedup.pop(place, 0), queue.name
        assert place[0] == slot_of(queue.name) and place[1] < limits[place[0]][1]
        heads = dict(queue.heads)
        for inverted, sequence in first_ready[place].items():
            assert heads[inverted] <= sequence < limits[place[0]][0], queue.name
    assert dedup == {}, "idempotency keys of no queue"
    by_name = {names[place]: (each[0], each[1], each[2], each[3]) for place, each in found.items() if any(each)}
    assert len(by_name) == sum(1 for each in found.values() if any(each)), "two queues of one name"
    return by_name


def _see(seen: set[bytes], value: bytes, slot: int, sequence: int) -> None:
    job_id = value[:16]
    assert job_id not in seen, f"job {job_ids.text(job_id)} is in two places"
    assert (job_ids.slot(job_id), job_ids.sequence(job_id)) == (slot, sequence)
    seen.add(job_id)


def _dedup_counts(store: Store) -> dict[tuple[int, int], int]:
    timers = [key for key, _ in rows(store, Family.DEDUP_EXPIRY)]
    expected = []
    counted: dict[tuple[int, int], int] = {}
    for key, value in rows(store, Family.DEDUP):
        place = keys.read_queue_key(key[:6])
        deadline_ms, _ = keys.read_dedup_value(value)
        expected.append(keys.dedup_expiry_key(place[0], deadline_ms, place[1], key[6:]))
        counted[place] = counted.get(place, 0) + 1
    assert sorted(expected) == timers, "idempotency keys and their timers differ"
    return counted


def names_of_one_slot() -> tuple[str, str]:
    """Two queues whose records lie next to each other."""
    seen: dict[int, str] = {}
    for number in count():
        name = f"queue-{number}"
        other = seen.setdefault(slot_of(name), name)
        if other != name:
            return other, name
    raise AssertionError("every two names have slots of their own")


# -- fixtures -------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "rocks"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    made: Home = MemoryHome() if request.param == "memory" else RocksHome(tmp_path / "shard")
    yield made
    made.store.close()


@pytest.fixture(params=["memory", "rocks"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Two shards, whose counters are compared with their stores at the end, when all is deleted that has left."""
    homes: list[Home] = (
        [MemoryHome(), MemoryHome()]
        if request.param == "memory"
        else [RocksHome(tmp_path / "shard-0"), RocksHome(tmp_path / "shard-1")]
    )
    made = Cluster(homes)
    yield made
    made.pass_time()
    made.check()
    for home in homes:
        home.store.close()


@pytest.fixture
def shard(home: Home) -> Iterator[Shard]:
    """A shard with the default configuration, whose counters are compared with its store at the end."""
    made = Shard(home)
    yield made
    made.check()
