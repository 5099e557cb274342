"""The configuration: every key with its default and bounds, and the one way in which it is read.

A value comes from the environment, else from the TOML file, else it is the default. Everything is checked
here, once, so that the rest of the server can trust what it holds. A `Config` never changes: a reload makes
a new one, and `with_live` takes over only what may change in a running server.

A key is declared once, as a field of its section: type and bounds, default, what it does, and whether a
reload takes it over. Error texts, the example file and the list of live keys are all read from there.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

DEFAULT_FILE = "sepp.toml"
ENVIRONMENT_PREFIX = "SEPP_"
# What a gRPC client with default options takes in one message.
CLIENT_MESSAGE_BYTES = 4_194_304

# A thousand years. Now plus a few of these still fits a protobuf Timestamp (year 9999).
_DURATION_MAX_MS = 31_536_000_000_000
_UINT32_MAX = 2**32 - 1
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
# A shard owns at least one of the 4 096 slots.
_PROCESSES_MAX = 4096
# What a job in an answer takes beside payload, names and custom map: ids, times, numbers, field headers.
_JOB_OVERHEAD_BYTES = 1024
_SHOWN_CHARS = 80

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
# Names and list positions from the outside in, as pydantic gives them.
_Location = tuple[int | str, ...]


class ConfigError(Exception):
    """The configuration cannot be used; the text is one line: the key, what it holds, what it may hold."""


class _Fault(ValueError):
    """A rule over several keys is broken."""

    def __init__(self, key: str, holds: str, allowed: str) -> None:
        super().__init__(f"{key} is {holds}; allowed: {allowed}")
        self.key = key


# ---- values ----


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; an IPv6 host comes back without its brackets, port 0 means any free one.

    Raises ValueError. Stricter than gRPC, which takes a missing port for 443 and wraps one above 65 535.
    """
    host, _, port = address.rpartition(":")
    if re.fullmatch(r"[0-9]{1,5}", port) is None or int(port) > _PORT_MAX:
        raise ValueError("no port after the last colon")
    if host.startswith("[") and host.endswith("]"):
        return str(IPv6Address(host[1:-1])), int(port)
    if re.fullmatch(r"[0-9.]+", host):
        return str(IPv4Address(host)), int(port)
    if host in _GRPC_SCHEMES or len(host) > _HOST_NAME_MAX or _HOST_NAME.fullmatch(host) is None:
        raise ValueError("no host name")
    return host, int(port)


_PORT_MAX = 65_535
_HOST_NAME_MAX = 253
_HOST_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*\.?")
# With one of these before the colon gRPC would not open a TCP port.
_GRPC_SCHEMES = frozenset({"unix", "unix-abstract", "vsock", "fd", "dns", "ipv4", "ipv6"})


def _address(value: str) -> str:
    # ipaddress raises a ValueError as well, which is what a validator raises.
    parse_address(value)
    return value


def _path(value: object) -> object:
    if isinstance(value, str):
        if not value or "\0" in value:
            raise ValueError("no path")
        return Path(value)
    return value


_LEVEL_WORDS = {"trace": "debug", "warn": "warning"}


