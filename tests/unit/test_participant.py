"""A shard's part in an atomic enqueue over several shards: what it promises, keeps and lets go of.

After every turn the jobs that are counted as reserved are those of the stored promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
import pytest

from common.wire import AdminCommand, EnqueueJob, Fate, LeasedJob, Op, Outcome, Question, Vote
from shard.machine import RETIRE_AFTER_MS, Machine
from shard.store import Family
from shard.transactions import ASK_AGAIN_MS
from tests.unit import shard_driver
from tests.unit.shard_driver import OTHER_ROUTER, ROUTER, WALL_START_MS, Home, MemoryHome, Shard, bodies, job, rows

home = shard_driver.home

HOME = 0
ELSEWHERE = 1
T1, T2 = 1 << 63, 7


class Participating(Shard):
    """A shard that knows its index and its routers."""

    def __init__(self, home: Home, index: int = HOME) -> None:
        self.index = index
        self.routers = [ROUTER, OTHER_ROUTER]
        super().__init__(home)
        self.start()

    def start(self, down_ms: int = 0) -> None:
        self.wall_ms += down_ms
        self.mono_ms += down_ms
        self.machine = Machine(self.store, self.config, self.now, self.index, self.routers)

    def _take(self) -> None:
        super()._take()
        self.check_promises()

    def check_promises(self) -> None:
        promised: Counter[str] = Counter()
        for key, value in rows(self.store, Family.TRANSACTIONS):
            if key[:1] == b"p":
                _, _, jobs = msgpack.unpackb(value)
                promised.update(each[0] for each, _ in jobs)
        reserved = {queue.name: queue.reserved for queue in self.machine._queues.values() if queue.reserved}
        assert reserved == promised

    # -- operations ---------------------------------------------------------------------------

    def prepare(self, *jobs: EnqueueJob, transaction: int = T1, at: int = HOME, router: str = ROUTER) -> Any:
        """Vote and data. `at` is the index of the transaction's home."""
        wanted = [list(each) for each in jobs or (job(),)]
        return self._data(self.send(Op.PREPARE, transaction, at, b"\x01\x02\x03" * len(wanted), wanted, router=router))

    def promise(self, *jobs: EnqueueJob, transaction: int = T1, at: int = HOME, router: str = ROUTER) -> list[Any]:
        """The outcomes of a vote that is a yes."""
        vote, outcomes = self.prepare(*jobs, transaction=transaction, at=at, router=router)
        assert vote == Vote.YES
        found: list[Any] = outcomes
        return found

    def decide(self, transaction: int = T1, router: str = ROUTER) -> Any:
        return self._data(self.send(Op.DECIDE, transaction, [ELSEWHERE], router=router))

    def commit(self, transaction: int = T1, router: str = ROUTER) -> None:
        assert self._data(self.send(Op.COMMIT, transaction, router=router)) is None

    def abort(self, transaction: int = T1, router: str = ROUTER) -> None:
        assert self._data(self.send(Op.ABORT, transaction, router=router)) is None

    def resolve(self, transaction: int = T1, coordinator: str = ROUTER, router: str = OTHER_ROUTER) -> Any:
        return self._data(self.send(Op.RESOLVE, transaction, coordinator, router=router))

    def forget(self, transaction: int = T1) -> None:
        assert self._data(self.send(Op.FORGET, transaction)) is None

    def try_enqueue(self, *jobs: EnqueueJob, op: Op = Op.ENQUEUE, router: str = ROUTER) -> int:
        """Op id of an enqueue that may have to wait."""
        return self.send(op, b"\x01\x02\x03" * len(jobs), [list(each) for each in jobs], router=router)

    def end_router(self, router: str = ROUTER) -> None:
        if router in self.routers:
            self.routers.remove(router)
        self.router_gone(router)

    def start_router(self, router: str) -> None:
        self.routers.append(router)
        self.machine.router_came(router)

    def questions(self) -> list[tuple[str, Any]]:
        """What was asked of which router since the last look."""
        found = [(router, data) for router, op_id, _, data in self.answers if op_id == 0]
        self.answers = [answer for answer in self.answers if answer[1] != 0]
        return found

    @property
    def records(self) -> int:
        """How many transactions something is stored of."""
        return len(rows(self.store, Family.TRANSACTIONS))


