"""Who waits for jobs, who is answered, and what becomes of a wake-up that comes to nothing."""

from __future__ import annotations

from common.wire import Strategy
from tests.unit import shard_driver
from tests.unit.shard_driver import LEASE_MS, OTHER_ROUTER, WALL_START_MS, Shard, bodies, job

home, shard = shard_driver.home, shard_driver.shard


# -- parked reserves --------------------------------------------------------------------------


def test_a_reserve_that_may_wait_is_answered_at_once_when_there_is_a_job(shard: Shard) -> None:
    shard.enqueue(body=b"1")
    assert bodies(shard.jobs_for(shard.park())) == [b"1"]


def test_a_parked_reserve_is_answered_by_an_enqueue(shard: Shard) -> None:
    waiting = shard.park()
    assert shard.jobs_for(waiting) is None
    made = shard.enqueue(body=b"1")
    assert shard.jobs_for(waiting) == [(made, 1, WALL_START_MS + LEASE_MS, b"1")]


def test_an_enqueue_is_answered_before_the_reserve_that_it_serves(shard: Shard) -> None:
    waiting = shard.park()
    shard.enqueue()
    assert [op_id for _, op_id, _, _ in shard.answers] == [shard.last_op, waiting]


def test_a_lease_from_a_wait_runs_from_the_answer(shard: Shard) -> None:
    waiting = shard.park(lease_ms=1_000)
    shard.pass_time(60_000)
    shard.enqueue()
    jobs = shard.jobs_for(waiting)
    assert jobs is not None and jobs[0].lease_expires_ms == WALL_START_MS + 61_000
    shard.pass_time(999)
    assert shard.counts() == (0, 0, 1, 0)


