"""What operators see and do, at a shard: looking, purging, deleting, requeueing; and queues that retire."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shard.admin as admin_module
import shard.machine as machine_module
from common import admin_pb2 as pb
from common import job_ids
from common.queue_pb2 import DeadLetterRecord, DrainDeadLettersRequest, DrainDeadLettersResponse, Job, Payload
from common.slots import SlotMap, slot_of
from common.wire import AdminCommand, JobRow, JobState, Op, Outcome, QueueRow, Strategy, Totals
from router.admin import PREVIEW_BYTES, Admin, Refused, Slots
from router.admin_service import AdminService
from router.front import Call, Status
from shard.admin import ABORTED, CLOSING_MS, FAILED_PRECONDITION, NOT_FOUND, UNIMPLEMENTED
from shard.machine import RETIRE_AFTER_MS
from shard.store import Family
from tests.unit import router_driver, shard_driver
from tests.unit.router_driver import RouterDriver
from tests.unit.shard_driver import LEASE_MS, WALL_START_MS, Shard, bodies, job, names_of_one_slot, rows

home = shard_driver.home
shard = shard_driver.shard

DAY_MS = 86_400_000


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command works in steps of two records."""
    monkeypatch.setattr(admin_module, "SCAN_RECORDS", 2)
    monkeypatch.setattr(admin_module, "QUEUES_PAGE", 2)


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    yield from router_driver.drivers()


def command(shard: Shard, name: AdminCommand, *arguments: object) -> list[Any]:
    """Status and data."""
    answer = shard.answer(shard.send(Op.ADMIN, name, *arguments))
    assert answer is not None
    return answer


def told(shard: Shard, name: AdminCommand, *arguments: object) -> Any:
    status, data = command(shard, name, *arguments)
    assert status == 0, data
    return data


def steps(shard: Shard, name: AdminCommand, *arguments: object) -> list[Any]:
    """The results of all steps of a command that goes on from a cursor."""
    results = []
    cursor: bytes | None = b""
    while cursor is not None:
        *result, cursor = told(shard, name, *arguments, cursor)
        results.append(result[0] if len(result) == 1 else result)
    return results


def queue_row(shard: Shard, name: str = "q") -> QueueRow:
    return QueueRow(*told(shard, AdminCommand.QUEUE, name))


def listed(shard: Shard, state: JobState, queue: str = "q", limit: int = 100) -> list[JobRow]:
    found: list[JobRow] = []
    cursor: bytes | None = b""
    while cursor is not None:
        page, cursor = told(shard, AdminCommand.JOBS, queue, state, cursor, limit)
        assert len(page) <= limit
        found += [JobRow(*row) for row in page]
    return found


def find(shard: Shard, job_id: bytes) -> JobRow | None:
    row = steps(shard, AdminCommand.FIND, job_id)[-1]
    return None if row is None else JobRow(*row)


def purge(shard: Shard, queue: str = "q") -> int:
    return sum(steps(shard, AdminCommand.PURGE, queue))


def close(shard: Shard, queue: str = "q", number: int = 0, may_wait: bool = False) -> int:
    """Close a queue without jobs in flight; returns its number."""
    found: int
    found, _ = told(shard, AdminCommand.CLOSE, queue, number, may_wait)
    return found


def delete(shard: Shard, queue: str = "q") -> tuple[int, int, int]:
    """Jobs, dead letters and keys that went."""
    removed = steps(shard, AdminCommand.REMOVE, queue, close(shard, queue))
    return sum(each[0] for each in removed), sum(each[1] for each in removed), sum(each[2] for each in removed)


def bury(shard: Shard, queue: str = "q", body: bytes = b"", reason: str | None = None, **fields: Any) -> bytes:
    """A dead letter; returns its id."""
    job_id: bytes = shard.enqueue(queue, body, **fields)
    (leased,) = shard.reserve(queue)
    assert leased.job_id == job_id
    shard.nack(leased, Strategy.DEAD_LETTER, reason=reason)
    return job_id


def keeps_dead_letters(shard: Shard, **values: object) -> None:
    shard.configure(dead_letter_retention_ms=DAY_MS, **values)


def fill(shard: Shard, queue: str = "q") -> None:
    """Three ready jobs in two priorities, two scheduled ones, a dead letter and two keys, one of them of its own."""
    keeps_dead_letters(shard)
    bury(shard, queue, b"dead")
    shard.enqueue_all(
        job(queue, b"low", key="a"),
        job(queue, b"high", priority=9),
        job(queue, b"low too"),
        job(queue, b"soon", due_ms=shard.wall_ms + 1_000, key="b"),
        job(queue, b"later", due_ms=shard.wall_ms + 9_000),
    )


def stored_of_queues(shard: Shard) -> dict[str, int]:
    """How many records there are by family, of families whose records belong to queues; none are left out."""
    families = set(Family) - {Family.SLOTS, Family.META}
    found = {family.name: len(rows(shard.store, family)) for family in families}
    return {name: count for name, count in found.items() if count}


# -- looking at queues ------------------------------------------------------------------------


def test_a_queue_is_shown_with_its_counters(shard: Shard) -> None:
    fill(shard)
    shard.reserve_one()
    assert queue_row(shard) == QueueRow(
        name="q",
        slot=slot_of("q"),
        number=1,
        ready=2,
        scheduled=2,
        leased=1,
        dead=1,
        keys=2,
        waiting=0,
        oldest_ms=WALL_START_MS,
        closing_until_ms=0,
    )


def test_polls_that_wait_for_a_queue_are_counted(shard: Shard) -> None:
    shard.enqueue(due_ms=WALL_START_MS + 1_000)
    shard.park("q", "other")
    shard.watch("q")
    assert queue_row(shard).waiting == 2


def test_the_oldest_job_is_that_of_any_priority(shard: Shard) -> None:
    shard.enqueue()
    shard.pass_time(5)
    shard.enqueue(priority=9)
    assert queue_row(shard).oldest_ms == WALL_START_MS
    shard.ack(shard.reserve_one())
    shard.ack(shard.reserve_one())
    assert queue_row(shard).oldest_ms == 0


def test_the_oldest_job_after_a_restart_is_not_one_in_flight(shard: Shard) -> None:
    shard.enqueue()
    shard.pass_time(5)
    shard.enqueue()
    shard.reserve_one()
    shard.restart()
    assert queue_row(shard).oldest_ms == WALL_START_MS + 5


