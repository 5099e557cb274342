"""What routers and shards say to each other: envelopes of operations and of results.

An envelope is one ZeroMQ message, a msgpack array. A router sends operations,

    [WIRE_VERSION, generation, router, number, epoch, [operation, …]]

and a shard answers each such envelope with one that carries its number, and with envelopes of
number 0 for what comes later (a parked poll that is answered, a watch that fires):

    [WIRE_VERSION, generation, shard, number, epoch, [result, …]]

An operation is `[op_id, Op, argument, …]`, a result `[op_id, status, data]`. Op ids are never used
twice by any router (each counts on from a random start). `status` is a gRPC status code; `data` is
the operation's answer when it is 0 and a text for the client when it is not. Times are integers:
durations in milliseconds, instants in milliseconds since the Unix epoch.

The generation is that of the shard process: a process refuses what was meant for its predecessor,
because the clients of those operations may have been told that they were not done.

The epoch is that of the sender's slot map. A shard that does not own what an operation is about
answers MOVED, with its own epoch as data: nothing was done, and the router routes it again.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, TypeAlias

import msgpack

from common import job_ids
from common.slots import slot_of

WIRE_VERSION = 2
# A result's status beside those of gRPC: the shard does not own a slot of the operation.
MOVED = 100
# What a job, and a dead letter without its reason, add to an answer besides the body, at most: id,
# instants, attempt, framing. Router and shard cut answers by the same count.
JOB_OVERHEAD_BYTES = 96
DEAD_LETTER_OVERHEAD_BYTES = 128


class Op(IntEnum):
    """Kinds of operations, with their arguments and the data of their results."""

    # entropy (3 bytes per job), [EnqueueJob, …] → [EnqueueOutcome, …] in the same order
    ENQUEUE = 1
    # the same, all or nothing → [True, [EnqueueOutcome, …]], or [False, [[index, EnqueueOutcome], …]]
    # with a refusal for every job that is at fault; then nothing was stored
    ENQUEUE_ATOMIC = 2
    # queues, max_jobs, lease_ms, may_wait, max_bytes, settles (op id of a watch that fired, or 0)
    # → [LeasedJob, …]; if it may wait, it is parked while there is none, until it is cancelled
    RESERVE = 3
    # queues → True as soon as a job is ready in one of them. Whoever is told so claims with RESERVE
    # (settles=…) or passes the wake-up on with CANCEL.
    WATCH = 4
    # op id of a RESERVE or WATCH → None. After this result none comes for that one; what an earlier
    # result gave, the router gives back.
    CANCEL = 5
    # op ids of RESERVE and DRAIN whose answers have left → nothing. Leases stand, drained dead letters go.
    CONFIRM = 6
    # op ids of RESERVE and DRAIN whose answers will never leave → nothing. As if they had not happened.
    GIVE_BACK = 7
    # job_id, attempt → None
    ACK = 8
    # job_id, attempt, strategy, delay_ms, reason → dead lettered?
    NACK = 9
    # job_id, attempt, lease_ms → lease_expires_at
    EXTEND = 10
    # queue or None, max, max_bytes → [DeadLetter, …], oldest first, none given to anybody else
    DRAIN = 11
    # op id of a DRAIN, n → None. Only its first n records go into the answer, the rest is there again.
    KEEP = 12
    # queues → for each, whether it has jobs or dead letters
    KNOWN = 13
    # an AdminCommand and its arguments → see there
    ADMIN = 14
    # transaction, home, entropy, [EnqueueJob, …] → [Vote, …] (see there)
    PREPARE = 15
    # transaction, the other participants → Fate; at the home, which commits its own part with it
    DECIDE = 16
    # transaction → None; applied now, or before
    COMMIT = 17
    # transaction → None; let go of, or never heard of
    ABORT = 18
    # transaction, coordinator → Fate; at the home, which settles it if it was open
    RESOLVE = 19
    # transaction → None; at the home: nobody can ask about it any more
    FORGET = 20
    # a MoveCommand and its arguments → see there
    MOVE = 21


class MoveCommand(StrEnum):
    """The steps of a move of slots from one shard to another, with arguments and the data of results.

    A row is [family, key, value]; the value is None where the target must have nothing. A move belongs
    to the router that asks for its steps: when that router ends, both sides let go of it.
    """

    # at the target: slots → whether nothing (any more) is stored of them here; ask again until it is so
    CLEAR = "clear"
    # at the source: slots → None. From now on changes of them are noted.
    OPEN = "open"
    # at the source: max_bytes → [[row, …], done]: what is stored of them, part by part
    READ = "read"
    # at the source: max_bytes → [[row, …], how many are left]: what has changed since it was read
    CHANGES = "changes"
    # at the source: → whether all is quiet. New operations on the slots wait from now on; it is quiet
    # when nothing that was begun before is open, and then nothing changes any more.
    HOLD = "hold"
    # at the source: → None. What was held is done; changes are noted as before.
    PAUSE = "pause"
    # at the source: → None. The move is given up: what was held is done.
    RESUME = "resume"
    # at the target: [row, …], wall_ms of the router → None. The target's time never runs behind that.
    RECEIVE = "receive"
    # at the target: → None. The move is given up: what was received is deleted.
    DISCARD = "discard"


class AdminCommand(StrEnum):
    """What operators look at and do, with arguments and the data of results.

    Each is a bounded piece of work. What may be longer takes a cursor, b"" at first, and gives the
    next one with its result, None when it is done. All that take a name are NOT_FOUND for a queue that
    nothing is stored of.
    """

    # cursor → [[QueueRow, …], cursor]
    QUEUES = "queues"
    # name → QueueRow
    QUEUE = "queue"
    # cursor → [Totals, cursor]; the totals of all steps are to be added up
    TOTALS = "totals"
    # name, JobState, cursor, limit → [[JobRow, …], cursor]
    JOBS = "jobs"
    # cursor, limit → [[JobRow, …], cursor], the dead letters of all queues
    DEAD = "dead"
    # job id, cursor → [JobRow or None, cursor]
    FIND = "find"
    # name, cursor → [jobs removed, cursor]; what is enqueued after the first step stays
    PURGE = "purge"
    # name, number of the queue or 0, may wait? → [number, jobs in flight]. The queue is closing from
    # now on, unless jobs are in flight and it may not wait: then FAILED_PRECONDITION.
    CLOSE = "close"
    # name, number, cursor → [jobs, dead letters and keys removed, cursor], of a closing queue. After
    # the last step the queue is gone. ABORTED when it was closing no more.
    REMOVE = "remove"
    # name, [[failed_at_ms, job id, priority, max_attempts], …] → [job id, …] of those that are ready again
    REQUEUE = "requeue"
    # name, [[failed_at_ms, job id], …] → how many dead letters were deleted
    DELETE_DEAD = "delete_dead"
    # → how many transactions are kept that others need: prepared, or decided and not forgotten
    TRANSACTIONS = "transactions"
    # cursor → [[[slot, jobs, bytes], …], cursor]: what slots hold, dead letters counted, bytes estimated
    SLOTS = "slots"
    # cursor → [[[finding, …], records looked at], cursor]: whether all that is stored is where it belongs
    VERIFY = "verify"


class Vote(IntEnum):
    """A participant's answer to PREPARE: `[vote, data]`."""

    YES = 1  # [EnqueueOutcome, …], one for each job
    REFUSED = 2  # [[index, EnqueueOutcome], …], one for each job at fault
    BUSY = 3  # another transaction holds a key or the last places of a queue; None
    TOO_LATE = 4  # the transaction was settled without its coordinator; None


