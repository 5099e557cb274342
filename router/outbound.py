"""What goes from a router to one shard, and what is known of what became of it.

Operations gather here until an envelope may leave: at most `ENVELOPES_OUT` are unanswered at a
time, so an idle shard gets an operation at once and a busy one gets them in batches that grow with
the load. When the shard's process ends, what had not been sent waits for its successor, and what
had been sent is handed back to the flows as lost: it may or may not have happened.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from common import wire
from common.wire import Op, Operation, Result
from router.front import Status

# Envelopes on the way to a shard or being answered. Two, so that the shard can apply one while it
# syncs the other.
ENVELOPES_OUT = 2
# The size of one envelope, about: what a shard takes in at once, and copies.
ENVELOPE_OPERATIONS = 1_024
ENVELOPE_BYTES = 8 * 1024 * 1024
# Bytes of jobs that may wait for one shard in one router, beside the limit on operations.
WAITING_BYTES_MAX = 256 * 1024 * 1024
# Operations that may be kept although they were taken back, beside as many as wait.
WITHDRAWN_SPARE = 64


class Flow(Protocol):
    """A call in progress, as its operations see it."""

    def result(self, op_id: int, status: int, data: Any) -> None:
        """The shard's answer to one operation."""

    def lost(self, op_id: int) -> None:
        """The shard ended after the operation was sent to it."""

    def hold(self) -> None:
        """An operation that has not been sent waits for a shard that is down."""


class Pending:
    """One operation with the flow that waits for its result; `flow` is None where nobody does."""

    __slots__ = ("flow", "operation", "parks", "sent", "size", "withdrawn")

    def __init__(self, operation: Operation, flow: Flow | None, size: int, parks: bool) -> None:
        self.operation = operation
        self.flow = flow
        self.size = size  # bytes of jobs in it
        self.parks = parks  # it may wait in the shard for as long as it likes
        self.sent = False
        self.withdrawn = False

    @property
    def op_id(self) -> int:
        op_id: int = self.operation[0]
        return op_id


