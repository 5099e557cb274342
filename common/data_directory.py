"""The data directory as the supervisor sees it.

    LOCK          held with flock; says whose it is and where the runtime directory lies
    generation    the first number that no process of this directory has had
    slots.json    the slot map
    shard-<n>/    what shard n owns, for as many shards as the map has

Children inherit the lock's descriptor, so the lock is free only when the last of them has ended: a
server that starts after a kill cannot meet the shards of the one before. The ipc sockets lie in a
runtime directory elsewhere, since the path of a Unix socket has 107 bytes and a data directory
may lie deep.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import structlog

from common.slots import SLOT_MAP_FILE, SlotMap

LOCK_FILE = "LOCK"
GENERATION_FILE = "generation"
# Numbers that one synced write of the generation file sets apart; few, so that they stay short.
GENERATION_BLOCK = 1000
# How long the children of a killed supervisor may take to end before a new start gives up.
CHILDREN_END_S = 10.0
LOCK_RETRY_S = 0.05
SOCKET_PATH_BYTES_MAX = 107
# Room for the name of a socket in the runtime directory: "/s", shard index, "-", generation.
SOCKET_NAME_BYTES = 30
RUNTIME_PREFIX = "seppd-"
RUNTIME_RANDOM_BYTES = 8  # what mkdtemp appends
_SHARD_DIRECTORY = re.compile(r"shard-(0|[1-9][0-9]*)")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class DataDirectoryError(Exception):
    """The data directory cannot be used; the text is one line and says what to do."""


@dataclass(frozen=True)
class _Holder:
    """What the lock file says. None for what it does not say."""

    pid: int | None
    runtime: Path | None


class DataDirectory:
    """A locked data directory with a runtime directory for sockets. Made by `open`; closing releases both."""

    def __init__(self, path: Path, lock_fd: int, runtime: Path) -> None:
        self.path = path
        self.lock_fd = lock_fd
        self.runtime = runtime
        self._next_generation = 0
        self._reserved_below = 0

    @classmethod
    def open(cls, path: Path, environ: Mapping[str, str]) -> DataDirectory:
        """Create what is missing, take the lock, make the runtime directory.

        Waits up to ten seconds for the children of a killed supervisor. Raises DataDirectoryError.
        """
        path = _prepare(path)
        lock_fd = _take_lock(path)
        try:
            _remove_runtime(_read_holder(lock_fd).runtime)
            runtime = _make_runtime(environ)
            _write_holder(lock_fd, _Holder(os.getpid(), runtime))
        except OSError as error:
            os.close(lock_fd)
            raise DataDirectoryError(f"{error.filename or path} cannot be used: {error.strerror}") from error
        except DataDirectoryError:
            os.close(lock_fd)
            raise
        return cls(path, lock_fd, runtime)

    def close(self) -> None:
        """Remove the runtime directory and let go of the lock. All children have ended before."""
        _remove_runtime(self.runtime)
        os.ftruncate(self.lock_fd, 0)
        os.close(self.lock_fd)

    def __enter__(self) -> DataDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def shard_path(self, shard: int) -> Path:
        """Where a shard keeps its data."""
        return self.path / f"shard-{shard}"

    def socket_address(self, name: str) -> str:
        """The ipc:// address of a socket in the runtime directory."""
        return f"ipc://{self.runtime / name}"

    def slot_map(self, configured_shards: int | None) -> SlotMap:
        """The stored slot map; a new directory gets one with `configured_shards`, None for half of the cores.

        What a change of the number left undone when it was interrupted is finished here. Raises
        DataDirectoryError when the number differs from what is stored or data is missing, SlotMapError when
        the map cannot be used.
        """
        stored = SlotMap.load(self.path)
        if stored is None:
            return self._first_slot_map(configured_shards or half_of_the_cores())
        if configured_shards not in (None, stored.shards):
            raise DataDirectoryError(
                f"server.shards is {configured_shards}, but {self.path} has {stored.shards} shards; run `seppd "
                f"rebalance apply --shards {configured_shards}`, set server.shards to {stored.shards}, or leave it out"
            )
        for shard in range(stored.shards):
            if not self.shard_path(shard).is_dir():
                self._replace_missing(shard, stored)
        self._remove_left_over(stored.shards)
        return stored

    def add_shard(self, shard: int) -> None:
        """Make the empty directory of a shard that no map knows yet; what lay there is deleted. Raises OSError."""
        self.remove_shard(shard)
        self.shard_path(shard).mkdir(mode=0o700)

    def remove_shard(self, shard: int) -> None:
        """Delete the directory of a shard that no map knows any more. Raises OSError."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.shard_path(shard))

    def next_generation(self) -> int:
        """A number for a child process, larger than every one before, also in earlier lives of this directory."""
        if self._next_generation >= self._reserved_below:
            self._reserve_generations()
        self._next_generation += 1
        return self._next_generation - 1

    def _replace_missing(self, shard: int, stored: SlotMap) -> None:
        """An empty directory for a shard that has nothing to lose."""
        path = self.shard_path(shard)
        if shard in stored.owners:
            raise DataDirectoryError(
                f"{path} is missing, and with it the jobs of shard {shard}; "
                f"restore it from a backup of this data directory"
            )
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise DataDirectoryError(f"{path} cannot be created: {error.strerror}") from error
        log.warning("directory of a shard without slots was missing and is made anew", path=str(path))

    def _remove_left_over(self, shards: int) -> None:
        """Delete what shards have left that were taken away: they owned nothing by then."""
        for path in sorted(self.path.glob("shard-*")):
            named = _SHARD_DIRECTORY.fullmatch(path.name)
            if named is None or int(named[1]) < shards or path.is_symlink() or not path.is_dir():
                continue
            try:
                shutil.rmtree(path)
            except OSError as error:
                # It takes room and does no harm: the map does not know it.
                log.warning("directory of a removed shard cannot be deleted", path=str(path), reason=error.strerror)
            else:
                log.info("directory of a removed shard deleted", path=str(path))

    def _first_slot_map(self, shards: int) -> SlotMap:
        """The directories come first and the map last: a map stands for directories that exist."""
        for found in self.path.glob("shard-*"):
            if any(found.iterdir()):
                raise DataDirectoryError(
                    f"{self.path} has data in {found.name}, but no {SLOT_MAP_FILE}; "
                    f"restore that file from a backup, or choose another server.db_path"
                )
        slot_map = SlotMap.even(shards)
        try:
            for shard in range(shards):
                self.shard_path(shard).mkdir(mode=0o700, exist_ok=True)
            slot_map.save(self.path)
        except OSError as error:
            raise DataDirectoryError(f"{self.path} cannot be written: {error.strerror}") from error
        return slot_map

    def _reserve_generations(self) -> None:
        path = self.path / GENERATION_FILE
        try:
            first = int(path.read_text()) if path.exists() else 1
            _replace_synced(path, f"{first + GENERATION_BLOCK}\n")
        except ValueError as error:
            raise DataDirectoryError(
                f"{path} is damaged; write a number into it that is larger than every generation in the log"
            ) from error
        except OSError as error:
            raise DataDirectoryError(f"{path} cannot be written: {error.strerror}") from error
        self._next_generation, self._reserved_below = first, first + GENERATION_BLOCK


def holder_of(path: Path) -> int | None:
    """The process that holds the lock of a data directory, None when nobody does.

    0 when somebody does who is not named: it is just starting. Raises DataDirectoryError.
    """
    try:
        lock_fd = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataDirectoryError(f"{path / LOCK_FILE} cannot be read: {error.strerror}") from error
    try:
        # Shared, so that two who look at the same time do not see each other.
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(lock_fd).pid or 0
    finally:
        os.close(lock_fd)
    return None


def half_of_the_cores() -> int:
    """Half of the cores that this process may use, at least 1: the default number of shards and of routers."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _prepare(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve(strict=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DataDirectoryError(f"server.db_path {path} is not a directory; choose another one") from error
    except OSError as error:
        raise DataDirectoryError(f"server.db_path {path} cannot be created: {error.strerror}") from error
    return path


