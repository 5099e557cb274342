"""How a lease ends: ack, nack, extend, its time, and what becomes of the job."""

from __future__ import annotations

import pytest

from common import job_ids
from common.config import Config
from common.slots import slot_of
from common.wire import LeasedJob, Strategy
from shard.dead_letters import DeadLetterCause
from shard.machine import FAILED_PRECONDITION, NOT_FOUND, TICK_LIMIT
from shard.retries import retry_delay_ms
from shard.store import Family
from tests.unit import shard_driver
from tests.unit.shard_driver import LEASE_MS, WALL_START_MS, Shard, job, rows

home, shard = shard_driver.home, shard_driver.shard

RETENTION_MS = 3_600_000


def refusal(answer: list[object]) -> object:
    """The status of an answer that is a refusal with a text."""
    status, text = answer
    assert status != 0 and isinstance(text, str)
    return status


def unknown_job() -> LeasedJob:
    return LeasedJob(job_ids.make(WALL_START_MS, slot_of("q"), 0, 1), 1, 0, b"")


# -- ack --------------------------------------------------------------------------------------


def test_an_acked_job_leaves_nothing_but_its_queue(shard: Shard) -> None:
    shard.enqueue()
    assert shard.ack(shard.reserve_one()) == 0
    assert all(rows(shard.store, family) == [] for family in (Family.JOBS, Family.LEASES, Family.DEAD))
    assert shard.counts() == (0, 0, 0, 0)


def test_an_acked_job_is_never_redelivered(shard: Shard) -> None:
    shard.enqueue()
    shard.ack(shard.reserve_one())
    shard.pass_time(10 * LEASE_MS)
    assert shard.reserve() == []


