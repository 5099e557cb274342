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

While a transaction is undecided its jobs count as live ones, and an enqueue of a key that it holds
waits for the decision. A PREPARE never waits: it is refused as busy, and its coordinator lets go of
everything and tries again, so that transactions cannot wait for each other in a circle.

The stored records, all under the transaction's id (64 bits, never used twice):

    TRANSACTIONS  p id   coordinator, home, jobs with their ids       prepared here
                  d id   coordinator, participants                    decided here: commit
                  x id   coordinator                                  refused here, whatever comes
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import msgpack

from common.wire import EnqueueJob, EnqueueOutcome, Fate, Operation, Outcome, Question, Vote
from shard.state import Queue
from shard.store import Family, Store

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


class Jobs(Protocol):
    """What a participant needs of the machine."""

    def refusals(self, jobs: list[EnqueueJob]) -> list[tuple[int, EnqueueOutcome]]:
        """Why a batch cannot be stored as a whole."""

    def duplicate(self, name: str, key: str) -> EnqueueOutcome | None:
        """The outcome for a key that a stored job holds."""

    def queue_for(self, name: str) -> Queue:
        """The queue, made if need be."""

    def draw_id(self, queue: Queue, random: int) -> bytes:
        """The id of a job to come; its place in the queue is taken with it."""

    def place(self, jobs: Iterable[tuple[EnqueueJob, bytes]]) -> None:
        """Store jobs under ids that were drawn, with their keys, and hand out what somebody waits for."""

    def again(self, router: str, operation: Operation) -> None:
        """Apply an operation that had to wait."""

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
        # Operations that wait for a transaction's end, in order.
        self._blocked: dict[int, list[tuple[str, Operation]]] = {}

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
        if any(job.key is not None and (job.queue, job.key) in self._held for job in wanted):
            return [Vote.BUSY, None]
        refusals = self._jobs.refusals(wanted)
        if refusals:
            return [Vote.REFUSED, refusals]
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
            self._unblock(transaction)

    def abort(self, transaction: int) -> None:
        """Let go of what was prepared."""
        if self._release(transaction) is not None:
            self._unblock(transaction)

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

    def blocks(self, router: str, operation: Operation, jobs: list[EnqueueJob]) -> bool:
        """Whether an enqueue has to wait for a transaction that holds a key of its; it is applied again then."""
        if not self._held:
            return False
        for job in jobs:
            transaction = self._held.get((job[0], job[4] or ""))
            if transaction is not None:
                self._blocked.setdefault(transaction, []).append((router, operation))
                return True
        return False

    def router_gone(self, router: str) -> None:
        """A router has ended: what it could still have decided here is aborted, the rest is asked about."""
        for transaction, waiting in list(self._blocked.items()):
            self._blocked[transaction] = [entry for entry in waiting if entry[0] != router]
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

    # -- what is open -------------------------------------------------------------------------

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

    def _unblock(self, transaction: int) -> None:
        for router, operation in self._blocked.pop(transaction, []):
            self._jobs.again(router, operation)


def _id(transaction: int) -> bytes:
    return transaction.to_bytes(8, "big")
