"""A demonstration on real work: hash every file of a folder through a server that loses a shard halfway.

    scripts/run.sh demo [FOLDER] [--workers 4] [--producers 2] [--shards 4]

It starts `seppd serve` on a free port in a temporary directory, enqueues one job for each file (without
FOLDER those of Python's standard library), and lets worker processes hash them through the official
client. When half of the jobs are acknowledged, one shard process gets SIGKILL. At the end every result is
compared with a direct computation, and every job must have been acknowledged exactly once.

How "exactly once" is known. An ack that takes effect deletes its job, and each delivery has an attempt
number of its own. So a worker that gets no clear answer to an ack asks again, under the same attempt:

    OK                    this ack took effect, hence no earlier one had
    NOT_FOUND, in time    an earlier ack took effect: while a lease runs, nothing else ends it
    anything else         this delivery did not end the job; another one will

Each job must have exactly one delivery that ended it by one of the first two. Then, when the workers have
gone, the server is asked for what it still has: a reserve on all queues must find no ready job, and an ack
of each job no lease. No job was scheduled or came near its last attempt, so there is nothing else that
one could be.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import sepp
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.slots import SlotMap, slot_of

WORKER_ARGUMENT = "--as-worker"
JOB_TYPE = "hash"
# Enough that every shard gets several, and no more than one Reserve may name.
QUEUE_COUNT = 32
ENQUEUE_JOBS = 32
RESERVE_JOBS = 16
# So many that no job comes near the last one: its loss would look like an ack.
MAX_ATTEMPTS = 100
# Longer than any restart of a shard; a job whose worker lost it comes back after this.
LEASE_S = 20.0
# Producers stay this part of all jobs ahead of the workers, so that both are busy when the shard dies.
LEAD_PART = 4
WAIT_S = 5.0
PAUSE_S = 0.05
STALL_S = 3 * LEASE_S
START_S = 60.0
STOP_S = 30.0
READ_BYTES = 1 << 20
PROBES_AT_ONCE = 64
# Python writes into the first while it runs, and the second is not the standard library.
LEFT_OUT = frozenset({"__pycache__", "site-packages"})

# A shard that restarts takes far less; this gives up after about half a minute.
PATIENT = sepp.RetryPolicy(
    max_attempts=40, initial_backoff=timedelta(milliseconds=50), max_backoff=timedelta(seconds=1)
)

T = TypeVar("T")


class DemoError(Exception):
    """The demonstration cannot go on; the text is one line."""


# Before Python 3.12 `asyncio.wait_for` forgets a cancellation that comes together with the result: a Ctrl-C in that
# moment would be waited for in vain. The client calls it when it connects.


async def within(limit_s: float, result: Awaitable[T]) -> T:
    """Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        return await result


async def connected(address: str, **options: Any) -> sepp.SeppClient:
    client = await sepp.SeppClient.connect(address, **options)
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        await client.close()
        raise asyncio.CancelledError
    return client


# -- the work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digest:
    """What is computed of a file; `lines` counts newline bytes."""

    sha256: str
    lines: int


def digest_of(path: Path) -> Digest:
    sha256, lines = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            sha256.update(block)
            lines += block.count(b"\n")
    return Digest(sha256.hexdigest(), lines)


def files_below(folder: Path) -> list[Path]:
    """Readable regular files, relative to the folder, in order. Symbolic links are not followed."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        paths = (Path(parent, name) for name in sorted(names))
        found += [path for path in paths if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK)]
    return [path.relative_to(folder) for path in found]


# -- a worker process -------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerTerms:
    """What a worker is told: the first line of its input."""

    name: str
    address: str
    folder: str
    queues: list[str]


@dataclass(frozen=True)
class Delivery:
    """What a worker tells of each job it was given: a line of its output."""

    job_id: str
    attempt: int
    sha256: str
    lines: int
    ended_job: bool
    asked: int  # how often it was acked until the answer was clear


@dataclass(frozen=True)
class Farewell:
    """The last line of a worker's output."""

    reserves_again: int


