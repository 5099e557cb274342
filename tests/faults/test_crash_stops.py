"""A coordinator that is stopped in the middle of an atomic batch, and a server that is told to stop there."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
from sepp import SeppClient

from common.wire import Op
from tests.faults.armed_stage import (
    CAP,
    COORDINATOR,
    NO_DECIDE_SENT,
    OPEN,
    OTHER_ROUTER,
    Batch,
    Cut,
    Stage,
    Told,
    at_home,
    at_participant,
    bring_to,
    noted,
    serve_bystander,
    soon,
    stage_of,
    told,
)
from tests.integration.clients import connected, job, reserve, texts
from tests.integration.conftest import StartServer
from tests.integration.server import Entry, wait_until_gone

# How many batches have to be stored before a server under load is told to stop.
SOME = 40
PRODUCERS = 8
# gRPC's core says CANCELLED to what it has taken from the connection and not yet handed over when it stops.
OPEN_AT_A_STOP = OPEN | {grpc.StatusCode.CANCELLED}
# For calls that cannot end within any grace, because a shard stands still.
SHORT_GRACE = {"SEPP_SERVER__SHUTDOWN_GRACE_MS": "300"}


# -- a coordinator that hangs ---------------------------------------------------------------------


async def serve_others(stage: Stage, batch: Batch) -> None:
    """Other jobs of the batch's queues come and go; its own are not seen."""
    client = await stage.client_at(OTHER_ROUTER)
    for queue in (batch.home, batch.participant):
        ack = await soon(client.enqueue(job(queue, "other", key="other")))
        again = await soon(client.enqueue(job(queue, "other", key="other")))
        assert (again.job_id, again.deduplicated) == (ack.job_id, True)
        (found,) = await soon(reserve(client, queue, max_jobs=10))
        assert texts([found]) == ["other"]
        await soon(client.ack(found.ctx))
    await serve_bystander(stage)


async def paused_at(stage: Stage, batch: Batch, cut: Cut) -> asyncio.Task[Told]:
    """The coordinator gets SIGSTOP at a cut; what becomes of the call is told later."""
    call, holds = await bring_to(batch, cut)
    await asyncio.to_thread(stage.server.pause, COORDINATOR)
    for hold in holds:
        hold.release()
    return asyncio.create_task(told(call))


async def test_all_but_an_enqueue_of_its_key_goes_on_while_the_coordinator_of_a_batch_is_stopped(
    new_server: StartServer,
) -> None:
    async with stage_of(new_server, shards=3, routers=2) as stage:
        batch = Batch(stage)
        outcome = await paused_at(stage, batch, NO_DECIDE_SENT)
        client = await stage.client_at(OTHER_ROUTER)
        same = asyncio.create_task(client.enqueue(job(batch.participant, "the same", key="key")))
        await asyncio.sleep(0)  # the task starts its call; what follows comes after it on the same connection
        await serve_others(stage, batch)
        assert not same.done()
        stage.server.resume(COORDINATOR)
        ids = (await outcome).ids
        ack = await soon(same)
        assert (ack.job_id, ack.deduplicated) == (ids[3], True)
        await batch.check(client, True, await outcome)
        await stage.end()


async def test_an_enqueue_gets_the_last_place_when_the_stopped_coordinator_of_the_batch_that_holds_it_is_killed(
    new_server: StartServer,
) -> None:
    async with stage_of(new_server, shards=3, routers=2) as stage:
        batch = Batch(stage)
        await batch.fill(batch.participant, CAP - 2)
        outcome = await paused_at(stage, batch, NO_DECIDE_SENT)
        client = await stage.client_at(OTHER_ROUTER)
        last = asyncio.create_task(client.enqueue(job(batch.participant, "last")))
        await asyncio.sleep(0)  # the task starts its call; what follows comes after it on the same connection
        await soon(client.enqueue(job(stage.server.queue_on(1), "beside")))
        assert not last.done()
        await stage.kill(COORDINATOR)
        await soon(last)
        assert (await outcome).is_open
        await stage.wait_until_back(COORDINATOR)
        batch.before[batch.participant].append("last")
        await batch.check(client, False, await outcome)


