"""Ack, nack and extend in a router's core."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from google.protobuf.duration_pb2 import Duration

from common import job_ids
from common import queue_pb2 as pb
from common.wire import Op, Strategy
from router.core import DEADLINE_MARGIN_MS, HOLD_MS
from router.front import Status
from tests.unit.router_driver import (
    INTERNAL,
    WALL_MS,
    FakeCall,
    RouterDriver,
    drivers,
    job_id_on,
    milliseconds,
    queue_on,
)

JOB = job_id_on(queue_on(1), 17)
JOB_TEXT = job_ids.text(JOB)


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    yield from drivers()


def ack(router: RouterDriver, deadline: float = float("inf")) -> FakeCall:
    return router.call("Ack", pb.AckRequest(job_id=JOB_TEXT, attempt=2), deadline)


def nack(router: RouterDriver, deadline: float = float("inf")) -> FakeCall:
    return router.call("Nack", pb.NackRequest(job_id=JOB_TEXT, attempt=2), deadline)


def extend(router: RouterDriver, deadline: float = float("inf")) -> FakeCall:
    request = pb.ExtendRequest(job_id=JOB_TEXT, attempt=2, lease_duration=milliseconds(5_000))
    return router.call("Extend", request, deadline)


EndOfLease = Callable[..., FakeCall]
all_three = pytest.mark.parametrize("send", [ack, nack, extend])


def test_an_ack_goes_to_the_shard_that_the_job_id_names(router: RouterDriver) -> None:
    call = ack(router)
    operation = router.shards[1].operation()
    assert operation[1:] == [Op.ACK, JOB, 2]
    router.shards[1].answer(operation)
    assert router.answer(call, pb.AckResponse).job_id == JOB_TEXT


def test_a_job_id_is_matched_whatever_its_case(router: RouterDriver) -> None:
    call = router.call("Ack", pb.AckRequest(job_id=JOB_TEXT.upper(), attempt=2))
    router.shards[1].serve()
    assert router.answer(call, pb.AckResponse).job_id == JOB_TEXT


@pytest.mark.parametrize(
    ("retry", "strategy", "delay_ms"),
    [
        (None, Strategy.DEFAULT, 0),
        (pb.NackRetry(delay=Duration(nanos=1_500_000)), Strategy.DELAY, 2),
        (pb.NackRetry(dead_letter={}), Strategy.DEAD_LETTER, 0),
    ],
)
def test_a_nack_carries_its_strategy_and_its_reason(
    router: RouterDriver, retry: pb.NackRetry | None, strategy: Strategy, delay_ms: int
) -> None:
    router.call("Nack", pb.NackRequest(job_id=JOB_TEXT, attempt=2, retry=retry, reason="why"))
    assert router.shards[1].operation()[1:] == [Op.NACK, JOB, 2, strategy, delay_ms, "why"]


@pytest.mark.parametrize("dead", [True, False])
def test_a_nack_is_told_whether_the_job_is_a_dead_letter_now(router: RouterDriver, dead: bool) -> None:
    call = nack(router)
    router.shards[1].answer(router.shards[1].operation(), dead)
    assert router.answer(call, pb.NackResponse) == pb.NackResponse(job_id=JOB_TEXT, dead_lettered=dead)


def test_an_extend_is_told_the_new_end_of_the_lease(router: RouterDriver) -> None:
    call = extend(router)
    operation = router.shards[1].operation()
    assert operation[1:] == [Op.EXTEND, JOB, 2, 5_000]
    router.shards[1].answer(operation, WALL_MS + 5_000)
    assert router.answer(call, pb.ExtendResponse).lease_expires_at.ToMilliseconds() == WALL_MS + 5_000


@all_three
@pytest.mark.parametrize("status", [Status.NOT_FOUND, Status.FAILED_PRECONDITION, INTERNAL])
def test_the_refusal_of_a_shard_is_passed_on(router: RouterDriver, send: EndOfLease, status: int) -> None:
    call = send(router)
    router.shards[1].answer(router.shards[1].operation(), "the shard's words", status)
    failure = router.failure(call)
    assert (failure.status, failure.text) == (status, "the shard's words")


@all_three
def test_it_is_aborted_and_not_repeated_when_the_shard_ends_before_it_answers(
    router: RouterDriver, send: EndOfLease
) -> None:
    call = send(router)
    router.shards[1].restart()
    assert router.failure(call).status == Status.ABORTED
    assert router.shards[1].operations() == []


@all_three
def test_it_waits_for_the_successor_of_a_shard_that_is_down(router: RouterDriver, send: EndOfLease) -> None:
    router.shards[1].down()
    call = send(router)
    router.pass_ms(HOLD_MS - 1)
    router.shards[1].up()
    router.shards[1].serve()
    assert router.answer(call, pb.AckResponse).job_id == JOB_TEXT


@all_three
def test_it_is_unavailable_when_its_shard_stays_down(router: RouterDriver, send: EndOfLease) -> None:
    router.shards[1].down()
    call = send(router)
    router.pass_ms(HOLD_MS - 1)
    assert not router.is_answered(call)
    router.pass_ms(1)
    assert router.failure(call).status == Status.UNAVAILABLE
    router.shards[1].up()
    assert router.shards[1].operations() == []


@all_three
def test_it_is_unavailable_just_before_its_deadline(router: RouterDriver, send: EndOfLease) -> None:
    router.shards[1].down()
    call = send(router, router.in_ms(700))
    router.pass_ms(700 - DEADLINE_MARGIN_MS)
    assert router.failure(call).status == Status.UNAVAILABLE


def test_it_is_unavailable_at_once_when_its_deadline_has_passed_already(router: RouterDriver) -> None:
    router.shards[1].down()
    call = ack(router, router.in_ms(-1))
    router.pass_ms(0)
    assert router.failure(call).status == Status.UNAVAILABLE


def test_what_had_gathered_when_the_shard_ended_goes_to_its_successor(router: RouterDriver) -> None:
    calls = [router.ack(job_id_on(queue_on(1), number)) for number in range(5)]
    assert len(router.shards[1].operations()) == 2
    router.shards[1].restart()
    assert [router.failure(call).status for call in calls[:2]] == [Status.ABORTED] * 2
    assert [operation[2] for operation in router.shards[1].operations()] == [
        job_id_on(queue_on(1), number) for number in range(2, 5)
    ]
