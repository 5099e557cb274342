"""One run: a whole server with its clients in one process, from a seed to an outcome."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from common import queue_pb2 as pb
from common import wire
from common.slots import slot_of
from common.wire import Op
from router.core import Reply
from shard.transactions import ASK_AGAIN_MS
from tests.simulation.bounds import bounded
from tests.simulation.clients import Clients, Delivery
from tests.simulation.disk import Disk
from tests.simulation.facts import Facts
from tests.simulation.invariants import check_empty, check_now, check_polls, check_rest, check_told
from tests.simulation.operators import Operators
from tests.simulation.router import RouterProcess
from tests.simulation.shape import KEYS, LONG_MS, NO_FAULTS, Shape, Style, draw, slot_map
from tests.simulation.shard import ShardProcess
from tests.simulation.supervisor import Supervisor
from tests.simulation.witness import Witness
from tests.simulation.world import Finding, World

# The longest way over a control channel, in microseconds.
CONTROL_US = 3_000
# How long a shard that is short of disk space stays so, at most.
SHORTAGE_US = 20_000
# Steps of transactions and moves that may be the last thing that somebody sees, and how soon after one they
# die, at most.
STEPS = (Op.DECIDE, Op.COMMIT, Op.ABORT, Op.RESOLVE, Op.FORGET, Op.MOVE)
AMBUSH_US = 3_000
# Rounds of questions between shards after which every transaction has to be settled.
SETTLING_ROUNDS = 8
# Rounds of a last worker, who takes all that is left; each takes as many jobs as a Reserve may.
LAST_ROUNDS = 40
LAST_JOBS = 16
LAST_LEASE_MS = 5_000
# How many runs end with that worker, who takes a fifth of their time.
TAKE_ALL = 0.4
# Events of a failing seed that are shown, and runs between two collections of what they left behind.
TRACE_SHOWN = 60
COLLECT_EVERY = 20


class Mishaps:
    """What goes wrong, until `stop`."""

    def __init__(self, world: World, shape: Shape, seen: Counter[str]) -> None:
        self.rates = shape.faults
        self._world = world
        self._seen = seen

    def stop(self) -> None:
        self.rates = NO_FAULTS

    def _happens(self, rate: float, what: str) -> bool:
        if not rate or not self._world.chance(rate):
            return False
        self._seen[f"fault: {what}"] += 1
        return True

    def write_fails(self) -> bool:
        return self._happens(self.rates.write_fails, "write failed")

    def write_stalls(self) -> bool:
        return self._happens(self.rates.write_stalls, "write stalled")

    def sync_fails(self) -> bool:
        return self._happens(self.rates.sync_fails, "sync failed")

    def map_fails(self) -> bool:
        return self._happens(self.rates.write_fails * 5, "slot map not written")

    def is_ambushed(self, message: bytes) -> bool:
        """Whether somebody dies just after this has left."""
        if not self.rates.ambush:
            return False
        steps = sum(operation[1] in STEPS for operation in wire.unpack(message).items)
        return steps > 0 and self._happens(self.rates.ambush, "ambush")


class Cluster:
    """A server, its disks, and everybody who talks to it."""

    def __init__(self, shape: Shape, world: World) -> None:
        self.shape = shape
        self.world = world
        self.seen: Counter[str] = Counter()  # what has happened, and how often
        self.facts = Facts(shape.shards)
        self.mishaps = Mishaps(world, shape, self.seen)
        self.has_lost_parts = False  # a shard or a router has died
        self.has_lost_routers = False
        # Shared by the witnesses: the last attempt of each job that a worker has seen, requeued dead letters,
        # and what was done with leases.
        self.delivered: dict[bytes, int] = {}
        self.requeued: set[bytes] = set()
        self.done: set[tuple[int, bytes, int]] = set()
        first_map = slot_map(shape.shards)
        self.disks = [
            Disk(world, Witness(self, index, frozenset(first_map.slots_of(index)))) for index in range(shape.shards)
        ]
        self.routers_by_name: dict[str, RouterProcess] = {}
        self.supervisor = Supervisor(self, shape.configs[0], first_map)
        self.clients = Clients(self)
        self.operators = Operators(self)
        self.supervisor.start()

    @property
    def keys_last(self) -> bool:
        """Idempotency keys outlive the run."""
        return self.shape.configs[0].storage.dedup_window_ms > LONG_MS * 10

    def link_us(self) -> int:
        """The longest way over one link between a router and a shard."""
        return self._way(self.shape.link_us)

    def control_us(self) -> int:
        """The longest way over one control channel."""
        return self._way(CONTROL_US)

    def _way(self, usual_us: int) -> int:
        """Slow ways differ, so that what goes over several of them may be faster than what goes over one."""
        world = self.world
        return (
            int(usual_us * self.shape.slow ** world.random.random())
            if world.chance(self.shape.slow_links)
            else usual_us
        )

    def process_of(self, queue: str) -> ShardProcess:
        process = self.supervisor.shard_process(self.supervisor.slot_map.owners[slot_of(queue)])
        assert process is not None
        return process

    # -- a step ---------------------------------------------------------------------------------

    def step(self) -> None:
        world = self.world
        world.run(world.number(0, self.shape.step_us))
        self.clients.act()
        self._mishap()
        check_now(self)

    def _mishap(self) -> None:
        world, shape, rates, supervisor = self.world, self.shape, self.mishaps.rates, self.supervisor
        if world.chance(rates.shard_dies) and supervisor.kill_shard(world.number(0, shape.shards - 1)):
            self.lost_part("shard killed")
        if world.chance(rates.router_dies) and supervisor.kill_router(world.number(0, shape.routers - 1)):
            self.lost_router("router killed")
        if world.chance(rates.all_die):
            self.lost_router("everything killed")
            supervisor.kill()
        if world.chance(rates.supervisor_dies):
            self.lost_router("supervisor killed")
            supervisor.die()
        if world.chance(rates.disk_is_short):
            self._disk_is_short(world.number(0, shape.shards - 1))
        if world.chance(shape.stops):
            self.seen["orderly stop"] += 1
            supervisor.stop()
        if world.chance(shape.reloads):
            self.seen["configuration reloaded"] += 1
            supervisor.configure(world.pick(shape.configs))
        if world.chance(shape.operators):
            self.operators.act()
        if shape.moves and world.chance(shape.moves):
            self.operators.move()
        if shape.resizes and world.chance(shape.resizes):
            self.operators.resize()

    def slots_moved(self, slots: frozenset[int], source: int, target: int) -> None:
        """The map was replaced: from this moment on the target's disk counts."""
        self.seen["slots moved"] += 1
        live = self.disks[source].witness.slots_left(slots)
        self.disks[target].witness.slots_arrived(slots, live, self.disks[target].store)

    def shard_added(self, index: int) -> None:
        self.seen["shard added"] += 1
        self.facts.add_shard()
        self.disks.append(Disk(self.world, Witness(self, index, frozenset())))

    def shard_removed(self, index: int) -> None:
        """The last shard was taken away: nothing may have been left on it."""
        self.seen["shard taken away"] += 1
        self.facts.remove_shard()
        self.disks.pop().is_of_no_use = True

    def lost_part(self, what: str) -> None:
        self.has_lost_parts = True
        self.seen[f"crash: {what}"] += 1

    def lost_router(self, what: str) -> None:
        self.has_lost_routers = True
        self.lost_part(what)

    def sent(self, router: int, shard: int, message: bytes) -> None:
        """A router has sent an envelope; perhaps that was the last thing that it or the shard lives to see."""
        if self.mishaps.is_ambushed(message):
            self.world.later(AMBUSH_US, self._ambush, router, shard)

    def _ambush(self, router: int, shard: int) -> None:
        if self.world.chance(0.7):
            if self.supervisor.kill_router(router):
                self.lost_router("router killed")
        elif self.supervisor.kill_shard(shard):
            self.lost_part("shard killed")

    def _disk_is_short(self, index: int) -> None:
        process = self.supervisor.shard_process(index)
        if process is not None:
            self.seen["fault: disk almost full"] += 1
            process.told("shortage", True)
            self.world.later(SHORTAGE_US, process.told, "shortage", False)

    # -- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Nothing goes wrong any more: everything has to come to rest, and nothing may be left."""
        self.mishaps.stop()
        self.supervisor.configure(self.shape.configs[0])
        self.settle()
        check_polls(self)
        self._end_waits()
        self.settle()
        check_rest(self)
        check_told(self)
        self.world.run(LONG_MS * 1000)
        self.settle()
        self._ask_for_all_keys()
        if self.world.chance(TAKE_ALL):
            self._take_all()
            check_empty(self)
        check_rest(self)
        check_told(self)

    def settle(self) -> None:
        """Until nothing is under way, and shards have asked for what they were in doubt of."""
        self.world.settle()
        for _ in range(SETTLING_ROUNDS):
            is_open = any(disk.witness.promises or disk.witness.decisions for disk in self.disks)
            # Those that stop as well: they are waited for by the rest of the server.
            routers = [place.process for place in self.supervisor.routers if place.process is not None]
            if not is_open and not any(router.is_trying_again or router.is_moving for router in routers):
                return
            self.world.run((ASK_AGAIN_MS + 10) * 1000)
            self.world.settle()

    def _end_waits(self) -> None:
        """By the clients, by the server, or by time."""
        match self.world.number(0, 2):
            case 0:
                for call, (router, _) in list(self.clients.open_polls.items()):
                    router.client_goes(call)
            case 1:
                self.supervisor.stop()
            case _:
                self.world.run(LONG_MS * 1000)

    def _ask_for_all_keys(self) -> None:
        """Every key names the job that was stored under it, or is free."""
        if not self.shape.keyed:
            return
        jobs = [
            pb.EnqueueRequest(queue=queue, job_type=f"last {queue} {key}", idempotency_key=key)
            for queue in self.shape.queues
            for key in KEYS
        ]
        for job in jobs:
            self.clients.hold(job)
        self.clients.send_batch(jobs, may_give_up=False)
        self.settle()

    def _take_all(self) -> None:
        """A last worker gets every job that is left, and every dead letter is drained."""
        for _ in range(LAST_ROUNDS):
            if not any(self.facts.live):
                return
            self.clients.poll(self.shape.queues, LAST_LEASE_MS, 0, LAST_JOBS, may_give_up=False, done=self._take)
            self.clients.drain_some(None, 256, may_give_up=False)
            self.settle()
            if any(self.facts.live):  # what was refused for load is given out again
                self.world.run(LAST_LEASE_MS * 1000)

    def _take(self, request: pb.ReserveRequest, reply: Reply | None) -> None:
        for job in self.clients.jobs_of(request, reply):
            self.clients.ack(Delivery(job.id, job.attempt, True), may_give_up=False)


