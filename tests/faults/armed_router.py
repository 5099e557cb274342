"""A router process with the points in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.slots import SlotMap
from common.wire import MoveCommand, Op
from router.__main__ import main
from router.coordinator import Recovery, Transaction
from router.core import Core, Moment
from router.process import RouterProcess
from router.resharding import Move
from tests.faults.armed_points import (
    BEFORE_ANSWER,
    COMMIT_MOVE,
    LAST_CHANGES,
    ROUTER_POINTS,
    SHARD_GONE,
    SLOT_MAP,
    STARTING,
    Points,
    point,
    wrap,
)

points = Points(ROUTER_POINTS)


def shard_name(index: int) -> str:
    return f"shard-{index}"


def sent_by_transaction(
    original: Callable[..., None],
    self: Transaction,
    kind: Op,
    shard: int,
    arguments: list[object],
    size: int = 0,
    jobs: int = 1,
    transaction: int = 0,
) -> None:
    points.reach(point(kind, "sending"), shard_name(shard), transaction or self._id)
    original(self, kind, shard, arguments, size, jobs, transaction)


def answered_transaction(
    original: Callable[..., None], self: Transaction, op_id: int, status: int, data: object
) -> None:
    sent = self._out[op_id]
    points.reach(point(sent.kind, "answered"), shard_name(sent.shard), sent.transaction)
    original(self, op_id, status, data)
    points.reach(point(sent.kind, "taken"), shard_name(sent.shard), sent.transaction)


def sent_by_recovery(
    original: Callable[..., None], self: Recovery, kind: Op, shard: int, arguments: list[object]
) -> None:
    points.reach(point(kind, "sending"), shard_name(shard), self._id)
    original(self, kind, shard, arguments)


def answered_recovery(original: Callable[..., None], self: Recovery, op_id: int, status: int, data: object) -> None:
    kind, shard, _ = self._out[op_id]
    points.reach(point(kind, "answered"), shard_name(shard), self._id)
    original(self, op_id, status, data)
    points.reach(point(kind, "taken"), shard_name(shard), self._id)


def step_of(self: Move, command: MoveCommand) -> str:
    """What the points of a step are called by: `_is_quiet` means that the source holds, and nothing is open."""
    return LAST_CHANGES if command == MoveCommand.CHANGES and self._is_quiet else command


def sent_by_move(
    original: Callable[..., None], self: Move, shard: int, command: MoveCommand, *given: Any, **named: Any
) -> None:
    points.reach(point(step_of(self, command), "sending"), shard_name(shard))
    original(self, shard, command, *given, **named)


def answered_move(original: Callable[..., None], self: Move, op_id: int, status: int, data: object) -> None:
    if self._out is None or self._out[2].op_id != op_id:
        original(self, op_id, status, data)
        return
    command, outbound, _ = self._out
    step = step_of(self, command)
    points.reach(point(step, "answered"), shard_name(outbound.index))
    original(self, op_id, status, data)
    points.reach(point(step, "taken"), shard_name(outbound.index))


def asking_for_commit(original: Callable[..., None], self: Move) -> None:
    points.reach(point(COMMIT_MOVE, "sending"))
    original(self)


def taking_map(original: Callable[..., None], self: RouterProcess, slot_map: SlotMap) -> None:
    points.reach(point(SLOT_MAP, "arrived"))
    original(self, slot_map)
    points.reach(point(SLOT_MAP, "applied"))


def answering_calls(original: Callable[..., None], replies: list[Any]) -> None:
    if any(reply.call.method == "EnqueueAtomic" for reply in replies):
        points.reach(BEFORE_ANSWER)
    original(replies)


def hearing_of_an_end(original: Callable[..., None], self: Core, shard: int, generation: int, now: Moment) -> None:
    original(self, shard, generation, now)
    points.reach(SHARD_GONE, shard_name(shard))


def starting(original: Callable[..., int], self: RouterProcess) -> int:
    points.process = f"router-{self._start.index}"
    points.reach(STARTING)
    return original(self)


def arm() -> None:
    """Raises LookupError when a place in the code has moved."""
    sending = ("self", "kind", "shard", "arguments")
    wrap(Transaction, "_send", (*sending, "size", "jobs", "transaction"), sent_by_transaction)
    wrap(Transaction, "result", ("self", "op_id", "status", "data"), answered_transaction)
    wrap(Recovery, "_send", sending, sent_by_recovery)
    wrap(Recovery, "result", ("self", "op_id", "status", "data"), answered_recovery)
    wrap(Move, "_send", ("self", "shard", "command", "arguments", "size"), sent_by_move)
    wrap(Move, "result", ("self", "op_id", "status", "data"), answered_move)
    wrap(Move, "_ask_for_commit", ("self",), asking_for_commit)
    wrap(Core, "shard_down", ("self", "shard", "generation", "now"), hearing_of_an_end)
    wrap(RouterProcess, "_answer", ("replies",), answering_calls)
    wrap(RouterProcess, "_map_changed", ("self", "slot_map"), taking_map)
    wrap(RouterProcess, "run", ("self",), starting)


def run() -> int:
    """The whole process; its exit status."""
    arm()
    return main()
