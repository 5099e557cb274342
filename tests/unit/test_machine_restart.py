"""What a shard still knows when its process ends at any moment and another starts from the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common import job_ids
from common.wire import Outcome, Strategy
from shard.machine import FAILED_PRECONDITION, NOT_FOUND
from shard.store import Family
from tests.unit import shard_driver
from tests.unit.shard_driver import LEASE_MS, WALL_START_MS, MemoryHome, Shard, bodies, job, rows

home, shard = shard_driver.home, shard_driver.shard


# -- a restart --------------------------------------------------------------------------------


def test_a_restart_changes_no_counter(shard: Shard) -> None:
    shard.configure(dead_letter_retention_ms=60_000)
    shard.enqueue_all(*(job(name) for name in ("a", "a", "a", "b")), job("b", due_ms=WALL_START_MS + 9_000))
    leased, _ = shard.reserve("a", max_jobs=2)
    shard.nack(leased, Strategy.DEAD_LETTER)
    shard.nack(shard.reserve_one("b"), Strategy.DELAY, 1_000)
    before = shard.machine.counts()
    assert before == {"a": (1, 0, 1, 1), "b": (0, 2, 0, 0)}
    shard.restart()
    assert shard.machine.counts() == before


def test_a_restart_of_an_empty_shard_finds_nothing(shard: Shard) -> None:
    shard.restart()
    assert shard.machine.counts() == {}
    assert shard.next_wake_ms() is None


def test_a_restart_writes_nothing(shard: Shard) -> None:
    shard.enqueue_all(job(key="k"), job(due_ms=WALL_START_MS + 1_000), job("b"))
    shard.reserve()
    before = [rows(shard.store, family) for family in Family]
    shard.restart()
    shard.restart()
    assert [rows(shard.store, family) for family in Family] == before


def test_order_and_priorities_outlive_a_restart(shard: Shard) -> None:
    shard.enqueue_all(job(body=b"1"), job(body=b"2", priority=9), job(body=b"3"))
    shard.restart()
    shard.enqueue_all(job(body=b"4"), job(body=b"5", priority=9))
    assert shard.drain() == [b"2", b"5", b"1", b"3", b"4"]


def test_a_job_that_comes_back_after_a_restart_takes_its_old_place(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number) for number in range(5)))
    taken = shard.reserve(max_jobs=3)
    shard.restart()
    shard.nack(taken[1])
    shard.nack(taken[0])
    assert shard.drain() == [b"0", b"1", b"3", b"4"]


def test_the_only_job_of_a_queue_comes_back_after_a_restart(shard: Shard) -> None:
    shard.enqueue(body=b"1", priority=7)
    leased = shard.reserve_one()
    shard.restart()
    shard.nack(leased)
    shard.enqueue(body=b"2", priority=7)
    assert shard.drain() == [b"1", b"2"]


def test_a_leased_job_behind_the_head_comes_back_in_its_place_after_a_restart(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number) for number in range(4)))
    first, _, third = shard.reserve(max_jobs=3)
    shard.nack(first)
    shard.restart()
    shard.nack(third)
    assert shard.drain() == [b"0", b"2", b"3"]


def test_ids_and_sequences_never_repeat_over_restarts(shard: Shard) -> None:
    seen = []
    for _ in range(4):
        seen += shard.enqueue_all(job(), job(), job("b"))
        for leased in shard.reserve("q", "b", max_jobs=10):
            shard.ack(leased)
        shard.restart()
    assert len({(job_ids.slot(each), job_ids.sequence(each)) for each in seen}) == 12
    sequences = [job_ids.sequence(each) for each in seen if job_ids.slot(each) == job_ids.slot(seen[0])]
    assert sequences == sorted(sequences)


def test_a_new_queue_after_a_restart_takes_no_number_of_an_old_one(shard: Shard) -> None:
    for name in ("a", "b", "c"):
        shard.enqueue(name, name.encode())
        shard.restart()
    assert shard.drain("c", "b", "a") == [b"c", b"b", b"a"]


# -- leases -----------------------------------------------------------------------------------


def test_a_restart_frees_no_live_lease(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.restart(down_ms=LEASE_MS - 1)
    shard.pass_time()
    assert shard.reserve() == []
    assert shard.ack(leased) == 0


def test_a_lease_runs_on_over_a_restart_and_ends_when_it_was_said_to(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.pass_time(10_000)
    shard.restart(down_ms=10_000)
    shard.pass_time(9_999)
    assert shard.counts() == (0, 0, 1, 0)
    shard.pass_time(1)
    assert shard.counts() == (1, 0, 0, 0)
    assert shard.ack(leased) == NOT_FOUND


def test_a_lease_that_ran_out_while_the_shard_was_down_ends_at_its_start(shard: Shard) -> None:
    shard.enqueue()
    late = shard.reserve_one()
    shard.restart(down_ms=LEASE_MS)
    shard.pass_time()
    (again,) = shard.reserve()
    assert again.attempt == 2
    assert shard.ack(late) == FAILED_PRECONDITION


def test_the_holder_of_a_lease_extends_it_after_a_restart(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.restart()
    assert shard.extend(leased, 60_000) == [0, WALL_START_MS + 60_000]
    shard.restart(down_ms=59_999)
    shard.pass_time()
    assert shard.counts() == (0, 0, 1, 0)
    assert shard.ack(leased) == 0


def test_a_shortened_lease_is_still_short_after_a_restart(shard: Shard) -> None:
    shard.enqueue()
    shard.extend(shard.reserve_one(), 100)
    shard.restart(down_ms=100)
    shard.pass_time()
    assert shard.counts() == (1, 0, 0, 0)


def test_a_wall_clock_set_back_during_a_restart_prolongs_no_lease_beyond_its_length(shard: Shard) -> None:
    shard.enqueue()
    shard.reserve()
    shard.wall_ms -= 3_600_000
    shard.restart()
    shard.pass_time(LEASE_MS - 1)
    assert shard.counts() == (0, 0, 1, 0)
    shard.pass_time(1)
    assert shard.counts() == (1, 0, 0, 0)


def test_wall_time_does_not_go_back_over_a_restart(shard: Shard) -> None:
    shard.enqueue()
    shard.wall_ms -= 3_600_000
    shard.restart()
    assert job_ids.accepted_at_ms(shard.enqueue()) == WALL_START_MS


def test_the_monotonic_clock_may_start_anew(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.mono_ms = 7
    shard.restart(down_ms=1_000)
    shard.pass_time(LEASE_MS - 1_001)
    assert shard.counts() == (0, 0, 1, 0)
    shard.pass_time(1)
    assert shard.ack(leased) == NOT_FOUND


def test_attempts_count_on_over_restarts(shard: Shard) -> None:
    shard.enqueue(max_attempts=3)
    deliveries = []
    for _ in range(6):
        deliveries += [leased.attempt for leased in shard.reserve()]
        shard.restart(down_ms=LEASE_MS)
        shard.pass_time()
    assert deliveries == [1, 2, 3]
    assert shard.counts() == (0, 0, 0, 0)


def test_a_last_attempt_that_ran_out_while_the_shard_was_down_is_a_dead_letter(shard: Shard) -> None:
    shard.configure(dead_letter_retention_ms=3_600_000)
    shard.enqueue(max_attempts=1)
    shard.reserve()
    shard.restart(down_ms=LEASE_MS + 5)
    shard.pass_time()
    assert [failed_at_ms for failed_at_ms, _ in shard.dead_letters()] == [WALL_START_MS + LEASE_MS + 5]


# -- claims -----------------------------------------------------------------------------------


def test_a_claim_is_given_back_by_its_op_id_after_a_restart(shard: Shard) -> None:
    shard.enqueue_all(job(body=b"1"), job(body=b"2"), job(body=b"3"))
    first, _ = shard.reserve(max_jobs=2)
    claim = shard.last_op
    shard.ack(first)
    shard.restart()
    shard.give_back(claim)
    assert [(leased.body, leased.attempt) for leased in shard.reserve(max_jobs=3)] == [(b"2", 1), (b"3", 1)]


def test_a_claim_confirmed_after_a_restart_is_not_given_back(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    claim = shard.last_op
    shard.restart()
    shard.confirm(claim)
    shard.give_back(claim)
    assert shard.ack(leased) == 0


def test_a_claim_of_a_later_attempt_is_not_given_back_by_the_first(shard: Shard) -> None:
    shard.enqueue()
    shard.nack(shard.reserve_one())
    first = shard.last_op - 1
    again = shard.reserve_one()
    shard.restart()
    shard.give_back(first)
    assert shard.ack(again) == 0


def test_after_a_restart_leases_stand_when_a_router_is_gone(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.restart()
    shard.router_gone()
    assert shard.ack(leased) == 0


# -- timers and keys --------------------------------------------------------------------------


def test_a_restart_shifts_no_due_time(shard: Shard) -> None:
    shard.enqueue(due_ms=WALL_START_MS + 5_000)
    shard.restart(down_ms=2_000)
    assert shard.next_wake_ms() == 1_000
    shard.pass_time(2_999)
    assert shard.counts() == (0, 1, 0, 0)
    shard.pass_time(1)
    assert shard.counts() == (1, 0, 0, 0)


def test_what_fell_due_while_the_shard_was_down_is_ready_at_its_start(shard: Shard) -> None:
    shard.enqueue(due_ms=WALL_START_MS + 5_000)
    shard.restart(down_ms=60_000)
    shard.pass_time()
    assert len(shard.reserve()) == 1


def test_jobs_that_fall_due_together_are_promoted_once_over_a_restart(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number, due_ms=WALL_START_MS + 1) for number in range(300)))
    shard.wall_ms += 1
    shard.tick()
    shard.restart()
    shard.pass_time()
    assert [int(body) for body in shard.drain()] == list(range(300))


def test_keys_outlive_a_restart_with_their_deadline(shard: Shard) -> None:
    shard.configure(dedup_window_ms=10_000)
    first = shard.enqueue(key="k")
    shard.restart(down_ms=9_999)
    assert shard.enqueue(key="k") == [Outcome.DEDUPLICATED, first]
    shard.restart(down_ms=1)
    shard.pass_time()
    assert rows(shard.store, Family.DEDUP) == []
    assert isinstance(shard.enqueue(key="k"), bytes)


def test_the_depth_of_a_queue_is_known_after_a_restart(shard: Shard) -> None:
    shard.configure(max_queue_depth=2)
    shard.enqueue_all(job(), job())
    shard.restart()
    assert shard.enqueue() == [Outcome.QUEUE_FULL, 2]


# -- a crash ----------------------------------------------------------------------------------


@pytest.fixture
def crashing() -> Iterator[Shard]:
    """A shard on a store of which a crash may lose what is not synced."""
    made = Shard(MemoryHome())
    yield made
    made.check()
    made.store.close()


def crash(shard: Shard, keep_unsynced: int = 0) -> None:
    assert isinstance(shard.home, MemoryHome)
    shard.home.store = shard.home.store.crash(keep_unsynced)
    shard.start()


def test_a_turn_that_was_not_written_leaves_nothing(crashing: Shard) -> None:
    crashing.enqueue(body=b"1")
    with crashing.one_turn():
        crashing.enqueue(body=b"2")
        crashing.reserve()
        crash(crashing)
        assert crashing.counts() == (1, 0, 0, 0)
    assert bodies(crashing.reserve(max_jobs=2)) == [b"1"]


@pytest.mark.parametrize(
    ("kept", "left"),
    [(0, []), (1, [1, 2]), (2, [1, 2, 3]), (3, [1, 2, 3]), (5, [1, 2, 3]), (6, [1, 3]), (7, [1, 4, 3]), (8, [1, 4, 3])],
)
def test_a_crash_leaves_whole_turns(crashing: Shard, kept: int, left: list[int]) -> None:
    live_unsynced(crashing)
    crash(crashing, kept)
    crashing.check()
    crashing.pass_time(10 * LEASE_MS)
    crashing.check()
    assert [int(body) for body in crashing.drain("q", "b")] == left


def live_unsynced(shard: Shard) -> None:
    """Eight turns, none of them synced."""
    shard.syncs = False
    shard.enqueue_all(job(body=b"1"), job(body=b"2", key="k"))
    shard.enqueue("b", b"3", due_ms=WALL_START_MS + 100)
    first, second = shard.reserve(max_jobs=2)
    shard.nack(first)
    shard.extend(second, 1_000)
    shard.ack(second)
    shard.enqueue("b", b"4", priority=3)
    shard.wall_ms += 100
    shard.tick()
    assert isinstance(shard.home, MemoryHome) and shard.home.store.unsynced == 8
