"""What a shard does with an enqueue: ids, order, schedules, idempotency keys and the depth of a queue."""

from __future__ import annotations

import pytest

from common import job_ids
from common.slots import slot_of
from common.wire import Outcome, Strategy
from shard.machine import SEQUENCE_BLOCK, TICK_LIMIT
from shard.store import Family
from tests.unit import shard_driver
from tests.unit.shard_driver import LEASE_MS, WALL_START_MS, Shard, bodies, job, names_of_one_slot, rows

home, shard = shard_driver.home, shard_driver.shard

DAY_MS = 86_400_000


# -- ids --------------------------------------------------------------------------------------


def test_a_job_id_carries_the_time_the_slot_and_the_sequence(shard: Shard) -> None:
    shard.enqueue("orders")
    second = shard.enqueue("orders")
    assert job_ids.accepted_at_ms(second) == WALL_START_MS
    assert job_ids.slot(second) == slot_of("orders")
    assert job_ids.sequence(second) == 1


def test_the_random_bits_of_an_id_come_with_the_operation(shard: Shard) -> None:
    made = shard.enqueue()
    assert int.from_bytes(made, "big") & 0x3FFFF == 0x010203 & 0x3FFFF


def test_outcomes_are_in_the_order_of_the_batch(shard: Shard) -> None:
    outcomes = shard.enqueue_all(job("a", b"1"), job("b", b"2"), job("a", b"3"))
    served = {leased.job_id: leased.body for leased in shard.reserve("a", "b", max_jobs=3)}
    assert [served[each] for each in outcomes] == [b"1", b"2", b"3"]


def test_queues_of_one_slot_draw_their_sequences_from_the_same_numbers(shard: Shard) -> None:
    first, second = names_of_one_slot()
    drawn = [job_ids.sequence(shard.enqueue(name)) for name in (first, second, first)]
    assert drawn == [0, 1, 2]


def test_queues_of_one_slot_keep_their_jobs_apart(shard: Shard) -> None:
    first, second = names_of_one_slot()
    shard.enqueue(first, b"1")
    shard.enqueue(second, b"2")
    shard.enqueue(first, b"3")
    assert shard.drain(first) == [b"1", b"3"]
    assert shard.drain(second) == [b"2"]


@pytest.mark.parametrize("name", ["a", "ab", "a\tb", "é", "e\u0301", "\U0001f600", "a b", "x" * 512])
def test_names_that_look_alike_are_different_queues(shard: Shard, name: str) -> None:
    for other in ("a ", "abc", "a\t", "e", "e\u0301\u0301", "\U0001f601", name + "x"):
        shard.enqueue(other, b"other")
    shard.enqueue(name, b"own")
    assert shard.drain(name) == [b"own"]


def test_asking_for_an_unknown_queue_stores_nothing(shard: Shard) -> None:
    shard.reserve("nobody")
    shard.watch("nobody")
    assert shard.machine.counts() == {}
    assert all(rows(shard.store, family) == [] for family in Family)


# -- schedules --------------------------------------------------------------------------------


def test_a_scheduled_job_is_not_ready_one_millisecond_before_its_time(shard: Shard) -> None:
    shard.enqueue(due_ms=WALL_START_MS + 1_000)
    shard.pass_time(999)
    assert shard.reserve() == []
    assert shard.counts() == (0, 1, 0, 0)


def test_a_scheduled_job_is_ready_exactly_at_its_time(shard: Shard) -> None:
    shard.enqueue(due_ms=WALL_START_MS + 1_000)
    shard.pass_time(1_000)
    assert shard.counts() == (1, 0, 0, 0)
    assert len(shard.reserve()) == 1


@pytest.mark.parametrize("due_ms", [1, WALL_START_MS - 1, WALL_START_MS])
def test_a_time_that_has_come_means_now(shard: Shard, due_ms: int) -> None:
    shard.enqueue(due_ms=due_ms)
    assert shard.counts() == (1, 0, 0, 0)


def test_a_scheduled_job_takes_the_place_of_its_enqueue(shard: Shard) -> None:
    shard.enqueue(body=b"1")
    shard.enqueue(body=b"2", due_ms=WALL_START_MS + 1_000)
    shard.enqueue(body=b"3")
    shard.pass_time(1_000)
    assert shard.drain() == [b"1", b"2", b"3"]


def test_a_scheduled_job_keeps_its_priority(shard: Shard) -> None:
    shard.enqueue(body=b"low")
    shard.enqueue(body=b"high", priority=9, due_ms=WALL_START_MS + 1_000)
    shard.pass_time(1_000)
    assert shard.drain() == [b"high", b"low"]


