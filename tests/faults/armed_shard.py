"""A shard process with the points in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common.wire import MoveCommand, Op, Operation, unpack
from shard import transactions
from shard.__main__ import main
from shard.machine import Machine
from shard.process import RouterLinks, ShardProcess
from shard.state import Instant
from shard.store import Family, Store
from shard.store_rocks import RocksStore
from tests.faults.armed_points import (
    LAST_CHANGES,
    PROTOCOL,
    SHARD_POINTS,
    SLOT_MAP,
    STARTING,
    STEPS,
    Points,
    point,
    set_constant,
    wrap,
)

# Until a shard asks again what became of a transaction: its first question may come before the router knows it.
ASK_AGAIN_MS = 50

points = Points(SHARD_POINTS)
# Kind and transaction (0: none) of the operations that the turn has applied, and of those that are written, by op id,
# until their results leave.
applied: dict[int, tuple[Op | str, int]] = {}
written: dict[int, tuple[Op | str, int]] = {}
# What the new map is known by in there: it has no op id, and no answer.
MAP_ID = -1


def loading(original: Callable[..., None], self: Machine, store: Store, *given: Any, **named: Any) -> None:
    original(self, store, *given, **named)
    note_transactions(store)


def kind_of(self: Machine, operation: Operation) -> Op | str | None:
    """What the points of an operation are called by; None where it has none."""
    kind = Op(operation[1])
    if kind == Op.MOVE:
        step = MoveCommand(operation[2])
        is_last = step == MoveCommand.CHANGES and self._ownership.held_slots
        return LAST_CHANGES if is_last else step if step in STEPS else None
    return kind if kind in PROTOCOL else None


def applying(
    original: Callable[..., None], self: Machine, router: str, operation: Operation, now: Instant, epoch: int = 0
) -> None:
    kind = kind_of(self, operation)
    transaction = operation[2] if kind in PROTOCOL else 0
    if kind is not None:
        points.reach(point(kind, "arrived"), router, transaction)
    original(self, router, operation, now, epoch)
    if kind is not None:
        applied[operation[0]] = kind, transaction


def taking_map(original: Callable[..., None], self: Machine, epoch: int, owners: Sequence[int], now: Instant) -> None:
    points.reach(point(SLOT_MAP, "arrived"))
    original(self, epoch, owners, now)
    applied[MAP_ID] = SLOT_MAP, 0


def writing(original: Callable[..., bool], self: RocksStore) -> bool:
    for kind, transaction in applied.values():
        points.reach(point(kind, "applied"), transaction=transaction)
    is_touched = bool(self.pending[Family.TRANSACTIONS])
    changed = original(self)
    if is_touched:
        note_transactions(self)
    for kind, transaction in applied.values():
        points.reach(point(kind, "written"), transaction=transaction)
    applied.pop(MAP_ID, None)
    written.update(applied)
    applied.clear()
    return changed


def answering(original: Callable[..., None], self: RouterLinks, router: str, message: bytes) -> None:
    for op_id, *_ in unpack(message).items:
        if op_id in written:
            kind, transaction = written.pop(op_id)
            points.reach(point(kind, "synced"), router, transaction)
    original(self, router, message)


def starting(original: Callable[..., int], self: ShardProcess, wake_fd: int) -> int:
    points.process = self._start.name
    points.reach(STARTING)
    return original(self, wake_fd)


def note_transactions(store: Store) -> None:
    points.note_transactions(len(store.scan(Family.TRANSACTIONS, b"", b"\xff", 1 << 62)))


def arm() -> None:
    """Raises LookupError when a place in the code has moved."""
    set_constant(transactions, "ASK_AGAIN_MS", ASK_AGAIN_MS)
    wrap(Machine, "__init__", ("self", "store", "config", "now", "shard", "routers", "owners", "epoch"), loading)
    wrap(Machine, "apply", ("self", "router", "operation", "now", "epoch"), applying)
    wrap(Machine, "map_changed", ("self", "epoch", "owners", "now"), taking_map)
    wrap(RocksStore, "write", ("self",), writing)
    wrap(RouterLinks, "send", ("self", "router", "message"), answering)
    wrap(ShardProcess, "run", ("self", "wake_fd"), starting)


def run() -> int:
    """The whole process; its exit status."""
    arm()
    return main()
