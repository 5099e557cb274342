"""The limits of the code, made so small that a run of thirty steps meets them.

Windows of ready jobs, blocks of sequence numbers, records and timers of one step, operations of one
envelope, parts of a move, and how long a shard waits before it asks again: what is seldom reached in life is reached
in every run that is drawn so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from router import outbound, resharding
from shard import admin, dead_letters, machine, migration, ready, transactions, turns

_SMALL: tuple[tuple[ModuleType, str, int], ...] = (
    (ready, "WINDOW_JOBS", 2),
    (machine, "SEQUENCE_BLOCK", 3),
    (machine, "TICK_LIMIT", 2),
    (machine, "RETIRE_AFTER_MS", 15),
    (transactions, "ASK_AGAIN_MS", 20),
    (admin, "SCAN_RECORDS", 2),
    (admin, "QUEUES_PAGE", 1),
    (dead_letters, "_SCAN_RECORDS", 1),
    (outbound, "ENVELOPE_JOBS", 3),
    (turns, "TURN_CHANGES", 4),
    (resharding, "PART_BYTES", 150),
    (resharding, "LAST_ROWS", 1),
    (resharding, "HOLD_MAX_MS", 5),
    (migration, "SWEEP_ROWS", 40),
)


@contextmanager
def bounded(small: bool) -> Iterator[None]:
    """Within, the limits are small, if they are to be."""
    if not small:
        yield
        return
    before = [getattr(module, name) for module, name, _ in _SMALL]
    for module, name, value in _SMALL:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(_SMALL, before, strict=True):
            setattr(module, name, value)
