"""What a shard finds when it looks at all that it stores, and what it says its slots hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common import job_ids
from common.slots import slot_of
from common.wire import AdminCommand, MoveCommand, Op, Strategy
from shard import keys, verification
from shard.migration import FAMILIES
from shard.store import Family
from tests.unit import shard_driver
from tests.unit.shard_driver import WALL_START_MS, Cluster, MemoryHome, Shard, job, names_of_one_slot, rows

cluster, home = shard_driver.cluster, shard_driver.home

Q = slot_of("q")
RETENTION_MS = 600_000


@pytest.fixture
def shard(home: shard_driver.Home) -> Iterator[Shard]:
    """A shard with something of everything. It may be damaged at the end."""
    made = Shard(home)
    fill(made)
    yield made


def fill(shard: Shard) -> None:
    shard.configure(dead_letter_retention_ms=RETENTION_MS)
    shard.enqueue_all(job(body=b"dead"), job(body=b"leased"), job(body=b"ready", key="k"), job("other", priority=9))
    dead, _ = shard.reserve(max_jobs=2)
    shard.nack(dead, Strategy.DEAD_LETTER)
    shard.enqueue(due_ms=WALL_START_MS + 60_000)


def told(shard: Shard, command: AdminCommand, cursor: bytes = b"") -> Any:
    return shard._data(shard.send(Op.ADMIN, command, cursor))


def verify(shard: Shard, between: Callable[[int], object] = lambda step: None) -> tuple[list[str], int, int]:
    """Findings, records looked at, steps."""
    findings: list[str] = []
    records = steps = 0
    cursor: bytes | None = b""
    while cursor is not None:
        (found, looked_at), cursor = told(shard, AdminCommand.VERIFY, cursor)
        findings += found
        records += looked_at
        between(steps)
        steps += 1
        assert steps < 1_000
    return findings, records, steps


def finding(shard: Shard) -> str:
    """The only thing that is wrong."""
    (found,) = verify(shard)[0]
    return found


def row(shard: Shard, family: Family, number: int = 0) -> tuple[bytes, bytes]:
    """A record of queue `q`, which is the first in its slot."""
    slot = slot_of("q")
    return shard.store.scan(family, keys.slot_prefix(slot), keys.slot_end(slot), 100)[number]


def put(shard: Shard, family: Family, key: bytes, value: bytes | None) -> None:
    """Damage what is stored behind the back of the machine."""
    if value is None:
        shard.store.delete(family, key)
    else:
        shard.store.put(family, key, value)
    shard.store.write()


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "STEP_ROWS", 3)
    monkeypatch.setattr(verification, "SCAN_ROWS", 0)


# ---- nothing to find


def test_nothing_is_wrong_with_a_shard_that_nobody_has_damaged(shard: Shard) -> None:
    stored = sum(len(rows(shard.store, family)) for family in FAMILIES)
    assert verify(shard) == ([], stored, 1)
    shard.restart()
    assert verify(shard)[0] == []


def test_small_steps_look_at_as_much_as_large_ones(shard: Shard, small_steps: None) -> None:
    findings, records, steps = verify(shard)
    assert (findings, records) == ([], 12)
    assert steps >= 12 // 3


def test_an_empty_shard_takes_one_step() -> None:
    assert verify(Shard(MemoryHome())) == ([], 0, 1)


def test_a_step_is_bounded_by_bytes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "STEP_BYTES", 10_000)
    shard = Shard(MemoryHome())
    shard.enqueue_all(*(job(body=b"x" * 1_000) for _ in range(30)))
    findings, records, steps = verify(shard)
    assert (findings, records) == ([], 32)
    assert 3 <= steps <= 5


def test_both_shards_are_in_order_while_a_slot_moves_and_after_it(cluster: Cluster) -> None:
    source, target = cluster.shards
    for each in cluster.shards:
        each.configure(dead_letter_retention_ms=RETENTION_MS)
    fill(source)
    source.confirm(*range(1, source.last_op))
    cluster.clear([Q])
    source.step(MoveCommand.OPEN, [Q])
    cluster.copy()
    assert [verify(each)[0] for each in cluster.shards] == [[], []]
    assert verify(target)[1] == 0
    source.step(MoveCommand.HOLD)
    cluster.copy_changes()
    cluster.switch([Q])
    assert [verify(each)[0] for each in cluster.shards] == [[], []]
    cluster.pass_time()
    assert [verify(each)[0] for each in cluster.shards] == [[], []]


# ---- planted damage


def test_a_record_of_a_slot_of_another_shard_is_found(cluster: Cluster) -> None:
    source = cluster.shards[0]
    cluster.switch([Q])
    source.pass_time()
    put(source, Family.JOBS, keys.job_key(Q, 1, 0, 1), b"")
    assert finding(source) == f"slot {Q}: records are there, but the slot belongs to another shard"
    put(source, Family.JOBS, keys.job_key(Q, 1, 0, 1), None)


def test_records_of_a_slot_that_is_not_served_are_found() -> None:
    shard = Shard(MemoryHome())
    put(shard, Family.DEAD, keys.dead_key(5, 1, 1, 1), b"")
    assert finding(shard) == "slot 5: records are there, but not that of the slot: no start serves them"


def test_a_queue_whose_name_belongs_into_another_slot_is_found(shard: Shard) -> None:
    key, value = row(shard, Family.QUEUES)
    record = keys.read_queue_value(value)
    put(shard, Family.QUEUES, key, keys.queue_value("p", *record[1:6], [], 0))
    assert f"queue 'p' belongs into slot {slot_of('p')}" in finding(shard)


def test_a_queue_under_a_number_that_is_not_its_own_is_found(shard: Shard) -> None:
    _, value = row(shard, Family.QUEUES)
    put(shard, Family.QUEUES, keys.queue_key(Q, 77), value)
    assert "queue 'q' is not known under this number" in finding(shard)


@pytest.mark.parametrize("place", range(5))
def test_a_stored_counter_that_differs_from_what_the_shard_counts_is_found(shard: Shard, place: int) -> None:
    key, value = row(shard, Family.QUEUES)
    record = list(keys.read_queue_value(value))
    record[1 + place] += 1
    put(shard, Family.QUEUES, key, keys.queue_value(*record))
    assert "queue 'q' is not stored as the shard has it" in finding(shard)


@pytest.mark.parametrize(
    ("counter", "noun", "there"),
    [
        ("ready", "ready jobs", 1),
        ("scheduled", "scheduled jobs", 1),
        ("leased", "leased jobs", 1),
        ("dead", "dead letters", 1),
        ("keys", "idempotency keys", 1),
    ],
)
def test_a_counter_that_is_not_what_is_there_is_found(shard: Shard, counter: str, noun: str, there: int) -> None:
    key, value = row(shard, Family.QUEUES)
    record = keys.read_queue_value(value)
    changed = record._replace(**{counter: 5})
    put(shard, Family.QUEUES, key, keys.queue_value(*changed))  # type: ignore[arg-type]
    setattr(shard.machine._queues["q"], counter, 5)
    assert finding(shard) == f"slot {Q}: queue 'q' counts 5 {noun}, {there} are there"


def test_a_job_that_is_missing_is_found(shard: Shard) -> None:
    ready = next(
        key for key, value in rows(shard.store, Family.JOBS) if value.endswith(b"ready") and keys.slot_of_key(key) == Q
    )
    put(shard, Family.JOBS, ready, None)
    assert finding(shard) == f"slot {Q}: queue 'q' counts 1 ready jobs, 0 are there"


def test_a_lease_without_its_job_is_found(shard: Shard) -> None:
    leased = next(key for key, value in rows(shard.store, Family.JOBS) if value.endswith(b"leased"))
    put(shard, Family.JOBS, leased, None)
    assert "is leased, and its record is not there" in finding(shard)


def test_a_lease_that_the_shard_does_not_know_is_found(shard: Shard) -> None:
    _, value = row(shard, Family.LEASES)
    put(shard, Family.LEASES, keys.lease_key(Q, 4_000), value)
    findings = verify(shard)[0]
    assert len(findings) == 2
    assert "is not one that the shard goes by" in findings[0]
    assert findings[1] == f"slot {Q}: queue 'q' counts 1 leased jobs, 2 are there"


def test_a_lease_that_is_missing_is_found(shard: Shard) -> None:
    put(shard, Family.LEASES, row(shard, Family.LEASES)[0], None)
    assert finding(shard) == f"slot {Q}: queue 'q' counts 1 leased jobs, 0 are there"


@pytest.mark.parametrize("family", [Family.JOBS, Family.SCHEDULED, Family.DEAD])
def test_a_job_whose_id_leads_to_another_slot_is_found(shard: Shard, family: Family) -> None:
    key, value = row(shard, family, -1)
    job_id = job_ids.make(WALL_START_MS, Q + 1, job_ids.sequence(value[:16]), 1)
    put(shard, family, key, job_id + value[16:])
    assert f"the id of job {job_ids.text(job_id)} leads to slot {Q + 1}" in finding(shard)


@pytest.mark.parametrize("family", [Family.JOBS, Family.SCHEDULED, Family.DEAD])
def test_a_job_whose_id_leads_to_another_place_is_found(shard: Shard, family: Family) -> None:
    key, value = row(shard, family, -1)
    job_id = job_ids.make(WALL_START_MS, Q, 1_000, 1)
    put(shard, family, key, job_id + value[16:])
    assert "leads to the place of sequence number 1000" in finding(shard)


def test_a_job_whose_number_was_not_given_out_is_found(shard: Shard) -> None:
    sequence = shard.machine._slots[Q].next_sequence
    record = keys.job_value(job_ids.make(WALL_START_MS, Q, sequence, 1), 1, 1, b"")
    put(shard, Family.JOBS, keys.job_key(Q, 1, 0, sequence), record)
    findings = verify(shard)[0]
    assert "was not given out" in findings[0]
    assert findings[1] == f"slot {Q}: queue 'q' counts 1 ready jobs, 2 are there"


def test_a_ready_job_that_no_reserve_would_find_is_found(shard: Shard) -> None:
    record = keys.job_value(job_ids.make(WALL_START_MS, Q, 0, 1), 1, 1, b"")
    put(shard, Family.JOBS, keys.job_key(Q, 1, 4, 0), record)
    findings = verify(shard)[0]
    assert "is ready, and would never be handed out" in findings[0]
    assert findings[1] == f"slot {Q}: queue 'q' counts 1 ready jobs, 2 are there"


def test_a_job_of_no_queue_is_found(shard: Shard) -> None:
    job_id = job_ids.make(WALL_START_MS, Q, 0, 1)
    put(shard, Family.JOBS, keys.job_key(Q, 9, 0, 0), keys.job_value(job_id, 1, 1, b""))
    assert f"job {job_ids.text(job_id)} is one of queue 9, which is not there" in finding(shard)


def test_a_scheduled_job_that_no_timer_would_find_is_found(shard: Shard) -> None:
    key, value = row(shard, Family.SCHEDULED)
    put(shard, Family.SCHEDULED, key, None)
    put(shard, Family.SCHEDULED, keys.scheduled_key(Q, 5, 1, 9, keys.read_scheduled_key(key)[4]), value)
    assert "is scheduled, and would never be ready" in finding(shard)


def test_a_key_without_a_timer_is_found(shard: Shard) -> None:
    put(shard, Family.DEDUP_EXPIRY, row(shard, Family.DEDUP_EXPIRY)[0], None)
    assert "the idempotency key has no timer and would never expire" in finding(shard)


def test_a_timer_without_its_key_is_found(shard: Shard) -> None:
    put(shard, Family.DEDUP_EXPIRY, keys.dedup_expiry_key(Q, WALL_START_MS, 1, b"k"), b"")
    assert "the timer is that of no idempotency key" in finding(shard)


def test_a_slot_whose_own_record_is_missing_is_found(shard: Shard) -> None:
    put(shard, Family.SLOTS, keys.slot_prefix(Q), None)
    assert finding(shard) == f"slot {Q}: records are there, but not that of the slot: no start serves them"


def test_a_record_of_the_slot_that_differs_is_found(shard: Shard) -> None:
    put(shard, Family.SLOTS, keys.slot_prefix(Q), keys.slot_value(1, 1))
    assert "it is not what the shard goes by" in finding(shard)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family is not Family.SLOTS])
def test_a_record_that_cannot_be_read_is_found(shard: Shard, family: Family) -> None:
    key, _ = row(shard, family)
    put(shard, family, key, None)
    put(shard, family, keys.slot_prefix(Q) + b"\x00", b"\xc1")
    assert any(f"{family.name.lower()} {keys.slot_prefix(Q).hex()}00: unreadable" in each for each in verify(shard)[0])


# ---- slots in use


def test_a_slot_that_changes_between_steps_is_counted_again(small_steps: None) -> None:
    shard = Shard(MemoryHome())
    shard.enqueue_all(*(job() for _ in range(10)))

    def swap(step: int) -> None:
        """The same counters with other jobs: one that was looked at as ready is leased, another comes back."""
        if step == 2:
            (leased,) = shard.reserve()
            shard.nack(leased)

    findings, records, _ = verify(shard, swap)
    assert (findings, records) == ([], 24)
    shard.machine._queues["q"].ready = 7
    assert verify(shard, swap)[0][-1] == f"slot {Q}: queue 'q' counts 7 ready jobs, 10 are there"


def test_a_slot_that_is_in_use_all_the_time_has_no_findings_about_its_counters(small_steps: None) -> None:
    shard = Shard(MemoryHome())
    shard.enqueue_all(*(job(max_attempts=1_000) for _ in range(10)))

    def use(step: int) -> None:
        shard.nack(shard.reserve_one())

    assert verify(shard, use)[:2] == ([], 3 * 12)
    shard.machine._queues["q"].ready += 1
    use(0)
    assert verify(shard, use)[:2] == ([], 3 * 12)
    assert finding(shard) == f"slot {Q}: queue 'q' counts 11 ready jobs, 10 are there"


def test_what_is_wrong_with_a_record_is_said_once_however_often_it_is_counted(small_steps: None) -> None:
    shard = Shard(MemoryHome())
    shard.enqueue_all(*(job() for _ in range(10)))
    put(shard, Family.DEDUP_EXPIRY, keys.dedup_expiry_key(Q, WALL_START_MS + 1_000, 1, b"k"), b"")
    assert len(verify(shard, lambda step: shard.enqueue())[0]) == 1


def test_a_verification_goes_on_after_a_restart_and_finds_nothing_that_is_not_there(small_steps: None) -> None:
    shard = Shard(MemoryHome())
    shard.enqueue_all(*(job() for _ in range(10)))
    shard.restart()

    def restart(step: int) -> None:
        if step == 3:
            shard.ack(shard.reserve_one())
            shard.restart(down_ms=1)

    assert verify(shard, restart)[:2] == ([], 12 + 11)


def test_a_slot_that_was_away_between_steps_is_counted_again(small_steps: None) -> None:
    moving = Cluster([MemoryHome(), MemoryHome()])
    source, target = moving.shards
    source.enqueue_all(*(job() for _ in range(10)))
    source.restart()

    def visit(step: int) -> None:
        if step == 3:
            moving.move([Q])
            moving.pass_time()
            target.ack(target.reserve_one())
            moving.move([Q], source=1, target=0)

    assert verify(source, visit)[:2] == ([], 12 + 11)


def test_a_slot_that_moves_away_between_steps_is_passed_over(small_steps: None) -> None:
    moving = Cluster([MemoryHome(), MemoryHome()])
    source, target = moving.shards
    source.enqueue_all(*(job() for _ in range(10)), job("other"))

    def move(step: int) -> None:
        if step == 2:
            moving.move([Q])

    assert verify(source, move)[0] == []
    assert verify(target)[0] == []


# ---- loads


def loads(shard: Shard) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    cursor: bytes | None = b""
    while cursor is not None:
        some, cursor = told(shard, AdminCommand.SLOTS, cursor)
        for slot, jobs, size in some:
            assert slot not in found
            found[slot] = (jobs, size)
    return found


def test_the_jobs_of_slots_are_counted_and_their_bytes_estimated(home: shard_driver.Home) -> None:
    shard = Shard(home)
    shard.configure(dead_letter_retention_ms=RETENTION_MS)
    shard.enqueue_all(*(job(body=b"x" * 1_000) for _ in range(300)))
    one, two = names_of_one_slot()
    shard.enqueue_all(job(one, b"y" * 100), job(two, due_ms=WALL_START_MS + 1_000), job("empty"))
    shard.drain("empty")
    found = loads(shard)
    assert {slot: jobs for slot, (jobs, _) in found.items()} == {Q: 300, slot_of(one): 2}
    assert found[Q][1] == 300 * (1_000 + keys.JOB_HEAD_BYTES + 15)
    shard.check()


@pytest.mark.parametrize("state", ["leased", "scheduled", "dead"])
def test_jobs_that_are_not_ready_are_estimated_too(home: shard_driver.Home, state: str) -> None:
    shard = Shard(home)
    shard.configure(dead_letter_retention_ms=RETENTION_MS)
    due_ms = WALL_START_MS + 1_000 if state == "scheduled" else 0
    shard.enqueue_all(*(job(body=b"x" * 1_000, due_ms=due_ms) for _ in range(4)))
    for leased in shard.reserve(max_jobs=10):
        if state == "dead":
            shard.nack(leased, Strategy.DEAD_LETTER)
    jobs, size = loads(shard)[Q]
    assert jobs == 4
    assert 4_000 < size < 4_300


def test_loads_come_in_steps_and_no_slot_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "STEP_ROWS", 10)
    shard = Shard(MemoryHome())
    names = [f"queue-{number}" for number in range(200)]
    shard.enqueue_all(*(job(name) for name in names))
    assert len(told(shard, AdminCommand.SLOTS)[0]) < 5
    found = loads(shard)
    assert set(found) == {slot_of(name) for name in names}
    assert sum(jobs for jobs, _ in found.values()) == 200


def test_slots_that_have_moved_are_counted_where_they_are(cluster: Cluster) -> None:
    source, target = cluster.shards
    source.enqueue_all(job(), job("other"))
    cluster.move([Q])
    assert (set(loads(source)), set(loads(target))) == ({slot_of("other")}, {Q})


def test_a_shard_with_keys_only_has_bytes_and_no_jobs() -> None:
    shard = Shard(MemoryHome())
    shard.enqueue(key="k")
    shard.drain()
    assert loads(shard) == {Q: (0, verification.KEY_BYTES)}
