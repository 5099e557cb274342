"""Queues that move to another shard, on real servers: what was before the move is what is after it."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from datetime import timedelta

import pytest
from sepp import EnqueueRequest, JobNotFoundError, Payload, RetryDirective, SeppClient

from common.admin_client import AdminClient, AdminUnavailableError
from common.slots import slot_of
from tests.integration.clients import LONG_WAIT, connected, job, reserve, reserve_one, texts
from tests.integration.conftest import StartServer
from tests.integration.server import ROOT, Entry, Server

KEEP_DEAD_LETTERS = {"SEPP_STORAGE__DEAD_LETTER_RETENTION_MS": "86400000"}


async def move(server: Server, queue: str, shard: int) -> None:
    """Until it is there: right after a start a shard may be down."""

    def moved() -> None:
        with AdminClient(server.data) as admin:
            admin.move_slots([slot_of(queue)], shard, 0)

    await asyncio.to_thread(moved)


async def findings(server: Server) -> list[str]:
    def found() -> list[str]:
        with AdminClient(server.data) as admin:
            return [each for shard in range(2) for step in admin.verify_shard(shard) for each in step.findings]

    return await asyncio.to_thread(found)


async def test_a_queue_that_moves_back_and_forth_keeps_all_and_brings_back_nothing(new_server: StartServer) -> None:
    server = new_server(shards=2, settings=KEEP_DEAD_LETTERS).start()
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        for name in ("acked", "held", "dead", "again"):
            await client.enqueue(job(queue, name, key=name))
        acked, held, dead, again = [await reserve_one(client, queue) for _ in range(4)]
        await client.ack(acked.ctx)
        await client.nack(dead.ctx, RetryDirective.DEAD_LETTER, "broken")
        await client.nack(again.ctx, RetryDirective.after(timedelta(0)))
        for number in range(9):
            await client.enqueue(job(queue, f"{number % 3}-{number}", priority=number % 3))
        for shard in (1, 0, 1, 0, 1):
            await move(server, queue, shard)
            assert await findings(server) == []

        duplicate = await client.enqueue(job(queue, "acked", key="acked"))
        assert (duplicate.job_id, duplicate.deduplicated) == (acked.ctx.id, True)
        with pytest.raises(JobNotFoundError):
            await client.ack(acked.ctx)
        await client.extend(held.ctx, timedelta(minutes=1))
        await client.ack(held.ctx)
        left = await reserve(client, queue, max_jobs=20)
        # The highest priority first; the retried job has that of jobs for which none was asked.
        by_priority = [one for one in texts(left) if one != "again"]
        assert by_priority == ["2-2", "2-5", "2-8", "1-1", "1-4", "1-7", "0-0", "0-3", "0-6"]
        assert [one.ctx.attempt for one in left if texts([one]) == ["again"]] == [2]
        (letter,) = await client.drain_dead_letters(queue)
        assert (letter.job_id, letter.last_reason) == (dead.ctx.id, "broken")


async def test_a_poll_that_waits_on_an_empty_queue_gets_the_job_that_comes_after_the_move(
    new_server: StartServer,
) -> None:
    server = new_server(shards=2).start()
    queue, other = server.queue_on(0), server.queue_on(1)
    async with connected(server.address) as client:
        await client.enqueue(job(queue, "first"))
        await client.ack((await reserve_one(client, queue)).ctx)
        polls = [
            asyncio.create_task(reserve_one(client, *queues)) for queues in ([queue], [other, queue], [queue, other])
        ]
        await asyncio.sleep(0)
        await move(server, queue, 1)
        for number in range(3):
            await client.enqueue(job(queue, str(number)))
        assert sorted(texts([await poll for poll in polls])) == ["0", "1", "2"]
        # And one that is parked where the queue has come from: it hears of what is on the other shard alone.
        poll = asyncio.create_task(reserve_one(client, queue, other, wait=LONG_WAIT))
        await asyncio.sleep(0)
        await move(server, other, 0)
        await client.enqueue(job(other, "late"))
        assert texts([await poll]) == ["late"]


async def fill(client: SeppClient, queue: str, jobs: int) -> set[str]:
    payload = Payload(bytes(10_000), "raw")
    acks = await client.enqueue_batch([EnqueueRequest(queue, "large", payload) for _ in range(jobs)])
    return {ack.job_id for ack in acks}


async def test_a_target_that_cannot_write_any_more_leaves_the_queue_where_it_is(new_server: StartServer) -> None:
    server = new_server(shards=2).start()
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        stored = await fill(client, queue, 200)
        target = server.pid_of("shard-1")
        log_size = max(path.stat().st_size for path in (server.data / "shard-1").rglob("*.log"))
        resource.prlimit(target, resource.RLIMIT_FSIZE, (log_size + 500_000, resource.RLIM_INFINITY))
        with pytest.raises(AdminUnavailableError, match="the slots were not moved"):
            await move(server, queue, 1)

        def is_successor(entry: Entry) -> bool:
            return entry.get("event") == "child is ready" and entry["child"] == "shard-1" and entry["pid"] != target

        first = await reserve_one(client, queue)  # the source serves on
        await client.ack(first.ctx)
        await asyncio.to_thread(server.log.wait_for, is_successor)
        assert await findings(server) == []
        await move(server, queue, 1)
        assert await findings(server) == []
        left = set()
        while jobs := await reserve(client, queue, max_jobs=100):
            left |= {one.ctx.id for one in jobs}
        assert left == stored - {first.ctx.id}


async def test_a_lease_of_before_a_move_and_a_crash_is_still_one(new_server: StartServer) -> None:
    server = new_server(shards=2).start()
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        await client.enqueue(job(queue, "one"))
        held = await reserve_one(client, queue)
        await move(server, queue, 1)
    await asyncio.to_thread(server.kill_all)
    await asyncio.to_thread(server.restart)
    async with connected(server.address) as client:
        assert await reserve(client, queue) == []
        await client.ack(held.ctx)
        with pytest.raises(JobNotFoundError):
            await client.ack(held.ctx)
    assert await findings(server) == []


def test_shards_come_and_go_under_a_load_and_every_job_comes_once_and_in_order() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "reshard.py"), "--json"]
    options = ["--jobs", "600", "--queues", "12", "--clients", "3", "--shards", "2,3,2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["wrong"], told["verify"]["findings"]) == ([], 0)
    assert [step["shards"] for step in told["steps"]] == [3, 2]
