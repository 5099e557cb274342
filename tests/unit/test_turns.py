"""A shard's turns, and which answers wait for which sync."""

from __future__ import annotations

import pytest

from common import wire
from common.config import Config
from common.slots import SLOT_COUNT
from common.wire import Op
from shard.commit import GroupCommit
from shard.machine import Machine
from shard.state import Instant
from shard.store import StoreBusy, StoreError
from shard.store_memory import MemoryStore
from shard.turns import INTERNAL, Turns
from tests.unit.shard_driver import MONO_START_MS, ROUTER, WALL_START_MS

NOW = Instant(WALL_START_MS, MONO_START_MS)
GENERATION = 7


def noted(commit: GroupCommit, *op_ids: int) -> None:
    for op_id in op_ids:
        commit.answers.add(ROUTER, [op_id, 0, None])


def op_ids(commit_answers: object) -> list[int]:
    assert commit_answers is not None
    results = commit_answers.results  # type: ignore[attr-defined]
    return [result[0] for result in results.get(ROUTER, [])]


# ---- the rule


def test_answers_of_a_turn_that_changed_nothing_leave_at_once() -> None:
    commit = GroupCommit()
    noted(commit, 1)
    assert op_ids(commit.written(False)) == [1]
    assert not commit.begins_sync()
    assert commit.is_idle


def test_answers_of_a_written_turn_wait_for_the_sync_that_began_after_it() -> None:
    commit = GroupCommit()
    noted(commit, 1)
    assert commit.written(True) is None
    assert commit.begins_sync()
    noted(commit, 2)
    assert commit.written(True) is None
    assert not commit.begins_sync(), "two syncs in the air"
    assert op_ids(commit.synced()) == [1]
    assert commit.begins_sync()
    assert op_ids(commit.synced()) == [2]
    assert commit.is_idle


def test_answers_of_a_turn_that_only_looked_wait_for_what_it_may_have_seen() -> None:
    commit = GroupCommit()
    noted(commit, 1)
    commit.written(True)
    commit.begins_sync()
    noted(commit, 2)
    assert commit.written(False) is None
    assert op_ids(commit.synced()) == [1, 2]
    assert commit.is_idle


def test_after_a_failure_every_answer_that_has_not_left_is_given_up() -> None:
    commit = GroupCommit()
    noted(commit, 1)
    commit.written(True)
    commit.begins_sync()
    noted(commit, 2)
    assert [op_ids(answers) for answers in commit.abandoned()] == [[1], [2]]


# ---- turns


class Driven:
    """Turns on a store in memory, whose syncs begin and end when the test says so."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.reach: list[int] = []
        self.machine = Machine(self.store, Config(), NOW, 0, [ROUTER])
        begin = lambda: self.reach.append(self.store.begin_sync())  # noqa: E731
        self.turns = Turns(self.machine, self.store, "shard-0", GENERATION, begin)

    def take(self, *operations: list[object], number: int = 1, generation: int = GENERATION) -> int | None:
        return self.turns.take(wire.pack(generation, ROUTER, number, list(operations)), NOW)

    def turn(self, *operations: list[object], number: int = 1) -> None:
        self.take(*operations, number=number)
        self.turns.close()
        self.turns.write()

    def end_sync(self) -> None:
        self.store.end_sync(self.reach.pop(0))
        self.turns.synced()

    def sent(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Number of each envelope that has left, with op id and status of its results."""
        envelopes = [wire.unpack(message) for _, message in self.turns.messages]
        self.turns.messages.clear()
        return [(envelope.number, [(result[0], result[1]) for result in envelope.items]) for envelope in envelopes]


def enqueue(op_id: int) -> list[object]:
    return [op_id, Op.ENQUEUE, b"\x01\x02\x03", [["q", 0, 3, 0, None, b""]]]


def test_a_result_leaves_when_its_write_is_durable() -> None:
    driven = Driven()
    driven.turn(enqueue(1))
    assert driven.sent() == []
    assert not driven.turns.is_idle
    driven.end_sync()
    assert driven.sent() == [(1, [(1, 0)])]
    assert driven.turns.is_idle


def test_turns_go_on_while_a_sync_runs_and_share_the_next_one() -> None:
    driven = Driven()
    for number in (1, 2, 3):
        driven.turn(enqueue(number), number=number)
    driven.end_sync()
    driven.end_sync()
    assert driven.sent() == [(1, [(1, 0)]), (3, [(2, 0), (3, 0)])]
    assert driven.reach == []


def test_an_envelope_for_another_process_or_from_a_router_that_has_ended_is_refused() -> None:
    driven = Driven()
    assert driven.take(enqueue(1), generation=GENERATION - 1) is None
    driven.turns.router_gone(ROUTER, NOW)
    assert driven.take(enqueue(2)) is None
    driven.turns.close()
    driven.turns.write()
    assert driven.sent() == []


def test_nothing_is_sent_to_a_router_that_has_ended() -> None:
    driven = Driven()
    driven.turn(enqueue(1))
    driven.turns.router_gone(ROUTER, NOW)
    driven.end_sync()
    assert driven.sent() == []


def test_a_write_that_would_stall_is_tried_again() -> None:
    driven = Driven()
    driven.store.refuse_writes = True
    driven.take(enqueue(1))
    driven.turns.close()
    with pytest.raises(StoreBusy):
        driven.turns.write()
    driven.store.refuse_writes = False
    driven.turns.write()
    driven.end_sync()
    assert driven.sent() == [(1, [(1, 0)])]


def test_after_a_failure_nothing_is_said_to_be_done_and_no_envelope_to_be_taken() -> None:
    driven = Driven()
    driven.turn(enqueue(1), number=1)
    driven.store.fail_next_write = True
    with pytest.raises(StoreError):
        driven.turn(enqueue(2), number=2)
    driven.turns.failed("no space left")
    assert driven.sent() == [(0, [(1, INTERNAL)]), (0, [(2, INTERNAL)])]


def test_answers_carry_the_epoch_of_the_map_that_is_known_here() -> None:
    driven = Driven()
    driven.turn([1, Op.KNOWN, ["q"]])
    driven.machine.map_changed(5, [0] * SLOT_COUNT, NOW)
    driven.turn([2, Op.KNOWN, ["q"]])
    driven.end_sync()
    assert [wire.unpack(message).epoch for _, message in driven.turns.messages] == [1, 5]


def test_operations_of_an_envelope_by_a_newer_map_wait_for_it_and_the_envelope_counts_as_taken() -> None:
    driven = Driven()
    driven.turns.take(wire.pack(GENERATION, ROUTER, 1, [enqueue(1), enqueue(2)], epoch=2), NOW)
    driven.turns.close()
    driven.turns.write()
    assert driven.sent() == [(1, [])]
    driven.machine.map_changed(2, [0] * SLOT_COUNT, NOW)
    driven.turn(number=2)
    driven.end_sync()
    assert driven.sent() == [(2, [(1, 0), (2, 0)])]
