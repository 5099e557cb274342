"""The shard process: the machine's turns, fed by sockets and clocks.

One thread does everything but the sync: it takes what routers have sent (a bounded part), applies
it and what is due, writes the turn, and sends the answers whose sync has returned.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from queue import Empty, SimpleQueue

import structlog
import zmq

from common import wire
from common.config import Config
from common.control import (
    ConfigChanged,
    ControlLink,
    Fatal,
    Ready,
    RouterDown,
    RouterUp,
    StartShard,
    Stop,
    ToChild,
    one_line,
)
from shard.commit import Answers, GroupCommit
from shard.disk import LOOK_INTERVAL_S, shortage
from shard.machine import Machine
from shard.state import Instant
from shard.store import Store, StoreBusy, StoreError
from shard.store_rocks import RocksStore, StoreOptions

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

INTERNAL = 13
# Operations that one turn takes in, about: the bound on how long a turn lasts. An envelope is taken whole.
TURN_OPERATIONS = 4_096
# How long to wait before a write that would have stalled is tried again; new work is not taken meanwhile.
STALL_RETRY_S = 0.01
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

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, shard: str, generation: int) -> None:
        self._context = context
        self._directory = address.rpartition("/")[0]
        self._shard = shard
        self._generation = generation
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._numbers: dict[str, int] = {}
        self._gone: set[str] = set()  # names are never used again

    def send(self, answers: Answers) -> None:
        """Send each router its answers. What a router does not take it no longer needs: it is gone."""
        for router in answers.routers():
            if router in self._gone:
                continue
            number = self._numbers[router] = answers.numbers.get(router, self._numbers.get(router, 0))
            results = answers.results.get(router, [])
            message = wire.pack(self._generation, self._shard, number, results)
            self._socket(router).send(message, zmq.NOBLOCK)

    def drop(self, router: str) -> None:
        """The router has ended."""
        self._gone.add(router)
        self._numbers.pop(router, None)
        link = self._sockets.pop(router, None)
        if link is not None:
            link.close(linger=0)

    def has_dropped(self, router: str) -> bool:
        return router in self._gone

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
        self._links = RouterLinks(self._context, start.address, start.name, start.generation)
        self._stopping = False
        self._directory = Path(start.directory)
        self._looked_at_disk_at = 0.0

    def run(self, wake_fd: int) -> int:
        """Serve until told to stop. `wake_fd` is readable when a control message has come."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        config = Config.model_validate(self._start.config)
        try:
            store = open_store(self._directory, config)
            machine = Machine(store, config, instant(), self._start.index, self._start.routers)
        except StoreError as error:
            self._control.send(Fatal(text=one_line(str(error))))
            return 1
        self._inbox.bind(self._start.address)
        commit = GroupCommit(store)
        self._control.send(Ready())
        try:
            self._serve(machine, store, commit, wake_fd)
        except StoreError as error:
            log.error("storage failed, the shard stops and starts again from disk", error=str(error))
            self._refuse(commit, str(error))
            self._control.send(Fatal(text=one_line(str(error))))
            return 1
        commit.close()
        store.close()
        self._links.close(LINGER_MS)
        self._inbox.close(linger=0)
        self._context.term()
        return 0

    def _serve(self, machine: Machine, store: Store, commit: GroupCommit, wake_fd: int) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(commit.wake_fd, zmq.POLLIN)
        poller.register(wake_fd, zmq.POLLIN)
        more_is_due = False
        while not (self._stopping and commit.idle):
            sleep_ms = 0 if more_is_due else machine.next_wake_ms(instant())
            ready = dict(poller.poll(sleep_ms))
            if commit.wake_fd in ready:
                self._leave(commit.finished())
            if wake_fd in ready:
                os.read(wake_fd, 64)
                self._take_messages(machine)
            now = instant()
            more_is_due = machine.tick(now)
            if self._inbox in ready:
                self._look_at_disk(machine)
                self._take_envelopes(machine, commit, now)
            for router, result in machine.results:
                commit.answers.add(router, result)
            machine.results.clear()
            for report in machine.reports:
                log.error("record set aside", report=report)
            machine.reports.clear()
            machine.end_turn()
            self._leave(commit.written(self._write(store)))

    def _look_at_disk(self, machine: Machine) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_at_disk_at < LOOK_INTERVAL_S:
            return
        self._looked_at_disk_at = now_s
        found = shortage(self._directory)
        if (found is None) != (machine.shortage is None):
            log.error("no jobs are taken", reason=found) if found else log.warning("jobs are taken again")
        machine.shortage = found

    def _take_envelopes(self, machine: Machine, commit: GroupCommit, now: Instant) -> None:
        taken = 0
        while taken < TURN_OPERATIONS:
            try:
                message = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            envelope = wire.unpack(message)
            if envelope.generation != self._start.generation or self._links.has_dropped(envelope.sender):
                log.warning("envelope for another process refused", sender=envelope.sender)
                continue
            for operation in envelope.items:
                machine.apply(envelope.sender, operation, now)
            taken += len(envelope.items)
            commit.answers.envelope_applied(envelope.sender, envelope.number)

    def _write(self, store: Store) -> bool:
        while True:
            try:
                return store.write()
            except StoreBusy:
                log.warning("a write would have stalled, trying again", retry_s=STALL_RETRY_S)
                time.sleep(STALL_RETRY_S)

    def _leave(self, answers: Answers | None) -> None:
        if answers:
            self._links.send(answers)

    def _refuse(self, commit: GroupCommit, error: str) -> None:
        """Nothing that waited for the failed write or sync is known to be done."""
        for answers in commit.abandoned():
            for results in answers.results.values():
                for result in results:
                    result[1:] = [INTERNAL, f"the write failed, the outcome is unknown: {one_line(error)}"]
            # Not acknowledged: what their envelopes gave back has to be given back again to our successor.
            answers.numbers.clear()
            self._links.send(answers)
        self._links.close(LINGER_MS)
        self._inbox.close(linger=0)
        self._context.term()

    def _take_messages(self, machine: Machine) -> None:
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
                    machine.router_gone(message.name, instant())
                case ConfigChanged():
                    machine.configure(Config.model_validate(message.config))
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
