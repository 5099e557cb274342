"""What has become durable on any disk: history that nothing may undo.

A witness (see `witness`) gathers what each written batch means, and tells it here when the batch is
synced, or was kept by a crash. What a client is told must be among these facts.
"""

from __future__ import annotations

from typing import NamedTuple

from common.wire import EnqueueJob
from tests.simulation.world import Finding


class StoredJob(NamedTuple):
    """A job that was stored once."""

    shard: int
    queue: str
    job_type: str  # unique to the job in a run
    transaction: int  # 0: it came alone, or in a batch of one shard


class Promise(NamedTuple):
    """What a shard has prepared for a transaction."""

    home: int
    jobs: list[tuple[EnqueueJob, bytes]]  # without duplicates; with the ids that they will have


class Facts:
    """The history of all disks together."""

    def __init__(self, shards: int) -> None:
        self.stored: dict[bytes, StoredJob] = {}
        self.by_type: dict[str, bytes] = {}
        self.ended: dict[bytes, str] = {}  # why
        self.live: list[set[bytes]] = [set() for _ in range(shards)]  # stored and not ended
        self.promised: list[set[int]] = [set() for _ in range(shards)]  # transactions that are prepared there
        self.decided: dict[int, list[int]] = {}  # ever, with the other participants
        self.decisions: list[set[int]] = [set() for _ in range(shards)]  # those that are not forgotten
        self.released: dict[int, int] = {}  # transactions that a shard has let go of

    def add_shard(self) -> None:
        self.live.append(set())
        self.promised.append(set())
        self.decisions.append(set())

    def remove_shard(self) -> None:
        """The last one."""
        for what, left in (("jobs", self.live), ("promises", self.promised), ("decisions", self.decisions)):
            if left.pop():
                raise Finding("lost", f"shard-{len(left)} was taken away with {what} of its own")

    def job_stored(self, shard: int, job_id: bytes, job: StoredJob) -> None:
        self.stored[job_id] = job
        self.by_type[job.job_type] = job_id
        self.live[shard].add(job_id)

    def job_ended(self, shard: int, job_id: bytes, why: str) -> None:
        self.ended[job_id] = why
        self.live[shard].discard(job_id)

    def transaction_prepared(self, shard: int, transaction: int) -> None:
        self.promised[shard].add(transaction)

    def transaction_decided(self, shard: int, transaction: int, others: list[int]) -> None:
        self.decided[transaction] = others
        self.decisions[shard].add(transaction)

    def transaction_applied(self, shard: int, transaction: int) -> None:
        self.promised[shard].discard(transaction)

    def transaction_released(self, shard: int, transaction: int) -> None:
        self.promised[shard].discard(transaction)
        self.released[transaction] = shard

    def transaction_forgotten(self, shard: int, transaction: int) -> None:
        self.decisions[shard].discard(transaction)
