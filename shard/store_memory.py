"""The store in memory, for tests and the simulator: it models what a crash keeps and what it loses.

What was written but not yet synced is a tail of batches. A crash keeps all that is durable and, as a
disk may, any number of batches from the front of that tail; a batch is never kept in part.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from shard.store import Family, Store, StoreBusy, StoreError

# The changes of one written turn, per family.
Batch = list[dict[bytes, bytes | None]]


class MemoryStore(Store):
    """A store without a disk. `fail_next_write`, `fail_next_sync` and `refuse_writes` inject faults.

    After an injected failure every write and sync raises StoreError, as with a real disk; reads go on.
    """

    def __init__(self) -> None:
        super().__init__()
        # The next write fails: its batch becomes the last of the tail, for its outcome is unknown.
        self.fail_next_write = False
        # The next sync fails: nothing becomes durable by it.
        self.fail_next_sync = False
        # While set, a write is refused with StoreBusy and leaves no trace.
        self.refuse_writes = False
        self._visible = _Families()
        self._durable = _Families()
        self._tail: list[Batch] = []
        # How many batches left the tail's front: a position in the log that outlives the tail.
        self._durable_count = 0

    # -- reads --------------------------------------------------------------------------------

    def _stored_value(self, family: Family, key: bytes) -> bytes | None:
        return self._visible.values[family].get(key)

    def _stored_pairs(self, family: Family, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        keys = self._visible.keys[family]
        values = self._visible.values[family]
        for position in range(bisect_left(keys, start), bisect_left(keys, end)):
            yield keys[position], values[keys[position]]

    # -- the end of a turn --------------------------------------------------------------------

    def write(self) -> bool:
        self._refuse_after_failure()
        if not any(self.pending):
            return False
        if self.refuse_writes:
            raise StoreBusy("writes are refused")
        batch = [dict(changes) for changes in self.pending]
        self._tail.append(batch)
        if self.fail_next_write:
            self._failure = "a write failed"
            raise StoreError(self._failure)
        self._visible.apply(batch)
        self._drop_pending()
        return True

    def sync(self) -> None:
        self.end_sync(self.begin_sync())

    def begin_sync(self) -> int:
        """Start a sync whose end comes later: the position in the log up to which it reaches."""
        self._refuse_after_failure()
        return self._durable_count + len(self._tail)

    def end_sync(self, reach: int) -> None:
        """What was written before the `begin_sync` that gave `reach` is durable. Raises StoreError."""
        self._refuse_after_failure()
        if self.fail_next_sync:
            self._failure = "a sync failed"
            raise StoreError(self._failure)
        count = max(0, reach - self._durable_count)
        for batch in self._tail[:count]:
            self._durable.apply(batch)
        del self._tail[:count]
        self._durable_count += count

    def close(self) -> None:
        try:
            if self._failure is None:
                self.sync()
        finally:
            self._drop_pending()
            self._failure = self._failure or "the store is closed"

    # -- crashes ------------------------------------------------------------------------------

    @property
    def unsynced(self) -> int:
        """How many batches a crash may lose; a batch whose write failed is the last of them."""
        return len(self._tail)

    def as_durable(self) -> MemoryStore:
        """The store as a restart would find it if one came now and kept nothing of the tail."""
        found = MemoryStore()
        for families in (found._visible, found._durable):
            families.copy(self._durable)
        return found

    def crash(self, keep_unsynced: int = 0) -> MemoryStore:
        """The store as a restart finds it, with `keep_unsynced` batches of the tail; ends this one.

        Raises ValueError for more batches than `unsynced`.
        """
        if not 0 <= keep_unsynced <= self.unsynced:
            raise ValueError(f"keep_unsynced {keep_unsynced} is not within 0 to {self.unsynced}")
        self._failure = self._failure or "the store has crashed"
        found = MemoryStore()
        for families in (found._visible, found._durable):
            families.copy(self._durable)
            for batch in self._tail[:keep_unsynced]:
                families.apply(batch)
        return found


class _Families:
    """Sorted keys and their values, per family."""

    def __init__(self) -> None:
        self.keys: list[list[bytes]] = [[] for _ in Family]
        self.values: list[dict[bytes, bytes]] = [{} for _ in Family]

    def copy(self, other: _Families) -> None:
        self.keys = [list(keys) for keys in other.keys]
        self.values = [dict(values) for values in other.values]

    def apply(self, batch: Batch) -> None:
        for keys, values, changes in zip(self.keys, self.values, batch, strict=True):
            for key, value in changes.items():
                if value is None:
                    if values.pop(key, None) is not None:
                        del keys[bisect_left(keys, key)]
                else:
                    if key not in values:
                        insort(keys, key)
                    values[key] = value
