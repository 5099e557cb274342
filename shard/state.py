"""What a shard has in memory of its slots, its queues and the jobs that are out."""

from __future__ import annotations

from typing import NamedTuple

from shard import keys
from shard.ready import Lane, WindowBudget

PRIORITIES = 10


class Instant(NamedTuple):
    """One moment, on both clocks, in milliseconds."""

    wall_ms: int
    mono_ms: int


class Queue:
    """A queue that has something stored. Counters are those of its record in the store."""

    __slots__ = (
        "closing_until_ms",
        "dead",
        "dirty",
        "keys",
        "lanes",
        "leased",
        "name",
        "number",
        "ready",
        "reserved",
        "scheduled",
        "slot",
    )

    def __init__(self, slot: int, number: int, name: str) -> None:
        self.slot = slot
        self.number = number
        self.name = name
        self.ready = 0
        self.scheduled = 0
        self.leased = 0
        self.dead = 0
        self.keys = 0
        self.reserved = 0  # jobs of transactions that are not decided; counted from those at start
        self.lanes: list[Lane | None] = [None] * PRIORITIES  # by 9 - priority
        self.closing_until_ms = 0  # wall time; 0: it is not being deleted
        self.dirty = False

    @classmethod
    def read(cls, slot: int, number: int, record: keys.QueueRecord, budget: WindowBudget) -> Queue:
        """A queue as it is stored, with nothing of its jobs in memory."""
        queue = cls(slot, number, record.name)
        queue.ready, queue.scheduled, queue.leased = record.ready, record.scheduled, record.leased
        queue.dead, queue.keys = record.dead, record.keys
        queue.closing_until_ms = record.closing_until_ms
        for inverted, head in record.heads:
            queue.lanes[inverted] = Lane(slot, number, inverted, head, budget)
        return queue

    def value(self) -> bytes:
        """Its record in the store."""
        heads = [
            (inverted, head)
            for inverted, lane in enumerate(self.lanes)
            if lane is not None and (head := lane.head()) is not None
        ]
        return keys.queue_value(
            self.name, self.ready, self.scheduled, self.leased, self.dead, self.keys, heads, self.closing_until_ms
        )

    @property
    def is_empty(self) -> bool:
        """Nothing is stored of it but its own record."""
        return not (
            self.ready
            or self.leased
            or self.scheduled
            or self.reserved
            or self.dead
            or self.keys
            or self.closing_until_ms
        )

    @property
    def depth(self) -> int:
        """Live jobs: what `max_queue_depth` caps."""
        return self.ready + self.scheduled + self.leased + self.reserved


class Slot:
    """Where a slot's numbers stand. `changes` counts the turns in which anything of it changed."""

    __slots__ = ("changes", "next_queue", "next_sequence", "number", "sequence_limit")

    def __init__(self, number: int, sequence_limit: int, next_queue: int) -> None:
        self.number = number
        self.next_sequence = sequence_limit
        self.sequence_limit = sequence_limit
        self.next_queue = next_queue
        self.changes = 0


class Lease:
    """One job that is out. `deadline` is monotonic, `expires_ms` is what the client was told."""

    __slots__ = (
        "attempt",
        "deadline",
        "expires_ms",
        "inverted",
        "job_id",
        "lease_ms",
        "max_attempts",
        "op_id",
        "queue",
        "sequence",
    )

    def __init__(
        self, queue: Queue, inverted: int, sequence: int, job_id: bytes, attempt: int, max_attempts: int, op_id: int
    ) -> None:
        self.queue = queue
        self.inverted = inverted
        self.sequence = sequence
        self.job_id = job_id
        self.attempt = attempt
        self.max_attempts = max_attempts
        self.op_id = op_id
        self.deadline = 0
        self.expires_ms = 0
        self.lease_ms = 0

    def job_key(self) -> bytes:
        return keys.job_key(self.queue.slot, self.queue.number, self.inverted, self.sequence)
