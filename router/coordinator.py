"""The coordinator: an EnqueueAtomic whose jobs live on several shards, all or nothing.

How it works. PREPARE goes to every participant at once; the home is the first shard of the batch.

    all YES      DECIDE to the home; its answer is the commit point. Then COMMIT to the others; when
                 all have applied it the client is answered (whoever hears success can reserve every
                 job at once) and the home may forget.
    a refusal    ABORT to all; the client gets every shard's refusals in order of index.
    busy         what is not decided holds a key, or the last places of a queue: ABORT to all, and from
                 the start under a new id after a moment.
    moved        a slot has another owner by now: ABORT to all, and from the start by the new map.
    a shard down or lost before DECIDE was sent
                 ABORT to all: nothing is or will be committed, UNAVAILABLE.
    lost after DECIDE was sent
                 the home's successor is asked what became of it, the others' successors hear COMMIT;
                 meanwhile a client whose time runs out hears ABORTED, for it may have been done.

Nothing is left behind while the router lives: every participant that may have prepared hears COMMIT
or ABORT, its successor if need be. When the router dies, shards settle among themselves through
the others (`Recovery`, asked for by a shard).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from common.queue_pb2 import JobRejection
from common.wire import Fate, Op, Vote
from router import answers
from router.flows import RANDOM_BYTES_PER_JOB, Part, accepted, rejection
from router.front import Call, Status
from router.outbound import Pending

if TYPE_CHECKING:
    from router.core import Core

# How long a transaction that met another one's keys or places waits at most before it tries again, in ms:
# doubled each time, up to the second.
BUSY_RETRY_MS = 4
BUSY_RETRY_MAX_MS = 250
# After how many times it gives up: five seconds at most.
BUSY_RETRIES_MAX = 24


# Of a transaction whose home was taken away: shards are not while they keep a decision that somebody needs.
_WITHOUT_HOME = Fate.ABORTED


class _Sent(NamedTuple):
    """An operation whose result has not come."""

    kind: Op
    shard: int
    transaction: int
    pending: Pending


class Transaction:
    """One EnqueueAtomic over several shards. `parts` are its jobs by shard, in order of the batch."""

    def __init__(self, core: Core, call: Call, parts: dict[int, Part]) -> None:
        self.timer_at = 0
        self._core = core
        self._call = call
        self._parts = parts
        self._home = next(iter(parts))
        self._id = 0
        self._retries = 0
        self._is_answered = False
        self._has_moved = False
        self._out: dict[int, _Sent] = {}  # by op id
        self._votes: dict[int, tuple[Vote, Any]] = {}
        self._failure: tuple[Status, str] | None = None

    def begin(self) -> None:
        core = self._core
        self._id = core.next_op_id()
        self._votes.clear()
        self._failure = None
        down = [shard for shard in self._parts if not core.shards[shard].is_up]
        if down:
            self._fail(Status.UNAVAILABLE, f"shard {down[0]} is down: nothing was stored")
            return
        for shard, part in self._parts.items():
            entropy = core.random_bytes(RANDOM_BYTES_PER_JOB * len(part.jobs))
            self._send(Op.PREPARE, shard, [self._home, entropy, part.jobs], part.size, len(part.jobs))

    # -- events -------------------------------------------------------------------------------

    def result(self, op_id: int, status: int, data: Any) -> None:
        sent = self._out.pop(op_id)
        kind, shard = sent.kind, sent.shard
        if status != Status.OK:  # its write failed: it starts again from the disk
            self._lost(sent, Status(status), data)
        elif kind == Op.PREPARE:
            self._votes[shard] = Vote(data[0]), data[1]
            self._conclude_when_voted()
        elif kind in (Op.DECIDE, Op.RESOLVE):
            self._decided(Fate(data))
        elif kind == Op.COMMIT:
            self._finish_when_committed()

    def lost(self, op_id: int) -> None:
        sent = self._out.pop(op_id)
        self._lost(sent, Status.UNAVAILABLE, f"shard {sent.shard} ended meanwhile: nothing was stored")

    def hold(self) -> None:
        """A shard is down: it is waited for only if the batch is or may be committed already."""
        for sent in list(self._out.values()):
            if sent.pending.sent or self._core.shards[sent.shard].is_up:
                continue
            if sent.kind in (Op.PREPARE, Op.DECIDE):
                self._give_up(Status.UNAVAILABLE, f"shard {sent.shard} is down: nothing was stored")
                return
            if sent.kind == Op.COMMIT:
                self._wait_no_longer_than_the_client()

    def moved(self, op_id: int) -> None:
        sent = self._out.pop(op_id)
        if sent.kind == Op.PREPARE:
            self._has_moved = True
            self._conclude_when_voted()
        elif sent.kind in (Op.DECIDE, Op.RESOLVE):
            self._decided(_WITHOUT_HOME)
        # Else its shard was taken away, which does not happen while it keeps something of this.

    def timer_fired(self) -> None:
        if self._votes or self._failure:  # decided, and its client cannot be kept waiting any longer
            text = "a shard ended while the batch was being committed: it may have been stored"
            self._fail(Status.ABORTED, text)
        else:
            self._begin_again()

    # -- the protocol -------------------------------------------------------------------------

    def _conclude_when_voted(self) -> None:
        if self._is_out(Op.PREPARE):
            return
        votes = [vote for vote, _ in self._votes.values()]
        if self._failure is not None:
            self._abort()
            self._fail(*self._failure)
        elif self._has_moved:
            self._abort()
            self._begin_again()
        elif Vote.REFUSED in votes:
            self._abort()
            self._reply(answers.atomic_rejection(self._rejections()))
        elif Vote.TOO_LATE in votes:
            self._abort()
            self._fail(
                Status.UNAVAILABLE, "the batch was given up by a shard that had waited too long: nothing was stored"
            )
        elif Vote.BUSY in votes:
            self._abort()
            self._try_again()
        else:
            others = [shard for shard in self._parts if shard != self._home]
            self._send(Op.DECIDE, self._home, [others])

    def _give_up(self, status: Status, text: str) -> None:
        """Before the decision: who has not been asked need not be."""
        self._failure = status, text
        for op_id, sent in list(self._out.items()):
            if sent.kind in (Op.PREPARE, Op.DECIDE) and self._core.shards[sent.shard].withdraw(sent.pending):
                del self._out[op_id]
        self._conclude_when_voted()

    def _decided(self, fate: Fate) -> None:
        if fate == Fate.COMMITTED:
            for shard in self._parts:
                if shard != self._home:
                    self._send(Op.COMMIT, shard, [])
        else:
            self._abort()
            self._fail(Status.UNAVAILABLE, "the batch was given up before it was decided: nothing was stored")

    def _finish_when_committed(self) -> None:
        if self._is_out(Op.COMMIT):
            return
        self._send(Op.FORGET, self._home, [])
        taken: dict[int, tuple[bytes, bool]] = {}
        for shard, part in self._parts.items():
            for index, outcome in zip(part.indexes, self._votes[shard][1], strict=True):
                taken[index] = accepted(outcome)
        self._reply(answers.atomic_answer(taken[index] for index in sorted(taken)))

    def _abort(self) -> None:
        """Everybody who may have promised something lets go of it."""
        for shard in self._parts:
            vote = self._votes.get(shard)
            if vote is None or vote[0] == Vote.YES:
                self._send(Op.ABORT, shard, [])

    def _try_again(self) -> None:
        self._retries += 1
        now = self._core.now
        delay_ms = min(BUSY_RETRY_MS << min(self._retries - 1, 10), BUSY_RETRY_MAX_MS)
        # Not all at the same moment: what met once would meet again.
        delay_ms = 1 + self._core.random_bytes(1)[0] * delay_ms // 256
        if self._retries > BUSY_RETRIES_MAX or now.wall_ms + delay_ms >= self._call.deadline * 1000:
            text = (
                "another batch that is not decided holds an idempotency key of this one, or the last places of a queue"
            )
            self._fail(Status.UNAVAILABLE, f"{text}: nothing was stored")
            return
        self._votes.clear()
        self._core.set_timer(self, now.mono_ms + delay_ms)

    def _begin_again(self) -> None:
        """Under a new id, with the jobs where their slots are by now; this one has still to hear of its aborts."""
        jobs = sorted((entry for part in self._parts.values() for entry in part), key=lambda entry: entry[0])
        parts = self._core.parts(jobs)
        if len(parts) > 1:
            self._parts = parts
            self._home = next(iter(parts))
            self._has_moved = False
            self.begin()
        else:
            self._is_answered = True
            self._core.begin_atomic(self._call, parts)

    def _lost(self, sent: _Sent, status: Status, text: str) -> None:
        """A shard ended with an operation of ours: what that means depends on how far we were."""
        if sent.kind == Op.PREPARE:
            self._give_up(status, text)
        elif sent.kind in (Op.DECIDE, Op.RESOLVE):
            self._wait_no_longer_than_the_client()
            self._send(Op.RESOLVE, sent.shard, [self._core.name])
        else:  # its successor has to hear it as well
            if sent.kind == Op.COMMIT:
                self._wait_no_longer_than_the_client()
            self._send(sent.kind, sent.shard, [], transaction=sent.transaction)

    def _wait_no_longer_than_the_client(self) -> None:
        if not self.timer_at and not self._is_answered:
            self._core.set_timer(self, self._core.hold_until(self._call))

    # -- operations and answers ---------------------------------------------------------------

    def _send(
        self, kind: Op, shard: int, arguments: list[Any], size: int = 0, jobs: int = 1, transaction: int = 0
    ) -> None:
        op_id = self._core.next_op_id()
        transaction = transaction or self._id
        pending = self._core.shards[shard].add([op_id, kind, transaction, *arguments], self, size, jobs=jobs)
        self._out[op_id] = _Sent(kind, shard, transaction, pending)
        if not self._core.shards[shard].is_up:
            self.hold()  # this one was not yet known when it was called by `add`

    def _is_out(self, kind: Op) -> bool:
        return any(sent.kind == kind for sent in self._out.values())

    def _rejections(self) -> list[tuple[int, JobRejection]]:
        errors: list[tuple[int, JobRejection]] = []
        for shard, (vote, refusals) in self._votes.items():
            if vote == Vote.REFUSED:
                part = self._parts[shard]
                errors += [(part.indexes[place], rejection(part.jobs[place], outcome)) for place, outcome in refusals]
        return errors

    def _reply(self, answer: bytes) -> None:
        self.timer_at = 0
        if not self._is_answered:
            self._is_answered = True
            self._core.reply(self._call, answer)

    def _fail(self, status: Status, text: str) -> None:
        self.timer_at = 0
        if not self._is_answered:
            self._is_answered = True
            self._core.fail(self._call, status, text)


class Recovery:
    """Settles a transaction whose coordinator has died, for a shard that asked.

    `resolve`: the asking shard has promised something and wants to know its fate from the home.
    `finish`: the asking shard is the home, has decided, and the others may not have heard of it.
    """

    def __init__(self, core: Core, transaction: int, shard: int) -> None:
        self._core = core
        self._id = transaction
        self._shard = shard
        self._out: dict[int, tuple[Op, int, list[Any]]] = {}

    def resolve(self, home: int, coordinator: str) -> None:
        if home < self._core.slot_map.shards:
            self._send(Op.RESOLVE, home, [coordinator])
        else:
            self._send(Op.ABORT, self._shard, [])

    def finish(self, participants: list[int]) -> None:
        for shard in participants:
            if shard < self._core.slot_map.shards:  # one that was taken away had committed
                self._send(Op.COMMIT, shard, [])
        if not self._out:
            self._send(Op.FORGET, self._shard, [])

    def result(self, op_id: int, status: int, data: Any) -> None:
        kind, shard, arguments = self._out.pop(op_id)
        if status != Status.OK:
            self._send(kind, shard, arguments)
        elif kind == Op.RESOLVE:
            self._send(Op.COMMIT if data == Fate.COMMITTED else Op.ABORT, self._shard, [])
        elif kind == Op.COMMIT and shard != self._shard and not self._out:
            self._send(Op.FORGET, self._shard, [])
        if not self._out:
            self._core.recovered(self._id)

    def lost(self, op_id: int) -> None:
        self._send(*self._out.pop(op_id))

    def moved(self, op_id: int) -> None:
        """Its shard was taken away."""
        kind, _, _ = self._out[op_id]
        self.result(op_id, Status.OK, _WITHOUT_HOME if kind == Op.RESOLVE else None)

    def hold(self) -> None:
        """It waits as long as it takes; nobody's call hangs on it."""

    def _send(self, kind: Op, shard: int, arguments: list[Any]) -> None:
        op_id = self._core.next_op_id()
        self._out[op_id] = kind, shard, arguments
        self._core.shards[shard].add([op_id, kind, self._id, *arguments], self)
