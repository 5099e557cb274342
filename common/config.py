"""The configuration: the one way in which it is read, and what a reload takes over.

A value comes from the environment, else from the TOML file, else it is the default. Everything is checked
here, once, so that the rest of the server can trust what it holds. A `Config` never changes: a reload makes
a new one, and `with_live` takes over only what may change in a running server.

The keys themselves are in `config_sections`; what other modules use of it is given on from here.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from common.config_errors import ConfigError, dotted, one_line, shown
from common.config_example import example
from common.config_keys import all_keys, dotted_keys, explained, extra, fields, is_text, sections, unknown
from common.config_sections import (
    CLIENT_MESSAGE_BYTES,
    ApiKey,
    AuthSection,
    Config,
    LimitsSection,
    LoggingSection,
    MetricsSection,
    QueueLimits,
    QueueSection,
    ServerSection,
    StorageSection,
    parse_address,
)

__all__ = [
    "CLIENT_MESSAGE_BYTES",
    "DEFAULT_FILE",
    "ApiKey",
    "AuthSection",
    "Config",
    "ConfigError",
    "LimitsSection",
    "Loaded",
    "LoggingSection",
    "MetricsSection",
    "QueueLimits",
    "QueueSection",
    "ServerSection",
    "StorageSection",
    "changed_keys",
    "chosen_file",
    "example",
    "load",
    "load_again",
    "parse_address",
    "restart_keys",
    "with_live",
]

DEFAULT_FILE = "sepp.toml"
ENVIRONMENT_PREFIX = "SEPP_"
_FILE_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"
# What a job in an answer takes beside payload, names and custom map: ids, times, numbers, field headers.
_JOB_OVERHEAD_BYTES = 1024

# What the reference server reads and this one has no use for: whole sections, and keys of shared ones.
_FOREIGN_SECTIONS = frozenset({"admin", "tracing"})
_FOREIGN_KEYS = frozenset(
    {
        "metrics.enabled",
        "metrics.otlp_endpoint",
        "metrics.export_interval_ms",
        "storage.max_journaling_size_bytes",
        "storage.max_cached_files",
        "storage.worker_threads",
    }
)

Source = Literal["default", "file", "environment"]


# ---- reading ----


@dataclass(frozen=True)
class Loaded:
    """A configuration and where it came from."""

    config: Config
    # One line each, for the log.
    warnings: list[str]
    # The file that was read, None when there was none.
    path: Path | None
    # Dotted key to where its value came from; [[queues]] is one key, `queues`.
    sources: dict[str, Source]


def load(path: Path | None, environ: Mapping[str, str]) -> Loaded:
    """Read the file and the environment. Raises ConfigError.

    `path` None means the file that SEPP_CONFIG names, else ./sepp.toml; only the last may be missing.
    """
    file_path, settings = _read_file(chosen_file(path, environ), path is None and not environ.get(_FILE_VARIABLE))
    warnings = _drop_foreign(settings, str(file_path))
    origin = dict.fromkeys(dotted_keys(settings), f"in {file_path}")
    sources: dict[str, Source] = {key: "file" if key in origin else "default" for key in all_keys()}

    for variable, section, name, value in _from_environment(environ, warnings):
        key = _place(settings, section, name, value)
        origin[key] = f"set by {variable}"
        sources[key] = "environment"

    config = _validated(settings, origin)
    warnings += _level_warnings(settings, config)
    warnings += _size_warnings(config)
    warnings += _metrics_warnings(config)
    return Loaded(config, warnings, file_path, sources)


def load_again(before: Loaded, path: Path | None, environ: Mapping[str, str]) -> Loaded:
    """What `load` gives for a running server. Raises ConfigError also when there was a file and is none.

    Falling back to the defaults then would take the keys off a server because somebody moved a file; so
    would a pipe, which has nothing to give a second time.
    """
    chosen = chosen_file(path, environ)
    if chosen.exists() and not chosen.is_file():
        raise ConfigError(f"{chosen}: is no regular file and cannot be read again")
    loaded = load(path, environ)
    if loaded.path is None and before.path is not None:
        raise ConfigError(f"{before.path}: the configuration file is gone")
    return loaded


def chosen_file(path: Path | None, environ: Mapping[str, str]) -> Path:
    """The file that `load` reads, whether it is there or not."""
    return path if path is not None else Path(environ.get(_FILE_VARIABLE) or DEFAULT_FILE)


def _read_file(chosen: Path, may_be_missing: bool) -> tuple[Path | None, dict[str, Any]]:
    try:
        raw = chosen.read_bytes()
    except FileNotFoundError as error:
        if may_be_missing:
            return None, {}
        raise ConfigError(f"{chosen}: there is no such configuration file") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{chosen}: cannot be read: {one_line(error)}") from error
    try:
        # Some editors put a byte order mark in front.
        return chosen, tomllib.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{chosen}: not UTF-8 (at line {line})") from error
    except (ValueError, RecursionError) as error:
        last_line = raw.rstrip().count(b"\n") + 1
        text = one_line(error).replace("at end of document", f"at the end, line {last_line}")
        raise ConfigError(f"{chosen}: not TOML: {text}") from error


def _drop_foreign(settings: dict[str, Any], where: str) -> list[str]:
    """Take out what only the reference server reads; gives the warnings."""
    dropped = [section for section in settings if section in _FOREIGN_SECTIONS]
    for section in dropped:
        del settings[section]
    warnings = [f"[{section}] has no use here and is ignored ({where})" for section in dropped]
    for key in sorted(_FOREIGN_KEYS):
        section, name = key.split(".")
        table = settings.get(section)
        if isinstance(table, dict) and name in table:
            del table[name]
            warnings.append(f"{key} has no use here and is ignored ({where})")
    return warnings


def _from_environment(environ: Mapping[str, str], warnings: list[str]) -> Iterator[tuple[str, str, str | None, object]]:
    """Variable, section, key and value of every variable that is ours. [[queues]] as a whole has no key."""
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        raw = environ[variable]
        section, separator, name = variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if not separator:
            if section == "queues":
                yield variable, section, None, _parsed(raw)
        elif section in _FOREIGN_SECTIONS or f"{section}.{name}" in _FOREIGN_KEYS:
            warnings.append(f"{section}.{name} has no use here and is ignored ({variable})")
        else:
            field = sections().get(section, {}).get(name)
            if field is None:
                raise ConfigError(f"{unknown((section, name), raw)} (set by {variable})")
            yield variable, section, name, _parsed_text(raw) if is_text(field.annotation) else _parsed(raw)


def _place(settings: dict[str, Any], section: str, name: str | None, value: object) -> str:
    """Put a value of the environment over what the file says; gives its dotted key."""
    if name is None:
        settings[section] = value
        return section
    table = settings.setdefault(section, {})
    # A section that is no table is left for the check to refuse.
    if isinstance(table, dict):
        table[name] = value
    return f"{section}.{name}"


def _parsed(raw: str) -> object:
    """The TOML or JSON value that a variable holds; what is neither stays text, for the check to refuse."""
    try:
        found = tomllib.loads(f"value = {raw}")
        # A line break could have started a second key.
        if found.keys() == {"value"}:
            return found["value"]
    except (ValueError, RecursionError):
        pass
    try:
        value: object = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    return value


def _parsed_text(raw: str) -> str:
    """Text as it is; quotes around it are TOML's."""
    value = _parsed(raw) if raw.startswith(('"', "'")) else raw
    return value if isinstance(value, str) else raw


