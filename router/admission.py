"""Admission: all that a router checks and fills in before a shard hears of a call.

An enqueued job goes through ten checks in a fixed order, and the first that fails is its rejection:

    1. structure               6. length of the idempotency key
    2. strict mode             7. size of the payload
    3. length of the queue     8. encoding
    4. length of the job type  9. custom: entries, each key, total
    5. job type                10. schedule horizon

What needs a queue's state (closing, deduplication, depth) comes after them, in the shard. The other
calls are checked as a whole: a call at fault is refused with a status, and nothing is done. Limits
that a client cannot know are no faults: durations and counts above them are clamped.

Everything here is a function of its arguments. All lengths are UTF-8 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from common import job_ids
from common.config_sections import Config, QueueLimits
from common.queue_pb2 import (
    AckRequest,
    DrainDeadLettersRequest,
    EnqueueBatchRequest,
    EnqueueRequest,
    ExtendRequest,
    Job,
    JobRejection,
    NackRequest,
    PrimitiveValue,
    ReserveRequest,
)
from common.wire import EnqueueJob, Strategy
from router import rejections
from router.answers import varint
from router.front import Status

PRIORITY_MAX = 9

# Names that are remembered as checked: more than a server's usual queues, and at most a few MB.
_NAMES_REMEMBERED = 4096
_NAME_REMEMBERED_CHARACTERS = 256
# What a text for people shows of a value that a client sent.
_SHOWN_CHARACTERS = 64
# A status text travels in HTTP/2 trailers: clients give up on it well below 20 000 bytes.
_LIST_BYTES = 2000

# A control character is one of Unicode's category Cc, which no version of Unicode changes.
_FORBIDDEN_IN_NAMES = re.compile("[/\x00-\x1f\x7f-\x9f]")
_NAME_RULE = "a queue name is not empty, '.' or '..', and has no '/' and no control characters"

# Valid instants are those of the years 1 to 9999.
_FIRST_SECOND = -62_135_596_800
_LAST_SECOND = 253_402_300_799
# The longest duration that protobuf calls valid: 10 000 years.
_DURATION_LIMIT_S = 315_576_000_000
_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000

_EMPTY_WORKER = "worker_id is present and empty; leave it out for a worker without a name"

_SIZE_OF_VALUE = {"double_value": 8, "int_value": 8, "bool_value": 1}

# Whether a queue that is not declared has jobs or dead letters. Strict mode lets such a queue pass.
IsKnown: TypeAlias = Callable[[str], bool]


class Refusal(NamedTuple):
    """A whole call that is not done: the gRPC status, and a text of what is wrong and what is allowed."""

    status: Status
    text: str


class ReserveTerms(NamedTuple):
    """What a Reserve asks for, its limits applied. `wait_ms` is 0 for a call that does not wait."""

    queues: tuple[str, ...]
    max_jobs: int
    lease_ms: int
    wait_ms: int


class LeaseRef(NamedTuple):
    """One delivery of one job: the 16 bytes of its id, and the attempt."""

    job_id: bytes
    attempt: int


class NackTerms(NamedTuple):
    """What a Nack asks for. `delay_ms` is 0 unless the strategy is a delay; the shard clamps it."""

    job_id: bytes
    attempt: int
    strategy: Strategy
    delay_ms: int
    reason: str | None


class ExtendTerms(NamedTuple):
    """What an Extend asks for, from now on; the shard, which knows the queue, clamps it."""

    job_id: bytes
    attempt: int
    lease_ms: int


class DrainTerms(NamedTuple):
    """What a DrainDeadLetters asks for; `queue` is None for all queues."""

    queue: str | None
    max_records: int


class _QueueName(NamedTuple):
    fault: str | None
    size: int
    field: bytes  # `Job.queue`, with its tag


def never_known(queue: str) -> bool:
    """Outside of strict mode nobody asks."""
    return False


# ---- enqueue


class _Kind(NamedTuple):
    """What plain jobs of one queue, type and encoding have in common; see `Admission`."""

    max_payload_bytes: int
    priority: int
    max_attempts: int
    head: bytes  # of the body, up to the payload
    encoding: bytes  # `Payload.encoding`, with its tag
    tail: bytes  # of the body, after the payload


class Admission:
    """Admits jobs by one configuration.

    A plain job has a queue, a type and a payload, and nothing else. All that can speak against one, but for its
    size, is in its queue, type and encoding, and the same few come all the time: of a kind that was admitted
    once the next ones cost a third.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._kinds: dict[tuple[str, str, str], _Kind] = {}

    def admit(self, request: EnqueueRequest, now_ms: int, is_known: IsKnown) -> EnqueueJob | JobRejection:
        """See `admit`."""
        queue = request.queue
        payload = request.payload
        data = payload.data
        kind = self._kinds.get((queue, request.job_type, payload.encoding))
        if kind is None or not 0 < len(data) <= kind.max_payload_bytes or _is_more_than_plain(request):
            return self._admit_and_learn(request, now_ms, is_known)
        body = b"".join((kind.head, _payload_head(len(data), len(kind.encoding)), data, kind.encoding, kind.tail))
        # Made as a tuple is: the constructor of a named tuple would cost as much as the body.
        return tuple.__new__(EnqueueJob, (queue, kind.priority, kind.max_attempts, 0, None, body))

    def _admit_and_learn(self, request: EnqueueRequest, now_ms: int, is_known: IsKnown) -> EnqueueJob | JobRejection:
        job = admit(request, self._config, now_ms, is_known)
        if isinstance(job, EnqueueJob) and request.HasField("payload") and not _is_more_than_plain(request):
            limits = self._config.effective(job.queue)
            names = job.queue, request.job_type, request.payload.encoding
            # In strict mode a queue that is not declared is asked for each time.
            is_lasting = limits.declared or not self._config.server.strict_queues
            if is_lasting and all(len(name) <= _NAME_REMEMBERED_CHARACTERS for name in names):
                if len(self._kinds) >= _NAMES_REMEMBERED:
                    self._kinds.clear()
                self._kinds[names] = _kind(job, request, limits.max_payload_bytes)
        return job


