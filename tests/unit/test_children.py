"""When a child that has died is started again."""

from __future__ import annotations

from common.children import Backoff


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