class Fate(IntEnum):
    """What a home says of a transaction."""

    COMMITTED = 1
    ABORTED = 2


class Question(IntEnum):
    """What a shard asks a router for of its own accord: a result whose op id is 0, with this as data."""

    RESOLVE = 1  # [1, transaction, home, coordinator]: what has become of what is prepared here?
    FINISH = 2  # [2, transaction, participants]: have these commit what is decided here


class Outcome(IntEnum):
    """What became of one enqueued job, where it is not simply a new id."""

    DEDUPLICATED = 1  # [1, job id of the earlier one]
    QUEUE_FULL = 2  # [2, max_queue_depth]
    QUEUE_CLOSING = 3  # [3]


class Strategy(IntEnum):
    """How a nacked job is tried again."""

    DEFAULT = 0
    DELAY = 1
    DEAD_LETTER = 2


class JobState(IntEnum):
    """Where a job is."""

    READY = 1
    SCHEDULED = 2
    LEASED = 3
    DEAD = 4


class EnqueueJob(NamedTuple):
    """One job to enqueue, checked and with its defaults filled in by the router."""

    queue: str
    priority: int
    max_attempts: int
    due_ms: int  # 0: at once
    key: str | None  # idempotency key
    body: bytes  # a serialised Job without id, enqueued_at, attempt and lease_expires_at


