"""Long polls and leases in the moments in which other job queues went wrong: field cases 1 to 8.

Parts of these cases have tests of their own elsewhere, which are not repeated here:

    1  cancelled while a lease is synced, by chance   test_jobs_are_neither_lost_nor_doubled_and_nothing_is_left_behind
    3  a job that falls due, one that is given back   test_a_parked_reserve_is_answered_when_a_scheduled_job_falls_due
                                                      test_a_parked_reserve_is_answered_by_a_job_that_is_given_back
       enqueues on the other shards                   test_a_long_poll_over_all_shards_is_answered_by_an_enqueue_on_one
       (a queue that arrives by a move: queues do not move yet)
    4  never early, in given time                     test_a_scheduled_job_is_not_ready_one_millisecond_before_its_time
                                                      test_a_scheduled_job_is_ready_exactly_at_its_time
       a nearer timer, in given time                  test_a_nearer_time_is_heard_of_while_a_far_one_is_waited_for
    5  nacked with a delay, extended                  test_the_end_of_an_old_lease_means_nothing_to_a_delayed_job
                                                      test_an_extension_counts_from_now
    6  a late worker, in given time                   test_a_late_worker_does_not_disturb_the_new_holder
    7  in given time, over several shards             test_an_answer_is_cut_by_bytes_and_the_rest_keeps_its_attempt
                                                      test_a_job_that_is_too_large_beside_those_of_other_shards_is_given_back

A job may be delivered a second time only where its answer may have reached somebody: with attempt 2.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta

import grpc
import grpc.aio
import pytest
from sepp import EnqueueRequest, Job, JobCtx, Payload, RetryDirective, SeppClient
from sepp.errors import AttemptMismatchError, ClientError, JobNotFoundError

from common import admin_pb2
from common import queue_pb2 as pb
from common.admin_client import AdminClient
from shard.machine import TICK_LIMIT
from shard.store import Family
from tests.integration.clients import (
    LEASE,
    LONG_WAIT,
    SERVICE,
    channel_to,
    connected,
    job,
    park,
    reserve,
    reserve_one,
    settled,
    texts,
    until,
)
from tests.integration.conftest import StartServer
from tests.integration.server import Server
from tests.unit import shard_driver
from tests.unit.router_driver import milliseconds
from tests.unit.shard_driver import WALL_START_MS, MemoryHome, Shard, bodies, rows
from tests.unit.shard_driver import job as stored_job

home, shard = shard_driver.home, shard_driver.shard

KEEP_DEAD_LETTERS = {"SEPP_STORAGE__DEAD_LETTER_RETENTION_MS": "3600000"}
MEBIBYTE = 1024 * 1024
# The lease of a poll that may be given a job which never reaches it: as short as it may be, for the
# next caller waits for its end.
BRIEF = timedelta(milliseconds=80)
JITTER_S = 0.005
# An end may come later than that, for an answer needs some milliseconds: so all orders are met.
END_JITTER_S = 0.02
# On real processes: 240 polls are cancelled, 100 connections cut, and 120 pairs of polls and 120
# deadlines tried, on each server. The rounds in given time are 10 000.
LANES = 10
ROUNDS = 24
CUT_ROUNDS = 10


@pytest.fixture(
    scope="module",
    params=[("queue", 1), ("aio", 1), ("queue", 4)],
    ids=["queue-front", "aio-front", "4-shards"],
)
def any_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server with either front on one shard, or with four shards; the tests use queues of their own."""
    front, shards = request.param
    with Server(shards=shards, front=front, settings=KEEP_DEAD_LETTERS) as running:
        yield running.start()


@pytest.fixture(scope="module")
def two_shards() -> Iterator[Server]:
    with Server(shards=2, settings=KEEP_DEAD_LETTERS) as running:
        yield running.start()


def queues_of(server: Server) -> list[str]:
    """A queue on each shard."""
    assert server.shards is not None
    return [server.queue_on(index) for index in range(server.shards)]


async def soon(jitter_s: float = END_JITTER_S) -> None:
    await asyncio.sleep(random.uniform(0, jitter_s))


async def enqueued_soon(client: SeppClient, queue: str) -> str:
    """The id of a job that is stored at a moment that nobody knows."""
    await soon(JITTER_S)
    return (await client.enqueue(job(queue))).job_id


