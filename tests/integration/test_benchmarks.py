"""The benchmarks run and count what they have done; what they measure is nobody's pass or fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


def figures(tmp_path: Path, script: str, *arguments: str) -> Any:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH / script), *arguments, "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=tmp_path)
    return json.loads(file.read_text())


def test_the_comparison_measures_acks_and_round_trips_and_finds_every_job(tmp_path: Path) -> None:
    found = figures(tmp_path, "compare.py", "--rows", "ack,round trip,client's", "--rounds", "1", "--scale", "0.01")
    ours = {row["work"]: row["rounds"] for row in found["figures"] if row["contender"] == "seppd"}
    trips = ["round trip, 1 conn.", "round trip, 50 conn.", "round trip at half load, 50 conn."]
    assert list(ours) == ["ack 1, 50 conn.", *trips, "client's enqueue, 50 conn.", "client's round trip, 1 conn."]
    assert all(len(rounds) == 1 and rounds[0]["rate"] > 0 for rounds in ours.values())
    trip = ours["round trip, 1 conn."][0]
    assert 0 < trip["p50"] <= trip["p99"] <= trip["p999"]
    assert list(tmp_path.iterdir()) == [tmp_path / "figures.json"]


@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load, of Debian's nghttp2-client, is not installed")
def test_the_cost_of_more_processes_is_measured_and_every_job_found(tmp_path: Path) -> None:
    found = figures(tmp_path, "backlog.py", "--rows", "scale", "--calls", "600")
    assert len(found) == 2 and all(float(figure["found"]) > 0 for figure in found)
