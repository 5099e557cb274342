"""DrainDeadLetters in a router's core: the oldest records of all shards, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common import queue_pb2 as pb
from common.wire import Op
from router.core import HOLD_MS
from router.front import Status
from tests.unit.router_driver import (
    INTERNAL,
    WALL_MS,
    FakeCall,
    RouterDriver,
    configured,
    drivers,
    job_id_on,
    queue_on,
)

LEFT, RIGHT = queue_on(0), queue_on(1)
MAX_BYTES = 65_536


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    yield from drivers(config=configured(limits={"max_response_bytes": MAX_BYTES}))


def drain(router: RouterDriver, queue: str | None = None, max_records: int | None = None, **options: Any) -> FakeCall:
    return router.call("DrainDeadLetters", pb.DrainDeadLettersRequest(queue=queue, max=max_records), **options)


def dead(queue: str, failed_after_ms: int, padding: int = 0) -> list[Any]:
    """A dead letter as a shard hands it out."""
    payload = pb.Payload(data=bytes(padding), encoding="e") if padding else None
    body = pb.Job(queue=queue, job_type="t", payload=payload).SerializeToString()
    return [job_id_on(queue, failed_after_ms), 1, WALL_MS + failed_after_ms, 3, "why", body]


def drained(router: RouterDriver, call: FakeCall) -> list[tuple[str, int]]:
    """Queue of each record, and how long after the start it failed, in ms."""
    records = router.answer(call, pb.DrainDeadLettersResponse).records
    return [(record.job.queue, record.failed_at.ToMilliseconds() - WALL_MS) for record in records]


def answer_both(router: RouterDriver, left: list[Any], right: list[Any]) -> tuple[int, int]:
    """Answer the drains of both shards; returns their op ids."""
    operations = [shard.operation() for shard in router.shards]
    for shard, operation, letters in zip(router.shards, operations, (left, right), strict=True):
        shard.answer(operation, letters)
    return operations[0][0], operations[1][0]


def test_the_dead_letters_of_one_queue_come_from_its_shard_alone(router: RouterDriver) -> None:
    call = drain(router, LEFT, 5)
    operation = router.shards[0].operation()
    assert operation[1:] == [Op.DRAIN, LEFT, 5, MAX_BYTES]
    assert router.shards[1].operations() == []
    router.shards[0].answer(operation, [dead(LEFT, 1)])
    (record,) = router.answer(call, pb.DrainDeadLettersResponse).records
    assert (record.job.queue, record.final_attempt, record.cause, record.last_reason) == (LEFT, 3, 1, "why")


def test_the_oldest_of_all_shards_are_drained_and_the_others_kept(router: RouterDriver) -> None:
    call = drain(router, max_records=3)
    left, right = answer_both(
        router, [dead(LEFT, 1), dead(LEFT, 4), dead(LEFT, 5)], [dead(RIGHT, 2), dead(RIGHT, 3), dead(RIGHT, 6)]
    )
    assert drained(router, call) == [(LEFT, 1), (RIGHT, 2), (RIGHT, 3)]
    for shard in router.shards:
        shard.envelopes()
    assert (router.shards[0].kept, router.shards[1].kept) == ([(left, 1)], [(right, 2)])


def test_a_drain_without_a_number_takes_one_record(router: RouterDriver) -> None:
    call = drain(router)
    answer_both(router, [dead(LEFT, 2)], [dead(RIGHT, 1)])
    assert drained(router, call) == [(RIGHT, 1)]


def test_an_answer_is_cut_by_bytes_over_all_shards(router: RouterDriver) -> None:
    call = drain(router, max_records=9)
    _, right = answer_both(router, [dead(LEFT, 1, MAX_BYTES // 2)], [dead(RIGHT, 2, MAX_BYTES // 2)])
    assert drained(router, call) == [(LEFT, 1)]
    router.shards[1].envelopes()
    assert router.shards[1].kept == [(right, 0)]


def test_a_record_is_drained_whatever_its_size(router: RouterDriver) -> None:
    call = drain(router, max_records=9)
    answer_both(router, [], [dead(RIGHT, 2, 2 * MAX_BYTES)])
    assert drained(router, call) == [(RIGHT, 2)]


def test_there_may_be_no_dead_letters(router: RouterDriver) -> None:
    call = drain(router)
    answer_both(router, [], [])
    assert drained(router, call) == []


def test_what_was_drained_is_confirmed_when_the_answer_has_left(router: RouterDriver) -> None:
    call = drain(router, max_records=2)
    left, right = answer_both(router, [dead(LEFT, 1)], [dead(RIGHT, 2)])
    router.left(call)
    for shard in router.shards:
        shard.envelopes()
    assert (router.shards[0].confirmed, router.shards[1].confirmed) == ([left], [right])


def test_what_was_drained_comes_back_when_the_answer_could_not_leave(router: RouterDriver) -> None:
    call = drain(router, max_records=2)
    left, right = answer_both(router, [dead(LEFT, 1)], [dead(RIGHT, 2)])
    router.left(call, False)
    for shard in router.shards:
        shard.envelopes()
    assert (router.shards[0].given_back, router.shards[1].given_back) == ([left], [right])


def test_a_busy_shard_hears_what_to_keep_before_it_hears_that_the_answer_has_left(router: RouterDriver) -> None:
    call = drain(router, LEFT)
    operation = router.shards[0].operation()
    for number in range(2):
        router.ack(job_id_on(LEFT, number))
    router.shards[0].envelopes()
    router.shards[0].send([operation[0], Status.OK, [dead(LEFT, 1), dead(LEFT, 2)]], number=0)
    router.left(call)
    assert router.shards[0].envelopes() == []
    router.shards[0].send()
    (envelope,) = router.shards[0].envelopes()
    assert [item[1] for item in envelope.items] == [Op.KEEP, Op.CONFIRM, Op.ACK]


def test_a_call_that_ends_before_all_shards_have_answered_gives_everything_back(router: RouterDriver) -> None:
    call = drain(router)
    left, right = (shard.operation() for shard in router.shards)
    router.shards[0].answer(left, [dead(LEFT, 1)])
    router.closed(call)
    router.shards[1].answer(right, [dead(RIGHT, 1)])
    for shard in router.shards:
        shard.envelopes()
    assert (router.shards[0].given_back, router.shards[1].given_back) == ([left[0]], [right[0]])


def test_a_drain_is_unavailable_when_a_shard_ends_before_it_answers(router: RouterDriver) -> None:
    call = drain(router)
    left, _ = (shard.operation() for shard in router.shards)
    router.shards[0].answer(left, [dead(LEFT, 1)])
    router.shards[1].down()
    assert router.failure(call).status == Status.UNAVAILABLE
    router.shards[0].envelopes()
    assert router.shards[0].given_back == [left[0]]


def test_a_drain_waits_for_a_shard_that_is_down_and_is_unavailable_when_it_stays_so(router: RouterDriver) -> None:
    router.shards[1].down()
    calls = [drain(router), drain(router)]
    operations = router.shards[0].operations()
    router.shards[0].send(*([operation[0], Status.OK, [dead(LEFT, 1)]] for operation in operations))
    router.closed(calls[1])
    router.pass_ms(HOLD_MS)
    assert router.failure(calls[0]).status == Status.UNAVAILABLE
    router.shards[0].envelopes()
    assert sorted(router.shards[0].given_back) == [operation[0] for operation in operations]


def test_a_failed_write_is_an_internal_error_of_a_drain(router: RouterDriver) -> None:
    call = drain(router, LEFT)
    router.shards[0].answer(router.shards[0].operation(), "the write failed", INTERNAL)
    assert router.failure(call).status == Status.INTERNAL
    router.shards[0].restart()


def test_a_drain_does_not_end_sooner_because_the_server_stops(router: RouterDriver) -> None:
    call = drain(router, LEFT)
    router.core.drain(router.now)
    router.shards[0].answer(router.shards[0].operation(), [dead(LEFT, 1)])
    assert drained(router, call) == [(LEFT, 1)]


def test_a_drain_whose_client_has_gone_is_not_held_for_a_shard_that_goes_down(router: RouterDriver) -> None:
    router.shards[0].crowd()
    call = drain(router, LEFT)
    router.closed(call)
    router.shards[0].down()
    assert router.core.next_timer_ms() is None