@pytest.fixture
def shard(home: Home) -> Iterator[Participating]:
    made = Participating(home)
    yield made
    made.check()


@pytest.fixture
def other(home: Home) -> Iterator[Participating]:
    """A shard that is the home of no transaction here."""
    made = Participating(home, ELSEWHERE)
    yield made
    made.check()


def full(cap: int) -> list[Any]:
    return [Outcome.QUEUE_FULL, cap]


def duplicate_of(job_id: bytes) -> list[Any]:
    return [Outcome.DEDUPLICATED, job_id]


# ---- votes


def test_a_promised_job_is_there_under_its_promised_id_after_the_commit(shard: Participating) -> None:
    (job_id,) = shard.promise(job(body=b"x"))
    assert shard.reserve() == []
    shard.commit()
    leased = shard.reserve_one()
    assert (leased.job_id, leased.attempt, leased.body) == (job_id, 1, b"x")
    assert shard.records == 0


def test_a_refusal_names_every_job_at_fault(shard: Participating) -> None:
    shard.configure(queues=[{"name": "a", "max_queue_depth": 1}, {"name": "b", "max_queue_depth": 0}])
    shard.enqueue("c")
    shard.send(Op.ADMIN, AdminCommand.CLOSE, "c", 0, True)
    vote, refusals = shard.prepare(job("a"), job("ok"), job("b"), job("c"), job("a"))
    assert vote == Vote.REFUSED
    assert [list(refusal) for refusal in refusals] == [[0, full(1)], [2, full(0)], [3, [3]], [4, full(1)]]


def test_a_refusal_promises_nothing(shard: Participating) -> None:
    shard.configure(queues=[{"name": "a", "max_queue_depth": 0}])
    shard.prepare(job("a"), job("ok", key="k"))
    assert shard.records == 0
    assert len(shard.enqueue("ok", key="k")) == 16


def test_a_transaction_that_meets_the_key_of_another_one_is_busy_and_promises_nothing(shard: Participating) -> None:
    shard.promise(job(key="k"), transaction=T1)
    assert shard.prepare(job("a"), job(key="k"), transaction=T2) == [Vote.BUSY, None]
    assert shard.records == 1
    shard.abort(T1)
    shard.promise(job("a"), job(key="k"), transaction=T2)
    shard.abort(T2)


def test_a_key_of_another_queue_is_another_key(shard: Participating) -> None:
    shard.promise(job("a", key="k"), transaction=T1)
    shard.promise(job("b", key="k"), transaction=T2)
    shard.commit(T1)
    shard.commit(T2)
    assert shard.records == 0


def test_a_job_whose_key_is_taken_is_a_duplicate_of_the_stored_one(shard: Participating) -> None:
    stored = shard.enqueue(key="k")
    first, second = shard.promise(job(key="k"), job("a"))
    assert first == duplicate_of(stored)
    assert len(second) == 16 and second != stored
    shard.commit()
    assert (shard.counts("q"), shard.counts("a")) == ((1, 0, 0, 0), (1, 0, 0, 0))


def test_keys_that_repeat_within_a_batch_are_one_job_each(shard: Participating) -> None:
    first, second, other = shard.promise(job(key="a"), job(key="a"), job(key="b"))
    assert second == duplicate_of(first)
    assert len(other) == 16 and other != first
    shard.commit()
    assert shard.counts() == (2, 0, 0, 0)


def test_a_batch_of_duplicates_alone_stores_nothing(shard: Participating) -> None:
    stored = shard.enqueue(key="k")
    assert shard.promise(job(key="k")) == [duplicate_of(stored)]
    assert shard.decide() == Fate.COMMITTED
    shard.forget()
    assert (shard.counts(), shard.records) == ((1, 0, 0, 0), 0)


