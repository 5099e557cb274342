"""The router's hand in a move of slots: its steps, what ends it early, and the change of the number of shards."""

from __future__ import annotations

from typing import Any

import pytest

from common.slots import slot_of
from common.wire import AdminCommand, MoveCommand, Op
from router.front import Status
from router.resharding import (
    CLEAR_RETRY_MS,
    HOLD_MAX_MS,
    HOLDS_MAX,
    LAST_ROWS,
    PART_BYTES,
    QUIET_RETRY_MS,
    ROUNDS_MAX,
    START_MS,
    Commit,
    MoveOutcome,
    Resize,
)
from tests.unit.router_driver import RouterDriver, queue_on

SLOT = slot_of(queue_on(0))
ROW = [1, b"key", b"value"]
SOURCE, TARGET = 0, 1


@pytest.fixture
def router() -> RouterDriver:
    return RouterDriver()  # many tests leave their move in the middle


class Moving:
    """A move of one slot from shard 0 to shard 1 that has begun."""

    def __init__(self, router: RouterDriver, bytes_per_second: int = 0) -> None:
        self.outcomes: list[MoveOutcome | str] = []
        self._router = router
        router.core.begin_move([SLOT], TARGET, bytes_per_second, self.outcomes.append, router.now)

    def step(self, shard: int, command: MoveCommand, data: object = None) -> list[Any]:
        """The step that comes next, and its answer; returns the arguments."""
        operation = self._router.shards[shard].operation()
        assert operation[1:3] == [Op.MOVE, command]
        self._router.shards[shard].answer(operation, data)
        return operation[3:]

    def copy(self) -> None:
        """All steps up to the first HOLD, of a slot that holds one row."""
        assert self.step(TARGET, MoveCommand.CLEAR, True) == [[SLOT]]
        assert self.step(SOURCE, MoveCommand.OPEN) == [[SLOT]]
        assert self.step(SOURCE, MoveCommand.READ, [[ROW], True]) == [PART_BYTES]
        assert self.step(TARGET, MoveCommand.RECEIVE) == [[ROW], self._router.now.wall_ms]
        self.step(SOURCE, MoveCommand.CHANGES, [[], 0])

    def finish(self) -> Commit:
        """From the HOLD on, with one last change, to the request."""
        self.step(SOURCE, MoveCommand.HOLD, True)
        self.step(SOURCE, MoveCommand.CHANGES, [[ROW], 0])
        self.step(TARGET, MoveCommand.RECEIVE)
        return self.request()

    def request(self) -> Commit:
        (request,) = self._router.core.requests
        self._router.core.requests.clear()
        assert isinstance(request, Commit)
        return request

    def is_let_go_of(self) -> bool:
        """Both sides hear that it was given up."""
        found = [[operation[1:] for operation in self._router.shards[shard].operations()] for shard in (SOURCE, TARGET)]
        return found == [[[Op.MOVE, MoveCommand.RESUME]], [[Op.MOVE, MoveCommand.DISCARD]]]


# ---- the way of a move


def test_a_move_copies_holds_copies_the_rest_and_asks_for_the_switch(router: RouterDriver) -> None:
    move = Moving(router)
    move.copy()
    generations = [shard.generation for shard in router.shards]
    assert move.finish() == Commit(1, [SLOT], TARGET, *generations)
    assert move.outcomes == []


def test_a_move_is_over_when_the_map_says_so(router: RouterDriver) -> None:
    move = Moving(router)
    move.copy()
    move.finish()
    router.pass_ms(7)
    router.core.map_changed(router.core.slot_map.moved([SLOT], TARGET), router.now)
    assert move.outcomes == [MoveOutcome(epoch=2, records=2, bytes=16, hold_ms=7)]


def test_a_large_slot_is_read_in_parts_each_of_which_is_received_before_the_next(router: RouterDriver) -> None:
    move = Moving(router)
    move.step(TARGET, MoveCommand.CLEAR, True)
    move.step(SOURCE, MoveCommand.OPEN)
    for _ in range(3):
        move.step(SOURCE, MoveCommand.READ, [[ROW], False])
        assert router.shards[SOURCE].operations() == []
        move.step(TARGET, MoveCommand.RECEIVE)
    move.step(SOURCE, MoveCommand.READ, [[], True])
    move.step(SOURCE, MoveCommand.CHANGES, [[], 0])
    assert router.shards[SOURCE].operation()[2] == MoveCommand.HOLD


