"""The points at which the crash tests kill: all are reached, none can get lost, and a server as it is has none."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from common import children
from common.admin_client import AdminClient
from common.children import ChildTerms
from common.slots import slot_of
from common.wire import MoveCommand
from tests.faults.armed_harness import Harness
from tests.faults.armed_points import (
    ROUTER_POINTS,
    SHARD_GONE,
    SHARD_POINTS,
    STARTING,
    SUPERVISOR,
    SUPERVISOR_POINTS,
    Points,
    point,
    set_constant,
    wrap,
)
from tests.faults.armed_stage import (
    CAP,
    COORDINATOR,
    HOME,
    NO_DECIDE_SENT,
    OTHER_ROUTER,
    Batch,
    Stage,
    Told,
    bring_to,
    soon,
    stage_of,
    told,
)
from tests.integration.clients import connected, job, reserve
from tests.integration.conftest import StartServer
from tests.integration.server import ROOT, WAIT_S, environment_of

PRODUCT = ("common", "router", "shard")


async def commit(stage: Stage) -> None:
    batch = Batch(stage)
    outcome = await told(await batch.send())
    assert outcome.ids
    await batch.check(await stage.client_at(OTHER_ROUTER), True, outcome)


async def refuse(stage: Stage) -> None:
    batch = Batch(stage)
    await batch.fill(batch.participant, CAP - 1)
    outcome = await told(await batch.send())
    assert outcome == Told(is_refused=True)
    await batch.check(await stage.client_at(OTHER_ROUTER), False, outcome)


async def settle_for_a_dead_coordinator(stage: Stage) -> None:
    batch = Batch(stage)
    call, (hold,) = await bring_to(batch, NO_DECIDE_SENT)
    await stage.kill(COORDINATOR)
    hold.release()
    outcome = await told(call)
    await stage.wait_until_back(COORDINATOR)
    await batch.check(await stage.client_at(OTHER_ROUTER), False, outcome)


async def move_a_slot(stage: Stage) -> None:
    """With a change after the first rows have gone over, so that the last changes are some."""
    client = await stage.client_at(OTHER_ROUTER)
    queue = stage.server.queue_on(0)
    await soon(client.enqueue(job(queue)))
    hold = stage.harness.hold(COORDINATOR, point(MoveCommand.CHANGES, "answered"))
    with AdminClient(stage.server.data) as admin:
        moving = asyncio.create_task(asyncio.to_thread(admin.move_slots, [slot_of(queue)], 1, 0))
        await asyncio.to_thread(hold.wait)
        await soon(client.enqueue(job(queue)))
        hold.release()
        await soon(moving)
    found = await soon(reserve(client, queue, max_jobs=3))
    assert len(found) == 2
    for one in found:
        await soon(client.ack(one.ctx))


async def test_every_named_point_is_reached(new_server: StartServer) -> None:
    async with stage_of(new_server, shards=2, routers=2) as stage:
        await move_a_slot(stage)
        await commit(stage)
        await refuse(stage)
        await settle_for_a_dead_coordinator(stage)
        await stage.kill(HOME)
        await asyncio.to_thread(stage.harness.wait_until_passed, COORDINATOR, SHARD_GONE, HOME)
        await stage.wait_until_back(HOME)
        passed = list(stage.harness.passed)
        await stage.end()
    assert {name for process, name, _ in passed if process.startswith("router")} == ROUTER_POINTS
    assert {name for process, name, _ in passed if process.startswith("shard")} == SHARD_POINTS
    assert {name for process, name, _ in passed if process == SUPERVISOR} == SUPERVISOR_POINTS


# -- points that got lost -------------------------------------------------------------------------


class Moved:
    """Code that has changed since points were put in it."""

    def still_here(self, number: int) -> int:
        return number


def test_a_point_in_a_method_that_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match="Moved has no was_here"):
        wrap(Moved, "was_here", ("self",), lambda original, *given: original(*given))


def test_a_point_in_a_method_with_other_parameters_is_an_error() -> None:
    with pytest.raises(LookupError, match="still_here takes"):
        wrap(Moved, "still_here", ("self", "name"), lambda original, *given: original(*given))
    assert Moved().still_here(1) == 1


def test_a_number_that_has_another_name_is_an_error() -> None:
    with pytest.raises(LookupError, match="no number RESTART_DELAY_EVER_S"):
        set_constant(children, "RESTART_DELAY_EVER_S", 0.0)


def test_a_hold_at_an_unknown_point_is_an_error() -> None:
    with Harness() as harness:
        with pytest.raises(LookupError, match="no point 'prepare-forgotten' in shard-0"):
            harness.hold("shard-0", "prepare-forgotten")
        with pytest.raises(LookupError, match="no point 'prepare-arrived' in router-0"):
            harness.hold("router-0", "prepare-arrived")
        with pytest.raises(LookupError, match="no point 'map-arrived' in supervisor"):
            harness.hold("supervisor", "map-arrived")


def test_reaching_an_unknown_point_is_an_error() -> None:
    with pytest.raises(LookupError, match="no point 'nowhere'"):
        Points(SHARD_POINTS).reach("nowhere")


def test_a_hold_that_nobody_came_to_is_an_error() -> None:
    with Harness() as harness:
        harness.hold("shard-0", STARTING)
        with pytest.raises(AssertionError, match="nobody came to"):
            harness.forget()


def test_what_is_on_its_way_for_an_earlier_round_passes_a_point_where_another_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Harness() as harness:
        for name, value in harness.settings.items():
            monkeypatch.setenv(name, value)
        shard = Points(SHARD_POINTS)
        shard.process = HOME
        shard.reach("forget-arrived", transaction=1)
        harness.forget()
        hold = harness.hold(HOME, "forget-arrived")
        late = threading.Thread(target=shard.reach, args=("forget-arrived", "", 1), daemon=True)
        late.start()
        late.join(WAIT_S)
        assert (hold.is_reached, harness.passed) == (False, [])
        hold.release()


# -- a server as it is ----------------------------------------------------------------------------


def test_no_file_of_the_product_speaks_of_tests_or_points() -> None:
    files = [path for package in PRODUCT for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 40
    signs = ("armed_", "from tests", "import tests", "TEST_POINTS")
    assert [(path.name, sign) for path in files for sign in signs if sign in path.read_text()] == []


async def test_a_server_as_it_is_runs_the_routers_and_shards_of_the_product(new_server: StartServer) -> None:
    server = new_server(shards=2, routers=1).start()
    async with connected(server.address) as client:
        acks = await soon(client.enqueue_atomic([job(server.queue_on(0)), job(server.queue_on(1))]))
    assert len(acks) == 2
    terms = ChildTerms()
    for child, command in (("router-0", terms.router), ("shard-0", terms.shard), ("shard-1", terms.shard)):
        process = Path(f"/proc/{await asyncio.to_thread(server.pid_of, child)}")
        running = process.joinpath("cmdline").read_text().split("\0")
        assert tuple(running[: len(command)]) == command
        assert not any(entry.startswith(b"TEST_POINTS=") for entry in environment_of(process))
    assert await asyncio.to_thread(server.stop) == 0