def _level(value: object) -> object:
    """The level of a word in any case, or of a filter like `info,http=warn`: its part without a target."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.lower().split(",")]
    if len(parts) > 1 or "=" in value:
        parts = [part for part in parts if "=" not in part] or ["info"]
    return _LEVEL_WORDS.get(parts[0], parts[0])


def _named_keys(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return [{"name": f"key-{place}", "key": key} if isinstance(key, str) else key for place, key in enumerate(value, 1)]


_QUEUE_NAME_REFUSED = re.compile(r"\.\.?|.*[/\x00-\x1f\x7f-\x9f].*", re.DOTALL)


def _queue_name(value: str) -> str:
    """The rule that admission has for the queue of a job."""
    if not value or _QUEUE_NAME_REFUSED.fullmatch(value):
        raise ValueError("no queue name")
    return value


_Positive32 = Annotated[int, Field(ge=1, le=_UINT32_MAX)]
_Positive31 = Annotated[int, Field(ge=1, le=_INT32_MAX)]
_Positive63 = Annotated[int, Field(ge=1, le=_INT64_MAX)]
_Processes = Annotated[int, Field(ge=1, le=_PROCESSES_MAX)]
_Depth = Annotated[int, Field(ge=0, le=_INT64_MAX)]
_Priority = Annotated[int, Field(ge=0, le=9)]
_DurationMs = Annotated[int, Field(ge=1, le=_DURATION_MAX_MS)]
_DurationOrZeroMs = Annotated[int, Field(ge=0, le=_DURATION_MAX_MS)]
_Backoff = Literal["none", "exponential"]
_Text = Annotated[str, StringConstraints(min_length=1)]
# TOML and JSON have lists where we have tuples; the elements stay strict.
_Texts = Annotated[tuple[_Text, ...], Field(strict=False)]
_SomeTexts = Annotated[tuple[_Text, ...], Field(strict=False, min_length=1)]
_Address = Annotated[str, AfterValidator(_address)]
_FilePath = Annotated[Path, BeforeValidator(_path)]

_ADDRESS_ALLOWED = "HOST:PORT, an IPv4 address, an IPv6 address in brackets or a name, and a port from 0 to 65535"
_TEXTS_ALLOWED = "a list of non-empty strings"
_KEYS_ALLOWED = (
    "a list of {name, key} or of keys alone; names and keys not empty and each there once, keys of visible ASCII"
)


def _key(default: object, about: str, *, live: bool = False, allowed: str | None = None, example: object = None) -> Any:
    """A key of a section.

    `about` is the line in the example file, `allowed` says what the type alone does not, `example` is shown
    for a key that is unset by default.
    """
    extra: dict[str, Any] = {"live": live, "allowed": allowed, "example": example}
    return Field(default=default, description=about, json_schema_extra=extra)


def _override() -> Any:
    """A key of [[queues]]: described where the same key is in [limits] or [storage], unset = as there."""
    return Field(default=None)


# ---- sections ----


class _Section(BaseModel):
    # Errors must not show an API key, hence hide_input_in_errors.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class ServerSection(_Section):
    """Where the server listens and stores, and how many processes it has."""

    listen_addr: _Address = _key(
        "0.0.0.0:50051", "Where clients connect; port 0 picks a free one.", allowed=_ADDRESS_ALLOWED
    )
    db_path: _FilePath = _key(
        Path("./sepp-data"), "The data directory; it is made when it is not there.", allowed="a path that is not empty"
    )
    tls_cert_path: _FilePath | None = _key(
        None,
        "Certificate chain in PEM; with tls_key_path it turns TLS on.",
        allowed="a path that is not empty",
        example="server.crt",
    )
    tls_key_path: _FilePath | None = _key(
        None, "Private key in PEM, for tls_cert_path.", allowed="a path that is not empty", example="server.key"
    )
    strict_queues: bool = _key(False, "Refuse queues that are not declared in [[queues]].", live=True)
    routers: _Processes | None = _key(
        None, "Router processes, which talk to clients; unset: half of the cores, at least 1.", example=2
    )
    shards: _Processes | None = _key(
        None,
        "Shard processes, which store; unset: as many as the data directory has, half of the cores in a new one.",
        example=2,
    )
    grpc_front: Literal["queue", "aio"] = _key(
        "queue", 'How routers drive gRPC: "queue" is fast, "aio" uses only what grpcio documents.'
    )
    shutdown_grace_ms: _DurationOrZeroMs = _key(
        30_000, "How long calls may take to end when the server stops.", live=True
    )


class ApiKey(_Section):
    """A key that clients send as `authorization: Bearer KEY`; the name is for people."""

    name: _Text
    key: Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$")] = Field(repr=False)


class AuthSection(_Section):
    """Who may call."""

    api_keys: (
        Annotated[
            tuple[ApiKey, ...],
            BeforeValidator(_named_keys),
            Field(strict=False),
        ]
        | None
    ) = _key(
        None,
        "Keys that clients may call with; unset: everybody may call, []: nobody may.",
        live=True,
        allowed=_KEYS_ALLOWED,
        example=[{"name": "workers", "key": "replace-this"}],
    )


class LimitsSection(_Section):
    """What clients may ask for, and what they get when they do not ask. Names and texts are measured in UTF-8."""

    max_lease_duration_ms: _DurationMs = _key(300_000, "Longer leases are cut to this.", live=True)
    default_max_attempts: _Positive32 = _key(
        3, "Attempts of a job that does not say; at most max_attempts_ceiling.", live=True
    )
    max_attempts_ceiling: _Positive32 = _key(100, "A job that asks for more attempts gets this many.", live=True)
    default_priority: _Priority = _key(0, "Priority of a job that does not say; 9 is served first.", live=True)
    retry_delay_ms: _DurationOrZeroMs = _key(
        0, "How long a nacked job waits, unless the nack says; 0: not at all. At most retry_delay_max_ms.", live=True
    )
    retry_backoff: _Backoff = _key(
        "none", '"exponential" doubles retry_delay_ms with each attempt, "none" keeps it.', live=True
    )
    retry_delay_max_ms: _DurationMs = _key(3_600_000, "No delay by the two keys above is longer.", live=True)
    max_reserve_batch: _Positive32 = _key(256, "Most jobs of one Reserve or DrainDeadLetters.", live=True)
    max_reserve_queues: _Positive32 = _key(32, "Most queues of one Reserve.", live=True)
    max_wait_timeout_ms: _DurationMs = _key(300_000, "Longer waits of a Reserve are cut to this.", live=True)
    max_enqueue_batch: _Positive32 = _key(256, "Most jobs of one EnqueueBatch or EnqueueAtomic.", live=True)
    max_queue_depth: _Depth | None = _key(
        None,
        "Most live jobs (ready, scheduled, in flight) of a queue; unset: no limit, 0: every job is refused.",
        live=True,
        example=100_000,
    )
    max_payload_bytes: _Positive31 = _key(1_048_576, "Most bytes of one payload; at most max_message_bytes.", live=True)
    max_message_bytes: _Positive31 = _key(16_777_216, "Most bytes of one request.")
    max_response_bytes: Annotated[int, Field(ge=65_536, le=_INT32_MAX)] = _key(
        CLIENT_MESSAGE_BYTES,
        "A Reserve or DrainDeadLetters answer is cut at this many bytes, but holds at least one job.",
        live=True,
    )
    max_custom_entries: _Positive32 = _key(64, "Most entries of a job's custom map.", live=True)
    max_custom_total_bytes: _Positive63 = _key(16_384, "Most bytes of keys and values in a custom map.", live=True)
    max_custom_key_bytes: _Positive32 = _key(256, "Most bytes of one key in a custom map.", live=True)
    max_queue_name_bytes: Annotated[int, Field(ge=1, le=65_535)] = _key(512, "Most bytes of a queue name.", live=True)
    max_job_type_bytes: _Positive32 = _key(256, "Most bytes of a job type.", live=True)
    max_idempotency_key_bytes: _Positive32 = _key(256, "Most bytes of an idempotency key.", live=True)
    max_schedule_horizon_ms: _DurationMs = _key(
        2_592_000_000, "How far ahead a job may be scheduled; longer delays of a nack are cut to this.", live=True
    )
    allowed_encodings: _Texts | None = _key(
        None,
        "Encodings that a payload may have; unset: any, []: none.",
        live=True,
        allowed=_TEXTS_ALLOWED,
        example=["application/json"],
    )


class StorageSection(_Section):
    """How jobs are kept."""

    persist_mode: Literal["sync_all", "sync_data", "buffer"] = _key(
        "sync_all", '"buffer" does not wait for the disk: a crash of the host may lose the last moments.'
    )
    sweep_interval_ms: _DurationMs = _key(1_000, "The longest sleep between two looks at the timers.")
    sweep_limit: _Positive31 = _key(10_000, "Most timers of one kind that one turn of a shard acts on.")
    dedup_window_ms: _DurationMs = _key(
        86_400_000, "How long an idempotency key names its job; holds for keys that are stored from then on.", live=True
    )
    dead_letter_retention_ms: _DurationOrZeroMs = _key(0, "How long a dead letter is kept; 0: dead jobs are deleted.")
    command_queue_capacity: _Positive31 = _key(4_096, "Most requests that wait for one shard.")
    cache_size_bytes: _Positive63 | None = _key(
        None, "Block cache of each shard; unset: RocksDB's default.", example=134_217_728
    )
    max_open_files: _Positive31 | None = _key(
        None, "Open files of each shard; unset: RocksDB's default.", example=1_000
    )
    background_threads: _Positive31 | None = _key(
        None, "Flush and compaction threads of each shard; unset: RocksDB's default.", example=2
    )


class LoggingSection(_Section):
    """What is logged, and how it looks."""

    level: Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(_level)] = _key(
        "info", "The least severe level that is logged."
    )
    format: Literal["text", "json"] = _key("text", '"text" is for people, "json" is one object a line.')


class MetricsSection(_Section):
    """The page for Prometheus."""

    prometheus_enabled: bool = _key(False, "Serve metrics at /metrics.")
    prometheus_listen_addr: _Address = _key("127.0.0.1:9464", "Where metrics are served.", allowed=_ADDRESS_ALLOWED)


class QueueSection(_Section):
    """A declared queue: its name, and what differs from [limits] and [storage]."""

    name: Annotated[str, AfterValidator(_queue_name)] = Field(
        json_schema_extra={
            "allowed": 'a name of at most limits.max_queue_name_bytes bytes, not "." or "..", '
            "with no slash and no control character, and each name once"
        }
    )
    max_lease_duration_ms: _DurationMs | None = _override()
    default_max_attempts: _Positive32 | None = _override()
    max_attempts_ceiling: _Positive32 | None = _override()
    default_priority: _Priority | None = _override()
    retry_delay_ms: _DurationOrZeroMs | None = _override()
    retry_backoff: _Backoff | None = _override()
    retry_delay_max_ms: _DurationMs | None = _override()
    max_payload_bytes: _Positive31 | None = _override()
    allowed_encodings: _Texts | None = Field(default=None, json_schema_extra={"allowed": _TEXTS_ALLOWED})
    max_schedule_horizon_ms: _DurationMs | None = _override()
    max_custom_entries: _Positive32 | None = _override()
    max_custom_total_bytes: _Positive63 | None = _override()
    max_custom_key_bytes: _Positive32 | None = _override()
    dedup_window_ms: _DurationMs | None = _override()
    max_queue_depth: _Depth | None = _override()
    allowed_job_types: _SomeTexts | None = Field(
        default=None, json_schema_extra={"allowed": "a list of at least one job type, none of them empty"}
    )


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What holds for one queue: its own values, else those of [limits] and [storage]. Units are in the names."""

    max_lease_duration_ms: int
    default_max_attempts: int
    max_attempts_ceiling: int
    default_priority: int
    retry_delay_ms: int
    retry_backoff: _Backoff
    retry_delay_max_ms: int
    max_payload_bytes: int
    # None: any, empty: none.
    allowed_encodings: tuple[str, ...] | None
    max_schedule_horizon_ms: int
    max_custom_entries: int
    max_custom_total_bytes: int
    max_custom_key_bytes: int
    dedup_window_ms: int
    # None: no limit.
    max_queue_depth: int | None
    # None: any.
    allowed_job_types: tuple[str, ...] | None
    # Listed in [[queues]], which is what strict mode asks for.
    declared: bool