# ---- capacity


def test_undecided_jobs_count_as_live_ones(shard: Participating) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job())
    assert len(shard.enqueue()) == 16
    assert shard.prepare(job(), transaction=T2) == [Vote.BUSY, None]
    assert shard.answer(shard.try_enqueue(job())) is None
    shard.abort()


def test_an_abort_gives_the_capacity_back_once(shard: Participating) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job(), job())
    for _ in range(2):
        shard.abort()
    assert [type(outcome) for outcome in shard.enqueue_all(job(), job(), job())] == [bytes, bytes, list]


def test_a_commit_turns_promised_capacity_into_jobs_once(shard: Participating) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job(), job())
    for _ in range(2):
        shard.commit()
        assert shard.counts() == (2, 0, 0, 0)
        assert shard.enqueue() == full(2)


def test_the_batch_is_counted_as_a_whole_with_its_duplicates(shard: Participating) -> None:
    shard.configure(max_queue_depth=2)
    shard.enqueue(key="k")
    assert shard.prepare(job(), job(key="k"))[0] == Vote.REFUSED


def test_a_lower_cap_does_not_take_a_promise_back(shard: Participating) -> None:
    shard.promise(job(), job())
    shard.configure(max_queue_depth=1)
    shard.commit()
    assert shard.counts() == (2, 0, 0, 0)


# ---- keys


@pytest.mark.parametrize("op", [Op.ENQUEUE, Op.ENQUEUE_ATOMIC])
def test_an_enqueue_of_a_held_key_is_a_duplicate_after_the_commit(shard: Participating, op: Op) -> None:
    (job_id,) = shard.promise(job(key="k"))
    op_id = shard.try_enqueue(job("a"), job(key="k"), op=op)
    assert shard.answer(op_id) is None
    shard.commit()
    outcomes = shard._data(op_id)
    assert (outcomes if op == Op.ENQUEUE else outcomes[1])[1] == duplicate_of(job_id)
    assert (shard.counts("q"), shard.counts("a")) == ((1, 0, 0, 0), (1, 0, 0, 0))


@pytest.mark.parametrize("op", [Op.ENQUEUE, Op.ENQUEUE_ATOMIC])
def test_an_enqueue_of_a_held_key_is_stored_after_the_abort(shard: Participating, op: Op) -> None:
    (promised,) = shard.promise(job(key="k"))
    op_id = shard.try_enqueue(job(key="k"), op=op)
    shard.abort()
    outcomes = shard._data(op_id)
    (stored,) = outcomes if op == Op.ENQUEUE else outcomes[1]
    assert len(stored) == 16 and stored != promised
    assert shard.reserve_one().job_id == stored


def test_enqueues_that_waited_for_one_key_are_applied_in_their_order(shard: Participating) -> None:
    shard.promise(job(key="k"))
    first, second = shard.try_enqueue(job(key="k", body=b"1")), shard.try_enqueue(job(key="k", body=b"2"))
    shard.abort()
    (stored,) = shard._data(first)
    assert shard._data(second) == [duplicate_of(stored)]
    assert bodies(shard.reserve()) == [b"1"]


def test_an_enqueue_waits_for_all_transactions_that_hold_keys_of_it(shard: Participating) -> None:
    shard.promise(job(key="1"), transaction=T1)
    shard.promise(job(key="2"), transaction=T2)
    op_id = shard.try_enqueue(job(key="1"), job(key="2"))
    shard.commit(T1)
    assert shard.answer(op_id) is None
    shard.commit(T2)
    assert [outcome[0] for outcome in shard._data(op_id)] == [Outcome.DEDUPLICATED, Outcome.DEDUPLICATED]


