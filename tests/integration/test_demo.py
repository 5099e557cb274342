"""The demonstration as a user runs it, on a small folder; and that its checks would notice."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sepp
from rich.progress import Progress

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
            process.terminate()  # it ends its server and its workers
        process.communicate(timeout=WAIT_S)


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


# -- the checks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """scripts/demo.py, imported."""
    spec = importlib.util.spec_from_file_location("demo_under_test", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def finished(module: ModuleType, tmp_path: Path) -> Any:
    """A run with two files, jobs "a" and "b", in which nothing went wrong."""
    files = [Path("one"), Path("two")]
    for file in files:
        (tmp_path / file).write_text(f"{file}\n")
    run = module.Run(module.Options(tmp_path, 1, 1, 1), files, [0] * 4096, Progress(disable=True))
    for index, job_id in enumerate("ab"):
        run.accepted(index, sepp.EnqueueAck(job_id, False))
        run.delivered(delivery_of(module, job_id, module.digest_of(tmp_path / files[index])))
    return run


def delivery_of(module: ModuleType, job_id: str, digest: Any, attempt: int = 1) -> Any:
    return module.Delivery(job_id, attempt, digest.sha256, digest.lines, True, 1)


def test_a_run_without_faults_has_none(module: ModuleType, finished: Any) -> None:
    assert module.count_faults(finished) + module.result_faults(finished) == []


def test_a_job_that_was_acknowledged_twice_is_a_fault(module: ModuleType, finished: Any, tmp_path: Path) -> None:
    finished.delivered(delivery_of(module, "b", module.digest_of(tmp_path / "two"), attempt=2))
    assert module.count_faults(finished) == ["job b was acknowledged 2 times"]


def test_a_job_that_was_never_acknowledged_is_a_fault(module: ModuleType, finished: Any) -> None:
    del finished.endings["a"]
    assert module.count_faults(finished) == ["job a was acknowledged 0 times"]


def test_a_second_job_for_a_file_is_a_fault(module: ModuleType, finished: Any, tmp_path: Path) -> None:
    finished.accepted(1, sepp.EnqueueAck("c", False))
    finished.delivered(delivery_of(module, "c", module.digest_of(tmp_path / "two")))
    assert module.count_faults(finished) == ["2 files have 3 jobs"]


def test_a_job_that_nobody_enqueued_is_a_fault(module: ModuleType, finished: Any, tmp_path: Path) -> None:
    finished.delivered(delivery_of(module, "c", module.digest_of(tmp_path / "two")))
    assert module.count_faults(finished) == ["job c was delivered, and nobody enqueued it"]


def test_a_wrong_result_is_a_fault(module: ModuleType, finished: Any, tmp_path: Path) -> None:
    (tmp_path / "two").write_text("changed\n")
    assert module.result_faults(finished) == ["the result for two differs from the direct computation"]


LOST = sepp.TransportError("the answer was lost")
GONE = sepp.JobNotFoundError()


@pytest.mark.parametrize(
    "answers, leased_until, expected",
    [
        pytest.param([None], math.inf, (True, 1), id="OK"),
        pytest.param([LOST, None], math.inf, (True, 2), id="OK when asked again"),
        pytest.param([LOST, GONE], math.inf, (True, 2), id="gone when asked again within the lease"),
        pytest.param([LOST, GONE], 0.0, (False, 2), id="gone when asked again after the lease"),
        pytest.param([GONE], math.inf, (False, 1), id="gone at the first time"),
        pytest.param([sepp.OverloadedError(), GONE], math.inf, (False, 2), id="gone after a refusal"),
        pytest.param([LOST, sepp.AttemptMismatchError()], math.inf, (False, 2), id="given to another"),
    ],
)
def test_an_ack_counts_only_when_it_must_have_taken_effect(
    module: ModuleType, answers: list[Exception | None], leased_until: float, expected: tuple[bool, int]
) -> None:
    left = list(answers)

    async def ack(ctx: object) -> None:
        answer = left.pop(0)
        if answer is not None:
            raise answer

    acknowledging = module._acknowledge(SimpleNamespace(ack=ack), object(), leased_until)
    assert asyncio.run(acknowledging) == expected
    assert left == []
