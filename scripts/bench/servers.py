"""What the benchmarks share: servers of their own on loopback, and h2load (Debian's nghttp2-client) as the load.

h2load sends one ready-made gRPC request over and over, so the load costs little beside the server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from common import queue_pb2
from common.admin_client import AdminClient

SERVICE = "/sepp.v1.QueueService"
PAYLOAD_BYTES = 256
ROOT = Path(__file__).resolve().parents[2]


class Running(NamedTuple):
    """A server that listens, and where its data lies."""

    address: str
    data: Path

    def stored_jobs(self) -> int:
        """Ready jobs of all queues, as the server counts them."""
        with AdminClient(self.data) as client:
            return sum(queue.ready for queue in client.queues())


def request_body(queues: Sequence[str]) -> bytes:
    """One batch with a job of 256 bytes for each of the queues, framed as gRPC sends it."""
    payload = queue_pb2.Payload(data=b"x" * PAYLOAD_BYTES, encoding="application/octet-stream")
    jobs = [queue_pb2.EnqueueRequest(queue=queue, job_type="bench", payload=payload) for queue in queues]
    message = queue_pb2.EnqueueBatchRequest(jobs=jobs).SerializeToString()
    return b"\x00" + len(message).to_bytes(4, "big") + message


@contextmanager
def body_file(body: bytes) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(prefix="seppd-body-") as file:
        file.write(body)
        file.flush()
        yield Path(file.name)


@contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[str]:
    """A server process that logs its address as JSON on stderr; ended afterwards."""
    process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if '"address"' in line:
                yield json.loads(line)["address"]
                break
        else:
            raise SystemExit(f"{' '.join(command)} did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextmanager
def seppd(front: str, shards: int, routers: int) -> Iterator[Running]:
    """Our server on an empty directory, every answer synced to disk."""
    with tempfile.TemporaryDirectory(prefix="seppd-bench-") as directory:
        environment = {
            "SEPP_SERVER__LISTEN_ADDR": "127.0.0.1:0",
            "SEPP_SERVER__GRPC_FRONT": front,
            "SEPP_LOGGING__FORMAT": "json",
        }
        command = [sys.executable, "-m", "common", "serve", "--db-path", f"{directory}/data"]
        with started([*command, "--shards", str(shards), "--routers", str(routers)], environment) as address:
            yield Running(address, Path(directory) / "data")


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
