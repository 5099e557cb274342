"""The example file: every key with its default and what it does."""

from __future__ import annotations

import json
from pathlib import Path

from common.config_keys import allowed, extra, fields, section_models
from common.config_sections import OVERRIDABLE


def example() -> str:
    """A configuration file with every key at its default, commented out, and a line on each.

    A key that is unset by default is shown as an example. Uncommenting changes nothing else.
    """
    lines = [
        "# Configuration of seppd.",
        "# Read from ./sepp.toml, from the file in SEPP_CONFIG, or from --config PATH. Every key can also be set",
        "# from the environment, which wins: SEPP_SERVER__LISTEN_ADDR for listen_addr in [server].",
        "# Keys marked (live) change in a running server when this file is saved; the others need a restart.",
        "# Durations are in milliseconds, sizes in bytes.",
    ]
    section_before = ""
    for section, name, field in fields():
        if section != section_before:
            about = (section_models()[section].__doc__ or "").strip()
            lines += ["", f"# {about}", f"[{section}]"]
            section_before = section
        live = " (live)" if extra(field, "live") else ""
        lines += ["", f"# {field.description}{live}", f"# Allowed: {allowed(field)}."]
        if field.default is None:
            lines.append(f"# Example: {name} = {_toml(extra(field, 'example'))}")
        else:
            lines.append(f"#{name} = {_toml(field.default)}")
    lines += [
        "",
        "# Declared queues (live). Each may have values of its own for these keys:",
        *(f"#   {name}" for name in OVERRIDABLE),
        "# and, only here, allowed_job_types: the job types that the queue takes, unset: any.",
        "# Example: [[queues]]",
        '# Example: name = "mail"',
        "# Example: default_max_attempts = 5",
        '# Example: allowed_job_types = ["welcome", "receipt"]',
    ]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, Path):
        # Path drops a leading "./", which reads better with it.
        return json.dumps(str(value) if value.is_absolute() else f"./{value}")
    return json.dumps(value)
