"""The supervisor's decisions: who is up, in which generation, who is told of it, and which shard owns which slot.

It follows `common.supervisor` step by step: a child is started with what was known at that moment,
hears of everything later over its own control channel, and a child that ended is told of to the
others before its successor starts. All of these messages take their time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.config import Config
from common.slots import SlotMap
from router.resharding import Request, Resize
from tests.simulation.network import Link
from tests.simulation.router import RouterProcess
from tests.simulation.shard import ShardProcess

if TYPE_CHECKING:
    from tests.simulation.simulation import Cluster

# How long the end of a process may go unnoticed, and how long a process takes to start, at most.
NOTICE_US = 4_000
START_US = 8_000
# How long the supervisor's children may not notice that it has ended.
ORPHAN_US = 6_000


class ShardPlace:
    """Where one shard's processes run, one after the other."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: ShardProcess | None = None
        self.control: Link | None = None
        self.is_ready = False


class RouterPlace:
    """Where one router's processes run, one after the other."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: RouterProcess | None = None
        self.control: Link | None = None
        self.away_ms = 0  # how long the next one stays away; 0: it is started at once


class Supervisor:
    """One server, from its start to its end, again and again."""

    def __init__(self, cluster: Cluster, config: Config, slot_map: SlotMap) -> None:
        self.slot_map = slot_map
        self.config = config
        self.shards = [ShardPlace(index) for index in range(slot_map.shards)]
        self.routers = [RouterPlace(index) for index in range(cluster.shape.routers)]
        self.places_by_generation: dict[int, ShardPlace] = {}
        self._leaving: list[ShardPlace] = []  # of shards that were taken away
        self.is_up = False
        self._routers_end = False  # they are told to, and none is started again
        self._shards_end = False
        self._cluster = cluster
        self._world = cluster.world
        self._generation = 0

    # -- the whole server -----------------------------------------------------------------------

    def start(self) -> None:
        """All places are filled."""
        self.is_up = True
        self._routers_end = self._shards_end = False
        for shard in self.shards:
            self._start_shard(shard)
        for router in self.routers:
            self._start_router(router)

    def stop(self) -> None:
        """SIGTERM: the routers end their calls, then the shards end; then the server starts again."""
        if not self.is_up or self._routers_end:
            return
        self._note("is told to stop")
        self._routers_end = True
        for router in self.routers:
            if router.control is not None:
                router.control.send("drain", self.config.server.shutdown_grace_ms)
        self._stop_shards_if_routers_ended()

    def kill(self) -> None:
        """SIGKILL of everything at one instant, or the loss of power."""
        if not self.is_up:
            return
        self._note("and all its children are killed")
        for place in (*self.shards, *self._leaving, *self.routers):
            if place.process is not None and place.process.is_alive:
                place.process.kill()
        self._restart()

    def die(self) -> None:
        """SIGKILL of the supervisor alone: its children notice it, each in its time, and end by themselves."""
        if not self.is_up:
            return
        self._note("is killed; its children will notice")
        for place in (*self.shards, *self._leaving, *self.routers):
            if place.process is not None:
                self._world.later(ORPHAN_US, place.process.supervisor_died)
        self.is_up = False
        self._wait_for_orphans()

    def _wait_for_orphans(self) -> None:
        """A new server starts when the lock of the old one is free: the last of its children has ended."""
        places = (*self.shards, *self._leaving, *self.routers)
        if any(place.process is not None and place.process.is_alive for place in places):
            self._world.later(ORPHAN_US, self._wait_for_orphans)
        else:
            self._restart()

    def _restart(self) -> None:
        self.is_up = False
        self._leaving.clear()
        for shard in self.shards:
            shard.process, shard.control, shard.is_ready = None, None, False
        for router in self.routers:
            router.process, router.control = None, None
        self._world.later(self._cluster.shape.restart_us, self.start)

    # -- one child ------------------------------------------------------------------------------

    def kill_shard(self, index: int) -> bool:
        process = self.shards[index].process if index < len(self.shards) else None
        if process is None or not process.is_alive:
            return False
        process.kill()
        self.noticed_later(process)
        return True

    def kill_router(self, index: int, away_ms: int = 0) -> bool:
        process = self.routers[index].process
        self.routers[index].away_ms = away_ms
        if process is None or not process.is_alive:
            return False
        process.kill()
        self.noticed_later(process)
        return True

    def noticed_later(self, process: ShardProcess | RouterProcess) -> None:
        """A child has ended; its end will be noticed."""
        self._world.later(NOTICE_US, self._noticed, process)

    def _noticed(self, process: ShardProcess | RouterProcess) -> None:
        if not self.is_up:
            return
        if isinstance(process, ShardProcess):
            shard = self.places_by_generation[process.generation]
            if shard.process is process and shard in self.shards:  # nobody asks for one that was taken away
                shard.process, shard.control, shard.is_ready = None, None, False
                self._tell_routers("shard down", (process.index, process.generation))
                if self._shards_end:
                    self._end_if_shards_ended()
                else:
                    self._world.later(self._cluster.shape.restart_us, self._start_shard, shard)
        else:
            router = self.routers[process.index]
            if router.process is process:
                router.process, router.control = None, None
                for shard in self.shards:
                    if shard.control is not None:
                        shard.control.send("router down", process.name)
                if self._routers_end:
                    self._stop_shards_if_routers_ended()
                elif router.away_ms:
                    self._world.at_ms(self._world.mono_ms + router.away_ms, self._start_router, router)
                else:
                    self._world.later(self._cluster.shape.restart_us, self._start_router, router)

    def _start_shard(self, place: ShardPlace) -> None:
        if not self.is_up or self._shards_end or place.process is not None or place not in self.shards:
            return
        self._generation += 1
        self.places_by_generation[self._generation] = place
        ready = Link(self._world, self._cluster.control_us(), lambda: self._shard_is_ready(place, process))
        routers = [router.process.name for router in self.routers if router.process is not None]
        process = ShardProcess(self._cluster, place.index, self._generation, self.config, self.slot_map, routers, ready)
        self._note(f"starts {process.name} as generation {process.generation}")
        place.process = process
        place.control = Link(self._world, self._cluster.control_us(), process.told)
        self._world.later(START_US, process.start)

    def _shard_is_ready(self, place: ShardPlace, process: ShardProcess) -> None:
        if not self.is_up or place.process is not process or place.is_ready or place not in self.shards:
            return
        place.is_ready = True
        self._tell_routers("shard up", (process.index, process.generation))
        assert place.control is not None
        for router in self.routers:
            if router.process is not None:
                place.control.send("router up", router.process.name)

    def _start_router(self, place: RouterPlace) -> None:
        if not self.is_up or self._routers_end or place.process is not None:
            return
        self._generation += 1
        requests = Link(
            self._world, self._cluster.control_us(), lambda request: self._map_request(place, process, request)
        )
        process = RouterProcess(
            self._cluster, place.index, self._generation, self.config, self.slot_map, self._ready_shards(), requests
        )
        self._note(f"starts {process.name}")
        place.process = process
        place.control = Link(self._world, self._cluster.control_us(), process.told)
        self._cluster.routers_by_name[process.name] = process
        self._world.later(START_US, process.start)
        for shard in self.shards:
            if shard.is_ready and shard.control is not None:
                shard.control.send("router up", process.name)

    def _ready_shards(self) -> list[tuple[int, int]]:
        return [
            (shard.index, shard.process.generation)
            for shard in self.shards
            if shard.process is not None and shard.is_ready
        ]

    def _stop_shards_if_routers_ended(self) -> None:
        if self._shards_end or any(router.process is not None for router in self.routers):
            return
        self._shards_end = True
        for shard in self.shards:
            if shard.control is not None:
                shard.control.send("stop", None)
        self._end_if_shards_ended()

    def _end_if_shards_ended(self) -> None:
        if all(place.process is None for place in (*self.shards, *self.routers)):
            self._note("has stopped")
            self._restart()

    # -- the slot map ---------------------------------------------------------------------------

    def _map_request(self, place: RouterPlace, process: RouterProcess, request: Request) -> None:
        """See `common.supervisor`: what was asked is checked and the map replaced in one step."""
        if not self.is_up or place.process is not process or place.control is None:
            return
        refusal = self._refusal(request)
        if refusal:
            place.control.send("map refused", (request.number, refusal))
            return
        if isinstance(request, Resize):
            self._resize(request.shards)
            return
        source = self.slot_map.owners[request.slots[0]]
        self.slot_map = self.slot_map.moved(request.slots, request.target)
        self._note(f"gives slots {request.slots} to shard-{request.target}")
        self._cluster.slots_moved(frozenset(request.slots), source, request.target)
        self._tell_map()

    def _resize(self, shards: int) -> None:
        self._note(f"has {shards} shards from now on")
        before, self.slot_map = self.slot_map.shards, self.slot_map.resized(shards)
        for index in range(before, shards):
            self._cluster.shard_added(index)
            self.shards.append(ShardPlace(index))
        leaving = self.shards[shards:]
        del self.shards[shards:]
        for place in reversed(leaving):
            self._cluster.shard_removed(place.index)
            if place.control is not None:
                place.control.send("stop", None)
                self._leaving.append(place)
        self._tell_map()
        for place in self.shards[before:]:
            self._start_shard(place)

    def _tell_map(self) -> None:
        for each in (*self.shards, *self.routers):
            if each.control is not None:
                each.control.send("map", self.slot_map)

    def _refusal(self, request: Request) -> str:
        """Why a map is not replaced; "" when it is."""
        if isinstance(request, Resize):
            if self._routers_end or self._leaving or max(self.slot_map.owners) >= request.shards:
                return "not now"
            return "the disk is full" if self._cluster.mishaps.map_fails() else ""
        if request.target >= len(self.shards):
            return f"there is no shard {request.target}"
        source = self.slot_map.owners[request.slots[0]]
        for index, generation in ((source, request.source_generation), (request.target, request.target_generation)):
            process = self.shards[index].process
            if process is None or process.generation != generation:
                return f"shard {index} was started again during the move"
        return "the disk is full" if self._cluster.mishaps.map_fails() else ""

    # -- for all children -----------------------------------------------------------------------

    def configure(self, config: Config) -> None:
        """The configuration file was saved."""
        self.config = config
        for place in (*self.shards, *self.routers):
            if place.control is not None:
                place.control.send("config", config)

    def shard_process(self, index: int) -> ShardProcess | None:
        """The process that is up, None while there is none."""
        process = self.shards[index].process if index < len(self.shards) else None
        return process if process is not None and process.is_up else None

    def live_routers(self) -> list[RouterProcess]:
        """Those that clients can connect to."""
        found = [router.process for router in self.routers if router.process is not None]
        return [process for process in found if process.listens]

    def _tell_routers(self, word: str, value: tuple[int, int]) -> None:
        for router in self.routers:
            if router.control is not None:
                router.control.send(word, value)

    def _note(self, what: str) -> None:
        if self._world.trace is not None:
            self._world.note("supervisor", what)
