"""What a large backlog costs: drain rate, memory and start-up with many jobs, many timers, many waiting polls.

    .venv/bin/python scripts/bench/backlog.py [--rows stored,drain,…] [--jobs 1000000] [--json FILE]

The figures to reach are for 10 000 000 jobs; draining so many takes as long as that many acks do. See
docs/benchmarks.md.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import raw_calls
import typer
from contenders import LEASE, SMALL_BATCH, ack, percentiles, queues_on
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from raw_calls import GrpcConnection, Lane
from rich.console import Console
from rich.table import Table
from servers import PAYLOAD_BYTES, Running, batch, body_file, calls_per_second, framed, seppd, seppd_on

from common import queue_pb2 as pb

QUEUE = "backlog"
BATCH = 256
CONNECTIONS = 50
MANY_CONNECTIONS = 256
SCHEDULED_OVER_S = 60


class Figure(NamedTuple):
    what: str
    found: str
    must: str
    aim: str


def run(running: Running, lanes: list[Lane], connections: int) -> None:
    raw_calls.run(lanes, connections, lambda: GrpcConnection(running.address))


def expect(running: Running, ready: int, leased: int = 0) -> None:
    """Every job that was taken must be there once."""
    if (found := (running.stored_jobs(), running.leased_jobs())) != (ready, leased):
        raise SystemExit(f"{found} jobs are ready and leased, not {(ready, leased)}")


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Seconds since it was entered."""
    began = time.monotonic()
    yield lambda: time.monotonic() - began


def say(text: str) -> None:
    """How far it is: ten million jobs take an hour."""
    Console(stderr=True, width=130).print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


# -- many ready jobs --------------------------------------------------------------------------------


def measure_stored(jobs: int) -> list[Figure]:
    """Fill, and start again."""
    calls = jobs // BATCH
    with tempfile.TemporaryDirectory(prefix="seppd-bench-") as directory, stopwatch() as empty_s:
        data = Path(directory) / "data"
        with seppd_on(data, "queue", 1, 1) as running:
            empty = empty_s()
            before = running.memory_mb("shard")
            fill(running, calls)
            memory = running.memory_mb("shard") - before
        with stopwatch() as full_s, seppd_on(data, "queue", 1, 1) as running:
            full = full_s()
            expect(running, calls * BATCH)
    many = f"{calls * BATCH:,} jobs"
    return [
        Figure(f"shard memory with {many} ready, above an empty shard", f"{memory:.0f} MB", "≤ 300 MB", "100 MB"),
        Figure(f"start with {many}", f"{full:.2f} s", f"≤ {2 * empty + 1:.2f} s", f"{1.2 * empty:.2f} s"),
    ]


