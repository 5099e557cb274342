"""Slots that move from one shard to another: what comes along, what stays behind, and who answers for it."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common import job_ids
from common.slots import SLOT_COUNT, slot_of
from common.wire import MOVED, AdminCommand, MoveCommand, Op, Outcome, Strategy
from shard import keys
from shard.machine import NOT_FOUND, Machine
from shard.migration import SWEEP_ROWS
from shard.store import Family, StoreError
from shard.store_memory import MemoryStore
from tests.unit import shard_driver
from tests.unit.shard_driver import (
    LEASE_MS,
    OTHER_ROUTER,
    ROUTER,
    WALL_START_MS,
    Cluster,
    MemoryHome,
    OwningShard,
    RocksHome,
    bodies,
    job,
)

cluster = shard_driver.cluster

Q = slot_of("q")
STAYS = "stays"
assert slot_of(STAYS) != Q


@pytest.fixture
def memory_cluster() -> Cluster:
    return Cluster([MemoryHome(), MemoryHome()])


def moved(shard: OwningShard, op_id: int) -> bool:
    """Whether an operation was sent back, by the map that holds now."""
    return shard.answer(op_id) == [MOVED, shard.cluster.epoch]


def told(shard: OwningShard, command: AdminCommand, *arguments: object) -> Any:
    return shard._data(shard.send(Op.ADMIN, command, *arguments))


def state_of_all_kinds(shard: OwningShard) -> None:
    """A queue with jobs in every state, of several priorities and attempts, and keys."""
    for each in shard.cluster.shards:
        each.configure(dead_letter_retention_ms=600_000)
    shard.enqueue_all(
        job(body=b"dead"), job(body=b"nacked"), job(body=b"leased", key="k"), job(body=b"low"), job(body=b"low 2")
    )
    dead, nacked, _ = shard.reserve(max_jobs=3)
    shard.confirm(shard.last_op)
    shard.nack(dead, Strategy.DEAD_LETTER, reason="of no use")
    shard.nack(nacked)
    shard.enqueue_all(job(body=b"high", priority=9), job(body=b"later", due_ms=WALL_START_MS + 5_000, key="l"))


# ---- what comes along


def test_every_record_of_a_slot_moves_as_it_is_and_nothing_stays_behind(cluster: Cluster) -> None:
    source, target = cluster.shards
    state_of_all_kinds(source)
    source.enqueue(STAYS)
    before = source.rows_of([Q])
    cluster.move([Q])
    assert target.rows_of([Q]) == before
    cluster.pass_time()
    assert source.rows_of([Q]) == []
    assert (source.counts(), target.counts()) == ((0, 0, 0, 0), (4, 1, 1, 1))
    assert source.drain(STAYS) == [b""]


def test_what_changes_while_it_is_read_moves_too(cluster: Cluster) -> None:
    source, target = cluster.shards
    names = ("q", *(f"more-{number}" for number in range(20)))
    slots = sorted({slot_of(name) for name in names})
    drawn = random.Random(5)
    source.configure(dead_letter_retention_ms=600_000)
    cluster.clear(slots)
    out: list[Any] = []
    source.step(MoveCommand.OPEN, slots)
    done = False
    for number in range(1_000):
        for _ in range(drawn.randrange(3)):
            name = drawn.choice(names)
            match drawn.randrange(5):
                case 0 | 1:
                    key = str(number) if drawn.random() < 0.3 else None
                    due_ms = WALL_START_MS + drawn.choice((0, 50, 100_000))
                    source.enqueue(name, b"%d" % number, priority=drawn.randrange(10), due_ms=due_ms, key=key)
                case 2:
                    out += source.reserve(name, lease_ms=drawn.choice((20, 60_000)))
                    source.confirm(source.last_op)
                case 3 if out:
                    source.ack(out.pop(drawn.randrange(len(out))))
                case 4 if out:
                    source.nack(out.pop(drawn.randrange(len(out))), drawn.choice(list(Strategy)), delay_ms=70)
        source.pass_time(drawn.randrange(5))
        target.pass_time(source.wall_ms - target.wall_ms)
        if not done:
            done = cluster.copy_part(part_bytes=drawn.choice((1, 200)))
        elif number > 300:
            break
    assert done
    cluster.copy_changes(part_bytes=50)
    assert source.step(MoveCommand.HOLD) is True
    cluster.copy_changes(part_bytes=50)
    expected = source.rows_of(slots)
    counts = source.machine.counts()
    cluster.switch(slots)
    assert target.rows_of(slots) == expected
    assert target.machine.counts() == counts
    assert len(expected) > 100


def test_order_and_priorities_and_attempts_move(cluster: Cluster) -> None:
    source, target = cluster.shards
    state_of_all_kinds(source)
    cluster.move([Q])
    found = target.reserve(max_jobs=10)
    assert [(each.body, each.attempt) for each in found] == [
        (b"high", 1),
        (b"nacked", 2),
        (b"low", 1),
        (b"low 2", 1),
    ]


def test_new_jobs_come_after_those_that_moved_and_no_id_comes_twice(cluster: Cluster) -> None:
    source, target = cluster.shards
    first = source.enqueue(body=b"1")
    cluster.move([Q])
    second = target.enqueue(body=b"2")
    cluster.move([Q], source=1, target=0)
    third = source.enqueue(body=b"3")
    assert job_ids.sequence(first) < job_ids.sequence(second) < job_ids.sequence(third)
    assert source.drain() == [b"1", b"2", b"3"]


def test_a_slot_whose_queues_are_gone_takes_its_numbers_along(cluster: Cluster) -> None:
    source, target = cluster.shards
    job_id = source.enqueue()
    source.drain()
    cluster.pass_time(20_000)
    assert [family for family, _, _ in source.rows_of([Q])] == [Family.SLOTS]
    cluster.move([Q])
    assert job_ids.sequence(target.enqueue()) > job_ids.sequence(job_id)


def test_a_lease_of_before_the_move_is_acked_at_the_target(cluster: Cluster) -> None:
    source, target = cluster.shards
    source.enqueue()
    leased = source.reserve_one()
    source.confirm(source.last_op)
    cluster.move([Q])
    op_id = source.send(Op.ACK, leased.job_id, leased.attempt)
    assert moved(source, op_id)
    assert target.ack(leased) == 0
    assert target.ack(leased) == NOT_FOUND


def test_a_lease_runs_on_at_the_target_and_ends_when_it_would_have_ended(cluster: Cluster) -> None:
    source, target = cluster.shards
    source.enqueue()
    source.reserve_one()
    source.confirm(source.last_op)
    cluster.pass_time(LEASE_MS - 1_000)
    cluster.move([Q])
    cluster.pass_time(999)
    assert target.reserve() == []
    cluster.pass_time(1)
    assert target.reserve_one().attempt == 2


def test_a_scheduled_job_is_ready_at_its_time_at_the_target(cluster: Cluster) -> None:
    source, target = cluster.shards
    source.enqueue(due_ms=WALL_START_MS + 5_000)
    cluster.move([Q])
    cluster.pass_time(4_999)
    assert target.reserve() == []
    cluster.pass_time(1)
    assert len(target.reserve()) == 1


def test_a_key_of_before_the_move_names_its_job_until_its_window_ends(cluster: Cluster) -> None:
    source, target = cluster.shards
    for shard in cluster.shards:
        shard.configure(dedup_window_ms=10_000)
    job_id = source.enqueue(key="k")
    cluster.move([Q])
    assert target.enqueue(key="k") == [Outcome.DEDUPLICATED, job_id]
    cluster.pass_time(10_000)
    assert isinstance(target.enqueue(key="k"), bytes)


def test_dead_letters_move_with_their_reasons_and_are_drained_at_the_target(cluster: Cluster) -> None:
    source, target = cluster.shards
    state_of_all_kinds(source)
    cluster.move([Q])
    assert source.drain_dead() == []
    (letter,) = target.drain_dead()
    assert (letter.body, letter.reason, letter.final_attempt) == (b"dead", "of no use", 1)


def test_a_queue_that_is_being_deleted_is_so_at_the_target(cluster: Cluster) -> None:
    source, target = cluster.shards
    source.enqueue()
    number, in_flight = told(source, AdminCommand.CLOSE, "q", 0, False)
    cluster.move([Q])
    assert target.enqueue() == [Outcome.QUEUE_CLOSING]
    cursor: bytes | None = b""
    while cursor is not None:
        *_, cursor = told(target, AdminCommand.REMOVE, "q", number, cursor)
    assert (in_flight, target.counts()) == (0, (0, 0, 0, 0))
    assert isinstance(target.enqueue(), bytes)


def test_the_time_of_the_target_does_not_run_behind_that_of_the_move(memory_cluster: Cluster) -> None:
    target = memory_cluster.shards[1]
    memory_cluster.clear([Q])
    target.step(MoveCommand.RECEIVE, [], target.wall_ms + 60_000)
    memory_cluster.switch([Q])
    assert job_ids.accepted_at_ms(target.enqueue()) == WALL_START_MS + 60_000


def test_a_queue_moves_forth_and_back_and_nothing_that_was_acked_comes_back(cluster: Cluster) -> None:
    source, target = cluster.shards
    source.enqueue_all(*(job(body=b"%d" % number) for number in range(6)))
    served = [source.reserve_one().body]
    assert source.ack(source.reserve_one()) == 0
    source.confirm(*range(1, source.last_op + 1))
    for start, end in ((0, 1), (1, 0), (0, 1)):
        cluster.move([Q], source=start, target=end)
        leased = cluster.shards[end].reserve_one()
        cluster.shards[end].confirm(cluster.shards[end].last_op)
        assert cluster.shards[end].ack(leased) == 0
        served.append(leased.body)
    assert served == [b"0", b"2", b"3", b"4"]
    assert target.counts() == (1, 0, 1, 0)
    assert source.counts() == (0, 0, 0, 0)


def test_several_slots_move_at_once_and_the_others_stay(cluster: Cluster) -> None:
    source, target = cluster.shards
    names = [f"queue-{number}" for number in range(10)]
    source.enqueue_all(*(job(name, name.encode()) for name in names))
    going = sorted({slot_of(name) for name in names[:5]})
    cluster.move(going, part_bytes=1)
    gone = [name for name in names if slot_of(name) in going]
    stayed = [name for name in names if slot_of(name) not in going]
    assert target.drain(*gone) == [name.encode() for name in gone]
    assert source.drain(*stayed) == [name.encode() for name in stayed]


def test_records_that_were_set_aside_move_too(cluster: Cluster) -> None:
    source, target = cluster.shards
    source.enqueue(body=b"whole")
    source.enqueue(body=b"damaged", priority=9)
    key, _ = next(row for row in shard_driver.rows(source.store, Family.JOBS) if row[1].endswith(b"damaged"))
    source.restart()
    source.store.put(Family.JOBS, key, b"torn")
    source.store.write()
    cluster.clear([Q])
    source.step(MoveCommand.OPEN, [Q])
    cluster.copy()
    assert source.drain() == [b"whole"]
    source.confirm(*range(1, source.last_op))
    assert source.step(MoveCommand.HOLD) is True
    cluster.copy_changes()
    cluster.switch([Q])
    source.pass_time()
    assert target.store.get(Family.META, keys.SET_ASIDE + key) == b"torn"
    assert source.store.get(Family.META, keys.SET_ASIDE + key) is None


# ---- who is asked after the switch


def test_operations_on_a_slot_that_has_moved_are_sent_back_and_change_nothing(memory_cluster: Cluster) -> None:
    source = memory_cluster.shards[0]
    source.enqueue(STAYS)
    memory_cluster.move([Q])
    source.pass_time()
    before = [shard_driver.rows(source.store, family) for family in Family if family is not Family.META]
    wanted = [list(job("q")), list(job(STAYS))]
    sent = [
        source.send(Op.ENQUEUE, b"123456", wanted),
        source.send(Op.ENQUEUE_ATOMIC, b"123456", wanted),
        source.send(Op.RESERVE, [STAYS, "q"], 1, LEASE_MS, False, 1 << 20, 0),
        source.send(Op.WATCH, ["q"]),
        source.send(Op.DRAIN, "q", 1, 1 << 20),
        source.send(Op.KNOWN, ["q"]),
        source.send(Op.PREPARE, 7, 0, b"123", [list(job("q"))]),
        source.send(Op.ADMIN, AdminCommand.QUEUE, "q"),
        source.send(Op.ADMIN, AdminCommand.FIND, job_ids.make(1, Q, 1, 1), b""),
    ]
    assert [moved(source, op_id) for op_id in sent] == [True] * len(sent)
    assert [shard_driver.rows(source.store, family) for family in Family if family is not Family.META] == before


def test_a_parked_poll_is_sent_back_at_the_switch(memory_cluster: Cluster) -> None:
    source = memory_cluster.shards[0]
    lost, of_both, stays = source.park("q"), source.watch(STAYS, "q"), source.park(STAYS)
    memory_cluster.move([Q])
    assert moved(source, lost) and moved(source, of_both)
    source.enqueue(STAYS, b"x")
    assert bodies(source.jobs_for(stays)) == [b"x"]
    assert len(source.machine._waiting) == 0


def test_a_watch_that_was_woken_before_the_switch_is_not_answered_twice(memory_cluster: Cluster) -> None:
    source = memory_cluster.shards[0]
    watch = source.watch("q", STAYS)
    source.enqueue()
    assert source.is_woken(watch)
    memory_cluster.move([Q])
    assert source.is_woken(watch)
    claim = source.park("q", settles=watch)
    assert moved(source, claim)
    assert (len(source.machine._waiting), source.machine._waiting._lines) == (0, {})


def test_a_watch_that_another_queue_woke_keeps_its_promise_when_a_slot_leaves(memory_cluster: Cluster) -> None:
    source = memory_cluster.shards[0]
    first, second, third = source.watch(STAYS, "q"), source.watch(STAYS), source.watch("q")
    source.enqueue(STAYS)
    assert source.is_woken(first)
    memory_cluster.move([Q])
    assert source.answer(second) is None and moved(source, third)
    source.cancel(first)
    assert source.is_woken(second)


def test_a_reserve_that_has_moved_settles_its_watch(memory_cluster: Cluster) -> None:
    source = memory_cluster.shards[0]
    first, second = source.watch(STAYS), source.watch(STAYS)
    source.enqueue(STAYS)
    memory_cluster.move([Q])
    assert moved(source, source.park(STAYS, "q", settles=first))
    assert source.is_woken(second)


def test_enqueues_that_wait_for_a_decision_elsewhere_are_sent_back_at_the_switch(memory_cluster: Cluster) -> None:
    source = memory_cluster.shards[0]
    source.configure([{"name": STAYS, "max_queue_depth": 1}])
    source._data(source.send(Op.PREPARE, 7, 0, b"123", [list(job(STAYS, key="k"))]))
    for_key = source.send(Op.ENQUEUE, b"123456", [list(job(STAYS, key="k")), list(job("q"))])
    for_place = source.send(Op.ENQUEUE, b"123456", [list(job("q")), list(job(STAYS))])
    behind = source.send(Op.ENQUEUE, b"123", [list(job(STAYS, body=b"x"))])
    memory_cluster.move([Q])
    assert moved(source, for_key) and moved(source, for_place)
    assert source.answer(behind) is None
    source._data(source.send(Op.ABORT, 7))
    assert moved(source, for_key) and moved(source, for_place)  # and not once more
    assert source.drain(STAYS) == [b"x"]


def test_confirms_and_returns_of_claims_that_have_moved_are_taken_and_do_nothing(memory_cluster: Cluster) -> None:
    source, target = memory_cluster.shards
    source.enqueue_all(job(), job(STAYS))
    source.reserve("q", STAYS, max_jobs=2)
    claim = source.last_op
    source.confirm(claim)
    memory_cluster.move([Q])
    source.confirm(claim)
    source.give_back(claim)
    assert (source.counts(STAYS), target.counts()) == ((0, 0, 1, 0), (0, 0, 1, 0))


# ---- maps


def test_an_envelope_by_an_older_map_is_applied_where_its_slots_have_stayed(memory_cluster: Cluster) -> None:
    source = memory_cluster.shards[0]
    memory_cluster.move([Q])
    source.machine.apply(ROUTER, [901, Op.KNOWN, [STAYS]], source.now, epoch=1)
    source.machine.apply(ROUTER, [902, Op.KNOWN, ["q"]], source.now, epoch=1)
    source._take()
    assert source.answer(901) == [0, [False]]
    assert moved(source, 902)


def test_operations_by_a_map_that_is_not_known_here_yet_wait_for_it_in_order(memory_cluster: Cluster) -> None:
    source, target = memory_cluster.shards
    source.enqueue(body=b"0")
    memory_cluster.clear([Q])
    source.step(MoveCommand.OPEN, [Q])
    memory_cluster.copy()
    source.step(MoveCommand.HOLD)
    memory_cluster.replace_map([Q])
    for number, body in ((901, b"1"), (902, b"2")):
        target.machine.apply(ROUTER, [number, Op.ENQUEUE, b"123", [list(job(body=body))]], target.now, epoch=2)
    target.machine.apply(ROUTER, [903, Op.RESERVE, ["q"], 10, LEASE_MS, True, 1 << 20, 0], target.now, epoch=2)
    target._take()
    assert [target.answer(number) for number in (901, 902, 903)] == [None, None, None]
    target.told_map()
    assert bodies(target.jobs_for(903)) == [b"0", b"1", b"2"]
    source.told_map()


def test_what_waits_for_a_map_goes_with_its_router_or_its_cancellation(memory_cluster: Cluster) -> None:
    target = memory_cluster.shards[1]
    memory_cluster.replace_map([Q])
    reserve = [Op.RESERVE, ["q"], 1, LEASE_MS, True, 1 << 20, 0]
    target.machine.apply(OTHER_ROUTER, [901, *reserve], target.now, epoch=2)
    target.machine.apply(ROUTER, [902, *reserve], target.now, epoch=2)
    target.machine.apply(ROUTER, [903, Op.CANCEL, 902], target.now, epoch=2)
    target.router_gone(OTHER_ROUTER)
    target.told_map()
    target.enqueue()
    assert target.counts() == (1, 0, 0, 0)
    assert target.answer(903) == [0, None]


def test_a_promise_that_waits_for_a_map_is_not_made_when_its_transaction_is_aborted(memory_cluster: Cluster) -> None:
    target = memory_cluster.shards[1]
    memory_cluster.replace_map([Q])
    target.machine.apply(ROUTER, [901, Op.PREPARE, 7, 0, b"123", [list(job())]], target.now, epoch=2)
    target.machine.apply(ROUTER, [902, Op.ABORT, 7], target.now, epoch=2)
    target.told_map()
    assert target.answer(902) == [0, None]
    assert told(target, AdminCommand.TRANSACTIONS) == 0
    assert target.counts() == (0, 0, 0, 0)


def test_a_shard_refuses_a_map_that_is_older_than_one_by_which_it_has_served(cluster: Cluster) -> None:
    source = cluster.shards[0]
    cluster.move([Q])
    source.restart()
    cluster.epoch = 1
    with pytest.raises(StoreError) as refused:
        source.restart()
    cluster.epoch = 2
    source.start()
    assert "map 2" in str(refused.value) and "map 1" in str(refused.value)
    assert "restore the slots.json" in str(refused.value)


def test_a_shard_that_has_only_known_the_first_map_writes_nothing_of_it() -> None:
    store = MemoryStore()
    Machine(store, shard_driver.Config(), shard_driver.Instant(WALL_START_MS, 0), 0)
    assert not any(store.pending)


# ---- crashes


def halfway(cluster: Cluster) -> None:
    """A move of which all is copied and synced, and the map not yet replaced."""
    source = cluster.shards[0]
    state_of_all_kinds(source)
    cluster.clear([Q])
    source.step(MoveCommand.OPEN, [Q])
    cluster.copy()
    assert source.step(MoveCommand.HOLD) is True
    cluster.copy_changes()


def test_a_source_that_crashes_before_the_switch_serves_on_and_the_target_deletes_its_copy(cluster: Cluster) -> None:
    source, target = cluster.shards
    halfway(cluster)
    source.restart()
    target.restart()
    cluster.pass_time()
    assert source.counts() == (4, 1, 1, 1)
    assert target.rows_of([Q]) == []
    assert target.counts() == (0, 0, 0, 0)


def test_a_source_that_crashes_after_the_switch_deletes_what_it_has_and_the_target_serves(cluster: Cluster) -> None:
    source, target = cluster.shards
    halfway(cluster)
    cluster.replace_map([Q])
    source.restart()
    target.restart()
    cluster.pass_time()
    assert source.rows_of([Q]) == []
    assert target.counts() == (4, 1, 1, 1)
    assert bodies(target.reserve(max_jobs=10)) == [b"high", b"nacked", b"low", b"low 2"]


def test_a_target_that_was_started_again_refuses_what_the_move_goes_on_to_send(memory_cluster: Cluster) -> None:
    target = memory_cluster.shards[1]
    halfway(memory_cluster)
    target.restart()
    assert "expects no slots" in target.refusal(MoveCommand.RECEIVE, [], WALL_START_MS)


def test_a_crash_in_the_middle_of_deleting_leaves_the_rest_to_the_next_start(cluster: Cluster) -> None:
    source = cluster.shards[0]
    body = b"x" * 1_000
    for _ in range(4):
        source.enqueue_all(*(job(body=body) for _ in range(600)))
    cluster.move([Q])
    source.tick()
    assert 0 < len(source.rows_of([Q])) < 2_402
    source.restart()
    assert source.counts() == (0, 0, 0, 0)
    cluster.pass_time()
    assert source.rows_of([Q]) == []


def test_deleting_goes_in_steps_and_other_queues_are_served_in_between(memory_cluster: Cluster) -> None:
    source = memory_cluster.shards[0]
    for _ in range(3):
        source.enqueue_all(*(job() for _ in range(1_000)))
    memory_cluster.move([Q])
    left = [len(source.rows_of([Q]))]
    while source.tick():
        left.append(len(source.rows_of([Q])))
        source.enqueue(STAYS)
        assert source.next_wake_ms() == 0
    assert source.rows_of([Q]) == []
    steps = [before - after for before, after in pairwise([*left, 0])]
    assert (left[0], len(steps)) == (3_002, 4)
    assert max(steps) <= SWEEP_ROWS


def test_slots_with_next_to_nothing_are_deleted_in_steps_too(memory_cluster: Cluster) -> None:
    source = memory_cluster.shards[0]
    names = [f"queue-{number}" for number in range(400)]
    source.enqueue_all(*(job(name) for name in names))
    memory_cluster.move(sorted({slot_of(name) for name in names}))
    steps = 1
    while source.tick():
        steps += 1
    assert steps > 10
    assert shard_driver.rows(source.store, Family.SLOTS) == []


def test_deleting_goes_on_where_it_was_and_not_over_what_it_has_deleted(
    memory_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = memory_cluster.shards[0]
    for _ in range(3):
        source.enqueue_all(*(job() for _ in range(1_000)))
    memory_cluster.move([Q])
    seen: list[tuple[Family, bytes]] = []
    scan = source.store.scan

    def noted(family: Family, start: bytes, *terms: Any) -> list[tuple[bytes, bytes]]:
        seen.append((family, start))
        return scan(family, start, *terms)

    monkeypatch.setattr(source.store, "scan", noted)
    source.pass_time()
    starts = [start for family, start in seen if family is Family.JOBS]
    assert len(starts) == 4
    assert starts == sorted(set(starts))
    assert [key for family, key in seen if family is Family.SLOTS] == [keys.slot_prefix(Q)]


def test_a_move_after_a_given_up_one_starts_from_nothing(cluster: Cluster) -> None:
    source, target = cluster.shards
    source.enqueue_all(job(body=b"1"), job(body=b"2"))
    cluster.clear([Q])
    source.step(MoveCommand.OPEN, [Q])
    cluster.copy()
    source.step(MoveCommand.RESUME)
    target.step(MoveCommand.DISCARD)
    assert source.drain() == [b"1", b"2"]
    source.enqueue(body=b"3")
    cluster.move([Q])
    assert target.drain() == [b"3"]


# ---- routers that end


def test_the_end_of_the_router_that_moves_gives_the_move_up_on_both_sides(cluster: Cluster) -> None:
    source, target = cluster.shards
    halfway(cluster)
    held = source.send(Op.ENQUEUE, b"123", [list(job(body=b"held"))], router=OTHER_ROUTER)
    of_the_dead = source.send(Op.ENQUEUE, b"123", [list(job(body=b"never"))])
    for shard in cluster.shards:
        shard.router_gone(ROUTER)
    cluster.pass_time()
    assert source.answer(held) is not None and source.answer(of_the_dead) is None
    assert target.rows_of([Q]) == []
    assert source.counts() == (5, 1, 1, 1)
    assert "knows of no move" in source.refusal(MoveCommand.CHANGES, 100, router=OTHER_ROUTER)


def test_the_end_of_another_router_takes_only_what_it_has_waiting(memory_cluster: Cluster) -> None:
    source, target = memory_cluster.shards
    halfway(memory_cluster)
    gone = source.park("q", router=OTHER_ROUTER)
    for shard in memory_cluster.shards:
        shard.router_gone(OTHER_ROUTER)
    memory_cluster.switch([Q])
    assert source.answer(gone) is None
    assert target.counts() == (4, 1, 1, 1)


# ---- steps that are refused


def test_steps_that_make_no_sense_are_refused(memory_cluster: Cluster) -> None:
    source, target = memory_cluster.shards
    assert "does not own" in target.refusal(MoveCommand.OPEN, [Q])
    assert "owns some of these" in source.refusal(MoveCommand.CLEAR, [Q])
    for command, arguments in ((MoveCommand.READ, [1]), (MoveCommand.CHANGES, [1]), (MoveCommand.HOLD, [])):
        assert "knows of no move" in source.refusal(command, *arguments)
    assert "expects no slots" in target.refusal(MoveCommand.RECEIVE, [], WALL_START_MS)
    source.step(MoveCommand.RESUME)
    target.step(MoveCommand.DISCARD)


def test_a_shard_whose_disk_is_almost_full_takes_no_slots_and_says_why(memory_cluster: Cluster) -> None:
    source, target = memory_cluster.shards
    memory_cluster.clear([Q])
    target.machine.shortage = "the disk is almost full"
    text = target.refusal(MoveCommand.RECEIVE, [], WALL_START_MS)
    assert text == "shard 1 takes no slots: the disk is almost full"
    source.machine.shortage = "the disk is almost full"
    source.step(MoveCommand.OPEN, [Q])  # giving slots away is what makes room


def test_another_router_cannot_take_part_in_a_move(memory_cluster: Cluster) -> None:
    source, target = memory_cluster.shards
    memory_cluster.clear([Q])
    source.step(MoveCommand.OPEN, [Q])
    assert "knows of no move" in source.refusal(MoveCommand.READ, 1, router=OTHER_ROUTER)
    assert "expects no slots" in target.refusal(MoveCommand.RECEIVE, [], WALL_START_MS, router=OTHER_ROUTER)


def test_an_operator_sees_nothing_of_slots_that_arrive_or_are_being_deleted(memory_cluster: Cluster) -> None:
    source, target = memory_cluster.shards
    halfway(memory_cluster)
    assert told(target, AdminCommand.QUEUES, b"") == ([], None)
    assert told(target, AdminCommand.DEAD, b"", 10) == ([], None)
    assert told(target, AdminCommand.TOTALS, b"")[0] == (0, 0, 0, 0, 0, 0, 0)
    memory_cluster.switch([Q])
    assert source.rows_of([Q]) != []
    assert told(source, AdminCommand.QUEUES, b"") == ([], None)
    assert told(source, AdminCommand.DEAD, b"", 10) == ([], None)
    assert [row.name for row in told(target, AdminCommand.QUEUES, b"")[0]] == ["q"]


def test_a_shard_says_how_many_transactions_it_keeps(memory_cluster: Cluster) -> None:
    source = memory_cluster.shards[0]
    source._data(source.send(Op.PREPARE, 7, 0, b"123", [list(job())]))
    source._data(source.send(Op.PREPARE, 8, 1, b"123", [list(job())]))
    assert told(source, AdminCommand.TRANSACTIONS) == 2
    source._data(source.send(Op.DECIDE, 7, [1]))
    source._data(source.send(Op.ABORT, 8))
    assert told(source, AdminCommand.TRANSACTIONS) == 1
    source._data(source.send(Op.FORGET, 7))
    assert told(source, AdminCommand.TRANSACTIONS) == 0


def test_random_lives_move_to_and_fro_and_end_as_they_would_have_without(tmp_path: Path) -> None:
    """The same operations on a shard alone and on two between which the queue moves every now and then."""
    drawn = random.Random(11)
    cluster = Cluster([RocksHome(tmp_path / "0"), MemoryHome()])
    alone = Cluster([MemoryHome()])
    for shard in (*cluster.shards, *alone.shards):
        shard.configure(dead_letter_retention_ms=600_000)
    served: list[list[tuple[bytes, int]]] = [[], []]
    out: list[list[Any]] = [[], []]
    owner = 0
    for number in range(400):
        kind, priority, pick = drawn.randrange(6), drawn.randrange(10), drawn.random()
        for side, shard in enumerate((cluster.shards[owner], alone.shards[0])):
            if kind <= 1:
                shard.enqueue(body=b"%d" % number, priority=priority, due_ms=shard.wall_ms + drawn.choice((0,)))
            elif kind == 2:
                found = shard.reserve(max_jobs=2, lease_ms=300)
                shard.confirm(shard.last_op)
                served[side] += [(each.body, each.attempt) for each in found]
                out[side] += found
            elif kind == 3 and out[side]:
                shard.ack(out[side].pop(int(pick * len(out[side]))))
            elif kind == 4 and out[side]:
                shard.nack(out[side].pop(int(pick * len(out[side]))), delay_ms=40, strategy=Strategy.DELAY)
        cluster.pass_time(10)
        alone.pass_time(10)
        if kind == 5:
            cluster.move([Q], source=owner, target=1 - owner, part_bytes=300)
            owner = 1 - owner
    assert served[0] == served[1]
    assert len(served[0]) > 50
    assert cluster.shards[owner].counts() == alone.shards[0].counts()
    cluster.pass_time()
    cluster.check()
    for shard in cluster.shards:
        shard.store.close()


def test_all_slots_can_leave(memory_cluster: Cluster) -> None:
    source, target = memory_cluster.shards
    source.enqueue_all(job(), job(STAYS))
    memory_cluster.move(range(SLOT_COUNT))
    source.pass_time()
    assert [key for key, _ in shard_driver.rows(source.store, Family.META)] == [keys.CLOCK, keys.EPOCH]
    assert all(not shard_driver.rows(source.store, family) for family in Family if family is not Family.META)
    assert target.counts(STAYS) == (1, 0, 0, 0)
