"""Slots on their way to another shard, and slots that arrive: both ends of a move.

How it works. A router copies what the source stores of some slots to the target, while the source
serves; then the source holds what is new, the rest is copied, and the slot map is replaced. That
replacement is the switch: before it the source owns the slots and the target has a copy that means
nothing; after it the source has one that means nothing. Whoever does not own a slot deletes what it
has of it, at its start or as soon as it hears of it, so no crash needs a repair.

The source                                            The target

    OPEN     notes every key that changes                 CLEAR    deletes what lies there of the slots
    READ     all rows, part by part                       RECEIVE  rows
    CHANGES  the rows of the keys that were noted         RECEIVE  rows
    HOLD     holds new operations on the slots, until     (map)    reads the slots into memory and serves
             nothing is open that was begun before
    CHANGES  to the last
    (map)    answers what it held with MOVED, forgets

What is open: jobs that were handed out and whose answer may not have left, dead letters likewise,
and prepared transactions. They end by operations that are never held, so holding ends soon; a client
that takes its answer slowly can make it last, and then the router PAUSEs, and holds again later.

While slots are held nothing changes them but what ends what is open: no timer fires in the source, and
nothing of a held slot is handed out. So when all is quiet, and the last CHANGES has left nothing, the
target has what the source has; timers that were due meanwhile fire there.

A move belongs to the router that drives it and ends with it. Order of copying: SLOTS come first and
are deleted last, so a slot of which anything is stored has its record in SLOTS.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from common.wire import Operation
from shard import keys
from shard.store import Family, Store

# Families whose keys begin with the slot, in the order in which they are copied.
FAMILIES = (
    Family.SLOTS,
    Family.QUEUES,
    Family.JOBS,
    Family.SCHEDULED,
    Family.LEASES,
    Family.DEDUP,
    Family.DEDUP_EXPIRY,
    Family.DEAD,
)
# In META are the records of a slot that were set aside.
_COPIED = (*FAMILIES, Family.META)
# SLOTS last: while its record is there, there may be others of the slot.
_SWEPT = _COPIED[::-1]
_PLACE = {family: place for place, family in enumerate(_COPIED)}
# Rows that are deleted in one turn of slots that are not owned (any more), about 5 ms of work.
SWEEP_ROWS = 1_000
SWEEP_BYTES = 1024 * 1024
# What a scan costs, in rows: there may be thousands of slots with next to nothing.
SWEEP_SCAN_ROWS = 5

# Family, key, and the value or None.
Row = tuple[int, bytes, bytes | None]


class Departure:
    """Slots that are copied from here. `router` drives the move."""

    def __init__(self, store: Store, router: str, slots: Iterable[int]) -> None:
        self.router = router
        self.slots = frozenset(slots)
        self.held: list[tuple[str, Operation]] = []  # in order of arrival
        self._store = store
        self._ranges = [(slot, family) for slot in sorted(self.slots) for family in _COPIED]
        self._range = 0  # the one that is being read
        self._start = b""  # where in it, b"" for its start
        self._read: dict[int, int] = {}  # by slot: how many of its families have been read
        self._changed: dict[tuple[int, bytes], None] = {}

    def note(self, pending: list[dict[bytes, bytes | None]]) -> None:
        """The turn's changes, before they are written. What will be read anyway need not be noted."""
        for family in _COPIED:
            for key in pending[family]:
                slot = slot_of_row(family, key)
                if slot in self.slots and self._has_read(slot, family, key):
                    self._changed[family, key] = None

    def read(self, max_bytes: int) -> tuple[list[Row], bool]:
        """The next rows, and whether these were the last ones."""
        rows: list[Row] = []
        size = 0
        while self._range < len(self._ranges) and size < max_bytes:
            slot, family = self._ranges[self._range]
            start, end = _range(family, slot)
            found = self._store.scan(family, self._start or start, end, 1 << 30, max_bytes - size)
            rows += [(family, key, value) for key, value in found]
            size += sum(len(key) + len(value) for key, value in found)
            if size >= max_bytes:
                self._start = found[-1][0] + b"\x00"
            else:
                self._range += 1
                self._start = b""
        return rows, self._range == len(self._ranges)

    def changes(self, max_bytes: int) -> tuple[list[Row], int]:
        """Rows that changed after they were read, and how many such are left."""
        rows: list[Row] = []
        size = 0
        while self._changed and size < max_bytes:
            family, key = next(iter(self._changed))
            del self._changed[family, key]
            value = self._store.get(Family(family), key)
            rows.append((family, key, value))
            size += len(key) + len(value or b"")
        return rows, len(self._changed)

    def _has_read(self, slot: int, family: Family, key: bytes) -> bool:
        if self._range == len(self._ranges):
            return True
        place = (slot, _PLACE[family])
        current_slot, current_family = self._ranges[self._range]
        current = (current_slot, _PLACE[current_family])
        return place < current or (place == current and key < self._start)


class Arrival:
    """Slots that are copied to here. `router` drives the move."""

    def __init__(self, router: str, slots: Iterable[int]) -> None:
        self.router = router
        self.slots = frozenset(slots)


class Sweep:
    """Deletes what is stored of slots that are not owned, a bounded part at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # How far each has come: its place in _SWEPT, and the key from which on something may be left. A scan
        # from the start would go over all that was deleted before.
        self._slots: dict[int, tuple[int, bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._slots)

    def add(self, slots: Iterable[int]) -> None:
        self._slots.update(dict.fromkeys(slots, (0, b"")))

    def has_any(self, slots: Iterable[int]) -> bool:
        """Whether one of them is not swept yet."""
        return any(slot in self._slots for slot in slots)

    def step(self) -> bool:
        """Delete some rows; whether there are more."""
        rows_left, bytes_left = SWEEP_ROWS, SWEEP_BYTES
        while self._slots and rows_left > 0 and bytes_left > 0:
            slot = next(iter(self._slots))
            place, following = self._slots[slot]
            start, end = _range(_SWEPT[place], slot)
            found = self._store.scan(_SWEPT[place], following or start, end, rows_left, bytes_left)
            for key, _ in found:
                self._store.delete(_SWEPT[place], key)
            size = sum(len(key) + len(value) for key, value in found)
            is_cut = len(found) == rows_left or size >= bytes_left
            rows_left -= len(found) + SWEEP_SCAN_ROWS
            bytes_left -= size
            if is_cut:
                self._slots[slot] = place, found[-1][0] + b"\x00"
            elif place + 1 < len(_SWEPT):
                self._slots[slot] = place + 1, b""
            else:
                del self._slots[slot]
        return bool(self._slots)


def slot_of_row(family: Family, key: bytes) -> int:
    """The slot that a record belongs to, -1 for one that belongs to the shard."""
    if family is not Family.META:
        return keys.slot_of_key(key)
    return keys.slot_of_key(key[len(keys.SET_ASIDE) :]) if key.startswith(keys.SET_ASIDE) else -1


def _range(family: Family, slot: int) -> tuple[bytes, bytes]:
    """Where the records of a slot begin in a family, and where they end."""
    before = keys.SET_ASIDE if family is Family.META else b""
    return before + keys.slot_prefix(slot), before + keys.slot_end(slot)


def rows_of(given: Iterable[list[Any]]) -> Iterator[tuple[Family, bytes, bytes | None]]:
    """Rows as they came over the wire."""
    for family, key, value in given:
        yield Family(family), key, value
