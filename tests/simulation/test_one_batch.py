"""One atomic batch over three shards, and a death at each moment of its way: all or nothing (field case 17)."""

from __future__ import annotations

from itertools import count

import pytest

from common.wire import Op, Operation
from shard.machine import Machine
from shard.state import Instant
from tests.simulation.clients import Batch
from tests.simulation.invariants import check_now, check_polls, check_rest, check_told
from tests.simulation.scene import Scene
from tests.simulation.simulation import run_many

HOME, OTHER, COORDINATOR = "home", "other", "coordinator"
# Events after which a batch that nobody disturbs is surely over.
MOMENTS_MAX = 120
TEN_MINUTES_MS = 600_000


def sent(scene: Scene) -> Batch:
    """A batch on all three shards, by a client who waits as long as it takes. The only router coordinates."""
    clients = scene.cluster.clients
    jobs = [scene.job(scene.queue(shard), key="a") for shard in range(3)]
    for job in jobs:
        clients.hold(job)
    return clients.send_atomic(jobs, may_give_up=False)


def kill(scene: Scene, who: str) -> None:
    supervisor = scene.cluster.supervisor
    scene.cluster.lost_router(who)
    if who == COORDINATOR:
        supervisor.kill_router(0)
    else:
        supervisor.kill_shard(0 if who == HOME else 1)


def one_batch(deaths: dict[str, int], seed: int) -> tuple[Scene, Batch, bool]:
    """A batch, and who dies after how many events. Returns whether it was over before the first death."""
    scene = Scene(shards=3, routers=1, seed=seed)
    batch = sent(scene)
    is_over = False
    for moment in range(max(deaths.values()) + 1):
        if moment == min(deaths.values()):
            is_over = scene.world.under_way == 0
        for who, at in deaths.items():
            if at == moment:
                kill(scene, who)
        check_now(scene.cluster)
        scene.world.next()
    return scene, batch, is_over


def check(scene: Scene) -> None:
    scene.settle()
    check_polls(scene.cluster)
    check_rest(scene.cluster)
    check_told(scene.cluster)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dying", [HOME, OTHER, COORDINATOR])
def test_a_batch_is_all_or_nothing_whenever_a_part_dies(dying: str, seed: int) -> None:
    outcomes = set()
    for moment in count():
        assert moment < MOMENTS_MAX, "it is never over"
        scene, batch, is_over = one_batch({dying: moment}, seed)
        check(scene)
        outcomes.add((batch.told, len(scene.cluster.facts.by_type)))
        if is_over:
            break
    assert ("stored", 3) in outcomes
    assert {stored for _, stored in outcomes} == {0, 3}, "it was stored whatever happened, or never"


@pytest.mark.parametrize("dying", [(HOME, COORDINATOR), (OTHER, COORDINATOR), (HOME, OTHER)], ids=" ".join)
@pytest.mark.parametrize("apart", [0, 3, 8])
def test_a_batch_is_all_or_nothing_whenever_two_parts_die(dying: tuple[str, str], apart: int) -> None:
    first, second = dying
    for moment in count():
        assert moment < MOMENTS_MAX, "it is never over"
        is_over = False
        for deaths in ({first: moment, second: moment + apart}, {second: moment, first: moment + apart}):
            scene, _, is_over = one_batch(deaths, seed=moment)
            check(scene)
        if is_over:
            break


def with_promises(scene: Scene) -> None:
    """Until every shard has promised its part, durably, and nobody has decided."""
    facts = scene.cluster.facts
    while not all(facts.promised):
        assert scene.world.under_way
        scene.world.next()
    assert not facts.decided


def test_a_coordinator_that_stays_away_for_ten_minutes_leaves_nothing_behind() -> None:
    scene = Scene(shards=3, routers=1)
    batch = sent(scene)
    with_promises(scene)
    scene.cluster.lost_router("router killed")
    scene.cluster.supervisor.kill_router(0, away_ms=TEN_MINUTES_MS)
    scene.pass_ms(TEN_MINUTES_MS - 1_000)
    assert [len(promised) for promised in scene.cluster.facts.promised] == [0, 1, 1]
    scene.pass_ms(2_000)
    # It is there again, and the shards have asked: now everybody knows.
    check(scene)
    assert batch.told == ""
    assert scene.cluster.facts.by_type == {}


def test_the_other_queues_are_served_while_a_coordinator_is_away() -> None:
    scene = Scene(shards=3, routers=2)
    sent_by_first = scene.enqueue(*(scene.queue(shard) for shard in range(3)), atomic=True, router=0)
    with_promises(scene)
    scene.cluster.lost_router("router killed")
    # Its end is not noticed: nobody may decide for it, and everything else goes on.
    process = scene.cluster.supervisor.routers[0].process
    assert process is not None
    process.kill()
    for shard in range(3):
        scene.stored(scene.queue(shard, 1), router=1)
    scene.stored(*(scene.queue(shard) for shard in range(3)), router=1)
    assert sent_by_first.reply is None
    assert [scene.depth(scene.queue(shard)) for shard in range(3)] == [2, 2, 2]
    scene.cluster.supervisor.noticed_later(process)
    scene.at_rest()
    assert [scene.depth(scene.queue(shard)) for shard in range(3)] == [1, 1, 1]


def test_a_queue_that_is_deleted_while_prepared_leaves_a_batch_whole_or_absent() -> None:
    outcomes = set()
    for moment in range(MOMENTS_MAX):
        scene = Scene(shards=3, routers=1, seed=moment)
        scene.stored(scene.queue(1))
        batch = sent(scene)
        for _ in range(moment):
            scene.world.next()
        is_over = scene.world.under_way == 0
        conversation = scene.cluster.operators.delete(scene.queue(1), wait=True)
        scene.settle()
        scene.world.run(10_000_000)
        check(scene)
        assert conversation is not None and conversation.is_over
        outcomes.add((batch.told, conversation.answer is not None))
        if is_over:
            break
    assert ("not stored", True) in outcomes
    assert ("stored", True) in outcomes


def test_the_runs_meet_every_step_of_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or they would say little."""
    taken: set[int] = set()
    apply = Machine.apply

    def noting(self: Machine, router: str, operation: Operation, now: Instant, epoch: int) -> None:
        taken.add(operation[1])
        apply(self, router, operation, now, epoch)

    monkeypatch.setattr(Machine, "apply", noting)
    run_many(range(40))
    assert {Op.PREPARE, Op.DECIDE, Op.COMMIT, Op.ABORT, Op.RESOLVE, Op.FORGET} <= taken
