"""Clients that go on working while a server gets more shards and fewer, and what they notice of it.

    .venv/bin/python scripts/bench/reshard.py [--jobs 100000] [--queues 200] [--clients 16] [--shards 2,8,3]

A server starts with the first number of shards and most of the jobs. Then as many producers as workers go
on, through the official client, while `seppd rebalance apply` brings it to one number of shards after the
other. Each queue has one producer, who waits for every answer, and one worker, so the order in which its
jobs come is known. In the end every job has come once, on its first attempt and in order, no call has
failed, and `seppd rebalance verify` finds nothing. Anything else ends the run with status 1.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated, Any

import grpc.aio
import typer
from rich.console import Console
from rich.table import Table
from sepp import EnqueueRequest, Job, Payload, ReserveOptions, SeppClient
from servers import ROOT, Running, seppd

PRIORITIES = (1, 5, 9)
# Of the jobs that are there at the start, of all: the others come while slots move.
PRELOADED = 0.8
BATCH = 200
LEASE = timedelta(minutes=30)
WAIT = timedelta(milliseconds=500)
RESERVED_MAX = 16
# A pause after each enqueue, so that producers are not done before the server is, in seconds.
PACE_S = 0.02
# Before the first change and after the last one, in seconds.
CALM_S = 1.0


class Story:
    """What producers have stored, what workers got, and what went wrong."""

    def __init__(self, jobs: int, queues: int) -> None:
        self.queues = [f"reshard-{number}" for number in range(queues)]
        self.stored: dict[str, int] = {}  # by queue and number, with the priority
        self.received: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.phase = "before"
        self.times: defaultdict[str, list[float]] = defaultdict(list)  # of enqueues in ms, by phase
        self._numbers: Counter[str] = Counter()
        self._last: dict[tuple[str, int], int] = {}
        self._padding = b"." * 1_000
        self.jobs = jobs

    def next_job(self, queue: str) -> tuple[str, EnqueueRequest]:
        self._numbers[queue] += 1
        number = self._numbers[queue]
        name = f"{queue} {number}"
        priority = PRIORITIES[number % len(PRIORITIES)]
        payload = Payload(name.encode() + self._padding, "text")
        return name, EnqueueRequest(queue, "bench", payload, priority=priority)

    def got(self, job: Job) -> None:
        assert job.payload is not None
        name = job.payload.data.rstrip(b".").decode()
        queue, _, number = name.rpartition(" ")
        self.received[name] += 1
        if job.ctx.attempt != 1:
            self.wrong.append(f"{name} comes as attempt {job.ctx.attempt}")
        line = queue, int(number) % len(PRIORITIES)
        last = self._last.get(line, 0)
        if int(number) <= last:
            self.wrong.append(f"{name} comes after {last}, which has its priority")
        self._last[line] = int(number)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[SeppClient]:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield SeppClient.from_channel(channel)


async def preload(address: str, story: Story) -> None:
    async with connected(address) as client:
        while len(story.stored) < story.jobs * PRELOADED:
            start = len(story.stored) // BATCH
            pairs = [story.next_job(story.queues[(start * BATCH + n) % len(story.queues)]) for n in range(BATCH)]
            await client.enqueue_batch([job for _, job in pairs])
            story.stored |= dict.fromkeys((name for name, _ in pairs), 1)


async def produce(address: str, story: Story, queues: list[str], is_over: Callable[[], bool]) -> None:
    """One call at a time, to one queue after the other."""
    async with connected(address) as client:
        while not is_over():
            for queue in queues:
                name, job = story.next_job(queue)
                begun = time.perf_counter()
                await client.enqueue(job)
                story.times[story.phase].append(1000 * (time.perf_counter() - begun))
                story.stored[name] = 1
                await asyncio.sleep(PACE_S)


async def work(address: str, story: Story, queues: list[str], is_over: Callable[[], bool]) -> None:
    """Take and acknowledge what comes in some queues, which lie on several shards."""
    async with connected(address) as client:
        while not is_over():
            for job in await client.reserve(ReserveOptions(queues, LEASE, WAIT, max_jobs=RESERVED_MAX)) or []:
                story.got(job)
                await client.ack(job.ctx)


async def rebalance(server: Running, *arguments: str) -> dict[str, Any]:
    """The command's own account of what it did."""
    command = [sys.executable, "-m", "common", "rebalance", *arguments, "--db-path", str(server.data), "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"rebalance {' '.join(arguments)} failed:\n{errors.decode()}{output.decode()}")
    done: dict[str, Any] = json.loads(output)
    return done


async def run(server: Running, story: Story, steps: list[int], clients: int) -> list[dict[str, Any]]:
    """Everybody works while the shards change; returns what each step was."""
    await preload(server.address, story)
    each = [story.queues[number::clients] for number in range(clients)]
    accounts = []
    is_over = is_produced = False

    async def produce_all() -> None:
        nonlocal is_produced
        async with asyncio.TaskGroup() as producers:
            for queues in each:
                producers.create_task(
                    produce(server.address, story, queues, lambda: is_over and len(story.stored) >= story.jobs)
                )
        is_produced = True

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce_all())
        for queues in each:
            tasks.create_task(
                work(server.address, story, queues, lambda: is_produced and len(story.received) >= len(story.stored))
            )
        await asyncio.sleep(CALM_S)
        for shards in steps:
            story.phase = f"to {shards} shards"
            accounts.append(await rebalance(server, "apply", "--shards", str(shards)))
        story.phase = "after"
        await asyncio.sleep(CALM_S)
        is_over = True
    return accounts


