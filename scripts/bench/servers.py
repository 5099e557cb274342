"""What the benchmarks share: servers of their own on loopback, and h2load (Debian's nghttp2-client) as the load.

h2load sends one ready-made gRPC request over and over, so the load costs little beside the server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from common import queue_pb2
from common.admin_client import AdminClient

SERVICE = "/sepp.v1.QueueService"
PAYLOAD_BYTES = 256
ROOT = Path(__file__).resolve().parents[2]


class Started(NamedTuple):
    """A server process that listens."""

    address: str
    pid: int


class Running(NamedTuple):
    """A seppd that listens, and where its data lies."""

    address: str
    data: Path
    pid: int

    def stored_jobs(self) -> int:
        """Ready jobs of all queues, as the server counts them."""
        with AdminClient(self.data) as client:
            return sum(queue.ready for queue in client.queues())

    def leased_jobs(self) -> int:
        """Jobs of all queues that are out."""
        with AdminClient(self.data) as client:
            return sum(queue.leased for queue in client.queues())

    def children(self, kind: str) -> list[int]:
        """The process ids of its routers or shards; `kind` is "router" or "shard"."""
        found = []
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            if f"\0-m\0{kind}\0" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
        return found

    def cpu_s(self, kind: str) -> float:
        """Processor time that its routers or shards have used, in seconds."""
        return sum(_cpu_s(child) for child in self.children(kind))

    def memory_mb(self, kind: str) -> float:
        """Memory of its routers or shards that is not backed by files, in MB."""
        return sum(_anonymous_bytes(child) for child in self.children(kind)) / 1e6


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def batch(queues: Sequence[str]) -> bytes:
    """An EnqueueBatchRequest with a job of 256 bytes for each of the queues."""
    payload = queue_pb2.Payload(data=b"x" * PAYLOAD_BYTES, encoding="application/octet-stream")
    jobs = [queue_pb2.EnqueueRequest(queue=queue, job_type="bench", payload=payload) for queue in queues]
    return queue_pb2.EnqueueBatchRequest(jobs=jobs).SerializeToString()


def framed(message: bytes) -> bytes:
    """A message as gRPC sends it."""
    return b"\x00" + len(message).to_bytes(4, "big") + message


@contextmanager
def body_file(body: bytes) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(prefix="seppd-body-") as file:
        file.write(body)
        file.flush()
        yield Path(file.name)


@contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[Started]:
    """A server process that logs its address as JSON on stderr; ended afterwards."""
    process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if '"address"' in line:
                yield Started(json.loads(line)["address"], process.pid)
                break
        else:
            raise SystemExit(f"{' '.join(command)} did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextmanager
def listening(
    command: list[str], port: int, environment: dict[str, str] | None = None, user: str | None = None
) -> Iterator[str]:
    """A server that is known to be up when its port takes connections; ended afterwards."""
    environment = os.environ | (environment or {})
    silent = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, user=user, stdout=silent, stderr=silent)
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            raise SystemExit(f"{command[0]} does not listen")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def seppd(front: str, shards: int, routers: int) -> Iterator[Running]:
    """Our server on an empty directory, every answer synced to disk."""
    with (
        tempfile.TemporaryDirectory(prefix="seppd-bench-") as directory,
        seppd_on(Path(directory) / "data", front, shards, routers) as running,
    ):
        yield running


@contextmanager
def seppd_on(data: Path, front: str, shards: int, routers: int) -> Iterator[Running]:
    """The same on a directory that outlives it."""
    environment = {
        "SEPP_SERVER__LISTEN_ADDR": "127.0.0.1:0",
        "SEPP_SERVER__GRPC_FRONT": front,
        "SEPP_LOGGING__FORMAT": "json",
        # What is reserved stays out to the end, when all jobs are counted.
        "SEPP_LIMITS__MAX_LEASE_DURATION_MS": "36000000",
    }
    command = [sys.executable, "-m", "common", "serve", "--db-path", str(data)]
    with started([*command, "--shards", str(shards), "--routers", str(routers)], environment) as (address, pid):
        yield Running(address, data, pid)


def calls_per_second(address: str, method: str, body: Path, connections: int, requests: int) -> float:
    """One h2load run: one call at a time on each connection. It cannot see a gRPC status: count what is stored."""
    if shutil.which("h2load") is None:
        raise SystemExit("h2load is missing: install Debian's nghttp2-client")
    command = ["h2load", "-n", str(requests), "-c", str(connections), "-m", "1", "-d", str(body)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"http://{address}{SERVICE}/{method}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    done = re.search(r"(\d+) succeeded", output)
    rate = re.search(r"([\d.]+) req/s", output)
    if done is None or rate is None or int(done[1]) != requests:
        raise SystemExit(f"h2load did not succeed with all of {requests} calls:\n{output}")
    return float(rate[1])
