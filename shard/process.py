"""The shard process: the machine's turns, fed by sockets and clocks.

One thread does everything but the sync: it takes what routers have sent (a bounded part), applies
it and what is due, writes the turn, and sends the answers whose sync has returned. A shard with next to
nothing to do waits for the sync as well.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from queue import Empty, SimpleQueue

import structlog
import zmq

from common.config_sections import Config
from common.control import (
    ConfigChanged,
    ControlLink,
    Fatal,
    Ready,
    RouterDown,
    RouterUp,
    SlotMapChanged,
    StartShard,
    Stop,
    ToChild,
    one_line,
)
from shard.disk import LOOK_INTERVAL_S, shortage
from shard.machine import Machine
from shard.state import Instant
from shard.store import Store, StoreBusy, StoreError
from shard.store_rocks import RocksStore, StoreOptions
from shard.sync import SyncThread
from shard.turns import Turns

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

# Operations that one turn takes in, about: the bound on how long a turn lasts. An envelope is taken whole.
TURN_OPERATIONS = 4_096
# How long to wait before a write that would have stalled is tried again; new work is not taken meanwhile.
STALL_RETRY_S = 0.01
# With so few operations in a turn, and nothing else to do, its sync is waited for: the way to the sync thread and
# back, 120 µs, would save nothing.
QUIET_OPERATIONS = 2
# The interpreter's switch interval, in seconds. With the default 5 ms a busy turn delays the start of
# a sync by 0.8 ms, with this by 0.06 ms.
SWITCH_INTERVAL_S = 0.000_5
# How long last answers may take to leave when the process ends, in ms.
LINGER_MS = 1_000


def instant() -> Instant:
    """Now, on both clocks."""
    return Instant(time.time_ns() // 1_000_000, time.monotonic_ns() // 1_000_000)


class RouterLinks:
    """Sockets to the routers, made when a router is first heard of. They lie beside the shard's own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._context = context
        self._directory = address.rpartition("/")[0]
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def send(self, router: str, message: bytes) -> None:
        """What a router does not take it no longer needs: it is gone."""
        self._socket(router).send(message, zmq.NOBLOCK)

    def drop(self, router: str) -> None:
        """The router has ended; nothing is sent to it any more."""
        link = self._sockets.pop(router, None)
        if link is not None:
            link.close(linger=0)

    def close(self, linger_ms: int) -> None:
        for link in self._sockets.values():
            link.close(linger=linger_ms)
        self._sockets.clear()

    def _socket(self, router: str) -> zmq.Socket[bytes]:
        link = self._sockets.get(router)
        if link is None:
            link = self._sockets[router] = self._context.socket(zmq.PUSH)
            link.sndhwm = 0  # what is unsent is bounded by what routers have asked for
            link.reconnect_ivl = 10
            link.connect(f"{self._directory}/{router}")
        return link