_OVERRIDABLE = tuple(field.name for field in fields(QueueLimits) if field.name not in ("allowed_job_types", "declared"))


class Config(_Section):
    """A whole, valid configuration.

    `model_dump(mode="json")` and `model_validate` carry it to another process; the result is equal.
    """

    server: ServerSection = ServerSection()
    auth: AuthSection = AuthSection()
    limits: LimitsSection = LimitsSection()
    storage: StorageSection = StorageSection()
    logging: LoggingSection = LoggingSection()
    metrics: MetricsSection = MetricsSection()
    queues: Annotated[tuple[QueueSection, ...], Field(strict=False)] = ()

    def effective(self, queue: str) -> QueueLimits:
        """What holds for a queue. Queues that are not declared share one object."""
        return self._declared.get(queue, self._undeclared)

    @cached_property
    def _undeclared(self) -> QueueLimits:
        return QueueLimits(**self._shared_limits(), allowed_job_types=None, declared=False)

    @cached_property
    def _declared(self) -> dict[str, QueueLimits]:
        return {queue.name: self._merged(queue) for queue in self.queues}

    def _shared_limits(self) -> dict[str, Any]:
        return {
            name: getattr(self.storage if name in StorageSection.model_fields else self.limits, name)
            for name in _OVERRIDABLE
        }

    def _merged(self, queue: QueueSection) -> QueueLimits:
        own = {name: value for name in _OVERRIDABLE if (value := getattr(queue, name)) is not None}
        return QueueLimits(**(self._shared_limits() | own), allowed_job_types=queue.allowed_job_types, declared=True)

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        _check_tls(self.server)
        _check_api_keys(self.auth)
        _check_listeners(self)
        _check_limits("limits", self.effective(""), self.limits.max_message_bytes)
        _check_queues(self)
        return self