@pytest.mark.parametrize("fields", [{}, {"key": "other"}])
def test_an_enqueue_without_a_held_key_does_not_wait(shard: Participating, fields: dict[str, Any]) -> None:
    shard.promise(job(key="k"))
    assert len(shard.enqueue(**fields)) == 16
    shard.abort()


def test_what_an_ended_router_enqueued_is_not_applied_when_the_key_is_free(shard: Participating) -> None:
    shard.promise(job(key="k"), router=OTHER_ROUTER)
    op_id = shard.try_enqueue(job(key="k"), router=ROUTER)
    shard.end_router(ROUTER)
    shard.abort(router=OTHER_ROUTER)
    assert (shard.answer(op_id), shard.counts()) == (None, (0, 0, 0, 0))


def test_a_router_that_ends_leaves_its_waiting_enqueues_and_frees_its_keys_for_others(shard: Participating) -> None:
    shard.promise(job(key="k"), router=ROUTER)
    its_own = shard.try_enqueue(job(key="k"), router=ROUTER)
    anothers = shard.try_enqueue(job(key="k"), router=OTHER_ROUTER)
    shard.end_router(ROUTER)
    assert shard.answer(its_own) is None
    assert len(shard._data(anothers)[0]) == 16


def test_the_window_of_a_key_holds_from_the_commit(shard: Participating) -> None:
    shard.configure(dedup_window_ms=1_000)
    (job_id,) = shard.promise(job(key="k"))
    shard.pass_time(5_000)
    shard.commit()
    shard.pass_time(999)
    assert shard.enqueue(key="k") == duplicate_of(job_id)
    shard.pass_time(1)
    assert len(shard.enqueue(key="k")) == 16


# ---- decisions


def test_the_home_commits_its_own_part_with_the_decision(shard: Participating) -> None:
    shard.promise(job(body=b"x"))
    assert shard.decide() == Fate.COMMITTED
    assert bodies(shard.reserve()) == [b"x"]
    assert shard.records == 1


def test_a_decision_is_made_once(shard: Participating) -> None:
    shard.promise(job())
    assert (shard.decide(), shard.decide()) == (Fate.COMMITTED, Fate.COMMITTED)
    assert shard.counts() == (1, 0, 0, 0)


def test_a_decision_is_forgotten_when_all_have_applied_it(shard: Participating) -> None:
    shard.promise(job())
    shard.decide()
    for _ in range(2):
        shard.forget()
        assert (shard.records, shard.counts()) == (0, (1, 0, 0, 0))


def test_what_was_never_promised_is_not_committed(shard: Participating) -> None:
    assert shard.decide() == Fate.ABORTED
    shard.commit()
    assert (shard.machine.counts(), shard.records) == ({}, 0)


def test_letting_go_of_what_is_unknown_does_nothing(shard: Participating) -> None:
    shard.abort()
    shard.forget()
    assert (shard.machine.counts(), shard.records) == ({}, 0)


def test_a_home_that_is_asked_before_it_has_decided_takes_its_promise_back(shard: Participating) -> None:
    shard.promise(job(key="k"))
    assert shard.resolve() == Fate.ABORTED
    assert shard.decide() == Fate.ABORTED
    assert (shard.counts(), shard.records) == ((0, 0, 0, 0), 0)
    assert len(shard.enqueue(key="k")) == 16


def test_a_home_that_is_asked_after_it_has_decided_says_committed(shard: Participating) -> None:
    shard.promise(job())
    shard.decide()
    assert (shard.resolve(), shard.resolve()) == (Fate.COMMITTED, Fate.COMMITTED)
    shard.forget()


def test_a_prepare_that_comes_after_the_fate_was_told_is_too_late(shard: Participating) -> None:
    assert shard.resolve() == Fate.ABORTED
    assert shard.resolve() == Fate.ABORTED
    assert shard.prepare(job()) == [Vote.TOO_LATE, None]
    assert shard.decide() == Fate.ABORTED
    assert (shard.machine.counts(), shard.records) == ({}, 1)
    shard.end_router(ROUTER)
    assert shard.records == 0