async def work() -> None:
    """Reserve, hash, ack and report, until the input ends."""
    logging.getLogger("sepp").setLevel(logging.CRITICAL)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    terms = WorkerTerms(**json.loads(await reader.readline()))
    end_of_input = asyncio.create_task(reader.read())
    reserves_again = 0
    # No retries by the client: only who sees every answer can tell what a NOT_FOUND means.
    async with await connected(terms.address) as client:
        while not end_of_input.done():
            began = time.monotonic()
            reserve = asyncio.create_task(client.reserve(_reserve_options(terms.queues, WAIT_S, terms.name)))
            await asyncio.wait((reserve, end_of_input), return_when=asyncio.FIRST_COMPLETED)
            if not reserve.done():
                reserve.cancel()
                break
            try:
                jobs = reserve.result() or []
            except (sepp.TransportError, sepp.OverloadedError, sepp.ServerInternalError):
                reserves_again += 1
                await asyncio.sleep(PAUSE_S)
                continue
            await _work_on(client, Path(terms.folder), jobs, began + LEASE_S)
    print(json.dumps(asdict(Farewell(reserves_again))), flush=True)


def _reserve_options(queues: Sequence[str], wait_s: float, worker: str) -> sepp.ReserveOptions:
    return sepp.ReserveOptions(
        queues,
        lease_duration=timedelta(seconds=LEASE_S),
        wait_timeout=timedelta(seconds=wait_s),
        worker_id=worker,
        max_jobs=RESERVE_JOBS,
    )


async def _work_on(client: sepp.SeppClient, folder: Path, jobs: Sequence[sepp.Job], leased_until: float) -> None:
    digests = []
    for job in jobs:
        assert job.payload is not None
        digests.append(digest_of(folder / os.fsdecode(job.payload.data)))
    ends = await asyncio.gather(*(_acknowledge(client, job.ctx, leased_until) for job in jobs))
    for job, digest, (ended_job, asked) in zip(jobs, digests, ends, strict=True):
        delivery = Delivery(job.ctx.id, job.ctx.attempt, digest.sha256, digest.lines, ended_job, asked)
        print(json.dumps(asdict(delivery)), flush=True)


async def _acknowledge(client: sepp.SeppClient, ctx: sepp.JobCtx, leased_until: float) -> tuple[bool, int]:
    """Whether this delivery ended the job, and how often that was asked. See the top of this file.

    `leased_until` is monotonic and not later than the end of the lease: it counts from before the reserve.
    """
    asked, may_be_done = 0, False
    while True:
        asked += 1
        try:
            await client.ack(ctx)
            return True, asked
        except (sepp.TransportError, sepp.ServerInternalError):
            may_be_done = True
        except sepp.OverloadedError:
            pass
        except sepp.JobNotFoundError:
            return may_be_done and time.monotonic() < leased_until, asked
        except sepp.AttemptMismatchError:
            return False, asked
        await asyncio.sleep(PAUSE_S)


# -- the server -------------------------------------------------------------------------------------


