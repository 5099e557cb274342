"""Rejections: why one job of a batch is not accepted, as the messages that clients see.

Each function builds one reason of `JobRejection`. Limits and lengths are in UTF-8 bytes unless the
name says entries; names and values are given back whole, so that a client can find its job by them.
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from common.queue_pb2 import (
    CustomEntriesTooMany,
    CustomKeyTooLong,
    CustomMapTooLarge,
    EncodingNotAllowed,
    IdempotencyKeyTooLong,
    InvalidRequest,
    JobRejection,
    JobTypeNameTooLong,
    JobTypeNotAllowed,
    PayloadTooLarge,
    QueueClosing,
    QueueFull,
    QueueNameTooLong,
    ScheduledTooFar,
    UnknownQueue,
)


def duration(milliseconds: int) -> Duration:
    """A configured duration, which is never negative nor longer than a valid Duration can be."""
    return Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)


def invalid_request(text: str) -> JobRejection:
    """`text` names what is wrong and what is allowed."""
    return JobRejection(invalid_request=InvalidRequest(message=text))


def unknown_queue(queue: str) -> JobRejection:
    return JobRejection(unknown_queue=UnknownQueue(queue=queue))


def queue_name_too_long(limit: int, actual: int) -> JobRejection:
    return JobRejection(queue_name_too_long=QueueNameTooLong(limit=limit, actual=actual))


def job_type_name_too_long(limit: int, actual: int) -> JobRejection:
    return JobRejection(job_type_name_too_long=JobTypeNameTooLong(limit=limit, actual=actual))


def job_type_not_allowed(job_type: str, allowed: tuple[str, ...]) -> JobRejection:
    return JobRejection(job_type_not_allowed=JobTypeNotAllowed(job_type=job_type, allowed=allowed))


def idempotency_key_too_long(limit: int, actual: int) -> JobRejection:
    return JobRejection(idempotency_key_too_long=IdempotencyKeyTooLong(limit=limit, actual=actual))


def payload_too_large(limit: int, actual: int) -> JobRejection:
    return JobRejection(payload_too_large=PayloadTooLarge(limit=limit, actual=actual))


def encoding_not_allowed(encoding: str, allowed: tuple[str, ...]) -> JobRejection:
    return JobRejection(encoding_not_allowed=EncodingNotAllowed(encoding=encoding, allowed=allowed))


def custom_entries_too_many(limit: int, actual: int) -> JobRejection:
    return JobRejection(custom_entries_too_many=CustomEntriesTooMany(limit=limit, actual=actual))


def custom_key_too_long(key: str, limit: int, actual: int) -> JobRejection:
    return JobRejection(custom_key_too_long=CustomKeyTooLong(key=key, limit=limit, actual=actual))


def custom_map_too_large(limit: int, actual: int) -> JobRejection:
    return JobRejection(custom_map_too_large=CustomMapTooLarge(limit=limit, actual=actual))


def scheduled_too_far(horizon_ms: int, requested: Timestamp) -> JobRejection:
    """`requested` is given back to the nanosecond."""
    return JobRejection(scheduled_too_far=ScheduledTooFar(horizon=duration(horizon_ms), actual=requested))


def queue_full(queue: str, limit: int) -> JobRejection:
    """`limit` is the queue's `max_queue_depth`, in jobs."""
    return JobRejection(queue_full=QueueFull(queue=queue, limit=limit))


def queue_closing(queue: str) -> JobRejection:
    return JobRejection(queue_closing=QueueClosing(queue=queue))
