"""Idempotency keys, batches, caps and a shard that is full of calls: field cases 13 to 16.

Parts of these cases have tests of their own elsewhere, which are not repeated here:

    13  a full queue                            test_a_refused_job_leaves_its_key_free
        a rejected job                          test_a_rejected_job_leaves_no_key_behind
    14  the window                              test_a_key_is_forgotten_when_its_window_is_over
                                                test_keys_outlive_a_restart_with_their_deadline
        duplicates do not extend it             test_a_duplicate_does_not_extend_the_window
        expired keys leave the disk             test_expired_keys_leave_the_store
        (after a move: queues do not move yet)
    15  one batch, alone, in given time         test_keys_within_one_batch_are_compared_too
    16  nack, expiry and promotion over a cap   test_jobs_come_back_and_fall_due_in_a_queue_that_is_over_its_cap
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest
from sepp import EnqueueAck, EnqueueRequest, RetryDirective, RetryPolicy, SeppClient
from sepp.errors import BatchValidationError, JobRejectedError, OverloadedError, QueueFull

from common.admin_client import AdminClient
from common.wire import Op, Outcome, Vote
from shard.store import Family, StoreError
from tests.integration.clients import LEASE, connected, job, park, reserve, reserve_one, settled
from tests.integration.conftest import StartServer
from tests.integration.server import Server
from tests.unit.shard_driver import ROUTER, MemoryHome, Shard, rows
from tests.unit.shard_driver import job as stored_job

CAP = 10
PRODUCERS = 50
ROUNDS = 8
SHARDS = pytest.mark.parametrize("shards", [1, 4], ids=["1-shard", "4-shards"])
# Until a client gives up on a shard that comes back.
PATIENT = RetryPolicy(max_attempts=120, initial_backoff=timedelta(milliseconds=50), max_backoff=timedelta(seconds=0.5))
KEEP_DEAD_LETTERS = {"SEPP_STORAGE__DEAD_LETTER_RETENTION_MS": "3600000"}


@pytest.fixture(scope="module", params=[1, 4], ids=["1-shard", "4-shards"])
def capped_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server whose queues take CAP jobs each; the tests use queues of their own."""
    shards: int = request.param
    with Server(shards=shards, settings={"SEPP_LIMITS__MAX_QUEUE_DEPTH": str(CAP)}) as running:
        yield running.start()


def queue_at_the_end(server: Server) -> str:
    """A queue on the last shard."""
    assert server.shards is not None
    return server.queue_on(server.shards - 1)


async def all_jobs(client: SeppClient, *queues: str) -> list[str]:
    """Ids of all jobs that are ready, each acked."""
    found: list[str] = []
    while jobs := await reserve(client, *queues, max_jobs=256):
        found += [one.ctx.id for one in jobs]
        for one in jobs:
            await client.ack(one.ctx)
    return found


# -- 13: what failed leaves its key free ----------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1], ids=["lost", "kept"])
def test_the_retry_of_an_enqueue_whose_write_failed_stores_the_job_or_names_the_stored_one(kept: int) -> None:
    home = MemoryHome()
    shard = Shard(home)
    home.store.fail_next_write = True
    with pytest.raises(StoreError):
        shard.enqueue(body=b"1", key="k")
    home.store = home.store.crash(kept)
    shard.start()
    outcome = shard.enqueue(body=b"1", key="k")
    (leased,) = shard.reserve(max_jobs=2)
    assert outcome == (leased.job_id if kept == 0 else [Outcome.DEDUPLICATED, leased.job_id])
    shard.check()


@pytest.mark.parametrize("end", ["aborted", "coordinator-gone", "coordinator-gone-over-a-restart"])
def test_a_promise_that_comes_to_nothing_leaves_its_key_free(end: str) -> None:
    shard = Shard(MemoryHome())
    transaction, jobs = 7, [list(stored_job(key="k"))]
    vote, _ = shard._data(shard.send(Op.PREPARE, transaction, 0, b"\x01\x02\x03", jobs))
    assert vote == Vote.YES
    if end == "aborted":
        shard.send(Op.ABORT, transaction)
    elif end == "coordinator-gone":
        shard.router_gone(ROUTER)
    else:
        shard.restart()  # no router is alive that could have asked for it
    made = shard.enqueue(key="k")
    assert [one.job_id for one in shard.reserve(max_jobs=2)] == [made]
    assert rows(shard.store, Family.TRANSACTIONS) == []
    shard.check()


async def test_a_batch_that_one_shard_refuses_leaves_its_keys_on_the_others_free(capped_server: Server) -> None:
    full, free = capped_server.queue_on(0), queue_at_the_end(capped_server)
    async with connected(capped_server.address) as client:
        await client.enqueue_batch([job(full) for _ in range(CAP)])
        with pytest.raises(BatchValidationError):
            await client.enqueue_atomic([job(free, key="a"), job(full, key="b")])
        again = await client.enqueue(job(free, key="a"))
        assert not again.deduplicated
        assert await all_jobs(client, free) == [again.job_id]
        assert len(await all_jobs(client, full)) == CAP
        assert not (await client.enqueue(job(full, key="b"))).deduplicated