def test_a_second_ack_finds_no_job(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.ack(leased)
    assert shard.ack(leased) == NOT_FOUND


def test_an_ack_in_the_last_millisecond_counts(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.pass_time(LEASE_MS - 1)
    assert shard.ack(leased) == 0


# -- refusals ---------------------------------------------------------------------------------


def test_a_job_that_never_existed_is_not_found(shard: Shard) -> None:
    assert shard.ack(unknown_job()) == NOT_FOUND
    assert refusal(shard.nack(unknown_job())) == NOT_FOUND
    assert refusal(shard.extend(unknown_job(), 1_000)) == NOT_FOUND


def test_an_id_whose_random_bits_were_guessed_is_not_found(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    guessed = leased._replace(job_id=(int.from_bytes(leased.job_id, "big") ^ 1).to_bytes(16, "big"))
    assert shard.ack(guessed) == NOT_FOUND
    assert shard.ack(leased) == 0


def test_a_ready_job_cannot_be_settled(shard: Shard) -> None:
    ready = LeasedJob(shard.enqueue(), 1, 0, b"")
    assert shard.ack(ready) == NOT_FOUND
    assert refusal(shard.nack(ready)) == NOT_FOUND
    assert refusal(shard.extend(ready, 1_000)) == NOT_FOUND
    assert shard.counts() == (1, 0, 0, 0)


@pytest.mark.parametrize("attempt", [1, 3])
def test_another_attempt_than_the_one_that_is_out_is_refused(shard: Shard, attempt: int) -> None:
    shard.enqueue()
    shard.nack(shard.reserve_one())
    leased = shard.reserve_one()
    assert shard.ack(leased, attempt=attempt) == FAILED_PRECONDITION
    assert refusal(shard.nack(leased, attempt=attempt)) == FAILED_PRECONDITION
    assert refusal(shard.extend(leased, 1_000, attempt=attempt)) == FAILED_PRECONDITION
    assert shard.counts() == (0, 0, 1, 0)
    assert shard.ack(leased) == 0


def test_a_late_worker_does_not_disturb_the_new_holder(shard: Shard) -> None:
    shard.enqueue()
    late = shard.reserve_one()
    shard.pass_time(LEASE_MS)
    holder = shard.reserve_one()
    assert refusal(shard.nack(late, Strategy.DEAD_LETTER)) == FAILED_PRECONDITION
    assert shard.ack(holder) == 0


def test_a_lease_whose_end_was_not_yet_swept_is_over_all_the_same(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.wall_ms += LEASE_MS
    shard.mono_ms += LEASE_MS
    assert shard.ack(leased) == NOT_FOUND
    assert shard.counts() == (1, 0, 0, 0)


def test_an_ack_that_finds_its_lease_over_may_find_the_job_given_to_a_waiter(shard: Shard) -> None:
    shard.enqueue(body=b"1")
    leased = shard.reserve_one()
    waiting = shard.park()
    shard.wall_ms += LEASE_MS
    shard.mono_ms += LEASE_MS
    assert shard.ack(leased) == FAILED_PRECONDITION
    given = shard.jobs_for(waiting)
    assert given is not None and [each.attempt for each in given] == [2]


# -- nack -------------------------------------------------------------------------------------


def test_a_nacked_job_is_ready_at_once_with_the_next_attempt(shard: Shard) -> None:
    made = shard.enqueue(body=b"1")
    assert shard.nack(shard.reserve_one()) == [0, False]
    assert shard.reserve() == [(made, 2, WALL_START_MS + LEASE_MS, b"1")]


def test_a_nacked_job_goes_back_to_its_place(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=body) for body in (b"1", b"2", b"3")))
    first, second = shard.reserve(max_jobs=2)
    shard.nack(second)
    shard.nack(first)
    assert shard.drain() == [b"1", b"2", b"3"]


def test_a_nack_on_the_last_attempt_ends_the_job(shard: Shard) -> None:
    shard.enqueue(max_attempts=2)
    assert shard.nack(shard.reserve_one()) == [0, False]
    assert shard.nack(shard.reserve_one()) == [0, True]
    assert shard.counts() == (0, 0, 0, 0)
    assert rows(shard.store, Family.JOBS) == []


def test_a_nack_on_the_last_attempt_keeps_a_dead_letter(shard: Shard) -> None:
    shard.configure(dead_letter_retention_ms=RETENTION_MS)
    made = shard.enqueue(body=b"1", max_attempts=1)
    leased = shard.reserve_one()
    shard.pass_time(10)
    assert shard.nack(leased, reason="broken") == [0, True]
    cause = DeadLetterCause.ATTEMPTS_EXHAUSTED
    assert shard.dead_letters() == [(WALL_START_MS + 10, (made, 1, cause, "broken", b"1"))]
    assert shard.counts() == (0, 0, 0, 1)


def test_a_delay_does_not_save_a_job_on_its_last_attempt(shard: Shard) -> None:
    shard.enqueue(max_attempts=1)
    assert shard.nack(shard.reserve_one(), Strategy.DELAY, 1_000) == [0, True]


@pytest.mark.parametrize("max_attempts", [1, 5])
def test_a_job_can_be_dead_lettered_on_any_attempt(shard: Shard, max_attempts: int) -> None:
    shard.configure(dead_letter_retention_ms=RETENTION_MS)
    made = shard.enqueue(max_attempts=max_attempts)
    assert shard.nack(shard.reserve_one(), Strategy.DEAD_LETTER) == [0, True]
    assert shard.dead_letters() == [(WALL_START_MS, (made, 1, DeadLetterCause.REJECTED, None, b""))]


def test_an_empty_reason_is_kept_apart_from_none(shard: Shard) -> None:
    shard.configure(dead_letter_retention_ms=RETENTION_MS)
    shard.enqueue()
    shard.nack(shard.reserve_one(), Strategy.DEAD_LETTER, reason="")
    ((_, record),) = shard.dead_letters()
    assert record.reason == ""


def test_without_retention_a_dead_job_is_deleted(shard: Shard) -> None:
    shard.enqueue()
    assert shard.nack(shard.reserve_one(), Strategy.DEAD_LETTER) == [0, True]
    assert rows(shard.store, Family.DEAD) == rows(shard.store, Family.JOBS) == []
    assert shard.counts() == (0, 0, 0, 0)


# -- delays -----------------------------------------------------------------------------------


def test_a_delayed_job_is_ready_exactly_when_its_delay_is_over(shard: Shard) -> None:
    shard.enqueue()
    shard.nack(shard.reserve_one(), Strategy.DELAY, 5_000)
    assert shard.counts() == (0, 1, 0, 0)
    shard.pass_time(4_999)
    assert shard.reserve() == []
    shard.pass_time(1)
    assert [leased.attempt for leased in shard.reserve()] == [2]


def test_a_delayed_job_goes_back_to_its_place(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=body) for body in (b"1", b"2", b"3")))
    shard.nack(shard.reserve_one(), Strategy.DELAY, 5_000)
    shard.pass_time(5_000)
    assert shard.drain() == [b"1", b"2", b"3"]


