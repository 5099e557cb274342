"""The state machine of a shard: all rules that move the state of its jobs are in this file.

How it works. A shard owns some slots and with them the queues whose names hash to these. It takes
operations, one after the other, each with the time at which it is applied; it changes the store and
the memory, and leaves results. It reads no clock, draws no random numbers and does no I/O besides
the store's, so the same operations at the same times give the same state and the same results.

A job is in exactly one place:

               enqueue                 reserve                ack
    (nothing) ─────────► READY ──────────────────► LEASED ─────────► (nothing)
        │                 ▲  ▲ ◄────────────────────┘ │  │
        │ enqueue, later  │  nack, expiry: attempt + 1 │  │ nack or expiry of the last attempt,
        ▼                 │  answer lost: same attempt │  ▼ or a nack that asks for it
    SCHEDULED ────────────┘ ◄──────────────────────────┘ DEAD ──► drained, or retention over
               at its time     nack with a delay

A ready job's record does not move when it is leased: the lease beside it says that it is out, and
everything about a lease is in memory as well (memory is bounded by what is in flight). An attempt
number is given out once: `attempt` in the record is the next delivery's, and whoever shows an older
one is refused. Order: the sequence number of a job is drawn when it is enqueued and never changes,
so a job that comes back, or that was scheduled, takes the place of its enqueue.

Time. Leases run on the monotonic clock while the process lives; due times, idempotency
deadlines, dead letters and what clients are shown are wall time, which never runs backwards here:
the highest instant seen is stored with every turn.

A turn: any number of `apply` and `tick`, then `end_turn`, then the shell writes the store's changes
in one batch. Results leave when that batch is durable. Nothing of this survives a failed write: the
process stops, and its successor starts from the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import NamedTuple
from zlib import crc32

from common import job_ids
from common.config import Config, QueueLimits
from common.slots import slot_of
from common.wire import EnqueueOutcome, LeasedJob, Op, Operation, Outcome, Result, Strategy
from shard import keys
from shard.ready import EXHAUSTED, Lane, WindowBudget
from shard.store import Family, Store
from shard.timers import SlotTimers
from shard.waiting import Waiter, WaitingRoom

# gRPC status codes of results.
OK = 0
NOT_FOUND = 5
FAILED_PRECONDITION = 9

PRIORITIES = 10
# Sequence numbers are drawn from blocks, so that their limit is stored once per
# block and not with every job; a restart skips what is left of a block.
SEQUENCE_BLOCK = 65_536
# What a job adds to an answer besides its body: id, two instants, attempt, framing.
JOB_OVERHEAD_BYTES = 96
# Timers of one kind that one `tick` acts on: about 5 ms of work, so that a million timers that fall
# due at once leave room for calls in between. `storage.sweep_limit` can lower it.
TICK_LIMIT = 256


class Instant(NamedTuple):
    """One moment, on both clocks, in milliseconds."""

    wall_ms: int
    mono_ms: int


class DeadLetterCause(IntEnum):
    """As in the protocol's enumeration of the same name."""

    ATTEMPTS_EXHAUSTED = 1
    REJECTED = 2
    LEASE_EXPIRED = 3
    ADMIN = 4


class Queue:
    """A queue that has something stored. Counters are those of its record in the store."""

    __slots__ = ("dead", "dirty", "keys", "lanes", "leased", "name", "number", "ready", "scheduled", "slot")

    def __init__(self, slot: int, number: int, name: str) -> None:
        self.slot = slot
        self.number = number
        self.name = name
        self.ready = 0
        self.scheduled = 0
        self.leased = 0
        self.dead = 0
        self.keys = 0
        self.lanes: list[Lane | None] = [None] * PRIORITIES  # by 9 - priority
        self.dirty = False

    @property
    def depth(self) -> int:
        """Live jobs: what `max_queue_depth` caps."""
        return self.ready + self.scheduled + self.leased


