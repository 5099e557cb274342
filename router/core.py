"""The router's core: what happens to a call, from its arrival to its answer.

It does no I/O and reads no clock: calls, envelopes, timers, shards that come and go and a new
configuration are events that the shell brings, each with the time; replies and envelopes are what
comes out, gathered in `replies`, `requests` and each shard's `messages` for the shell to carry away. Nothing
in here blocks, so the shell can hold one lock around it.

The way of a call: `arrived` checks the key and the request (`admission`), then a flow takes it. A
flow sends operations to shards through `outbound`, gets their results or hears that they were lost,
and ends with one reply or failure. The flows are in `flows`, those that hand something out in `polls` and `drains`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from hmac import compare_digest
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from common import job_ids, queue_pb2
from common.config_sections import Config
from common.slots import SlotMap, slot_of
from common.wire import EnqueueJob, Op, Question, unpack
from router import admission, answers
from router.admission import Admission, IsKnown, Refusal
from router.asks import AskFlow, Done
from router.coordinator import Recovery, Transaction
from router.drains import DrainFlow
from router.flows import RANDOM_BYTES_PER_JOB, EnqueueFlow, KnownFlow, Part, SingleFlow, atomic_answer
from router.front import WATCHED_METHODS, Call, Status
from router.outbound import Outbound, Pending
from router.polls import Poll
from router.resharding import MoveDone, Request, Resharding

# How long a call without a deadline is held for a shard that is down, and what is left of a deadline
# when the others are told that nothing was done, in ms.
HOLD_MS = 30_000
DEADLINE_MARGIN_MS = 50
# Timers that may be kept although they apply no more, beside as many as there are in use.
TIMERS_SPARE = 4_096


class Moment(NamedTuple):
    """One instant on both clocks, in ms: wall time for what clients see, monotonic for waiting."""

    wall_ms: int
    mono_ms: int


class Reply(NamedTuple):
    """What a call is to be answered with: bytes, or a status and a text."""

    call: Call
    answer: bytes | None
    status: Status
    text: str


class Watched(Protocol):
    """A call whose answer hands something out that comes back when nobody receives it."""

    def closed(self) -> None:
        """The call has ended without an answer."""

    def answer_left(self, left: bool) -> None:
        """The answer was written to the connection, or could not be."""

    def stop_waiting(self) -> None:
        """The server stops: answer soon."""


class Timed(Protocol):
    """Something that waits for an instant. `timer_at` is monotonic ms, 0 when it waits no more."""

    timer_at: int

    def timer_fired(self) -> None: ...


class Core:
    """One router. Op ids count on from `first_op_id`, which the shell draws at random so that no two
    routers ever use the same."""

    def __init__(
        self,
        name: str,
        version: str,
        config: Config,
        slot_map: SlotMap,
        first_op_id: int,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.name = name
        self.config = config
        self._admission = Admission(config)
        self.now = Moment(0, 0)
        self.replies: list[Reply] = []
        self.requests: list[Request] = []
        self.slot_map = slot_map
        # By index. Those beyond the map's number belonged to shards that were taken away, and are down.
        self.shards = [Outbound(index, name, slot_map.epoch) for index in range(slot_map.shards)]
        self.draining = False
        self._version = version
        self._op_id = first_op_id
        self.random_bytes = random_bytes
        # Calls whose end the front tells of, by id() of the call.
        self._watched: dict[int, Watched] = {}
        self._recoveries: dict[int, Recovery] = {}  # by transaction
        self._resharding = Resharding(self)
        # What came back from shards that knew a newer map than this router does.
        self._early: list[tuple[Outbound, Pending, int]] = []
        self._timers: list[tuple[int, int, Timed]] = []
        self._timer_count = 0
        self._timers_max = TIMERS_SPARE  # how many there may be before those that wait no more are dropped
        self._methods: dict[str, Callable[[Call], None]] = {
            "EnqueueBatch": self._enqueue_batch,
            "EnqueueAtomic": self._enqueue_atomic,
            "Reserve": self._reserve,
            "Ack": self._ack,
            "Nack": self._nack,
            "Extend": self._extend,
            "DrainDeadLetters": self._drain_dead_letters,
            "GetServerInfo": self._server_info,
        }

    # -- events -------------------------------------------------------------------------------

    def arrived(self, call: Call, now: Moment) -> None:
        """A call with a whole request."""
        self.now = now
        if not self._is_authorised(call):
            self.fail(call, Status.UNAUTHENTICATED, "no listed API key: send metadata `authorization: Bearer <key>`")
            return
        self._begin(call)

    def arrived_trusted(self, call: Call, now: Moment) -> None:
        """A call whose caller has shown in another way that it may ask for everything."""
        self.now = now
        self._begin(call)

    def ask(self, shard: int, arguments: list[Any], done: Done, now: Moment) -> None:
        """An operation, without its id, whose status and data go to `done`; UNAVAILABLE when the shard is down."""
        self.now = now
        AskFlow(self, shard, done).begin(arguments)
        self._pump()

    def _begin(self, call: Call) -> None:
        method = self._methods.get(call.method)
        if method is None:
            self.fail(call, Status.UNIMPLEMENTED, f"{call.method} is not implemented by this version of the server")
            return
        try:
            method(call)
        except (DecodeError, UnicodeDecodeError) as error:
            self.fail(call, Status.INTERNAL, f"the request is no message of {call.method}: {error}")
        self._pump()

    def closed(self, call: Call, now: Moment) -> None:
        """A watched call ended before it was answered."""
        self.now = now
        watched = self._watched.pop(id(call), None)
        if watched is not None:
            watched.closed()
        self._pump()

    def answer_left(self, call: Call, left: bool, now: Moment) -> None:
        """The answer of a watched call was written to its connection, or could not be."""
        self.now = now
        watched = self._watched.pop(id(call), None)
        if watched is not None:
            watched.answer_left(left)
        self._pump()

    def envelope(self, message: bytes, now: Moment) -> None:
        """A message came from a shard; that of a process which has ended is too late. Raises WireError."""
        self.now = now
        envelope = unpack(message)
        for outbound in self.shards:
            if outbound.generation == envelope.generation:
                outbound.take(envelope.number, envelope.items)
                questions, outbound.questions = outbound.questions, []
                for question in questions:
                    self._recover(outbound.index, question)
                if outbound.returned:
                    self._take_back(outbound)
                break
        self._pump()

    def shard_up(self, shard: int, generation: int, now: Moment) -> None:
        """A shard's process takes operations; what waited for it is sent."""
        self.now = now
        self.shards[shard].came_up(generation)
        self._pump()

    def shard_down(self, shard: int, generation: int, now: Moment) -> None:
        """A shard's process has ended."""
        self.now = now
        if self.shards[shard].generation == generation:
            self.shards[shard].went_down()
        self._pump()

    def tick(self, now: Moment) -> None:
        """Time has passed."""
        self.now = now
        while self._timers and self._timers[0][0] <= now.mono_ms:
            at, _, timed = heappop(self._timers)
            if timed.timer_at == at:
                timed.timer_at = 0
                timed.timer_fired()
        self._pump()

    def next_timer_ms(self) -> int | None:
        """When `tick` should be called at the latest, monotonic ms."""
        while self._timers and self._timers[0][2].timer_at != self._timers[0][0]:
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def configure(self, config: Config) -> None:
        """A new configuration; it holds from the next call on."""
        self.config = config
        self._admission = Admission(config)

    def drain(self, now: Moment) -> None:
        """The server stops: waiting polls are answered with nothing, and no poll waits any more."""
        self.now = now
        self.draining = True
        for watched in list(self._watched.values()):
            watched.stop_waiting()
        self._pump()

    @property
    def is_settled(self) -> bool:
        """Every shard has heard, and has said so, of what was delivered and what is given back. A router that
        ends sooner takes that with it: leases would end that workers hold, and others would be held by nobody."""
        return all(outbound.is_settled for outbound in self.shards[: self.slot_map.shards])

    # -- slots that move ------------------------------------------------------------------------

    def begin_move(
        self,
        slots: list[int],
        target: int,
        bytes_per_second: int,
        done: MoveDone,
        now: Moment,
    ) -> None:
        """Move slots of one shard to another; `done` gets what came of it or, as one line, why it did not."""
        self.now = now
        self._resharding.begin_move(slots, target, bytes_per_second, done)
        self._pump()

    def set_shards(self, shards: int, done: Callable[[str | None], None], now: Moment) -> None:
        """Change the number of shards; `done` gets None or, as one line, why it was not."""
        self.now = now
        self._resharding.set_shards(shards, done)
        self._pump()

    def map_changed(self, slot_map: SlotMap, now: Moment) -> None:
        """The slot map was replaced. What was sent to former owners comes back, and goes to the new ones
        before what is begun from now on."""
        self.now = now
        before, self.slot_map = self.slot_map, slot_map
        changed = slot_map.changed_since(before)
        for index in range(before.shards, slot_map.shards):
            self.shards[index : index + 1] = [Outbound(index, self.name, slot_map.epoch)]
        for outbound in self.shards:
            outbound.epoch = slot_map.epoch
        unsent = [pending for outbound in self.shards for pending in outbound.unsent_of(changed)]
        early, self._early = self._early, []
        for outbound, pending, epoch in early:
            self._send_again(outbound, pending, epoch)
        for outbound in self.shards:
            outbound.block_until_back(changed, lambda slot: self.shards[slot_map.owners[slot]])
        for pending in unsent:
            _send_to_owner(pending)
        for index in range(slot_map.shards, before.shards):
            outbound, self.shards[index] = self.shards[index], Outbound(index, self.name, slot_map.epoch)
            for pending in outbound.close():
                _send_to_owner(pending)
        self._resharding.map_changed()
        self._pump()

    def map_refused(self, request: int, text: str, now: Moment) -> None:
        """The supervisor did not do what was asked of it with this number."""
        self.now = now
        self._resharding.refused(request, text)
        self._pump()

    def _take_back(self, outbound: Outbound) -> None:
        returned, outbound.returned = outbound.returned, []
        for pending, epoch in returned:
            self._send_again(outbound, pending, epoch)

    def _send_again(self, outbound: Outbound, pending: Pending, epoch: int) -> None:
        """An operation came back from a shard whose map has this epoch."""
        if epoch > self.slot_map.epoch:
            self._early.append((outbound, pending, epoch))
            return
        for other in self.shards:
            other.is_returning = True
        _send_to_owner(pending)
        for other in self.shards:
            other.is_returning = False
        outbound.is_back(pending)

    def _recover(self, shard: int, question: list[Any]) -> None:
        """A shard asks about a transaction whose coordinator has died; it asks again until it is settled."""
        transaction = question[1]
        if transaction in self._recoveries:
            return
        recovery = self._recoveries[transaction] = Recovery(self, transaction, shard)
        if question[0] == Question.RESOLVE:
            recovery.resolve(home=question[2], coordinator=question[3])
        else:
            recovery.finish(participants=question[2])

    def recovered(self, transaction: int) -> None:
        """A recovery has ended."""
        del self._recoveries[transaction]

    # -- for flows ----------------------------------------------------------------------------

    def reply(self, call: Call, answer: bytes) -> None:
        self.replies.append(Reply(call, answer, Status.OK, ""))

    def fail(self, call: Call, status: Status, text: str) -> None:
        self.replies.append(Reply(call, None, status, text))

    def next_op_id(self) -> int:
        self._op_id += 1
        return self._op_id

    def shard_of(self, queue: str) -> int:
        return self.slot_map.owners[slot_of(queue)]

    def parts(self, jobs: Iterable[tuple[int, EnqueueJob]]) -> dict[int, Part]:
        """Jobs with their places in a batch, by the shard that they go to."""
        parts: dict[int, Part] = {}
        queue = None
        for index, job in jobs:
            if job.queue != queue:  # neighbours are mostly of one queue
                queue = job.queue
                part = parts.setdefault(self.shard_of(queue), Part())
            part.add(index, job)
        return parts

    def begin_atomic(self, call: Call, parts: dict[int, Part]) -> None:
        """An atomic batch whose jobs are admitted."""
        if len(parts) > 1:
            Transaction(self, call, parts).begin()
            return
        ((shard, part),) = parts.items()
        entropy = self.random_bytes(RANDOM_BYTES_PER_JOB * len(part.jobs))
        SingleFlow(
            self,
            call,
            shard,
            lambda data: atomic_answer(part.jobs, data),
            lambda: self.begin_atomic(call, self.parts(part)),
        ).begin(Op.ENQUEUE_ATOMIC, [entropy, part.jobs], part.size, len(part.jobs))

    def set_timer(self, timed: Timed, at_ms: int) -> None:
        """Fire once at a monotonic instant; replaces an earlier timer of the same object."""
        timed.timer_at = at_ms
        self._timer_count += 1
        heappush(self._timers, (at_ms, self._timer_count, timed))
        if len(self._timers) > self._timers_max:
            # Most waits end before their time: drop their timers, or the heap would grow with the
            # rate of calls times their wait. Seldom enough that it costs next to nothing per timer.
            self._timers = [timer for timer in self._timers if timer[2].timer_at == timer[0]]
            heapify(self._timers)
            self._timers_max = 2 * len(self._timers) + TIMERS_SPARE

    def hold_until(self, call: Call) -> int:
        """Until when a call may wait for a shard that is down, monotonic ms."""
        remaining_ms = call.deadline * 1000 - self.now.wall_ms - DEADLINE_MARGIN_MS
        return self.now.mono_ms + max(0, int(min(remaining_ms, HOLD_MS)))

    # -- calls --------------------------------------------------------------------------------

    def _pump(self) -> None:
        for outbound in self.shards:
            if outbound.is_stirred:  # there may be 64, and most have nothing to send
                outbound.pump()

    def _is_authorised(self, call: Call) -> bool:
        api_keys = self.config.auth.api_keys
        if api_keys is None:
            return True
        scheme, _, shown = (call.authorization or "").partition(" ")
        # Metadata may hold any bytes, and what they were decoded to need not be text that can be encoded.
        shown_bytes = shown.encode(errors="surrogatepass")
        # Every key is compared, and each in constant time, so that the time tells nothing.
        matches = [compare_digest(shown_bytes, known.key.encode()) for known in api_keys]
        return scheme == "Bearer" and any(matches)

    def _refuse(self, call: Call, refusal: Refusal) -> None:
        self.fail(call, refusal.status, refusal.text)

    def _is_busy(self, call: Call, shards: Iterable[int]) -> bool:
        capacity = self.config.storage.command_queue_capacity
        for shard in shards:
            if self.shards[shard].is_full(capacity):
                text = f"{capacity} operations are waiting for shard {shard}: nothing was done, try again later"
                self.fail(call, Status.RESOURCE_EXHAUSTED, text)
                return True
        return False

    def _when_known(self, call: Call, queues: Iterable[str], then: Callable[[IsKnown], None]) -> None:
        """Go on once it is known which undeclared queues exist all the same; only strict mode has to ask."""
        unsure = set()
        if self.config.server.strict_queues:
            unsure = {queue for queue in queues if not self.config.effective(queue).declared}
        if not unsure:
            then(admission.never_known)
            return
        by_shard: dict[int, list[str]] = {}
        for queue in sorted(unsure):
            by_shard.setdefault(self.shard_of(queue), []).append(queue)
        if not self._is_busy(call, by_shard):
            flow = KnownFlow(self, call, by_shard, then)
            if call.method in WATCHED_METHODS:
                self._watched[id(call)] = flow  # or it would go on with a call that ended meanwhile
            flow.begin()

    def _batch(self, call: Call) -> queue_pb2.EnqueueBatchRequest | None:
        """The request of an enqueue; None when it was refused as a whole."""
        request = queue_pb2.EnqueueBatchRequest.FromString(call.request)
        refusal = admission.check_batch(request, self.config)
        if refusal is not None:
            self._refuse(call, refusal)
            return None
        return request

    def _enqueue_batch(self, call: Call) -> None:
        request = self._batch(call)
        if request is not None:
            self._when_known(
                call, (job.queue for job in request.jobs), lambda is_known: self._admit_batch(call, request, is_known)
            )

    def _admit_batch(self, call: Call, request: queue_pb2.EnqueueBatchRequest, is_known: IsKnown) -> None:
        rejected, parts = self._admitted(request, is_known)
        if not self._is_busy(call, parts):
            EnqueueFlow(self, call, rejected, parts).begin()

    def _enqueue_atomic(self, call: Call) -> None:
        request = self._batch(call)
        if request is not None:
            self._when_known(
                call, (job.queue for job in request.jobs), lambda is_known: self._admit_atomic(call, request, is_known)
            )

    def _admit_atomic(self, call: Call, request: queue_pb2.EnqueueBatchRequest, is_known: IsKnown) -> None:
        rejected, parts = self._admitted(request, is_known)
        errors = [(index, rejection) for index, rejection in enumerate(rejected) if rejection is not None]
        if errors:
            self.reply(call, answers.atomic_rejection(errors))
        elif not self._is_busy(call, parts):
            self.begin_atomic(call, parts)

    def _admitted(
        self, request: queue_pb2.EnqueueBatchRequest, is_known: IsKnown
    ) -> tuple[list[queue_pb2.JobRejection | None], dict[int, Part]]:
        """For each job of a batch why it was rejected, or None; and those that were admitted, by shard."""
        admit, now_ms = self._admission.admit, self.now.wall_ms
        rejected: list[queue_pb2.JobRejection | None] = []
        admitted: list[tuple[int, EnqueueJob]] = []
        for index, job in enumerate(request.jobs):
            outcome = admit(job, now_ms, is_known)
            if isinstance(outcome, EnqueueJob):
                rejected.append(None)
                admitted.append((index, outcome))
            else:
                rejected.append(outcome)
        return rejected, self.parts(admitted)

    def _reserve(self, call: Call) -> None:
        request = queue_pb2.ReserveRequest.FromString(call.request)
        self._when_known(call, request.queues, lambda is_known: self._begin_poll(call, request, is_known))

    def _begin_poll(self, call: Call, request: queue_pb2.ReserveRequest, is_known: IsKnown) -> None:
        terms = admission.check_reserve(request, self.config, is_known)
        if isinstance(terms, Refusal):
            self._refuse(call, terms)
        elif not self._is_busy(call, {self.shard_of(queue): None for queue in terms.queues}):
            poll = Poll(self, call, terms)
            self._watched[id(call)] = poll
            poll.begin()

    def _drain_dead_letters(self, call: Call) -> None:
        request = queue_pb2.DrainDeadLettersRequest.FromString(call.request)
        terms = admission.check_drain(request, self.config)
        if isinstance(terms, Refusal):
            self._refuse(call, terms)
            return
        shards = range(self.slot_map.shards) if terms.queue is None else [self.shard_of(terms.queue)]
        if not self._is_busy(call, shards):
            drain = DrainFlow(self, call, terms, shards)
            self._watched[id(call)] = drain
            drain.begin()

    def _ack(self, call: Call) -> None:
        terms = admission.check_ack(queue_pb2.AckRequest.FromString(call.request))
        if isinstance(terms, Refusal):
            self._refuse(call, terms)
        else:
            job_id = terms.job_id
            self._lease_call(call, job_id, Op.ACK, [terms.attempt], lambda _: answers.ack_answer(job_id))

    def _nack(self, call: Call) -> None:
        terms = admission.check_nack(queue_pb2.NackRequest.FromString(call.request))
        if isinstance(terms, Refusal):
            self._refuse(call, terms)
        else:
            job_id = terms.job_id
            arguments = [terms.attempt, terms.strategy, terms.delay_ms, terms.reason]
            self._lease_call(call, job_id, Op.NACK, arguments, lambda dead: answers.nack_answer(job_id, dead))

    def _extend(self, call: Call) -> None:
        terms = admission.check_extend(queue_pb2.ExtendRequest.FromString(call.request))
        if isinstance(terms, Refusal):
            self._refuse(call, terms)
        else:
            job_id = terms.job_id
            arguments = [terms.attempt, terms.lease_ms]
            self._lease_call(call, job_id, Op.EXTEND, arguments, lambda ends: answers.extend_answer(job_id, ends))

    def _lease_call(
        self, call: Call, job_id: bytes, kind: Op, arguments: list[Any], answer: Callable[[Any], bytes]
    ) -> None:
        shard = self.slot_map.owners[job_ids.slot(job_id)]
        if not self._is_busy(call, [shard]):
            again = lambda: self._lease_call(call, job_id, kind, arguments, answer)  # noqa: E731
            SingleFlow(self, call, shard, answer, again).begin(kind, [job_id, *arguments])

    def _server_info(self, call: Call) -> None:
        queue_pb2.GetServerInfoRequest.FromString(call.request)
        self.reply(call, answers.server_info(self.config, self.now.wall_ms, self._version))


def _send_to_owner(pending: Pending) -> None:
    flow, pending.flow = pending.flow, None
    if flow is not None:
        flow.moved(pending.op_id)