class ShardProcess:
    """One shard from start to end. `run` returns the exit status."""

    def __init__(self, start: StartShard, control: ControlLink, messages: SimpleQueue[ToChild | None]) -> None:
        self._start = start
        self._control = control
        self._messages = messages
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.rcvhwm = 0  # routers have at most two envelopes each on the way
        self._links = RouterLinks(self._context, start.address)
        self._stopping = False
        self._sync_wanted = False
        self._directory = Path(start.directory)
        self._looked_at_disk_at = 0.0

    def run(self, wake_fd: int) -> int:
        """Serve until told to stop. `wake_fd` is readable when a control message has come."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        config = Config.model_validate(self._start.config)
        try:
            store = open_store(self._directory, config)
            start = self._start
            machine = Machine(store, config, instant(), start.index, start.routers, start.owners, start.epoch)
        except StoreError as error:
            self._control.send(Fatal(text=one_line(str(error))))
            return 1
        self._inbox.bind(self._start.address)
        sync = SyncThread(store)
        turns = Turns(machine, store, self._start.name, self._start.generation, self._want_sync)
        self._control.send(Ready())
        try:
            self._serve(machine, turns, store, sync, wake_fd)
        except StoreError as error:
            log.error("storage failed, the shard stops and starts again from disk", error=str(error))
            turns.failed(one_line(str(error)))
            self._send(turns)
            self._close()
            self._control.send(Fatal(text=one_line(str(error))))
            return 1
        sync.close()
        store.close()
        self._close()
        return 0

    def _close(self) -> None:
        self._links.close(LINGER_MS)
        self._inbox.close(linger=0)
        self._context.term()

    def _want_sync(self) -> None:
        self._sync_wanted = True

    def _serve(self, machine: Machine, turns: Turns, store: Store, sync: SyncThread, wake_fd: int) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(sync.wake_fd, zmq.POLLIN)
        poller.register(wake_fd, zmq.POLLIN)
        more_is_due = False
        while not (self._stopping and turns.is_idle):
            sleep_ms = 0 if more_is_due else machine.next_wake_ms(instant())
            ready = dict(poller.poll(sleep_ms))
            if sync.wake_fd in ready and sync.has_returned():
                turns.synced()
                self._send(turns)
            if wake_fd in ready:
                os.read(wake_fd, 64)
                self._take_messages(machine, turns)
            now = instant()
            more_is_due = machine.tick(now)
            taken = 0
            if self._inbox in ready:
                self._look_at_disk(machine)
                taken = self._take_envelopes(turns, now)
            for report in machine.reports:
                log.error("record set aside", report=report)
            machine.reports.clear()
            turns.close()
            self._write(turns)
            self._send(turns)
            if self._sync_wanted:
                is_quiet = taken <= QUIET_OPERATIONS and not more_is_due and not self._has_more()
                self._sync_as_wanted(turns, store, sync, is_quiet)

    def _sync_as_wanted(self, turns: Turns, store: Store, sync: SyncThread, is_quiet: bool) -> None:
        """Begin the sync that is wanted, or wait for it and for what wants one after it: nothing else would wake us."""
        while self._sync_wanted:
            self._sync_wanted = False
            if is_quiet:
                store.sync()
                turns.synced()
                self._send(turns)
            else:
                sync.begin()

    def _has_more(self) -> bool:
        return bool(int(self._inbox.get(zmq.EVENTS)) & zmq.POLLIN)

    def _look_at_disk(self, machine: Machine) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_at_disk_at < LOOK_INTERVAL_S:
            return
        self._looked_at_disk_at = now_s
        found = shortage(self._directory)
        if (found is None) != (machine.shortage is None):
            log.error("no jobs are taken", reason=found) if found else log.warning("jobs are taken again")
        machine.shortage = found

    def _take_envelopes(self, turns: Turns, now: Instant) -> int:
        """How many operations were applied."""
        taken = 0
        while taken < TURN_OPERATIONS:
            try:
                message = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            operations = turns.take(message, now)
            if operations is None:
                log.warning("envelope for another process refused")
            else:
                taken += operations
            if turns.is_full:
                break
        return taken

    def _write(self, turns: Turns) -> None:
        while True:
            try:
                turns.write()
                return
            except StoreBusy:
                log.warning("a write would have stalled, trying again", retry_s=STALL_RETRY_S)
                time.sleep(STALL_RETRY_S)

    def _send(self, turns: Turns) -> None:
        for router, message in turns.messages:
            self._links.send(router, message)
        turns.messages.clear()

    def _take_messages(self, machine: Machine, turns: Turns) -> None:
        while True:
            try:
                message = self._messages.get_nowait()
            except Empty:
                return
            match message:
                case RouterUp():
                    machine.router_came(message.name)
                case RouterDown():
                    self._links.drop(message.name)
                    turns.router_gone(message.name, instant())
                case ConfigChanged():
                    machine.configure(Config.model_validate(message.config))
                case SlotMapChanged():
                    machine.map_changed(message.epoch, message.owners, instant())
                case Stop() | None:
                    self._stopping = True
                case _:
                    raise AssertionError(f"a shard does not take {message.kind}")


def open_store(directory: Path, config: Config) -> RocksStore:
    """The store of a shard, as the configuration wants it. Raises StoreError."""
    storage = config.storage
    options = StoreOptions(
        persist_mode=storage.persist_mode,
        cache_size_bytes=storage.cache_size_bytes,
        max_open_files=storage.max_open_files,
        background_threads=storage.background_threads,
    )
    return RocksStore.open(directory, options)
