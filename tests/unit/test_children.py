"""Children: when one that has died is started again, and what a kill leaves of one that ends."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from common.children import Backoff, Child


def test_delays_grow_from_none_to_five_seconds_while_a_child_never_gets_ready() -> None:
    backoff = Backoff()
    assert [backoff.delay_s(0.0) for _ in range(9)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_child_that_was_ready_for_ten_seconds_starts_again_at_once() -> None:
    backoff = Backoff()
    assert [backoff.delay_s(ready_s) for ready_s in (0.0, 9.9, 10.0, 0.0)] == [0.0, 0.1, 0.0, 0.1]


def test_the_delay_stays_finite_after_very_many_deaths() -> None:
    backoff = Backoff()
    for _ in range(5000):
        backoff.delay_s(0.0)
    assert backoff.delay_s(0.0) == 5.0


def test_a_kill_takes_no_exit_status_from_whoever_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has ended, its status is not yet collected, and at that moment it is killed."""
    waitpid = os.waitpid
    was_killed = threading.Event()

    def late_waitpid(pid: int, options: int) -> tuple[int, int]:
        if threading.current_thread() is not threading.main_thread():
            assert was_killed.wait(60)
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", late_waitpid)

    async def status() -> int:
        lock, other = os.pipe()
        child = await Child.start((sys.executable, "-c", "raise SystemExit(3)"), lock, 1)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        child.kill()
        was_killed.set()
        ended = await child.process.wait()
        child.link.close()
        os.close(lock)
        os.close(other)
        return ended

    assert asyncio.run(status()) == 3
