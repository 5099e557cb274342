"""Dead letters: kept per queue in order of `failed_at`, handed out oldest first, gone when confirmed.

A drain hands records out but leaves them in the store: they are deleted when their answer has left,
and are there again when it has not, or when the shard dies in between (then they are seen twice,
never lost). Handed out records are passed over by other drains, so nobody else gets them.
"""

from __future__ import annotations

from collections.abc import Container
from enum import IntEnum
from heapq import heapify, heappop, heappush

from common.wire import DEAD_LETTER_OVERHEAD_BYTES, DeadLetter
from shard import keys
from shard.state import Queue
from shard.store import Family, Store

# Records read at once when the first one of a queue that is not handed out is looked for.
_SCAN_RECORDS = 64


class DeadLetterCause(IntEnum):
    """As in the protocol's enumeration of the same name."""

    ATTEMPTS_EXHAUSTED = 1
    REJECTED = 2
    LEASE_EXPIRED = 3
    ADMIN = 4


class DeadLetters:
    """The dead letters of a shard. The caller counts `queue.dead`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # The first record of each queue that is not handed out, by (failed_at, sequence).
        self._heads: dict[Queue, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int, int, Queue]] = []
        self._handed_out: dict[int, tuple[str, list[tuple[Queue, bytes]]]] = {}
        self._out: set[bytes] = set()

    def load(self, queue: Queue) -> None:
        """A queue with dead letters, at start."""
        self._find_head(queue, keys.dead_key(queue.slot, queue.number, 0, 0))

    def add(self, queue: Queue, failed_at_ms: int, sequence: int, value: bytes) -> None:
        self._store.put(Family.DEAD, keys.dead_key(queue.slot, queue.number, failed_at_ms, sequence), value)
        self._offer(queue, (failed_at_ms, sequence))

    def hand_out(self, router: str, op_id: int, queue: Queue | None, count: int, max_bytes: int) -> list[DeadLetter]:
        """Up to `count` records, oldest first, of one queue or of all, until `max_bytes` are full (at least one)."""
        letters: list[DeadLetter] = []
        taken: list[tuple[Queue, bytes]] = []
        size = 0
        while len(letters) < count:
            source = queue if queue is not None else self._oldest()
            if source is None or source not in self._heads:
                break
            failed_at_ms, sequence = self._heads[source]
            key = keys.dead_key(source.slot, source.number, failed_at_ms, sequence)
            value = self._store.get(Family.DEAD, key)
            assert value is not None, "the head of the dead letters is not in the store"
            size += len(value) + DEAD_LETTER_OVERHEAD_BYTES
            if letters and size > max_bytes:
                break
            record = keys.read_dead_value(value)
            letters.append(
                DeadLetter(record.job_id, record.cause, failed_at_ms, record.final_attempt, record.reason, record.body)
            )
            taken.append((source, key))
            self._out.add(key)
            self._find_head(source, key + b"\x00")
        if taken:
            self._handed_out[op_id] = (router, taken)
        return letters

    def keep(self, op_id: int, count: int) -> None:
        """Of what a drain was handed, only the first `count` records go into its answer."""
        router, taken = self._handed_out.pop(op_id, ("", []))
        if taken[:count]:
            self._handed_out[op_id] = (router, taken[:count])
        self._put_back(taken[count:])

    def confirm(self, op_id: int) -> list[Queue]:
        """The answer has left: its records are deleted. Returns the queue of each."""
        _, taken = self._handed_out.pop(op_id, ("", []))
        there = [(queue, key) for queue, key in taken if key in self._out]  # the others went with their queue
        for _, key in there:
            self._store.delete(Family.DEAD, key)
            self._out.discard(key)
        return [queue for queue, _ in there]

    def give_back(self, op_id: int) -> None:
        """The answer will never leave: its records are there as before."""
        self._put_back(self._handed_out.pop(op_id, ("", []))[1])

    def router_gone(self, router: str) -> None:
        for op_id in [op_id for op_id, (owner, _) in self._handed_out.items() if owner == router]:
            self.give_back(op_id)

    def expire(self, before_ms: int, limit: int) -> list[Queue]:
        """Delete up to `limit` records that failed at `before_ms` or earlier. Returns the queue of each."""
        removed: list[Queue] = []
        while len(removed) < limit:
            queue = self._oldest()
            if queue is None or self._heads[queue][0] > before_ms:
                break
            self.delete(queue, keys.dead_key(queue.slot, queue.number, *self._heads[queue]))
            removed.append(queue)
        return removed

    def delete(self, queue: Queue, key: bytes) -> None:
        """Delete one record that is in the store and not handed out."""
        self._store.delete(Family.DEAD, key)
        if self._heads.get(queue) == keys.read_dead_key(key)[2:]:
            self._find_head(queue, key + b"\x00")

    def clear(self, queue: Queue, start: bytes, limit: int, limit_bytes: int) -> tuple[int, bytes | None]:
        """Delete records of a queue from `start` on, also those that are handed out.

        Returns how many, and where the next ones begin when a limit was reached.
        """
        rows = self._store.scan(Family.DEAD, start, keys.queue_end(queue.slot, queue.number), limit, limit_bytes)
        for key, _ in rows:
            self._store.delete(Family.DEAD, key)
            self._out.discard(key)
        if not rows:
            return 0, None
        following = rows[-1][0] + b"\x00"
        self._find_head(queue, following)
        size = sum(len(key) + len(value) for key, value in rows)
        return len(rows), following if len(rows) == limit or size >= limit_bytes else None

    def is_handed_out(self, key: bytes) -> bool:
        return key in self._out

    def has_handed_out(self, slots: Container[int]) -> bool:
        """Whether a record of one of these slots is handed out."""
        return any(keys.slot_of_key(key) in slots for key in self._out)

    def start_of(self, queue: Queue) -> bytes:
        """Where the records of a queue begin that are not handed out; its end when all are."""
        head = self._heads.get(queue)
        if head is None:
            return keys.queue_end(queue.slot, queue.number)
        return keys.dead_key(queue.slot, queue.number, *head)

    def oldest_failed_at(self) -> int | None:
        """`failed_at` of the oldest record that is not handed out, wall milliseconds."""
        queue = self._oldest()
        return None if queue is None else self._heads[queue][0]

    def forget(self, queue: Queue) -> None:
        """The queue is no more."""
        self._heads.pop(queue, None)

    def _oldest(self) -> Queue | None:
        while self._heap:
            failed_at_ms, sequence, _, _, queue = self._heap[0]
            if self._heads.get(queue) == (failed_at_ms, sequence):
                return queue
            heappop(self._heap)
        return None

    def _offer(self, queue: Queue, place: tuple[int, int]) -> None:
        head = self._heads.get(queue)
        if head is None or place < head:
            self._heads[queue] = place
            heappush(self._heap, (*place, queue.slot, queue.number, queue))
            if len(self._heap) > 2 * len(self._heads) + 64:
                # Heads that were taken stay in the heap while another queue has an older record.
                self._heap = [(*head, other.slot, other.number, other) for other, head in self._heads.items()]
                heapify(self._heap)

    def _put_back(self, taken: list[tuple[Queue, bytes]]) -> None:
        for queue, key in taken:
            if key not in self._out:  # it went with its queue
                continue
            self._out.discard(key)
            failed_at_ms, sequence = keys.read_dead_key(key)[2:]
            self._offer(queue, (failed_at_ms, sequence))

    def _find_head(self, queue: Queue, start: bytes) -> None:
        """The first record at or after `start` that is not handed out becomes the queue's head."""
        self._heads.pop(queue, None)
        end = keys.queue_end(queue.slot, queue.number)
        while True:
            rows = self._store.scan(Family.DEAD, start, end, _SCAN_RECORDS, DEAD_LETTER_OVERHEAD_BYTES)
            if not rows:
                return
            for key, _ in rows:
                if key not in self._out:
                    failed_at_ms, sequence = keys.read_dead_key(key)[2:]
                    self._offer(queue, (failed_at_ms, sequence))
                    return
            start = rows[-1][0] + b"\x00"