def test_an_unknown_queue_is_not_found_and_nothing_is_stored(shard: Shard) -> None:
    for name in (AdminCommand.QUEUE, AdminCommand.PURGE, AdminCommand.CLOSE, AdminCommand.JOBS):
        more = {AdminCommand.PURGE: [b""], AdminCommand.CLOSE: [0, True], AdminCommand.JOBS: [1, b"", 9]}.get(name, [])
        status, text = command(shard, name, "nobody's", *more)
        assert (status, "nobody's" in text) == (NOT_FOUND, True)
    assert stored_of_queues(shard) == {}
    assert shard.machine.counts() == {}


def test_an_unknown_command_is_refused(shard: Shard) -> None:
    assert shard.answer(shard.send(Op.ADMIN, "dance"))[0] == UNIMPLEMENTED  # type: ignore[index]


@pytest.mark.usefixtures("small_steps")
def test_all_queues_are_listed_page_by_page(shard: Shard) -> None:
    names = [f"queue-{number}" for number in range(7)]
    shard.enqueue_all(*(job(name) for name in names))
    pages = steps(shard, AdminCommand.QUEUES)
    assert max(len(page) for page in pages) == 2
    assert sorted(QueueRow(*row).name for page in pages for row in page) == names


@pytest.mark.usefixtures("small_steps")
def test_totals_add_up_over_all_queues(shard: Shard) -> None:
    for name in ("a", "b", "c"):
        fill(shard, name)
    shard.reserve_one("a")
    shard.park("nothing")
    parts = [Totals(*part) for part in steps(shard, AdminCommand.TOTALS)]
    assert [sum(column) for column in zip(*parts, strict=True)] == [3, 8, 6, 1, 3, 6, 1]
    assert [part.queues for part in parts] == [2, 1]


# -- looking at jobs --------------------------------------------------------------------------


@pytest.mark.usefixtures("small_steps")
def test_ready_jobs_are_listed_in_serving_order_without_those_in_flight(shard: Shard) -> None:
    for number, priority in enumerate([0, 9, 0, 5, 9, 0, 0]):
        shard.enqueue(body=b"%d" % number, priority=priority)
    shard.reserve_one()
    found = listed(shard, JobState.READY)
    assert [row.body for row in found] == [b"4", b"3", b"0", b"2", b"5", b"6"]
    assert found[0] == JobRow("q", found[0].job_id, JobState.READY, 1, 0, 0, None, b"4")
    assert shard.drain() == [row.body for row in found]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
def test_a_page_of_ready_jobs_has_no_more_than_its_limit_and_none_is_left_out(shard: Shard, limit: int) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number, priority=number % 3) for number in range(7)))
    found = listed(shard, JobState.READY, limit=limit)
    assert [row.body for row in found] == [b"2", b"5", b"1", b"4", b"0", b"3", b"6"]


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("state", [JobState.SCHEDULED, JobState.LEASED, JobState.DEAD])
def test_a_list_has_only_jobs_of_its_queue_also_where_others_lie_between(shard: Shard, state: JobState) -> None:
    keeps_dead_letters(shard)
    mine, other = names_of_one_slot()
    expected = []
    for number in range(6):
        queue = mine if number % 2 else other
        due_ms = WALL_START_MS + 100 - number
        if state == JobState.SCHEDULED:
            job_id = shard.enqueue(queue, due_ms=due_ms)
        elif state == JobState.LEASED:
            shard.enqueue(queue)
            job_id = shard.reserve_one(queue).job_id
        else:
            job_id = bury(shard, queue)
        expected += [job_id] if queue == mine else []
    found = listed(shard, state, mine)
    assert sorted(row.job_id for row in found) == expected
    assert {(row.queue, row.state) for row in found} == {(mine, state)}


def test_a_scheduled_job_is_listed_with_its_time_and_one_that_waits_for_a_retry_with_its_attempt(shard: Shard) -> None:
    shard.enqueue(body=b"1")
    shard.nack(shard.reserve_one(), Strategy.DELAY, 700)
    shard.enqueue(body=b"2", due_ms=WALL_START_MS + 500)
    found = listed(shard, JobState.SCHEDULED)
    assert [(row.body, row.attempt, row.at_ms - WALL_START_MS) for row in found] == [(b"2", 1, 500), (b"1", 2, 700)]


def test_a_leased_job_is_listed_with_the_end_of_its_lease(shard: Shard) -> None:
    shard.enqueue(body=b"1")
    leased = shard.reserve_one(lease_ms=1_234)
    assert listed(shard, JobState.LEASED) == [
        JobRow("q", leased.job_id, JobState.LEASED, 1, WALL_START_MS + 1_234, 0, None, b"1")
    ]


def test_a_dead_letter_is_listed_with_why_and_when(shard: Shard) -> None:
    keeps_dead_letters(shard)
    shard.pass_time(9)
    job_id = bury(shard, body=b"1", reason="broken")
    assert listed(shard, JobState.DEAD) == [JobRow("q", job_id, JobState.DEAD, 1, WALL_START_MS + 9, 2, "broken", b"1")]


@pytest.mark.usefixtures("small_steps")
def test_dead_letters_of_all_queues_are_listed_page_by_page(shard: Shard) -> None:
    keeps_dead_letters(shard)
    expected = sorted(bury(shard, f"queue-{number % 4}") for number in range(7))
    found: list[bytes] = []
    cursor: bytes | None = b""
    while cursor is not None:
        page, cursor = told(shard, AdminCommand.DEAD, cursor, 2)
        found += [JobRow(*row).job_id for row in page]
    assert sorted(found) == expected


@pytest.mark.parametrize("state", list(JobState))
def test_a_cursor_that_nobody_gave_does_no_harm(shard: Shard, state: JobState) -> None:
    fill(shard)
    for cursor in (b"\x00", b"\xff" * 7, b"\xff" * 99, b"garbage"):
        assert command(shard, AdminCommand.JOBS, "q", state, cursor, 10)[0] == 0


# -- looking for one job ------------------------------------------------------------------------