def test_nothing_is_stored_of_a_fate_whose_coordinator_cannot_prepare_any_more(shard: Participating) -> None:
    shard.end_router(ROUTER)
    assert shard.resolve(coordinator=ROUTER, router=OTHER_ROUTER) == Fate.ABORTED
    assert shard.records == 0


def test_nothing_is_stored_of_a_fate_that_the_coordinator_itself_asks_for(shard: Participating) -> None:
    assert shard.resolve(coordinator=ROUTER, router=ROUTER) == Fate.ABORTED
    assert shard.records == 0


def test_transactions_are_told_apart(shard: Participating) -> None:
    shard.promise(job(body=b"1"), transaction=T1)
    shard.promise(job(body=b"2"), transaction=T2)
    shard.abort(T1)
    shard.commit(T2)
    assert bodies(shard.reserve(max_jobs=9)) == [b"2"]


# ---- a coordinator that ends


def test_a_home_aborts_what_an_ended_router_had_not_decided(shard: Participating) -> None:
    shard.promise(job(key="k"))
    op_id = shard.try_enqueue(job(key="k"), router=OTHER_ROUTER)
    shard.end_router()
    assert shard.records == 0
    assert len(shard._data(op_id)[0]) == 16
    assert shard.resolve(router=OTHER_ROUTER) == Fate.ABORTED


def test_a_home_keeps_what_an_ended_router_had_decided_and_asks_that_it_be_finished(shard: Participating) -> None:
    shard.promise(job())
    shard.decide()
    shard.end_router()
    shard.pass_time()
    assert shard.questions() == [(OTHER_ROUTER, [Question.FINISH, T1, [ELSEWHERE]])]
    assert shard.counts() == (1, 0, 0, 0)
    shard.forget()
    assert (shard.records, shard.next_wake_ms()) == (0, None)


def test_a_participant_keeps_what_an_ended_router_may_have_decided_and_asks_for_its_fate(other: Participating) -> None:
    other.promise(job(), at=HOME)
    other.end_router()
    other.pass_time()
    assert other.questions() == [(OTHER_ROUTER, [Question.RESOLVE, T1, HOME, ROUTER])]
    assert other.records == 1
    other.abort(router=OTHER_ROUTER)
    other.pass_time(10 * ASK_AGAIN_MS)
    assert (other.records, other.questions()) == (0, [])


@pytest.mark.parametrize("is_decided", [False, True])
def test_a_router_that_ended_while_the_shard_was_down_is_missed_at_its_start(home: Home, is_decided: bool) -> None:
    shard = Participating(home)
    shard.promise(job())
    if is_decided:
        shard.decide()
    shard.routers = [OTHER_ROUTER]
    shard.restart()
    shard.pass_time()
    assert shard.questions() == ([(OTHER_ROUTER, [Question.FINISH, T1, [ELSEWHERE]])] if is_decided else [])
    assert (shard.records, shard.counts()) == ((1, (1, 0, 0, 0)) if is_decided else (0, (0, 0, 0, 0)))
    shard.check()


def test_a_promise_of_an_ended_router_is_asked_about_after_a_restart(other: Participating) -> None:
    other.promise(job(), at=HOME)
    other.routers = [OTHER_ROUTER]
    other.restart()
    assert other.next_wake_ms() == 0
    other.pass_time()
    assert other.questions() == [(OTHER_ROUTER, [Question.RESOLVE, T1, HOME, ROUTER])]
    other.commit(router=OTHER_ROUTER)
    assert (other.records, other.counts()) == (0, (1, 0, 0, 0))


def test_a_mark_of_an_ended_router_is_gone_after_a_restart(shard: Participating) -> None:
    shard.resolve()
    shard.routers = [OTHER_ROUTER]
    shard.restart()
    shard.pass_time()
    assert shard.records == 0


