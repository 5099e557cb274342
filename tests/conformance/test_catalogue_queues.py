"""Rejections that come from the state of a queue, and what a rejection of one job means for the others."""

from __future__ import annotations

import pytest

from common import queue_pb2 as pb
from tests.conformance.conftest import CAPPED
from tests.conformance.service import Service, new_job, new_queue, now_ms
from tests.integration.server import Server

FAR_MS = 3_600_000


@pytest.fixture
def capped(request: pytest.FixtureRequest) -> str:
    """A queue of depth 2 for this test alone."""
    return CAPPED[FILLING.index(request.function)]


def full(queue: str, limit: int = 2) -> pb.JobRejection:
    return pb.JobRejection(queue_full=pb.QueueFull(queue=queue, limit=limit))


# ---- one job and its batch


def test_a_rejected_job_leaves_the_rest_of_its_batch_alone(limited: Service) -> None:
    queue = new_queue()
    results = limited.enqueue(new_job(queue), new_job(queue, priority=10), new_job(queue))
    assert [result.WhichOneof("outcome") for result in results] == ["success", "rejection", "success"]
    accepted = [results[0].success.job_id, results[2].success.job_id]
    assert [job.id for job in limited.reserve(queue)] == accepted


def test_a_batch_in_which_every_job_is_rejected_is_no_error(limited: Service) -> None:
    results = limited.enqueue(new_job(""), new_job("a/b"))
    assert [result.rejection.WhichOneof("reason") for result in results] == ["invalid_request"] * 2


def test_an_atomic_batch_reports_each_job_at_fault_by_its_index(limited: Service) -> None:
    queue = new_queue()
    answer = limited.enqueue_atomic(new_job(queue), new_job(queue, job_type=13 * "x"), new_job(queue), new_job("."))
    assert answer.WhichOneof("outcome") == "rejection"
    found = [(error.index, error.rejection.WhichOneof("reason")) for error in answer.rejection.errors]
    assert found == [(1, "job_type_name_too_long"), (3, "invalid_request")]


def test_an_atomic_batch_with_a_job_at_fault_stores_nothing(limited: Service) -> None:
    queue = new_queue()
    limited.enqueue_atomic(new_job(queue), new_job(queue, priority=10))
    assert limited.reserve(queue) == []


# ---- UnknownQueue


def test_strict_mode_rejects_an_undeclared_queue(strict: Service) -> None:
    queue = new_queue()
    assert strict.rejection(new_job(queue)) == pb.JobRejection(unknown_queue=pb.UnknownQueue(queue=queue))


def test_strict_mode_takes_jobs_for_a_declared_queue(strict: Service) -> None:
    strict.accepted(new_job("known"))


def test_strict_mode_rejects_an_undeclared_queue_in_an_atomic_batch(strict: Service) -> None:
    queue = new_queue()
    (error,) = strict.enqueue_atomic(new_job("known"), new_job(queue)).rejection.errors
    assert (error.index, error.rejection) == (1, pb.JobRejection(unknown_queue=pb.UnknownQueue(queue=queue)))


def test_without_strict_mode_the_first_job_makes_the_queue(limited: Service) -> None:
    queue = new_queue()
    (job_id,) = limited.accepted(new_job(queue))
    assert limited.reserve_one(queue).id == job_id


def test_strict_mode_knows_an_undeclared_queue_while_it_has_jobs() -> None:
    with Server(toml="") as server:
        before = Service(server.start().address)
        (job_id,) = before.accepted(new_job("older"))
        before.close()
        assert server.stop() == 0
        (server.home / "sepp.toml").write_text("[server]\nstrict_queues = true\n")
        service = Service(server.restart().address)
        (second_id,) = service.accepted(new_job("older"))
        jobs = service.reserve("older")
        assert [job.id for job in jobs] == [job_id, second_id]
        for job in jobs:
            service.ack(job)
        assert service.rejection(new_job("older")).WhichOneof("reason") == "unknown_queue"
        service.close()


# ---- QueueFull


