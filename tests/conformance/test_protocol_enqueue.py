"""Enqueue: the order of its checks, its defaults, schedules and idempotency keys."""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import count
from pathlib import Path

import pytest

from common import queue_pb2 as pb
from tests.conformance.conftest import CAPPED
from tests.conformance.service import (
    CALL_TIMEOUT_S,
    Service,
    custom,
    dead_letter,
    delay,
    instant,
    new_job,
    new_queue,
    now_ms,
    value_of,
)
from tests.integration.server import Server

HOUR_MS = 3_600_000
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


# ---- the order of the checks

# What fails one check each, from the last to the first. Of a job with all of them only the first
# is told; without that one, the next.
FAULTS: list[tuple[str, pb.EnqueueRequest]] = [
    ("scheduled_too_far", pb.EnqueueRequest(scheduled_at=instant(4_000_000_000_000))),
    ("custom_map_too_large", pb.EnqueueRequest(custom=custom(total="x" * 40))),
    ("custom_key_too_long", pb.EnqueueRequest(custom={"k" * 9: value_of(1)})),
    ("custom_entries_too_many", pb.EnqueueRequest(custom=custom(a=1, b=2, c=3))),
    ("encoding_not_allowed", pb.EnqueueRequest(payload=pb.Payload(data=b"x", encoding="xml"))),
    ("payload_too_large", pb.EnqueueRequest(payload=pb.Payload(data=b"x" * 65, encoding="xml"))),
    ("idempotency_key_too_long", pb.EnqueueRequest(idempotency_key="k" * 11)),
    ("job_type_not_allowed", pb.EnqueueRequest(job_type="parcel")),
    ("job_type_name_too_long", pb.EnqueueRequest(job_type="parcels by air")),
]


@pytest.mark.parametrize("count", range(1, len(FAULTS) + 1), ids=[fault[0] for fault in FAULTS])
def test_of_several_faults_the_first_to_be_checked_is_the_rejection(limited: Service, count: int) -> None:
    job = new_job("choosy")
    for _, fault in FAULTS[:count]:
        job.MergeFrom(fault)
    assert limited.rejection(job).WhichOneof("reason") == FAULTS[count - 1][0]


def test_the_length_of_the_queue_is_checked_before_that_of_the_job_type(limited: Service) -> None:
    job = new_job("q" * 25, job_type="t" * 13)
    assert limited.rejection(job).WhichOneof("reason") == "queue_name_too_long"


def test_strict_mode_is_checked_before_the_length_of_the_queue(strict: Service) -> None:
    assert strict.rejection(new_job("q" * 25)).WhichOneof("reason") == "unknown_queue"


@pytest.mark.parametrize(
    "fault",
    [
        pb.EnqueueRequest(priority=10),
        pb.EnqueueRequest(max_attempts=0),
        pb.EnqueueRequest(custom={"": value_of(1)}),
        pb.EnqueueRequest(trace_context=pb.TraceContext()),
        pb.EnqueueRequest(payload=pb.Payload(data=b"x")),
    ],
    ids=["priority", "max_attempts", "custom", "trace_context", "payload"],
)
def test_the_structure_is_checked_before_strict_mode(strict: Service, fault: pb.EnqueueRequest) -> None:
    job = new_job("unknown")
    job.MergeFrom(fault)
    assert strict.rejection(job).WhichOneof("reason") == "invalid_request"


def test_what_a_router_checks_comes_before_the_depth(limited: Service) -> None:
    assert limited.rejection(new_job("shut", job_type="t" * 13)).WhichOneof("reason") == "job_type_name_too_long"


def test_what_a_router_checks_comes_before_the_idempotency_key(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue, idempotency_key="k"))
    again = new_job(queue, "x" * 65, idempotency_key="k")
    assert limited.rejection(again).WhichOneof("reason") == "payload_too_large"


# ---- defaults


def test_a_job_without_a_priority_gets_that_of_its_queue(limited: Service) -> None:
    limited.accepted(new_job("lean"))
    job = limited.reserve_one("lean")
    limited.ack(job)
    assert job.priority == 7


def test_a_job_without_a_priority_gets_the_global_one_where_its_queue_has_none(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue), new_job(queue, priority=0))
    assert [job.priority for job in limited.reserve(queue)] == [2, 0]