@pytest.mark.usefixtures("small_steps")
def test_a_job_is_found_in_every_state_and_stays_as_it_is(shard: Shard) -> None:
    mine, other = names_of_one_slot()
    fill(shard, other)
    dead = bury(shard, mine, b"dead")
    scheduled = shard.enqueue(mine, b"scheduled", due_ms=WALL_START_MS + 5_000)
    shard.enqueue(mine, b"leased", priority=9)
    leased = shard.reserve_one(mine)
    ready = shard.enqueue(mine, b"ready", priority=3)
    before = shard.machine.counts()
    for job_id, state, body in (
        (dead, JobState.DEAD, b"dead"),
        (scheduled, JobState.SCHEDULED, b"scheduled"),
        (leased.job_id, JobState.LEASED, b"leased"),
        (ready, JobState.READY, b"ready"),
    ):
        found = find(shard, job_id)
        assert found is not None
        assert (found.queue, found.job_id, found.state, found.body) == (mine, job_id, state, body)
    assert shard.machine.counts() == before
    assert shard.ack(leased) == 0


def test_a_job_that_is_not_there_is_not_found(shard: Shard) -> None:
    fill(shard)
    shard.enqueue("gone")
    leased = shard.reserve_one("gone")
    shard.ack(leased)
    assert find(shard, leased.job_id) is None
    for row in listed(shard, JobState.READY):
        assert find(shard, row.job_id[:-1] + bytes([row.job_id[-1] ^ 1])) is None
    assert find(shard, bytes(16)) is None


# -- purging ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_steps")
def test_a_purge_removes_ready_and_scheduled_jobs_and_nothing_else(shard: Shard) -> None:
    fill(shard)
    held = shard.reserve_one()
    assert purge(shard) == 4
    assert shard.counts() == (0, 0, 1, 1)
    assert shard.enqueue(key="a")[0] == Outcome.DEDUPLICATED
    shard.check()
    assert shard.ack(held) == 0


@pytest.mark.usefixtures("small_steps")
def test_a_job_that_comes_back_after_a_purge_is_served(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number) for number in range(7)))
    held = shard.reserve(max_jobs=2)
    assert purge(shard) == 5
    shard.nack(held[1])
    shard.enqueue(body=b"new")
    shard.nack(held[0])
    assert shard.drain() == [b"0", b"1", b"new"]


def test_a_purge_leaves_what_is_enqueued_after_it_began(shard: Shard) -> None:
    shard.enqueue_all(job(body=b"1"), job(body=b"2", due_ms=WALL_START_MS + 50))
    removed, cursor = told(shard, AdminCommand.PURGE, "q", b"")
    assert removed == 1  # scheduled jobs come first
    shard.enqueue_all(job(body=b"3"), job(body=b"4", due_ms=WALL_START_MS + 50), job(body=b"5", priority=4))
    removed, cursor = told(shard, AdminCommand.PURGE, "q", cursor)
    assert (removed, cursor) == (1, None)
    assert shard.counts() == (2, 1, 0, 0)
    shard.pass_time(50)
    assert shard.drain() == [b"5", b"3", b"4"]


@pytest.mark.usefixtures("small_steps")
def test_a_purge_leaves_what_is_scheduled_while_it_is_among_the_scheduled(shard: Shard) -> None:
    shard.enqueue_all(*(job(due_ms=WALL_START_MS + 50 + number) for number in range(3)))
    removed, cursor = told(shard, AdminCommand.PURGE, "q", b"")
    assert removed == 2
    shard.enqueue(body=b"new", due_ms=WALL_START_MS + 60)
    while cursor is not None:
        _, cursor = told(shard, AdminCommand.PURGE, "q", cursor)
    shard.pass_time(60)
    assert shard.drain() == [b"new"]


@pytest.mark.usefixtures("small_steps")
def test_clients_are_served_between_the_steps_of_a_purge(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number) for number in range(9)))
    removed, cursor = told(shard, AdminCommand.PURGE, "q", b"")
    assert (removed, cursor is None) == (0, False)
    removed, cursor = told(shard, AdminCommand.PURGE, "q", cursor)
    assert (removed, cursor is None) == (2, False)
    assert shard.reserve_one().body == b"2"
    shard.check()


def test_a_purge_of_a_queue_that_is_deleted_meanwhile_leaves_the_next_of_its_name(shard: Shard) -> None:
    shard.enqueue()
    _, cursor = told(shard, AdminCommand.PURGE, "q", b"")
    delete(shard)
    shard.enqueue(body=b"new")
    assert told(shard, AdminCommand.PURGE, "q", cursor) == (0, None)
    assert shard.drain() == [b"new"]


# -- a closing queue ----------------------------------------------------------------------------


def test_a_closing_queue_refuses_jobs_before_it_looks_at_keys_and_capacity(shard: Shard) -> None:
    shard.configure(max_queue_depth=1)
    shard.enqueue(key="a")
    close(shard)
    refused, also_refused, stored = shard.enqueue_all(job(key="a"), job(), job("other"))
    assert refused == also_refused == [Outcome.QUEUE_CLOSING]
    assert isinstance(stored, bytes)
    assert shard.counts("other") == (1, 0, 0, 0)


def test_an_atomic_batch_names_every_job_for_a_closing_queue_and_others_only_if_they_are_at_fault(shard: Shard) -> None:
    shard.configure([{"name": "full", "max_queue_depth": 0}])
    shard.enqueue()
    close(shard)
    assert shard.enqueue_atomic(job("free"), job("q"), job("full"), job("q")) == [
        False,
        [(1, [Outcome.QUEUE_CLOSING]), (2, [Outcome.QUEUE_FULL, 0]), (3, [Outcome.QUEUE_CLOSING])],
    ]
    assert shard.counts("free") == (0, 0, 0, 0)


def test_nothing_is_handed_out_from_a_closing_queue(shard: Shard) -> None:
    shard.enqueue()
    close(shard)
    assert shard.reserve() == []
    poll = shard.park()
    watch = shard.watch()
    assert shard.jobs_for(poll) is None
    assert not shard.is_woken(watch)


def test_nobody_is_woken_for_a_closing_queue(shard: Shard) -> None:
    shard.enqueue()
    close(shard)
    watch = shard.watch()
    assert not shard.is_woken(watch)
    shard.pass_time(CLOSING_MS)
    assert shard.is_woken(watch)


def test_a_poll_on_several_queues_gets_jobs_of_those_that_are_not_closing(shard: Shard) -> None:
    shard.enqueue_all(job("q", b"1"), job("other", b"2"))
    close(shard)
    assert bodies(shard.reserve("q", "other", max_jobs=9)) == [b"2"]


