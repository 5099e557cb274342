"""A shard process with the points of the protocol in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.wire import Op, Operation, unpack
from shard import machine
from shard.__main__ import main
from shard.machine import Machine
from shard.process import RouterLinks, ShardProcess
from shard.state import Instant
from shard.store import Family, Store
from shard.store_rocks import RocksStore
from tests.faults.armed_points import PROTOCOL, SHARD_POINTS, STARTING, Points, point, set_constant, wrap

# Until a shard asks again what became of a transaction: its first question may come before the router knows it.
ASK_AGAIN_MS = 50

points = Points(SHARD_POINTS)
# Kind and transaction of the operations that the turn has applied, and of those that are written, by op id, until
# their results leave.
applied: dict[int, tuple[Op, int]] = {}
written: dict[int, tuple[Op, int]] = {}


def loading(original: Callable[..., None], self: Machine, store: Store, *given: Any, **named: Any) -> None:
    original(self, store, *given, **named)
    note_transactions(store)


def applying(original: Callable[..., None], self: Machine, router: str, operation: Operation, now: Instant) -> None:
    kind = Op(operation[1])
    if kind in PROTOCOL:
        points.reach(point(kind, "arrived"), router, operation[2])
    original(self, router, operation, now)
    if kind in PROTOCOL:
        applied[operation[0]] = kind, operation[2]


def writing(original: Callable[..., bool], self: RocksStore) -> bool:
    for kind, transaction in applied.values():
        points.reach(point(kind, "applied"), transaction=transaction)
    is_touched = bool(self.pending[Family.TRANSACTIONS])
    changed = original(self)
    if is_touched:
        note_transactions(self)
    for kind, transaction in applied.values():
        points.reach(point(kind, "written"), transaction=transaction)
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
    set_constant(machine, "ASK_AGAIN_MS", ASK_AGAIN_MS)
    wrap(Machine, "__init__", ("self", "store", "config", "now", "shard", "routers"), loading)
    wrap(Machine, "apply", ("self", "router", "operation", "now"), applying)
    wrap(RocksStore, "write", ("self",), writing)
    wrap(RouterLinks, "send", ("self", "router", "message"), answering)
    wrap(ShardProcess, "run", ("self", "wake_fd"), starting)


def run() -> int:
    """The whole process; its exit status."""
    arm()
    return main()
