"""The world that a run takes place in: time, chance, what is to happen, and the trace of what did.

Everything comes from one seed: the same seed gives the same run, event by event, in any process.
Time is counted in whole microseconds, so that two events seldom fall on one instant; the cores are
shown milliseconds, as in real life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeVar

from router.core import Moment
from shard.state import Instant

WALL_START_MS = 1_700_000_000_000
MONO_START_MS = 5_000_000
# Events that lead from one to the next without an end: far more than any run has.
EVENTS_MAX = 100_000

_Item = TypeVar("_Item")
_Event = Callable[..., None]


class Finding(AssertionError):
    """Something happened that may not. `invariant` is the short name of the rule that was broken."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


class World:
    """Time, chance and events of one run."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now_us = MONO_START_MS * 1000
        self.under_way = 0  # events other than timers
        self.events_done = 0
        # (microseconds since the start, who, what happened); None: nobody listens.
        self.trace: list[tuple[int, str, str]] | None = [] if tracing else None
        self._events: list[tuple[int, int, bool, _Event, tuple[Any, ...]]] = []
        self._count = 0

    # -- time -----------------------------------------------------------------------------------

    @property
    def mono_ms(self) -> int:
        return self.now_us // 1000

    @property
    def wall_ms(self) -> int:
        return self.now_us // 1000 + (WALL_START_MS - MONO_START_MS)

    def instant(self) -> Instant:
        """Now, for a shard."""
        mono_ms = self.now_us // 1000
        return Instant(mono_ms + (WALL_START_MS - MONO_START_MS), mono_ms)

    def moment(self) -> Moment:
        """Now, for a router."""
        mono_ms = self.now_us // 1000
        return Moment(mono_ms + (WALL_START_MS - MONO_START_MS), mono_ms)

    # -- chance ---------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def number(self, low: int, high: int) -> int:
        """One of low, low + 1, … high. Several times as fast as `randint`."""
        return low + int(self.random.random() * (high - low + 1))

    def pick(self, items: Sequence[_Item]) -> _Item:
        return items[int(self.random.random() * len(items))]

    # -- events ---------------------------------------------------------------------------------

    def at_us(self, at_us: int, event: _Event, *arguments: Any, timer: bool = False) -> None:
        """`timer`: what waits for it is at rest meanwhile."""
        self._count += 1
        if not timer:
            self.under_way += 1
        heappush(self._events, (max(at_us, self.now_us), self._count, timer, event, arguments))

    def at_ms(self, mono_ms: int, event: _Event, *arguments: Any) -> None:
        """A timer, for an instant of the cores' monotonic clock."""
        self.at_us(mono_ms * 1000, event, *arguments, timer=True)

    def later(self, longest_us: int, event: _Event, *arguments: Any) -> None:
        self.at_us(self.now_us + int(self.random.random() * longest_us), event, *arguments)

    def run(self, duration_us: int) -> None:
        """Everything that happens in this time."""
        until = self.now_us + duration_us
        events = self._events
        while events and events[0][0] <= until:
            self._next()
        self.now_us = until

    def settle(self) -> None:
        """Until nothing is under way."""
        for _ in range(EVENTS_MAX):
            if not self.under_way:
                return
            self._next()
        raise Finding("rest", "it does not come to rest")

    def next(self) -> None:
        """The next event, unless nothing is under way but timers."""
        if self.under_way:
            self._next()

    def _next(self) -> None:
        self.now_us, _, timer, event, arguments = heappop(self._events)
        if not timer:
            self.under_way -= 1
        self.events_done += 1
        event(*arguments)

    # -- trace ----------------------------------------------------------------------------------

    def note(self, who: str, what: str) -> None:
        """Only where somebody listens: callers look at `trace` before they put words together."""
        assert self.trace is not None
        self.trace.append((self.now_us - MONO_START_MS * 1000, who, what))

    def told(self) -> list[str]:
        """The trace, one line an event."""
        return [f"t=+{at_us / 1000:.1f}ms {who} {what}" for at_us, who, what in self.trace or ()]
