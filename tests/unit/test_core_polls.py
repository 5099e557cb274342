"""Reserve in a router's core: claims, waits, watches, and shards that come and go meanwhile.

What becomes of a poll whose call ends is in `test_core_poll_ends`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common import job_ids
from common import queue_pb2 as pb
from common.wire import JOB_OVERHEAD_BYTES, Op
from router.core import DEADLINE_MARGIN_MS, HOLD_MS
from router.front import Status
from tests.unit.router_driver import (
    INTERNAL,
    WALL_MS,
    RouterDriver,
    configured,
    drivers,
    job_id_on,
    leased,
    queue_on,
)

LEFT, RIGHT = queue_on(0), queue_on(1)
LEFT_TOO = queue_on(0, 1)
MAX_BYTES = 65_536
SETTLES = 7


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    """A router whose Reserve answers are small."""
    yield from drivers(config=configured(limits={"max_response_bytes": MAX_BYTES}))


def reserve_operation(queues: list[str], max_jobs: int = 1, may_wait: bool = False, size: int = 0) -> list[Any]:
    return [Op.RESERVE, queues, max_jobs, 30_000, may_wait, MAX_BYTES - size, 0]


# ---- one shard


def test_queues_of_one_shard_are_reserved_with_one_operation_in_the_listed_order(router: RouterDriver) -> None:
    router.reserve(LEFT_TOO, LEFT, max_jobs=5)
    assert router.shards[0].operation()[1:] == reserve_operation([LEFT_TOO, LEFT], 5)


def test_a_reserved_job_carries_its_id_attempt_and_end_of_lease(router: RouterDriver) -> None:
    call = router.reserve(LEFT)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT, number=4, attempt=3)])
    (job,) = router.answer(call, pb.ReserveResponse).jobs
    assert (job.id, job.queue, job.attempt) == (job_ids.text(job_id_on(LEFT, 4)), LEFT, 3)
    assert job.lease_expires_at.ToMilliseconds() == WALL_MS + 30_000
    assert job.enqueued_at.ToMilliseconds() == WALL_MS


def test_a_reserve_that_does_not_wait_is_answered_with_nothing_when_there_is_nothing(router: RouterDriver) -> None:
    call = router.reserve(LEFT)
    router.shards[0].answer(router.shards[0].operation(), [])
    assert router.reserved(call) == []


def test_a_poll_is_parked_in_its_shard_and_answered_by_the_first_job(router: RouterDriver) -> None:
    call = router.reserve(LEFT, wait_ms=60_000)
    operation = router.shards[0].operation()
    assert operation[1:] == reserve_operation([LEFT], may_wait=True)
    router.pass_ms(59_999)
    assert not router.is_answered(call)
    router.shards[0].answer(operation, [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]


def test_a_failed_write_is_an_internal_error_and_what_it_may_have_claimed_is_given_back(router: RouterDriver) -> None:
    call = router.reserve(LEFT, wait_ms=60_000)
    operation = router.shards[0].operation()
    router.shards[0].answer(operation, "the write failed", INTERNAL)
    assert router.failure(call).status == Status.INTERNAL
    router.shards[0].restart()
    router.shards[0].envelopes()
    assert router.shards[0].given_back == [operation[0]]


# ---- several shards


def test_shards_are_claimed_from_one_after_the_other_in_the_listed_order(router: RouterDriver) -> None:
    call = router.reserve(RIGHT, LEFT, max_jobs=3)
    operation = router.shards[1].operation()
    assert operation[1:] == reserve_operation([RIGHT], 3)
    assert router.shards[0].operations() == []
    jobs = [leased(RIGHT, 1), leased(RIGHT, 2)]
    router.shards[1].answer(operation, jobs)
    size = sum(len(job[3]) + JOB_OVERHEAD_BYTES for job in jobs)
    operation = router.shards[0].operation()
    assert operation[1:] == reserve_operation([LEFT], 1, size=size)
    router.shards[0].answer(operation, [leased(LEFT)])
    assert router.reserved(call) == [(RIGHT, 1), (RIGHT, 1), (LEFT, 1)]


def test_neighbours_on_one_shard_are_claimed_together_and_others_in_their_turn(router: RouterDriver) -> None:
    call = router.reserve(LEFT, LEFT_TOO, RIGHT, queue_on(0, 2))
    seen = []
    for shard in (0, 1, 0):
        operation = router.shards[shard].operation()
        seen.append(operation[2])
        router.shards[shard].answer(operation, [])
    assert seen == [[LEFT, LEFT_TOO], [RIGHT], [queue_on(0, 2)]]
    assert router.reserved(call) == []


def test_no_more_shards_are_asked_when_there_are_enough_jobs(router: RouterDriver) -> None:
    call = router.reserve(LEFT, RIGHT, max_jobs=2, wait_ms=60_000)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT, 1), leased(LEFT, 2)])
    assert router.reserved(call) == [(LEFT, 1), (LEFT, 1)]
    assert router.shards[1].operations() == []


def test_a_poll_with_some_jobs_does_not_wait_for_more(router: RouterDriver) -> None:
    call = router.reserve(LEFT, RIGHT, max_jobs=2, wait_ms=60_000)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    router.shards[1].answer(router.shards[1].operation(), [])
    assert router.reserved(call) == [(LEFT, 1)]


def test_no_more_shards_are_asked_when_the_answer_has_its_bytes(router: RouterDriver) -> None:
    call = router.reserve(LEFT, RIGHT, max_jobs=9)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT, padding=MAX_BYTES)])
    assert router.reserved(call) == [(LEFT, 1)]
    assert router.shards[1].operations() == []


def test_a_job_that_is_too_large_beside_those_of_other_shards_is_given_back(router: RouterDriver) -> None:
    call = router.reserve(LEFT, RIGHT, max_jobs=9)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT, padding=MAX_BYTES // 2)])
    operation = router.shards[1].operation()
    router.shards[1].answer(operation, [leased(RIGHT, padding=MAX_BYTES // 2)])
    assert router.reserved(call) == [(LEFT, 1)]
    router.shards[1].envelopes()
    assert router.shards[1].given_back == [operation[0]]


def test_the_first_job_goes_into_the_answer_whatever_its_size(router: RouterDriver) -> None:
    call = router.reserve(LEFT, RIGHT, max_jobs=9)
    router.shards[0].answer(router.shards[0].operation(), [])
    router.shards[1].answer(router.shards[1].operation(), [leased(RIGHT, padding=2 * MAX_BYTES)])
    assert router.reserved(call) == [(RIGHT, 1)]


def test_a_poll_keeps_to_the_size_of_answers_that_held_when_it_came(router: RouterDriver) -> None:
    router.reserve(LEFT, RIGHT, max_jobs=2)
    router.core.configure(configured())
    router.shards[0].answer(router.shards[0].operation(), [])
    assert router.shards[1].operation()[1:] == reserve_operation([RIGHT], 2)


# ---- whether the answer left


def test_what_was_claimed_is_confirmed_to_each_shard_when_the_answer_has_left(router: RouterDriver) -> None:
    call = router.reserve(LEFT, RIGHT, max_jobs=2)
    claims = []
    for shard, queue in enumerate((LEFT, RIGHT)):
        claims.append(router.shards[shard].operation())
        router.shards[shard].answer(claims[-1], [leased(queue)])
    router.left(call)
    for shard in router.shards:
        shard.envelopes()
    assert [shard.confirmed for shard in router.shards] == [[claim[0]] for claim in claims]
    assert [shard.given_back for shard in router.shards] == [[], []]


def test_what_was_claimed_is_given_back_to_each_shard_when_the_answer_could_not_leave(router: RouterDriver) -> None:
    call = router.reserve(LEFT, RIGHT, max_jobs=2)
    claims = []
    for shard, queue in enumerate((LEFT, RIGHT)):
        claims.append(router.shards[shard].operation())
        router.shards[shard].answer(claims[-1], [leased(queue)])
    router.left(call, False)
    for shard in router.shards:
        shard.envelopes()
    assert [shard.given_back for shard in router.shards] == [[claim[0]] for claim in claims]
    assert [shard.confirmed for shard in router.shards] == [[], []]


def test_an_empty_claim_is_neither_confirmed_nor_given_back(router: RouterDriver) -> None:
    call = router.reserve(LEFT)
    router.shards[0].answer(router.shards[0].operation(), [])
    router.left(call)
    assert router.shards[0].envelopes() == []


# ---- waiting


def test_a_wait_that_is_over_is_answered_with_nothing_and_its_operation_cancelled(router: RouterDriver) -> None:
    call = router.reserve(LEFT, wait_ms=2_000)
    operation = router.shards[0].operation()
    router.pass_ms(1_999)
    assert not router.is_answered(call)
    router.pass_ms(1)
    cancellation = router.shards[0].operation()
    assert cancellation[1:] == [Op.CANCEL, operation[0]]
    assert not router.is_answered(call)
    router.shards[0].answer(cancellation)
    assert router.reserved(call) == []


@pytest.mark.parametrize(
    ("wait_ms", "patience_ms", "expected_ms"),
    [(60_000, 500, 500), (3_600_000, 10_000_000, 300_000), (60_000, -1, 0)],
    ids=["than the client waits", "than the server allows", "than no time at all"],
)
def test_a_wait_is_no_longer(router: RouterDriver, wait_ms: int, patience_ms: int, expected_ms: int) -> None:
    router.reserve(LEFT, wait_ms=wait_ms, deadline=router.in_ms(patience_ms))
    operation = router.shards[0].operation()
    if expected_ms:
        router.pass_ms(expected_ms - 1)
        assert router.shards[0].operations() == []
    router.pass_ms(1)
    assert router.shards[0].operation()[1:] == [Op.CANCEL, operation[0]]


# ---- a wait that ends while a claim is under way


def test_a_wait_shorter_than_a_claim_still_brings_the_job(router: RouterDriver) -> None:
    call = router.reserve(LEFT, wait_ms=1)
    operation = router.shards[0].operation()
    router.pass_ms(5)
    assert not router.is_answered(call)
    router.shards[0].answer(operation, [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]


def test_a_wait_that_ends_before_its_claim_was_sent_is_one_that_may_not_park(router: RouterDriver) -> None:
    router.shards[0].crowd()
    call = router.reserve(LEFT, wait_ms=1)
    router.pass_ms(1)
    router.shards[0].send()
    operation = router.shards[0].operation()
    assert operation[1:] == reserve_operation([LEFT], may_wait=False)
    assert router.core.shards[0].is_full(3)  # two acks and this: it is no parked one, which would not count
    router.shards[0].answer(operation, [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]


def test_a_wait_that_ends_during_the_claims_of_several_shards_is_answered_after_the_last_of_them(
    router: RouterDriver,
) -> None:
    call = router.reserve(LEFT, RIGHT, wait_ms=1)
    first = router.shards[0].operation()
    router.pass_ms(1)
    assert not router.is_answered(call)
    router.shards[0].answer(first, [])
    router.shards[1].answer(router.shards[1].operation(), [leased(RIGHT)])
    assert router.reserved(call) == [(RIGHT, 1)]


def test_a_wait_that_ends_during_claims_that_give_nothing_is_answered_with_nothing_and_watches_nobody(
    router: RouterDriver,
) -> None:
    call = router.reserve(LEFT, RIGHT, wait_ms=1)
    first = router.shards[0].operation()
    router.pass_ms(1)
    router.shards[0].answer(first, [])
    router.shards[1].answer(router.shards[1].operation(), [])
    assert router.reserved(call) == []
    assert [shard.operations() for shard in router.shards] == [[], []]


def test_a_wake_up_that_comes_during_the_last_claims_is_passed_on(router: RouterDriver) -> None:
    call, left, right = watching(router)
    router.shards[0].answer(left, True)
    claim = router.shards[1].operation()
    router.pass_ms(60_000)
    router.shards[1].answer(right, True)
    router.shards[1].answer(claim, [])
    router.shards[0].answer(router.shards[0].operation(), [])
    assert router.reserved(call) == []
    assert router.shards[1].operation()[1:] == [Op.CANCEL, right[0]]


@pytest.mark.parametrize("queues", [(LEFT,), (LEFT, RIGHT), (RIGHT, LEFT)])
def test_a_wait_that_ended_before_its_claim_was_sent_is_not_prolonged_by_a_shard_that_goes_down(
    router: RouterDriver, queues: tuple[str, ...]
) -> None:
    router.shards[0].crowd()
    call = router.reserve(*queues, wait_ms=1)
    router.pass_ms(1)
    if queues[0] == RIGHT:
        router.shards[1].answer(router.shards[1].operation(), [])
    assert not router.is_answered(call)
    router.shards[0].down()
    if queues[-1] == RIGHT:
        router.shards[1].answer(router.shards[1].operation(), [])
    assert router.reserved(call) == []


def test_a_claim_that_is_lost_after_the_wait_is_given_back_and_not_repeated(router: RouterDriver) -> None:
    call = router.reserve(LEFT, wait_ms=1)
    lost = router.shards[0].operation()
    router.pass_ms(1)
    router.shards[0].restart()
    assert router.reserved(call) == []
    router.shards[0].serve()
    assert router.shards[0].given_back == [lost[0]]


def test_a_failed_write_after_the_wait_is_an_internal_error(router: RouterDriver) -> None:
    call = router.reserve(LEFT, wait_ms=1)
    operation = router.shards[0].operation()
    router.pass_ms(1)
    router.shards[0].answer(operation, "the write failed", INTERNAL)
    assert router.failure(call).status == Status.INTERNAL
    router.shards[0].restart()


# ---- watches


def watching(router: RouterDriver) -> tuple[Any, list[Any], list[Any]]:
    """A poll of both shards that found nothing: its call, and the watches."""
    call = router.reserve(RIGHT, LEFT, LEFT_TOO, max_jobs=2, wait_ms=60_000)
    for shard in (1, 0):
        router.shards[shard].answer(router.shards[shard].operation(), [])
    return call, router.shards[0].operation(), router.shards[1].operation()


def test_a_poll_that_finds_nothing_watches_all_its_shards(router: RouterDriver) -> None:
    call, left, right = watching(router)
    assert left[1:] == [Op.WATCH, [LEFT, LEFT_TOO]]
    assert right[1:] == [Op.WATCH, [RIGHT]]
    assert not router.is_answered(call)


def test_queues_of_one_shard_are_watched_together_wherever_they_are_listed(router: RouterDriver) -> None:
    router.reserve(LEFT, RIGHT, LEFT_TOO, wait_ms=60_000)
    for shard in (0, 1, 0):
        router.shards[shard].answer(router.shards[shard].operation(), [])
    assert router.shards[0].operation()[1:] == [Op.WATCH, [LEFT, LEFT_TOO]]


def test_a_watch_that_fires_is_followed_by_claims_in_the_listed_order(router: RouterDriver) -> None:
    call, left, right = watching(router)
    router.shards[0].answer(left, True)
    first = router.shards[1].operation()
    assert (first[1], first[2], first[SETTLES]) == (Op.RESERVE, [RIGHT], 0)
    router.shards[1].answer(first, [])
    second = router.shards[0].operation()
    assert (second[1], second[2], second[SETTLES]) == (Op.RESERVE, [LEFT, LEFT_TOO], left[0])
    router.shards[0].answer(second, [leased(LEFT_TOO)])
    assert router.reserved(call) == [(LEFT_TOO, 1)]
    assert router.shards[1].operation()[1:] == [Op.CANCEL, right[0]]


def test_a_watch_that_comes_to_nothing_is_set_again_on_its_shard_alone(router: RouterDriver) -> None:
    call, left, _ = watching(router)
    router.shards[0].answer(left, True)
    for shard in (1, 0):
        router.shards[shard].answer(router.shards[shard].operation(), [])
    assert router.shards[0].operation()[1:] == [Op.WATCH, [LEFT, LEFT_TOO]]
    assert router.shards[1].operations() == []
    assert not router.is_answered(call)


def test_a_watch_that_fires_while_claims_are_under_way_is_followed_by_claims_from_the_start(
    router: RouterDriver,
) -> None:
    call, left, right = watching(router)
    router.shards[0].answer(left, True)
    router.shards[1].answer(router.shards[1].operation(), [])
    router.shards[1].answer(right, True)
    router.shards[0].answer(router.shards[0].operation(), [])
    again = router.shards[1].operation()
    assert (again[1], again[SETTLES]) == (Op.RESERVE, right[0])
    router.shards[1].answer(again, [leased(RIGHT, 1), leased(RIGHT, 2)])
    assert router.reserved(call) == [(RIGHT, 1), (RIGHT, 1)]


def test_a_wake_up_that_is_not_needed_any_more_is_passed_on(router: RouterDriver) -> None:
    call, left, right = watching(router)
    router.shards[1].answer(right, True)
    claim = router.shards[1].operation()
    router.shards[0].answer(left, True)
    router.shards[1].answer(claim, [leased(RIGHT, 1), leased(RIGHT, 2)])
    assert router.reserved(call) == [(RIGHT, 1), (RIGHT, 1)]
    assert router.shards[0].operation()[1:] == [Op.CANCEL, left[0]]


def test_the_wait_of_a_watching_poll_ends_in_time(router: RouterDriver) -> None:
    call, left, right = watching(router)
    router.pass_ms(60_000)
    assert router.reserved(call) == []
    assert router.shards[0].operation()[1:] == [Op.CANCEL, left[0]]
    assert router.shards[1].operation()[1:] == [Op.CANCEL, right[0]]


# ---- a shard that is down


def test_a_reserve_for_a_shard_that_is_down_is_sent_to_its_successor(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.reserve(LEFT)
    router.pass_ms(HOLD_MS - 1)
    router.shards[0].up()
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]


@pytest.mark.parametrize("queues", [(LEFT,), (LEFT, RIGHT)])
def test_a_reserve_is_unavailable_when_its_shards_stay_down(router: RouterDriver, queues: tuple[str, ...]) -> None:
    for shard in router.shards:
        shard.down()
    calls = [router.reserve(*queues), router.reserve(*queues, deadline=router.in_ms(400))]
    router.pass_ms(400 - DEADLINE_MARGIN_MS)
    assert [router.is_answered(call) for call in calls] == [False, True]
    router.pass_ms(HOLD_MS)
    assert [router.failure(call).status for call in calls] == [Status.UNAVAILABLE] * 2


def test_a_poll_whose_wait_ends_while_its_shard_is_down_is_answered_with_nothing(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.reserve(LEFT, wait_ms=2_000)
    router.pass_ms(2_000)
    assert router.reserved(call) == []
    router.shards[0].up()
    assert router.shards[0].operations() == []


def test_a_shard_that_is_down_is_passed_over_while_others_have_jobs(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.reserve(LEFT, RIGHT, max_jobs=2)
    router.shards[1].answer(router.shards[1].operation(), [leased(RIGHT)])
    assert router.reserved(call) == [(RIGHT, 1)]


def test_a_poll_that_passed_a_shard_over_watches_its_successor(router: RouterDriver) -> None:
    router.shards[0].down()
    call = router.reserve(LEFT, RIGHT, wait_ms=60_000)
    router.shards[1].answer(router.shards[1].operation(), [])
    router.shards[0].up()
    watch = router.shards[0].operation()
    assert watch[1:] == [Op.WATCH, [LEFT]]
    router.shards[0].answer(watch, True)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]


def test_a_poll_that_found_all_shards_down_is_served_by_the_first_that_comes_up(router: RouterDriver) -> None:
    for shard in router.shards:
        shard.down()
    call = router.reserve(LEFT, RIGHT, wait_ms=60_000)
    router.shards[1].up()
    router.shards[1].answer(router.shards[1].operation(), True)
    router.shards[1].answer(router.shards[1].operation(), [leased(RIGHT)])
    assert router.reserved(call) == [(RIGHT, 1)]


@pytest.mark.parametrize("wait_ms", [0, 60_000])
def test_a_claim_that_was_not_sent_does_not_wait_for_the_successor_while_another_shard_is_up(
    router: RouterDriver, wait_ms: int
) -> None:
    router.shards[0].crowd()
    call = router.reserve(LEFT, RIGHT, wait_ms=wait_ms)
    router.shards[0].down()
    router.shards[1].answer(router.shards[1].operation(), [leased(RIGHT)])
    assert router.reserved(call) == [(RIGHT, 1)]


def test_jobs_that_were_claimed_are_not_held_back_for_a_shard_that_went_down(router: RouterDriver) -> None:
    router.shards[1].crowd()
    call = router.reserve(LEFT, RIGHT, max_jobs=2)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    router.shards[1].down()
    assert router.reserved(call) == [(LEFT, 1)]


def test_jobs_that_were_claimed_are_answered_when_the_time_to_hold_a_call_is_over(router: RouterDriver) -> None:
    for shard in router.shards:
        shard.down()
    call = router.reserve(LEFT, RIGHT, max_jobs=2)
    router.shards[1].up()
    router.shards[1].crowd()
    router.shards[0].up()
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    assert not router.is_answered(call)
    router.pass_ms(HOLD_MS)
    assert router.reserved(call) == [(LEFT, 1)]


# ---- a shard that ends


def test_a_lost_reserve_is_given_back_to_the_successor_before_it_is_asked_again(router: RouterDriver) -> None:
    call = router.reserve(LEFT)
    lost = router.shards[0].operation()
    router.shards[0].restart()
    (envelope,) = router.shards[0].envelopes()
    give_back, again = envelope.items
    assert give_back == [0, Op.GIVE_BACK, [lost[0]]]
    assert again[1:] == reserve_operation([LEFT])
    router.shards[0].answer(again, [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]


def test_every_lost_reserve_is_given_back_when_the_successor_ends_as_well(router: RouterDriver) -> None:
    router.reserve(LEFT)
    lost = []
    for _ in range(3):
        lost.append(router.shards[0].operation()[0])
        router.shards[0].restart()
        (envelope,) = router.shards[0].envelopes()
        assert sorted(envelope.items[0][2]) == lost
        router.shards[0].down()
        lost.append(envelope.items[1][0])
        router.shards[0].up()


def test_a_lost_poll_waits_on_for_what_was_left_of_its_wait(router: RouterDriver) -> None:
    call = router.reserve(LEFT, wait_ms=10_000)
    for _ in range(3):
        router.pass_ms(3_000)
        router.shards[0].restart()
        assert router.shards[0].operation()[1:] == reserve_operation([LEFT], may_wait=True)
    router.pass_ms(999)
    assert router.shards[0].operations() == []
    router.pass_ms(1)
    assert router.shards[0].operation()[1] == Op.CANCEL
    router.serve()
    assert router.reserved(call) == []


def test_a_lost_claim_of_several_shards_is_given_back_and_the_next_shard_asked(router: RouterDriver) -> None:
    call = router.reserve(LEFT, RIGHT)
    lost = router.shards[0].operation()
    router.shards[0].restart()
    router.shards[0].envelopes()
    assert router.shards[0].given_back == [lost[0]]
    router.shards[1].answer(router.shards[1].operation(), [leased(RIGHT)])
    assert router.reserved(call) == [(RIGHT, 1)]


def test_a_lost_watch_is_set_again_on_the_successor(router: RouterDriver) -> None:
    _, left, right = watching(router)
    router.shards[0].restart()
    again = router.shards[0].operation()
    assert again[1:] == left[1:]
    assert again[0] not in (left[0], right[0])


def test_a_wake_up_of_a_shard_that_has_ended_since_is_void(router: RouterDriver) -> None:
    call, left, _ = watching(router)
    router.shards[0].answer(left, True)
    claim = router.shards[1].operation()
    router.shards[0].down()
    router.shards[1].answer(claim, [])
    assert router.shards[1].operations() == []
    router.shards[0].up()
    assert router.shards[0].operation()[1:] == left[1:]
    assert not router.is_answered(call)


def test_a_poll_survives_the_end_of_all_its_shards(router: RouterDriver) -> None:
    call, _, _ = watching(router)
    for shard in router.shards:
        shard.down()
    for shard in router.shards:
        shard.up()
    router.shards[0].answer(router.shards[0].operation(), True)
    router.shards[1].answer(router.shards[1].operations()[1], [])
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]


# ---- the server stops


def test_waiting_polls_are_answered_with_nothing_when_the_server_stops(router: RouterDriver) -> None:
    parked = router.reserve(LEFT, wait_ms=60_000)
    router.shards[0].operation()
    router.shards[0].send()
    call, _, _ = watching(router)
    router.core.drain(router.now)
    assert (router.reserved(parked), router.reserved(call)) == ([], [])
    router.serve()
    assert router.shards[0].waiting == router.shards[1].waiting == {}


def test_a_poll_that_has_jobs_already_is_answered_with_them_when_the_server_stops(router: RouterDriver) -> None:
    call = router.reserve(LEFT, RIGHT, max_jobs=2, wait_ms=60_000)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    router.core.drain(router.now)
    assert router.reserved(call) == [(LEFT, 1)]


def test_a_reserve_that_does_not_wait_is_served_to_its_end_when_the_server_stops(router: RouterDriver) -> None:
    call = router.reserve(LEFT)
    router.core.drain(router.now)
    assert not router.is_answered(call)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]


@pytest.mark.parametrize("queues", [(LEFT,), (LEFT, RIGHT)])
def test_polls_that_come_while_the_server_stops_do_not_wait(router: RouterDriver, queues: tuple[str, ...]) -> None:
    router.core.drain(router.now)
    call = router.reserve(*queues, wait_ms=60_000)
    router.serve()
    assert router.reserved(call) == []


def test_polls_that_come_while_the_server_stops_still_get_what_is_ready(router: RouterDriver) -> None:
    router.core.drain(router.now)
    call = router.reserve(LEFT, wait_ms=60_000)
    operation = router.shards[0].operation()
    assert operation[1:] == reserve_operation([LEFT])
    router.shards[0].answer(operation, [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]
