"""What else happens to a queue while a transaction is undecided: keys, time, operators, restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shard.admin as admin_module
from common import admin_pb2 as admin_pb
from common.slots import SlotMap
from common.wire import AdminCommand, Fate, Op, Outcome, Question, Vote
from router.admin import Admin, Patience, Refused
from router.resharding import MoveOutcome
from shard.admin import ABORTED, CLOSING_MS, FAILED_PRECONDITION
from shard.machine import RETIRE_AFTER_MS, UNAVAILABLE
from shard.transactions import ASK_AGAIN_MS
from tests.unit import shard_driver
from tests.unit.shard_driver import OTHER_ROUTER, ROUTER, WALL_START_MS, Home, MemoryHome, job
from tests.unit.test_last_places import (
    BOTH_KINDS,
    BUSY,
    CLOSING,
    DAY_MS,
    Contested,
    Decision,
    abort,
    commit,
    plain,
    refused_alone,
)
from tests.unit.test_participant import ELSEWHERE, HOME, T1, T2, duplicate_of

home = shard_driver.home

TEN_MINUTES_MS = 600_000


@pytest.fixture
def shard() -> Iterator[Contested]:
    made = Contested(MemoryHome())
    yield made
    made.check()


# ---- keys


@pytest.mark.parametrize("after_ms", [0, 1])
def test_a_key_that_has_expired_is_no_duplicate_for_a_batch_swept_or_not(shard: Contested, after_ms: int) -> None:
    shard.configure(dedup_window_ms=1_000)
    earlier = shard.enqueue(key="k")
    shard.wall_ms += 1_000
    shard.mono_ms += 1_000
    if after_ms:
        shard.pass_time(after_ms)
    (promised,) = shard.promise(job(key="k"))
    assert len(promised) == 16 and promised != earlier
    shard.commit()
    assert shard.enqueue(key="k") == duplicate_of(promised)


def test_a_duplicate_in_a_batch_names_its_job_although_its_key_expires_before_the_commit(shard: Contested) -> None:
    shard.configure(dedup_window_ms=1_000)
    earlier = shard.enqueue(key="k")
    assert shard.promise(job(key="k"), job("a"))[0] == duplicate_of(earlier)
    shard.pass_time(1_000)
    later = shard.enqueue(key="k")
    assert len(later) == 16 and later != earlier
    shard.commit()
    assert (shard.counts("q"), shard.counts("a")) == ((2, 0, 0, 0), (1, 0, 0, 0))
    assert shard.enqueue(key="k") == duplicate_of(later)


@BOTH_KINDS
def test_keys_that_repeat_in_an_enqueue_and_in_an_undecided_batch_are_one_job_each(shard: Contested, op: Op) -> None:
    first, _, second = shard.promise(job(key="a"), job(key="a"), job(key="b"))
    op_id = shard.try_enqueue(job(key="a"), job(key="a"), job(key="b"), job(key="c"), job(key="c"), op=op)
    shard.commit()
    outcomes = shard._data(op_id) if op == Op.ENQUEUE else shard._data(op_id)[1]
    assert outcomes[:3] == [duplicate_of(first), duplicate_of(first), duplicate_of(second)]
    assert outcomes[4] == duplicate_of(outcomes[3])
    assert shard.counts() == (3, 0, 0, 0)


def test_a_batch_and_its_copy_at_the_same_time_are_one_job_for_each_key(shard: Contested) -> None:
    batch = [job(key="a"), job(key="a"), job(key="b")]
    first, _, second = shard.promise(*batch, transaction=T1)
    assert shard.prepare(*batch, transaction=T2) == BUSY
    shard.commit(T1)
    assert shard.promise(*batch, transaction=T2) == [duplicate_of(each) for each in (first, first, second)]
    shard.commit(T2)
    assert shard.counts() == (2, 0, 0, 0)


def test_an_aborted_batch_leaves_its_keys_free_and_its_ids_unused(shard: Contested) -> None:
    promised = shard.promise(job(key="a"), job(key="b"))
    shard.abort()
    stored = shard._data(shard.try_enqueue(job(key="a"), job(key="b")))
    assert set(promised).isdisjoint(stored)
    assert plain(stored) == [16, 16]


# ---- time


def test_a_silent_coordinator_holds_up_no_other_queue_and_its_decision_counts_after_ten_minutes() -> None:
    other = Contested(MemoryHome(), ELSEWHERE)
    other.configure(max_queue_depth=2)
    (promised,) = other.promise(job(key="k", body=b"promised"), at=HOME)
    held_up = other.try_enqueue(job(key="k"))
    for minute in range(10):
        assert other.outcomes(other.try_enqueue(job("a", b"%d" % minute))) == [16]
        assert other.drain("a") == [b"%d" % minute]
        other.pass_time(60_000)
    assert other._status(held_up) == UNAVAILABLE
    assert (other.questions(), other.records) == ([], 1)
    other.commit()
    leased = other.reserve_one()
    assert (leased.job_id, leased.body) == (promised, b"promised")
    assert other.enqueue(key="k") == duplicate_of(promised)


@pytest.mark.parametrize("decision", [Fate.COMMITTED, Fate.ABORTED])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_dead_coordinator_left_is_asked_of_the_first_router_after_ten_minutes_without_any(
    home: Home, decision: Fate, restarted: bool
) -> None:
    shard = Contested(home, ELSEWHERE)
    (promised,) = shard.promise(job(key="k"), at=HOME)
    shard.enqueue("a", body=b"meanwhile")
    shard.end_router(ROUTER)
    shard.end_router(OTHER_ROUTER)
    shard.pass_time(TEN_MINUTES_MS)
    if restarted:
        shard.restart()
    assert (shard.questions(), shard.records) == ([], 1)
    shard.start_router("router-2")
    shard.pass_time()
    assert shard.questions() == [("router-2", [Question.RESOLVE, T1, HOME, ROUTER])]
    if decision == Fate.COMMITTED:
        shard.commit(router="router-2")
        assert shard.reserve_one().job_id == promised
    else:
        shard.abort(router="router-2")
        assert shard.reserve() == []
    assert shard.records == 0
    assert shard.drain("a") == [b"meanwhile"]
    shard.check()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_home_tells_after_ten_minutes_without_any_router_what_it_had_decided(home: Home, restarted: bool) -> None:
    shard = Contested(home)
    shard.promise(job(), transaction=T1)
    shard.promise(job(), transaction=T2)
    shard.decide(T1)
    shard.end_router(ROUTER)
    shard.end_router(OTHER_ROUTER)
    shard.pass_time(TEN_MINUTES_MS)
    if restarted:
        shard.restart()
    shard.start_router("router-2")
    shard.pass_time()
    assert shard.questions() == [("router-2", [Question.FINISH, T1, [ELSEWHERE]])]
    assert shard.resolve(T1, router="router-2") == Fate.COMMITTED
    assert shard.resolve(T2, router="router-2") == Fate.ABORTED
    assert shard.counts() == (1, 0, 0, 0)
    shard.pass_time(ASK_AGAIN_MS - 1)
    assert shard.questions() == []
    shard.forget(T1)
    assert shard.records == 0
    shard.check()


def test_a_lease_that_expires_and_a_job_that_falls_due_are_served_beside_a_promise(shard: Contested) -> None:
    shard.enqueue(body=b"leased")
    shard.reserve_one(lease_ms=1_000)
    shard.enqueue(body=b"scheduled", due_ms=shard.wall_ms + 1_000)
    shard.promise(job(body=b"promised"), job(body=b"promised later", due_ms=WALL_START_MS + 2_000))
    shard.pass_time(1_000)
    assert shard.counts() == (2, 0, 0, 0)
    assert shard.drain() == [b"leased", b"scheduled"]
    shard.commit()
    assert shard.counts() == (1, 1, 0, 0)
    shard.pass_time(1_000)
    assert shard.drain() == [b"promised", b"promised later"]


# ---- operators


def test_a_purge_leaves_what_is_promised(shard: Contested) -> None:
    shard.enqueue_all(job(), job(due_ms=shard.wall_ms + 1_000))
    shard.promise(job(body=b"1"), job(body=b"2", due_ms=shard.wall_ms + 1_000, key="k"))
    assert shard.purge() == 2
    shard.commit()
    shard.pass_time(1_000)
    assert shard.drain() == [b"1", b"2"]
    assert shard.enqueue(key="k")[0] == Outcome.DEDUPLICATED


def test_a_queue_that_was_purged_empty_is_not_retired_while_something_is_promised(shard: Contested) -> None:
    shard.enqueue()
    shard.promise(job())
    shard.purge()
    shard.pass_time(10 * RETIRE_AFTER_MS)
    shard.abort()
    shard.pass_time(RETIRE_AFTER_MS - 1)
    assert "q" in shard.machine.counts()
    shard.pass_time(1)
    assert shard.stored() == {}


def test_a_promise_counts_among_the_jobs_that_a_deletion_is_refused_for(shard: Contested) -> None:
    shard.enqueue_all(job(), job())
    shard.reserve_one()
    shard.promise(job(), job(), job())
    status, text = shard.close(may_wait=False)
    assert status == FAILED_PRECONDITION
    assert "in flight, 1," in text and "not decided, 3:" in text
    assert len(shard.enqueue()) == 16
    assert len(shard.promise(job(), transaction=T2)) == 1
    shard.abort(T2)
    shard.abort(T1)


def test_a_closing_queue_takes_no_promise(shard: Contested) -> None:
    shard.enqueue()
    shard.close()
    assert shard.prepare(job("a"), job("q")) == [Vote.REFUSED, [(1, CLOSING)]]
    shard.pass_time(CLOSING_MS)
    shard.promise(job("q"))
    shard.abort()


@BOTH_KINDS
def test_a_closing_queue_refuses_at_once_although_what_is_wanted_of_it_is_held(shard: Contested, op: Op) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job(key="k"))
    shard.close()
    assert shard.outcomes(shard.try_enqueue(job(key="k"), job(), op=op)) == refused_alone(op, CLOSING, CLOSING)
    shard.abort()


def test_who_waits_for_a_place_hears_at_once_that_the_queue_is_closing(shard: Contested) -> None:
    shard.configure(max_queue_depth=1)
    shard.promise(job())
    waiting = [shard.try_enqueue(job()), shard.atomic(job())]
    shard.close()
    assert [shard.outcomes(op_id) for op_id in waiting] == [[CLOSING], [False, [[0, CLOSING]]]]
    shard.abort()


def test_who_waited_for_a_key_of_a_queue_that_is_deleted_stores_nothing(shard: Contested) -> None:
    shard.promise(job(key="k"))
    op_id = shard.try_enqueue(job(key="k"))
    _, (number, _) = shard.close()
    shard.commit()
    assert shard.outcomes(op_id) == [CLOSING]
    assert shard.remove(number) == 0
    assert shard.stored() == {}


def test_nothing_that_is_committed_in_a_closing_queue_is_handed_out(shard: Contested) -> None:
    poll = shard.park()
    shard.promise(job())
    shard.close()
    shard.commit()
    assert shard.jobs_for(poll) is None
    assert shard.reserve() == []
    shard.cancel(poll)


def test_what_was_committed_in_a_closing_queue_is_served_when_its_deletion_is_given_up(shard: Contested) -> None:
    poll = shard.park()
    (promised,) = shard.promise(job(key="k"))
    shard.close()
    shard.commit()
    shard.pass_time(CLOSING_MS)
    assert [leased.job_id for leased in shard.jobs_for(poll) or []] == [promised]
    assert shard.enqueue(key="k") == duplicate_of(promised)


@pytest.mark.parametrize("decide", [commit, abort])
def test_a_deletion_that_waited_for_a_decision_leaves_nothing_behind(shard: Contested, decide: Decision) -> None:
    shard.enqueue(key="old")
    shard.promise(job(key="k"), job(due_ms=shard.wall_ms + 60_000, key="later"))
    status, (number, in_flight) = shard.close()
    assert (status, in_flight) == (0, 2)
    decide(shard)
    assert shard.close(number=number) == (0, (number, 0))
    assert shard.remove(number) == 0
    assert shard.stored() == {}


def test_a_deletion_takes_nothing_away_beside_a_promise(shard: Contested) -> None:
    """It paused, the queue opened and promised something, and another deletion has closed it again."""
    shard.enqueue(body=b"old", key="old")
    _, (number, _) = shard.close()
    shard.pass_time(CLOSING_MS)
    shard.promise(job(body=b"promised", key="k"))
    assert shard.close() == (0, (number, 1))
    assert shard.remove(number) == ABORTED
    assert shard.counts() == (1, 0, 0, 0)
    shard.commit()
    shard.pass_time(CLOSING_MS)
    assert shard.drain() == [b"old", b"promised"]
    assert shard.enqueue(key="k")[0] == shard.enqueue(key="old")[0] == Outcome.DEDUPLICATED


def test_a_deletion_that_is_refused_for_a_promise_does_not_keep_its_queue_closing(shard: Contested) -> None:
    shard.enqueue()
    _, (number, _) = shard.close()
    shard.pass_time(CLOSING_MS)
    shard.promise(job())
    shard.close()
    shard.pass_time(CLOSING_MS - 1)
    assert shard.remove(number) == ABORTED
    shard.pass_time(1)
    assert len(shard.enqueue()) == 16
    shard.abort()


def test_the_next_queue_of_a_name_has_nothing_of_a_deleted_one_and_its_transaction(shard: Contested) -> None:
    (promised,) = shard.promise(job(key="k"))
    _, (number, _) = shard.close()
    shard.decide()
    shard.remove(number)
    new = shard.enqueue(key="k")
    assert len(new) == 16 and new != promised
    assert shard.decide() == shard.resolve() == Fate.COMMITTED
    shard.commit()
    shard.forget()
    assert shard.counts() == (1, 0, 0, 0)


def test_a_deletion_leaves_the_other_queues_of_a_batch_alone(shard: Contested) -> None:
    shard.promise(job("q"), job("a", b"a"), job("q"))
    _, (number, _) = shard.close()
    shard.commit()
    assert shard.remove(number) == 0
    assert shard.machine.counts() == {"a": (1, 0, 0, 0)}
    assert shard.drain("a") == [b"a"]


def test_a_duplicate_of_a_job_that_is_deleted_before_the_commit_brings_nothing_back(shard: Contested) -> None:
    stored = shard.enqueue(key="k")
    assert shard.promise(job(key="k"), job("a"))[0] == duplicate_of(stored)
    _, (number, in_flight) = shard.close()
    assert in_flight == 0
    assert shard.remove(number) == 0
    shard.commit()
    assert shard.machine.counts() == {"a": (1, 0, 0, 0)}


class OneShard:
    """A server of one shard, as the router's part of a deletion sees it; every pause is half a second."""

    def __init__(self, shard: Contested, meanwhile: dict[int, Decision]) -> None:
        self.shard = shard
        self.pauses = 0
        self._meanwhile = meanwhile

    def ask(self, shard: int, arguments: list[Any]) -> tuple[int, Any]:
        status, data = self.shard.answer(self.shard.send(*arguments)) or (-1, None)
        return status, data

    def slot_map(self) -> SlotMap:
        return SlotMap.even(1)

    def move(self, slots: list[int], target: int, bytes_per_second: int, patience: Patience) -> MoveOutcome | str:
        raise AssertionError("nothing moves")

    def set_shards(self, shards: int, patience: Patience) -> str | None:
        raise AssertionError("nothing moves")

    def is_over(self) -> bool:
        return self.pauses > 2_000

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        self.shard.pass_time(int(seconds * 1_000))
        self._meanwhile.get(self.pauses, lambda shard: None)(self.shard)


