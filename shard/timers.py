"""Stored timers of one kind: what is due, found without looking at every slot.

Timers lie in the store by slot and deadline. In memory there is one instant per slot that has any:
its earliest. So the memory is bounded by the slots, not by the timers, and a scan starts where the
live timers begin, not among the tombstones of those that have fired.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from shard import keys
from shard.store import Family, Store

# Bytes of timers (with a job's record in each, for scheduled jobs) that one turn takes up.
SCAN_BYTES = 1024 * 1024


class SlotTimers:
    """The timers of one family whose keys are `slot deadline …`. Deadlines are wall milliseconds."""

    def __init__(self, family: Family, store: Store) -> None:
        self._family = family
        self._store = store
        self._earliest: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def look(self, slot: int) -> None:
        """Find the timers of a slot, at start or when it has come here."""
        self._look(slot, keys.slot_prefix(slot))

    def forget(self, slots: Iterable[int]) -> None:
        """These slots are here no more."""
        for slot in slots:
            self._earliest.pop(slot, None)

    def note(self, slot: int, due_ms: int) -> None:
        """A timer was stored."""
        earliest = self._earliest.get(slot)
        if earliest is None or due_ms < earliest:
            self._earliest[slot] = due_ms
            heappush(self._heap, (due_ms, slot))
            if len(self._heap) > 2 * len(self._earliest) + 64:
                # A far timer is noted again after each nearer one of its slot that fires.
                self._heap = [(due_ms, slot) for slot, due_ms in self._earliest.items()]
                heapify(self._heap)

    def next_due(self) -> int | None:
        """The earliest deadline of all; it may turn out to belong to a timer that was taken back."""
        while self._heap:
            due_ms, slot = self._heap[0]
            if self._earliest.get(slot) == due_ms:
                return due_ms
            heappop(self._heap)
        return None

    def start_of(self, slot: int) -> bytes | None:
        """Where the timers of a slot begin at the earliest, None when it has none."""
        earliest = self._earliest.get(slot)
        return None if earliest is None else keys.due_start(slot, earliest)

    def due(self, wall_ms: int, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to `limit` timers of one slot that are due; the caller deletes them. Empty: nothing is due."""
        while True:
            due_ms = self.next_due()
            if due_ms is None or due_ms > wall_ms:
                return []
            slot = self._heap[0][1]
            heappop(self._heap)
            del self._earliest[slot]
            end = keys.due_start(slot, wall_ms + 1)
            rows = self._store.scan(self._family, keys.due_start(slot, due_ms), end, limit, SCAN_BYTES)
            self._look(slot, rows[-1][0] + b"\x00" if rows else end)
            if rows:
                return rows

    def _look(self, slot: int, start: bytes) -> None:
        following = self._store.scan(self._family, start, keys.slot_end(slot), 1)
        if following:
            self.note(slot, keys.read_due(following[0][0]))
