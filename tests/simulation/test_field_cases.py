"""What went wrong in comparable systems, over several shards: long polls and leases, keys, capacity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from google.protobuf.message import Message

from common import admin_pb2
from common import queue_pb2 as pb
from router.admin import Admin, Patience
from router.front import Status
from tests.simulation.operators import Conversation
from tests.simulation.scene import LEASE_MS, Scene
from tests.simulation.shape import NO_FAULTS
from tests.unit.router_driver import milliseconds

ROUNDS = 150
WAIT_MS = 10_000
# What a wake-up takes at most in a scene: a few messages, turns and a sync.
WAKE_MS = 50


def two_queues(scene: Scene, shards: int) -> tuple[str, str]:
    """On one shard, or on two."""
    return scene.queue(0), scene.queue(shards - 1, nth=1)


# ---- 1, 2, 8: polls that end in the moment in which a job comes


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_job_for_a_poll_that_is_cancelled_is_there_for_the_next_one(shards: int) -> None:
    """Attempt 1 at once, or attempt 2 when its lease ends; never a third state."""
    ends: Counter[str] = Counter()
    scene = Scene(shards=shards)
    first, second = two_queues(scene, shards)
    for _ in range(ROUNDS):
        poll = scene.reserve(first, second, wait_ms=WAIT_MS, router=scene.world.number(0, 1))
        scene.pass_ms(scene.world.number(3, 8))
        scene.enqueue(second, router=scene.world.number(0, 1))
        scene.pass_ms(scene.world.random.random() * 12)
        poll.cancel()
        scene.settle()
        if poll.reply is None:
            ends["given back"] += 1
            (job,) = scene.reserved(first, second)
            assert job.attempt == 1
        else:
            ends["delivered"] += 1
            assert [job.attempt for job in poll.jobs] == [1]
            assert scene.reserved(first, second) == []
            scene.pass_ms(LEASE_MS + 1)
            (job,) = scene.reserved(first, second)
            assert job.attempt == 2
        scene.ack(job)
        scene.settle()
    assert ends["given back"] and ends["delivered"], "the rounds are all alike"
    scene.at_rest()


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("way", ["cancelled", "out of time"])
def test_of_two_polls_the_second_gets_the_job_when_the_first_ends_in_that_moment(way: str, shards: int) -> None:
    ends: Counter[str] = Counter()
    scene = Scene(shards=shards)
    first, second = two_queues(scene, shards)
    for _ in range(ROUNDS):
        polls = [
            scene.reserve(first, second, wait_ms=20 if way == "out of time" else WAIT_MS),
            scene.reserve(first, second, wait_ms=WAIT_MS, router=1),
        ]
        scene.pass_ms(8 + scene.world.random.random() * 12)
        scene.enqueue(second, router=1)
        if way == "cancelled":
            scene.pass_ms(scene.world.random.random() * 8)
            polls[0].cancel()
        scene.pass_ms(WAKE_MS)
        if polls[0].reply is None or not polls[0].jobs:
            ends["second"] += 1
            (job,) = polls[1].jobs
        else:
            ends["first"] += 1
            (job,) = polls[0].jobs
            polls[1].cancel()
        assert job.attempt == 1
        scene.ack(job)
        scene.settle()
    assert ends["first"] and ends["second"], "the rounds are all alike"
    scene.at_rest()


@pytest.mark.parametrize("shards", [1, 2])
def test_nothing_is_leased_into_a_call_whose_own_deadline_has_passed(shards: int) -> None:
    ends: Counter[str] = Counter()
    scene = Scene(shards=shards)
    first, second = two_queues(scene, shards)
    for _ in range(ROUNDS):
        poll = scene.reserve(first, second, wait_ms=WAIT_MS, deadline_ms=20)
        scene.pass_ms(10 + scene.world.random.random() * 12)
        scene.enqueue(second, router=1)
        scene.settle()
        scene.pass_ms(20)
        scene.settle()
        is_delivered = poll.reply is not None and bool(poll.jobs)
        ends["delivered" if is_delivered else "too late"] += 1
        (job,) = poll.jobs if is_delivered else scene.reserved(second)
        assert job.attempt == 1
        scene.ack(job)
        scene.settle()
    assert ends["delivered"] and ends["too late"], "the rounds are all alike"
    scene.at_rest()


# ---- 3: everything that makes a job ready wakes a poll


def now_ms(scene: Scene) -> float:
    return scene.world.now_us / 1000


def enqueued(scene: Scene, queue: str, held: pb.Job) -> float:
    scene.enqueue(queue)
    return now_ms(scene)


def committed(scene: Scene, queue: str, held: pb.Job) -> float:
    scene.enqueue(scene.queue(0, 1), queue, atomic=True)
    return now_ms(scene)


def scheduled(scene: Scene, queue: str, held: pb.Job) -> float:
    job = scene.job(queue)
    job.scheduled_at.FromMilliseconds(scene.world.wall_ms + 300)
    scene.enqueue(job)
    return scene.world.mono_ms + 300


def scheduled_over_a_restart(scene: Scene, queue: str, held: pb.Job) -> float:
    due_at = scheduled(scene, queue, held)
    scene.settle()
    scene.pass_ms(due_at - 5 - now_ms(scene))
    scene.cluster.supervisor.kill_shard(1)
    return due_at


def nacked(scene: Scene, queue: str, held: pb.Job) -> float:
    scene.nack(held)
    return now_ms(scene)


def nacked_with_a_delay(scene: Scene, queue: str, held: pb.Job) -> float:
    scene.nack(held, delay=milliseconds(300))
    return scene.world.mono_ms + 300


def given_up(scene: Scene, queue: str, held: pb.Job) -> float:
    return float(held.lease_expires_at.ToMilliseconds() - scene.world.wall_ms + scene.world.mono_ms)


def given_up_early(scene: Scene, queue: str, held: pb.Job) -> float:
    call = scene.extend(held, 20)
    scene.settle()
    until_ms = pb.ExtendResponse.FromString(call.answer).lease_expires_at.ToMilliseconds()
    return float(until_ms - scene.world.wall_ms + scene.world.mono_ms)


def requeued(scene: Scene, queue: str, held: pb.Job) -> float:
    scene.nack(held, dead_letter={})
    scene.settle()
    began = now_ms(scene)
    operate(scene, lambda admin, _: admin.requeue_dead_letters(admin_pb2.DeadLetterSelection(queue=queue)))
    return began


WAYS: dict[str, tuple[Callable[[Scene, str, pb.Job], float], int]] = {
    "an enqueue": (enqueued, 0),
    "an atomic batch": (committed, 0),
    "a schedule": (scheduled, 0),
    "a schedule, over a restart of the shard": (scheduled_over_a_restart, 0),
    "a nack": (nacked, LEASE_MS),
    "a nack with a delay": (nacked_with_a_delay, LEASE_MS),
    "a lease that ends": (given_up, 400),
    "a lease that is shortened": (given_up_early, LEASE_MS),
    "a dead letter that is requeued": (requeued, LEASE_MS),
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_makes_a_job_ready_wakes_a_poll_in_time_and_never_early(way: str, shards: int) -> None:
    scene = Scene(shards=2)
    watched = scene.queue(1)
    others = (scene.queue(1, nth=1),) if shards == 1 else (scene.queue(0), scene.queue(1, nth=1))
    act, lease_ms = WAYS[way]
    held = pb.Job()
    if lease_ms:
        scene.stored(watched)
        (held,) = scene.reserved(watched, lease_ms=lease_ms)
    poll = scene.reserve(*others, watched, wait_ms=WAIT_MS, router=1)
    scene.settle()
    ready_at = act(scene, watched, held)
    scene.pass_ms(ready_at + 200 - now_ms(scene))
    assert [job.queue for job in poll.jobs] == [watched]
    assert ready_at <= poll.at_ms <= ready_at + 200
    scene.at_rest()


def operate(scene: Scene, command: Callable[[Admin, Patience], Message]) -> Conversation:
    """What an operator does, until it is done or has to wait for time to pass."""
    router = scene.cluster.supervisor.routers[0].process
    assert router is not None
    conversation = Conversation(scene.cluster, router, command)
    conversation.go_on()
    scene.settle()
    return conversation


# ---- 5: timers that no longer apply never act


def is_ready(scene: Scene, queue: str) -> bool:
    queue_of_machine = scene.cluster.process_of(queue).machine._queues.get(queue)
    return queue_of_machine is not None and queue_of_machine.ready > 0


def test_a_nack_with_a_delay_outlasts_the_lease_that_it_ended() -> None:
    scene = Scene()
    scene.stored(scene.queue(0))
    (job,) = scene.reserved(scene.queue(0), lease_ms=2_000)
    scene.pass_ms(1_000)
    scene.nack(job, delay=milliseconds(10_000))
    scene.settle()
    scene.pass_ms(2_000)
    assert not is_ready(scene, scene.queue(0))
    scene.pass_ms(8_100)
    assert is_ready(scene, scene.queue(0))


def test_an_extended_lease_does_not_end_when_the_first_one_would_have() -> None:
    scene = Scene()
    scene.stored(scene.queue(0))
    (job,) = scene.reserved(scene.queue(0), lease_ms=2_000)
    scene.pass_ms(1_000)
    scene.extend(job, 2_000)
    scene.settle()
    scene.pass_ms(1_500)
    assert not is_ready(scene, scene.queue(0))
    ack = scene.ack(job)
    scene.settle()
    assert ack.status == Status.OK


def test_a_job_acked_just_before_its_lease_ends_is_never_redelivered() -> None:
    statuses: Counter[Status] = Counter()
    scene = Scene()
    queue = scene.queue(0)
    for _ in range(ROUNDS):
        scene.stored(queue)
        (job,) = scene.reserved(queue, lease_ms=100)
        scene.pass_ms(job.lease_expires_at.ToMilliseconds() - scene.world.wall_ms - scene.world.number(0, 5))
        ack = scene.ack(job)
        scene.settle()
        scene.pass_ms(10)
        statuses[ack.status] += 1
        again = scene.reserved(queue)
        if ack.status == Status.OK:
            assert again == []
        else:
            assert [each.attempt for each in again] == [2]
            scene.ack(again[0])
            scene.settle()
    assert statuses.keys() == {Status.OK, Status.NOT_FOUND}


# ---- 6: a late worker is refused, and the new holder keeps the job


def test_a_late_worker_is_refused_also_after_a_restart() -> None:
    scene = Scene()
    queue = scene.queue(0)
    scene.stored(queue)
    (late,) = scene.reserved(queue, lease_ms=100)
    scene.pass_ms(100)
    (job,) = scene.reserved(queue)
    for restart in (False, True):
        if restart:
            scene.cluster.supervisor.kill_shard(0)
            scene.settle()
        for call in (scene.ack(late), scene.nack(late), scene.extend(late, LEASE_MS)):
            scene.settle()
            assert call.status == Status.FAILED_PRECONDITION
    ack = scene.ack(job)
    scene.settle()
    assert ack.status == Status.OK


def test_a_late_worker_finds_nothing_of_a_queue_that_was_deleted_and_is_there_again() -> None:
    scene = Scene()
    queue = scene.queue(0)
    scene.stored(queue)
    (late,) = scene.reserved(queue, lease_ms=100)
    scene.pass_ms(101)
    deleted = operate(scene, lambda admin, one: admin.delete_queue(admin_pb2.DeleteQueueRequest(queue=queue), one))
    assert deleted.answer == admin_pb2.DeleteQueueResponse(removed_jobs=1)
    scene.stored(queue)
    (job,) = scene.reserved(queue)
    assert (job.attempt, job.id == late.id) == (1, False)
    for call in (scene.ack(late), scene.nack(late), scene.extend(late, LEASE_MS)):
        scene.settle()
        assert call.status == Status.NOT_FOUND
    ack = scene.ack(job)
    scene.settle()
    assert ack.status == Status.OK


# ---- 9, 10: a stop and a restart take no lease from its holder


def test_an_orderly_stop_takes_no_lease_from_its_holder_and_leaves_none_with_nobody() -> None:
    delivered = 0
    for seed in range(60):
        scene = Scene(seed=seed)
        queues = [scene.queue(shard) for shard in range(2)]
        polls = [scene.reserve(*queues, wait_ms=WAIT_MS, router=router) for router in (0, 1) for _ in range(4)]
        scene.enqueue(*queues, *queues)
        scene.pass_ms(scene.world.random.random() * 12)
        scene.cluster.supervisor.stop()
        scene.settle()
        jobs = [job for poll in polls if poll.reply is not None for job in poll.jobs]
        for job in jobs:
            ack = scene.ack(job)
            scene.settle()
            assert ack.status == Status.OK
        delivered += len(jobs)
        assert not any(scene.cluster.process_of(queue).machine._leases for queue in queues)
    assert delivered


# ---- 13: an enqueue that failed leaves its key free


def key_is_free(scene: Scene, queue: str) -> bool:
    call = scene.enqueue(scene.job(queue, key="k"))
    scene.settle()
    (result,) = call.results
    return result.HasField("success") and not result.success.deduplicated


@pytest.mark.parametrize("atomic", [False, True])
def test_a_key_is_free_after_its_queue_was_full(atomic: bool) -> None:
    first, second = (Scene().queue(shard) for shard in range(2))
    scene = Scene(queues=[{"name": first, "max_queue_depth": 1}])
    scene.stored(first)
    scene.enqueue(scene.job(first, key="k"), scene.job(second, key="k"), atomic=atomic)
    scene.settle()
    (job,) = scene.reserved(first)
    scene.ack(job)
    scene.settle()
    assert key_is_free(scene, first)
    assert key_is_free(scene, second) == atomic


@pytest.mark.parametrize("atomic", [False, True])
def test_a_key_is_free_or_names_a_stored_job_after_a_write_failed(atomic: bool) -> None:
    outcomes = set()
    for seed in range(20):
        scene = Scene(seed=seed)
        first, second = scene.queue(0), scene.queue(1)
        scene.cluster.mishaps.rates = NO_FAULTS._replace(write_fails=0.2, sync_fails=0.1)
        scene.enqueue(scene.job(first, key="k"), scene.job(second, key="k"), atomic=atomic)
        scene.settle()
        scene.cluster.mishaps.stop()
        stored = {job.queue for job in scene.cluster.facts.stored.values()}
        free = [key_is_free(scene, queue) for queue in (first, second)]
        assert free == [first not in stored, second not in stored]
        outcomes.add(tuple(free))
        scene.at_rest()
    if atomic:
        assert outcomes == {(True, True), (False, False)}
    else:
        assert {(True, False), (False, True), (False, False)} <= outcomes


# ---- 15: keys a, a, b in one batch


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_each_key_of_a_batch_is_one_job_and_results_are_in_line(atomic: bool, copies: int, shards: int) -> None:
    for seed in range(10):
        scene = Scene(shards=2, seed=seed)
        one, other = scene.queue(0), scene.queue(shards - 1, nth=1)
        batches = [
            scene.enqueue(
                scene.job(one, key="a"), scene.job(one, key="a"), scene.job(other, key="b"), atomic=atomic, router=copy
            )
            for copy in range(copies)
        ]
        scene.settle()
        scene.pass_ms(1_000)  # a batch that met the other one tries again
        answers = [
            list(batch.atomic.success.responses) if atomic else [result.success for result in batch.results]
            for batch in batches
        ]
        ids = {tuple(answer.job_id for answer in each) for each in answers}
        assert len(ids) == 1
        (first, second, third) = ids.pop()
        assert first == second != third
        news = Counter(answer.job_id for each in answers for answer in each if not answer.deduplicated)
        assert news == {first: 1, third: 1}
        assert (scene.depth(one), scene.depth(other)) == (1, 1)
        scene.at_rest()


# ---- 16: producers at the last places


@pytest.mark.parametrize("seed", range(5))
def test_fifty_producers_fill_the_last_places_exactly(seed: int) -> None:
    capped, beside = (Scene().queue(shard) for shard in range(2))
    scene = Scene(seed=seed, queues=[{"name": capped, "max_queue_depth": 10}])
    calls = []
    for producer in range(50):
        atomic = producer % 3 == 0
        jobs = (capped, beside, capped) if atomic else (capped,)
        calls.append((atomic, scene.enqueue(*jobs, atomic=atomic, router=producer % 2)))
        scene.pass_ms(scene.world.random.random())
    scene.settle()
    scene.pass_ms(10_000)
    accepted = sum(
        2 * call.atomic.HasField("success") if atomic else sum(one.HasField("success") for one in call.results)
        for atomic, call in calls
        if call.status == Status.OK
    )
    assert {call.status for _, call in calls} <= {Status.OK, Status.UNAVAILABLE}
    assert accepted == scene.depth(capped) == 10
    # Room comes back with the acks, and with nothing else.
    jobs_out = scene.reserved(capped, max_jobs=10)
    scene.nack(jobs_out[0])
    scene.ack(jobs_out[1])
    scene.settle()
    assert scene.depth(capped) == 9
    scene.stored(capped)
    assert scene.depth(capped) == 10
    scene.at_rest()
