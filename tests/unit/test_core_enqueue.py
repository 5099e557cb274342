"""Enqueues in a router's core: from the batch to an operation for each shard, and back to one answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common import job_ids
from common import queue_pb2 as pb
from common.wire import Op, Outcome
from router.core import DEADLINE_MARGIN_MS, HOLD_MS
from router.front import Status
from tests.unit.router_driver import INTERNAL, FakeCall, RouterDriver, configured, drivers, job_id_on, queue_on

LEFT, RIGHT = queue_on(0), queue_on(1)
ATOMIC = "EnqueueAtomic"


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    yield from drivers()


def results(router: RouterDriver, call: FakeCall) -> list[str]:
    """What became of each job of a batch: its id, or the name of its rejection."""
    return [
        result.success.job_id if result.HasField("success") else str(result.rejection.WhichOneof("reason"))
        for result in router.answer(call, pb.EnqueueBatchResponse).results
    ]


def ids(*numbers_on: tuple[str, int]) -> list[str]:
    return [job_ids.text(job_id_on(queue, number)) for queue, number in numbers_on]


# ---- batches


def test_a_batch_for_one_shard_is_one_operation_with_random_bytes_for_each_job(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, LEFT)
    operation = router.shards[0].operation()
    assert operation[1:3] == [Op.ENQUEUE, bytes(6)]
    assert [job[0] for job in operation[3]] == [LEFT, LEFT]
    router.shards[0].answer(operation, [job_id_on(LEFT, 1), job_id_on(LEFT, 2)])
    assert results(router, call) == ids((LEFT, 1), (LEFT, 2))


def test_a_batch_over_two_shards_is_answered_in_its_own_order_when_both_have_answered(router: RouterDriver) -> None:
    call = router.enqueue(RIGHT, LEFT, RIGHT)
    left, right = (shard.operation() for shard in router.shards)
    router.shards[1].answer(right, [job_id_on(RIGHT, 1), job_id_on(RIGHT, 2)])
    assert not router.is_answered(call)
    router.shards[0].answer(left, [job_id_on(LEFT, 3)])
    assert results(router, call) == ids((RIGHT, 1), (LEFT, 3), (RIGHT, 2))


def test_rejected_jobs_keep_their_places_and_reach_no_shard(router: RouterDriver) -> None:
    call = router.enqueue("", LEFT, "..", LEFT)
    operation = router.shards[0].operation()
    assert len(operation[3]) == 2
    router.shards[0].answer(operation, [job_id_on(LEFT, 1), job_id_on(LEFT, 2)])
    first, second = ids((LEFT, 1), (LEFT, 2))
    assert results(router, call) == ["invalid_request", first, "invalid_request", second]


def test_a_batch_of_rejected_jobs_is_answered_at_once(router: RouterDriver) -> None:
    assert results(router, router.enqueue("", ".")) == ["invalid_request", "invalid_request"]


def test_a_shards_refusals_and_duplicates_are_told_job_by_job(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, LEFT, LEFT, LEFT)
    outcomes = [
        [Outcome.QUEUE_FULL, 7],
        [Outcome.DEDUPLICATED, job_id_on(LEFT, 1)],
        [Outcome.QUEUE_CLOSING],
        job_id_on(LEFT, 2),
    ]
    router.shards[0].answer(router.shards[0].operation(), outcomes)
    full, duplicate, closing, new = router.answer(call, pb.EnqueueBatchResponse).results
    assert full.rejection.queue_full == pb.QueueFull(queue=LEFT, limit=7)
    assert (duplicate.success.job_id, duplicate.success.deduplicated) == (*ids((LEFT, 1)), True)
    assert closing.rejection.queue_closing == pb.QueueClosing(queue=LEFT)
    assert (new.success.job_id, new.success.deduplicated) == (*ids((LEFT, 2)), False)


def test_a_batch_above_the_limit_is_refused_as_a_whole() -> None:
    router = RouterDriver(config=configured(limits={"max_enqueue_batch": 2}))
    assert router.failure(router.enqueue(LEFT, LEFT, LEFT)).status == Status.INVALID_ARGUMENT
    router.finish()


# ---- failures of a part


def test_a_batch_is_aborted_when_the_shard_of_a_part_ends_before_it_answers(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, RIGHT)
    router.shards[0].serve()
    router.shards[1].envelopes()
    router.shards[1].down()
    assert router.failure(call).status == Status.ABORTED


def test_a_batch_waits_for_its_other_parts_before_it_is_aborted(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, RIGHT)
    router.shards[1].down()
    assert not router.is_answered(call)
    router.shards[0].serve()
    assert router.failure(call).status == Status.ABORTED


def test_a_failed_write_of_a_part_is_an_internal_error_of_the_batch(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, RIGHT)
    router.shards[0].answer(router.shards[0].operation(), "the write failed", INTERNAL)
    router.shards[1].down()
    failure = router.failure(call)
    assert failure.status == Status.INTERNAL
    assert "the write failed" in failure.text


def test_a_batch_of_which_nothing_was_sent_is_unavailable(router: RouterDriver) -> None:
    for shard in router.shards:
        shard.down()
    call = router.enqueue(LEFT, RIGHT)
    router.pass_ms(HOLD_MS)
    assert router.failure(call).status == Status.UNAVAILABLE


def test_a_batch_of_which_one_part_was_stored_and_one_never_sent_is_aborted(router: RouterDriver) -> None:
    router.shards[1].down()
    call = router.enqueue(LEFT, RIGHT)
    router.shards[0].serve()
    assert not router.is_answered(call)
    router.pass_ms(HOLD_MS)
    assert router.failure(call).status == Status.ABORTED


def test_rejected_jobs_do_not_make_an_unsent_batch_look_as_if_it_had_been_stored(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.enqueue("", LEFT)
    router.pass_ms(HOLD_MS)
    assert router.failure(call).status == Status.UNAVAILABLE


# ---- a shard that is down


def test_a_batch_for_a_shard_that_is_down_is_sent_to_its_successor(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.enqueue(LEFT)
    router.pass_ms(HOLD_MS - 1)
    router.shards[0].up()
    router.shards[0].answer(router.shards[0].operation(), [job_id_on(LEFT, 5)])
    assert results(router, call) == ids((LEFT, 5))


def test_a_batch_that_waits_for_a_shard_is_unavailable_just_before_its_deadline(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.enqueue(LEFT, deadline=router.in_ms(2_000))
    router.pass_ms(2_000 - DEADLINE_MARGIN_MS - 1)
    assert not router.is_answered(call)
    router.pass_ms(1)
    assert router.failure(call).status == Status.UNAVAILABLE
    router.shards[0].up()
    assert router.shards[0].operations() == []


def test_a_batch_that_has_reached_the_successor_waits_for_its_answer_past_the_hold(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.enqueue(LEFT)
    router.shards[0].up()
    router.pass_ms(HOLD_MS)
    assert not router.is_answered(call)
    router.shards[0].serve()
    assert results(router, call) == ids((LEFT, 0))


# ---- atomic batches


def test_an_atomic_batch_on_one_shard_is_one_operation(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, LEFT, method=ATOMIC)
    operation = router.shards[0].operation()
    assert operation[1:3] == [Op.ENQUEUE_ATOMIC, bytes(6)]
    router.shards[0].answer(operation, [True, [job_id_on(LEFT, 1), [Outcome.DEDUPLICATED, job_id_on(LEFT, 9)]]])
    responses = router.answer(call, pb.EnqueueAtomicResponse).success.responses
    assert [response.job_id for response in responses] == ids((LEFT, 1), (LEFT, 9))
    assert [response.deduplicated for response in responses] == [False, True]


def test_an_atomic_batch_with_rejected_jobs_reaches_no_shard(router: RouterDriver) -> None:
    call = router.enqueue("", LEFT, ".", method=ATOMIC)
    errors = router.answer(call, pb.EnqueueAtomicResponse).rejection.errors
    assert [(error.index, error.rejection.WhichOneof("reason")) for error in errors] == [
        (0, "invalid_request"),
        (2, "invalid_request"),
    ]
    assert router.shards[0].operations() == []


def test_the_refusals_of_a_shard_reject_an_atomic_batch(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, LEFT, LEFT, method=ATOMIC)
    refusals = [[2, [Outcome.QUEUE_CLOSING]], [0, [Outcome.QUEUE_FULL, 3]]]
    router.shards[0].answer(router.shards[0].operation(), [False, refusals])
    errors = router.answer(call, pb.EnqueueAtomicResponse).rejection.errors
    assert [(error.index, error.rejection.WhichOneof("reason")) for error in errors] == [
        (0, "queue_full"),
        (2, "queue_closing"),
    ]


def test_an_atomic_batch_is_aborted_when_its_shard_ends_before_it_answers(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, method=ATOMIC)
    router.shards[0].restart()
    assert router.failure(call).status == Status.ABORTED
    assert router.shards[0].operations() == []


def test_an_atomic_batch_that_was_never_sent_is_unavailable(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.enqueue(LEFT, method=ATOMIC)
    router.pass_ms(HOLD_MS)
    assert router.failure(call).status == Status.UNAVAILABLE


def test_a_failed_write_is_an_internal_error_of_an_atomic_batch(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, method=ATOMIC)
    router.shards[0].answer(router.shards[0].operation(), "the write failed", INTERNAL)
    assert router.failure(call).status == Status.INTERNAL