def test_a_job_without_attempts_gets_those_of_its_queue(limited: Service) -> None:
    limited.accepted(new_job("lean"))
    job = limited.reserve_one("lean")
    limited.ack(job)
    assert job.max_attempts == 1


@pytest.mark.parametrize(("asked", "given"), [(None, 3), (4, 4), (5, 5), (6, 5), (2**32 - 1, 5)])
def test_attempts_are_clamped_to_the_ceiling(limited: Service, asked: int | None, given: int) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue, max_attempts=asked))
    assert limited.reserve_one(queue).max_attempts == given


def test_a_queue_has_a_ceiling_of_its_own(limited: Service) -> None:
    limited.accepted(new_job("lean", max_attempts=3))
    job = limited.reserve_one("lean")
    limited.ack(job)
    assert job.max_attempts == 2


def test_the_job_id_is_a_lower_case_hyphenated_uuid(limited: Service) -> None:
    (job_id,) = limited.accepted(new_job(new_queue()))
    assert UUID.fullmatch(job_id)


def test_the_ids_of_a_batch_are_all_different(limited: Service) -> None:
    queue = new_queue()
    assert len(set(limited.accepted(*[new_job(queue) for _ in range(6)]))) == 6


def test_a_job_arrives_with_everything_it_was_given(limited: Service) -> None:
    queue, at_ms = new_queue(), now_ms()
    sent = pb.EnqueueRequest(
        queue=queue,
        job_type="létter",
        payload=pb.Payload(data=b"\x00\xff", encoding="raw"),
        priority=9,
        max_attempts=4,
        trace_context=pb.TraceContext(traceparent="00-1-2-01", tracestate=""),
        custom=custom(t="é", i=-1, d=-0.5),
        scheduled_at=instant(at_ms),
    )
    (job_id,) = limited.accepted(sent)
    job = limited.reserve_one(queue)
    assert at_ms <= job.enqueued_at.ToMilliseconds() <= now_ms()
    assert job == pb.Job(
        id=job_id,
        job_type="létter",
        payload=sent.payload,
        priority=9,
        trace_context=sent.trace_context,
        enqueued_at=job.enqueued_at,
        attempt=1,
        max_attempts=4,
        lease_expires_at=job.lease_expires_at,
        custom=sent.custom,
        scheduled_at=sent.scheduled_at,
        queue=queue,
    )


def test_a_job_that_was_given_nothing_has_only_what_every_job_has(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue))
    fields = {field.name for field, _ in limited.reserve_one(queue).ListFields()}
    always = {"id", "job_type", "priority", "enqueued_at", "attempt", "max_attempts", "lease_expires_at", "queue"}
    assert fields == always


# ---- schedules


def test_an_instant_in_the_past_means_now_and_is_shown_as_it_was_sent(limited: Service) -> None:
    queue, before_the_epoch = new_queue(), instant(-1)
    limited.accepted(new_job(queue, scheduled_at=before_the_epoch))
    (job,) = limited.reserve(queue)
    assert job.scheduled_at == before_the_epoch


def test_a_scheduled_job_comes_at_its_time(limited: Service) -> None:
    queue, at_ms = new_queue(), now_ms() + 200
    limited.accepted(new_job(queue, scheduled_at=instant(at_ms)))
    assert limited.reserve_one(queue).scheduled_at == instant(at_ms)
    assert now_ms() >= at_ms


def test_a_nacks_delay_does_not_change_what_the_job_shows_as_its_schedule(limited: Service) -> None:
    queue, sent = new_queue(), instant(now_ms() - 1000)
    limited.accepted(new_job(queue, scheduled_at=sent), new_job(queue))
    for job in limited.reserve(queue):
        limited.nack(job, delay(1))
    first, second = limited.reserve_one(queue), limited.reserve_one(queue)
    assert (first.scheduled_at, second.HasField("scheduled_at")) == (sent, False)


# ---- idempotency


def test_a_key_that_is_known_gives_the_job_that_has_it(limited: Service) -> None:
    queue = new_queue()
    (job_id,) = limited.accepted(new_job(queue, "first", idempotency_key="k"))
    (result,) = limited.enqueue(new_job(queue, "second", idempotency_key="k"))
    assert result.success == pb.EnqueueResponse(job_id=job_id, deduplicated=True)
    assert [job.payload.data for job in limited.reserve(queue)] == [b"first"]


