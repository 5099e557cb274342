"""What a reserve hands out: order, queues, limits, and the part of a queue that is held in memory."""

from __future__ import annotations

import pytest

from common.slots import slot_of
from common.wire import JOB_OVERHEAD_BYTES, EnqueueJob, Strategy
from shard import keys, ready
from shard.ready import WINDOW_JOBS
from shard.store import Family
from tests.unit import shard_driver
from tests.unit.shard_driver import LEASE_MS, WALL_START_MS, Shard, bodies, job, rows

home, shard = shard_driver.home, shard_driver.shard

KIB = 1024


def numbered(first: int, end: int, priority: int = 0) -> list[EnqueueJob]:
    """Jobs whose bodies are their numbers."""
    return [job(body=b"%d" % number, priority=priority) for number in range(first, end)]


def numbers(jobs: list[bytes]) -> list[int]:
    return [int(body) for body in jobs]


# -- order ------------------------------------------------------------------------------------


def test_jobs_are_served_in_the_order_of_their_enqueue(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 3))
    shard.enqueue_all(*numbered(3, 5))
    assert numbers(shard.drain()) == [0, 1, 2, 3, 4]


def test_every_priority_is_served_before_the_ones_below_it(shard: Shard) -> None:
    order = [3, 0, 9, 5, 1, 8, 2, 7, 4, 6]
    shard.enqueue_all(*(job(body=b"%d" % priority, priority=priority) for priority in order))
    assert numbers(shard.drain()) == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


def test_jobs_of_one_priority_keep_their_order(shard: Shard) -> None:
    shard.enqueue_all(
        job(body=b"1", priority=2), job(body=b"2", priority=4), job(body=b"3", priority=2), job(body=b"4", priority=4)
    )
    assert numbers(shard.drain()) == [2, 4, 1, 3]


def test_a_high_priority_that_comes_later_goes_first(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 3))
    assert numbers(bodies(shard.reserve())) == [0]
    shard.enqueue_all(*numbered(10, 12, priority=9))
    assert numbers(shard.drain()) == [10, 11, 1, 2]


def test_queues_are_served_in_the_order_they_are_listed(shard: Shard) -> None:
    shard.enqueue("a", b"a", priority=0)
    shard.enqueue("b", b"b", priority=9)
    shard.enqueue("c", b"c")
    assert bodies(shard.reserve("c", "a", "b", max_jobs=3)) == [b"c", b"a", b"b"]


def test_a_listed_queue_that_is_empty_or_unknown_is_passed_over(shard: Shard) -> None:
    shard.enqueue("empty")
    shard.ack(shard.reserve_one("empty"))
    shard.enqueue("full", b"1")
    assert bodies(shard.reserve("empty", "unknown", "full")) == [b"1"]


def test_a_queue_listed_twice_gives_each_job_once(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 2))
    assert numbers(bodies(shard.reserve("q", "q", max_jobs=5))) == [0, 1]


def test_a_reserve_of_nothing_is_answered_with_nothing(shard: Shard) -> None:
    assert shard.reserve("q") == []


# -- limits -----------------------------------------------------------------------------------


def test_a_reserve_takes_no_more_than_max_jobs(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 5))
    assert numbers(bodies(shard.reserve(max_jobs=2))) == [0, 1]
    assert shard.counts() == (3, 0, 2, 0)


def test_max_jobs_holds_over_all_listed_queues(shard: Shard) -> None:
    shard.enqueue_all(job("a", b"1"), job("a", b"2"), job("b", b"3"), job("b", b"4"))
    assert bodies(shard.reserve("a", "b", max_jobs=3)) == [b"1", b"2", b"3"]


def test_an_answer_is_cut_by_bytes_and_the_rest_keeps_its_attempt(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=bytes(1000)) for _ in range(5)))
    of_two = 2 * (1000 + keys.JOB_HEAD_BYTES + JOB_OVERHEAD_BYTES)
    assert len(shard.reserve(max_jobs=5, max_bytes=of_two)) == 2
    assert len(shard.reserve(max_jobs=5, max_bytes=of_two - 1)) == 1
    assert shard.counts() == (2, 0, 3, 0)
    assert [leased.attempt for leased in shard.reserve(max_jobs=5)] == [1, 1]


def test_the_first_job_is_handed_out_however_large_it_is(shard: Shard) -> None:
    shard.enqueue_all(job(body=bytes(5000)), job(body=b"small"))
    assert [len(leased.body) for leased in shard.reserve(max_jobs=2, max_bytes=100)] == [5000]


def test_a_job_that_does_not_fit_is_not_overtaken_by_a_smaller_one(shard: Shard) -> None:
    shard.enqueue_all(job("a", b"1"), job("a", bytes(5000)), job("a", b"3"), job("b", b"4"))
    assert bodies(shard.reserve("a", "b", max_jobs=4, max_bytes=1000)) == [b"1"]