class Server:
    """`seppd serve` with what its log tells: where it listens and which process is which shard."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        loop = asyncio.get_running_loop()
        self.address: asyncio.Future[str] = loop.create_future()
        self.end: asyncio.Future[None] = loop.create_future()
        self._last_line = "it said nothing"
        self._pids: dict[str, int] = {}
        self._awaited: tuple[str, asyncio.Future[None]] | None = None
        self._reading = asyncio.create_task(self._read_log())

    @classmethod
    async def start(cls, directory: Path, db_path: Path, shards: int) -> Server:
        """It sees no configuration but what is given here."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SEPP_")}
        environ |= {"SEPP_LOGGING__FORMAT": "json", "SEPP_LOGGING__LEVEL": "debug"}
        options = ["--listen-addr", "127.0.0.1:0", "--db-path", str(db_path), "--shards", str(shards)]
        installed = Path(sys.executable).with_name("seppd")
        program = [str(installed)] if installed.exists() else [sys.executable, "-P", "-m", "common"]
        process = await asyncio.create_subprocess_exec(
            *program,
            "serve",
            *options,
            cwd=directory,
            env=environ,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the demonstration, which stops it in order
        )
        return cls(process)

    def kill_shard(self, shard: int) -> tuple[int, asyncio.Future[None]]:
        """SIGKILL for the process of a shard: its pid, and what is done when its successor is ready."""
        name = f"shard-{shard}"
        successor: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited = name, successor
        pid = self._pids[name]
        os.kill(pid, signal.SIGKILL)
        return pid, successor

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await within(STOP_S, self._process.wait())
        except TimeoutError:
            self._process.kill()  # its children end when it is gone
            await self._process.wait()
        await self._reading
        self.address.cancel()
        self.end.cancel()

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            try:
                self._take(json.loads(line))
            except ValueError:
                self._last_line = line.decode(errors="replace").strip()
        error = DemoError(f"the server has ended: {self._last_line}")
        for future in (self.address, self.end):
            if not future.done():
                future.set_exception(error)

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("level") in ("error", "critical"):
            self._last_line = " ".join(str(event.get(key, "")) for key in ("event", "child", "reason")).strip()
        match event.get("event"):
            case "child is ready":
                self._pids[event["child"]] = event["pid"]
                if self._awaited is not None and self._awaited[0] == event["child"] and not self._awaited[1].done():
                    self._awaited[1].set_result(None)
            case "queue server listening":
                self.address.set_result(event["address"])


@asynccontextmanager
async def serving(directory: Path, db_path: Path, shards: int) -> AsyncIterator[Server]:
    server = await Server.start(directory, db_path, shards)
    try:
        yield server
    finally:
        await server.stop()


# -- a run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    folder: Path
    workers: int
    producers: int
    shards: int


