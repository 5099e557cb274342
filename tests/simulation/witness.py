"""The witness of one disk: it reads every batch before it is written, and knows what may be in it.

It keeps its own count of everything, from the batches and the operations alone, and holds the shard
to it: a job goes only for a reason, a lease ends only for a reason, attempts grow by one, counters
are right, no queue is over its cap, a transaction is applied as a whole or not at all, and nothing
is answered before it is durable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgpack

from common import job_ids, wire
from common import queue_pb2 as pb
from common.config import Config
from common.slots import slot_of
from common.wire import AdminCommand, EnqueueJob, Envelope, LeasedJob, Op, Operation, Outcome, Result, Vote
from router.front import Status
from shard import keys
from shard.machine import Machine
from shard.migration import FAMILIES
from shard.state import Instant
from shard.store import Family, Store
from shard.store_memory import MemoryStore
from tests.simulation.facts import Promise, StoredJob
from tests.simulation.words import job_in_words
from tests.simulation.world import Finding
from tests.unit.shard_driver import recount

if TYPE_CHECKING:
    from tests.simulation.simulation import Cluster

_JOB_FAMILIES = (Family.JOBS, Family.SCHEDULED, Family.DEAD)
_REMOVING = (AdminCommand.PURGE, AdminCommand.REMOVE, AdminCommand.DELETE_DEAD)
_ALL = 1 << 62

# A job's record: the family and the key.
Place = tuple[Family, bytes]


class Counts:
    """What is stored of one queue."""

    __slots__ = ("dead", "jobs", "keys", "leases", "scheduled")

    def __init__(self) -> None:
        self.jobs = 0  # ready and leased
        self.scheduled = 0
        self.dead = 0
        self.leases = 0
        self.keys = 0


class SlotView(MemoryStore):
    """What a store holds of some slots, and all that belongs to no slot."""

    def __init__(self, store: MemoryStore, slots: frozenset[int]) -> None:
        super().__init__()
        self._store = store
        self._slots = slots
        self.pending = [
            {key: value for key, value in changes.items() if self._counts(family, key)}
            for family, changes in enumerate(store.pending)
        ]

    def _counts(self, family: int, key: bytes) -> bool:
        return family not in FAMILIES or keys.slot_of_key(key) in self._slots

    def _stored_value(self, family: Family, key: bytes) -> bytes | None:
        return self._store._stored_value(family, key) if self._counts(family, key) else None

    def _stored_pairs(self, family: Family, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        return (pair for pair in self._store._stored_pairs(family, start, end) if self._counts(family, pair[0]))


class Witness:
    """What one disk holds and has held of the slots that its shard owns by the map that is stored. Its state is
    that of the last written batch."""

    def __init__(self, cluster: Cluster, shard: int, slots: frozenset[int]) -> None:
        self.facts = cluster.facts
        self.shard = shard
        self.slots = slots
        self.places: dict[bytes, Place] = {}
        self.promises: dict[int, Promise] = {}
        self.decisions: dict[int, list[int]] = {}
        self._cluster = cluster
        self._seen = cluster.seen
        self._name = f"shard-{shard}"
        self._counts: dict[bytes, Counts] = {}  # by slot and number of the queue, as in keys
        self._held: Counter[str] = Counter()  # places of undecided transactions, by queue
        self._depths: dict[str, int] = {}
        self._names: dict[bytes, str] = {}
        self._machine: Machine
        self._configs: list[Config] = []  # those of this turn
        self._tail: list[list[tuple[Any, ...]]] = []  # events of each batch that is not durable
        self._known: set[bytes] = set()  # jobs that were written since the disk was read
        self._written = 0
        self._durable = 0
        self._now = Instant(0, 0)
        # Of this process.
        self._operations: dict[int, Operation] = {}
        self._routers: dict[int, str] = {}  # who sent an operation that claims
        self._drained: dict[int, list[bytes]] = {}
        self._removing: dict[int, str] = {}  # removals that are not answered, with their queues
        self._made: dict[tuple[str, int], int] = {}  # results that have not left, and when they may
        self._forget_turn()

    def _forget_turn(self) -> None:
        self._applied: list[Operation] = []
        self._gone: list[str] = []
        self._results: list[tuple[str, Result]] = []
        self._acked: set[bytes] = set()
        self._nacked: dict[bytes, bool] = {}  # dead lettered?
        self._extended: set[bytes] = set()
        self._given_back: set[int] = set()
        self._confirmed: set[bytes] = set()
        self._removed_from: set[str] = set()
        self._requeued: set[bytes] = set()
        self._new: list[tuple[bytes, EnqueueJob]] = []  # jobs that were accepted, with their ids
        self._named: list[tuple[bytes, EnqueueJob]] = []  # duplicates: the earlier job, and who hears of it

    def _find(self, invariant: str, text: str) -> Finding:
        return Finding(invariant, f"{self._name}: {text}")

    # -- the life of the disk -------------------------------------------------------------------

    def machine_started(self, machine: Machine) -> None:
        """A process has read the disk."""
        self._machine = machine
        self._operations.clear()
        self._routers.clear()
        self._drained.clear()
        self._removing.clear()
        self._made.clear()
        claim = machine._claim
        machine._claim = lambda *terms: self._claim(claim, *terms)  # type: ignore[method-assign]
        for kind in (Op.ENQUEUE, Op.ENQUEUE_ATOMIC, Op.PREPARE):
            machine._handlers[kind] = partial(self._enqueue, machine._handlers[kind])

    def synced(self, batches: int) -> None:
        for events in self._tail[:batches]:
            for happened, *what in events:
                happened(self.shard, *what)
        del self._tail[:batches]
        self._durable += batches

    def slots_left(self, slots: frozenset[int]) -> set[bytes]:
        """The slots count here no more. Returns their live jobs."""
        self.slots -= slots
        for events in self._tail:
            for _, job_id, *_ in events:
                if isinstance(job_id, bytes) and job_ids.slot(job_id) in slots:
                    raise self._find("moved", f"{job_in_words(job_id)} changed after its last copy")
        if any(job_ids.slot(job_id) in slots for promise in self.promises.values() for _, job_id in promise.jobs):
            raise self._find("moved", "an undecided batch was left behind")
        live = {job_id for job_id in self.facts.live[self.shard] if job_ids.slot(job_id) in slots}
        self.facts.live[self.shard] -= live
        for job_id in live:
            self.places.pop(job_id, None)
        for by_place in (self._counts, self._names):
            for place in [place for place in by_place if keys.slot_of_key(place) in slots]:
                del by_place[place]
        return live

    def slots_arrived(self, slots: frozenset[int], live: set[bytes], store: MemoryStore) -> None:
        """The slots count here from now on: what is durable has to be all of it, and nothing else."""
        view = SlotView(store.as_durable(), slots)
        before = set(self.places)
        for name, (ready, scheduled, leased, _) in self._add_rows(view).items():
            self._depths[name] = ready + scheduled + leased
        arrived = self.places.keys() - before
        if live != arrived:
            one = min(live ^ arrived)
            text = "did not arrive with its slot" if one in live else "had ended, and arrived with its slot"
            raise self._find("moved", f"{job_in_words(one)} {text}")
        self.facts.live[self.shard] |= live
        self.slots |= slots

    def crashed(self, kept: int, store: MemoryStore) -> None:
        """Of the batches that were not durable the first ones were kept."""
        self.synced(kept)
        self._tail.clear()
        self._written = self._durable
        self._read(store)

    def closed(self, store: MemoryStore) -> None:
        self.synced(len(self._tail))
        self._read(store)

    def _read(self, store: MemoryStore) -> None:
        """Begin again from what a restart finds, which has to be what is known to be durable."""
        self.places.clear()
        self.promises.clear()
        self.decisions.clear()
        self._counts.clear()
        self._held.clear()
        self._names.clear()
        self._depths.clear()
        self._known.clear()
        counted = self._add_rows(self._view(store))
        for key, value in store.scan(Family.TRANSACTIONS, b"", b"\xff" * 64, _ALL):
            transaction = int.from_bytes(key[1:], "big")
            if key[:1] == b"p":
                self._hold(transaction, _read_promise(value), 1)
            elif key[:1] == b"d":
                self.decisions[transaction] = msgpack.unpackb(value)[1]
        for name in counted.keys() | self._held.keys():
            ready, scheduled, leased, _ = counted.get(name, (0, 0, 0, 0))
            self._depths[name] = ready + scheduled + leased + self._held[name]
        self._compare_with_facts()

    def _add_rows(self, store: Store) -> dict[str, tuple[int, int, int, int]]:
        """Take in what is stored, which has to fit together; returns the counts of each queue."""
        try:
            counted = recount(store)
        except AssertionError as error:
            raise self._find("records", f"what is found after a restart does not fit together: {error}") from error
        for family in _JOB_FAMILIES:
            for key, value in store.scan(family, b"", b"\xff" * 64, _ALL):
                self.places[value[:16]] = family, key
                self._count(family, key, value, 1)
        for family in (Family.LEASES, Family.DEDUP):
            for key, value in store.scan(family, b"", b"\xff" * 64, _ALL):
                self._count(family, key, value, 1)
        for key, value in store.scan(Family.QUEUES, b"", b"\xff" * 64, _ALL):
            self._names[key] = keys.read_queue_value(value).name
        return counted

    def _view(self, store: MemoryStore) -> MemoryStore:
        """What counts here. Nothing else is there unless slots move."""
        return SlotView(store, self.slots) if self._cluster.shape.moves else store

    def _compare_with_facts(self) -> None:
        facts, shard = self.facts, self.shard
        lost = facts.live[shard] - self.places.keys()
        if lost:
            raise self._find("lost", f"{job_in_words(min(lost))} was durable, and is not there after a restart")
        back = self.places.keys() - facts.live[shard]
        if back:
            raise self._find("back", f"{job_in_words(min(back))} had ended, and is there after a restart")
        if self.promises.keys() != facts.promised[shard] or self.decisions.keys() != facts.decisions[shard]:
            raise self._find("transactions", "promises or decisions after a restart are not those that were durable")

    # -- a turn ---------------------------------------------------------------------------------

    def turn_begins(self, now: Instant) -> None:
        self._now = now
        self._configs = [self._machine._config]

    def configured(self, config: Config) -> None:
        self._configs.append(config)

    def router_gone(self, name: str) -> None:
        self._gone.append(name)

    def applied(self, envelope: Envelope) -> None:
        for operation in envelope.items:
            op_id, kind = operation[0], operation[1]
            self._applied.append(operation)
            if op_id:
                self._operations[op_id] = operation
                if kind == Op.RESERVE:
                    self._routers[op_id] = envelope.sender
            if kind == Op.GIVE_BACK:
                self._given_back.update(operation[2])
            elif kind == Op.CONFIRM:
                for confirmed in operation[2]:
                    self._confirmed.update(self._drained.pop(confirmed, ()))
            elif kind == Op.KEEP:
                drained = self._drained.get(operation[2])
                if drained is not None:
                    del drained[operation[3] :]
            elif kind == Op.ADMIN and operation[2] in _REMOVING:
                self._removing[op_id] = operation[3]

    def results(self, results: list[tuple[str, Result]]) -> None:
        self._results = list(results)
        self._removed_from.update(self._removing.values())
        for _, result in results:
            self._removing.pop(result[0], None)
        for _, (op_id, status, data) in results:
            if op_id == 0 or status != Status.OK:
                continue
            operation = self._operations[op_id]
            match operation[1]:
                case Op.ACK:
                    self._acked.add(operation[2])
                    self._cluster.done.add((Op.ACK, operation[2], operation[3]))
                case Op.NACK:
                    self._nacked[operation[2]] = data
                    self._cluster.done.add((Op.NACK, operation[2], operation[3]))
                case Op.EXTEND:
                    self._extended.add(operation[2])
                    self._cluster.done.add((Op.EXTEND, operation[2], operation[3]))
                case Op.DRAIN:
                    self._drained[op_id] = [letter[0] for letter in data]
                case Op.ENQUEUE:
                    self._note_outcomes(operation[3], data)
                case Op.ENQUEUE_ATOMIC if data[0]:
                    self._note_outcomes(operation[3], data[1])
                case Op.PREPARE if data[0] == Vote.YES:
                    promised, self._new = self._new, []
                    self._note_outcomes(operation[5], data[1])
                    self._new = promised
                case Op.ADMIN if operation[2] == AdminCommand.REQUEUE:
                    self._requeued.update(data)
                    self._cluster.requeued.update(data)

    def _note_outcomes(self, jobs: list[Any], outcomes: list[Any]) -> None:
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, bytes):
                self._new.append((outcome, EnqueueJob(*job)))
            elif outcome[0] == Outcome.DEDUPLICATED:
                self._named.append((outcome[1], EnqueueJob(*job)))

    def turn_ends(self, store: MemoryStore) -> None:
        """The turn is closed and will be written now."""
        if any(store.pending):
            store = self._view(store)
            events: list[tuple[Any, ...]] = []
            put, touched = self._read_jobs(store, events)
            self._read_leases(store, put, touched)
            self._read_keys(store, touched)
            names = self._read_transactions(store, put, events)
            for job_id, job in self._new:
                if job_id not in put:
                    self._was_removed_at_once(job_id, job, events)
            self._read_queues(store, touched, names)
            self._tail.append(events)
            self._written += 1
        for router, (op_id, _, _) in self._results:
            if op_id:
                self._made[router, op_id] = self._written
        for job_id, job in self._named:
            self._check_duplicate(job_id, job)
        if self._applied or self._gone or self._results:
            self._forget_turn()

    def leaves(self, router: str, message: bytes) -> None:
        """An envelope leaves for a router."""
        for op_id, status, data in wire.unpack(message).items:
            if op_id == 0:
                continue
            position = self._made.pop((router, op_id))
            if status == Status.INTERNAL:
                continue
            if position > self._durable:
                raise self._find("durability", f"the result of {op_id} left before it was durable")
            if status == Status.OK and self._operations[op_id][1] == Op.RESERVE:
                for job_id, *_ in data:
                    self._check_batch_of(job_id)

    def _check_batch_of(self, job_id: bytes) -> None:
        """A worker may see a job of a batch only when the batch is decided for good."""
        transaction = self.facts.stored[job_id].transaction
        if transaction and transaction not in self.facts.decided:
            raise self._find("atomicity", f"{job_in_words(job_id)} of tx {transaction} is handed out undecided")

    def _check_duplicate(self, job_id: bytes, job: EnqueueJob) -> None:
        """A duplicate's answer names a job that was stored, or that is promised in this very batch."""
        if job_id in self._known or job_id in self.facts.stored or any(new == job_id for new, _ in self._new):
            return
        if not any(other == job_id for promise in self.promises.values() for _, other in promise.jobs):
            raise self._find("keys", f"key {job.key!r} of {job.queue} is said to be {job_in_words(job_id)}: never was")

    # -- jobs -----------------------------------------------------------------------------------

    def _count(self, family: Family, key: bytes, value: bytes, step: int) -> bytes:
        """Count one record; returns the queue's place."""
        if family == Family.SCHEDULED:
            place = key[:2] + key[10:14]
        elif family == Family.LEASES:
            place = key[:2] + value[16:20]
        else:
            place = key[:6]
        counts = self._counts.get(place)
        if counts is None:
            counts = self._counts[place] = Counts()
        match family:
            case Family.JOBS:
                counts.jobs += step
            case Family.SCHEDULED:
                counts.scheduled += step
            case Family.DEAD:
                counts.dead += step
            case Family.LEASES:
                counts.leases += step
            case Family.DEDUP:
                counts.keys += step
        return place

    def _read_jobs(
        self, store: MemoryStore, events: list[tuple[Any, ...]]
    ) -> tuple[dict[bytes, tuple[Family, bytes, bytes]], set[bytes]]:
        """What became of jobs: those that have a new record, and the queues that changed."""
        put: dict[bytes, tuple[Family, bytes, bytes]] = {}
        removed: dict[bytes, tuple[Family, bytes, bytes]] = {}
        touched: set[bytes] = set()
        for family in _JOB_FAMILIES:
            for key, value in store.pending[family].items():
                old = store._stored_value(family, key)
                if value is None:
                    if old is not None:
                        removed[old[:16]] = family, key, old
                        touched.add(self._count(family, key, old, -1))
                    continue
                if value[:16] in put:
                    raise self._find("records", f"{job_in_words(value[:16])} is put in two places")
                put[value[:16]] = family, key, value
                if old is None:
                    touched.add(self._count(family, key, value, 1))
                elif old[:16] != value[:16]:
                    raise self._find("records", f"{job_in_words(old[:16])} is overwritten")
        for job_id, (family, key, value) in put.items():
            place = self.places.get(job_id)
            if place is None:
                self._is_new(job_id, family, key, value, events)
            elif place != (family, key) and job_id not in removed:
                raise self._find("records", f"{job_in_words(job_id)} is in two places")
            self.places[job_id] = family, key
        for job_id, (family, key, value) in removed.items():
            if job_id not in put:
                del self.places[job_id]
                why = self._reason(job_id, family, key, value, store)
                events.append((self.facts.job_ended, job_id, why))
        return put, touched

    def _is_new(self, job_id: bytes, family: Family, key: bytes, value: bytes, events: list[tuple[Any, ...]]) -> None:
        if job_id in self.facts.stored:
            raise self._find("back", f"{job_in_words(job_id)} had ended ({self.facts.ended[job_id]}) and is back")
        if family == Family.DEAD:
            raise self._find("records", f"{job_in_words(job_id)} is dead before it was there")
        transaction = next(
            (number for number, promise in self.promises.items() if any(other == job_id for _, other in promise.jobs)),
            0,
        )
        job = pb.Job.FromString(value[keys.JOB_HEAD_BYTES :])
        stored = StoredJob(self.shard, job.queue, job.job_type, transaction)
        if job.job_type in self.facts.by_type:
            raise self._find("doubled", f"{job.job_type} is stored a second time, as {job_in_words(job_id)}")
        self._known.add(job_id)
        events.append((self.facts.job_stored, job_id, stored))

    def _was_removed_at_once(self, job_id: bytes, job: EnqueueJob, events: list[tuple[Any, ...]]) -> None:
        """An operator removed a job in the turn in which it was accepted: no batch ever held it."""
        if job.queue not in self._removed_from:
            raise self._find("lost", f"{job_in_words(job_id)} was accepted and is not stored")
        job_type = pb.Job.FromString(job.body).job_type
        self._known.add(job_id)
        events.append((self.facts.job_stored, job_id, StoredJob(self.shard, job.queue, job_type, 0)))
        events.append((self.facts.job_ended, job_id, "removed"))

    def _reason(self, job_id: bytes, family: Family, key: bytes, value: bytes, store: MemoryStore) -> str:
        """Why a job may be gone."""
        if family == Family.DEAD:
            failed_at_ms = keys.read_dead_key(key)[2]
            if job_id in self._confirmed:
                return "drained"
            if failed_at_ms <= self._now.wall_ms - self._machine._config.storage.dead_letter_retention_ms:
                return "kept long enough"
        elif family == Family.JOBS:
            if job_id in self._acked:
                return "acked"
            lease = self._old_lease(job_id, store)
            if lease is not None and not self._machine._config.storage.dead_letter_retention_ms:
                is_last = lease.attempt >= lease.max_attempts and lease.expires_ms <= self._now.wall_ms
                if self._nacked.get(job_id) or is_last:
                    return "dead"
        if self._removed_from and self._name_of(family, key) in self._removed_from:
            return "removed"
        raise self._find("lost", f"{job_in_words(job_id)} is gone from {family.name} for no reason")

    def _name_of(self, family: Family, key: bytes) -> str:
        place = key[:2] + key[10:14] if family == Family.SCHEDULED else key[:6]
        return self._names.get(place, "")

    # -- leases ---------------------------------------------------------------------------------

    def _old_lease(self, job_id: bytes, store: MemoryStore) -> keys.LeaseRecord | None:
        key = keys.lease_key(job_ids.slot(job_id), job_ids.sequence(job_id))
        value = store._stored_value(Family.LEASES, key)
        return None if value is None else keys.read_lease_value(value)

    def _read_leases(
        self, store: MemoryStore, put: dict[bytes, tuple[Family, bytes, bytes]], touched: set[bytes]
    ) -> None:
        for key, value in store.pending[Family.LEASES].items():
            old_value = store._stored_value(Family.LEASES, key)
            old = None if old_value is None else keys.read_lease_value(old_value)
            new = None if value is None else keys.read_lease_value(value)
            if old_value is not None and new is None:
                touched.add(self._count(Family.LEASES, key, old_value, -1))
            elif value is not None and old is None:
                touched.add(self._count(Family.LEASES, key, value, 1))
            if old is not None and new is not None and (old.op_id, old.attempt) == (new.op_id, new.attempt):
                if old.job_id not in self._extended:
                    raise self._find("leases", f"the lease of {job_in_words(old.job_id)} moves by itself")
                continue
            if old is not None:
                self._lease_ended(old, put, store)
            if new is not None:
                self._lease_began(new, store)

    def _lease_ended(
        self, lease: keys.LeaseRecord, put: dict[bytes, tuple[Family, bytes, bytes]], store: MemoryStore
    ) -> None:
        """It ended for a reason, and the reason says what the next attempt is."""
        job_id = lease.job_id
        next_attempts: set[int] = set()
        if lease.op_id in self._given_back:
            next_attempts.add(lease.attempt)
            self._seen["lease given back"] += 1
        if lease.expires_ms <= self._now.wall_ms:
            next_attempts.add(lease.attempt + 1)
            self._seen["lease expired"] += 1
        if job_id in self._nacked or job_id in self._acked:
            next_attempts.add(lease.attempt + 1)
        if self._gone and self._routers.get(lease.op_id) in self._gone:
            # To a poll of another router that has gone as well, and so on.
            next_attempts.update(lease.attempt + 1 + further for further in range(len(self._gone)))
            self._seen["lease ended with its router"] += 1
        if not next_attempts:
            raise self._find("leases", f"the lease of {job_in_words(job_id)}, attempt {lease.attempt}, ends too early")
        if job_id not in self.places or job_id in self._requeued:
            return
        family, key = self.places[job_id]
        if family == Family.DEAD:
            return
        record = store.get(family, key)
        assert record is not None
        attempt = keys.read_job_value(record)[1]
        if attempt not in next_attempts:
            text = f"attempt {lease.attempt} of {job_in_words(job_id)} ended, and the next one is {attempt}"
            raise self._find("attempts", text)

    def _lease_began(self, lease: keys.LeaseRecord, store: MemoryStore) -> None:
        job_id = lease.job_id
        self._seen["lease"] += 1
        if job_id not in self.places or self.places[job_id][0] != Family.JOBS:
            raise self._find("leases", f"{job_in_words(job_id)} is leased and not there")
        known = self._cluster.delivered.get(job_id, 0)
        if lease.attempt <= known and job_id not in self._cluster.requeued:
            text = f"{job_in_words(job_id)} is leased as attempt {lease.attempt}, after a worker saw {known}"
            raise self._find("attempts", text)

    def _claim(self, claim: Any, router: str, op_id: int, names: list[str], max_jobs: int, *terms: Any) -> Any:
        """What is claimed is the first of what is ready, by the store alone."""
        machine = self._machine
        store = machine._store
        ready: list[bytes] = []
        for name in names:
            queue = machine._queues.get(name)
            if queue is None or not queue.ready or queue.closing_until_ms > machine._now.wall_ms:
                continue
            if queue.slot in machine._ownership.held_slots:
                continue
            start, end = keys.queue_key(queue.slot, queue.number), keys.queue_end(queue.slot, queue.number)
            for key, record in store.scan(Family.JOBS, start, end, _ALL):
                sequence = keys.read_job_key(key)[3]
                if store.get(Family.LEASES, keys.lease_key(queue.slot, sequence)) is None:
                    ready.append(record)
        taken: list[LeasedJob] = claim(router, op_id, names, max_jobs, *terms)
        expected = [record[:16] for record in ready[: len(taken)]]
        if [leased.job_id for leased in taken] != expected:
            raise self._find("order", f"{op_id} is given {_listed(taken)}, and {_ids(expected)} was first")
        if len(taken) < min(max_jobs, len(ready)):
            size = sum(len(record) + wire.JOB_OVERHEAD_BYTES for record in ready[: len(taken) + 1])
            if size <= terms[1] or not taken:
                raise self._find("order", f"{op_id} is given {len(taken)} jobs of {len(ready)}")
            self._seen["claim cut by bytes"] += 1
        return taken

    # -- capacity -------------------------------------------------------------------------------

    def _enqueue(self, enqueue: Callable[[str, Operation], None], router: str, operation: Operation) -> None:
        """Nobody is refused for want of room while there is room that no undecided transaction can give back."""
        machine = self._machine
        kind = operation[1]
        jobs = operation[5] if kind == Op.PREPARE else operation[3]
        live: dict[str, int] = {}
        for job in jobs:
            queue = machine._queues.get(job[0])
            live[job[0]] = 0 if queue is None else queue.depth - queue.reserved
        before = len(machine.results)
        enqueue(router, operation)
        result = next((each for _, each in machine.results[before:] if each[0] == operation[0]), None)
        if result is None or result[1] != Status.OK:
            if result is None and kind != Op.PREPARE:
                self._seen["enqueue waits for a decision"] += 1
            return
        data = result[2]
        if kind == Op.ENQUEUE:
            for job, outcome in zip(jobs, data, strict=True):
                if isinstance(outcome, bytes):
                    live[job[0]] += 1
                elif outcome[0] == Outcome.QUEUE_FULL and live[job[0]] < outcome[1]:
                    raise self._find("refused", f"{job[0]} is said to be full with {live[job[0]]} jobs of {outcome[1]}")
            return
        is_refused = data[0] == Vote.REFUSED if kind == Op.PREPARE else not data[0]
        wanted = Counter(job[0] for job in jobs)
        for index, outcome in data[1] if is_refused else ():
            name = jobs[index][0]
            if outcome[0] == Outcome.QUEUE_FULL and live[name] + wanted[name] <= outcome[1]:
                raise self._find("refused", f"{name} has {live[name]} jobs of {outcome[1]}, {wanted[name]} more fit")

    # -- keys and queues ------------------------------------------------------------------------

    def _read_keys(self, store: MemoryStore, touched: set[bytes]) -> None:
        for key, value in store.pending[Family.DEDUP].items():
            old = store._stored_value(Family.DEDUP, key)
            if value is None and old is not None:
                touched.add(self._count(Family.DEDUP, key, b"", -1))
            elif value is not None and old is None:
                touched.add(self._count(Family.DEDUP, key, b"", 1))
            elif value is not None and old is not None and keys.read_dedup_value(old)[0] > self._now.wall_ms:
                raise self._find("keys", f"a key that holds for {job_in_words(old[8:24])} is given to another job")

    def _read_queues(self, store: MemoryStore, touched: set[bytes], names: set[str]) -> None:
        for key, value in store.pending[Family.QUEUES].items():
            counts = self._counts.get(key)
            if value is None:
                self._names.pop(key, None)
                if counts is not None:
                    if counts.jobs or counts.scheduled or counts.dead or counts.keys:
                        raise self._find("counters", "a queue is forgotten of which something is stored")
                    del self._counts[key]
                touched.discard(key)
                continue
            record = keys.read_queue_value(value)
            self._names[key] = record.name
            counts = counts or Counts()
            counted = counts.jobs - counts.leases, counts.scheduled, counts.leases, counts.dead, counts.keys
            if counted != (record.ready, record.scheduled, record.leased, record.dead, record.keys):
                raise self._find("counters", f"{record.name} has {counted}, its record says {record[1:6]}")
            names.add(record.name)
            self._check_depth(record.name, counts)
        if touched - store.pending[Family.QUEUES].keys():
            raise self._find("counters", "a queue changed and its counters did not")
        for name in names:
            queue = self._machine._queues.get(name)
            if (0 if queue is None else queue.reserved) != self._held[name]:
                raise self._find("capacity", f"{name} holds {self._held[name]} places, the machine counts others")

    def _check_depth(self, name: str, counts: Counts) -> None:
        """No enqueue takes a queue over its cap; requeued dead letters and a cap that was lowered may."""
        depth = counts.jobs + counts.scheduled + self._held[name]
        caps = [config.effective(name).max_queue_depth for config in self._configs]
        highest = max(-1 if cap is None else cap for cap in caps)
        if None not in caps and depth > highest:
            before = self._depths.get(name, 0)
            if depth > max(highest, before) + len(self._requeued):
                raise self._find("capacity", f"{name} has {depth} jobs, its cap is {highest}")
        self._depths[name] = depth

    # -- transactions ---------------------------------------------------------------------------

    def _hold(self, transaction: int, promise: Promise, step: int) -> None:
        if step > 0:
            self.promises[transaction] = promise
        else:
            del self.promises[transaction]
        for job, _ in promise.jobs:
            self._held[job.queue] += step

    def _read_transactions(
        self, store: MemoryStore, put: dict[bytes, tuple[Family, bytes, bytes]], events: list[tuple[Any, ...]]
    ) -> set[str]:
        """Returns the queues whose held places changed."""
        names: set[str] = set()
        pending = store.pending[Family.TRANSACTIONS]
        for key, value in pending.items():
            kind, transaction = key[:1], int.from_bytes(key[1:], "big")
            old = store._stored_value(Family.TRANSACTIONS, key)
            if kind == b"p":
                if value is not None and old is None:
                    promise = _read_promise(value)
                    self._hold(transaction, promise, 1)
                    names.update(job.queue for job, _ in promise.jobs)
                    events.append((self.facts.transaction_prepared, transaction))
                    self._seen["prepared"] += 1
                elif value is None and old is not None:
                    promise = self.promises[transaction]
                    self._hold(transaction, promise, -1)
                    names.update(job.queue for job, _ in promise.jobs)
                    self._promise_ended(transaction, promise, put, pending, events)
            elif kind == b"d":
                if value is not None:
                    self._check_decision(transaction, msgpack.unpackb(value)[1], events)
                elif old is not None:
                    self._check_forgotten(transaction)
                    events.append((self.facts.transaction_forgotten, transaction))
        return names

    def _promise_ended(
        self,
        transaction: int,
        promise: Promise,
        put: dict[bytes, tuple[Family, bytes, bytes]],
        pending: dict[bytes, bytes | None],
        events: list[tuple[Any, ...]],
    ) -> None:
        applied = sum(job_id in put for _, job_id in promise.jobs)
        decided_here = pending.get(b"d" + transaction.to_bytes(8, "big")) is not None
        is_decided = transaction in self.facts.decided or decided_here
        if self._removed_from.intersection(job.queue for job, _ in promise.jobs):
            if is_decided:  # applied, and removed in the same turn by an operator
                for job, job_id in promise.jobs:
                    if job_id not in put:
                        self._was_removed_at_once(job_id, job, events)
        elif applied not in (0, len(promise.jobs)):
            raise self._find("atomicity", f"tx {transaction} is applied in part")
        elif applied and not is_decided:
            raise self._find("atomicity", f"tx {transaction} is applied and not decided")
        elif promise.jobs and not applied and is_decided:
            raise self._find("atomicity", f"tx {transaction} is decided, and its jobs were let go of")
        if applied or is_decided:
            events.append((self.facts.transaction_applied, transaction))
        else:
            events.append((self.facts.transaction_released, transaction))
            self._seen["released"] += 1

    def _check_decision(self, transaction: int, others: list[int], events: list[tuple[Any, ...]]) -> None:
        """Decided: every other shard has promised its part, durably, and has not let go of it."""
        self.decisions[transaction] = others
        self._seen["decided"] += 1
        for other in others:
            if transaction not in self.facts.promised[other]:
                raise self._find("atomicity", f"tx {transaction} is decided without the promise of shard-{other}")
        events.append((self.facts.transaction_decided, transaction, others))

    def _check_forgotten(self, transaction: int) -> None:
        for other in self.decisions.pop(transaction):
            # A shard that was taken away had promised nothing any more.
            if other < len(self.facts.promised) and transaction in self.facts.promised[other]:
                text = f"tx {transaction} is forgotten, and shard-{other} does not know yet that it is decided"
                raise self._find("forgotten", text)

    # -- at rest --------------------------------------------------------------------------------

    def check_counters(self) -> None:
        """What the machine counts in memory is what is stored."""
        counted: dict[str, tuple[int, int, int, int]] = {}
        for place, counts in self._counts.items():
            each = counts.jobs - counts.leases, counts.scheduled, counts.leases, counts.dead
            if any(each):
                counted[self._names[place]] = each
        in_memory = {name: each for name, each in self._machine.counts().items() if any(each)}
        if self._cluster.shape.moves:  # the machine may not have heard yet of what is stored
            both = self.slots & self._machine._ownership.owned
            counted = {name: each for name, each in counted.items() if slot_of(name) in both}
            in_memory = {name: each for name, each in in_memory.items() if slot_of(name) in both}
        if counted != in_memory:
            raise self._find("counters", f"{in_memory} in memory, {counted} stored")


def _read_promise(value: bytes) -> Promise:
    _, home, jobs = msgpack.unpackb(value)
    return Promise(home, [(EnqueueJob(*job), job_id) for job, job_id in jobs])


def _listed(jobs: list[LeasedJob]) -> str:
    return _ids([leased.job_id for leased in jobs])


def _ids(ids: list[bytes]) -> str:
    return "[" + ", ".join(job_in_words(job_id) for job_id in ids) + "]"
