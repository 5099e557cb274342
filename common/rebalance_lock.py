"""The lock of a data directory that keeps two rebalances apart.

It is no part of the server: who is killed with it leaves nothing that has to be cleared away.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.admin_socket import AdminError

LOCK_FILE = "rebalance.lock"


@contextmanager
def rebalance_lock(directory: Path) -> Iterator[None]:
    """Hold the lock. Raises AdminError when another process does, and where it cannot be had."""
    path = directory / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AdminError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        _lock(descriptor, directory)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def rebalancing_process(directory: Path) -> int | None:
    """The process that holds the lock, 0 when it has not written its number yet, None when nobody does.

    Raises AdminError where that cannot be seen.
    """
    path = directory / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AdminError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        # Shared, so that two who look at the same time do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _written_pid(descriptor)
    finally:
        os.close(descriptor)
    return None


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = _written_pid(descriptor)
        named = f"process {pid}" if pid else "another process"
        raise AdminError(f"{named} is moving or verifying slots of {directory} already; wait for it") from error
    # Made by root, it must not be in the way of the user whose directory it is.
    owner = directory.stat()
    if os.geteuid() == 0 and os.fstat(descriptor).st_uid != owner.st_uid:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _written_pid(descriptor: int) -> int:
    written = os.pread(descriptor, 32, 0).strip()
    return int(written) if written.isdigit() else 0