def test_changes_go_over_round_by_round_until_a_round_is_small(router: RouterDriver) -> None:
    move = Moving(router)
    move.step(TARGET, MoveCommand.CLEAR, True)
    move.step(SOURCE, MoveCommand.OPEN)
    move.step(SOURCE, MoveCommand.READ, [[], True])
    for rows, left in ((1, 7), (LAST_ROWS + 1, 0), (LAST_ROWS, 0)):
        move.step(SOURCE, MoveCommand.CHANGES, [[ROW] * rows, left])
        move.step(TARGET, MoveCommand.RECEIVE)
    assert router.shards[SOURCE].operation()[2] == MoveCommand.HOLD


def test_a_slot_that_never_calms_down_is_held_all_the_same(router: RouterDriver) -> None:
    move = Moving(router)
    move.step(TARGET, MoveCommand.CLEAR, True)
    move.step(SOURCE, MoveCommand.OPEN)
    move.step(SOURCE, MoveCommand.READ, [[], True])
    for _ in range(ROUNDS_MAX):
        move.step(SOURCE, MoveCommand.CHANGES, [[ROW] * (LAST_ROWS + 1), 0])
        move.step(TARGET, MoveCommand.RECEIVE)
    assert router.shards[SOURCE].operation()[2] == MoveCommand.HOLD


def test_a_rate_limit_makes_pauses_between_parts(router: RouterDriver) -> None:
    move = Moving(router, bytes_per_second=1_000)
    move.step(TARGET, MoveCommand.CLEAR, True)
    move.step(SOURCE, MoveCommand.OPEN)
    move.step(SOURCE, MoveCommand.READ, [[[1, b"k" * 10, b"v" * 90]], False])
    move.step(TARGET, MoveCommand.RECEIVE)
    router.pass_ms(99)
    assert router.shards[SOURCE].operations() == []
    router.pass_ms(1)
    assert router.shards[SOURCE].operation()[2] == MoveCommand.READ


def test_the_target_is_asked_until_nothing_is_left_of_an_earlier_try(router: RouterDriver) -> None:
    move = Moving(router)
    for _ in range(3):
        move.step(TARGET, MoveCommand.CLEAR, False)
        assert router.shards[TARGET].operations() == []
        router.pass_ms(CLEAR_RETRY_MS)
    move.step(TARGET, MoveCommand.CLEAR, True)
    assert router.shards[SOURCE].operation()[2] == MoveCommand.OPEN


def test_a_target_that_is_just_starting_is_waited_for(router: RouterDriver) -> None:
    router.shards[TARGET].down()
    move = Moving(router)
    router.pass_ms(START_MS - 1)
    router.shards[TARGET].up()
    move.copy()
    assert move.outcomes == []


# ---- holding


def test_what_is_open_is_waited_for_a_moment(router: RouterDriver) -> None:
    move = Moving(router)
    move.copy()
    for _ in range(5):
        move.step(SOURCE, MoveCommand.HOLD, False)
        router.pass_ms(QUIET_RETRY_MS)
    move.finish()


def test_what_stays_open_ends_the_hold_and_it_is_tried_again_later(router: RouterDriver) -> None:
    move = Moving(router)
    move.copy()
    move.step(SOURCE, MoveCommand.HOLD, False)
    router.pass_ms(HOLD_MAX_MS)
    move.step(SOURCE, MoveCommand.HOLD, False)
    move.step(SOURCE, MoveCommand.PAUSE)
    assert router.shards[SOURCE].operations() == []
    router.pass_ms(HOLD_MAX_MS)
    move.step(SOURCE, MoveCommand.CHANGES, [[], 0])
    move.finish()


