"""What the commands of `rebalance_cli` print: results as text for people and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from common.admin_cli import Plain, counted
from common.rebalance import BatchMoved, Plan, Share, Summary
from common.rebalance_plan import Batch

MEGABYTE = 1_000_000
_NONE = Share(0, 0, 0, 0)


# -- numbers ----------------------------------------------------------------------------------------


def megabytes(size: int) -> str:
    return f"{size / MEGABYTE:.1f}"


def speed(jobs: int, size: int, seconds: float) -> str:
    seconds = max(seconds, 1e-3)
    return f"{size / MEGABYTE / seconds:.1f} MB/s, {jobs / seconds:.0f} jobs/s"


def duration(seconds: float) -> str:
    """In the units that matter: 3 s, 4 min, 2 h 5 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def evenness(found: Sequence[Share]) -> dict[str, float | None]:
    """By what is counted: the most that a shard has over what it would have if all had the same; None of nothing."""
    measures: dict[str, Callable[[Share], int]] = {
        "slots": lambda share: share.slots,
        "jobs": lambda share: share.jobs,
        "bytes": lambda share: share.bytes,
    }
    even: dict[str, float | None] = {}
    for what, measure in measures.items():
        total = sum(map(measure, found))
        even[what] = round(max(map(measure, found)) * len(found) / total, 4) if total else None
    return even


# -- text -------------------------------------------------------------------------------------------


def plan_line(planned: Plan, bytes_per_second: int) -> str:
    shards = planned.slot_map.shards
    if not planned.changes_anything:
        return f"nothing moves: {counted(shards, 'shard')}, as even as can be"
    change = counted(shards, "shard") if planned.shards == shards else f"from {shards} to {planned.shards} shards"
    moves = f"{counted(planned.slots, 'slot')} {'moves' if planned.slots == 1 else 'move'}"
    held = f"{counted(planned.jobs, 'job')} and about {megabytes(planned.bytes)} MB"
    batches = "1 batch" if len(planned.batches) == 1 else f"{len(planned.batches)} batches"
    return f"{change}: {moves}, with {held}, in {batches}; about {duration(planned.seconds(bytes_per_second))}"


def plan_rows(planned: Plan) -> list[tuple[object, ...]]:
    """For each shard what it owns and what it is to own: slots, jobs, MB."""
    before = {share.shard: share for share in planned.before()}
    after = {share.shard: share for share in planned.after()}
    rows: list[tuple[object, ...]] = []
    for shard in sorted(before.keys() | after.keys()):
        now, then = before.get(shard, _NONE), after.get(shard, _NONE)
        rows.append((shard, now.slots, then.slots, now.jobs, then.jobs, megabytes(now.bytes), megabytes(then.bytes)))
    return rows


PLAN_TITLES = ("shard", "slots", "then", "jobs", "then", "MB", "then")


def moved_line(moved: BatchMoved) -> str:
    batch = moved.batch
    what = f"{counted(len(batch.slots), 'slot')}, {counted(batch.jobs, 'job')}, {megabytes(moved.bytes)} MB"
    return f"from shard {batch.source} to {batch.target}: {what}, held for {moved.hold_ms} ms"


def summary_line(summary: Summary) -> str:
    moved = f"{counted(summary.slots, 'slot')} moved, with {counted(summary.jobs, 'job')}"
    rate = speed(summary.jobs, summary.bytes, summary.seconds)
    copied = f"{megabytes(summary.bytes)} MB in {summary.seconds:.1f} s ({rate})"
    held = f"operations were held for {summary.hold_ms} ms at most"
    state = f"{counted(summary.shards, 'shard')}, epoch {summary.epoch}"
    stopped = "" if summary.is_complete else "; stopped before the end: the same command goes on"
    return f"{moved}, {copied}; {held}; {state}{stopped}"


# -- plain values -----------------------------------------------------------------------------------


def plain_plan(planned: Plan, bytes_per_second: int) -> Plain:
    return {
        "epoch": planned.slot_map.epoch,
        "shards": planned.slot_map.shards,
        "shards_after": planned.shards,
        "slots": planned.slots,
        "jobs": planned.jobs,
        "bytes": planned.bytes,
        "seconds": round(planned.seconds(bytes_per_second), 3),
        "batches": [_plain_batch(batch) for batch in planned.batches],
        "before": [asdict(share) for share in planned.before()],
        "after": [asdict(share) for share in planned.after()],
    }


def plain_summary(summary: Summary, moved: Sequence[BatchMoved]) -> Plain:
    return {
        "complete": summary.is_complete,
        "epoch": summary.epoch,
        "shards": summary.shards,
        "slots": summary.slots,
        "jobs": summary.jobs,
        "records": summary.records,
        "bytes": summary.bytes,
        "hold_ms": summary.hold_ms,
        "seconds": round(summary.seconds, 3),
        "batches": [
            {**_plain_batch(one.batch), "bytes": one.bytes, "records": one.records, "hold_ms": one.hold_ms}
            for one in moved
        ],
    }


def _plain_batch(batch: Batch) -> Plain:
    return {
        "from": batch.source,
        "to": batch.target,
        "slots": batch.slots,
        "jobs": batch.jobs,
        "bytes": batch.bytes,
    }