def test_a_nearer_time_is_heard_of_while_a_far_one_is_waited_for(shard: Shard) -> None:
    shard.configure(sweep_interval_ms=DAY_MS)
    shard.enqueue(due_ms=WALL_START_MS + 10_000)
    assert shard.next_wake_ms() == 10_000
    shard.enqueue(due_ms=WALL_START_MS + 400)
    assert shard.next_wake_ms() == 400


def test_the_sleep_is_cut_to_the_sweep_interval_because_the_wall_clock_may_be_set(shard: Shard) -> None:
    shard.enqueue(due_ms=WALL_START_MS + 10_000)
    assert shard.next_wake_ms() == 1_000


def test_there_is_nothing_to_wake_for_without_timers(shard: Shard) -> None:
    shard.enqueue()
    assert shard.next_wake_ms() is None


def test_due_jobs_of_many_slots_are_all_promoted(shard: Shard) -> None:
    names = [f"queue-{number}" for number in range(20)]
    shard.enqueue_all(*(job(name, due_ms=WALL_START_MS + 50 + number) for number, name in enumerate(names)))
    shard.pass_time(59)
    assert [name for name in names if shard.counts(name) == (1, 0, 0, 0)] == names[:10]
    shard.pass_time(10)
    assert [name for name in names if shard.counts(name) == (1, 0, 0, 0)] == names


def test_one_tick_promotes_a_bounded_part_of_what_is_due(shard: Shard) -> None:
    jobs = [job(body=b"%d" % number, due_ms=WALL_START_MS + 1) for number in range(TICK_LIMIT + 5)]
    shard.enqueue_all(*jobs)
    shard.wall_ms += 1
    assert shard.tick()
    assert shard.counts() == (TICK_LIMIT, 5, 0, 0)
    shard.pass_time()
    assert shard.drain() == [each.body for each in jobs]


def test_the_sweep_limit_lowers_what_one_tick_does(shard: Shard) -> None:
    shard.configure(sweep_limit=2)
    shard.enqueue_all(*(job(due_ms=WALL_START_MS + 1) for _ in range(5)))
    shard.wall_ms += 1
    shard.tick()
    assert shard.counts() == (2, 3, 0, 0)


def test_a_far_timer_does_not_gather_in_memory_while_near_ones_fire(shard: Shard) -> None:
    shard.enqueue(due_ms=WALL_START_MS + DAY_MS)
    for _ in range(300):
        shard.enqueue(due_ms=shard.wall_ms + 1)
        shard.pass_time(1)
    assert shard.counts() == (300, 1, 0, 0)
    assert len(shard.machine._scheduled._heap) < 100


# -- idempotency ------------------------------------------------------------------------------


def test_a_key_that_is_known_answers_with_the_earlier_job(shard: Shard) -> None:
    first = shard.enqueue(key="k")
    assert shard.enqueue(key="k") == [Outcome.DEDUPLICATED, first]
    assert shard.counts() == (1, 0, 0, 0)


def test_keys_within_one_batch_are_compared_too(shard: Shard) -> None:
    first, second, third = shard.enqueue_all(job(key="a"), job(key="a"), job(key="b"))
    assert second == [Outcome.DEDUPLICATED, first]
    assert isinstance(third, bytes)
    assert shard.counts() == (2, 0, 0, 0)


def test_a_key_is_scoped_to_its_queue(shard: Shard) -> None:
    for name in names_of_one_slot():
        assert isinstance(shard.enqueue(name, key="k"), bytes)


def test_a_key_outlives_a_job_that_was_acked(shard: Shard) -> None:
    first = shard.enqueue(key="k")
    shard.ack(shard.reserve_one())
    assert shard.enqueue(key="k") == [Outcome.DEDUPLICATED, first]


def test_a_key_outlives_a_job_that_died(shard: Shard) -> None:
    first = shard.enqueue(key="k")
    shard.nack(shard.reserve_one(), Strategy.DEAD_LETTER)
    assert shard.enqueue(key="k") == [Outcome.DEDUPLICATED, first]


@pytest.mark.parametrize("state", ["leased", "scheduled", "delayed"])
def test_a_key_names_its_job_in_whatever_state_it_is(shard: Shard, state: str) -> None:
    due_ms = WALL_START_MS + 5_000 if state == "scheduled" else 0
    first = shard.enqueue(key="k", due_ms=due_ms)
    if state != "scheduled":
        leased = shard.reserve_one()
        if state == "delayed":
            shard.nack(leased, Strategy.DELAY, 5_000)
    assert shard.enqueue(key="k") == [Outcome.DEDUPLICATED, first]


def test_a_key_is_known_until_its_window_is_over(shard: Shard) -> None:
    first = shard.enqueue(key="k")
    shard.pass_time(DAY_MS - 1)
    assert shard.enqueue(key="k") == [Outcome.DEDUPLICATED, first]