def _kind(job: EnqueueJob, request: EnqueueRequest, max_payload_bytes: int) -> _Kind:
    """What a plain job that was admitted says of its kind."""
    head, tail = _head(request.job_type.encode()), _tail(request, job.priority, job.max_attempts)
    encoding = _encoding_field(request.payload.encoding)
    return _Kind(max_payload_bytes, job.priority, job.max_attempts, head, encoding, tail)


def _is_more_than_plain(request: EnqueueRequest) -> bool:
    has = request.HasField
    return (
        has("idempotency_key")
        or has("priority")
        or has("max_attempts")
        or has("scheduled_at")
        or has("trace_context")
        or bool(request.custom)
    )


def check_batch(request: EnqueueBatchRequest, config: Config) -> Refusal | None:
    """The shape of an EnqueueBatch or EnqueueAtomic, before any of its jobs is looked at."""
    count = len(request.jobs)
    limit = config.limits.max_enqueue_batch
    if 1 <= count <= limit:
        return None
    return _invalid(f"jobs has {count} entries; 1 to {limit} are allowed")


def admit(
    request: EnqueueRequest, config: Config, now_ms: int, is_known: IsKnown = never_known
) -> EnqueueJob | JobRejection:
    """Checks 1 to 10 of one job: the job for its shard, defaults and clamps applied, or its rejection.

    `now_ms` is wall time since the epoch. The admitted `due_ms` is 0 for a job that is ready at once,
    else the requested instant, up to the next millisecond, so that no job is early. Fields of the
    request that this server does not know are left out of the body, where no limit would count them.
    Flat, because it runs once for each job: 7 µs with a payload of 256 bytes.
    """
    name = _queue_name(request.queue)
    payload = request.payload if request.HasField("payload") else None
    data, encoding = (payload.data, payload.encoding) if payload is not None else (b"", "")
    fault = _structure_fault(request, name)
    if fault is None and payload is not None:
        fault = _payload_fault(data, encoding)
    if fault is not None:
        return rejections.invalid_request(fault)

    queue = request.queue
    limits = config.effective(queue)
    if config.server.strict_queues and not limits.declared and not is_known(queue):
        return rejections.unknown_queue(queue)
    sizes = config.limits
    if name.size > sizes.max_queue_name_bytes:
        return rejections.queue_name_too_long(sizes.max_queue_name_bytes, name.size)
    job_type = request.job_type
    job_type_bytes = job_type.encode()
    if len(job_type_bytes) > sizes.max_job_type_bytes:
        return rejections.job_type_name_too_long(sizes.max_job_type_bytes, len(job_type_bytes))
    if limits.allowed_job_types is not None and job_type not in limits.allowed_job_types:
        return rejections.job_type_not_allowed(job_type, limits.allowed_job_types)
    key = None
    if request.HasField("idempotency_key"):
        key = request.idempotency_key
        key_size = len(key.encode())
        if key_size > sizes.max_idempotency_key_bytes:
            return rejections.idempotency_key_too_long(sizes.max_idempotency_key_bytes, key_size)
    if payload is not None:
        if len(data) > limits.max_payload_bytes:
            return rejections.payload_too_large(limits.max_payload_bytes, len(data))
        if limits.allowed_encodings is not None and encoding not in limits.allowed_encodings:
            return rejections.encoding_not_allowed(encoding, limits.allowed_encodings)
    if request.custom:
        rejection = _custom_rejection(request.custom, limits)
        if rejection is not None:
            return rejection
    due_ms = 0
    if request.HasField("scheduled_at"):
        due_ms = _instant_ms(request.scheduled_at)
        if due_ms > now_ms + limits.max_schedule_horizon_ms:
            return rejections.scheduled_too_far(limits.max_schedule_horizon_ms, request.scheduled_at)
        if due_ms <= now_ms:
            due_ms = 0

    priority = request.priority if request.HasField("priority") else limits.default_priority
    attempts = request.max_attempts if request.HasField("max_attempts") else limits.default_max_attempts
    max_attempts = min(attempts, limits.max_attempts_ceiling)
    content = _payload_field(data, _encoding_field(encoding)) if payload is not None else b""
    body = _head(job_type_bytes) + content + _tail(request, priority, max_attempts)
    return EnqueueJob(queue, priority, max_attempts, due_ms, key, body)


