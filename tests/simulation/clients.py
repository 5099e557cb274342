"""The clients of a run: what they ask for, what they are told, and what of that may not be.

Producers, workers and those who look at dead letters are one object, for they are held to one
account: `facts` is what the disks know, and every answer has to agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import Message

from common import job_ids
from common import queue_pb2 as pb
from common.wire import Op
from router.core import Reply
from router.front import Status
from tests.simulation.router import RouterProcess, SimCall
from tests.simulation.shape import KEYS, LONG_MS
from tests.simulation.world import Finding
from tests.unit.router_driver import milliseconds

if TYPE_CHECKING:
    from tests.simulation.simulation import Cluster

# How long a request may be on its way to a router, and how long a worker works, at most.
CALL_US = 1_500
WORK_US = 40_000
LARGE_BYTES = 40_000
# What tells a client for certain that nothing was done, and what says that it may have been.
NOT_DONE = (Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED)
PERHAPS_DONE = (Status.ABORTED, Status.INTERNAL)
LOST_LEASE = (Status.NOT_FOUND, Status.FAILED_PRECONDITION)

_Done = Callable[[Reply | None], None]


class Held(NamedTuple):
    """An idempotency key that a job asked for."""

    queue: str
    key: str


class Batch:
    """What a client enqueued at once, and what it knows of it."""

    def __init__(self, jobs: Sequence[pb.EnqueueRequest], is_atomic: bool) -> None:
        self.types = [job.job_type for job in jobs]
        self.jobs = jobs
        self.is_atomic = is_atomic
        self.told = ""  # "stored", "not stored", "perhaps"; empty while there is no answer


class Delivery(NamedTuple):
    """A job as a worker was given it."""

    job_id: str
    attempt: int
    is_long: bool  # the lease outlives the run


class Clients:
    """Everybody who calls the server."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._facts = cluster.facts
        self._seen = cluster.seen
        self._number = 0
        self.batches: dict[str, Batch] = {}  # by type of each job
        self.held: dict[str, Held] = {}  # by type
        self.not_stored: set[str] = set()  # types that a client was told are not stored
        self.failed_keys: set[Held] = set()  # asked for in vain
        self.deliveries: set[tuple[str, int]] = set()
        self.acked: dict[str, int] = {}
        self.perhaps_acked: set[str] = set()
        self.drained: dict[str, int] = {}  # with the last attempt
        # Calls on leases that were certainly not done: kind, job, attempt.
        self.not_done: set[tuple[int, bytes, int]] = set()
        self.lease_calls: dict[tuple[int, bytes, int], int] = {}
        self.open_polls: dict[SimCall, tuple[RouterProcess, pb.ReserveRequest]] = {}
        shape = cluster.shape
        actions: dict[str, Callable[[], None]] = {
            "EnqueueBatch": self.enqueue,
            "EnqueueAtomic": self.enqueue_atomic,
            "Reserve": self.reserve,
            "DrainDeadLetters": self.drain,
            "GetServerInfo": self.look,
        }
        self._actions = [actions[kind] for kind, weight in shape.rpcs.items() for _ in range(weight)]

    def act(self) -> None:
        self._world.pick(self._actions)()

    # -- calls ----------------------------------------------------------------------------------

    def _call(self, method: str, request: Message, done: _Done, may_give_up: bool = True) -> None:
        routers = self._cluster.supervisor.live_routers()
        if not routers:
            self._seen["connection refused"] += 1
            return
        self._seen[method] += 1
        world = self._world
        router = world.pick(routers)
        deadline = math.inf
        patience_ms = 0
        if may_give_up and world.chance(self._cluster.shape.impatient):
            patience_ms = world.number(1, 30) if world.chance(0.5) else world.number(30, 200)
            if world.chance(0.5):
                deadline = (world.wall_ms + patience_ms) / 1000
        call = SimCall(method, request.SerializeToString(), deadline, done)
        if isinstance(request, pb.ReserveRequest):
            self.open_polls[call] = router, request
            call.done = partial(self._poll_ends, call, done)
        world.later(CALL_US, router.call_arrives, call)
        if patience_ms:
            world.at_ms(world.mono_ms + patience_ms, router.client_goes, call)

    def _poll_ends(self, call: SimCall, done: _Done, reply: Reply | None) -> None:
        del self.open_polls[call]
        done(reply)

    def _note(self, what: str) -> None:
        if self._world.trace is not None:
            self._world.note("client", what)

    # -- producers ------------------------------------------------------------------------------

    def _jobs(self, count: int) -> list[pb.EnqueueRequest]:
        world, shape = self._world, self._cluster.shape
        jobs = []
        for _ in range(count):
            self._number += 1
            job = pb.EnqueueRequest(queue=world.pick(shape.queues), job_type=f"job-{self._number}")
            if world.chance(shape.keyed):
                job.idempotency_key = world.pick(KEYS)
                self.hold(job)
            if world.chance(shape.scheduled):
                job.scheduled_at.FromMilliseconds(world.wall_ms + world.number(1, 100))
            if world.chance(0.3):
                job.priority = world.number(0, 9)
            if world.chance(0.1):
                job.max_attempts = world.number(1, 3)
            if world.chance(shape.large):
                job.payload.data, job.payload.encoding = bytes(LARGE_BYTES), "e"
            jobs.append(job)
        return jobs

    def hold(self, job: pb.EnqueueRequest) -> None:
        self.held[job.job_type] = Held(job.queue, job.idempotency_key)

    def enqueue(self) -> None:
        self.send_batch(self._jobs(self._world.number(1, 3)))

    def send_batch(self, jobs: Sequence[pb.EnqueueRequest], may_give_up: bool = True) -> None:
        batch = self._batch(jobs, is_atomic=False)
        request = pb.EnqueueBatchRequest(jobs=jobs)
        self._call("EnqueueBatch", request, partial(self._batch_answered, batch), may_give_up)

    def enqueue_atomic(self) -> None:
        self.send_atomic(self._jobs(self._world.number(1, 5)))

    def send_atomic(self, jobs: Sequence[pb.EnqueueRequest], may_give_up: bool = True) -> Batch:
        batch = self._batch(jobs, is_atomic=True)
        request = pb.EnqueueBatchRequest(jobs=jobs)
        self._call("EnqueueAtomic", request, partial(self._atomic_answered, batch), may_give_up)
        return batch

    def _batch(self, jobs: Sequence[pb.EnqueueRequest], is_atomic: bool) -> Batch:
        batch = Batch(jobs, is_atomic)
        for job in jobs:
            self.batches[job.job_type] = batch
        held = [self.held[job.job_type] for job in jobs if job.job_type in self.held]
        if len(set(held)) < len(held):
            self._seen["a key twice in one batch"] += 1
        return batch

    def _batch_answered(self, batch: Batch, reply: Reply | None) -> None:
        if reply is None or reply.answer is None:
            self._batch_failed(batch, reply)
            return
        results = pb.EnqueueBatchResponse.FromString(reply.answer).results
        for job, result in zip(batch.jobs, results, strict=True):
            if result.HasField("success"):
                self._stored(job, result.success)
            else:
                self._refused(job, result.rejection)

    def _atomic_answered(self, batch: Batch, reply: Reply | None) -> None:
        if reply is None or reply.answer is None:
            self._batch_failed(batch, reply)
            return
        response = pb.EnqueueAtomicResponse.FromString(reply.answer)
        batch.told = "stored" if response.HasField("success") else "not stored"
        if response.HasField("success"):
            for job, answer in zip(batch.jobs, response.success.responses, strict=True):
                self._stored(job, answer)
            return
        self._seen["atomic batch refused"] += 1
        for error in response.rejection.errors:
            self._refused(batch.jobs[error.index], error.rejection)
        for job in batch.jobs:
            self._is_not_stored(job)

    def _batch_failed(self, batch: Batch, reply: Reply | None) -> None:
        if reply is None:
            return
        self._note(f"hears {reply.status.name} of {', '.join(batch.types)}")
        batch.told = "not stored" if reply.status in NOT_DONE else "perhaps"
        if reply.status in NOT_DONE:
            for job in batch.jobs:
                self._is_not_stored(job)
        elif reply.status not in PERHAPS_DONE:
            raise Finding("answers", f"an enqueue is answered {reply.status.name} {reply.text}")

    def _stored(self, job: pb.EnqueueRequest, answer: pb.EnqueueResponse) -> None:
        job_id = job_ids.parse(answer.job_id)
        stored = None if job_id is None else self._facts.stored.get(job_id)
        if stored is None:
            raise Finding("lost", f"a client hears that {job.job_type} is stored as {answer.job_id}, and it is not")
        if answer.deduplicated:
            self._seen["duplicate"] += 1
            held = self.held.get(job.job_type)
            if held is None or self.held.get(stored.job_type) != held:
                raise Finding("keys", f"{job.job_type} {held} is called a duplicate of {stored.job_type}")
            if stored.job_type != job.job_type:
                self._is_not_stored(job, failed=False)
        elif stored.job_type != job.job_type or stored.queue != job.queue:
            raise Finding("answers", f"{job.job_type} is told the id of {stored.job_type}")
        elif self.held.get(job.job_type) in self.failed_keys:
            self._seen["a key stored after it failed"] += 1

    def _refused(self, job: pb.EnqueueRequest, rejection: pb.JobRejection) -> None:
        reason = rejection.WhichOneof("reason")
        if reason not in ("queue_full", "queue_closing", "unknown_queue"):
            raise Finding("answers", f"{job.job_type} is refused: {rejection}")
        self._seen[f"refused: {reason}"] += 1
        self._is_not_stored(job)

    def _is_not_stored(self, job: pb.EnqueueRequest, failed: bool = True) -> None:
        self.not_stored.add(job.job_type)
        if failed and job.job_type in self.held:
            self.failed_keys.add(self.held[job.job_type])
        if job.job_type in self._facts.by_type:
            raise Finding("told", f"a client hears that {job.job_type} is not stored, and it is")

    # -- workers --------------------------------------------------------------------------------

    def reserve(self) -> None:
        world, shape = self._world, self._cluster.shape
        is_long = world.chance(shape.long_leases)
        wait_ms = 0
        if world.chance(0.7):
            wait_ms = LONG_MS if world.chance(shape.long_waits) else world.number(1, 200)
        queues = list(shape.queues)
        world.random.shuffle(queues)
        self.poll(
            queues[: world.number(1, len(queues))],
            lease_ms=LONG_MS if is_long else world.number(1, 100),
            wait_ms=wait_ms,
            max_jobs=world.number(1, 3),
        )

    def poll(
        self,
        queues: Sequence[str],
        lease_ms: int,
        wait_ms: int,
        max_jobs: int,
        may_give_up: bool = True,
        done: Callable[[pb.ReserveRequest, Reply | None], None] | None = None,
    ) -> None:
        request = pb.ReserveRequest(
            queues=queues,
            max_jobs=max_jobs,
            lease_duration=milliseconds(lease_ms),
            wait_timeout=milliseconds(wait_ms) if wait_ms else None,
        )
        done = done or partial(self._reserved, lease_ms == LONG_MS)
        self._call("Reserve", request, partial(done, request), may_give_up)

    def _reserved(self, is_long: bool, request: pb.ReserveRequest, reply: Reply | None) -> None:
        for job in self.jobs_of(request, reply):
            self._world.later(WORK_US, self._work, Delivery(job.id, job.attempt, is_long))

    def jobs_of(self, request: pb.ReserveRequest, reply: Reply | None) -> Sequence[pb.Job]:
        """The jobs of an answer to a Reserve, each of which may be there."""
        if reply is None:
            return ()
        if reply.answer is None:
            if reply.status not in (*NOT_DONE, *PERHAPS_DONE, Status.FAILED_PRECONDITION):
                raise Finding("answers", f"a Reserve is answered {reply.status.name} {reply.text}")
            return ()
        jobs = pb.ReserveResponse.FromString(reply.answer).jobs
        if len(jobs) > request.max_jobs:
            raise Finding("answers", f"{len(jobs)} jobs for a Reserve of {request.max_jobs}")
        places = [list(request.queues).index(job.queue) for job in jobs]
        if places != sorted(places):
            raise Finding("order", f"queues {[job.queue for job in jobs]} for a Reserve of {list(request.queues)}")
        for job in jobs:
            self._delivered(job)
        return jobs

    def _delivered(self, job: pb.Job) -> None:
        job_id = job_ids.parse(job.id)
        assert job_id is not None
        self._note(f"is given {job.job_type}, attempt {job.attempt}")
        is_requeued = job_id in self._cluster.requeued
        if (job.id, job.attempt) in self.deliveries and not is_requeued:
            raise Finding("doubled", f"{job.job_type} is given to two workers as attempt {job.attempt}")
        self.deliveries.add((job.id, job.attempt))
        delivered = self._cluster.delivered
        delivered[job_id] = max(job.attempt, delivered.get(job_id, 0))
        if job.job_type in self.not_stored:
            raise Finding("told", f"{job.job_type} is delivered after a client heard that it is not stored")
        if job.attempt > self.acked.get(job.id, job.attempt):
            raise Finding("redelivered", f"{job.job_type} is delivered after its ack")
        if job.attempt > self.drained.get(job.id, job.attempt) and not is_requeued:
            raise Finding("redelivered", f"{job.job_type} is delivered after it was drained")
        stored = self._facts.stored.get(job_id)
        if stored is None or stored.job_type != job.job_type:
            raise Finding("lost", f"{job.job_type} is delivered and not durable")
        batch = self.batches[job.job_type]
        if batch.is_atomic and not stored.transaction:
            for other in batch.types:
                if other not in self._facts.by_type and other not in self.held:
                    raise Finding("atomicity", f"{job.job_type} is delivered, and {other} of its batch is not there")
        if batch.is_atomic and len(batch.types) > 1:
            self._seen["job of a batch delivered"] += 1

    def _work(self, delivery: Delivery) -> None:
        world = self._world
        match world.number(0, 11):
            case 0:
                self._seen["worker died"] += 1
            case 1:
                self.nack(delivery, None)
            case 2:
                self.nack(delivery, pb.NackRetry(default={}))
            case 3:
                self.nack(delivery, pb.NackRetry(delay=milliseconds(world.number(1, 50))))
            case 4:
                self.nack(delivery, pb.NackRetry(dead_letter={}))
            case 5 | 6:
                self.extend(delivery)
            case _:
                self.ack(delivery)

    def ack(self, delivery: Delivery, may_give_up: bool = True) -> None:
        request = pb.AckRequest(job_id=delivery.job_id, attempt=delivery.attempt)
        self._lease_call(Op.ACK, "Ack", delivery, request, self._acked, may_give_up)

    def _acked(self, delivery: Delivery, reply: Reply | None) -> None:
        job_id = delivery.job_id
        if reply is None or reply.status in PERHAPS_DONE:
            self.perhaps_acked.add(job_id)
            if self._world.chance(0.5):  # it asks again, as a careful worker does
                self._world.later(WORK_US, self.ack, delivery)
        elif reply.status == Status.OK:
            if job_id in self.acked:
                raise Finding("doubled", f"{job_id} is acked twice")
            self.acked[job_id] = delivery.attempt
            self._note(f"hears that {job_id} is acked")
            ended = self._facts.ended.get(_parsed(job_id))
            if ended != "acked":
                raise Finding("durability", f"a worker hears that {job_id} is acked, and on the disk it is {ended}")

    def nack(self, delivery: Delivery, retry: pb.NackRetry | None) -> None:
        request = pb.NackRequest(job_id=delivery.job_id, attempt=delivery.attempt, retry=retry)
        if self._world.chance(0.3):
            request.reason = "no reason"
        self._lease_call(Op.NACK, "Nack", delivery, request, self._nacked)

    def _nacked(self, delivery: Delivery, reply: Reply | None) -> None:
        if reply is not None and reply.answer is not None and self._world.chance(0.2):
            self._seen["late ack"] += 1
            self.ack(delivery)  # late: it is refused, or the nack has been forgotten

    def extend(self, delivery: Delivery) -> None:
        request = pb.ExtendRequest(
            job_id=delivery.job_id, attempt=delivery.attempt, lease_duration=milliseconds(LONG_MS)
        )
        self._lease_call(Op.EXTEND, "Extend", delivery, request, self._extended)

    def _extended(self, delivery: Delivery, reply: Reply | None) -> None:
        if reply is not None and reply.answer is not None:
            longer = delivery._replace(is_long=True)
            self._world.later(WORK_US, self.ack if self._world.chance(0.8) else self.extend, longer)

    def _lease_call(
        self,
        kind: Op,
        method: str,
        delivery: Delivery,
        request: Message,
        done: Callable[[Delivery, Reply | None], None],
        may_give_up: bool = True,
    ) -> None:
        key = kind.value, _parsed(delivery.job_id), delivery.attempt
        self.lease_calls[key] = self.lease_calls.get(key, 0) + 1
        self._call(method, request, partial(self._lease_answered, key, delivery, done), may_give_up)

    def _lease_answered(
        self,
        key: tuple[int, bytes, int],
        delivery: Delivery,
        done: Callable[[Delivery, Reply | None], None],
        reply: Reply | None,
    ) -> None:
        if reply is not None:
            self._note(f"hears {reply.status.name} of {Op(key[0]).name} {delivery.job_id} attempt {delivery.attempt}")
            if reply.status in NOT_DONE and self.lease_calls[key] == 1:
                self.not_done.add(key)
            if reply.status in LOST_LEASE:
                self._lease_is_lost(key, delivery)
        done(delivery, reply)

    def _lease_is_lost(self, key: tuple[int, bytes, int], delivery: Delivery) -> None:
        """A worker that did everything in time may only lose its lease with a router."""
        kind, job_id, attempt = key
        self._seen["lease was over"] += 1
        others = (Op.ACK, Op.NACK)
        calls = sum(self.lease_calls.get((other, job_id, attempt), 0) for other in others)
        is_alone = calls == (kind != Op.EXTEND)
        if delivery.is_long and is_alone and not self._cluster.has_lost_routers:
            raise Finding("leases", f"the long lease of {delivery.job_id}, attempt {attempt}, was taken away")

    # -- dead letters and the server ------------------------------------------------------------

    def drain(self) -> None:
        world, queues = self._world, self._cluster.shape.queues
        queue = world.pick(queues) if world.chance(0.5) else None
        self.drain_some(queue, world.number(1, 3))

    def drain_some(self, queue: str | None, most: int, may_give_up: bool = True) -> None:
        request = pb.DrainDeadLettersRequest(queue=queue, max=most)
        self._call("DrainDeadLetters", request, partial(self._drained, queue), may_give_up)

    def _drained(self, queue: str | None, reply: Reply | None) -> None:
        if reply is None:
            return
        if reply.answer is None:
            if reply.status not in (*NOT_DONE, *PERHAPS_DONE):
                raise Finding("answers", f"a drain is answered {reply.status.name} {reply.text}")
            return
        records = pb.DrainDeadLettersResponse.FromString(reply.answer).records
        failed_at = [record.failed_at.ToMilliseconds() for record in records]
        if failed_at != sorted(failed_at):
            raise Finding("order", "dead letters are not drained oldest first")
        for record in records:
            job_id = record.job.id
            self._seen["drained"] += 1
            self._note(f"is given the dead letter {record.job.job_type}")
            if queue is not None and record.job.queue != queue:
                raise Finding("answers", f"a dead letter of {record.job.queue} for {queue}")
            if job_id in self.acked:
                raise Finding("redelivered", f"{job_id} is drained after its ack")
            if job_id in self.drained and not self._cluster.has_lost_parts and job_id not in self._requeued():
                raise Finding("doubled", f"{job_id} is drained twice")
            self.drained[job_id] = record.final_attempt

    def _requeued(self) -> set[str]:
        return {job_ids.text(job_id) for job_id in self._cluster.requeued}

    def look(self) -> None:
        self._call("GetServerInfo", pb.GetServerInfoRequest(), self._looked)

    def _looked(self, reply: Reply | None) -> None:
        if reply is not None:
            assert reply.answer is not None
            info = pb.GetServerInfoResponse.FromString(reply.answer)
            if info.strict_queues not in {config.server.strict_queues for config in self._cluster.shape.configs}:
                raise Finding("answers", "the server's info is not that of any configuration")


def _parsed(job_id: str) -> bytes:
    parsed = job_ids.parse(job_id)
    assert parsed is not None
    return parsed