def test_leases_of_a_closing_queue_are_ended_and_prolonged_as_ever(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number) for number in range(4)))
    acked, nacked, expired, extended = shard.reserve(max_jobs=4, lease_ms=500)
    assert told(shard, AdminCommand.CLOSE, "q", 0, True) == (1, 4)
    assert shard.ack(acked) == 0
    assert shard.nack(nacked) == [0, False]
    assert shard.extend(extended, 60_000) == [0, WALL_START_MS + 60_000]
    shard.pass_time(500)
    assert shard.counts() == (2, 0, 1, 0)
    assert shard.ack(expired) == NOT_FOUND


def test_a_closing_queue_opens_by_itself_and_serves_who_waits(shard: Shard) -> None:
    shard.enqueue(body=b"1")
    close(shard)
    poll = shard.park()
    assert queue_row(shard).closing_until_ms == WALL_START_MS + CLOSING_MS
    shard.pass_time(CLOSING_MS - 1)
    assert shard.enqueue() == [Outcome.QUEUE_CLOSING]
    assert shard.next_wake_ms() == 1
    shard.pass_time(1)
    assert bodies(shard.jobs_for(poll)) == [b"1"]
    assert isinstance(shard.enqueue(), bytes)
    assert queue_row(shard).closing_until_ms == 0


def test_every_sign_of_a_deletion_keeps_its_queue_closing(shard: Shard) -> None:
    shard.enqueue()
    number = close(shard)
    shard.pass_time(CLOSING_MS - 1)
    assert close(shard, number=number) == number
    shard.pass_time(CLOSING_MS - 1)
    assert shard.enqueue() == [Outcome.QUEUE_CLOSING]
    shard.pass_time(1)
    assert isinstance(shard.enqueue(), bytes)


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_closing_queue_is_closing_after_a_restart_for_as_long_as_before(shard: Shard, is_empty: bool) -> None:
    shard.enqueue()
    if is_empty:
        shard.ack(shard.reserve_one())
    close(shard)
    shard.restart(down_ms=CLOSING_MS - 1_000)
    shard.pass_time()
    assert shard.enqueue() == [Outcome.QUEUE_CLOSING]
    shard.pass_time(999)
    assert shard.enqueue() == [Outcome.QUEUE_CLOSING]
    shard.pass_time(1)
    assert isinstance(shard.enqueue(), bytes)


def test_a_queue_whose_deletion_was_forgotten_is_open_after_a_longer_stop(shard: Shard) -> None:
    shard.enqueue(body=b"1")
    close(shard)
    shard.restart(down_ms=CLOSING_MS)
    assert shard.drain() == [b"1"]


# -- deleting -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_steps")
def test_a_deleted_queue_leaves_nothing_behind(shard: Shard) -> None:
    fill(shard)
    assert delete(shard) == (5, 1, 2)
    assert stored_of_queues(shard) == {}
    assert shard.machine.counts() == {}
    shard.pass_time(DAY_MS)
    assert shard.reserve() == []
    assert shard.next_wake_ms() is None


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("pair", [("a", "ab"), ("q/1", "q"), ("e\u0301", "\u00e9"), None])
def test_a_deletion_touches_no_queue_with_a_name_like_it(shard: Shard, pair: tuple[str, str] | None) -> None:
    mine, other = pair or names_of_one_slot()
    for name in (other, mine):
        fill(shard, name)
    expected = {other: shard.machine.counts()[other]}
    assert delete(shard, mine) == (5, 1, 2)
    assert shard.machine.counts() == expected
    shard.check()
    shard.pass_time(9_000)
    assert len(shard.drain(other)) == 5


def test_a_deletion_is_refused_while_jobs_are_in_flight_and_the_queue_stays_open(shard: Shard) -> None:
    shard.enqueue_all(job(), job(), job())
    shard.reserve(max_jobs=2)
    status, text = command(shard, AdminCommand.CLOSE, "q", 0, False)
    assert (status, "2" in text) == (FAILED_PRECONDITION, True)
    assert isinstance(shard.enqueue(), bytes)
    assert len(shard.reserve()) == 1


def test_a_deletion_that_waits_hears_how_many_jobs_are_in_flight(shard: Shard) -> None:
    shard.enqueue_all(job(), job())
    held = shard.reserve(max_jobs=2)
    number, leased = told(shard, AdminCommand.CLOSE, "q", 0, True)
    assert leased == 2
    shard.ack(held[0])
    assert told(shard, AdminCommand.CLOSE, "q", number, True) == (number, 1)
    shard.nack(held[1])
    assert told(shard, AdminCommand.CLOSE, "q", number, True) == (number, 0)
    steps(shard, AdminCommand.REMOVE, "q", number)
    assert stored_of_queues(shard) == {}


def test_a_deletion_that_paused_too_long_stops_and_keeps_what_came_meanwhile(shard: Shard) -> None:
    shard.enqueue(body=b"old")
    number = close(shard)
    shard.pass_time(CLOSING_MS)
    shard.enqueue(body=b"new")
    status, _ = command(shard, AdminCommand.REMOVE, "q", number, b"")
    assert status == ABORTED
    assert shard.drain() == [b"old", b"new"]


def test_jobs_that_came_in_a_pause_are_not_lost_when_the_queue_is_closed_again(shard: Shard) -> None:
    shard.enqueue(body=b"old")
    number = close(shard)
    *_, cursor = told(shard, AdminCommand.REMOVE, "q", number, b"")
    *_, cursor = told(shard, AdminCommand.REMOVE, "q", number, cursor)
    shard.pass_time(CLOSING_MS)
    shard.enqueue(body=b"new")
    close(shard)
    status = 0
    while status == 0:
        status, data = command(shard, AdminCommand.REMOVE, "q", number, cursor)
        cursor = data[-1]
    assert status == ABORTED
    shard.pass_time(CLOSING_MS)
    assert shard.drain() == [b"new"]


@pytest.mark.usefixtures("small_steps")
def test_a_deletion_is_finished_by_another_one_after_a_crash_at_any_step(shard: Shard) -> None:
    done = 0
    while True:
        fill(shard)
        number = close(shard)
        cursor: bytes | None = b""
        for _ in range(done):
            assert cursor is not None
            *_, cursor = told(shard, AdminCommand.REMOVE, "q", number, cursor)
        if cursor is None:
            break
        shard.restart()
        shard.check()
        assert shard.enqueue() == [Outcome.QUEUE_CLOSING]
        delete(shard)
        assert stored_of_queues(shard) == {}
        done += 1
    assert done == 7


