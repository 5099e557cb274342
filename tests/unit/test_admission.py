"""What a router accepts, refuses and fills in before a shard hears of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from common import queue_pb2 as pb
from common.config import Config
from common.wire import EnqueueJob, Strategy
from router import admission as admission_module
from router.admission import (
    Admission,
    DrainTerms,
    ExtendTerms,
    LeaseRef,
    NackTerms,
    Refusal,
    ReserveTerms,
    admit,
    check_ack,
    check_batch,
    check_drain,
    check_extend,
    check_nack,
    check_reserve,
)
from router.front import Status

NOW_MS = 1_700_000_000_123
HOUR_MS = 3_600_000
JOB_ID = "018f0e3a-1111-7222-8333-444455556666"
JOB_ID_BYTES = bytes.fromhex("018f0e3a111172228333444455556666")

LIMITS: dict[str, object] = {
    "max_lease_duration_ms": 60_000,
    "max_attempts_ceiling": 5,
    "max_reserve_batch": 4,
    "max_reserve_queues": 3,
    "max_wait_timeout_ms": 800,
    "max_enqueue_batch": 6,
    "max_payload_bytes": 64,
    "max_custom_entries": 3,
    "max_custom_total_bytes": 40,
    "max_custom_key_bytes": 8,
    "max_queue_name_bytes": 24,
    "max_job_type_bytes": 12,
    "max_idempotency_key_bytes": 10,
    "max_schedule_horizon_ms": HOUR_MS,
}
SMALL: dict[str, object] = {
    "name": "small",
    "default_priority": 7,
    "default_max_attempts": 1,
    "max_attempts_ceiling": 2,
    "max_payload_bytes": 8,
    "max_custom_entries": 1,
    "max_custom_total_bytes": 10,
    "max_custom_key_bytes": 4,
    "max_schedule_horizon_ms": 60_000,
    "max_lease_duration_ms": 5_000,
}


def configured(*queues: dict[str, object], strict: bool = False, **limits: object) -> Config:
    return Config.model_validate(
        {"server": {"strict_queues": strict}, "limits": LIMITS | limits, "queues": [{"name": "known"}, *queues]}
    )


CONFIG = configured(SMALL)
STRICT = configured(strict=True)


def job(**fields: Any) -> pb.EnqueueRequest:
    """A request as it comes in: parsed from its bytes."""
    request = pb.EnqueueRequest(**({"queue": "mail", "job_type": "send"} | fields))
    return pb.EnqueueRequest.FromString(request.SerializeToString())


def admitted(request: pb.EnqueueRequest, config: Config = CONFIG) -> EnqueueJob:
    outcome = admit(request, config, NOW_MS)
    assert isinstance(outcome, EnqueueJob), outcome
    return outcome


def body(request: pb.EnqueueRequest, config: Config = CONFIG) -> pb.Job:
    return pb.Job.FromString(admitted(request, config).body)


def rejection(request: pb.EnqueueRequest, config: Config = CONFIG) -> pb.JobRejection:
    outcome = admit(request, config, NOW_MS)
    assert isinstance(outcome, pb.JobRejection), outcome
    return outcome


def instant(milliseconds: int, nanos: int = 0) -> Timestamp:
    return Timestamp(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000 + nanos)


def entries(count: int) -> dict[str, pb.PrimitiveValue]:
    return {f"k{number}": pb.PrimitiveValue(bool_value=True) for number in range(count)}


# ---- 1. structure

MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"queue": ""}, "queue is empty;"),
    ({"queue": "."}, "queue is '.';"),
    ({"queue": ".."}, "queue is '..';"),
    ({"queue": "a/b"}, "queue 'a/b' contains '/';"),
    ({"queue": "/"}, "queue '/' contains '/';"),
    ({"queue": "a\nb"}, r"queue 'a\nb' contains '\n';"),
    ({"queue": "a\0b"}, r"queue 'a\x00b' contains '\x00';"),
    ({"queue": "\x1f"}, r"queue '\x1f' contains '\x1f';"),
    ({"queue": "a\x7fb"}, r"queue 'a\x7fb' contains '\x7f';"),
    ({"queue": "\x85x"}, r"queue '\x85x' contains '\x85';"),
    ({"queue": "\x9f"}, r"queue '\x9f' contains '\x9f';"),
    ({"job_type": ""}, "job_type is empty;"),
    ({"payload": pb.Payload()}, "payload.data is empty;"),
    ({"payload": pb.Payload(encoding="json")}, "payload.data is empty;"),
    ({"payload": pb.Payload(data=b"x")}, "payload.encoding is empty;"),
    ({"idempotency_key": ""}, "idempotency_key is present and empty;"),
    ({"priority": 10}, "priority is 10; 0 to 9 are allowed"),
    ({"priority": 2**32 - 1}, "priority is 4294967295; 0 to 9 are allowed"),
    ({"max_attempts": 0}, "max_attempts is 0; at least 1 is allowed"),
    ({"trace_context": pb.TraceContext()}, "trace_context.traceparent is empty;"),
    ({"trace_context": pb.TraceContext(tracestate="a=b")}, "trace_context.traceparent is empty;"),
    ({"custom": {"": pb.PrimitiveValue(int_value=1)}}, "custom has an empty key;"),
    ({"custom": {"size": pb.PrimitiveValue()}}, "custom['size'] has no value;"),
    ({"scheduled_at": Timestamp(nanos=10**9)}, "scheduled_at.nanos is 1000000000; 0 to 999999999 are allowed"),
    ({"scheduled_at": Timestamp(nanos=-1)}, "scheduled_at.nanos is -1; 0 to 999999999 are allowed"),
    ({"scheduled_at": Timestamp(seconds=-62_135_596_801)}, "scheduled_at.seconds is -62135596801;"),
    ({"scheduled_at": Timestamp(seconds=253_402_300_800)}, "scheduled_at.seconds is 253402300800;"),
    ({"scheduled_at": Timestamp(seconds=2**63 - 1)}, "scheduled_at.seconds is 9223372036854775807;"),
]


@pytest.mark.parametrize(("fields", "text"), MALFORMED)
def test_a_malformed_job_is_rejected_with_a_text_that_names_the_fault(fields: dict[str, Any], text: str) -> None:
    found = rejection(job(**fields))
    assert found.WhichOneof("reason") == "invalid_request"
    assert found.invalid_request.message.startswith(text)


WELL_FORMED: list[dict[str, Any]] = [
    {"queue": " "},
    {"queue": "..."},
    {"queue": "a.b"},
    {"queue": "ü"},
    {"queue": "\xa0"},
    {"queue": "e\u0301 📮"},
    {"job_type": "a/b c"},
    {"job_type": "\n"},
    {"priority": 0},
    {"priority": 9},
    {"max_attempts": 1},
    {"max_attempts": 2**32 - 1},
    {"trace_context": pb.TraceContext(traceparent="nonsense", tracestate="")},
    {"custom": {"\n": pb.PrimitiveValue(string_value="")}},
    {"custom": {"zero": pb.PrimitiveValue(int_value=0)}},
    {"scheduled_at": Timestamp(seconds=-62_135_596_800)},
    {"scheduled_at": Timestamp(nanos=999_999_999)},
    {"scheduled_at": Timestamp()},
]


@pytest.mark.parametrize("fields", WELL_FORMED)
def test_a_well_formed_job_is_admitted(fields: dict[str, Any]) -> None:
    assert admitted(job(**fields)).queue == fields.get("queue", "mail")


def test_a_job_without_a_payload_is_admitted() -> None:
    assert not body(job()).HasField("payload")


def test_the_last_valid_instant_is_no_structural_fault() -> None:
    last = Timestamp(seconds=253_402_300_799, nanos=999_999_999)
    assert rejection(job(scheduled_at=last)).scheduled_too_far.actual == last


def test_a_value_of_a_kind_that_is_not_known_here_is_no_value() -> None:
    newer = pb.PrimitiveValue.FromString(b"\x7a\x01x")  # field 15
    assert rejection(job(custom={"a": newer})).WhichOneof("reason") == "invalid_request"


def test_a_long_value_is_cut_in_the_text() -> None:
    assert len(rejection(job(queue="/" * 5000)).invalid_request.message) < 300


# ---- 2. strict mode


def test_strict_mode_rejects_a_queue_that_is_not_declared() -> None:
    assert rejection(job(queue="who"), STRICT) == pb.JobRejection(unknown_queue=pb.UnknownQueue(queue="who"))


def test_strict_mode_admits_a_declared_queue() -> None:
    assert admitted(job(queue="known"), STRICT).queue == "known"


def test_strict_mode_admits_a_queue_that_is_known_for_its_jobs() -> None:
    outcome = admit(job(queue="who"), STRICT, NOW_MS, lambda queue: queue == "who")
    assert isinstance(outcome, EnqueueJob)


def test_any_queue_is_admitted_without_strict_mode() -> None:
    assert admitted(job(queue="who")).queue == "who"


# ---- 3, 4, 6 to 10. limits, at the limit less one, at the limit, and one above


def rejected(**reason: Any) -> pb.JobRejection:
    return pb.JobRejection(**reason)


def payload(size: int) -> pb.Payload:
    return pb.Payload(data=b"x" * size, encoding="json")


def text_value(text: str) -> pb.PrimitiveValue:
    return pb.PrimitiveValue(string_value=text)


AT_LIMITS: list[tuple[dict[str, Any], pb.JobRejection | None]] = [
    ({"queue": "z" * 23}, None),
    ({"queue": "z" * 24}, None),
    ({"queue": "z" * 25}, rejected(queue_name_too_long=pb.QueueNameTooLong(limit=24, actual=25))),
    ({"queue": "é" * 12}, None),
    ({"queue": "é" * 12 + "z"}, rejected(queue_name_too_long=pb.QueueNameTooLong(limit=24, actual=25))),
    ({"queue": "📮" * 7}, rejected(queue_name_too_long=pb.QueueNameTooLong(limit=24, actual=28))),
    ({"job_type": "z" * 11}, None),
    ({"job_type": "z" * 12}, None),
    ({"job_type": "z" * 13}, rejected(job_type_name_too_long=pb.JobTypeNameTooLong(limit=12, actual=13))),
    ({"job_type": "é" * 6}, None),
    ({"job_type": "é" * 7}, rejected(job_type_name_too_long=pb.JobTypeNameTooLong(limit=12, actual=14))),
    ({"idempotency_key": "z" * 9}, None),
    ({"idempotency_key": "z" * 10}, None),
    ({"idempotency_key": "z" * 11}, rejected(idempotency_key_too_long=pb.IdempotencyKeyTooLong(limit=10, actual=11))),
    ({"idempotency_key": "é" * 5}, None),
    ({"idempotency_key": "é" * 6}, rejected(idempotency_key_too_long=pb.IdempotencyKeyTooLong(limit=10, actual=12))),
    ({"payload": payload(63)}, None),
    ({"payload": payload(64)}, None),
    ({"payload": payload(65)}, rejected(payload_too_large=pb.PayloadTooLarge(limit=64, actual=65))),
    ({"queue": "small", "payload": payload(8)}, None),
    ({"queue": "small", "payload": payload(9)}, rejected(payload_too_large=pb.PayloadTooLarge(limit=8, actual=9))),
    ({"custom": entries(2)}, None),
    ({"custom": entries(3)}, None),
    ({"custom": entries(4)}, rejected(custom_entries_too_many=pb.CustomEntriesTooMany(limit=3, actual=4))),
    (
        {"queue": "small", "custom": entries(2)},
        rejected(custom_entries_too_many=pb.CustomEntriesTooMany(limit=1, actual=2)),
    ),
    ({"custom": {"z" * 7: text_value("")}}, None),
    ({"custom": {"z" * 8: text_value("")}}, None),
    (
        {"custom": {"z" * 9: text_value("")}},
        rejected(custom_key_too_long=pb.CustomKeyTooLong(key="z" * 9, limit=8, actual=9)),
    ),
    ({"custom": {"é" * 4: text_value("")}}, None),
    (
        {"custom": {"é" * 5: text_value("")}},
        rejected(custom_key_too_long=pb.CustomKeyTooLong(key="é" * 5, limit=8, actual=10)),
    ),
    (
        {"custom": {"b" * 9: text_value(""), "a" * 10: text_value(""), "k": text_value("")}},
        rejected(custom_key_too_long=pb.CustomKeyTooLong(key="a" * 10, limit=8, actual=10)),
    ),
    ({"custom": {"k": text_value("v" * 38)}}, None),
    ({"custom": {"k": text_value("v" * 39)}}, None),
    ({"custom": {"k": text_value("v" * 40)}}, rejected(custom_map_too_large=pb.CustomMapTooLarge(limit=40, actual=41))),
    ({"custom": {"é": text_value("é" * 19)}}, None),
    ({"custom": {"k": text_value("é" * 20)}}, rejected(custom_map_too_large=pb.CustomMapTooLarge(limit=40, actual=41))),
    ({"custom": {f"abcde{n}": pb.PrimitiveValue(bool_value=True) for n in range(3)}}, None),
    (
        {"custom": {f"abcde{n}": pb.PrimitiveValue(int_value=0) for n in range(3)}},
        rejected(custom_map_too_large=pb.CustomMapTooLarge(limit=40, actual=42)),
    ),
    (
        {"custom": {f"abcde{n}": pb.PrimitiveValue(double_value=0.0) for n in range(3)}},
        rejected(custom_map_too_large=pb.CustomMapTooLarge(limit=40, actual=42)),
    ),
    ({"scheduled_at": instant(NOW_MS + HOUR_MS - 1)}, None),
    ({"scheduled_at": instant(NOW_MS + HOUR_MS)}, None),
    (
        {"scheduled_at": instant(NOW_MS + HOUR_MS, nanos=1)},
        rejected(
            scheduled_too_far=pb.ScheduledTooFar(
                horizon=Duration(seconds=3600), actual=instant(NOW_MS + HOUR_MS, nanos=1)
            )
        ),
    ),
    (
        {"queue": "small", "scheduled_at": instant(NOW_MS + 60_001)},
        rejected(scheduled_too_far=pb.ScheduledTooFar(horizon=Duration(seconds=60), actual=instant(NOW_MS + 60_001))),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), AT_LIMITS)
def test_a_limit_admits_what_reaches_it_and_rejects_what_passes_it(
    fields: dict[str, Any], expected: pb.JobRejection | None
) -> None:
    outcome = admit(job(**fields), CONFIG, NOW_MS)
    if expected is None:
        assert isinstance(outcome, EnqueueJob)
    else:
        assert outcome == expected


def test_a_name_that_was_admitted_before_is_measured_with_the_limit_of_now() -> None:
    name = "remembered-name-of-24-by"
    admitted(job(queue=name))
    found = rejection(job(queue=name), configured(max_queue_name_bytes=23))
    assert found.queue_name_too_long == pb.QueueNameTooLong(limit=23, actual=24)


def test_a_name_too_long_to_be_remembered_is_checked_all_the_same() -> None:
    config = configured(max_queue_name_bytes=300)
    assert admitted(job(queue="z" * 300), config).queue == "z" * 300
    assert rejection(job(queue="z" * 301), config).queue_name_too_long.actual == 301
    assert rejection(job(queue="z" * 299 + "/"), config).WhichOneof("reason") == "invalid_request"


def test_the_horizon_is_echoed_to_the_millisecond() -> None:
    config = configured(max_schedule_horizon_ms=1_500)
    found = rejection(job(scheduled_at=instant(NOW_MS + 1_501)), config)
    assert found.scheduled_too_far.horizon == Duration(seconds=1, nanos=500_000_000)


# ---- 5. job types, 8. encodings

TYPED: dict[str, object] = {"name": "typed", "allowed_job_types": ["mail", "sms"]}
ENCODED: dict[str, object] = {"name": "enc", "allowed_encodings": ["json", "cbor"]}
CLOSED: dict[str, object] = {"name": "noenc", "allowed_encodings": []}


def test_a_job_type_on_the_queues_list_is_admitted() -> None:
    assert body(job(queue="typed", job_type="sms"), configured(TYPED)).job_type == "sms"


@pytest.mark.parametrize("job_type", ["Mail", "mail ", "fax"])
def test_a_job_type_that_is_not_on_the_queues_list_is_rejected(job_type: str) -> None:
    found = rejection(job(queue="typed", job_type=job_type), configured(TYPED))
    assert found == rejected(job_type_not_allowed=pb.JobTypeNotAllowed(job_type=job_type, allowed=["mail", "sms"]))


def test_an_encoding_on_the_list_is_admitted() -> None:
    assert admitted(job(queue="enc", payload=pb.Payload(data=b"x", encoding="cbor")), configured(ENCODED))


def test_an_encoding_that_is_not_on_the_list_is_rejected() -> None:
    found = rejection(job(queue="enc", payload=pb.Payload(data=b"x", encoding="raw")), configured(ENCODED))
    assert found == rejected(encoding_not_allowed=pb.EncodingNotAllowed(encoding="raw", allowed=["json", "cbor"]))


def test_an_empty_list_of_encodings_rejects_every_payload() -> None:
    found = rejection(job(queue="noenc", payload=payload(1)), configured(CLOSED))
    assert found == rejected(encoding_not_allowed=pb.EncodingNotAllowed(encoding="json"))


def test_a_job_without_a_payload_passes_an_empty_list_of_encodings() -> None:
    assert admitted(job(queue="noenc"), configured(CLOSED)).queue == "noenc"


def test_a_queues_own_list_of_encodings_replaces_the_global_one() -> None:
    config = configured(ENCODED, allowed_encodings=["raw"])
    assert admitted(job(queue="enc", payload=payload(1)), config).queue == "enc"
    assert rejection(job(payload=payload(1)), config).encoding_not_allowed.allowed == ["raw"]


# ---- the order of the checks


def _custom(entry: dict[str, pb.PrimitiveValue]) -> Callable[[pb.EnqueueRequest], object]:
    def change(request: pb.EnqueueRequest) -> None:
        for key, value in entry.items():
            request.custom[key].CopyFrom(value)

    return change


def _set(**fields: Any) -> Callable[[pb.EnqueueRequest], object]:
    return lambda request: request.MergeFrom(pb.EnqueueRequest(**fields))


# In the order of the checks: the reason, and what makes a job of the queue "typed" run into it.
FAULTS: list[tuple[str, Callable[[pb.EnqueueRequest], object]]] = [
    ("invalid_request", _set(priority=10)),
    ("unknown_queue", _set(queue="who")),
    ("queue_name_too_long", _set(queue="q" * 25)),
    ("job_type_name_too_long", _set(job_type="t" * 13)),
    ("job_type_not_allowed", _set(job_type="fax")),
    ("idempotency_key_too_long", _set(idempotency_key="k" * 11)),
    ("payload_too_large", _set(payload=pb.Payload(data=b"x" * 65))),
    ("encoding_not_allowed", _set(payload=pb.Payload(encoding="raw"))),
    ("custom_entries_too_many", _custom(entries(4))),
    ("custom_key_too_long", _custom({"k" * 9: pb.PrimitiveValue(bool_value=True)})),
    ("custom_map_too_large", _custom({"k": text_value("v" * 40)})),
    ("scheduled_too_far", _set(scheduled_at=instant(NOW_MS + HOUR_MS + 1))),
]
# No job can have both: a queue has one name, a type one length, and only a declared queue has a list of types.
EXCLUSIVE = {
    frozenset(("unknown_queue", "queue_name_too_long")),
    frozenset(("unknown_queue", "job_type_not_allowed")),
    frozenset(("queue_name_too_long", "job_type_not_allowed")),
    frozenset(("job_type_name_too_long", "job_type_not_allowed")),
}
PAIRS = [
    (first, second)
    for number, first in enumerate(FAULTS)
    for second in FAULTS[number:]
    if frozenset((first[0], second[0])) not in EXCLUSIVE
]
ORDER = configured(TYPED, strict=True, allowed_encodings=["json"])


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda fault: fault[0])
def test_of_two_faults_the_earlier_check_decides(
    first: tuple[str, Callable[[pb.EnqueueRequest], object]],
    second: tuple[str, Callable[[pb.EnqueueRequest], object]],
) -> None:
    request = job(queue="typed", job_type="mail", payload=pb.Payload(data=b"x", encoding="json"))
    second[1](request)
    first[1](request)
    outcome = admit(request, ORDER, NOW_MS, lambda queue: queue != "who")
    assert isinstance(outcome, pb.JobRejection)
    assert outcome.WhichOneof("reason") == first[0]


def test_a_long_name_that_strict_mode_does_not_know_is_unknown_first() -> None:
    assert rejection(job(queue="u" * 25), STRICT).unknown_queue.queue == "u" * 25


def test_a_long_type_that_is_not_on_the_list_is_too_long_first() -> None:
    found = rejection(job(queue="typed", job_type="t" * 13), configured(TYPED))
    assert found.WhichOneof("reason") == "job_type_name_too_long"


# ---- defaults, clamps, the instant


def test_a_plain_job_gets_the_defaults() -> None:
    found = admitted(job())
    assert found[:5] == ("mail", 0, 3, 0, None)
    assert pb.Job.FromString(found.body) == pb.Job(queue="mail", job_type="send", max_attempts=3)


def test_a_queues_own_defaults_come_first() -> None:
    found = admitted(job(queue="small"))
    assert (found.priority, found.max_attempts) == (7, 1)


def test_an_explicit_priority_of_0_is_kept() -> None:
    found = admitted(job(queue="small", priority=0))
    assert (found.priority, pb.Job.FromString(found.body).priority) == (0, 0)


@pytest.mark.parametrize(("asked", "given"), [(4, 4), (5, 5), (6, 5), (2**32 - 1, 5)])
def test_max_attempts_is_clamped_to_the_ceiling(asked: int, given: int) -> None:
    found = admitted(job(max_attempts=asked))
    assert (found.max_attempts, pb.Job.FromString(found.body).max_attempts) == (given, given)


def test_a_queues_own_ceiling_comes_first() -> None:
    assert admitted(job(queue="small", max_attempts=50)).max_attempts == 2


def test_an_idempotency_key_is_beside_the_body() -> None:
    found = admitted(job(idempotency_key="order-7"))
    assert found.key == "order-7"
    assert b"order-7" not in found.body


@pytest.mark.parametrize(
    ("requested", "due_ms"),
    [
        (instant(NOW_MS + 1), NOW_MS + 1),
        (instant(NOW_MS, nanos=1), NOW_MS + 1),
        (instant(NOW_MS + 1, nanos=999_999), NOW_MS + 2),
        (instant(NOW_MS), 0),
        (instant(NOW_MS - 1, nanos=999_999), 0),
        (instant(NOW_MS - 90_000), 0),
        (Timestamp(), 0),
        (Timestamp(seconds=-62_135_596_800), 0),
    ],
)
def test_a_job_is_due_at_its_instant_and_never_before(requested: Timestamp, due_ms: int) -> None:
    found = admitted(job(scheduled_at=requested))
    assert found.due_ms == due_ms
    assert pb.Job.FromString(found.body).scheduled_at == requested


def test_scheduled_at_stays_unset_when_none_was_sent() -> None:
    assert not body(job()).HasField("scheduled_at")


def test_an_empty_scheduled_at_stays_set() -> None:
    assert body(job(scheduled_at=Timestamp())).HasField("scheduled_at")


# ---- the body


def test_a_body_holds_the_whole_job_but_for_what_changes() -> None:
    fields: dict[str, Any] = {
        "queue": "mail",
        "job_type": "send",
        "payload": pb.Payload(data=b"\x00" * 16, encoding="cbor"),
        "priority": 3,
        "max_attempts": 4,
        "trace_context": pb.TraceContext(traceparent="00-0af7-b7ad-01", tracestate="a=b"),
        "custom": {
            "s": text_value("é"),
            "i": pb.PrimitiveValue(int_value=-5),
            "d": pb.PrimitiveValue(double_value=0.5),
        },
        "scheduled_at": instant(NOW_MS + 5, nanos=7),
    }
    assert body(job(**fields)) == pb.Job(**fields)


def test_a_trace_state_that_is_set_and_empty_stays_set() -> None:
    found = body(job(trace_context=pb.TraceContext(traceparent="p", tracestate="")))
    assert found.trace_context.HasField("tracestate")


@pytest.mark.parametrize("size", [1, 127, 128, 250, 16_383, 16_384, 1_048_576])
def test_a_payload_of_any_size_comes_back(size: int) -> None:
    data = bytes(number % 251 for number in range(size))
    config = configured(max_payload_bytes=1_048_576)
    assert body(job(payload=pb.Payload(data=data, encoding="raw")), config).payload.data == data


def test_fields_that_are_not_known_here_are_left_out_of_the_body() -> None:
    unknown = b"\xf2\x01\x02xx"  # field 30
    request = pb.EnqueueRequest.FromString(
        pb.EnqueueRequest(
            queue="mail",
            job_type="send",
            payload=pb.Payload.FromString(payload(1).SerializeToString() + unknown),
            trace_context=pb.TraceContext.FromString(b"\x0a\x01p" + unknown),
            custom={"a": pb.PrimitiveValue.FromString(b"\x18\x07" + unknown)},
            scheduled_at=Timestamp.FromString(unknown),
        ).SerializeToString()
        + unknown
    )
    assert b"xx" not in admitted(request).body
    assert body(request).custom["a"].int_value == 7


def test_admission_leaves_the_request_as_it_was() -> None:
    request = pb.EnqueueRequest.FromString(job(custom=entries(1)).SerializeToString() + b"\xf2\x01\x02xx")
    before = request.SerializeToString(deterministic=True)
    admitted(request)
    assert request.SerializeToString(deterministic=True) == before


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1, max_size=300)
VALUES = st.one_of(
    st.builds(lambda value: pb.PrimitiveValue(string_value=value), st.text(st.characters(exclude_categories=["Cs"]))),
    st.builds(lambda value: pb.PrimitiveValue(double_value=value), st.floats(allow_nan=False)),
    st.builds(lambda value: pb.PrimitiveValue(int_value=value), st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda value: pb.PrimitiveValue(bool_value=value), st.booleans()),
)
WIDE = configured(
    max_payload_bytes=10_000,
    max_custom_entries=64,
    max_custom_total_bytes=10**6,
    max_custom_key_bytes=2_000,
    max_queue_name_bytes=2_000,
    max_job_type_bytes=2_000,
    max_attempts_ceiling=2**32 - 1,
    max_schedule_horizon_ms=31_536_000_000_000,
)


@given(
    fields=st.fixed_dictionaries(
        {"queue": NAMES.filter(lambda name: name not in (".", "..")), "job_type": NAMES},
        optional={
            "payload": st.builds(
                lambda data, encoding: pb.Payload(data=data, encoding=encoding), st.binary(min_size=1), NAMES
            ),
            "priority": st.integers(0, 9),
            "max_attempts": st.integers(1, 2**32 - 1),
            "trace_context": st.builds(lambda parent: pb.TraceContext(traceparent=parent), NAMES),
            "custom": st.dictionaries(NAMES, VALUES, max_size=5),
            "scheduled_at": st.builds(
                lambda seconds, nanos: Timestamp(seconds=seconds, nanos=nanos),
                st.integers(-62_135_596_800, 33_000_000_000),
                st.integers(0, 999_999_999),
            ),
        },
    )
)
def test_a_body_equals_the_job_that_messages_would_build(fields: dict[str, Any]) -> None:
    expected = pb.Job(**({"priority": 0, "max_attempts": 3} | fields))
    assert body(job(**fields), WIDE) == expected


# ---- the shape of a batch


@pytest.mark.parametrize("count", [1, 5, 6])
def test_a_batch_up_to_its_limit_is_in_order(count: int) -> None:
    assert check_batch(pb.EnqueueBatchRequest(jobs=[job()] * count), CONFIG) is None


@pytest.mark.parametrize(
    ("count", "text"), [(0, "jobs has 0 entries; 1 to 6 are allowed"), (7, "jobs has 7 entries; 1 to 6 are allowed")]
)
def test_a_batch_that_is_empty_or_too_long_is_refused(count: int, text: str) -> None:
    refused = check_batch(pb.EnqueueBatchRequest(jobs=[job()] * count), CONFIG)
    assert refused == Refusal(Status.INVALID_ARGUMENT, text)


# ---- kinds that come again

FEW_QUEUES = st.sampled_from(["mail", "small", "known", "known?", "a/b", "q" * 25, ""])
FEW_TYPES = st.sampled_from(["send", "t" * 13, ""])
PAYLOADS = st.none() | st.builds(
    pb.Payload,
    data=st.sampled_from([b"", b"x", b"x" * 9, b"x" * 64, b"x" * 65]),
    encoding=st.sampled_from(["", "json"]),
)
MORE = st.sampled_from(
    [
        {},
        {},
        {"priority": 3},
        {"priority": 10},
        {"max_attempts": 1},
        {"idempotency_key": "k"},
        {"scheduled_at": instant(NOW_MS + 5_000)},
        {"scheduled_at": instant(NOW_MS + 100_000)},
        {"trace_context": pb.TraceContext(traceparent="00-1")},
        {"custom": entries(2)},
    ]
)


@st.composite
def alike(draw: st.DrawFn) -> pb.EnqueueRequest:
    return job(queue=draw(FEW_QUEUES), job_type=draw(FEW_TYPES), payload=draw(PAYLOADS), **draw(MORE))


@given(st.lists(st.tuples(alike(), st.booleans()), max_size=12), st.sampled_from([CONFIG, STRICT]))
def test_what_was_admitted_before_changes_nothing_for_what_comes_next(
    requests: list[tuple[pb.EnqueueRequest, bool]], config: Config
) -> None:
    admission = Admission(config)
    for request, known in requests:
        is_known = lambda _, known=known: known  # noqa: E731
        expected = admit(request, config, NOW_MS, is_known)
        assert admission.admit(request, NOW_MS, is_known) == expected
        assert admission.admit(request, NOW_MS, is_known) == expected


def test_a_new_payload_of_a_kind_that_came_before_is_the_one_in_the_body() -> None:
    admission = Admission(CONFIG)
    payloads = [pb.Payload(data=bytes([number]) * number, encoding="json") for number in range(1, 65)]
    bodies = [admission.admit(job(payload=payload), NOW_MS, admission_module.never_known) for payload in payloads]
    assert [pb.Job.FromString(each.body).payload for each in bodies if isinstance(each, EnqueueJob)] == payloads


def test_the_kinds_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "_NAMES_REMEMBERED", 10)
    admission = Admission(CONFIG)
    payload = pb.Payload(data=b"x", encoding="json")
    for number in range(35):
        admission.admit(job(queue=f"queue-{number}", payload=payload), NOW_MS, admission_module.never_known)
        assert len(admission._kinds) == number % 10 + 1


# ---- reserve

LEASE = Duration(seconds=30)


def reserve(*queues: str, **fields: Any) -> pb.ReserveRequest:
    known: dict[str, Any] = {"queues": queues or ("mail",), "lease_duration": LEASE}
    return pb.ReserveRequest(**(known | fields))


def test_a_plain_reserve_asks_for_one_job_and_does_not_wait() -> None:
    assert check_reserve(reserve(), CONFIG) == ReserveTerms(("mail",), 1, 30_000, 0)


BAD_DURATIONS = [
    Duration(seconds=-1),
    Duration(nanos=-1),
    Duration(seconds=1, nanos=-1),
    Duration(seconds=-1, nanos=1),
    Duration(nanos=10**9),
    Duration(nanos=-(10**9)),
    Duration(seconds=315_576_000_001),
    Duration(seconds=-315_576_000_001),
]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (pb.ReserveRequest(lease_duration=LEASE), "queues has 0 entries; 1 to 3 are allowed"),
        (reserve("a", "b", "c", "d"), "queues has 4 entries; 1 to 3 are allowed"),
        (reserve(""), "queue is empty;"),
        (reserve("good", ".."), "queue is '..';"),
        (reserve("a/b"), "queue 'a/b' contains '/';"),
        (reserve("q" * 25), "a queue name has 25 bytes; 24 are allowed"),
        (reserve("é" * 13), "a queue name has 26 bytes; 24 are allowed"),
        (pb.ReserveRequest(queues=["mail"]), "lease_duration is missing;"),
        (reserve(worker_id=""), "worker_id is present and empty;"),
        (reserve(max_jobs=0), "max_jobs is 0;"),
        *((reserve(lease_duration=bad), "lease_duration is 0, negative or no") for bad in [Duration(), *BAD_DURATIONS]),
        *((reserve(wait_timeout=bad), "wait_timeout is negative or no valid") for bad in BAD_DURATIONS),
    ],
)
def test_a_malformed_reserve_is_refused_with_a_text_that_names_the_fault(
    request_: pb.ReserveRequest, text: str
) -> None:
    refused = check_reserve(request_, CONFIG)
    assert isinstance(refused, Refusal)
    assert refused.status is Status.INVALID_ARGUMENT
    assert refused.text.startswith(text)


@pytest.mark.parametrize("queues", [("a", "b"), ("a", "b", "c"), ("z" * 23,), ("z" * 24,), ("é" * 12,), (" ",)])
def test_queues_within_their_limits_are_served_in_the_order_listed(queues: tuple[str, ...]) -> None:
    terms = check_reserve(reserve(*queues), CONFIG)
    assert isinstance(terms, ReserveTerms)
    assert terms.queues == queues


def test_a_queue_that_is_listed_twice_is_served_once_in_its_first_place() -> None:
    terms = check_reserve(reserve("b", "a", "b"), CONFIG)
    assert isinstance(terms, ReserveTerms)
    assert terms.queues == ("b", "a")


@pytest.mark.parametrize(
    ("duration", "lease_ms"),
    [
        (Duration(nanos=1), 1),
        (Duration(nanos=999_999), 1),
        (Duration(nanos=1_000_000), 1),
        (Duration(nanos=1_999_999), 1),
        (Duration(seconds=59, nanos=999_000_000), 59_999),
        (Duration(seconds=60), 60_000),
        (Duration(seconds=60, nanos=1_000_000), 60_000),
        (Duration(seconds=315_576_000_000), 60_000),
    ],
)
def test_a_lease_is_whole_milliseconds_within_its_limit(duration: Duration, lease_ms: int) -> None:
    terms = check_reserve(reserve(lease_duration=duration), CONFIG)
    assert isinstance(terms, ReserveTerms)
    assert terms.lease_ms == lease_ms


def test_a_lease_is_clamped_to_the_smallest_limit_among_the_queues() -> None:
    terms = check_reserve(reserve("never", "small", lease_duration=Duration(seconds=50)), CONFIG)
    assert isinstance(terms, ReserveTerms)
    assert terms.lease_ms == 5_000


@pytest.mark.parametrize(
    ("duration", "wait_ms"),
    [
        (Duration(), 0),
        (Duration(nanos=999_999), 0),
        (Duration(nanos=1_999_999), 1),
        (Duration(nanos=799_000_000), 799),
        (Duration(nanos=800_000_000), 800),
        (Duration(nanos=801_000_000), 800),
        (Duration(seconds=315_576_000_000), 800),
    ],
)
def test_a_wait_is_whole_milliseconds_within_its_limit(duration: Duration, wait_ms: int) -> None:
    terms = check_reserve(reserve(wait_timeout=duration), CONFIG)
    assert isinstance(terms, ReserveTerms)
    assert terms.wait_ms == wait_ms


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (3, 3), (4, 4), (5, 4), (2**32 - 1, 4)])
def test_max_jobs_is_clamped_to_its_limit(asked: int, given: int) -> None:
    terms = check_reserve(reserve(max_jobs=asked), CONFIG)
    assert isinstance(terms, ReserveTerms)
    assert terms.max_jobs == given


def test_strict_mode_refuses_a_reserve_and_lists_every_queue_that_is_not_declared() -> None:
    refused = check_reserve(reserve("who", "known", "else"), STRICT)
    text = "not declared, and server.strict_queues is on: 'who', 'else'"
    assert refused == Refusal(Status.FAILED_PRECONDITION, text)


def test_strict_mode_serves_a_queue_that_is_known_for_its_jobs() -> None:
    terms = check_reserve(reserve("who", "known"), STRICT, lambda queue: queue == "who")
    assert isinstance(terms, ReserveTerms)
    assert terms.queues == ("who", "known")


def test_a_malformed_reserve_is_invalid_before_strict_mode_is_asked() -> None:
    refused = check_reserve(reserve("who", max_jobs=0), STRICT)
    assert isinstance(refused, Refusal)
    assert refused.status is Status.INVALID_ARGUMENT


def test_a_long_list_of_queues_that_are_not_declared_is_cut() -> None:
    config = configured(strict=True, max_reserve_queues=32, max_queue_name_bytes=512)
    refused = check_reserve(reserve(*(f"{number:0500}" for number in range(32))), config)
    assert isinstance(refused, Refusal)
    assert refused.text.endswith(f"'{2:0500}' and 29 more")


# ---- ack, nack, extend

HOLDERS: list[tuple[Callable[..., Any], type[Any], dict[str, Any]]] = [
    (check_ack, pb.AckRequest, {}),
    (check_nack, pb.NackRequest, {}),
    (check_extend, pb.ExtendRequest, {"lease_duration": LEASE}),
]
NO_JOB_ID = [
    "",
    "abc",
    "018f0e3a111172228333444455556666",
    "{018f0e3a-1111-7222-8333-444455556666}",
    "urn:uuid:018f0e3a-1111-7222-8333-444455556666",
    " 018f0e3a-1111-7222-8333-444455556666",
    "018f0e3a-1111-7222-8333-444455556666\n",
    "018f0e3a-1111-7222-8333-44445555666g",
]


@pytest.mark.parametrize(("check", "message", "fields"), HOLDERS)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        *(({"job_id": job_id}, f"job_id is {job_id!r};") for job_id in NO_JOB_ID),
        ({"attempt": 0}, "attempt is 0;"),
        ({"worker_id": ""}, "worker_id is present and empty;"),
    ],
)
def test_a_malformed_reference_to_a_lease_is_refused(
    check: Callable[..., Any], message: type[Any], fields: dict[str, Any], wrong: dict[str, Any], text: str
) -> None:
    refused = check(message(**({"job_id": JOB_ID, "attempt": 1} | fields | wrong)))
    assert isinstance(refused, Refusal)
    assert refused.status is Status.INVALID_ARGUMENT
    assert refused.text.startswith(text)


def test_an_ack_names_a_job_and_an_attempt() -> None:
    assert check_ack(pb.AckRequest(job_id=JOB_ID, attempt=2, worker_id="w")) == LeaseRef(JOB_ID_BYTES, 2)


def test_a_job_id_is_matched_whatever_its_case() -> None:
    assert check_ack(pb.AckRequest(job_id=JOB_ID.upper(), attempt=1)) == LeaseRef(JOB_ID_BYTES, 1)


def nack(**fields: Any) -> pb.NackRequest:
    known: dict[str, Any] = {"job_id": JOB_ID, "attempt": 1}
    return pb.NackRequest(**(known | fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (Strategy.DEFAULT, 0, None)),
        ({"reason": "no"}, (Strategy.DEFAULT, 0, "no")),
        ({"reason": ""}, (Strategy.DEFAULT, 0, "")),
        ({"retry": pb.NackRetry(default=Empty())}, (Strategy.DEFAULT, 0, None)),
        ({"retry": pb.NackRetry(dead_letter=Empty()), "reason": "no"}, (Strategy.DEAD_LETTER, 0, "no")),
        ({"retry": pb.NackRetry(delay=Duration())}, (Strategy.DELAY, 0, None)),
        ({"retry": pb.NackRetry(delay=Duration(nanos=1))}, (Strategy.DELAY, 1, None)),
        ({"retry": pb.NackRetry(delay=Duration(seconds=9, nanos=1_000_000))}, (Strategy.DELAY, 9_001, None)),
        (
            {"retry": pb.NackRetry(delay=Duration(seconds=315_576_000_000))},
            (Strategy.DELAY, 315_576_000_000_000, None),
        ),
    ],
)
def test_a_nack_says_how_the_job_is_tried_again(
    fields: dict[str, Any], expected: tuple[Strategy, int, str | None]
) -> None:
    assert check_nack(nack(**fields)) == NackTerms(JOB_ID_BYTES, 1, *expected)


def test_a_retry_without_a_strategy_is_refused() -> None:
    refused = check_nack(nack(retry=pb.NackRetry()))
    assert isinstance(refused, Refusal)
    assert refused.status is Status.INVALID_ARGUMENT
    assert refused.text.startswith("retry has no strategy;")


@pytest.mark.parametrize("delay", BAD_DURATIONS)
def test_a_delay_that_is_negative_or_not_valid_is_refused(delay: Duration) -> None:
    refused = check_nack(nack(retry=pb.NackRetry(delay=delay)))
    assert isinstance(refused, Refusal)
    assert refused.status is Status.INVALID_ARGUMENT
    assert refused.text.startswith("retry.delay is negative or no valid duration;")


def extend(**fields: Any) -> pb.ExtendRequest:
    return pb.ExtendRequest(job_id=JOB_ID, attempt=3, **fields)


@pytest.mark.parametrize(
    ("duration", "lease_ms"), [(Duration(nanos=1), 1), (Duration(nanos=1_999_999), 1), (Duration(seconds=90), 90_000)]
)
def test_an_extend_asks_for_whole_milliseconds(duration: Duration, lease_ms: int) -> None:
    assert check_extend(extend(lease_duration=duration)) == ExtendTerms(JOB_ID_BYTES, 3, lease_ms)


@pytest.mark.parametrize("fields", [{}, *({"lease_duration": bad} for bad in [Duration(), *BAD_DURATIONS])])
def test_an_extend_without_a_positive_duration_is_refused(fields: dict[str, Any]) -> None:
    refused = check_extend(extend(**fields))
    assert isinstance(refused, Refusal)
    assert refused.status is Status.INVALID_ARGUMENT
    assert refused.text.startswith("lease_duration is ")


# ---- dead letters


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, DrainTerms(None, 1)),
        ({"queue": "mail", "max": 3}, DrainTerms("mail", 3)),
        ({"max": 4}, DrainTerms(None, 4)),
        ({"max": 5}, DrainTerms(None, 4)),
        ({"queue": "a/b"}, DrainTerms("a/b", 1)),
        ({"queue": "q" * 25}, DrainTerms("q" * 25, 1)),
    ],
)
def test_a_drain_takes_any_name_and_a_clamped_number(fields: dict[str, Any], expected: DrainTerms) -> None:
    assert check_drain(pb.DrainDeadLettersRequest(**fields), CONFIG) == expected


@pytest.mark.parametrize(
    ("fields", "text"), [({"queue": ""}, "queue is present and empty;"), ({"max": 0}, "max is 0; at least 1")]
)
def test_a_malformed_drain_is_refused(fields: dict[str, Any], text: str) -> None:
    refused = check_drain(pb.DrainDeadLettersRequest(**fields), CONFIG)
    assert isinstance(refused, Refusal)
    assert refused.status is Status.INVALID_ARGUMENT
    assert refused.text.startswith(text)


# ---- memory


def test_the_memory_for_names_is_bounded() -> None:
    for number in range(5_000):
        admitted(job(queue=f"of-many-{number}"))
    assert admission_module._remembered.cache_info().currsize <= 4_096
