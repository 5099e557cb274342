"""The store: ordered keys in families, read with the changes of the turn that is being built.

A turn puts and deletes; reads see those changes at once. `write` hands all of them over in one
atomic batch without waiting for the disk; `sync` makes everything written before it durable and
may run in another thread while the next turn is built. That is all a shard asks of its storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import islice


class Family(IntEnum):
    """What is stored apart from the rest, by purpose. Keys and values: see `keys`."""

    JOBS = 0
    SCHEDULED = 1
    LEASES = 2
    DEDUP = 3
    DEDUP_EXPIRY = 4
    DEAD = 5
    QUEUES = 6
    SLOTS = 7
    META = 8
    TRANSACTIONS = 9


class StoreError(Exception):
    """The storage failed. After a failed write or sync the shard stops and starts again from disk."""


class StoreCorrupt(StoreError):
    """What is stored is damaged, found when it was opened or read; the text says what to do."""


class StoreBusy(StoreError):
    """The write was refused for now (it would have stalled); nothing was written, try again later."""


class Store(ABC):
    """A store as the state machine sees it."""

    def __init__(self) -> None:
        # Changes of the turn, per family: the value, or None for a deletion. Keys are only ever added
        # until the turn is written: the order of scans is kept up on that assumption.
        self.pending: list[dict[bytes, bytes | None]] = [{} for _ in Family]
        # The keys of `pending` in order, brought up to date by the scans that need them.
        self._pending_keys: list[list[bytes]] = [[] for _ in Family]
        # Why nothing can be written any more. Set by the thread that met the failure, never unset.
        self._failure: str | None = None

    # -- the turn -----------------------------------------------------------------------------

    def put(self, family: Family, key: bytes, value: bytes) -> None:
        self.pending[family][key] = value

    def delete(self, family: Family, key: bytes) -> None:
        self.pending[family][key] = None

    def get(self, family: Family, key: bytes) -> bytes | None:
        """The value of a key, with the turn's changes. Raises StoreError."""
        changes = self.pending[family]
        if key in changes:
            return changes[key]
        return self._stored_value(family, key)

    def scan(
        self, family: Family, start: bytes, end: bytes, limit: int, limit_bytes: int = 1 << 62
    ) -> list[tuple[bytes, bytes]]:
        """Pairs with start ≤ key < end in order, with the turn's changes.

        Stops after `limit` pairs, or after the pair with which keys and values together reach
        `limit_bytes`: fewer and smaller means that there are no more. Raises StoreError.
        """
        if limit <= 0 or start >= end:
            return []
        pairs: Iterable[tuple[bytes, bytes]] = self._stored_pairs(family, start, end)
        changed = self._changed_keys(family, start, end)
        if changed:
            pairs = _overlay(pairs, changed, self.pending[family])
        return _take(pairs, limit, limit_bytes)

    def _changed_keys(self, family: Family, start: bytes, end: bytes) -> list[bytes]:
        """Keys with start ≤ key < end that the turn put or deleted, in order."""
        changes = self.pending[family]
        keys = self._pending_keys[family]
        # A dict keeps the order of insertion, so the keys that are new since the last scan are its tail.
        for key in islice(reversed(changes), len(changes) - len(keys)):
            insort(keys, key)
        return keys[bisect_left(keys, start) : bisect_left(keys, end)]

    @abstractmethod
    def _stored_value(self, family: Family, key: bytes) -> bytes | None:
        """The value of a key as written, without the turn's changes."""

    @abstractmethod
    def _stored_pairs(self, family: Family, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with start ≤ key < end in order as written, without the turn's changes."""

    # -- the end of a turn --------------------------------------------------------------------

    @abstractmethod
    def write(self) -> bool:
        """Write the turn's changes in one batch, without sync; False when there were none.

        Raises StoreBusy (nothing written, the changes are still pending) or StoreError (whether they
        are on disk is not known until the store is opened again).
        """

    @abstractmethod
    def sync(self) -> None:
        """Block until all that was written before this call is durable. Raises StoreError."""

    @abstractmethod
    def close(self) -> None:
        """Make durable what was written and release everything, what is pending is dropped.

        Not while another thread is in `sync`. The store cannot be used afterwards. Raises StoreError.
        """

    # -- for the two forms --------------------------------------------------------------------

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise StoreError(self._failure)

    def _drop_pending(self) -> None:
        """Forget the turn's changes, because they are written or the store is closed."""
        for changes, keys in zip(self.pending, self._pending_keys, strict=True):
            if changes:
                changes.clear()
                keys.clear()


def _overlay(
    pairs: Iterable[tuple[bytes, bytes]], changed: list[bytes], changes: Mapping[bytes, bytes | None]
) -> Iterator[tuple[bytes, bytes]]:
    """What is stored with the changes laid over it; `changed` are keys of `changes`, all in order."""
    position = 0
    for pair in pairs:
        stored = pair[0]
        while position < len(changed) and changed[position] < stored:
            value = changes[changed[position]]
            if value is not None:
                yield changed[position], value
            position += 1
        # A stored key that was changed too comes from the changes, in the next round or at the end.
        if position == len(changed) or changed[position] != stored:
            yield pair
    for key in changed[position:]:
        value = changes[key]
        if value is not None:
            yield key, value


def _take(pairs: Iterable[tuple[bytes, bytes]], limit: int, limit_bytes: int) -> list[tuple[bytes, bytes]]:
    """The first pairs, until one of the limits is reached. `limit` is at least 1."""
    taken: list[tuple[bytes, bytes]] = []
    size_bytes = 0
    for pair in pairs:
        taken.append(pair)
        size_bytes += len(pair[0]) + len(pair[1])
        if len(taken) == limit or size_bytes >= limit_bytes:
            break
    return taken
