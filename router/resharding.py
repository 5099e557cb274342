"""Slots that move from one shard to another, as the router drives it that was asked to.

How it works. Both ends are in the shards (`shard.migration` tells what each step means there); this is
the hand that carries rows from one to the other, and the order of the steps:

    CLEAR     the target, until nothing is left of an earlier try
    OPEN      the source notes what changes from now on
    READ      part by part from the source, each to the target with RECEIVE; the rate limit holds here
    CHANGES   round by round, until what changes in one round is little
    HOLD      the source holds new operations; until all is quiet, or for HOLD_MAX_MS, then RESUME and again later
    CHANGES   the last of them
    commit    the supervisor replaces the slot map: that is the switch

Every RECEIVE is synced before it is answered, so all is on the target's disk before the switch. The
supervisor refuses the commit when source or target have been started again since the move began: a
source that was is serving, a target that was has deleted what it does not own. Whatever goes wrong
before the commit, the source RESUMEs, the target DISCARDs, and nothing has happened. After the commit
was asked for, only the supervisor's answer counts.

If this router dies, both shards hear of it and let go; the supervisor takes nothing from a dead router.
One move at a time: a second one is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from common.wire import AdminCommand, MoveCommand, Op
from router.asks import AskFlow
from router.front import Status
from router.outbound import Outbound, Pending

if TYPE_CHECKING:
    from router.core import Core

# Of one READ or CHANGES: the most that a turn of either shard is made longer by, some milliseconds.
PART_BYTES = 256 * 1024
# Rows that changed in one round, at most, for the next round to be the held one.
LAST_ROWS = 500
# Rounds after which the slots are held although more than that changes in each.
ROUNDS_MAX = 50
# How often the source is asked whether all is quiet, and for how long, before it serves again, in ms.
QUIET_RETRY_MS = 2
HOLD_MAX_MS = 100
# What is waited before slots are held again, in ms: doubled each time, up to the second; and how often at most.
HOLD_AGAIN_MS = 50
HOLD_AGAIN_MAX_MS = 2_000
HOLDS_MAX = 30
# How often the target is asked whether it has deleted what lay there, in ms.
CLEAR_RETRY_MS = 10
# How long a shard that is down is waited for before anything has begun, in ms: a new one is just starting.
START_MS = 30_000


class Commit(NamedTuple):
    """Ask the supervisor to give slots to another shard. The answer is a new map, or a refusal by number."""

    number: int
    slots: list[int]
    target: int
    source_generation: int
    target_generation: int


class Resize(NamedTuple):
    """Ask the supervisor for another number of shards. The answer is a new map, or a refusal by number."""

    number: int
    shards: int


Request: TypeAlias = Commit | Resize


class MoveOutcome(NamedTuple):
    """What a move has done: rows and bytes copied, and how long operations on its slots were held, in ms."""

    epoch: int
    records: int
    bytes: int
    hold_ms: int


MoveDone: TypeAlias = Callable[[MoveOutcome | str], None]


class Resharding:
    """The moves and resizings of one router, one after the other."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._number = 0
        self._move: Move | None = None
        self._resize: tuple[Resize, Callable[[str | None], None]] | None = None
        self._asking = False

    def begin_move(self, slots: list[int], target: int, bytes_per_second: int, done: MoveDone) -> None:
        owners = {self._core.slot_map.owners[slot] for slot in slots}
        if self._is_busy():
            done("slots are being moved already: one move at a time")
        elif len(owners) != 1 or target in owners or target >= self._core.slot_map.shards:
            done("the slots have moved meanwhile: plan again")
        else:
            self._move = Move(self._core, self, slots, owners.pop(), target, bytes_per_second, done)
            self._move.begin()

    def set_shards(self, shards: int, done: Callable[[str | None], None]) -> None:
        if self._is_busy():
            done("slots are being moved: the number of shards can change afterwards")
        else:
            self._ask_next(shards, shards, done)

    def _ask_next(self, shard: int, shards: int, done: Callable[[str | None], None]) -> None:
        """Whether a shard that is to go, and those after it, keep the decisions of atomic batches that others need."""
        self._asking = shard < self._core.slot_map.shards
        if not self._asking:
            self._request_resize(shards, done)
            return

        def answered(status: int, data: Any) -> None:
            if status == Status.OK and data == 0:
                self._ask_next(shard + 1, shards, done)
                return
            self._asking = False
            if status == Status.OK:
                done(f"shard {shard} keeps what became of {data} atomic batches until all have heard of it: try again")
            else:
                done(f"shard {shard} cannot be asked whether it can go: {data}")

        AskFlow(self._core, shard, answered).begin([Op.ADMIN, AdminCommand.TRANSACTIONS])

    def _request_resize(self, shards: int, done: Callable[[str | None], None]) -> None:
        request = Resize(self.next_number(), shards)
        self._resize = request, done
        self._core.requests.append(request)

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def map_changed(self) -> None:
        """The core has taken over another map."""
        if self._move is not None:
            self._move.map_changed()
        if self._resize is not None and self._resize[0].shards == self._core.slot_map.shards:
            (_, done), self._resize = self._resize, None
            done(None)

    def refused(self, number: int, text: str) -> None:
        """The supervisor refused the request of this number."""
        if self._move is not None:
            self._move.refused(number, text)
        if self._resize is not None and self._resize[0].number == number:
            (_, done), self._resize = self._resize, None
            done(text)

    def ended(self) -> None:
        """The move is over."""
        self._move = None

    def _is_busy(self) -> bool:
        return self._move is not None or self._resize is not None or self._asking