@pytest.mark.parametrize(("decide", "jobs", "keys"), [(commit, 2, 1), (abort, 1, 0)])
def test_a_deletion_waits_for_a_silent_coordinator_and_counts_what_was_committed(
    shard: Contested, decide: Decision, jobs: int, keys: int
) -> None:
    shard.enqueue()
    shard.promise(job(key="k"))
    server = OneShard(shard, {1_200: decide})
    answer = Admin(server, server).delete_queue(admin_pb.DeleteQueueRequest(queue="q", wait=True), server)
    assert server.pauses == 1_200
    assert answer == admin_pb.DeleteQueueResponse(removed_jobs=jobs, removed_keys=keys)
    assert shard.stored() == {}


def test_a_deletion_that_may_not_wait_says_what_is_not_decided_and_the_queue_goes_on(shard: Contested) -> None:
    shard.promise(job())
    server = OneShard(shard, {})
    with pytest.raises(Refused) as refused:
        Admin(server, server).delete_queue(admin_pb.DeleteQueueRequest(queue="q"), server)
    assert refused.value.status == FAILED_PRECONDITION
    shard.commit()
    assert len(shard.drain()) == 1


# ---- restarts between any two steps

Step = Callable[[Contested], Any]


def _close(shard: Contested) -> Any:
    status, data = shard.close()
    return status, data[1]


