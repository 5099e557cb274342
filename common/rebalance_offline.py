"""The server that slots are moved in: the one that runs on a data directory, else a private one.

A private server is `seppd serve --private` with the same configuration: it listens where no client looks
for it, and ends when its standard input does, hence with the process that started it however that ends.
So there is one way in which slots move, whether anybody is served meanwhile or not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from common.admin_client import AdminClient
from common.admin_socket import SOCKET_FILE, AdminError
from common.data_directory import holder_of
from common.slots import SLOT_MAP_FILE

# How long a server that holds the directory may take to answer, or to be gone: it may be starting or
# stopping. In seconds.
ANSWER_S = 5.0
ANSWER_LOOK_S = 0.1
# What a private server says last on its own behalf begins with this.
_PROGRAM = "seppd: "
_LISTENING = "queue server listening"
# How often it is looked whether it listens, in seconds.
_LOOK_S = 0.05


def running_server(directory: Path) -> AdminClient | None:
    """A connection to the server on a directory, None when there is no server.

    Raises AdminError when there is one that does not answer, and for a directory without data.
    """
    try:
        (directory / SLOT_MAP_FILE).stat()
    except OSError as error:
        raise AdminError(
            f"{directory / SLOT_MAP_FILE}: {error.strerror}: no server has been started there; correct server.db_path"
        ) from error
    give_up_at = time.monotonic() + ANSWER_S
    while True:
        try:
            return AdminClient(directory)
        except AdminError as error:
            holder = holder_of(directory)
            if holder is None:
                return None
            if time.monotonic() >= give_up_at:
                named = f"process {holder}" if holder else "another process"
                raise AdminError(
                    f"{directory} is in use by {named}, which does not answer on {SOCKET_FILE}: {error}"
                ) from error
        time.sleep(ANSWER_LOOK_S)


@contextmanager
def private_server(directory: Path, config: Path | None, environ: Mapping[str, str]) -> Iterator[AdminClient]:
    """A connection to a server that runs for this only. `environ` says all that the configuration file does not.

    Raises AdminError when it cannot start, and in place of what is raised inside when it has ended by itself.
    """
    if directory.stat().st_uid != os.geteuid():  # its server could not read what this one writes
        raise AdminError(f"{directory} belongs to another user: run this as the user that runs the server")
    with _PrivateServer(config, environ) as server, AdminClient(directory) as client:
        try:
            yield client
        except AdminError as error:
            reason = server.end_reason()
            raise AdminError(f"{error}: {reason}") if reason else error from error


class _PrivateServer:
    """The process. Entering waits until it serves, leaving until it has ended."""

    def __init__(self, config: Path | None, environ: Mapping[str, str]) -> None:
        # No pipe: when this process is killed, the log must still take what a server writes that stops.
        self._log = os.memfd_create("log")
        command = [sys.executable, "-P", "-m", "common", "serve", "--private"]
        try:
            self._process = subprocess.Popen(
                [*command, *(() if config is None else ("--config", str(config)))],
                env={**environ, "SEPP_LOGGING__FORMAT": "json", "SEPP_LOGGING__LEVEL": "info"},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                # A terminal's Ctrl-C is for the command, which ends the server when it is done.
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._log)
            raise AdminError(f"no server can be started: {error.strerror}") from error

    def __enter__(self) -> _PrivateServer:
        try:
            while not any(_entry(line).get("event") == _LISTENING for line in self._lines()):
                if reason := self.end_reason():
                    raise AdminError(reason)
                time.sleep(_LOOK_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def end_reason(self) -> str | None:
        """Why it has ended by itself, in one line; None while it runs."""
        if self._process.poll() is None:
            return None
        lines = self._lines()
        for line in reversed(lines):
            if line.startswith(_PROGRAM):
                return line.removeprefix(_PROGRAM)
        errors = [line for line in lines if _entry(line).get("level") in ("error", "critical")]
        return errors[-1] if errors else f"the server for it ended with status {self._process.returncode}"

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        os.close(self._log)

    def _lines(self) -> list[str]:
        """What it has written, from the beginning."""
        # Not read(): the server writes where the common position is.
        return os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace").splitlines()


def _entry(line: str) -> dict[str, object]:
    """The entry of the log in a line; an empty one for other lines."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
