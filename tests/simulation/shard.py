"""The process of a shard: the real machine and the real turns, around a disk that is simulated.

A turn takes up what has come by then, as the process does. Syncs take their time meanwhile. Every
batch is shown to the disk's witness before it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common import wire
from common.config import Config
from common.slots import SlotMap
from shard.machine import Machine
from shard.store import StoreBusy, StoreError
from shard.store_memory import MemoryStore
from shard.turns import Turns
from tests.simulation.network import Link
from tests.simulation.words import envelope_in_words
from tests.simulation.world import Finding, World

if TYPE_CHECKING:
    from tests.simulation.simulation import Cluster

# How long the process takes to look up after something has come, at most, and how long a stalled write waits.
TURN_US = 300
STALL_RETRY_US = 10_000
SHORTAGE_TEXT = "the disk is almost full: no jobs are taken"


class ShardProcess:
    """One process of a shard, from its start to its end."""

    def __init__(
        self,
        cluster: Cluster,
        index: int,
        generation: int,
        config: Config,
        slot_map: SlotMap,
        routers: list[str],
        ready: Link,
    ) -> None:
        self.index = index
        self.name = f"shard-{index}"
        self.generation = generation
        self.is_alive = True
        self.is_up = False
        self.disk = cluster.disks[index]
        self.machine: Machine
        self.turns: Turns
        self._cluster = cluster
        self._world: World = cluster.world
        self._config = config
        self._slot_map = slot_map
        self._routers = routers
        self._ready = ready  # to the supervisor
        self._links: dict[str, Link] = {}  # to the routers
        self._inbox: list[bytes] = []
        self._control: list[tuple[str, Any]] = []
        self._turn_is_set = False
        self._wakes_at_ms = 0  # the timer that is set, 0: none
        self._sync_has_returned = False
        self.is_stalled = False
        self._stopping = False

    # -- from its start to its end --------------------------------------------------------------

    def start(self) -> None:
        """The machine is loaded; the supervisor hears of it."""
        if not self.is_alive:
            return
        store = self.disk.store
        slot_map = self._slot_map
        self.machine = Machine(
            store, self._config, self._world.instant(), self.index, self._routers, slot_map.owners, slot_map.epoch
        )
        self.turns = Turns(self.machine, store, self.name, self.generation, self._begin_sync)
        self.disk.witness.machine_started(self.machine)
        self.is_up = True
        self._ready.send()
        self._soon()

    def kill(self) -> None:
        """SIGKILL, or the loss of power: what is not synced may be lost, and what has not arrived."""
        self._end("is killed")
        self._ready.sender_died()
        for link in self._links.values():
            link.sender_died()
        self.disk.crash()

    def _end(self, how: str) -> None:
        if self._world.trace is not None:
            self._world.note(self.name, f"{how} (generation {self.generation})")
        self.is_alive = self.is_up = False

    # -- what comes in --------------------------------------------------------------------------

    def envelope(self, message: bytes) -> None:
        """From a router."""
        if self.is_alive:
            self._inbox.append(message)
            self._soon()

    def told(self, word: str, value: Any) -> None:
        """From the supervisor."""
        if self.is_alive:
            self._control.append((word, value))
            self._soon()

    def supervisor_died(self) -> None:
        """Its control channel has ended."""
        self.told("stop", None)

    def _soon(self) -> None:
        if self.is_up and not self._turn_is_set and not self.is_stalled:
            self._turn_is_set = True
            self._world.later(TURN_US, self._turn)

    # -- turns ----------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._turn_is_set = False
        if not self.is_alive:
            return
        now = self._world.instant()
        turns, machine, witness = self.turns, self.machine, self.disk.witness
        if self._sync_has_returned:
            self._sync_has_returned = False
            turns.synced()
            self._send()
        witness.turn_begins(now)
        if self._control:
            self._take_control()
        more_is_due = machine.tick(now)
        if self._inbox:
            while self._inbox:
                message = self._inbox.pop(0)
                envelope = wire.unpack(message)
                if turns.take(message, now) is not None:
                    witness.applied(envelope)
                if turns.is_full:
                    break
        for report in machine.reports:
            raise Finding("records", f"{self.name} reports: {report}")
        witness.results(machine.results)
        turns.close()
        witness.turn_ends(self.disk.store)
        self._write()
        if self.is_alive and not self.is_stalled:
            if more_is_due or self._inbox:
                self._soon()
            self._set_timer()

    def _take_control(self) -> None:
        now = self._world.instant()
        control, self._control = self._control, []
        for word, value in control:
            match word:
                case "router up":
                    self.machine.router_came(value)
                case "router down":
                    self.turns.router_gone(value, now)
                    self.disk.witness.router_gone(value)
                case "config":
                    self._config = value
                    self.disk.witness.configured(value)
                    self.machine.configure(value)
                case "map":
                    self.machine.map_changed(value.epoch, value.owners, now)
                case "shortage":
                    self.machine.shortage = SHORTAGE_TEXT if value else None
                case "stop":
                    self._stopping = True
                case _:
                    raise AssertionError(word)

    def _write(self) -> None:
        """Write the closed turn, and the end of the process if that was the last one."""
        if not self.is_alive:
            return
        self.is_stalled = False
        store = self.disk.store
        mishaps = self._cluster.mishaps
        store.fail_next_write = mishaps.write_fails()
        store.refuse_writes = mishaps.write_stalls()
        try:
            self.turns.write()
        except StoreBusy:
            self.is_stalled = True
            self._world.later(STALL_RETRY_US, self._try_again)
            return
        except StoreError as error:
            self._fail(error)
            return
        store.fail_next_write = False
        self._send()
        if self._stopping and self.turns.is_idle:
            store.close()
            self._end("ends in order")
            self.disk.closed()
            self._cluster.supervisor.noticed_later(self)

    def _try_again(self) -> None:
        if not self.is_alive:
            return
        self._write()
        if self.is_alive:
            self._soon()
            self._set_timer()

    def _set_timer(self) -> None:
        now = self._world.instant()
        sleep_ms = self.machine.next_wake_ms(now)
        if sleep_ms is None:
            return
        at_ms = now.mono_ms + sleep_ms
        if sleep_ms == 0:
            self._soon()
        elif not now.mono_ms < self._wakes_at_ms <= at_ms:
            self._wakes_at_ms = at_ms
            self._world.at_ms(at_ms, self._wake, at_ms)

    def _wake(self, at_ms: int) -> None:
        if self.is_alive and self._wakes_at_ms == at_ms:
            self._wakes_at_ms = 0
            if self.machine.next_wake_ms(self._world.instant()) == 0:
                self._soon()
            else:
                self._set_timer()

    # -- syncs ----------------------------------------------------------------------------------

    def _begin_sync(self) -> None:
        store = self.disk.store
        self._world.later(self._cluster.shape.sync_us, self._sync_ends, store, store.begin_sync())

    def _sync_ends(self, store: MemoryStore, reach: int) -> None:
        if not self.is_alive:
            return
        store.fail_next_sync = self._cluster.mishaps.sync_fails()
        try:
            self.disk.end_sync(reach)
        except StoreError as error:
            self._fail(error)
            return
        self._sync_has_returned = True
        self._soon()

    def _fail(self, error: StoreError) -> None:
        self.turns.failed(str(error))
        self._send()
        self._end(f"ends, {error}")
        self._cluster.lost_part("storage failed")
        self.disk.crash()
        self._cluster.supervisor.noticed_later(self)

    # -- what goes out --------------------------------------------------------------------------

    def _send(self) -> None:
        for router, message in self.turns.messages:
            if not self.disk.is_of_no_use:
                self.disk.witness.leaves(router, message)
            if self._world.trace is not None:
                self._world.note(f"{self.name} -> {router}", envelope_in_words(message, results=True))
            link = self._links.get(router)
            if link is None:
                receiver = self._cluster.routers_by_name.get(router)
                assert receiver is not None
                link = self._links[router] = Link(self._world, self._cluster.link_us(), receiver.envelope)
            link.send(message)
        self.turns.messages.clear()
