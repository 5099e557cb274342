"""What operators look at and do: the commands of `Op.ADMIN`.

Each command is one operation, so it is applied in a turn like any other, and it is bounded: it looks
at no more than SCAN_RECORDS records or SCAN_BYTES, about a few milliseconds of work, and what needs
more goes on from a cursor in the next operation, with those of clients in between. A cursor is opaque
to whoever passes it on, and good for the process that made it and its successors.

Deleting a queue. CLOSE makes it closing for CLOSING_MS, during which it takes no jobs and hands none
out; every CLOSE and REMOVE of the same deletion moves that on. When no job of it is in flight, REMOVE
takes away, step by step, scheduled jobs, ready jobs, dead letters and idempotency records, and in the
last step the queue itself. The deletion that stops in between leaves a queue with fewer jobs, which
is closing for a while; another deletion finishes the work.

A job of an undecided transaction is in flight as well: CLOSE refuses or waits for the decision, and
REMOVE takes nothing away beside one. A closing queue takes no new promises but keeps those it made:
what is committed meanwhile is stored, with its keys, and goes with the rest of the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from struct import Struct
from typing import Any, NamedTuple, Protocol

from common import job_ids
from common.wire import AdminCommand, JobRow, JobState, QueueRow, Totals
from shard import keys
from shard.dead_letters import DeadLetters
from shard.dedup import DedupKeys
from shard.ready import EXHAUSTED, Lane
from shard.state import PRIORITIES, Instant, Lease, Queue, Slot
from shard.store import Family, Store
from shard.timers import SlotTimers
from shard.waiting import WaitingRoom

# gRPC status codes of results.
OK = 0
NOT_FOUND = 5
FAILED_PRECONDITION = 9
ABORTED = 10
UNIMPLEMENTED = 12

# What one operation looks at, at most.
SCAN_RECORDS = 1_000
SCAN_BYTES = 1024 * 1024
# Queues of which one operation looks at a job of each priority: up to ten scans or reads each.
QUEUES_PAGE = 100
# How long a queue is closing after the last sign of its deletion, in ms of wall time; from the
# catalogue of rejections (QueueClosing).
CLOSING_MS = 30_000

_STAGE_KEY = Struct(">B")
_PURGE_HEAD = Struct(">IQ")

# Stages of a purge and of a deletion, in this order: a scheduled job that falls due meanwhile is then
# found among the ready ones.
_SCHEDULED, _READY, _DEAD, _KEYS = range(4)


class Holdings(NamedTuple):
    """The records of a shard and what its machine has in memory of them."""

    store: Store
    queues: Mapping[str, Queue]
    by_number: Mapping[tuple[int, int], Queue]
    slots: Mapping[int, Slot]
    leases: Mapping[bytes, Lease]
    waiting: WaitingRoom
    scheduled: SlotTimers
    dead: DeadLetters
    dedup: DedupKeys


class Mover(Protocol):
    """What only the machine does."""

    def close_queue(self, queue: Queue, until_ms: int) -> None:
        """Until then, wall time, the queue takes no jobs and hands none out."""

    def requeue(self, queue: Queue, inverted: int, sequence: int, record: bytes) -> None:
        """A dead letter is a job again; the caller has deleted its record."""

    def changed(self, queue: Queue) -> None:
        """Counters of a queue were changed."""

    def purged(self, queue: Queue) -> None:
        """Jobs of a queue were removed, so that there may be room for others."""

    def drop_queue(self, queue: Queue) -> None:
        """Forget a queue of which nothing is stored but its record."""

    def open_transactions(self) -> int:
        """How many transactions are kept that others need."""


class Removed(NamedTuple):
    """What one step has removed, and where the next one begins."""

    jobs: int
    dead: int
    keys: int
    next: bytes | None


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Admin:
    """The commands of operators on one shard."""

    def __init__(self, holdings: Holdings, mover: Mover, others: Mapping[str, Callable[..., Any]]) -> None:
        """`others` are the commands that are not in here."""
        self._store = holdings.store
        self._holdings = holdings
        self._mover = mover
        self._now = Instant(0, 0)
        self._commands: dict[str, Callable[..., Any]] = {
            AdminCommand.QUEUES: self._queues,
            AdminCommand.QUEUE: self._queue_row,
            AdminCommand.TOTALS: self._totals,
            AdminCommand.JOBS: self._jobs,
            AdminCommand.DEAD: self._all_dead,
            AdminCommand.FIND: self._find,
            AdminCommand.PURGE: self._purge,
            AdminCommand.CLOSE: self._close,
            AdminCommand.REMOVE: self._remove,
            AdminCommand.REQUEUE: self._requeue,
            AdminCommand.DELETE_DEAD: self._delete_dead,
            **others,
            AdminCommand.TRANSACTIONS: self._mover.open_transactions,
        }

    def run(self, command: str, arguments: list[Any], now: Instant) -> tuple[int, Any]:
        """Status and data of one command (see `common.wire.AdminCommand`)."""
        self._now = now
        handler = self._commands.get(command)
        if handler is None:
            return UNIMPLEMENTED, f"this shard has no command {command!r}"
        try:
            return OK, handler(*arguments)
        except _Refused as refused:
            return refused.status, str(refused)

    def _queue(self, name: str) -> Queue:
        queue = self._holdings.queues.get(name)
        if queue is None:
            raise _Refused(NOT_FOUND, f"queue {name!r} is unknown: nothing is stored under this name")
        return queue

    # -- looking at queues --------------------------------------------------------------------

    def _queues(self, cursor: bytes) -> tuple[list[QueueRow], bytes | None]:
        found, following = self._some_queues(cursor, QUEUES_PAGE)
        return [self._row(queue) for queue in found], following

    def _queue_row(self, name: str) -> QueueRow:
        return self._row(self._queue(name))

    def _totals(self, cursor: bytes) -> tuple[Totals, bytes | None]:
        found, following = self._some_queues(cursor, SCAN_RECORDS)
        return Totals(
            queues=len(found),
            ready=sum(queue.ready for queue in found),
            scheduled=sum(queue.scheduled for queue in found),
            leased=sum(queue.leased for queue in found),
            dead=sum(queue.dead for queue in found),
            keys=sum(queue.keys for queue in found),
            waiting=0 if cursor else len(self._holdings.waiting),
        ), following

    def _some_queues(self, cursor: bytes, limit: int) -> tuple[list[Queue], bytes | None]:
        rows = self._store.scan(Family.QUEUES, cursor, _END, limit)
        # Rows that arrive with their slot, or are left of one that has gone, are of no queue here.
        found = [self._holdings.by_number.get(keys.read_queue_key(key)) for key, _ in rows]
        return [queue for queue in found if queue is not None], _after(rows) if len(rows) == limit else None

    def _row(self, queue: Queue) -> QueueRow:
        return QueueRow(
            name=queue.name,
            slot=queue.slot,
            number=queue.number,
            ready=queue.ready,
            scheduled=queue.scheduled,
            leased=queue.leased,
            dead=queue.dead,
            keys=queue.keys,
            waiting=self._holdings.waiting.waiting_for(queue.name),
            oldest_ms=self._oldest_ms(queue),
            closing_until_ms=queue.closing_until_ms if self._is_closing(queue) else 0,
        )

    def _oldest_ms(self, queue: Queue) -> int:
        lanes = [lane for lane in queue.lanes if lane is not None] if queue.ready else []
        records = [lane.peek(self._store, self._holdings.leases) for lane in lanes]
        return min((job_ids.accepted_at_ms(record[:16]) for record in records if record is not None), default=0)

    def _is_closing(self, queue: Queue) -> bool:
        return queue.closing_until_ms > self._now.wall_ms

    # -- looking at jobs ----------------------------------------------------------------------

    def _jobs(self, name: str, state: int, cursor: bytes, limit: int) -> tuple[list[JobRow], bytes | None]:
        queue = self._queue(name)
        if state == JobState.READY:
            return self._ready_page(queue, cursor, limit)
        if state == JobState.DEAD:
            start = max(cursor, keys.queue_key(queue.slot, queue.number))
            return self._page(Family.DEAD, start, keys.queue_end(queue.slot, queue.number), limit, self._dead_row)
        start = cursor or self._start_of(queue, state)
        if state == JobState.SCHEDULED:
            return self._page(
                Family.SCHEDULED, start, keys.slot_end(queue.slot), limit, _only(queue, self._scheduled_row)
            )
        return self._page(Family.LEASES, start, keys.slot_end(queue.slot), limit, _only(queue, self._leased_row))

    def _start_of(self, queue: Queue, state: int) -> bytes:
        """Where a slot's records of a state begin; its end when the queue has none."""
        if state == JobState.SCHEDULED:
            start = self._holdings.scheduled.start_of(queue.slot) if queue.scheduled else None
            return keys.slot_end(queue.slot) if start is None else start
        return keys.slot_prefix(queue.slot) if queue.leased else keys.slot_end(queue.slot)

    def _all_dead(self, cursor: bytes, limit: int) -> tuple[list[JobRow], bytes | None]:
        return self._page(Family.DEAD, cursor, _END, limit, self._dead_row)

    def _page(
        self,
        family: Family,
        start: bytes,
        end: bytes,
        limit: int,
        read: Callable[[bytes, bytes], JobRow | None],
    ) -> tuple[list[JobRow], bytes | None]:
        """Up to `limit` of what `read` makes of the records from `start` on; what it makes None of is passed over."""
        rows, following = self._scan(family, start, end)
        found: list[JobRow] = []
        for key, value in rows:
            try:
                row = read(key, value)
            except keys.CorruptRecord:  # reported when its turn comes; nothing can be shown of it
                continue
            if row is not None:
                found.append(row)
                if len(found) == limit:
                    return found, key + b"\x00"
        return found, following

    def _scan(self, family: Family, start: bytes, end: bytes) -> tuple[list[tuple[bytes, bytes]], bytes | None]:
        """Records from `start` on, as many as one operation may look at, and where the rest begins if there is one."""
        rows = self._store.scan(family, start, end, SCAN_RECORDS, SCAN_BYTES)
        return rows, _after(rows) if _is_full(rows) else None

    def _ready_page(self, queue: Queue, cursor: bytes, limit: int) -> tuple[list[JobRow], bytes | None]:
        """In serving order, one priority per step: from the first ready job, not over what has been served."""
        first = cursor[_INVERTED_AT] if len(cursor) > _INVERTED_AT else 0
        for lane in queue.lanes[first:]:
            head = None if lane is None else lane.head()
            if lane is None or head is None:
                continue
            start = max(cursor, keys.job_key(queue.slot, queue.number, lane.inverted, head))
            end = keys.lane_end(queue.slot, queue.number, lane.inverted)
            found, following = self._page(Family.JOBS, start, end, limit, self._ready_row)
            if following is None and lane.inverted < PRIORITIES - 1:
                following = end
            return found, following
        return [], None

    def _ready_row(self, key: bytes, record: bytes) -> JobRow | None:
        slot, number, _, _ = keys.read_job_key(key)
        if record[:16] in self._holdings.leases:
            return None
        return _job_row(self._holdings.by_number[slot, number], JobState.READY, record, 0)

    def _scheduled_row(self, key: bytes, record: bytes) -> JobRow | None:
        slot, due_ms, number, _, _ = keys.read_scheduled_key(key)
        return _job_row(self._holdings.by_number[slot, number], JobState.SCHEDULED, record, due_ms)

    def _leased_row(self, key: bytes, value: bytes) -> JobRow | None:
        lease = self._holdings.leases.get(keys.read_lease_value(value).job_id)
        return None if lease is None else self._row_of_lease(lease)

    def _row_of_lease(self, lease: Lease) -> JobRow | None:
        record = self._store.get(Family.JOBS, lease.job_key())
        return None if record is None else _job_row(lease.queue, JobState.LEASED, record, lease.expires_ms)

    def _dead_row(self, key: bytes, value: bytes) -> JobRow | None:
        slot, number, failed_at_ms, _ = keys.read_dead_key(key)
        queue = self._holdings.by_number.get((slot, number))
        if queue is None:  # of a slot that arrives, or has gone
            return None
        letter = keys.read_dead_value(value)
        return JobRow(
            queue=queue.name,
            job_id=letter.job_id,
            state=JobState.DEAD,
            attempt=letter.final_attempt,
            at_ms=failed_at_ms,
            cause=letter.cause,
            reason=letter.reason,
            body=letter.body,
        )

    # -- looking for one job --------------------------------------------------------------------

    def _find(self, job_id: bytes, cursor: bytes) -> tuple[JobRow | None, bytes | None]:
        """An id says the slot and the place in it, but neither the queue nor the state: those are tried in turn.

        A job that changes its state meanwhile can be missed; then it is found by asking again.
        """
        stage, start = (cursor[0], cursor[1:]) if cursor else (JobState.READY.value, b"")
        row, following = self._FIND_IN[stage](self, job_id, start)
        if row is not None:
            return row, None
        if following is None and stage != JobState.DEAD:
            stage, following = _NEXT_TO_FIND[stage], b""
        return None, None if following is None else _STAGE_KEY.pack(stage) + following

    def _find_in_queues(self, job_id: bytes, start: bytes) -> tuple[JobRow | None, bytes | None]:
        """Leased, or ready: then its key is known but for the queue and the priority."""
        lease = self._holdings.leases.get(job_id)
        if lease is not None:
            return self._row_of_lease(lease), None
        slot, sequence = job_ids.slot(job_id), job_ids.sequence(job_id)
        rows = self._store.scan(Family.QUEUES, start or keys.slot_prefix(slot), keys.slot_end(slot), QUEUES_PAGE)
        for key, _ in rows:
            queue = self._holdings.by_number[keys.read_queue_key(key)]
            for lane in queue.lanes:
                if lane is not None:
                    job_key = keys.job_key(slot, queue.number, lane.inverted, sequence)
                    record = self._store.get(Family.JOBS, job_key)
                    if record is not None and record[:16] == job_id:
                        return self._ready_row(job_key, record), None
        return None, _after(rows) if len(rows) == QUEUES_PAGE else None

    def _find_scheduled(self, job_id: bytes, start: bytes) -> tuple[JobRow | None, bytes | None]:
        slot = job_ids.slot(job_id)
        begin = start or self._holdings.scheduled.start_of(slot)
        if begin is None:
            return None, None
        rows, following = self._scan(Family.SCHEDULED, begin, keys.slot_end(slot))
        for key, record in rows:
            if record[:16] == job_id:
                return self._scheduled_row(key, record), None
        return None, following

    def _find_dead(self, job_id: bytes, start: bytes) -> tuple[JobRow | None, bytes | None]:
        slot = job_ids.slot(job_id)
        rows, following = self._scan(Family.DEAD, start or keys.slot_prefix(slot), keys.slot_end(slot))
        for key, value in rows:
            if value[:16] == job_id:
                return self._dead_row(key, value), None
        return None, following

    _FIND_IN: Mapping[int, Callable[[Admin, bytes, bytes], tuple[JobRow | None, bytes | None]]] = {
        JobState.READY: _find_in_queues,
        JobState.SCHEDULED: _find_scheduled,
        JobState.DEAD: _find_dead,
    }

    # -- purging and deleting -------------------------------------------------------------------

    def _purge(self, name: str, cursor: bytes) -> tuple[int, bytes | None]:
        """Remove the ready and scheduled jobs that were there at the first step.

        A job of an undecided transaction is not there yet, and the purge does not wait for it. One that
        is committed between two steps has its place from before them, and may go with the others.
        """
        queue = self._holdings.queues.get(name) if cursor else self._queue(name)
        if cursor:
            number, below = _PURGE_HEAD.unpack_from(cursor)
            if queue is None or queue.number != number:
                return 0, None  # it was deleted, or is empty and was retired
            rest = cursor[_PURGE_HEAD.size :]
        else:
            assert queue is not None
            below = self._holdings.slots[queue.slot].next_sequence
            rest = b""
        removed = self._remove_step(queue, rest, below, _READY)
        self._mover.purged(queue)
        following = None if removed.next is None else _PURGE_HEAD.pack(queue.number, below) + removed.next
        return removed.jobs, following

    def _close(self, name: str, number: int, may_wait: bool) -> tuple[int, int]:
        queue = self._queue(name)
        if number not in (0, queue.number):
            raise _Refused(NOT_FOUND, f"queue {name!r} was deleted meanwhile, and there is a new one of this name")
        in_flight = queue.leased + queue.reserved
        if in_flight and not may_wait:
            text = f"queue {name!r} has jobs in flight, {queue.leased}"
            if queue.reserved:
                text += f", and jobs of atomic batches that are not decided, {queue.reserved}"
            raise _Refused(FAILED_PRECONDITION, f"{text}: let them finish, or delete with wait")
        self._mover.close_queue(queue, self._now.wall_ms + CLOSING_MS)
        return queue.number, in_flight

    def _remove(self, name: str, number: int, cursor: bytes) -> Removed:
        """One step of a deletion. Only of a closing queue: what it accepts after it has reopened stays."""
        queue = self._queue(name)
        if queue.number != number:
            raise _Refused(NOT_FOUND, f"queue {name!r} was deleted meanwhile, and there is a new one of this name")
        if not self._is_closing(queue):
            raise _Refused(ABORTED, f"queue {name!r} takes jobs again, its deletion paused for too long: run it again")
        if queue.reserved:  # promised in such a pause, before another deletion closed it again
            text = f"queue {name!r} has jobs of atomic batches that are not decided, {queue.reserved}: run it again"
            raise _Refused(ABORTED, text)
        self._mover.close_queue(queue, self._now.wall_ms + CLOSING_MS)
        removed = self._remove_step(queue, cursor, keys.SEQUENCE_END, _KEYS)
        if removed.next is None:
            if queue.depth or queue.dead or queue.keys:
                text = f"queue {name!r} took jobs while it was being deleted, because that paused: run it again"
                raise _Refused(ABORTED, text)
            self._mover.drop_queue(queue)
        return removed

    def _remove_step(self, queue: Queue, cursor: bytes, below: int, last: int) -> Removed:
        """One bounded step through the stages up to `last`; jobs of `below` or later stay."""
        stage, start = (cursor[0], cursor[1:]) if cursor else (_SCHEDULED, b"")
        jobs = dead = dedup = 0
        if stage == _SCHEDULED:
            jobs, following = self._remove_scheduled(queue, start, below)
        elif stage == _READY:
            jobs, following = self._remove_ready(queue, below)
        elif stage == _DEAD:
            begin = start or keys.queue_key(queue.slot, queue.number)
            dead, following = self._holdings.dead.clear(queue, begin, SCAN_RECORDS, SCAN_BYTES)
            queue.dead -= dead
        else:
            begin = start or keys.queue_key(queue.slot, queue.number)
            dedup, following = self._holdings.dedup.clear(queue, begin, SCAN_RECORDS)
            queue.keys -= dedup
        if following is None and stage < last:
            stage, following = stage + 1, b""
        return Removed(jobs, dead, dedup, None if following is None else _STAGE_KEY.pack(stage) + following)

    def _remove_scheduled(self, queue: Queue, start: bytes, below: int) -> tuple[int, bytes | None]:
        rows, following = self._scan(
            Family.SCHEDULED, start or self._start_of(queue, JobState.SCHEDULED), keys.slot_end(queue.slot)
        )
        removed = 0
        for key, _ in rows:
            _, _, number, _, sequence = keys.read_scheduled_key(key)
            if number == queue.number and sequence < below:
                self._store.delete(Family.SCHEDULED, key)
                removed += 1
        queue.scheduled -= removed
        return removed, following if queue.scheduled else None

    def _remove_ready(self, queue: Queue, below: int) -> tuple[int, bytes | None]:
        """The first ready jobs of the highest priority that has any. Leased ones lie among them and stay."""
        lane = _first_lane(queue, below)
        if lane is None:
            return 0, None
        head = lane.head()
        assert head is not None
        start = keys.job_key(queue.slot, queue.number, lane.inverted, head)
        end = keys.lane_end(queue.slot, queue.number, lane.inverted)
        if below != keys.SEQUENCE_END:
            end = keys.job_key(queue.slot, queue.number, lane.inverted, below)
        rows = self._store.scan(Family.JOBS, start, end, SCAN_RECORDS, SCAN_BYTES)
        removed = self._delete_unleased(rows, self._holdings.leases)
        queue.ready -= removed
        if _is_full(rows):
            lane.skip_to(keys.read_job_key(rows[-1][0])[3] + 1)
        else:
            lane.skip_to(EXHAUSTED if below == keys.SEQUENCE_END else below)
        return removed, b"" if _first_lane(queue, below) is not None else None

    def _delete_unleased(self, rows: Iterable[tuple[bytes, bytes]], leased: Container[bytes]) -> int:
        removed = 0
        for key, record in rows:
            if record[:16] not in leased:
                self._store.delete(Family.JOBS, key)
                removed += 1
        return removed

    # -- dead letters ---------------------------------------------------------------------------

    def _requeue(self, name: str, letters: list[tuple[int, bytes, int, int]]) -> list[bytes]:
        """Dead letters are ready again under their old ids, with their first attempt before them.

        Priority and max_attempts are the caller's to say: they are in the body, which no shard reads.
        Capacity is not asked: an operator may go over it. What is not there (any more), or is being
        handed out, is passed over.
        """
        queue = self._queue(name)
        if self._is_closing(queue):
            raise _Refused(FAILED_PRECONDITION, f"queue {name!r} is being deleted")
        requeued: list[bytes] = []
        for failed_at_ms, job_id, priority, max_attempts in letters:
            letter = self._take_dead(queue, failed_at_ms, job_id)
            if letter is not None:
                record = keys.job_value(job_id, 1, max_attempts, letter.body)
                self._mover.requeue(queue, PRIORITIES - 1 - priority, job_ids.sequence(job_id), record)
                requeued.append(job_id)
        return requeued

    def _delete_dead(self, name: str, letters: list[tuple[int, bytes]]) -> int:
        queue = self._queue(name)
        taken = [self._take_dead(queue, failed_at_ms, job_id) for failed_at_ms, job_id in letters]
        return sum(letter is not None for letter in taken)

    def _take_dead(self, queue: Queue, failed_at_ms: int, job_id: bytes) -> keys.DeadRecord | None:
        """Delete a dead letter, and return what it was; None when it is not there or is being handed out."""
        key = keys.dead_key(queue.slot, queue.number, failed_at_ms, job_ids.sequence(job_id))
        value = self._store.get(Family.DEAD, key)
        if value is None or self._holdings.dead.is_handed_out(key):
            return None
        letter = keys.read_dead_value(value)
        if letter.job_id != job_id:
            return None
        self._holdings.dead.delete(queue, key)
        queue.dead -= 1
        self._mover.changed(queue)
        return letter