def test_a_key_is_free_when_its_window_is_over(shard: Shard) -> None:
    first = shard.enqueue(key="k")
    shard.pass_time(DAY_MS)
    second = shard.enqueue(key="k")
    assert isinstance(second, bytes) and second != first


def test_an_expired_key_is_replaced_before_it_was_swept(shard: Shard) -> None:
    shard.enqueue(key="k")
    shard.wall_ms += DAY_MS
    second = shard.enqueue(key="k")
    assert isinstance(second, bytes)
    assert len(rows(shard.store, Family.DEDUP)) == len(rows(shard.store, Family.DEDUP_EXPIRY)) == 1
    shard.pass_time(1)
    assert shard.enqueue(key="k") == [Outcome.DEDUPLICATED, second]


def test_a_duplicate_does_not_extend_the_window(shard: Shard) -> None:
    shard.enqueue(key="k")
    shard.pass_time(DAY_MS - 1)
    shard.enqueue(key="k")
    shard.pass_time(1)
    assert isinstance(shard.enqueue(key="k"), bytes)


def test_a_longer_window_changes_no_key_that_is_stored(shard: Shard) -> None:
    shard.configure(dedup_window_ms=1_000)
    shard.enqueue(key="old")
    shard.configure(dedup_window_ms=10_000)
    shard.enqueue(key="new")
    shard.pass_time(1_000)
    assert isinstance(shard.enqueue(key="old"), bytes)
    assert not isinstance(shard.enqueue(key="new"), bytes)


def test_a_shorter_window_changes_no_key_that_is_stored(shard: Shard) -> None:
    shard.configure(dedup_window_ms=10_000)
    first = shard.enqueue(key="k")
    shard.configure(dedup_window_ms=1_000)
    shard.pass_time(9_999)
    assert shard.enqueue(key="k") == [Outcome.DEDUPLICATED, first]


def test_a_queue_has_the_window_that_it_declares(shard: Shard) -> None:
    shard.configure(queues=[{"name": "own", "dedup_window_ms": 500}])
    shard.enqueue("own", key="k")
    shard.pass_time(500)
    assert isinstance(shard.enqueue("own", key="k"), bytes)


def test_expired_keys_leave_the_store(shard: Shard) -> None:
    shard.configure(dedup_window_ms=1_000)
    shard.enqueue_all(*(job(key=f"k{number}") for number in range(TICK_LIMIT + 1)))
    shard.pass_time(999)
    assert len(rows(shard.store, Family.DEDUP)) == TICK_LIMIT + 1
    shard.pass_time(1)
    assert rows(shard.store, Family.DEDUP) == rows(shard.store, Family.DEDUP_EXPIRY) == []


def test_a_duplicate_that_follows_a_job_in_one_turn_sees_its_key(shard: Shard) -> None:
    with shard.one_turn():
        first = shard.enqueue(key="k")
        assert shard.enqueue(key="k") == [Outcome.DEDUPLICATED, first]


# -- depth ------------------------------------------------------------------------------------


def test_a_queue_takes_jobs_up_to_its_depth(shard: Shard) -> None:
    shard.configure(max_queue_depth=2)
    outcomes = shard.enqueue_all(job(), job(), job())
    assert outcomes[2] == [Outcome.QUEUE_FULL, 2]
    assert shard.counts() == (2, 0, 0, 0)


def test_a_depth_of_zero_refuses_every_job_and_makes_no_queue(shard: Shard) -> None:
    shard.configure(max_queue_depth=0)
    assert shard.enqueue(key="k") == [Outcome.QUEUE_FULL, 0]
    assert rows(shard.store, Family.QUEUES) == rows(shard.store, Family.DEDUP) == []


def test_the_cap_of_one_queue_is_nothing_to_another(shard: Shard) -> None:
    shard.configure(queues=[{"name": "small", "max_queue_depth": 1}])
    assert [type(each) for each in shard.enqueue_all(job("small"), job("small"), job("q"), job("q"))] == [
        bytes,
        list,
        bytes,
        bytes,
    ]


def test_a_duplicate_is_answered_by_a_full_queue(shard: Shard) -> None:
    shard.configure(max_queue_depth=1)
    first = shard.enqueue(key="k")
    assert shard.enqueue(key="k") == [Outcome.DEDUPLICATED, first]


def test_a_refused_job_leaves_its_key_free(shard: Shard) -> None:
    shard.configure(max_queue_depth=1)
    shard.enqueue()
    assert shard.enqueue(key="k") == [Outcome.QUEUE_FULL, 1]
    shard.ack(shard.reserve_one())
    assert isinstance(shard.enqueue(key="k"), bytes)


