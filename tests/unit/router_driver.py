"""Drives a router's core in tests: calls and shards are made up here, time stands still until it is moved.

A test sends calls, looks at the operations that the core sends to the shards, answers them as a
shard would, and reads the replies. `finish` brings everything to its end and checks that the core
has forgotten all of it; the fixtures of the tests call it after each test.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from common import job_ids, wire
from common import queue_pb2 as pb
from common.config import Config
from common.slots import SlotMap, slot_of
from common.wire import Envelope, Fate, Op, Operation, Vote
from router.core import Core, Moment, Reply
from router.front import WATCHED_METHODS, Status

WALL_MS = 1_700_000_000_000
MONO_MS = 5_000_000
ROUTER = "router-0"
VERSION = "1.2.3"
FIRST_OP_ID = 1 << 40
INTERNAL = 13

_Answer = TypeVar("_Answer", bound=Message)


@dataclass(eq=False)
class FakeCall:
    """A call as a front shows it. The shell answers calls, so the core never may."""

    method: str
    request: bytes
    authorization: str | None = None
    deadline: float = math.inf

    def reply(self, answer: bytes) -> None:
        raise AssertionError("the core answers by its replies")

    def fail(self, status: Status, text: str) -> None:
        raise AssertionError("the core answers by its replies")


@dataclass
class Failed:
    """A call that was answered with a status."""

    status: Status
    text: str


class FakeShard:
    """One shard as the core sees it. Its operations are taken and answered by the test."""

    def __init__(self, driver: RouterDriver, index: int) -> None:
        self.index = index
        self.name = f"shard-{index}"
        self.generation = 0
        self.taken = 0  # number of the last envelope that was taken
        self.waiting: dict[int, Operation] = {}  # taken and not answered, by op id
        # Op ids of what the shard may have handed out and has not heard the end of.
        self.claimed: set[int] = set()
        # Op ids of watches that were told of a job, and have not claimed or passed it on.
        self.woken: set[int] = set()
        # Transactions of which it may hold a promise or a decision, and has not heard the end.
        self.promised: set[int] = set()
        self.decided: set[int] = set()
        self._returning: list[tuple[int, int]] = []  # number of an envelope, op id that it gives back
        self.confirmed: list[int] = []
        self.given_back: list[int] = []
        self._drains: set[int] = set()
        self.kept: list[tuple[int, int]] = []  # op id of a drain, and how many of its records go into the answer
        self._driver = driver

    def up(self) -> None:
        """A new process of the shard starts."""
        self._driver.generation += 1
        self.generation = self._driver.generation
        self.taken = 0
        self._driver.core.shard_up(self.index, self.generation, self._driver.now)

    def down(self) -> None:
        """Its process ends, and all that it had in memory. What it had taken may be on the disk."""
        generation, self.generation = self.generation, 0
        self.promised |= {operation[2] for operation in self.waiting.values() if operation[1] == Op.PREPARE}
        self.decided |= {operation[2] for operation in self.waiting.values() if operation[1] == Op.DECIDE}
        self.claimed |= {op_id for op_id, operation in self.waiting.items() if operation[1] == Op.RESERVE}
        self.claimed |= {op_id for _, op_id in self._returning}
        self.claimed -= self._drains
        self._returning.clear()
        self.woken.clear()
        self.waiting.clear()
        self._driver.core.shard_down(self.index, generation, self._driver.now)

    def restart(self) -> None:
        self.down()
        self.up()

    def envelopes(self) -> list[Envelope]:
        """What the core has sent since the last look."""
        messages = self._driver.core.shards[self.index].messages
        envelopes = [wire.unpack(message) for message in messages]
        messages.clear()
        for envelope in envelopes:
            self.taken += 1
            assert (envelope.sender, envelope.generation, envelope.number) == (ROUTER, self.generation, self.taken)
            for operation in envelope.items:
                self._note(envelope.number, operation)
        return envelopes

    def _note(self, number: int, operation: Operation) -> None:
        op_id, kind, *arguments = operation
        match kind:
            case Op.CONFIRM:
                self.confirmed += arguments[0]
                self.claimed -= set(arguments[0])
                return
            case Op.GIVE_BACK:
                self.given_back += arguments[0]
                self.claimed -= set(arguments[0])
                self._returning += [(number, given_back) for given_back in arguments[0]]
                return
            case Op.KEEP:
                self.kept.append((arguments[0], arguments[1]))
                return
            case Op.RESERVE:
                self.woken.discard(arguments[5])
            case Op.CANCEL:
                self.woken.discard(arguments[0])
            case Op.DRAIN:
                self._drains.add(op_id)
        assert op_id not in self.waiting, f"sent twice: {operation}"
        self.waiting[op_id] = operation

    def operations(self) -> list[Operation]:
        """Those that somebody waits for; the others are noted in `confirmed`, `given_back` and `kept`."""
        items = [operation for envelope in self.envelopes() for operation in envelope.items]
        return [operation for operation in items if operation[1] not in (Op.CONFIRM, Op.GIVE_BACK, Op.KEEP)]

    def operation(self) -> Operation:
        """The only one that the core has sent."""
        operations = self.operations()
        assert len(operations) == 1, operations
        return operations[0]

    def send(self, *results: list[Any], number: int | None = None) -> None:
        """An envelope to the core; it answers all that was taken, unless it says less."""
        for op_id, status, data in results:
            operation = self.waiting.pop(op_id, None)
            if operation is not None:
                self._note_result(operation, status, data)
        answered = self.taken if number is None else number
        self._returning = [entry for entry in self._returning if entry[0] > answered]
        message = wire.pack(self.generation, self.name, answered, list(results))
        self._driver.core.envelope(message, self._driver.now)

    def _note_result(self, operation: Operation, status: int, data: Any) -> None:
        op_id, kind, *arguments = operation
        if kind == Op.CANCEL:
            self.waiting.pop(arguments[0], None)
        elif kind == Op.WATCH:
            self.woken.add(op_id)
        elif kind in (Op.RESERVE, Op.DRAIN) and (data or status != Status.OK):
            self.claimed.add(op_id)
        elif kind in (Op.PREPARE, Op.DECIDE, Op.COMMIT, Op.ABORT, Op.RESOLVE, Op.FORGET):
            is_ours = kind != Op.RESOLVE or arguments[1] == ROUTER
            self._note_step(kind, arguments[0], status, data if is_ours else None)

    def _note_step(self, kind: Op, transaction: int, status: int, data: Any) -> None:
        """A step of a transaction; of one that failed the outcome is unknown. What a router that has ended
        decided is finished when the home asks for it."""
        if kind == Op.PREPARE and (status != Status.OK or data[0] == Vote.YES):
            self.promised.add(transaction)
        elif kind == Op.DECIDE and status != Status.OK:
            self.decided.add(transaction)
        elif status == Status.OK and kind == Op.FORGET:
            self.decided.discard(transaction)
        elif status == Status.OK:
            self.promised.discard(transaction)
            if kind in (Op.DECIDE, Op.RESOLVE):
                self.decided.discard(transaction)
                self.decided |= {transaction} if data == Fate.COMMITTED else set()

    def answer(self, operation: Operation, data: Any = None, status: int = Status.OK) -> None:
        """The result of one operation."""
        self.send([operation[0], status, data])

    def moved(self, *operations: Operation, epoch: int = 2) -> None:
        """Its map has this epoch, and by it the slots of these operations are elsewhere."""
        for operation in operations:
            del self.waiting[operation[0]]
        self.send(*([operation[0], wire.MOVED, epoch] for operation in operations))

    def crowd(self) -> None:
        """Keep it busy, so that what comes next is not sent to it."""
        for number in range(2):
            self._driver.ack(job_id_on(queue_on(self.index, 0, self._driver.shards_count), number))
        self.envelopes()

    def serve(self) -> None:
        """Answer all that can be answered, as an empty shard would. Polls and watches stay parked."""
        self.envelopes()
        self.send(*[[op[0], Status.OK, _usual(op)] for op in self.waiting.values() if not _is_parked(op)])


def _is_parked(operation: Operation) -> bool:
    return operation[1] == Op.WATCH or (operation[1] == Op.RESERVE and bool(operation[5]))


def _usual(operation: Operation) -> Any:
    match operation[1]:
        case Op.ENQUEUE:
            return [job_id_on(queue, number) for number, (queue, *_) in enumerate(operation[3])]
        case Op.ENQUEUE_ATOMIC:
            return [True, [job_id_on(queue, number) for number, (queue, *_) in enumerate(operation[3])]]
        case Op.PREPARE:
            return [Vote.YES, [job_id_on(queue, number) for number, (queue, *_) in enumerate(operation[5])]]
        case Op.DECIDE | Op.RESOLVE:
            return Fate.COMMITTED
        case Op.RESERVE | Op.DRAIN:
            return []
        case Op.KNOWN:
            return [False for _ in operation[2]]
        case Op.NACK:
            return False
        case Op.EXTEND:
            return WALL_MS + operation[4]
        case _:
            return None


@dataclass
class RouterDriver:
    """A core with its shards, all of them up, and a clock that the test moves."""

    shards_count: int = 2
    config: Config = field(default_factory=Config)
    up: bool = True

    def __post_init__(self) -> None:
        self.now = Moment(WALL_MS, MONO_MS)
        self.generation = 100
        self.core = Core(ROUTER, VERSION, self.config, SlotMap.even(self.shards_count), FIRST_OP_ID, bytes)
        self.shards = [FakeShard(self, index) for index in range(self.shards_count)]
        self._replies: dict[int, Reply] = {}  # by id() of their call
        # Watched calls whose answer is on its way.
        self._leaving: dict[int, FakeCall] = {}
        self._calls: list[FakeCall] = []
        self._gone: set[int] = set()
        if self.up:
            for shard in self.shards:
                shard.up()

    # -- calls ---------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        request: Message | bytes = b"",
        deadline: float = math.inf,
        authorization: str | None = None,
    ) -> FakeCall:
        """A call arrives. `deadline` is in wall seconds."""
        content = request if isinstance(request, bytes) else request.SerializeToString()
        call = FakeCall(method, content, authorization, deadline)
        self._calls.append(call)
        self.core.arrived(call, self.now)
        return call

    def enqueue(self, *queues: str, method: str = "EnqueueBatch", **options: Any) -> FakeCall:
        """A batch of one small job for each queue that is named."""
        jobs = [pb.EnqueueRequest(queue=queue, job_type="t") for queue in queues]
        return self.call(method, pb.EnqueueBatchRequest(jobs=jobs), **options)

    def reserve(
        self, *queues: str, wait_ms: int = 0, max_jobs: int = 1, lease_ms: int = 30_000, **options: Any
    ) -> FakeCall:
        request = pb.ReserveRequest(
            queues=queues,
            max_jobs=max_jobs,
            lease_duration=milliseconds(lease_ms),
            wait_timeout=milliseconds(wait_ms) if wait_ms else None,
        )
        return self.call("Reserve", request, **options)

    def ack(self, job_id: bytes, attempt: int = 1, **options: Any) -> FakeCall:
        return self.call("Ack", pb.AckRequest(job_id=job_ids.text(job_id), attempt=attempt), **options)

    def closed(self, call: FakeCall) -> None:
        """The client has gone before the answer."""
        self._gone.add(id(call))
        self.core.closed(call, self.now)

    def left(self, call: FakeCall, left: bool = True) -> None:
        """The answer of a watched call was written, or could not be."""
        self._collect()
        del self._leaving[id(call)]
        self.core.answer_left(call, left, self.now)

    # -- answers -------------------------------------------------------------------------------

    def is_answered(self, call: FakeCall) -> bool:
        self._collect()
        return id(call) in self._replies

    def answer(self, call: FakeCall, kind: type[_Answer]) -> _Answer:
        """The message that the call was answered with."""
        self._collect()
        reply = self._replies[id(call)]
        assert reply.answer is not None and reply.status == Status.OK, reply
        return kind.FromString(reply.answer)

    def reserved(self, call: FakeCall) -> list[tuple[str, int]]:
        """Queue and attempt of each job in a Reserve's answer."""
        return [(job.queue, job.attempt) for job in self.answer(call, pb.ReserveResponse).jobs]

    def failure(self, call: FakeCall) -> Failed:
        self._collect()
        reply = self._replies[id(call)]
        assert reply.answer is None, reply
        return Failed(reply.status, reply.text)

    def _collect(self) -> None:
        replies, self.core.replies = self.core.replies, []
        for reply in replies:
            assert id(reply.call) not in self._replies, f"answered twice: {reply}"
            self._replies[id(reply.call)] = reply
            assert isinstance(reply.call, FakeCall)
            if reply.call.method in WATCHED_METHODS:
                self._leaving[id(reply.call)] = reply.call

    # -- slots ---------------------------------------------------------------------------------

    def move(self, *queues: str, target: int) -> None:
        """The slot map is replaced: another shard owns the slots of these queues."""
        slots = {slot_of(queue) for queue in queues}
        self.core.map_changed(self.core.slot_map.moved(slots, target), self.now)

    # -- time ----------------------------------------------------------------------------------

    def pass_ms(self, duration_ms: int) -> None:
        """Time passes on both clocks; the core's timers fire in their order."""
        until = self.now.mono_ms + duration_ms
        while (at := self.core.next_timer_ms()) is not None and at <= until:
            self._move_to(max(at, self.now.mono_ms))
            self.core.tick(self.now)
        self._move_to(until)
        self.core.tick(self.now)

    def _move_to(self, mono_ms: int) -> None:
        self.now = Moment(self.now.wall_ms + mono_ms - self.now.mono_ms, mono_ms)

    def in_ms(self, duration_ms: int) -> float:
        """A deadline, in wall seconds."""
        return (self.now.wall_ms + duration_ms) / 1000

    # -- the end -------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer all that can be answered, until nothing more comes."""
        for _ in range(8):
            for shard in self.shards:
                if shard.generation:
                    shard.serve()

    def finish(self) -> None:
        """Bring all calls to their end: waiting ones are closed, answers leave. Then nothing may be left."""
        for shard in self.shards:
            if not shard.generation:
                shard.up()
        self.serve()
        for call in self._calls:
            if call.method in WATCHED_METHODS and not self.is_answered(call):
                self.closed(call)
        for call in list(self._leaving.values()):
            self.left(call)
        self.serve()
        assert [call for call in self._calls if not (self.is_answered(call) or id(call) in self._gone)] == []
        for shard in self.shards:
            assert (shard.waiting, shard.claimed, shard.woken) == ({}, set(), set())
            assert (shard.promised, shard.decided) == (set(), set())
        assert_idle(self.core)

    def let_go(self) -> None:
        """Forget all calls. None may be left in a circle: its request would stay until the collector comes."""
        calls = [weakref.ref(call) for call in self._calls]
        self._calls.clear()
        self._replies.clear()
        self._leaving.clear()
        self.core._timers.clear()  # those that were dropped are looked at later
        for outbound in self.core.shards:
            outbound._unsent.clear()  # as are those that were withdrawn
        assert [call.method for ref in calls if (call := ref()) is not None] == []


