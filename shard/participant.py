"""A shard's part in a transaction: an atomic enqueue whose jobs live on several shards.

Two-phase commit with presumed abort. The router that took the call coordinates; one participant is
the transaction's home, and the commit decision lives there.

    PREPARE   every participant: refuse, or store the jobs aside and hold their capacity and keys
    DECIDE    the home: store the decision and apply the home's own part, in one write. From its
              sync on the transaction is committed.
    COMMIT    the others: apply. When all have, FORGET at the home.
    ABORT     whoever may have prepared: let go of everything.

What a participant promised it keeps over restarts; what it did not hear it asks for. A prepared
transaction whose coordinator is gone is settled by its home: a home that has decided says so, one
that has not takes its own promise back, after which nobody can decide any more, and says abort.
Where the home has not even prepared it leaves a mark, so that a PREPARE that is still on its way
is refused. Shards do not talk to each other: a shard's question is answered through any router.

While a transaction is undecided its jobs count as live ones, so no queue is ever filled over its
cap; but what it holds may be free again in a moment, so nobody is refused for it either. An enqueue
waits for the decision when it has a key that is held, or when it would be refused as full only for
places that are held: it would fit if all that is undecided were aborted. What is full even then is
refused at once, and what a closing queue refuses does not wait.

    a key      waits for the one transaction that holds it
    places     stand in the line of their queue, which goes on whenever places of it come free: with
               a decision, an ack, a purge, a higher cap. While there is a line, whoever needs places
               of that queue joins it, so a batch is not overtaken for ever by smaller ones.

All who wait are numbered as they came, and go in this order wherever two of them want the same. One
that goes is applied as if it had come now, and may find the next thing to wait for; after WAIT_MAX_MS
it is told that nothing was stored. All this is memory only: a router that ends takes what it waits
for with it.

A PREPARE never waits: where an enqueue would, it is refused as busy, and its coordinator lets go of
everything and tries again, so that transactions cannot wait for each other in a circle. Those that
wait stand only behind promises that were made before, as no PREPARE passes their line.

The stored records, all under the transaction's id (64 bits, never used twice):

    TRANSACTIONS  p id   coordinator, home, jobs with their ids       prepared here
                  d id   coordinator, participants                    decided here: commit
                  x id   coordinator                                  refused here, whatever comes
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Iterable
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import msgpack

from common.slots import slot_of
from common.wire import EnqueueJob, EnqueueOutcome, Fate, Op, Operation, Outcome, Question, Vote
from shard.state import Queue
from shard.store import Family, Store

# How long an enqueue waits for decisions at most, in ms: as long as a router holds a call without a
# deadline for a shard that is down. Decisions take milliseconds, unless a coordinator lives and is silent.
WAIT_MAX_MS = 30_000

_PREPARED = b"p"
_DECIDED = b"d"
_REFUSED = b"x"


class PreparedJob(NamedTuple):
    """One job of a prepared part. `job_id` is empty for a duplicate, whose id is in the outcome."""

    job: EnqueueJob
    job_id: bytes


class Prepared(NamedTuple):
    """What a shard has promised to one transaction."""

    coordinator: str  # the router's name
    home: int
    jobs: list[PreparedJob]


class Waiter:
    """An enqueue that waits for `place`: a transaction, or the queue of that name. None: it is being tried."""

    __slots__ = ("number", "operation", "place", "router", "until_ms")

    def __init__(self, number: int, router: str, operation: Operation, until_ms: int) -> None:
        self.number = number
        self.router = router
        self.operation = operation
        self.until_ms = until_ms  # monotonic
        self.place: int | str | None = None


class Jobs(Protocol):
    """What a participant needs of the machine."""

    def refusals(self, jobs: list[EnqueueJob]) -> list[tuple[int, EnqueueOutcome]]:
        """Why a batch cannot be stored as a whole, whatever becomes of undecided transactions."""

    def duplicate(self, name: str, key: str) -> EnqueueOutcome | None:
        """The outcome for a key that a stored job holds."""

    def contested(self, name: str) -> Queue | None:
        """The queue, if undecided jobs have places in it and it is not closing."""

    def cap(self, name: str) -> int | None:
        """How many live jobs a queue may have, None for any number."""

    def queue_for(self, name: str) -> Queue:
        """The queue, made if need be."""

    def draw_id(self, queue: Queue, random: int) -> bytes:
        """The id of a job to come; its place in the queue is taken with it."""

    def place(self, jobs: Iterable[tuple[EnqueueJob, bytes]]) -> None:
        """Store jobs under ids that were drawn, with their keys, and hand out what somebody waits for."""

    def again(self, router: str, operation: Operation) -> None:
        """Apply an operation that had to wait; it may have to wait again."""

    def give_up(self, router: str, operation: Operation) -> None:
        """Answer an operation that has waited long enough: it was not applied, and will not be."""

    def changed(self, queue: Queue) -> None:
        """The queue's record has to be written."""


