"""Names that are almost the same, names that nobody has used, and numbers that must add up: field cases 25 and 26.

Parts of these cases have tests of their own elsewhere, which are not repeated here:

    25  in given time, every record    test_names_that_look_alike_are_different_queues
                                       test_queues_of_one_slot_keep_their_jobs_apart
                                       test_asking_for_an_unknown_queue_stores_nothing
    26  after any steps, in memory     every test that takes the fixture `shard` ends with a full scan
        the counters of a restart      test_a_restart_changes_no_counter
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import pytest
from sepp import EnqueueRequest, RetryDirective

from common.admin_client import AdminClient
from shard.store_rocks import RocksStore, StoreOptions
from tests.faults.stream import Stream
from tests.integration.clients import LEASE, NO_WAIT, connected, job, reserve, reserve_one, texts, until
from tests.integration.conftest import StartServer
from tests.integration.server import Server
from tests.unit.shard_driver import Counts, recount

SHARDS = pytest.mark.parametrize("shards", [1, 4], ids=["1-shard", "4-shards"])
KEEP_DEAD_LETTERS = {"SEPP_STORAGE__DEAD_LETTER_RETENTION_MS": "3600000"}
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
ALIKE = [
    "q",
    "qq",
    "Q",
    "q ",
    " q",
    "q:",
    "q:1",
    "q|1",
    "q,1",
    "q.1",
    "q-1",
    "q\\1",
    "q%2F1",
    "q*",
    "q#",
    "q\u00e9",
    "qe\u0301",
    "qe",
    "q\u200b",
    "q\ufeff",
    "q\ufb01",
    "qfi",
    "\U0001f468",
    FAMILY,
    f"q{FAMILY}",
    "q" * 100,
    "q" * 101,
]


@pytest.fixture(scope="module", params=[1, 4], ids=["1-shard", "4-shards"])
def keeping_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server that keeps dead letters; it is not used for anything but names."""
    with Server(shards=request.param, settings=KEEP_DEAD_LETTERS) as running:
        yield running.start()


def counters(server: Server) -> dict[str, Counts]:
    """Ready, scheduled, leased and dead jobs of each queue that has any, as the server tells them."""
    with AdminClient(server.data) as admin:
        rows = {one.name: (one.ready, one.scheduled, one.leased, one.dead) for one in admin.queues()}
    return {name: counts for name, counts in rows.items() if any(counts)}


def scanned(server: Server) -> dict[str, Counts]:
    """The same by a scan of all that the shards of a server which has ended have on their disks."""
    found: dict[str, Counts] = {}
    assert server.shards is not None
    for index in range(server.shards):
        store = RocksStore.open(server.data / f"shard-{index}", StoreOptions())
        try:
            found |= recount(store)
        finally:
            store.close()
    return found


# -- 25: names ------------------------------------------------------------------------------------


@SHARDS
async def test_queues_whose_names_are_alike_never_show_one_anothers_records_before_or_after_a_kill(
    new_server: StartServer, shards: int
) -> None:
    server = new_server(shards=shards, settings=KEEP_DEAD_LETTERS).start()
    far = datetime.now(UTC) + timedelta(hours=1)
    async with connected(server.address) as client:
        acks = await client.enqueue_atomic([job(name, key="dead") for name in ALIKE])
        dead = {name: ack.job_id for name, ack in zip(ALIKE, acks, strict=True)}
        for name in ALIKE:
            found = await reserve_one(client, name)
            assert (found.ctx.id, found.ctx.queue) == (dead[name], name)
            await client.nack(found.ctx, RetryDirective.DEAD_LETTER)
        acks = await client.enqueue_atomic([job(name, name, key="ready") for name in ALIKE])
        ids = {name: ack.job_id for name, ack in zip(ALIKE, acks, strict=True)}
        await client.enqueue_batch([EnqueueRequest(name, "letter", scheduled_at=far) for name in ALIKE])
    assert await asyncio.to_thread(counters, server) == dict.fromkeys(ALIKE, (1, 1, 0, 1))
    await asyncio.to_thread(server.kill_all)
    server.restart()
    async with connected(server.address) as client:
        for name in ALIKE:
            again = await client.enqueue_batch([job(name, key="ready"), job(name, key="dead")])
            assert [getattr(one, "job_id", None) for one in again] == [ids[name], dead[name]]
            (letter,) = await client.drain_dead_letters(name, 100)
            assert (letter.job_id, letter.queue) == (dead[name], name)
            assert texts(await reserve(client, name, max_jobs=100)) == [name]
    assert await asyncio.to_thread(counters, server) == dict.fromkeys(ALIKE, (0, 1, 1, 0))