async def what_came(poll: asyncio.Task[list[Job]]) -> list[Job]:
    """The jobs that a poll which somebody ended was given all the same."""
    try:
        return await settled(poll)
    except (ClientError, asyncio.CancelledError):
        return []


async def check_the_next_caller(client: SeppClient, queues: list[str], job_id: str, ended: list[Job]) -> None:
    """The job comes once more if its first answer may have arrived, else for the first time; then it is gone."""
    found = await reserve_one(client, *queues)
    assert found.ctx.id == job_id
    assert found.ctx.attempt in ({2} if ended else {1, 2})
    assert [(one.ctx.id, one.ctx.attempt) for one in ended] in ([], [(job_id, 1)])
    await client.ack(found.ctx)
    assert await reserve(client, *queues) == []


class Relay:
    """A way to a server that can be cut."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """The address to connect to."""
        listener = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
            self.cut()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Every connection is gone, without a word to either side."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, back]
        self._tasks |= {asyncio.create_task(_copy(reader, back)), asyncio.create_task(_copy(there, writer))}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while content := await reader.read(65_536):
            writer.write(content)
            await writer.drain()
    writer.close()


# -- 1: a poll ends in the moment of an enqueue ----------------------------------------------------


async def test_a_job_that_meets_the_cancellation_of_its_poll_goes_to_the_next_caller(any_server: Server) -> None:
    async def rounds(worker: SeppClient, producer: SeppClient) -> None:
        queues = queues_of(any_server)
        for number in range(ROUNDS):
            poll = asyncio.create_task(reserve(worker, *queues, lease=BRIEF, wait=LONG_WAIT))
            storing = asyncio.create_task(enqueued_soon(producer, queues[number % len(queues)]))
            await soon()
            poll.cancel()
            job_id = await storing
            await check_the_next_caller(producer, queues, job_id, await what_came(poll))

    async with connected(any_server.address) as worker, connected(any_server.address) as producer:
        await asyncio.gather(*[rounds(worker, producer) for _ in range(LANES)])


async def test_a_job_that_meets_the_cut_of_its_polls_connection_goes_to_the_next_caller(any_server: Server) -> None:
    async def rounds(producer: SeppClient) -> None:
        queues = queues_of(any_server)
        for number in range(CUT_ROUNDS):
            relay = Relay(any_server.address)
            async with relay.open() as address, connected(address) as worker:
                poll = asyncio.create_task(reserve(worker, *queues, lease=BRIEF, wait=LONG_WAIT))
                storing = asyncio.create_task(enqueued_soon(producer, queues[number % len(queues)]))
                await soon()
                relay.cut()
                job_id = await storing
                await check_the_next_caller(producer, queues, job_id, await what_came(poll))

    async with connected(any_server.address) as producer:
        await asyncio.gather(*[rounds(producer) for _ in range(LANES)])


# -- 2: two polls, one job ------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["cancelled", "timed-out"])
async def test_the_second_poll_gets_the_job_that_meets_the_end_of_the_first(any_server: Server, end: str) -> None:
    far = datetime.now(UTC) + timedelta(hours=1)
    kept: list[str] = []

    async def rounds(worker: SeppClient, producer: SeppClient) -> None:
        queues = queues_of(any_server)
        kept.extend(queues)
        for queue in queues:  # keeps its record, to look at in the end
            await producer.enqueue(EnqueueRequest(queue, "letter", scheduled_at=far))
        for number in range(ROUNDS // 2):
            wait = LONG_WAIT if end == "cancelled" else timedelta(milliseconds=3)
            first = asyncio.create_task(reserve(worker, *queues, lease=BRIEF, wait=wait))
            await asyncio.sleep(0)  # in this order
            second = asyncio.create_task(reserve(worker, *queues, wait=LONG_WAIT))
            storing = asyncio.create_task(enqueued_soon(producer, queues[number % len(queues)]))
            if end == "cancelled":
                await soon()
                first.cancel()
            job_id = await storing
            came = await what_came(first)
            (found,) = await settled(second)
            assert found.ctx.id == job_id
            # A poll that was told of no job was given none; one that was cancelled may have been.
            assert found.ctx.attempt in ({2} if came else {1} if end == "timed-out" else {1, 2})
            await worker.ack(found.ctx)

    async with connected(any_server.address) as worker, connected(any_server.address) as producer:
        await asyncio.gather(*[rounds(worker, producer) for _ in range(LANES)])
        await until(lambda: waiting_polls(any_server, kept) == 0)


def waiting_polls(server: Server, queues: list[str]) -> int:
    with AdminClient(server.data) as admin:
        return sum(admin.queue(name).waiting for name in queues)


def test_no_waiter_is_left_after_10_000_jobs_that_met_the_end_of_the_first_in_line() -> None:
    shard = Shard(MemoryHome())
    for number in range(10_000):
        first, second = shard.park(), shard.park()
        with shard.one_turn():
            if number % 2:
                shard.cancel(first)
                shard.enqueue(body=b"%d" % number)
            else:
                shard.enqueue(body=b"%d" % number)
                shard.cancel(first)
                shard.give_back(first)
        found = shard.jobs_for(second)
        assert bodies(found) == [b"%d" % number] and found is not None and found[0].attempt == 1
        assert shard.ack(found[0]) == 0
        shard.answers.clear()
    assert (len(shard.machine._waiting), shard.machine._waiting._lines) == (0, {})
    shard.check()


# -- 3: what wakes a poll -------------------------------------------------------------------------

Act = Callable[[], Awaitable[object]]


async def by_an_enqueue(server: Server, client: SeppClient, queue: str) -> Act:
    return lambda: client.enqueue(job(queue))


async def by_an_atomic_batch(server: Server, client: SeppClient, queue: str) -> Act:
    return lambda: client.enqueue_atomic([job(server.queue_on(1)), job(queue)])


async def held(client: SeppClient, queue: str) -> JobCtx:
    await client.enqueue(job(queue))
    return (await reserve_one(client, queue)).ctx


async def by_a_nack(server: Server, client: SeppClient, queue: str) -> Act:
    ctx = await held(client, queue)
    return lambda: client.nack(ctx)


async def by_a_nack_with_a_delay(server: Server, client: SeppClient, queue: str) -> Act:
    ctx = await held(client, queue)
    return lambda: client.nack(ctx, RetryDirective.after(timedelta(milliseconds=100)))


async def by_the_end_of_a_shortened_lease(server: Server, client: SeppClient, queue: str) -> Act:
    ctx = await held(client, queue)
    return lambda: client.extend(ctx, timedelta(milliseconds=100))


async def by_the_end_of_a_lease(server: Server, client: SeppClient, queue: str) -> Act:
    worker = await park(client, queue, lease=timedelta(milliseconds=100))

    async def act() -> None:
        await client.enqueue(job(queue))
        await settled(worker)

    return act


async def by_the_requeue_of_a_dead_letter(server: Server, client: SeppClient, queue: str) -> Act:
    ctx = await held(client, queue)
    assert await client.nack(ctx, RetryDirective.DEAD_LETTER)

    def act() -> None:
        with AdminClient(server.data) as admin:
            admin.requeue(admin_pb2.DeadLetterSelection(queue=queue))

    return lambda: asyncio.to_thread(act)


async def by_a_lease_that_ends_while_its_shard_starts_again(server: Server, client: SeppClient, queue: str) -> Act:
    ctx = await held(client, queue)

    async def act() -> None:
        await client.extend(ctx, timedelta(milliseconds=100))
        await asyncio.to_thread(server.kill, "shard-0")

    return act


@pytest.mark.parametrize(
    "event",
    [
        by_an_enqueue,
        by_an_atomic_batch,
        by_a_nack,
        by_a_nack_with_a_delay,
        by_the_end_of_a_lease,
        by_the_end_of_a_shortened_lease,
        by_the_requeue_of_a_dead_letter,
        by_a_lease_that_ends_while_its_shard_starts_again,
    ],
)
@pytest.mark.parametrize("spread", [False, True], ids=["one-shard", "two-shards"])
async def test_a_poll_is_woken(
    two_shards: Server, event: Callable[[Server, SeppClient, str], Awaitable[Act]], spread: bool
) -> None:
    queue = two_shards.queue_on(0)
    queues = [two_shards.queue_on(1), queue] if spread else [queue]
    async with connected(two_shards.address) as client, connected(two_shards.address) as worker:
        act = await event(two_shards, client, queue)
        poll = await park(worker, *queues)
        await act()
        (found,) = await settled(poll)
        assert found.ctx.queue == queue
        await worker.ack(found.ctx)


# -- 4: timers ------------------------------------------------------------------------------------


async def test_a_poll_that_sleeps_for_a_far_time_hears_of_a_nearer_one_and_is_never_early(any_server: Server) -> None:
    queues = queues_of(any_server)
    async with connected(any_server.address) as client, connected(any_server.address) as worker:
        await client.enqueue(EnqueueRequest(queues[0], "far", scheduled_at=datetime.now(UTC) + timedelta(hours=1)))
        poll = await park(worker, *queues)
        near = datetime.now(UTC) + timedelta(milliseconds=150)
        await client.enqueue(EnqueueRequest(queues[-1], "near", scheduled_at=near))
        (found,) = await settled(poll)
        assert found.ctx.job_type == "near"
        assert datetime.now(UTC) >= near
        await worker.ack(found.ctx)


def test_whoever_sleeps_for_what_is_a_millisecond_away_does_not_spin(shard: Shard) -> None:
    shard.enqueue_all(*[stored_job(due_ms=WALL_START_MS + 1) for _ in range(2 * TICK_LIMIT)])
    assert shard.next_wake_ms() == 1
    assert not shard.tick()
    assert shard.next_wake_ms() == 1
    shard.wall_ms += 1
    shard.mono_ms += 1
    wakes = 0
    while shard.next_wake_ms() == 0:
        shard.tick()
        wakes += 1
    assert (wakes, shard.counts()) == (2, (2 * TICK_LIMIT, 0, 0, 0))


# -- 5: timers that no longer apply ---------------------------------------------------------------


def test_10_000_jobs_acked_in_the_last_millisecond_of_their_leases_are_never_redelivered() -> None:
    shard = Shard(MemoryHome())
    at_once = 50
    for _ in range(10_000 // at_once):
        shard.enqueue_all(*[stored_job() for _ in range(at_once)])
        leased = shard.reserve(max_jobs=at_once, lease_ms=2_000)
        shard.pass_time(1_999)
        with shard.one_turn():
            assert [shard.ack(one) for one in leased] == [0] * at_once
        waiting = shard.park()
        shard.pass_time(1)
        assert shard.jobs_for(waiting) is None
        shard.cancel(waiting)
        shard.answers.clear()
    assert shard.counts() == (0, 0, 0, 0)
    assert rows(shard.store, Family.LEASES) == rows(shard.store, Family.JOBS) == []
    shard.check()


async def test_the_wait_of_a_poll_that_was_answered_means_nothing_to_its_lease(any_server: Server) -> None:
    queues = queues_of(any_server)
    wait = timedelta(milliseconds=150)
    async with connected(any_server.address) as client:
        poll = asyncio.create_task(reserve(client, *queues, wait=wait))
        await client.enqueue(job(queues[-1]))
        found = await settled(poll) or [await reserve_one(client, *queues, wait=wait)]
        assert await reserve(client, *queues, wait=2 * wait) == []
        await client.ack(found[0].ctx)


# -- 6: a late worker -----------------------------------------------------------------------------


async def check_that_it_is_refused(client: SeppClient, late: JobCtx, why: type[Exception]) -> None:
    with pytest.raises(why):
        await client.ack(late)
    with pytest.raises(why):
        await client.nack(late, RetryDirective.DEAD_LETTER)
    with pytest.raises(why):
        await client.extend(late, LEASE)


async def test_a_late_worker_is_refused_before_and_after_a_restart_and_the_new_holder_keeps_the_job(
    new_server: StartServer,
) -> None:
    server = new_server(settings=KEEP_DEAD_LETTERS).start()
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        await client.enqueue(job(queue))
        late = await reserve_one(client, queue, lease=timedelta(milliseconds=1))
        holder = await reserve_one(client, queue)
        assert holder.ctx.attempt == 2
        await check_that_it_is_refused(client, late.ctx, AttemptMismatchError)
    await asyncio.to_thread(server.kill_all)
    server.restart()
    async with connected(server.address) as client:
        await check_that_it_is_refused(client, late.ctx, AttemptMismatchError)
        assert await reserve(client, queue) == []
        await client.extend(holder.ctx, LEASE)
        await client.ack(holder.ctx)
        await check_that_it_is_refused(client, late.ctx, JobNotFoundError)
        assert await client.drain_dead_letters(queue) == []


async def test_a_worker_that_comes_after_the_deletion_of_its_queue_finds_no_job_of_the_new_one(
    any_server: Server,
) -> None:
    queue = queues_of(any_server)[-1]
    async with connected(any_server.address) as client:
        await client.enqueue(EnqueueRequest(queue, "letter", max_attempts=2))
        late = await reserve_one(client, queue, lease=timedelta(milliseconds=1))
        await client.nack((await reserve_one(client, queue)).ctx)

        def delete() -> None:
            with AdminClient(any_server.data) as admin:
                admin.delete(queue, wait=False)

        await asyncio.to_thread(delete)
        ack = await client.enqueue(job(queue))
        assert ack.job_id != late.ctx.id
        holder = await reserve_one(client, queue)
        await check_that_it_is_refused(client, late.ctx, JobNotFoundError)
        await client.ack(holder.ctx)


# -- 7: more than a client takes ------------------------------------------------------------------


async def test_an_answer_is_cut_to_what_a_client_takes_and_costs_the_others_no_attempt(any_server: Server) -> None:
    queues = queues_of(any_server)
    async with connected(any_server.address) as client:
        for number in range(10):
            content = Payload(b"%d" % number + bytes(MEBIBYTE - 1), "raw")
            await client.enqueue(EnqueueRequest(queues[number % len(queues)], "letter", content))
        sizes, found = [], []
        while jobs := await reserve(client, *queues, max_jobs=256):
            sizes.append(len(jobs))
            found += jobs
            for one in jobs:
                await client.ack(one.ctx)
        assert sizes == [3, 3, 3, 1]
        assert sorted(text[0] for text in texts(found)) == list("0123456789")
        assert [one.ctx.attempt for one in found] == [1] * 10


# -- 8: a deadline before the end of the wait -----------------------------------------------------


async def test_nothing_is_leased_into_a_call_whose_deadline_is_over(any_server: Server) -> None:
    queues = queues_of(any_server)
    request = pb.ReserveRequest(
        queues=queues, max_jobs=10, lease_duration=milliseconds(60_000), wait_timeout=milliseconds(120_000)
    ).SerializeToString()
    async with channel_to(any_server.address) as channel:
        client = SeppClient.from_channel(channel)
        await client.get_server_info()
        poll = channel.unary_unary(f"/{SERVICE}/Reserve")
        for number in range(10):
            try:
                # The server answers just before a deadline, if it can.
                assert await poll(request, timeout=0.03) == b""
            except grpc.aio.AioRpcError as ended:
                assert ended.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            ack = await client.enqueue(job(queues[number % len(queues)]))
            found = await reserve_one(client, *queues)
            assert (found.ctx.id, found.ctx.attempt) == (ack.job_id, 1)
            await client.ack(found.ctx)


async def test_a_job_that_meets_the_deadline_of_its_poll_goes_to_the_next_caller(any_server: Server) -> None:
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(channel_to(any_server.address))
        producer = await stack.enter_async_context(connected(any_server.address))
        poll = channel.unary_unary(f"/{SERVICE}/Reserve")

        async def rounds() -> None:
            queues = queues_of(any_server)
            request = pb.ReserveRequest(
                queues=queues,
                lease_duration=milliseconds(int(BRIEF.total_seconds() * 1_000)),
                wait_timeout=milliseconds(120_000),
            ).SerializeToString()
            for number in range(ROUNDS // 2):
                storing = asyncio.create_task(enqueued_soon(producer, queues[number % len(queues)]))
                came = []
                try:
                    answer = pb.ReserveResponse.FromString(await poll(request, timeout=random.uniform(0, END_JITTER_S)))
                    came = [(one.id, one.attempt) for one in answer.jobs]
                except grpc.aio.AioRpcError as ended:
                    assert ended.code() == grpc.StatusCode.DEADLINE_EXCEEDED
                job_id = await storing
                assert came in ([], [(job_id, 1)])
                found = await reserve_one(producer, *queues)
                assert found.ctx.id == job_id
                assert found.ctx.attempt in ({2} if came else {1, 2})
                await producer.ack(found.ctx)

        await asyncio.gather(*[rounds() for _ in range(LANES)])