def _take_lock(path: Path) -> int:
    """The descriptor of the locked file."""
    try:
        lock_fd = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataDirectoryError(
            f"server.db_path {path} is not writable ({error.strerror}); let this user write there or choose another one"
        ) from error
    try:
        _wait_for_lock(path, lock_fd)
    except DataDirectoryError:
        os.close(lock_fd)
        raise
    return lock_fd


def _wait_for_lock(path: Path, lock_fd: int) -> None:
    """Lock, or say who has it. A holder that is alive is not waited for; the children of a dead one are."""
    give_up_at = time.monotonic() + CHILDREN_END_S
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pid = _read_holder(lock_fd).pid
        except OSError as error:
            raise DataDirectoryError(f"server.db_path {path} cannot be locked: {error.strerror}") from error
        if pid is not None and _is_alive(pid):
            raise DataDirectoryError(
                f"server.db_path {path} is in use by process {pid}; stop it or choose another server.db_path"
            )
        if time.monotonic() >= give_up_at:
            raise DataDirectoryError(
                f"server.db_path {path} is in use by processes that process {pid or '(unknown)'} left behind; "
                f"wait until they have ended or choose another server.db_path"
            )
        time.sleep(LOCK_RETRY_S)


def _is_alive(pid: int) -> bool:
    """A killed process that its parent has not collected yet counts as dead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state not in ("Z", "X")


def _read_holder(lock_fd: int) -> _Holder:
    """What the lock file says; a holder that is just starting has not written it yet."""
    try:
        found = json.loads(os.pread(lock_fd, 4096, 0))
        return _Holder(int(found["pid"]), Path(found["runtime"]))
    except (ValueError, TypeError, KeyError):
        return _Holder(None, None)


def _write_holder(lock_fd: int, holder: _Holder) -> None:
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, json.dumps({"pid": holder.pid, "runtime": str(holder.runtime)}).encode() + b"\n", 0)


def _make_runtime(environ: Mapping[str, str]) -> Path:
    """A new directory of mode 0700 whose sockets have paths that are short enough."""
    added = len(f"/{RUNTIME_PREFIX}") + RUNTIME_RANDOM_BYTES + SOCKET_NAME_BYTES
    for parent in (environ.get("XDG_RUNTIME_DIR", ""), environ.get("TMPDIR", ""), tempfile.gettempdir(), "/tmp"):
        if not os.path.isabs(parent) or len(os.fsencode(parent)) + added > SOCKET_PATH_BYTES_MAX:
            continue
        with suppress(OSError):  # not there or not writable: the next one
            return Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir=parent))
    raise DataDirectoryError(
        "there is no place for the ipc sockets; set XDG_RUNTIME_DIR to a writable directory with a short path"
    )


def _remove_runtime(runtime: Path | None) -> None:
    """Remove a runtime directory, also one that a killed server left; nothing that is not surely one."""
    if runtime is None or not runtime.name.startswith(RUNTIME_PREFIX):
        return
    with suppress(FileNotFoundError):
        found = runtime.lstat()
        if stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.getuid():
            shutil.rmtree(runtime, ignore_errors=True)


def _replace_synced(path: Path, text: str) -> None:
    """Replace a file so that after a power loss the old or the new text is there."""
    scratch = path.with_name(path.name + ".new")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