class Outcome(NamedTuple):
    """What became of a run."""

    seed: int
    finding: Finding | None
    seen: Counter[str]
    trace: list[str]  # empty unless it was asked for


def run(
    seed: int,
    steps: int | None = None,
    tracing: bool = False,
    style: Style | None = None,
    shape: Shape | None = None,
    prepare: Callable[[Cluster], None] | None = None,
) -> Outcome:
    """Run one seed. `steps`, `style` and `shape` replace what it draws; `prepare` sees the cluster at its start."""
    world = World(seed, tracing)
    finding: Finding | None = None
    shape = shape or draw(seed, steps, style)
    with bounded(shape.small_bounds):
        cluster = Cluster(shape, world)
        if prepare is not None:
            prepare(cluster)
        try:
            world.settle()
            for _ in range(shape.steps):
                cluster.step()
            cluster.finish()
        except Finding as found:
            finding = found
        except Exception as error:  # the code under test has failed in a way of its own
            finding = Finding("failure", f"{type(error).__name__}: {error}")
            finding.__cause__ = error
    cluster.seen["events"] += world.events_done
    return Outcome(seed, finding, cluster.seen, world.told())


class Tally(NamedTuple):
    """What became of many runs."""

    seeds: int
    seen: Counter[str]
    findings: list[tuple[int, str]]  # seed, and what was found