class Outbound:
    """One router's way to one shard. `messages` are envelopes ready to be sent; the shell takes them."""

    def __init__(self, index: int, router: str) -> None:
        self.index = index
        self.messages: list[bytes] = []
        self.questions: list[Any] = []  # what the shard asks of its own accord; the core takes them
        self._router = router
        self.generation = 0  # 0: the shard is down
        self._unsent: deque[Pending] = deque()
        self._sent: dict[int, Pending] = {}
        self._withdrawn = 0  # of those in `_unsent`
        self._waiting_bytes = 0
        self._parked = 0
        self._number = 0
        self._answered = 0
        self._kept: list[Operation] = []
        # Op ids of reserves and drains whose answers have left, or never will.
        self._confirmed: list[int] = []
        self._given_back: list[int] = []
        # Those of `_given_back` that are on the way, by the number of their envelope.
        self._giving_back: dict[int, list[int]] = {}

    @property
    def is_up(self) -> bool:
        return self.generation != 0

    @property
    def is_settled(self) -> bool:
        """The shard has heard everything that is for it, and has said so."""
        is_said = len(self._unsent) == self._withdrawn and not (self._kept or self._confirmed or self._given_back)
        return is_said and (not self.generation or self._number == self._answered)

    def is_full(self, capacity: int) -> bool:
        """Whether as many operations wait for this shard as may (`storage.command_queue_capacity`)."""
        waiting = len(self._unsent) - self._withdrawn + len(self._sent) - self._parked
        return waiting >= capacity or self._waiting_bytes >= WAITING_BYTES_MAX

    # -- operations ---------------------------------------------------------------------------

    def add(self, operation: Operation, flow: Flow | None, size: int = 0, parks: bool = False) -> Pending:
        """Send an operation as soon as may be."""
        pending = Pending(operation, flow, size, parks)
        self._unsent.append(pending)
        self._waiting_bytes += size
        if flow is not None and not self.generation:
            flow.hold()
        return pending

    def keep(self, keep_op_id: int, op_id: int, count: int) -> None:
        """Only the first `count` records of this drain go into its answer.

        Told before any confirmation, which would delete the others as well.
        """
        self._kept.append([keep_op_id, Op.KEEP, op_id, count])

    def confirm(self, op_id: int) -> None:
        """The answer with what this reserve or drain claimed has left."""
        self._confirmed.append(op_id)

    def give_back(self, op_id: int) -> None:
        """The answer with what this reserve or drain claimed will never leave."""
        self._given_back.append(op_id)

    def withdraw(self, pending: Pending) -> bool:
        """Take back an operation that has not been sent; False when it has been."""
        if pending.sent or pending.withdrawn:
            return False
        pending.withdrawn = True  # it is passed over when its turn comes: looking for it would cost more
        self._withdrawn += 1
        self._waiting_bytes -= pending.size
        if self._withdrawn > len(self._unsent) // 2 + WITHDRAWN_SPARE:
            # Its turn may be far: while the shard is down, calls come, wait and give up.
            self._unsent = deque(pending for pending in self._unsent if not pending.withdrawn)
            self._withdrawn = 0
        return True

    def forget(self, op_id: int) -> bool:
        """No result comes for this operation any more (it was cancelled); False when one has come."""
        pending = self._sent.pop(op_id, None)
        if pending is None:
            return False
        self._done(pending)
        return True

    def pump(self) -> None:
        """Form the envelopes that may leave now."""
        while (
            self.generation
            and self._number - self._answered < ENVELOPES_OUT
            and (len(self._unsent) > self._withdrawn or self._kept or self._confirmed or self._given_back)
        ):
            self._number += 1
            self.messages.append(wire.pack(self.generation, self._router, self._number, self._next_items()))

    def _next_items(self) -> list[Operation]:
        items, self._kept = self._kept, []
        if self._confirmed:
            items.append([0, Op.CONFIRM, self._confirmed])
            self._confirmed = []
        if self._given_back:
            items.append([0, Op.GIVE_BACK, self._given_back])
            self._giving_back[self._number] = self._given_back
            self._given_back = []
        size = 0
        unsent, sent = self._unsent, self._sent
        while unsent and len(items) < ENVELOPE_OPERATIONS and size < ENVELOPE_BYTES:
            pending = unsent.popleft()
            if pending.withdrawn:
                self._withdrawn -= 1
                continue
            pending.sent = True
            items.append(pending.operation)
            sent[pending.operation[0]] = pending
            size += pending.size
            if pending.parks:
                self._parked += 1
        return items

    # -- the shard ----------------------------------------------------------------------------

    def came_up(self, generation: int) -> None:
        """A new process of the shard takes operations."""
        self.generation = generation
        self._number = self._answered = 0

    def went_down(self) -> None:
        """The shard's process has ended: flows hear of what had been sent to it."""
        self.generation = 0
        self.messages.clear()
        self._kept.clear()  # its successor has handed out nothing
        for op_ids in self._giving_back.values():
            self._given_back.extend(op_ids)  # giving back twice does no harm
        self._giving_back.clear()
        sent, self._sent = self._sent, {}
        self._parked = 0
        for pending in sent.values():
            self._waiting_bytes -= pending.size
        for pending in list(self._unsent):
            if pending.flow is not None and not pending.withdrawn:
                pending.flow.hold()
        for pending in sent.values():
            if pending.flow is not None:
                pending.flow.lost(pending.op_id)

    def take(self, number: int, results: list[Result]) -> None:
        """An envelope came from the shard: it has applied all of ours up to `number`."""
        for op_id, status, data in results:
            if op_id == 0:
                if status == Status.OK:  # else its write failed, and its successor asks again
                    self.questions.append(data)
                continue
            pending = self._sent.pop(op_id, None)
            if pending is not None:
                self._done(pending)
                if pending.flow is not None:
                    pending.flow.result(op_id, status, data)
        if number > self._answered:
            self._answered = number
            for answered in [n for n in self._giving_back if n <= number]:
                del self._giving_back[answered]

    def _done(self, pending: Pending) -> None:
        self._waiting_bytes -= pending.size
        if pending.parks:
            self._parked -= 1