class Move:
    """One move. All slots belong to `source`."""

    def __init__(
        self,
        core: Core,
        resharding: Resharding,
        slots: list[int],
        source: int,
        target: int,
        bytes_per_second: int,
        done: MoveDone,
    ) -> None:
        self.timer_at = 0
        self._core = core
        self._resharding = resharding
        self._slots = slots
        self._source = source
        self._target = target
        self._bytes_per_second = bytes_per_second
        self._done = done
        self._source_generation = 0
        self._target_generation = 0
        self._out: tuple[MoveCommand, Outbound, Pending] | None = None
        self._on_timer: Callable[[], None] = self._clear
        self._records = 0
        self._bytes = 0
        self._may_read_at = 0.0  # monotonic ms, by the rate limit
        self._rounds = 0
        self._holds = 0
        self._held_at = 0  # monotonic ms, 0 when nothing is held
        self._is_quiet = False
        self._commit = 0  # the number of the request

    def begin(self) -> None:
        self._core.set_timer(self, self._core.now.mono_ms + START_MS)
        self._on_timer = self._has_not_started
        self._clear()

    # -- events -------------------------------------------------------------------------------

    def result(self, op_id: int, status: int, data: Any) -> None:
        if self._out is None or self._out[2].op_id != op_id:
            return  # given up meanwhile
        (command, _, _), self._out = self._out, None
        if status != Status.OK:
            self._give_up(str(data))
            return
        match command:
            case MoveCommand.CLEAR:
                self._cleared(data)
            case MoveCommand.OPEN:
                self._source_generation = self._core.shards[self._source].generation
                self._read()
            case MoveCommand.READ:
                rows, done = data
                self._pass_on(rows, self._changes if done else self._read_by_rate)
            case MoveCommand.CHANGES:
                self._changed(*data)
            case MoveCommand.HOLD:
                self._held(data)
            case MoveCommand.RECEIVE:
                self._on_received()
            case _:
                raise AssertionError(f"nobody waits for {command}")

    def lost(self, op_id: int) -> None:
        if self._out is not None and self._out[2].op_id == op_id:
            (_, outbound, _), self._out = self._out, None
            self._give_up(f"shard {outbound.index} ended meanwhile")

    def hold(self) -> None:
        """A shard is down. One that has only just been added is waited for."""
        if self._out is None or not self._target_generation:
            return
        _, outbound, pending = self._out
        if not outbound.is_up and outbound.withdraw(pending):
            self._out = None
            self._give_up(f"shard {outbound.index} is down")

    def moved(self, op_id: int) -> None:
        """Its shard was taken away."""
        if self._out is not None and self._out[2].op_id == op_id:
            self._out = None
            self._give_up("a shard was taken away")

    def timer_fired(self) -> None:
        self._on_timer()

    def map_changed(self) -> None:
        slot_map = self._core.slot_map
        owners = {slot_map.owners[slot] for slot in self._slots}
        if self._commit and owners == {self._target}:
            self._end(MoveOutcome(slot_map.epoch, self._records, self._bytes, self._core.now.mono_ms - self._held_at))

    def refused(self, number: int, text: str) -> None:
        if number == self._commit:
            self._commit = 0
            self._give_up(text)

    # -- steps --------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._send(self._target, MoveCommand.CLEAR, [self._slots])

    def _has_not_started(self) -> None:
        if self._out is not None and not self._out[1].withdraw(self._out[2]):
            return  # it is being asked
        self._out = None
        self._give_up(f"shard {self._target} is down")

    def _cleared(self, is_empty: bool) -> None:
        self._target_generation = self._core.shards[self._target].generation
        if not is_empty:
            self._wait(CLEAR_RETRY_MS, self._clear)
            return
        self.timer_at = 0
        self._send(self._source, MoveCommand.OPEN, [self._slots])

    def _read(self) -> None:
        self._send(self._source, MoveCommand.READ, [PART_BYTES])

    def _read_by_rate(self) -> None:
        delay_ms = int(self._may_read_at - self._core.now.mono_ms)
        if delay_ms > 0:
            self._wait(delay_ms, self._read)
        else:
            self._read()

    def _changes(self) -> None:
        self._send(self._source, MoveCommand.CHANGES, [PART_BYTES])

    def _changed(self, rows: list[list[Any]], left: int) -> None:
        self._rounds += 1
        if self._is_quiet:
            self._pass_on(rows, self._changes if left else self._ask_for_commit)
        elif left or (len(rows) > LAST_ROWS and self._rounds < ROUNDS_MAX):
            self._pass_on(rows, self._changes)
        else:
            self._pass_on(rows, self._hold)

    def _hold(self) -> None:
        if not self._held_at:
            self._held_at = self._core.now.mono_ms
        self._send(self._source, MoveCommand.HOLD, [])

    def _held(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        if is_quiet:
            self._changes()
        elif self._core.now.mono_ms < self._held_at + HOLD_MAX_MS:
            self._wait(QUIET_RETRY_MS, self._hold)
        else:
            self._serve_again()

    def _serve_again(self) -> None:
        """Somebody takes an answer slowly, or a batch is not decided: others must not wait for that."""
        self._holds += 1
        if self._holds == HOLDS_MAX:
            self._give_up("workers take their answers so slowly that jobs of these slots are always on the way")
            return
        self._tell(self._source, MoveCommand.PAUSE)
        self._held_at = self._rounds = 0
        self._wait(min(HOLD_AGAIN_MS << self._holds, HOLD_AGAIN_MAX_MS), self._changes)

    def _ask_for_commit(self) -> None:
        self._commit = self._resharding.next_number()
        self._core.requests.append(
            Commit(self._commit, self._slots, self._target, self._source_generation, self._target_generation)
        )

    def _pass_on(self, rows: list[list[Any]], then: Callable[[], None]) -> None:
        self._on_received = then
        if not rows:
            then()
            return
        size = sum(len(key) + len(value or b"") for _, key, value in rows)
        self._records += len(rows)
        self._bytes += size
        if self._bytes_per_second:
            start = max(self._may_read_at, float(self._core.now.mono_ms))
            self._may_read_at = start + size * 1000 / self._bytes_per_second
        self._send(self._target, MoveCommand.RECEIVE, [rows, self._core.now.wall_ms], size)

    # -- the end ------------------------------------------------------------------------------

    def _give_up(self, text: str) -> None:
        """Before the commit: nothing has happened."""
        if self._commit:
            return  # only the supervisor knows
        if self._out is not None:
            self._out[1].withdraw(self._out[2])
            self._out = None
        self._tell(self._source, MoveCommand.RESUME)
        self._tell(self._target, MoveCommand.DISCARD)
        self._end(f"{text}: the slots were not moved")

    def _end(self, outcome: MoveOutcome | str) -> None:
        self.timer_at = 0
        self._resharding.ended()
        self._done(outcome)

    # -- operations ---------------------------------------------------------------------------

    def _send(self, shard: int, command: MoveCommand, arguments: list[Any], size: int = 0) -> None:
        outbound = self._core.shards[shard]
        operation = [self._core.next_op_id(), Op.MOVE, command, *arguments]
        self._out = command, outbound, outbound.add(operation, self, size)
        self.hold()

    def _tell(self, shard: int, command: MoveCommand) -> None:
        """Whoever has ended since need not hear it, and its successor does not mind."""
        self._core.shards[shard].add([self._core.next_op_id(), Op.MOVE, command], None)

    def _wait(self, delay_ms: int, then: Callable[[], None]) -> None:
        self._on_timer = then
        self._core.set_timer(self, self._core.now.mono_ms + delay_ms)