@pytest.mark.parametrize("restarted", [False, True])
def test_nothing_is_asked_while_the_coordinator_lives(home: Home, restarted: bool) -> None:
    shard = Participating(home, ELSEWHERE)
    shard.promise(job(), at=HOME, transaction=T1)
    shard.promise(job(), at=ELSEWHERE, transaction=T2)
    shard.decide(T2)
    if restarted:
        shard.restart()
    shard.end_router(OTHER_ROUTER)
    shard.pass_time(10 * ASK_AGAIN_MS)
    assert shard.questions() == []
    assert shard.next_wake_ms() is None


def test_a_coordinator_that_is_not_announced_yet_counts_as_living(other: Participating) -> None:
    other.promise(job(), at=HOME, router="router-9")
    other.pass_time(ASK_AGAIN_MS)
    assert other.questions() == []
    other.abort(router="router-9")


def test_a_question_is_asked_again_after_a_second_and_of_the_living_routers_in_turn(other: Participating) -> None:
    other.start_router("router-2")
    other.promise(job(), at=HOME)
    other.end_router()
    other.pass_time()
    asked = [router for router, _ in other.questions()]
    for _ in range(2):
        assert other.next_wake_ms() == ASK_AGAIN_MS
        other.pass_time(ASK_AGAIN_MS - 1)
        assert other.questions() == []
        other.pass_time(1)
        asked += [router for router, _ in other.questions()]
    assert sorted(asked[:2]) == [OTHER_ROUTER, "router-2"]
    assert asked[2] == asked[0]
    other.abort()


def test_everything_in_doubt_is_asked_of_one_router_together(home: Home) -> None:
    shard = Participating(home, ELSEWHERE)
    shard.promise(job(), at=HOME, transaction=T1)
    shard.promise(job(), at=ELSEWHERE, transaction=T2)
    shard.decide(T2)
    shard.end_router()
    shard.pass_time()
    resolve, finish = sorted(shard.questions())
    assert resolve == (OTHER_ROUTER, [Question.RESOLVE, T1, HOME, ROUTER])
    assert finish == (OTHER_ROUTER, [Question.FINISH, T2, [ELSEWHERE]])


def test_a_question_waits_for_a_router(other: Participating) -> None:
    other.promise(job(), at=HOME)
    other.end_router(ROUTER)
    other.end_router(OTHER_ROUTER)
    other.pass_time(ASK_AGAIN_MS)
    assert (other.questions(), other.next_wake_ms()) == ([], None)
    other.start_router("router-2")
    assert other.next_wake_ms() == 0
    other.pass_time()
    assert other.questions() == [("router-2", [Question.RESOLVE, T1, HOME, ROUTER])]
    other.abort()


def test_a_question_is_answered_by_what_became_of_it_also_when_it_comes_twice(other: Participating) -> None:
    (job_id,) = other.promise(job(), at=HOME)
    other.end_router()
    other.commit(router=OTHER_ROUTER)
    other.abort(router=OTHER_ROUTER)
    other.commit(router=OTHER_ROUTER)
    assert other.reserve_one().job_id == job_id


# ---- the jobs


def test_a_committed_job_has_the_place_of_its_prepare(shard: Participating) -> None:
    shard.enqueue(body=b"1")
    shard.promise(job(body=b"2"), job(body=b"3"))
    shard.enqueue(body=b"4")
    shard.commit()
    assert shard.drain() == [b"1", b"2", b"3", b"4"]


def test_a_committed_job_has_its_place_also_when_later_ones_were_handed_out(shard: Participating) -> None:
    shard.promise(job(body=b"1"))
    for body in (b"2", b"3", b"4"):
        shard.enqueue(body=body)
    later = shard.reserve(max_jobs=2)
    shard.restart()
    shard.commit()
    shard.nack(later[0])
    assert shard.drain() == [b"1", b"2", b"4"]


def test_a_committed_job_is_found_by_a_restart_although_later_ones_are_gone(shard: Participating) -> None:
    shard.promise(job(body=b"1"))
    shard.enqueue(body=b"2")
    assert shard.drain() == [b"2"]
    shard.commit()
    shard.restart()
    assert shard.drain() == [b"1"]


