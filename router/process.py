"""The router process: the core between a gRPC front and the links to the shards.

Two threads bring events, the front's and the links' one; a lock is held around the core, and in it
envelopes are handed to ZeroMQ, which takes them at once. Replies start after the lock is released.
Envelopes from shards are received by the links' thread and, where that can be, worked off by the
front's (`Front.run_soon`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import structlog
import zmq

from common import __version__
from common.config_errors import ConfigError
from common.config_sections import Config
from common.config_tls import read_tls
from common.control import (
    CommitMove,
    ConfigChanged,
    ControlLink,
    Drain,
    Fatal,
    MapRefused,
    Ready,
    Served,
    Serving,
    SetShards,
    ShardDown,
    ShardUp,
    SlotMapChanged,
    StartRouter,
    ToChild,
    one_line,
)
from common.slots import SlotMap
from common.wire import WireError
from router.admin_service import AdminService
from router.asks import Done
from router.core import Core, Moment, Reply
from router.front import Call, Front, FrontError, FrontOptions, Status
from router.fronts import make_front
from router.links import ShardLinks
from router.resharding import Commit, MoveDone, Request

# How long a router that ends waits at most for shards to hear what became of its last answers, in seconds.
SETTLE_S = 1.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def moment() -> Moment:
    """Now, on both clocks."""
    return Moment(time.time_ns() // 1_000_000, time.monotonic_ns() // 1_000_000)


def keep_metadata_out_of_the_log() -> None:
    """grpcio logs metadata that is no UTF-8, with a traceback: it may hold a key, and anybody could fill the log."""
    grpcio = logging.getLogger("grpc._cython.cygrpc")
    grpcio.addFilter(lambda record: not str(record.msg).startswith("Invalid encoding on"))


class RouterProcess:
    """One router from start to end. `run` returns the exit status.

    It is the front's Receiver: `call_arrived`, `call_closed` and `answer_left` come from its threads.
    """

    def __init__(self, start: StartRouter, control: ControlLink, messages: SimpleQueue[ToChild | None]) -> None:
        self._start = start
        self._control = control
        self._messages = messages
        self._ends: SimpleQueue[Drain | None] = SimpleQueue()
        self._start_config = Config.model_validate(start.config)
        self._slot_map = SlotMap(start.epoch, start.shards, tuple(start.owners))
        self._core = Core(
            name=start.name,
            version=__version__,
            config=self._start_config,
            slot_map=self._slot_map,
            first_op_id=int.from_bytes(os.urandom(8), "big") >> 2,
            random_bytes=os.urandom,
        )
        self._lock = threading.Lock()
        self._links = ShardLinks(start.address, start.shards)
        # Envelopes that came, in their order, and whether somebody has been told to take them.
        self._arrived: deque[bytes] = deque()
        self._arrived_told = False
        self._calls_are_over = False
        self._settled = threading.Event()
        self._stopped = False
        # Monotonic ms until which the links' thread sleeps at most; an earlier timer wakes it.
        self._sleeps_until: float = inf
        self._wake_fd, self._wake_end = os.pipe()
        os.set_blocking(self._wake_fd, False)
        self._front: Front

    def _make_front(self) -> Front:
        """Raises ConfigError when the TLS files cannot be used."""
        server, limits = self._start_config.server, self._start_config.limits
        options = FrontOptions(self._start.listen, limits.max_message_bytes, read_tls(server))
        return make_front(options, self, server.grpc_front)

    def wake(self) -> None:
        """A control message has come; for any thread."""
        os.write(self._wake_end, b"\x00")

    def run(self) -> int:
        """Serve until told to drain. Without a supervisor there is nothing to serve: end at once."""
        keep_metadata_out_of_the_log()
        try:
            self._front = self._make_front()
        except ConfigError as error:
            self._control.send(Fatal(text=one_line(str(error))))
            return 1
        for shard in self._start.up:
            self._shard_up(shard.index, shard.generation, shard.address)
        links = threading.Thread(target=self._serve_links, name="links", daemon=True)
        links.start()
        try:
            self._front.start()
        except FrontError as error:
            self._control.send(Fatal(text=one_line(str(error))))
            return 1
        admin = self._start_admin()
        self._control.send(Ready())
        drain = self._ends.get()
        if drain is None:
            os._exit(1)
        self._front.set_serving(False)
        with self._lock:
            self._core.drain(moment())
            replies = self._carry()
        self._answer(replies)
        admin_over = None if admin is None else admin.stop()
        self._front.stop(drain.grace_ms / 1000)
        if admin_over is not None:
            admin_over.wait()
        self._calls_are_over = True
        self.wake()
        if not self._settled.wait(SETTLE_S):
            log.warning("the router ends although shards have not heard of all answers", waited_s=SETTLE_S)
        self._stopped = True
        self.wake()
        links.join()
        self._links.close()
        return 0

    def _start_admin(self) -> AdminService | None:
        """One router of a server has the admin socket."""
        if self._start.index != 0:
            return None
        directory = Path(self._start_config.server.db_path)
        admin = AdminService(directory, self)
        admin.start()
        return admin

    # -- for the admin service ------------------------------------------------------------------

    def ask(self, shard: int, arguments: list[Any], done: Done) -> None:
        with self._lock:
            if shard < self._slot_map.shards:
                self._core.ask(shard, arguments, done, moment())
            else:
                done(Status.UNAVAILABLE, f"shard {shard} was taken away")
            replies = self._carry()
        self._answer(replies)

    def slot_map(self) -> SlotMap:
        return self._slot_map

    def begin_move(self, slots: list[int], target: int, bytes_per_second: int, done: MoveDone) -> None:
        with self._lock:
            self._core.begin_move(slots, target, bytes_per_second, done, moment())
            replies = self._carry()
        self._answer(replies)

    def set_shards(self, shards: int, done: Callable[[str | None], None]) -> None:
        with self._lock:
            self._core.set_shards(shards, done, moment())
            replies = self._carry()
        self._answer(replies)

    def call_trusted(self, call: Call) -> None:
        with self._lock:
            self._core.arrived_trusted(call, moment())
            replies = self._carry()
        self._answer(replies)

    # -- events of the front --------------------------------------------------------------------

    def call_arrived(self, call: Call) -> None:
        with self._lock:
            self._core.arrived(call, moment())
            replies = self._carry()
        self._answer(replies)

    def call_closed(self, call: Call) -> None:
        with self._lock:
            self._core.closed(call, moment())
            replies = self._carry()
        self._answer(replies)

    def answer_left(self, call: Call, left: bool) -> None:
        with self._lock:
            self._core.answer_left(call, left, moment())
            replies = self._carry()
        self._answer(replies)

    # -- what the core wants --------------------------------------------------------------------

    def _carry(self) -> list[Reply]:
        """Send the core's envelopes and take its replies; with the lock held."""
        core = self._core
        for shard in core.shards:
            if shard.messages:
                for message in shard.messages:
                    self._links.send(shard.index, message)
                shard.messages.clear()
        for request in core.requests:
            self._control.send(_message_of(request))
        core.requests.clear()
        timer = core.next_timer_ms()
        if timer is not None and timer < self._sleeps_until:
            self._sleeps_until = timer
            self.wake()
        replies, core.replies = core.replies, []
        return replies

    @staticmethod
    def _answer(replies: list[Reply]) -> None:
        for call, answer, status, text in replies:
            if answer is None:
                call.fail(status, text)
            else:
                call.reply(answer)

    # -- the links' thread ------------------------------------------------------------------------

    def _serve_links(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._links.inbox, zmq.POLLIN)
            poller.register(self._wake_fd, zmq.POLLIN)
            while not self._stopped:
                ready = dict(poller.poll(self._sleep_ms()))
                if self._links.inbox in ready:
                    self._receive_envelopes()
                    self._have_envelopes_taken()
                if self._wake_fd in ready:
                    self._drain_wake()
                    self._take_messages()
                if self._sleep_ms() == 0:
                    self._tick()
                if self._calls_are_over:
                    self._take_envelopes()  # nobody else does any more
                    self._look_whether_settled()
        except Exception:
            _die()

    def _sleep_ms(self) -> int | None:
        """How long nothing is due; for poll, None is for ever."""
        until = self._sleeps_until
        if until == inf:
            return None
        return max(0, int(until) - time.monotonic_ns() // 1_000_000 + 1)

    def _tick(self) -> None:
        with self._lock:
            self._core.tick(moment())
            replies = self._carry()
            timer = self._core.next_timer_ms()
            self._sleeps_until = inf if timer is None else timer
        self._answer(replies)

    def _look_whether_settled(self) -> None:
        with self._lock:
            if self._core.is_settled:
                self._settled.set()

    def _drain_wake(self) -> None:
        try:
            os.read(self._wake_fd, 4096)
        except BlockingIOError:
            pass

    def _receive_envelopes(self) -> None:
        while True:
            try:
                self._arrived.append(self._links.inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return

    def _have_envelopes_taken(self) -> None:
        if not self._arrived_told:
            self._arrived_told = True
            if not self._front.run_soon(self._take_envelopes):
                self._take_envelopes()

    def _take_envelopes(self) -> None:
        """Work off what has come, in its order; in any thread."""
        self._arrived_told = False  # first: what comes from now on is told of again
        try:
            while self._arrived:
                with self._lock:
                    self._take_next_envelope()
                    replies = self._carry()
                self._answer(replies)
        except Exception:
            _die()

    def _take_next_envelope(self) -> None:
        if not self._arrived:
            return  # another thread was faster
        try:
            self._core.envelope(self._arrived.popleft(), moment())
        except WireError as error:
            log.error("a message that is no envelope was dropped", error=str(error))

    def _take_messages(self) -> None:
        while True:
            try:
                message = self._messages.get_nowait()
            except Empty:
                return
            match message:
                case ShardUp():
                    self._shard_up(message.index, message.generation, message.address)
                case ShardDown():
                    if message.index < self._slot_map.shards:  # else it was taken away, as has been heard before
                        self._shard_down(message.index, message.generation)
                case SlotMapChanged():
                    self._map_changed(SlotMap(message.epoch, message.shards, tuple(message.owners)))
                case MapRefused():
                    with self._lock:
                        self._core.map_refused(message.request, message.text, moment())
                        replies = self._carry()
                    self._answer(replies)
                case Serving():
                    self._front.set_serving(True)
                    self._control.send(Served())
                case ConfigChanged():
                    with self._lock:
                        self._core.configure(Config.model_validate(message.config))
                case Drain() | None:
                    self._ends.put(message)
                case _:
                    raise AssertionError(f"a router does not take {message.kind}")

    def _shard_up(self, shard: int, generation: int, address: str) -> None:
        with self._lock:
            self._links.connect(shard, address)
            self._core.shard_up(shard, generation, moment())
            replies = self._carry()
        self._answer(replies)

    def _shard_down(self, shard: int, generation: int) -> None:
        self._receive_envelopes()
        self._take_envelopes()  # what it sent before it ended still counts
        with self._lock:
            self._links.disconnect(shard)
            self._core.shard_down(shard, generation, moment())
            replies = self._carry()
        self._answer(replies)

    def _map_changed(self, slot_map: SlotMap) -> None:
        self._receive_envelopes()
        self._take_envelopes()  # also of shards that are taken away
        with self._lock:
            self._slot_map = slot_map  # first: whoever waits for the change asks for it next
            self._core.map_changed(slot_map, moment())
            self._links.resize(slot_map.shards)
            replies = self._carry()
        self._answer(replies)


def _die() -> None:
    """What failed would leave calls hanging: better to end and be started again."""
    log.exception("the router cannot go on")
    os._exit(1)


def _message_of(request: Request) -> CommitMove | SetShards:
    """What the core asks of the supervisor, as it is sent."""
    if isinstance(request, Commit):
        return CommitMove(
            request=request.number,
            slots=request.slots,
            target=request.target,
            source_generation=request.source_generation,
            target_generation=request.target_generation,
        )
    return SetShards(request=request.number, shards=request.shards)
