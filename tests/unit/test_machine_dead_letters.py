"""Dead letters of a shard: who gets which, when they go, and when they come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.wire import DeadLetter, Strategy
from shard.dead_letters import DEAD_LETTER_OVERHEAD_BYTES, DeadLetterCause
from shard.machine import TICK_LIMIT
from shard.store import Family
from tests.unit import shard_driver
from tests.unit.shard_driver import LEASE_MS, OTHER_ROUTER, WALL_START_MS, Home, Shard, job, rows

home = shard_driver.home

RETENTION_MS = 60_000


@pytest.fixture
def shard(home: Home) -> Iterator[Shard]:
    """A shard that keeps dead letters."""
    made = Shard(home)
    made.configure(dead_letter_retention_ms=RETENTION_MS)
    yield made
    made.check()


def bury(shard: Shard, *bodies: bytes, queue: str = "q", apart_ms: int = 1) -> None:
    """Dead letters one after the other, each `apart_ms` after the one before."""
    for body in bodies:
        shard.enqueue(queue, body)
        shard.nack(shard.reserve_one(queue), Strategy.DEAD_LETTER)
        shard.pass_time(apart_ms)


def bodies(letters: list[DeadLetter]) -> list[bytes]:
    return [letter.body for letter in letters]


# -- what is handed out -----------------------------------------------------------------------


def test_a_dead_letter_says_what_became_of_its_job(shard: Shard) -> None:
    made = shard.enqueue(body=b"1")
    shard.nack(shard.reserve_one())
    leased = shard.reserve_one()
    shard.pass_time(7)
    shard.nack(leased, Strategy.DEAD_LETTER, reason="no good")
    assert shard.drain_dead() == [(made, DeadLetterCause.REJECTED, WALL_START_MS + 7, 2, "no good", b"1")]


def test_an_expired_lease_has_no_reason(shard: Shard) -> None:
    made = shard.enqueue(max_attempts=1)
    shard.reserve()
    shard.pass_time(LEASE_MS)
    cause = DeadLetterCause.LEASE_EXPIRED
    assert shard.drain_dead() == [(made, cause, WALL_START_MS + LEASE_MS, 1, None, b"")]


def test_dead_letters_are_handed_out_oldest_first(shard: Shard) -> None:
    bury(shard, b"1", b"2", b"3")
    assert bodies(shard.drain_dead("q")) == [b"1", b"2", b"3"]


def test_dead_letters_of_one_moment_are_in_order_of_enqueue(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number) for number in range(3)))
    for leased in reversed(shard.reserve(max_jobs=3)):
        shard.nack(leased, Strategy.DEAD_LETTER)
    assert bodies(shard.drain_dead("q")) == [b"0", b"1", b"2"]


def test_without_a_queue_the_oldest_of_all_come_first(shard: Shard) -> None:
    bury(shard, b"1", queue="a")
    bury(shard, b"2", queue="b")
    bury(shard, b"3", queue="a")
    assert bodies(shard.drain_dead()) == [b"1", b"2", b"3"]


def test_a_named_queue_gives_only_its_own(shard: Shard) -> None:
    bury(shard, b"1", queue="a")
    bury(shard, b"2", queue="b")
    assert bodies(shard.drain_dead("b")) == [b"2"]


def test_an_unknown_queue_has_no_dead_letters(shard: Shard) -> None:
    bury(shard, b"1")
    assert shard.drain_dead("unknown") == []


def test_no_more_than_asked_for_are_handed_out(shard: Shard) -> None:
    bury(shard, b"1", b"2", b"3")
    assert bodies(shard.drain_dead(count=2)) == [b"1", b"2"]


def test_an_answer_of_dead_letters_is_cut_by_bytes_but_holds_one(shard: Shard) -> None:
    bury(shard, bytes(500), bytes(500), bytes(500))
    assert len(shard.drain_dead(max_bytes=10)) == 1
    assert len(shard.drain_dead(max_bytes=500 + DEAD_LETTER_OVERHEAD_BYTES)) == 1
    assert len(shard.drain_dead(max_bytes=10_000)) == 1


def test_more_dead_letters_than_one_read_takes_are_handed_out_in_order(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number) for number in range(200)))
    for leased in shard.reserve(max_jobs=200):
        shard.nack(leased, Strategy.DEAD_LETTER)
    assert [int(body) for body in bodies(shard.drain_dead(count=150))] == list(range(150))
    assert [int(body) for body in bodies(shard.drain_dead(count=150))] == list(range(150, 200))


# -- confirmed or given back ------------------------------------------------------------------


def test_a_dead_letter_is_handed_to_one_caller(shard: Shard) -> None:
    bury(shard, b"1", b"2")
    assert bodies(shard.drain_dead(count=1)) == [b"1"]
    assert bodies(shard.drain_dead("q")) == [b"2"]
    assert shard.drain_dead() == []


def test_a_dead_letter_is_deleted_when_its_answer_has_left(shard: Shard) -> None:
    bury(shard, b"1")
    shard.drain_dead()
    assert shard.counts() == (0, 0, 0, 1)
    shard.confirm(shard.last_op)
    assert shard.counts() == (0, 0, 0, 0)
    assert rows(shard.store, Family.DEAD) == []


def test_dead_letters_given_back_are_there_as_before(shard: Shard) -> None:
    bury(shard, b"1", b"2", b"3")
    shard.drain_dead(count=2)
    shard.give_back(shard.last_op)
    assert bodies(shard.drain_dead()) == [b"1", b"2", b"3"]


def test_dead_letters_of_a_confirmed_drain_are_not_given_back(shard: Shard) -> None:
    bury(shard, b"1")
    shard.drain_dead()
    drain = shard.last_op
    shard.confirm(drain)
    shard.give_back(drain)
    assert shard.drain_dead() == []


def test_a_drain_keeps_the_first_records_of_its_answer(shard: Shard) -> None:
    bury(shard, b"1", b"2", b"3")
    shard.drain_dead()
    drain = shard.last_op
    shard.keep(drain, 1)
    assert bodies(shard.drain_dead(router=OTHER_ROUTER)) == [b"2", b"3"]
    shard.confirm(drain)
    assert shard.counts() == (0, 0, 0, 2)


def test_a_drain_that_keeps_nothing_gives_all_back(shard: Shard) -> None:
    bury(shard, b"1")
    shard.drain_dead()
    drain = shard.last_op
    shard.keep(drain, 0)
    shard.confirm(drain)
    assert bodies(shard.drain_dead()) == [b"1"]


def test_what_a_router_that_is_gone_was_handed_is_there_again(shard: Shard) -> None:
    bury(shard, b"1", b"2")
    shard.drain_dead(count=1)
    shard.drain_dead(count=1, router=OTHER_ROUTER)
    shard.router_gone()
    assert bodies(shard.drain_dead()) == [b"1"]


def test_what_was_handed_out_is_there_again_after_a_restart(shard: Shard) -> None:
    bury(shard, b"1", b"2")
    shard.drain_dead(count=1)
    shard.restart()
    assert bodies(shard.drain_dead()) == [b"1", b"2"]


# -- retention --------------------------------------------------------------------------------


def test_a_dead_letter_is_kept_until_its_retention_is_over(shard: Shard) -> None:
    bury(shard, b"1", apart_ms=0)
    shard.pass_time(RETENTION_MS - 1)
    assert shard.counts() == (0, 0, 0, 1)
    shard.pass_time(1)
    assert shard.counts() == (0, 0, 0, 0)
    assert rows(shard.store, Family.DEAD) == []


def test_a_restart_shifts_no_retention(shard: Shard) -> None:
    bury(shard, b"1", apart_ms=0)
    shard.restart(down_ms=RETENTION_MS - 1)
    shard.pass_time()
    assert shard.counts() == (0, 0, 0, 1)
    shard.restart(down_ms=1)
    shard.pass_time()
    assert shard.counts() == (0, 0, 0, 0)


def test_the_end_of_a_retention_is_a_time_to_wake(shard: Shard) -> None:
    shard.configure(dead_letter_retention_ms=500)
    bury(shard, b"1", apart_ms=0)
    assert shard.next_wake_ms() == 500


def test_a_dead_letter_that_is_handed_out_is_not_swept(shard: Shard) -> None:
    bury(shard, b"1")
    shard.drain_dead()
    drain = shard.last_op
    shard.pass_time(RETENTION_MS)
    shard.give_back(drain)
    assert shard.counts() == (0, 0, 0, 1)
    shard.pass_time()
    assert shard.counts() == (0, 0, 0, 0)


def test_one_tick_sweeps_a_bounded_part_of_what_is_over(shard: Shard) -> None:
    shard.enqueue_all(*(job() for _ in range(TICK_LIMIT + 2)))
    for leased in shard.reserve(max_jobs=TICK_LIMIT + 2):
        shard.nack(leased, Strategy.DEAD_LETTER)
    shard.wall_ms += RETENTION_MS
    assert shard.tick()
    assert shard.counts() == (0, 0, 0, 2)
    shard.pass_time()
    assert shard.counts() == (0, 0, 0, 0)


def test_drains_of_one_queue_do_not_gather_in_memory_while_another_keeps_an_older_letter(shard: Shard) -> None:
    shard.configure(dead_letter_retention_ms=3_600_000)
    bury(shard, b"old", queue="kept")
    for _ in range(300):
        bury(shard, b"new")
        shard.drain_dead("q")
        shard.confirm(shard.last_op)
    assert len(shard.machine._dead._heap) < 100


# -- queues that are known --------------------------------------------------------------------


def test_a_queue_with_jobs_or_dead_letters_is_known(shard: Shard) -> None:
    shard.enqueue("ready")
    shard.enqueue("scheduled", due_ms=WALL_START_MS + 1_000)
    shard.enqueue("leased")
    shard.reserve("leased")
    bury(shard, b"", queue="dead")
    shard.enqueue("done")
    shard.ack(shard.reserve_one("done"))
    names = ("ready", "scheduled", "leased", "dead", "done", "never")
    assert shard.known(*names) == [True, True, True, True, False, False]
