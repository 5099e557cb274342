"""Servers that are broken on purpose, each by one small change, to show that the simulator can see.

A variant replaces methods while its context is entered. `invariants` are the rules by which it may
be found out first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from common import wire
from common.wire import Fate, Op
from router import answers
from router.coordinator import Transaction
from router.core import Core
from router.flows import accepted
from router.outbound import Outbound
from router.polls import Poll
from router.resharding import Move
from shard import keys
from shard.commit import Answers, GroupCommit
from shard.leases import Leases
from shard.machine import Machine
from shard.migration import Arrival, Departure
from shard.ownership import Ownership
from shard.participant import Participant
from shard.ready import Lane
from shard.store import Family
from shard.store_memory import MemoryStore
from shard.turns import Turns
from shard.waiting import WaitingRoom
from tests.simulation.shape import Style


class Variant(NamedTuple):
    """One broken server. `style` is that of the runs it is looked for in, None: any."""

    name: str
    patches: tuple[tuple[type, str, Callable[..., Any]], ...]
    invariants: frozenset[str]
    style: Style | None

    @contextmanager
    def entered(self) -> Iterator[None]:
        patchers = [mock.patch.object(owner, name, method) for owner, name, method in self.patches]
        for patcher in patchers:
            patcher.start()
        try:
            yield
        finally:
            for patcher in reversed(patchers):
                patcher.stop()


VARIANTS: dict[str, Variant] = {}


def _variant(
    name: str, *invariants: str, style: Style | None = None, **methods: tuple[type, Callable[..., Any]]
) -> None:
    """`methods` are the replaced ones by their names."""
    patches = tuple((owner, method, replacement) for method, (owner, replacement) in methods.items())
    VARIANTS[name] = Variant(name, patches, frozenset(invariants), style)


# ---- durability


def _written_at_once(self: GroupCommit, changed: bool) -> Answers:
    self._unsynced = self._unsynced or changed
    answers, self.answers = self.answers, Answers()
    return answers


_variant("answer before sync", "durability", written=(GroupCommit, _written_at_once))


def _end_sync_without_the_last(self: MemoryStore, reach: int) -> None:
    self._refuse_after_failure()
    count = max(0, reach - self._durable_count)
    for batch in self._tail[: count - 1]:
        self._durable.apply(batch)
    del self._tail[:count]
    self._durable_count += count


_variant("lose the tail", "lost", "back", "transactions", "records", end_sync=(MemoryStore, _end_sync_without_the_last))

_is_failed = Turns.failed


def _failed_as_if_done(self: Turns, error: str) -> None:
    for gathered in self._commit.abandoned():
        self._leave(gathered)


_variant("answers as if the failed write had been done", "durability", failed=(Turns, _failed_as_if_done))


# ---- transactions


def _no_votes_are_out(self: Transaction, kind: Op) -> bool:
    return kind != Op.PREPARE and any(sent.kind == kind for sent in self._out.values())


_variant("commit without all votes", "atomicity", _is_out=(Transaction, _no_votes_are_out))

_decided = Transaction._decided


def _forget_first(self: Transaction, fate: Fate) -> None:
    if fate == Fate.COMMITTED:
        self._send(Op.FORGET, self._home, [])
    _decided(self, fate)


_variant("forget a decision early", "forgotten", _decided=(Transaction, _forget_first))


def _resolve_without_a_record(self: Participant, coordinator: str, transaction: int, may_prepare: bool) -> Fate:
    return Fate.COMMITTED if transaction in self._decided else Fate.ABORTED


_variant(
    "skip the abort record",
    "atomicity",
    "rest",
    style=Style.TRANSACTIONS,
    resolve=(Participant, _resolve_without_a_record),
)


def _success_at_once(self: Transaction, fate: Fate) -> None:
    _decided(self, fate)
    if fate == Fate.COMMITTED:
        taken: dict[int, tuple[bytes, bool]] = {}
        for shard, part in self._parts.items():
            for index, outcome in zip(part.indexes, self._votes[shard][1], strict=True):
                taken[index] = accepted(outcome)
        self._reply(answers.atomic_answer(taken[index] for index in sorted(taken)))


_variant("success before the last commit", "lost", _decided=(Transaction, _success_at_once))

_release = Participant._release


def _release_twice(self: Participant, transaction: int) -> Any:
    prepared = _release(self, transaction)
    for job, _ in prepared.jobs if prepared is not None else ():
        self._jobs.queue_for(job.queue).reserved -= 1
    return prepared


_variant("release capacity twice", "capacity", _release=(Participant, _release_twice))


_hold = Participant._hold


def _hold_no_keys(self: Participant, transaction: int, prepared: Any) -> None:
    _hold(self, transaction, prepared)
    self._held.clear()


_variant("do not hold keys", "keys", "doubled", _hold=(Participant, _hold_no_keys))


def _blocks_nobody(self: Participant, *_: Any) -> bool:
    return False


_variant("do not wait for an undecided batch", "refused", "keys", "capacity", blocks=(Participant, _blocks_nobody))

_router_gone = Participant.router_gone


def _nobody_is_orphaned(self: Participant, router: str) -> None:
    _router_gone(self, router)
    self._orphans.clear()


_variant("ask for nothing when a coordinator has died", "rest", router_gone=(Participant, _nobody_is_orphaned))


# ---- waiting


def _told_in_vain(self: Poll, op_id: int) -> None:
    for shard, pending in self._watches.items():
        if pending.op_id == op_id:
            del self._watches[shard]
            return


_variant("wake without claim", "wake-ups", "rest", _told=(Poll, _told_in_vain))

_remove = WaitingRoom.remove


def _remove_and_forget(self: WaitingRoom, op_id: int) -> Any:
    waiter = _remove(self, op_id)
    if waiter is not None:
        waiter.promised = None
    return waiter


_variant("do not pass a wake-up on", "wake-ups", style=Style.POLLS, remove=(WaitingRoom, _remove_and_forget))


def _keep_waiting(self: Poll, *_: Any) -> bool:
    return False


_variant("do not cancel what a poll has parked", "rest", "stranded", "assertion", _cancel=(Poll, _keep_waiting))


# ---- leases and attempts

_retry = Machine._retry


def _retry_as_the_same_attempt(self: Machine, lease: Any, delay_ms: int) -> None:
    lease.attempt -= 1
    _retry(self, lease, delay_ms)


_variant("reuse an attempt number", "attempts", _retry=(Machine, _retry_as_the_same_attempt))


def _give_nothing_back(self: Machine, router: str, operation: Any) -> None:
    return None


_variant("do not take back a claim", "stranded", "rest", _give_back=(Machine, _give_nothing_back))


_variant("confirm what was not delivered", "stranded", "lost", give_back=(Outbound, Outbound.confirm))

_answer_left = Poll.answer_left


def _answer_never_left(self: Poll, left: bool) -> None:
    _answer_left(self, False)


_variant("give back what was delivered", "attempts", "doubled", "leases", answer_left=(Poll, _answer_never_left))

_set_end = Leases.set_end


def _shorter_lease(self: Leases, lease: Any, lease_ms: int, now: Any) -> None:
    _set_end(self, lease, lease_ms, now)
    lease.deadline -= 1
    self.timers.append((lease.deadline, lease.job_id))
    self.timers.sort()


_variant("end leases early", "leases", set_end=(Leases, _shorter_lease))


# ---- order and counters

_add = Lane.add


def _add_at_the_end(self: Lane, sequence: int, record: bytes) -> None:
    if sequence < self.frontier:
        self._window.append(sequence)
        self._records[sequence] = record
        self._bytes += len(record)
        self._budget.used += len(record)


_variant("out of order lane", "order", "records", add=(Lane, _add_at_the_end))


def _promote_uncounted(self: Machine, limit: int) -> bool:
    rows = self._scheduled.due(self._now.wall_ms, limit)
    for key, record in rows:
        slot, _, number, inverted, sequence = keys.read_scheduled_key(key)
        self._store.delete(Family.SCHEDULED, key)
        self._make_ready(self._by_number[slot, number], inverted, sequence, record)
    return bool(rows)


_variant("promotion forgets the counter", "counters", _promote=(Machine, _promote_uncounted))


def _ignore_the_cap(self: Machine, jobs: Any) -> list[Any]:
    return []


_variant("an atomic batch goes over the cap", "capacity", refusals=(Machine, _ignore_the_cap))


# ---- processes that have ended


def _take_from_anybody(self: Turns, message: bytes, now: Any) -> int:
    envelope = wire.unpack(message)
    for operation in envelope.items:
        self._machine.apply(envelope.sender, operation, now, envelope.epoch)
    self._commit.answers.envelope_applied(envelope.sender, envelope.number)
    return len(envelope.items)


_variant("take envelopes of and for the dead", "rest", "told", "stranded", "doubled", take=(Turns, _take_from_anybody))


def _believe_every_shard(self: Core, message: bytes, now: Any) -> None:
    self.now = now
    envelope = wire.unpack(message)
    self.shards[int(envelope.sender.removeprefix("shard-"))].take(envelope.number, envelope.items)
    self._pump()


_variant("take results of a dead shard", "rest", "assertion", envelope=(Core, _believe_every_shard))


def _settled_at_once(self: Core) -> bool:
    return True


_variant(
    "a router that stops tells nobody what it delivered",
    "leases",
    "stranded",
    "doubled",
    "attempts",
    "rest",
    style=Style.STOPS,
    is_settled=(Core, property(_settled_at_once)),  # type: ignore[arg-type]
)


# ---- slots that move


def _commit_when_quiet(self: Move, is_quiet: bool) -> None:
    self._ask_for_commit() if is_quiet else self._wait(1, self._hold)


def _serve_on(self: Ownership, router: str) -> bool:
    return True


def _apply_whatever_the_slot(self: Ownership, router: str, operation: Any) -> None:
    self._jobs.apply_here(router, operation)


def _nothing_is_open(self: Machine, slots: frozenset[int]) -> bool:
    return False


def _clear_nothing(self: Ownership, router: str, slots: list[int]) -> bool:
    self._arrival = Arrival(router, slots)
    return True


def _note_nothing(self: Departure, pending: Any) -> None:
    pass


def _forget_who_waits(self: WaitingRoom, slots: Any) -> list[int]:
    return []


def _variant_of_moves(name: str, *invariants: str, **methods: tuple[type, Callable[..., Any]]) -> None:
    _variant(name, *invariants, style=Style.MOVES, **methods)


_variant_of_moves("switch without the last changes", "moved", "records", _held=(Move, _commit_when_quiet))
_variant_of_moves("hold nothing", "moved", "records", _hold=(Ownership, _serve_on))
_variant_of_moves(
    "a former owner goes on",
    "moved",
    "records",
    "order",
    "lost",
    "leases",
    apply_if_ours=(Ownership, _apply_whatever_the_slot),
)
_variant_of_moves("hold without waiting for what is open", "moved", "leases", is_open=(Machine, _nothing_is_open))
_variant_of_moves("copy onto what lies there", "moved", "records", _clear=(Ownership, _clear_nothing))
_variant_of_moves("changes are not copied", "moved", "records", note=(Departure, _note_nothing))
_variant_of_moves(
    "waiters are not told that their queue has moved", "wake-ups", "rest", about=(WaitingRoom, _forget_who_waits)
)
