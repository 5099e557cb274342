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

Transactions. What a batch over several shards asks of a shard is in `transactions` and `participant`,
which calls back here to take places and to store jobs.

Operators. What they look at and do is in `admin`, which works on the same records and calls back
here for what moves a job or ends a queue. A queue that is being deleted is closing until an instant
that its deletion keeps moving on; a queue of which nothing is left is retired after a while.

Slots. Which of them are ours says the slot map, which may change while we serve; how one comes and
goes is in `ownership`. An operation on a slot that is not ours is answered with MOVED and changes
nothing; one on a slot that is about to leave waits until it has left or stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from common import job_ids
from common.config_sections import Config
from common.slots import slot_of
from common.wire import (
    JOB_OVERHEAD_BYTES,
    MOVED,
    AdminCommand,
    EnqueueJob,
    EnqueueOutcome,
    LeasedJob,
    MoveCommand,
    Op,
    Operation,
    Outcome,
    Result,
    Strategy,
    Vote,
)
from shard import keys
from shard.admin import Admin, Holdings
from shard.dead_letters import DeadLetterCause, DeadLetters
from shard.dedup import DedupKeys
from shard.leases import Leases
from shard.ownership import HELD_MS, MoveRefused, Ownership
from shard.participant import Participant
from shard.ready import EXHAUSTED, Lane, WindowBudget
from shard.retries import retry_delay_ms
from shard.state import PRIORITIES, Instant, Lease, Queue, Slot
from shard.store import Family, Store
from shard.timers import SlotTimers
from shard.transactions import Transactions
from shard.verification import Verification
from shard.waiting import Waiter, WaitingRoom

# gRPC status codes of results.
OK = 0
NOT_FOUND = 5
FAILED_PRECONDITION = 9
INTERNAL = 13
UNAVAILABLE = 14

# Sequence numbers are drawn from blocks, so that their limit is stored once per
# block and not with every job; a restart skips what is left of a block.
SEQUENCE_BLOCK = 65_536
# Timers of one kind that one `tick` acts on: about 5 ms of work, so that a million timers that fall
# due at once leave room for calls in between. `storage.sweep_limit` can lower it.
TICK_LIMIT = 256
_ALL = 1 << 62
# How long nothing is stored of a queue before its record goes too, in ms: longer than the pause of a
# queue that is drained and filled again.
RETIRE_AFTER_MS = 10_000


