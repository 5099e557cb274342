"""The commands `seppd rebalance plan`, `apply`, `move`, `status` and `verify`; scripts/rebalance.py runs the same.

They speak to the server that runs on the data directory, or start one for themselves. Results go to stdout;
what happens meanwhile goes to stderr. What goes wrong is raised, for `cli` to say in one line.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from common.admin_cli import ConfigOption, DbPathOption, JsonOption, counted, print_json, print_table, printable
from common.admin_client import AdminClient, AdminUnavailableError
from common.admin_socket import AdminError
from common.config import load
from common.rebalance import (
    BatchMoved,
    Event,
    Plan,
    Postponed,
    Rebalance,
    ShardsSet,
    Stop,
    batch_seconds,
    even_plan,
    known_loads,
    known_map,
    shares,
    single_plan,
)
from common.rebalance_lock import rebalance_lock, rebalancing_process
from common.rebalance_offline import private_server, running_server
from common.rebalance_output import (
    MEGABYTE,
    PLAN_TITLES,
    evenness,
    megabytes,
    moved_line,
    plain_plan,
    plain_summary,
    plan_line,
    plan_rows,
    speed,
    summary_line,
)
from common.rebalance_plan import By
from common.slots import slot_of

# What a shell says of a command that Ctrl-C ended.
INTERRUPTED = 130
NEW_SHARD = "new"
# Of the queues that share a slot.
QUEUES_NAMED = 10
STOPPING = "stopping after the current slots; run the same command again to go on, Ctrl-C again to end at once"

app = typer.Typer(help="Move queues between shards, and change the number of shards, while the server serves or not.")

ShardsOption = Annotated[
    int | None, typer.Option("--shards", metavar="N", help="How many shards, 1 to 64; else as many as there are.")
]
ByOption = Annotated[By, typer.Option("--by", help="What is to be even.")]
RateOption = Annotated[
    float | None, typer.Option("--rate-limit", metavar="MB", help="Copy at most so many megabytes per second.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")]


@dataclass(frozen=True)
class _Place:
    """The data directory, and what its server is configured with."""

    directory: Path
    config: Path | None
    environ: Mapping[str, str]
    configured_shards: int | None

    @classmethod
    def found(cls, config: Path | None, db_path: str | None) -> _Place:
        """Raises ConfigError."""
        environ = {**os.environ}
        if db_path is not None:
            environ["SEPP_SERVER__DB_PATH"] = db_path
        server = load(config, environ).config.server
        return cls(Path(server.db_path), config, environ, server.shards)

    def warning(self, shards: int) -> str | None:
        """What is to be done about a configuration that the next start will not take."""
        if self.configured_shards in (None, shards):
            return None
        return (
            f"server.shards is {self.configured_shards}: the next start is refused with "
            f"{counted(shards, 'shard')}; set server.shards to {shards} or leave it out"
        )

    @contextmanager
    def server(self, alone: bool) -> Iterator[AdminClient]:
        """A connection to the server, which is started when none runs; `alone` keeps other rebalances out.

        Who starts a server is alone with it: it ends with the command.
        """
        with ExitStack() as stack:
            running = running_server(self.directory)
            if running is not None:
                stack.enter_context(running)
            if alone or running is None:
                stack.enter_context(rebalance_lock(self.directory))
            if running is None:
                _say("no server is running there; one is started that serves nobody else")
                running = stack.enter_context(private_server(self.directory, self.config, self.environ))
            yield running


# -- planning and moving ----------------------------------------------------------------------------


@app.command()
def plan(
    shards: ShardsOption = None,
    by: ByOption = By.SLOTS,
    rate_limit: RateOption = None,
    config: ConfigOption = None,
    db_path: DbPathOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what `apply` would move, and what the shards would own then."""
    place, rate = _Place.found(config, db_path), _bytes_per_second(rate_limit)
    with place.server(alone=False) as server:
        planned = even_plan(server.slot_map(True), shards, by)
    _show_plan(planned, rate, place.warning(planned.shards), as_json)


@app.command()
def apply(
    shards: ShardsOption = None,
    by: ByOption = By.SLOTS,
    rate_limit: RateOption = None,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    db_path: DbPathOption = None,
    as_json: JsonOption = False,
) -> int:
    """Have so many shards, with the slots spread evenly over them. Ctrl-C stops after the current slots."""
    place, rate = _Place.found(config, db_path), _bytes_per_second(rate_limit)
    with place.server(alone=not dry_run) as server:
        planned = even_plan(server.slot_map(True), shards, by)
        warning = place.warning(planned.shards)
        if dry_run:
            _show_plan(planned, rate, warning, as_json)
            return 0
        return _carry_out(server, planned, rate, place, as_json)