def test_a_late_ack_of_a_deleted_queue_is_not_found(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    told(shard, AdminCommand.CLOSE, "q", 0, True)
    shard.pass_time(LEASE_MS - 1)
    told(shard, AdminCommand.CLOSE, "q", 0, True)
    shard.pass_time(1)
    delete(shard)
    assert shard.ack(leased) == NOT_FOUND
    assert shard.nack(leased)[0] == NOT_FOUND
    assert shard.extend(leased, 1_000)[0] == NOT_FOUND


def test_a_poll_outlives_the_deletion_of_its_queue(shard: Shard) -> None:
    shard.enqueue(due_ms=WALL_START_MS + 5_000)
    poll = shard.park()
    watch = shard.watch()
    delete(shard)
    shard.enqueue_all(job(body=b"1"), job(body=b"2"))
    assert bodies(shard.jobs_for(poll)) == [b"1"]
    assert shard.is_woken(watch)


def test_a_key_is_free_after_its_queue_was_deleted(shard: Shard) -> None:
    first = shard.enqueue(key="k")
    delete(shard)
    second = shard.enqueue(key="k")
    assert isinstance(second, bytes)
    assert second != first
    shard.pass_time(DAY_MS)
    assert queue_row(shard).keys == 0


def test_the_number_of_a_queue_is_never_used_again(shard: Shard) -> None:
    numbers = []
    for restarts in (False, True, False):
        shard.enqueue()
        numbers.append(queue_row(shard).number)
        delete(shard)
        if restarts:
            shard.restart()
    assert numbers == [1, 2, 3]


def test_a_deletion_does_not_go_on_into_the_next_queue_of_the_name(shard: Shard) -> None:
    shard.enqueue()
    number = close(shard)
    delete(shard)
    shard.enqueue(body=b"new")
    close(shard)
    assert command(shard, AdminCommand.REMOVE, "q", number, b"")[0] == NOT_FOUND
    assert command(shard, AdminCommand.CLOSE, "q", number, True)[0] == NOT_FOUND
    assert shard.counts() == (1, 0, 0, 0)


@pytest.mark.parametrize("end", ["confirm", "give_back", "keep", "router_gone"])
def test_dead_letters_that_are_handed_out_go_with_their_queue_whatever_becomes_of_their_answer(
    shard: Shard, end: str
) -> None:
    keeps_dead_letters(shard)
    for name in ("q", "other", "q"):
        bury(shard, name, name.encode())
        shard.pass_time(1)
    assert [letter.body for letter in shard.drain_dead(count=2)] == [b"q", b"other"]
    drain = shard.last_op
    assert delete(shard) == (0, 2, 0)
    match end:
        case "confirm":
            shard.confirm(drain)
        case "give_back":
            shard.give_back(drain)
        case "keep":
            shard.keep(drain, 1)
            shard.confirm(drain)
        case "router_gone":
            shard.router_gone()
    left = [] if end == "confirm" else [b"other"]
    assert [letter.body for letter in shard.drain_dead()] == left


# -- dead letters -------------------------------------------------------------------------------


def test_a_requeued_dead_letter_is_the_same_job_at_its_old_place_before_its_first_attempt(shard: Shard) -> None:
    keeps_dead_letters(shard)
    shard.enqueue(body=b"first", priority=5)
    shard.nack(shard.reserve_one())
    leased = shard.reserve_one()
    assert leased.attempt == 2
    shard.nack(leased, Strategy.DEAD_LETTER)
    shard.enqueue(body=b"second", priority=5)
    letter = listed(shard, JobState.DEAD)[0]
    assert told(shard, AdminCommand.REQUEUE, "q", [[letter.at_ms, letter.job_id, 5, 7]]) == [leased.job_id]
    assert shard.counts() == (2, 0, 0, 0)
    shard.restart()
    again = shard.reserve_one()
    assert (again.job_id, again.attempt, again.body) == (leased.job_id, 1, b"first")
    assert shard.reserve_one().body == b"second"


def test_a_requeued_job_has_its_attempts_again(shard: Shard) -> None:
    keeps_dead_letters(shard)
    bury(shard, max_attempts=2)
    letter = listed(shard, JobState.DEAD)[0]
    told(shard, AdminCommand.REQUEUE, "q", [[letter.at_ms, letter.job_id, 0, 2]])
    assert shard.nack(shard.reserve_one()) == [0, False]
    assert shard.nack(shard.reserve_one()) == [0, True]


def test_a_requeued_dead_letter_wakes_a_poll(shard: Shard) -> None:
    keeps_dead_letters(shard)
    bury(shard, body=b"1")
    poll = shard.park()
    letter = listed(shard, JobState.DEAD)[0]
    told(shard, AdminCommand.REQUEUE, "q", [[letter.at_ms, letter.job_id, 0, 3]])
    assert bodies(shard.jobs_for(poll)) == [b"1"]


@pytest.mark.parametrize("name", [AdminCommand.REQUEUE, AdminCommand.DELETE_DEAD])
def test_a_dead_letter_that_is_handed_out_is_nobody_elses(shard: Shard, name: AdminCommand) -> None:
    keeps_dead_letters(shard)
    job_id = bury(shard)
    shard.drain_dead()
    more = [0, 3] if name == AdminCommand.REQUEUE else []
    assert told(shard, name, "q", [[WALL_START_MS, job_id, *more]]) in ([], 0)
    shard.confirm(shard.last_op - 1)
    assert shard.counts() == (0, 0, 0, 0)


def test_a_dead_letter_of_another_id_is_passed_over(shard: Shard) -> None:
    keeps_dead_letters(shard)
    job_id = bury(shard)
    other = job_id[:-1] + bytes([job_id[-1] ^ 1])
    assert told(shard, AdminCommand.DELETE_DEAD, "q", [[WALL_START_MS, other], [WALL_START_MS + 1, job_id]]) == 0
    assert told(shard, AdminCommand.REQUEUE, "q", [[WALL_START_MS, other, 0, 3]]) == []
    assert shard.counts() == (0, 0, 0, 1)


def test_nothing_is_requeued_into_a_closing_queue(shard: Shard) -> None:
    keeps_dead_letters(shard)
    job_id = bury(shard)
    close(shard)
    assert command(shard, AdminCommand.REQUEUE, "q", [[WALL_START_MS, job_id, 0, 3]])[0] == FAILED_PRECONDITION
    assert shard.counts() == (0, 0, 0, 1)


def test_deleted_dead_letters_are_gone_and_the_others_are_drained_in_order(shard: Shard) -> None:
    keeps_dead_letters(shard)
    ids = [bury(shard, body=b"%d" % number) for number in range(4)]
    assert told(shard, AdminCommand.DELETE_DEAD, "q", [[WALL_START_MS, ids[0]], [WALL_START_MS, ids[2]]]) == 2
    shard.check()
    assert [letter.body for letter in shard.drain_dead()] == [b"1", b"3"]


# -- queues that retire -------------------------------------------------------------------------


def test_a_queue_that_stays_empty_retires_from_memory_and_disk(shard: Shard) -> None:
    shard.enqueue()
    shard.ack(shard.reserve_one())
    assert shard.next_wake_ms() == RETIRE_AFTER_MS
    shard.pass_time(RETIRE_AFTER_MS - 1)
    assert "q" in shard.machine.counts()
    shard.pass_time(1)
    assert shard.machine.counts() == {}
    assert stored_of_queues(shard) == {}
    assert shard.next_wake_ms() is None


@pytest.mark.parametrize("what", ["ready", "scheduled", "leased", "dead", "key", "closing"])
def test_a_queue_of_which_anything_is_stored_does_not_retire(shard: Shard, what: str) -> None:
    keeps_dead_letters(shard)
    if what == "dead":
        bury(shard)
    else:
        shard.enqueue(due_ms=WALL_START_MS + DAY_MS if what == "scheduled" else 0, key="k" if what == "key" else None)
    if what in ("leased", "key", "closing"):
        leased = shard.reserve_one(lease_ms=DAY_MS)
        if what != "leased":
            shard.ack(leased)
    if what == "closing":
        close(shard)
    shard.pass_time(2 * RETIRE_AFTER_MS)
    assert "q" in shard.machine.counts()


def test_a_queue_that_is_used_again_in_time_does_not_retire(shard: Shard) -> None:
    shard.enqueue()
    shard.ack(shard.reserve_one())
    shard.pass_time(RETIRE_AFTER_MS - 1)
    shard.enqueue()
    shard.ack(shard.reserve_one())
    shard.pass_time(RETIRE_AFTER_MS - 1)
    assert queue_row(shard).number == 1


def test_a_name_that_comes_again_after_it_retired_is_a_new_queue(shard: Shard) -> None:
    shard.enqueue()
    shard.ack(shard.reserve_one())
    poll = shard.park()
    shard.pass_time(RETIRE_AFTER_MS)
    shard.enqueue(body=b"1")
    assert bodies(shard.jobs_for(poll)) == [b"1"]
    assert queue_row(shard).number == 2


def test_a_queue_that_was_empty_before_a_restart_retires_after_it(shard: Shard) -> None:
    shard.enqueue()
    shard.ack(shard.reserve_one())
    shard.restart()
    assert queue_row(shard).number == 1
    shard.pass_time(RETIRE_AFTER_MS)
    assert stored_of_queues(shard) == {}


def test_a_queue_whose_last_key_expires_retires(shard: Shard) -> None:
    shard.configure(dedup_window_ms=1_000)
    shard.enqueue(key="k")
    shard.ack(shard.reserve_one())
    shard.pass_time(1_000)
    shard.pass_time(RETIRE_AFTER_MS)
    assert stored_of_queues(shard) == {}


def test_an_empty_queue_whose_deletion_was_forgotten_retires(shard: Shard) -> None:
    shard.enqueue()
    shard.ack(shard.reserve_one())
    close(shard)
    shard.pass_time(RETIRE_AFTER_MS)
    shard.pass_time(CLOSING_MS - RETIRE_AFTER_MS)
    assert queue_row(shard).number == 1
    shard.pass_time(RETIRE_AFTER_MS)
    assert stored_of_queues(shard) == {}


def test_one_tick_retires_a_bounded_part_of_many_queues(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "TICK_LIMIT", 4)
    names = [f"queue-{number}" for number in range(6)]
    shard.enqueue_all(*(job(name) for name in names))
    for name in names:
        shard.drain(name)
    shard.wall_ms += RETIRE_AFTER_MS
    shard.mono_ms += RETIRE_AFTER_MS
    assert shard.tick()
    assert len(shard.machine.counts()) == 2
    assert not shard.tick()
    assert shard.machine.counts() == {}


def test_a_wake_up_that_was_given_outlives_its_queue(shard: Shard) -> None:
    watch = shard.watch()
    shard.enqueue()
    assert shard.is_woken(watch)
    shard.ack(shard.reserve_one())
    shard.pass_time(RETIRE_AFTER_MS)
    shard.enqueue_all(job(body=b"1"), job(body=b"2"))
    poll = shard.park()
    assert bodies(shard.jobs_for(poll)) == [b"1"]
    assert bodies(shard.reserve(settles=watch)) == [b"2"]


# -- anything in any order ----------------------------------------------------------------------


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("seed", range(4))
def test_counters_equal_a_full_scan_after_anything(shard: Shard, seed: int) -> None:
    draw = random.Random(seed)
    keeps_dead_letters(shard, dedup_window_ms=3_000)
    names = (*names_of_one_slot(), "third")
    held: list[Any] = []
    drains: list[int] = []
    cursors: dict[str, tuple[AdminCommand, list[object]]] = {}

    def begin(name: str) -> None:
        status, data = command(shard, AdminCommand.CLOSE, name, 0, draw.random() < 0.5)
        if status == 0:
            cursors[name] = AdminCommand.REMOVE, [name, data[0], b""]

    def go_on(name: str) -> None:
        kind, arguments = cursors.pop(name, (AdminCommand.PURGE, [name, b""]))
        status, data = command(shard, kind, *arguments)
        if status == 0 and data[-1] is not None:
            cursors[name] = kind, [*arguments[:-1], data[-1]]

    def requeue(name: str) -> None:
        for letter in told(shard, AdminCommand.DEAD, b"", 100)[0]:
            row = JobRow(*letter)
            if row.queue == name and draw.random() < 0.5:
                command(shard, AdminCommand.REQUEUE, name, [[row.at_ms, row.job_id, draw.randrange(10), 2]])

    def enqueue(name: str) -> None:
        due_ms = draw.choice([0, shard.wall_ms + 400])
        key = draw.choice([None, "a", "b"])
        shard.enqueue_all(*[job(name, priority=draw.randrange(10), max_attempts=2, due_ms=due_ms, key=key)] * 2)

    def reserve(name: str) -> None:
        held.extend(shard.reserve(name, max_jobs=3, lease_ms=900))

    def finish(name: str) -> None:
        if held:
            leased = held.pop(draw.randrange(len(held)))
            draw.choice([shard.ack, shard.nack, lambda one: shard.nack(one, Strategy.DEAD_LETTER)])(leased)

    def drain(name: str) -> None:
        shard.drain_dead(draw.choice([None, name]), 2)
        drains.append(shard.last_op)

    def settle(name: str) -> None:
        if drains:
            draw.choice([shard.confirm, shard.give_back])(drains.pop())

    def pass_time(name: str) -> None:
        shard.pass_time(draw.choice([1, 300, 1_000, 5_000, RETIRE_AFTER_MS, CLOSING_MS]))

    actions: list[Callable[[str], None]] = [enqueue] * 4 + [reserve] * 3 + [finish] * 3 + [drain, settle, pass_time]
    actions += [begin, go_on, go_on, go_on, requeue, lambda name: shard.restart()]
    for _ in range(200):
        draw.choice(actions)(draw.choice(names))
        shard.check()
    for op_id in drains:
        shard.give_back(op_id)
    shard.pass_time(CLOSING_MS)
    shard.pass_time(CLOSING_MS)
    for name in names:
        if name in shard.machine.counts():
            delete(shard, name)
    assert stored_of_queues(shard) == {}


# -- the router's part --------------------------------------------------------------------------


class OneShard:
    """A server of one shard, as the router's part sees it. `between` is called before each operation."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.between: Callable[[list[Any]], None] = lambda arguments: None

    def ask(self, shard: int, arguments: list[Any]) -> tuple[int, Any]:
        assert shard == 0
        self.between(arguments)
        status, data = command(self.shard, *arguments[1:])
        return status, data


class OneShardOnly(Slots):
    """The slot map of a server of one shard."""

    def slot_map(self) -> SlotMap:
        return SlotMap.even(1)


class Impatient:
    """Waits by letting the shard's time pass, for so many pauses."""

    def __init__(self, shard: Shard, pauses: int) -> None:
        self.shard = shard
        self.pauses = pauses

    def is_over(self) -> bool:
        return self.pauses < 0

    def pause(self, seconds: float) -> None:
        self.pauses -= 1
        self.shard.pass_time(int(seconds * 1_000))


@pytest.fixture
def one_shard(shard: Shard) -> OneShard:
    return OneShard(shard)


@pytest.fixture
def admin(one_shard: OneShard) -> Admin:
    return Admin(one_shard, OneShardOnly())


def body_of(data: bytes = b"x", **fields: Any) -> bytes:
    return Job(queue="q", job_type="t", payload=Payload(data=data, encoding="e"), **fields).SerializeToString()


@pytest.mark.usefixtures("small_steps")
def test_a_deletion_reports_what_it_removed(shard: Shard, admin: Admin) -> None:
    fill(shard)
    answer = admin.delete_queue(pb.DeleteQueueRequest(queue="q"), Impatient(shard, 0))
    assert answer == pb.DeleteQueueResponse(removed_jobs=5, removed_dead_letters=1, removed_keys=2)


@pytest.mark.usefixtures("small_steps")
def test_other_queues_are_served_while_one_is_deleted(shard: Shard, one_shard: OneShard, admin: Admin) -> None:
    shard.enqueue_all(*(job() for _ in range(20)))
    served: list[bytes] = []

    def between(arguments: list[Any]) -> None:
        shard.enqueue("other", b"%d" % len(served))
        served.extend(shard.drain("other"))

    one_shard.between = between
    admin.delete_queue(pb.DeleteQueueRequest(queue="q"), Impatient(shard, 0))
    assert served == [b"%d" % number for number in range(15)]


def test_a_deletion_that_waits_goes_on_when_the_last_lease_has_ended(shard: Shard, admin: Admin) -> None:
    shard.enqueue()
    shard.reserve_one(lease_ms=40_000)
    answer = admin.delete_queue(pb.DeleteQueueRequest(queue="q", wait=True), Impatient(shard, 80))
    assert answer.removed_jobs == 1
    assert shard.machine.counts() == {}


def test_a_deletion_whose_caller_goes_away_stops_and_the_queue_opens_again(shard: Shard, admin: Admin) -> None:
    shard.enqueue()
    shard.reserve_one(lease_ms=100_000)
    with pytest.raises(Refused):
        admin.delete_queue(pb.DeleteQueueRequest(queue="q", wait=True), Impatient(shard, 2))
    assert shard.enqueue() == [Outcome.QUEUE_CLOSING]
    shard.pass_time(CLOSING_MS)
    assert isinstance(shard.enqueue(), bytes)


def test_requeueing_a_queue_takes_priority_and_attempts_from_the_jobs(shard: Shard, admin: Admin) -> None:
    keeps_dead_letters(shard)
    bury(shard, body=body_of(b"low", priority=1, max_attempts=1), priority=1, max_attempts=1)
    bury(shard, body=body_of(b"high", priority=8, max_attempts=4), priority=8, max_attempts=4)
    answer = admin.requeue_dead_letters(pb.DeadLetterSelection(queue="q"))
    assert answer == pb.RequeueDeadLettersResponse(requeued=2)
    high, low = shard.reserve(max_jobs=2)
    assert Job.FromString(high.body).payload.data == b"high"
    assert shard.nack(high) == [0, False]
    assert shard.nack(low) == [0, True]


@pytest.mark.usefixtures("small_steps")
def test_a_job_that_dies_again_while_its_queue_is_requeued_is_not_requeued_again(
    shard: Shard, one_shard: OneShard, admin: Admin
) -> None:
    keeps_dead_letters(shard)
    for _ in range(5):
        bury(shard, body=body_of())

    def between(arguments: list[Any]) -> None:
        shard.pass_time(1)
        for leased in shard.reserve(max_jobs=9):
            shard.nack(leased, Strategy.DEAD_LETTER)

    one_shard.between = between
    assert admin.requeue_dead_letters(pb.DeadLetterSelection(queue="q")).requeued == 5


def test_dead_letters_by_id_leave_the_others_and_name_what_is_missing(shard: Shard, admin: Admin) -> None:
    keeps_dead_letters(shard)
    first, second, third = (job_ids.text(bury(shard, body=body_of())) for _ in range(3))
    ready = job_ids.text(shard.enqueue(body=body_of()))
    nobody = job_ids.text(bytes(16))
    answer = admin.delete_dead_letters(pb.DeadLetterSelection(job_ids=[second, ready, nobody]))
    assert answer == pb.DeleteDeadLettersResponse(deleted=1, missing_job_ids=[ready, nobody])
    requeued = admin.requeue_dead_letters(pb.DeadLetterSelection(job_ids=[third, second]))
    assert requeued == pb.RequeueDeadLettersResponse(requeued=1, missing_job_ids=[second])
    assert [row.job_id for row in listed(shard, JobState.DEAD)] == [job_ids.parse(first)]


@pytest.mark.parametrize(
    "selection",
    [pb.DeadLetterSelection(), pb.DeadLetterSelection(queue="q", job_ids=["a"]), pb.DeadLetterSelection(job_ids=["a"])],
)
def test_a_selection_that_makes_no_sense_is_refused(
    shard: Shard, admin: Admin, selection: pb.DeadLetterSelection
) -> None:
    with pytest.raises(Refused) as refused:
        admin.requeue_dead_letters(selection)
    assert refused.value.status == Status.INVALID_ARGUMENT


@pytest.mark.usefixtures("small_steps")
def test_a_list_is_filled_over_several_steps_and_payloads_are_cut_in_it(shard: Shard, admin: Admin) -> None:
    shard.enqueue_all(*(job(body=body_of(b"x" * 1_000)) for _ in range(5)))
    answer = admin.list_jobs(pb.ListJobsRequest(queue="q", state=pb.JOB_STATE_READY, limit=3))
    assert [(len(one.job.payload.data), one.payload_bytes) for one in answer.jobs] == [(PREVIEW_BYTES, 1_000)] * 3
    rest = admin.list_jobs(pb.ListJobsRequest(queue="q", state=pb.JOB_STATE_READY, cursor=answer.cursor))
    assert (len(rest.jobs), rest.cursor) == (2, b"")
    whole = admin.show_job(pb.ShowJobRequest(job_id=rest.jobs[1].job.id))
    assert whole.job.payload.data == b"x" * 1_000


def test_a_page_ends_when_it_is_large(shard: Shard, admin: Admin) -> None:
    custom = {f"key-{number}": {"string_value": "x" * 200} for number in range(60)}
    body = Job(queue="q", job_type="t", custom=custom).SerializeToString()
    shard.enqueue_all(*(job(body=body) for _ in range(200)))
    answer = admin.list_jobs(pb.ListJobsRequest(queue="q", state=pb.JOB_STATE_READY, limit=1_000))
    assert 1024 * 1024 <= answer.ByteSize() < 3 * 1024 * 1024
    assert answer.cursor != b""


def test_an_operation_of_nobody_reaches_the_shard_and_its_result_comes_back(router: RouterDriver) -> None:
    found: list[tuple[int, Any]] = []
    router.core.ask(1, [Op.ADMIN, "queue", "q"], lambda *result: found.append(result), router.now)
    operation = router.shards[1].operation()
    assert operation[1:] == [Op.ADMIN, "queue", "q"]
    router.shards[1].answer(operation, "data", 5)
    assert found == [(5, "data")]


@pytest.mark.parametrize("when", ["before", "unsent", "sent"])
def test_an_operation_of_nobody_is_unavailable_when_its_shard_is_or_goes_down(router: RouterDriver, when: str) -> None:
    found: list[int] = []
    if when == "before":
        router.shards[0].down()
    if when == "unsent":  # both envelopes are out, so it waits for its turn
        for _ in range(2):
            router.core.ask(0, [Op.ADMIN, "totals", b""], lambda *result: None, router.now)
    router.core.ask(0, [Op.ADMIN, "totals", b""], lambda status, _: found.append(status), router.now)
    if when != "before":
        assert found == []
        router.shards[0].down()
    assert found == [Status.UNAVAILABLE]


class RouterWithDeadLetters:
    """A router that has so many dead letters, and notes what becomes of its answers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[int] = []
        self.left: list[bool] = []

    def ask(self, shard: int, arguments: list[Any], done: Callable[[int, Any], None]) -> None:
        raise AssertionError("no queue is named")

    def slot_map(self) -> SlotMap:
        return SlotMap.even(1)

    def begin_move(self, slots: list[int], target: int, bytes_per_second: int, done: Callable[..., None]) -> None:
        raise AssertionError("nothing is moved")

    def set_shards(self, shards: int, done: Callable[..., None]) -> None:
        raise AssertionError("nothing is changed")

    def call_trusted(self, call: Call) -> None:
        request = DrainDeadLettersRequest.FromString(call.request)
        self.asked.append(request.max)
        count = min(self.count, request.max)
        self.count -= count
        call.reply(DrainDeadLettersResponse(records=[DeadLetterRecord()] * count).SerializeToString())

    def call_closed(self, call: Call) -> None:
        raise AssertionError("it was answered")

    def answer_left(self, call: Call, left: bool) -> None:
        self.left.append(left)


class OpenContext:
    """A call that goes on."""

    def abort(self, code: object, text: str) -> None:
        raise AssertionError(text)


@pytest.mark.parametrize(("wanted", "asked"), [(0, [256, 256, 256]), (300, [256, 44]), (2, [2])])
def test_a_drain_goes_on_batch_by_batch_until_it_has_what_was_asked_for(
    tmp_path: Path, wanted: int, asked: list[int]
) -> None:
    router = RouterWithDeadLetters(500)
    service = AdminService(tmp_path, router)
    answers = list(service._drain(pb.DrainDeadLettersRequest(max=wanted), OpenContext()))
    assert router.asked == asked
    assert sum(len(DrainDeadLettersResponse.FromString(answer).records) for answer in answers) == (wanted or 500)
    assert router.left == [True] * len(asked)


def test_a_drain_whose_caller_goes_away_gives_its_last_answer_back(tmp_path: Path) -> None:
    router = RouterWithDeadLetters(500)
    service = AdminService(tmp_path, router)
    drain = service._drain(pb.DrainDeadLettersRequest(), OpenContext())
    next(drain)
    assert router.left == []
    next(drain)
    assert router.left == [True]
    drain.close()
    assert router.left == [True, False]
