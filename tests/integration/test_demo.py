"""The demonstration as a user runs it, on a small folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "scripts" / "demo.py"
WAIT_S = 120.0
FILES = 90
SHARDS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files in two levels, one of them empty and one with a name that is not UTF-8."""
    folder = tmp_path / "files"
    (folder / "below").mkdir(parents=True)
    for number in range(FILES - 2):
        (folder / ("below" if number % 2 else "") / f"file-{number}").write_text("a line\n" * number)
    (folder / "empty").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9")).write_bytes(b"\x00\xff\n")
    return folder


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    return scratch


@contextmanager
def demo(scratch: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A demonstration in its own process group, with `scratch` for temporary files."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, str(DEMO), *arguments],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def run(scratch: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    with demo(scratch, *arguments) as process:
        out, err = process.communicate(timeout=WAIT_S)
        return process.returncode, out, err


def counted(out: str, name: str) -> int:
    found = re.search(rf"{name}\W+(\d+)\b", out)
    assert found is not None, out
    return int(found[1])


def processes_below(scratch: Path) -> list[str]:
    """Command lines of all processes that have `scratch` for temporary files."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={scratch}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended, or it is not ours
            continue
    return found


def test_the_demo_acknowledges_every_job_once_though_a_shard_is_killed(folder: Path, scratch: Path) -> None:
    status, out, err = run(scratch, str(folder), "--workers", "2", "--shards", str(SHARDS))
    assert (status, err) == (0, ""), out
    assert counted(out, "jobs") == FILES
    assert counted(out, "acknowledged exactly once") == FILES
    assert counted(out, "deliveries") >= FILES
    rows = [[int(cell) for cell in re.findall(r"\d+", line)] for line in re.findall(r"│ [0-9] .*", out)]
    assert [row[0] for row in rows] == list(range(SHARDS))
    assert sum(row[2] for row in rows) == FILES
    assert [row[2] for row in rows] == [row[3] for row in rows]
    assert len(re.findall(r"shard-\d \(process \d+\) was killed after", out)) == 1


def test_the_demo_leaves_no_process_and_no_file(folder: Path, scratch: Path) -> None:
    status, out, err = run(scratch, str(folder), "--workers", "1", "--producers", "1", "--shards", "1")
    assert (status, err) == (0, ""), out
    assert processes_below(scratch) == []
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_and_no_file(folder: Path, scratch: Path, number: signal.Signals) -> None:
    with demo(scratch, str(folder), "--workers", "1", "--shards", "1") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "serves on" in line:
                break
        process.send_signal(number)
        _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (1, "demo: interrupted\n")
    assert processes_below(scratch) == []
    assert list(scratch.iterdir()) == []


def test_a_folder_that_is_missing_is_one_line_and_status_1(scratch: Path) -> None:
    missing = scratch / "missing"
    assert run(scratch, str(missing)) == (1, "", f"demo: {missing} is not a folder\n")


def test_a_folder_without_files_is_one_line_and_status_1(scratch: Path) -> None:
    assert run(scratch, str(scratch)) == (1, "", f"demo: {scratch} holds no file that can be read\n")


def test_an_option_out_of_bounds_is_one_line_and_status_1(scratch: Path) -> None:
    status, out, err = run(scratch, str(scratch), "--shards", "0")
    assert (status, out) == (1, "")
    assert err.startswith("demo: Invalid value for '--shards'") and err.count("\n") == 1
