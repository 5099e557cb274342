"""Runs seeds of the simulator: a whole server with clients and faults in one process, see docs/reliability.md.

    .venv/bin/python scripts/simulate.py --seeds 2000             seeds 0 to 1 999
    .venv/bin/python scripts/simulate.py --seeds 500 --seed 7000  seeds 7 000 to 7 499
    .venv/bin/python scripts/simulate.py --seed 7                 one seed, with its last events
    .venv/bin/python scripts/simulate.py --seed 7 --trace         one seed, with all of them
    .venv/bin/python scripts/simulate.py --seeds 9 --style moves   9 seeds, all about slots that move

Exit status 1 when something was found; it says which seed, and how to see it again.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from router.front import METHODS  # noqa: E402
from tests.simulation.shape import Style  # noqa: E402
from tests.simulation.simulation import Tally, explanation, run, run_many  # noqa: E402

# Seeds that one process is given at a time: about two seconds of work.
CHUNK = 64
# Findings that are listed; the first one is explained.
LISTED_MAX = 20
# What the counted things are, by how their names begin; the rest are operations and what became of them.
GROUPS = {"crash: ": "crashes", "fault: ": "faults", "operator: ": "operators"}
RESTARTS = ("orderly stop", "configuration reloaded")

console = Console(stderr=True, highlight=False)


def main(
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds to run.")] = None,
    seed: Annotated[int, typer.Option(help="The first seed; without --seeds the only one, shown event by event.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run; unset: what the seed draws.")] = None,
    style: Annotated[Style | None, typer.Option(help="What the runs are about; unset: what the seed draws.")] = None,
    trace: Annotated[bool, typer.Option(help="Show all events of one seed, not the last ones only.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="How many processes run at once.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as one JSON object on stdout.")] = False,
) -> None:
    """Run seeds of the simulator."""
    if seeds is None:
        outcome = run(seed, steps, style=style)
        print(explanation(seed, steps, None if trace else 60, style))
        raise typer.Exit(outcome.finding is not None)
    began = time.monotonic()
    tally = _run_all(range(seed, seed + seeds), steps, style, jobs, quiet=as_json)
    seconds = time.monotonic() - began
    if as_json:
        print(json.dumps(_summary(tally, seconds)))
    else:
        _show(tally, seconds)
    if tally.findings:
        first, _ = min(tally.findings)
        print(explanation(first, steps, style=style), file=sys.stderr)
    raise typer.Exit(bool(tally.findings))


def _run_all(seeds: range, steps: int | None, style: Style | None, jobs: int, quiet: bool) -> Tally:
    seen: Counter[str] = Counter()
    findings: list[tuple[int, str]] = []
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, disable=quiet) as progress:
        bar = progress.add_task("", total=len(seeds))
        for tally in _tallies(seeds, steps, style, jobs):
            seen.update(tally.seen)
            findings += tally.findings
            progress.update(bar, advance=tally.seeds, description=f"{len(findings)} findings" if findings else "")
    return Tally(len(seeds), seen, sorted(findings))


def _tallies(seeds: range, steps: int | None, style: Style | None, jobs: int) -> Iterator[Tally]:
    chunks = [seeds[place : place + CHUNK] for place in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        yield from (run_many(chunk, steps, style) for chunk in chunks)
        return
    # Spawned, not forked: a process begins like one that was started by hand.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_many, chunk, steps, style) for chunk in chunks]):
            yield done.result()


def _summary(tally: Tally, seconds: float) -> dict[str, object]:
    groups: dict[str, dict[str, int]] = {"calls": {}, "operators": {}, "crashes": {}, "faults": {}, "other": {}}
    groups["calls"] = {rpc: tally.seen[rpc] for rpc in METHODS}
    groups["restarts"] = {what: tally.seen[what] for what in RESTARTS}
    for name, count in sorted(tally.seen.items()):
        prefix = next((prefix for prefix in GROUPS if name.startswith(prefix)), None)
        if prefix is not None:
            groups[GROUPS[prefix]][name.removeprefix(prefix)] = count
        elif name not in METHODS and name not in RESTARTS:
            groups["other"][name] = count
    return {
        "seeds": tally.seeds,
        "seconds": round(seconds, 1),
        **groups,
        "findings": [{"seed": seed, "what": what} for seed, what in tally.findings],
    }


def _show(tally: Tally, seconds: float) -> None:
    table = Table(title=f"{tally.seeds} seeds in {seconds:.0f} s", title_justify="left", show_header=False)
    summary = _summary(tally, seconds)
    for group in ("calls", "operators", "crashes", "restarts", "faults", "other"):
        counts = summary[group]
        assert isinstance(counts, dict)
        for place, (name, count) in enumerate(counts.items()):
            table.add_row("" if place else group, name, f"{count:,}", end_section=place == len(counts) - 1)
    Console(highlight=False).print(table)
    if not tally.findings:
        print("nothing was found")
    for seed, what in tally.findings[:LISTED_MAX]:
        print(f"seed {seed}: {what}")
    if len(tally.findings) > LISTED_MAX:
        print(f"and {len(tally.findings) - LISTED_MAX} more")


if __name__ == "__main__":
    typer.run(main)