def test_a_committed_batch_is_ordered_by_priority(shard: Participating) -> None:
    shard.promise(job(body=b"low"), job(body=b"high", priority=9))
    shard.commit()
    assert shard.drain() == [b"high", b"low"]


def test_a_scheduled_job_is_ready_at_its_time(shard: Participating) -> None:
    shard.promise(job(due_ms=WALL_START_MS + 1_000))
    shard.commit()
    assert shard.counts() == (0, 1, 0, 0)
    shard.pass_time(1_000)
    assert shard.counts() == (1, 0, 0, 0)


def test_a_scheduled_job_whose_time_passed_before_the_commit_is_ready_at_once(shard: Participating) -> None:
    shard.promise(job(due_ms=WALL_START_MS + 1_000))
    shard.pass_time(1_000)
    shard.commit()
    assert shard.counts() == (1, 0, 0, 0)


def test_a_commit_wakes_a_parked_reserve_with_all_that_it_may_have_in_their_order(shard: Participating) -> None:
    op_id = shard.park("a", "q", max_jobs=3)
    shard.promise(job(body=b"low"), job("a", body=b"a"), job(body=b"high", priority=9), job(body=b"rest"))
    assert shard.jobs_for(op_id) is None
    shard.commit()
    assert bodies(shard.jobs_for(op_id)) == [b"a", b"high", b"low"]


def test_a_decision_wakes_a_watch(shard: Participating) -> None:
    watch = shard.watch()
    shard.promise(job())
    assert not shard.is_woken(watch)
    shard.decide()
    assert shard.is_woken(watch)
    shard.cancel(watch)


def test_an_abort_wakes_nobody(shard: Participating) -> None:
    op_id = shard.park()
    shard.promise(job())
    shard.abort()
    assert shard.jobs_for(op_id) is None
    shard.cancel(op_id)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_queue_with_promised_jobs_is_not_retired(home: Home, restarted: bool) -> None:
    shard = Participating(home)
    shard.promise(job())
    if restarted:
        shard.restart()
    shard.pass_time(RETIRE_AFTER_MS)
    assert "q" in shard.machine.counts()
    shard.commit()
    assert shard.counts() == (1, 0, 0, 0)
    shard.check()


def test_a_queue_that_came_to_be_for_an_aborted_batch_is_retired(shard: Participating) -> None:
    shard.promise(job())
    shard.abort()
    shard.pass_time(RETIRE_AFTER_MS)
    assert (shard.machine.counts(), rows(shard.store, Family.QUEUES)) == ({}, [])


def test_a_deletion_waits_for_promised_jobs(shard: Participating) -> None:
    shard.promise(job(), job())
    op_id = shard.send(Op.ADMIN, AdminCommand.CLOSE, "q", 0, False)
    assert shard._status(op_id) == 9
    number, in_flight = shard._data(shard.send(Op.ADMIN, AdminCommand.CLOSE, "q", 0, True))
    assert in_flight == 2
    shard.commit()
    assert shard._data(shard.send(Op.ADMIN, AdminCommand.CLOSE, "q", number, True)) == (number, 0)
    shard.pass_time(60_000)


# ---- restarts between any two steps

Step = Callable[[Participating], Any]


def _drained(shard: Participating) -> list[bytes]:
    return shard.drain("q", "a")