class Machine:
    """The jobs of one shard. See the top of this file; `results` and `reports` are for the shell to take."""

    def __init__(
        self,
        store: Store,
        config: Config,
        now: Instant,
        shard: int = 0,
        routers: Iterable[str] = (),
        owners: Sequence[int] | None = None,
        epoch: int = 1,
    ) -> None:
        """Read what the store holds. `shard` is our index, `routers` are the names of those that live;
        `owners` is the shard of each slot (None: this is the only one) in the slot map of that epoch."""
        self._store = store
        self._shard = shard
        self._ownership = Ownership(store, shard, owners, epoch, self)
        self._config = config
        self._now = now
        # (router, result) in the order in which they came about; the shell empties it.
        self.results: list[tuple[str, Result]] = []
        # What an operator should know (a record that was set aside); the shell logs and empties it.
        self.reports: list[str] = []
        # Why no jobs are taken, None while they are; the shell sets it. What ends jobs goes on.
        self.shortage: str | None = None
        self._slots: dict[int, Slot] = {}
        self._queues: dict[str, Queue] = {}
        self._by_number: dict[tuple[int, int], Queue] = {}
        self._dirty: list[Queue] = []
        self._out = Leases(store)
        self._leases = self._out.by_id
        self._claims = self._out.claims
        self._waiting = WaitingRoom()
        # Queues that are being deleted, and those that became empty with the instant (monotonic), in its order.
        self._closing: set[Queue] = set()
        self._emptied: dict[Queue, int] = {}
        self._dead = DeadLetters(store)
        self._budget = WindowBudget()
        self._handlers: dict[int, Callable[[str, Operation], None]] = {
            Op.ENQUEUE: self._enqueue,
            Op.ENQUEUE_ATOMIC: self._enqueue_atomic,
            Op.RESERVE: self._reserve,
            Op.WATCH: self._watch,
            Op.CANCEL: self._cancel,
            Op.CONFIRM: self._confirm,
            Op.GIVE_BACK: self._give_back,
            Op.ACK: self._ack,
            Op.NACK: self._nack,
            Op.EXTEND: self._extend,
            Op.DRAIN: self._drain,
            Op.KEEP: self._keep,
            Op.KNOWN: self._known,
            Op.ADMIN: self._administer,
            Op.PREPARE: self._prepare,
            Op.MOVE: self._move,
        }
        self._routers = set(routers)
        self._load()
        self._admin = self._make_admin()
        self._participant = Participant(store, shard, self)
        self._participant.load(self._routers)
        self._transactions = Transactions(self._participant, self._routers, self.results)
        self._handlers |= self._transactions.handlers

    # -- turns --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """That of the slot map which is known here."""
        return self._ownership.epoch

    def apply(self, router: str, operation: Operation, now: Instant, epoch: int = 0) -> None:
        """Apply one operation (see `common.wire.Op`) of a router; its result may come now or later.

        `epoch` is that of the map by which it was sent here, 0 where that is not known.
        """
        self._advance(now)
        ownership = self._ownership
        if epoch == ownership.epoch and not ownership.held_slots:
            self._handlers[operation[1]](router, operation)
        else:
            ownership.take(router, operation, epoch)

    def tick(self, now: Instant) -> bool:
        """Act on what is due, a bounded part of it; True when more is due already."""
        self._advance(now)
        self._transactions.ask(self._now.mono_ms)
        if self._participant.has_waiters:
            self._participant.give_up(self._now.mono_ms)
        if self._ownership.held_slots:
            return False
        limit = min(TICK_LIMIT, self._config.storage.sweep_limit)
        return any(
            [
                self._expire_leases(limit),
                self._promote(limit),
                self._expire_keys(limit),
                self._expire_dead_letters(limit),
                bool(self._closing) and self._reopen(),
                bool(self._emptied) and self._retire(limit),
                bool(self._ownership.sweep) and self._ownership.sweep.step(),
            ]
        )

    def next_wake_ms(self, now: Instant) -> int | None:
        """How long the shell may sleep at most, in ms; None when no timer is set."""
        self._advance(now)
        expiry = self._out.next_end()
        oldest = self._dead.oldest_failed_at()
        kept_until = None if oldest is None else oldest + self._config.storage.dead_letter_retention_ms
        wall = [due for due in (self._scheduled.next_due(), self._dedup.next_due(), kept_until) if due is not None]
        wall += [queue.closing_until_ms for queue in self._closing]
        sleeps = [due - self._now.wall_ms for due in wall]
        if expiry is not None:
            sleeps.append(expiry - self._now.mono_ms)
        if (question := self._transactions.next_question()) is not None:
            sleeps.append(question - self._now.mono_ms)
        if self._emptied:
            sleeps.append(next(iter(self._emptied.values())) + RETIRE_AFTER_MS - self._now.mono_ms)
        if self._participant.has_waiters:
            sleeps.append(self._participant.waits_until() - self._now.mono_ms)
        if not sleeps and not self._ownership.sweep:
            return None
        if self._ownership.held_slots:
            return HELD_MS
        if self._ownership.sweep:
            return 0
        # The wall clock may be set while we sleep: never sleep longer than the sweep interval on it.
        longest = self._config.storage.sweep_interval_ms if wall else sleeps[0]
        return max(0, min(longest, *sleeps))

    def end_turn(self) -> None:
        """Put what this turn changed in counters and clock into the store's changes."""
        if not self._dirty and not any(self._store.pending):
            return
        for queue in self._dirty:
            queue.dirty = False
            self._slots[queue.slot].changes += 1
            if not queue.ready and queue.is_empty:
                self._emptied.pop(queue, None)
                self._emptied[queue] = self._now.mono_ms
            self._store.put(Family.QUEUES, keys.queue_key(queue.slot, queue.number), queue.value())
        self._dirty.clear()
        self._ownership.end_turn()
        self._store.put(Family.META, keys.CLOCK, keys.clock_value(self._now.wall_ms))

    def configure(self, config: Config) -> None:
        """Take a new configuration; it holds from the next operation on."""
        self._config = config
        self._participant.serve_all()

    def router_gone(self, router: str, now: Instant) -> None:
        """A router process has ended.

        Its polls are over. Leases that it had not confirmed may or may not have reached their
        client, so they end at once but with the next attempt number: two workers never hold the
        same attempt. On its last attempt a job keeps its lease until it runs out.
        """
        self._advance(now)
        # All of them leave before any wake-up is passed on, or it would go to another of them.
        gone = [self._waiting.remove(op_id) for op_id in self._waiting.of_router(router)]
        for waiter in gone:
            if waiter is not None:
                self._serve_promised(waiter)
        self._dead.router_gone(router)
        for op_id in self._out.claims_of(router):
            for lease in self._out.unconfirmed(op_id):
                if lease.attempt < lease.max_attempts:
                    self._retry(lease, 0)
        self._routers.discard(router)
        self._participant.router_gone(router)
        self._ownership.router_gone(router)

    def router_came(self, router: str) -> None:
        """A router process lives: it can be asked."""
        self._routers.add(router)

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
        self._scheduled = SlotTimers(Family.SCHEDULED, store)
        self._dedup = DedupKeys(store)
        for key, _ in store.scan(Family.SLOTS, b"", b"\xff" * 8, _ALL):
            number = keys.slot_of_key(key)
            if number in self._ownership.owned:
                self._load_slot(number)
            else:
                self._ownership.sweep.add((number,))
        self._out.ordered()

    def _load_slot(self, number: int) -> None:
        """Take what is stored of a slot into memory; the caller puts the expiries in order."""
        store = self._store
        start, end = keys.slot_prefix(number), keys.slot_end(number)
        value = store.get(Family.SLOTS, start)
        if value is None:
            return
        self._slots[number] = Slot(number, *keys.read_slot_value(value))
        for key, value in store.scan(Family.QUEUES, start, end, _ALL):
            self._load_queue(*keys.read_queue_key(key), keys.read_queue_value(value))
        for key, value in store.scan(Family.LEASES, start, end, _ALL):
            record = keys.read_lease_value(value)
            self._out.load(self._by_number[number, record.queue], keys.read_lease_key(key)[1], record, self._now)
        self._scheduled.look(number)
        self._dedup.look(number)

    def _load_queue(self, slot: int, number: int, record: keys.QueueRecord) -> None:
        queue = Queue.read(slot, number, record, self._budget)
        if queue.closing_until_ms:
            self._closing.add(queue)
        if queue.is_empty:
            self._emptied[queue] = self._now.mono_ms
        self._queues[record.name] = queue
        self._by_number[slot, number] = queue
        if queue.dead:
            self._dead.load(queue)

    # -- enqueue ------------------------------------------------------------------------------

    def _enqueue(self, router: str, operation: Operation) -> None:
        op_id, _, entropy, jobs = operation
        if self._is_short(router, op_id) or self._participant.blocks(router, operation, jobs, self._now.mono_ms):
            return
        outcomes: list[EnqueueOutcome] = []
        stirred: dict[str, Queue] = {}
        name = ""  # that of no queue
        for index, job in enumerate(jobs):
            if job[0] != name:  # neighbours are mostly of one queue
                name = job[0]
                queue = self._queues.get(name)
                cap = self._config.effective(name).max_queue_depth
            key = job[4]
            outcome: EnqueueOutcome | None = None
            if queue is not None:
                if queue.closing_until_ms > self._now.wall_ms:
                    outcome = [Outcome.QUEUE_CLOSING]
                elif key is not None:
                    outcome = self._duplicate(queue, key)
            if outcome is None and cap is not None and (0 if queue is None else queue.depth) >= cap:
                outcome = [Outcome.QUEUE_FULL, cap]
            if outcome is None:
                if queue is None:
                    queue = self._new_queue(name)
                outcome = self._admit(queue, job, index, entropy, stirred)
            outcomes.append(outcome)
        self.results.append((router, [op_id, OK, outcomes]))
        self._serve_all(stirred.values())

    def _enqueue_atomic(self, router: str, operation: Operation) -> None:
        """All or nothing: capacity is checked for the batch as a whole, duplicates counted as new jobs."""
        op_id, _, entropy, jobs = operation
        if self._is_short(router, op_id):
            return
        refusals = self.refusals(jobs)
        if refusals:
            self.results.append((router, [op_id, OK, [False, refusals]]))
            return
        if self._participant.blocks(router, operation, jobs, self._now.mono_ms):
            return
        outcomes: list[EnqueueOutcome] = []
        stirred: dict[str, Queue] = {}
        for index, job in enumerate(jobs):
            name, key = job[0], job[4]
            queue = self._queues.get(name)
            duplicate = self._duplicate(queue, key) if key is not None and queue is not None else None
            if duplicate is None:
                duplicate = self._admit(queue or self._new_queue(name), job, index, entropy, stirred)
            outcomes.append(duplicate)
        self.results.append((router, [op_id, OK, [True, outcomes]]))
        self._serve_all(stirred.values())

    def _is_short(self, router: str, op_id: int) -> bool:
        if self.shortage is None:
            return False
        self.results.append((router, [op_id, INTERNAL, self.shortage]))
        return True

    def refusals(self, jobs: list[EnqueueJob]) -> list[tuple[int, EnqueueOutcome]]:
        """Why an atomic batch cannot be stored: every job at fault, with its index.

        Places that undecided transactions hold are none of the reasons; see `participant`.
        """
        wanted: dict[str, int] = {}
        for job in jobs:
            wanted[job[0]] = wanted.get(job[0], 0) + 1
        refused: dict[str, EnqueueOutcome] = {}
        for name, count in wanted.items():
            cap = self._config.effective(name).max_queue_depth
            queue = self._queues.get(name)
            if queue is not None and queue.closing_until_ms > self._now.wall_ms:
                refused[name] = [Outcome.QUEUE_CLOSING]
            elif cap is not None and (0 if queue is None else queue.depth - queue.reserved) + count > cap:
                refused[name] = [Outcome.QUEUE_FULL, cap]
        return [(index, refused[job[0]]) for index, job in enumerate(jobs) if job[0] in refused]

    def _duplicate(self, queue: Queue, key: str) -> EnqueueOutcome | None:
        job_id = self._dedup.find(queue, key, self._now.wall_ms)
        return None if job_id is None else [Outcome.DEDUPLICATED, job_id]

    def _admit(self, queue: Queue, job: EnqueueJob, index: int, entropy: bytes, stirred: dict[str, Queue]) -> bytes:
        """Store a job that nothing speaks against; queues that have something to hand out are noted."""
        name, priority, max_attempts, due_ms, key, body = job
        job_id = self.draw_id(queue, int.from_bytes(entropy[3 * index : 3 * index + 3], "big") & 0x3FFFF)
        self._place(queue, priority, max_attempts, due_ms, key, body, job_id)
        if queue.ready:
            stirred[name] = queue
        return job_id

    def draw_id(self, queue: Queue, random: int) -> bytes:
        """The id of a job to come, and with it its place in the order of its queue."""
        slot = self._slots[queue.slot]
        sequence = slot.next_sequence
        if sequence >= slot.sequence_limit:
            slot.sequence_limit += SEQUENCE_BLOCK
            self._put_slot(slot)
        slot.next_sequence = sequence + 1
        return job_ids.make(self._now.wall_ms, queue.slot, sequence, random)

    def _place(
        self, queue: Queue, priority: int, max_attempts: int, due_ms: int, key: str | None, body: bytes, job_id: bytes
    ) -> None:
        """A new job, ready or scheduled, and its idempotency key."""
        record = keys.job_value(job_id, 1, max_attempts, body)
        inverted = PRIORITIES - 1 - priority
        sequence = job_ids.sequence(job_id)
        if due_ms > self._now.wall_ms:
            self._schedule(queue, inverted, sequence, due_ms, record)
        else:
            self._make_ready(queue, inverted, sequence, record)
        if key is not None:
            window_ms = self._config.effective(queue.name).dedup_window_ms
            self._dedup.remember(queue, key, job_id, self._now.wall_ms + window_ms)

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

    def _serve_all(self, queues: Iterable[Queue]) -> None:
        for queue in queues:
            self._serve(queue)

    def _serve(self, queue: Queue) -> None:
        """Hand ready jobs of a queue to those who wait for them, first come, first served."""
        if queue.closing_until_ms > self._now.wall_ms or queue.slot in self._ownership.held_slots:
            return
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
        room = max_bytes
        held_slots = self._ownership.held_slots
        for name in names:
            queue = self._queues.get(name)
            if queue is None or not queue.ready or queue.closing_until_ms > self._now.wall_ms:
                continue
            if queue.slot in held_slots:  # a reserve that was parked before, and is served for another queue
                continue
            for lane in queue.lanes:
                if lane is None:
                    continue
                while len(taken) < max_jobs:
                    rows = lane.take(self._store, self._leases, max_jobs - len(taken), room, must=not taken)
                    if not rows:
                        break
                    room -= self._lease(queue, lane.inverted, rows, lease_ms, op_id, taken)
                if len(taken) == max_jobs or lane.has_first:
                    break
            else:
                continue
            break
        if taken:
            self._claims[op_id] = (router, [job.job_id for job in taken])
        return taken

    def _lease(
        self,
        queue: Queue,
        inverted: int,
        rows: list[tuple[int, bytes]],
        lease_ms: int,
        op_id: int,
        taken: list[LeasedJob],
    ) -> int:
        """Lease jobs that were taken from their lane; returns about how much of an answer they fill, in bytes."""
        size = 0
        slot, expires_ms = queue.slot, self._now.wall_ms + lease_ms
        leases: list[Lease] = []
        for sequence, record in rows:
            try:
                job_id, attempt, max_attempts = keys.read_job_value(record)
                if not job_ids.is_at(job_id, slot, sequence):
                    raise keys.CorruptRecord(f"it names job {job_ids.text(job_id)}")
            except keys.CorruptRecord as error:
                self._set_aside(queue, inverted, sequence, record, str(error))
                continue
            leases.append(Lease(queue, inverted, sequence, job_id, attempt, max_attempts, op_id))
            size += len(record) + JOB_OVERHEAD_BYTES
            # Without its constructor, which would cost as much as the lease.
            taken.append(tuple.__new__(LeasedJob, (job_id, attempt, expires_ms, record[keys.JOB_HEAD_BYTES :])))
        self._out.begin(leases, lease_ms, self._now)
        queue.ready -= len(rows)
        queue.leased += len(leases)
        self._touch(queue)
        return size

    def _confirm(self, router: str, operation: Operation) -> None:
        for op_id in operation[2]:
            self._claims.pop(op_id, None)
            for queue in self._dead.confirm(op_id):
                queue.dead -= 1
                self._touch(queue)

    def _give_back(self, router: str, operation: Operation) -> None:
        """Answers that never reach their client: the jobs are ready again as if nobody had reserved them."""
        for op_id in operation[2]:
            for lease in self._out.unconfirmed(op_id):
                self._return(lease)
            self._dead.give_back(op_id)

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
            self._make_room(lease.queue)

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
            self._out.set_end(lease, max(1, min(lease_ms, longest)), self._now)
            self.results.append((router, [op_id, OK, lease.expires_ms]))

    def _expire_leases(self, limit: int) -> bool:
        for _ in range(limit):
            lease = self._out.take_ended(self._now.mono_ms)
            if lease is None:
                return False
            self._expire(lease)
        return True

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
            value = keys.dead_value(lease.job_id, lease.attempt, cause, reason, record[keys.JOB_HEAD_BYTES :])
            self._dead.add(queue, self._now.wall_ms, lease.sequence, value)
            queue.dead += 1
        self._make_room(lease.queue)

    def _end_lease(self, lease: Lease) -> None:
        self._out.remove(lease)
        lease.queue.leased -= 1
        self._touch(lease.queue)

    # -- dead letters -------------------------------------------------------------------------

    def _drain(self, router: str, operation: Operation) -> None:
        op_id, _, name, count, max_bytes = operation
        queue = None if name is None else self._queues.get(name)
        letters = []
        if name is None or queue is not None:
            letters = self._dead.hand_out(router, op_id, queue, count, max_bytes)
        self.results.append((router, [op_id, OK, letters]))

    def _keep(self, router: str, operation: Operation) -> None:
        self._dead.keep(operation[2], operation[3])
        self.results.append((router, [operation[0], OK, None]))

    def _expire_dead_letters(self, limit: int) -> bool:
        before_ms = self._now.wall_ms - self._config.storage.dead_letter_retention_ms
        queues = self._dead.expire(before_ms, limit)
        for queue in queues:
            queue.dead -= 1
            self._touch(queue)
        return bool(queues)

    def _expire_keys(self, limit: int) -> bool:
        removed = self._dedup.expire(self._now.wall_ms, limit)
        for place in removed:
            self._by_number[place].keys -= 1
            self._touch(self._by_number[place])
        return bool(removed)

    def _known(self, router: str, operation: Operation) -> None:
        """Strict mode lets undeclared queues pass that came to be before it: those with jobs or dead letters."""
        found = [self._queues.get(name) for name in operation[2]]
        known = [queue is not None and bool(queue.depth or queue.dead) for queue in found]
        self.results.append((router, [operation[0], OK, known]))

    # -- transactions (the rules are in `participant`) -----------------------------------------

    def _prepare(self, router: str, operation: Operation) -> None:
        op_id, _, transaction, home, entropy, jobs = operation
        if self._is_short(router, op_id):
            return
        self.results.append((router, [op_id, OK, self._participant.prepare(router, transaction, home, entropy, jobs)]))

    def _make_room(self, queue: Queue) -> None:
        """Jobs of a queue are gone for good: an enqueue may be waiting for a place."""
        if self._participant.lines:
            self._participant.serve(queue.name)

    def give_up(self, router: str, operation: Operation) -> None:
        text = "an atomic batch that is not decided holds a key or the last places of a queue: nothing was stored"
        self.results.append((router, [operation[0], UNAVAILABLE, text]))

    def contested(self, name: str) -> Queue | None:
        queue = self._queues.get(name)
        if queue is None or not queue.reserved or queue.closing_until_ms > self._now.wall_ms:
            return None
        return queue

    def cap(self, name: str) -> int | None:
        return self._config.effective(name).max_queue_depth

    def duplicate(self, name: str, key: str) -> EnqueueOutcome | None:
        queue = self._queues.get(name)
        return None if queue is None else self._duplicate(queue, key)

    def queue_for(self, name: str) -> Queue:
        return self._queues.get(name) or self._new_queue(name)

    def place(self, jobs: Iterable[tuple[EnqueueJob, bytes]]) -> None:
        stirred: dict[str, Queue] = {}
        for (name, priority, max_attempts, due_ms, key, body), job_id in jobs:
            queue = self.queue_for(name)
            self._place(queue, priority, max_attempts, due_ms, key, body, job_id)
            if queue.ready:
                stirred[name] = queue
        self._serve_all(stirred.values())

    def again(self, router: str, operation: Operation) -> None:
        self._ownership.apply_if_ours(router, operation)

    # -- slots that come and go (the rules are in `ownership`) ----------------------------------

    def map_changed(self, epoch: int, owners: Sequence[int], now: Instant) -> None:
        """The slot map was replaced."""
        self._advance(now)
        self._ownership.map_changed(epoch, owners)

    def apply_here(self, router: str, operation: Operation) -> None:
        self._handlers[operation[1]](router, operation)

    def never_applied(self, operation: Operation) -> None:
        if operation[1] == Op.RESERVE and operation[_SETTLES]:  # the wake-up was not of use
            self._remove_waiter(operation[_SETTLES])

    def refuse_moved(self, router: str, operation: Operation) -> None:
        self.never_applied(operation)
        self.results.append((router, [operation[0], MOVED, self.epoch]))

    def load_slots(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._load_slot(slot)
        self._out.ordered()

    def drop_slots(self, slots: frozenset[int]) -> None:
        self._out.forget(slots)
        for queue in [queue for queue in self._queues.values() if queue.slot in slots]:
            self._drop_from_memory(queue)
        for op_id in self._waiting.about(slots):
            waiter = self._waiting.remove(op_id)
            assert waiter is not None
            if waiter.promised is None:  # one that was woken has had its result
                self.results.append((waiter.router, [op_id, MOVED, self.epoch]))
        for router, operation in self._participant.drop_about(slots):
            self.refuse_moved(router, operation)
        self._scheduled.forget(slots)
        self._dedup.forget(slots)
        for slot in slots:
            self._slots.pop(slot, None)

    def is_open(self, slots: frozenset[int]) -> bool:
        if self._out.has_unconfirmed(slots) or self._dead.has_handed_out(slots):
            return True
        return any(queue.reserved for queue in self._queues.values() if queue.slot in slots)

    def gives_back_loaded(self, op_ids: list[int], slots: frozenset[int]) -> bool:
        return self._out.are_loaded(op_ids, slots)

    def too_late(self, router: str, operation: Operation) -> None:
        self.results.append((router, [operation[0], OK, [Vote.TOO_LATE, None]]))

    def serve_slots(self, slots: frozenset[int]) -> None:
        self._serve_all([queue for queue in self._queues.values() if queue.slot in slots and queue.ready])

    def not_before(self, wall_ms: int) -> None:
        self._advance(Instant(wall_ms, self._now.mono_ms))

    def _move(self, router: str, operation: Operation) -> None:
        try:
            if self.shortage is not None and operation[2] == MoveCommand.RECEIVE:
                raise MoveRefused(f"shard {self._shard} takes no slots: {self.shortage}")
            data = self._ownership.step(router, operation[2], operation[3:])
        except MoveRefused as refused:
            self.results.append((router, [operation[0], FAILED_PRECONDITION, str(refused)]))
            return
        self.results.append((router, [operation[0], OK, data]))

    # -- for operators ------------------------------------------------------------------------

    def _make_admin(self) -> Admin:
        holdings = Holdings(
            store=self._store,
            queues=self._queues,
            by_number=self._by_number,
            slots=self._slots,
            leases=self._leases,
            waiting=self._waiting,
            scheduled=self._scheduled,
            dead=self._dead,
            dedup=self._dedup,
        )
        verification = Verification(holdings, self._ownership, self._now)
        return Admin(holdings, self, {AdminCommand.SLOTS: verification.loads, AdminCommand.VERIFY: verification.verify})

    def _administer(self, router: str, operation: Operation) -> None:
        status, data = self._admin.run(operation[2], operation[3:], self._now)
        self.results.append((router, [operation[0], status, data]))

    def close_queue(self, queue: Queue, until_ms: int) -> None:
        """Until then, wall time, the queue takes no jobs and hands none out. Leases of it can be ended."""
        queue.closing_until_ms = until_ms
        self._closing.add(queue)
        self._touch(queue)
        self._make_room(queue)

    def requeue(self, queue: Queue, inverted: int, sequence: int, record: bytes) -> None:
        """A dead letter is a job again, at its place among the ready ones."""
        self._make_ready(queue, inverted, sequence, record)
        self._serve(queue)

    def changed(self, queue: Queue) -> None:
        """Counters of a queue were changed from outside."""
        self._touch(queue)

    def purged(self, queue: Queue) -> None:
        """Jobs of a queue were removed."""
        self._touch(queue)
        self._make_room(queue)

    def open_transactions(self) -> int:
        return self._participant.open_count

    def drop_queue(self, queue: Queue) -> None:
        """Forget a queue of which nothing is stored but its record. Who waits for it waits for its name."""
        self._drop_from_memory(queue)
        self._slots[queue.slot].changes += 1
        self._store.delete(Family.QUEUES, keys.queue_key(queue.slot, queue.number))

    def _drop_from_memory(self, queue: Queue) -> None:
        for lane in queue.lanes:
            if lane is not None:
                lane.forget()
        self._dead.forget(queue)
        self._closing.discard(queue)
        self._emptied.pop(queue, None)
        if queue.dirty:
            self._dirty.remove(queue)
            queue.dirty = False
        del self._queues[queue.name]
        del self._by_number[queue.slot, queue.number]

    def _reopen(self) -> bool:
        """Whoever was deleting a queue has not been heard of for too long: it is a queue like any other again."""
        for queue in [queue for queue in self._closing if queue.closing_until_ms <= self._now.wall_ms]:
            queue.closing_until_ms = 0
            self._closing.discard(queue)
            self._touch(queue)
            self._serve(queue)
        return False

    def _retire(self, limit: int) -> bool:
        """Queues that have been empty for a while go, or names that are used once would stay for ever."""
        due_ms = self._now.mono_ms - RETIRE_AFTER_MS
        for _ in range(limit):
            queue, emptied_ms = next(iter(self._emptied.items()), (None, 0))
            if queue is None or emptied_ms > due_ms:
                return False
            del self._emptied[queue]
            if queue.is_empty:
                self.drop_queue(queue)
        return True

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
        self._serve_all(stirred.values())
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


# Where an operation RESERVE says which wake-up it settles.
_SETTLES = 7
