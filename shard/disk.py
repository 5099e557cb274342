"""The room that is left on the shard's file system.

A database whose disk is full cannot be written at all, not even to finish jobs and so to make room,
and may not even open again. So jobs are refused while there still is some room: acks and the
database's own work go on in what is kept free.
"""

from __future__ import annotations

import os
from pathlib import Path

# Kept free, in bytes: twice what a shard's log and what is made of it at the next start may take.
RESERVE_BYTES = 128 * 1024 * 1024
# On a small file system not more than this part of it.
RESERVE_PART = 1 / 20
# Seconds between two looks: at 1 GB/s of jobs less than the reserve can fill in between.
LOOK_INTERVAL_S = 0.1


def shortage(directory: Path) -> str | None:
    """What to tell clients when less than the reserve is free, None when there is room."""
    found = os.statvfs(directory)
    free_bytes = found.f_bavail * found.f_frsize
    reserve_bytes = min(RESERVE_BYTES, int(found.f_blocks * found.f_frsize * RESERVE_PART))
    if free_bytes >= reserve_bytes:
        return None
    return f"the disk is almost full, {free_bytes >> 20} MiB are free: no job is taken until {reserve_bytes >> 20} are"
