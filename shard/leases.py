"""The jobs that are out: their leases, when these end, and which answers nobody has confirmed.

All of it is in memory, bounded by what is in flight; beside each lease there is its record in the store.
Leases run on the monotonic clock while the process lives. After a restart they run on by wall time, and
never longer than they were given for.

A claim is one reserve whose answer its router has not confirmed as sent. Of a claim of before our start
nobody knows whether the answer has left: it has no router, and only its own router, whose op id it is,
may still say that it has not.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from heapq import heapify, heappop, heappush

from common import job_ids
from shard import keys
from shard.state import Instant, Lease, Queue
from shard.store import Family, Store

# Timers that no longer apply, beyond as many as there are leases, before the heap of timers is made anew.
SPARE_TIMERS = 1024


class Leases:
    """The leases of one shard. The caller counts `queue.leased`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.by_id: dict[bytes, Lease] = {}
        # Router, and the ids of the jobs that are still leased, by op id of the reserve.
        self.claims: dict[int, tuple[str, list[bytes]]] = {}
        # A heap of deadlines with job ids. A lease that was extended is in it more than once.
        self.timers: list[tuple[int, bytes]] = []

    def load(self, queue: Queue, sequence: int, record: keys.LeaseRecord, now: Instant) -> None:
        """A lease of before our start, or of a slot that has come here; `ordered` puts its timer in order."""
        attempts = record.attempt, record.max_attempts
        lease = Lease(queue, record.inverted, sequence, record.job_id, *attempts, record.op_id)
        lease.expires_ms, lease.lease_ms = record.expires_ms, record.lease_ms
        # A wall clock that was set back meanwhile does not prolong it.
        remaining = min(record.expires_ms - now.wall_ms, record.lease_ms)
        lease.deadline = now.mono_ms + max(0, remaining)
        self.by_id[record.job_id] = lease
        self.timers.append((lease.deadline, record.job_id))
        self.claims.setdefault(record.op_id, ("", []))[1].append(record.job_id)

    def ordered(self) -> None:
        """All that was to be loaded is."""
        heapify(self.timers)

    def begin(self, leases: list[Lease], lease_ms: int, now: Instant) -> None:
        """Jobs go out, until `lease_ms` from now."""
        deadline, expires_ms = now.mono_ms + lease_ms, now.wall_ms + lease_ms
        by_id, timers, put = self.by_id, self.timers, self._store.put
        for lease in leases:
            job_id, queue = lease.job_id, lease.queue
            lease.lease_ms, lease.deadline, lease.expires_ms = lease_ms, deadline, expires_ms
            by_id[job_id] = lease
            heappush(timers, (deadline, job_id))
            value = keys.lease_value(
                job_id,
                queue.number,
                lease.inverted,
                lease.attempt,
                lease.max_attempts,
                expires_ms,
                lease_ms,
                lease.op_id,
            )
            put(Family.LEASES, keys.lease_key(queue.slot, lease.sequence), value)
        self._drop_spare_timers()

    def set_end(self, lease: Lease, lease_ms: int, now: Instant) -> None:
        """The lease ends in `lease_ms`; store it so."""
        self.begin([lease], lease_ms, now)

    def _drop_spare_timers(self) -> None:
        if len(self.timers) > 2 * len(self.by_id) + SPARE_TIMERS:
            # Most jobs are acked long before their lease ends; without this the heap would grow
            # with the rate of jobs times the length of their leases.
            self.timers = [(other.deadline, other.job_id) for other in self.by_id.values()]
            heapify(self.timers)

    def next_end(self) -> int | None:
        """When the first lease ends, monotonic ms."""
        while self.timers:
            deadline, job_id = self.timers[0]
            lease = self.by_id.get(job_id)
            if lease is not None and lease.deadline == deadline:
                return deadline
            heappop(self.timers)  # acked, or extended: that timer no longer applies
        return None

    def take_ended(self, mono_ms: int) -> Lease | None:
        """A lease whose time is over; the caller ends it. None when there is none."""
        deadline = self.next_end()
        if deadline is None or deadline > mono_ms:
            return None
        return self.by_id[heappop(self.timers)[1]]

    def remove(self, lease: Lease) -> None:
        """The lease is over."""
        del self.by_id[lease.job_id]
        self._store.delete(Family.LEASES, keys.lease_key(lease.queue.slot, lease.sequence))
        self._forget_claim(lease)

    def unconfirmed(self, op_id: int) -> list[Lease]:
        """The leases of a claim, which is none any more."""
        _, claimed = self.claims.pop(op_id, ("", []))
        found = [self.by_id.get(job_id) for job_id in claimed]
        return [lease for lease in found if lease is not None and lease.op_id == op_id]

    def claims_of(self, router: str) -> list[int]:
        """Op ids of the claims that a router has not confirmed."""
        return [op_id for op_id, (owner, _) in self.claims.items() if owner == router]

    # -- slots that come and go -----------------------------------------------------------------

    def forget(self, slots: Container[int]) -> None:
        """These slots are here no more."""
        for lease in [lease for lease in self.by_id.values() if lease.queue.slot in slots]:
            del self.by_id[lease.job_id]
            self._forget_claim(lease)

    def has_unconfirmed(self, slots: Container[int]) -> bool:
        """Whether a router that lives may still give back or confirm a job of these slots."""
        return any(owner and _is_about(claimed, slots) for owner, claimed in self.claims.values())

    def are_loaded(self, op_ids: Iterable[int], slots: Container[int]) -> bool:
        """Whether one of these claims is of before our start and has jobs of these slots."""
        claims = [self.claims[op_id] for op_id in op_ids if op_id in self.claims]
        return any(not owner and _is_about(claimed, slots) for owner, claimed in claims)

    def _forget_claim(self, lease: Lease) -> None:
        claim = self.claims.get(lease.op_id)
        if claim is not None:
            claim[1].remove(lease.job_id)
            if not claim[1]:
                del self.claims[lease.op_id]


def _is_about(claimed: Iterable[bytes], slots: Container[int]) -> bool:
    return any(job_ids.slot(job_id) in slots for job_id in claimed)
