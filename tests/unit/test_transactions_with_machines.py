"""Atomic batches over all shards, in the small world of `test_core_with_machines`.

Shards die and lose what was not synced, routers die in the middle of a transaction, keys are fought
over and queues are capped. A batch is all or nothing in the end, and nothing of it is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest

from common import job_ids, wire
from common import queue_pb2 as pb
from common.wire import Op
from router.core import Reply
from router.front import Status
from shard import keys
from shard.machine import ASK_AGAIN_MS
from shard.store import Family
from shard.store_memory import MemoryStore
from tests.unit.router_driver import configured
from tests.unit.shard_driver import recount
from tests.unit.test_core_with_machines import (
    LONG_MS,
    QUEUES,
    Chances,
    Clients,
    Cluster,
    SimCall,
    check_that_every_job_is_somewhere,
    check_that_no_poll_waits_for_a_job_that_is_ready,
    check_that_nobody_waits_or_holds_what_was_not_delivered,
)

SEEDS = 300
STEPS = 50
CAPS = {QUEUES[0]: 5, QUEUES[3]: 8}
KEYS = ["a", "b", "c"]
CONFIG = configured(
    limits={"default_max_attempts": 100},
    storage={"dead_letter_retention_ms": 3_600_000},
    queues=[{"name": name, "max_queue_depth": cap} for name, cap in CAPS.items()],
)
CHANCES = Chances(shard_dies=0.04, router_dies=0.03, sync_fails=0.01)
NO_MISHAPS = Chances(0, 0, 0)
# What tells a client for certain that nothing was stored.
NOT_STORED = (Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED)


class Held(NamedTuple):
    """A key that a job asked for."""

    queue: str
    key: str


class Batch:
    """What a client asked for at once, and what it was told."""

    def __init__(self, jobs: Sequence[pb.EnqueueRequest]) -> None:
        self.jobs = jobs
        self.is_known = False  # whether the client was told for certain
        self.stored: set[str] = set()  # types of the jobs that it was told are new

    @property
    def types(self) -> set[str]:
        return {job.job_type for job in self.jobs}


class BatchClients(Clients):
    """Clients that enqueue atomically most of the time."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.batches: list[Batch] = []
        self.held: dict[str, Held] = {}  # by type of the job
        self.seen: dict[str, str] = {}  # types of delivered jobs: their ids
        self.ack_sent: set[str] = set()

    def act(self) -> None:
        weights = {self.enqueue_atomic: 5, self.enqueue_with_keys: 2, self.reserve: 4}
        (action,) = self._random.choices(list(weights), list(weights.values()))
        action()

    def _call(self, method: str, request: Any, done: Callable[[Reply | None], None], patience_ms: int = 0) -> None:
        if method == "Ack":
            self.ack_sent.add(request.job_id)
        super()._call(method, request, done, patience_ms)

    def _jobs(self, count: int) -> list[pb.EnqueueRequest]:
        jobs = []
        for _ in range(count):
            self._number += 1
            job = pb.EnqueueRequest(queue=self._random.choice(QUEUES), job_type=f"job-{self._number}")
            if self._world.chance(0.4):
                job.idempotency_key = self._random.choice(KEYS)
                self.held[job.job_type] = Held(job.queue, job.idempotency_key)
            if self._world.chance(0.1):
                job.scheduled_at.FromMilliseconds(self._world.wall_ms + self._random.randint(1, 100))
            jobs.append(job)
        return jobs

    def enqueue_atomic(self) -> None:
        batch = Batch(self._jobs(self._random.randint(1, 5)))
        self.batches.append(batch)
        request = pb.EnqueueBatchRequest(jobs=batch.jobs)
        self._call("EnqueueAtomic", request, partial(self._atomic_answered, batch), self._impatience())

    def _atomic_answered(self, batch: Batch, reply: Reply | None) -> None:
        if reply is None:
            return
        if reply.status in NOT_STORED:
            batch.is_known = True
        elif reply.answer is not None:
            batch.is_known = True
            response = pb.EnqueueAtomicResponse.FromString(reply.answer)
            if response.HasField("success"):
                self._stored_together(batch, response.success.responses)
            else:
                assert {error.rejection.WhichOneof("reason") for error in response.rejection.errors} == {"queue_full"}
        else:
            assert reply.status in (Status.ABORTED, Status.INTERNAL)
        if batch.is_known:
            self.not_stored |= batch.types - batch.stored

    def _stored_together(self, batch: Batch, responses: Sequence[pb.EnqueueResponse]) -> None:
        for job, response in zip(batch.jobs, responses, strict=True):
            if not response.deduplicated:
                assert response.job_id not in self.types
                self.types[response.job_id] = job.job_type
                batch.stored.add(job.job_type)
        # Whoever hears success can reserve every job at once, unless it was served or finished before.
        there = {job_id for shard in self._cluster.shards for job_id, _ in stored_jobs(shard.store)}
        missing = {response.job_id for response in responses} - there - self.ack_sent - self.drained
        assert missing == set(), "a client heard of a success that is none"

    def enqueue_with_keys(self) -> None:
        batch = self._jobs(self._random.randint(1, 2))
        request = pb.EnqueueBatchRequest(jobs=batch)
        self._call("EnqueueBatch", request, partial(self._batch_answered, batch), self._impatience())

    def _batch_answered(self, jobs: Sequence[pb.EnqueueRequest], reply: Reply | None) -> None:
        if reply is not None and reply.status in NOT_STORED:
            self.not_stored |= {job.job_type for job in jobs}
        if reply is None or reply.answer is None:
            return
        results = pb.EnqueueBatchResponse.FromString(reply.answer).results
        for job, result in zip(jobs, results, strict=True):
            if result.HasField("success") and not result.success.deduplicated:
                assert result.success.job_id not in self.types
                self.types[result.success.job_id] = job.job_type
            else:
                self.not_stored.add(job.job_type)

    def _reserved(self, lease_ms: int, reply: Reply | None) -> None:
        if reply is not None and reply.answer is not None:
            for job in pb.ReserveResponse.FromString(reply.answer).jobs:
                self.seen[job.job_type] = job.id
        super()._reserved(lease_ms, reply)