async def test_the_retry_of_a_batch_that_met_the_kill_of_a_shard_stores_every_job_once(new_server: StartServer) -> None:
    server = new_server(shards=2).start()
    queues = [server.queue_on(0), server.queue_on(1)]
    async with connected(server.address, PATIENT) as client:
        for number in range(4):
            victim = f"shard-{number % 2}"
            batches = [[job(queue, key=f"{number}-{n}") for queue in queues] for n in range(4)]
            storing = [asyncio.create_task(client.enqueue_atomic(batch)) for batch in batches]
            await asyncio.sleep(random.uniform(0, 0.005))
            await asyncio.to_thread(server.kill, victim)
            stored = [ack.job_id for acks in await asyncio.gather(*storing) for ack in acks]
            await asyncio.to_thread(server.wait_until_back, victim)
            again = [await client.enqueue_batch(batch) for batch in batches]
            assert [one.job_id for acks in again for one in acks if isinstance(one, EnqueueAck)] == stored
            found = [(await reserve_one(client, *queues)).ctx for _ in stored]
            assert Counter(ctx.id for ctx in found) == Counter(stored)
            for ctx in found:
                await client.ack(ctx)
            assert await reserve(client, *queues) == []


# -- 14: what a key is answered with --------------------------------------------------------------


@SHARDS
async def test_a_key_names_its_job_in_every_state_and_over_a_kill_until_its_queue_is_deleted(
    new_server: StartServer, shards: int
) -> None:
    server = new_server(shards=shards, settings=KEEP_DEAD_LETTERS).start()
    states = ["ready", "leased", "delayed", "acked", "dead", "drained"]
    queues = {state: server.queue_on(number % shards) for number, state in enumerate(states)}
    ids: dict[str, str] = {}

    async def check(client: SeppClient) -> None:
        for state, queue in queues.items():
            again = await client.enqueue(job(queue, key="k"))
            assert (state, again.job_id, again.deduplicated) == (state, ids[state], True)

    async with connected(server.address) as client:
        for state, queue in queues.items():
            ids[state] = (await client.enqueue(job(queue, key="k"))).job_id
            if state == "ready":
                continue
            held = (await reserve_one(client, queue)).ctx
            if state == "delayed":
                await client.nack(held, RetryDirective.after(timedelta(hours=1)))
            elif state == "acked":
                await client.ack(held)
            elif state in ("dead", "drained"):
                await client.nack(held, RetryDirective.DEAD_LETTER)
        assert len(await client.drain_dead_letters(queues["drained"], 2)) == 1
        await check(client)
    await asyncio.to_thread(server.kill_all)
    server.restart()

    def delete(queue: str) -> None:
        with AdminClient(server.data) as admin:
            admin.delete(queue, wait=False)

    async with connected(server.address) as client:
        await check(client)
        ready = [one.ctx.id for one in await reserve(client, *queues.values(), max_jobs=10)]
        assert ready == [ids["ready"]]  # no duplicate was stored
        for state in ("delayed", "acked", "dead", "drained"):
            await asyncio.to_thread(delete, queues[state])
            new = await client.enqueue(job(queues[state], key="k"))
            assert not new.deduplicated and new.job_id != ids[state]


# -- 15: one key twice in a batch -----------------------------------------------------------------


async def sent(client: SeppClient, kind: str, batch: list[EnqueueRequest]) -> list[EnqueueAck]:
    if kind == "atomic":
        return await client.enqueue_atomic(batch)
    return [one for one in await client.enqueue_batch(batch) if isinstance(one, EnqueueAck)]


@pytest.mark.parametrize("copies", [1, 3], ids=["alone", "with-its-copies"])
@pytest.mark.parametrize("kind", ["batch", "atomic"])
async def test_there_is_one_job_for_each_key_and_the_results_are_in_line(
    capped_server: Server, kind: str, copies: int
) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(capped_server.address)) for _ in range(copies)]
        for _ in range(ROUNDS):
            first, second = capped_server.queue_on(0), queue_at_the_end(capped_server)
            batch = [job(first, key="a"), job(first, key="a"), job(second, key="b")]
            acks = await asyncio.gather(*[sent(client, kind, batch) for client in clients])
            a, b = acks[0][0].job_id, acks[0][2].job_id
            assert a != b
            assert [[ack.job_id for ack in each] for each in acks] == [[a, a, b]] * copies
            fresh = Counter(ack.job_id for each in acks for ack in each if not ack.deduplicated)
            assert fresh == Counter([a, b])
            assert all(each[1].deduplicated for each in acks)
            assert Counter(await all_jobs(clients[0], first, second)) == Counter([a, b])


