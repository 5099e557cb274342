"""Rejections that come from sizes, lists, the custom map, the schedule and the structure of one job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from common import queue_pb2 as pb
from tests.conformance.service import Service, custom, instant, new_job, new_queue, now_ms, text_of, value_of

HOUR_MS = 3_600_000
MINUTE_MS = 60_000
# Between a test's clock and the server's lies the way of a call; no call takes as long.
MARGIN_MS = 50_000

# By size, a job that has something of that size.
Build = Callable[[int], pb.EnqueueRequest]


def payload(queue: str, character: str = "é") -> Build:
    return lambda size: new_job(queue, text_of(size, character))


def entries(queue: str) -> Build:
    return lambda count: new_job(queue, custom={f"k{number}": value_of(True) for number in range(count)})


def custom_key(queue: str) -> Build:
    return lambda size: new_job(queue, custom={text_of(size): value_of(1)})


def custom_text(queue: str, key: str = "ü") -> Build:
    """The total is what is asked for: a key of 2 bytes, and a text."""
    return lambda size: new_job(queue, custom={key: value_of(text_of(size - len(key.encode()), "€"))})


def custom_numbers(queue: str) -> Build:
    """A total of 40 is two keys of 1 byte, an int, a double, and a text of 20 bytes with a key of 2."""

    def build(size: int) -> pb.EnqueueRequest:
        return new_job(queue, custom=custom(i=1, d=0.5, te=text_of(size - 20)))

    return build


def custom_flag(queue: str) -> Build:
    """A bool counts 1, and a key the rest."""
    return lambda size: new_job(queue, custom=custom(b=True, **{"text": text_of(size - 6)}))


SIZES: list[tuple[str, Build, int, pb.JobRejection]] = [
    (
        "payload",
        payload("sizes"),
        64,
        pb.JobRejection(payload_too_large=pb.PayloadTooLarge(limit=64, actual=65)),
    ),
    (
        "payload of a queue with a limit of its own",
        payload("small", "😀"),
        8,
        pb.JobRejection(payload_too_large=pb.PayloadTooLarge(limit=8, actual=9)),
    ),
    (
        "queue name",
        lambda size: new_job(text_of(size, "€")),
        24,
        pb.JobRejection(queue_name_too_long=pb.QueueNameTooLong(limit=24, actual=25)),
    ),
    (
        "job type",
        lambda size: new_job("sizes", job_type=text_of(size, "😀")),
        12,
        pb.JobRejection(job_type_name_too_long=pb.JobTypeNameTooLong(limit=12, actual=13)),
    ),
    (
        "idempotency key",
        lambda size: new_job("sizes", idempotency_key=text_of(size)),
        10,
        pb.JobRejection(idempotency_key_too_long=pb.IdempotencyKeyTooLong(limit=10, actual=11)),
    ),
    (
        "custom entries",
        entries("sizes"),
        3,
        pb.JobRejection(custom_entries_too_many=pb.CustomEntriesTooMany(limit=3, actual=4)),
    ),
    (
        "custom entries of a queue with a limit of its own",
        entries("small"),
        1,
        pb.JobRejection(custom_entries_too_many=pb.CustomEntriesTooMany(limit=1, actual=2)),
    ),
    (
        "custom key",
        custom_key("sizes"),
        8,
        pb.JobRejection(custom_key_too_long=pb.CustomKeyTooLong(key=text_of(9), limit=8, actual=9)),
    ),
    (
        "custom total of a text",
        custom_text("sizes"),
        40,
        pb.JobRejection(custom_map_too_large=pb.CustomMapTooLarge(limit=40, actual=41)),
    ),
    (
        "custom total of an int and a double",
        custom_numbers("sizes"),
        40,
        pb.JobRejection(custom_map_too_large=pb.CustomMapTooLarge(limit=40, actual=41)),
    ),
    (
        "custom total of a bool",
        custom_flag("sizes"),
        40,
        pb.JobRejection(custom_map_too_large=pb.CustomMapTooLarge(limit=40, actual=41)),
    ),
    (
        "custom total of a queue with a limit of its own",
        custom_text("small"),
        10,
        pb.JobRejection(custom_map_too_large=pb.CustomMapTooLarge(limit=10, actual=11)),
    ),
]
EACH_SIZE = pytest.mark.parametrize(
    ("build", "limit", "rejected"), [size[1:] for size in SIZES], ids=[size[0] for size in SIZES]
)


# ---- sizes


@EACH_SIZE
def test_a_size_one_below_its_limit_is_accepted(
    limited: Service, build: Build, limit: int, rejected: pb.JobRejection
) -> None:
    limited.accepted(build(limit - 1))


@EACH_SIZE
def test_a_size_at_its_limit_is_accepted(limited: Service, build: Build, limit: int, rejected: pb.JobRejection) -> None:
    limited.accepted(build(limit))


@EACH_SIZE
def test_a_size_one_over_its_limit_is_rejected_with_limit_and_size(
    limited: Service, build: Build, limit: int, rejected: pb.JobRejection
) -> None:
    assert limited.rejection(build(limit + 1)) == rejected


def test_a_custom_key_over_the_limit_of_its_queue_is_named(limited: Service) -> None:
    limited.accepted(new_job("small", custom={"éé": value_of(True)}))
    rejected = pb.CustomKeyTooLong(key="ééa", limit=4, actual=5)
    assert limited.rejection(new_job("small", custom={"ééa": value_of(True)})).custom_key_too_long == rejected


def test_the_default_limits_hold_where_nothing_is_configured(plain: Service) -> None:
    queue = new_queue()
    found = [
        plain.rejection(job)
        for job in (
            new_job("q" * 513),
            new_job(queue, job_type="t" * 257),
            new_job(queue, idempotency_key="k" * 257),
            new_job(queue, "p" * 1_048_577),
            new_job(queue, custom={str(number): value_of(True) for number in range(65)}),
            new_job(queue, custom={"k" * 257: value_of(True)}),
            new_job(queue, custom={"k": value_of("v" * 16_384)}),
        )
    ]
    assert found == [
        pb.JobRejection(queue_name_too_long=pb.QueueNameTooLong(limit=512, actual=513)),
        pb.JobRejection(job_type_name_too_long=pb.JobTypeNameTooLong(limit=256, actual=257)),
        pb.JobRejection(idempotency_key_too_long=pb.IdempotencyKeyTooLong(limit=256, actual=257)),
        pb.JobRejection(payload_too_large=pb.PayloadTooLarge(limit=1_048_576, actual=1_048_577)),
        pb.JobRejection(custom_entries_too_many=pb.CustomEntriesTooMany(limit=64, actual=65)),
        pb.JobRejection(custom_key_too_long=pb.CustomKeyTooLong(key="k" * 257, limit=256, actual=257)),
        pb.JobRejection(custom_map_too_large=pb.CustomMapTooLarge(limit=16_384, actual=16_385)),
    ]


# ---- lists


def encoded(queue: str, encoding: str) -> pb.EnqueueRequest:
    return new_job(queue, payload=pb.Payload(data=b"{}", encoding=encoding))


def test_an_encoding_that_is_not_on_the_queues_list_is_rejected_with_the_list(limited: Service) -> None:
    rejected = pb.EncodingNotAllowed(encoding="xml", allowed=["json", "cbor"])
    assert limited.rejection(encoded("encoded", "xml")).encoding_not_allowed == rejected


def test_the_case_of_an_encoding_matters(limited: Service) -> None:
    rejected = pb.EncodingNotAllowed(encoding="JSON", allowed=["json", "cbor"])
    assert limited.rejection(encoded("encoded", "JSON")).encoding_not_allowed == rejected


@pytest.mark.parametrize("encoding", ["json", "cbor"])
def test_an_encoding_on_the_queues_list_is_accepted(limited: Service, encoding: str) -> None:
    limited.accepted(encoded("encoded", encoding))


def test_without_a_list_any_encoding_is_accepted(limited: Service) -> None:
    limited.accepted(encoded(new_queue(), "étrange/😀"))


def test_an_empty_list_rejects_every_encoding(limited: Service) -> None:
    rejected = pb.EncodingNotAllowed(encoding="json", allowed=[])
    assert limited.rejection(encoded("sealed", "json")).encoding_not_allowed == rejected


@pytest.mark.parametrize("queue", ["encoded", "sealed"])
def test_a_job_without_a_payload_passes_any_list_of_encodings(limited: Service, queue: str) -> None:
    limited.accepted(new_job(queue))


def test_the_global_list_of_encodings_holds_for_a_queue_without_one(strict: Service) -> None:
    rejected = pb.EncodingNotAllowed(encoding="raw", allowed=["json", "cbor"])
    assert strict.rejection(encoded("known", "raw")).encoding_not_allowed == rejected


def test_a_queues_list_of_encodings_replaces_the_global_one(strict: Service) -> None:
    strict.accepted(encoded("raw", "raw"))
    rejected = pb.EncodingNotAllowed(encoding="json", allowed=["raw"])
    assert strict.rejection(encoded("raw", "json")).encoding_not_allowed == rejected


def test_a_job_type_that_is_not_on_the_queues_list_is_rejected_with_the_list(limited: Service) -> None:
    rejected = pb.JobTypeNotAllowed(job_type="Mail", allowed=["mail", "sms"])
    assert limited.rejection(new_job("typed", job_type="Mail")).job_type_not_allowed == rejected


@pytest.mark.parametrize("job_type", ["mail", "sms"])
def test_a_job_type_on_the_queues_list_is_accepted(limited: Service, job_type: str) -> None:
    limited.accepted(new_job("typed", job_type=job_type))


def test_without_a_list_any_job_type_is_accepted(limited: Service) -> None:
    limited.accepted(new_job(new_queue(), job_type="/ \n😀"))


# ---- schedule


@pytest.mark.parametrize(("queue", "horizon_ms"), [("horizons", HOUR_MS), ("small", MINUTE_MS)])
def test_a_job_scheduled_within_the_horizon_is_accepted(limited: Service, queue: str, horizon_ms: int) -> None:
    limited.accepted(new_job(queue, scheduled_at=instant(now_ms() + horizon_ms - MARGIN_MS)))


@pytest.mark.parametrize(("queue", "horizon_ms"), [("horizons", HOUR_MS), ("small", MINUTE_MS)])
def test_a_job_scheduled_beyond_the_horizon_is_rejected_with_its_instant(
    limited: Service, queue: str, horizon_ms: int
) -> None:
    asked = instant(now_ms() + horizon_ms + MARGIN_MS)
    asked.nanos += 123_456
    rejected = pb.ScheduledTooFar(horizon=Duration(seconds=horizon_ms // 1000), actual=asked)
    assert limited.rejection(new_job(queue, scheduled_at=asked)).scheduled_too_far == rejected


def test_the_default_horizon_is_thirty_days(plain: Service) -> None:
    days_ms = 30 * 24 * HOUR_MS
    plain.accepted(new_job(new_queue(), scheduled_at=instant(now_ms() + days_ms - MARGIN_MS)))
    rejection = plain.rejection(new_job(new_queue(), scheduled_at=instant(now_ms() + days_ms + MARGIN_MS)))
    assert rejection.scheduled_too_far.horizon == Duration(seconds=2_592_000)


# ---- structure

MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("an empty queue name", {"queue": ""}, "queue is empty;"),
    ("the name .", {"queue": "."}, "queue is '.';"),
    ("the name ..", {"queue": ".."}, "queue is '..';"),
    ("a slash in the name", {"queue": "a/b"}, "queue 'a/b' contains '/';"),
    ("the first control character in the name", {"queue": "a\0b"}, r"queue 'a\x00b' contains '\x00';"),
    ("a line feed in the name", {"queue": "a\nb"}, r"queue 'a\nb' contains '\n';"),
    ("the last ASCII control character in the name", {"queue": "a\x7f"}, r"queue 'a\x7f' contains '\x7f';"),
    ("a control character beyond ASCII in the name", {"queue": "\x85"}, r"queue '\x85' contains '\x85';"),
    ("no job type", {"job_type": ""}, "job_type is empty;"),
    ("an empty payload", {"payload": pb.Payload(encoding="json")}, "payload.data is empty;"),
    ("a payload without an encoding", {"payload": pb.Payload(data=b"x")}, "payload.encoding is empty;"),
    ("an empty idempotency key", {"idempotency_key": ""}, "idempotency_key is present and empty;"),
    ("a priority of 10", {"priority": 10}, "priority is 10;"),
    ("the largest priority", {"priority": 2**32 - 1}, "priority is 4294967295;"),
    ("no attempt at all", {"max_attempts": 0}, "max_attempts is 0;"),
    (
        "an empty traceparent",
        {"trace_context": pb.TraceContext(tracestate="a=b")},
        "trace_context.traceparent is empty;",
    ),
    ("an empty custom key", {"custom": {"": value_of(1)}}, "custom has an empty key;"),
    ("a custom value without a value", {"custom": {"size": pb.PrimitiveValue()}}, "custom['size'] has no value;"),
    ("a year after 9999", {"scheduled_at": Timestamp(seconds=253_402_300_800)}, "scheduled_at.seconds is"),
    ("a year before 1", {"scheduled_at": Timestamp(seconds=-62_135_596_801)}, "scheduled_at.seconds is"),
    ("a second of a billion nanoseconds", {"scheduled_at": Timestamp(nanos=10**9)}, "scheduled_at.nanos is"),
    ("negative nanoseconds", {"scheduled_at": Timestamp(nanos=-1)}, "scheduled_at.nanos is"),
]


@pytest.mark.parametrize(("fields", "text"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_a_malformed_job_is_rejected_with_a_text_that_names_the_fault(
    limited: Service, fields: dict[str, Any], text: str
) -> None:
    assert limited.rejection(new_job("structures", **fields)).invalid_request.message.startswith(text)


@pytest.mark.parametrize("queue", ["...", ".a", "a.b", " ", "a b", "ü", "😀", "a\\b", "a\u00a0b", "\u200b"])
def test_a_name_with_no_slash_and_no_control_character_is_accepted(limited: Service, queue: str) -> None:
    limited.accepted(new_job(queue))


@pytest.mark.parametrize("priority", [0, 8, 9])
def test_a_priority_of_0_to_9_is_accepted(limited: Service, priority: int) -> None:
    limited.accepted(new_job("structures", priority=priority))


def test_one_attempt_is_accepted(limited: Service) -> None:
    limited.accepted(new_job("structures", max_attempts=1))
