"""The keys of the configuration: each is declared here once, as a field of its section.

A field says type and bounds, default, what the key does and whether a reload takes it over. The rules that
tie keys together are here as well, so that every `Config` there is is valid.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from common.config_errors import Fault, shown

# What a gRPC client with default options takes in one message.
CLIENT_MESSAGE_BYTES = 4_194_304

# A thousand years. Now plus a few of these still fits a protobuf Timestamp (year 9999).
_DURATION_MAX_MS = 31_536_000_000_000
_UINT32_MAX = 2**32 - 1
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
# A shard owns at least one of the 4 096 slots.
_PROCESSES_MAX = 4096


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


OVERRIDABLE = tuple(field.name for field in fields(QueueLimits) if field.name not in ("allowed_job_types", "declared"))


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
            for name in OVERRIDABLE
        }

    def _merged(self, queue: QueueSection) -> QueueLimits:
        own = {name: value for name in OVERRIDABLE if (value := getattr(queue, name)) is not None}
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
    raise Fault(f"server.tls_{unset}_path", "unset", f"a path, because server.tls_{other}_path is set")


def _check_api_keys(auth: AuthSection) -> None:
    names: set[str] = set()
    keys: set[str] = set()
    for place, api_key in enumerate(auth.api_keys or ()):
        if api_key.name in names:
            raise Fault(f"auth.api_keys[{place}].name", f"{shown(api_key.name)} once more", "each name once")
        if api_key.key in keys:
            raise Fault(f"auth.api_keys[{place}].key", "an earlier key once more", "each key once")
        names.add(api_key.name)
        keys.add(api_key.key)


def _check_listeners(config: Config) -> None:
    address = config.metrics.prometheus_listen_addr
    port = parse_address(address)[1]
    if config.metrics.prometheus_enabled and port != 0 and address == config.server.listen_addr:
        raise Fault("metrics.prometheus_listen_addr", shown(address), "another address than server.listen_addr")


def _check_limits(section: str, limits: QueueLimits, max_message_bytes: int, own: frozenset[str] | None = None) -> None:
    """The bounds that one key gives another. `own` are the keys that a queue sets itself, None for [limits].

    A queue may break such a bound with either of the two keys: the text names one that the queue sets.
    """
    for low, high in (("default_max_attempts", "max_attempts_ceiling"), ("retry_delay_ms", "retry_delay_max_ms")):
        low_value, high_value = getattr(limits, low), getattr(limits, high)
        if low_value <= high_value:
            continue
        if own is None or low in own:
            raise Fault(f"{section}.{low}", str(low_value), f"at most {high_value}, its {high}")
        raise Fault(f"{section}.{high}", str(high_value), f"at least {low_value}, its {low}")
    if limits.max_payload_bytes > max_message_bytes:
        raise Fault(
            f"{section}.max_payload_bytes",
            str(limits.max_payload_bytes),
            f"an integer from 1 to {max_message_bytes}, which is limits.max_message_bytes",
        )


def _check_queues(config: Config) -> None:
    seen: set[str] = set()
    for place, queue in enumerate(config.queues):
        key = f"queues[{place}]"
        if queue.name in seen:
            raise Fault(f"{key}.name", f"{shown(queue.name)} once more", "each name once")
        seen.add(queue.name)
        length = len(queue.name.encode())
        if length > config.limits.max_queue_name_bytes:
            raise Fault(
                f"{key}.name",
                f"{shown(queue.name)}, which has {length} bytes",
                f"a name of at most {config.limits.max_queue_name_bytes} bytes, which is limits.max_queue_name_bytes",
            )
        own = frozenset(name for name in OVERRIDABLE if getattr(queue, name) is not None)
        _check_limits(key, config.effective(queue.name), config.limits.max_message_bytes, own)
