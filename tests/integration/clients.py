"""The official client, and raw channels beside it, as tests use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import grpc
import grpc.aio
from sepp import EnqueueRequest, Job, Payload, ReserveOptions, RetryPolicy, SeppClient

from tests.integration.server import WAIT_S

SERVICE = "sepp.v1.QueueService"
METHODS = ("EnqueueBatch", "EnqueueAtomic", "Reserve", "Ack", "Nack", "Extend", "DrainDeadLetters", "GetServerInfo")
# A connection of its own for each channel; the address is loopback, so no proxy has a say.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
LEASE = timedelta(minutes=1)
NO_WAIT = timedelta(0)
# Longer than any test waits: a poll that is to be answered early.
LONG_WAIT = timedelta(seconds=2 * WAIT_S)


@asynccontextmanager
async def connected(address: str, retry_policy: RetryPolicy | None = None) -> AsyncIterator[SeppClient]:
    """A client with a connection of its own."""
    async with channel_to(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), WAIT_S)
        yield SeppClient.from_channel(channel, retry_policy=retry_policy)


def channel_to(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def job(queue: str, text: str = "", *, priority: int | None = None, key: str | None = None) -> EnqueueRequest:
    payload = Payload(text.encode(), "text") if text else None
    return EnqueueRequest(queue, "letter", payload, priority=priority, idempotency_key=key)


def texts(jobs: list[Job] | None) -> list[str]:
    """The payloads of jobs, in order."""
    return ["" if one.payload is None else one.payload.data.decode() for one in jobs or []]


async def reserve(
    client: SeppClient,
    *queues: str,
    max_jobs: int = 1,
    lease: timedelta = LEASE,
    wait: timedelta = NO_WAIT,
) -> list[Job]:
    return await client.reserve(ReserveOptions(queues, lease, wait, max_jobs=max_jobs)) or []


async def reserve_one(client: SeppClient, *queues: str, lease: timedelta = LEASE, wait: timedelta = LONG_WAIT) -> Job:
    """The job that is there, or comes."""
    (found,) = await asyncio.wait_for(reserve(client, *queues, lease=lease, wait=wait), WAIT_S)
    return found


async def park(client: SeppClient, *queues: str, lease: timedelta = LEASE) -> asyncio.Task[list[Job]]:
    """A long poll that waits in the server.

    A router passes on what comes over one connection in the order in which it came: when calls to the
    same shards that were sent after the poll are answered, the poll has arrived there.
    """
    poll = asyncio.create_task(reserve(client, *queues, lease=lease, wait=LONG_WAIT))
    await asyncio.sleep(0)  # the task starts its call
    for queue in queues:
        assert await reserve(client, queue) == []
    assert not poll.done(), "there was a job already"
    return poll


async def settled(poll: asyncio.Task[list[Job]]) -> list[Job]:
    """What a poll was answered with."""
    return await asyncio.wait_for(poll, WAIT_S)


async def until(holds: Callable[[], bool]) -> None:
    """Until something holds of which nobody is told."""
    async with asyncio.timeout(WAIT_S):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.01)