def _structure_fault(request: EnqueueRequest, name: _QueueName) -> str | None:
    """Check 1, but for the payload, whose bytes are not to be copied twice."""
    if name.fault is not None:
        return name.fault
    if not request.job_type:
        return "job_type is empty; a job needs a type"
    if request.HasField("idempotency_key") and not request.idempotency_key:
        return "idempotency_key is present and empty; leave it out for a job without a key"
    if request.HasField("priority") and request.priority > PRIORITY_MAX:
        return f"priority is {request.priority}; 0 to {PRIORITY_MAX} are allowed"
    if request.HasField("max_attempts") and request.max_attempts < 1:
        return "max_attempts is 0; at least 1 is allowed"
    if request.HasField("trace_context") and not request.trace_context.traceparent:
        return "trace_context.traceparent is empty; leave trace_context out for a job without a trace"
    if request.custom:
        fault = _custom_fault(request.custom)
        if fault is not None:
            return fault
    if request.HasField("scheduled_at"):
        return _timestamp_fault(request.scheduled_at)
    return None


def _payload_fault(data: bytes, encoding: str) -> str | None:
    if not data:
        return "payload.data is empty; leave payload out for a job without a payload"
    if not encoding:
        return "payload.encoding is empty; it says how payload.data is to be read"
    return None


