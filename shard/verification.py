"""Whether all that a shard stores is as it should be, and how much its slots hold.

VERIFY goes through everything that is stored, slot by slot and in a slot family by family. A record is
compared with those that belong to it: that takes one turn, in which nothing changes, so what is found
there is so. The counters of a queue are compared with what there is when the whole slot has been looked
at. A slot that is too large for one step can change between two of them, and then what was counted means
nothing: it is counted again, and after RECOUNTS_MAX times its counters are left out. So a finding is never
false, and a slot that is in use all the time may be verified only when it is at rest.

What arrives with a slot that moves here, and what is left of one that has moved away and is being deleted,
is of no queue here and is passed over.

A cursor holds all that a verification knows between two steps. It is good for a successor of this process.

SLOTS counts jobs as the queues do. Their bytes are estimated from some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import error as StructError
from typing import Protocol

import msgpack

from common import job_ids
from common.slots import slot_of
from shard import keys
from shard.admin import Holdings
from shard.migration import FAMILIES
from shard.state import Instant, Lease, Queue, Slot
from shard.store import Family

# What one step looks at, at most: some 20 ms of work.
STEP_ROWS = 5_000
STEP_BYTES = 4 * 1024 * 1024
# What a scan that finds nothing costs, in rows.
SCAN_ROWS = 5
# How often a slot that has changed while it was being counted is counted again.
RECOUNTS_MAX = 2
# Jobs of a slot whose size is looked at, and their bytes at most.
SAMPLE_JOBS = 200
SAMPLE_BYTES = 256 * 1024
# Queues of a slot from which they are taken, the largest ones.
SAMPLE_QUEUES = 8
# What an idempotency key takes with its timer, in bytes, about.
KEY_BYTES = 100

_STATES = ("ready", "scheduled", "leased", "dead", "keys")
_READY, _SCHEDULED, _LEASED, _DEAD, _KEYS = range(len(_STATES))
_NOUNS = ("ready jobs", "scheduled jobs", "leased jobs", "dead letters", "idempotency keys")
# What reading a damaged record raises.
_UNREADABLE = (keys.CorruptRecord, StructError, ValueError, TypeError, IndexError)


class Owner(Protocol):
    """Which slots are here."""

    @property
    def epoch(self) -> int: ...

    @property
    def owned(self) -> frozenset[int]: ...

    def is_on_the_way(self, slot: int) -> bool:
        """Whether a slot that is not owned is arriving, or is being deleted."""


class _Progress:
    """How far a verification has come: `start` in a family of a slot, with what was counted before it."""

    def __init__(self, slot: int = 0) -> None:
        self.slot = slot
        self.family = 0  # its place in FAMILIES
        self.start = b""  # b"": where the slot begins
        self.recounts = 0
        self.mark: list[int] = []  # what `_mark` said when counting began
        self.counts: dict[int, list[int]] = {}  # by number of the queue, in order of _STATES

    @classmethod
    def read(cls, cursor: bytes) -> _Progress:
        found = cls()
        if cursor:
            unpacked = msgpack.unpackb(cursor, strict_map_key=False)
            found.slot, found.family, found.start, found.recounts, found.mark, found.counts = unpacked
        return found

    def cursor(self) -> bytes:
        packed: bytes = msgpack.packb((self.slot, self.family, self.start, self.recounts, self.mark, self.counts))
        return packed

    @property
    def is_at_start(self) -> bool:
        return not self.family and not self.start

    def count_again(self) -> None:
        self.family, self.start = 0, b""
        self.recounts += 1
        self.counts = {}


class Verification:
    """VERIFY and SLOTS (see `common.wire.AdminCommand`) of one shard, whose process has begun at `began`."""

    def __init__(self, holdings: Holdings, owner: Owner, began: Instant) -> None:
        self._store = holdings.store
        self._holdings = holdings
        self._owner = owner
        self._began = began
        self._checks: dict[Family, Callable[[_Progress, bytes, bytes], str | None]] = {
            Family.SLOTS: self._check_slot,
            Family.QUEUES: self._check_queue,
            Family.JOBS: self._check_job,
            Family.SCHEDULED: self._check_scheduled,
            Family.LEASES: self._check_lease,
            Family.DEDUP: self._check_key,
            Family.DEDUP_EXPIRY: self._check_key_timer,
            Family.DEAD: self._check_dead,
        }

    # -- steps --------------------------------------------------------------------------------

    def verify(self, cursor: bytes) -> tuple[tuple[list[str], int], bytes | None]:
        """Findings and how many records were looked at, of one step; and where the next one begins."""
        progress = _Progress.read(cursor)
        findings: list[str] = []
        looked_at = 0
        rows_left, bytes_left = STEP_ROWS, STEP_BYTES
        while rows_left > 0 and bytes_left > 0:
            if progress.is_at_start:
                rows_left -= len(FAMILIES) * SCAN_ROWS
                slot = self._next_slot(progress.slot)
                if slot is None:
                    return (findings, looked_at), None
                if slot != progress.slot:
                    progress = _Progress(slot)
                progress.mark = self._mark(slot)
            foreign = self._foreign(progress.slot)
            if foreign is not None:
                findings += foreign
                progress = _Progress(progress.slot + 1)
                continue
            rows, size, is_done = self._look_on(progress, rows_left, bytes_left, findings)
            looked_at += rows
            rows_left -= rows + SCAN_ROWS
            bytes_left -= size
            if is_done:
                progress = self._counted(progress, findings)
        return (findings, looked_at), progress.cursor()

    def _next_slot(self, start: int) -> int | None:
        """The first slot from `start` on of which anything is stored."""
        found = [self._store.scan(family, keys.slot_prefix(start), _END, 1) for family in FAMILIES]
        return min((keys.slot_of_key(rows[0][0]) for rows in found if rows), default=None)

    def _mark(self, slot: int) -> list[int]:
        """Something that is another one after every change of what is stored of a slot."""
        state = self._holdings.slots.get(slot)
        return [*self._began, self._owner.epoch, 0 if state is None else state.changes]

    def _foreign(self, slot: int) -> list[str] | None:
        """What there is to say of a slot that is not served here, None for one that is."""
        if slot in self._owner.owned:
            if slot in self._holdings.slots and self._store.get(Family.SLOTS, keys.slot_prefix(slot)) is not None:
                return None
            return [f"slot {slot}: records are there, but not that of the slot: no start serves them"]
        if self._owner.is_on_the_way(slot):
            return []
        return [f"slot {slot}: records are there, but the slot belongs to another shard"]

    def _look_on(self, progress: _Progress, limit: int, limit_bytes: int, findings: list[str]) -> tuple[int, int, bool]:
        """Look at some records of a family: how many, their bytes, and whether the slot's last one was among them."""
        family, slot = FAMILIES[progress.family], progress.slot
        start = progress.start or keys.slot_prefix(slot)
        rows = self._store.scan(family, start, keys.slot_end(slot), limit, limit_bytes)
        check = self._checks[family]
        for key, value in rows:
            try:
                wrong = check(progress, key, value)
            except _UNREADABLE as error:
                wrong = f"unreadable: {error}"
            if wrong is not None and not progress.recounts:  # else it has been said
                findings.append(f"slot {slot}: {family.name.lower()} {key.hex()}: {wrong}")
        size = sum(len(key) + len(value) for key, value in rows)
        if len(rows) == limit or size >= limit_bytes:
            progress.start = rows[-1][0] + b"\x00"
            return len(rows), size, False
        progress.family, progress.start = progress.family + 1, b""
        return len(rows), size, progress.family == len(FAMILIES)

    def _counted(self, progress: _Progress, findings: list[str]) -> _Progress:
        """All of a slot was looked at; returns where to go on."""
        if progress.mark == self._mark(progress.slot):
            findings += self._miscounts(progress)
        elif progress.recounts < RECOUNTS_MAX:
            progress.count_again()
            return progress
        return _Progress(progress.slot + 1)

    def _miscounts(self, progress: _Progress) -> Iterator[str]:
        for number, counts in sorted(progress.counts.items()):
            queue = self._holdings.by_number.get((progress.slot, number))
            if queue is None:
                continue  # every record of it was a finding
            counted = (queue.ready, queue.scheduled, queue.leased, queue.dead, queue.keys)
            for noun, expected, there in zip(_NOUNS, counted, counts, strict=True):
                if expected != there:
                    yield f"slot {progress.slot}: queue {queue.name!r} counts {expected} {noun}, {there} are there"

    # -- one record -----------------------------------------------------------------------------

    def _check_slot(self, progress: _Progress, key: bytes, value: bytes) -> str | None:
        slot = self._slot(progress)
        if len(key) != len(keys.slot_prefix(0)):
            return "no key of a slot"
        if keys.read_slot_value(value) != (slot.sequence_limit, slot.next_queue):
            return "it is not what the shard goes by"
        return None

    def _check_queue(self, progress: _Progress, key: bytes, value: bytes) -> str | None:
        slot, number = keys.read_queue_key(key)
        record = keys.read_queue_value(value)
        progress.counts.setdefault(number, [0] * len(_STATES))
        queue = self._holdings.by_number.get((slot, number))
        if slot_of(record.name) != slot:
            return f"queue {record.name!r} belongs into slot {slot_of(record.name)}"
        if queue is None or queue.name != record.name or self._holdings.queues.get(record.name) is not queue:
            return f"queue {record.name!r} is not known under this number"
        if not 0 < number < self._slot(progress).next_queue:
            return f"queue {record.name!r} has a number that was not given out"
        counters = (record.ready, record.scheduled, record.leased, record.dead, record.keys, record.closing_until_ms)
        if not queue.dirty and counters != (*_counters(queue), queue.closing_until_ms):
            return f"queue {record.name!r} is not stored as the shard has it"
        return None

    def _check_job(self, progress: _Progress, key: bytes, record: bytes) -> str | None:
        _, number, inverted, sequence = keys.read_job_key(key)
        is_leased = record[: job_ids.JOB_ID_BYTES] in self._holdings.leases
        if not is_leased:  # leased ones are counted with their leases
            self._count(progress, number, _READY)
        job_id, _, _ = keys.read_job_value(record)
        wrong = self._misplaced(progress, number, job_id, sequence)
        if wrong is not None or is_leased:
            return wrong
        lane = self._holdings.by_number[progress.slot, number].lanes[inverted]
        if lane is None or not lane.finds(sequence):
            return f"job {job_ids.text(job_id)} is ready, and would never be handed out"
        return None

    def _check_scheduled(self, progress: _Progress, key: bytes, record: bytes) -> str | None:
        slot, _, number, _, sequence = keys.read_scheduled_key(key)
        self._count(progress, number, _SCHEDULED)
        job_id, _, _ = keys.read_job_value(record)
        start = self._holdings.scheduled.start_of(slot)
        if start is None or key < start:
            return f"job {job_ids.text(job_id)} is scheduled, and would never be ready"
        return self._misplaced(progress, number, job_id, sequence)

    def _check_lease(self, progress: _Progress, key: bytes, value: bytes) -> str | None:
        slot, sequence = keys.read_lease_key(key)
        record = keys.read_lease_value(value)
        self._count(progress, record.queue, _LEASED)
        text = job_ids.text(record.job_id)
        lease = self._holdings.leases.get(record.job_id)
        if lease is None or (lease.sequence, lease.attempt) != (sequence, record.attempt):
            return f"the lease of job {text} is not one that the shard goes by"
        job = self._store.get(Family.JOBS, keys.job_key(slot, record.queue, record.inverted, sequence))
        if job is None or job[: job_ids.JOB_ID_BYTES] != record.job_id:
            return f"job {text} is leased, and its record is not there"
        return self._misplaced(progress, record.queue, record.job_id, sequence)

    def _check_key(self, progress: _Progress, key: bytes, value: bytes) -> str | None:
        slot, number = keys.read_queue_key(key[:_QUEUE_KEY_BYTES])
        self._count(progress, number, _KEYS)
        deadline_ms, job_id = keys.read_dedup_value(value)
        timer = keys.dedup_expiry_key(slot, deadline_ms, number, key[_QUEUE_KEY_BYTES:])
        if self._store.get(Family.DEDUP_EXPIRY, timer) is None:
            return "the idempotency key has no timer and would never expire"
        return self._misplaced(progress, number, job_id, None)

    def _check_key_timer(self, progress: _Progress, key: bytes, value: bytes) -> str | None:
        slot, deadline_ms, number, name = keys.read_dedup_expiry_key(key)
        record = self._store.get(Family.DEDUP, keys.dedup_key(slot, number, name))
        if record is None or keys.read_dedup_value(record)[0] != deadline_ms:
            return "the timer is that of no idempotency key"
        return None

    def _check_dead(self, progress: _Progress, key: bytes, value: bytes) -> str | None:
        _, number, _, sequence = keys.read_dead_key(key)
        self._count(progress, number, _DEAD)
        return self._misplaced(progress, number, keys.read_dead_value(value).job_id, sequence)

    def _count(self, progress: _Progress, number: int, state: int) -> None:
        progress.counts.setdefault(number, [0] * len(_STATES))[state] += 1

    def _misplaced(self, progress: _Progress, number: int, job_id: bytes, sequence: int | None) -> str | None:
        """What is wrong with the place of a record that names a job; `sequence` is that of its key if it has one."""
        text = job_ids.text(job_id)
        if (progress.slot, number) not in self._holdings.by_number:
            return f"job {text} is one of queue {number}, which is not there"
        if job_ids.slot(job_id) != progress.slot:
            return f"the id of job {text} leads to slot {job_ids.slot(job_id)}"
        if sequence is not None and job_ids.sequence(job_id) != sequence:
            return f"the id of job {text} leads to the place of sequence number {job_ids.sequence(job_id)}"
        if job_ids.sequence(job_id) >= self._slot(progress).next_sequence:
            return f"the sequence number of job {text} was not given out"
        return None

    def _slot(self, progress: _Progress) -> Slot:
        return self._holdings.slots[progress.slot]

    # -- loads ----------------------------------------------------------------------------------

    def loads(self, cursor: bytes) -> tuple[list[tuple[int, int, int]], bytes | None]:
        """Slot, jobs and bytes, about, of slots that hold something; no slot comes twice."""
        first = keys.slot_of_key(cursor) if cursor else 0
        loads: list[tuple[int, int, int]] = []
        leased: dict[int, Lease] | None = None
        looked_at = 0
        for number in sorted(slot for slot in self._holdings.slots if slot >= first):
            if looked_at >= STEP_ROWS:
                return loads, keys.slot_prefix(number)
            queues = self._queues_of(number)
            jobs = sum(queue.depth - queue.reserved + queue.dead for queue in queues)
            sizes = self._sizes(number, queues) if jobs else []
            if jobs and not sizes:  # all of them are leased
                leased = self._some_leases() if leased is None else leased
                sizes = self._size_of_lease(leased.get(number))
            mean = sum(sizes) / len(sizes) if sizes else 0.0
            size = int(jobs * mean) + KEY_BYTES * sum(queue.keys for queue in queues)
            if jobs or size:
                loads.append((number, jobs, size))
            looked_at += len(queues) + len(sizes) + SCAN_ROWS
        return loads, None

    def _queues_of(self, slot: int) -> list[Queue]:
        rows = self._store.scan(Family.QUEUES, keys.slot_prefix(slot), keys.slot_end(slot), 1 << 62)
        found = [self._holdings.by_number.get(keys.read_queue_key(key)) for key, _ in rows]
        return [queue for queue in found if queue is not None]

    def _sizes(self, slot: int, queues: list[Queue]) -> list[int]:
        """Bytes of some jobs, from where those that are ready, due next or dead begin: not over what was deleted."""
        sizes: list[int] = []
        largest = sorted(queues, key=lambda queue: queue.ready + queue.dead, reverse=True)[:SAMPLE_QUEUES]
        for family, start, end in self._samples(slot, largest):
            left, left_bytes = SAMPLE_JOBS - len(sizes), SAMPLE_BYTES - sum(sizes)
            if left <= 0 or left_bytes <= 0:
                break
            sizes += [len(key) + len(value) for key, value in self._store.scan(family, start, end, left, left_bytes)]
        return sizes

    def _samples(self, slot: int, queues: list[Queue]) -> Iterator[tuple[Family, bytes, bytes]]:
        for queue in queues:
            for lane in queue.lanes:
                head = None if lane is None else lane.head()
                if lane is not None and head is not None:
                    start = keys.job_key(slot, queue.number, lane.inverted, head)
                    yield Family.JOBS, start, keys.lane_end(slot, queue.number, lane.inverted)
        due = self._holdings.scheduled.start_of(slot)
        if due is not None:
            yield Family.SCHEDULED, due, keys.slot_end(slot)
        for queue in queues:
            if queue.dead:
                start = self._holdings.dead.start_of(queue)
                yield Family.DEAD, start, keys.queue_end(slot, queue.number)

    def _some_leases(self) -> dict[int, Lease]:
        """A lease of each slot that has one."""
        return {lease.queue.slot: lease for lease in self._holdings.leases.values()}

    def _size_of_lease(self, lease: Lease | None) -> list[int]:
        record = None if lease is None else self._store.get(Family.JOBS, lease.job_key())
        return [] if record is None else [len(record)]


def _counters(queue: Queue) -> tuple[int, int, int, int, int]:
    return queue.ready, queue.scheduled, queue.leased, queue.dead, queue.keys


# Behind every key.
_END = b"\xff" * 64
# Where a key of DEDUP goes on after the queue.
_QUEUE_KEY_BYTES = 6
