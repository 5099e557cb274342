"""How everything is laid out in the store: keys, values, and why they sort as they do.

Keys begin with the slot (2 bytes, big endian), so that a slot is one contiguous range in each
family and can be copied to another shard. Queues are numbered within their slot, names are stored
once. Priorities are stored inverted, so that byte order is serving order.

    family        key                                           value
    JOBS          slot queue 9-priority sequence                job id, attempt, max_attempts, body
    SCHEDULED     slot due_ms queue 9-priority sequence         the same
    LEASES        slot sequence                                 Lease
    DEDUP         slot queue key                                deadline_ms, job id
    DEDUP_EXPIRY  slot deadline_ms queue key                    (empty)
    DEAD          slot queue failed_at_ms sequence              job id, final attempt, cause, reason, body
    QUEUES        slot queue                                    name, counters, first ready sequence by priority,
                                                                until when it is closing
    SLOTS         slot                                          sequence limit, next queue number
    TRANSACTIONS  transaction                                   see `participant` (not part of any slot)
    META          a name                                        (not part of any slot)

A job is one record, and the family it is in says what it is: ready or leased (JOBS; leased when a
lease with its sequence exists), scheduled, or dead. A change of state moves the record. `attempt`
is the number of its next delivery, or of the delivery that is out while it is leased.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple

import msgpack

SEQUENCE_END = (1 << 64) - 1

_SLOT = Struct(">H")
_JOB_KEY = Struct(">HIBQ")
_LANE = Struct(">HIB")
_JOB_HEAD = Struct(">16sII")
_SCHEDULED_KEY = Struct(">HQIBQ")
_SCHEDULED_START = Struct(">HQ")
_LEASE_KEY = Struct(">HQ")
_LEASE = Struct(">16sIBIIQQQ")
_QUEUE_KEY = Struct(">HI")
_DEDUP = Struct(">Q16s")
_DEDUP_EXPIRY_HEAD = Struct(">HQI")
_DEAD_KEY = Struct(">HIQQ")
_DEAD_HEAD = Struct(">16sIBi")
_U64 = Struct(">Q")

JOB_HEAD_BYTES = _JOB_HEAD.size

CLOCK = b"clock"
EPOCH = b"epoch"
# Records that could not be read are moved under this prefix in META and reported, never dropped.
SET_ASIDE = b"set-aside/"


class CorruptRecord(Exception):
    """A stored record that does not say what its key says."""


# -- slots ---------------------------------------------------------------------------------------


def slot_prefix(slot: int) -> bytes:
    return _SLOT.pack(slot)


def slot_end(slot: int) -> bytes:
    """The first key after all keys of a slot."""
    return _SLOT.pack(slot + 1) if slot < 0xFFFF else b"\xff" * 64


def slot_of_key(key: bytes) -> int:
    return key[0] << 8 | key[1]


def slot_value(sequence_limit: int, next_queue: int) -> bytes:
    packed: bytes = msgpack.packb((sequence_limit, next_queue))
    return packed


def read_slot_value(value: bytes) -> tuple[int, int]:
    sequence_limit, next_queue = msgpack.unpackb(value)
    return sequence_limit, next_queue


# -- jobs ----------------------------------------------------------------------------------------


def job_key(slot: int, queue: int, inverted: int, sequence: int) -> bytes:
    return _JOB_KEY.pack(slot, queue, inverted, sequence)


def read_job_key(key: bytes) -> tuple[int, int, int, int]:
    """Slot, queue, 9 - priority, sequence."""
    return _JOB_KEY.unpack(key)


def lane_end(slot: int, queue: int, inverted: int) -> bytes:
    """The first key after all jobs of one priority of a queue."""
    return _LANE.pack(slot, queue, inverted + 1)


def job_value(job_id: bytes, attempt: int, max_attempts: int, body: bytes) -> bytes:
    return _JOB_HEAD.pack(job_id, attempt, max_attempts) + body


def read_job_value(value: bytes) -> tuple[bytes, int, int]:
    """Job id, attempt and max_attempts; the body is what follows JOB_HEAD_BYTES."""
    if len(value) < JOB_HEAD_BYTES:
        raise CorruptRecord(f"a job record of {len(value)} bytes, at least {JOB_HEAD_BYTES} were written")
    return _JOB_HEAD.unpack_from(value)


def scheduled_key(slot: int, due_ms: int, queue: int, inverted: int, sequence: int) -> bytes:
    return _SCHEDULED_KEY.pack(slot, due_ms, queue, inverted, sequence)


def due_start(slot: int, due_ms: int) -> bytes:
    """Where the timers of a slot (SCHEDULED, DEDUP_EXPIRY) that are due at `due_ms` or later begin."""
    return _SCHEDULED_START.pack(slot, due_ms)


def read_scheduled_key(key: bytes) -> tuple[int, int, int, int, int]:
    """Slot, due_ms, queue, 9 - priority, sequence."""
    return _SCHEDULED_KEY.unpack(key)


def read_due(key: bytes) -> int:
    due: int = _U64.unpack_from(key, 2)[0]
    return due


# -- leases --------------------------------------------------------------------------------------


class LeaseRecord(NamedTuple):
    job_id: bytes
    queue: int
    inverted: int
    attempt: int
    max_attempts: int
    expires_ms: int  # wall time
    lease_ms: int  # a lease never runs longer than this after a restart, whatever the wall clock says
    op_id: int  # of the reserve that claimed the job


def lease_key(slot: int, sequence: int) -> bytes:
    return _LEASE_KEY.pack(slot, sequence)


def read_lease_key(key: bytes) -> tuple[int, int]:
    return _LEASE_KEY.unpack(key)


def lease_value(
    job_id: bytes,
    queue: int,
    inverted: int,
    attempt: int,
    max_attempts: int,
    expires_ms: int,
    lease_ms: int,
    op_id: int,
) -> bytes:
    return _LEASE.pack(job_id, queue, inverted, attempt, max_attempts, expires_ms, lease_ms, op_id)


def read_lease_value(value: bytes) -> LeaseRecord:
    return LeaseRecord._make(_LEASE.unpack(value))


# -- queues --------------------------------------------------------------------------------------


class QueueRecord(NamedTuple):
    name: str
    ready: int
    scheduled: int
    leased: int
    dead: int
    keys: int  # idempotency records
    # [9 - priority, a sequence below which that priority has no ready job], for priorities that have some
    heads: list[list[int]]
    # Wall time until which the queue takes no jobs and hands none out, because it is being deleted; 0: it is not.
    closing_until_ms: int = 0


def queue_key(slot: int, queue: int) -> bytes:
    """The key of a queue's record, and where its keys begin in the families whose keys go on with the queue."""
    return _QUEUE_KEY.pack(slot, queue)