# Behind every key.
_END = b"\xff" * 64
# Where a key of JOBS says the priority.
_INVERTED_AT = 6
_NEXT_TO_FIND = {JobState.READY.value: JobState.SCHEDULED.value, JobState.SCHEDULED.value: JobState.DEAD.value}


def _after(rows: list[tuple[bytes, bytes]]) -> bytes:
    return rows[-1][0] + b"\x00"


def _is_full(rows: list[tuple[bytes, bytes]]) -> bool:
    """Whether a scan ended by its limits, so that there may be more."""
    return len(rows) == SCAN_RECORDS or sum(len(key) + len(value) for key, value in rows) >= SCAN_BYTES


def _only(queue: Queue, read: Callable[[bytes, bytes], JobRow | None]) -> Callable[[bytes, bytes], JobRow | None]:
    """For families in which the queues of a slot are mixed."""

    def read_own(key: bytes, value: bytes) -> JobRow | None:
        row = read(key, value)
        return row if row is not None and row.queue == queue.name else None

    return read_own


def _job_row(queue: Queue, state: JobState, record: bytes, at_ms: int) -> JobRow:
    """Raises CorruptRecord."""
    job_id, attempt, _ = keys.read_job_value(record)
    return JobRow(
        queue=queue.name,
        job_id=job_id,
        state=state,
        attempt=attempt,
        at_ms=at_ms,
        cause=0,
        reason=None,
        body=record[keys.JOB_HEAD_BYTES :],
    )


def _first_lane(queue: Queue, below: int) -> Lane | None:
    """The highest priority that may have a ready job whose sequence is below that."""
    for lane in queue.lanes:
        head = None if lane is None else lane.head()
        if head is not None and head < below:
            return lane
    return None