def main(
    jobs: Annotated[int, typer.Option(help="Jobs of 1 KiB, at least.")] = 100_000,
    queues: Annotated[int, typer.Option(help="Queues that they lie in.")] = 200,
    clients: Annotated[int, typer.Option(help="Producers, and workers.")] = 16,
    shards: Annotated[str, typer.Option(help="The number of shards at the start, and those to come to.")] = "2,8,3",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Change the number of shards under a load, and look at what clients notice."""
    first, *steps = [int(number) for number in shards.split(",")]
    story = Story(jobs, queues)
    with seppd("queue", first, 2) as server:
        accounts = asyncio.run(run(server, story, steps, clients))
        verified = asyncio.run(rebalance(server, "verify"))
        left = server.stored_jobs()
    story.wrong += [f"{name} was stored and has not come" for name in story.stored.keys() - story.received.keys()]
    story.wrong += [f"{name} has come {times} times" for name, times in story.received.items() if times > 1]
    story.wrong += [f"{left} jobs are left"] if left else []
    if as_json:
        print(json.dumps({"jobs": len(story.stored), "wrong": story.wrong, "steps": accounts, "verify": verified}))
    else:
        show(story, steps, accounts)
    if story.wrong:
        raise SystemExit("\n".join(story.wrong[:20]))


def show(story: Story, steps: list[int], accounts: list[dict[str, Any]]) -> None:
    table = Table("phase", "s", "slots", "jobs moved", "longest hold", "enqueues", "p50", "p99", "longest")
    by_phase = {f"to {shards} shards": account for shards, account in zip(steps, accounts, strict=True)}
    for phase, times in story.times.items():
        account = by_phase.get(phase, {})
        times.sort()
        table.add_row(
            phase,
            f"{account['seconds']:.1f}" if account else "",
            str(account.get("slots", "")),
            str(account.get("jobs", "")),
            f"{account['hold_ms']} ms" if account else "",
            f"{len(times):,}",
            f"{statistics.median(times):.1f} ms",
            f"{times[len(times) * 99 // 100]:.1f} ms",
            f"{times[-1]:.0f} ms",
        )
    console = Console(width=110)
    console.print(table)
    console.print(f"{len(story.stored):,} jobs, each came once and in order" if not story.wrong else "[red]wrong[/red]")


if __name__ == "__main__":
    typer.run(main)