def measure_drain(jobs: int, part: int) -> list[Figure]:
    """Fill, and drain the first part, the middle and the last part."""
    calls = jobs // BATCH
    jobs, part = calls * BATCH, min(part, jobs // 4)
    with seppd("queue", 1, 1) as running:
        fill(running, calls)
        first, first_cpu = drain(running, part)
        say(f"the first {part:,} are out at {first:,.0f}/s; the rest takes about {jobs / first / 60:.0f} minutes")
        drain(running, jobs - 2 * part, MANY_CONNECTIONS)  # faster, and nobody looks
        say("the last part begins")
        last, last_cpu = drain(running, part)
        expect(running, 0)
    return [
        Figure(
            f"drain rate of the last {part:,} of {jobs:,} jobs, against the first", f"{last / first:.2f}", "≥ 0.9", "1"
        ),
        Figure("the same in the shard's processor time of a job", f"{last_cpu / first_cpu:.2f}", "", ""),
    ]


def fill(running: Running, calls: int) -> None:
    with body_file(framed(batch([QUEUE] * BATCH))) as body:
        calls_per_second(running.address, "EnqueueBatch", body, CONNECTIONS, calls)
    expect(running, calls * BATCH)
    say(f"{calls * BATCH:,} jobs are in")


def drain(running: Running, jobs: int, connections: int = CONNECTIONS) -> tuple[float, float]:
    """Reserve and ack so many; returns jobs per second, and what a job cost the shard in seconds."""
    left = [jobs]

    def worker() -> Lane:
        while left[0] > 0:
            count = min(SMALL_BATCH, left[0])
            left[0] -= count
            request = pb.ReserveRequest(queues=[QUEUE], max_jobs=count, lease_duration=LEASE)
            answer = yield "Reserve", request.SerializeToString()
            taken = pb.ReserveResponse.FromString(answer).jobs
            left[0] += count - len(taken)
            for job in taken:
                yield "Ack", ack(job)

    began, before = time.monotonic(), running.cpu_s("shard")
    run(running, [worker() for _ in range(connections)], connections)
    return jobs / (time.monotonic() - began), (running.cpu_s("shard") - before) / jobs


# -- many timers ------------------------------------------------------------------------------------


def measure_scheduled(jobs: int) -> list[Figure]:
    """Jobs that fall due over a minute while others work."""
    calls = jobs // SMALL_BATCH
    with seppd("queue", 1, 1) as running:
        idle = percentiles(round_trips(running, 10.0))["p99"]
        lead_s = 10 + calls * SMALL_BATCH / 20_000
        first_ms = int((time.time() + lead_s) * 1000)
        payload = pb.Payload(data=b"x" * PAYLOAD_BYTES, encoding="application/octet-stream")

        def schedule(place: int) -> Lane:
            for number in range(place, calls, CONNECTIONS):
                due_ms = first_ms + number * SCHEDULED_OVER_S * 1000 // calls
                due = Timestamp(seconds=due_ms // 1000, nanos=due_ms % 1000 * 1_000_000)
                job = pb.EnqueueRequest(queue=QUEUE, job_type="bench", payload=payload, scheduled_at=due)
                yield "EnqueueBatch", pb.EnqueueBatchRequest(jobs=[job] * SMALL_BATCH).SerializeToString()

        run(running, [schedule(place) for place in range(CONNECTIONS)], CONNECTIONS)
        if time.time() * 1000 > first_ms:
            raise SystemExit("scheduling took longer than until the first was due: use fewer jobs")
        time.sleep(first_ms / 1000 - time.time())
        busy = percentiles(round_trips(running, SCHEDULED_OVER_S))["p99"]
        give_up_at = time.monotonic() + 30
        while running.stored_jobs() < calls * SMALL_BATCH and time.monotonic() < give_up_at:
            time.sleep(0.1)
        expect(running, calls * SMALL_BATCH)
    what = f"p99 of 50 connections while {calls * SMALL_BATCH:,} jobs fall due in {SCHEDULED_OVER_S} s, against idle"
    return [Figure(f"{what} ({idle:.1f} ms)", f"{busy / idle:.2f}", "≤ 3", "1.5")]


def round_trips(running: Running, seconds: float) -> list[float]:
    """Enqueue, reserve, ack on every connection, for so long; what each call took."""
    took: list[float] = []
    until = time.monotonic() + seconds

    def trip(queue: str) -> Lane:
        enqueue = batch([queue])
        reserve = pb.ReserveRequest(queues=[queue], lease_duration=LEASE).SerializeToString()
        while time.monotonic() < until:
            began = time.monotonic()
            yield "EnqueueBatch", enqueue
            then = time.monotonic()
            answer = yield "Reserve", reserve
            (job,) = pb.ReserveResponse.FromString(answer).jobs
            last = time.monotonic()
            yield "Ack", ack(job)
            took.extend((then - began, last - then, time.monotonic() - last))

    run(running, [trip(f"trip-{place}") for place in range(CONNECTIONS)], CONNECTIONS)
    return took


# -- many polls -------------------------------------------------------------------------------------


def measure_polls(queues: int) -> list[Figure]:
    """A waiting poll on each of many queues, and nothing to do."""
    settle_s, look_s = 10 + queues / 1_000, 20.0
    wait = Duration(seconds=int(settle_s + look_s + 10))
    used: list[float] = []
    with seppd("queue", 1, 1) as running:

        def poll(number: int) -> Lane:
            request = pb.ReserveRequest(queues=[f"poll-{number}"], wait_timeout=wait, lease_duration=LEASE)
            yield "Reserve", request.SerializeToString()

        def look() -> Lane:
            yield time.monotonic() + settle_s
            before = running.cpu_s("router") + running.cpu_s("shard")
            yield time.monotonic() + look_s
            used.append(running.cpu_s("router") + running.cpu_s("shard") - before)

        run(running, [look(), *(poll(number) for number in range(queues))], 100)
        expect(running, 0)
    found = f"{100 * used[0] / look_s:.2f} %"
    return [Figure(f"{queues:,} queues with a waiting poll each: a core, when idle", found, "≤ 2 %", "0.5 %")]


# -- more processes ---------------------------------------------------------------------------------


def measure_scale(calls: int) -> list[Figure]:
    """Processor time of a job with one router and one shard, and with two of each, under the same load."""
    figures = []
    for connections in (CONNECTIONS, MANY_CONNECTIONS):
        cost: dict[int, float] = {}
        for processes in (1, 2):
            with seppd("queue", processes, processes) as running:
                cost[processes] = cost_of_a_job(running, calls, connections)
        what = f"jobs per CPU-second of two routers and two shards, against one and one, {connections} connections"
        figures.append(Figure(what, f"{cost[1] / cost[2]:.2f}", "≥ 0.9", "1"))
    return figures


def cost_of_a_job(running: Running, calls: int, connections: int) -> float:
    """Seconds of routers and shards, with two loads at once, whose queues are on one shard each where there are two."""
    before = running.cpu_s("router") + running.cpu_s("shard")
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        bodies = [stack.enter_context(body_file(framed(batch(queues_on(shard, 1, 2))))) for shard in range(2)]
        load = running.address, "EnqueueBatch"
        loads = [pool.submit(calls_per_second, *load, body, connections // 2, calls // 2) for body in bodies]
        for each in loads:
            each.result()
    expect(running, calls // 2 * 2)
    return (running.cpu_s("router") + running.cpu_s("shard") - before) / calls


def main(
    rows: Annotated[str, typer.Option(help="Of stored, drain, scheduled, polls and scale, with commas between.")] = "",
    jobs: Annotated[int, typer.Option(min=CONNECTIONS * BATCH, help="Ready jobs.")] = 1_000_000,
    part: Annotated[int, typer.Option(min=1, help="Jobs of the first and last part that are timed.")] = 100_000,
    scheduled: Annotated[
        int, typer.Option(min=CONNECTIONS * SMALL_BATCH, help="Jobs that fall due over a minute.")
    ] = 1_000_000,
    queues: Annotated[int, typer.Option(min=1, help="Queues with a waiting poll.")] = 10_000,
    calls: Annotated[int, typer.Option(min=CONNECTIONS, help="Enqueues for the cost of more processes.")] = 20_000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Measure what a large backlog costs."""
    known: dict[str, Callable[[], list[Figure]]] = {
        "stored": lambda: measure_stored(jobs),
        "drain": lambda: measure_drain(jobs, part),
        "scheduled": lambda: measure_scheduled(scheduled),
        "polls": lambda: measure_polls(queues),
        "scale": lambda: measure_scale(calls),
    }
    wanted = [row.strip() for row in rows.split(",") if row.strip()] or list(known)
    if unknown := set(wanted) - known.keys():
        raise typer.BadParameter(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    figures = [figure for row in wanted for figure in known[row]()]
    table = Table("what", "found", "must", "aim")
    for figure in figures:
        table.add_row(*figure)
    Console(width=130).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps([figure._asdict() for figure in figures], indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