def _custom_fault(custom: Mapping[str, PrimitiveValue]) -> str | None:
    if "" in custom:
        return "custom has an empty key; keys are at least 1 byte"
    for key, value in custom.items():
        if value.WhichOneof("value") is None:
            return f"custom[{_shown(key)}] has no value; a string, a double, an int or a bool is allowed"
    return None


def _timestamp_fault(instant: Timestamp) -> str | None:
    if not _FIRST_SECOND <= instant.seconds <= _LAST_SECOND:
        return f"scheduled_at.seconds is {instant.seconds}; instants of the years 1 to 9999 are allowed"
    if not 0 <= instant.nanos < _NS_PER_S:
        return f"scheduled_at.nanos is {instant.nanos}; 0 to 999999999 are allowed"
    return None


def _custom_rejection(custom: Mapping[str, PrimitiveValue], limits: QueueLimits) -> JobRejection | None:
    """Check 9. A string counts its bytes, a double or an int 8, a bool 1, and every key its bytes."""
    if len(custom) > limits.max_custom_entries:
        return rejections.custom_entries_too_many(limits.max_custom_entries, len(custom))
    total = 0
    key_limit = limits.max_custom_key_bytes
    long_keys = []
    for key, value in custom.items():
        key_size = len(key.encode())
        if key_size > key_limit:
            long_keys.append(key)
        kind = value.WhichOneof("value")
        total += key_size + (len(value.string_value.encode()) if kind == "string_value" else _SIZE_OF_VALUE[str(kind)])
    if long_keys:
        # A map comes in no order: the first by name, so that the same job gets the same answer.
        key = min(long_keys)
        return rejections.custom_key_too_long(key, key_limit, len(key.encode()))
    if total > limits.max_custom_total_bytes:
        return rejections.custom_map_too_large(limits.max_custom_total_bytes, total)
    return None


