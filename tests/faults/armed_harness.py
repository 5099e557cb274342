"""The test's side of the points: who stands still where, and what was passed."""

from __future__ import annotations

import json
import shutil
import socketserver
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.armed_points import SOCKET, points_of
from tests.integration.server import WAIT_S

# What stands before the command of a server to have the points in it.
LAUNCHER = (sys.executable, "-m", "tests.faults.armed_server")


class Hold:
    """A point at which the next thread that comes there stands still until it is released, or killed."""

    def __init__(self, grown: threading.Condition, where: tuple[str, str, str]) -> None:
        self.where = where
        self.is_reached = False
        self.is_released = False
        self._grown = grown

    def wait(self) -> None:
        """Until somebody stands there."""
        with self._grown:
            assert self._grown.wait_for(lambda: self.is_reached, WAIT_S), f"nobody came to {self.where}"

    def release(self) -> None:
        with self._grown:
            self.is_released = True
            self._grown.notify_all()


class Harness:
    """The points of one server. A point is (process, name, other side); where `of` is empty any other side will do.

    What is still on its way for the transactions of an earlier round, an ABORT that is sent again or the question
    of a second router, passes all points unseen: it must not be taken for this round's.
    """

    def __init__(self) -> None:
        self.passed: list[tuple[str, str, str]] = []
        self._grown = threading.Condition()
        self._holds: list[Hold] = []
        self._seen: set[int] = set()  # transactions of this round
        self._earlier: set[int] = set()
        self._transactions: dict[str, tuple[int, int]] = {}  # by shard: number of the connection, records stored
        self._connections = 0
        self._is_over = False
        self._directory = Path(tempfile.mkdtemp(prefix="sepp-"))
        harness = self

        class Link(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                harness._serve(self)

        self._server = socketserver.ThreadingUnixStreamServer(str(self._directory / "points"), Link)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="points")

    @property
    def settings(self) -> dict[str, str]:
        """What the processes need in their environment."""
        return {SOCKET: str(self._server.server_address)}

    def __enter__(self) -> Harness:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._grown:
            self._is_over = True
            self._grown.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def hold(self, process: str, name: str, of: str = "") -> Hold:
        """Have the next one that comes to a point stand still there. Raises LookupError for an unknown point."""
        if name not in points_of(process):
            raise LookupError(f"there is no point {name!r} in {process}")
        with self._grown:
            hold = Hold(self._grown, (process, name, of))
            self._holds.append(hold)
            return hold

    def wait_until_passed(self, process: str, name: str, of: str = "") -> None:
        """Until somebody has come to a point since the last `forget`."""
        with self._grown:
            self._until(lambda: any(_is_at((process, name, of), *where) for where in self.passed), f"{process} {name}")

    def wait_until_settled(self) -> None:
        """Until no shard has a record of any transaction in its store."""
        with self._grown:
            self._until(lambda: not any(stored for _, stored in self._transactions.values()), "no open transaction")

    def forget(self) -> None:
        """A round is over: what was passed, and the holds that have come to an end.

        Raises AssertionError for a hold that waits.
        """
        with self._grown:
            waiting = [hold.where for hold in self._holds if not hold.is_released]
            assert waiting == [], f"nobody came to {waiting}, or still stands there"
            self._holds.clear()
            self.passed.clear()
            self._earlier |= self._seen
            self._seen.clear()

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        state = f"passed {self.passed}, records {self._transactions}"
        assert self._grown.wait_for(holds, WAIT_S), f"{what} has not come: {state}"

    # -- the threads of the links ---------------------------------------------------------------

    def _serve(self, link: socketserver.StreamRequestHandler) -> None:
        with self._grown:
            self._connections += 1
            number = self._connections
        for line in link.rfile:
            self._take(number, json.loads(line))
            try:
                link.wfile.write(b"\n")
            except OSError:  # it was killed where it stood
                return

    def _take(self, connection: int, message: dict[str, Any]) -> None:
        with self._grown:
            if "transactions" in message:
                # A message that a killed process left must not count for its successor.
                if connection >= self._transactions.get(message["process"], (0, 0))[0]:
                    self._transactions[message["process"]] = connection, message["transactions"]
            elif message["transaction"] not in self._earlier:
                if message["transaction"]:
                    self._seen.add(message["transaction"])
                self._reach((message["process"], message["point"], message["of"]))
            self._grown.notify_all()

    def _reach(self, where: tuple[str, str, str]) -> None:
        self.passed.append(where)
        for hold in self._holds:
            if not hold.is_reached and not hold.is_released and _is_at(hold.where, *where):
                hold.is_reached = True
                self._grown.notify_all()
                self._grown.wait_for(lambda: hold.is_released or self._is_over)  # noqa: B023
                return


def _is_at(wanted: tuple[str, str, str], process: str, name: str, of: str) -> bool:
    return wanted[:2] == (process, name) and wanted[2] in ("", of)
