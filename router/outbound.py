"""What goes from a router to one shard, and what is known of what became of it.

Operations gather here until an envelope may leave: at most `ENVELOPES_OUT` are unanswered at a
time, so an idle shard gets an operation at once and a busy one gets them in batches that grow with
the load. When the shard's process ends, what had not been sent waits for its successor, and what
had been sent is handed back to the flows as lost: it may or may not have happened.

When slots move, operations that had been sent to their old shard may come back as MOVED, and go to the
new one. So that they stay in the order in which they were begun, the way to the new shard is blocked
until they have come back, and they are put before what was begun later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from common import wire
from common.wire import MOVED, Op, Operation, Result, slots_of
from router.front import Status

# Envelopes on the way to a shard or being answered. Two, so that the shard can apply one while it
# syncs the other.
ENVELOPES_OUT = 2
# The size of one envelope, about: what a shard takes in at once, and copies. An operation counts as many jobs as it
# has or asks for, at least one. With more, shard and router would wait for each other when all clients reserve large
# batches: the one works while the other has nothing.
ENVELOPE_JOBS = 2_048
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

    def moved(self, op_id: int) -> None:
        """Another shard owns the slots of this operation by now: it was not done, and has to be sent there."""


class Pending:
    """One operation with the flow that waits for its result; `flow` is None where nobody does, or no longer.

    Flows know their operations: if one that is over still knew its flow, both would stay, with the jobs in
    them, until the collector comes.
    """

    __slots__ = ("flow", "jobs", "operation", "parks", "sent", "size", "withdrawn")

    def __init__(self, operation: Operation, flow: Flow | None, size: int, parks: bool, jobs: int) -> None:
        self.operation = operation
        self.flow = flow
        self.size = size  # bytes of jobs in it
        self.jobs = jobs  # that it asks for or brings
        self.parks = parks  # it may wait in the shard for as long as it likes
        self.sent = False
        self.withdrawn = False

    @property
    def op_id(self) -> int:
        op_id: int = self.operation[0]
        return op_id


class Outbound:
    """One router's way to one shard. `messages` are envelopes ready to be sent; the shell takes them."""

    def __init__(self, index: int, router: str, epoch: int) -> None:
        self.index = index
        self.epoch = epoch  # of the slot map by which operations are sent here
        self.messages: list[bytes] = []
        self.is_stirred = False  # since the last `pump` something was added, or an envelope came back
        self.questions: list[Any] = []  # what the shard asks of its own accord; the core takes them
        self._router = router
        self.generation = 0  # 0: the shard is down
        self._unsent: deque[Pending] = deque()
        self._sent: dict[int, Pending] = {}
        self._withdrawn = 0  # of those in `_unsent` and `_later`
        # Operations that came back, with the shard's epoch; the core takes them. Then it sends those again
        # that have moved, and says so here, because these go before what waits in `_later`.
        self.returned: list[tuple[Pending, int]] = []
        self.is_returning = False
        self._later: deque[Pending] = deque()
        self._blocked_by: set[int] = set()  # op ids that are out at former owners
        self._blocks: dict[int, set[Outbound]] = {}  # by op id that is out here
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
        is_said = not (self._waiting or self._kept or self._confirmed or self._given_back)
        return is_said and (not self.generation or self._number == self._answered)

    @property
    def _waiting(self) -> int:
        return len(self._unsent) + len(self._later) - self._withdrawn

    def is_full(self, capacity: int) -> bool:
        """Whether as many operations wait for this shard as may (`storage.command_queue_capacity`)."""
        waiting = self._waiting + len(self._sent) - self._parked
        return waiting >= capacity or self._waiting_bytes >= WAITING_BYTES_MAX

    # -- operations ---------------------------------------------------------------------------

    def add(
        self, operation: Operation, flow: Flow | None, size: int = 0, parks: bool = False, jobs: int = 1
    ) -> Pending:
        """Send an operation as soon as may be."""
        pending = Pending(operation, flow, size, parks, jobs)
        if self._blocked_by and not self.is_returning:
            self._later.append(pending)
        else:
            self._unsent.append(pending)
        self._waiting_bytes += size
        self.is_stirred = True
        if flow is not None and not self.generation:
            flow.hold()
        return pending

    def keep(self, keep_op_id: int, op_id: int, count: int) -> None:
        """Only the first `count` records of this drain go into its answer.

        Told before any confirmation, which would delete the others as well.
        """
        self._kept.append([keep_op_id, Op.KEEP, op_id, count])
        self.is_stirred = True

    def confirm(self, op_id: int) -> None:
        """The answer with what this reserve or drain claimed has left."""
        self._confirmed.append(op_id)
        self.is_stirred = True

    def give_back(self, op_id: int) -> None:
        """The answer with what this reserve or drain claimed will never leave."""
        self._given_back.append(op_id)
        self.is_stirred = True

    def withdraw(self, pending: Pending) -> bool:
        """Take back an operation that has not been sent; False when it has been."""
        if not self._withdraw(pending):
            return False
        pending.flow = None
        return True

    def _withdraw(self, pending: Pending) -> bool:
        if pending.sent or pending.withdrawn:
            return False
        pending.withdrawn = True  # it is passed over when its turn comes: looking for it would cost more
        self._withdrawn += 1
        self._waiting_bytes -= pending.size
        if self._withdrawn > len(self._unsent) // 2 + WITHDRAWN_SPARE and not self._later:
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
        pending.flow = None
        self._unblock(op_id)
        return True

    def pump(self) -> None:
        """Form the envelopes that may leave now."""
        self.is_stirred = False
        while (
            self.generation
            and not self._blocked_by
            and self._number - self._answered < ENVELOPES_OUT
            and (len(self._unsent) > self._withdrawn or self._kept or self._confirmed or self._given_back)
        ):
            self._number += 1
            self.messages.append(self._next_envelope())

    def _next_envelope(self) -> bytes:
        return wire.pack(self.generation, self._router, self._number, self._next_items(), self.epoch)

    def _next_items(self) -> list[Operation]:
        items, self._kept = self._kept, []
        if self._confirmed:
            items.append([0, Op.CONFIRM, self._confirmed])
            self._confirmed = []
        if self._given_back:
            items.append([0, Op.GIVE_BACK, self._given_back])
            self._giving_back[self._number] = self._given_back
            self._given_back = []
        size = jobs = 0
        unsent, sent = self._unsent, self._sent
        while unsent and jobs < ENVELOPE_JOBS and size < ENVELOPE_BYTES:
            pending = unsent.popleft()
            if pending.withdrawn:
                self._withdrawn -= 1
                continue
            pending.sent = True
            items.append(pending.operation)
            sent[pending.operation[0]] = pending
            size += pending.size
            jobs += pending.jobs
            if pending.parks:
                self._parked += 1
        return items

    # -- the shard ----------------------------------------------------------------------------

    def came_up(self, generation: int) -> None:
        """A new process of the shard takes operations."""
        self.generation = generation
        self._number = self._answered = 0
        self.is_stirred = True

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
        for pending in [*self._unsent, *self._later]:
            if pending.flow is not None and not pending.withdrawn:
                pending.flow.hold()
        for pending in sent.values():
            flow, pending.flow = pending.flow, None
            if flow is not None:
                flow.lost(pending.op_id)
            self._unblock(pending.op_id)

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
                if status == MOVED:
                    self.returned.append((pending, data))
                    continue
                flow, pending.flow = pending.flow, None
                if flow is not None:
                    flow.result(op_id, status, data)
                self._unblock(op_id)
        if number > self._answered:
            self._answered = number
            self.is_stirred = True
            for answered in [n for n in self._giving_back if n <= number]:
                del self._giving_back[answered]

    def _done(self, pending: Pending) -> None:
        self._waiting_bytes -= pending.size
        if pending.parks:
            self._parked -= 1

    # -- slots that move ------------------------------------------------------------------------

    def unsent_of(self, slots: Collection[int]) -> list[Pending]:
        """Take back what has not been sent of operations that are about these slots."""
        unsent = [pending for pending in (*self._unsent, *self._later) if not pending.withdrawn]
        found = [pending for pending in unsent if not slots_of(pending.operation).isdisjoint(slots)]
        return [pending for pending in found if self._withdraw(pending)]

    def close(self) -> list[Pending]:
        """The shard was taken away, and this is used no more. Returns what had not been sent."""
        self.went_down()
        return [pending for pending in (*self._unsent, *self._later) if self._withdraw(pending)]

    def block_until_back(self, slots: Collection[int], owner_of: Callable[[int], Outbound]) -> None:
        """What is out about these slots goes before anything that is sent to their new owners from now on."""
        for op_id, pending in self._sent.items():
            if pending.parks:
                continue
            for slot in slots_of(pending.operation).intersection(slots):
                self._blocks.setdefault(op_id, set()).add(owner_of(slot))
        for op_id, blocked in self._blocks.items():
            for outbound in blocked:
                outbound._blocked_by.add(op_id)

    def is_back(self, pending: Pending) -> None:
        """An operation that came back from here has been sent to its new owner."""
        self._unblock(pending.op_id)

    def _unblock(self, op_id: int) -> None:
        if not self._blocks:
            return
        for outbound in self._blocks.pop(op_id, ()):
            outbound._blocked_by.discard(op_id)
            if not outbound._blocked_by:
                outbound._unsent.extend(outbound._later)
                outbound._later.clear()
                outbound.is_stirred = True
