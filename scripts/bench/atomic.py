"""What an atomic batch over two shards costs against the same batch on one shard, side by side in one run.

    .venv/bin/python scripts/bench/atomic.py [--connections 50] [--requests 5000] [--jobs 10] [--rounds 3]

One server with two shards; the batches differ in nothing but the names of their two queues: both on
one shard, or one on each. Rounds alternate. In the end every job of every batch must be stored once.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from itertools import count, islice
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from servers import body_file, calls_per_second, request_body, seppd

from common.slots import SlotMap, slot_of

SHARDS = 2


def queues_on(shard: int, number: int) -> list[str]:
    """The first names of queues that live on a shard of a new server."""
    owners = SlotMap.even(SHARDS).owners
    return list(islice((f"bench-{n}" for n in count() if owners[slot_of(f"bench-{n}")] == shard), number))


def main(
    connections: Annotated[int, typer.Option(help="Connections, one call at a time on each.")] = 50,
    requests: Annotated[int, typer.Option(help="Batches per kind and round.")] = 5_000,
    jobs: Annotated[int, typer.Option(help="Jobs of 256 bytes in a batch.", min=2)] = 10,
    rounds: Annotated[int, typer.Option(help="Rounds; the median is shown.")] = 3,
    routers: Annotated[int, typer.Option(help="Router processes.")] = 1,
) -> None:
    """Measure atomic batches on one and on two shards."""
    first, second = queues_on(0, 2)
    (other,) = queues_on(1, 1)
    kinds = {"one shard": (first, second), "two shards": (first, other)}
    with ExitStack() as stack:
        server = stack.enter_context(seppd("queue", SHARDS, routers))
        bodies = {
            kind: stack.enter_context(body_file(request_body([queues[n % 2] for n in range(jobs)])))
            for kind, queues in kinds.items()
        }
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, body in bodies.items():
                rates[kind].append(calls_per_second(server.address, "EnqueueAtomic", body, connections, requests))
        expected = len(kinds) * rounds * requests * jobs
        if (stored := server.stored_jobs()) != expected:
            raise SystemExit(f"{stored} jobs are stored, not {expected}")
    table = Table("batch on", "batches/s (median)", "lowest to highest", "mean time of a batch", "cost")
    one = statistics.median(rates["one shard"])
    for kind, values in rates.items():
        median = statistics.median(values)
        table.add_row(
            kind,
            f"{median:,.0f}",
            f"{min(values):,.0f} to {max(values):,.0f}",
            f"{1000 * connections / median:.1f} ms",
            f"{one / median:.2f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
