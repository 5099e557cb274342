"""One operation for whoever is no client: its result goes to a callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from common.wire import MOVED
from router.front import Status
from router.outbound import Pending

if TYPE_CHECKING:
    from router.core import Core

# Status, and the data of the result or a text.
Done: TypeAlias = Callable[[int, Any], None]


class AskFlow:
    """An operation that is not held for a shard that is down: then it is UNAVAILABLE at once, and MOVED
    when the shard does not own its slot any more."""

    def __init__(self, core: Core, shard: int, done: Done) -> None:
        self._core = core
        self._shard = shard
        self._done = done
        self._pending: Pending | None = None

    def begin(self, arguments: list[Any]) -> None:
        """`arguments` are an operation without its id."""
        outbound = self._core.shards[self._shard]
        if outbound.is_up:
            self._pending = outbound.add([self._core.next_op_id(), *arguments], self)
        else:
            self._done(Status.UNAVAILABLE, f"shard {self._shard} is down")

    def result(self, op_id: int, status: int, data: Any) -> None:
        self._done(status, data)

    def lost(self, op_id: int) -> None:
        self._done(Status.UNAVAILABLE, f"shard {self._shard} ended meanwhile")

    def moved(self, op_id: int) -> None:
        self._done(MOVED, None)

    def hold(self) -> None:
        if self._pending is not None and self._core.shards[self._shard].withdraw(self._pending):
            self._done(Status.UNAVAILABLE, f"shard {self._shard} is down")