def test_a_lower_priority_does_not_overtake_a_job_that_does_not_fit(shard: Shard) -> None:
    shard.enqueue_all(job(body=b"1", priority=9), job(body=bytes(5000), priority=9), job(body=b"3"))
    assert bodies(shard.reserve(max_jobs=3, max_bytes=1000)) == [b"1"]


# -- leases -----------------------------------------------------------------------------------


def test_a_leased_job_says_when_its_lease_ends(shard: Shard) -> None:
    made = shard.enqueue(body=b"1")
    assert shard.reserve() == [(made, 1, WALL_START_MS + LEASE_MS, b"1")]


def test_a_lease_is_stored_beside_its_job(shard: Shard) -> None:
    made = shard.enqueue(body=b"1", priority=4, max_attempts=7)
    shard.reserve(lease_ms=2_000)
    ((key, value),) = rows(shard.store, Family.LEASES)
    assert keys.read_lease_key(key) == (slot_of("q"), 0)
    assert keys.read_lease_value(value) == keys.LeaseRecord(
        job_id=made,
        queue=1,
        inverted=5,
        attempt=1,
        max_attempts=7,
        expires_ms=WALL_START_MS + 2_000,
        lease_ms=2_000,
        op_id=shard.last_op,
    )
    assert len(rows(shard.store, Family.JOBS)) == 1


def test_a_leased_job_is_given_to_nobody_else(shard: Shard) -> None:
    shard.enqueue()
    shard.reserve()
    assert shard.reserve(max_jobs=10) == []


def test_attempts_count_from_one_with_every_delivery(shard: Shard) -> None:
    shard.enqueue(max_attempts=5)
    seen = []
    for _ in range(4):
        leased = shard.reserve_one()
        seen.append(leased.attempt)
        shard.nack(leased)
    assert seen == [1, 2, 3, 4]


# -- the part of a queue in memory ------------------------------------------------------------


def test_a_queue_longer_than_its_window_is_served_in_order(shard: Shard) -> None:
    for first in range(0, 1500, 100):
        shard.enqueue_all(*numbered(first, first + 100))
    assert numbers(shard.drain()) == list(range(1500))


def test_a_queue_longer_than_its_window_is_served_in_order_after_a_restart(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 2 * WINDOW_JOBS + 10))
    shard.restart()
    assert numbers(shard.drain()) == list(range(2 * WINDOW_JOBS + 10))


@pytest.mark.parametrize("count", [WINDOW_JOBS - 1, WINDOW_JOBS, WINDOW_JOBS + 1])
def test_jobs_added_while_a_window_is_consumed_follow_in_order(shard: Shard, count: int) -> None:
    shard.enqueue_all(*numbered(0, count))
    shard.restart()
    assert numbers(bodies(shard.reserve(max_jobs=3))) == [0, 1, 2]
    shard.enqueue_all(*numbered(count, count + 5))
    assert numbers(shard.drain()) == list(range(3, count + 5))


def test_a_window_that_overflows_in_one_turn_loses_nothing(shard: Shard) -> None:
    with shard.one_turn():
        shard.enqueue_all(*numbered(0, 3 * WINDOW_JOBS))
        assert numbers(bodies(shard.reserve(max_jobs=WINDOW_JOBS))) == list(range(WINDOW_JOBS))
    assert numbers(shard.drain()) == list(range(WINDOW_JOBS, 3 * WINDOW_JOBS))


def test_a_high_priority_is_served_first_while_a_long_backlog_waits(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 600))
    assert numbers(bodies(shard.reserve(max_jobs=10))) == list(range(10))
    shard.enqueue_all(*numbered(1000, 1600, priority=9))
    assert numbers(shard.drain()) == [*range(1000, 1600), *range(10, 600)]


def test_a_job_that_returns_below_the_frontier_is_served_next(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 2 * WINDOW_JOBS))
    first, *_ = shard.reserve(max_jobs=WINDOW_JOBS + 20)
    shard.nack(first)
    assert numbers(bodies(shard.reserve(max_jobs=2))) == [0, WINDOW_JOBS + 20]


def test_a_job_that_returns_above_the_frontier_is_found_in_its_place(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 400))
    taken = shard.reserve(max_jobs=400)
    # Returned from the last on: the window overflows with low jobs and leaves the high ones to the store.
    shard.enqueue_all(*numbered(400, 700))
    for leased in reversed(taken):
        shard.nack(leased)
    assert numbers(shard.drain()) == list(range(700))


def test_a_leased_job_above_the_frontier_is_passed_over_by_the_scan(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 300))
    taken = shard.reserve(max_jobs=300)
    shard.enqueue_all(*numbered(300, 700))
    for leased in taken[:250]:
        shard.nack(leased)
    kept = taken[250:]
    assert numbers(shard.drain()) == [*range(250), *range(300, 700)]
    assert shard.counts() == (0, 0, 50, 0)
    for leased in kept:
        shard.nack(leased)
    assert numbers(shard.drain()) == list(range(250, 300))


