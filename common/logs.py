"""Logging: one event per line on stderr, with the process it comes from.

`text` is for people (colours on a terminal only), `json` one object per line. What libraries log
through the standard library takes the same form.
"""

from __future__ import annotations

import io
import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")


def configure(level: str, format: str, process: str) -> None:
    """Set up logging for this process; `process` is what it is called: "supervisor", "router-0", "shard-1".

    Raises ValueError for a level or format that is none of LEVELS and FORMATS.
    """
    if level not in LEVELS or format not in FORMATS:
        raise ValueError(f"level {level!r} is none of {LEVELS}, or format {format!r} none of {FORMATS}")
    number = logging.getLevelNamesMapping()[level.upper()]
    # Bound by a processor and not as a context variable: those are not seen in other threads.
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _process_binder(process),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    ending = _ending(format)
    structlog.configure(
        processors=[*shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # One write per line: several processes share this stderr.
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Unbreakable(sys.stderr))),
        cache_logger_on_first_use=False,  # tests and a child's start configure again
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))  # the debug lines of libraries say nothing about seppd


class _Unbreakable(io.TextIOBase):
    """Where log lines go. One that cannot be written, because its reader has gone or its disk is full, is lost:
    what the line tells of has to go on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _process_binder(process: str) -> structlog.typing.Processor:
    def bind(
        logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event.setdefault("process", process)
        return event

    return bind


def _ending(format: str) -> list[structlog.typing.Processor]:
    """The processors that make the line. Tracebacks never show local variables: they may hold keys and payloads."""
    if format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    colours = sys.stderr.isatty()
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=colours, sort_keys=False, exception_formatter=plain)]
