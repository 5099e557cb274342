"""A shard that holds what is new for slots that are leaving: what it waits for, what waits for it, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from common.slots import slot_of
from common.wire import MOVED, AdminCommand, Fate, MoveCommand, Op, Strategy, Vote
from shard.store import Family
from tests.unit import shard_driver
from tests.unit.shard_driver import (
    LEASE_MS,
    OTHER_ROUTER,
    ROUTER,
    WALL_START_MS,
    Cluster,
    MemoryHome,
    OwningShard,
    bodies,
    job,
    rows,
)

cluster = shard_driver.cluster

Q = slot_of("q")
STAYS = "stays"
T = 7


@pytest.fixture
def memory_cluster() -> Cluster:
    return Cluster([MemoryHome(), MemoryHome()])


@pytest.fixture
def source(memory_cluster: Cluster) -> OwningShard:
    """A shard from which a slot is being moved that has not been held yet."""
    shard = memory_cluster.shards[0]
    for each in memory_cluster.shards:
        each.configure([{"name": STAYS, "max_queue_depth": 1}], dead_letter_retention_ms=10_000, dedup_window_ms=5_000)
    memory_cluster.clear([Q])
    shard.step(MoveCommand.OPEN, [Q])
    memory_cluster.copy()
    return shard


def hold(shard: OwningShard) -> bool:
    quiet: bool = shard.step(MoveCommand.HOLD)
    return quiet


def prepare(shard: OwningShard, *jobs: Any, transaction: int = T, router: str = ROUTER) -> int:
    return shard.send(Op.PREPARE, transaction, 0, b"123" * len(jobs), [list(each) for each in jobs], router=router)


def enqueue(shard: OwningShard, *jobs: Any, router: str = ROUTER) -> int:
    return shard.send(Op.ENQUEUE, b"123" * len(jobs), [list(each) for each in jobs], router=router)


def finish(cluster: Cluster) -> None:
    """What is left of a move that is quiet."""
    cluster.copy_changes()
    cluster.switch([Q])


# ---- what holding waits for


def test_holding_waits_for_a_claim_that_is_not_confirmed(source: OwningShard, memory_cluster: Cluster) -> None:
    source.enqueue()
    leased = source.reserve_one()
    claim = source.last_op
    assert not hold(source)
    source.confirm(claim)
    assert hold(source)
    finish(memory_cluster)
    assert memory_cluster.shards[1].ack(leased) == 0


def test_a_claim_that_is_given_back_while_it_is_waited_for_moves_as_a_ready_job(
    source: OwningShard, memory_cluster: Cluster
) -> None:
    source.enqueue(body=b"x")
    source.reserve_one()
    claim = source.last_op
    assert not hold(source)
    source.give_back(claim)
    assert hold(source)
    finish(memory_cluster)
    assert [(each.body, each.attempt) for each in memory_cluster.shards[1].reserve()] == [(b"x", 1)]


def test_a_job_that_comes_back_while_held_is_given_to_nobody(source: OwningShard, memory_cluster: Cluster) -> None:
    source.enqueue(body=b"x")
    source.reserve_one()
    claim = source.last_op
    watch, poll = source.watch("q"), source.park("q", STAYS)
    hold(source)
    source.give_back(claim)
    assert (source.answer(watch), source.answer(poll)) == (None, None)
    assert hold(source)
    finish(memory_cluster)
    assert (source.answer(watch), source.answer(poll)) == ([MOVED, 2], [MOVED, 2])
    assert bodies(memory_cluster.shards[1].reserve()) == [b"x"]


def test_a_parked_poll_on_a_held_and_another_queue_is_served_from_the_other_one_only(
    source: OwningShard, memory_cluster: Cluster
) -> None:
    source.enqueue(body=b"held")
    source.reserve_one()
    claim = source.last_op
    poll = source.park("q", STAYS, max_jobs=5)
    hold(source)
    source.give_back(claim)
    assert hold(source)
    source.enqueue(STAYS, b"other")
    assert bodies(source.jobs_for(poll)) == [b"other"]
    finish(memory_cluster)
    assert bodies(memory_cluster.shards[1].reserve()) == [b"held"]


def test_claims_on_other_slots_and_of_routers_that_have_ended_are_not_waited_for(source: OwningShard) -> None:
    source.enqueue_all(job(), job(STAYS))
    source.reserve(STAYS)
    source.reserve("q", router=OTHER_ROUTER)
    source.router_gone(OTHER_ROUTER)
    assert hold(source)


def test_claims_of_before_a_start_are_not_waited_for_and_come_back_only_where_they_are_served(
    memory_cluster: Cluster,
) -> None:
    source, target = memory_cluster.shards
    source.enqueue()
    source.reserve_one()
    claim = source.last_op
    source.restart()
    memory_cluster.clear([Q])
    source.step(MoveCommand.OPEN, [Q])
    memory_cluster.copy()
    assert hold(source)
    memory_cluster.copy_changes()
    before = source.rows_of([Q])
    source.give_back(claim)
    assert source.rows_of([Q]) == before
    source.step(MoveCommand.PAUSE)
    assert source.counts() == (1, 0, 0, 0)
    assert hold(source)
    finish(memory_cluster)
    assert target.counts() == (1, 0, 0, 0)


def test_holding_waits_for_dead_letters_that_are_handed_out(source: OwningShard, memory_cluster: Cluster) -> None:
    source.enqueue_all(job(body=b"1"), job(body=b"2"))
    for leased in source.reserve(max_jobs=2):
        source.nack(leased, Strategy.DEAD_LETTER)
    source.drain_dead()
    drain = source.last_op
    assert not hold(source)
    source.keep(drain, 1)
    assert not hold(source)
    source.confirm(drain)
    assert hold(source)
    finish(memory_cluster)
    assert [letter.body for letter in memory_cluster.shards[1].drain_dead()] == [b"2"]


@pytest.mark.parametrize("ending", ["decide", "commit", "abort", "router"])
def test_holding_waits_for_the_decision_of_a_transaction(
    source: OwningShard, memory_cluster: Cluster, ending: str
) -> None:
    prepare(source, job(body=b"x", key="k"), router=OTHER_ROUTER)
    assert not hold(source)
    match ending:
        case "decide":
            assert source._data(source.send(Op.DECIDE, T, [1])) == Fate.COMMITTED
        case "commit":
            source._data(source.send(Op.COMMIT, T))
        case "abort":
            source._data(source.send(Op.ABORT, T))
        case _:
            source.router_gone(OTHER_ROUTER)
    assert hold(source)
    finish(memory_cluster)
    target = memory_cluster.shards[1]
    is_stored = ending in ("decide", "commit")
    assert target.drain() == ([b"x"] if is_stored else [])
    assert isinstance(target.enqueue(key="k"), bytes) != is_stored


def test_a_transaction_all_of_whose_jobs_are_duplicates_is_not_waited_for(
    source: OwningShard, memory_cluster: Cluster
) -> None:
    source.enqueue(key="k")
    vote, _ = source._data(prepare(source, job(key="k")))
    assert vote == Vote.YES
    assert hold(source)
    finish(memory_cluster)
    assert source._data(source.send(Op.DECIDE, T, [])) == Fate.COMMITTED
    assert memory_cluster.shards[1].counts() == (1, 0, 0, 0)


# ---- what waits for it


def test_what_is_new_waits_and_is_sent_back_in_order_at_the_switch(
    source: OwningShard, memory_cluster: Cluster
) -> None:
    source.enqueue()
    leased = source.reserve_one()
    source.confirm(source.last_op)
    assert hold(source)
    sent = [
        enqueue(source, job(body=b"1")),
        source.send(Op.ACK, leased.job_id, 1),
        enqueue(source, job(STAYS), job(body=b"2")),
        source.park("q", STAYS),
        source.watch("q"),
        prepare(source, job()),
        source.send(Op.DRAIN, "q", 1, 1 << 20),
        source.send(Op.ADMIN, AdminCommand.PURGE, "q", b""),
    ]
    assert [source.answer(op_id) for op_id in sent] == [None] * len(sent)
    finish(memory_cluster)
    assert [op_id for _, op_id, status, _ in source.answers if status == MOVED] == sent


def test_a_drain_of_all_queues_waits_and_is_done_by_both_shards_for_their_own(
    source: OwningShard, memory_cluster: Cluster
) -> None:
    source.enqueue_all(job(), job(STAYS))
    for leased in source.reserve("q", STAYS, max_jobs=2):
        source.nack(leased, Strategy.DEAD_LETTER)
    source.confirm(*range(1, source.last_op))
    assert hold(source)
    drain = source.send(Op.DRAIN, None, 10, 1 << 20)
    assert source.answer(drain) is None
    finish(memory_cluster)
    assert len(source._data(drain)) == 1
    assert len(memory_cluster.shards[1].drain_dead()) == 1


def test_operations_on_other_slots_are_not_held(source: OwningShard) -> None:
    assert hold(source)
    source.enqueue(STAYS, b"x")
    assert source.drain(STAYS) == [b"x"]
    assert source.known(STAYS) == [False]


@pytest.mark.parametrize("command", [MoveCommand.RESUME, MoveCommand.PAUSE])
def test_what_was_held_is_done_in_order_when_the_slots_stay(source: OwningShard, command: MoveCommand) -> None:
    assert hold(source)
    poll = source.park("q", max_jobs=5)
    first, second = enqueue(source, job(body=b"1")), enqueue(source, job(body=b"2"))
    source.step(command)
    assert bodies(source.jobs_for(poll)) == [b"1"]
    assert [source.answer(op_id) is not None for op_id in (first, second)] == [True, True]
    assert bodies(source.reserve(max_jobs=5)) == [b"2"]


def test_after_a_pause_the_move_goes_on_with_what_has_changed(source: OwningShard, memory_cluster: Cluster) -> None:
    assert hold(source)
    memory_cluster.copy_changes()
    enqueue(source, job(body=b"1"))
    source.step(MoveCommand.PAUSE)
    source.enqueue(body=b"2")
    memory_cluster.copy_changes()
    source.enqueue(body=b"3")
    assert hold(source)
    finish(memory_cluster)
    assert memory_cluster.shards[1].drain() == [b"1", b"2", b"3"]


def test_after_a_resume_nothing_is_known_of_the_move(source: OwningShard) -> None:
    assert hold(source)
    source.step(MoveCommand.RESUME)
    assert "knows of no move" in source.refusal(MoveCommand.CHANGES, 100)
    source.enqueue()


def test_a_job_that_came_back_while_held_is_given_to_who_waits_when_the_slots_stay(source: OwningShard) -> None:
    source.enqueue()
    source.reserve_one()
    claim = source.last_op
    poll = source.park("q")
    hold(source)
    source.give_back(claim)
    source.step(MoveCommand.PAUSE)
    assert len(source.jobs_for(poll) or ()) == 1


def test_a_poll_that_is_cancelled_while_held_is_not_parked_afterwards(source: OwningShard) -> None:
    hold(source)
    poll = source.park("q")
    source.cancel(poll)
    source.step(MoveCommand.RESUME)
    source.enqueue()
    assert source.counts() == (1, 0, 0, 0)


def test_a_claim_that_is_cancelled_while_held_passes_its_wake_up_on(source: OwningShard) -> None:
    first, second = source.watch(STAYS), source.watch(STAYS)
    source.enqueue(STAYS)
    hold(source)
    claim = source.park("q", STAYS, settles=first)
    assert (source.answer(claim), source.answer(second)) == (None, None)
    source.cancel(claim)
    assert source.is_woken(second)


@pytest.mark.parametrize("op", [Op.ABORT, Op.RESOLVE])
def test_a_promise_that_is_held_is_not_made_when_its_transaction_is_settled(source: OwningShard, op: Op) -> None:
    hold(source)
    held, other = prepare(source, job()), prepare(source, job(body=b"other"), transaction=8)
    source._data(source.send(op, T, *([ROUTER] if op == Op.RESOLVE else [])))
    assert source.answer(held) == [0, [Vote.TOO_LATE, None]]
    source.step(MoveCommand.RESUME)
    assert source._data(other)[0] == Vote.YES
    assert source._data(source.send(Op.ADMIN, AdminCommand.TRANSACTIONS)) == 1


def test_an_enqueue_that_a_decision_sets_free_while_held_is_held_too(
    source: OwningShard, memory_cluster: Cluster
) -> None:
    prepare(source, job(key="k"))
    waits = enqueue(source, job(key="k"))
    assert not hold(source)
    source._data(source.send(Op.ABORT, T))
    assert source.answer(waits) is None
    assert hold(source)
    finish(memory_cluster)
    assert source.answer(waits) == [MOVED, 2]
    assert memory_cluster.shards[1].counts() == (0, 0, 0, 0)


def test_a_router_that_ends_takes_what_it_has_held_along(source: OwningShard) -> None:
    hold(source)
    gone, stays = enqueue(source, job(), router=OTHER_ROUTER), enqueue(source, job())
    source.router_gone(OTHER_ROUTER)
    source.step(MoveCommand.RESUME)
    assert (source.answer(gone), source.answer(stays) is not None) == (None, True)
    assert source.counts() == (1, 0, 0, 0)


# ---- time while held


def test_no_timer_changes_what_is_held_and_all_act_at_the_target_in_time(
    source: OwningShard, memory_cluster: Cluster
) -> None:
    target = memory_cluster.shards[1]
    source.enqueue_all(job(body=b"dead"), job(body=b"leased"), job(key="k"), job(due_ms=WALL_START_MS + 50))
    source.nack(source.reserve_one(), Strategy.DEAD_LETTER)
    source.reserve_one(lease_ms=50)
    source.confirm(*range(1, source.last_op + 1))
    assert hold(source)
    memory_cluster.copy_changes()
    before = source.rows_of([Q])
    source.pass_time(30_000)
    assert source.rows_of([Q]) == before
    memory_cluster.switch([Q])
    assert target.counts() == (1, 1, 1, 1)
    target.pass_time(30_000)
    assert target.counts() == (3, 0, 0, 0)
    assert isinstance(target.enqueue(key="k"), bytes)


def test_timers_that_were_due_while_held_act_when_the_slots_stay(source: OwningShard) -> None:
    source.enqueue(due_ms=WALL_START_MS + 50)
    assert hold(source)
    source.pass_time(1_000)
    assert source.counts() == (0, 1, 0, 0)
    source.step(MoveCommand.RESUME)
    assert source.next_wake_ms() == 0
    source.pass_time()
    assert source.counts() == (1, 0, 0, 0)


def test_a_shard_that_holds_does_not_spin_on_timers_that_are_due(source: OwningShard) -> None:
    source.enqueue(due_ms=WALL_START_MS + 50)
    assert hold(source)
    source.pass_time(1_000)
    wait_ms = source.next_wake_ms()
    assert wait_ms is not None and wait_ms > 0


def test_nothing_is_stored_of_what_was_held_and_sent_back(source: OwningShard, memory_cluster: Cluster) -> None:
    assert hold(source)
    enqueue(source, job(key="k"), job(STAYS))
    source.reserve(STAYS, lease_ms=LEASE_MS)
    finish(memory_cluster)
    source.pass_time()
    assert [len(rows(source.store, family)) for family in (Family.JOBS, Family.DEDUP, Family.QUEUES)] == [0, 0, 0]
    assert source._data(source.send(Op.ADMIN, AdminCommand.TRANSACTIONS)) == 0
