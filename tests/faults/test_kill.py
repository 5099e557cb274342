"""SIGKILL, SIGSTOP and SIGTERM for the whole server and for its parts, under load: what was answered holds."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

import grpc.aio
import pytest
from sepp import EnqueueRequest, Job, RetryPolicy, SeppClient
from sepp.errors import ClientError, JobNotFoundError, TransportError

from tests.faults.stream import LEASE, Stream
from tests.integration.clients import connected, job, park, reserve, reserve_one, settled, texts
from tests.integration.conftest import StartServer
from tests.integration.server import Server, wait_until_gone

SHARDS = pytest.mark.parametrize("shards", [1, 4], ids=["1-shard", "4-shards"])
# How many answers a stream has to get before something is killed, and again after it.
SOME = 40
PARKED = 200
# Until a client gives up on a server whose parts come back: a minute.
PATIENT = RetryPolicy(max_attempts=120, initial_backoff=timedelta(milliseconds=50), max_backoff=timedelta(seconds=0.5))


def queues_of(server: Server) -> list[str]:
    """A queue on each shard."""
    assert server.shards is not None
    return [server.queue_on(shard) for shard in range(server.shards)]


async def clients(stack: AsyncExitStack, server: Server, number: int) -> list[SeppClient]:
    return [await stack.enter_async_context(connected(server.address)) for _ in range(number)]


async def client_at(
    stack: AsyncExitStack, server: Server, router: str, policy: RetryPolicy | None = None
) -> SeppClient:
    """A client whose connection is served by a certain router."""
    while True:
        before = server.connections()
        client = await stack.enter_async_context(connected(server.address))
        await client.get_server_info()  # the router has accepted it
        (mine,) = server.connections().items() - before.items()
        if mine[1] == router:
            return client


# -- the whole server -----------------------------------------------------------------------------


@SHARDS
async def test_a_killed_server_has_lost_nothing_and_brings_nothing_back(new_server: StartServer, shards: int) -> None:
    server = new_server(shards=shards, routers=min(shards, 2)).start()
    queues = queues_of(server)
    stream = Stream(*queues)
    for _ in range(2):
        async with AsyncExitStack() as stack:
            first, second, third = await clients(stack, server, 3)
            for number, queue in enumerate(queues * 4):
                stream.produce((first, second)[number % 2], queue)
            for _ in range(3):
                stream.work(third, *queues)
            aim = len(stream.acked) + SOME
            await stream.until(lambda: len(stream.acked) >= aim)  # noqa: B023
            await asyncio.to_thread(server.kill_all)
            await stream.end()
        await asyncio.to_thread(server.restart)
    async with connected(server.address) as client:
        await stream.settle(client)


@SHARDS
async def test_leases_run_on_over_a_kill(new_server: StartServer, shards: int) -> None:
    server = new_server(shards=shards).start()
    queues = queues_of(server)
    async with connected(server.address) as client:
        for queue in queues:
            await client.enqueue(job(queue))
        held = await reserve(client, *queues, max_jobs=len(queues))
    await asyncio.to_thread(server.kill_all)
    server.restart()
    async with connected(server.address) as client:
        assert await reserve(client, *queues) == []
        assert await client.extend(held[0].ctx, timedelta(minutes=2)) > held[0].ctx.lease_expires_at
        for one in held:
            await client.ack(one.ctx)
        for one in held:
            with pytest.raises(JobNotFoundError):
                await client.ack(one.ctx)


async def test_a_lease_that_ends_while_the_server_is_away_makes_the_job_ready(new_server: StartServer) -> None:
    server = new_server().start()
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        ack = await client.enqueue(job(queue))
        await reserve_one(client, queue, lease=timedelta(milliseconds=100))
    await asyncio.to_thread(server.kill_all)
    server.restart()
    async with connected(server.address) as client:
        again = await reserve_one(client, queue)
        assert (again.ctx.id, again.ctx.attempt) == (ack.job_id, 2)


async def test_an_idempotency_key_outlives_a_kill(new_server: StartServer) -> None:
    server = new_server().start()
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        first = await client.enqueue(job(queue, key="order-1"))
    await asyncio.to_thread(server.kill_all)
    server.restart()
    async with connected(server.address) as client:
        again = await client.enqueue(job(queue, key="order-1"))
        assert (again.job_id, again.deduplicated) == (first.job_id, True)


async def test_children_end_with_a_killed_supervisor_and_a_new_server_has_their_jobs(new_server: StartServer) -> None:
    server = new_server(shards=2, routers=2).start()
    queues = queues_of(server)
    stream = Stream(*queues)
    async with AsyncExitStack() as stack:
        producer, worker = await clients(stack, server, 2)
        for queue in queues * 2:
            stream.produce(producer, queue)
        stream.work(worker, *queues)
        await stream.until(lambda: len(stream.acked) >= SOME)
        everybody = server.processes()
        assert len(everybody) == 5
        await asyncio.to_thread(server.kill_supervisor)
        for pid in everybody:
            await asyncio.to_thread(wait_until_gone, pid)
        await stream.end()
    server.restart()
    async with connected(server.address) as client:
        await stream.settle(client)


async def test_a_job_is_delivered_as_often_as_it_has_attempts_over_kills(new_server: StartServer) -> None:
    server = new_server().start()
    queue = server.queue_on(0)
    short = timedelta(milliseconds=100)
    async with connected(server.address) as client:
        await client.enqueue(EnqueueRequest(queue, "letter", max_attempts=3))
        assert (await reserve_one(client, queue, lease=short)).ctx.attempt == 1
    for attempt in (2, 3):
        await asyncio.to_thread(server.kill_all)
        server.restart()
        async with connected(server.address) as client:
            assert (await reserve_one(client, queue, lease=short)).ctx.attempt == attempt
    await asyncio.to_thread(server.kill_all)
    server.restart()
    async with connected(server.address) as client:
        assert await reserve(client, queue, wait=3 * short) == []


# -- a shard --------------------------------------------------------------------------------------


async def test_the_other_shards_serve_while_one_hangs_and_is_killed(new_server: StartServer) -> None:
    server = new_server(shards=4, routers=2).start()
    queues = queues_of(server)
    stream = Stream(*queues)
    async with AsyncExitStack() as stack:
        producer, worker = await clients(stack, server, 2)
        for queue in queues:
            stream.produce(producer, queue)
            stream.work(worker, queue)
        await stream.until(lambda: min(stream.acks[queue] for queue in queues) >= SOME)

        server.pause("shard-0")
        at_pause = stream.acks.copy()
        await stream.until(lambda: min(stream.acks[queue] - at_pause[queue] for queue in queues[1:]) >= SOME)
        await asyncio.to_thread(server.kill, "shard-0")
        at_kill = stream.acks.copy()
        await stream.until(lambda: min(stream.acks[queue] - at_kill[queue] for queue in queues[1:]) >= SOME)
        await asyncio.to_thread(server.wait_until_back, "shard-0")
        await stream.until(lambda: stream.acks[queues[0]] - at_kill[queues[0]] >= SOME)
        await stream.end()
        await stream.settle(worker)
    assert await asyncio.to_thread(server.stop) == 0


async def test_a_shard_may_be_killed_again_and_again(new_server: StartServer) -> None:
    server = new_server(shards=1, routers=2).start()
    queue = server.queue_on(0)
    stream = Stream(queue)
    async with AsyncExitStack() as stack:
        both = await clients(stack, server, 2)
        for client in both * 2:
            stream.produce(client, queue)
            stream.work(client, queue)
        for _ in range(3):
            aim = len(stream.acked) + SOME
            await stream.until(lambda: len(stream.acked) >= aim)  # noqa: B023
            await asyncio.to_thread(server.kill, "shard-0")
        await stream.end()
        await asyncio.to_thread(server.wait_until_back, "shard-0")
        await stream.settle(both[0])


@pytest.mark.parametrize("spread", [False, True], ids=["one-shard", "two-shards"])
async def test_a_poll_outlives_the_shard_it_is_parked_on(new_server: StartServer, spread: bool) -> None:
    server = new_server(shards=2).start()
    queues = queues_of(server) if spread else [server.queue_on(0)]
    async with AsyncExitStack() as stack:
        worker, producer = await clients(stack, server, 2)
        poll = await park(worker, *queues)
        await asyncio.to_thread(server.kill, "shard-0")
        await asyncio.to_thread(server.wait_until_back, "shard-0")
        ack = await producer.enqueue(job(queues[0]))
        (found,) = await settled(poll)
        assert (found.ctx.id, found.ctx.attempt) == (ack.job_id, 1)
        await worker.ack(found.ctx)


async def test_an_enqueue_waits_for_a_shard_that_is_down(new_server: StartServer) -> None:
    server = new_server(shards=2).start()
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        # Killed more than once, it is away for a while: it starts again with growing delays.
        for _ in range(3):
            await asyncio.to_thread(server.kill, "shard-0")
        while True:
            try:
                ack = await client.enqueue(job(queue))
                break
            except TransportError as error:  # the router had not heard of the end yet
                assert isinstance(error.__cause__, grpc.aio.AioRpcError)
                assert error.__cause__.code() == grpc.StatusCode.ABORTED
        await asyncio.to_thread(server.wait_until_back, "shard-0")
        assert (await reserve_one(client, queue)).ctx.id == ack.job_id


async def test_the_holder_of_a_lease_acks_after_its_shard_was_killed(new_server: StartServer) -> None:
    server = new_server(shards=2).start()
    queue = server.queue_on(1)
    async with connected(server.address, PATIENT) as client:
        await client.enqueue(job(queue))
        held = await reserve_one(client, queue)
        await asyncio.to_thread(server.kill, "shard-1")
        await asyncio.to_thread(server.wait_until_back, "shard-1")
        await client.ack(held.ctx)
        assert await reserve(client, queue) == []


# -- a router -------------------------------------------------------------------------------------


async def test_clients_of_a_killed_router_reconnect_and_lose_nothing(new_server: StartServer) -> None:
    server = new_server(shards=2, routers=2).start()
    queues = queues_of(server)
    stream = Stream(*queues)
    async with AsyncExitStack() as stack:
        # Without a retry policy: a client that repeats an ack by itself cannot tell whether it was done.
        theirs = await client_at(stack, server, "router-0")
        others = await client_at(stack, server, "router-1")
        for queue in queues:
            stream.produce(theirs, queue)
            stream.work(theirs, queue)
            stream.work(others, *queues)
        await stream.until(lambda: len(stream.acked) >= SOME)
        await asyncio.to_thread(server.kill, "router-0")
        aim = len(stream.confirmed) + SOME  # only the clients of the killed router enqueue
        await stream.until(lambda: len(stream.confirmed) >= aim)
        await asyncio.to_thread(server.wait_until_back, "router-0")
        await stream.end()
        await stream.settle(others)
    assert await asyncio.to_thread(server.stop) == 0


@pytest.mark.parametrize("spread", [False, True], ids=["one-shard", "two-shards"])
async def test_a_job_that_was_claimed_through_a_router_that_hangs_comes_back_when_it_is_killed(
    new_server: StartServer, spread: bool
) -> None:
    server = new_server(shards=2, routers=2).start()
    queues = queues_of(server) if spread else [server.queue_on(0)]
    async with AsyncExitStack() as stack:
        stuck = await client_at(stack, server, "router-0")
        lively = await client_at(stack, server, "router-1")
        poll = await park(stuck, *queues)
        server.pause("router-0")
        ack = await lively.enqueue(job(queues[0]))
        taken = await reserve(lively, queues[0])
        # A poll on one shard has been given the job; a poll on several is only told that there is one.
        assert [one.ctx.id for one in taken] == ([ack.job_id] if spread else [])
        await asyncio.to_thread(server.kill, "router-0")
        with pytest.raises(ClientError):
            await settled(poll)
        if not spread:
            found: Job = await reserve_one(lively, *queues)
            # It may have reached the client: so it counts as a delivery.
            assert (found.ctx.id, found.ctx.attempt) == (ack.job_id, 2)
            await lively.ack(found.ctx)


async def test_polls_behind_a_dead_poll_get_the_jobs(new_server: StartServer) -> None:
    server = new_server(shards=1, routers=2).start()
    queue = server.queue_on(0)
    async with AsyncExitStack() as stack:
        theirs = await client_at(stack, server, "router-0")
        others = await client_at(stack, server, "router-1")
        first = await park(theirs, queue)
        second = await park(others, queue)
        await asyncio.to_thread(server.kill, "router-0")
        with pytest.raises(ClientError):
            await settled(first)
        ack = await others.enqueue(job(queue))
        (found,) = await settled(second)
        assert found.ctx.id == ack.job_id


# -- an orderly stop ------------------------------------------------------------------------------


@SHARDS
async def test_a_stop_under_load_keeps_every_ok_and_answers_every_parked_poll(
    new_server: StartServer, shards: int
) -> None:
    server = new_server(shards=shards, routers=2).start()
    queues, empty = queues_of(server), queues_of(server)
    stream = Stream(*queues)
    async with AsyncExitStack() as stack:
        pollers = await clients(stack, server, 4)
        producer, worker = await clients(stack, server, 2)
        polls = [await park(pollers[n % 4], *(empty if n % 2 else empty[:1])) for n in range(PARKED)]
        for queue in queues * 4:
            stream.produce(producer, queue)
        stream.work(worker, *queues)
        await stream.until(lambda: len(stream.confirmed) >= 5 * SOME)
        server.terminate()
        assert [await settled(poll) for poll in polls] == [[]] * PARKED
        server.terminate()  # a second one, while it stops or after, changes nothing
        status = await asyncio.to_thread(server.exit_status)
        await stream.end()
        assert status == 0, server.log.text()
    server.restart()
    async with connected(server.address) as client:
        await stream.settle(client)


async def test_a_stop_leaves_ready_what_a_cancelled_poll_might_have_had(new_server: StartServer) -> None:
    server = new_server().start()
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        poll = await park(client, queue, lease=10 * LEASE)
        poll.cancel()
        await client.enqueue_batch([job(queue, "first"), job(queue, "second")])
        assert await asyncio.to_thread(server.stop) == 0
    server.restart()
    async with connected(server.address) as client:
        found = await reserve(client, queue, max_jobs=10)
        assert texts(found) == ["first", "second"]
        assert [one.ctx.attempt for one in found] == [1, 1]