def _remove(shard: Contested) -> int:
    _, (number, _) = shard.close()
    return shard.remove(number)


SCRIPTS: dict[str, list[Step]] = {
    "deleted before the commit": [
        lambda shard: shard.enqueue(key="old"),
        lambda shard: shard.promise(job(key="k"), job("a")),
        _close,
        lambda shard: shard.prepare(job(), transaction=T2),
        lambda shard: shard.enqueue(),
        lambda shard: shard.commit(),
        lambda shard: shard.commit(),
        _close,
        _remove,
        lambda shard: shard.stored(),
        lambda shard: shard.enqueue(key="k"),
        lambda shard: shard.drain("q", "a"),
    ],
    "deleted before the abort": [
        lambda shard: shard.promise(job(key="k"), job("a", body=b"a")),
        _close,
        lambda shard: shard.abort(),
        _remove,
        lambda shard: shard.pass_time(RETIRE_AFTER_MS),
        lambda shard: shard.stored(),
        lambda shard: shard.enqueue(key="k"),
    ],
    "decided at the home of a deleted queue": [
        lambda shard: shard.promise(job(key="k"), job("a")),
        _close,
        lambda shard: shard.decide(),
        _remove,
        lambda shard: shard.decide(),
        lambda shard: shard.resolve(),
        lambda shard: shard.forget(),
        lambda shard: shard.stored(),
        lambda shard: shard.counts("a"),
    ],
    "left by its coordinator, and deleted": [
        lambda shard: shard.promise(job(), job("a")),
        _close,
        lambda shard: shard.end_router(),
        _remove,
        lambda shard: shard.pass_time(RETIRE_AFTER_MS),
        lambda shard: shard.stored(),
    ],
    "deletion given up": [
        lambda shard: shard.promise(job(key="k")),
        _close,
        lambda shard: shard.pass_time(CLOSING_MS),
        lambda shard: shard.enqueue(),
        lambda shard: shard.commit(),
        lambda shard: shard.enqueue(key="k"),
        lambda shard: shard.drain(),
    ],
    "purged": [
        lambda shard: shard.enqueue_all(job(), job(due_ms=WALL_START_MS + DAY_MS)),
        lambda shard: shard.promise(job(body=b"1"), job(due_ms=WALL_START_MS + 5_000, body=b"2")),
        lambda shard: shard.purge(),
        lambda shard: shard.commit(),
        lambda shard: shard.pass_time(5_000),
        lambda shard: shard.drain(),
    ],
    "at the last places": [
        lambda shard: shard.configure(max_queue_depth=3),
        lambda shard: shard.enqueue_all(job(), job()),
        lambda shard: shard.promise(job(key="k")),
        lambda shard: shard.prepare(job(), transaction=T2),
        lambda shard: shard.prepare(job(), job(), transaction=T2),
        lambda shard: shard.outcomes(shard.atomic(job(), job())),
        lambda shard: shard.ack(shard.reserve_one()),
        lambda shard: shard.promise(job(), transaction=T2),
        lambda shard: shard.commit(),
        lambda shard: shard.abort(T2),
        lambda shard: shard.enqueue_all(job(), job(key="k"), job()),
        lambda shard: len(shard.drain()),
    ],
}


