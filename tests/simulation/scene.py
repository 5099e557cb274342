"""A server that stands still until a test moves it: for situations that are built on purpose.

Everything is as in a run of the simulator, with its witnesses, but nothing happens by chance besides
the delays: the test makes the calls, lets time pass, and kills.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from common import queue_pb2 as pb
from router.core import Reply
from router.front import Status
from tests.simulation.invariants import check_rest
from tests.simulation.router import RouterProcess, SimCall
from tests.simulation.shape import NO_FAULTS, RETENTION_MS, Shape
from tests.simulation.simulation import Cluster
from tests.simulation.world import World
from tests.unit.router_driver import configured, milliseconds, queue_on

LEASE_MS = 30_000


class Answered:
    """A call of a scene. `reply` is there when it was answered; `gone` when its client left first."""

    def __init__(self, scene: Scene, router: RouterProcess, method: str, request: Message, deadline: float) -> None:
        self.reply: Reply | None = None
        self.is_over = False
        self._scene = scene
        self._router = router
        self._call = SimCall(method, request.SerializeToString(), deadline, self._done)
        self.at_ms = 0.0
        router.call_arrives(self._call)

    def _done(self, reply: Reply | None) -> None:
        self.reply = reply
        self.is_over = True
        self.at_ms = self._scene.world.now_us / 1000

    def cancel(self) -> None:
        self._router.client_goes(self._call)

    @property
    def status(self) -> Status:
        assert self.reply is not None, "there is no answer"
        return self.reply.status

    @property
    def answer(self) -> bytes:
        assert self.reply is not None and self.reply.answer is not None, self.reply
        return self.reply.answer

    @property
    def jobs(self) -> Sequence[pb.Job]:
        return pb.ReserveResponse.FromString(self.answer).jobs

    @property
    def results(self) -> Sequence[pb.JobResult]:
        return pb.EnqueueBatchResponse.FromString(self.answer).results

    @property
    def atomic(self) -> pb.EnqueueAtomicResponse:
        return pb.EnqueueAtomicResponse.FromString(self.answer)


class Scene:
    """A server at rest, with two queues on each of its shards: `queue(shard, nth)`."""

    def __init__(self, shards: int = 2, routers: int = 2, seed: int = 0, **sections: Any) -> None:
        sections = {"storage": {"dead_letter_retention_ms": RETENTION_MS}, **sections}
        self._shards = shards
        self._number = 0
        self.world = World(seed)
        self.cluster = Cluster(
            Shape(
                shards=shards,
                routers=routers,
                steps=0,
                queues=tuple(queue_on(shard, 0, shards) for shard in range(shards)),
                step_us=0,
                link_us=1_000,
                slow_links=0.0,
                slow=1,
                sync_us=2_000,
                restart_us=20_000,
                faults=NO_FAULTS,
                stops=0.0,
                reloads=0.0,
                operators=0.0,
                moves=0.0,
                resizes=0.0,
                rpcs={"Reserve": 1},
                keyed=0.0,
                scheduled=0.0,
                large=0.0,
                configs=(configured(**sections),),
                impatient=0.0,
                long_leases=0.0,
                long_waits=0.0,
                small_bounds=False,
            ),
            self.world,
        )
        self.world.settle()

    def queue(self, shard: int, nth: int = 0) -> str:
        return queue_on(shard, nth, self._shards)

    # -- time -----------------------------------------------------------------------------------

    def settle(self) -> None:
        self.cluster.settle()

    def pass_ms(self, duration_ms: float) -> None:
        self.world.run(int(duration_ms * 1000))

    def at_rest(self) -> None:
        """Nothing is left of all calls, but for jobs and leases."""
        self.settle()
        self.cluster.has_lost_routers = True  # deliveries are not known to the clients of the run
        check_rest(self.cluster)

    # -- calls ----------------------------------------------------------------------------------

    def call(self, method: str, request: Message, router: int = 0, deadline_ms: float | None = None) -> Answered:
        """`deadline_ms` from now."""
        process = self.cluster.supervisor.routers[router].process
        assert process is not None and process.listens
        deadline = math.inf if deadline_ms is None else (self.world.wall_ms + deadline_ms) / 1000
        call = Answered(self, process, method, request, deadline)
        if deadline_ms is not None:
            self.world.at_us(self.world.now_us + int(deadline_ms * 1000), call.cancel, timer=True)
        return call

    def job(self, queue: str, key: str | None = None, **fields: Any) -> pb.EnqueueRequest:
        """A job of a type of its own."""
        self._number += 1
        return pb.EnqueueRequest(queue=queue, job_type=f"job-{self._number}", idempotency_key=key, **fields)

    def enqueue(self, *jobs: str | pb.EnqueueRequest, atomic: bool = False, router: int = 0) -> Answered:
        """One job for each queue that is named, or the jobs as they are given."""
        request = pb.EnqueueBatchRequest(jobs=[self.job(job) if isinstance(job, str) else job for job in jobs])
        return self.call("EnqueueAtomic" if atomic else "EnqueueBatch", request, router)

    def reserve(
        self,
        *queues: str,
        wait_ms: int = 0,
        max_jobs: int = 1,
        lease_ms: int = LEASE_MS,
        router: int = 0,
        deadline_ms: float | None = None,
    ) -> Answered:
        request = pb.ReserveRequest(
            queues=queues,
            max_jobs=max_jobs,
            lease_duration=milliseconds(lease_ms),
            wait_timeout=milliseconds(wait_ms) if wait_ms else None,
        )
        return self.call("Reserve", request, router, deadline_ms)

    def ack(self, job: pb.Job, router: int = 0) -> Answered:
        return self.call("Ack", pb.AckRequest(job_id=job.id, attempt=job.attempt), router)

    def nack(self, job: pb.Job, router: int = 0, **retry: Any) -> Answered:
        """`retry`: a strategy of NackRetry."""
        request = pb.NackRequest(job_id=job.id, attempt=job.attempt, retry=pb.NackRetry(**retry) if retry else None)
        return self.call("Nack", request, router)

    def extend(self, job: pb.Job, lease_ms: int, router: int = 0) -> Answered:
        request = pb.ExtendRequest(job_id=job.id, attempt=job.attempt, lease_duration=milliseconds(lease_ms))
        return self.call("Extend", request, router)

    # -- shortcuts ------------------------------------------------------------------------------

    def reserved(self, *queues: str, **terms: Any) -> list[pb.Job]:
        """Jobs that a Reserve gets now."""
        call = self.reserve(*queues, **terms)
        self.settle()
        return list(call.jobs)

    def stored(self, *jobs: str | pb.EnqueueRequest, **terms: Any) -> None:
        """Jobs that are enqueued now, all of them."""
        call = self.enqueue(*jobs, **terms)
        self.settle()
        if terms.get("atomic"):
            assert call.atomic.HasField("success")
        else:
            assert all(result.HasField("success") for result in call.results)

    def depth(self, queue: str) -> int:
        """Live jobs of a queue, as its machine counts them."""
        found = self.cluster.process_of(queue).machine._queues.get(queue)
        return 0 if found is None else found.depth