def test_scheduled_and_leased_jobs_count_against_the_depth(shard: Shard) -> None:
    shard.configure(max_queue_depth=3)
    shard.enqueue_all(job(), job(), job(due_ms=WALL_START_MS + 60_000))
    shard.reserve()
    assert shard.counts() == (1, 1, 1, 0)
    assert shard.enqueue() == [Outcome.QUEUE_FULL, 3]


def test_an_ack_makes_room(shard: Shard) -> None:
    shard.configure(max_queue_depth=1)
    shard.enqueue()
    shard.ack(shard.reserve_one())
    assert isinstance(shard.enqueue(), bytes)


def test_a_dead_letter_takes_no_room(shard: Shard) -> None:
    shard.configure(max_queue_depth=1, dead_letter_retention_ms=DAY_MS)
    shard.enqueue()
    shard.nack(shard.reserve_one(), Strategy.DEAD_LETTER)
    assert isinstance(shard.enqueue(), bytes)
    assert shard.counts() == (1, 0, 0, 1)


def test_jobs_come_back_and_fall_due_in_a_queue_that_is_over_its_cap(shard: Shard) -> None:
    shard.enqueue_all(job(body=b"1"), job(body=b"2"), job(body=b"3", due_ms=WALL_START_MS + 1_000))
    first, second = shard.reserve(max_jobs=2, lease_ms=1_000)
    shard.configure(max_queue_depth=1)
    assert shard.nack(first) == [0, False]
    shard.pass_time(1_000)
    assert shard.counts() == (3, 0, 0, 0)
    assert second.attempt == 1
    assert shard.drain() == [b"1", b"2", b"3"]


# -- atomic batches ---------------------------------------------------------------------------


def test_an_atomic_batch_is_stored_as_a_whole(shard: Shard) -> None:
    stored, outcomes = shard.enqueue_atomic(job("a", b"1"), job("b", b"2"))
    assert stored
    assert [leased.job_id for leased in shard.reserve("a", "b", max_jobs=2)] == outcomes


def test_an_atomic_batch_that_overfills_one_queue_stores_nothing(shard: Shard) -> None:
    shard.configure(queues=[{"name": "small", "max_queue_depth": 1}])
    stored, refusals = shard.enqueue_atomic(job("small", key="k"), job("big", key="k"), job("small"))
    assert not stored
    assert [list(each) for each in refusals] == [[0, [Outcome.QUEUE_FULL, 1]], [2, [Outcome.QUEUE_FULL, 1]]]
    assert all(rows(shard.store, family) == [] for family in Family)


def test_an_atomic_batch_counts_duplicates_as_new_jobs(shard: Shard) -> None:
    shard.configure(max_queue_depth=1)
    shard.enqueue(key="k")
    assert shard.enqueue_atomic(job(key="k"))[0] is False


def test_an_atomic_batch_answers_duplicates_in_line(shard: Shard) -> None:
    earlier = shard.enqueue(key="old")
    stored, (first, second, third) = shard.enqueue_atomic(job(key="a"), job(key="a"), job(key="old"))
    assert stored
    assert second == [Outcome.DEDUPLICATED, first]
    assert third == [Outcome.DEDUPLICATED, earlier]
    assert shard.counts() == (2, 0, 0, 0)


def test_an_atomic_batch_answers_a_waiting_reserve(shard: Shard) -> None:
    waiting = shard.park(max_jobs=2)
    shard.enqueue_atomic(job(body=b"1"), job(body=b"2"))
    assert bodies(shard.jobs_for(waiting)) == [b"1", b"2"]


# -- numbers ----------------------------------------------------------------------------------


def test_sequences_go_on_over_the_end_of_a_block(shard: Shard) -> None:
    shard.enqueue(body=b"first")
    shard.machine._slots[slot_of("q")].next_sequence = SEQUENCE_BLOCK - 1
    drawn = [job_ids.sequence(each) for each in shard.enqueue_all(job(body=b"second"), job(body=b"third"))]
    assert drawn == [SEQUENCE_BLOCK - 1, SEQUENCE_BLOCK]
    shard.restart()
    assert job_ids.sequence(shard.enqueue(body=b"fourth")) == 2 * SEQUENCE_BLOCK
    assert shard.drain() == [b"first", b"second", b"third", b"fourth"]


def test_an_enqueue_and_the_reserve_of_its_job_share_a_turn(shard: Shard) -> None:
    with shard.one_turn():
        shard.enqueue(body=b"1")
        leased = shard.reserve_one()
        assert shard.ack(leased) == 0
    assert shard.counts() == (0, 0, 0, 0)
    assert rows(shard.store, Family.JOBS) == []
    assert leased.lease_expires_ms == WALL_START_MS + LEASE_MS
