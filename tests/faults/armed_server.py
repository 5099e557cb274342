"""A whole server whose processes have the points in them.

It stands before the command of a server (`python -m tests.faults.armed_server python -m common serve`) and
runs that in its place. The supervisor is as it is, but for how it gets its children: by fork from a process
that has loaded everything, has one thread, and never used gRPC or RocksDB. A start by exec spends its first
half second of processor time on loading libraries, and here some hundreds are killed. How the product starts
its children is seen by every other test with a server.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from common import children
from common.children import ChildTerms
from common.cli import main
from common.slots import SLOT_MAP_FILE
from tests.faults import armed_router, armed_shard
from tests.faults.armed_points import SLOT_MAP, SUPERVISOR, SUPERVISOR_POINTS, Points, point, set_constant, wrap

PROGRAM_MODULE = "common"
ROUTER, SHARD = "router", "shard"
PROGRAMS: dict[str, Callable[[], int]] = {ROUTER: armed_router.run, SHARD: armed_shard.run}
# What the supervisor handles in its own way.
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Forked:
    """What the supervisor needs of a child's process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._is_over = asyncio.Event()
        self._fd = os.pidfd_open(pid)
        self._loop.add_reader(self._fd, self._reap)

    async def wait(self) -> int:
        """Its exit status, or the negative number of the signal that ended it."""
        await self._is_over.wait()
        assert self.returncode is not None
        return self.returncode

    def _reap(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._is_over.set()


async def fork(program: str, *arguments: str, stdin: int, pass_fds: tuple[int, ...], start_new_session: bool) -> Forked:
    """In place of `asyncio.create_subprocess_exec`, with what the supervisor gives to that."""
    assert (stdin, start_new_session) == (asyncio.subprocess.DEVNULL, True)
    pid = os.fork()
    if pid == 0:
        become(program, arguments, pass_fds)
    return Forked(pid)


def become(program: str, arguments: tuple[str, ...], pass_fds: tuple[int, ...]) -> NoReturn:
    """Run a program in a child that has just been forked, with nothing of its parent but some descriptors."""
    status = 1
    try:
        gc.freeze()  # an object of the parent that is collected here would close the child's own descriptors
        asyncio._set_running_loop(None)
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in pass_fds:
                close(fd)
        sys.argv = [program, *arguments]
        status = PROGRAMS[program]()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def close(fd: int) -> None:
    """The descriptor of the listing itself is among those listed, and closed by then."""
    try:
        os.close(fd)
    except OSError:
        return


points = Points(SUPERVISOR_POINTS)


def replacing(original: Callable[..., Path], self: Path, target: Path) -> Path:
    """The new slot map is on the disk under another name; from here on it is the slot map."""
    if target.name != SLOT_MAP_FILE:
        return original(self, target)
    points.reach(point(SLOT_MAP, "replacing"))
    replaced = original(self, target)
    points.reach(point(SLOT_MAP, "replaced"))
    return replaced


if __name__ == "__main__":
    # What is killed again and again is started again at once: how long it stays away is up to the test.
    set_constant(children, "RESTART_DELAY_MAX_S", 0.0)
    points.process = SUPERVISOR
    wrap(Path, "replace", ("self", "target"), replacing)
    asyncio.create_subprocess_exec = fork  # type: ignore[assignment]
    main(sys.argv[sys.argv.index(PROGRAM_MODULE) + 1 :], ChildTerms(router=(ROUTER,), shard=(SHARD,)))
