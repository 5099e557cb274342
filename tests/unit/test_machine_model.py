"""A shard against a model of it that is small enough to be seen to be right.

Random lives of a shard: after every step its answers, its counters and every record in its store must
be those of `Model`, which keeps jobs in a plain list and sorts them when somebody asks. The same
lives are drawn every time. To look further, with lives that differ from run to run:

    MODEL_EXAMPLES=2000 pytest tests/unit/test_machine_model.py
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common import job_ids
from common.wire import EnqueueJob, LeasedJob, Outcome, Strategy
from shard import keys, machine, ready
from shard.dead_letters import DeadLetterCause
from shard.machine import FAILED_PRECONDITION, JOB_OVERHEAD_BYTES, NOT_FOUND
from shard.retries import retry_delay_ms
from shard.store import Family
from tests.unit.shard_driver import Home, MemoryHome, RocksHome, Shard, job, names_of_one_slot, queue_names, rows

CAPPED = "capped"
CAP = 4
QUEUES = (*names_of_one_slot(), CAPPED)
DEDUP_WINDOW_MS = 300
RETENTION_MS = 400
RETRY_DELAY_MS = 40
LONGEST_LEASE_MS = 500


@dataclass
class ModelJob:
    """One live job. `order` is the place of its enqueue among all jobs."""

    job_id: bytes
    queue: str
    priority: int
    max_attempts: int
    body: bytes
    order: int
    state: str
    due_ms: int
    attempt: int = 1
    deadline: int = 0
    expires_ms: int = 0
    lease_ms: int = 0
    op_id: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return (job_ids.slot(self.job_id), job_ids.sequence(self.job_id))


@dataclass
class ModelDead:
    queue: str
    failed_at_ms: int
    record: keys.DeadRecord

    @property
    def age(self) -> tuple[int, int, int]:
        job_id = self.record.job_id
        return (self.failed_at_ms, job_ids.sequence(job_id), job_ids.slot(job_id))


@dataclass
class Model:
    """What a shard should be: first what is stored, then what a process knows."""

    jobs: list[ModelJob] = field(default_factory=list)
    dead: list[ModelDead] = field(default_factory=list)
    keys: dict[tuple[str, str], tuple[int, bytes]] = field(default_factory=dict)
    enqueued: int = 0
    ids: set[bytes] = field(default_factory=set)
    stored_wall_ms: int = 0

    wall_ms: int = 0
    mono_ms: int = 0
    # Op ids of claims nobody has confirmed, with their jobs; True when the router that claimed is known.
    claims: dict[int, tuple[bool, list[ModelJob]]] = field(default_factory=dict)
    # op id, queue, max_jobs, lease_ms
    waiting: list[tuple[int, str, int, int]] = field(default_factory=list)
    answers: dict[int, list[LeasedJob]] = field(default_factory=dict)

    # -- time and restarts --------------------------------------------------------------------

    def set_clock(self, wall_ms: int, mono_ms: int) -> None:
        self.wall_ms = max(self.wall_ms, wall_ms)
        self.mono_ms = mono_ms

    def tick(self) -> None:
        for each in sorted(self.in_state("leased"), key=lambda each: (each.deadline, each.job_id)):
            if each.deadline <= self.mono_ms:
                self.expire(each)
        due = [each for each in self.in_state("scheduled") if each.due_ms <= self.wall_ms]
        for each in due:
            each.state = "ready"
        for queue in {each.queue for each in due}:
            self.serve(queue)
        self.keys = {key: held for key, held in self.keys.items() if held[0] > self.wall_ms}
        self.dead = [each for each in self.dead if each.failed_at_ms > self.wall_ms - RETENTION_MS]

    def restart(self, wall_ms: int, mono_ms: int) -> None:
        self.wall_ms, self.mono_ms = max(self.stored_wall_ms, wall_ms), mono_ms
        self.waiting, self.answers, self.claims = [], {}, {}
        for each in sorted(self.in_state("leased"), key=lambda each: each.place):
            each.deadline = mono_ms + max(0, min(each.expires_ms - self.wall_ms, each.lease_ms))
            self.claims.setdefault(each.op_id, (False, []))[1].append(each)

    # -- jobs ---------------------------------------------------------------------------------

    def in_state(self, state: str, queue: str | None = None) -> list[ModelJob]:
        return [each for each in self.jobs if each.state == state and queue in (None, each.queue)]

    def outcome(self, new: EnqueueJob) -> list[object] | None:
        """What speaks against a new job: an earlier one of its key, or the depth of its queue."""
        if new.key is not None and (new.queue, new.key) in self.keys:
            deadline_ms, job_id = self.keys[new.queue, new.key]
            if deadline_ms > self.wall_ms:
                return [Outcome.DEDUPLICATED, job_id]
        if new.queue == CAPPED and sum(each.queue == CAPPED for each in self.jobs) >= CAP:
            return [Outcome.QUEUE_FULL, CAP]
        return None

    def add(self, new: EnqueueJob, job_id: bytes) -> None:
        assert job_id not in self.ids
        self.ids.add(job_id)
        state = "scheduled" if new.due_ms > self.wall_ms else "ready"
        self.enqueued += 1
        self.jobs.append(
            ModelJob(job_id, new.queue, new.priority, new.max_attempts, new.body, self.enqueued, state, new.due_ms)
        )
        if new.key is not None:
            self.keys[new.queue, new.key] = (self.wall_ms + DEDUP_WINDOW_MS, job_id)

    def claim(self, op_id: int, queues: Iterable[str], max_jobs: int, lease_ms: int, max_bytes: int) -> list[LeasedJob]:
        taken = self.first_ready(queues, max_jobs, max_bytes)
        for each in taken:
            each.state, each.op_id = "leased", op_id
            self.set_expiry(each, lease_ms)
        if taken:
            self.claims[op_id] = (True, list(taken))
        return [LeasedJob(each.job_id, each.attempt, each.expires_ms, each.body) for each in taken]

    def first_ready(self, queues: Iterable[str], max_jobs: int, max_bytes: int) -> list[ModelJob]:
        in_order = [
            each
            for queue in dict.fromkeys(queues)
            for each in sorted(self.in_state("ready", queue), key=lambda each: (-each.priority, each.order))
        ]
        taken: list[ModelJob] = []
        for each in in_order[:max_jobs]:
            max_bytes -= len(each.body) + keys.JOB_HEAD_BYTES + JOB_OVERHEAD_BYTES
            if taken and max_bytes < 0:
                break
            taken.append(each)
        return taken

    def set_expiry(self, leased: ModelJob, lease_ms: int) -> None:
        leased.lease_ms = lease_ms
        leased.deadline, leased.expires_ms = self.mono_ms + lease_ms, self.wall_ms + lease_ms

    def serve(self, queue: str) -> None:
        for waiter in list(self.waiting):
            op_id, wanted, max_jobs, lease_ms = waiter
            if wanted == queue and self.in_state("ready", queue):
                self.answers[op_id] = self.claim(op_id, [queue], max_jobs, lease_ms, 1 << 30)
                self.waiting.remove(waiter)

    # -- leases -------------------------------------------------------------------------------

    def refusal(self, leased: LeasedJob, attempt: int) -> int | None:
        found = self.lease(leased.job_id)
        if found is not None and found.deadline <= self.mono_ms:
            self.expire(found)
            found = self.lease(leased.job_id)
        if found is None:
            return NOT_FOUND
        return None if found.attempt == attempt else FAILED_PRECONDITION

    def lease(self, job_id: bytes) -> ModelJob | None:
        return next((each for each in self.in_state("leased") if each.job_id == job_id), None)

    def end_lease(self, leased: ModelJob) -> None:
        if leased.op_id in self.claims:
            self.claims[leased.op_id][1].remove(leased)

    def expire(self, leased: ModelJob) -> None:
        if leased.attempt < leased.max_attempts:
            self.retry(leased, 0)
        else:
            self.bury(leased, DeadLetterCause.LEASE_EXPIRED, None)

    def retry(self, leased: ModelJob, delay_ms: int) -> None:
        self.end_lease(leased)
        leased.attempt += 1
        leased.state, leased.due_ms = ("scheduled", self.wall_ms + delay_ms) if delay_ms else ("ready", 0)
        self.serve(leased.queue)

    def bury(self, leased: ModelJob, cause: DeadLetterCause, reason: str | None) -> None:
        self.remove(leased)
        record = keys.DeadRecord(leased.job_id, leased.attempt, cause, reason, leased.body)
        self.dead.append(ModelDead(leased.queue, self.wall_ms, record))

    def remove(self, leased: ModelJob) -> None:
        self.end_lease(leased)
        self.jobs.remove(leased)

    def give_back(self, op_id: int) -> None:
        for each in self.claims.pop(op_id, (True, []))[1]:
            each.state = "ready"
            self.serve(each.queue)

    def router_gone(self) -> None:
        self.waiting = []
        for op_id in [op_id for op_id, (is_known, _) in self.claims.items() if is_known]:
            for each in self.claims.pop(op_id)[1]:
                if each.attempt < each.max_attempts:
                    self.retry(each, 0)

    # -- dead letters -------------------------------------------------------------------------

    def oldest_dead(self, queue: str | None, count: int) -> list[ModelDead]:
        of_queue = [each for each in self.dead if queue in (None, each.queue)]
        return sorted(of_queue, key=lambda each: each.age)[:count]


_body_bytes = st.sampled_from([0, 0, 10, 150])
_jobs = st.builds(
    dict,
    queue=st.sampled_from(QUEUES),
    priority=st.sampled_from([0, 5, 9]),
    max_attempts=st.integers(1, 3),
    delay_ms=st.sampled_from([0, 0, 0, 1, 50, 200]),
    key=st.sampled_from([None, None, "k", "l"]),
    body_bytes=_body_bytes,
)
_queue_lists = st.lists(st.sampled_from((*QUEUES, "unknown")), min_size=1, max_size=4)
_lease_ms = st.sampled_from([1, 60, 200])
_recent = st.integers(0, 20)
_attempt_errors = st.sampled_from([0, 0, 0, 0, 1, -1])


class Lives(RuleBasedStateMachine):
    """One life of a shard and of its model. Nearly every rule is one turn."""

    def __init__(self) -> None:
        super().__init__()
        self.small = [
            # So that the edges of windows and of blocks of numbers are met all the time.
            mock.patch.object(ready, "WINDOW_JOBS", 4),
            mock.patch.object(ready, "WINDOW_BYTES", 400),
            mock.patch.object(machine, "SEQUENCE_BLOCK", 5),
        ]
        for each in self.small:
            each.start()
        self.shard = Shard(self.open())
        self.shard.configure(
            queues=[{"name": CAPPED, "max_queue_depth": CAP}],
            dedup_window_ms=DEDUP_WINDOW_MS,
            dead_letter_retention_ms=RETENTION_MS,
            retry_delay_ms=RETRY_DELAY_MS,
            max_lease_duration_ms=LONGEST_LEASE_MS,
        )
        self.model = Model()
        self.follow_clock()
        self.bodies = 0
        self.handed: list[LeasedJob] = []
        self.op_ids: list[int] = []
        self.parked: list[int] = []
        # What the model was when each turn was written: the first is durable, a crash may lose the others.
        self.snapshots = [deepcopy(self.model)]
        self.turns_seen = 0

    def open(self) -> Home:
        raise NotImplementedError

    def teardown(self) -> None:
        self.shard.store.close()
        for each in self.small:
            each.stop()

    # -- rules --------------------------------------------------------------------------------

    @rule(drawn=st.lists(_jobs, min_size=1, max_size=4))
    def enqueue(self, drawn: list[dict[str, Any]]) -> None:
        new = [self.new_job(**each) for each in drawn]
        outcomes = self.shard.enqueue_all(*new)
        for each, outcome in zip(new, outcomes, strict=True):
            refusal = self.model.outcome(each)
            if refusal is None:
                self.model.add(each, outcome)
            else:
                assert outcome == refusal
        for queue in QUEUES:
            self.model.serve(queue)
        self.end_turn()

    @rule(
        queue=st.sampled_from(QUEUES), priority=st.sampled_from([0, 9]), count=st.integers(3, 9), body_bytes=_body_bytes
    )
    def enqueue_many(self, queue: str, priority: int, count: int, body_bytes: int) -> None:
        """A backlog of one priority, longer than what is held of it in memory."""
        plain = {"queue": queue, "priority": priority, "max_attempts": 2, "delay_ms": 0, "key": None}
        self.enqueue([plain | {"body_bytes": body_bytes} for _ in range(count)])

    def new_job(
        self, queue: str, priority: int, max_attempts: int, delay_ms: int, key: str | None, body_bytes: int
    ) -> EnqueueJob:
        self.bodies += 1
        body = b"%d" % self.bodies + b" " * body_bytes
        due_ms = self.model.wall_ms + delay_ms if delay_ms else 0
        return job(queue, body, priority, max_attempts, due_ms, key)

    @rule(
        queues=_queue_lists,
        max_jobs=st.integers(1, 6),
        lease_ms=_lease_ms,
        max_bytes=st.sampled_from([1, 400, 1 << 30]),
    )
    def reserve(self, queues: list[str], max_jobs: int, lease_ms: int, max_bytes: int) -> None:
        taken = self.shard.reserve(*queues, max_jobs=max_jobs, lease_ms=lease_ms, max_bytes=max_bytes)
        assert taken == self.model.claim(self.shard.last_op, queues, max_jobs, lease_ms, max_bytes)
        self.op_ids.append(self.shard.last_op)
        self.handed += taken
        self.end_turn()

    @rule()
    def reserve_all(self) -> None:
        self.reserve(list(QUEUES), 1_000, 60, 1 << 30)

    @rule(queue=st.sampled_from(QUEUES), max_jobs=st.integers(1, 3), lease_ms=_lease_ms)
    def park(self, queue: str, max_jobs: int, lease_ms: int) -> None:
        op_id = self.shard.park(queue, max_jobs=max_jobs, lease_ms=lease_ms)
        self.model.waiting.append((op_id, queue, max_jobs, lease_ms))
        self.model.serve(queue)
        self.parked.append(op_id)
        self.op_ids.append(op_id)
        self.end_turn()

    @precondition(lambda self: self.parked)
    @rule(which=_recent)
    def cancel(self, which: int) -> None:
        op_id = nth_recent(self.parked, which)
        self.shard.cancel(op_id)
        self.model.waiting = [each for each in self.model.waiting if each[0] != op_id]
        self.end_turn()

    @precondition(lambda self: self.handed)
    @rule(which=_recent, error=_attempt_errors)
    def ack(self, which: int, error: int) -> None:
        leased = nth_recent(self.handed, which)
        refused = self.model.refusal(leased, leased.attempt + error)
        assert self.shard.ack(leased, leased.attempt + error) == (refused or 0)
        if refused is None:
            self.model.remove(self.held(leased))
        self.end_turn()

    @precondition(lambda self: self.handed)
    @rule(
        which=_recent,
        error=_attempt_errors,
        strategy=st.sampled_from(Strategy),
        delay_ms=st.sampled_from([0, 30, 100]),
        reason=st.sampled_from([None, "", "brøken"]),
    )
    def nack(self, which: int, error: int, strategy: Strategy, delay_ms: int, reason: str | None) -> None:
        leased = nth_recent(self.handed, which)
        attempt = leased.attempt + error
        refused = self.model.refusal(leased, attempt)
        status, data = self.shard.nack(leased, strategy, delay_ms, reason, attempt)
        assert status == (refused or 0)
        if refused is None:
            held = self.held(leased)
            is_last = held.attempt == held.max_attempts
            assert data is (strategy == Strategy.DEAD_LETTER or is_last)
            if strategy == Strategy.DEAD_LETTER:
                self.model.bury(held, DeadLetterCause.REJECTED, reason)
            elif is_last:
                self.model.bury(held, DeadLetterCause.ATTEMPTS_EXHAUSTED, reason)
            else:
                by_policy = retry_delay_ms(self.shard.config.effective(held.queue), held.job_id, attempt)
                self.model.retry(held, delay_ms if strategy == Strategy.DELAY else by_policy)
        self.end_turn()

    @precondition(lambda self: self.handed)
    @rule(which=_recent, error=_attempt_errors, lease_ms=st.sampled_from([0, 1, 80, 100_000]))
    def extend(self, which: int, error: int, lease_ms: int) -> None:
        leased = nth_recent(self.handed, which)
        refused = self.model.refusal(leased, leased.attempt + error)
        status, data = self.shard.extend(leased, lease_ms, leased.attempt + error)
        assert status == (refused or 0)
        if refused is None:
            held = self.held(leased)
            self.model.set_expiry(held, max(1, min(lease_ms, LONGEST_LEASE_MS)))
            assert data == held.expires_ms
        self.end_turn()

    @precondition(lambda self: self.model.in_state("leased"))
    @rule(which=_recent)
    def ack_half(self, which: int) -> None:
        """Every second of the jobs that are out is done, so that leases lie among the records of others."""
        leased = [each for each in self.model.in_state("leased") if each.deadline > self.model.mono_ms]
        for each in leased[which % 2 :: 2]:
            assert self.shard.ack(LeasedJob(each.job_id, each.attempt, 0, b"")) == 0
            self.model.remove(each)
            self.end_turn()

    @precondition(lambda self: self.op_ids)
    @rule(which=_recent)
    def give_back(self, which: int) -> None:
        op_id = nth_recent(self.op_ids, which)
        self.shard.give_back(op_id)
        self.model.give_back(op_id)
        self.end_turn()

    @precondition(lambda self: self.op_ids)
    @rule(which=_recent)
    def confirm(self, which: int) -> None:
        op_id = nth_recent(self.op_ids, which)
        self.shard.confirm(op_id)
        self.model.claims.pop(op_id, None)
        self.end_turn()

    @rule()
    def router_gone(self) -> None:
        self.shard.router_gone()
        self.model.router_gone()
        self.end_turn()

    @rule(queue=st.sampled_from([None, *QUEUES]), count=st.integers(1, 3), leaves=st.booleans())
    def drain_dead(self, queue: str | None, count: int, leaves: bool) -> None:
        expected = self.model.oldest_dead(queue, count)
        with self.shard.one_turn():
            letters = self.shard.drain_dead(queue, count)
            assert [(each.failed_at_ms, each.job_id) for each in letters] == [
                (each.failed_at_ms, each.record.job_id) for each in expected
            ]
            drain = self.shard.last_op
            if leaves:
                self.shard.confirm(drain)
            else:
                self.shard.give_back(drain)
        if leaves:
            self.model.dead = [each for each in self.model.dead if each not in expected]
        self.end_turn()

    @rule(ms=st.sampled_from([0, 1, 10, 40, 60, 150, 300]))
    def pass_time(self, ms: int) -> None:
        with self.shard.one_turn():
            self.shard.pass_time(ms)
        self.follow_clock()
        self.model.tick()
        self.end_turn()

    @rule(ms=st.sampled_from([1, 60, 300]))
    def pass_time_without_acting_on_it(self, ms: int) -> None:
        """The next operations come before what has fallen due meanwhile."""
        self.shard.wall_ms += ms
        self.shard.mono_ms += ms
        self.shard.next_wake_ms()
        self.follow_clock()

    @rule(ms=st.sampled_from([-200, -30, 100]))
    def set_wall_clock(self, ms: int) -> None:
        self.shard.wall_ms += ms
        self.pass_time(0)

    @rule(down_ms=st.sampled_from([0, 1, 70, 250]))
    def restart(self, down_ms: int) -> None:
        self.shard.restart(down_ms)
        self.restarted(deepcopy(self.model))

    def restarted(self, left: Model) -> None:
        """What is in the store now is what the model was at some turn."""
        self.model = left
        self.model.restart(self.shard.wall_ms, self.shard.mono_ms)
        self.snapshots = [deepcopy(self.model)]
        self.turns_seen = self.shard.turns_written
        self.parked.clear()
        self.agree()
        self.pass_time(0)

    # -- what holds after every step ----------------------------------------------------------

    def follow_clock(self) -> None:
        self.model.set_clock(self.shard.wall_ms, self.shard.mono_ms)

    def held(self, leased: LeasedJob) -> ModelJob:
        held = self.model.lease(leased.job_id)
        assert held is not None
        return held

    def end_turn(self) -> None:
        for op_id in self.parked:
            assert self.shard.jobs_for(op_id) == self.model.answers.get(op_id)
            self.handed += self.model.answers.get(op_id, [])
        self.parked = [op_id for op_id in self.parked if op_id not in self.model.answers]
        if self.shard.turns_written > self.turns_seen:
            self.turns_seen = self.shard.turns_written
            self.model.stored_wall_ms = self.model.wall_ms
            self.snapshots.append(deepcopy(self.model))

    @invariant()
    def agree(self) -> None:
        self.shard.check()
        assert self.shard.reports == []
        assert self.stored_jobs() == {
            each.job_id: (each.queue, each.state, each.attempt, each.max_attempts, each.body)
            for each in self.model.jobs
        }
        for queue in QUEUES:
            dead = [(each.failed_at_ms, each.record) for each in self.model.oldest_dead(queue, 1 << 30)]
            assert self.shard.dead_letters(queue) == dead
        assert self.stored_keys() == self.model.keys

    def stored_jobs(self) -> dict[bytes, tuple[str, str, int, int, bytes]]:
        store = self.shard.store
        names = queue_names(store)
        leases = {key for key, _ in rows(store, Family.LEASES)}
        found = {}
        for key, value in rows(store, Family.JOBS):
            job_id, attempt, max_attempts = keys.read_job_value(value)
            lease = keys.lease_key(job_ids.slot(job_id), job_ids.sequence(job_id))
            state = "leased" if lease in leases else "ready"
            queue = names[keys.read_queue_key(key[:6])]
            found[job_id] = (queue, state, attempt, max_attempts, value[keys.JOB_HEAD_BYTES :])
        for key, value in rows(store, Family.SCHEDULED):
            job_id, attempt, max_attempts = keys.read_job_value(value)
            slot, _, number, _, _ = keys.read_scheduled_key(key)
            found[job_id] = (names[slot, number], "scheduled", attempt, max_attempts, value[keys.JOB_HEAD_BYTES :])
        return found

    def stored_keys(self) -> dict[tuple[str, str], tuple[int, bytes]]:
        names = queue_names(self.shard.store)
        return {
            (names[keys.read_queue_key(key[:6])], key[6:].decode()): keys.read_dedup_value(value)
            for key, value in rows(self.shard.store, Family.DEDUP)
        }


def nth_recent(items: list[Any], which: int) -> Any:
    return items[-1 - which % len(items)]


class MemoryLives(Lives):
    """On a store of which a crash loses what was not synced."""

    def open(self) -> Home:
        return MemoryHome()

    @initialize(syncs=st.booleans())
    def choose_syncs(self, syncs: bool) -> None:
        self.shard.syncs = syncs

    @rule()
    def sync(self) -> None:
        self.shard.store.sync()
        del self.snapshots[:-1]

    @rule(kept=st.integers(0, 30), down_ms=st.sampled_from([0, 100]))
    def crash(self, kept: int, down_ms: int) -> None:
        home = self.shard.home
        assert isinstance(home, MemoryHome)
        if home.store.unsynced == 0:
            del self.snapshots[:-1]
        assert len(self.snapshots) == 1 + home.store.unsynced
        kept %= len(self.snapshots)
        home.store = home.store.crash(kept)
        self.shard.start(down_ms)
        self.restarted(self.snapshots[kept])


class RocksLives(Lives):
    """On a store as a shard has it, closed and opened again."""

    def open(self) -> Home:
        self.directory = tempfile.TemporaryDirectory()
        return RocksHome(Path(self.directory.name) / "shard")

    def teardown(self) -> None:
        super().teardown()
        self.directory.cleanup()


def _profile(examples: int, steps: int) -> settings:
    more = os.environ.get("MODEL_EXAMPLES")
    return settings(
        max_examples=int(more) if more else examples,
        stateful_step_count=steps,
        derandomize=more is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


MemoryLives.TestCase.settings = _profile(120, 60)
RocksLives.TestCase.settings = _profile(6, 50)
TestMemoryLives = MemoryLives.TestCase
TestRocksLives = RocksLives.TestCase