# ---- rules over several keys ----


def _check_tls(server: ServerSection) -> None:
    if (server.tls_cert_path is None) == (server.tls_key_path is None):
        return
    unset, other = ("cert", "key") if server.tls_cert_path is None else ("key", "cert")
    raise _Fault(f"server.tls_{unset}_path", "unset", f"a path, because server.tls_{other}_path is set")


def _check_api_keys(auth: AuthSection) -> None:
    names: set[str] = set()
    keys: set[str] = set()
    for place, api_key in enumerate(auth.api_keys or ()):
        if api_key.name in names:
            raise _Fault(f"auth.api_keys[{place}].name", f"{_shown(api_key.name)} once more", "each name once")
        if api_key.key in keys:
            raise _Fault(f"auth.api_keys[{place}].key", "an earlier key once more", "each key once")
        names.add(api_key.name)
        keys.add(api_key.key)


def _check_listeners(config: Config) -> None:
    address = config.metrics.prometheus_listen_addr
    port = parse_address(address)[1]
    if config.metrics.prometheus_enabled and port != 0 and address == config.server.listen_addr:
        raise _Fault("metrics.prometheus_listen_addr", _shown(address), "another address than server.listen_addr")


def _check_limits(section: str, limits: QueueLimits, max_message_bytes: int, own: frozenset[str] | None = None) -> None:
    """The bounds that one key gives another. `own` are the keys that a queue sets itself, None for [limits].

    A queue may break such a bound with either of the two keys: the text names one that the queue sets.
    """
    for low, high in (("default_max_attempts", "max_attempts_ceiling"), ("retry_delay_ms", "retry_delay_max_ms")):
        low_value, high_value = getattr(limits, low), getattr(limits, high)
        if low_value <= high_value:
            continue
        if own is None or low in own:
            raise _Fault(f"{section}.{low}", str(low_value), f"at most {high_value}, its {high}")
        raise _Fault(f"{section}.{high}", str(high_value), f"at least {low_value}, its {low}")
    if limits.max_payload_bytes > max_message_bytes:
        raise _Fault(
            f"{section}.max_payload_bytes",
            str(limits.max_payload_bytes),
            f"an integer from 1 to {max_message_bytes}, which is limits.max_message_bytes",
        )