def test_a_parked_reserve_is_answered_by_a_nack(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    waiting = shard.park()
    shard.nack(leased)
    assert [each.attempt for each in shard.jobs_for(waiting) or ()] == [2]


def test_a_parked_reserve_is_answered_when_the_delay_of_a_nack_is_over(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    waiting = shard.park()
    shard.nack(leased, Strategy.DELAY, 1_000)
    shard.pass_time(999)
    assert shard.jobs_for(waiting) is None
    shard.pass_time(1)
    assert [each.attempt for each in shard.jobs_for(waiting) or ()] == [2]


def test_a_parked_reserve_is_answered_when_a_lease_expires(shard: Shard) -> None:
    shard.enqueue()
    shard.reserve()
    waiting = shard.park()
    shard.pass_time(LEASE_MS)
    assert [each.attempt for each in shard.jobs_for(waiting) or ()] == [2]


def test_a_parked_reserve_is_answered_when_a_shortened_lease_expires(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    waiting = shard.park()
    shard.extend(leased, 10)
    shard.pass_time(10)
    assert [each.attempt for each in shard.jobs_for(waiting) or ()] == [2]


def test_a_parked_reserve_is_answered_when_a_scheduled_job_falls_due(shard: Shard) -> None:
    waiting = shard.park()
    shard.enqueue(due_ms=WALL_START_MS + 500)
    assert shard.jobs_for(waiting) is None
    shard.pass_time(500)
    assert [each.attempt for each in shard.jobs_for(waiting) or ()] == [1]


def test_a_parked_reserve_is_answered_by_a_job_that_is_given_back(shard: Shard) -> None:
    shard.enqueue()
    shard.reserve()
    claim = shard.last_op
    waiting = shard.park()
    shard.give_back(claim)
    assert [each.attempt for each in shard.jobs_for(waiting) or ()] == [1]


def test_what_a_parked_reserve_was_given_can_be_given_back(shard: Shard) -> None:
    first = shard.park()
    second = shard.park()
    shard.enqueue()
    shard.give_back(first)
    assert [each.attempt for each in shard.jobs_for(second) or ()] == [1]


def test_waiters_are_served_first_come_first_served(shard: Shard) -> None:
    waiting = [shard.park() for _ in range(4)]
    for number in range(3):
        shard.enqueue(body=b"%d" % number)
    assert [bodies(shard.jobs_for(each)) for each in waiting] == [[b"0"], [b"1"], [b"2"], []]
    assert shard.jobs_for(waiting[3]) is None


def test_one_job_wakes_one_waiter(shard: Shard) -> None:
    first, second = shard.park(max_jobs=10), shard.park(max_jobs=10)
    shard.enqueue()
    assert shard.jobs_for(first) is not None
    assert shard.jobs_for(second) is None


def test_a_batch_is_shared_out_among_the_waiters(shard: Shard) -> None:
    first, second = shard.park(max_jobs=2), shard.park(max_jobs=2)
    shard.enqueue_all(job(body=b"1"), job(body=b"2"), job(body=b"3"))
    assert bodies(shard.jobs_for(first)) == [b"1", b"2"]
    assert bodies(shard.jobs_for(second)) == [b"3"]


def test_a_batch_is_served_by_priority_and_not_by_its_own_order(shard: Shard) -> None:
    waiting = shard.park()
    shard.enqueue_all(job(body=b"low"), job(body=b"high", priority=9))
    assert bodies(shard.jobs_for(waiting)) == [b"high"]


def test_a_batch_over_two_queues_is_served_in_the_order_the_waiter_listed(shard: Shard) -> None:
    waiting = shard.park("b", "a", max_jobs=2)
    shard.enqueue_all(job("a", b"1"), job("b", b"2"))
    assert bodies(shard.jobs_for(waiting)) == [b"2", b"1"]


def test_a_waiter_on_several_queues_is_answered_by_any_of_them_and_once(shard: Shard) -> None:
    waiting = shard.park("a", "b")
    shard.enqueue("b", b"1")
    shard.enqueue("a", b"2")
    assert bodies(shard.jobs_for(waiting)) == [b"1"]
    assert shard.counts("a") == (1, 0, 0, 0)


def test_a_parked_answer_is_cut_by_bytes(shard: Shard) -> None:
    waiting = shard.park(max_jobs=3, max_bytes=3_000)
    shard.enqueue_all(*(job(body=bytes(2_000)) for _ in range(3)))
    assert len(shard.jobs_for(waiting) or ()) == 1
    assert shard.counts() == (2, 0, 1, 0)


def test_no_waiter_is_left_when_all_are_answered(shard: Shard) -> None:
    for _ in range(20):
        shard.park("a", "b", "c")
    shard.enqueue_all(*(job(name) for name in ("a", "b", "c", "a", "b") * 4))
    assert len(shard.machine._waiting) == 0
    assert shard.machine._waiting._lines == {}


# -- cancelled waits --------------------------------------------------------------------------


def test_a_cancelled_reserve_is_not_answered(shard: Shard) -> None:
    waiting = shard.park()
    shard.cancel(waiting)
    shard.enqueue()
    assert shard.jobs_for(waiting) is None
    assert shard.counts() == (1, 0, 0, 0)


def test_the_next_in_line_gets_what_a_cancelled_reserve_would_have_got(shard: Shard) -> None:
    first, second = shard.park(), shard.park()
    shard.cancel(first)
    shard.enqueue()
    assert shard.jobs_for(second) is not None


def test_a_reserve_that_was_answered_before_its_cancel_keeps_its_answer(shard: Shard) -> None:
    waiting = shard.park()
    with shard.one_turn():
        shard.enqueue()
        shard.cancel(waiting)
    assert len(shard.jobs_for(waiting) or ()) == 1


def test_cancelling_an_unknown_wait_is_answered(shard: Shard) -> None:
    shard.cancel(4711)
    assert shard.answer(shard.last_op) == [0, None]


# -- watches ----------------------------------------------------------------------------------


def test_a_watch_fires_at_once_when_a_job_is_ready(shard: Shard) -> None:
    shard.enqueue("b")
    assert shard.is_woken(shard.watch("a", "b"))


def test_a_watch_fires_when_a_job_becomes_ready(shard: Shard) -> None:
    watching = shard.watch("a", "b")
    assert not shard.is_woken(watching)
    shard.enqueue("b")
    assert shard.is_woken(watching)


def test_a_watch_leases_nothing(shard: Shard) -> None:
    shard.watch()
    shard.enqueue()
    assert shard.counts() == (1, 0, 0, 0)


def test_a_watch_fires_once(shard: Shard) -> None:
    watching = shard.watch("a", "b")
    shard.enqueue("a")
    shard.enqueue("b")
    assert [op_id for _, op_id, _, _ in shard.answers].count(watching) == 1


def test_one_job_wakes_one_watch(shard: Shard) -> None:
    first, second = shard.watch(), shard.watch()
    shard.enqueue()
    assert shard.is_woken(first) and not shard.is_woken(second)


def test_a_second_job_wakes_the_second_watch_while_the_first_is_unsettled(shard: Shard) -> None:
    first, second, third = shard.watch(), shard.watch(), shard.watch()
    shard.enqueue_all(job(), job())
    assert [shard.is_woken(each) for each in (first, second, third)] == [True, True, False]


def test_a_job_that_is_promised_wakes_nobody_who_comes_later(shard: Shard) -> None:
    shard.enqueue()
    first, second = shard.watch(), shard.watch()
    assert shard.is_woken(first) and not shard.is_woken(second)


def test_a_claim_settles_its_watch(shard: Shard) -> None:
    watching, next_one = shard.watch(), shard.watch()
    shard.enqueue(body=b"1")
    assert bodies(shard.reserve(settles=watching)) == [b"1"]
    assert not shard.is_woken(next_one)
    shard.enqueue(body=b"2")
    assert shard.is_woken(next_one)


def test_a_claim_that_leaves_the_job_wakes_the_next(shard: Shard) -> None:
    first, second = shard.watch("a", "b"), shard.watch("b")
    shard.enqueue("b", b"1")
    shard.enqueue("a", b"2")
    assert bodies(shard.reserve("a", "b", settles=first)) == [b"2"]
    assert shard.is_woken(second)


def test_a_cancelled_watch_passes_its_wake_up_on(shard: Shard) -> None:
    first, second = shard.watch(), shard.watch()
    shard.enqueue()
    shard.cancel(first)
    assert shard.is_woken(second)


def test_a_cancelled_watch_passes_its_wake_up_on_to_a_parked_reserve(shard: Shard) -> None:
    first, second = shard.watch(), shard.park()
    shard.enqueue(body=b"1")
    assert shard.jobs_for(second) is None
    shard.cancel(first)
    assert bodies(shard.jobs_for(second)) == [b"1"]


def test_a_watch_cancelled_before_it_fires_takes_no_wake_up(shard: Shard) -> None:
    first, second = shard.watch(), shard.watch()
    shard.cancel(first)
    shard.enqueue()
    assert shard.is_woken(second) and not shard.is_woken(first)


def test_a_wake_up_that_finds_the_job_taken_wakes_the_next_for_the_next_job(shard: Shard) -> None:
    first, second = shard.watch(), shard.watch()
    shard.enqueue(body=b"1")
    assert bodies(shard.reserve()) == [b"1"]  # somebody who did not wait was quicker
    assert shard.reserve(settles=first) == []
    shard.enqueue(body=b"2")
    assert shard.is_woken(second)


def test_a_claim_that_finds_nothing_may_wait_in_its_turn(shard: Shard) -> None:
    watching = shard.watch()
    shard.enqueue()
    shard.reserve()
    parked = shard.park(settles=watching)
    shard.enqueue(body=b"2")
    assert bodies(shard.jobs_for(parked)) == [b"2"]


def test_watches_and_reserves_stand_in_one_line(shard: Shard) -> None:
    first, second, third = shard.park(), shard.watch(), shard.park()
    shard.enqueue_all(job(body=b"1"), job(body=b"2"), job(body=b"3"))
    assert bodies(shard.jobs_for(first)) == [b"1"]
    assert shard.is_woken(second)
    assert bodies(shard.jobs_for(third)) == [b"2"]
    assert bodies(shard.reserve(settles=second)) == [b"3"]


def test_no_trace_is_left_of_watches_that_are_settled(shard: Shard) -> None:
    watching = [shard.watch("a", "b") for _ in range(6)]
    shard.enqueue_all(job("a"), job("b"), job("a"))
    shard.reserve("a", settles=watching[0])
    for each in watching[1:]:
        shard.cancel(each)
    assert len(shard.machine._waiting) == 0
    assert shard.machine._waiting._lines == {}


# -- a router that has ended ------------------------------------------------------------------


def test_the_waits_of_a_router_that_is_gone_are_over(shard: Shard) -> None:
    gone = shard.park()
    other = shard.park(router=OTHER_ROUTER)
    shard.router_gone()
    shard.enqueue()
    assert shard.jobs_for(gone) is None
    assert shard.jobs_for(other) is not None


def test_a_router_that_is_gone_passes_its_wake_ups_on(shard: Shard) -> None:
    first, second = shard.watch(), shard.watch(router=OTHER_ROUTER)
    shard.enqueue()
    assert shard.is_woken(first)
    shard.router_gone()
    assert shard.is_woken(second)


def test_a_wake_up_is_not_passed_on_to_the_router_that_is_gone(shard: Shard) -> None:
    shard.watch()
    parked = shard.park()
    shard.enqueue(max_attempts=1)
    shard.router_gone()
    assert shard.jobs_for(parked) is None
    assert shard.counts() == (1, 0, 0, 0)
    assert [leased.attempt for leased in shard.reserve(router=OTHER_ROUTER)] == [1]


def test_a_job_lost_with_its_router_goes_to_the_next_in_line(shard: Shard) -> None:
    shard.enqueue()
    shard.reserve()
    waiting = shard.park(router=OTHER_ROUTER)
    shard.router_gone()
    assert [leased.attempt for leased in shard.jobs_for(waiting) or ()] == [2]


def test_no_waiter_of_a_router_that_is_gone_is_left(shard: Shard) -> None:
    for _ in range(5):
        shard.park("a", "b")
        shard.watch("b", "c")
    shard.enqueue_all(job("b"), job("c"))
    shard.router_gone()
    assert len(shard.machine._waiting) == 0
    assert shard.machine._waiting._lines == {}