class Slot:
    """Where a slot's numbers stand."""

    __slots__ = ("next_queue", "next_sequence", "number", "sequence_limit")

    def __init__(self, number: int, sequence_limit: int, next_queue: int) -> None:
        self.number = number
        self.next_sequence = sequence_limit
        self.sequence_limit = sequence_limit
        self.next_queue = next_queue


class Lease:
    """One job that is out. `deadline` is monotonic, `expires_ms` is what the client was told."""

    __slots__ = (
        "attempt",
        "deadline",
        "expires_ms",
        "inverted",
        "job_id",
        "lease_ms",
        "max_attempts",
        "op_id",
        "queue",
        "sequence",
    )

    def __init__(self, queue: Queue, inverted: int, sequence: int, job_id: bytes) -> None:
        self.queue = queue
        self.inverted = inverted
        self.sequence = sequence
        self.job_id = job_id
        self.attempt = 0
        self.max_attempts = 0
        self.deadline = 0
        self.expires_ms = 0
        self.lease_ms = 0
        self.op_id = 0

    def job_key(self) -> bytes:
        return keys.job_key(self.queue.slot, self.queue.number, self.inverted, self.sequence)


class Machine:
    """The jobs of one shard. See the top of this file; `results` and `reports` are for the shell to take."""

    def __init__(self, store: Store, config: Config, now: Instant) -> None:
        self._store = store
        self._config = config
        self._now = now
        # (router, result) in the order in which they came about; the shell empties it.
        self.results: list[tuple[str, Result]] = []
        # What an operator should know (a record that was set aside); the shell logs and empties it.
        self.reports: list[str] = []
        self._slots: dict[int, Slot] = {}
        self._queues: dict[str, Queue] = {}
        self._by_number: dict[tuple[int, int], Queue] = {}
        self._dirty: list[Queue] = []
        self._leases: dict[bytes, Lease] = {}
        self._expiries: list[tuple[int, bytes]] = []
        # Reserves whose answers routers have not confirmed: router, ids of the jobs.
        self._claims: dict[int, tuple[str, list[bytes]]] = {}
        self._waiting = WaitingRoom()
        self._budget = WindowBudget()
        self._handlers: dict[int, Callable[[str, Operation], None]] = {
            Op.ENQUEUE: self._enqueue,
            Op.RESERVE: self._reserve,
            Op.WATCH: self._watch,
            Op.CANCEL: self._cancel,
            Op.CONFIRM: self._confirm,
            Op.GIVE_BACK: self._give_back,
            Op.ACK: self._ack,
            Op.NACK: self._nack,
            Op.EXTEND: self._extend,
        }
        self._load()

    # -- turns --------------------------------------------------------------------------------

    def apply(self, router: str, operation: Operation, now: Instant) -> None:
        """Apply one operation (see `common.wire.Op`) of a router; its result may come now or later."""
        self._advance(now)
        self._handlers[operation[1]](router, operation)

    def tick(self, now: Instant) -> bool:
        """Act on what is due, a bounded part of it; True when more is due already."""
        self._advance(now)
        limit = min(TICK_LIMIT, self._config.storage.sweep_limit)
        return any(
            [
                self._expire_leases(limit),
                self._promote(limit),
                self._expire_keys(limit),
            ]
        )

    def next_wake_ms(self, now: Instant) -> int | None:
        """How long the shell may sleep at most, in ms; None when no timer is set."""
        self._advance(now)
        expiry = self._next_expiry()
        wall = [due for due in (self._scheduled.next_due(), self._key_expiry.next_due()) if due is not None]
        sleeps = [due - self._now.wall_ms for due in wall]
        if expiry is not None:
            sleeps.append(expiry - self._now.mono_ms)
        if not sleeps:
            return None
        # The wall clock may be set while we sleep: never sleep longer than the sweep interval on it.
        longest = self._config.storage.sweep_interval_ms if wall else sleeps[0]
        return max(0, min(longest, *sleeps))

    def end_turn(self) -> None:
        """Put what this turn changed in counters and clock into the store's changes."""
        if not self._dirty and not any(self._store.pending):
            return
        for queue in self._dirty:
            queue.dirty = False
            key = keys.queue_key(queue.slot, queue.number)
            heads = [
                (inverted, head)
                for inverted, lane in enumerate(queue.lanes)
                if lane is not None and (head := lane.head()) is not None
            ]
            value = keys.queue_value(
                queue.name, queue.ready, queue.scheduled, queue.leased, queue.dead, queue.keys, heads
            )
            self._store.put(Family.QUEUES, key, value)
        self._dirty.clear()
        self._store.put(Family.META, keys.CLOCK, keys.clock_value(self._now.wall_ms))

    def configure(self, config: Config) -> None:
        """Take a new configuration; it holds from the next operation on."""
        self._config = config

    def router_gone(self, router: str, now: Instant) -> None:
        """A router process has ended.

        Its polls are over. Leases that it had not confirmed may or may not have reached their
        client, so they end at once but with the next attempt number: two workers never hold the
        same attempt. On its last attempt a job keeps its lease until it runs out.
        """
        self._advance(now)
        for op_id in self._waiting.of_router(router):
            self._remove_waiter(op_id)
        for op_id in [op_id for op_id, (owner, _) in self._claims.items() if owner == router]:
            for lease in self._unconfirmed(op_id):
                if lease.attempt < lease.max_attempts:
                    self._retry(lease, 0)

    def counts(self) -> dict[str, tuple[int, int, int, int]]:
        """Ready, scheduled, leased and dead jobs of each queue."""
        return {q.name: (q.ready, q.scheduled, q.leased, q.dead) for q in self._queues.values()}

    def _advance(self, now: Instant) -> None:
        if now.wall_ms < self._now.wall_ms:  # the wall clock was set back: stand still until it catches up
            now = Instant(self._now.wall_ms, now.mono_ms)
        self._now = now

    # -- start --------------------------------------------------------------------------------

    def _load(self) -> None:
        store = self._store
        clock = store.get(Family.META, keys.CLOCK)
        if clock is not None and (stored := keys.read_clock_value(clock)) > self._now.wall_ms:
            self._now = Instant(stored, self._now.mono_ms)
        for key, value in self._all(Family.SLOTS):
            number = keys.slot_of_key(key)
            self._slots[number] = Slot(number, *keys.read_slot_value(value))
        for key, value in self._all(Family.QUEUES):
            slot, number = keys.read_queue_key(key)
            record = keys.read_queue_value(value)
            queue = Queue(slot, number, record.name)
            queue.ready, queue.scheduled, queue.leased = record.ready, record.scheduled, record.leased
            queue.dead, queue.keys = record.dead, record.keys
            for inverted, head in record.heads:
                queue.lanes[inverted] = Lane(slot, number, inverted, head, self._budget)
            self._queues[record.name] = queue
            self._by_number[slot, number] = queue
        for key, value in self._all(Family.LEASES):
            self._load_lease(key, keys.read_lease_value(value))
        heapify(self._expiries)
        self._scheduled = SlotTimers(Family.SCHEDULED, store, self._slots)
        self._key_expiry = SlotTimers(Family.DEDUP_EXPIRY, store, self._slots)

    def _all(self, family: Family) -> list[tuple[bytes, bytes]]:
        return self._store.scan(family, b"", b"\xff" * 8, 1 << 62)

    def _load_lease(self, key: bytes, record: keys.LeaseRecord) -> None:
        slot, sequence = keys.read_lease_key(key)
        lease = Lease(self._by_number[slot, record.queue], record.inverted, sequence, record.job_id)
        lease.attempt, lease.max_attempts = record.attempt, record.max_attempts
        lease.expires_ms, lease.lease_ms = record.expires_ms, record.lease_ms
        # A lease runs on over a restart; a wall clock that was set back meanwhile does not prolong it.
        remaining = min(record.expires_ms - self._now.wall_ms, record.lease_ms)
        lease.deadline = self._now.mono_ms + max(0, remaining)
        lease.op_id = record.op_id
        self._leases[record.job_id] = lease
        self._expiries.append((lease.deadline, record.job_id))
        # Whether the answer left is not known here; only its own router may say that it did not.
        self._claims.setdefault(record.op_id, ("", []))[1].append(record.job_id)

    # -- enqueue ------------------------------------------------------------------------------

    def _enqueue(self, router: str, operation: Operation) -> None:
        op_id, _, entropy, jobs = operation
        outcomes: list[EnqueueOutcome] = []
        stirred: dict[str, Queue] = {}
        for index, (name, priority, max_attempts, due_ms, key, body) in enumerate(jobs):
            limits = self._config.effective(name)
            queue = self._queues.get(name)
            outcome: EnqueueOutcome | None = None
            if key is not None and queue is not None:
                outcome = self._duplicate_of(queue, key)
            if outcome is None:
                cap = limits.max_queue_depth
                if cap is not None and (0 if queue is None else queue.depth) >= cap:
                    outcome = [Outcome.QUEUE_FULL, cap]
            if outcome is None:
                if queue is None:
                    queue = self._new_queue(name)
                random = int.from_bytes(entropy[3 * index : 3 * index + 3], "big") & 0x3FFFF
                outcome = self._store_job(queue, priority, max_attempts, due_ms, body, random)
                if key is not None:
                    self._store_key(queue, key, outcome, limits)
                if queue.ready:
                    stirred[name] = queue
            outcomes.append(outcome)
        self.results.append((router, [op_id, OK, outcomes]))
        for queue in stirred.values():
            self._serve(queue)

    def _store_job(
        self, queue: Queue, priority: int, max_attempts: int, due_ms: int, body: bytes, random: int
    ) -> bytes:
        """A new job, ready or scheduled; returns its id."""
        slot = self._slots[queue.slot]
        sequence = slot.next_sequence
        if sequence >= slot.sequence_limit:
            slot.sequence_limit += SEQUENCE_BLOCK
            self._put_slot(slot)
        slot.next_sequence = sequence + 1
        wall_ms = self._now.wall_ms
        job_id = job_ids.make(wall_ms, queue.slot, sequence, random)
        record = keys.job_value(job_id, 1, max_attempts, body)
        inverted = PRIORITIES - 1 - priority
        if due_ms > wall_ms:
            self._schedule(queue, inverted, sequence, due_ms, record)
        else:
            self._make_ready(queue, inverted, sequence, record)
        return job_id

    def _make_ready(self, queue: Queue, inverted: int, sequence: int, record: bytes) -> None:
        self._store.put(Family.JOBS, keys.job_key(queue.slot, queue.number, inverted, sequence), record)
        self._lane(queue, inverted).add(sequence, record)
        queue.ready += 1
        self._touch(queue)

    def _schedule(self, queue: Queue, inverted: int, sequence: int, due_ms: int, record: bytes) -> None:
        key = keys.scheduled_key(queue.slot, due_ms, queue.number, inverted, sequence)
        self._store.put(Family.SCHEDULED, key, record)
        self._scheduled.note(queue.slot, due_ms)
        queue.scheduled += 1
        self._touch(queue)

    # -- idempotency --------------------------------------------------------------------------

    def _duplicate_of(self, queue: Queue, key: str) -> EnqueueOutcome | None:
        value = self._store.get(Family.DEDUP, keys.dedup_key(queue.slot, queue.number, key.encode()))
        if value is None:
            return None
        deadline_ms, job_id = keys.read_dedup_value(value)
        return [Outcome.DEDUPLICATED, job_id] if deadline_ms > self._now.wall_ms else None

    def _store_key(self, queue: Queue, key: str, outcome: EnqueueOutcome, limits: QueueLimits) -> None:
        """Remember a job under its key; the deadline is fixed here, whatever the window becomes later."""
        assert isinstance(outcome, bytes)
        encoded = key.encode()
        dedup_key = keys.dedup_key(queue.slot, queue.number, encoded)
        earlier = self._store.get(Family.DEDUP, dedup_key)
        if earlier is None:
            queue.keys += 1
        else:  # expired, and not yet swept
            expired_ms, _ = keys.read_dedup_value(earlier)
            stale = keys.dedup_expiry_key(queue.slot, expired_ms, queue.number, encoded)
            self._store.delete(Family.DEDUP_EXPIRY, stale)
        deadline_ms = self._now.wall_ms + limits.dedup_window_ms
        self._store.put(Family.DEDUP, dedup_key, keys.dedup_value(deadline_ms, outcome))
        expiry_key = keys.dedup_expiry_key(queue.slot, deadline_ms, queue.number, encoded)
        self._store.put(Family.DEDUP_EXPIRY, expiry_key, b"")
        self._key_expiry.note(queue.slot, deadline_ms)
        self._touch(queue)

    def _expire_keys(self, limit: int) -> bool:
        rows = self._key_expiry.due(self._now.wall_ms, limit)
        for expiry_key, _ in rows:
            slot, _, number, key = keys.read_dedup_expiry_key(expiry_key)
            self._store.delete(Family.DEDUP_EXPIRY, expiry_key)
            self._store.delete(Family.DEDUP, keys.dedup_key(slot, number, key))
            queue = self._by_number[slot, number]
            queue.keys -= 1
            self._touch(queue)
        return bool(rows)

    # -- reserve ------------------------------------------------------------------------------

    def _reserve(self, router: str, operation: Operation) -> None:
        op_id, _, names, max_jobs, lease_ms, may_wait, max_bytes, settles = operation
        settled = self._waiting.remove(settles) if settles else None
        jobs = self._claim(router, op_id, names, max_jobs, lease_ms, max_bytes)
        if jobs or not may_wait:
            self.results.append((router, [op_id, OK, jobs]))
        else:
            self._waiting.park(Waiter(router, op_id, names, max_jobs, lease_ms, max_bytes))
        if settled is not None:
            self._serve_promised(settled)

    def _watch(self, router: str, operation: Operation) -> None:
        op_id, _, names = operation
        self._waiting.park(Waiter(router, op_id, names))
        for name in names:
            queue = self._queues.get(name)
            if queue is not None and queue.ready:
                self._serve(queue)

    def _cancel(self, router: str, operation: Operation) -> None:
        self._remove_waiter(operation[2])
        self.results.append((router, [operation[0], OK, None]))

    def _remove_waiter(self, op_id: int) -> None:
        waiter = self._waiting.remove(op_id)
        if waiter is not None:
            self._serve_promised(waiter)

    def _serve_promised(self, waiter: Waiter) -> None:
        """A wake-up came to nothing, or took only its part: the next in line may have the rest."""
        if waiter.promised is not None:
            queue = self._queues.get(waiter.promised)
            if queue is not None and queue.ready:
                self._serve(queue)

    def _serve(self, queue: Queue) -> None:
        """Hand ready jobs of a queue to those who wait for them, first come, first served."""
        while (waiter := self._waiting.first(queue.name, queue.ready)) is not None:
            if waiter.is_watch:
                self._waiting.wake(waiter, queue.name)
                self.results.append((waiter.router, [waiter.op_id, OK, True]))
                continue
            jobs = self._claim(
                waiter.router, waiter.op_id, waiter.queues, waiter.max_jobs, waiter.lease_ms, waiter.max_bytes
            )
            if not jobs:  # what was counted as ready turned out to be unreadable and was set aside
                return
            self._waiting.remove(waiter.op_id)
            self.results.append((waiter.router, [waiter.op_id, OK, jobs]))

    def _claim(
        self, router: str, op_id: int, names: list[str], max_jobs: int, lease_ms: int, max_bytes: int
    ) -> list[LeasedJob]:
        """Lease up to `max_jobs` ready jobs, queue by queue in the order named, until `max_bytes` are full."""
        taken: list[LeasedJob] = []
        size = 0
        for name in names:
            queue = self._queues.get(name)
            if queue is None or not queue.ready:
                continue
            for lane in queue.lanes:
                if lane is None:
                    continue
                while len(taken) < max_jobs:
                    first = lane.first(self._store, self._leases)
                    if first is None:
                        break
                    sequence, record = first
                    try:
                        job_id, attempt, max_attempts = keys.read_job_value(record)
                        if job_ids.sequence(job_id) != sequence or job_ids.slot(job_id) != queue.slot:
                            raise keys.CorruptRecord(f"it names job {job_ids.text(job_id)}")
                    except keys.CorruptRecord as error:
                        lane.take_first()
                        queue.ready -= 1
                        self._set_aside(queue, lane.inverted, sequence, record, str(error))
                        continue
                    size += len(record) + JOB_OVERHEAD_BYTES
                    if size > max_bytes and taken:
                        break
                    lane.take_first()
                    expires_ms = self._lease(
                        queue, lane.inverted, sequence, job_id, attempt, max_attempts, lease_ms, op_id
                    )
                    taken.append(LeasedJob(job_id, attempt, expires_ms, record[keys.JOB_HEAD_BYTES :]))
                if len(taken) == max_jobs or size > max_bytes:
                    break
            if len(taken) == max_jobs or size > max_bytes:
                break
        if taken:
            self._claims[op_id] = (router, [job.job_id for job in taken])
        return taken

    def _lease(
        self,
        queue: Queue,
        inverted: int,
        sequence: int,
        job_id: bytes,
        attempt: int,
        max_attempts: int,
        lease_ms: int,
        op_id: int,
    ) -> int:
        """Lease a job that was just taken from its lane; returns when the lease ends, wall time."""
        lease = Lease(queue, inverted, sequence, job_id)
        lease.attempt = attempt
        lease.max_attempts = max_attempts
        lease.op_id = op_id
        self._leases[job_id] = lease
        queue.ready -= 1
        queue.leased += 1
        self._touch(queue)
        self._set_expiry(lease, lease_ms)
        return lease.expires_ms

    def _set_expiry(self, lease: Lease, lease_ms: int) -> None:
        lease.lease_ms = lease_ms
        lease.deadline = self._now.mono_ms + lease_ms
        lease.expires_ms = self._now.wall_ms + lease_ms
        heappush(self._expiries, (lease.deadline, lease.job_id))
        if len(self._expiries) > 2 * len(self._leases) + 1024:
            # Most jobs are acked long before their lease ends; without this the heap would grow
            # with the rate of jobs times the length of their leases.
            self._expiries = [(other.deadline, other.job_id) for other in self._leases.values()]
            heapify(self._expiries)
        value = keys.lease_value(
            lease.job_id,
            lease.queue.number,
            lease.inverted,
            lease.attempt,
            lease.max_attempts,
            lease.expires_ms,
            lease_ms,
            lease.op_id,
        )
        self._store.put(Family.LEASES, keys.lease_key(lease.queue.slot, lease.sequence), value)

    def _confirm(self, router: str, operation: Operation) -> None:
        for op_id in operation[2]:
            self._claims.pop(op_id, None)

    def _give_back(self, router: str, operation: Operation) -> None:
        """Answers that never reach their client: the jobs are ready again as if nobody had reserved them."""
        for op_id in operation[2]:
            for lease in self._unconfirmed(op_id):
                self._return(lease)

    def _unconfirmed(self, op_id: int) -> list[Lease]:
        _, job_ids_ = self._claims.pop(op_id, ("", []))
        found = [self._leases.get(job_id) for job_id in job_ids_]
        return [lease for lease in found if lease is not None and lease.op_id == op_id]

    def _return(self, lease: Lease) -> None:
        record = self._store.get(Family.JOBS, lease.job_key())
        self._end_lease(lease)
        if record is None:
            self._lost(lease)
            return
        self._lane(lease.queue, lease.inverted).add(lease.sequence, record)
        lease.queue.ready += 1
        self._serve(lease.queue)

    # -- the end of a lease -------------------------------------------------------------------

    def _held(self, router: str, op_id: int, job_id: bytes, attempt: int) -> Lease | None:
        """The lease that an ack, nack or extend speaks of; None when it was refused."""
        lease = self._leases.get(job_id)
        if lease is not None and lease.deadline <= self._now.mono_ms:
            self._expire(lease)  # its turn in the sweep has not come yet
            lease = self._leases.get(job_id)
        if lease is None:
            text = "no in-flight job has this id: it was acknowledged, its lease has expired, or it never existed"
            self.results.append((router, [op_id, NOT_FOUND, text]))
            return None
        if lease.attempt != attempt:
            text = f"the job is in flight under attempt {lease.attempt}, not {attempt}: its lease was given to another"
            self.results.append((router, [op_id, FAILED_PRECONDITION, text]))
            return None
        return lease

    def _ack(self, router: str, operation: Operation) -> None:
        op_id, _, job_id, attempt = operation
        lease = self._held(router, op_id, job_id, attempt)
        if lease is not None:
            self._store.delete(Family.JOBS, lease.job_key())
            self._end_lease(lease)
            self.results.append((router, [op_id, OK, None]))

    def _nack(self, router: str, operation: Operation) -> None:
        op_id, _, job_id, attempt, strategy, delay_ms, reason = operation
        lease = self._held(router, op_id, job_id, attempt)
        if lease is None:
            return
        dead = True
        if strategy == Strategy.DEAD_LETTER:
            self._bury(lease, DeadLetterCause.REJECTED, reason)
        elif attempt >= lease.max_attempts:
            self._bury(lease, DeadLetterCause.ATTEMPTS_EXHAUSTED, reason)
        else:
            dead = False
            limits = self._config.effective(lease.queue.name)
            if strategy == Strategy.DELAY:
                delay = min(delay_ms, limits.max_schedule_horizon_ms)
            else:
                delay = retry_delay_ms(limits, job_id, attempt)
            self._retry(lease, delay)
        self.results.append((router, [op_id, OK, dead]))

    def _extend(self, router: str, operation: Operation) -> None:
        op_id, _, job_id, attempt, lease_ms = operation
        lease = self._held(router, op_id, job_id, attempt)
        if lease is not None:
            longest = self._config.effective(lease.queue.name).max_lease_duration_ms
            self._set_expiry(lease, max(1, min(lease_ms, longest)))
            self.results.append((router, [op_id, OK, lease.expires_ms]))

    def _expire_leases(self, limit: int) -> bool:
        for _ in range(limit):
            deadline = self._next_expiry()
            if deadline is None or deadline > self._now.mono_ms:
                return False
            _, job_id = heappop(self._expiries)
            self._expire(self._leases[job_id])
        return True

    def _next_expiry(self) -> int | None:
        while self._expiries:
            deadline, job_id = self._expiries[0]
            lease = self._leases.get(job_id)
            if lease is not None and lease.deadline == deadline:
                return deadline
            heappop(self._expiries)  # acked, or extended: that timer no longer applies
        return None

    def _expire(self, lease: Lease) -> None:
        if lease.attempt >= lease.max_attempts:
            self._bury(lease, DeadLetterCause.LEASE_EXPIRED, None)
        else:
            self._retry(lease, 0)

    def _retry(self, lease: Lease, delay_ms: int) -> None:
        """The job is delivered again, under the next attempt number, at once or after a delay."""
        key = lease.job_key()
        record = self._store.get(Family.JOBS, key)
        self._end_lease(lease)
        if record is None:
            self._lost(lease)
            return
        again = keys.job_value(lease.job_id, lease.attempt + 1, lease.max_attempts, record[keys.JOB_HEAD_BYTES :])
        if delay_ms > 0:
            self._store.delete(Family.JOBS, key)
            self._schedule(lease.queue, lease.inverted, lease.sequence, self._now.wall_ms + delay_ms, again)
        else:
            self._make_ready(lease.queue, lease.inverted, lease.sequence, again)
            self._serve(lease.queue)

    def _bury(self, lease: Lease, cause: DeadLetterCause, reason: str | None) -> None:
        """The job is delivered no more: it becomes a dead letter, or is deleted where none are kept."""
        key = lease.job_key()
        record = self._store.get(Family.JOBS, key) if self._config.storage.dead_letter_retention_ms else None
        self._end_lease(lease)
        self._store.delete(Family.JOBS, key)
        if record is not None:
            queue = lease.queue
            dead_key = keys.dead_key(queue.slot, queue.number, self._now.wall_ms, lease.sequence)
            value = keys.dead_value(lease.job_id, lease.attempt, cause, reason, record[keys.JOB_HEAD_BYTES :])
            self._store.put(Family.DEAD, dead_key, value)
            queue.dead += 1

    def _end_lease(self, lease: Lease) -> None:
        del self._leases[lease.job_id]
        self._store.delete(Family.LEASES, keys.lease_key(lease.queue.slot, lease.sequence))
        lease.queue.leased -= 1
        self._touch(lease.queue)
        claim = self._claims.get(lease.op_id)
        if claim is not None:
            claim[1].remove(lease.job_id)
            if not claim[1]:
                del self._claims[lease.op_id]

    # -- schedules ----------------------------------------------------------------------------

    def _promote(self, limit: int) -> bool:
        rows = self._scheduled.due(self._now.wall_ms, limit)
        stirred: dict[str, Queue] = {}
        for key, record in rows:
            slot, _, number, inverted, sequence = keys.read_scheduled_key(key)
            queue = self._by_number[slot, number]
            self._store.delete(Family.SCHEDULED, key)
            queue.scheduled -= 1
            self._make_ready(queue, inverted, sequence, record)
            stirred[queue.name] = queue
        for queue in stirred.values():
            self._serve(queue)
        return bool(rows)

    # -- records ------------------------------------------------------------------------------

    def _new_queue(self, name: str) -> Queue:
        number_of_slot = slot_of(name)
        slot = self._slots.get(number_of_slot)
        if slot is None:
            slot = self._slots[number_of_slot] = Slot(number_of_slot, 0, 1)
        queue = Queue(slot.number, slot.next_queue, name)
        slot.next_queue += 1
        self._put_slot(slot)
        self._queues[name] = queue
        self._by_number[slot.number, queue.number] = queue
        return queue

    def _put_slot(self, slot: Slot) -> None:
        value = keys.slot_value(slot.sequence_limit, slot.next_queue)
        self._store.put(Family.SLOTS, keys.slot_prefix(slot.number), value)

    def _lane(self, queue: Queue, inverted: int) -> Lane:
        lane = queue.lanes[inverted]
        if lane is None:
            lane = queue.lanes[inverted] = Lane(queue.slot, queue.number, inverted, EXHAUSTED, self._budget)
        return lane

    def _touch(self, queue: Queue) -> None:
        if not queue.dirty:
            queue.dirty = True
            self._dirty.append(queue)

    def _set_aside(self, queue: Queue, inverted: int, sequence: int, record: bytes, why: str) -> None:
        """Keep an unreadable record where it harms nobody, and say so."""
        key = keys.job_key(queue.slot, queue.number, inverted, sequence)
        self._store.put(Family.META, keys.SET_ASIDE + key, record)
        self._store.delete(Family.JOBS, key)
        self._touch(queue)
        self.reports.append(f"a job of queue {queue.name!r} is unreadable and was set aside ({key.hex()}): {why}")

    def _lost(self, lease: Lease) -> None:
        self.reports.append(
            f"job {job_ids.text(lease.job_id)} of queue {lease.queue.name!r} was in flight but its record is missing"
        )


def retry_delay_ms(limits: QueueLimits, job_id: bytes, attempt: int) -> int:
    """How long a nacked job waits by its queue's policy, after its `attempt`-th delivery.

    Doubled per attempt when exponential, capped, less a jitter of up to a quarter that is a function
    of job and attempt, so that jobs that failed together do not come back together.
    """
    delay = limits.retry_delay_ms
    if delay == 0:
        return 0
    if limits.retry_backoff == "exponential":
        delay <<= min(attempt - 1, 62)
    delay = min(delay, limits.retry_delay_max_ms)
    jitter: int = crc32(job_id + attempt.to_bytes(4, "big")) % (delay // 4 + 1)
    return delay - jitter