@app.command()
def move(
    to: Annotated[
        str, typer.Option("--to", metavar="SHARD", help="The shard, or `new` for one that owns nothing else.")
    ],
    slot: Annotated[list[int] | None, typer.Option("--slot", help="A slot; can be given several times.")] = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="NAME", help="The slot of this queue.")] = None,
    rate_limit: RateOption = None,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    db_path: DbPathOption = None,
    as_json: JsonOption = False,
) -> int:
    """Move single slots, or a queue with all that share its slot, to a shard."""
    if (queue is None) == (not slot):
        raise AdminError("give --slot or --queue")
    slots = {slot_of(queue)} if queue is not None else set(slot or ())
    target = _target(to)
    place, rate = _Place.found(config, db_path), _bytes_per_second(rate_limit)
    with place.server(alone=not dry_run) as server:
        planned = single_plan(server.slot_map(True), slots, target)
        if queue is not None:
            _say(_slot_of_queue(queue, server))
        if dry_run:
            _show_plan(planned, rate, place.warning(planned.shards), as_json)
            return 0
        return _carry_out(server, planned, rate, place, as_json)


def _target(to: str) -> int | None:
    if to == NEW_SHARD:
        return None
    if not to.isdecimal() or not to.isascii():
        raise AdminError(f"--to takes the number of a shard or `{NEW_SHARD}`, not {printable(to)!r}")
    return int(to)


def _bytes_per_second(megabytes: float | None) -> int:
    """0 is no limit."""
    if megabytes is None:
        return 0
    if not 0 < megabytes < 1_000_000:
        raise AdminError(f"--rate-limit is {megabytes:g}; allowed: megabytes per second, more than 0")
    return max(1, round(megabytes * MEGABYTE))


def _slot_of_queue(queue: str, server: AdminClient) -> str:
    """Who moves along: queues of one slot are never apart."""
    slot = slot_of(queue)
    others = [one.name for one in server.queues() if one.slot == slot and one.name != queue]
    along = ""
    if others:
        more = f" and {len(others) - QUEUES_NAMED} more" if len(others) > QUEUES_NAMED else ""
        along = f"; with it move {', '.join(map(printable, others[:QUEUES_NAMED]))}{more}"
    return f"queue {printable(queue)} is in slot {slot}{along}"


def _carry_out(server: AdminClient, planned: Plan, rate: int, place: _Place, as_json: bool) -> int:
    """The exit status."""
    stop = Stop()
    with _Report(planned, rate) as report, _stopping_on_interrupt(stop):
        try:
            summary = Rebalance(server, planned, rate, report.tell, stop).run()
        except KeyboardInterrupt:
            return INTERRUPTED
    warning = place.warning(summary.shards)
    if as_json:
        print_json({**plain_summary(summary, report.moved), "warning": warning})
    else:
        print(summary_line(summary) if planned.changes_anything else plan_line(planned, rate))
        _warn(warning)
    return 0 if summary.is_complete else INTERRUPTED


@contextmanager
def _stopping_on_interrupt(stop: Stop) -> Iterator[None]:
    """The first Ctrl-C asks for the end, the second one raises KeyboardInterrupt."""

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if stop.is_asked:
            raise KeyboardInterrupt
        stop.is_asked = True
        # Past the buffers: the handler may have come in the middle of a write to them.
        os.write(2, f"\n{STOPPING}\n".encode())

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Report:
    """What is said while slots move: a line for each batch and, on a terminal, a bar below them.

    The bar grows with the estimated time of what has moved, so that a batch of empty slots does not look
    like one of full ones.
    """

    def __init__(self, planned: Plan, rate: int) -> None:
        self.moved: list[BatchMoved] = []
        self._rate = rate
        console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.fields[moved_slots]} of {task.fields[all_slots]} slots"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._console = console
        self._slots = 0
        self._bytes = 0
        self._jobs = 0
        self._begun = time.monotonic()
        self._task = self._progress.add_task(
            "", total=planned.seconds(rate), moved_slots=0, all_slots=planned.slots, speed=""
        )

    def __enter__(self) -> _Report:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, event: Event) -> None:
        match event:
            case ShardsSet():
                self._console.print(f"{counted(event.shards, 'shard')} now")
            case Postponed():
                self._console.print(f"{event.what}: {event.reason}; again in {event.pause_s:g} s")
            case BatchMoved():
                self._console.print(moved_line(event))
                self._count(event)

    def _count(self, event: BatchMoved) -> None:
        self.moved.append(event)
        self._slots += len(event.batch.slots)
        self._jobs += event.batch.jobs
        self._bytes += event.bytes
        self._progress.update(
            self._task,
            advance=batch_seconds(event.batch, self._rate),
            moved_slots=self._slots,
            speed=speed(self._jobs, self._bytes, time.monotonic() - self._begun),
        )


