"""Slots that have another owner, in a router's core: every call is done once, where its slot is, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common import queue_pb2 as pb
from common.slots import slot_of
from common.wire import MOVED, AdminCommand, Op, Question, Vote
from router.front import Status
from tests.unit.router_driver import RouterDriver, drivers, job_id_on, leased, queue_on

LEFT, RIGHT = queue_on(0), queue_on(1)
OTHER_LEFT = queue_on(0, 1)
JOB = job_id_on(LEFT)
ATOMIC = "EnqueueAtomic"
WAIT_MS = 10_000


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    yield from drivers()


def kinds(router: RouterDriver, shard: int) -> list[Any]:
    """What a shard is sent: kinds of operations with their first argument that is not random."""
    return [(operation[1], operation[2]) for operation in router.shards[shard].operations()]


def queues_of(operations: list[list[Any]]) -> list[list[str]]:
    return [[job[0] for job in operation[3]] for operation in operations]


# ---- what was sent to a former owner comes back


def test_an_ack_that_comes_back_is_sent_to_the_new_owner(router: RouterDriver) -> None:
    call = router.ack(JOB, attempt=3)
    sent = router.shards[0].operation()
    router.move(LEFT, target=1)
    router.shards[0].moved(sent)
    again = router.shards[1].operation()
    assert again[1:] == [Op.ACK, JOB, 3]
    router.shards[1].answer(again)
    assert router.answer(call, pb.AckResponse).job_id


def test_what_comes_back_before_the_map_has_come_waits_for_it(router: RouterDriver) -> None:
    call = router.ack(JOB)
    router.shards[0].moved(router.shards[0].operation())
    assert (router.shards[0].operations(), router.shards[1].operations()) == ([], [])
    router.move(LEFT, target=1)
    router.shards[1].answer(router.shards[1].operation())
    assert router.is_answered(call)


def test_what_had_not_been_sent_goes_to_the_new_owner_at_once(router: RouterDriver) -> None:
    for number in range(2):
        router.ack(job_id_on(OTHER_LEFT, number))
    router.ack(JOB)
    router.move(LEFT, target=1)
    assert kinds(router, 1) == [(Op.ACK, JOB)]


def test_operations_on_slots_that_stay_are_not_touched(router: RouterDriver) -> None:
    router.shards[0].crowd()
    router.enqueue(OTHER_LEFT)
    router.move(LEFT, target=1)
    assert router.shards[1].operations() == []
    router.shards[0].send()
    assert queues_of(router.shards[0].operations()) == [[OTHER_LEFT]]


def test_only_those_jobs_of_a_batch_move_whose_slots_have(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, OTHER_LEFT, LEFT)
    sent = router.shards[0].operation()
    router.move(LEFT, target=1)
    router.shards[0].moved(sent)
    stayed, moved = router.shards[0].operation(), router.shards[1].operation()
    assert queues_of([stayed, moved]) == [[OTHER_LEFT], [LEFT, LEFT]]
    router.shards[1].answer(moved, [job_id_on(LEFT, 1), job_id_on(LEFT, 2)])
    router.shards[0].answer(stayed, [job_id_on(OTHER_LEFT, 3)])
    results = router.answer(call, pb.EnqueueBatchResponse).results
    assert [result.HasField("success") for result in results] == [True, True, True]


def test_an_atomic_batch_of_one_shard_that_comes_back_in_part_becomes_a_transaction(router: RouterDriver) -> None:
    router.enqueue(LEFT, OTHER_LEFT, method=ATOMIC)
    sent = router.shards[0].operation()
    assert sent[1] == Op.ENQUEUE_ATOMIC
    router.move(LEFT, target=1)
    router.shards[0].moved(sent)
    assert [router.shards[shard].operation()[1] for shard in (0, 1)] == [Op.PREPARE, Op.PREPARE]


def test_a_transaction_a_part_of_which_comes_back_lets_go_and_begins_again_by_the_new_map(router: RouterDriver) -> None:
    call = router.enqueue(LEFT, RIGHT, method=ATOMIC)
    left, right = router.shards[0].operation(), router.shards[1].operation()
    router.shards[1].answer(right, [Vote.YES, [job_id_on(RIGHT)]])
    router.move(LEFT, target=1)
    router.shards[0].moved(left)
    abort, again = router.shards[1].operations()
    assert abort[1:] == [Op.ABORT, right[2]]
    assert again[1] == Op.ENQUEUE_ATOMIC and queues_of([again]) == [[LEFT, RIGHT]]
    router.shards[0].serve()  # an abort as well: it may have prepared for all that is known
    router.shards[1].answer(abort)
    router.shards[1].answer(again, [True, [job_id_on(LEFT), job_id_on(RIGHT)]])
    assert router.answer(call, pb.EnqueueAtomicResponse).HasField("success")


def test_a_question_of_an_operator_that_comes_back_is_told_so(router: RouterDriver) -> None:
    answers: list[tuple[int, Any]] = []
    router.core.ask(0, [Op.ADMIN, AdminCommand.QUEUE, LEFT], lambda *answer: answers.append(answer), router.now)
    sent = router.shards[0].operation()
    router.move(LEFT, target=1)
    router.shards[0].moved(sent)
    assert answers == [(MOVED, None)]


def test_a_drain_of_a_queue_that_comes_back_is_asked_of_the_new_owner(router: RouterDriver) -> None:
    router.call("DrainDeadLetters", pb.DrainDeadLettersRequest(queue=LEFT, max=5))
    sent = router.shards[0].operation()
    router.move(LEFT, target=1)
    router.shards[0].moved(sent)
    assert kinds(router, 1) == [(Op.DRAIN, LEFT)]


# ---- order


def test_what_comes_back_goes_before_what_was_begun_later(router: RouterDriver) -> None:
    router.ack(JOB, attempt=1)
    first = router.shards[0].operation()
    router.move(LEFT, target=1)
    router.ack(JOB, attempt=2)
    assert router.shards[1].operations() == []  # it waits for the one that is out
    router.shards[0].moved(first)
    assert [operation[3] for operation in router.shards[1].operations()] == [1, 2]


def test_what_was_done_by_the_former_owner_sets_free_what_was_begun_later(router: RouterDriver) -> None:
    router.ack(JOB, attempt=1)
    first = router.shards[0].operation()
    router.move(LEFT, target=1)
    router.ack(JOB, attempt=2)
    router.shards[0].answer(first)
    assert [operation[3] for operation in router.shards[1].operations()] == [2]


def test_the_end_of_the_former_owner_sets_free_what_was_begun_later(router: RouterDriver) -> None:
    router.ack(JOB, attempt=1)
    router.shards[0].operation()
    router.move(LEFT, target=1)
    router.ack(JOB, attempt=2)
    router.shards[0].down()
    assert [operation[3] for operation in router.shards[1].operations()] == [2]


def test_all_that_comes_back_early_keeps_its_order_before_what_is_sent_by_the_new_map(router: RouterDriver) -> None:
    for attempt in (1, 2):
        router.ack(JOB, attempt=attempt)
    first, second = router.shards[0].operations()
    router.ack(JOB, attempt=3)  # not sent: two envelopes are out
    router.shards[0].waiting.pop(first[0])
    router.shards[0].send([first[0], MOVED, 2], number=0)
    router.move(LEFT, target=1)
    router.ack(JOB, attempt=4)
    router.shards[0].moved(second)
    assert [operation[3] for operation in router.shards[1].operations()] == [1, 2, 3, 4]


def test_a_parked_poll_holds_up_nobody(router: RouterDriver) -> None:
    router.reserve(LEFT, wait_ms=WAIT_MS)
    router.shards[0].operation()
    router.move(LEFT, target=1)
    router.ack(JOB)
    assert kinds(router, 1) == [(Op.ACK, JOB)]


# ---- polls


def test_a_parked_poll_that_comes_back_waits_at_the_new_owner_for_what_is_left_of_its_time(
    router: RouterDriver,
) -> None:
    call = router.reserve(LEFT, wait_ms=WAIT_MS)
    parked = router.shards[0].operation()
    router.pass_ms(WAIT_MS - 1_000)
    router.move(LEFT, target=1)
    router.shards[0].moved(parked)
    again = router.shards[1].operation()
    assert again[1:3] == [Op.RESERVE, [LEFT]]
    router.pass_ms(999)
    assert not router.is_answered(call)
    router.pass_ms(1)
    (cancel,) = router.shards[1].operations()
    assert cancel[1:] == [Op.CANCEL, again[0]]
    router.shards[1].answer(cancel)
    assert router.reserved(call) == []


def test_a_poll_that_moved_is_given_the_job_that_comes_after_it(router: RouterDriver) -> None:
    call = router.reserve(LEFT, wait_ms=WAIT_MS)
    parked = router.shards[0].operation()
    router.move(LEFT, target=1)
    router.shards[0].moved(parked)
    router.shards[1].answer(router.shards[1].operation(), [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]


def test_a_poll_of_one_shard_whose_queues_part_watches_both(router: RouterDriver) -> None:
    router.reserve(LEFT, OTHER_LEFT, wait_ms=WAIT_MS)
    parked = router.shards[0].operation()
    router.move(LEFT, target=1)
    router.shards[0].moved(parked)
    first = router.shards[1].operation()
    assert (first[1], first[2]) == (Op.RESERVE, [LEFT])
    router.shards[1].answer(first, [])
    second = router.shards[0].operation()
    assert (second[1], second[2]) == (Op.RESERVE, [OTHER_LEFT])
    router.shards[0].answer(second, [])
    assert kinds(router, 0) == [(Op.WATCH, [OTHER_LEFT])]
    assert kinds(router, 1) == [(Op.WATCH, [LEFT])]


def test_a_poll_whose_queues_come_together_is_parked_in_one_place(router: RouterDriver) -> None:
    router.reserve(LEFT, RIGHT, wait_ms=WAIT_MS)
    for shard in (0, 1):
        router.shards[shard].answer(router.shards[shard].operation(), [])
    left, right = router.shards[0].operation(), router.shards[1].operation()
    router.move(LEFT, target=1)
    router.shards[0].moved(left)
    cancel, parked = router.shards[1].operations()
    assert cancel[1:] == [Op.CANCEL, right[0]]
    assert parked[1:3] == [Op.RESERVE, [LEFT, RIGHT]] and parked[5]


def test_a_poll_whose_shard_ends_after_its_queue_has_moved_does_not_wait_there_any_more(router: RouterDriver) -> None:
    router.reserve(LEFT, RIGHT, wait_ms=WAIT_MS)
    for shard in (0, 1):
        router.shards[shard].answer(router.shards[shard].operation(), [])
    _, right = router.shards[0].operation(), router.shards[1].operation()
    router.move(LEFT, target=1)
    router.shards[0].restart()
    cancel, parked = router.shards[1].operations()
    assert cancel[1:] == [Op.CANCEL, right[0]]
    assert parked[1:3] == [Op.RESERVE, [LEFT, RIGHT]]
    assert router.shards[0].operations() == []


def test_a_poll_that_has_jobs_already_is_answered_with_them_when_the_next_claim_comes_back(
    router: RouterDriver,
) -> None:
    call = router.reserve(LEFT, RIGHT, max_jobs=5)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    sent = router.shards[1].operation()
    router.move(RIGHT, target=0)
    router.shards[1].moved(sent)
    assert router.reserved(call) == [(LEFT, 1)]


def test_a_poll_that_is_given_up_while_it_is_on_its_way_back_is_not_claimed_for_again(router: RouterDriver) -> None:
    call = router.reserve(LEFT, wait_ms=WAIT_MS)
    parked = router.shards[0].operation()
    router.closed(call)
    router.move(LEFT, target=1)
    router.shards[0].moved(parked)
    assert router.shards[1].operations() == []


# ---- shards that come and go


def resize(router: RouterDriver, shards: int) -> None:
    router.core.map_changed(router.core.slot_map.resized(shards), router.now)


def empty_the_second_shard(router: RouterDriver) -> None:
    slots = router.core.slot_map.slots_of(1)
    router.core.map_changed(router.core.slot_map.moved(slots, 0), router.now)


def test_what_goes_to_a_shard_that_was_taken_away_goes_to_the_owner(router: RouterDriver) -> None:
    router.reserve(RIGHT, wait_ms=WAIT_MS)
    router.shards[1].operation()
    empty_the_second_shard(router)
    resize(router, 1)
    assert kinds(router, 0) == [(Op.RESERVE, [RIGHT])]
    router.shards[1].generation = 0
    router.shards[1].waiting.clear()
    del router.shards[1:]


def test_a_transaction_whose_home_was_taken_away_is_aborted_where_it_is_asked_about(router: RouterDriver) -> None:
    empty_the_second_shard(router)
    resize(router, 1)
    router.shards[1].generation = 0
    del router.shards[1:]
    router.shards[0].send([0, Status.OK, [Question.RESOLVE, 7, 1, "router-9"]], number=0)
    abort = router.shards[0].operation()
    assert abort[1:] == [Op.ABORT, 7]
    router.shards[0].answer(abort)


def test_a_decision_whose_other_shard_was_taken_away_is_forgotten(router: RouterDriver) -> None:
    empty_the_second_shard(router)
    resize(router, 1)
    router.shards[1].generation = 0
    del router.shards[1:]
    router.shards[0].send([0, Status.OK, [Question.FINISH, 7, [1]]], number=0)
    forget = router.shards[0].operation()
    assert forget[1:] == [Op.FORGET, 7]
    router.shards[0].answer(forget)


def test_a_shard_that_was_added_is_sent_what_is_about_its_slots(router: RouterDriver) -> None:
    resize(router, 3)
    router.shards.append(type(router.shards[0])(router, 2))
    router.shards[2].up()
    router.move(LEFT, target=2)
    router.enqueue(LEFT)
    assert queues_of(router.shards[2].operations()) == [[LEFT]]
    assert router.core.slot_map.owners[slot_of(LEFT)] == 2
