"""The configuration file of a running server, watched for what is saved to it.

The system tells of changes in the folders where the file can be replaced; besides, the file is looked at every
second, because not every change is told. What counts is the content: a change is one when reading the file
gives something else than before.

Nothing is done with a file that is still being written. An editor may empty it, or take it away for a moment,
and an empty file is a valid configuration that lets everybody in.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from hashlib import sha256
from pathlib import Path

import structlog
from watchfiles import awatch

# How long a content must stay before it counts, in seconds: longer than a writer's pause between two blocks.
SETTLE_S = 0.1
# So many times as long must a file be empty or gone.
SETTLE_LOOKS_EMPTY = 10
# The file is looked at this often at least, in ms, also where the system tells of no change: on some network
# file systems, for a file that is mounted by itself, and in the moment when the folders to watch change.
LOOK_MS = 1_000
# A change is told of when no other has followed for the first time, at the latest after the second; in ms.
_QUIET_MS = 20
_GATHER_MS = 200

# What reading the file gives: a digest of what is in it, or one of these.
_EMPTY = b"empty"
_UNREADABLE = b"unreadable"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class ConfigFile:
    """A path, and what was read there last. There need not be a file."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._seen = _content(self._path)
        self._is_watchable = True

    def note(self) -> None:
        """What the file holds now is known: only what is saved later is a change."""
        self._seen = _content(self._path)

    async def changes(self) -> AsyncGenerator[None, None]:
        """Gives the caller a turn whenever the file has come to hold something else. Never ends by itself."""
        logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it tells of every change in the folder
        while True:
            folders = _folders(self._path)
            async with aclosing(self._looks(list(folders))) as looks:
                async for _ in looks:
                    if await self._has_changed():
                        yield
                    if _folders(self._path) != folders:
                        break

    async def _looks(self, folders: list[Path]) -> AsyncGenerator[None, None]:
        """A turn whenever the system tells of a change, and every LOOK_MS."""
        try:
            changes = awatch(
                *folders,
                watch_filter=None,
                debounce=_GATHER_MS,
                step=_QUIET_MS,
                rust_timeout=LOOK_MS,
                yield_on_timeout=True,
                recursive=False,
            )
            async with aclosing(changes):
                async for _ in changes:
                    yield
        except (OSError, RuntimeError) as error:
            if self._is_watchable:
                log.warning(
                    "the configuration file cannot be watched, it is looked at instead",
                    reason=str(error),
                    every_ms=LOOK_MS,
                )
            self._is_watchable = False
        await asyncio.sleep(LOOK_MS / 1000)
        yield

    async def _has_changed(self) -> bool:
        """Whether there is another content, once it stays."""
        content, looks = _content(self._path), 0
        while content != self._seen:
            await asyncio.sleep(SETTLE_S)
            before, content = content, _content(self._path)
            looks = looks + 1 if content == before else 0
            if looks == (SETTLE_LOOKS_EMPTY if content in (_EMPTY, _UNREADABLE) else 1):
                self._seen = content
                return True
        return False


def _content(path: Path) -> bytes:
    try:
        # A pipe would be empty when it is read the next time.
        raw = path.read_bytes() if path.is_file() else None
    except OSError:
        raw = None
    if raw is None:
        return _UNREADABLE
    return sha256(raw).digest() if raw else _EMPTY


def _folders(path: Path) -> dict[Path, int]:
    """The folder of the path and that of the file it leads to, with inode numbers: another one may take the name."""
    found = {}
    for folder in (path.parent, Path(os.path.realpath(path)).parent):
        with suppress(OSError):  # a look finds it when it is there
            found[folder] = folder.stat().st_ino
    return found
