"""What a log line holds."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator

import pytest
import structlog

from common import logs


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_a_json_line_is_one_object_with_process_level_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", "shard-1")
    structlog.get_logger().info("shard opened", jobs=3)
    line = json.loads(capsys.readouterr().err)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "shard opened", "jobs": 3, "process": "shard-1", "level": "info"}


def test_a_text_line_has_no_colours_when_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "text", "router-0")
    structlog.get_logger().warning("slow", ms=7)
    line = capsys.readouterr().err
    assert "\x1b" not in line and line.count("\n") == 1
    assert "slow" in line and "ms=7" in line and "process=router-0" in line


def test_lines_below_the_level_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", "json", "router-0")
    structlog.get_logger().info("left out")
    logging.getLogger("library").info("left out")
    assert capsys.readouterr().err == ""


def test_the_process_is_named_in_lines_of_other_threads(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", "router-0")
    thread = threading.Thread(target=lambda: structlog.get_logger().info("from a thread"))
    thread.start()
    thread.join()
    assert json.loads(capsys.readouterr().err)["process"] == "router-0"


def test_what_libraries_log_takes_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json", "router-0")
    logging.getLogger("library").warning("odd %s", "thing")
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["logger"], line["process"], line["level"]) == (
        "odd thing",
        "library",
        "router-0",
        "warning",
    )


@pytest.mark.parametrize("format", logs.FORMATS)
def test_a_traceback_shows_no_local_variables(capsys: pytest.CaptureFixture[str], format: str) -> None:
    logs.configure("info", format, "router-0")

    def fail(payload: str) -> None:
        raise ValueError("no")

    try:
        fail("".join(["top", "-", "secret"]))
    except ValueError:
        structlog.get_logger().exception("failed")
    text = capsys.readouterr().err
    assert "ValueError: no" in text and "top-secret" not in text


@pytest.mark.parametrize(("level", "format"), [("loud", "text"), ("info", "xml")])
def test_an_unknown_level_or_format_is_refused(level: str, format: str) -> None:
    with pytest.raises(ValueError, match="is none of"):
        logs.configure(level, format, "router-0")


def test_a_line_that_cannot_be_written_is_lost_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # who read the log has gone
    with os.fdopen(writing, "w", buffering=1) as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        logs.configure("info", "json", "supervisor")
        structlog.get_logger().info("stopping")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # or closing it would fail on what is buffered
