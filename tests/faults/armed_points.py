"""Named points of the transaction protocol and of a move of slots, as seen from inside a process of a test.

The product knows nothing of them: `armed_router`, `armed_shard` and `armed_server` wrap some of its methods
and then run the process as it is. At a point the thread tells the test where it stands and goes on when the
test says so, which is at once unless somebody is to stand still there (`armed_harness`). A thread
that stands still does so alone: the others of its process, those of ZeroMQ among them, go on, so
that what was sent before arrives.

A message's points: where its sender is about to send it, where it arrived and nothing was done yet,
where it was applied and not written, written and not synced, synced and not answered; then where the
answer arrived, and where the receiver of the answer has taken it in. A new slot map's points: where the
supervisor is about to put its file in the place of the old one, where it has and nobody was told; where
the map arrived at a process and nothing was done yet, was applied, and at a shard was written.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import threading
from collections.abc import Callable
from io import TextIOWrapper
from types import ModuleType
from typing import Any

from common.wire import MoveCommand, Op

# In the environment of every process: the path of the socket on which the test listens.
SOCKET = "TEST_POINTS"

PROTOCOL = (Op.PREPARE, Op.DECIDE, Op.COMMIT, Op.ABORT, Op.RESOLVE, Op.FORGET)
STARTING = "starting"
BEFORE_ANSWER = "before-answer"
SHARD_GONE = "shard-gone"  # a router has heard that a shard's process ended, and acted on it
ROUTER_STAGES = ("sending", "answered", "taken")
SHARD_STAGES = ("arrived", "applied", "written", "synced")

LAST_CHANGES = "last-changes"  # CHANGES while the source holds what is new
# Steps of a move that goes well.
STEPS = (
    MoveCommand.CLEAR,
    MoveCommand.OPEN,
    MoveCommand.READ,
    MoveCommand.CHANGES,
    MoveCommand.HOLD,
    LAST_CHANGES,
    MoveCommand.RECEIVE,
)
COMMIT_MOVE = "commit-move"  # what the router asks of the supervisor
SLOT_MAP = "map"


def point(kind: Op | str, stage: str) -> str:
    return f"{kind.name.lower() if isinstance(kind, Op) else kind}-{stage}"


ROUTER_POINTS = frozenset(
    {
        STARTING,
        BEFORE_ANSWER,
        SHARD_GONE,
        point(COMMIT_MOVE, "sending"),
        point(SLOT_MAP, "arrived"),
        point(SLOT_MAP, "applied"),
        *(point(kind, stage) for kind in (*PROTOCOL, *STEPS) for stage in ROUTER_STAGES),
    }
)
SHARD_POINTS = frozenset(
    {
        STARTING,
        point(SLOT_MAP, "arrived"),
        point(SLOT_MAP, "applied"),
        point(SLOT_MAP, "written"),
        *(point(kind, stage) for kind in (*PROTOCOL, *STEPS) for stage in SHARD_STAGES),
    }
)
SUPERVISOR = "supervisor"
SUPERVISOR_POINTS = frozenset({point(SLOT_MAP, "replacing"), point(SLOT_MAP, "replaced")})


def points_of(process: str) -> frozenset[str]:
    """The points that there are in a process of this place."""
    if process == SUPERVISOR:
        return SUPERVISOR_POINTS
    return ROUTER_POINTS if process.startswith("router") else SHARD_POINTS


class Points:
    """The way of one process to the test. `process` is its place: "router-0", "shard-1", "supervisor"."""

    def __init__(self, known: frozenset[str]) -> None:
        self.process = ""
        self._known = known
        self._links = threading.local()  # a thread that stands still must not hold up another one

    def reach(self, name: str, of: str = "", transaction: int = 0) -> None:
        """Tell that a point is reached, and stand still as long as the test wants. `of` is the other side, if any."""
        if name not in self._known:
            raise LookupError(f"there is no point {name!r}")
        self._tell({"process": self.process, "point": name, "of": of, "transaction": transaction})

    def note_transactions(self, stored: int) -> None:
        """Tell how many records of transactions this shard has stored."""
        self._tell({"process": self.process, "transactions": stored})

    def _tell(self, message: dict[str, str | int]) -> None:
        link: TextIOWrapper | None = getattr(self._links, "link", None)
        if link is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(os.environ[SOCKET])
            link = self._links.link = connection.makefile("rw")
            connection.close()  # it is open as long as the file is
        link.write(json.dumps(message) + "\n")
        link.flush()
        link.readline()


def set_constant(module: ModuleType, name: str, value: float) -> None:
    """Raises LookupError when the module has no such number any more."""
    if not isinstance(vars(module).get(name), int | float):
        raise LookupError(f"{module.__name__} has no number {name}")
    setattr(module, name, value)


def wrap(owner: type, name: str, parameters: tuple[str, ...], around: Callable[..., Any]) -> None:
    """Have `around(original, …)` called in place of a method that `owner` itself defines.

    Raises LookupError when there is no such method any more, or its parameters are not those that the
    points were written for.
    """
    original = vars(owner).get(name)
    if original is None:
        raise LookupError(f"{owner.__name__} has no {name}: the points in it have to be looked at")
    function = original.__func__ if isinstance(original, staticmethod) else original
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise LookupError(f"{owner.__name__}.{name} takes {found}, the points in it expect {parameters}")

    def armed(*given: Any, **named: Any) -> Any:
        return around(function, *given, **named)

    setattr(owner, name, staticmethod(armed) if isinstance(original, staticmethod) else armed)