class DeadLetter(NamedTuple):
    """One dead letter handed out by a drain."""

    job_id: bytes
    cause: int
    failed_at_ms: int
    final_attempt: int
    reason: str | None
    body: bytes


class LeasedJob(NamedTuple):
    """One job handed out by a reserve."""

    job_id: bytes
    attempt: int
    lease_expires_ms: int
    body: bytes


class QueueRow(NamedTuple):
    """A queue as operators see it."""

    name: str
    slot: int
    number: int  # in its slot; never used again
    ready: int
    scheduled: int
    leased: int
    dead: int
    keys: int  # idempotency records
    waiting: int  # polls that wait for a job of it
    oldest_ms: int  # when the oldest job was accepted that is the first ready one of its priority; 0: none is known
    closing_until_ms: int  # 0: it is not closing


class Totals(NamedTuple):
    """What a shard holds, or a part of its queues."""

    queues: int
    ready: int
    scheduled: int
    leased: int
    dead: int
    keys: int
    waiting: int


class JobRow(NamedTuple):
    """A job as operators see it, in any state."""

    queue: str
    job_id: bytes
    state: int
    attempt: int  # of the delivery that is out, or of the next one, or the last one of a dead letter
    at_ms: int  # when it is due, its lease ends or it failed; 0 when it is ready
    cause: int  # 0 unless it is a dead letter
    reason: str | None
    body: bytes


# 16 bytes: the id of a new job; else a list that starts with an Outcome.
EnqueueOutcome: TypeAlias = bytes | list[Any]
Operation: TypeAlias = list[Any]
Result: TypeAlias = list[Any]


class Envelope(NamedTuple):
    """One message between a router and a shard."""

    version: int
    generation: int
    sender: str
    number: int
    epoch: int
    items: list[list[Any]]


class WireError(Exception):
    """What came in is no envelope of this version."""


_packer = msgpack.Packer(autoreset=True)


def pack(generation: int, sender: str, number: int, items: list[list[Any]], epoch: int = 1) -> bytes:
    """Not for use from several threads at once: the packer is shared."""
    packed: bytes = _packer.pack((WIRE_VERSION, generation, sender, number, epoch, items))
    return packed


def unpack(message: bytes) -> Envelope:
    """Raises WireError for anything but an envelope of this version."""
    try:
        envelope = Envelope(*msgpack.unpackb(message))
    except Exception as error:  # msgpack's errors have no common class
        raise WireError(f"not an envelope: {error}") from error
    if envelope.version != WIRE_VERSION:
        raise WireError(f"envelope of version {envelope.version}, this process speaks {WIRE_VERSION}")
    return envelope


# Admin commands whose first argument is the name of a queue.
_OF_A_QUEUE = frozenset(
    {
        AdminCommand.QUEUE,
        AdminCommand.JOBS,
        AdminCommand.PURGE,
        AdminCommand.CLOSE,
        AdminCommand.REMOVE,
        AdminCommand.REQUEUE,
        AdminCommand.DELETE_DEAD,
    }
)


def slots_of(operation: Operation) -> set[int]:
    """The slots that an operation is about; none where it is about an operation, a transaction or a whole shard."""
    match operation[1]:
        case Op.ENQUEUE | Op.ENQUEUE_ATOMIC:
            return {slot_of(job[0]) for job in operation[3]}
        case Op.PREPARE:
            return {slot_of(job[0]) for job in operation[5]}
        case Op.RESERVE | Op.WATCH | Op.KNOWN:
            return {slot_of(queue) for queue in operation[2]}
        case Op.ACK | Op.NACK | Op.EXTEND:
            return {job_ids.slot(operation[2])}
        case Op.DRAIN:
            return set() if operation[2] is None else {slot_of(operation[2])}
        case Op.ADMIN if operation[2] in _OF_A_QUEUE:
            return {slot_of(operation[3])}
        case Op.ADMIN if operation[2] == AdminCommand.FIND:
            return {job_ids.slot(operation[3])}
        case _:
            return set()
