"""The process of a router: the real core, and in place of gRPC a front that does what `router.front` promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.config import Config
from common.slots import SlotMap
from router.asks import Done
from router.coordinator import Transaction
from router.core import Core, Moment, Reply
from router.front import WATCHED_METHODS, Status
from router.resharding import MoveDone
from tests.simulation.network import Link
from tests.simulation.words import envelope_in_words
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.simulation import Cluster

# How long an answer may take to be written to its connection, at most.
WRITE_US = 2_000
# As in `router.process`: how long a router that ends waits for shards to hear of its last answers.
SETTLE_MS = 1_000
# Op ids that one router process has for itself: far more than it uses, and short enough to read.
OP_IDS = 100_000


class SimCall:
    """One call of a client. `done` is told the reply, or None when the client has gone or its connection broke."""

    __slots__ = ("authorization", "deadline", "done", "has_ended", "is_answered", "is_told_closed", "method", "request")

    def __init__(self, method: str, request: bytes, deadline: float, done: Callable[[Reply | None], None]) -> None:
        self.method = method
        self.request = request
        self.authorization = None
        self.deadline = deadline
        self.done = done
        self.is_answered = False  # the core has answered it
        self.has_ended = False  # for its client
        self.is_told_closed = False

    def reply(self, answer: bytes) -> None:
        raise AssertionError("the core answers by its replies")

    def fail(self, status: Status, text: str) -> None:
        raise AssertionError("the core answers by its replies")


class RouterProcess:
    """One process of a router, from its start to its end."""

    def __init__(
        self,
        cluster: Cluster,
        index: int,
        generation: int,
        config: Config,
        slot_map: SlotMap,
        up: list[tuple[int, int]],
        requests: Link,
    ) -> None:
        self.index = index
        self.name = f"router-{index}-{generation}"
        self.is_alive = True
        self.listens = False
        self.calls: dict[SimCall, None] = {}  # whose end the front has not seen
        self._cluster = cluster
        self._world: World = cluster.world
        self._up = up
        self._requests = requests  # to the supervisor
        self._links: dict[int, Link] = {}  # by generation of the shard
        self._is_draining = False
        self._calls_are_over = False
        self._wakes_at_ms = 0  # the timer that is set, 0: none
        self._waiting_control: list[tuple[str, Any]] = []
        self.core = Core(
            self.name,
            "1",
            config,
            slot_map,
            generation * OP_IDS,
            self._world.random.randbytes,
        )

    # -- from its start to its end --------------------------------------------------------------

    def start(self) -> None:
        if not self.is_alive:
            return
        self.listens = True
        for index, generation in self._up:
            self._do(self.core.shard_up, index, generation)
        waiting, self._waiting_control = self._waiting_control, []
        for word, value in waiting:
            self.told(word, value)

    def kill(self) -> None:
        """SIGKILL: its clients lose their connections."""
        self._end("is killed")
        for link in self._links.values():
            link.sender_died()
        self._requests.sender_died()

    def supervisor_died(self) -> None:
        """Its control channel has ended: it ends at once."""
        if self.is_alive:
            self.kill()

    def _end(self, how: str) -> None:
        if self._world.trace is not None:
            self._world.note(self.name, how)
        self.is_alive = self.listens = False
        for call in list(self.calls):
            self._end_for_client(call, None)
        self.calls.clear()

    # -- from the supervisor --------------------------------------------------------------------

    def told(self, word: str, value: Any) -> None:
        if not self.is_alive:
            return
        if not self.listens and not self._is_draining:
            self._waiting_control.append((word, value))
            return
        match word:
            case "shard up":
                self._do(self.core.shard_up, *value)
            case "shard down":
                if value[0] < self.core.slot_map.shards:  # else it was taken away
                    self._do(self.core.shard_down, *value)
            case "map":
                self._do(self.core.map_changed, value)
            case "map refused":
                self._do(self.core.map_refused, *value)
            case "config":
                self.core.configure(value)
            case "drain":
                self.listens = False
                self._is_draining = True
                self._do(self.core.drain)
                self._world.at_ms(self._world.mono_ms + value, self._grace_is_over)
                self._end_if_done()
            case _:
                raise AssertionError(word)

    def _grace_is_over(self) -> None:
        """The front cancels what is still running."""
        if self.is_alive:
            for call in list(self.calls):
                self.client_goes(call)
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_draining and self.is_alive and not self.calls:
            if not self._calls_are_over:
                self._calls_are_over = True
                self._world.at_ms(self._world.mono_ms + SETTLE_MS, self._end_in_order)
            if self.core.is_settled:
                self._end_in_order()

    def _end_in_order(self) -> None:
        if not self.is_alive:
            return
        if not self.core.is_settled:  # a shard is down for too long: what it has not heard of runs out by itself
            self._cluster.has_lost_routers = True
        self._end("ends in order")
        self._cluster.supervisor.noticed_later(self)

    # -- from shards ----------------------------------------------------------------------------

    def envelope(self, message: bytes) -> None:
        if self.is_alive:
            self._do(self.core.envelope, message)

    # -- from clients ---------------------------------------------------------------------------

    def call_arrives(self, call: SimCall) -> None:
        if not self.listens:
            # It never reached anybody; its client cannot know that.
            self._end_for_client(call, None)
        elif not call.has_ended:
            self.calls[call] = None
            self._do(self.core.arrived, call)

    def client_goes(self, call: SimCall) -> None:
        """The client cancels, its deadline passes, or its connection breaks."""
        if call.has_ended:
            return
        self._end_for_client(call, None)
        if not self.is_alive or call not in self.calls or call.is_answered:
            return
        del self.calls[call]
        if call.method in WATCHED_METHODS:
            call.is_told_closed = True
            self._do(self.core.closed, call)
        self._end_if_done()

    @property
    def is_trying_again(self) -> bool:
        """Whether a transaction waits to be tried again, perhaps for a client that has gone."""
        return any(timed.timer_at == at_ms and isinstance(timed, Transaction) for at_ms, _, timed in self.core._timers)

    @property
    def is_moving(self) -> bool:
        """Whether slots are being moved."""
        return self.core._resharding._is_busy()

    def begin_move(self, slots: list[int], target: int, bytes_per_second: int, done: MoveDone) -> None:
        """An operator moves slots."""
        if self.is_alive:
            self._do(self.core.begin_move, slots, target, bytes_per_second, done)

    def set_shards(self, shards: int, done: Callable[[str | None], None]) -> None:
        """An operator adds shards or takes some away."""
        if self.is_alive:
            self._do(self.core.set_shards, shards, done)

    def ask(self, shard: int, arguments: list[Any], done: Done) -> None:
        """An operation of an operator."""
        if self.is_alive:
            self._do(self.core.ask, shard, arguments, done)

    @staticmethod
    def _end_for_client(call: SimCall, reply: Reply | None) -> None:
        if not call.has_ended:
            call.has_ended = True
            call.done(reply)

    # -- the core -------------------------------------------------------------------------------

    def _do(self, event: Callable[..., None], *arguments: Any) -> None:
        world, core = self._world, self.core
        event(*arguments, Moment(world.wall_ms, world.mono_ms))
        for outbound in core.shards:
            if outbound.messages:
                link = self._links.get(outbound.generation)
                if link is None:
                    link = self._link(outbound.index, outbound.generation)
                for message in outbound.messages:
                    if world.trace is not None:
                        world.note(f"{self.name} -> shard-{outbound.index}", envelope_in_words(message, results=False))
                    link.send(message)
                    self._cluster.sent(self.index, outbound.index, message)
                outbound.messages.clear()
        for request in core.requests:
            self._requests.send(request)
        core.requests.clear()
        if core.replies:
            replies, core.replies = core.replies, []
            for reply in replies:
                self._write(reply)
        timer_ms = core.next_timer_ms()
        if self._calls_are_over:
            self._end_if_done()
        if timer_ms is not None and not world.mono_ms < self._wakes_at_ms <= timer_ms:
            self._wakes_at_ms = timer_ms
            world.at_ms(timer_ms, self._wake, timer_ms)

    def _link(self, index: int, generation: int) -> Link:
        """A way to a shard. What was meant for a process that has ended may reach its successor, as a queue in
        between would have it."""
        place = self._cluster.supervisor.places_by_generation[generation]

        def receive(message: bytes) -> None:
            if place.process is not None:
                place.process.envelope(message)

        link = self._links[generation] = Link(self._world, self._cluster.link_us(), receive)
        return link

    def _wake(self, at_ms: int) -> None:
        if self.is_alive and self._wakes_at_ms == at_ms:
            self._wakes_at_ms = 0
            self._do(self.core.tick)

    def _write(self, reply: Reply) -> None:
        call = reply.call
        assert isinstance(call, SimCall) and not call.is_answered, "a call is answered twice"
        call.is_answered = True
        if self._world.trace is not None:
            self._world.note(self.name, f"answers {call.method}: {reply.status.name} {reply.text}".rstrip())
        self._world.later(WRITE_US, self._written, call, reply)

    def _written(self, call: SimCall, reply: Reply) -> None:
        if not self.is_alive:
            return
        left = not call.has_ended
        self.calls.pop(call, None)
        self._end_for_client(call, reply)
        if call.method in WATCHED_METHODS:
            if not left and not call.is_told_closed and self._world.chance(0.5):
                self._do(self.core.closed, call)
            self._do(self.core.answer_left, call, left)
        self._end_if_done()