async def test_a_stopped_coordinator_that_is_killed_leaves_nothing_of_an_undecided_batch(
    new_server: StartServer,
) -> None:
    async with stage_of(new_server, shards=3, routers=2) as stage:
        batch = Batch(stage)
        outcome = await paused_at(stage, batch, NO_DECIDE_SENT)
        await serve_others(stage, batch)
        await stage.kill(COORDINATOR)
        assert (await outcome).is_open
        await stage.wait_until_back(COORDINATOR)
        await batch.check(await stage.client_at(OTHER_ROUTER), False, await outcome)
        await stage.end()


# -- an orderly stop ------------------------------------------------------------------------------

STOPS = {
    Cut("nobody has prepared", (at_home(Op.PREPARE, "arrived"), at_participant(Op.PREPARE, "arrived"))): False,
    Cut("one has prepared", (at_home(Op.PREPARE, "arrived"), at_participant(Op.PREPARE, "synced"))): False,
    Cut("DECIDE was sent", (at_home(Op.DECIDE, "arrived"),)): True,
    Cut("COMMIT was sent", (at_participant(Op.COMMIT, "arrived"),)): True,
    Cut("COMMIT is written", (at_participant(Op.COMMIT, "written"),)): True,
}


def was_late(entry: Entry) -> bool:
    """A child had to be killed."""
    event = entry.get("event", "")
    return "killed" in event or "did not end in order" in event


async def stop_at(stage: Stage, cut: Cut, is_whole: bool) -> None:
    """SIGTERM at a cut; the batch is looked at in the next life of the server."""
    server, batch = stage.server, Batch(stage)
    call, holds = await bring_to(batch, cut)
    router = server.pid_of(COORDINATOR)
    server.terminate()
    # The shard is slow: the call gets its whole grace, and the router ends without it.
    await asyncio.to_thread(wait_until_gone, router)
    for hold in holds:
        hold.release()
    assert await asyncio.to_thread(server.exit_status) == 0
    assert [entry for entry in server.log.entries if was_late(entry)] == []
    outcome = await told(call)
    assert outcome.is_open
    await stage.close()
    await stage.restart()
    await batch.check(await stage.client_at(COORDINATOR), is_whole, outcome)
    stage.harness.forget()


async def test_a_stop_amid_an_atomic_batch_is_in_order_and_the_batch_whole_or_absent(new_server: StartServer) -> None:
    async with stage_of(new_server, shards=2, routers=1, settings=SHORT_GRACE) as stage:
        for cut, is_whole in STOPS.items():
            with noted(cut.name):
                await stop_at(stage, cut, is_whole)
        await stage.end()


@dataclass
class Batches:
    """Atomic batches for two queues, one after the other, and what their clients were told."""

    queues: tuple[str, str]
    told: dict[str, Told] = field(default_factory=dict)  # by text, which the two jobs of a batch share
    stored: asyncio.Event = field(default_factory=asyncio.Event)

    async def produce(self, client: SeppClient, producer: int) -> None:
        """Until the server is gone."""
        number = 0
        outcome = Told(ids=("",))
        while not outcome.is_open:
            text = f"{producer}.{number}"
            number += 1
            first, second = self.queues if number % 2 else self.queues[::-1]
            outcome = self.told[text] = await told(
                client.enqueue_atomic([job(first, text), job(second, text)]), OPEN_AT_A_STOP
            )
            if sum(bool(one.ids) for one in self.told.values()) >= SOME:
                self.stored.set()


async def test_a_stop_under_a_load_of_atomic_batches_keeps_each_whole_or_absent(new_server: StartServer) -> None:
    server = new_server(shards=2, routers=2).start()
    batches = Batches((server.queue_on(0), server.queue_on(1)))
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(server.address)) for _ in range(PRODUCERS)]
        producing = [asyncio.create_task(batches.produce(client, number)) for number, client in enumerate(clients)]
        await soon(batches.stored.wait())
        server.terminate()
        await soon(asyncio.gather(*producing))
        assert await asyncio.to_thread(server.exit_status) == 0
        assert [entry for entry in server.log.entries if was_late(entry)] == []
    server.restart()
    async with connected(server.address) as client:
        found = [texts(await soon(reserve(client, queue, max_jobs=1_000))) for queue in batches.queues]
    assert sorted(found[0]) == sorted(found[1])
    assert len(set(found[0])) == len(found[0])
    for text, outcome in batches.told.items():
        assert outcome.is_open or bool(outcome.ids) == (text in found[0])
