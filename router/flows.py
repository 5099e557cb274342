"""Calls in progress that are answered in one step per shard: enqueues, and what is one operation on one shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from common.queue_pb2 import JobRejection
from common.wire import EnqueueJob, EnqueueOutcome, Op, Outcome
from router import answers, rejections
from router.admission import IsKnown
from router.front import Call, Status
from router.outbound import Pending

if TYPE_CHECKING:
    from router.core import Core

RANDOM_BYTES_PER_JOB = 3


class Part:
    """The jobs of a batch that go to one shard, and where each stands in the batch."""

    __slots__ = ("indexes", "jobs", "size")

    def __init__(self) -> None:
        self.indexes: list[int] = []
        self.jobs: list[EnqueueJob] = []
        self.size = 0

    def __iter__(self) -> Iterator[tuple[int, EnqueueJob]]:
        return zip(self.indexes, self.jobs, strict=True)

    def add(self, index: int, job: EnqueueJob) -> None:
        self.indexes.append(index)
        self.jobs.append(job)
        self.size += len(job.body)


class EnqueueFlow:
    """An EnqueueBatch: one operation for each shard that gets jobs, one answer when all have answered."""

    def __init__(self, core: Core, call: Call, rejected: Sequence[JobRejection | None], parts: dict[int, Part]) -> None:
        self.timer_at = 0
        self._core = core
        self._call = call
        self._outcomes: list[answers.Outcome | None] = list(rejected)
        self._parts = parts
        self._pending: dict[int, tuple[int, Part, Pending]] = {}  # op id: shard, jobs, operation
        self._failures: list[tuple[Status, str]] = []
        self._anything_stored = False

    def begin(self) -> None:
        self._send(self._parts)
        self._finish_if_done()

    def result(self, op_id: int, status: int, data: Any) -> None:
        _, part, _ = self._pending.pop(op_id)
        if status != Status.OK:
            self._failures.append((Status(status), data))
        else:
            self._anything_stored = True
            for index, job, outcome in zip(part.indexes, part.jobs, data, strict=True):
                self._outcomes[index] = outcome if isinstance(outcome, bytes) else _outcome(job, outcome)
        self._finish_if_done()

    def lost(self, op_id: int) -> None:
        shard, _, _ = self._pending.pop(op_id)
        self._failures.append((Status.ABORTED, f"shard {shard} ended meanwhile: the jobs may have been stored"))
        self._finish_if_done()

    def hold(self) -> None:
        if not self.timer_at:
            self._core.set_timer(self, self._core.hold_until(self._call))

    def moved(self, op_id: int) -> None:
        _, part, _ = self._pending.pop(op_id)
        self._send(self._core.parts(part))

    def timer_fired(self) -> None:
        for op_id, (shard, _, pending) in list(self._pending.items()):
            if self._core.shards[shard].withdraw(pending):
                del self._pending[op_id]
                self._failures.append((Status.UNAVAILABLE, f"shard {shard} is down: nothing was stored"))
        self._finish_if_done()

    def _send(self, parts: dict[int, Part]) -> None:
        core = self._core
        for shard, part in parts.items():
            op_id = core.next_op_id()
            entropy = core.random_bytes(RANDOM_BYTES_PER_JOB * len(part.jobs))
            operation = [op_id, Op.ENQUEUE, entropy, part.jobs]
            pending = core.shards[shard].add(operation, self, part.size, jobs=len(part.jobs))
            self._pending[op_id] = shard, part, pending

    def _finish_if_done(self) -> None:
        if self._pending:
            return
        self.timer_at = 0
        if self._failures:
            self._core.fail(self._call, *self._whole_failure())
        else:
            outcomes = [outcome for outcome in self._outcomes if outcome is not None]
            self._core.reply(self._call, answers.enqueue_answer(outcomes))

    def _whole_failure(self) -> tuple[Status, str]:
        """What to say of the whole batch: only if no part was or may have been done is it "not done"."""
        statuses = {status for status, _ in self._failures}
        text = "; ".join(text for _, text in self._failures)
        if Status.INTERNAL in statuses:
            return Status.INTERNAL, text
        if statuses == {Status.UNAVAILABLE} and not self._anything_stored:
            return Status.UNAVAILABLE, text
        return Status.ABORTED, text


class KnownFlow:
    """Asks shards which queues have jobs or dead letters, and then goes on with a call in strict mode."""

    def __init__(self, core: Core, call: Call, by_shard: dict[int, list[str]], then: Callable[[IsKnown], None]) -> None:
        self.timer_at = 0
        self._core = core
        self._call = call
        self._by_shard = by_shard
        self._then = then
        self._pending: dict[int, tuple[int, list[str], Pending]] = {}  # op id: shard, queues, operation
        self._known: set[str] = set()
        self._ended = False

    def begin(self) -> None:
        for shard, queues in self._by_shard.items():
            self._ask(shard, queues)

    def result(self, op_id: int, status: int, data: Any) -> None:
        _, queues, _ = self._pending.pop(op_id)
        if self._ended:
            return
        if status != Status.OK:
            self._end()
            self._core.fail(self._call, Status(status), data)
            return
        self._known.update(queue for queue, known in zip(queues, data, strict=True) if known)
        if not self._pending:
            self._end()
            self._then(self._known.__contains__)

    def lost(self, op_id: int) -> None:
        self.moved(op_id)  # a question does no harm twice

    def moved(self, op_id: int) -> None:
        _, queues, _ = self._pending.pop(op_id)
        if not self._ended:
            for queue in queues:
                self._ask(self._core.shard_of(queue), [queue])

    def hold(self) -> None:
        if not self.timer_at:
            self._core.set_timer(self, self._core.hold_until(self._call))

    def timer_fired(self) -> None:
        withdrawn = self._withdraw()
        if withdrawn:
            self._end()
            self._core.fail(self._call, Status.UNAVAILABLE, f"shard {withdrawn[0]} is down: nothing was done")

    def closed(self) -> None:
        self._end()

    def answer_left(self, left: bool) -> None:
        """Nothing was handed out."""

    def stop_waiting(self) -> None:
        """It does not wait."""

    def _end(self) -> None:
        """What shards still say means nothing any more."""
        self._ended = True
        self.timer_at = 0
        self._withdraw()

    def _withdraw(self) -> list[int]:
        """Take back the questions that have not been sent; returns their shards."""
        return [shard for shard, _, pending in self._pending.values() if self._core.shards[shard].withdraw(pending)]

    def _ask(self, shard: int, queues: list[str]) -> None:
        op_id = self._core.next_op_id()
        pending = self._core.shards[shard].add([op_id, Op.KNOWN, queues], self)
        self._pending[op_id] = shard, queues, pending


class SingleFlow:
    """A call that is one operation on one shard: an ack, nack or extend, an atomic batch that lives there.

    `again` begins it anew, where its slot is by then.
    """

    def __init__(
        self, core: Core, call: Call, shard: int, answer: Callable[[Any], bytes], again: Callable[[], None]
    ) -> None:
        self.timer_at = 0
        self._core = core
        self._call = call
        self._shard = shard
        self._answer = answer
        self._again = again
        self._pending: Pending | None = None

    def begin(self, kind: Op, arguments: list[Any], size: int = 0, jobs: int = 1) -> None:
        """`size` is that of the jobs among the arguments, in bytes."""
        core = self._core
        self._pending = core.shards[self._shard].add([core.next_op_id(), kind, *arguments], self, size, jobs=jobs)

    def result(self, op_id: int, status: int, data: Any) -> None:
        self.timer_at = 0
        if status == Status.OK:
            self._core.reply(self._call, self._answer(data))
        else:
            self._core.fail(self._call, Status(status), data)

    def lost(self, op_id: int) -> None:
        self.timer_at = 0
        text = f"shard {self._shard} ended meanwhile: this may have been done"
        self._core.fail(self._call, Status.ABORTED, text)

    def moved(self, op_id: int) -> None:
        self.timer_at = 0
        self._again()

    def hold(self) -> None:
        if not self.timer_at:
            self._core.set_timer(self, self._core.hold_until(self._call))

    def timer_fired(self) -> None:
        assert self._pending is not None
        if self._core.shards[self._shard].withdraw(self._pending):
            self._core.fail(self._call, Status.UNAVAILABLE, f"shard {self._shard} is down: nothing was done")


def atomic_answer(jobs: Sequence[EnqueueJob], data: Any) -> bytes:
    """What a shard says of an atomic batch that lives on it alone."""
    committed, outcomes = data
    if committed:
        return answers.atomic_answer(accepted(outcome) for outcome in outcomes)
    return answers.atomic_rejection((index, rejection(jobs[index], outcome)) for index, outcome in outcomes)


def accepted(outcome: EnqueueOutcome) -> tuple[bytes, bool]:
    """The id of a job that was taken, and whether it is that of an earlier one with its key."""
    return (outcome, False) if isinstance(outcome, bytes) else (outcome[1], True)


def _outcome(job: EnqueueJob, outcome: list[Any]) -> answers.Outcome:
    """The shard's word on one job that is not simply its id, as an answer says it."""
    return (outcome[1], True) if outcome[0] == Outcome.DEDUPLICATED else rejection(job, outcome)


def rejection(job: EnqueueJob, outcome: list[Any]) -> JobRejection:
    """Why a shard did not take a job."""
    match outcome[0]:
        case Outcome.QUEUE_FULL:
            return rejections.queue_full(job.queue, outcome[1])
        case Outcome.QUEUE_CLOSING:
            return rejections.queue_closing(job.queue)
        case _:
            raise AssertionError(f"a shard does not say {outcome!r}")
