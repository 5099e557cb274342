"""EnqueueAtomic over two shards, and SIGKILL at every named point of its protocol: field case 17 on real processes.

A round brings one batch to a cut, somebody is killed, the others go on, and then what the client was
told, what a worker finds, the room in the queues and the keys must all tell the same story. Which
story it has to be is written beside each cut.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import pytest

from common.wire import Op
from tests.faults.armed_points import BEFORE_ANSWER, SHARD_GONE, STARTING
from tests.faults.armed_stage import (
    CAP,
    COORDINATOR,
    HOME,
    NO_COMMIT_SENT,
    NO_DECIDE_SENT,
    OTHER_ROUTER,
    PARTICIPANT,
    UNASKED_HOME,
    Batch,
    Cut,
    Stage,
    Told,
    Where,
    at_coordinator,
    at_home,
    at_participant,
    bring_to,
    noted,
    serve_bystander,
    stage_of,
    told,
)
from tests.integration.conftest import StartServer

EVERYBODY = "everybody"

NOBODY: frozenset[str] = frozenset()
# The participant's promise is known, and kept by whoever comes after it.
PROMISED = frozenset({PARTICIPANT})
# The home will decide; if it dies before it has, nobody ever will.
ASKED = frozenset({COORDINATOR, PARTICIPANT})
DECIDED = frozenset({COORDINATOR, HOME, PARTICIPANT, EVERYBODY})

CUTS = (
    Cut("no PREPARE has left", (at_coordinator(Op.PREPARE, "sending", HOME),), NOBODY),
    Cut("PREPARE was sent to both", (UNASKED_HOME, at_participant(Op.PREPARE, "arrived")), NOBODY),
    Cut(
        "the participant has applied PREPARE, not written",
        (at_participant(Op.PREPARE, "applied"), UNASKED_HOME),
        NOBODY,
    ),
    Cut(
        "the participant has written PREPARE, not synced", (at_participant(Op.PREPARE, "written"), UNASKED_HOME), NOBODY
    ),
    Cut("the participant has synced PREPARE, not voted", (at_participant(Op.PREPARE, "synced"), UNASKED_HOME), NOBODY),
    Cut(
        "the home has voted, the participant has synced PREPARE",
        (at_participant(Op.PREPARE, "synced"),),
        NOBODY,
        home_has_voted=True,
    ),
    Cut(
        "the participant has sent its vote",
        (at_coordinator(Op.PREPARE, "answered", PARTICIPANT), UNASKED_HOME),
        PROMISED,
    ),
    Cut("the home has applied PREPARE, not written", (at_home(Op.PREPARE, "applied"),), PROMISED, home_is_last=True),
    Cut("the home has written PREPARE, not synced", (at_home(Op.PREPARE, "written"),), PROMISED, home_is_last=True),
    Cut("the home has synced PREPARE, not voted", (at_home(Op.PREPARE, "synced"),), PROMISED, home_is_last=True),
    Cut("the home has sent its vote", (at_coordinator(Op.PREPARE, "answered", HOME),), PROMISED, home_is_last=True),
    Cut("all votes are in, no DECIDE has left", (at_coordinator(Op.DECIDE, "sending", HOME),), PROMISED),
    Cut("DECIDE was sent", (at_home(Op.DECIDE, "arrived"),), ASKED),
    Cut("the home has applied DECIDE, not written", (at_home(Op.DECIDE, "applied"),), ASKED),
    Cut("the home has written DECIDE, not synced", (at_home(Op.DECIDE, "written"),), DECIDED),
    Cut("the home has synced DECIDE, not said so", (at_home(Op.DECIDE, "synced"),), DECIDED),
    Cut("the home has said that it decided", (at_coordinator(Op.DECIDE, "answered", HOME),), DECIDED),
    Cut("it is decided, no COMMIT has left", (at_coordinator(Op.COMMIT, "sending", PARTICIPANT),), DECIDED),
    Cut("COMMIT was sent", (at_participant(Op.COMMIT, "arrived"),), DECIDED),
    Cut("the participant has applied COMMIT, not written", (at_participant(Op.COMMIT, "applied"),), DECIDED),
    Cut("the participant has written COMMIT, not synced", (at_participant(Op.COMMIT, "written"),), DECIDED),
    Cut("the participant has synced COMMIT, not said so", (at_participant(Op.COMMIT, "synced"),), DECIDED),
    Cut("the participant has said that it committed", (at_coordinator(Op.COMMIT, "answered", PARTICIPANT),), DECIDED),
    Cut("all have committed, no FORGET has left", (at_coordinator(Op.FORGET, "sending", HOME),), DECIDED),
    Cut(
        "FORGET was sent, the client is not answered",
        ((COORDINATOR, BEFORE_ANSWER, ""), at_home(Op.FORGET, "arrived")),
        DECIDED,
    ),
    Cut("the home has applied FORGET, not written", (at_home(Op.FORGET, "applied"),), DECIDED, is_answered=True),
    Cut("the home has written FORGET, not synced", (at_home(Op.FORGET, "written"),), DECIDED, is_answered=True),
)


# -- rounds ---------------------------------------------------------------------------------------


async def play(stage: Stage, cut: Cut, victim: str) -> None:
    """Somebody is killed at a cut, and is back when the batch is looked at."""
    batch = Batch(stage)
    await stage.client_at(COORDINATOR)
    call, holds = await bring_to(batch, cut)
    outcome = await told(call) if cut.is_answered else None
    back = stage.harness.hold(victim, STARTING)
    await stage.kill(victim)
    if victim == HOME and cut.home_has_voted:  # when the last vote comes, DECIDE has nowhere to go
        await asyncio.to_thread(stage.harness.wait_until_passed, COORDINATOR, SHARD_GONE, HOME)
    for hold in holds:
        hold.release()
    await asyncio.to_thread(back.wait)
    await serve_bystander(stage)
    back.release()
    outcome = outcome or await told(call)
    await stage.wait_until_back(victim)
    check_told(cut, victim, outcome)
    await batch.check(await stage.client_at(OTHER_ROUTER), victim in cut.whole_without, outcome)
    stage.harness.forget()


async def play_all(stage: Stage, cut: Cut) -> None:
    """All are killed at a cut as if in one instant, and are back when the batch is looked at."""
    batch = Batch(stage)
    await stage.client_at(COORDINATOR)
    call, holds = await bring_to(batch, cut)
    outcome = await told(call) if cut.is_answered else None
    # Where something was just written the supervisor dies too, and another one starts on what is there. At the
    # other cuts the disk is as it was at one of these, and it saves a good part of the time not to.
    is_whole_server = any(name.endswith("-written") for _, name, _ in cut.holds)
    await (stage.kill_all() if is_whole_server else stage.kill_children((COORDINATOR, HOME, PARTICIPANT)))
    for hold in holds:
        hold.release()
    outcome = outcome or await told(call)
    if is_whole_server:
        await stage.restart()
    for victim in (COORDINATOR, HOME, PARTICIPANT):
        await stage.wait_until_back(victim)
    check_told(cut, EVERYBODY, outcome)
    await batch.check(await stage.client_at(COORDINATOR), EVERYBODY in cut.whole_without, outcome)
    stage.harness.forget()


def check_told(cut: Cut, victim: str, outcome: Told) -> None:
    """Who asked a router that died hears nothing; else the answer is the truth."""
    if cut.is_answered:
        assert outcome.ids
    elif victim in (COORDINATOR, EVERYBODY):
        assert outcome.is_open
    else:
        assert bool(outcome.ids) == (victim in cut.whole_without)
        assert outcome.is_refused == (victim not in cut.whole_without)


async def each(cuts: Sequence[Cut], play_one: Callable[[Cut], Awaitable[None]]) -> None:
    """A round for each cut."""
    begun = time.monotonic()
    for cut in cuts:
        with noted(cut.name):
            await play_one(cut)
    print(f"{len(cuts)} rounds took {time.monotonic() - begun:.1f} s")


# -- the matrix -----------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [COORDINATOR, HOME, PARTICIPANT], ids=["coordinator", "home", "participant"])
async def test_a_batch_is_whole_or_absent_at_whatever_point_one_process_is_killed(
    new_server: StartServer, victim: str
) -> None:
    async with stage_of(new_server, shards=3, routers=2) as stage:
        await each(CUTS, lambda cut: play(stage, cut, victim))
        await stage.end()


async def test_a_batch_is_whole_or_absent_at_whatever_point_everybody_is_killed(new_server: StartServer) -> None:
    async with stage_of(new_server, shards=2, routers=1) as stage:
        await each(CUTS, lambda cut: play_all(stage, cut))
        await stage.end()


# -- a batch that is refused ----------------------------------------------------------------------

# The participant has room for one of its two jobs.
ABORT_CUTS = (
    Cut("no ABORT has left", (at_coordinator(Op.ABORT, "sending", HOME),)),
    Cut("ABORT was sent", (at_home(Op.ABORT, "arrived"),), is_answered=True),
    Cut("the home has applied ABORT, not written", (at_home(Op.ABORT, "applied"),), is_answered=True),
    Cut("the home has written ABORT, not synced", (at_home(Op.ABORT, "written"),), is_answered=True),
    Cut("the home has synced ABORT, not said so", (at_home(Op.ABORT, "synced"),), is_answered=True),
)


async def play_refused(stage: Stage, cut: Cut, victim: str) -> None:
    batch = Batch(stage)
    await batch.fill(batch.participant, CAP - 1)
    call, holds = await bring_to(batch, cut)
    outcome = await told(call) if cut.is_answered else None
    await stage.kill(victim)
    for hold in holds:
        hold.release()
    outcome = outcome or await told(call)
    assert outcome.is_open if victim == COORDINATOR and not cut.is_answered else outcome.is_refused
    await stage.wait_until_back(victim)
    await batch.check(await stage.client_at(OTHER_ROUTER), False, outcome)
    stage.harness.forget()


async def test_a_refused_batch_holds_nothing_at_whatever_point_of_its_abort_one_process_is_killed(
    new_server: StartServer,
) -> None:
    async with stage_of(new_server, shards=2, routers=2) as stage:
        for victim in (COORDINATOR, HOME, PARTICIPANT):
            with noted(f"{victim} is killed"):
                await each(ABORT_CUTS, lambda cut: play_refused(stage, cut, victim))  # noqa: B023
        await stage.end()


# -- twice ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Twice:
    """One is killed at a cut, and another, or its successor, at a point of what follows."""

    cut: Cut
    first: str
    then: Where
    second: str
    is_whole: bool


def at_other_router(kind: Op, stage: str, of: str) -> Where:
    return OTHER_ROUTER, at_coordinator(kind, stage, of)[1], of


DECIDE_SENT = Cut("DECIDE was sent", (at_home(Op.DECIDE, "arrived"),))
DECIDE_WRITTEN = Cut("the home has written DECIDE, not synced", (at_home(Op.DECIDE, "written"),))
COMMIT_SENT = Cut("COMMIT was sent", (at_participant(Op.COMMIT, "arrived"),))

TWICE = {
    "the home while it is asked for a dead coordinator": Twice(
        NO_DECIDE_SENT, COORDINATOR, at_home(Op.RESOLVE, "arrived"), HOME, False
    ),
    "the participant while it lets go for a dead coordinator": Twice(
        NO_DECIDE_SENT, COORDINATOR, at_participant(Op.ABORT, "applied"), PARTICIPANT, False
    ),
    "the router that asks for a dead coordinator": Twice(
        NO_DECIDE_SENT, COORDINATOR, at_other_router(Op.RESOLVE, "sending", HOME), OTHER_ROUTER, False
    ),
    "the participant while it commits for a dead coordinator": Twice(
        NO_COMMIT_SENT, COORDINATOR, at_participant(Op.COMMIT, "written"), PARTICIPANT, True
    ),
    "the router that commits for a dead coordinator": Twice(
        NO_COMMIT_SENT, COORDINATOR, at_other_router(Op.COMMIT, "sending", PARTICIPANT), OTHER_ROUTER, True
    ),
    "the home while it forgets for a dead coordinator": Twice(
        NO_COMMIT_SENT, COORDINATOR, at_home(Op.FORGET, "applied"), HOME, True
    ),
    "the home's successor while it settles": Twice(DECIDE_SENT, HOME, at_home(Op.RESOLVE, "applied"), HOME, False),
    "the home's successor that has settled": Twice(DECIDE_SENT, HOME, at_home(Op.RESOLVE, "written"), HOME, False),
    "the coordinator while the home's successor settles": Twice(
        DECIDE_SENT, HOME, at_home(Op.RESOLVE, "applied"), COORDINATOR, False
    ),
    "the decided home's successor while it is asked": Twice(
        DECIDE_WRITTEN, HOME, at_home(Op.RESOLVE, "arrived"), HOME, True
    ),
    "the coordinator while the decided home's successor is asked": Twice(
        DECIDE_WRITTEN, HOME, at_home(Op.RESOLVE, "arrived"), COORDINATOR, True
    ),
    "the participant's successor while it commits": Twice(
        COMMIT_SENT, PARTICIPANT, at_participant(Op.COMMIT, "applied"), PARTICIPANT, True
    ),
}


async def play_twice(stage: Stage, twice: Twice) -> None:
    batch, harness = Batch(stage), stage.harness
    await stage.client_at(COORDINATOR)
    await stage.client_at(OTHER_ROUTER)
    call, holds = await bring_to(batch, twice.cut)
    then = harness.hold(*twice.then)
    # The other router settles, for there is no third one.
    back = harness.hold(COORDINATOR, STARTING) if twice.first == COORDINATOR else None
    await stage.kill(twice.first)
    for hold in holds:
        hold.release()
    await asyncio.to_thread(then.wait)
    if back is not None:
        await asyncio.to_thread(back.wait)
    await stage.kill(twice.second)
    then.release()
    if back is not None:
        back.release()
    outcome = await told(call)
    if COORDINATOR in (twice.first, twice.second):
        assert outcome.is_open
    else:
        assert (bool(outcome.ids), outcome.is_refused) == (twice.is_whole, not twice.is_whole)
    await stage.wait_until_back(twice.first)
    await stage.wait_until_back(twice.second)
    await batch.check(await stage.client_at(OTHER_ROUTER), twice.is_whole, outcome)
    harness.forget()


async def test_a_batch_is_whole_or_absent_when_what_follows_a_death_is_killed_too(new_server: StartServer) -> None:
    async with stage_of(new_server, shards=2, routers=2) as stage:
        for name, twice in TWICE.items():
            with noted(f"killed second: {name}"):
                await play_twice(stage, twice)
        await stage.end()


# -- every order of return ------------------------------------------------------------------------


async def play_return(stage: Stage, cut: Cut, order: Sequence[str], is_whole: bool) -> None:
    """All three are killed, and come back one after the other."""
    batch, harness = Batch(stage), stage.harness
    await stage.client_at(COORDINATOR)
    call, holds = await bring_to(batch, cut)
    backs = [harness.hold(victim, STARTING) for victim in order]
    await stage.kill_children(order)
    for hold in holds:
        hold.release()
    for victim, back in zip(order, backs, strict=True):
        await asyncio.to_thread(back.wait)
        back.release()
        await stage.wait_until_back(victim)
    outcome = await told(call)
    assert outcome.is_open
    await batch.check(await stage.client_at(COORDINATOR), is_whole, outcome)
    harness.forget()


async def test_a_batch_is_whole_or_absent_in_whatever_order_the_dead_return(new_server: StartServer) -> None:
    async with stage_of(new_server, shards=2, routers=1) as stage:
        for cut, is_whole in ((NO_DECIDE_SENT, False), (NO_COMMIT_SENT, True)):
            for order in permutations((COORDINATOR, HOME, PARTICIPANT)):
                with noted(f"{cut.name}, they return in the order {order}"):
                    await play_return(stage, cut, order, is_whole)
        await stage.end()
