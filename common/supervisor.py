"""The supervisor: the `seppd` process itself, which starts, watches, restarts and stops the others.

It holds the data directory's lock and the port, and keeps one place for each router and shard.
A keeper fills each place with one process after another; every process gets a generation that
none had before, and with it a socket address of its own, so that nothing meant for a dead process
can reach its successor. What the processes must know of each other goes over their control
channels: routers hear of every shard that is ready or has ended, shards of every router that ended.

The life of a server:

    starting    all at once; the first child that fails ends everything with its one-line text
    serving     every child was ready; one that ends is started again, with growing delays
    draining    routers end, none is started again; shards still are, for running calls need them
    stopping    shards end

The slot map is the supervisor's. A router asks for each change, and **the replacement of the file is the
change**: what was asked is checked, stored, taken over and told to everybody without an await in between, so
that no process can be started with the map before. Shards that are added are made before the map knows them,
and shards that are taken away end after it has forgotten them; what a crash leaves of either is cleared away
at the next start.

The supervisor does no work on jobs and decides nothing that a client waits for.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType

import structlog

from common import __version__
from common.children import Backoff, Child, ChildTerms
from common.config import ConfigError, Loaded, changed_keys, restart_keys, with_live
from common.config_file import ConfigFile
from common.control import (
    CommitMove,
    ConfigChanged,
    ControlError,
    Drain,
    Fatal,
    JsonObject,
    MapRefused,
    Ready,
    RouterDown,
    RouterUp,
    Served,
    Serving,
    SetShards,
    ShardAddress,
    ShardDown,
    ShardUp,
    SlotMapChanged,
    StartRouter,
    StartShard,
    Stop,
    ToChild,
    one_line,
)
from common.data_directory import DataDirectory, DataDirectoryError, half_of_the_cores
from common.listen_address import HeldAddress
from common.slots import SHARDS_MAX, SLOT_COUNT, SlotMap, SlotMapError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

# Names of changed keys that one line of the log shows; ten thousand queues can change at once.
KEYS_SHOWN_MAX = 50
# After a process has ended, what it wrote is already in the channel; this only bounds the reading,
# should something else still hold the other end open.
LAST_WORDS_S = 1.0


class StartError(Exception):
    """The server could not start; the text is one line and says what is wrong and what to do."""


class Role(Enum):
    """What a child is. The value is its name in logs and commands."""

    ROUTER = "router"
    SHARD = "shard"


class _RefusedError(Exception):
    """A change of the slot map that was not made; the text is one line."""


@dataclass(eq=False)
class _Place:
    """Shard 2, say, whichever process fills it. `child` is the one that has its start message, if any.

    `ending` is set when it is told to end: then no other process is started.
    """

    role: Role
    index: int
    child: Child | None = None
    backoff: Backoff = field(default_factory=Backoff)
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return f"{self.role.value}-{self.index}"

    @property
    def is_ready(self) -> bool:
        return self.child is not None and self.child.ready_at is not None


class Supervisor:
    """Runs a server on a directory and a port that are held already. One `run` per object.

    `reload` reads the configuration again, given what was loaded before, and raises ConfigError; it is
    called on SIGHUP and when something else is saved to `file`.
    """

    def __init__(
        self,
        loaded: Loaded,
        reload: Callable[[Loaded], Loaded],
        file: ConfigFile,
        directory: DataDirectory,
        slot_map: SlotMap,
        listen: HeldAddress,
        terms: ChildTerms,
    ) -> None:
        # What was read last; `_config` is what holds: live keys of it, the others as they were at the start.
        self._loaded = loaded
        self._config = loaded.config
        self._reload = reload
        self._file = file
        self._directory = directory
        self._slot_map = slot_map
        self._listen = listen
        self._terms = terms
        self._shards = [_Place(Role.SHARD, index) for index in range(slot_map.shards)]
        routers = self._config.server.routers or half_of_the_cores()
        self._routers = [_Place(Role.ROUTER, index) for index in range(routers)]
        self._is_serving = False
        self._stop_asked = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._all_serve = asyncio.Event()  # the health service of every router says so
        # Why the start failed: the first reason stays.
        self._start_failure: str | None = None
        self._start_failed = asyncio.Event()
        # Of all places, those among them that are being taken away.
        self._keepers: dict[asyncio.Task[None], _Place] = {}
        self._keepers_changed = asyncio.Event()
        # Ends shards that were taken away and deletes what they have left; one at a time.
        self._removal: asyncio.Task[None] | None = None
        self._exit_status = 0
        # From then on children end because they were killed: nothing to report.
        self._is_killing = False

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; the exit status. Raises StartError."""
        self._handle_signals(asyncio.get_running_loop())
        self._fill((*self._shards, *self._routers))
        watching = asyncio.create_task(self._watch_file(), name="config")
        try:
            await self._start()
            await self._until_asked_to_stop()
            await self._stop()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._kill_all()
            # A second SIGTERM while the interpreter winds down must not turn the exit status into a signal.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        return self._exit_status

    # -- signals --------------------------------------------------------------------------------

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Plain handlers that wake the loop; asyncio's own are gone before the last moments of the process."""

        def on_stop(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._ask_to_stop, signal.Signals(number).name)

        def on_reload(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._reload_config)

        signal.signal(signal.SIGTERM, on_stop)
        signal.signal(signal.SIGINT, on_stop)
        signal.signal(signal.SIGHUP, on_reload)

    def _ask_to_stop(self, why: str) -> None:
        if self._stop_asked.is_set():
            log.info("already stopping", signal=why)
            return
        self._stop_asked.set()
        log.info("stopping", signal=why, grace_ms=self._config.server.shutdown_grace_ms)

    # -- configuration --------------------------------------------------------------------------

    async def _watch_file(self) -> None:
        """Reload when the file is saved. What breaks here must not end a server that serves."""
        try:
            async for _ in self._file.changes():
                self._reload_config()
        except Exception:
            log.exception("the configuration file is not watched any more, SIGHUP still reloads it")

    def _reload_config(self) -> None:
        """Read the configuration again; a broken one changes nothing."""
        self._file.note()
        try:
            loaded = self._reload(self._loaded)
            config = with_live(self._config, loaded.config)
        except ConfigError as error:
            log.error("configuration not reloaded, the running one stays", reason=str(error))
            return
        for warning in loaded.warnings:
            if warning not in self._loaded.warnings:
                log.warning("configuration", warning=warning)
        waiting = restart_keys(self._config, loaded.config)
        if waiting:
            log.warning("changed keys that need a restart keep their running values", keys=waiting)
        changed = changed_keys(self._config, config)
        self._loaded = loaded
        self._config = config
        if not changed:
            log.debug("configuration read again, nothing has changed")
            return
        self._send_to((*self._shards, *self._routers), ConfigChanged(config=self._config_json()))
        more = {"more": len(changed) - KEYS_SHOWN_MAX} if len(changed) > KEYS_SHOWN_MAX else {}
        log.info("configuration reloaded", keys=changed[:KEYS_SHOWN_MAX], **more)

    # -- the phases -----------------------------------------------------------------------------

    async def _start(self) -> None:
        """Until every child is ready, or a stop is asked for. Raises StartError."""
        await self._first_of(self._all_ready, self._start_failed, self._stop_asked)
        if self._start_failure is not None:
            raise StartError(self._start_failure)
        if self._stop_asked.is_set():
            return
        self._is_serving = True
        self._send_to(self._routers, Serving())
        await self._first_of(self._all_serve, self._stop_asked)
        if self._stop_asked.is_set():
            return
        log.info(
            "queue server listening",
            address=str(self._listen.address),
            shards=len(self._shards),
            routers=len(self._routers),
            db_path=str(self._directory.path),
            version=__version__,
            pid=os.getpid(),
        )

    async def _until_asked_to_stop(self) -> None:
        await self._first_of(self._stop_asked)

    async def _stop(self) -> None:
        """Routers first: running calls need the shards, and what a router did not confirm comes back in them."""
        grace_ms = self._config.server.shutdown_grace_ms
        await self._end(self._routers, Drain(grace_ms=grace_ms), grace_ms / 1000 + self._terms.router_stop_s)
        if await self._end(self._shards, Stop(), self._terms.shard_stop_s):
            self._exit_status = 1
        if self._removal is not None:
            await self._removal
        log.info("stopped", status=self._exit_status)

    async def _end(self, places: Collection[_Place], message: ToChild, limit_s: float) -> bool:
        """Tell the children of some places to end and wait for it; True when one had to be killed."""
        for place in places:
            place.ending.set()
        self._send_to(places, message)
        keepers = [task for task, place in self._keepers.items() if place in places]
        _, late = await asyncio.wait(keepers, timeout=limit_s)
        for task in late:
            place = self._keepers[task]
            log.error("child did not end in time and is killed", child=place.name, limit_s=limit_s)
            if place.child is not None:
                place.child.kill()
        await asyncio.gather(*keepers)
        return bool(late)

    async def _first_of(self, *events: asyncio.Event) -> None:
        """Wait for the first of some events; what broke in a keeper is raised here."""
        waits = [asyncio.create_task(event.wait()) for event in (*events, self._keepers_changed)]
        try:
            while not any(event.is_set() for event in events):
                if self._keepers_changed.is_set():
                    self._keepers_changed.clear()
                    waits[-1] = asyncio.create_task(self._keepers_changed.wait())
                await asyncio.wait(
                    (*waits, *(keeper for keeper in self._keepers if not keeper.done())),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for keeper in [keeper for keeper in self._keepers if keeper.done()]:
                    await keeper
        finally:
            for wait in waits:
                wait.cancel()

    async def _kill_all(self) -> None:
        """Whatever happened, no child outlives the supervisor. After an orderly stop there is none left."""
        self._kill()
        removal = () if self._removal is None else (self._removal,)
        await asyncio.gather(*self._keepers, *removal, return_exceptions=True)

    def _kill(self) -> None:
        self._is_killing = True
        for place in self._keepers.values():
            place.ending.set()
            if place.child is not None:
                place.child.kill()

    # -- one place ------------------------------------------------------------------------------

    def _fill(self, places: Iterable[_Place]) -> None:
        for place in places:
            self._keepers[asyncio.create_task(self._keep(place), name=place.name)] = place
        self._keepers_changed.set()

    async def _keep(self, place: _Place) -> None:
        """Fill a place with one process after another until it ends."""
        while not place.ending.is_set():
            ready_s = await self._run_child(place)
            if place.ending.is_set() or self._start_failed.is_set():
                return
            delay_s = place.backoff.delay_s(ready_s)
            log.info("child is started again", child=place.name, delay_s=delay_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(place.ending.wait(), delay_s)

    async def _run_child(self, place: _Place) -> float:
        """One process from start to end; how many seconds it was ready."""
        command = self._terms.shard if place.role is Role.SHARD else self._terms.router
        try:
            generation = self._directory.next_generation()
            child = await Child.start(command, self._directory.lock_fd, generation)
        except (DataDirectoryError, OSError) as error:
            self._report_end(place, f"cannot be started: {error}")
            return 0.0
        if place.ending.is_set():  # asked to end while it was being started: it knows of nothing yet
            child.kill()
        # No await between these: nothing can happen that the start message does not tell and no later one will.
        place.child = child
        child.send(self._start_message(place, generation))
        if place.role is Role.ROUTER:
            ready = [shard for shard in self._shards if shard.is_ready]
            self._send_to(ready, RouterUp(name=_router_name(place.index, generation)))
        listening = asyncio.create_task(self._listen_to(place, child))
        status = await child.process.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(listening, LAST_WORDS_S)
        child.link.close()
        place.child = None
        self._tell_of_end(place, generation)
        self._judge_end(place, child, status)
        return child.ready_s(asyncio.get_running_loop().time())

    async def _listen_to(self, place: _Place, child: Child) -> None:
        """Act on what a child says until it says no more; then it has to end soon."""
        try:
            while (message := await child.link.receive()) is not None:
                if isinstance(message, Fatal):
                    child.fatal_text = one_line(message.text)
                    self._fail_start(f"{place.name}: {child.fatal_text}")
                    break
                match message:
                    case Served():
                        self._on_served(child)
                    case CommitMove() | SetShards():
                        self._on_map_request(place, child, message)
                    case Ready():
                        self._on_ready(place, child)
        except ControlError as error:
            child.fatal_text = f"was killed: {error}"
            child.kill()
        if not place.ending.is_set():  # an ending child has its own, longer limit
            asyncio.get_running_loop().call_later(self._terms.silent_end_s, self._kill_silent, place, child)

    def _kill_silent(self, place: _Place, child: Child) -> None:
        if place.child is child and not place.ending.is_set():
            log.error("child has closed its channel, did not end and is killed", child=place.name, pid=child.pid)
            child.kill()

    def _on_ready(self, place: _Place, child: Child) -> None:
        if child.ready_at is not None:
            return
        child.ready_at = asyncio.get_running_loop().time()
        log.debug("child is ready", child=place.name, generation=child.generation, pid=child.pid)
        if place.role is Role.SHARD:
            up = self._shard_address(place.index, child.generation)
            self._send_to(self._routers, ShardUp(index=up.index, generation=up.generation, address=up.address))
            # Not while it starts: a write to a child that fails would cut off its last words.
            for name in self._router_names():
                child.send(RouterUp(name=name))
        elif self._is_serving:
            child.send(Serving())
        if all(one.is_ready for one in (*self._shards, *self._routers)):
            self._all_ready.set()

    def _on_served(self, child: Child) -> None:
        child.serves = True
        if all(router.child is not None and router.child.serves for router in self._routers):
            self._all_serve.set()

    def _tell_of_end(self, place: _Place, generation: int) -> None:
        """At once, before anything is started again. Also for a router that ended in order: what it had handed
        out and not confirmed must be back in the shards before they stop."""
        if place.role is Role.SHARD:
            self._send_to(self._routers, ShardDown(index=place.index, generation=generation))
        else:
            self._send_to(self._shards, RouterDown(name=_router_name(place.index, generation)))

    def _judge_end(self, place: _Place, child: Child, status: int) -> None:
        if self._is_killing:
            return
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if not place.ending.is_set():
            self._report_end(place, child.fatal_text or f"{how}, see its log above")
        elif status != 0:
            log.error("child did not end in order", child=place.name, how=how)
            if place in self._shards:  # one that was taken away had nothing left to lose
                self._exit_status = 1

    def _report_end(self, place: _Place, reason: str) -> None:
        """A child is gone that should be there: fatal during the start, else it is logged."""
        if self._start_is_over():
            log.error("child ended", child=place.name, reason=reason)
        else:
            self._fail_start(f"{place.name}: {reason}")

    def _fail_start(self, text: str) -> None:
        if not self._start_is_over() and self._start_failure is None:
            self._start_failure = text
            self._start_failed.set()

    def _start_is_over(self) -> bool:
        return self._is_serving or self._stop_asked.is_set()

    # -- the slot map ---------------------------------------------------------------------------

    def _on_map_request(self, place: _Place, child: Child, request: CommitMove | SetShards) -> None:
        """Change the slot map, or refuse. No await in here: see the beginning of this module."""
        if place.child is not child:
            return  # everybody has been told that it ended, and what it was doing with it
        try:
            if isinstance(request, CommitMove):
                self._commit_move(request)
            else:
                self._set_shards(request.shards)
        except _RefusedError as refused:
            if self._is_killing:
                return
            log.warning("slot map not changed", asked_by=place.name, reason=str(refused))
            child.send(MapRefused(request=request.request, text=one_line(str(refused))))

    def _commit_move(self, move: CommitMove) -> None:
        """Raises _RefusedError."""
        source = self._owner_of(move.slots)
        if not 0 <= move.target < len(self._shards) or move.target == source:
            raise _RefusedError(f"shard {move.target} cannot be given slots of shard {source}")
        for index, generation in ((source, move.source_generation), (move.target, move.target_generation)):
            child = self._shards[index].child
            if child is None or child.generation != generation:
                raise _RefusedError(f"shard {index} was started again during the move; move the slots again")
        self._replace_map(self._slot_map.moved(move.slots, move.target))
        log.info("slots moved", slots=len(move.slots), source=source, target=move.target, epoch=self._slot_map.epoch)

    def _owner_of(self, slots: list[int]) -> int:
        """The only owner of some slots. Raises _RefusedError."""
        if not slots or not all(0 <= slot < SLOT_COUNT for slot in slots):
            raise _RefusedError(f"these are no slots: {slots}")
        owners = {self._slot_map.owners[slot] for slot in slots}
        if len(owners) != 1:
            raise _RefusedError("the slots belong to several shards")
        return owners.pop()

    def _set_shards(self, shards: int) -> None:
        """Raises _RefusedError."""
        if not 1 <= shards <= SHARDS_MAX:
            raise _RefusedError(f"there can be 1 to {SHARDS_MAX} shards, not {shards}")
        if not self._is_serving or self._stop_asked.is_set():
            raise _RefusedError("the number of shards can change only while the server serves")
        if self._removal is not None:
            raise _RefusedError("shards that were taken away are still ending; try again later")
        if shards > len(self._shards):
            self._grow(shards)
        elif shards < len(self._shards):
            self._shrink(shards)
        else:
            raise _RefusedError(f"there are {shards} shards already")
        configured = self._loaded.config.server.shards  # what the next start reads, if nobody changes it
        if configured not in (None, shards):
            log.warning(
                "server.shards is another number than that of the shards: the next start is refused until it is "
                "changed or left out",
                configured=configured,
                shards=shards,
            )

    def _grow(self, shards: int) -> None:
        """Directories first: a map stands for directories that exist."""
        added = [_Place(Role.SHARD, index) for index in range(len(self._shards), shards)]
        try:
            for place in added:
                self._directory.add_shard(place.index)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._replace_map(self._slot_map.resized(shards))
        self._shards += added
        self._fill(added)
        log.info("shards added", shards=len(self._shards), added=len(added), epoch=self._slot_map.epoch)

    def _shrink(self, shards: int) -> None:
        try:
            slot_map = self._slot_map.resized(shards)
        except SlotMapError as error:
            raise _RefusedError(str(error)) from error
        self._replace_map(slot_map)
        removed = self._shards[shards:]
        del self._shards[shards:]
        self._removal = asyncio.create_task(self._remove(removed), name="removal")
        log.info("shards taken away", shards=len(self._shards), removed=len(removed), epoch=self._slot_map.epoch)

    async def _remove(self, places: list[_Place]) -> None:
        """End shards that own nothing any more, and delete their directories. Whatever is left when this is
        cut off, the next start deletes."""
        try:
            await self._end(places, Stop(), self._terms.shard_stop_s)
            for keeper in [keeper for keeper, place in self._keepers.items() if place in places]:
                del self._keepers[keeper]
            self._keepers_changed.set()
            for place in places:
                await asyncio.to_thread(self._directory.remove_shard, place.index)
                log.info("directory of a removed shard deleted", path=str(self._directory.shard_path(place.index)))
        except OSError as error:
            log.warning("directory of a removed shard cannot be deleted", path=error.filename, reason=error.strerror)
        finally:
            self._removal = None

    def _replace_map(self, slot_map: SlotMap) -> None:
        """The switch: store the map, take it over, tell everybody. Raises _RefusedError while the old one holds."""
        try:
            slot_map.save(self._directory.path)
        except OSError as error:
            raise self._cannot_write(error) from error
        except SlotMapError as error:
            # Nobody may act by either map: the next start goes by what is on the disk then.
            log.error("the server ends at once", reason=str(error))
            self._exit_status = 1
            self._ask_to_stop("disk error")
            self._kill()
            raise _RefusedError(str(error)) from error
        self._slot_map = slot_map
        changed = SlotMapChanged(epoch=slot_map.epoch, shards=slot_map.shards, owners=list(slot_map.owners))
        self._send_to((*self._shards, *self._routers), changed)

    def _cannot_write(self, error: OSError) -> _RefusedError:
        return _RefusedError(
            f"{self._directory.path} cannot be written ({error.strerror}): make room there; nothing was changed"
        )

    # -- messages -------------------------------------------------------------------------------

    def _send_to(self, places: Iterable[_Place], message: ToChild) -> None:
        for place in places:
            if place.child is not None:
                place.child.send(message)

    def _start_message(self, place: _Place, generation: int) -> ToChild:
        return (
            self._start_shard(place, generation) if place.role is Role.SHARD else self._start_router(place, generation)
        )

    def _start_shard(self, place: _Place, generation: int) -> StartShard:
        return StartShard(
            index=place.index,
            name=place.name,
            generation=generation,
            directory=str(self._directory.shard_path(place.index)),
            address=self._shard_address(place.index, generation).address,
            config=self._config_json(),
            epoch=self._slot_map.epoch,
            owners=list(self._slot_map.owners),
            shards=self._slot_map.shards,
            routers=self._router_names(),
        )

    def _router_names(self) -> list[str]:
        """Of the router processes that live."""
        return [
            _router_name(router.index, router.child.generation) for router in self._routers if router.child is not None
        ]

    def _start_router(self, place: _Place, generation: int) -> StartRouter:
        name = _router_name(place.index, generation)
        up = [
            self._shard_address(shard.index, shard.child.generation)
            for shard in self._shards
            if shard.child is not None and shard.is_ready
        ]
        return StartRouter(
            index=place.index,
            name=name,
            address=self._directory.socket_address(name),
            listen=str(self._listen.address),
            config=self._config_json(),
            epoch=self._slot_map.epoch,
            owners=list(self._slot_map.owners),
            shards=self._slot_map.shards,
            up=up,
        )

    def _shard_address(self, index: int, generation: int) -> ShardAddress:
        address = self._directory.socket_address(f"s{index}-{generation}")
        return ShardAddress(index=index, generation=generation, address=address)

    def _config_json(self) -> JsonObject:
        config: JsonObject = self._config.model_dump(mode="json")
        return config


def _router_name(index: int, generation: int) -> str:
    """What shards know a router process by; no other one of this data directory is ever called so."""
    return f"r{index}-{generation}"