# -- looking ----------------------------------------------------------------------------------------


@app.command()
def status(config: ConfigOption = None, db_path: DbPathOption = None, as_json: JsonOption = False) -> None:
    """Show what the shards own, how even that is, and whether slots are being moved."""
    place = _Place.found(config, db_path)
    moving = rebalancing_process(place.directory)
    with place.server(alone=False) as server:
        try:
            answer, unknown = server.slot_map(True), None
        except AdminUnavailableError as error:
            answer, unknown = server.slot_map(False), str(error)
    slot_map = known_map(answer)
    found = shares(slot_map.owners, slot_map.shards, known_loads(answer))
    warning = place.warning(slot_map.shards)
    if as_json:
        print_json(
            {
                "epoch": slot_map.epoch,
                "shards": [asdict(share) for share in found],
                "fullest_to_mean": evenness(found),
                "moving_process": moving,
                "loads_unknown": unknown,
                "warning": warning,
            }
        )
        return
    running = "nothing is being moved" if moving is None else f"process {moving or 'unknown'} is at it"
    print(f"{counted(slot_map.shards, 'shard')}, epoch {slot_map.epoch}, {running}")
    if unknown is not None:
        print_table(("shard", "slots"), [(share.shard, share.slots) for share in found])
        _say(f"jobs and bytes are not known: {unknown}")
    else:
        print_table(
            ("shard", "slots", "jobs", "MB"),
            [(share.shard, share.slots, share.jobs, megabytes(share.bytes)) for share in found],
        )
        even = ", ".join(f"{what} {ratio:.2f}" for what, ratio in evenness(found).items() if ratio is not None)
        print(f"the fullest shard against the mean: {even}")
    _warn(warning)


@app.command()
def verify(config: ConfigOption = None, db_path: DbPathOption = None, as_json: JsonOption = False) -> int:
    """Look through all that is stored: whether it is in the shard that owns it, and adds up. Status 1 if not."""
    place = _Place.found(config, db_path)
    with place.server(alone=True) as server:
        shards = known_map(server.slot_map(False)).shards
        looked = [_looked_through(server, shard) for shard in range(shards)]
    findings = sum(len(one.findings) for one in looked)
    if as_json:
        print_json({"findings": findings, "shards": [asdict(one) for one in looked]})
        return 1 if findings else 0
    for one in looked:
        for finding in one.findings:
            print(f"shard {one.shard}: {printable(finding)}")
    records = counted(sum(one.records for one in looked), "record")
    result = counted(findings, "finding") if findings else "all is where it belongs and adds up"
    print(f"{counted(shards, 'shard')}, {records}: {result}")
    return 1 if findings else 0


@dataclass
class _Looked:
    """What a shard was found to hold, so far."""

    shard: int
    records: int
    findings: list[str]


def _looked_through(server: AdminClient, shard: int) -> _Looked:
    found = _Looked(shard, 0, [])
    console = Console(stderr=True, markup=False, highlight=False)
    with console.status("") as line:  # on a terminal only
        for step in server.verify_shard(shard):
            found.records += step.records
            found.findings.extend(step.findings)
            line.update(f"shard {shard}: {counted(found.records, 'record')}")
    return found


# -- what is printed --------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _warn(warning: str | None) -> None:
    if warning is not None:
        _say(f"warning: {warning}")


def _show_plan(planned: Plan, rate: int, warning: str | None, as_json: bool) -> None:
    if as_json:
        print_json({**plain_plan(planned, rate), "warning": warning})
        return
    print(plan_line(planned, rate))
    print_table(PLAN_TITLES, plan_rows(planned))
    _warn(warning)
