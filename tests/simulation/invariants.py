"""What must hold when everything has come to rest: nobody waits for what is there, nothing is held, nothing is lost.

What must hold at every moment is looked after where it happens: in `witness` for what is written and
what leaves a shard, in `clients` for what is told.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from common import job_ids
from common.wire import Op
from shard.store import Family
from tests.simulation.words import job_in_words
from tests.simulation.world import Finding
from tests.unit.router_driver import assert_idle

if TYPE_CHECKING:
    from tests.simulation.simulation import Cluster


def check_now(cluster: Cluster) -> None:
    """After each step: what the shards count in memory is what is stored."""
    for place in cluster.supervisor.shards:
        process = place.process
        if process is not None and process.is_up and not process.is_stalled:
            process.disk.witness.check_counters()


def check_polls(cluster: Cluster) -> None:
    """No poll waits for a job that is ready."""
    for call, (router, request) in cluster.clients.open_polls.items():
        if not router.is_alive or call.is_answered:
            continue
        for name in request.queues:
            machine = cluster.process_of(name).machine
            queue = machine._queues.get(name)
            if queue is not None and queue.ready and queue.closing_until_ms <= cluster.world.wall_ms:
                raise Finding("wake-ups", f"{name} has a ready job, and a poll waits for it on {router.name}")


def check_rest(cluster: Cluster) -> None:
    """No call is open and no time is left to wait for: nothing is held anywhere."""
    if cluster.clients.open_polls:
        raise Finding("rest", "a poll has not come to its end")
    for place in cluster.supervisor.routers:
        router = place.process
        if router is None or not router.listens:
            raise Finding("rest", f"router-{place.index} does not come up")
        if router.calls:
            raise Finding("rest", f"{router.name} has calls that do not end: {[call.method for call in router.calls]}")
        try:
            assert_idle(router.core)
        except AssertionError as error:
            raise Finding("rest", f"{router.name} holds something: {_what_failed(error)}") from error
    for shard in cluster.supervisor.shards:
        process = shard.process
        if process is None or not process.is_up:
            raise Finding("rest", f"shard-{shard.index} does not come up")
        machine = process.machine
        participant = machine._participant
        held = {
            "waiters": machine._waiting._by_op,
            "lines": machine._waiting._lines,
            "claims": [op_id for op_id, (owner, _) in machine._claims.items() if owner],
            "drained records": machine._dead._handed_out,
            "promises": participant._prepared,
            "decisions": participant._decided,
            "refusals": participant._refused,
            "keys of transactions": participant._held,
            "orphans": participant._orphans,
            "blocked operations": participant._blocked,
            "lines for keys": participant._by_key,
            "lines for places": participant.lines,
            "reserved places": [queue.name for queue in machine._queues.values() if queue.reserved],
            "records of transactions": process.disk.store.scan(Family.TRANSACTIONS, b"", b"\xff" * 9, 1 << 62),
        }
        for what, some in held.items():
            if some:
                raise Finding("rest", f"{process.name} holds {what}: {some}")
    if not cluster.has_lost_routers:  # what a dead router was given comes back with time after a restart
        for shard in cluster.supervisor.shards:
            assert shard.process is not None
            for lease in shard.process.machine._leases.values():
                if (job_ids.text(lease.job_id), lease.attempt) not in cluster.clients.deliveries:
                    text = f"attempt {lease.attempt} of {job_in_words(lease.job_id)} is leased to nobody"
                    raise Finding("stranded", text)


def check_told(cluster: Cluster) -> None:
    """What clients heard agrees with all that was ever stored."""
    clients, facts = cluster.clients, cluster.facts
    wrong = clients.not_stored & facts.by_type.keys()
    if wrong:
        raise Finding("told", f"a client heard that {min(wrong)} is not stored, and it was")
    for kind, job_id, attempt in clients.not_done:
        if (kind, job_id, attempt) in cluster.done and clients.lease_calls[kind, job_id, attempt] == 1:
            raise Finding("told", f"a client heard that {Op(kind).name} of {job_in_words(job_id)} was not done: it was")
    for job_id, why in facts.ended.items():
        text = job_ids.text(job_id)
        if why == "acked" and text not in clients.acked and text not in clients.perhaps_acked:
            raise Finding("told", f"{job_in_words(job_id)} is acked, and no worker can have done that")
    _check_batches(cluster)
    _check_keys(cluster)


def _check_batches(cluster: Cluster) -> None:
    """Of an atomic batch everything was stored or nothing; a job with a key may stand for an earlier one."""
    facts, held = cluster.facts, cluster.clients.held
    keys = {held[job_type] for job_type in facts.by_type if job_type in held}
    for batch in {id(batch): batch for batch in cluster.clients.batches.values() if batch.is_atomic}.values():
        stored = [job_type for job_type in batch.types if job_type in facts.by_type]
        if not stored:
            continue
        for job_type in batch.types:
            if job_type not in facts.by_type and (job_type not in held or held[job_type] not in keys):
                raise Finding("atomicity", f"of one batch {stored[0]} was stored and {job_type} was not")


def _check_keys(cluster: Cluster) -> None:
    """One job for each key, while the key's time is not over and its queue was not deleted."""
    if not cluster.keys_last:
        return
    first: dict[object, str] = {}
    for job_type in cluster.facts.by_type:
        held = cluster.clients.held.get(job_type)
        if held is None or held.queue in cluster.operators.deleted:
            continue
        other = first.setdefault(held, job_type)
        if other != job_type:
            raise Finding("keys", f"{other} and {job_type} were both stored under key {held.key!r} of {held.queue}")


def check_empty(cluster: Cluster) -> None:
    """Everything was acked and drained by now: nothing is left."""
    for shard, live in enumerate(cluster.facts.live):
        if live:
            raise Finding("lost", f"{job_in_words(min(live))} of shard-{shard} is stored, and nobody can get it")
    for place in cluster.supervisor.shards:
        assert place.process is not None
        for name, counts in place.process.machine.counts().items():
            if any(counts):
                raise Finding("counters", f"{name} is empty, and its counters say {counts}")


def _what_failed(error: AssertionError) -> str:
    """The line of the check, for its text is empty unless a test is run."""
    return str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
