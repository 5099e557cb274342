"""Who waits for jobs of which queue: parked reserves and watches, first come, first served.

A parked reserve belongs to a call whose queues are all on this shard: it is answered with jobs. A
watch belongs to a call with queues on several shards: it is only told that there is a job here, and
its router then claims in the order of the call's queues. Until it has claimed or passed the wake-up
on, one ready job of that queue is promised to it, so that one job wakes one waiter and a wake-up
that comes to nothing wakes the next.

Waiting is memory only, and has no end here: the router knows when a call's wait is over and cancels
it, and it asks again when it hears that a shard is new.
"""

from __future__ import annotations

from collections.abc import Container

from common.slots import slot_of


class Waiter:
    """One parked reserve or watch."""

    __slots__ = ("lease_ms", "max_bytes", "max_jobs", "op_id", "promised", "queues", "router")

    def __init__(
        self,
        router: str,
        op_id: int,
        queues: list[str],
        max_jobs: int = 0,
        lease_ms: int = 0,
        max_bytes: int = 0,
    ) -> None:
        self.router = router
        self.op_id = op_id
        self.queues = queues
        self.max_jobs = max_jobs  # 0: a watch
        self.lease_ms = lease_ms
        self.max_bytes = max_bytes
        self.promised: str | None = None  # the queue that woke this watch

    @property
    def is_watch(self) -> bool:
        return self.max_jobs == 0


class _Line:
    __slots__ = ("promised", "waiters")

    def __init__(self) -> None:
        self.waiters: dict[int, Waiter] = {}  # by op id, in order of arrival
        self.promised = 0


class WaitingRoom:
    """All waiters of a shard."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._by_op: dict[int, Waiter] = {}

    def __len__(self) -> int:
        return len(self._by_op)

    def park(self, waiter: Waiter) -> None:
        self._by_op[waiter.op_id] = waiter
        for queue in waiter.queues:
            line = self._lines.get(queue)
            if line is None:
                line = self._lines[queue] = _Line()
            line.waiters[waiter.op_id] = waiter

    def first(self, queue: str, ready: int) -> Waiter | None:
        """Whom to serve next when `ready` jobs of the queue are ready; None when nobody waits for them."""
        line = self._lines.get(queue)
        if line is None or not line.waiters or ready <= line.promised:
            return None
        return next(iter(line.waiters.values()))

    def wake(self, waiter: Waiter, queue: str) -> None:
        """A watch is told of a job; it stays known until it is settled."""
        self._leave_lines(waiter)
        waiter.promised = queue
        line = self._lines.get(queue)
        if line is None:
            line = self._lines[queue] = _Line()
        line.promised += 1

    def remove(self, op_id: int) -> Waiter | None:
        """Take a waiter out, whatever its state; its `promised` says which queue to look at again."""
        waiter = self._by_op.pop(op_id, None)
        if waiter is None:
            return None
        if waiter.promised is None:
            self._leave_lines(waiter)
        else:
            line = self._lines[waiter.promised]
            line.promised -= 1
            self._drop_if_empty(waiter.promised, line)
        return waiter

    def waiting_for(self, queue: str) -> int:
        """How many wait for a job of a queue."""
        line = self._lines.get(queue)
        return 0 if line is None else len(line.waiters)

    def about(self, slots: Container[int]) -> list[int]:
        """Op ids of those who wait for a queue of one of these slots, in order of arrival. A watch that was
        woken waits for no other queue than the one that woke it."""
        names = {queue for queue in self._lines if slot_of(queue) in slots}
        return [
            op_id
            for op_id, waiter in self._by_op.items()
            if not names.isdisjoint(waiter.queues if waiter.promised is None else (waiter.promised,))
        ]

    def of_router(self, router: str) -> list[int]:
        return [op_id for op_id, waiter in self._by_op.items() if waiter.router == router]

    def _leave_lines(self, waiter: Waiter) -> None:
        for queue in waiter.queues:
            line = self._lines.get(queue)
            if line is not None:
                line.waiters.pop(waiter.op_id, None)
                self._drop_if_empty(queue, line)

    def _drop_if_empty(self, queue: str, line: _Line) -> None:
        if not line.waiters and not line.promised:
            del self._lines[queue]
