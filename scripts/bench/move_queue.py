"""A large queue that moves to another shard while it is being used: how long that takes, holds and needs.

    .venv/bin/python scripts/bench/move_queue.py [--jobs 1000000]

One server with two shards and one queue of jobs with 256 bytes each. Two producers and two workers use the
queue, through the official client, while `seppd rebalance move` takes it to the other shard. In the end the
jobs that are left, counted by the server, must be those that were stored and not acknowledged.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from reshard import connected, rebalance
from rich.console import Console
from rich.table import Table
from sepp import EnqueueRequest, Payload, ReserveOptions
from servers import PAYLOAD_BYTES, Running, seppd

from common.slots import slot_of

QUEUE = "large"
SHARDS = 2
BATCH = 250
PRELOADERS = 4
CLIENTS = 2
LEASE = timedelta(minutes=30)
WAIT = timedelta(milliseconds=100)
# Between two looks at what the shards take, in seconds.
LOOK_S = 0.05


class Seen:
    """What the clients have done, and how much memory shards took."""

    def __init__(self) -> None:
        self.stored = 0
        self.acked = 0
        self.times: list[float] = []  # of calls, in ms
        self.shard_bytes: list[int] = []  # the larger one of the two, at each look


def job() -> EnqueueRequest:
    return EnqueueRequest(QUEUE, "bench", Payload(b"x" * PAYLOAD_BYTES, "application/octet-stream"))


async def preload(server: Running, seen: Seen, jobs: int) -> None:
    async def fill() -> None:
        async with connected(server.address) as client:
            while seen.stored < jobs:
                seen.stored += BATCH
                await client.enqueue_batch([job()] * BATCH)

    await asyncio.gather(*(fill() for _ in range(PRELOADERS)))


async def produce(server: Running, seen: Seen, is_over: asyncio.Event) -> None:
    async with connected(server.address) as client:
        while not is_over.is_set():
            begun = time.perf_counter()
            await client.enqueue(job())
            seen.times.append(1000 * (time.perf_counter() - begun))
            seen.stored += 1


async def work(server: Running, seen: Seen, is_over: asyncio.Event) -> None:
    async with connected(server.address) as client:
        while not is_over.is_set():
            begun = time.perf_counter()
            for taken in await client.reserve(ReserveOptions([QUEUE], LEASE, WAIT, max_jobs=1)) or []:
                await client.ack(taken.ctx)
                seen.acked += 1
            seen.times.append(1000 * (time.perf_counter() - begun))


async def watch(processes: list[Path], seen: Seen, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        seen.shard_bytes.append(max(resident_bytes(process) for process in processes))
        with suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), LOOK_S)


def shard_processes(directory: Path) -> list[Path]:
    """Those that have a file below a data directory open, and are shards."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"\0shard\0" not in (process / "cmdline").read_bytes():
                continue
            if any(str(link.readlink()).startswith(str(directory)) for link in (process / "fd").iterdir()):
                found.append(process)
    return found


def resident_bytes(process: Path) -> int:
    status = (process / "status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


async def run(server: Running, jobs: int, seen: Seen) -> tuple[dict[str, Any], int]:
    """Returns what the command says, and the memory of the larger shard before."""
    await preload(server, seen, jobs)
    processes = shard_processes(server.data)
    before = max(resident_bytes(process) for process in processes)
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(produce(server, seen, is_over))
            tasks.create_task(work(server, seen, is_over))
        tasks.create_task(watch(processes, seen, is_over))
        target = (slot_of(QUEUE) + 1) % SHARDS
        account = await rebalance(server, "move", "--queue", QUEUE, "--to", str(target))
        is_over.set()
    return account, before


def main(jobs: Annotated[int, typer.Option(help="Jobs in the queue.")] = 1_000_000) -> None:
    """Move a queue while it is being used."""
    seen = Seen()
    with seppd("queue", SHARDS, 1) as server:
        account, before = asyncio.run(run(server, jobs, seen))
        left = server.stored_jobs()
    if left != seen.stored - seen.acked:
        raise SystemExit(f"{left} jobs are left, not {seen.stored - seen.acked}")
    seen.times.sort()
    table = Table("jobs", "s", "MB/s", "held", "calls", "p50", "p99", "longest", "a shard before", "at most")
    table.add_row(
        f"{jobs:,}",
        f"{account['seconds']:.1f}",
        f"{account['bytes'] / account['seconds'] / 1e6:.1f}",
        f"{account['hold_ms']} ms",
        f"{len(seen.times):,}",
        f"{statistics.median(seen.times):.1f} ms",
        f"{seen.times[len(seen.times) * 99 // 100]:.1f} ms",
        f"{seen.times[-1]:.0f} ms",
        f"{before / 1e6:.0f} MB",
        f"{max(seen.shard_bytes) / 1e6:.0f} MB",
    )
    console = Console(width=120)
    console.print(table)
    console.print(f"{left:,} jobs are left, as many as were stored and not acknowledged")


if __name__ == "__main__":
    typer.run(main)
