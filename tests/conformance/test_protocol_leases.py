"""Ack, Nack and Extend of a job in flight, and leases that run out."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty

from common import queue_pb2 as pb
from tests.conformance.service import (
    Service,
    dead_letter,
    delay,
    duration,
    new_job,
    new_queue,
    now_ms,
)

HOUR_MS = 3_600_000


def in_flight(service: Service, queue: str | None = None, lease_ms: int = 60_000, **fields: int) -> pb.Job:
    """A job that was just reserved."""
    queue = queue or new_queue()
    service.accepted(new_job(queue, **fields))
    return service.reserve_one(queue, lease_ms=lease_ms)


# ---- Ack


def test_an_ack_is_answered_with_the_job_id(limited: Service) -> None:
    job = in_flight(limited)
    assert limited.ack(job) == pb.AckResponse(job_id=job.id)


def test_an_acked_job_never_comes_again(limited: Service) -> None:
    job = in_flight(limited, lease_ms=1_000)
    limited.ack(job)
    while now_ms() <= job.lease_expires_at.ToMilliseconds() + 100:
        assert limited.reserve(job.queue, wait_ms=200) == []


@pytest.mark.parametrize("method", ["Ack", "Nack", "Extend"])
def test_a_job_id_is_matched_whatever_its_case(limited: Service, method: str) -> None:
    job = in_flight(limited)
    fields = {"lease_duration": duration(1000)} if method == "Extend" else {}
    request = getattr(pb, f"{method}Request")(job_id=job.id.upper(), attempt=1, **fields)
    answer = getattr(pb, f"{method}Response").FromString(limited.exchange(method, request.SerializeToString()))
    assert answer.job_id == job.id


@pytest.mark.parametrize("method", ["Ack", "Nack", "Extend"])
def test_a_worker_id_is_accepted(limited: Service, method: str) -> None:
    job = in_flight(limited)
    fields = {"lease_duration": duration(1000)} if method == "Extend" else {}
    request = getattr(pb, f"{method}Request")(job_id=job.id, attempt=1, worker_id="w", **fields)
    assert limited.code(method, request) == "OK"


# ---- Nack


def test_a_nack_that_asks_for_a_dead_letter_ends_the_job(limited: Service) -> None:
    job = in_flight(limited)
    assert limited.nack(job, dead_letter(), "no such address") is True
    record = limited.drained(job.queue)
    assert (record.cause, record.last_reason) == (pb.DEAD_LETTER_CAUSE_REJECTED, "no such address")


def test_a_nack_that_asks_for_a_dead_letter_has_that_cause_on_the_last_attempt_too(limited: Service) -> None:
    job = in_flight(limited, max_attempts=1)
    limited.nack(job, dead_letter())
    assert limited.drained(job.queue).cause == pb.DEAD_LETTER_CAUSE_REJECTED


@pytest.mark.parametrize(
    "retry",
    [None, pb.NackRetry(default=Empty()), delay(0), delay(HOUR_MS)],
    ids=["none", "default", "at once", "delay"],
)
def test_a_nack_of_the_last_attempt_ends_the_job(limited: Service, retry: pb.NackRetry | None) -> None:
    job = in_flight(limited, max_attempts=1)
    assert limited.nack(job, retry) is True
    assert limited.drained(job.queue).cause == pb.DEAD_LETTER_CAUSE_ATTEMPTS_EXHAUSTED


@pytest.mark.parametrize(
    "retry", [None, pb.NackRetry(default=Empty()), delay(0)], ids=["no retry", "default", "delay of 0"]
)
def test_a_nack_without_a_delay_gives_the_job_back_at_once(limited: Service, retry: pb.NackRetry | None) -> None:
    job = in_flight(limited)
    assert limited.nack(job, retry) is False
    (again,) = limited.reserve(job.queue)
    assert (again.id, again.attempt) == (job.id, 2)


def test_a_nack_with_a_delay_gives_the_job_back_after_it(limited: Service) -> None:
    job = in_flight(limited)
    nacked_ms = now_ms()
    assert limited.nack(job, delay(200)) is False
    again = limited.reserve_one(job.queue)
    assert (again.id, again.attempt) == (job.id, 2)
    assert now_ms() - nacked_ms >= 200


def test_a_nacks_delay_is_clamped_to_the_horizon_of_the_queue(limited: Service) -> None:
    job = in_flight(limited, "soon")
    limited.nack(job, delay(HOUR_MS))
    again = limited.reserve_one("soon")  # the horizon is 200 ms
    assert (again.id, again.attempt) == (job.id, 2)
    limited.ack(again)


def test_a_nack_without_a_strategy_waits_as_its_queue_says(limited: Service) -> None:
    job = in_flight(limited, "steady")
    nacked_ms = now_ms()
    limited.nack(job)
    again = limited.reserve_one("steady")
    assert now_ms() - nacked_ms >= 150  # 200 ms, less up to a quarter
    limited.ack(again)


def test_a_delay_of_zero_overrules_what_the_queue_says(limited: Service) -> None:
    job = in_flight(limited, "steady")
    limited.nack(job, delay(0))
    (again,) = limited.reserve("steady")
    limited.ack(again)


def test_an_exponential_backoff_doubles_with_each_attempt_up_to_its_cap(limited: Service) -> None:
    job = in_flight(limited, "backoff", max_attempts=4)
    for least_ms in (75, 150, 225):  # 100, 200, and 400 capped to 300 ms, less up to a quarter each
        nacked_ms = now_ms()
        limited.nack(job)
        job = limited.reserve_one("backoff")
        assert now_ms() - nacked_ms >= least_ms
    limited.ack(job)


# ---- Extend


def test_an_extension_counts_from_now_and_is_answered_with_the_new_end(limited: Service) -> None:
    job = in_flight(limited, lease_ms=10_000)
    before_ms = now_ms()
    answer = limited.extend(job, duration(30_000))
    assert answer.job_id == job.id
    assert before_ms <= answer.lease_expires_at.ToMilliseconds() - 30_000 <= now_ms()


def test_an_extended_lease_does_not_end_when_it_would_have(limited: Service) -> None:
    job = in_flight(limited, lease_ms=2_000)
    ends = limited.extend(job, duration(2_600)).lease_expires_at.ToMilliseconds()
    again = limited.reserve_one(job.queue)
    assert (again.id, again.attempt) == (job.id, 2)
    assert now_ms() >= ends


def test_an_extension_can_shorten_a_lease(limited: Service) -> None:
    job = in_flight(limited)
    limited.extend(job, duration(1))
    assert limited.reserve_one(job.queue).attempt == 2


@pytest.mark.parametrize(("queue", "longest_ms"), [(None, 60_000), ("lean", 5_000)])
def test_an_extension_is_clamped_to_the_longest_lease_of_the_queue(
    limited: Service, queue: str | None, longest_ms: int
) -> None:
    job = in_flight(limited, queue)
    before_ms = now_ms()
    ends_ms = limited.extend(job, Duration(seconds=315_576_000_000)).lease_expires_at.ToMilliseconds()
    assert before_ms <= ends_ms - longest_ms <= now_ms()
    limited.ack(job)


def test_an_extension_that_rounds_to_nothing_is_one_millisecond(limited: Service) -> None:
    job = in_flight(limited)
    before_ms = now_ms()
    ends_ms = limited.extend(job, Duration(nanos=1)).lease_expires_at.ToMilliseconds()
    assert before_ms <= ends_ms - 1 <= now_ms()


# ---- leases that run out


def test_a_lease_that_runs_out_on_the_last_attempt_ends_the_job(limited: Service) -> None:
    job = in_flight(limited, lease_ms=1, max_attempts=1)
    record = limited.drained(job.queue)
    assert (record.cause, record.HasField("last_reason")) == (pb.DEAD_LETTER_CAUSE_LEASE_EXPIRED, False)


def test_a_lease_that_runs_out_does_not_wait_as_the_queue_says(limited: Service) -> None:
    job = in_flight(limited, "backoff", lease_ms=1)
    again = limited.reserve_one("backoff")
    assert (again.id, again.attempt) == (job.id, 2)
    limited.ack(again)
