"""Stops, restarts, clocks and failed writes: field cases 9 to 12, and storage that fails under a running server.

Parts of these cases have tests of their own elsewhere, which are not repeated here:

    9   polls and calls under way         test_a_stop_under_load_keeps_every_ok_and_answers_every_parked_poll
        what a cancelled poll may have had  test_a_stop_leaves_ready_what_a_cancelled_poll_might_have_had
    10  the holder acks after a kill        test_leases_run_on_over_a_kill
        a lease that ends meanwhile         test_a_lease_that_ends_while_the_server_is_away_makes_the_job_ready
        in given time                       test_a_restart_frees_no_live_lease
                                            test_a_restart_shifts_no_due_time
                                            test_what_fell_due_while_the_shard_was_down_is_ready_at_its_start
        a wall clock that is an hour off    test_a_wall_clock_that_steps_forward_frees_no_lease
                                            test_a_wall_clock_that_steps_back_freezes_no_lease
                                            test_a_wall_clock_set_back_during_a_restart_prolongs_no_lease_beyond_its_length
    11  deliveries over kills               test_a_job_is_delivered_as_often_as_it_has_attempts_over_kills
        in given time                       test_a_lease_that_expires_on_the_last_attempt_ends_the_job_without_a_reserve
                                            test_a_last_attempt_that_ran_out_while_the_shard_was_down_is_a_dead_letter
    12  a crash between two promotions      test_jobs_that_fall_due_together_are_promoted_once_over_a_restart
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sepp import EnqueueRequest, Job, Payload, SeppClient
from sepp.errors import ClientError, JobNotFoundError, ServerInternalError

from shard.machine import TICK_LIMIT
from tests.integration.clients import LEASE, LONG_WAIT, connected, job, park, reserve, reserve_one, settled, texts
from tests.integration.conftest import StartServer
from tests.integration.server import WAIT_S, Entry, Server
from tests.unit.shard_driver import WALL_START_MS, MemoryHome, RocksHome, Shard
from tests.unit.shard_driver import job as stored_job

SHARDS = pytest.mark.parametrize("shards", [1, 4], ids=["1-shard", "4-shards"])
KEEP_DEAD_LETTERS = {"SEPP_STORAGE__DEAD_LETTER_RETENTION_MS": "3600000"}
PARKED = 500
UNDER_WAY = 50
# The case speaks of half a million jobs; these take two seconds, and are promoted in 98 parts.
DUE_IN_GIVEN_TIME = 25_000
# On a real server: promoted in 20 parts, which is long enough to be killed in between.
DUE_AT_ONCE = 5_000
BATCH = 250


def queues_of(server: Server) -> list[str]:
    """A queue on each shard."""
    assert server.shards is not None
    return [server.queue_on(index) for index in range(server.shards)]


async def drained(client: SeppClient, *queues: str) -> Counter[str]:
    """Text of every job that is ready, each acked."""
    found: Counter[str] = Counter()
    while jobs := await reserve(client, *queues, max_jobs=256):
        found.update(texts(jobs))
        await asyncio.gather(*[client.ack(one.ctx) for one in jobs])
    return found


# -- 9: an orderly stop ---------------------------------------------------------------------------


@SHARDS
async def test_a_stop_while_the_disk_hangs_keeps_every_ok_and_leases_nothing_to_a_poll_that_was_told_otherwise(
    new_server: StartServer, shards: int
) -> None:
    server = new_server(shards=shards).start()
    queues, empty = queues_of(server), queues_of(server)
    async with AsyncExitStack() as stack:
        pollers = [await stack.enter_async_context(connected(server.address)) for _ in range(5)]
        client = await stack.enter_async_context(connected(server.address))
        held: list[Job] = []
        for number in range(UNDER_WAY):
            await client.enqueue(job(queues[number % shards], f"held {number}"))
        while len(held) < UNDER_WAY:
            held += await reserve(client, *queues, max_jobs=UNDER_WAY)
        firsts = [await park(poller, *empty) for poller in pollers]
        polls = [asyncio.create_task(reserve(pollers[n % 5], *empty, wait=LONG_WAIT)) for n in range(PARKED - 5)]
        await asyncio.sleep(0)  # they start their calls
        for poller in pollers:
            await poller.get_server_info()  # behind the polls on the same connection
        for shard in range(shards):  # nothing is written and nothing answered, as by a disk that hangs
            await asyncio.to_thread(server.pause, f"shard-{shard}")
        enqueues = [asyncio.create_task(client.enqueue(job(queues[n % shards], f"new {n}"))) for n in range(UNDER_WAY)]
        acks = [asyncio.create_task(client.ack(one.ctx)) for one in held]
        await asyncio.sleep(0)
        await client.get_server_info()
        server.terminate()
        await asyncio.to_thread(server.log.wait_for, lambda entry: entry.get("event") == "stopping")
        server.terminate()
        await asyncio.to_thread(server.log.wait_for, lambda entry: entry.get("event") == "already stopping")
        assert not any(call.done() for call in [*enqueues, *acks])
        for shard in range(shards):
            server.resume(f"shard-{shard}")
        assert [await settled(poll) for poll in [*firsts, *polls]] == [[]] * PARKED
        stored = await asyncio.gather(*enqueues, return_exceptions=True)
        acked = await asyncio.gather(*acks, return_exceptions=True)
        assert await asyncio.to_thread(server.exit_status) == 0, server.log.text()
    assert [one for one in [*stored, *acked] if isinstance(one, BaseException)] == []
    server.restart()
    async with connected(server.address) as client:
        assert await drained(client, *queues, *empty) == Counter(f"new {number}" for number in range(UNDER_WAY))


# -- 10: what goes on over a restart --------------------------------------------------------------


@SHARDS
async def test_a_restart_shifts_no_due_time_and_forgets_none_that_fell_due_meanwhile(
    new_server: StartServer, shards: int
) -> None:
    server = new_server(shards=shards).start()
    queues = queues_of(server)
    async with connected(server.address) as client:
        meanwhile = datetime.now(UTC) + timedelta(milliseconds=200)
        later = datetime.now(UTC) + timedelta(seconds=2)
        for queue in queues:
            for at, text in ((meanwhile, "meanwhile"), (later, "later"), (later + timedelta(hours=1), "far")):
                await client.enqueue(EnqueueRequest(queue, "letter", Payload(text.encode(), "text"), scheduled_at=at))
    assert await asyncio.to_thread(server.stop) == 0
    server.restart()
    async with connected(server.address) as client:
        dues = {"meanwhile": meanwhile, "later": later}
        found = [await reserve_one(client, *queues) for _ in range(2 * len(queues))]
        assert Counter(texts(found)) == Counter([*dues] * len(queues))
        assert found[-1].ctx.scheduled_at is not None
        assert datetime.now(UTC) >= later
        assert await reserve(client, *queues) == []


# -- 11: the last attempt -------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [False, True], ids=["server-lives", "server-is-killed"])
async def test_a_job_whose_last_worker_dies_becomes_a_dead_letter_though_nobody_reserves(
    new_server: StartServer, killed: bool
) -> None:
    server = new_server(settings=KEEP_DEAD_LETTERS).start()
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        ack = await client.enqueue(EnqueueRequest(queue, "letter", max_attempts=2))
        assert (await reserve_one(client, queue, lease=timedelta(milliseconds=1))).ctx.attempt == 1
        assert (await reserve_one(client, queue, lease=timedelta(milliseconds=300))).ctx.attempt == 2
    if killed:
        await asyncio.to_thread(server.kill_all)
        server.restart()
    async with connected(server.address) as client, asyncio.timeout(WAIT_S):
        while not (letters := await client.drain_dead_letters(queue, 10)):
            await asyncio.sleep(0.02)  # nobody is told of a dead letter
        assert [(letter.job_id, letter.final_attempt) for letter in letters] == [(ack.job_id, 2)]
        assert await reserve(client, queue) == []


# -- 12: many jobs due at one instant -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "rocks"])
def test_jobs_due_at_one_instant_are_promoted_once_each_over_a_crash_and_calls_go_on_between(
    kind: str, tmp_path: Path
) -> None:
    shard = Shard(MemoryHome() if kind == "memory" else RocksHome(tmp_path / "shard"))
    shard.syncs = kind == "memory"  # a store that buffers is closed in order by a restart
    due_ms = WALL_START_MS + 60_000
    for first in range(0, DUE_IN_GIVEN_TIME, BATCH):
        shard.enqueue_all(*[stored_job(body=b"%d" % number, due_ms=due_ms) for number in range(first, first + BATCH)])
    shard.wall_ms, shard.mono_ms = due_ms, shard.mono_ms + 60_000
    parts = 0
    while shard.tick():
        parts += 1
        if parts == 50:
            with shard.one_turn():
                shard.tick()
                shard.restart()  # the turn's changes are lost with it
        if parts % 10 == 0:
            shard.enqueue("other", b"call")
            assert shard.drain("other") == [b"call"]
            shard.answers.clear()
    assert parts == DUE_IN_GIVEN_TIME // TICK_LIMIT + 1
    assert shard.counts() == (DUE_IN_GIVEN_TIME, 0, 0, 0)
    shard.check()
    served: list[int] = []
    while jobs := shard.reserve(max_jobs=256):
        served += [int(one.body) for one in jobs]
        with shard.one_turn():
            assert {shard.ack(one) for one in jobs} == {0}
        shard.answers.clear()
    assert served == list(range(DUE_IN_GIVEN_TIME))
    shard.home.store.close()


async def test_jobs_due_at_one_instant_come_once_each_though_their_shard_is_killed_meanwhile(
    new_server: StartServer,
) -> None:
    server = new_server(shards=2).start()
    queue, same, other = server.queue_on(0), server.queue_on(0), server.queue_on(1)
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    async with connected(server.address) as client, connected(server.address) as worker:
        for first in range(0, DUE_AT_ONCE, BATCH):
            await client.enqueue_batch(
                EnqueueRequest(queue, "letter", Payload(b"%d" % number, "text"), scheduled_at=due)
                for number in range(first, first + BATCH)
            )
        early = await reserve_one(worker, queue, lease=timedelta(minutes=5))  # the promotion has begun
        await asyncio.to_thread(server.kill, "shard-0")
        await call_on(client, other)  # while the shard is away
        await asyncio.to_thread(server.wait_until_back, "shard-0")
        await call_on(client, same)
        await client.ack(early.ctx)
        found = await drained(worker, queue)
        while found.total() < DUE_AT_ONCE - 1:
            await call_on(client, same)
            found += await drained(worker, queue)
        expected = Counter(str(number) for number in range(DUE_AT_ONCE))
        assert found + Counter(texts([early])) == expected
        assert await reserve(worker, queue) == []


async def call_on(client: SeppClient, queue: str) -> None:
    """A job through its whole life."""
    ack = await client.enqueue(job(queue))
    found = await reserve_one(client, queue)
    assert found.ctx.id == ack.job_id
    await client.ack(found.ctx)


# -- storage that fails ---------------------------------------------------------------------------


def log_size(server: Server) -> int:
    """Bytes in the log that shard 0 is writing."""
    return max(path.stat().st_size for path in (server.data / "shard-0").rglob("*.log"))


async def test_a_failed_write_is_an_internal_error_and_leaves_the_keys_of_what_failed_usable(
    new_server: StartServer,
) -> None:
    server = new_server(shards=2).start()
    queue, other = server.queue_on(0), server.queue_on(1)
    payload = Payload(bytes(10_000), "raw")

    def numbered(number: int) -> EnqueueRequest:
        return EnqueueRequest(queue, f"type-{number}", payload, idempotency_key=f"key-{number}")

    async with connected(server.address) as client:
        stored: dict[int, str] = {}
        for number in range(20):
            stored[number] = (await client.enqueue(numbered(number))).job_id
        acked = set()
        for _ in range(10):
            found = await reserve_one(client, queue)
            await client.ack(found.ctx)
            acked.add(found.ctx.id)
        held = await reserve_one(client, queue)

        # The process may write no file beyond a few jobs more; its successor has no such limit.
        first = server.pid_of("shard-0")

        def is_successor(entry: Entry) -> bool:
            return entry.get("event") == "child is ready" and entry["child"] == "shard-0" and entry["pid"] != first

        room = log_size(server) + 50_000
        resource.prlimit(first, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        numbers = range(20, 80)
        outcomes = await asyncio.gather(*[client.enqueue(numbered(n)) for n in numbers], return_exceptions=True)
        failed = {n: one for n, one in zip(numbers, outcomes, strict=True) if isinstance(one, BaseException)}
        stored |= {
            n: one.job_id for n, one in zip(numbers, outcomes, strict=True) if not isinstance(one, BaseException)
        }
        assert any(isinstance(error, ServerInternalError) for error in failed.values()), failed
        assert all(isinstance(error, ClientError) for error in failed.values()), failed
        failure = "storage failed, the shard stops and starts again from disk"
        await asyncio.to_thread(server.log.wait_for, lambda entry: entry.get("event") == failure)
        await call_on(client, other)
        await asyncio.to_thread(server.log.wait_for, is_successor)
        await call_on(client, server.queue_on(0))

        for number in failed:
            again = await client.enqueue(numbered(number))
            # What failed may have been stored or not; either way there is one job now, under this id.
            assert again.job_id not in stored.values()
            stored[number] = again.job_id
        for number, job_id in stored.items():
            again = await client.enqueue(numbered(number))
            assert (again.job_id, again.deduplicated) == (job_id, True)
        await client.ack(held.ctx)  # its lease stands
        left: Counter[tuple[str, str]] = Counter()
        while jobs := await reserve(client, queue, max_jobs=256, lease=LEASE):
            left.update((one.ctx.id, one.ctx.job_type) for one in jobs)
            for one in jobs:
                await client.ack(one.ctx)
                with pytest.raises(JobNotFoundError):
                    await client.ack(one.ctx)
        expected = {(job_id, f"type-{number}") for number, job_id in stored.items()}
        assert left == Counter({each for each in expected if each[0] not in acked | {held.ctx.id}})
    assert await asyncio.to_thread(server.stop) == 0