def run(shard: Contested, steps: list[Step], restart_after: int | None) -> list[Any]:
    answers = []
    for number, step in enumerate(steps):
        answers.append(plain(step(shard)))
        if number == restart_after:
            shard.restart()
    assert shard.records == 0
    shard.check()
    return answers


@pytest.mark.parametrize(
    ("script", "restart_after"), [(script, step) for script, steps in SCRIPTS.items() for step in range(len(steps))]
)
def test_a_restart_between_any_two_steps_changes_no_answer(home: Home, script: str, restart_after: int) -> None:
    steps = SCRIPTS[script]
    assert run(Contested(home), steps, restart_after) == run(Contested(MemoryHome()), steps, None)


def test_nothing_is_left_of_a_deletion_with_a_crash_at_any_step_after_its_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin_module, "SCAN_RECORDS", 2)
    done, steps = 0, 1
    while done < steps:
        shard = Contested(MemoryHome())
        shard.enqueue_all(job(key="1"), job(due_ms=DAY_MS + WALL_START_MS), job(priority=9))
        shard.promise(job(key="2"), job(priority=5), job(due_ms=DAY_MS + WALL_START_MS, key="3"))
        _, (number, _) = shard.close()
        shard.commit()
        cursor: bytes | None = b""
        steps = 0
        while cursor is not None:
            if steps == done:
                shard.restart()
            steps += 1
            cursor = shard._data(shard.send(Op.ADMIN, AdminCommand.REMOVE, "q", number, cursor))[-1]
        assert shard.stored() == {}
        done += 1
    assert done > 5