def queue_end(slot: int, queue: int) -> bytes:
    """The first key after all keys of a queue, in the families whose keys go on with the queue."""
    return _QUEUE_KEY.pack(slot, queue + 1)


def read_queue_key(key: bytes) -> tuple[int, int]:
    return _QUEUE_KEY.unpack(key)


def queue_value(
    name: str,
    ready: int,
    scheduled: int,
    leased: int,
    dead: int,
    dedup: int,
    heads: list[tuple[int, int]],
    closing_until_ms: int = 0,
) -> bytes:
    packed: bytes = msgpack.packb((name, ready, scheduled, leased, dead, dedup, heads, closing_until_ms))
    return packed


def read_queue_value(value: bytes) -> QueueRecord:
    fields: list[Any] = msgpack.unpackb(value)
    return QueueRecord(*fields)


# -- idempotency ---------------------------------------------------------------------------------


def dedup_key(slot: int, queue: int, key: bytes) -> bytes:
    return _QUEUE_KEY.pack(slot, queue) + key


def dedup_value(deadline_ms: int, job_id: bytes) -> bytes:
    return _DEDUP.pack(deadline_ms, job_id)


def read_dedup_value(value: bytes) -> tuple[int, bytes]:
    return _DEDUP.unpack(value)


def dedup_expiry_key(slot: int, deadline_ms: int, queue: int, key: bytes) -> bytes:
    return _DEDUP_EXPIRY_HEAD.pack(slot, deadline_ms, queue) + key


def read_dedup_expiry_key(key: bytes) -> tuple[int, int, int, bytes]:
    """Slot, deadline_ms, queue, idempotency key."""
    slot, deadline_ms, queue = _DEDUP_EXPIRY_HEAD.unpack_from(key)
    return slot, deadline_ms, queue, key[_DEDUP_EXPIRY_HEAD.size :]


# -- dead letters --------------------------------------------------------------------------------


class DeadRecord(NamedTuple):
    job_id: bytes
    final_attempt: int
    cause: int
    reason: str | None
    body: bytes


def dead_key(slot: int, queue: int, failed_at_ms: int, sequence: int) -> bytes:
    return _DEAD_KEY.pack(slot, queue, failed_at_ms, sequence)


def read_dead_key(key: bytes) -> tuple[int, int, int, int]:
    """Slot, queue, failed_at_ms, sequence."""
    return _DEAD_KEY.unpack(key)


def dead_value(job_id: bytes, final_attempt: int, cause: int, reason: str | None, body: bytes) -> bytes:
    encoded = b"" if reason is None else reason.encode()
    return _DEAD_HEAD.pack(job_id, final_attempt, cause, -1 if reason is None else len(encoded)) + encoded + body


def read_dead_value(value: bytes) -> DeadRecord:
    if len(value) < _DEAD_HEAD.size:
        raise CorruptRecord(f"a dead letter of {len(value)} bytes, at least {_DEAD_HEAD.size} were written")
    job_id, final_attempt, cause, length = _DEAD_HEAD.unpack_from(value)
    start = _DEAD_HEAD.size
    if length < 0:
        return DeadRecord(job_id, final_attempt, cause, None, value[start:])
    return DeadRecord(job_id, final_attempt, cause, value[start : start + length].decode(), value[start + length :])


# -- meta ----------------------------------------------------------------------------------------


def clock_value(wall_ms: int) -> bytes:
    return _U64.pack(wall_ms)


def read_clock_value(value: bytes) -> int:
    wall_ms: int = _U64.unpack(value)[0]
    return wall_ms


# -- epoch: of the newest slot map by which the shard has served ----------------------------------


def epoch_value(epoch: int) -> bytes:
    return _U64.pack(epoch)


def read_epoch_value(value: bytes) -> int:
    epoch: int = _U64.unpack(value)[0]
    return epoch
