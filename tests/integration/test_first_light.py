"""What a user of the official client sees of a whole server, with one shard and with four."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

import pytest
from sepp import EnqueueRequest, JobCtx, Payload, Priority, RetryDirective, SeppClient
from sepp.errors import AttemptMismatchError, JobNotFoundError

from common import __version__
from tests.integration.clients import LONG_WAIT, connected, job, park, reserve, reserve_one, settled, texts
from tests.integration.server import WAIT_S, Server

SHORT_LEASE = timedelta(milliseconds=300)
SHORT_WAIT = timedelta(milliseconds=300)
POLLS = 40


async def test_a_job_arrives_as_it_was_enqueued(server: Server) -> None:
    queue = server.queue_on(0)
    async with await SeppClient.connect(server.address) as client:
        request = EnqueueRequest(
            queue,
            "letter",
            Payload(b"\x00\xff text", "raw"),
            priority=7,
            max_attempts=5,
            custom={"name": "value", "count": -3, "ratio": 0.5, "flag": True},
        )
        before = datetime.now(UTC)
        ack = await client.enqueue(request)
        found = await reserve_one(client, queue, lease=timedelta(seconds=30))
        after = datetime.now(UTC)
        assert ack.deduplicated is False
        assert found.payload == Payload(b"\x00\xff text", "raw")
        enqueued_at, lease_expires_at = found.ctx.enqueued_at, found.ctx.lease_expires_at
        assert found.ctx == JobCtx(
            id=ack.job_id,
            queue=queue,
            job_type="letter",
            priority=Priority.P7,
            attempt=1,
            max_attempts=5,
            enqueued_at=enqueued_at,
            custom={"name": "value", "count": -3, "ratio": 0.5, "flag": True},
            trace_context=None,
            lease_expires_at=lease_expires_at,
            scheduled_at=None,
        )
        millisecond = timedelta(milliseconds=1)  # what the server's instants are cut to
        assert before - millisecond <= enqueued_at <= after
        assert before - millisecond <= lease_expires_at - timedelta(seconds=30) <= after


async def test_an_acked_job_is_never_redelivered(server: Server) -> None:
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        await client.enqueue(job(queue))
        found = await reserve_one(client, queue, lease=SHORT_LEASE)
        await client.ack(found.ctx)
        assert await reserve(client, queue, wait=2 * SHORT_LEASE) == []


async def test_an_acked_job_cannot_be_acked_again(server: Server) -> None:
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        await client.enqueue(job(queue))
        found = await reserve_one(client, queue)
        await client.ack(found.ctx)
        with pytest.raises(JobNotFoundError):
            await client.ack(found.ctx)


async def test_higher_priorities_come_first_and_equal_ones_in_their_order(server: Server) -> None:
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        for number, priority in enumerate([0, 9, 4, 9, 0, 4]):
            await client.enqueue(job(queue, f"{priority}-{number}", priority=priority))
        found = await reserve(client, queue, max_jobs=10)
        assert texts(found) == ["9-1", "9-3", "4-2", "4-5", "0-0", "0-4"]


async def test_a_batch_keeps_its_order_over_all_queues(server: Server) -> None:
    queues = [server.queue_on(shard) for shard in range(server.shards)]
    async with connected(server.address) as client:
        acks = await client.enqueue_batch([job(queues[n % len(queues)], str(n)) for n in range(100)])
        found = [one for queue in queues for one in await reserve(client, queue, max_jobs=100)]
        for number, ack in enumerate(acks):
            (same,) = [one for one in found if one.ctx.id == ack.job_id]
            assert (texts([same]), same.ctx.queue) == ([str(number)], queues[number % len(queues)])
        numbers = [[int(text) for text in texts(found) if int(text) % len(queues) == n] for n in range(len(queues))]
        assert numbers == [sorted(one) for one in numbers]


async def test_one_answer_holds_jobs_of_several_queues_in_the_order_listed(server: Server) -> None:
    queues = [server.queue_on(shard % server.shards) for shard in (3, 0, 2, 1, 0)]
    async with connected(server.address) as client:
        for number, queue in enumerate(reversed(queues)):  # not the order of enqueue
            await client.enqueue_batch([job(queue, f"{len(queues) - 1 - number}a"), job(queue)])
        found = await reserve(client, *queues, max_jobs=20)
        assert [one.ctx.queue for one in found] == [queue for queue in queues for _ in range(2)]
        assert texts(found) == ["0a", "", "1a", "", "2a", "", "3a", "", "4a", ""]


async def test_an_earlier_queue_is_emptied_before_a_later_one_is_looked_at(server: Server) -> None:
    first, second = server.queue_on(server.shards - 1), server.queue_on(0)
    async with connected(server.address) as client:
        await client.enqueue(job(second, "second", priority=9))
        await client.enqueue_batch([job(first, "a"), job(first, "b")])
        taken = [texts(await reserve(client, first, second)) for _ in range(4)]
        assert taken == [["a"], ["b"], ["second"], []]


async def test_a_long_poll_is_answered_by_an_enqueue(server: Server) -> None:
    queue = server.queue_on(0)
    async with connected(server.address) as client, connected(server.address) as producer:
        poll = await park(client, queue)
        ack = await producer.enqueue(job(queue))
        (found,) = await settled(poll)
        assert (found.ctx.id, found.ctx.attempt) == (ack.job_id, 1)


@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
async def test_a_long_poll_over_all_shards_is_answered_by_an_enqueue_on_one(server: Server, place: int) -> None:
    queues = [server.queue_on(shard) for shard in range(server.shards)]
    async with connected(server.address) as client, connected(server.address) as producer:
        poll = await park(client, *queues)
        ack = await producer.enqueue(job(queues[place]))
        (found,) = await settled(poll)
        assert (found.ctx.id, found.ctx.queue, found.ctx.attempt) == (ack.job_id, queues[place], 1)


async def test_a_long_poll_without_jobs_is_empty_when_its_wait_is_over(server: Server) -> None:
    queues = [server.queue_on(shard) for shard in range(server.shards)]
    async with connected(server.address) as client:
        for listed in (queues, queues[:1]):
            begin = asyncio.get_running_loop().time()
            assert await reserve(client, *listed, wait=SHORT_WAIT) == []
            assert asyncio.get_running_loop().time() - begin >= SHORT_WAIT.total_seconds()


async def test_each_of_many_parked_polls_gets_one_job(server: Server) -> None:
    queues = [server.queue_on(shard) for shard in range(server.shards)]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(server.address)) for _ in range(4)]
        polls = [await park(clients[n % 4], *(queues if n % 2 else queues[:1])) for n in range(POLLS)]
        acks = await clients[0].enqueue_batch([job(queues[0]) for _ in range(POLLS)])
        answers = [await settled(poll) for poll in polls]
        assert [len(answer) for answer in answers] == [1] * POLLS
        assert {one.ctx.id for (one,) in answers} == {ack.job_id for ack in acks}
        assert {one.ctx.attempt for (one,) in answers} == {1}


async def test_a_cancelled_poll_takes_no_job(server: Server) -> None:
    queues = [server.queue_on(shard) for shard in range(server.shards)]
    async with connected(server.address) as client:
        for listed in (queues, queues[:1]):
            poll = await park(client, *listed)
            poll.cancel()
            ack = await client.enqueue(job(queues[0]))
            found = await reserve_one(client, *listed)
            assert (found.ctx.id, found.ctx.attempt) == (ack.job_id, 1)


async def test_a_job_whose_lease_has_ended_is_delivered_again_with_attempt_2(server: Server) -> None:
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        ack = await client.enqueue(job(queue, "text"))
        first = await reserve_one(client, queue, lease=SHORT_LEASE)
        second = await reserve_one(client, queue)
        assert (second.ctx.id, second.ctx.attempt, texts([second])) == (ack.job_id, 2, ["text"])
        with pytest.raises(AttemptMismatchError):
            await client.ack(first.ctx)
        await client.ack(second.ctx)


async def test_an_extended_lease_ends_when_the_extension_says(server: Server) -> None:
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        await client.enqueue(job(queue))
        found = await reserve_one(client, queue, lease=timedelta(seconds=30))
        ends_at = await client.extend(found.ctx, timedelta(minutes=2))
        assert ends_at - found.ctx.lease_expires_at >= timedelta(seconds=90)
        again = await client.extend(found.ctx, timedelta(milliseconds=100))
        assert again < found.ctx.lease_expires_at
        assert (await reserve_one(client, queue)).ctx.attempt == 2


async def test_a_nacked_job_comes_back_in_its_place_with_the_next_attempt(server: Server) -> None:
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        await client.enqueue_batch([job(queue, "first"), job(queue, "second")])
        found = await reserve_one(client, queue)
        assert await client.nack(found.ctx, RetryDirective.DEFAULT) is False
        both = await reserve(client, queue, max_jobs=2)
        assert [(text, one.ctx.attempt) for text, one in zip(texts(both), both, strict=True)] == [
            ("first", 2),
            ("second", 1),
        ]


async def test_a_job_that_is_nacked_on_its_last_attempt_is_dead(server: Server) -> None:
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        await client.enqueue(EnqueueRequest(queue, "letter", max_attempts=1))
        found = await reserve_one(client, queue)
        assert await client.nack(found.ctx) is True
        assert await reserve(client, queue) == []


async def test_an_idempotency_key_names_one_job_for_good(server: Server) -> None:
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        first = await client.enqueue(job(queue, key="order-1"))
        again = await client.enqueue(job(queue, key="order-1"))
        await client.ack((await reserve_one(client, queue)).ctx)
        after_ack = await client.enqueue(job(queue, key="order-1"))
        assert [first.deduplicated, again.deduplicated, after_ack.deduplicated] == [False, True, True]
        assert {first.job_id, again.job_id, after_ack.job_id} == {first.job_id}
        assert await reserve(client, queue) == []


async def test_a_scheduled_job_is_not_delivered_before_its_time(server: Server) -> None:
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        due_at = datetime.now(UTC) + timedelta(milliseconds=500)
        await client.enqueue(EnqueueRequest(queue, "letter", scheduled_at=due_at))
        found = await asyncio.wait_for(reserve(client, queue, wait=LONG_WAIT), WAIT_S)
        assert datetime.now(UTC) >= due_at
        assert [one.ctx.scheduled_at for one in found] == [due_at]


async def test_the_server_tells_its_limits(server: Server) -> None:
    async with connected(server.address) as client:
        before = datetime.now(UTC) - timedelta(milliseconds=1)
        info = await client.get_server_info()
        assert before <= info.server_time <= datetime.now(UTC)
        assert (info.version, info.supported_protocol_versions) == (__version__, ["v1"])
        assert (info.restricts_encodings, info.allowed_encodings) == (False, [])
        assert (info.strict_queues, info.dead_letter_retention_enabled) == (False, False)
        assert info.max_payload_bytes == 1_048_576
        assert (info.max_custom_entries, info.max_custom_total_bytes, info.max_custom_key_bytes) == (64, 16_384, 256)
        names = (info.max_queue_name_bytes, info.max_job_type_bytes, info.max_idempotency_key_bytes)
        assert names == (512, 256, 256)
        assert (info.max_enqueue_batch, info.max_reserve_batch, info.max_reserve_queues) == (256, 256, 32)
        assert (info.max_wait_timeout, info.max_lease_duration) == (timedelta(minutes=5), timedelta(minutes=5))
        assert info.max_schedule_horizon == timedelta(days=30)
