"""Python's collector of cyclic garbage, for processes that leave it next to nothing."""

from __future__ import annotations

import gc

# New objects between two collections of the youngest generation, and collections between two of the next ones.
# Python's own are 700, 10 and 10.
THRESHOLDS = (50_000, 20, 100)


def settle() -> None:
    """Call when everything is loaded and before work begins.

    What is there by then is never looked at again, and what comes is looked at seldom. What a call or a turn
    leaves behind is freed by its reference counts alone; but a shard keeps a few objects for each lease and timer,
    and by default they would all be looked through whenever a quarter more have come: with 150 000 leases a fifth
    of the time of a reserve.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()
