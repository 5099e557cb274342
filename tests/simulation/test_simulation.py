"""Two thousand lives of a server, and that they are the same each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.front import METHODS
from tests.simulation.simulation import explanation, run, run_many

SEEDS_PER_TEST = 125
SEEDS_AT_A_TIME = 25
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "simulate.py"


def check_seeds(block: int) -> None:
    first = block * SEEDS_PER_TEST
    tally = run_many(range(first, first + SEEDS_PER_TEST))
    if tally.findings:
        pytest.fail(explanation(tally.findings[0][0]), pytrace=False)


# Four classes, so that four processes can share the seeds where tests are dealt out by class.


class TestFirstFour:
    @pytest.mark.parametrize("block", range(4))
    def test_nothing_is_lost_doubled_torn_or_held_for_ever(self, block: int) -> None:
        check_seeds(block)


class TestSecondFour:
    @pytest.mark.parametrize("block", range(4, 8))
    def test_nothing_is_lost_doubled_torn_or_held_for_ever(self, block: int) -> None:
        check_seeds(block)


class TestThirdFour:
    @pytest.mark.parametrize("block", range(8, 12))
    def test_nothing_is_lost_doubled_torn_or_held_for_ever(self, block: int) -> None:
        check_seeds(block)


class TestLastFour:
    @pytest.mark.parametrize("block", range(12, 16))
    def test_nothing_is_lost_doubled_torn_or_held_for_ever(self, block: int) -> None:
        check_seeds(block)


@pytest.mark.parametrize("seed", [3, 14, 159])
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    first, second = run(seed, tracing=True), run(seed, tracing=True)
    assert len(first.trace) > 50
    assert first.trace == second.trace


def test_what_is_watched_does_not_change_what_happens() -> None:
    assert run(3).seen == run(3, tracing=True).seen


def script(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_another_process_gives_the_same_trace() -> None:
    one, other = script("--seed", "14", "--trace", hash_seed="1"), script("--seed", "14", "--trace", hash_seed="2")
    assert one.stdout == other.stdout
    assert [line for line in one.stdout.splitlines() if line.startswith("t=+")] == run(14, tracing=True).trace


def test_the_script_says_what_it_has_run() -> None:
    done = script("--seeds", "3", "--seed", "7", "--json")
    assert done.returncode == 0
    assert '"seeds": 3' in done.stdout and '"findings": []' in done.stdout


def test_all_that_can_happen_does_happen() -> None:
    """Or the runs above would say little."""
    expected = {
        *METHODS,
        "operator: delete",
        "operator: delete dead",
        "operator: purge",
        "operator: requeue",
        "crash: shard killed",
        "crash: router killed",
        "crash: supervisor killed",
        "crash: everything killed",
        "crash: storage failed",
        "fault: sync failed",
        "fault: write failed",
        "fault: write stalled",
        "fault: disk almost full",
        "orderly stop",
        "configuration reloaded",
        "prepared",
        "decided",
        "released",
        "drained",
        "refused: queue_full",
        "refused: queue_closing",
        "refused: unknown_queue",
        # The situations of the field cases of `test_field_cases`.
        "lease given back",
        "lease expired",
        "lease ended with its router",
        "lease was over",
        "late ack",
        "claim cut by bytes",
        "duplicate",
        "a key stored after it failed",
        "a key twice in one batch",
        "enqueue waits for a decision",
        "job of a batch delivered",
    }
    missing = expected
    for first in range(0, 150, SEEDS_AT_A_TIME):
        seen = run_many(range(first, first + SEEDS_AT_A_TIME)).seen
        missing = {what for what in missing if not seen[what]}
        if not missing:
            return
    assert missing == set()
