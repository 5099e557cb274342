"""Idempotency keys: which job a key of a queue stands for, and until when.

A key's deadline is fixed when it is written: a window that is changed later changes no existing
key, and a duplicate does not prolong it. A key outlives its job.
"""

from __future__ import annotations

from collections.abc import Iterable

from shard import keys
from shard.state import Queue
from shard.store import Family, Store
from shard.timers import SlotTimers


class DedupKeys:
    """The idempotency records of a shard. Instants are wall milliseconds; the caller counts `queue.keys`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._expiry = SlotTimers(Family.DEDUP_EXPIRY, store)

    def look(self, slot: int) -> None:
        """Find the records of a slot, at start or when it has come here."""
        self._expiry.look(slot)

    def forget(self, slots: Iterable[int]) -> None:
        """These slots are here no more."""
        self._expiry.forget(slots)

    def find(self, queue: Queue, key: str, wall_ms: int) -> bytes | None:
        """The id of the job that holds a key, None when nobody does (any more)."""
        value = self._store.get(Family.DEDUP, keys.dedup_key(queue.slot, queue.number, key.encode()))
        if value is None:
            return None
        deadline_ms, job_id = keys.read_dedup_value(value)
        return job_id if deadline_ms > wall_ms else None

    def remember(self, queue: Queue, key: str, job_id: bytes, deadline_ms: int) -> None:
        """A new job holds a key that is free."""
        encoded = key.encode()
        dedup_key = keys.dedup_key(queue.slot, queue.number, encoded)
        earlier = self._store.get(Family.DEDUP, dedup_key)
        if earlier is None:
            queue.keys += 1
        else:  # expired, and not yet swept
            expired_ms, _ = keys.read_dedup_value(earlier)
            self._store.delete(
                Family.DEDUP_EXPIRY, keys.dedup_expiry_key(queue.slot, expired_ms, queue.number, encoded)
            )
        self._store.put(Family.DEDUP, dedup_key, keys.dedup_value(deadline_ms, job_id))
        self._store.put(Family.DEDUP_EXPIRY, keys.dedup_expiry_key(queue.slot, deadline_ms, queue.number, encoded), b"")
        self._expiry.note(queue.slot, deadline_ms)

    def expire(self, wall_ms: int, limit: int) -> list[tuple[int, int]]:
        """Remove up to `limit` keys whose time is over; returns slot and queue number of each."""
        removed: list[tuple[int, int]] = []
        for expiry_key, _ in self._expiry.due(wall_ms, limit):
            slot, _, number, key = keys.read_dedup_expiry_key(expiry_key)
            self._store.delete(Family.DEDUP_EXPIRY, expiry_key)
            self._store.delete(Family.DEDUP, keys.dedup_key(slot, number, key))
            removed.append((slot, number))
        return removed

    def clear(self, queue: Queue, start: bytes, limit: int) -> tuple[int, bytes | None]:
        """Remove up to `limit` keys of a queue from `start` on; how many, and where the next ones begin if any."""
        rows = self._store.scan(Family.DEDUP, start, keys.queue_end(queue.slot, queue.number), limit)
        for dedup_key, value in rows:
            deadline_ms, _ = keys.read_dedup_value(value)
            expiry_key = keys.dedup_expiry_key(queue.slot, deadline_ms, queue.number, dedup_key[6:])
            self._store.delete(Family.DEDUP, dedup_key)
            self._store.delete(Family.DEDUP_EXPIRY, expiry_key)
        return len(rows), rows[-1][0] + b"\x00" if len(rows) == limit else None

    def next_due(self) -> int | None:
        return self._expiry.next_due()