class BatchCluster(Cluster):
    """A cluster with clients of its own kind; after every step the promises of its shards are looked at."""

    clients: BatchClients

    def __init__(self, seed: int, chances: Chances = CHANCES) -> None:
        super().__init__(seed, CONFIG, chances)
        self.clients = BatchClients(self)

    def step(self) -> None:
        super().step()
        self.check_promises()

    def check_promises(self) -> None:
        for shard in self.shards:
            if shard.generation:
                for queue in shard.machine._queues.values():
                    assert queue.reserved >= 0
                    assert queue.depth <= CAPS.get(queue.name, queue.depth), f"{queue.name} is over its cap"

    def settle(self) -> None:
        """Until nothing is under way, and every shard has asked for what it was in doubt of."""
        self.world.settle()
        for _ in range(4):
            self.world.run(ASK_AGAIN_MS + 10)
            self.world.settle()

    def enqueue_at_last(self, queue: str, key: str) -> pb.EnqueueResult:
        """An enqueue that nothing disturbs."""
        replies: list[Reply | None] = []
        job = pb.EnqueueRequest(queue=queue, job_type=f"last {queue} {key}", idempotency_key=key)
        call = SimCall("EnqueueBatch", pb.EnqueueBatchRequest(jobs=[job]), float("inf"), replies.append)
        self.routers[0].arrived(call)
        self.world.settle()
        (reply,) = replies
        assert reply is not None and reply.answer is not None
        (result,) = pb.EnqueueBatchResponse.FromString(reply.answer).results
        return result


def stored_jobs(store: MemoryStore) -> list[tuple[str, str]]:
    """Id and type of every job that is live or a dead letter."""
    found = []
    for family in (Family.JOBS, Family.SCHEDULED):
        for _, record in store.scan(family, b"", b"\xff" * 8, 1 << 62):
            found.append((record[:16], record[keys.JOB_HEAD_BYTES :]))
    for _, value in store.scan(Family.DEAD, b"", b"\xff" * 8, 1 << 62):
        dead = keys.read_dead_value(value)
        found.append((dead.job_id, dead.body))
    return [(job_ids.text(job_id), pb.Job.FromString(body).job_type) for job_id, body in found]


# ---- what must hold


def check_that_no_transaction_is_left(cluster: Cluster) -> None:
    for shard in cluster.shards:
        assert shard.store.scan(Family.TRANSACTIONS, b"", b"\xff", 1 << 62) == []
        participant = shard.machine._participant
        assert (participant._prepared, participant._decided, participant._refused) == ({}, {}, {})
        assert (participant._held, participant._orphans, participant._blocked) == ({}, {}, {})
        assert [queue.name for queue in shard.machine._queues.values() if queue.reserved] == []
        counts = {name: each for name, each in shard.machine.counts().items() if any(each)}
        assert recount(shard.store) == counts


def check_that_batches_are_all_or_nothing(clients: BatchClients, ever: dict[str, str]) -> None:
    """`ever` are the jobs that were stored at any time: their ids, by type."""
    keys_held = {clients.held[job_type] for job_type in ever if job_type in clients.held}
    for batch in clients.batches:
        stored = batch.types & ever.keys()
        if batch.is_known:
            assert stored == batch.stored
            continue
        unconditional = {job.job_type for job in batch.jobs if job.job_type not in clients.held}
        if stored:
            assert unconditional <= stored, "a batch in parts"
            assert {clients.held[each] for each in batch.types - unconditional} <= keys_held, "a batch in parts"


