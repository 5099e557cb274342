"""Operators: the real `router.admin.Admin`, which blocks in real life, in a world where nothing may block.

A conversation is its command run again from the start after each answer, with the answers that have
come so far; where the next one is missing it stops. That gives the same questions each time, for the
command depends on nothing but the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from common import admin_pb2 as pb
from router.admin import Admin, Refused
from router.front import Status
from tests.simulation.router import RouterProcess
from tests.simulation.world import Finding

if TYPE_CHECKING:
    from tests.simulation.simulation import Cluster

# What an operator may be told; anything else is a finding.
_EXPECTED = (Status.NOT_FOUND, Status.FAILED_PRECONDITION, Status.ABORTED, Status.UNAVAILABLE, Status.INTERNAL)
# How often a deletion looks for jobs in flight before its operator gives up, at most.
PAUSES_MAX = 4


class _AnswerIsMissing(Exception):
    """The conversation cannot go on now."""


class Conversation:
    """One command of an operator, with one router; it is its own way to the shards."""

    def __init__(self, cluster: Cluster, router: RouterProcess, command: Callable[[Admin, Any], Message]) -> None:
        self.answer: Message | None = None
        self.refusal: Refused | None = None
        self._cluster = cluster
        self._router = router
        self._command = command
        self._patience = _Patience(cluster, router, self)
        self._admin = Admin(self, cluster.supervisor.slot_map.owners, cluster.supervisor.slot_map.shards)
        self._answers: list[Any] = []
        self._place = 0
        self.pauses = 0  # that are over
        self._waits = False  # for an answer
        self._is_asking = False

    def go_on(self) -> None:
        self._place = self.pauses = 0
        try:
            self.answer = self._command(self._admin, self._patience)
        except _AnswerIsMissing:
            return
        except Refused as refused:
            self.refusal = refused
            if refused.status not in _EXPECTED:
                raise Finding("answers", f"an operator is told {refused.status} {refused.text}") from refused

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.refusal is not None or not self._router.is_alive

    def next_answer(self, ask: Callable[[], None]) -> Any:
        """The next answer that has come; else it is asked for, unless that was done."""
        if self._place == len(self._answers):
            if not self._waits:
                self._waits = self._is_asking = True
                ask()
                self._is_asking = False
            if self._waits:
                raise _AnswerIsMissing
        self._place += 1
        return self._answers[self._place - 1]

    def answered(self, *answer: Any) -> None:
        self._answers.append(answer)
        self._waits = False
        if not self._is_asking:
            self._cluster.world.later(1, self.go_on)

    # -- the way to the shards ------------------------------------------------------------------

    def ask(self, shard: int, arguments: list[Any]) -> tuple[int, Any]:
        answer: tuple[int, Any] = self.next_answer(lambda: self._router.ask(shard, arguments, self.answered))
        return answer


class _Patience:
    """That of the operator: it ends with the server."""

    def __init__(self, cluster: Cluster, router: RouterProcess, conversation: Conversation) -> None:
        self._world = cluster.world
        self._router = router
        self._conversation = conversation
        self._pauses = cluster.world.number(1, PAUSES_MAX)

    def is_over(self) -> bool:
        return not self._router.listens or self._conversation.pauses >= self._pauses

    def pause(self, seconds: float) -> None:
        at_ms = self._world.mono_ms + int(seconds * 1000)
        self._conversation.next_answer(lambda: self._world.at_ms(at_ms, self._conversation.answered))
        self._conversation.pauses += 1


class Operators:
    """Everybody who uses the admin socket."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.deleted: set[str] = set()  # queues that somebody wanted to delete, or to take dead letters of

    def act(self) -> None:
        world = self._world
        queue = world.pick(self._cluster.shape.queues)
        dead = pb.DeadLetterSelection(queue=queue)
        match world.number(0, 9):
            case 0 | 1:
                self._begin("purge", lambda admin, one: admin.purge_queue(pb.PurgeQueueRequest(queue=queue), one))
            case 2 | 3:
                self.delete(queue, wait=world.chance(0.5))
            case 4 | 5:
                self._begin("requeue", lambda admin, _: admin.requeue_dead_letters(dead))
            case 6:
                self._begin("delete dead", lambda admin, _: admin.delete_dead_letters(dead))
            case 7 | 8:
                self._begin("queues", lambda admin, _: admin.list_queues(pb.ListQueuesRequest()))
            case _:
                request = pb.ListJobsRequest(queue=queue, state=world.number(1, 4))
                self._begin("jobs", lambda admin, _: admin.list_jobs(request))

    def delete(self, queue: str, wait: bool) -> Conversation | None:
        self.deleted.add(queue)
        request = pb.DeleteQueueRequest(queue=queue, wait=wait)
        return self._begin("delete", lambda admin, one: admin.delete_queue(request, one))

    def _begin(self, name: str, command: Callable[[Admin, Any], Message]) -> Conversation | None:
        routers = self._cluster.supervisor.live_routers()
        if not routers:
            return None
        self._cluster.seen[f"operator: {name}"] += 1
        if self._world.trace is not None:
            self._world.note("operator", name)
        conversation = Conversation(self._cluster, routers[0], command)
        conversation.go_on()
        return conversation
