"""A Reserve in progress, from its arrival until its answer has left or it has ended without one.

All its queues on one shard: one operation, which the shard parks while there is nothing. Queues on
several shards: claims one after the other in the listed order (the runs); when all are empty, a
watch on every shard, and claims again from the start as soon as one is told of a job.

What was claimed for a call that ends without it is given back, whatever the moment: the call is
closed before or while it is claimed for, its answer cannot be written, or the shard dies before its
result arrives (then its successor is told). When the wait is over is known here alone: watches and
a parked claim are cancelled, claims that are under way are brought to their end, and the answer is
what they gave, most often an empty list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.wire import JOB_OVERHEAD_BYTES, Op
from router import answers
from router.admission import ReserveTerms
from router.front import Call, Status
from router.outbound import Pending

if TYPE_CHECKING:
    from router.core import Core

# Where an operation RESERVE says that it may be parked, and which wake-up it settles.
_MAY_WAIT = 5
_SETTLES = 7


class Poll:
    """One Reserve. `timer_at` is when its wait is over, monotonic ms."""

    def __init__(self, core: Core, call: Call, terms: ReserveTerms) -> None:
        self.timer_at = 0
        self._core = core
        self._call = call
        self._terms = terms
        self._epoch = core.slot_map.epoch
        self._runs = self._by_shard(terms.queues)
        self._max_bytes = core.config.limits.max_response_bytes
        self._run = 0
        self._jobs: list[answers.ReservedJob] = []
        self._size = 0
        self._claims: list[tuple[int, int]] = []  # shard and op id of those that gave jobs
        self._claim: tuple[int, Pending] | None = None  # the one that is out
        self._watches: dict[int, Pending] = {}  # by shard
        self._woken: dict[int, int] = {}  # shard: op id of a watch that fired and is not settled
        self._wait_is_over = False
        self._is_cancelling = False  # the claim that is out
        self._ended = False

    def begin(self) -> None:
        wait_ms = 0 if self._core.draining else self._terms.wait_ms
        if wait_ms:
            # No longer than the client waits: nothing is leased into a call that has ended.
            left_ms = self._call.deadline * 1000 - self._core.now.wall_ms
            self._core.set_timer(self, self._core.now.mono_ms + int(max(0, min(wait_ms, left_ms))))
        self._begin_claims()

    # -- events -------------------------------------------------------------------------------

    def closed(self) -> None:
        """The call has ended without an answer."""
        if not self._ended:
            self._end()
        self._give_back()

    def answer_left(self, left: bool) -> None:
        for shard, op_id in self._claims:
            if left:
                self._core.shards[shard].confirm(op_id)
            else:
                self._core.shards[shard].give_back(op_id)

    def stop_waiting(self) -> None:
        """The server stops: an answer now, an empty one if need be."""
        if self.timer_at:
            self._answer()

    def timer_fired(self) -> None:
        if self._terms.wait_ms and not self._core.draining:
            self._end_wait()
        elif self._jobs:
            self._answer()
        elif self._claim is not None and self._core.shards[self._claim[0]].withdraw(self._claim[1]):
            shard, self._claim = self._claim[0], None
            self._end()
            self._core.fail(self._call, Status.UNAVAILABLE, f"shard {shard} is down: nothing was reserved")

    def result(self, op_id: int, status: int, data: Any) -> None:
        if self._claim is not None and self._claim[1].op_id == op_id:
            shard, self._claim = self._claim[0], None
            self._claimed(shard, op_id, status, data)
        else:
            self._told(op_id)

    def lost(self, op_id: int) -> None:
        if self._claim is not None and self._claim[1].op_id == op_id:
            shard, self._claim = self._claim[0], None
            # It may have claimed: then its successor finds the leases under this op id.
            self._core.shards[shard].give_back(op_id)
            if self._ended:
                return
            if len(self._runs) > 1 or self._wait_is_over:
                self._next_run()
            else:
                self._begin_claims()
            return
        for shard, pending in list(self._watches.items()):
            if pending.op_id == op_id:
                del self._watches[shard]
                if self._ended:
                    return
                if self._is_planned_by_the_map:
                    self._watch(shard)
                elif self._claim is None:
                    self._begin_claims()

    def moved(self, op_id: int) -> None:
        if self._claim is not None and self._claim[1].op_id == op_id:
            self._claim = None
            if self._ended:
                pass
            elif self._is_cancelling:  # it was parked, so there had been nothing
                self._answer()
            else:
                self._begin_claims()
            return
        for shard, pending in list(self._watches.items()):
            if pending.op_id == op_id:
                del self._watches[shard]
                if not self._ended and self._claim is None:
                    self._begin_claims()

    def hold(self) -> None:
        if self._ended:
            return
        if self._wait_is_over or self._may_pass_over():
            self._pass_over()
        elif not self.timer_at:
            self._core.set_timer(self, self._core.hold_until(self._call))

    def _pass_over(self) -> bool:
        """Whether the claim had not been sent and its shard is down: then it is not waited for."""
        if self._claim is None:
            return False
        shard, pending = self._claim
        if self._core.shards[shard].is_up or not self._core.shards[shard].withdraw(pending):
            return False
        self._claim = None
        self._next_run()
        return True

    def _end_wait(self) -> None:
        """The wait is over. What is being claimed at this moment still counts: a wait that is shorter than
        a claim takes must not hide jobs that are there."""
        self._wait_is_over = True
        if self._claim is None:
            self._answer()
        elif not self._pass_over():
            shard, pending = self._claim
            if not pending.sent:
                pending.operation[_MAY_WAIT] = pending.parks = False
            elif pending.parks:
                self._is_cancelling = True
                self._cancel(shard, pending, self._nothing_was_claimed)

    def _nothing_was_claimed(self) -> None:
        """The claim was cancelled while it was parked."""
        self._claim = None
        if not self._ended:
            self._answer()

    # -- claims -------------------------------------------------------------------------------

    @property
    def _is_planned_by_the_map(self) -> bool:
        """Nothing may be sent by an older plan: a shard trusts routers to know what it owns by their map."""
        return self._epoch == self._core.slot_map.epoch

    def _begin_claims(self) -> None:
        """From the first queue on, where its slot is by now."""
        if not self._is_planned_by_the_map:
            self._plan_again()
        self._run = 0
        if self._jobs:  # the order of the queues would not hold for more
            self._answer()
        elif self._may_pass_over():
            self._claim_again()
        else:
            self._claim_run()

    def _plan_again(self) -> None:
        """Slots have moved: watches and wake-ups are of the old plan."""
        self._epoch = self._core.slot_map.epoch
        self._runs = self._by_shard(self._terms.queues)
        self._end_watches()

    def _claim_run(self) -> None:
        shard, queues = self._runs[self._run]
        core = self._core
        may_wait = len(self._runs) == 1 and self._may_wait()
        max_jobs = self._terms.max_jobs - len(self._jobs)
        operation = [
            core.next_op_id(),
            Op.RESERVE,
            queues,
            max_jobs,
            self._terms.lease_ms,
            may_wait,
            self._max_bytes - self._size,
            self._woken.pop(shard, 0),
        ]
        self._claim = shard, core.shards[shard].add(operation, self, parks=may_wait, jobs=max_jobs)

    def _claimed(self, shard: int, op_id: int, status: int, data: Any) -> None:
        if status != Status.OK:
            # Its write failed, which may have left leases behind all the same: the successor will know.
            self._core.shards[shard].give_back(op_id)
            if not self._ended:
                self._fail(Status(status), data)
            return
        if self._ended:
            if data:
                self._core.shards[shard].give_back(op_id)
            return
        if data:
            size = self._size + sum(len(body) + JOB_OVERHEAD_BYTES for _, _, _, body in data)
            if self._jobs and size > self._max_bytes:
                # A shard gives one job whatever its size, and this one is too large beside the others.
                self._core.shards[shard].give_back(op_id)
                self._answer()
                return
            self._claims.append((shard, op_id))
            self._jobs += data
            self._size = size
        if len(self._runs) == 1:
            self._answer()
        else:
            self._next_run()

    def _next_run(self) -> None:
        """The claim of this run is through: the next run of a shard that is up, or what there is."""
        if not self._is_planned_by_the_map:
            self._begin_claims()
            return
        core = self._core
        while True:
            self._run += 1
            full = len(self._jobs) >= self._terms.max_jobs or self._size >= self._max_bytes
            if full or self._run == len(self._runs):
                break
            if core.shards[self._runs[self._run][0]].is_up:
                self._claim_run()
                return
        if self._jobs or not self._may_wait():
            self._answer()
            return
        # A wake-up of a shard that has ended since then is void: its successor will be watched.
        self._woken = {shard: op_id for shard, op_id in self._woken.items() if core.shards[shard].is_up}
        if self._woken:  # told of a job while the claims were under way
            self._claim_again()
        else:
            for shard, _ in self._runs:
                if shard not in self._watches:
                    self._watch(shard)

    def _claim_again(self) -> None:
        self._run = -1
        self._next_run()

    # -- watches ------------------------------------------------------------------------------

    def _watch(self, shard: int) -> None:
        queues = [queue for owner, run in self._runs if owner == shard for queue in run]
        operation = [self._core.next_op_id(), Op.WATCH, queues]
        self._watches[shard] = self._core.shards[shard].add(operation, self, parks=True)

    def _told(self, op_id: int) -> None:
        """A watch fired."""
        for shard, pending in self._watches.items():
            if pending.op_id == op_id:
                del self._watches[shard]
                if self._ended:
                    return  # its cancellation is on the way, and passes the wake-up on
                self._woken[shard] = op_id
                if self._claim is None:
                    self._claim_again()
                return

    # -- the end ------------------------------------------------------------------------------

    def _may_pass_over(self) -> bool:
        """Whether there is something better to do than to wait for a claim on a shard that is down."""
        if len(self._runs) == 1:
            return False
        return self._may_wait() or any(self._core.shards[shard].is_up for shard, _ in self._runs)

    def _may_wait(self) -> bool:
        return bool(self.timer_at and self._terms.wait_ms and not self._core.draining)

    def _answer(self) -> None:
        self._end()
        self._core.reply(self._call, answers.reserve_answer(self._jobs))

    def _fail(self, status: Status, text: str) -> None:
        self._end()
        self._give_back()
        self._core.fail(self._call, status, text)

    def _give_back(self) -> None:
        for shard, op_id in self._claims:
            self._core.shards[shard].give_back(op_id)
        self._claims.clear()

    def _end(self) -> None:
        """No more is claimed for this call; what is under way is cancelled or will be given back."""
        self._ended = True
        self.timer_at = 0
        if self._claim is not None and not self._is_cancelling:
            shard, pending = self._claim
            if self._cancel(shard, pending) and (woken := pending.operation[_SETTLES]):
                self._woken[shard] = woken
        self._end_watches()

    def _end_watches(self) -> None:
        """Cancel watches, and pass wake-ups on."""
        for shard, pending in self._watches.items():
            self._cancel(shard, pending)
        self._watches.clear()
        for shard, op_id in self._woken.items():
            self._core.shards[shard].add([self._core.next_op_id(), Op.CANCEL, op_id], None)
        self._woken.clear()

    def _cancel(self, shard: int, pending: Pending, done: Callable[[], None] | None = None) -> bool:
        """Whether the shard had not heard of it and never will; else it is told, and `done` follows if it had
        not answered it before."""
        outbound = self._core.shards[shard]
        if outbound.withdraw(pending):
            return True
        op_id = self._core.next_op_id()
        outbound.add([op_id, Op.CANCEL, pending.op_id], _Cancelled(self._core, shard, pending, done))
        return False

    def _by_shard(self, queues: tuple[str, ...]) -> list[tuple[int, list[str]]]:
        """The queues in their order, in runs of neighbours on one shard."""
        runs: list[tuple[int, list[str]]] = []
        for queue in queues:
            shard = self._core.shard_of(queue)
            if runs and runs[-1][0] == shard:
                runs[-1][1].append(queue)
            else:
                runs.append((shard, [queue]))
        return runs


class _Cancelled:
    """A cancellation on the way: after its result none comes for the operation that it cancelled."""

    def __init__(self, core: Core, shard: int, target: Pending, done: Callable[[], None] | None) -> None:
        self._core = core
        self._shard = shard
        self._target = target
        self._done = done

    def result(self, op_id: int, status: int, data: Any) -> None:
        was_open = self._core.shards[self._shard].forget(self._target.op_id)
        if was_open and self._done is not None:
            self._done()

    def lost(self, op_id: int) -> None:
        """So was the operation."""

    def hold(self) -> None:
        """Nobody waits for it."""

    def moved(self, op_id: int) -> None:
        """Its shard was taken away."""