def run_many(seeds: range, steps: int | None = None, style: Style | None = None) -> Tally:
    """Run seeds one after the other."""
    seen: Counter[str] = Counter()
    findings: list[tuple[int, str]] = []
    gc.disable()  # a run leaves circles behind: they are collected between runs, not again and again within
    gc.freeze()  # and what was there before is not looked through with them: under pytest, most of a collection
    try:
        for count, seed in enumerate(seeds):
            outcome = run(seed, steps, style=style)
            seen.update(outcome.seen)
            if outcome.finding is not None:
                findings.append((seed, str(outcome.finding)))
            if count % COLLECT_EVERY == 0:
                gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    return Tally(len(seeds), seen, findings)


def explanation(
    seed: int, steps: int | None = None, events: int | None = TRACE_SHOWN, style: Style | None = None
) -> str:
    """A run in words: the last events (None: all), what was found, and how to see it again."""
    again = run(seed, steps, tracing=True, style=style)
    shown = again.trace if events is None else again.trace[-events:]
    options = ("" if steps is None else f" --steps {steps}") + ("" if style is None else f" --style {style}")
    return "\n".join(
        (
            f"seed {seed}, the last {len(shown)} of {len(again.trace)} events:",
            *shown,
            f"seed {seed}: {again.finding or 'nothing was found'}",
            f"again: python scripts/simulate.py --seed {seed}{options}",
        )
    )
