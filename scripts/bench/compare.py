"""This server and its peers at the same work, side by side in one run; see docs/benchmarks.md.

    .venv/bin/python scripts/bench/compare.py [--rows enqueue,ack] [--rounds 3] [--json FILE] [--chart STEM]

Rounds alternate, so that a noisy minute hits everybody. Only ratios within one run mean anything.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from contenders import BY_CLIENT, Contest, Work, contest, median, run_bare
from rich.console import Console
from rich.table import Table

# Calls of each row and round; `--scale` multiplies them.
WORKS = (
    Work("enqueue", 1, 1, 1_000),
    Work("enqueue", 8, 1, 4_000),
    Work("enqueue", 50, 1, 10_000),
    Work("enqueue", 256, 1, 10_000),
    Work("enqueue", 50, 10, 4_000),
    Work("enqueue", 50, 100, 800),
    Work("enqueue", 50, 256, 400),
    Work("reserve", 50, 1, 8_000),
    Work("reserve", 50, 256, 200),
    Work("ack", 50, 1, 8_000),
    Work("round trip", 1, 1, 500),
    Work("round trip", 50, 1, 4_000),
    Work("round trip at half load", 50, 1, 4_000),
    Work("atomic on one shard", 50, 10, 1_500),
    Work("atomic on two shards", 50, 10, 1_500),
    Work("client's enqueue", 50, 1, 2_000),
    Work("client's round trip", 1, 1, 300),
)
# Fewer calls than connections would measure nothing.
CALLS_MIN = 2

Figures = dict[tuple[str, str], list[dict[str, float]]]  # by contender and row, one for each round


class Ratio(NamedTuple):
    """One figure to reach: a quotient of medians."""

    what: str
    above: tuple[str, str, str]  # contender, row, figure
    below: tuple[str, str, str]
    must: str
    aim: str


OURS, BARE, REFERENCE, BEANSTALKD, TWO = (
    "seppd",
    "bare grpc.aio",
    "sepp (reference)",
    "beanstalkd -f 0",
    "seppd, two shards",
)
RATIOS = (
    Ratio(
        "enqueue against the bare handler",
        (OURS, "enqueue 1, 50 conn.", "rate"),
        (BARE, "enqueue 1, 50 conn.", "rate"),
        "≥ 1.3",
        "2",
    ),
    Ratio(
        "enqueue against the reference, 50",
        (OURS, "enqueue 1, 50 conn.", "rate"),
        (REFERENCE, "enqueue 1, 50 conn.", "rate"),
        "≥ 0.45",
        "0.8",
    ),
    Ratio(
        "enqueue against the reference, 256",
        (OURS, "enqueue 1, 256 conn.", "rate"),
        (REFERENCE, "enqueue 1, 256 conn.", "rate"),
        "≥ 0.45",
        "0.8",
    ),
    Ratio(
        "reserve against the bare handler",
        (OURS, "reserve 1, 50 conn.", "rate"),
        (BARE, "enqueue 1, 50 conn.", "rate"),
        "≥ 1.2",
        "2",
    ),
    Ratio(
        "ack against the bare handler",
        (OURS, "ack 1, 50 conn.", "rate"),
        (BARE, "enqueue 1, 50 conn.", "rate"),
        "≥ 1.2",
        "2",
    ),
    Ratio(
        "batches of 100 against puts of beanstalkd",
        (OURS, "enqueue 100, 50 conn.", "rate"),
        (BEANSTALKD, "enqueue 1, 50 conn.", "rate"),
        "≥ 10",
        "20",
    ),
    Ratio(
        "batches of 256 against the reference",
        (OURS, "enqueue 256, 50 conn.", "rate"),
        (REFERENCE, "enqueue 256, 50 conn.", "rate"),
        "≥ 1.5",
        "3",
    ),
    Ratio(
        "reserve of 256 against batches of 256",
        (OURS, "reserve 256, 50 conn.", "rate"),
        (OURS, "enqueue 256, 50 conn.", "rate"),
        "≥ 1",
        "2",
    ),
    Ratio(
        "idle round trip against the reference",
        (OURS, "round trip, 1 conn.", "p50"),
        (REFERENCE, "round trip, 1 conn.", "p50"),
        "≤ 1.5",
        "1",
    ),
    Ratio(
        "atomic on one shard against two",
        (TWO, "atomic on one shard 10, 50 conn.", "rate"),
        (TWO, "atomic on two shards 10, 50 conn.", "rate"),
        "≤ 2.5",
        "",
    ),
)


def main(
    rows: Annotated[str, typer.Option(help="Kinds of rows, with commas between; unset: all.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 3,
    scale: Annotated[float, typer.Option(help="Multiplies the number of calls.")] = 1.0,
    routers: Annotated[int, typer.Option(help="Router processes of this server.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a chart to this name with .png and .svg.")] = None,
    bare: Annotated[bool, typer.Option(help="Serve the bare handler instead (started by the benchmark).")] = False,
) -> None:
    """Measure this server and its peers."""
    if bare:
        run_bare()
        return
    wanted = [kind.strip() for kind in rows.split(",") if kind.strip()]
    works = [_scaled(work, scale) for work in WORKS if not wanted or any(work.kind.startswith(kind) for kind in wanted)]
    if not works:
        raise typer.BadParameter(f"no row is called {rows!r}; there are {', '.join({work.kind for work in WORKS})}")
    console = Console(width=130)
    with contest(routers, {work.kind for work in works}) as found:
        for text in found.missing:
            console.print(text)
        figures = _measured(found, works, rounds)
        memory = found.ours.memory()
        faults = [fault for contender in found.contenders if (fault := contender.check()) is not None]
    console.print(_machine())
    _show(console, found, works, figures, memory)
    ratios = _ratios(figures)
    _show_ratios(console, ratios)
    if json_file is not None:
        json_file.write_text(json.dumps(_as_json(figures, ratios, memory), indent=2) + "\n")
    if chart is not None:
        _draw(figures, works, chart)
    if faults:
        raise SystemExit("\n".join(faults))


def _scaled(work: Work, scale: float) -> Work:
    least = CALLS_MIN * work.connections
    calls = max(least, int(work.calls * scale))
    return work._replace(calls=calls // work.connections * work.connections)


def _measured(found: Contest, works: list[Work], rounds: int) -> Figures:
    figures: Figures = {}
    for _ in range(rounds):
        for work in works:
            for contender in found.contenders:
                if contender.can(work):
                    figures.setdefault((contender.name, str(work)), []).append(contender.measure(work))
    return figures


def _show(console: Console, found: Contest, works: list[Work], figures: Figures, memory: dict[str, float]) -> None:
    names = [contender.name for contender in found.contenders]
    _show_rates(console, "jobs/s, lowest to highest", names, [w for w in works if w.kind not in BY_CLIENT], figures)
    _show_rates(console, "by the usual client of each", names, [w for w in works if w.kind in BY_CLIENT], figures)
    for work in works:
        each = figures.get((OURS, str(work)))
        if each and "router cpu" in each[0]:
            used = ", ".join(f"{kind} {median(each, f'{kind} cpu'):.1f} µs" for kind in ("router", "shard"))
            console.print(f"processor time of seppd for a job, {work}: {used}")
    console.print("memory of seppd at the end: " + ", ".join(f"{kind} {size:.0f} MB" for kind, size in memory.items()))


def _show_rates(console: Console, title: str, names: list[str], works: list[Work], figures: Figures) -> None:
    """A table of those works, with those who can do some of them."""
    names = [name for name in names if any((name, str(work)) in figures for work in works)]
    table = Table("work", *names, title=title)
    for work in works:
        each = [figures.get((name, str(work))) for name in names]
        table.add_row(str(work), *("" if cell is None else _cell(cell) for cell in each))
    if works:
        console.print(table)


def _cell(each: list[dict[str, float]]) -> str:
    rates = [figures["rate"] for figures in each]
    text = f"{statistics.median(rates):,.0f}"
    if len(rates) > 1:
        text += f"\n{min(rates):,.0f} to {max(rates):,.0f}"
    if "p50" in each[0]:
        text += "\np50 {:.2f} p99 {:.2f} p999 {:.2f} ms".format(
            *(median(each, name) for name in ("p50", "p99", "p999"))
        )
    return text


def _ratios(figures: Figures) -> list[tuple[Ratio, float]]:
    found = []
    for ratio in RATIOS:
        above, below = figures.get(ratio.above[:2]), figures.get(ratio.below[:2])
        if above and below:
            found.append((ratio, median(above, ratio.above[2]) / median(below, ratio.below[2])))
    return found


def _show_ratios(console: Console, ratios: list[tuple[Ratio, float]]) -> None:
    table = Table("ratio", "found", "must", "aim")
    for ratio, value in ratios:
        table.add_row(ratio.what, f"{value:.2f}", ratio.must, ratio.aim)
    console.print(table)


def _machine() -> str:
    """What it ran on, and what a sync takes there."""
    model = "an unknown processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    took = []
    path = Path(f"seppd-bench-sync-{os.getpid()}")
    with path.open("wb", buffering=0) as file:
        for _ in range(50):
            file.write(b"x" * 400)
            began = time.monotonic()
            os.fsync(file.fileno())
            took.append(time.monotonic() - began)
    path.unlink()
    cores, system = len(os.sched_getaffinity(0)), f"{platform.system()} {platform.release()}"
    return f"{cores} cores of {model}, {system}, a sync takes {1000 * statistics.median(took):.2f} ms"


def _as_json(figures: Figures, ratios: list[tuple[Ratio, float]], memory: dict[str, float]) -> dict[str, Any]:
    return {
        "machine": _machine(),
        "figures": [{"contender": who, "work": work, "rounds": each} for (who, work), each in figures.items()],
        "ratios": [
            {"what": ratio.what, "found": value, "must": ratio.must, "aim": ratio.aim} for ratio, value in ratios
        ],
        "memory_mb": memory,
    }


def _draw(figures: Figures, works: list[Work], stem: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("a chart needs matplotlib: .venv/bin/pip install -e '.[bench]'") from None
    colours = {name: f"C{place}" for place, name in enumerate(dict.fromkeys(who for who, _ in figures))}
    rows = {str(work): [name for name in colours if (name, str(work)) in figures] for work in works}
    height = 0.8 / max(map(len, rows.values()))
    figure = Figure(figsize=(10, 0.5 + 0.7 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for number, (row, names) in enumerate(rows.items()):
        for place, name in enumerate(names):
            at = number + (place + 0.5 - len(names) / 2) * height
            axes.barh(at, median(figures[name, row], "rate"), height, color=colours[name])
    for name, colour in colours.items():
        axes.barh(0, 0, color=colour, label=name)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("jobs per second")
    axes.legend()
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_suffix(suffix))


if __name__ == "__main__":
    typer.run(main)