def test_a_delay_of_nothing_means_at_once(shard: Shard) -> None:
    shard.configure(retry_delay_ms=5_000)
    shard.enqueue()
    shard.nack(shard.reserve_one(), Strategy.DELAY, 0)
    assert shard.counts() == (1, 0, 0, 0)


def test_a_delay_is_cut_to_the_schedule_horizon_of_its_queue(shard: Shard) -> None:
    shard.configure(queues=[{"name": "near", "max_schedule_horizon_ms": 2_000}])
    shard.enqueue("near")
    shard.nack(shard.reserve_one("near"), Strategy.DELAY, 10_000)
    shard.pass_time(1_999)
    assert shard.counts("near") == (0, 1, 0, 0)
    shard.pass_time(1)
    assert shard.counts("near") == (1, 0, 0, 0)


def test_the_end_of_an_old_lease_means_nothing_to_a_delayed_job(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one(lease_ms=2_000)
    shard.pass_time(1_000)
    shard.nack(leased, Strategy.DELAY, 10_000)
    shard.pass_time(1_000)
    assert shard.counts() == (0, 1, 0, 0)
    shard.pass_time(8_999)
    assert shard.counts() == (0, 1, 0, 0)
    shard.pass_time(1)
    assert shard.counts() == (1, 0, 0, 0)


def test_the_default_strategy_waits_as_its_queue_says(shard: Shard) -> None:
    shard.configure(retry_delay_ms=4_000)
    made = shard.enqueue()
    shard.nack(shard.reserve_one())
    delay_ms = retry_delay_ms(shard.config.effective("q"), made, 1)
    assert 3_000 <= delay_ms <= 4_000
    shard.pass_time(delay_ms - 1)
    assert shard.counts() == (0, 1, 0, 0)
    shard.pass_time(1)
    assert shard.counts() == (1, 0, 0, 0)


def config(**limits: object) -> Config:
    return Config.model_validate({"limits": limits})


@pytest.mark.parametrize(
    ("attempt", "longest_ms"), [(1, 1_000), (2, 2_000), (3, 4_000), (4, 8_000), (5, 10_000), (100, 10_000)]
)
def test_an_exponential_delay_doubles_with_each_attempt_up_to_its_cap(attempt: int, longest_ms: int) -> None:
    limits = config(retry_delay_ms=1_000, retry_backoff="exponential", retry_delay_max_ms=10_000).effective("q")
    delays = [retry_delay_ms(limits, number.to_bytes(16, "big"), attempt) for number in range(500)]
    assert longest_ms - longest_ms // 4 <= min(delays) < longest_ms - longest_ms // 5
    assert longest_ms - longest_ms // 20 < max(delays) <= longest_ms


def test_a_plain_delay_is_the_same_for_every_attempt() -> None:
    limits = config(retry_delay_ms=1_000).effective("q")
    delays = [retry_delay_ms(limits, bytes(16), attempt) for attempt in range(1, 200)]
    assert 750 <= min(delays) and max(delays) <= 1_000


def test_the_jitter_is_a_function_of_job_and_attempt() -> None:
    limits = config(retry_delay_ms=100_000).effective("q")
    one, other = bytes(16), bytes(15) + b"\x01"
    assert retry_delay_ms(limits, one, 1) == retry_delay_ms(limits, one, 1)
    assert retry_delay_ms(limits, one, 1) != retry_delay_ms(limits, other, 1)
    assert retry_delay_ms(limits, one, 1) != retry_delay_ms(limits, one, 2)


def test_no_delay_has_no_jitter() -> None:
    assert retry_delay_ms(config(retry_delay_ms=0, retry_backoff="exponential").effective("q"), bytes(16), 9) == 0


@pytest.mark.parametrize("delay_ms", [1, 2, 3])
def test_a_delay_too_short_for_a_quarter_is_kept_whole(delay_ms: int) -> None:
    assert retry_delay_ms(config(retry_delay_ms=delay_ms).effective("q"), bytes(16), 1) == delay_ms


# -- extend -----------------------------------------------------------------------------------


def test_an_extension_counts_from_now(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one(lease_ms=2_000)
    shard.pass_time(1_000)
    assert shard.extend(leased, 5_000) == [0, WALL_START_MS + 6_000]
    shard.pass_time(4_999)
    assert shard.counts() == (0, 0, 1, 0)
    shard.pass_time(1)
    assert shard.counts() == (1, 0, 0, 0)


def test_an_extension_may_shorten_a_lease(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one(lease_ms=20_000)
    assert shard.extend(leased, 100) == [0, WALL_START_MS + 100]
    assert shard.next_wake_ms() == 100
    shard.pass_time(100)
    assert shard.counts() == (1, 0, 0, 0)


def test_an_extension_is_cut_to_the_longest_lease_of_its_queue(shard: Shard) -> None:
    shard.configure(queues=[{"name": "short", "max_lease_duration_ms": 3_000}])
    shard.enqueue("short")
    assert shard.extend(shard.reserve_one("short"), 10_000) == [0, WALL_START_MS + 3_000]


def test_an_extension_is_at_least_a_millisecond(shard: Shard) -> None:
    shard.enqueue()
    assert shard.extend(shard.reserve_one(), 0) == [0, WALL_START_MS + 1]


def test_an_extension_keeps_the_attempt(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    for _ in range(3):
        shard.extend(leased, LEASE_MS)
    assert shard.ack(leased) == 0


def test_an_extension_of_a_lease_that_is_over_is_refused(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.pass_time(LEASE_MS)
    assert refusal(shard.extend(leased, LEASE_MS)) == NOT_FOUND


def test_extending_a_lease_over_and_over_does_not_gather_in_memory(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    with shard.one_turn():
        for _ in range(3_000):
            shard.extend(leased, LEASE_MS)
    assert len(shard.machine._out.timers) <= 1_026


# -- expiry -----------------------------------------------------------------------------------


def test_a_lease_holds_until_its_last_millisecond(shard: Shard) -> None:
    shard.enqueue()
    shard.reserve()
    shard.pass_time(LEASE_MS - 1)
    assert shard.counts() == (0, 0, 1, 0)


def test_an_expired_lease_makes_the_job_ready_with_the_next_attempt(shard: Shard) -> None:
    made = shard.enqueue()
    shard.reserve()
    shard.pass_time(LEASE_MS)
    assert [(leased.job_id, leased.attempt) for leased in shard.reserve()] == [(made, 2)]


def test_an_expired_job_goes_back_to_its_place_at_once_whatever_the_retry_delay(shard: Shard) -> None:
    shard.configure(retry_delay_ms=10_000)
    shard.enqueue_all(job(body=b"1"), job(body=b"2"))
    shard.reserve()
    shard.pass_time(LEASE_MS)
    assert shard.drain() == [b"1", b"2"]


def test_a_lease_that_expires_on_the_last_attempt_ends_the_job_without_a_reserve(shard: Shard) -> None:
    shard.configure(dead_letter_retention_ms=RETENTION_MS)
    made = shard.enqueue(max_attempts=1)
    shard.reserve()
    shard.pass_time(LEASE_MS)
    cause = DeadLetterCause.LEASE_EXPIRED
    assert shard.dead_letters() == [(WALL_START_MS + LEASE_MS, (made, 1, cause, None, b""))]


def test_a_job_is_delivered_exactly_as_often_as_it_has_attempts(shard: Shard) -> None:
    shard.enqueue(max_attempts=4)
    deliveries = []
    for _ in range(10):
        deliveries += [leased.attempt for leased in shard.reserve()]
        shard.pass_time(LEASE_MS)
    assert deliveries == [1, 2, 3, 4]
    assert shard.counts() == (0, 0, 0, 0)


def test_leases_end_in_the_order_of_their_deadlines(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number) for number in range(3)))
    for lease_ms in (3_000, 1_000, 2_000):
        shard.reserve(lease_ms=lease_ms)
    ready = []
    for _ in range(3):
        shard.pass_time(1_000)
        ready.append(shard.counts()[0])
    assert ready == [1, 2, 3]


def test_the_next_wake_is_the_earliest_end_of_a_lease_that_still_stands(shard: Shard) -> None:
    shard.enqueue_all(job(), job())
    short = shard.reserve_one(lease_ms=500)
    shard.reserve_one(lease_ms=8_000)
    assert shard.next_wake_ms() == 500
    shard.ack(short)
    assert shard.next_wake_ms() == 8_000
    shard.pass_time(7_999)
    assert shard.next_wake_ms() == 1


def test_one_tick_ends_a_bounded_part_of_the_leases_that_are_over(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number) for number in range(TICK_LIMIT + 3)))
    shard.reserve(max_jobs=TICK_LIMIT + 3)
    shard.wall_ms += LEASE_MS
    shard.mono_ms += LEASE_MS
    assert shard.tick()
    assert shard.counts() == (TICK_LIMIT, 0, 3, 0)
    shard.pass_time()
    assert [int(body) for body in shard.drain()] == list(range(TICK_LIMIT + 3))


# -- clocks -----------------------------------------------------------------------------------


def test_a_wall_clock_that_steps_forward_frees_no_lease(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.wall_ms += 3_600_000
    shard.pass_time()
    assert shard.counts() == (0, 0, 1, 0)
    assert shard.ack(leased) == 0


def test_a_wall_clock_that_steps_back_freezes_no_lease(shard: Shard) -> None:
    shard.enqueue()
    shard.reserve()
    shard.wall_ms -= 3_600_000
    shard.pass_time(LEASE_MS)
    assert shard.counts() == (1, 0, 0, 0)


def test_wall_time_stands_still_until_a_clock_that_was_set_back_catches_up(shard: Shard) -> None:
    shard.enqueue("early")
    shard.wall_ms -= 10_000
    assert job_ids.accepted_at_ms(shard.enqueue()) == WALL_START_MS
    assert shard.reserve_one().lease_expires_ms == WALL_START_MS + LEASE_MS
    shard.wall_ms += 10_001
    assert job_ids.accepted_at_ms(shard.enqueue()) == WALL_START_MS + 1


def test_a_wall_clock_that_steps_forward_brings_schedules_forward(shard: Shard) -> None:
    shard.enqueue(due_ms=WALL_START_MS + 1_000)
    shard.wall_ms += 1_000
    shard.pass_time()
    assert shard.counts() == (1, 0, 0, 0)


def test_a_wall_clock_that_steps_back_promotes_nothing_early(shard: Shard) -> None:
    shard.enqueue(due_ms=WALL_START_MS + 1_000)
    shard.wall_ms -= 500
    shard.pass_time(1_499)
    assert shard.counts() == (0, 1, 0, 0)
    shard.pass_time(1)
    assert shard.counts() == (1, 0, 0, 0)
