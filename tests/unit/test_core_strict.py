"""Strict mode in a router's core: undeclared queues that have jobs or dead letters may still be used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common import queue_pb2 as pb
from common.wire import Op
from router.core import HOLD_MS
from router.front import Status
from tests.unit.router_driver import INTERNAL, RouterDriver, configured, drivers, leased, queue_on

LEFT, RIGHT = queue_on(0), queue_on(1)
LEFT_TOO = queue_on(0, 1)
DECLARED = queue_on(0, 2)


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    yield from drivers(config=configured(server={"strict_queues": True}, queues=[{"name": DECLARED}]))


def test_nothing_is_asked_about_declared_queues(router: RouterDriver) -> None:
    router.enqueue(DECLARED)
    assert router.shards[0].operation()[1] == Op.ENQUEUE


def test_each_shard_is_asked_once_about_its_undeclared_queues(router: RouterDriver) -> None:
    router.enqueue(LEFT_TOO, RIGHT, LEFT, DECLARED, LEFT)
    assert router.shards[0].operation()[1:] == [Op.KNOWN, sorted([LEFT, LEFT_TOO])]
    assert router.shards[1].operation()[1:] == [Op.KNOWN, [RIGHT]]


def test_jobs_of_known_queues_are_enqueued_and_those_of_unknown_ones_rejected(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, RIGHT)
    router.shards[0].answer(router.shards[0].operation(), [True])
    assert router.shards[0].operations() == []
    router.shards[1].answer(router.shards[1].operation(), [False])
    router.shards[0].serve()
    stored, rejected = router.answer(call, pb.EnqueueBatchResponse).results
    assert stored.HasField("success")
    assert rejected.rejection.unknown_queue.queue == RIGHT


def test_an_atomic_batch_for_an_unknown_queue_is_rejected(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, method="EnqueueAtomic")
    router.serve()
    (error,) = router.answer(call, pb.EnqueueAtomicResponse).rejection.errors
    assert (error.index, error.rejection.unknown_queue.queue) == (0, LEFT)


def test_a_known_queue_is_reserved_from(router: RouterDriver) -> None:
    call = router.reserve(LEFT)
    router.shards[0].answer(router.shards[0].operation(), [True])
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]


def test_a_reserve_from_an_unknown_queue_is_refused(router: RouterDriver) -> None:
    call = router.reserve(LEFT, DECLARED, RIGHT)
    router.serve()
    failure = router.failure(call)
    assert failure.status == Status.FAILED_PRECONDITION
    assert LEFT in failure.text and RIGHT in failure.text and DECLARED not in failure.text


def test_a_lost_question_is_asked_again(router: RouterDriver) -> None:
    router.enqueue(LEFT)
    asked = router.shards[0].operation()
    router.shards[0].restart()
    again = router.shards[0].operation()
    assert again[1:] == asked[1:]


def test_a_question_that_cannot_be_asked_makes_the_call_unavailable(router: RouterDriver) -> None:
    router.shards[0].down()
    calls = [router.enqueue(LEFT), router.reserve(LEFT, RIGHT)]
    router.pass_ms(HOLD_MS)
    assert [router.failure(call).status for call in calls] == [Status.UNAVAILABLE] * 2


def test_a_call_that_was_answered_is_not_taken_up_again_when_another_shard_ends(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.enqueue(LEFT, RIGHT)
    router.shards[1].envelopes()
    router.pass_ms(HOLD_MS)
    assert router.failure(call).status == Status.UNAVAILABLE
    router.shards[1].down()
    router.pass_ms(HOLD_MS)
    for shard in router.shards:
        shard.up()
        assert shard.operations() == []


def test_a_question_that_has_been_asked_is_waited_for_past_the_hold(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.enqueue(LEFT)
    router.shards[0].up()
    router.pass_ms(HOLD_MS)
    assert not router.is_answered(call)
    router.serve()
    (result,) = router.answer(call, pb.EnqueueBatchResponse).results
    assert result.rejection.unknown_queue.queue == LEFT


def test_a_failed_write_beside_a_question_is_an_internal_error(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, RIGHT)
    router.shards[0].answer(router.shards[0].operation(), "the write failed", INTERNAL)
    assert router.failure(call).status == Status.INTERNAL
    router.shards[1].answer(router.shards[1].operation(), [True])
    assert router.shards[1].operations() == []


def test_a_reserve_that_ends_while_its_queues_are_asked_about_reserves_nothing(router: RouterDriver) -> None:
    call = router.reserve(LEFT, wait_ms=60_000)
    asked = router.shards[0].operation()
    router.closed(call)
    router.shards[0].answer(asked, [True])
    assert router.shards[0].operations() == []


def test_a_reserve_that_waits_for_a_question_when_the_server_stops_does_not_wait_for_jobs(
    router: RouterDriver,
) -> None:
    call = router.reserve(LEFT, wait_ms=60_000)
    router.core.drain(router.now)
    router.shards[0].answer(router.shards[0].operation(), [True])
    router.serve()
    assert router.reserved(call) == []
