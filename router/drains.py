"""A DrainDeadLetters in progress, over one shard or all of them.

Every shard hands out its oldest records; the oldest of all go into the answer and the rest is there
again at once. A record is deleted when the answer has left, and comes back when it has not.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import merge
from typing import TYPE_CHECKING, Any

from common.wire import DEAD_LETTER_OVERHEAD_BYTES, DeadLetter, Op
from router import answers
from router.admission import DrainTerms
from router.front import Call, Status
from router.outbound import Pending

if TYPE_CHECKING:
    from router.core import Core


class DrainFlow:
    """One DrainDeadLetters."""

    def __init__(self, core: Core, call: Call, terms: DrainTerms, shards: Iterable[int]) -> None:
        self.timer_at = 0
        self._core = core
        self._call = call
        self._terms = terms
        self._shards = list(shards)
        self._pending: dict[int, tuple[int, Pending]] = {}  # op id: shard, operation
        self._found: dict[int, tuple[int, list[DeadLetter]]] = {}  # op id: shard, records
        self._failure: tuple[Status, str] | None = None
        self._closed = False

    def begin(self) -> None:
        for shard in self._shards:
            self._ask(shard)

    def result(self, op_id: int, status: int, data: Any) -> None:
        shard, _ = self._pending.pop(op_id)
        if status == Status.OK:
            self._found[op_id] = shard, [DeadLetter(*letter) for letter in data]
        else:
            self._failure = Status(status), data
        self._finish_if_done()

    def lost(self, op_id: int) -> None:
        shard, _ = self._pending.pop(op_id)
        # Nothing is deleted before it is confirmed, so nothing was done.
        self._failure = Status.UNAVAILABLE, f"shard {shard} ended meanwhile: nothing was drained"
        self._finish_if_done()

    def hold(self) -> None:
        if not self.timer_at and not self._closed:
            self._core.set_timer(self, self._core.hold_until(self._call))

    def timer_fired(self) -> None:
        for op_id, (shard, pending) in list(self._pending.items()):
            if self._core.shards[shard].withdraw(pending):
                del self._pending[op_id]
                self._failure = Status.UNAVAILABLE, f"shard {shard} is down: nothing was drained"
        self._finish_if_done()

    def moved(self, op_id: int) -> None:
        del self._pending[op_id]
        if self._terms.queue is not None and not self._closed:
            self._ask(self._core.shard_of(self._terms.queue))
        else:  # a shard that was taken away has none
            self._finish_if_done()

    def closed(self) -> None:
        self._closed = True
        self.timer_at = 0
        for op_id, (shard, pending) in list(self._pending.items()):
            if self._core.shards[shard].withdraw(pending):
                del self._pending[op_id]
        self._give_back()

    def answer_left(self, left: bool) -> None:
        for op_id, (shard, _) in self._found.items():
            if left:
                self._core.shards[shard].confirm(op_id)
            else:
                self._core.shards[shard].give_back(op_id)

    def stop_waiting(self) -> None:
        """It does not wait."""

    def _ask(self, shard: int) -> None:
        core = self._core
        op_id = core.next_op_id()
        max_bytes = core.config.limits.max_response_bytes
        operation = [op_id, Op.DRAIN, self._terms.queue, self._terms.max_records, max_bytes]
        self._pending[op_id] = shard, core.shards[shard].add(operation, self)

    def _finish_if_done(self) -> None:
        if self._closed:
            self._give_back()
        elif not self._pending:
            self.timer_at = 0
            if self._failure is not None:
                self._give_back()
                self._core.fail(self._call, *self._failure)
            else:
                self._core.reply(self._call, answers.drain_answer(self._chosen()))

    def _chosen(self) -> list[DeadLetter]:
        """The oldest of all shards, as many as may go into the answer; the rest goes back."""
        by_shard = [
            [(letter.failed_at_ms, op_id, letter) for letter in letters] for op_id, (_, letters) in self._found.items()
        ]
        chosen: list[DeadLetter] = []
        kept = dict.fromkeys(self._found, 0)
        size = 0
        for _, op_id, letter in merge(*by_shard, key=lambda entry: entry[:2]):
            size += len(letter.body) + len((letter.reason or "").encode()) + DEAD_LETTER_OVERHEAD_BYTES
            if len(chosen) == self._terms.max_records or (
                chosen and size > self._core.config.limits.max_response_bytes
            ):
                break
            chosen.append(letter)
            kept[op_id] += 1
        for op_id, (shard, letters) in self._found.items():
            if kept[op_id] < len(letters):
                self._core.shards[shard].keep(self._core.next_op_id(), op_id, kept[op_id])
        return chosen

    def _give_back(self) -> None:
        for op_id, (shard, _) in self._found.items():
            self._core.shards[shard].give_back(op_id)
        self._found.clear()