def _check_queues(config: Config) -> None:
    seen: set[str] = set()
    for place, queue in enumerate(config.queues):
        key = f"queues[{place}]"
        if queue.name in seen:
            raise _Fault(f"{key}.name", f"{_shown(queue.name)} once more", "each name once")
        seen.add(queue.name)
        length = len(queue.name.encode())
        if length > config.limits.max_queue_name_bytes:
            raise _Fault(
                f"{key}.name",
                f"{_shown(queue.name)}, which has {length} bytes",
                f"a name of at most {config.limits.max_queue_name_bytes} bytes, which is limits.max_queue_name_bytes",
            )
        own = frozenset(name for name in _OVERRIDABLE if getattr(queue, name) is not None)
        _check_limits(key, config.effective(queue.name), config.limits.max_message_bytes, own)


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
    file_path, settings = _read_file(path, environ.get(ENVIRONMENT_PREFIX + "CONFIG"))
    warnings = _drop_foreign(settings, str(file_path))
    origin = dict.fromkeys(_dotted_keys(settings), f"in {file_path}")
    sources: dict[str, Source] = {key: "file" if key in origin else "default" for key in _all_keys()}

    for variable, section, name, value in _from_environment(environ, warnings):
        key = _place(settings, section, name, value)
        origin[key] = f"set by {variable}"
        sources[key] = "environment"

    config = _validated(settings, origin)
    warnings += _level_warnings(settings, config)
    warnings += _size_warnings(config)
    return Loaded(config, warnings, file_path, sources)


