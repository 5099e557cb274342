"""Reserve: what it clamps, the order in which it serves, and how it waits."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from common import queue_pb2 as pb
from tests.conformance.service import (
    LONG_WAIT_MS,
    Service,
    delay,
    duration,
    new_job,
    new_queue,
    now_ms,
    reserve_request,
    texts,
)

HOUR_MS = 3_600_000
MEBIBYTE = 1_048_576


def enqueue_all(service: Service, *jobs: pb.EnqueueRequest) -> None:
    """One by one: the order is that of the enqueues, and no batch is too long."""
    for job in jobs:
        service.accepted(job)


def test_no_more_than_one_job_is_given_unless_asked_for(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue), new_job(queue))
    request = pb.ReserveRequest(queues=[queue], lease_duration=duration(1000))
    answer = pb.ReserveResponse.FromString(limited.exchange("Reserve", request.SerializeToString()))
    assert len(answer.jobs) == 1


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (3, 3), (4, 4), (5, 4), (2**32 - 1, 4)])
def test_the_number_of_jobs_is_clamped_to_the_limit(limited: Service, asked: int, given: int) -> None:
    queue = new_queue()
    limited.accepted(*[new_job(queue) for _ in range(6)])
    assert len(limited.reserve(queue, max_jobs=asked)) == given


@pytest.mark.parametrize(
    ("asked_ms", "given_ms"), [(59_999, 59_999), (60_000, 60_000), (60_001, 60_000), (HOUR_MS, 60_000)]
)
def test_the_lease_is_clamped_to_the_limit(limited: Service, asked_ms: int, given_ms: int) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue))
    before_ms = now_ms()
    (job,) = limited.reserve(queue, lease_ms=asked_ms)
    assert before_ms <= job.lease_expires_at.ToMilliseconds() - given_ms <= now_ms()


def test_the_lease_is_clamped_to_the_smallest_limit_of_the_queues_that_are_listed(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue))
    before_ms = now_ms()
    (job,) = limited.reserve(queue, "lean", lease_ms=HOUR_MS)
    assert job.queue == queue
    assert before_ms <= job.lease_expires_at.ToMilliseconds() - 5_000 <= now_ms()


def test_a_lease_that_rounds_to_nothing_is_one_millisecond(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue))
    request = reserve_request(queue)
    request.lease_duration.CopyFrom(Duration(nanos=1))
    before_ms = now_ms()
    (job,) = pb.ReserveResponse.FromString(limited.exchange("Reserve", request.SerializeToString())).jobs
    assert before_ms <= job.lease_expires_at.ToMilliseconds() - 1 <= now_ms()


def test_the_longest_valid_durations_are_clamped(limited: Service) -> None:
    request = reserve_request(new_queue())
    request.lease_duration.CopyFrom(Duration(seconds=315_576_000_000))
    request.wait_timeout.CopyFrom(Duration(seconds=315_576_000_000))
    assert limited.exchange("Reserve", request.SerializeToString()) == b""


def test_a_wait_is_clamped_to_the_limit(limited: Service) -> None:
    # The limit is 300 ms; the call itself would give up long before the wait that is asked for.
    assert limited.reserve(new_queue(), wait_ms=HOUR_MS) == []


def test_a_wait_that_is_over_is_answered_with_no_jobs(limited: Service) -> None:
    before_ms = now_ms()
    assert limited.reserve(new_queue(), wait_ms=100) == []
    assert now_ms() - before_ms >= 100


def test_without_a_wait_the_answer_comes_at_once(plain: Service) -> None:
    request = pb.ReserveRequest(queues=[new_queue()], lease_duration=duration(1000))
    assert plain.exchange("Reserve", request.SerializeToString()) == b""


def test_a_waiting_call_is_answered_as_soon_as_there_is_a_job(plain: Service) -> None:
    queue = new_queue()
    poll = plain.future("Reserve", reserve_request(queue, wait_ms=LONG_WAIT_MS))
    plain.reserve(queue)  # what was sent before over this connection has arrived
    assert not poll.done()
    (job_id,) = plain.accepted(new_job(queue))
    (job,) = pb.ReserveResponse.FromString(poll.result()).jobs
    assert job.id == job_id


def test_a_waiting_call_over_several_queues_is_answered_by_a_job_in_the_last(plain: Service) -> None:
    queues = [new_queue() for _ in range(5)]
    poll = plain.future("Reserve", reserve_request(*queues, wait_ms=LONG_WAIT_MS))
    plain.reserve(queues[0])
    (job_id,) = plain.accepted(new_job(queues[-1]))
    (job,) = pb.ReserveResponse.FromString(poll.result()).jobs
    assert (job.id, job.queue) == (job_id, queues[-1])


# ---- order


def test_queues_are_served_strictly_in_the_listed_order(limited: Service) -> None:
    queues = [new_queue() for _ in range(3)]
    for queue in reversed(queues):
        limited.accepted(new_job(queue, priority=queues.index(queue)), new_job(queue))
    taken = [job.queue for _ in range(3) for job in limited.reserve(*queues, max_jobs=2)]
    assert taken == [queues[0], queues[0], queues[1], queues[1], queues[2], queues[2]]


def test_one_answer_may_hold_jobs_of_several_queues(limited: Service) -> None:
    queues = [new_queue() for _ in range(3)]
    limited.accepted(*[new_job(queue) for queue in queues])
    assert [job.queue for job in limited.reserve(*queues, max_jobs=3)] == queues


def test_a_queue_that_is_listed_twice_is_served_once(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue), new_job(queue))
    assert len(limited.reserve(queue, queue, max_jobs=4)) == 2


def test_a_higher_priority_comes_first(limited: Service) -> None:
    queue = new_queue()
    enqueue_all(limited, *[new_job(queue, str(priority), priority=priority) for priority in (1, 9, 0, 5)])
    assert texts(limited.reserve(queue)) == ["9", "5", "1", "0"]


def test_equal_priorities_come_in_the_order_of_their_enqueue(limited: Service) -> None:
    queue = new_queue()
    for start in range(0, 12, 3):
        limited.accepted(*[new_job(queue, str(number)) for number in range(start, start + 3)])
    taken = [text for _ in range(3) for text in texts(limited.reserve(queue))]
    assert taken == [str(number) for number in range(12)]


def test_a_retried_job_goes_back_to_its_place(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(*[new_job(queue, text) for text in ("a", "b", "c")])
    first, second = limited.reserve(queue, max_jobs=2)
    limited.nack(second)
    limited.nack(first)
    assert texts(limited.reserve(queue)) == ["a", "b", "c"]


def test_a_job_that_comes_back_after_a_delay_goes_back_to_its_place(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue, "a"), new_job(queue, "b"))
    first, second = limited.reserve(queue)
    limited.nack(first, delay(1))
    limited.nack(limited.reserve_one(queue))
    limited.nack(second)
    assert texts(limited.reserve(queue)) == ["a", "b"]


def test_names_that_are_alike_are_different_queues(limited: Service) -> None:
    base = new_queue()
    names = [base, f"{base} ", base.upper(), f"{base}é", f"{base}e\u0301"]
    limited.accepted(*[new_job(name, name) for name in names])
    assert [texts(limited.reserve(name)) for name in names] == [[name] for name in names]


# ---- the job that is delivered


def test_the_first_delivery_is_attempt_1_and_each_other_one_more(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue, max_attempts=3))
    attempts = []
    for _ in range(3):
        job = limited.reserve_one(queue)
        attempts.append(job.attempt)
        limited.nack(job)
    assert attempts == [1, 2, 3]


def test_a_job_in_flight_is_not_delivered_again(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue))
    limited.reserve_one(queue)
    assert limited.reserve(queue) == []


def test_a_lease_that_runs_out_gives_the_job_to_the_next(limited: Service) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue))
    first = limited.reserve_one(queue, lease_ms=200)
    second = limited.reserve_one(queue)
    assert (second.id, second.attempt) == (first.id, 2)
    assert now_ms() >= first.lease_expires_at.ToMilliseconds()


def test_an_answer_is_cut_by_its_bytes_and_the_rest_stays_ready(plain: Service) -> None:
    queue = new_queue()
    enqueue_all(plain, *[new_job(queue, str(number) * MEBIBYTE) for number in range(5)])
    first = plain.reserve(queue)
    second = plain.reserve(queue)
    assert [text[0] for text in texts(first)] == ["0", "1", "2"]
    assert [(job.payload.data[:1], job.attempt) for job in second] == [(b"3", 1), (b"4", 1)]