def check_that_keys_stand_for_stored_jobs(cluster: BatchCluster, ever: dict[str, str]) -> None:
    by_key: dict[Held, str] = {}
    for job_type, job_id in ever.items():
        held = cluster.clients.held.get(job_type)
        if held is not None:
            assert held not in by_key, "two jobs of one key"
            by_key[held] = job_id
    for queue in QUEUES:
        for key in KEYS:
            result = cluster.enqueue_at_last(queue, key)
            job_id = by_key.get(Held(queue, key))
            if job_id is not None:
                assert (result.success.job_id, result.success.deduplicated) == (job_id, True)
            elif result.HasField("rejection"):
                assert result.rejection.WhichOneof("reason") == "queue_full"
            else:
                assert not result.success.deduplicated, "a key of a job that was never stored"


def check(cluster: BatchCluster) -> None:
    """Everything has come to rest."""
    cluster.chances = NO_MISHAPS
    check_that_no_transaction_is_left(cluster)
    check_that_nobody_waits_or_holds_what_was_not_delivered(cluster)
    check_that_every_job_is_somewhere(cluster)
    ever = {job_type: job_id for shard in cluster.shards for job_id, job_type in stored_jobs(shard.store)}
    ever |= cluster.clients.seen
    check_that_batches_are_all_or_nothing(cluster.clients, ever)
    check_that_keys_stand_for_stored_jobs(cluster, ever)
    check_that_no_transaction_is_left(cluster)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_atomic_batches_are_all_or_nothing_and_nothing_of_them_is_left_behind(seed: int) -> None:
    cluster = BatchCluster(seed)
    for _ in range(STEPS):
        cluster.step()
    cluster.settle()
    check_that_no_poll_waits_for_a_job_that_is_ready(cluster)
    cluster.end_waits()
    cluster.settle()
    check(cluster)


# ---- one batch, and a death at each moment of its way

HOME, OTHER, COORDINATOR = "home", "other", "coordinator"
# Events after which a batch that nobody disturbs is surely over.
MOMENTS_MAX = 100


def one_batch(deaths: dict[str, int], seed: int = 0) -> tuple[BatchCluster, Batch, bool]:
    """A batch on all shards, and who dies after how many events. Whether it was over before the first death."""
    cluster = BatchCluster(seed, NO_MISHAPS)
    cluster.settle()
    clients = cluster.clients
    jobs = [
        pb.EnqueueRequest(queue=queue, job_type=f"job-{number}", idempotency_key=KEYS[0])
        for number, queue in enumerate((QUEUES[0], QUEUES[2], QUEUES[3]))
    ]
    clients.held = {job.job_type: Held(job.queue, job.idempotency_key) for job in jobs}
    batch = Batch(jobs)
    clients.batches.append(batch)
    call = SimCall(
        "EnqueueAtomic",
        pb.EnqueueBatchRequest(jobs=jobs),
        (cluster.world.wall_ms + LONG_MS) / 1000,
        partial(clients._atomic_answered, batch),
    )
    cluster.routers[0].arrived(call)
    is_over = False
    for count in range(max(deaths.values()) + 1):
        if count == min(deaths.values()):
            is_over = cluster.world.under_way == 0
        if deaths.get(HOME) == count:
            cluster.shards[0].die()
        if deaths.get(OTHER) == count:
            cluster.shards[1].die()
        if deaths.get(COORDINATOR) == count:
            cluster.replace_router(0)
        cluster.check_promises()
        cluster.world.next()
    cluster.settle()
    return cluster, batch, is_over


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dying", [HOME, OTHER, COORDINATOR])
def test_a_batch_is_all_or_nothing_whenever_a_part_dies(dying: str, seed: int) -> None:
    outcomes = set()
    for moment in range(MOMENTS_MAX):
        cluster, batch, is_over = one_batch({dying: moment}, seed)
        check(cluster)
        outcomes.add((batch.is_known, bool(batch.stored)))
        if is_over:
            break
    assert is_over
    assert (True, True) in outcomes
    assert len(outcomes) > 1, "it was stored whatever happened"


@pytest.mark.parametrize("dying", [(HOME, COORDINATOR), (OTHER, COORDINATOR), (HOME, OTHER)], ids=" ".join)
@pytest.mark.parametrize("apart", [0, 3, 6, 12])
def test_a_batch_is_all_or_nothing_whenever_two_parts_die(dying: tuple[str, str], apart: int) -> None:
    first, second = dying
    is_over = False
    for moment in range(MOMENTS_MAX):
        for deaths in ({first: moment, second: moment + apart}, {second: moment, first: moment + apart}):
            cluster, _, is_over = one_batch(deaths, seed=moment)
            check(cluster)
        if is_over:
            break
    assert is_over


def test_the_world_meets_every_step_of_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests above would say little."""
    seen: set[int] = set()
    unpack = wire.unpack

    def noting(message: bytes) -> wire.Envelope:
        envelope = unpack(message)
        if envelope.sender.startswith("router"):
            seen.update(operation[1] for operation in envelope.items)
        return envelope

    monkeypatch.setattr(wire, "unpack", noting)
    for seed in range(20):
        cluster = BatchCluster(seed)
        for _ in range(STEPS):
            cluster.step()
        cluster.settle()
    assert {Op.PREPARE, Op.DECIDE, Op.COMMIT, Op.ABORT, Op.RESOLVE, Op.FORGET} <= seen
