"""One-job enqueues per second, both fronts against a bare grpc.aio handler, side by side in one run.

    .venv/bin/python scripts/bench/enqueue.py [--connections 50] [--requests 20000] [--rounds 3]

The load comes from h2load (Debian's nghttp2-client), which sends one ready-made gRPC request over
and over. The three servers are measured in turn, round by round, so that a noisy minute hits all;
the table shows the median and the spread, and the ratio to the bare handler of the same run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.table import Table

from common import queue_pb2

PATH = "/sepp.v1.QueueService/EnqueueBatch"
PAYLOAD_BYTES = 256
ROOT = Path(__file__).resolve().parents[2]


def request_body() -> bytes:
    """One EnqueueBatch of one job, framed as gRPC sends it."""
    payload = queue_pb2.Payload(data=b"x" * PAYLOAD_BYTES, encoding="application/octet-stream")
    job = queue_pb2.EnqueueRequest(queue="bench", job_type="bench", payload=payload)
    message = queue_pb2.EnqueueBatchRequest(jobs=[job]).SerializeToString()
    return b"\x00" + len(message).to_bytes(4, "big") + message


async def serve_bare() -> None:
    """A grpc.aio server whose only handler answers constant bytes: what asyncio can do at best."""

    async def answer(_request: bytes, _context: object) -> bytes:
        return b"\x0a\x28\x0a\x26\x0a\x24" + b"0" * 36

    handler = grpc.method_handlers_generic_handler(
        "sepp.v1.QueueService", {"EnqueueBatch": grpc.unary_unary_rpc_method_handler(answer)}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), file=sys.stderr, flush=True)
    await server.wait_for_termination()


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
def seppd(front: str, shards: int, routers: int) -> Iterator[str]:
    """Our server on an empty directory, every answer synced to disk."""
    with tempfile.TemporaryDirectory(prefix="seppd-bench-") as directory:
        environment = {
            "SEPP_SERVER__LISTEN_ADDR": "127.0.0.1:0",
            "SEPP_SERVER__GRPC_FRONT": front,
            "SEPP_LOGGING__FORMAT": "json",
        }
        command = [sys.executable, "-m", "common", "serve", "--db-path", f"{directory}/data"]
        with started([*command, "--shards", str(shards), "--routers", str(routers)], environment) as address:
            yield address


def calls_per_second(address: str, body: Path, connections: int, requests: int) -> float:
    """One h2load run: one call at a time on each connection."""
    command = ["h2load", "-n", str(requests), "-c", str(connections), "-m", "1", "-d", str(body)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", f"http://{address}{PATH}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    done = re.search(r"(\d+) succeeded", output)
    rate = re.search(r"([\d.]+) req/s", output)
    if done is None or rate is None or int(done[1]) != requests:
        raise SystemExit(f"h2load did not succeed with all of {requests} calls:\n{output}")
    return float(rate[1])


def main(
    connections: Annotated[int, typer.Option(help="Connections, one call at a time on each.")] = 50,
    requests: Annotated[int, typer.Option(help="Calls per server and round.")] = 20_000,
    rounds: Annotated[int, typer.Option(help="Rounds; the median is shown.")] = 3,
    shards: Annotated[int, typer.Option(help="Shard processes.")] = 1,
    routers: Annotated[int, typer.Option(help="Router processes.")] = 1,
    bare: Annotated[bool, typer.Option(help="Serve the bare handler instead (started by the benchmark).")] = False,
) -> None:
    """Measure one-job enqueues of 256 bytes."""
    if bare:
        asyncio.run(serve_bare())
        return
    if shutil.which("h2load") is None:
        raise SystemExit("h2load is missing: install Debian's nghttp2-client")
    with ExitStack() as stack:
        body = stack.enter_context(tempfile.NamedTemporaryFile(prefix="seppd-body-"))
        body.write(request_body())
        body.flush()
        servers = {
            "bare grpc.aio handler": stack.enter_context(started([sys.executable, __file__, "--bare"], {})),
            "seppd, queue front": stack.enter_context(seppd("queue", shards, routers)),
            "seppd, aio front": stack.enter_context(seppd("aio", shards, routers)),
        }
        rates: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(rounds):
            for name, address in servers.items():
                rates[name].append(calls_per_second(address, Path(body.name), connections, requests))
    table = Table("server", "calls/s (median)", "lowest to highest", "against the bare handler")
    ceiling = statistics.median(rates["bare grpc.aio handler"])
    for name, values in rates.items():
        median = statistics.median(values)
        table.add_row(name, f"{median:,.0f}", f"{min(values):,.0f} to {max(values):,.0f}", f"{median / ceiling:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
