"""Other job queues, measured through the usual client of each: a program in `clients/`, one for each run.

Their servers sync before they answer, as this one does. The program is one process, and often what limits the
figure; so our own figure beside them is that of the official client.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from servers import free_port, listening

CLIENTS = Path(__file__).with_name("clients")
PYTHON = [sys.executable]
NODE = ["node"]
EXTRA = ".venv/bin/pip install -e '.[bench]'"


def run_client(program: list[str], kind: str, connections: int, calls: int, address: str, cwd: Path) -> dict[str, Any]:
    """What a program of `clients/` prints: `rate` in jobs per second, and `seconds` of each round trip.

    `kind` is "enqueue", "round trip", or "count", which gives `ready` instead. Raises SystemExit.
    """
    *interpreter, name = program
    command = [*interpreter, str(CLIENTS / name), kind, str(connections), str(calls), address]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-1000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Peer(NamedTuple):
    """A job queue, and where its usual client is found."""

    name: str
    server: str  # of SERVERS
    program: list[str]
    library: str  # what is imported
    install: str

    def missing(self) -> str | None:
        """What is not installed, and how to get it."""
        server, install = SERVERS[self.server]
        if shutil.which(server) is None:
            return f"{server} is not installed, {self.name} is left out: {install}"
        is_there = importlib.util.find_spec(self.library) or Path("node_modules", self.library).is_dir()
        return None if is_there else f"{self.library} is not installed, {self.name} is left out: {self.install}"


SERVERS = {
    "redis": ("redis-server", "apt install redis-server"),
    "nats": ("nats-server", "go install github.com/nats-io/nats-server/v2@latest, with its folder in the PATH"),
    "postgresql": ("initdb", "apt install postgresql, with its bin folder in the PATH"),
}
PEERS = (
    Peer(
        "BullMQ",
        "redis",
        [*NODE, "by_bullmq.mjs"],
        "bullmq",
        "npm install bullmq ioredis, in the folder where this is run",
    ),
    Peer("Celery", "redis", [*PYTHON, "by_celery.py"], "celery", EXTRA),
    Peer("NATS JetStream", "nats", [*PYTHON, "by_nats.py"], "nats", EXTRA),
    Peer("Procrastinate", "postgresql", [*PYTHON, "by_procrastinate.py"], "procrastinate", EXTRA),
)


@contextmanager
def server_of(peer: Peer, directory: Path) -> Iterator[str]:
    """The address of a new server on an empty directory."""
    port = free_port()
    match peer.server:
        case "redis":
            command, user = _redis(directory, port), None
        case "nats":
            command, user = _nats(directory, port), None
        case _:
            command, user = _postgresql(directory, port)
    with listening(command, port, user=user) as address:
        yield address


def _redis(directory: Path, port: int) -> list[str]:
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
    return [*command, "--save", "", "--appendonly", "yes", "--appendfsync", "always"]


def _nats(directory: Path, port: int) -> list[str]:
    config = directory / "nats.conf"
    config.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{directory}", sync_interval: always }}\n')
    return ["nats-server", "-c", str(config)]


def _postgresql(directory: Path, port: int) -> tuple[list[str], str | None]:
    """With the default settings, by which a commit is synced; and the user to run as, because it refuses root."""
    user = None
    if os.geteuid() == 0:
        user = "nobody"
        shutil.chown(directory, user)
        directory.parent.chmod(0o711)
    data = directory / "data"
    setup = ["initdb", "--pgdata", str(data), "--username", "bench", "--auth", "trust"]
    subprocess.run(setup, check=True, capture_output=True, cwd=directory, user=user)
    postgres = Path(os.path.realpath(shutil.which("initdb") or "")).with_name("postgres")
    command = [str(postgres), "-D", str(data), "-p", str(port), "-c", "listen_addresses=127.0.0.1"]
    return [*command, "-c", f"unix_socket_directories={directory}"], user