def _validated(settings: Mapping[str, Any], origin: Mapping[str, str]) -> Config:
    """`origin` says where a dotted key was written, for the error text. Raises ConfigError."""
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        key, text = explained(error.errors()[0])
        where = origin.get(key, origin.get(key.split("[")[0]))
        raise ConfigError(f"{text} ({where})" if where else text) from error


def _level_warnings(settings: Mapping[str, Any], config: Config) -> list[str]:
    written = settings.get("logging", {}).get("level", "")
    if "," not in written and "=" not in written:
        return []
    return [
        f"logging.level is {shown(written)}: filters by target have no use here, the level is {config.logging.level}"
    ]


def _size_warnings(config: Config) -> list[str]:
    """Sizes that a client with default options cannot receive."""
    limits = config.limits
    warnings = []
    if limits.max_response_bytes > CLIENT_MESSAGE_BYTES:
        warnings.append(
            f"limits.max_response_bytes is {limits.max_response_bytes}: gRPC clients take "
            f"{CLIENT_MESSAGE_BYTES} bytes unless their maximum receive message length is raised"
        )
    named = [("limits", config.effective(""))]
    named += [
        (f"queues[{place}]", config.effective(queue.name))
        for place, queue in enumerate(config.queues)
        if queue.max_payload_bytes is not None or queue.max_custom_total_bytes is not None
    ]
    for section, of_queue in named:
        beside = (
            of_queue.max_custom_total_bytes
            + limits.max_queue_name_bytes
            + limits.max_job_type_bytes
            + _JOB_OVERHEAD_BYTES
        )
        if of_queue.max_payload_bytes + beside > CLIENT_MESSAGE_BYTES:
            warnings.append(
                f"{section}.max_payload_bytes is {of_queue.max_payload_bytes}: with names and custom map a job may "
                f"exceed the {CLIENT_MESSAGE_BYTES} bytes that gRPC clients take unless their maximum receive "
                "message length is raised; they could never reserve it"
            )
    return warnings


def _metrics_warnings(config: Config) -> list[str]:
    if config.metrics.prometheus_enabled:
        return ["metrics.prometheus_enabled is true: this version serves no metrics yet"]
    return []


# ---- reloading ----


def changed_keys(old: Config, new: Config) -> list[str]:
    """Dotted keys that differ: names only, no values. A declared queue that came or went is one key."""
    keys = [
        f"{section}.{name}"
        for section, name, _ in fields()
        if getattr(getattr(old, section), name) != getattr(getattr(new, section), name)
    ]
    return [*keys, *_changed_queues(old, new)]


def _changed_queues(old: Config, new: Config) -> Iterator[str]:
    before = {queue.name: queue for queue in old.queues}
    after = {queue.name: queue for queue in new.queues}
    for name in before | after:
        one, other = before.get(name), after.get(name)
        if one is None or other is None:
            yield dotted(("queues", name))
        elif one != other:
            yield from (
                dotted(("queues", name, key))
                for key in QueueSection.model_fields
                if getattr(one, key) != getattr(other, key)
            )


def restart_keys(old: Config, new: Config) -> list[str]:
    """Dotted keys that differ and keep their old value until a restart."""
    fixed = {f"{section}.{name}" for section, name, field in fields() if not extra(field, "live")}
    return [key for key in changed_keys(old, new) if key in fixed]


def with_live(old: Config, new: Config) -> Config:
    """`old` with the live keys of `new`.

    Raises ConfigError when the two do not go together, for example a larger payload with a message size
    that needs a restart first.
    """
    merged = old.model_dump(mode="json")
    changed = new.model_dump(mode="json")
    for section, name, field in fields():
        if extra(field, "live"):
            merged[section][name] = changed[section][name]
    merged["queues"] = changed["queues"]
    return _validated(merged, {})