class Participant:
    """The transactions of one shard. `shard` is its index."""

    def __init__(self, store: Store, shard: int, jobs: Jobs) -> None:
        self._store = store
        self._shard = shard
        self._jobs = jobs
        self._prepared: dict[int, Prepared] = {}
        self._decided: dict[int, tuple[str, list[int]]] = {}  # coordinator, participants
        self._refused: dict[int, str] = {}  # coordinator
        # Those of the prepared and decided ones whose coordinator has ended.
        self._orphans: dict[int, None] = {}
        # Keys that undecided transactions hold, by queue name and key.
        self._held: dict[tuple[str, str], int] = {}
        # Enqueues that wait, by op id in the order in which they came; and each of them by what it waits
        # for: a transaction that holds a key, or places in a queue. In a line they are in order as well.
        self._blocked: dict[int, Waiter] = {}
        self._by_key: dict[int, list[Waiter]] = {}
        self.lines: dict[str, list[Waiter]] = {}
        self._arrivals = 0

    # -- start --------------------------------------------------------------------------------

    def load(self, routers: set[str]) -> None:
        """Read what was promised before a restart. `routers` are those that live."""
        for key, value in self._store.scan(Family.TRANSACTIONS, b"", b"\xff", 1 << 62):
            transaction = int.from_bytes(key[1:], "big")
            if key[:1] == _PREPARED:
                coordinator, home, jobs = msgpack.unpackb(value)
                prepared = Prepared(coordinator, home, [PreparedJob(EnqueueJob(*job), job_id) for job, job_id in jobs])
                self._hold(transaction, prepared)
            elif key[:1] == _DECIDED:
                coordinator, participants = msgpack.unpackb(value)
                self._decided[transaction] = coordinator, participants
            else:
                self._refused[transaction] = msgpack.unpackb(value)
        coordinators = {prepared.coordinator for prepared in self._prepared.values()}
        coordinators |= {coordinator for coordinator, _ in self._decided.values()}
        coordinators |= set(self._refused.values())
        for coordinator in sorted(coordinators - routers):
            self.router_gone(coordinator)

    # -- operations ---------------------------------------------------------------------------

    def prepare(self, coordinator: str, transaction: int, home: int, entropy: bytes, jobs: list[Any]) -> list[Any]:
        """Vote, and promise what the vote says."""
        wanted = [EnqueueJob(*job) for job in jobs]
        if transaction in self._refused:
            return [Vote.TOO_LATE, None]
        refusals = self._jobs.refusals(wanted)
        if refusals:
            return [Vote.REFUSED, refusals]
        if self._prepared and self._obstacle(wanted, self._arrivals + 1, is_atomic=True) is not None:
            return [Vote.BUSY, None]
        outcomes: list[EnqueueOutcome] = []
        prepared: list[PreparedJob] = []
        fresh: dict[tuple[str, str], bytes] = {}
        for index, job in enumerate(wanted):
            outcome: EnqueueOutcome | None = None
            if job.key is not None:
                first = fresh.get((job.queue, job.key))
                outcome = (
                    [Outcome.DEDUPLICATED, first] if first is not None else self._jobs.duplicate(job.queue, job.key)
                )
            if outcome is None:
                random = int.from_bytes(entropy[3 * index : 3 * index + 3], "big") & 0x3FFFF
                outcome = job_id = self._jobs.draw_id(self._jobs.queue_for(job.queue), random)
                prepared.append(PreparedJob(job, job_id))
                if job.key is not None:
                    fresh[job.queue, job.key] = job_id
            outcomes.append(outcome)
        promise = Prepared(coordinator, home, prepared)
        self._store.put(Family.TRANSACTIONS, _PREPARED + _id(transaction), msgpack.packb(promise))
        self._hold(transaction, promise)
        return [Vote.YES, outcomes]

    def decide(self, coordinator: str, transaction: int, participants: list[int]) -> Fate:
        """At the home: commit, unless the promise was taken back. `participants` are the other shards."""
        if transaction in self._decided:
            return Fate.COMMITTED
        if transaction not in self._prepared:
            return Fate.ABORTED
        self._decided[transaction] = coordinator, participants
        self._store.put(Family.TRANSACTIONS, _DECIDED + _id(transaction), msgpack.packb((coordinator, participants)))
        self.commit(transaction)
        return Fate.COMMITTED

    def commit(self, transaction: int) -> None:
        """Apply what was prepared; a transaction that is unknown here was applied before."""
        prepared = self._release(transaction)
        if prepared is not None:
            self._jobs.place(prepared.jobs)
            self._unblock(transaction, prepared)

    def abort(self, transaction: int) -> None:
        """Let go of what was prepared."""
        prepared = self._release(transaction)
        if prepared is not None:
            self._unblock(transaction, prepared)

    def resolve(self, coordinator: str, transaction: int, may_prepare: bool) -> Fate:
        """At the home: the transaction's fate, settled here and now if it was open.

        `may_prepare`: a PREPARE of its coordinator may be on its way here.
        """
        if transaction in self._decided:
            return Fate.COMMITTED
        if transaction in self._prepared:
            self.abort(transaction)
        elif may_prepare and transaction not in self._refused:
            self._refused[transaction] = coordinator
            self._store.put(Family.TRANSACTIONS, _REFUSED + _id(transaction), msgpack.packb(coordinator))
        return Fate.ABORTED

    def forget(self, transaction: int) -> None:
        """At the home: every participant has applied it, nobody can ask any more."""
        if self._decided.pop(transaction, None) is not None:
            self._orphans.pop(transaction, None)
            self._store.delete(Family.TRANSACTIONS, _DECIDED + _id(transaction))

    def router_gone(self, router: str) -> None:
        """A router has ended: what it could still have decided here is aborted, the rest is asked about."""
        self._drop([waiter for waiter in self._blocked.values() if waiter.router == router])
        for transaction, prepared in list(self._prepared.items()):
            if prepared.coordinator == router:
                if prepared.home == self._shard:
                    self.abort(transaction)
                else:
                    self._orphans[transaction] = None
        for transaction, (coordinator, _) in self._decided.items():
            if coordinator == router:
                self._orphans[transaction] = None
        for transaction, coordinator in list(self._refused.items()):
            if coordinator == router:  # neither its PREPARE nor its DECIDE can come any more
                del self._refused[transaction]
                self._store.delete(Family.TRANSACTIONS, _REFUSED + _id(transaction))

    # -- enqueues that wait -------------------------------------------------------------------

    def blocks(self, router: str, operation: Operation, jobs: list[EnqueueJob], mono_ms: int) -> bool:
        """Whether an enqueue has to wait for a decision; it is applied again then.

        An atomic one must have been found to be without `refusals`.
        """
        if not self._prepared:
            return False
        op_id, kind, *_ = operation
        waiter = self._blocked.get(op_id)  # one that has waited already keeps its number
        number = self._arrivals + 1 if waiter is None else waiter.number
        place = self._obstacle(jobs, number, is_atomic=kind == Op.ENQUEUE_ATOMIC)
        if place is None:
            return False
        if waiter is None:
            self._arrivals = number
            waiter = self._blocked[op_id] = Waiter(number, router, operation, mono_ms + WAIT_MAX_MS)
        waiter.place = place
        insort(self._companions(place), waiter, key=_number)
        return True

    def serve(self, name: str) -> None:
        """Places of a queue may have come free, or its cap has changed, or it is closing: its line goes on."""
        self._go_on([], {name})

    def serve_all(self) -> None:
        """The same of every queue."""
        self._go_on([], set(self.lines))

    @property
    def has_waiters(self) -> bool:
        """Whether any enqueue waits here."""
        return bool(self._blocked)

    def waits_until(self) -> int:
        """When the first of those who wait has waited long enough, monotonic ms."""
        return next(iter(self._blocked.values())).until_ms

    def give_up(self, mono_ms: int) -> None:
        """Those who have waited long enough hear so."""
        due = list(takewhile(lambda waiter: waiter.until_ms <= mono_ms, self._blocked.values()))
        for waiter in due:
            self._jobs.give_up(waiter.router, waiter.operation)
        self._drop(due)

    def drop_about(self, slots: Container[int]) -> list[tuple[str, Operation]]:
        """Those that are about queues of these slots wait no more; returns them in their order."""
        found = [
            waiter for waiter in self._blocked.values() if any(slot_of(job[0]) in slots for job in waiter.operation[3])
        ]
        self._drop(found)
        return [(waiter.router, waiter.operation) for waiter in found]

    def _obstacle(self, jobs: list[EnqueueJob], number: int, is_atomic: bool) -> int | str | None:
        """What an enqueue has to wait for: a transaction with a key of it, a queue with too few places, or nothing."""
        by_queue: dict[str, list[EnqueueJob]] = {}
        for job in jobs:
            by_queue.setdefault(job[0], []).append(job)
        for name, wanted in by_queue.items():
            queue = self._jobs.contested(name)
            if queue is None:
                continue
            for job in wanted:
                transaction = self._held.get((name, job[4] or ""))
                if transaction is not None:
                    return transaction
            if self._lacks_places(queue, wanted, number, is_atomic):
                return name
        return None

    def _lacks_places(self, queue: Queue, jobs: list[EnqueueJob], number: int, is_atomic: bool) -> bool:
        """Whether jobs for a queue get fewer places now than if all that is undecided were aborted."""
        cap = self._jobs.cap(queue.name)
        if cap is None:
            return False
        line = self.lines.get(queue.name)
        is_behind = line is not None and line[0].number < number
        free = max(0, cap - queue.depth)
        count = len(jobs)
        if count <= free and not is_behind:
            return False
        if not is_atomic:  # there duplicates need no place
            count = self._new_jobs(queue.name, jobs)
        free_at_most = cap - queue.depth + queue.reserved
        return (0 if is_behind else min(count, free)) < min(count, free_at_most)

    def _new_jobs(self, name: str, jobs: list[EnqueueJob]) -> int:
        """How many of these are no duplicates, neither of stored jobs nor of each other."""
        keys = {job[4] for job in jobs if job[4] is not None}
        keyless = sum(job[4] is None for job in jobs)
        return keyless + sum(self._jobs.duplicate(name, key) is None for key in keys)

    def _unblock(self, transaction: int, prepared: Prepared) -> None:
        """A transaction is decided: those who wait for its keys, or for places where it had some, are tried again."""
        if self._blocked:
            self._go_on(self._by_key.pop(transaction, []), {job.queue for job, _ in prepared.jobs})

    def _go_on(self, freed: list[Waiter], names: set[str]) -> None:
        """Try again who waited for a key, and the lines of some queues up to the first that has to stay."""
        names = names & self.lines.keys()
        while freed or names:
            first = min(freed[:1] + [self.lines[name][0] for name in names], key=_number)
            place = first.place
            if isinstance(place, str):
                self._leave(first)
            else:
                del freed[0]
            first.place = None
            self._jobs.again(first.router, first.operation)
            if first.place is None:
                del self._blocked[first.operation[0]]
            elif first.place == place:
                names.discard(first.place)
            names &= self.lines.keys()

    def _drop(self, waiters: list[Waiter]) -> None:
        """These wait no more; who stood behind them may go on."""
        for waiter in waiters:
            del self._blocked[waiter.operation[0]]
            self._leave(waiter)
        self._go_on([], {waiter.place for waiter in waiters if isinstance(waiter.place, str)})

    def _companions(self, place: int | str) -> list[Waiter]:
        """Who waits for the same."""
        if isinstance(place, str):
            return self.lines.setdefault(place, [])
        return self._by_key.setdefault(place, [])

    def _leave(self, waiter: Waiter) -> None:
        place = waiter.place
        assert place is not None
        companions = self._companions(place)
        companions.remove(waiter)
        if companions:
            return
        if isinstance(place, str):
            del self.lines[place]
        else:
            del self._by_key[place]

    # -- what is open -------------------------------------------------------------------------

    @property
    def open_count(self) -> int:
        """How many transactions are prepared here, or decided and not forgotten."""
        return len(self._prepared) + len(self._decided)

    @property
    def is_in_doubt(self) -> bool:
        """Whether there are transactions here whose coordinator has ended."""
        return bool(self._orphans)

    def questions(self) -> list[list[Any]]:
        """What to ask a router of them."""
        asked: list[list[Any]] = []
        for transaction in self._orphans:
            prepared = self._prepared.get(transaction)
            if prepared is not None:
                asked.append([Question.RESOLVE, transaction, prepared.home, prepared.coordinator])
            else:
                asked.append([Question.FINISH, transaction, self._decided[transaction][1]])
        return asked

    # -- promises -----------------------------------------------------------------------------

    def _hold(self, transaction: int, prepared: Prepared) -> None:
        self._prepared[transaction] = prepared
        for job, _ in prepared.jobs:
            queue = self._jobs.queue_for(job.queue)
            queue.reserved += 1
            self._jobs.changed(queue)
            if job.key is not None:
                self._held[job.queue, job.key] = transaction

    def _release(self, transaction: int) -> Prepared | None:
        prepared = self._prepared.pop(transaction, None)
        if prepared is None:
            return None
        self._orphans.pop(transaction, None)
        self._store.delete(Family.TRANSACTIONS, _PREPARED + _id(transaction))
        for job, _ in prepared.jobs:
            queue = self._jobs.queue_for(job.queue)
            queue.reserved -= 1
            self._jobs.changed(queue)
            if job.key is not None:
                self._held.pop((job.queue, job.key), None)
        return prepared


def _id(transaction: int) -> bytes:
    return transaction.to_bytes(8, "big")


def _number(waiter: Waiter) -> int:
    return waiter.number
