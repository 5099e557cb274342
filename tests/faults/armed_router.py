"""A router process with the points of the protocol in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.wire import Op
from router.__main__ import main
from router.coordinator import Recovery, Transaction
from router.core import Core, Moment
from router.process import RouterProcess
from tests.faults.armed_points import BEFORE_ANSWER, ROUTER_POINTS, SHARD_GONE, STARTING, Points, point, wrap

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
    transaction: int = 0,
) -> None:
    points.reach(point(kind, "sending"), shard_name(shard), transaction or self._id)
    original(self, kind, shard, arguments, size, transaction)


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
    wrap(Transaction, "_send", (*sending, "size", "transaction"), sent_by_transaction)
    wrap(Transaction, "result", ("self", "op_id", "status", "data"), answered_transaction)
    wrap(Recovery, "_send", sending, sent_by_recovery)
    wrap(Recovery, "result", ("self", "op_id", "status", "data"), answered_recovery)
    wrap(Core, "shard_down", ("self", "shard", "generation", "now"), hearing_of_an_end)
    wrap(RouterProcess, "_answer", ("replies",), answering_calls)
    wrap(RouterProcess, "run", ("self",), starting)


def run() -> int:
    """The whole process; its exit status."""
    arm()
    return main()
