"""What is said when a configuration cannot be used: always one line, and never an API key."""

from __future__ import annotations

import json
import re

_SHOWN_CHARS = 80

# Names and list positions from the outside in, as pydantic gives them.
Location = tuple[int | str, ...]


class ConfigError(Exception):
    """The configuration cannot be used; the text is one line: the key, what it holds, what it may hold."""


class Fault(ValueError):
    """A rule over several keys is broken."""

    def __init__(self, key: str, holds: str, allowed: str) -> None:
        super().__init__(f"{key} is {holds}; allowed: {allowed}")
        self.key = key


def one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def shown(value: object) -> str:
    """A value as it would be written, on one line, cut when it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if not text.isprintable():
        text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def dotted(location: Location) -> str:
    key = ""
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            written = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else shown(part)
            key += f".{written}" if key else written
    return key