# -- 16: the last places of a queue ---------------------------------------------------------------


async def accepted(client: SeppClient, *jobs: EnqueueRequest) -> list[EnqueueAck]:
    """What is stored of an atomic batch, or of one job; nothing where the queue is full."""
    try:
        return await client.enqueue_atomic(jobs) if len(jobs) > 1 else [await client.enqueue(jobs[0])]
    except JobRejectedError as refused:
        assert isinstance(refused.rejection, QueueFull)
    except BatchValidationError:
        pass
    return []


async def test_many_producers_never_fill_a_queue_above_its_cap_and_nothing_accepted_is_dropped(
    capped_server: Server,
) -> None:
    capped, other = capped_server.queue_on(0), queue_at_the_end(capped_server)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(capped_server.address)) for _ in range(10)]
        for _ in range(ROUNDS):
            batches = [[job(capped)], [job(capped), job(capped)], [job(capped)], [job(capped), job(other)]]
            calls = [accepted(clients[n % 10], *batches[n % 4]) for n in range(PRODUCERS)]
            results = await asyncio.gather(*calls)
            ids = {capped: Counter[str](), other: Counter[str]()}
            for n, acks in enumerate(results):
                for request, ack in zip(batches[n % 4], acks, strict=False):
                    ids[request.queue][ack.job_id] += 1
            assert ids[capped].total() <= CAP and ids[other].total() <= CAP
            if capped_server.shards == 1:  # no promise of a batch was taken back: every place is taken
                assert ids[capped].total() == CAP
            assert len(await accepted(clients[1], *[job(capped)] * (CAP + 1 - ids[capped].total()))) == 0

            # Jobs that come back need no room, and give none.
            for lease in (LEASE, timedelta(milliseconds=1)):
                for one in await reserve(clients[0], capped, max_jobs=CAP, lease=lease):
                    if lease is LEASE:
                        await clients[0].nack(one.ctx, RetryDirective.after(timedelta(milliseconds=1)))
                        assert len(await accepted(clients[1], *[job(capped)] * (CAP + 1 - ids[capped].total()))) == 0
            found = [await reserve_one(clients[0], capped) for _ in range(ids[capped].total())]
            assert Counter(one.ctx.id for one in found) == ids[capped]
            if ids[capped].total() == CAP:
                await clients[0].ack(found[0].ctx)
                (new,) = await accepted(clients[1], job(capped))  # room comes back with the ack
                found[0] = await reserve_one(clients[0], capped)
                assert found[0].ctx.id == new.job_id
            for one in found:
                await clients[0].ack(one.ctx)
            assert Counter(await all_jobs(clients[0], other)) == ids[other]
            assert await all_jobs(clients[0], capped) == []


# -- a shard that is full of calls ----------------------------------------------------------------


async def test_a_hanging_shard_that_is_full_of_calls_refuses_more_at_once_and_goes_on_when_it_wakes(
    new_server: StartServer,
) -> None:
    capacity, number = 8, 40
    server = new_server(shards=2, settings={"SEPP_STORAGE__COMMAND_QUEUE_CAPACITY": str(capacity)}).start()
    queue, parked_on, other = server.queue_on(0), server.queue_on(0), server.queue_on(1)
    async with connected(server.address) as client, connected(server.address) as worker:
        polls = [await park(worker, parked_on) for _ in range(capacity)]  # who waits takes no place
        server.pause("shard-0")
        calls = [asyncio.create_task(client.enqueue(job(queue, key=str(n)))) for n in range(number)]
        refused: set[asyncio.Task[EnqueueAck]] = set()
        while len(refused) < number - capacity:
            ended, _ = await asyncio.wait(set(calls) - refused, return_when=asyncio.FIRST_COMPLETED)
            refused |= ended
        assert all(isinstance(call.exception(), OverloadedError) for call in refused)
        with pytest.raises(OverloadedError):
            await reserve(client, queue)
        with pytest.raises(OverloadedError):
            await client.enqueue_atomic([job(other), job(queue)])
        assert (await client.enqueue(job(other))).job_id  # nothing of the batch is there before it
        assert len(await all_jobs(client, other)) == 1

        server.resume("shard-0")
        stored = [(await call).job_id for call in calls if call not in refused]
        assert len(stored) == capacity
        assert Counter(await all_jobs(client, queue)) == Counter(stored)
        for n, call in enumerate(calls):
            again = await client.enqueue(job(queue, key=str(n)))
            assert again.deduplicated == (call not in refused)
        assert len(await all_jobs(client, queue)) == number - capacity
        for poll in polls:
            ack = await client.enqueue(job(parked_on))
            (found,) = await settled(poll)
            assert found.ctx.id == ack.job_id
