"""A whole server as a user starts it: the supervisor with its routers and shards, on a directory of its own.

Tests learn from its log, which is JSON here, where it listens and which process fills which place;
they wait for entries of the log and for the end of processes, never for time to pass.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from common.slots import SlotMap, slot_of

ROOT = Path(__file__).parents[2]
# A bound on waiting for something that is certain to come; no test is decided by it.
WAIT_S = 60.0
# In the environment of every process of one server, and of no other: so they are found, orphans too.
TAG = "TEST_SERVER"
# The state of an established connection in the kernel's tables.
ESTABLISHED = "01"

Entry = dict[str, Any]


class Log:
    """What a server has written to stderr, line by line; lines that are not of its log have only `line`."""

    def __init__(self, stream: IO[str]) -> None:
        self.entries: list[Entry] = []
        self._stream = stream
        self._grown = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, name="log")
        self._reader.start()

    def wait_for(self, matches: Callable[[Entry], bool]) -> Entry:
        """The latest entry that matches, as soon as there is one."""
        with self._grown:
            self._grown.wait_for(lambda: self._is_over or self._find(matches) is not None, WAIT_S)
            found = self._find(matches)
            assert found is not None, f"what was waited for has not come:\n{self.text()}"
            return found

    def plain_lines(self) -> list[str]:
        """What is on stderr beside the log; once all processes have ended."""
        self.join()
        return [entry["line"] for entry in self.entries if "line" in entry]

    def text(self) -> str:
        return "\n".join(json.dumps(entry) for entry in self.entries)

    def join(self) -> None:
        """Until the last process has let go of stderr."""
        self._reader.join(WAIT_S)
        assert not self._reader.is_alive(), "a process still holds stderr"

    def _find(self, matches: Callable[[Entry], bool]) -> Entry | None:
        return next((entry for entry in reversed(self.entries) if matches(entry)), None)

    def _read(self) -> None:
        with self._stream:  # closed here and nowhere else: a next life may begin while this one's last lines are read
            for line in self._stream:
                entry = json.loads(line) if line.startswith("{") else {"line": line.rstrip("\n")}
                with self._grown:
                    self.entries.append(entry)
                    self._grown.notify_all()
        with self._grown:
            self._is_over = True
            self._grown.notify_all()


class Server:
    """One data directory and the server on it, one life after another. Leaving its context ends every process.

    `settings` are environment variables, `toml` is the configuration file. `launcher` is a command
    that ends in running the one that is appended to it.
    """

    def __init__(
        self,
        shards: int | None = 1,
        routers: int = 1,
        front: str = "queue",
        settings: Mapping[str, str] | None = None,
        toml: str = "",
        data: Path | None = None,
        launcher: tuple[str, ...] = (),
    ) -> None:
        # Not tmp_path: its names are too long for sockets.
        self.home = Path(tempfile.mkdtemp(prefix="sepp-")).resolve()
        self.data = data or self.home / "data"
        self.shards = shards
        (self.home / "run").mkdir()
        (self.home / "sepp.toml").write_text(toml)
        self._tag = uuid.uuid4().hex
        self._launcher = launcher
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("SEPP_")}
        self._environ |= {
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "SEPP_LOGGING__FORMAT": "json",
            "SEPP_LOGGING__LEVEL": "debug",
            "SEPP_SERVER__LISTEN_ADDR": "127.0.0.1:0",
            "SEPP_SERVER__DB_PATH": str(self.data),
            "SEPP_SERVER__ROUTERS": str(routers),
            "SEPP_SERVER__GRPC_FRONT": front,
            TAG: self._tag,
            **(settings or {}),
        }
        self._process: subprocess.Popen[str] | None = None
        self._log: Log | None = None
        self._killed: dict[str, int] = {}  # by child: the generation that was killed
        self._stopped: set[int] = set()  # pids under SIGSTOP

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- start and stop -------------------------------------------------------------------------

    def start(self) -> Server:
        """Start, and wait until it listens."""
        self.launch()
        self.log.wait_for(is_listening)
        return self

    def launch(self) -> None:
        """Start, and wait for nothing."""
        assert self._process is None or self._process.poll() is not None, "it is running"
        environ = self._environ
        if self.shards is not None:
            environ = {**environ, "SEPP_SERVER__SHARDS": str(self.shards)}
        self._process = subprocess.Popen(
            [*self._launcher, sys.executable, "-m", "common", "serve"],
            cwd=self.home,
            env=environ,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self._log = Log(self._process.stderr)
        self._killed.clear()
        self._stopped.clear()

    def restart(self) -> Server:
        """The next life, on the same data. Port 0 was asked for, so the address is another one."""
        return self.start()

    def exit_status(self) -> int:
        """Wait for the supervisor's end."""
        assert self._process is not None
        return self._process.wait(WAIT_S)

    def stop(self) -> int:
        """SIGTERM; the exit status. No child may be left behind."""
        self.terminate()
        status = self.exit_status()
        assert self.processes() == [], self.log.text()
        return status

    def terminate(self) -> None:
        self._send(self.pid, signal.SIGTERM)

    def kill_all(self) -> None:
        """SIGKILL for everybody, as if in one instant: no child lives to see that the supervisor is gone."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._pause(self._process.pid, "the supervisor")  # it must start no more children
        while pids := self.processes():
            for pid in sorted(pids, key=self._process.pid.__eq__):
                with alive(pid) as fd:
                    self._send(pid, signal.SIGKILL)
                    assert fd is None or select.select([fd], [], [], WAIT_S)[0], f"process {pid} does not end"
        self._process.wait(WAIT_S)

    def kill_supervisor(self) -> None:
        self._send(self.pid, signal.SIGKILL)
        self.exit_status()

    def close(self) -> None:
        """Kill what is left, and remove everything. The log is printed: pytest shows it for a failed test."""
        self.kill_all()
        if self._log is not None:
            self._log.join()
            print(self._log.text(), file=sys.stderr)
        self._process = None
        shutil.rmtree(self.home, ignore_errors=True)

    # -- what is known of it --------------------------------------------------------------------

    @property
    def log(self) -> Log:
        assert self._log is not None, "it has not been started"
        return self._log

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def address(self) -> str:
        """host:port of the life that was last started."""
        address = self.log.wait_for(is_listening)["address"]
        assert isinstance(address, str)
        return address

    def processes(self) -> list[int]:
        """All processes that were started for this server and live, the supervisor among them."""
        wanted = f"{TAG}={self._tag}".encode()
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if wanted in environment_of(path)]

    def shard_of(self, queue: str) -> int:
        assert self.shards is not None
        return SlotMap.even(self.shards).owners[slot_of(queue)]

    def queue_on(self, shard: int) -> str:
        """The name of a queue that nobody else uses and that lies on this shard."""
        while self.shard_of(name := f"queue-{uuid.uuid4().hex}") != shard:
            pass
        return name

    def connections(self) -> dict[str, str]:
        """Connections that clients have to this server: an id for each, and the router that serves it."""
        port = int(self.address.rpartition(":")[2])
        # gRPC listens on a socket of the other family where it can, for IPv4 addresses too.
        tables = [
            Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6") if Path(f"/proc/net/{name}").exists()
        ]
        rows = [row.split() for table in tables for row in table.splitlines()[1:]]
        inodes = {row[9] for row in rows if row[3] == ESTABLISHED and int(row[1].partition(":")[2], 16) == port}
        found = {}
        for index in range(int(self._environ["SEPP_SERVER__ROUTERS"])):
            router = f"router-{index}"
            for link in Path(f"/proc/{self.pid_of(router)}/fd").iterdir():
                with suppress(FileNotFoundError):
                    kind, _, inode = os.readlink(link).partition(":")
                    if kind == "socket" and inode.strip("[]") in inodes:
                        found[inode] = router
        return found

    # -- single processes -------------------------------------------------------------------------

    def pid_of(self, child: str) -> int:
        """The process that fills a place: "shard-0", "router-1"."""
        pid = self._ready(child)["pid"]
        assert isinstance(pid, int)
        return pid

    def kill(self, child: str) -> None:
        """SIGKILL, and wait for its end."""
        entry = self._ready(child)
        with alive(entry["pid"]) as fd:
            self._killed[child] = entry["generation"]
            self._send(entry["pid"], signal.SIGKILL)
            assert fd is None or select.select([fd], [], [], WAIT_S)[0], f"{child} does not end"

    def wait_until_back(self, child: str) -> None:
        """Until the successor of a killed process is ready."""
        self._ready(child)

    def pause(self, child: str) -> None:
        """SIGSTOP, and wait until it has stopped: it lives and does nothing."""
        self._pause(self.pid_of(child), child)

    @contextmanager
    def paused_supervisor(self) -> Iterator[None]:
        """Nobody hears of what happens to the children meanwhile."""
        self._pause(self.pid, "the supervisor")
        try:
            yield
        finally:
            self._send(self.pid, signal.SIGCONT)

    def _pause(self, pid: int, name: str) -> None:
        self._send(pid, signal.SIGSTOP)
        give_up_at = time.monotonic() + WAIT_S
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
            assert time.monotonic() < give_up_at, f"{name} does not stop"

    def resume(self, child: str) -> None:
        self._send(self.pid_of(child), signal.SIGCONT)

    def _ready(self, child: str) -> Entry:
        older = self._killed.get(child, 0)
        return self.log.wait_for(
            lambda entry: (
                entry.get("event") == "child is ready" and entry["child"] == child and entry["generation"] > older
            )
        )

    def _send(self, pid: int, number: signal.Signals) -> None:
        """Signal a process if it is still the one that was started for this server."""
        with alive(pid) as fd:
            if fd is not None and f"{TAG}={self._tag}".encode() in environment_of(Path(f"/proc/{pid}")):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)


def is_listening(entry: Entry) -> bool:
    return entry.get("event") == "queue server listening"


@contextmanager
def alive(pid: int) -> Iterator[int | None]:
    """A descriptor that stands for a process whatever its number is used for later; None if it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def wait_until_gone(pid: int) -> None:
    with alive(pid) as fd:
        assert fd is None or select.select([fd], [], [], WAIT_S)[0], f"process {pid} has not ended"


def environment_of(process: Path) -> list[bytes]:
    """What a process was started with; nothing for one that has ended or is not ours."""
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