def _read_file(path: Path | None, named: str | None) -> tuple[Path | None, dict[str, Any]]:
    explicit = path is not None or bool(named)
    chosen = path if path is not None else Path(named or DEFAULT_FILE)
    try:
        raw = chosen.read_bytes()
    except FileNotFoundError as error:
        if explicit:
            raise ConfigError(f"{chosen}: there is no such configuration file") from error
        return None, {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{chosen}: cannot be read: {_one_line(error)}") from error
    try:
        # Some editors put a byte order mark in front.
        return chosen, tomllib.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{chosen}: not UTF-8 (at line {line})") from error
    except (ValueError, RecursionError) as error:
        last_line = raw.rstrip().count(b"\n") + 1
        text = _one_line(error).replace("at end of document", f"at the end, line {last_line}")
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
            field = _sections().get(section, {}).get(name)
            if field is None:
                raise ConfigError(f"{_unknown((section, name), raw)} (set by {variable})")
            yield variable, section, name, _parsed_text(raw) if _is_text(field.annotation) else _parsed(raw)


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
        key, text = _explained(error.errors()[0])
        where = origin.get(key, origin.get(key.split("[")[0]))
        raise ConfigError(f"{text} ({where})" if where else text) from error


def _level_warnings(settings: Mapping[str, Any], config: Config) -> list[str]:
    written = settings.get("logging", {}).get("level", "")
    if "," not in written and "=" not in written:
        return []
    return [
        f"logging.level is {_shown(written)}: filters by target have no use here, the level is {config.logging.level}"
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


# ---- reloading ----


def restart_keys(old: Config, new: Config) -> list[str]:
    """Dotted keys that differ and keep their old value until a restart."""
    return [
        f"{section}.{name}"
        for section, name, field in _fields()
        if not _extra(field, "live") and getattr(getattr(old, section), name) != getattr(getattr(new, section), name)
    ]


def with_live(old: Config, new: Config) -> Config:
    """`old` with the live keys of `new`.

    Raises ConfigError when the two do not go together, for example a larger payload with a message size
    that needs a restart first.
    """
    merged = old.model_dump(mode="json")
    changed = new.model_dump(mode="json")
    for section, name, field in _fields():
        if _extra(field, "live"):
            merged[section][name] = changed[section][name]
    merged["queues"] = changed["queues"]
    return _validated(merged, {})


# ---- the example file ----


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
    for section, name, field in _fields():
        if section != section_before:
            about = (_section_models()[section].__doc__ or "").strip()
            lines += ["", f"# {about}", f"[{section}]"]
            section_before = section
        live = " (live)" if _extra(field, "live") else ""
        lines += ["", f"# {field.description}{live}", f"# Allowed: {_allowed(field)}."]
        if field.default is None:
            lines.append(f"# Example: {name} = {_toml(_extra(field, 'example'))}")
        else:
            lines.append(f"#{name} = {_toml(field.default)}")
    lines += [
        "",
        "# Declared queues (live). Each may have values of its own for these keys:",
        *(f"#   {name}" for name in _OVERRIDABLE),
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


# ---- what the fields say of themselves ----


def _section_models() -> dict[str, type[BaseModel]]:
    """Sections by name, without [[queues]]."""
    return {
        section: field.annotation
        for section, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def _sections() -> dict[str, dict[str, FieldInfo]]:
    return {section: model.model_fields for section, model in _section_models().items()}


def _fields() -> Iterator[tuple[str, str, FieldInfo]]:
    for section, keys in _sections().items():
        for name, field in keys.items():
            yield section, name, field


def _all_keys() -> list[str]:
    return [f"{section}.{name}" for section, name, _ in _fields()] + ["queues"]


def _dotted_keys(settings: Mapping[str, Any]) -> Iterator[str]:
    """What a file sets, known or not: its sections, and section.key for what is in them."""
    for section, table in settings.items():
        yield _dotted((section,))
        if isinstance(table, dict):
            yield from (_dotted((section, name)) for name in table)


def _extra(field: FieldInfo, name: str) -> object:
    extra = field.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


def _is_text(annotation: object) -> bool:
    """Whether a variable holds this value without quotes: text, paths, words of a list."""
    kinds = _unwrapped(annotation)[0]
    return kinds in (str, Path) or get_origin(kinds) is Literal


def _unwrapped(annotation: object) -> tuple[Any, list[object]]:
    """The bare type and its bounds, without `Annotated` and `None`."""
    bounds: list[object] = []
    bare: Any = annotation
    while True:
        if get_origin(bare) is Annotated:
            bare, *metadata = get_args(bare)
            for item in metadata:
                bounds += item.metadata if isinstance(item, FieldInfo) else [item]
        elif get_origin(bare) in (Union, UnionType):
            bare = next(kind for kind in get_args(bare) if kind is not NoneType)
        else:
            return bare, bounds


def _allowed(field: FieldInfo) -> str:
    """What a key may hold, in words."""
    said = _extra(field, "allowed")
    if isinstance(said, str):
        return said
    bare, bounds = _unwrapped(field.annotation)
    bounds += field.metadata
    if bare is bool:
        return "true or false"
    if get_origin(bare) is Literal:
        words = [_shown(word) for word in get_args(bare)]
        return f"{', '.join(words[:-1])} or {words[-1]}"
    low = next(getattr(bound, "ge") for bound in bounds if hasattr(bound, "ge"))  # noqa: B009
    high = next(getattr(bound, "le") for bound in bounds if hasattr(bound, "le"))  # noqa: B009
    return f"an integer from {low} to {high}"


# ---- error texts ----


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def _shown(value: object) -> str:
    """A value as it would be written, on one line, cut when it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if not text.isprintable():
        text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def _dotted(location: _Location) -> str:
    key = ""
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            written = part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _shown(part)
            key += f".{written}" if key else written
    return key


def _held(location: _Location, value: object) -> str:
    """A value for an error text; never an API key, which belongs into no log."""
    if location[0] == "auth":
        return f"a hidden {type(value).__name__}"
    return _shown(value)


def _explained(error: ErrorDetails) -> tuple[str, str]:
    """Dotted key and error text of the first thing that is wrong."""
    fault = error.get("ctx", {}).get("error")
    if isinstance(fault, _Fault):
        return fault.key, str(fault)
    location, value = error["loc"], error["input"]
    key = _dotted(location)
    if error["type"] == "extra_forbidden":
        return key, _unknown(location, value)
    holds = "unset" if error["type"] == "missing" else _held(location, value)
    return key, f"{key} is {holds}; allowed: {_allowed_at(location)}"


def _allowed_at(location: _Location) -> str:
    """What the key at a location, or the list that it is in, may hold."""
    section, *rest = location
    names = [part for part in rest if isinstance(part, str)]
    if section == "queues":
        return _allowed(QueueSection.model_fields[names[0]]) if names else "a list of tables, each with a name"
    return _allowed(_sections()[str(section)][names[0]]) if names else "a table"


def _unknown(location: _Location, value: object) -> str:
    """For a key that is none: the one that was meant, else all that there are."""
    section, name = location[0], str(location[-1])
    if len(location) == 1 or section not in Config.model_fields:
        # A section, or a key from the environment in a section that is none.
        known, name = list(Config.model_fields), str(section)
    elif section == "queues":
        known = list(QueueSection.model_fields)
    elif len(location) > 2:
        known = list(ApiKey.model_fields)
    else:
        known = list(_sections()[str(section)])
    close = difflib.get_close_matches(name, known, n=1)
    allowed = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(known)}"
    return f"{_dotted(location)} is not known (it holds {_held(location, value)}); {allowed}"