def test_a_queue_takes_jobs_up_to_its_depth(limited: Service, capped: str) -> None:
    limited.accepted(new_job(capped))
    limited.accepted(new_job(capped))
    assert limited.rejection(new_job(capped)) == full(capped)


def test_a_full_queue_takes_jobs_again_after_an_ack(limited: Service, capped: str) -> None:
    limited.accepted(new_job(capped), new_job(capped))
    assert limited.rejection(new_job(capped)) == full(capped)
    limited.ack(limited.reserve_one(capped))
    limited.accepted(new_job(capped))


def test_jobs_in_flight_count_for_the_depth(limited: Service, capped: str) -> None:
    limited.accepted(new_job(capped), new_job(capped))
    assert len(limited.reserve(capped)) == 2
    assert limited.rejection(new_job(capped)) == full(capped)


def test_scheduled_jobs_count_for_the_depth(limited: Service, capped: str) -> None:
    later = new_job(capped)
    later.scheduled_at.FromMilliseconds(now_ms() + FAR_MS // 2)
    limited.accepted(later, later)
    assert limited.rejection(new_job(capped)) == full(capped)


def test_jobs_earlier_in_the_same_batch_count_for_the_depth(limited: Service, capped: str) -> None:
    results = limited.enqueue(*[new_job(capped) for _ in range(4)])
    assert [result.WhichOneof("outcome") for result in results] == ["success", "success", "rejection", "rejection"]
    assert [result.rejection for result in results[2:]] == [full(capped)] * 2


def test_a_depth_of_zero_rejects_every_job(limited: Service) -> None:
    assert limited.rejection(new_job("shut")) == full("shut", 0)


def test_without_a_depth_a_queue_takes_any_number_of_jobs(plain: Service) -> None:
    queue = new_queue()
    for _ in range(4):
        plain.accepted(*[new_job(queue) for _ in range(256)])


def test_an_idempotency_hit_is_a_success_although_the_queue_is_full(limited: Service, capped: str) -> None:
    job_id, _ = limited.accepted(new_job(capped, idempotency_key="k"), new_job(capped))
    (result,) = limited.enqueue(new_job(capped, idempotency_key="k"))
    assert (result.success.job_id, result.success.deduplicated) == (job_id, True)


def test_an_atomic_batch_that_fits_a_queue_exactly_is_stored(limited: Service, capped: str) -> None:
    answer = limited.enqueue_atomic(new_job(capped), new_job(capped))
    assert len(answer.success.responses) == 2
    assert limited.rejection(new_job(capped)) == full(capped)


def test_an_atomic_batch_over_the_depth_is_rejected_with_every_job_of_that_queue(limited: Service, capped: str) -> None:
    limited.accepted(new_job(capped))
    answer = limited.enqueue_atomic(new_job(capped), new_job(capped))
    assert [(error.index, error.rejection) for error in answer.rejection.errors] == [
        (0, full(capped)),
        (1, full(capped)),
    ]
    assert len(limited.reserve(capped)) == 1


def test_an_atomic_batch_counts_idempotency_hits_as_new_jobs(limited: Service, capped: str) -> None:
    limited.accepted(new_job(capped, idempotency_key="k"), new_job(capped))
    answer = limited.enqueue_atomic(new_job(capped, idempotency_key="k"))
    assert [error.rejection for error in answer.rejection.errors] == [full(capped)]


# By its place here a test gets a queue of its own.
FILLING = [
    test_a_queue_takes_jobs_up_to_its_depth,
    test_a_full_queue_takes_jobs_again_after_an_ack,
    test_jobs_in_flight_count_for_the_depth,
    test_scheduled_jobs_count_for_the_depth,
    test_jobs_earlier_in_the_same_batch_count_for_the_depth,
    test_an_idempotency_hit_is_a_success_although_the_queue_is_full,
    test_an_atomic_batch_that_fits_a_queue_exactly_is_stored,
    test_an_atomic_batch_over_the_depth_is_rejected_with_every_job_of_that_queue,
    test_an_atomic_batch_counts_idempotency_hits_as_new_jobs,
]