def assert_idle(core: Core) -> None:
    """No call, timer or operation is left in the core's tables."""
    assert core.replies == []
    assert core._watched == {}
    assert core._recoveries == {}
    assert core.next_timer_ms() is None
    assert (core.requests, core._early) == ([], [])
    for outbound in core.shards[: core.slot_map.shards]:
        assert outbound.messages == []
        assert (outbound.returned, list(outbound._later)) == ([], [])
        assert (outbound._blocked_by, outbound._blocks) == (set(), {})
        assert [pending.operation for pending in outbound._unsent if not pending.withdrawn] == []
        assert [pending.operation for pending in outbound._sent.values()] == []
        assert outbound._withdrawn == len(outbound._unsent)
        assert (outbound._waiting_bytes, outbound._parked) == (0, 0)
        assert (outbound._kept, outbound._confirmed, outbound._given_back, outbound._giving_back) == ([], [], [], {})
        assert outbound._number == outbound._answered


def drivers(**settings: Any) -> Iterator[RouterDriver]:
    """For fixtures: a driver that is finished after the test."""
    driver = RouterDriver(**settings)
    yield driver
    driver.finish()
    driver.let_go()


# ---- what tests send and answer


def configured(**sections: Any) -> Config:
    return Config.model_validate(sections)


def milliseconds(duration_ms: int) -> Duration:
    return Duration(seconds=duration_ms // 1000, nanos=duration_ms % 1000 * 1_000_000)


@lru_cache
def queue_on(shard: int, nth: int = 0, shards: int = 2) -> str:
    """The name of a queue that lies on a shard."""
    owners = SlotMap.even(shards).owners
    names = (f"queue-{number}" for number in range(1_000_000))
    found = (name for name in names if owners[slot_of(name)] == shard)
    for _ in range(nth):
        next(found)
    return next(found)


def job_id_on(queue: str, number: int = 0) -> bytes:
    """The id of a job of a queue."""
    return job_ids.make(WALL_MS, slot_of(queue), number, 0)


def leased(queue: str, number: int = 0, attempt: int = 1, padding: int = 0) -> list[Any]:
    """A job as a shard hands it out; `padding` bytes of payload."""
    payload = pb.Payload(data=bytes(padding), encoding="e") if padding else None
    body = pb.Job(queue=queue, job_type="t", payload=payload).SerializeToString()
    return [job_id_on(queue, number), attempt, WALL_MS + 30_000, body]
