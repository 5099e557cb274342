"""Child processes of the supervisor: how one is started, and when the next one may be.

Children are started by exec, never by fork (neither gRPC nor RocksDB lives through one), in a
session of their own, so that a terminal's Ctrl-C reaches only the supervisor, which ends them in
order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

from common.control import CONTROL_FD_OPTION, SupervisorLink, ToChild

# A child that was ready for this long starts again at once when it dies.
STEADY_S = 10.0
RESTART_DELAY_FIRST_S = 0.1
RESTART_DELAY_MAX_S = 5.0


@dataclass(frozen=True)
class ChildTerms:
    """How children are started, and how long the supervisor waits for their end before it kills them.

    `router` and `shard` are commands; `--control-fd N` is appended. Times in seconds:
    `router_stop_s` is what a router gets beyond `server.shutdown_grace_ms`; `shard_stop_s` must
    exceed the longest write or sync of a shard, which holds back its signals and messages;
    `silent_end_s` is what a child gets that said it ends, or closed its channel.
    """

    # -P: a folder called router or shard in the current directory is not meant.
    router: tuple[str, ...] = (sys.executable, "-P", "-m", "router")
    shard: tuple[str, ...] = (sys.executable, "-P", "-m", "shard")
    router_stop_s: float = 5.0
    shard_stop_s: float = 60.0
    silent_end_s: float = 10.0


class Backoff:
    """How long to wait before a child is started again: 0, 0.1, 0.2, 0.4 … 5 seconds."""

    def __init__(self) -> None:
        self._deaths = 0

    def delay_s(self, ready_s: float) -> float:
        """Called at each death; `ready_s` is how long the child was ready, 0 when it never was."""
        if ready_s >= STEADY_S:
            self._deaths = 0
        self._deaths += 1
        if self._deaths == 1:
            return 0.0
        # The exponent is bounded: a child that dies for weeks must not overflow a float.
        return float(min(RESTART_DELAY_MAX_S, RESTART_DELAY_FIRST_S * 2 ** min(self._deaths - 2, 16)))


class Child:
    """One router or shard process, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, link: SupervisorLink, generation: int) -> None:
        self.process = process
        self.link = link
        self.generation = generation
        # Loop time at which it said that it is ready, None before.
        self.ready_at: float | None = None
        self.serves = False  # a router's health service says SERVING
        # The one line it gave as the reason for its end.
        self.fatal_text: str | None = None

    @classmethod
    async def start(cls, command: tuple[str, ...], lock_fd: int, generation: int) -> Child:
        """Start a process that inherits its end of a new channel and the lock of the data directory.

        Raises OSError when there is no such program or no room for another process.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                CONTROL_FD_OPTION,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lock_fd),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, await SupervisorLink.open(ours), generation)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: ToChild) -> None:
        """Write a message; a child that leaves too much of them unread is killed."""
        if not self.link.send(message):
            self.kill()

    def kill(self) -> None:
        """SIGKILL; nothing where the process has ended already."""
        # Not process.kill(): it looks first whether the process has ended, and with that takes its exit
        # status away from the thread that waits for it.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def ready_s(self, now: float) -> float:
        """Seconds since it became ready, 0 when it never was. `now` is loop time."""
        return 0.0 if self.ready_at is None else now - self.ready_at
