"""Room in a queue while transactions are undecided, at one shard.

Places that an undecided transaction holds count, so no queue is over its cap; and nobody is refused
for them: what is full of stored jobs refuses, what is full of promises lets wait. After every turn
each line is looked at: whoever waits has a reason to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.wire import AdminCommand, EnqueueJob, LeasedJob, Op, Outcome, Strategy, Vote
from shard.machine import INTERNAL, UNAVAILABLE
from shard.participant import WAIT_MAX_MS
from shard.store import Family
from tests.unit.shard_driver import LEASE_MS, OTHER_ROUTER, ROUTER, MemoryHome, job, rows
from tests.unit.test_participant import T1, T2, Participating, duplicate_of, full

CLOSING = [Outcome.QUEUE_CLOSING]
BUSY = [Vote.BUSY, None]
DAY_MS = 86_400_000


def check_lines(shard: Participating) -> None:
    """Whoever waits for places waits for what undecided jobs hold, in the order of arrival, and not in vain."""
    participant = shard.machine._participant
    for name, line in participant.lines.items():
        queue = shard.machine._queues[name]
        assert queue.reserved > 0, f"nobody will wake the line of {name}"
        numbers = [waiter.number for waiter in line]
        assert numbers == sorted(set(numbers))
        assert {waiter.place for waiter in line} == {name}
        _, kind, _, jobs = line[0].operation
        wanted = [each for each in jobs if each[0] == name]
        assert participant._lacks_places(queue, wanted, numbers[0], kind == Op.ENQUEUE_ATOMIC), "it waits in vain"
    for transaction, companions in participant._by_key.items():
        assert transaction in participant._prepared
        assert {waiter.place for waiter in companions} == {transaction}
    waiting = [waiter for line in [*participant.lines.values(), *participant._by_key.values()] for waiter in line]
    assert sorted(waiter.operation[0] for waiter in waiting) == sorted(participant._blocked)


class Contested(Participating):
    """A shard whose lines are looked at after every turn."""

    def _take(self) -> None:
        super()._take()
        check_lines(self)

    def atomic(self, *jobs: EnqueueJob, router: str = ROUTER) -> int:
        return self.try_enqueue(*jobs, op=Op.ENQUEUE_ATOMIC, router=router)

    def is_waiting(self, *op_ids: int) -> bool:
        """Whether all of them wait; fails when only some do."""
        (waits,) = {self.answer(op_id) is None for op_id in op_ids}
        return waits

    def outcomes(self, op_id: int) -> Any:
        """What an enqueue was told, with new ids as their length."""
        return plain(self._data(op_id))

    def close(self, queue: str = "q", number: int = 0, may_wait: bool = True) -> tuple[int, Any]:
        status, data = self.answer(self.send(Op.ADMIN, AdminCommand.CLOSE, queue, number, may_wait)) or (-1, None)
        return status, data

    def remove(self, number: int, queue: str = "q") -> int:
        """All steps of a deletion, or as far as they go; the last status."""
        cursor: bytes | None = b""
        while cursor is not None:
            status, data = self.answer(self.send(Op.ADMIN, AdminCommand.REMOVE, queue, number, cursor)) or (-1, None)
            if status != 0:
                return int(status)
            cursor = data[-1]
        return 0

    def purge(self, queue: str = "q") -> int:
        removed, cursor = self._data(self.send(Op.ADMIN, AdminCommand.PURGE, queue, b""))
        while cursor is not None:
            more, cursor = self._data(self.send(Op.ADMIN, AdminCommand.PURGE, queue, cursor))
            removed += more
        return int(removed)

    def stored(self) -> dict[str, int]:
        """How many records there are of queues and transactions, by family."""
        families = set(Family) - {Family.SLOTS, Family.META}
        found = {family.name: len(rows(self.store, family)) for family in families}
        return {name: count for name, count in found.items() if count}


def plain(outcomes: Any) -> Any:
    """New ids differ in every run; a new job is a 16."""
    if isinstance(outcomes, bytes):
        return len(outcomes)
    return [plain(each) for each in outcomes] if isinstance(outcomes, (list, tuple)) else outcomes


@pytest.fixture
def shard() -> Iterator[Contested]:
    made = Contested(MemoryHome())
    yield made
    made.check()


Decision = Callable[[Contested], object]


def commit(shard: Contested) -> None:
    shard.commit()


def abort(shard: Contested) -> None:
    shard.abort()


BOTH_KINDS = pytest.mark.parametrize("op", [Op.ENQUEUE, Op.ENQUEUE_ATOMIC])


def stored_alone(op: Op, *outcomes: Any) -> Any:
    """The answer of an enqueue whose jobs were all taken."""
    return list(outcomes) if op == Op.ENQUEUE else [True, list(outcomes)]


def refused_alone(op: Op, *outcomes: Any) -> Any:
    """The answer of an enqueue whose jobs were all refused."""
    return list(outcomes) if op == Op.ENQUEUE else [False, [[index, each] for index, each in enumerate(outcomes)]]


# ---- an enqueue at places that are held


@BOTH_KINDS
def test_an_enqueue_for_a_place_that_is_held_is_stored_after_the_abort(shard: Contested, op: Op) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job())
    op_id = shard.try_enqueue(job(body=b"x"), op=op)
    assert shard.is_waiting(op_id)
    shard.abort()
    assert shard.outcomes(op_id) == stored_alone(op, 16)
    assert shard.drain() == [b"x"]


@BOTH_KINDS
def test_an_enqueue_for_a_place_that_is_held_is_refused_after_the_commit(shard: Contested, op: Op) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job(body=b"promised"))
    op_id = shard.try_enqueue(job(), op=op)
    shard.commit()
    assert shard.outcomes(op_id) == refused_alone(op, full(1))
    assert shard.drain() == [b"promised"]


@BOTH_KINDS
def test_an_enqueue_is_refused_at_once_by_a_queue_that_is_full_of_stored_jobs(shard: Contested, op: Op) -> None:
    shard.enqueue()
    shard.promise(job())
    shard.configure(max_queue_depth=1)
    assert shard.outcomes(shard.try_enqueue(job(), op=op)) == refused_alone(op, full(1))
    shard.abort()


def test_an_atomic_batch_that_would_not_fit_if_all_were_aborted_is_refused_at_once(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.enqueue()
    shard.promise(job())
    assert shard.outcomes(shard.atomic(job(), job())) == [False, [[0, full(2)], [1, full(2)]]]
    assert shard.is_waiting(shard.atomic(job()))
    shard.abort()


@pytest.mark.parametrize(("decide", "taken"), [(abort, 2), (commit, 1)])
def test_an_enqueue_of_which_one_more_job_may_fit_waits_as_a_whole(
    shard: Contested, decide: Decision, taken: int
) -> None:
    shard.configure(max_queue_depth=3)
    shard.enqueue()
    shard.promise(job())
    op_id = shard.try_enqueue(*[job()] * 5)
    assert shard.is_waiting(op_id)
    assert shard.counts() == (1, 0, 0, 0)
    decide(shard)
    assert shard.outcomes(op_id) == [16] * taken + [full(3)] * (5 - taken)


def test_an_enqueue_for_several_queues_waits_as_a_whole(shard: Contested) -> None:
    shard.configure(queues=[{"name": "q", "max_queue_depth": 1}])
    shard.promise(job())
    op_id = shard.try_enqueue(job("a"), job("q"), job("b"))
    assert (shard.is_waiting(op_id), shard.counts("a"), shard.counts("b")) == (True, (0, 0, 0, 0), (0, 0, 0, 0))
    shard.commit()
    assert shard.outcomes(op_id) == [16, full(1), 16]


def test_a_queue_without_a_cap_lets_nobody_wait_for_places(shard: Contested) -> None:
    shard.promise(*[job()] * 10)
    assert shard.outcomes(shard.atomic(*[job()] * 10)) == [True, [16] * 10]
    shard.abort()


def test_a_promise_lets_nobody_wait_for_places_of_another_queue(shard: Contested) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job("a"))
    assert shard.outcomes(shard.atomic(job("b"))) == [True, [16]]
    assert shard.outcomes(shard.try_enqueue(job("b"))) == [full(1)]
    shard.abort()


def test_an_atomic_batch_that_one_queue_refuses_for_good_does_not_wait_for_another(shard: Contested) -> None:
    """And it is told of what is at fault for certain only."""
    shard.configure(queues=[{"name": "full", "max_queue_depth": 0}, {"name": "held", "max_queue_depth": 1}])
    shard.promise(job("held", key="k"))
    assert shard.outcomes(shard.atomic(job("held"), job("full"))) == [False, [[1, full(0)]]]
    assert shard.outcomes(shard.atomic(job("held", key="k"), job("full"))) == [False, [[1, full(0)]]]
    shard.abort()


# ---- duplicates


def test_a_duplicate_needs_no_place_and_does_not_wait(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    stored = shard.enqueue(key="k")
    shard.promise(job())
    assert shard._data(shard.try_enqueue(job(key="k"), job(key="k"))) == [duplicate_of(stored)] * 2
    shard.abort()


def test_a_batch_waits_for_the_places_of_its_new_jobs_alone(shard: Contested) -> None:
    shard.configure(max_queue_depth=3)
    stored = shard.enqueue(key="k")
    shard.promise(job())
    jobs = [job(key="k"), job(key="a"), job(key="a")]
    (duplicate, new, repeated) = shard._data(shard.try_enqueue(*jobs))
    assert (duplicate, len(new), repeated) == (duplicate_of(stored), 16, duplicate_of(new))
    op_id = shard.try_enqueue(*jobs, job(key="b"))
    assert shard.is_waiting(op_id)
    shard.abort()
    assert shard._data(op_id)[:3] == [duplicate_of(stored), duplicate_of(new), duplicate_of(new)]
    assert len(shard._data(op_id)[3]) == 16


def test_an_atomic_batch_waits_for_the_places_of_its_duplicates_as_well(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    stored = shard.enqueue(key="k")
    shard.promise(job())
    op_id = shard.atomic(job(key="k"))
    assert shard.is_waiting(op_id)
    shard.abort()
    assert shard._data(op_id) == [True, [duplicate_of(stored)]]


def test_an_atomic_batch_whose_duplicates_have_no_place_is_refused_as_ever(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.enqueue(key="k")
    shard.promise(job())
    op_id = shard.atomic(job(key="k"))
    shard.commit()
    assert shard.outcomes(op_id) == [False, [[0, full(2)]]]


@BOTH_KINDS
def test_an_enqueue_that_waited_for_a_key_may_have_to_wait_for_a_place(shard: Contested, op: Op) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job(key="k"), transaction=T1)
    shard.promise(job(), transaction=T2)
    shard.enqueue("a")
    op_id = shard.try_enqueue(job(key="k"), op=op)
    last = shard.try_enqueue(job())
    shard.abort(T1)
    assert shard.outcomes(op_id) == stored_alone(op, 16)
    assert shard.is_waiting(last)
    shard.abort(T2)
    assert shard.outcomes(last) == [16]


# ---- two transactions, and two who wait


def test_an_enqueue_goes_on_with_whichever_decision_makes_room(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job(), transaction=T1)
    shard.promise(job(), transaction=T2)
    op_id = shard.try_enqueue(job())
    shard.abort(T2)
    assert shard.outcomes(op_id) == [16]
    shard.commit(T1)
    assert shard.counts() == (2, 0, 0, 0)


def test_an_enqueue_waits_on_while_too_few_places_have_come_free(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job(), transaction=T1)
    shard.promise(job(), transaction=T2)
    op_id = shard.atomic(job(), job())
    shard.abort(T1)
    assert shard.is_waiting(op_id)
    shard.abort(T2)
    assert shard.outcomes(op_id) == [True, [16, 16]]


def test_an_atomic_batch_is_refused_as_soon_as_a_commit_leaves_too_few_places(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job(), transaction=T1)
    shard.promise(job(), transaction=T2)
    op_id = shard.atomic(job(), job())
    shard.commit(T1)
    assert shard.outcomes(op_id) == [False, [[0, full(2)], [1, full(2)]]]
    shard.abort(T2)


def test_those_who_wait_for_one_place_get_it_in_their_order(shard: Contested) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job())
    first, second = shard.try_enqueue(job(body=b"1")), shard.atomic(job(body=b"2"))
    shard.abort()
    assert (shard.outcomes(first), shard.outcomes(second)) == ([16], [False, [[0, full(1)]]])


@BOTH_KINDS
def test_who_needs_places_joins_the_line_although_they_would_do_for_it(shard: Contested, op: Op) -> None:
    """A batch is not overtaken for ever by smaller ones."""
    shard.configure(max_queue_depth=3)
    shard.promise(job(), transaction=T1)
    batch = shard.atomic(job(), job(), job())
    small = shard.try_enqueue(job(), op=op)
    assert shard.is_waiting(batch, small)
    shard.abort(T1)
    assert shard.outcomes(batch) == [True, [16, 16, 16]]
    assert shard.outcomes(small) == refused_alone(op, full(3))


def test_the_line_goes_on_as_far_as_there_is_room(shard: Contested) -> None:
    shard.configure(max_queue_depth=3)
    shard.promise(job(), transaction=T1)
    shard.promise(job(), job(), transaction=T2)
    one, two, last = shard.try_enqueue(job()), shard.atomic(job(), job()), shard.try_enqueue(job())
    shard.abort(T1)
    assert shard.outcomes(one) == [16]
    assert shard.is_waiting(two, last)
    shard.abort(T2)
    assert (shard.outcomes(two), shard.outcomes(last)) == ([True, [16, 16]], [full(3)])


def test_who_needs_no_place_passes_the_line(shard: Contested) -> None:
    shard.configure(queues=[{"name": "q", "max_queue_depth": 3}])
    stored = shard.enqueue(key="k")
    shard.promise(job())
    batch = shard.atomic(job(), job())
    assert shard._data(shard.try_enqueue(job(key="k"))) == [duplicate_of(stored)]
    assert shard.outcomes(shard.try_enqueue(job("a"))) == [16]
    assert shard.outcomes(shard.atomic(job(), job(), job())) == [False, [[index, full(3)] for index in range(3)]]
    assert shard.is_waiting(batch)
    shard.abort()


def test_a_transaction_that_finds_places_held_is_busy_and_promises_nothing(shard: Contested) -> None:
    shard.configure(queues=[{"name": "q", "max_queue_depth": 2}])
    shard.enqueue()
    shard.promise(job(), transaction=T1)
    assert shard.prepare(job("a"), job("q"), transaction=T2) == BUSY
    assert shard.records == 1
    shard.abort(T1)
    assert shard.prepare(job("q"), job("q"), transaction=T2)[0] == Vote.REFUSED
    shard.promise(job("a"), job("q"), transaction=T2)
    shard.abort(T2)


def test_a_transaction_that_would_not_fit_if_all_were_aborted_is_refused(shard: Contested) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job(key="k"), transaction=T1)
    assert shard.prepare(job(), job(key="k"), transaction=T2) == [Vote.REFUSED, [(0, full(1)), (1, full(1))]]
    shard.abort(T1)


def test_no_transaction_passes_the_line(shard: Contested) -> None:
    """Or ever new ones could keep a batch waiting for ever."""
    shard.configure(max_queue_depth=3)
    shard.promise(job(), transaction=T1)
    batch = shard.atomic(job(), job(), job())
    assert shard.prepare(job(), transaction=T2) == BUSY
    shard.abort(T1)
    assert shard.outcomes(batch) == [True, [16, 16, 16]]


@pytest.mark.parametrize("key_comes_first", [False, True])
def test_who_waits_for_a_key_and_who_waits_for_a_place_go_in_the_order_in_which_they_came(
    shard: Contested, key_comes_first: bool
) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job(key="k"), job())
    jobs = [[job(body=b"key", key="k")], [job(body=b"place"), job()]]
    first, second = [shard.atomic(*each) for each in (jobs if key_comes_first else reversed(jobs))]
    assert shard.is_waiting(first, second)
    shard.abort()
    assert shard._data(first)[0] is True
    assert shard._data(second)[0] is False


def test_who_waits_for_another_queue_next_keeps_its_place_before_those_who_came_later(shard: Contested) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job("p"), transaction=T1)
    shard.promise(job("q"), transaction=T2)
    both = shard.atomic(job("p"), job("q"))
    later = shard.try_enqueue(job("q"))
    shard.abort(T1)
    assert shard.is_waiting(both, later)
    shard.abort(T2)
    assert (shard.outcomes(both), shard.outcomes(later)) == ([True, [16, 16]], [full(1)])


def test_who_stood_behind_one_that_waits_for_something_else_now_goes_on(shard: Contested) -> None:
    shard.configure(queues=[{"name": "p", "max_queue_depth": 2}, {"name": "q", "max_queue_depth": 1}])
    shard.promise(job("p"), transaction=T1)
    shard.promise(job("q"), transaction=T2)
    both = shard.atomic(job("p"), job("p"), job("q"))
    later = shard.try_enqueue(job("p"))
    shard.abort(T1)
    assert shard.is_waiting(both)
    assert shard.outcomes(later) == [16]
    shard.abort(T2)
    assert shard.outcomes(both) == [False, [[0, full(2)], [1, full(2)]]]


def test_all_lines_are_gone_when_all_is_decided(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job("p", key="k"), job("q"), transaction=T1)
    shard.promise(job("p"), job("q"), transaction=T2)
    op_ids = [shard.atomic(job("p"), job("q")), shard.try_enqueue(job("q"), job("p", key="k")), shard.atomic(job("q"))]
    assert shard.is_waiting(*op_ids)
    shard.commit(T2)
    shard.abort(T1)
    participant = shard.machine._participant
    assert (participant._blocked, participant._by_key, participant.lines) == ({}, {}, {})
    assert not shard.is_waiting(*op_ids)


# ---- room that comes from elsewhere


def full_with_a_lease(shard: Contested) -> Any:
    """One leased job and one promised one fill the queue."""
    shard.configure(max_queue_depth=2)
    shard.enqueue(max_attempts=1)
    leased = shard.reserve_one()
    shard.promise(job())
    return leased


ROOM: dict[str, Callable[[Contested, Any], object]] = {
    "ack": lambda shard, leased: shard.ack(leased),
    "nack to the dead": lambda shard, leased: shard.nack(leased, Strategy.DEAD_LETTER),
    "last attempt": lambda shard, leased: shard.nack(leased),
    "last lease": lambda shard, leased: shard.pass_time(LEASE_MS - 1_000),
    "higher cap": lambda shard, leased: (shard.configure(max_queue_depth=3), shard.pass_time()),
    "no cap": lambda shard, leased: (shard.configure(), shard.pass_time()),
}


@pytest.mark.parametrize("kind", ROOM)
def test_who_waits_gets_room_that_others_make(shard: Contested, kind: str) -> None:
    leased = full_with_a_lease(shard)
    shard.pass_time(1_000)
    op_id = shard.try_enqueue(job())
    assert shard.is_waiting(op_id)
    ROOM[kind](shard, leased)
    assert shard.outcomes(op_id) == [16]
    shard.abort()


def test_a_purge_makes_room(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.enqueue()
    shard.promise(job())
    op_id = shard.try_enqueue(job())
    assert shard.purge() == 1
    assert shard.outcomes(op_id) == [16]
    shard.abort()


def test_a_job_that_comes_back_makes_no_room(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.enqueue()
    leased = shard.reserve_one()
    shard.promise(job())
    op_id = shard.try_enqueue(job())
    shard.nack(leased)
    shard.reserve_one()
    shard.give_back(shard.last_op)
    assert shard.is_waiting(op_id)
    shard.abort()


def test_a_lower_cap_refuses_who_waits_for_what_is_over_it_now(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.enqueue()
    shard.promise(job())
    op_id = shard.try_enqueue(job())
    shard.configure(max_queue_depth=1)
    shard.pass_time()
    assert shard.outcomes(op_id) == [full(1)]
    shard.commit()
    assert shard.counts() == (2, 0, 0, 0)


def test_a_lower_cap_lets_wait_for_the_promises_that_are_over_it(shard: Contested) -> None:
    shard.promise(job(), job(), job())
    shard.configure(max_queue_depth=1)
    op_id = shard.try_enqueue(job(), job())
    assert shard.is_waiting(op_id)
    shard.abort()
    assert shard.outcomes(op_id) == [16, full(1)]


@pytest.mark.parametrize("back", ["nack", "lease", "schedule", "give back"])
def test_jobs_come_back_and_fall_due_whatever_is_promised(shard: Contested, back: str) -> None:
    shard.configure(max_queue_depth=2)
    shard.enqueue(due_ms=shard.wall_ms + 1_000 if back == "schedule" else 0)
    leased = None if back == "schedule" else shard.reserve_one(lease_ms=1_000)
    op_id = shard.last_op
    shard.promise(job(body=b"promised"))
    shard.configure(max_queue_depth=1)
    if back == "nack":
        shard.nack(leased)
    elif back == "give back":
        shard.give_back(op_id)
    else:
        shard.pass_time(1_000)
    assert shard.counts() == (1, 0, 0, 0)
    shard.commit()
    assert shard.drain() == [b"", b"promised"]


# ---- who waits no more


def test_a_router_that_ends_takes_what_it_waits_for_along_and_those_behind_go_on(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job(), router=ROUTER)
    batch = shard.atomic(job(), job(), router=OTHER_ROUTER)
    behind = shard.try_enqueue(job(), router=ROUTER)
    assert shard.is_waiting(batch, behind)
    shard.end_router(OTHER_ROUTER)
    assert shard.outcomes(behind) == [16]
    shard.abort()
    assert shard.is_waiting(batch)
    assert shard.counts() == (1, 0, 0, 0)


def test_a_coordinator_that_ends_makes_room_at_its_home(shard: Contested) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job(), router=ROUTER)
    its_own, anothers = shard.try_enqueue(job(), router=ROUTER), shard.try_enqueue(job(), router=OTHER_ROUTER)
    shard.end_router(ROUTER)
    assert shard.is_waiting(its_own)
    assert shard.outcomes(anothers) == [16]


@pytest.mark.parametrize("waits_for", ["key", "place"])
def test_an_enqueue_that_has_waited_long_enough_hears_that_nothing_was_stored(shard: Contested, waits_for: str) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job(key="k"))
    op_id = shard.try_enqueue(job(key="k" if waits_for == "key" else None))
    assert shard.next_wake_ms() == WAIT_MAX_MS
    shard.pass_time(WAIT_MAX_MS - 1)
    assert shard.is_waiting(op_id)
    shard.pass_time(1)
    status, text = shard.answer(op_id) or (0, "")
    assert status == UNAVAILABLE
    assert "key" in text and "places" in text and "nothing was stored" in text
    assert shard.next_wake_ms() is None
    shard.abort()
    assert shard.counts() == (0, 0, 0, 0)


def test_the_time_of_an_enqueue_that_waits_for_one_thing_after_the_other_does_not_start_again(shard: Contested) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job("a", key="k"), transaction=T1)
    shard.promise(job("b"), transaction=T2)
    op_id = shard.try_enqueue(job("a", key="k"), job("b"))
    shard.pass_time(WAIT_MAX_MS - 1)
    shard.abort(T1)
    assert shard.is_waiting(op_id)
    shard.pass_time(1)
    assert shard._status(op_id) == UNAVAILABLE
    shard.abort(T2)


def test_those_behind_one_that_has_waited_long_enough_go_on(shard: Contested) -> None:
    shard.configure(max_queue_depth=2)
    shard.promise(job())
    batch = shard.atomic(job(), job())
    shard.pass_time(1)
    behind = shard.try_enqueue(job())
    shard.pass_time(WAIT_MAX_MS - 1)
    assert shard._status(batch) == UNAVAILABLE
    assert shard.outcomes(behind) == [16]
    shard.abort()


def test_a_wall_clock_that_is_set_ends_no_wait(shard: Contested) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job())
    op_id = shard.try_enqueue(job())
    shard.wall_ms += DAY_MS
    shard.pass_time()
    assert shard.is_waiting(op_id)
    shard.abort()


def test_an_enqueue_whose_disk_is_full_when_its_turn_comes_is_refused(shard: Contested) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job())
    op_id = shard.try_enqueue(job())
    shard.machine.shortage = "the disk is almost full"
    shard.abort()
    assert shard.answer(op_id) == [INTERNAL, "the disk is almost full"]


def test_nobody_waits_over_a_restart_but_the_places_stay_taken(shard: Contested) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job())
    before = shard.try_enqueue(job())
    shard.restart()
    after = shard.try_enqueue(job())
    assert shard.is_waiting(before, after)
    shard.abort()
    assert shard.is_waiting(before)
    assert shard.outcomes(after) == [16]


# ---- anything, at random

RANDOM_STEPS = 150
SEEDS = 40
CAPS = {"p": 3, "q": 5, "free": None}


class Anything:
    """Random enqueues, transactions and workers at one shard, with a second opinion on what it says."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.shard = Contested(MemoryHome())
        caps = [{"name": name, "max_queue_depth": cap} for name, cap in CAPS.items() if cap is not None]
        self.shard.configure(queues=caps)
        self.promised: dict[int, set[bytes]] = {}  # ids of the jobs of undecided transactions
        self.asked: dict[int, list[EnqueueJob]] = {}  # jobs of enqueues that were not answered, by op id
        self.leased: list[LeasedJob] = []
        self.accepted: set[bytes] = set()  # jobs that are there
        self.transactions = 0
        self.waited = self.refused = self.busy = 0

    def run(self) -> None:
        for _ in range(RANDOM_STEPS):
            actions = {self.enqueue: 5, self.prepare: 4, self.decide: 3, self.reserve: 2, self.finish: 2}
            (action,) = self.random.choices(list(actions), list(actions.values()))
            action()
            self.look()
        while self.promised:
            self.decide()
            self.look()

    def jobs(self) -> list[EnqueueJob]:
        names, keys = list(CAPS), [None, None, "a", "b"]
        count = self.random.randint(1, 3)
        return [job(self.random.choice(names), key=self.random.choice(keys), max_attempts=100) for _ in range(count)]

    def enqueue(self) -> None:
        jobs = self.jobs()
        op_id = self.shard.try_enqueue(*jobs, op=self.random.choice([Op.ENQUEUE, Op.ENQUEUE_ATOMIC]))
        self.asked[op_id] = jobs
        self.waited += self.shard.is_waiting(op_id)

    def prepare(self) -> None:
        self.transactions += 1
        jobs = self.jobs()
        vote, data = self.shard.prepare(*jobs, transaction=self.transactions)
        if vote == Vote.YES:
            self.promised[self.transactions] = {outcome for outcome in data if isinstance(outcome, bytes)}
        elif vote == Vote.REFUSED:
            self.check_refusals(jobs, data)
        else:
            self.busy += 1

    def decide(self) -> None:
        if not self.promised:
            return
        transaction = self.random.choice(list(self.promised))
        promised = self.promised.pop(transaction)
        if self.random.random() < 0.5:
            self.accepted |= promised
            self.shard.commit(transaction)
        else:
            self.shard.abort(transaction)

    def reserve(self) -> None:
        self.leased += self.shard.reserve(*CAPS, max_jobs=4, lease_ms=DAY_MS)

    def finish(self) -> None:
        for leased in self.leased:
            if self.random.random() < 0.7:
                assert self.shard.ack(leased) == 0
                self.accepted.remove(leased.job_id)
            else:
                assert self.shard.nack(leased) == [0, False]
            self.look()
        self.leased.clear()

    def look(self) -> None:
        for queue in self.shard.machine._queues.values():
            cap = CAPS[queue.name]
            assert cap is None or queue.depth <= cap, f"{queue.name} is over its cap"
        for op_id, jobs in list(self.asked.items()):
            if self.shard.answer(op_id) is not None:
                del self.asked[op_id]
                self.check_answer(jobs, self.shard._data(op_id))

    def check_answer(self, jobs: list[EnqueueJob], data: list[Any]) -> None:
        if data[0] is False:
            self.check_refusals(jobs, data[1])
            return
        outcomes = data[1] if data[0] is True else data
        for each, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, bytes):
                self.accepted.add(outcome)
            elif outcome[0] == Outcome.QUEUE_FULL:
                self.refused += 1
                assert self.stored(each.queue) == CAPS[each.queue], "refused for what is only promised"

    def check_refusals(self, jobs: list[EnqueueJob], refusals: list[Any]) -> None:
        """Of an atomic batch: it has more jobs for each queue that it names than there are places for good."""
        self.refused += 1
        for name in {jobs[index].queue for index, _ in refusals}:
            wanted = sum(each.queue == name for each in jobs)
            assert self.stored(name) + wanted > (CAPS[name] or 0), "refused for what is only promised"

    def stored(self, name: str) -> int:
        """What is stored for good when a step has ended; it does not get less within one that refuses."""
        return sum(self.shard.counts(name)[:3])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_queue_is_over_its_cap_or_refuses_for_promises_and_all_are_answered_in_the_end(seed: int) -> None:
    anything = Anything(seed)
    anything.run()
    shard = anything.shard
    assert (anything.asked, shard.records) == ({}, 0)
    left = {leased.job_id for leased in [*anything.leased, *shard.reserve(*CAPS, max_jobs=1_000)]}
    assert left == anything.accepted, "what was accepted and not acked is there, and nothing else"
    shard.check()


def test_random_runs_meet_all_that_can_be_said_of_held_places() -> None:
    """Or the test above would say little."""
    runs = [Anything(seed) for seed in range(SEEDS)]
    for anything in runs:
        anything.run()
    assert sum(anything.waited for anything in runs) > 100
    assert sum(anything.refused for anything in runs) > 100
    assert sum(anything.busy for anything in runs) > 100
