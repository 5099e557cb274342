"""The ready jobs of a queue, in serving order, with a bounded part of them in memory.

A lane is one priority of one queue. Its jobs lie in the store in order of their sequence; leased
ones lie among them and are passed over. The lane keeps

    window     ready jobs in memory, lowest sequence first, with their records
    frontier   every ready job below it is in the window; from it on the store must be read

so that a reserve costs no read while the window lasts, then one scan from the frontier: never from
the start of the lane, where the tombstones of finished jobs lie (a seek from there took 20 ms after
400 000 jobs, from a remembered place 25 µs). A job that comes back below the frontier (a nack, an
expired lease) goes into the window; one at or above it will be found by the scan.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container

from common.wire import JOB_OVERHEAD_BYTES
from shard import keys
from shard.store import Family, Store

# A frontier that says: the store holds nothing that the window lacks.
EXHAUSTED = keys.SEQUENCE_END

# Jobs and bytes of one lane in memory: enough that a scan's fixed cost (5 µs) is spread thin.
WINDOW_JOBS = 512
WINDOW_BYTES = 256 * 1024
# Of all lanes of a shard; past it a lane holds only SMALL_WINDOW_BYTES, so that 10 000 busy queues
# need some tens of megabytes and not gigabytes.
ALL_WINDOWS_BYTES = 64 * 1024 * 1024
SMALL_WINDOW_BYTES = 4 * 1024
# How far an operator's look at the first ready job goes past leased ones.
PEEK_JOBS = 64
PEEK_BYTES = 64 * 1024


class WindowBudget:
    """How much memory the windows of one shard use together."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = 0

    def lane_bytes(self) -> int:
        return WINDOW_BYTES if self.used < ALL_WINDOWS_BYTES else SMALL_WINDOW_BYTES


class Lane:
    """One priority of one queue. `inverted` is 9 - priority, as in the keys."""

    __slots__ = ("_budget", "_bytes", "_end", "_records", "_window", "frontier", "inverted", "queue", "slot")

    def __init__(self, slot: int, queue: int, inverted: int, frontier: int, budget: WindowBudget) -> None:
        self.slot = slot
        self.queue = queue
        self.inverted = inverted
        self.frontier = frontier
        self._window: list[int] = []  # in order
        self._records: dict[int, bytes] = {}
        self._bytes = 0
        self._budget = budget
        self._end = keys.lane_end(slot, queue, inverted)

    def add(self, sequence: int, record: bytes) -> None:
        """A job became ready: its record is in the store, or in the changes of this turn."""
        if sequence >= self.frontier:
            return
        size = len(record)
        window = self._window
        if len(window) >= WINDOW_JOBS or (window and self._bytes + size > self._budget.lane_bytes()):
            self._shrink()
            if sequence >= self.frontier:
                return
        insort(window, sequence)  # nearly always at its end
        self._records[sequence] = record
        self._bytes += size
        self._budget.used += size

    def take(
        self, store: Store, leased: Container[bytes], count: int, room: int, must: bool
    ) -> list[tuple[int, bytes]]:
        """Remove the first ready jobs, as they are being leased: sequences and records, none when none is ready.

        No more than `count`, or than have room in an answer with `room` bytes left; with `must` the first is taken
        whatever its size. There may be more than are returned: after this, `has_first` means that the next has no
        room or is beyond `count`. `leased` holds job ids.
        """
        if not self._window and self.frontier != EXHAUSTED:
            self._refill(store, leased)
        window, remove = self._window, self._records.pop
        taken = [(sequence, remove(sequence)) for sequence in window[:count]]
        freed = 0
        for place, (_, record) in enumerate(taken):
            room -= len(record) + JOB_OVERHEAD_BYTES
            if room < 0 and (place or not must):
                self._records.update(taken[place:])
                del taken[place:]
                break
            freed += len(record)
        del window[: len(taken)]
        self._bytes -= freed
        self._budget.used -= freed
        return taken

    @property
    def has_first(self) -> bool:
        """Whether the first ready job is in memory."""
        return bool(self._window)

    def head(self) -> int | None:
        """A sequence below which no job of this lane is ready; None when none is ready at all."""
        if self._window:
            return self._window[0]
        return None if self.frontier == EXHAUSTED else self.frontier

    def finds(self, sequence: int) -> bool:
        """Whether a ready job of this lane that has this sequence would ever be found."""
        return sequence >= self.frontier or sequence in self._records

    def peek(self, store: Store, leased: Container[bytes]) -> bytes | None:
        """The record of the first ready job, without taking anything into memory; None when it is not near."""
        if self._window:
            return self._records[self._window[0]]
        if self.frontier == EXHAUSTED:
            return None
        start = keys.job_key(self.slot, self.queue, self.inverted, self.frontier)
        rows = store.scan(Family.JOBS, start, self._end, PEEK_JOBS, PEEK_BYTES)
        return next((record for _, record in rows if record[:16] not in leased), None)

    def skip_to(self, sequence: int) -> None:
        """No job below `sequence` is ready any more: those that were are deleted. The store has the rest."""
        self.forget()
        self.frontier = sequence

    def forget(self) -> None:
        """Give the window's memory back."""
        self._budget.used -= self._bytes
        self._bytes = 0
        self._window.clear()
        self._records.clear()

    def _refill(self, store: Store, leased: Container[bytes]) -> None:
        limit_bytes = self._budget.lane_bytes()
        while not self._window and self.frontier != EXHAUSTED:
            start = keys.job_key(self.slot, self.queue, self.inverted, self.frontier)
            rows = store.scan(Family.JOBS, start, self._end, WINDOW_JOBS, limit_bytes)
            size = 0
            for key, record in rows:
                size += len(key) + len(record)
                if record[:16] in leased:
                    continue
                sequence = int.from_bytes(key[7:], "big")
                self._window.append(sequence)
                self._records[sequence] = record
                self._bytes += len(record)
                self._budget.used += len(record)
            if len(rows) == WINDOW_JOBS or size >= limit_bytes:
                self.frontier = int.from_bytes(rows[-1][0][7:], "big") + 1
            else:
                self.frontier = EXHAUSTED

    def _shrink(self) -> None:
        """Keep the lower half of the window; the store has the rest."""
        kept = len(self._window) // 2
        dropped = self._window[kept:]
        if not dropped:
            return
        self.frontier = dropped[0]
        del self._window[kept:]
        for sequence in dropped:
            size = len(self._records.pop(sequence))
            self._bytes -= size
            self._budget.used -= size