class Run:
    """What has been enqueued and what the workers told, as it comes in."""

    def __init__(self, options: Options, files: list[Path], owners: Sequence[int], progress: Progress) -> None:
        self.options = options
        self.files = files
        self.shard_of = {name: owners[slot_of(name)] for name in (queue_of(index) for index in range(QUEUE_COUNT))}
        # Those of one shard stand together: a reserve goes to each shard once.
        self.queues = sorted(self.shard_of, key=lambda name: (self.shard_of[name], name))
        self.enqueued: dict[str, int] = {}  # job id: index of its file
        self.deduplicated = 0
        self.deliveries: list[Delivery] = []
        self.endings: Counter[str] = Counter()  # by job id
        self.reserves_again = 0
        self.killed: tuple[int, int, float] | None = None  # shard, pid, seconds until it was back
        self.half = asyncio.Event()
        self.complete = asyncio.Event()
        self.advanced = asyncio.Event()
        self._progress = progress
        self._bars = [progress.add_task(text, total=len(files)) for text in ("enqueued", "acknowledged")]
        self.began = time.monotonic()
        self.took_s = 0.0

    def shard_of_file(self, index: int) -> int:
        return self.shard_of[queue_of(index)]

    @property
    def is_far_ahead(self) -> bool:
        lead_max = max(ENQUEUE_JOBS, len(self.files) // LEAD_PART)
        return len(self.enqueued) - len(self.endings) >= lead_max

    def accepted(self, index: int, ack: sepp.EnqueueAck) -> None:
        self.enqueued[ack.job_id] = index
        self.deduplicated += ack.deduplicated
        self._progress.update(self._bars[0], completed=len(self.enqueued))

    def delivered(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        if delivery.ended_job:
            self.endings[delivery.job_id] += 1
        done = len(self.endings)
        self._progress.update(self._bars[1], completed=done)
        self.advanced.set()
        if 2 * done >= len(self.files):
            self.half.set()
        if done == len(self.files):
            self.took_s = self.took_s or time.monotonic() - self.began
            self.complete.set()

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)


def queue_of(index: int) -> str:
    """Names that differ only in a number at their end fall on few slots; the text after it spreads them."""
    return f"files-{index % QUEUE_COUNT:02d}-of-{QUEUE_COUNT}"


async def produce(run: Run, address: str, indexes: Sequence[int]) -> None:
    """Enqueue jobs for some files. With keys the client may ask again whatever the answer was."""
    async with await connected(address, retry_policy=PATIENT) as client:
        for batch in portions(indexes, ENQUEUE_JOBS):
            while run.is_far_ahead:
                run.advanced.clear()
                await run.advanced.wait()
            results = await client.enqueue_batch([job_for(run.files[index], index) for index in batch])
            for index, result in zip(batch, results, strict=True):
                if isinstance(result, sepp.JobRejection):
                    raise DemoError(f"the job for {run.files[index]} was rejected: {result}")
                run.accepted(index, result)


def job_for(file: Path, index: int) -> sepp.EnqueueRequest:
    return sepp.EnqueueRequest(
        queue_of(index),
        JOB_TYPE,
        payload=sepp.Payload(os.fsencode(file), "text/plain"),
        idempotency_key=f"file-{index}",
        max_attempts=MAX_ATTEMPTS,
    )


def portions(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


async def employ(run: Run, address: str, place: int) -> None:
    """One worker process, until all is done. It ends when its input does, also when this process is killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        WORKER_ARGUMENT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    reports = asyncio.create_task(_take_reports(run, process.stdout))
    try:
        # Each starts with another shard, so that all have work at once.
        first = place * len(run.queues) // run.options.workers
        queues = run.queues[first:] + run.queues[:first]
        terms = WorkerTerms(f"worker-{place}", address, str(run.options.folder), queues)
        process.stdin.write(json.dumps(asdict(terms)).encode() + b"\n")
        complete = asyncio.create_task(run.complete.wait())
        await asyncio.wait((complete, reports), return_when=asyncio.FIRST_COMPLETED)
        complete.cancel()
        process.stdin.close()
        said_farewell = await within(STOP_S, reports)
        status = await within(STOP_S, process.wait())
        if status != 0 or not said_farewell:
            raise DemoError(f"worker-{place} ended with status {status}, see above")
    finally:
        reports.cancel()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _take_reports(run: Run, output: asyncio.StreamReader) -> bool:
    """Until the output ends; whether it ended as it should."""
    async for line in output:
        report = json.loads(line)
        if "reserves_again" in report:
            run.reserves_again += Farewell(**report).reserves_again
            return True
        run.delivered(Delivery(**report))
    return False


async def strike(run: Run, server: Server) -> None:
    """Kill the shard with the most jobs when half of all are done."""
    jobs = Counter(run.shard_of_file(index) for index in range(len(run.files)))
    shard = jobs.most_common(1)[0][0]
    await run.half.wait()
    pid, successor = server.kill_shard(shard)
    killed_at = time.monotonic()
    run.say(f"shard-{shard} (process {pid}) was killed after {len(run.endings)} of {len(run.files)} jobs")
    await within(STALL_S, successor)
    run.killed = shard, pid, time.monotonic() - killed_at
    run.say(f"shard-{shard} is back after {run.killed[2]:.2f} s")


async def watch(run: Run, server: Server) -> None:
    """Until all is done; raises DemoError when the server ends or nothing moves."""
    done = len(run.endings)
    while not run.complete.is_set():
        complete = asyncio.create_task(run.complete.wait())
        await asyncio.wait((complete, server.end), timeout=STALL_S, return_when=asyncio.FIRST_COMPLETED)
        complete.cancel()
        if server.end.done():
            server.end.result()
        if len(run.endings) == done and not run.complete.is_set():
            raise DemoError(f"no job was acknowledged for {STALL_S:.0f} s: {len(run.files) - done} are missing")
        done = len(run.endings)


async def demonstrate(options: Options, files: list[Path], console: Console) -> list[str]:
    """The whole demonstration; what was wrong, one line each."""
    with tempfile.TemporaryDirectory(prefix="seppd-demo-") as name:
        directory = Path(name)
        db_path = directory / "data"
        async with serving(directory, db_path, options.shards) as server:
            address = await within(START_S, server.address)
            console.print(f"seppd serves on {address} with {options.shards} shards", highlight=False)
            slot_map = SlotMap.load(db_path)
            assert slot_map is not None
            with progress_on(console) as progress:
                run = Run(options, files, slot_map.owners, progress)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(watch(run, server))
                    tasks.create_task(strike(run, server))
                    for place in range(options.workers):
                        tasks.create_task(employ(run, address, place))
                    for place in range(options.producers):
                        tasks.create_task(produce(run, address, range(place, len(files), options.producers)))
            left = await remains(run, address)
        faults = [*left, *count_faults(run), *result_faults(run)]
        console.print(summary(run), shard_table(run), highlight=False)
        return faults


def progress_on(console: Console) -> Progress:
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


# -- the checks -------------------------------------------------------------------------------------


async def remains(run: Run, address: str) -> list[str]:
    """What the server still has, with all workers gone."""
    faults = []
    async with await connected(address, retry_policy=PATIENT) as client:
        last = {delivery.job_id: delivery.attempt for delivery in run.deliveries}
        for some in portions(list(last.items()), PROBES_AT_ONCE):
            held = await asyncio.gather(*(is_leased(client, job_id, attempt) for job_id, attempt in some))
            names = [job_id for (job_id, _), is_held in zip(some, held, strict=True) if is_held]
            faults += [f"job {job_id} was still leased" for job_id in names]
        ready = await client.reserve(_reserve_options(run.queues, 0, "check")) or []
    return faults + [f"job {job.ctx.id} of queue {job.ctx.queue} was left over" for job in ready]


async def is_leased(client: sepp.SeppClient, job_id: str, attempt: int) -> bool:
    """Asked by an ack that must be refused. The client wants a whole context; the server sees id and attempt."""
    now = datetime.now(UTC)
    ctx = sepp.JobCtx(job_id, "-", JOB_TYPE, sepp.Priority(0), attempt, MAX_ATTEMPTS, now, {}, None, now)
    try:
        await client.ack(ctx)
    except sepp.JobNotFoundError:
        return False
    except sepp.AttemptMismatchError:
        pass
    return True


def count_faults(run: Run) -> list[str]:
    """Every file has one job, and every job one acknowledgement."""
    faults = []
    if len(set(run.enqueued.values())) != len(run.files) or len(run.enqueued) != len(run.files):
        faults.append(f"{len(run.files)} files have {len(run.enqueued)} jobs")
    for job_id in run.enqueued.keys() | run.endings.keys():
        if job_id not in run.enqueued:
            faults.append(f"job {job_id} was delivered, and nobody enqueued it")
        elif run.endings[job_id] != 1:
            faults.append(f"job {job_id} was acknowledged {run.endings[job_id]} times")
    return faults


def result_faults(run: Run) -> list[str]:
    """Every result that a worker told, against a direct computation."""
    told: dict[int, set[Digest]] = {}
    for delivery in run.deliveries:
        if delivery.job_id in run.enqueued:
            told.setdefault(run.enqueued[delivery.job_id], set()).add(Digest(delivery.sha256, delivery.lines))
    return [
        f"the result for {file} differs from the direct computation"
        for index, file in enumerate(run.files)
        if told.get(index) != {digest_of(run.options.folder / file)}
    ]


# -- what is shown ----------------------------------------------------------------------------------


def summary(run: Run) -> Table:
    again = [delivery for delivery in run.deliveries if delivery.asked > 1]
    table = Table(show_header=False, title="all jobs", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_row("jobs", str(len(run.files)))
    table.add_row("acknowledged exactly once", str(sum(count == 1 for count in run.endings.values())))
    table.add_row("deliveries", str(len(run.deliveries)))
    table.add_row("deliveries after the first attempt", str(sum(one.attempt > 1 for one in run.deliveries)))
    table.add_row("acks asked again for want of a clear answer", str(len(again)))
    table.add_row("enqueues repeated, found stored already", str(run.deduplicated))
    table.add_row("reserves asked again", str(run.reserves_again))
    table.add_row("time", f"{run.took_s:.2f} s")
    table.add_row("jobs a second", f"{len(run.files) / run.took_s:.0f}")
    return table


def shard_table(run: Run) -> Table:
    jobs = Counter(run.shard_of_file(index) for index in range(len(run.files)))
    done = Counter(run.shard_of_file(run.enqueued[job_id]) for job_id in run.endings if job_id in run.enqueued)
    queues = Counter(run.shard_of.values())
    table = Table("shard", title="by shard", title_justify="left")
    for name in ("queues", "jobs", "acknowledged", "killed, back after"):
        table.add_column(name, justify="right")
    for shard in range(run.options.shards):
        killed = f"{run.killed[2]:.2f} s" if run.killed is not None and run.killed[0] == shard else ""
        table.add_row(str(shard), str(queues[shard]), str(jobs[shard]), str(done[shard]), killed)
    return table


# -- the command line -------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    folder: Annotated[
        Path | None, typer.Argument(help="The files to hash; else those of Python's standard library.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 4,
    producers: Annotated[int, typer.Option(min=1, max=64, help="Producers.")] = 2,
    shards: Annotated[int, typer.Option(min=1, max=64, help="Shard processes of the server.")] = 4,
) -> int:
    """Hash every file of a folder through a server that loses a shard halfway."""
    chosen = folder or Path(sysconfig.get_path("stdlib"))
    if not chosen.is_dir():
        raise DemoError(f"{chosen} is not a folder")
    chosen = chosen.resolve()
    files = files_below(chosen)
    if not files:
        raise DemoError(f"{chosen} holds no file that can be read")
    console = Console()
    console.print(f"{len(files)} files below {chosen}", highlight=False)
    faults = run_until_signal(lambda: demonstrate(Options(chosen, workers, producers, shards), files, console))
    for fault in faults:
        print(f"demo: {fault}", file=sys.stderr)
    if not faults:
        console.print("every job was done and acknowledged exactly once, every result is right", highlight=False)
    return 1 if faults else 0


def run_until_signal(start: Callable[[], Any]) -> list[str]:
    """Run to the end, or until Ctrl-C or SIGTERM: then everything is ended in order first. Raises DemoError."""

    async def main() -> list[str]:
        loop, running = asyncio.get_running_loop(), asyncio.ensure_future(start())
        stops = [running.cancel]

        def stop() -> None:
            if stops:  # a second Ctrl-C must not break into the cleaning up
                stops.pop()()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        faults: list[str] = await running
        return faults

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise DemoError("interrupted") from None
    except Exception as error:
        first = first_of(error)
        if isinstance(first, TimeoutError):
            raise DemoError("the server or a worker took too long") from error
        if isinstance(first, DemoError | sepp.SeppError):
            raise DemoError(" ".join(str(first).split())) from error
        raise


def first_of(error: BaseException) -> BaseException:
    """The first reason of what a task group raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def main() -> int:
    if sys.argv[1:] == [WORKER_ARGUMENT]:
        asyncio.run(work())
        return 0
    logging.getLogger("sepp").setLevel(logging.CRITICAL)  # its warnings of every retry would break the bar
    try:
        status = app(prog_name="demo", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(f"{error.format_message()} (`demo --help` shows what there is)")
    except DemoError as error:
        return _fail(str(error))
    except typer.Abort:
        return 1
    return status if isinstance(status, int) else 0


def _fail(text: str) -> int:
    print(f"demo: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