def test_what_never_ends_gives_the_move_up(router: RouterDriver) -> None:
    move = Moving(router)
    move.copy()
    for tries in range(HOLDS_MAX):
        move.step(SOURCE, MoveCommand.HOLD, False)
        router.pass_ms(HOLD_MAX_MS)
        move.step(SOURCE, MoveCommand.HOLD, False)
        if tries < HOLDS_MAX - 1:
            move.step(SOURCE, MoveCommand.PAUSE)
            router.pass_ms(10_000)
            move.step(SOURCE, MoveCommand.CHANGES, [[], 0])
    assert move.is_let_go_of()
    (why,) = move.outcomes
    assert why == (
        "workers take their answers so slowly that jobs of these slots are always on the way: the slots were not moved"
    )


# ---- what ends it early


@pytest.mark.parametrize("shard", [SOURCE, TARGET])
def test_the_end_of_a_shard_gives_the_move_up(router: RouterDriver, shard: int) -> None:
    move = Moving(router)
    move.copy() if shard == SOURCE else move.step(TARGET, MoveCommand.CLEAR, True)
    if shard == TARGET:
        move.step(SOURCE, MoveCommand.OPEN)
        move.step(SOURCE, MoveCommand.READ, [[ROW], True])
    router.shards[shard].operation()
    router.shards[shard].restart()
    assert move.is_let_go_of()
    assert move.outcomes == [f"shard {shard} ended meanwhile: the slots were not moved"]


def test_a_step_that_is_refused_gives_the_move_up_and_says_why(router: RouterDriver) -> None:
    move = Moving(router)
    move.step(TARGET, MoveCommand.CLEAR, True)
    router.shards[SOURCE].answer(router.shards[SOURCE].operation(), "it is not so", Status.FAILED_PRECONDITION)
    assert move.is_let_go_of()
    assert move.outcomes == ["it is not so: the slots were not moved"]


def test_a_switch_that_is_refused_gives_the_move_up(router: RouterDriver) -> None:
    move = Moving(router)
    move.copy()
    number = move.finish().number
    router.core.map_refused(number + 1, "another one", router.now)
    assert move.outcomes == []
    router.core.map_refused(number, "the disk is full", router.now)
    assert move.is_let_go_of()
    assert move.outcomes == ["the disk is full: the slots were not moved"]


def test_once_the_switch_is_asked_for_only_the_supervisor_ends_the_move(router: RouterDriver) -> None:
    move = Moving(router)
    move.copy()
    move.finish()
    for shard in router.shards:
        shard.restart()
    assert move.outcomes == []
    router.core.map_changed(router.core.slot_map.moved([SLOT], TARGET), router.now)
    assert isinstance(move.outcomes[0], MoveOutcome)


def test_a_second_move_is_refused_until_the_first_is_over(router: RouterDriver) -> None:
    first = Moving(router)
    assert Moving(router).outcomes == ["slots are being moved already: one move at a time"]
    first.copy()
    router.core.map_refused(first.finish().number, "no", router.now)
    assert first.is_let_go_of()
    third = Moving(router)
    third.copy()
    router.core.map_refused(third.finish().number, "no", router.now)
    assert third.is_let_go_of()


# ---- the number of shards


def test_adding_shards_asks_the_supervisor(router: RouterDriver) -> None:
    answers: list[str | None] = []
    router.core.set_shards(3, answers.append, router.now)
    assert router.core.requests == [Resize(1, 3)]
    router.core.requests.clear()
    router.core.map_changed(router.core.slot_map.resized(3), router.now)
    assert answers == [None]


def test_a_shard_goes_only_when_nobody_needs_its_decisions(router: RouterDriver) -> None:
    answers: list[str | None] = []
    router.core.set_shards(1, answers.append, router.now)
    question = router.shards[1].operation()
    assert question[1:] == [Op.ADMIN, AdminCommand.TRANSACTIONS]
    router.shards[1].answer(question, 2)
    assert answers == ["shard 1 keeps what became of 2 atomic batches until all have heard of it: try again"]
    router.core.set_shards(1, answers.append, router.now)
    router.shards[1].answer(router.shards[1].operation(), 0)
    assert router.core.requests == [Resize(1, 1)]
    router.core.requests.clear()
    router.core.map_refused(1, "not now", router.now)
    assert answers[1:] == ["not now"]
