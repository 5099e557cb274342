"""Answers joined from bytes are the messages that objects would have built."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import example, given
from hypothesis import strategies as st

from common import job_ids
from common import queue_pb2 as pb
from common.config import Config
from router import answers, rejections

JOB_ID = job_ids.make(now_ms=1_700_000_000_123, slot=7, sequence=9, random=3)
OTHER_ID = job_ids.make(now_ms=1_700_000_000_124, slot=7, sequence=10, random=4)

ids = st.builds(job_ids.make, st.integers(0, 2**48 - 1), st.integers(0, 4095), st.integers(0, 2**44 - 1), st.just(5))
instants = st.integers(0, 253_402_300_799_999)
bodies = st.builds(
    lambda data, queue: pb.Job(queue=queue, job_type="t", payload=pb.Payload(data=data, encoding="raw")),
    st.binary(max_size=300),
    st.text(st.characters(exclude_categories=["Cs"])),
)
reasons = st.sampled_from(
    [
        rejections.invalid_request("priority is 10; 0 to 9 are allowed"),
        rejections.unknown_queue("q" * 20_000),
        rejections.queue_full("mail", 2),
        rejections.queue_full("mail", 0),
        rejections.queue_closing("mail"),
        pb.JobRejection(),
    ]
)


def timestamp(instant_ms: int) -> Timestamp:
    return Timestamp(seconds=instant_ms // 1000, nanos=instant_ms % 1000 * 1_000_000)


@given(st.lists(st.tuples(ids, st.integers(0, 2**32 - 1), instants, bodies), max_size=4))
@example([])
@example([(JOB_ID, 1, 1_700_000_030_000, pb.Job())])
def test_a_reserve_answer_equals_what_messages_would_build(jobs: list[tuple[bytes, int, int, pb.Job]]) -> None:
    expected = pb.ReserveResponse()
    for job_id, attempt, lease_expires_ms, body in jobs:
        job = expected.jobs.add()
        job.CopyFrom(body)
        job.id = job_ids.text(job_id)
        job.attempt = attempt
        job.enqueued_at.CopyFrom(timestamp(job_ids.accepted_at_ms(job_id)))
        job.lease_expires_at.CopyFrom(timestamp(lease_expires_ms))
    answer = answers.reserve_answer(
        [(job_id, attempt, expires_ms, body.SerializeToString()) for job_id, attempt, expires_ms, body in jobs]
    )
    assert pb.ReserveResponse.FromString(answer) == expected


def test_a_job_takes_at_most_80_bytes_of_an_answer_beyond_its_body() -> None:
    latest = job_ids.make(now_ms=2**48 - 1, slot=4095, sequence=2**44 - 1, random=2**18 - 1)
    body = pb.Job(payload=pb.Payload(data=bytes(2**21), encoding="raw")).SerializeToString()
    answer = answers.reserve_answer([(latest, 2**32 - 1, 253_402_300_799_999, body)])
    assert len(answer) - len(body) <= 80


@given(st.lists(st.one_of(ids, st.tuples(ids, st.booleans()), reasons), max_size=5))
@example([JOB_ID, (JOB_ID, True), (OTHER_ID, False), rejections.queue_full("mail", 2)])
def test_an_enqueue_answer_equals_what_messages_would_build(outcomes: list[answers.Outcome]) -> None:
    expected = pb.EnqueueBatchResponse()
    for outcome in outcomes:
        result = expected.results.add()
        if isinstance(outcome, pb.JobRejection):
            result.rejection.CopyFrom(outcome)
        elif isinstance(outcome, bytes):
            result.success.job_id = job_ids.text(outcome)
        else:
            result.success.job_id = job_ids.text(outcome[0])
            result.success.deduplicated = outcome[1]
    assert pb.EnqueueBatchResponse.FromString(answers.enqueue_answer(outcomes)) == expected


@given(st.lists(st.tuples(ids, st.booleans()), max_size=5))
def test_an_atomic_answer_equals_what_messages_would_build(accepted: list[tuple[bytes, bool]]) -> None:
    expected = pb.EnqueueAtomicResponse(
        success=pb.EnqueueAtomicSuccess(
            responses=[
                pb.EnqueueResponse(job_id=job_ids.text(job_id), deduplicated=deduplicated)
                for job_id, deduplicated in accepted
            ]
        )
    )
    assert pb.EnqueueAtomicResponse.FromString(answers.atomic_answer(accepted)) == expected


def test_an_atomic_rejection_lists_its_faults_by_index() -> None:
    full, closing = rejections.queue_full("mail", 2), rejections.queue_closing("old")
    found = pb.EnqueueAtomicResponse.FromString(answers.atomic_rejection([(2, full), (0, closing)]))
    assert [(error.index, error.rejection) for error in found.rejection.errors] == [(0, closing), (2, full)]


def test_an_ack_answer_has_the_job_id_in_lower_case() -> None:
    found = pb.AckResponse.FromString(answers.ack_answer(job_ids.parse("018F0E3A-1111-7222-8333-444455556666") or b""))
    assert found == pb.AckResponse(job_id="018f0e3a-1111-7222-8333-444455556666")


@pytest.mark.parametrize("dead_lettered", [True, False])
def test_a_nack_answer_says_whether_the_job_is_dead(dead_lettered: bool) -> None:
    found = pb.NackResponse.FromString(answers.nack_answer(JOB_ID, dead_lettered))
    assert found == pb.NackResponse(job_id=job_ids.text(JOB_ID), dead_lettered=dead_lettered)


@given(instants)
@example(0)
@example(999)
@example(1000)
def test_an_extend_answer_has_the_instant_to_the_millisecond(lease_expires_ms: int) -> None:
    found = pb.ExtendResponse.FromString(answers.extend_answer(JOB_ID, lease_expires_ms))
    assert found == pb.ExtendResponse(job_id=job_ids.text(JOB_ID), lease_expires_at=timestamp(lease_expires_ms))


@given(st.integers(0, 2**64 - 1))
@example(0x7F)
@example(0x80)
@example(0x3FFF)
@example(0x4000)
def test_a_varint_is_what_protobuf_reads(value: int) -> None:
    assert pb.QueueFull.FromString(b"\x10" + answers.varint(value)).limit == value


def test_server_info_gives_the_global_limits_as_configured() -> None:
    config = Config.model_validate(
        {
            "server": {"strict_queues": True},
            "limits": {
                "allowed_encodings": ["json"],
                "max_payload_bytes": 64,
                "max_custom_entries": 3,
                "max_custom_total_bytes": 40,
                "max_custom_key_bytes": 8,
                "max_queue_name_bytes": 24,
                "max_job_type_bytes": 12,
                "max_idempotency_key_bytes": 10,
                "max_schedule_horizon_ms": 3_600_000,
                "max_enqueue_batch": 6,
                "max_reserve_batch": 4,
                "max_reserve_queues": 3,
                "max_wait_timeout_ms": 800,
                "max_lease_duration_ms": 60_000,
            },
            "storage": {"dead_letter_retention_ms": 1},
            "queues": [{"name": "small", "max_payload_bytes": 1}],
        }
    )
    found = pb.GetServerInfoResponse.FromString(answers.server_info(config, 1_700_000_000_123, "1.2.3"))
    assert found == pb.GetServerInfoResponse(
        server_version="1.2.3",
        supported_protocol_versions=["v1"],
        server_time=Timestamp(seconds=1_700_000_000, nanos=123_000_000),
        restricts_encodings=True,
        allowed_encodings=["json"],
        max_payload_bytes=64,
        max_custom_entries=3,
        max_custom_total_bytes=40,
        max_custom_key_bytes=8,
        max_queue_name_bytes=24,
        max_job_type_bytes=12,
        max_idempotency_key_bytes=10,
        max_schedule_horizon=Duration(seconds=3600),
        max_enqueue_batch=6,
        max_reserve_batch=4,
        max_reserve_queues=3,
        max_wait_timeout=Duration(nanos=800_000_000),
        max_lease_duration=Duration(seconds=60),
        strict_queues=True,
        dead_letter_retention_enabled=True,
    )


def test_server_info_of_the_defaults_restricts_nothing() -> None:
    found = pb.GetServerInfoResponse.FromString(answers.server_info(Config(), 0, "1.2.3"))
    assert not (found.restricts_encodings or found.strict_queues or found.dead_letter_retention_enabled)
    assert (found.max_payload_bytes, found.max_schedule_horizon) == (1_048_576, Duration(seconds=2_592_000))


def test_server_info_tells_an_empty_list_of_encodings_from_none() -> None:
    config = Config.model_validate({"limits": {"allowed_encodings": []}})
    found = pb.GetServerInfoResponse.FromString(answers.server_info(config, 0, "1.2.3"))
    assert found.restricts_encodings
    assert list(found.allowed_encodings) == []