async def test_asking_for_an_unknown_queue_leaves_no_trace_of_it(keeping_server: Server) -> None:
    assert keeping_server.shards is not None
    names = [keeping_server.queue_on(index) for index in range(keeping_server.shards)]
    async with connected(keeping_server.address) as client:
        assert await reserve(client, *names, wait=timedelta(milliseconds=20)) == []
        for name in names:
            assert await reserve(client, name, wait=NO_WAIT) == []
            assert await client.drain_dead_letters(name, 10) == []

    def listed() -> set[str]:
        with AdminClient(keeping_server.data) as admin:
            return {one.name for one in admin.queues()}

    assert await asyncio.to_thread(listed) & set(names) == set()


# -- 26: numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "end"), [(1, "stopped"), (4, "killed")])
async def test_counters_equal_a_full_scan_at_rest_after_streams_kills_and_every_kind_of_end(
    new_server: StartServer, shards: int, end: str
) -> None:
    server = new_server(shards=shards, routers=2, settings=KEEP_DEAD_LETTERS).start()
    queues = [server.queue_on(index) for index in range(shards)]
    streamed = [server.queue_on(index) for index in range(shards)]
    far = datetime.now(UTC) + timedelta(hours=1)
    stream = Stream(*streamed)
    async with AsyncExitStack() as stack:
        client, producer, worker = [await stack.enter_async_context(connected(server.address)) for _ in range(3)]
        for queue in streamed * 2:
            stream.produce(producer, queue)
        stream.work(worker, *streamed)
        await stream.until(lambda: len(stream.acked) >= 30)
        await asyncio.to_thread(server.kill, "shard-0")
        await asyncio.to_thread(server.wait_until_back, "shard-0")
        aim = len(stream.acked) + 30
        await stream.until(lambda: len(stream.acked) >= aim)
        await stream.end()

        for number, queue in enumerate(queues):
            await client.enqueue_atomic([job(each, key=f"{number}") for each in queues])
            await client.enqueue_batch([job(queue, key="twice"), job(queue, key="twice"), *[job(queue)] * 7])
            await client.enqueue(EnqueueRequest(queue, "letter", scheduled_at=far))
        for queue in queues:
            late, acked, again, delayed, dead, held = [(await reserve_one(client, queue)).ctx for _ in range(6)]
            await client.extend(late, timedelta(milliseconds=1))
            again_first = await reserve_one(client, queue)
            assert again_first.ctx.id == late.id  # it comes again in its place, before all others
            await client.ack(acked)
            await client.nack(again)
            await client.nack(delayed, RetryDirective.after(timedelta(hours=1)))
            await client.nack(dead, RetryDirective.DEAD_LETTER)
            await client.extend(held, LEASE)
        assert (await client.drain_dead_letters(queues[0], 1))[0].queue == queues[0]
    # Each queue was given one job with every atomic batch and eight besides; two are on the way, one
    # is acked, one dead, and one waits for its delay beside the one that was scheduled.
    expected = {queue: (shards + 8 - 5, 2, 2, 1 if queue != queues[0] else 0) for queue in queues}

    # A drained dead letter is deleted when its answer has left, which is after the client has it.
    def told() -> dict[str, Counts]:
        return {queue: counts for queue, counts in counters(server).items() if queue in queues}

    await until(lambda: told() == expected)
    if end == "stopped":
        assert await asyncio.to_thread(server.stop) == 0
    else:
        await asyncio.to_thread(server.kill_all)
    # The scan compares every queue with the counters that are stored with it, those of the stream too.
    found = await asyncio.to_thread(scanned, server)
    assert {queue: found[queue] for queue in queues} == expected
    server.restart()
    assert {queue: each for queue, each in counters(server).items() if queue in queues} == expected
