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
from common.slots import SlotMap, slot_of
from router.admin import Admin, Patience, Refused
from router.front import Status
from router.resharding import MoveOutcome
from tests.simulation.router import RouterProcess
from tests.simulation.world import Finding

if TYPE_CHECKING:
    from tests.simulation.simulation import Cluster

# What an operator may be told; anything else is a finding.
_EXPECTED = (Status.NOT_FOUND, Status.FAILED_PRECONDITION, Status.ABORTED, Status.UNAVAILABLE, Status.INTERNAL)
# How often a deletion looks for jobs in flight before its operator gives up, at most.
PAUSES_MAX = 4
SHARDS_MAX = 5


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
        self._admin = Admin(self, self)
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

    # -- the slot map ---------------------------------------------------------------------------

    def slot_map(self) -> SlotMap:
        slot_map: SlotMap = self.next_answer(lambda: self.answered(self._router.core.slot_map))[0]
        return slot_map

    def move(self, slots: list[int], target: int, bytes_per_second: int, patience: Patience) -> MoveOutcome | str:
        outcome: MoveOutcome | str = self.next_answer(
            lambda: self._router.begin_move(slots, target, bytes_per_second, self.answered)
        )[0]
        return outcome

    def set_shards(self, shards: int, patience: Patience) -> str | None:
        raise AssertionError("the number of shards stays")

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

    def move(self) -> None:
        """Move the slots of some queues of one shard to another one."""
        world, routers = self._world, self._cluster.supervisor.live_routers()
        if not routers:
            return
        slot_map = routers[0].core.slot_map
        first = slot_of(world.pick(self._cluster.shape.queues))
        source = slot_map.owners[first]
        slots = {first}
        for queue in self._cluster.shape.queues:
            if slot_map.owners[slot_of(queue)] == source and world.chance(0.3):
                slots.add(slot_of(queue))
        if slot_map.shards == 1:
            return
        target = world.pick([shard for shard in range(slot_map.shards) if shard != source])
        rate = world.pick((0, 0, 200_000))
        request = pb.MoveSlotsRequest(slots=sorted(slots), to=target, rate_limit_bytes_per_second=rate)
        self._begin("move", lambda admin, one: admin.move_slots(request, one))

    def resize(self) -> None:
        """Add a shard, or move everything away from the last one and take it away."""
        world, supervisor = self._world, self._cluster.supervisor
        routers = supervisor.live_routers()
        if not routers:
            return
        router, router_map = routers[0], routers[0].core.slot_map
        shards = router_map.shards
        if shards == 1 or (shards < SHARDS_MAX and world.chance(0.5)):
            self._cluster.seen["operator: add a shard"] += 1
            router.set_shards(shards + 1, lambda _: None)
            return
        self._cluster.seen["operator: take a shard away"] += 1
        slots = router_map.slots_of(shards - 1)

        def moved(outcome: MoveOutcome | str) -> None:
            if not isinstance(outcome, str):
                world.later(1, router.set_shards, shards - 1, lambda _: None)

        if slots:
            router.begin_move(slots, world.number(0, shards - 2), 0, moved)
        else:
            router.set_shards(shards - 1, lambda _: None)

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