def test_a_window_full_of_leases_does_not_hide_what_follows(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 2 * WINDOW_JOBS + 1))
    shard.reserve(max_jobs=2 * WINDOW_JOBS)
    shard.enqueue(body=b"5000", priority=9)
    shard.restart()
    assert numbers(shard.drain()) == [5000, 2 * WINDOW_JOBS]


def test_large_jobs_are_all_served_after_a_restart(shard: Shard) -> None:
    large = [job(body=b"%d" % number + b" " * 20 * KIB) for number in range(60)]
    shard.enqueue_all(*large)
    shard.restart()
    assert numbers(shard.drain()) == list(range(60))


def test_large_and_small_jobs_are_served_in_order(shard: Shard) -> None:
    sizes = [1, 300, 1, 90, 200, 1, 1, 257, 3]
    shard.enqueue_all(*(job(body=b"%d" % n + b" " * size * KIB) for n, size in enumerate(sizes)))
    first = shard.reserve_one()
    shard.nack(first)
    assert numbers(shard.drain()) == list(range(len(sizes)))


@pytest.mark.parametrize("restarts", [False, True])
def test_order_holds_when_all_windows_together_are_full(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr(ready, "ALL_WINDOWS_BYTES", 32 * KIB)
    for name in ("a", "b", "c"):
        shard.enqueue_all(*(job(name, b"%d" % n + b" " * KIB) for n in range(40)))
    if restarts:
        shard.restart()
    taken = shard.reserve("b", max_jobs=20, max_bytes=1 << 30)
    for leased in reversed(taken):
        shard.nack(leased)
    for name in ("c", "b", "a"):
        assert numbers(shard.drain(name)) == list(range(40))


def test_windows_give_their_memory_back(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 700))
    shard.enqueue(body=bytes(300 * KIB))
    taken = shard.reserve(max_jobs=300)
    for leased in taken:
        shard.nack(leased)
    shard.reserve(max_jobs=1000, max_bytes=1 << 30)
    assert shard.machine._budget.used == 0


def test_a_window_holds_a_bounded_part_of_a_long_queue(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=bytes(KIB)) for _ in range(1000)))
    shard.enqueue_all(*(job(body=bytes(KIB)) for _ in range(1000)))
    assert shard.machine._budget.used <= ready.WINDOW_BYTES
    shard.restart()
    shard.reserve()
    assert shard.machine._budget.used <= ready.WINDOW_BYTES + 2 * KIB


# -- unreadable records -----------------------------------------------------------------------


def corrupt(shard: Shard, sequence: int, record: bytes) -> bytes:
    """Overwrite the record of a ready job of queue q; returns its key. The machine reads it after a restart."""
    key = keys.job_key(slot_of("q"), 1, 9, sequence)
    assert shard.store.get(Family.JOBS, key) is not None
    shard.store.put(Family.JOBS, key, record)
    shard.store.write()
    shard.restart()
    return key


@pytest.mark.parametrize("record", [b"", b"short", bytes(40), b"\xff" * 24])
def test_an_unreadable_job_is_set_aside_and_the_rest_is_served(shard: Shard, record: bytes) -> None:
    shard.enqueue_all(*numbered(0, 3))
    key = corrupt(shard, 1, record)
    assert numbers(shard.drain()) == [0, 2]
    assert shard.store.get(Family.META, keys.SET_ASIDE + key) == record
    assert len(shard.reports) == 1 and "'q'" in shard.reports[0] and key.hex() in shard.reports[0]
    assert shard.counts() == (0, 0, 0, 0)


def test_a_record_under_another_jobs_key_is_set_aside(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 2))
    second = shard.store.get(Family.JOBS, keys.job_key(slot_of("q"), 1, 9, 1))
    assert second is not None
    corrupt(shard, 0, second)
    assert numbers(bodies(shard.reserve(max_jobs=2))) == [1]
    assert len(shard.reports) == 1


def test_a_reserve_waits_when_all_there_is_proves_unreadable(shard: Shard) -> None:
    shard.enqueue()
    corrupt(shard, 0, b"short")
    waiting = shard.park()
    assert shard.jobs_for(waiting) is None
    shard.enqueue(body=b"good")
    assert bodies(shard.jobs_for(waiting)) == [b"good"]


def test_what_was_set_aside_stays_so_after_a_restart(shard: Shard) -> None:
    shard.enqueue_all(*numbered(0, 2))
    corrupt(shard, 0, b"short")
    shard.reserve()
    shard.restart()
    shard.check()
    assert len(shard.reports) == 1
    assert shard.counts() == (0, 0, 1, 0)


def test_a_leased_job_whose_record_is_gone_is_reported(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.store.delete(Family.JOBS, keys.job_key(slot_of("q"), 1, 9, 0))
    assert shard.nack(leased, Strategy.DELAY, 1_000) == [0, False]
    assert len(shard.reports) == 1
    assert shard.counts() == (0, 0, 0, 0)