def test_a_key_counts_within_one_batch(limited: Service) -> None:
    queue = new_queue()
    first, second = limited.enqueue(*[new_job(queue, idempotency_key="k") for _ in range(2)])
    assert second.success == pb.EnqueueResponse(job_id=first.success.job_id, deduplicated=True)


def test_a_key_counts_within_one_atomic_batch(limited: Service) -> None:
    queue = new_queue()
    first, second = limited.enqueue_atomic(*[new_job(queue, idempotency_key="k") for _ in range(2)]).success.responses
    assert (first.deduplicated, second.deduplicated) == (False, True)
    assert first.job_id == second.job_id


def test_a_key_belongs_to_its_queue(limited: Service) -> None:
    one, other = limited.enqueue(*[new_job(new_queue(), idempotency_key="k") for _ in range(2)])
    assert (one.success.deduplicated, other.success.deduplicated) == (False, False)


def test_keys_are_compared_as_they_are(limited: Service) -> None:
    queue = new_queue()
    composed, decomposed, upper = (new_job(queue, idempotency_key=key) for key in ("é", "e\u0301", "É"))
    assert len(set(limited.accepted(composed, decomposed, upper))) == 3


def test_a_key_outlives_the_ack_of_its_job(limited: Service) -> None:
    queue = new_queue()
    (job_id,) = limited.accepted(new_job(queue, idempotency_key="k"))
    limited.ack(limited.reserve_one(queue))
    (result,) = limited.enqueue(new_job(queue, idempotency_key="k"))
    assert result.success == pb.EnqueueResponse(job_id=job_id, deduplicated=True)


def test_a_key_outlives_the_death_of_its_job(limited: Service) -> None:
    queue = new_queue()
    (job_id,) = limited.accepted(new_job(queue, idempotency_key="k"))
    assert limited.nack(limited.reserve_one(queue), dead_letter())
    (result,) = limited.enqueue(new_job(queue, idempotency_key="k"))
    assert result.success == pb.EnqueueResponse(job_id=job_id, deduplicated=True)


def test_a_rejected_job_leaves_no_key_behind(limited: Service) -> None:
    capped = CAPPED[-1]  # which no other test fills
    limited.accepted(new_job(capped), new_job(capped))
    assert limited.rejection(new_job(capped, idempotency_key="k")).WhichOneof("reason") == "queue_full"
    limited.ack(limited.reserve_one(capped))
    (result,) = limited.enqueue(new_job(capped, idempotency_key="k"))
    assert result.success.deduplicated is False


def test_a_key_is_forgotten_when_its_window_is_over(brief: Service) -> None:
    queue = new_queue()
    (job_id,) = brief.accepted(new_job(queue, idempotency_key="k"))
    assert renewed(brief, queue, "k") != job_id


def test_changing_the_window_changes_no_key_that_is_written() -> None:
    with Server() as server:
        service = Service(server.start().address)
        (older,) = service.accepted(new_job("q", idempotency_key="older"))
        reload(server, "[storage]\ndedup_window_ms = 1\n")
        wait_until_new_keys_are_forgotten(service, "q")
        (result,) = service.enqueue(new_job("q", idempotency_key="older"))
        assert result.success == pb.EnqueueResponse(job_id=older, deduplicated=True)
        service.close()


def renewed(service: Service, queue: str, key: str) -> str:
    """The id of a new job, as soon as the key of an older one is forgotten."""
    give_up_at = time.monotonic() + CALL_TIMEOUT_S
    while True:
        (result,) = service.enqueue(new_job(queue, idempotency_key=key))
        if not result.success.deduplicated:
            return result.success.job_id
        assert time.monotonic() < give_up_at, "the key is not forgotten"
        time.sleep(0.01)


def wait_until_new_keys_are_forgotten(service: Service, queue: str) -> None:
    """The log tells of a reload when it was sent to the shards: a key that is written now may still be an older one."""
    give_up_at = time.monotonic() + CALL_TIMEOUT_S
    for number in count():
        key = f"newer-{number}"
        service.accepted(new_job(queue, idempotency_key=key))
        time.sleep(0.01)
        (result,) = service.enqueue(new_job(queue, idempotency_key=key))
        if not result.success.deduplicated:
            return
        assert time.monotonic() < give_up_at, "the new window does not hold"


def reload(server: Server, toml: str) -> None:
    Path(server.home / "sepp.toml").write_text(toml)
    os.kill(server.pid, signal.SIGHUP)
    server.log.wait_for(lambda entry: entry.get("event") == "configuration reloaded")