def _instant_ms(instant: Timestamp) -> int:
    """Milliseconds since the epoch, up to the next whole one."""
    return instant.seconds * 1000 - (-instant.nanos // _NS_PER_MS)


def _head(job_type: bytes) -> bytes:
    """`Job.job_type`, with its tag: a body up to the payload."""
    return b"\x12" + varint(len(job_type)) + job_type


def _payload_field(data: bytes, encoding: bytes) -> bytes:
    """`Job.payload`, with its tag; `encoding` is the `_encoding_field`."""
    return _payload_head(len(data), len(encoding)) + data + encoding


@lru_cache(maxsize=4096)
def _payload_head(data_bytes: int, encoding_bytes: int) -> bytes:
    """What stands before the data of `Job.payload`; `encoding_bytes` is the length of the `_encoding_field`."""
    size = varint(data_bytes)
    return b"\x1a%b\x0a%b" % (varint(1 + len(size) + data_bytes + encoding_bytes), size)


def _encoding_field(encoding: str) -> bytes:
    """`Payload.encoding`, with its tag."""
    encoded = encoding.encode()
    return b"\x12" + varint(len(encoded)) + encoded


def _tail(request: EnqueueRequest, priority: int, max_attempts: int) -> bytes:
    """A body after the payload."""
    rare, queue = _rare_fields(request), _queue_name(request.queue).field
    return b" %b@%b%b%b" % (varint(priority), varint(max_attempts), rare, queue)


def _rare_fields(request: EnqueueRequest) -> bytes:
    """`Job.trace_context`, `.custom` and `.scheduled_at` as sent, with their tags; most jobs have none of them."""
    has_trace = request.HasField("trace_context")
    has_schedule = request.HasField("scheduled_at")
    if not (has_trace or has_schedule or request.custom):
        return b""
    job = Job()
    if has_trace:
        job.trace_context.CopyFrom(request.trace_context)
    if has_schedule:
        job.scheduled_at.CopyFrom(request.scheduled_at)
    for key, value in request.custom.items():
        job.custom[key].CopyFrom(value)
    job.DiscardUnknownFields()
    return job.SerializeToString()


# ---- queue names


def _queue_name(queue: str) -> _QueueName:
    """What is to know of a name; remembered for short ones, as the same few come all the time."""
    if len(queue) > _NAME_REMEMBERED_CHARACTERS:
        return _examined(queue)
    return _remembered(queue)


def _examined(queue: str) -> _QueueName:
    encoded = queue.encode()
    return _QueueName(_queue_name_fault(queue), len(encoded), b"b%b%b" % (varint(len(encoded)), encoded))


_remembered = lru_cache(maxsize=_NAMES_REMEMBERED)(_examined)


def _queue_name_fault(queue: str) -> str | None:
    if not queue:
        return f"queue is empty; {_NAME_RULE}"
    if queue in (".", ".."):
        return f"queue is {_shown(queue)}; {_NAME_RULE}"
    forbidden = _FORBIDDEN_IN_NAMES.search(queue)
    if forbidden is not None:
        return f"queue {_shown(queue)} contains {forbidden.group()!r}; {_NAME_RULE}"
    return None


# ---- reserve


def check_reserve(request: ReserveRequest, config: Config, is_known: IsKnown = never_known) -> ReserveTerms | Refusal:
    """The terms of a Reserve.

    Refused with INVALID_ARGUMENT when malformed, with FAILED_PRECONDITION when strict mode knows one
    of the queues not. A queue that is listed twice is served once, in its first place. Durations go
    down to whole milliseconds, a lease to no less than one.
    """
    limits = config.limits
    if not 1 <= len(request.queues) <= limits.max_reserve_queues:
        return _invalid(f"queues has {len(request.queues)} entries; 1 to {limits.max_reserve_queues} are allowed")
    queues = tuple(dict.fromkeys(request.queues))
    for queue in queues:
        name = _queue_name(queue)
        if name.fault is not None:
            return _invalid(name.fault)
        if name.size > limits.max_queue_name_bytes:
            return _invalid(f"a queue name has {name.size} bytes; {limits.max_queue_name_bytes} are allowed")
    lease_ms = _lease_ms(request)
    if isinstance(lease_ms, Refusal):
        return lease_ms
    wait_ns = _nanoseconds(request.wait_timeout)  # 0 when it is unset
    if wait_ns is None or wait_ns < 0:
        return _invalid("wait_timeout is negative or no valid duration; 0 or more is allowed, unset does not wait")
    if request.HasField("worker_id") and not request.worker_id:
        return _invalid(_EMPTY_WORKER)
    if request.HasField("max_jobs") and request.max_jobs < 1:
        return _invalid("max_jobs is 0; at least 1 is allowed, unset means 1")

    of_queues = [config.effective(queue) for queue in queues]
    if config.server.strict_queues:
        unknown = [
            queue
            for queue, of_queue in zip(queues, of_queues, strict=True)
            if not of_queue.declared and not is_known(queue)
        ]
        if unknown:
            return Refusal(
                Status.FAILED_PRECONDITION,
                f"not declared, and server.strict_queues is on: {_listed(unknown)}",
            )
    return ReserveTerms(
        queues,
        min(request.max_jobs if request.HasField("max_jobs") else 1, limits.max_reserve_batch),
        min(lease_ms, *(of_queue.max_lease_duration_ms for of_queue in of_queues)),
        min(wait_ns // _NS_PER_MS, limits.max_wait_timeout_ms),
    )


# ---- ack, nack, extend, dead letters


def check_ack(request: AckRequest) -> LeaseRef | Refusal:
    """Which delivery an Ack is for. Refused with INVALID_ARGUMENT when malformed."""
    return _lease_ref(request)


def check_nack(request: NackRequest) -> NackTerms | Refusal:
    """The terms of a Nack. Refused with INVALID_ARGUMENT when malformed.

    A delay goes up to the next whole millisecond, so that no retry is early.
    """
    lease = _lease_ref(request)
    if isinstance(lease, Refusal):
        return lease
    reason = request.reason if request.HasField("reason") else None
    chosen = request.retry.WhichOneof("strategy") if request.HasField("retry") else "default"
    if chosen is None:
        return _invalid("retry has no strategy; default, delay or dead_letter is allowed, or no retry at all")
    if chosen == "default":
        return NackTerms(*lease, Strategy.DEFAULT, 0, reason)
    if chosen == "dead_letter":
        return NackTerms(*lease, Strategy.DEAD_LETTER, 0, reason)
    delay_ns = _nanoseconds(request.retry.delay)
    if delay_ns is None or delay_ns < 0:
        return _invalid("retry.delay is negative or no valid duration; 0 or more is allowed")
    return NackTerms(*lease, Strategy.DELAY, -(-delay_ns // _NS_PER_MS), reason)


def check_extend(request: ExtendRequest) -> ExtendTerms | Refusal:
    """The terms of an Extend. Refused with INVALID_ARGUMENT when malformed."""
    lease = _lease_ref(request)
    if isinstance(lease, Refusal):
        return lease
    lease_ms = _lease_ms(request)
    if isinstance(lease_ms, Refusal):
        return lease_ms
    return ExtendTerms(*lease, lease_ms)


def check_drain(request: DrainDeadLettersRequest, config: Config) -> DrainTerms | Refusal:
    """The terms of a DrainDeadLetters. Refused with INVALID_ARGUMENT when malformed.

    A name that no queue can have is no fault: it is looked up, and has no dead letters.
    """
    queue = request.queue if request.HasField("queue") else None
    if queue == "":
        return _invalid("queue is present and empty; leave it out for the dead letters of all queues")
    max_records = request.max if request.HasField("max") else 1
    if max_records < 1:
        return _invalid("max is 0; at least 1 is allowed, unset means 1")
    return DrainTerms(queue, min(max_records, config.limits.max_reserve_batch))


def _lease_ref(request: AckRequest | NackRequest | ExtendRequest) -> LeaseRef | Refusal:
    job_id = job_ids.parse(request.job_id)
    if job_id is None:
        return _invalid(f"job_id is {_shown(request.job_id)}; a UUID in its hyphenated form is allowed")
    if request.attempt < 1:
        return _invalid("attempt is 0; it is that of the reserved job, at least 1")
    if request.HasField("worker_id") and not request.worker_id:
        return _invalid(_EMPTY_WORKER)
    return LeaseRef(job_id, request.attempt)


def _lease_ms(request: ReserveRequest | ExtendRequest) -> int | Refusal:
    if not request.HasField("lease_duration"):
        return _invalid("lease_duration is missing; a duration above 0 is allowed")
    lease_ns = _nanoseconds(request.lease_duration)
    if lease_ns is None or lease_ns <= 0:
        return _invalid("lease_duration is 0, negative or no valid duration; a duration above 0 is allowed")
    return max(lease_ns // _NS_PER_MS, 1)


def _nanoseconds(duration: Duration) -> int | None:
    """None for what protobuf does not call a valid duration."""
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) > _DURATION_LIMIT_S or abs(nanos) >= _NS_PER_S or seconds * nanos < 0:
        return None
    return seconds * _NS_PER_S + nanos


# ---- texts


def _invalid(text: str) -> Refusal:
    return Refusal(Status.INVALID_ARGUMENT, text)


def _shown(value: str) -> str:
    """A client's value in a text: quoted, control characters escaped, and cut."""
    return repr(value) if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]!r}…"


def _listed(queues: Iterable[str]) -> str:
    """All names, or as many as a status text can carry and the number of the others."""
    text, left = "", 0
    for queue in queues:
        longer = f"{text}, {queue!r}" if text else repr(queue)
        if left or len(longer.encode()) > _LIST_BYTES:
            left += 1
        else:
            text = longer
    return f"{text} and {left} more" if left else text