SCRIPTS: dict[str, list[Step]] = {
    "decided and forgotten": [
        lambda shard: shard.promise(job(key="k", body=b"1"), job("a", body=b"2"), job(key="k")),
        lambda shard: shard.enqueue(body=b"3"),
        lambda shard: shard.decide(),
        lambda shard: shard.resolve(),
        lambda shard: shard.forget(),
        lambda shard: shard.enqueue(key="k"),
        _drained,
    ],
    "committed": [
        lambda shard: shard.promise(job(key="k", body=b"1"), job("a", body=b"2"), at=ELSEWHERE),
        lambda shard: shard.prepare(job(key="k"), transaction=T2),
        lambda shard: shard.commit(),
        lambda shard: shard.commit(),
        lambda shard: shard.promise(job(key="k"), transaction=T2),
        lambda shard: shard.abort(T2),
        _drained,
    ],
    "aborted": [
        lambda shard: shard.promise(job(key="k", body=b"1"), job(body=b"2")),
        lambda shard: shard.prepare(job(), job(), transaction=T2),
        lambda shard: shard.abort(),
        lambda shard: shard.abort(),
        lambda shard: shard.enqueue_all(job(key="k", body=b"3"), job(body=b"4"), job(body=b"5"), job()),
        _drained,
    ],
    "asked too early": [
        lambda shard: shard.promise(job(key="k")),
        lambda shard: shard.resolve(),
        lambda shard: shard.decide(),
        lambda shard: shard.enqueue(key="k", body=b"1"),
        _drained,
    ],
    "asked before it was prepared": [
        lambda shard: shard.resolve(),
        lambda shard: shard.prepare(job()),
        lambda shard: shard.decide(),
        lambda shard: shard.end_router(),
    ],
    "left by its coordinator": [
        lambda shard: shard.promise(job(key="k", body=b"1"), transaction=T1),
        lambda shard: shard.promise(job(body=b"2"), transaction=T2),
        lambda shard: shard.decide(T2),
        lambda shard: shard.end_router(),
        lambda shard: shard.enqueue(key="k", body=b"3"),
        lambda shard: shard.resolve(T2),
        lambda shard: shard.forget(T2),
        _drained,
    ],
}


def _in_order_of_appearance(answers: Sequence[Any]) -> list[Any]:
    """Job ids as numbers: a restart skips sequence numbers, so the ids themselves differ."""
    seen: dict[bytes, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, bytes) and len(value) == 16:
            return seen.setdefault(value, len(seen))
        if isinstance(value, LeasedJob):
            return plain(value.job_id)
        return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value

    found: list[Any] = plain(answers)
    return found


def _run(shard: Participating, steps: list[Step], restart_after: int | None) -> list[Any]:
    shard.configure(max_queue_depth=3)
    answers = []
    for number, step in enumerate(steps):
        answers.append(step(shard))
        if number == restart_after:
            shard.restart(down_ms=10)
    assert shard.records == 0
    shard.check()
    return _in_order_of_appearance(answers)


@pytest.mark.parametrize(
    ("script", "restart_after"), [(script, step) for script, steps in SCRIPTS.items() for step in range(len(steps))]
)
def test_a_restart_between_any_two_steps_changes_no_answer(home: Home, script: str, restart_after: int) -> None:
    steps = SCRIPTS[script]
    assert _run(Participating(home), steps, restart_after) == _run(Participating(MemoryHome()), steps, None)


def test_a_promise_that_was_lost_in_a_crash_is_not_decided() -> None:
    home = MemoryHome()
    shard = Participating(home)
    shard.syncs = False
    shard.promise(job(key="k"))
    home.store = home.store.crash(0)
    shard.start()
    assert shard.decide() == Fate.ABORTED
    assert len(shard.enqueue(key="k")) == 16


def test_a_decision_that_was_lost_in_a_crash_can_still_go_either_way() -> None:
    for way in (Op.DECIDE, Op.RESOLVE):
        home = MemoryHome()
        shard = Participating(home)
        shard.promise(job())
        shard.syncs = False
        shard.decide()
        home.store = home.store.crash(0)
        shard.start()
        if way == Op.DECIDE:
            assert (shard.decide(), shard.counts()) == (Fate.COMMITTED, (1, 0, 0, 0))
        else:
            assert (shard.resolve(), shard.decide(), shard.counts()) == (Fate.ABORTED, Fate.ABORTED, (0, 0, 0, 0))
