"""One-job enqueues per second, both fronts against a bare grpc.aio handler, side by side in one run.

    .venv/bin/python scripts/bench/enqueue.py [--connections 50] [--requests 20000] [--rounds 3]

The three servers are measured in turn, round by round, so that a noisy minute hits all; the table
shows the median and the spread, and the ratio to the bare handler of the same run.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from contextlib import ExitStack
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.table import Table
from servers import body_file, calls_per_second, request_body, seppd, started

FRONTS = ("queue", "aio")


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
    with ExitStack() as stack:
        body = stack.enter_context(body_file(request_body(["bench"])))
        ours = {f"seppd, {front} front": stack.enter_context(seppd(front, shards, routers)) for front in FRONTS}
        servers = {"bare grpc.aio handler": stack.enter_context(started([sys.executable, __file__, "--bare"], {}))}
        servers |= {name: running.address for name, running in ours.items()}
        rates: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(rounds):
            for name, address in servers.items():
                rates[name].append(calls_per_second(address, "EnqueueBatch", body, connections, requests))
        for name, running in ours.items():
            if (stored := running.stored_jobs()) != rounds * requests:
                raise SystemExit(f"{name} has {stored} jobs, not {rounds * requests}")
    table = Table("server", "calls/s (median)", "lowest to highest", "against the bare handler")
    ceiling = statistics.median(rates["bare grpc.aio handler"])
    for name, values in rates.items():
        median = statistics.median(values)
        table.add_row(name, f"{median:,.0f}", f"{min(values):,.0f} to {max(values):,.0f}", f"{median / ceiling:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
