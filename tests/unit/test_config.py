"""The configuration: defaults, bounds, error texts, where values come from, and what a reload takes over."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from common import config
from common.config import Config, ConfigError, Loaded, QueueLimits

Load = Callable[..., Loaded]

THOUSAND_YEARS_MS = 31_536_000_000_000
UINT32_MAX = 2**32 - 1
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

# Key, least and greatest value. What the key next to it must be for the value to make sense follows.
BOUNDS: list[tuple[str, int, int, dict[str, int]]] = [
    ("server.routers", 1, 4096, {}),
    ("server.shards", 1, 4096, {}),
    ("server.shutdown_grace_ms", 0, THOUSAND_YEARS_MS, {}),
    ("limits.max_lease_duration_ms", 1, THOUSAND_YEARS_MS, {}),
    ("limits.default_max_attempts", 1, UINT32_MAX, {"max_attempts_ceiling": UINT32_MAX}),
    ("limits.max_attempts_ceiling", 1, UINT32_MAX, {"default_max_attempts": 1}),
    ("limits.default_priority", 0, 9, {}),
    ("limits.retry_delay_ms", 0, THOUSAND_YEARS_MS, {"retry_delay_max_ms": THOUSAND_YEARS_MS}),
    ("limits.retry_delay_max_ms", 1, THOUSAND_YEARS_MS, {}),
    ("limits.max_reserve_batch", 1, UINT32_MAX, {}),
    ("limits.max_reserve_queues", 1, UINT32_MAX, {}),
    ("limits.max_wait_timeout_ms", 1, THOUSAND_YEARS_MS, {}),
    ("limits.max_enqueue_batch", 1, UINT32_MAX, {}),
    ("limits.max_queue_depth", 0, INT64_MAX, {}),
    ("limits.max_payload_bytes", 1, INT32_MAX, {"max_message_bytes": INT32_MAX}),
    ("limits.max_message_bytes", 1, INT32_MAX, {"max_payload_bytes": 1}),
    ("limits.max_response_bytes", 65_536, INT32_MAX, {}),
    ("limits.max_custom_entries", 1, UINT32_MAX, {}),
    ("limits.max_custom_total_bytes", 1, INT64_MAX, {}),
    ("limits.max_custom_key_bytes", 1, UINT32_MAX, {}),
    ("limits.max_queue_name_bytes", 1, 65_535, {}),
    ("limits.max_job_type_bytes", 1, UINT32_MAX, {}),
    ("limits.max_idempotency_key_bytes", 1, UINT32_MAX, {}),
    ("limits.max_schedule_horizon_ms", 1, THOUSAND_YEARS_MS, {}),
    ("storage.sweep_interval_ms", 1, THOUSAND_YEARS_MS, {}),
    ("storage.sweep_limit", 1, INT32_MAX, {}),
    ("storage.dedup_window_ms", 1, THOUSAND_YEARS_MS, {}),
    ("storage.dead_letter_retention_ms", 0, THOUSAND_YEARS_MS, {}),
    ("storage.command_queue_capacity", 1, INT32_MAX, {}),
    ("storage.cache_size_bytes", 1, INT64_MAX, {}),
    ("storage.max_open_files", 1, INT32_MAX, {}),
    ("storage.background_threads", 1, INT32_MAX, {}),
]

QUEUE_KEYS = (
    "max_lease_duration_ms",
    "default_max_attempts",
    "max_attempts_ceiling",
    "default_priority",
    "retry_delay_ms",
    "retry_delay_max_ms",
    "max_payload_bytes",
    "max_schedule_horizon_ms",
    "max_custom_entries",
    "max_custom_total_bytes",
    "max_custom_key_bytes",
    "dedup_window_ms",
    "max_queue_depth",
)
QUEUE_BOUNDS = [(name, low, high, near) for key, low, high, near in BOUNDS if (name := key.split(".")[1]) in QUEUE_KEYS]

DEFAULTS: dict[str, dict[str, object]] = {
    "server": {
        "listen_addr": "0.0.0.0:50051",
        "db_path": "sepp-data",
        "tls_cert_path": None,
        "tls_key_path": None,
        "strict_queues": False,
        "routers": None,
        "shards": None,
        "grpc_front": "queue",
        "shutdown_grace_ms": 30_000,
    },
    "auth": {"api_keys": None},
    "limits": {
        "max_lease_duration_ms": 300_000,
        "default_max_attempts": 3,
        "max_attempts_ceiling": 100,
        "default_priority": 0,
        "retry_delay_ms": 0,
        "retry_backoff": "none",
        "retry_delay_max_ms": 3_600_000,
        "max_reserve_batch": 256,
        "max_reserve_queues": 32,
        "max_wait_timeout_ms": 300_000,
        "max_enqueue_batch": 256,
        "max_queue_depth": None,
        "max_payload_bytes": 1_048_576,
        "max_message_bytes": 16_777_216,
        "max_response_bytes": 4_194_304,
        "max_custom_entries": 64,
        "max_custom_total_bytes": 16_384,
        "max_custom_key_bytes": 256,
        "max_queue_name_bytes": 512,
        "max_job_type_bytes": 256,
        "max_idempotency_key_bytes": 256,
        "max_schedule_horizon_ms": 2_592_000_000,
        "allowed_encodings": None,
    },
    "storage": {
        "persist_mode": "sync_all",
        "sweep_interval_ms": 1_000,
        "sweep_limit": 10_000,
        "dedup_window_ms": 86_400_000,
        "dead_letter_retention_ms": 0,
        "command_queue_capacity": 4_096,
        "cache_size_bytes": None,
        "max_open_files": None,
        "background_threads": None,
    },
    "logging": {"level": "info", "format": "text"},
    "metrics": {"prometheus_enabled": False, "prometheus_listen_addr": "127.0.0.1:9464"},
    "queues": {},
}

RESTART_ONLY = {
    "server.listen_addr": "127.0.0.1:1",
    "server.db_path": "/elsewhere",
    "server.routers": 7,
    "server.shards": 7,
    "server.grpc_front": "aio",
    "limits.max_message_bytes": 20_000_000,
    "storage.persist_mode": "buffer",
    "storage.sweep_interval_ms": 7,
    "storage.sweep_limit": 7,
    "storage.dead_letter_retention_ms": 7,
    "storage.command_queue_capacity": 7,
    "storage.cache_size_bytes": 7,
    "storage.max_open_files": 7,
    "storage.background_threads": 7,
    "logging.level": "debug",
    "logging.format": "json",
    "metrics.prometheus_enabled": True,
    "metrics.prometheus_listen_addr": "127.0.0.1:7",
}


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    """Loads a file with this text, and an environment."""

    def load(text: str = "", environ: Mapping[str, str] | None = None) -> Loaded:
        path = tmp_path / "test.toml"
        path.write_text(text)
        return config.load(path, environ or {})

    return load


@pytest.fixture
def refusal(load_text: Load) -> Callable[..., str]:
    """The error text for a file with this text, and an environment."""

    def refuse(text: str = "", environ: Mapping[str, str] | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            load_text(text, environ)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return refuse


def made(key: str, value: object, **near: object) -> Config:
    section, name = key.split(".")
    return Config.model_validate({section: near | {name: value}})


def with_queue(**keys: object) -> Config:
    return Config.model_validate({"queues": [{"name": "mail"} | keys]})


# ---- defaults and bounds ----


def test_the_defaults_are_those_of_the_specification() -> None:
    expected: dict[str, object] = DEFAULTS | {"queues": []}

    assert Config().model_dump(mode="json") == expected


@pytest.mark.parametrize(("key", "low", "high", "near"), BOUNDS, ids=[row[0] for row in BOUNDS])
def test_a_number_is_accepted_at_its_bounds_and_refused_beyond(
    key: str, low: int, high: int, near: dict[str, int]
) -> None:
    section, name = key.split(".")

    for value in (low, low + 1, high - 1, high):
        assert getattr(getattr(made(key, value, **near), section), name) == value
    for value in (low - 1, high + 1, -1):
        with pytest.raises(ValidationError):
            made(key, value, **near)


@pytest.mark.parametrize(("name", "low", "high", "near"), QUEUE_BOUNDS, ids=[row[0] for row in QUEUE_BOUNDS])
def test_a_queues_own_number_has_the_same_bounds(name: str, low: int, high: int, near: dict[str, int]) -> None:
    limits = {key: value for key, value in near.items() if key == "max_message_bytes"}
    own = {key: value for key, value in near.items() if key != "max_message_bytes"}

    def queue(value: int) -> Config:
        return Config.model_validate({"limits": limits, "queues": [{"name": "mail", **own, name: value}]})

    for value in (low, high):
        assert getattr(queue(value).effective("mail"), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ValidationError):
            queue(value)


@pytest.mark.parametrize(("key", "low", "high", "near"), BOUNDS, ids=[row[0] for row in BOUNDS])
@pytest.mark.parametrize("written", ['"5"', "5.0", "true", "[5]"])
def test_a_number_of_another_type_is_refused_by_name(
    refusal: Callable[..., str], key: str, low: int, high: int, near: dict[str, int], written: str
) -> None:
    section, name = key.split(".")

    text = refusal(f"[{section}]\n{name} = {written}\n")

    assert text.startswith(f"{key} is {written}; allowed: an integer from {low} to {high} (in ")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("server.grpc_front", '"queue" or "aio"'),
        ("limits.retry_backoff", '"none" or "exponential"'),
        ("storage.persist_mode", '"sync_all", "sync_data" or "buffer"'),
        ("logging.level", '"debug", "info", "warning", "error" or "critical"'),
        ("logging.format", '"text" or "json"'),
    ],
)
def test_a_word_is_one_of_a_list(refusal: Callable[..., str], key: str, words: str) -> None:
    section, name = key.split(".")

    for word in re.findall(r'"(\w+)"', words):
        assert getattr(getattr(made(key, word), section), name) == word
    assert refusal(f'[{section}]\n{name} = "other"').startswith(f'{key} is "other"; allowed: {words} (in ')


@pytest.mark.parametrize("key", ["server.strict_queues", "metrics.prometheus_enabled"])
@pytest.mark.parametrize("written", ["1", '"true"'])
def test_a_switch_is_true_or_false(refusal: Callable[..., str], key: str, written: str) -> None:
    section, name = key.split(".")

    assert refusal(f"[{section}]\n{name} = {written}").startswith(f"{key} is {written}; allowed: true or false (in ")


@pytest.mark.parametrize("key", ["server.db_path", "server.tls_cert_path", "server.tls_key_path"])
def test_an_empty_path_is_refused(refusal: Callable[..., str], key: str) -> None:
    section, name = key.split(".")

    assert refusal(f'[{section}]\n{name} = ""').startswith(f'{key} is ""; allowed: a path that is not empty (in ')


@pytest.mark.parametrize(
    ("written", "level"),
    [("INFO", "info"), ("warn", "warning"), ("trace", "debug"), ("http=debug,error", "error"), ("http=debug", "info")],
)
def test_log_levels_in_the_reference_servers_words_are_understood(written: str, level: str) -> None:
    assert made("logging.level", written).logging.level == level


# ---- addresses ----


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("0.0.0.0:50051", "0.0.0.0", 50051),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("127.0.0.1:65535", "127.0.0.1", 65535),
        ("[::]:50051", "::", 50051),
        ("[::1]:1", "::1", 1),
        ("localhost:50051", "localhost", 50051),
        ("jobs_1.example-net.test:443", "jobs_1.example-net.test", 443),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, host: str, port: int) -> None:
    assert config.parse_address(address) == (host, port)
    assert made("server.listen_addr", address).server.listen_addr == address
    assert made("metrics.prometheus_listen_addr", address).metrics.prometheus_listen_addr == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1",
        "127.0.0.1:",
        ":50051",
        "127.0.0.1:65536",
        "127.0.0.1:99999",
        "127.0.0.1:-1",
        "127.0.0.1:+1",
        "127.0.0.1: 1",
        "127.0.0.1:http",
        "127.0.0.1:1/",
        "127.0.0.1:\u0661",
        "127.0.0.1:1,127.0.0.1:2",
        "127.0.0.1:1\n",
        "256.0.0.1:1",
        "1.2.3:1",
        "::1:50051",
        "[::1]",
        "[]:1",
        "[127.0.0.1]:1",
        "[::g]:1",
        "*:1",
        "a b:1",
        "-a:1",
        "a..b:1",
        f"{'a' * 64}:1",
        f"{'a.' * 127}a:1",
        "unix:/tmp/socket",
        "unix:1",
        "fd:3",
        "ipv4:127.0.0.1:1",
        "dns:1",
        "http://localhost:1",
    ],
)
def test_what_grpc_would_take_for_something_else_is_no_address(refusal: Callable[..., str], address: str) -> None:
    text = refusal(f"[server]\nlisten_addr = {json.dumps(address)}")

    assert text.startswith("server.listen_addr is ")
    assert "; allowed: HOST:PORT, an IPv4 address, an IPv6 address in brackets or a name, and a port from 0" in text


def test_metrics_and_clients_cannot_share_an_address(refusal: Callable[..., str]) -> None:
    text = refusal(
        '[server]\nlisten_addr = "localhost:5000"\n'
        '[metrics]\nprometheus_enabled = true\nprometheus_listen_addr = "localhost:5000"\n'
    )

    assert text.startswith('metrics.prometheus_listen_addr is "localhost:5000"; allowed: another address than server.')


def test_two_free_ports_are_not_the_same_address(load_text: Load) -> None:
    loaded = load_text(
        '[server]\nlisten_addr = "localhost:0"\n'
        '[metrics]\nprometheus_enabled = true\nprometheus_listen_addr = "localhost:0"\n'
    )

    assert loaded.config.metrics.prometheus_enabled


# ---- API keys ----


def test_a_bare_api_key_is_named_after_its_position() -> None:
    keys = made("auth.api_keys", ["a", {"name": "mine", "key": "b"}, "c"]).auth.api_keys

    assert keys is not None
    assert [(key.name, key.key) for key in keys] == [("key-1", "a"), ("mine", "b"), ("key-3", "c")]


def test_no_api_keys_and_an_empty_list_of_them_are_different() -> None:
    assert Config().auth.api_keys is None
    assert made("auth.api_keys", []).auth.api_keys == ()


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ('[""]', "auth.api_keys[0].key"),
        ('["a", "b c"]', "auth.api_keys[1].key"),
        ('["\\u00e4"]', "auth.api_keys[0].key"),
        ('["a\\n"]', "auth.api_keys[0].key"),
        ('[{name = "", key = "a"}]', "auth.api_keys[0].name"),
        ('[{name = "a"}]', "auth.api_keys[0].key"),
        ('[{name = "a", key = "a", role = "x"}]', "auth.api_keys[0].role"),
        ("[5]", "auth.api_keys[0]"),
        ('"secret"', "auth.api_keys"),
    ],
)
def test_a_bad_api_key_is_named_by_its_place(refusal: Callable[..., str], written: str, key: str) -> None:
    assert refusal(f"[auth]\napi_keys = {written}").startswith(f"{key} is ")


@pytest.mark.parametrize(
    ("written", "start"),
    [
        ('["x", "x"]', "auth.api_keys[1].key is an earlier key once more; allowed: each key once"),
        (
            '[{name = "n", key = "x"}, {name = "n", key = "y"}]',
            'auth.api_keys[1].name is "n" once more; allowed: each name once',
        ),
    ],
)
def test_api_keys_and_their_names_are_unique(refusal: Callable[..., str], written: str, start: str) -> None:
    assert refusal(f"[auth]\napi_keys = {written}").startswith(start)


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ('[auth]\napi_keys = ["hush hush"]', {}),
        ('[auth]\napi_keys = ["hush", "hush"]', {}),
        ('[auth]\napi_key = "hush"', {}),
        ('[auth]\napi_keys = "hush"', {}),
        ('[auth]\napi_keys = [{key = "hush"}]', {}),
        ("", {"SEPP_AUTH__API_KEYS": "hush"}),
        ("", {"SEPP_AUTH__API_KEY": "hush"}),
    ],
)
def test_no_error_text_shows_an_api_key(refusal: Callable[..., str], text: str, environ: dict[str, str]) -> None:
    assert "hush" not in refusal(text, environ)


def test_no_representation_shows_an_api_key() -> None:
    assert "hush" not in repr(made("auth.api_keys", ["hush"]))


# ---- rules over several keys ----


@pytest.mark.parametrize(("set_key", "unset_key"), [("cert", "key"), ("key", "cert")])
def test_half_of_a_tls_pair_is_refused(refusal: Callable[..., str], set_key: str, unset_key: str) -> None:
    text = refusal(f'[server]\ntls_{set_key}_path = "x.pem"')

    assert text == f"server.tls_{unset_key}_path is unset; allowed: a path, because server.tls_{set_key}_path is set"


def test_a_whole_tls_pair_is_accepted(load_text: Load) -> None:
    server = load_text('[server]\ntls_cert_path = "c.pem"\ntls_key_path = "k.pem"').config.server

    assert (server.tls_cert_path, server.tls_key_path) == (Path("c.pem"), Path("k.pem"))


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("max_attempts_ceiling = 2", "limits.default_max_attempts is 3; allowed: at most 2, its max_attempts_ceiling"),
        (
            "default_max_attempts = 101",
            "limits.default_max_attempts is 101; allowed: at most 100, its max_attempts_ceiling (in ",
        ),
        (
            "retry_delay_ms = 3600001",
            "limits.retry_delay_ms is 3600001; allowed: at most 3600000, its retry_delay_max_ms (in ",
        ),
        (
            "max_payload_bytes = 16777217",
            "limits.max_payload_bytes is 16777217; allowed: an integer from 1 to 16777216, which is limits.max_message",
        ),
        ("max_message_bytes = 1048575", "limits.max_payload_bytes is 1048576; allowed: an integer from 1 to 1048575"),
    ],
)
def test_a_limit_that_another_limit_forbids_is_refused(refusal: Callable[..., str], text: str, start: str) -> None:
    assert refusal(f"[limits]\n{text}").startswith(start)


@pytest.mark.parametrize(
    "text",
    [
        "max_attempts_ceiling = 3",
        "default_max_attempts = 100",
        "retry_delay_ms = 3600000",
        "max_payload_bytes = 16777216",
        "max_message_bytes = 1048576",
    ],
)
def test_a_limit_may_be_equal_to_the_one_above_it(load_text: Load, text: str) -> None:
    name, value = text.split(" = ")

    assert getattr(load_text(f"[limits]\n{text}").config.limits, name) == int(value)


# ---- queues ----


@pytest.mark.parametrize(
    ("limits", "queue", "start"),
    [
        ("", "max_attempts_ceiling = 2", "queues[0].max_attempts_ceiling is 2; allowed: at least 3, its default_max_"),
        ("", "default_max_attempts = 101", "queues[0].default_max_attempts is 101; allowed: at most 100, its max_att"),
        ("", "retry_delay_max_ms = 1\nretry_delay_ms = 2", "queues[0].retry_delay_ms is 2; allowed: at most 1, its r"),
        ("retry_delay_ms = 5", "retry_delay_max_ms = 4", "queues[0].retry_delay_max_ms is 4; allowed: at least 5, it"),
        ("", "max_payload_bytes = 16777217", "queues[0].max_payload_bytes is 16777217; allowed: an integer from 1 to"),
        ("", "default_priority = 10", "queues[0].default_priority is 10; allowed: an integer from 0 to 9 (in "),
        ("", 'retry_backoff = "linear"', 'queues[0].retry_backoff is "linear"; allowed: "none" or "exponential" (in '),
        ("", 'allowed_encodings = [""]', 'queues[0].allowed_encodings[0] is ""; allowed: a list of non-empty strings'),
        ("", "allowed_job_types = []", "queues[0].allowed_job_types is []; allowed: a list of at least one job type"),
        ("", 'allowed_job_types = ["a", ""]', 'queues[0].allowed_job_types[1] is ""; allowed: a list of at least one'),
    ],
)
def test_a_queue_is_checked_with_what_it_inherits(
    refusal: Callable[..., str], limits: str, queue: str, start: str
) -> None:
    assert refusal(f'[limits]\n{limits}\n[[queues]]\nname = "mail"\n{queue}').startswith(start)


def test_a_queues_own_values_make_a_pair_valid_that_the_limits_alone_would_not(load_text: Load) -> None:
    queue = load_text('[[queues]]\nname = "mail"\ndefault_max_attempts = 200\nmax_attempts_ceiling = 200').config

    assert queue.effective("mail").default_max_attempts == 200


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "a\nb", "a\x00", "\x7f", "\x85"])
def test_a_queue_with_a_name_that_no_job_may_have_is_refused(refusal: Callable[..., str], name: str) -> None:
    text = refusal(f"[[queues]]\nname = {json.dumps(name).replace(chr(0x7F), chr(92) + 'u007f')}")

    assert text.startswith("queues[0].name is ")
    assert "; allowed: a name of at most limits.max_queue_name_bytes bytes" in text


@pytest.mark.parametrize("name", ["...", "a.b", "a b", "\u00fc" * 256])
def test_a_queue_may_have_any_other_name(name: str) -> None:
    assert Config.model_validate({"queues": [{"name": name}]}).effective(name).declared


def test_a_queue_name_is_measured_in_bytes(refusal: Callable[..., str]) -> None:
    text = refusal('[limits]\nmax_queue_name_bytes = 3\n[[queues]]\nname = "abc"\n[[queues]]\nname = "\u00fc\u00fc"')

    assert text.startswith(
        'queues[1].name is "\u00fc\u00fc", which has 4 bytes; allowed: a name of at most 3 bytes, which is limits.max_'
    )


def test_a_queue_is_declared_once(refusal: Callable[..., str]) -> None:
    text = refusal('[[queues]]\nname = "a"\n[[queues]]\nname = "b"\n[[queues]]\nname = "a"')

    assert text.startswith('queues[2].name is "a" once more; allowed: each name once')


def test_a_queue_needs_a_name(refusal: Callable[..., str]) -> None:
    assert refusal("[[queues]]\ndefault_priority = 1").startswith("queues[0].name is unset; allowed: a name of at most")


def test_a_declared_queue_takes_its_own_values_and_inherits_the_rest(load_text: Load) -> None:
    loaded = load_text(
        "[limits]\nmax_queue_depth = 5\nmax_custom_entries = 7\n"
        "[storage]\ndedup_window_ms = 9\n"
        '[[queues]]\nname = "mail"\nmax_queue_depth = 0\nallowed_encodings = []\nallowed_job_types = ["welcome"]\n'
    )

    assert loaded.config.effective("mail") == QueueLimits(
        max_lease_duration_ms=300_000,
        default_max_attempts=3,
        max_attempts_ceiling=100,
        default_priority=0,
        retry_delay_ms=0,
        retry_backoff="none",
        retry_delay_max_ms=3_600_000,
        max_payload_bytes=1_048_576,
        allowed_encodings=(),
        max_schedule_horizon_ms=2_592_000_000,
        max_custom_entries=7,
        max_custom_total_bytes=16_384,
        max_custom_key_bytes=256,
        dedup_window_ms=9,
        max_queue_depth=0,
        allowed_job_types=("welcome",),
        declared=True,
    )


def test_queues_that_are_not_declared_share_one_object() -> None:
    loaded = with_queue(default_priority=4)

    assert loaded.effective("one") is loaded.effective("two")
    assert not loaded.effective("one").declared
    assert loaded.effective("one").default_priority == 0
    assert loaded.effective("mail") is loaded.effective("mail")


# ---- unknown keys ----


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("[limits]\nmax_paylod_bytes = 5", "limits.max_paylod_bytes is not known (it holds 5); did you mean max_pay"),
        ("[logging]\ncolour = true", "logging.colour is not known (it holds true); allowed: level, format (in "),
        ("[sever]\nx = 1", 'sever is not known (it holds {"x": 1}); did you mean server? (in '),
        ("routers = 1", "routers is not known (it holds 1); "),
        ('[[queues]]\nname = "a"\nmax_depth = 1', "queues[0].max_depth is not known (it holds 1); "),
        (
            '[server]\n"a\\nb" = "c\\nd"',
            'server."a\\nb" is not known (it holds "c\\nd"); allowed: listen_addr, db_path',
        ),
    ],
)
def test_an_unknown_key_is_refused_by_name(refusal: Callable[..., str], text: str, start: str) -> None:
    assert refusal(text).startswith(start)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("server = 5", "server is 5; allowed: a table (in "),
        ("[[limits]]\nmax_reserve_batch = 1", 'limits is [{"max_reserve_batch": 1}]; allowed: a table (in '),
        ("queues = 5", "queues is 5; allowed: a list of tables, each with a name (in "),
        ('[queues]\nname = "a"', 'queues is {"name": "a"}; allowed: a list of tables, each with a name (in '),
        ("queues = [5]", "queues[0] is 5; allowed: a list of tables, each with a name (in "),
    ],
)
def test_a_section_of_the_wrong_shape_is_refused_by_name(refusal: Callable[..., str], text: str, start: str) -> None:
    assert refusal(text).startswith(start)


def test_a_long_value_is_cut_in_the_error_text(refusal: Callable[..., str]) -> None:
    assert f'is "{"x" * 78}\u2026; allowed' in refusal(f'[logging]\nformat = "{"x" * 5000}"')


# ---- files ----


def test_a_file_that_is_named_must_exist(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"

    with pytest.raises(ConfigError, match=re.escape(f"{missing}: there is no such configuration file")):
        config.load(missing, {})
    with pytest.raises(ConfigError, match=re.escape(f"{missing}: there is no such configuration file")):
        config.load(None, {"SEPP_CONFIG": str(missing)})


def test_the_default_file_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    loaded = config.load(None, {})

    assert (loaded.config, loaded.path, loaded.warnings) == (Config(), None, [])


def test_the_default_file_is_read_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sepp.toml").write_text("[server]\nrouters = 3\n")
    monkeypatch.chdir(tmp_path)

    loaded = config.load(None, {})

    assert (loaded.path, loaded.config.server.routers) == (Path("sepp.toml"), 3)


def test_a_path_wins_over_sepp_config_and_that_over_the_default_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, routers in (("sepp.toml", 1), ("variable.toml", 2), ("given.toml", 3)):
        (tmp_path / name).write_text(f"[server]\nrouters = {routers}\n")
    monkeypatch.chdir(tmp_path)
    environ = {"SEPP_CONFIG": "variable.toml"}

    assert config.load(None, environ).config.server.routers == 2
    assert config.load(Path("given.toml"), environ).config.server.routers == 3


@pytest.mark.parametrize(
    ("written", "line"),
    [
        (b"[server]\nrouters = \n", "line 2"),
        (b"[server]\n\nrouters", "line 3"),
        (b"[server]\nrouters = 1\n[server]\n", "line 3"),
        (b"[server]\ndb_path = '\xff'\n", "line 2"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, written: bytes, line: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(written)

    with pytest.raises(ConfigError) as caught:
        config.load(path, {})

    text = str(caught.value)
    assert text.startswith(f"{path}: not ")
    assert line in text
    assert "\n" not in text


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: cannot be read: Is a directory")):
        config.load(tmp_path, {})


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf[server]\nrouters = 2\n")

    assert config.load(path, {}).config.server.routers == 2


# ---- environment ----


@pytest.mark.parametrize(
    ("variable", "raw", "value"),
    [
        ("SEPP_SERVER__LISTEN_ADDR", "127.0.0.1:0", "127.0.0.1:0"),
        ("SEPP_SERVER__LISTEN_ADDR", '"127.0.0.1:0"', "127.0.0.1:0"),
        ("SEPP_SERVER__DB_PATH", "/data/a b", Path("/data/a b")),
        ("SEPP_SERVER__STRICT_QUEUES", "true", True),
        ("SEPP_SERVER__ROUTERS", "3", 3),
        ("SEPP_SERVER__ROUTERS", "null", None),
        ("SEPP_SERVER__GRPC_FRONT", "aio", "aio"),
        ("SEPP_LIMITS__MAX_SCHEDULE_HORIZON_MS", "1_000", 1_000),
        ("SEPP_LIMITS__RETRY_BACKOFF", "exponential", "exponential"),
        ("SEPP_LIMITS__ALLOWED_ENCODINGS", '["json", "raw"]', ("json", "raw")),
        ("SEPP_LIMITS__ALLOWED_ENCODINGS", "['json']", ("json",)),
        ("SEPP_LIMITS__ALLOWED_ENCODINGS", "[]", ()),
        ("SEPP_LOGGING__LEVEL", "debug", "debug"),
        ("SEPP_METRICS__PROMETHEUS_LISTEN_ADDR", "[::1]:1", "[::1]:1"),
    ],
)
def test_a_key_can_be_set_from_the_environment(load_text: Load, variable: str, raw: str, value: object) -> None:
    section, name = variable.removeprefix("SEPP_").lower().split("__")

    loaded = load_text("", {variable: raw})

    assert getattr(getattr(loaded.config, section), name) == value
    assert loaded.sources[f"{section}.{name}"] == "environment"


def test_every_key_can_be_set_from_the_environment(load_text: Load) -> None:
    # A path has no value that means unset.
    values = {("server", "tls_cert_path"): "c", ("server", "tls_key_path"): "k"}
    environ = {}
    for section, keys in DEFAULTS.items():
        for name, default in keys.items():
            value = values.get((section, name), default)
            environ[f"SEPP_{section}__{name}".upper()] = value if isinstance(value, str) else json.dumps(value)

    loaded = load_text("", environ)

    assert loaded.config == changed(server={"tls_cert_path": "c", "tls_key_path": "k"})
    assert {key for key, source in loaded.sources.items() if source != "environment"} == {"queues"}


@pytest.mark.parametrize("raw", ['[{name = "a", key = "k"}]', '[{"name": "a", "key": "k"}]'])
def test_tables_in_the_environment_are_toml_or_json(load_text: Load, raw: str) -> None:
    keys = load_text("", {"SEPP_AUTH__API_KEYS": raw}).config.auth.api_keys

    assert keys is not None
    assert [(key.name, key.key) for key in keys] == [("a", "k")]


def test_the_queues_can_be_set_from_the_environment(load_text: Load) -> None:
    loaded = load_text('[[queues]]\nname = "file"', {"SEPP_QUEUES": '[{"name": "mail", "default_priority": 2}]'})

    assert [queue.name for queue in loaded.config.queues] == ["mail"]
    assert loaded.config.effective("mail").default_priority == 2
    assert loaded.sources["queues"] == "environment"


def test_the_environment_wins_over_the_file_key_by_key(load_text: Load) -> None:
    loaded = load_text("[server]\nrouters = 2\nshards = 2", {"SEPP_SERVER__ROUTERS": "5"})

    assert (loaded.config.server.routers, loaded.config.server.shards) == (5, 2)
    assert loaded.sources["server.routers"] == "environment"
    assert loaded.sources["server.shards"] == "file"
    assert loaded.sources["server.db_path"] == "default"


def test_the_environment_can_mend_what_the_file_breaks(load_text: Load) -> None:
    assert load_text("[server]\nrouters = 0", {"SEPP_SERVER__ROUTERS": "1"}).config.server.routers == 1


@pytest.mark.parametrize(
    ("variable", "raw", "text"),
    [
        ("SEPP_SERVER__ROUTERS", "many", 'server.routers is "many"; allowed: an integer from 1 to 4096'),
        ("SEPP_SERVER__ROUTERS", "", 'server.routers is ""; allowed: an integer from 1 to 4096'),
        (
            "SEPP_SERVER__ROUTERS",
            "1\nshards = 1",
            'server.routers is "1\\nshards = 1"; allowed: an integer from 1 to 4096',
        ),
        ("SEPP_SERVER__STRICT_QUEUES", "yes", 'server.strict_queues is "yes"; allowed: true or false'),
        ("SEPP_LIMITS__ALLOWED_ENCODINGS", "json", 'limits.allowed_encodings is "json"; allowed: a list of non-empty'),
        ("SEPP_LIMITS__MAX_PAYLOD_BYTES", "1", 'limits.max_paylod_bytes is not known (it holds "1"); did you mean max'),
        ("SEPP_SERVR__ROUTERS", "1", 'servr.routers is not known (it holds "1"); did you mean server?'),
        ("SEPP_QUEUES__NAME", "a", 'queues.name is not known (it holds "a"); '),
    ],
)
def test_a_bad_variable_is_named_with_its_key(refusal: Callable[..., str], variable: str, raw: str, text: str) -> None:
    found = refusal("", {variable: raw})

    assert found.startswith(text)
    assert found.endswith(f" (set by {variable})")


def test_variables_of_others_are_left_alone(load_text: Load) -> None:
    loaded = load_text("", {"SEPP_TEST_ADDR": "x", "SEPP_CONFIG": "/ignored", "OTHER_SERVER__ROUTERS": "x"})

    assert loaded.config == Config()


# ---- the reference server's file ----


def test_keys_of_the_reference_server_are_ignored_with_a_warning(load_text: Load) -> None:
    loaded = load_text(
        "[admin]\nenabled = true\nkeys = [{ name = 'a', role = 'viewer' }]\n"
        "[tracing]\nenabled = false\n"
        "[metrics]\nenabled = false\notlp_endpoint = 'x'\nexport_interval_ms = 1\n"
        "[storage]\nmax_journaling_size_bytes = 1\nmax_cached_files = 1\nworker_threads = 1\n",
        {"SEPP_ADMIN__ENABLED": "false"},
    )

    assert loaded.config == Config()
    assert [warning.split(" ")[0] for warning in loaded.warnings] == [
        "[admin]",
        "[tracing]",
        "metrics.enabled",
        "metrics.export_interval_ms",
        "metrics.otlp_endpoint",
        "storage.max_cached_files",
        "storage.max_journaling_size_bytes",
        "storage.worker_threads",
        "admin.enabled",
    ]


def test_a_log_filter_by_target_is_taken_for_its_level_with_a_warning(load_text: Load) -> None:
    loaded = load_text('[logging]\nlevel = "warn,http=debug"')

    assert loaded.config.logging.level == "warning"
    assert loaded.warnings == [
        'logging.level is "warn,http=debug": filters by target have no use here, the level is warning'
    ]


# ---- sizes that clients cannot receive ----

# Payload, custom map, queue name, job type and 1 024 bytes for the rest fill 4 MiB.
LARGEST_QUIET_PAYLOAD = 4_194_304 - 16_384 - 512 - 256 - 1_024


@pytest.mark.parametrize(("extra", "warned"), [(0, []), (1, ["limits.max_payload_bytes"])])
def test_a_payload_that_default_clients_cannot_receive_gets_a_warning(
    load_text: Load, extra: int, warned: list[str]
) -> None:
    loaded = load_text(f"[limits]\nmax_payload_bytes = {LARGEST_QUIET_PAYLOAD + extra}")

    assert [warning.split(" ")[0] for warning in loaded.warnings] == warned


def test_a_queue_with_such_payloads_gets_a_warning_of_its_own(load_text: Load) -> None:
    loaded = load_text('[[queues]]\nname = "a"\n[[queues]]\nname = "b"\nmax_payload_bytes = 4194304')

    assert [warning.split(" ")[0] for warning in loaded.warnings] == ["queues[1].max_payload_bytes"]


def test_answers_that_default_clients_cannot_receive_get_a_warning(load_text: Load) -> None:
    loaded = load_text("[limits]\nmax_response_bytes = 4194305")

    assert [warning.split(" ")[0] for warning in loaded.warnings] == ["limits.max_response_bytes"]


# ---- the way to another process ----


def test_a_configuration_arrives_equal_in_another_process(load_text: Load) -> None:
    sent = load_text(
        '[server]\ndb_path = "/data"\ntls_cert_path = "c"\ntls_key_path = "k"\nrouters = 2\n'
        '[auth]\napi_keys = ["a", { name = "b", key = "c" }]\n'
        "[limits]\nallowed_encodings = []\nmax_queue_depth = 0\n"
        '[[queues]]\nname = "mail"\nallowed_job_types = ["x"]\nretry_backoff = "exponential"\n'
    ).config

    arrived = Config.model_validate(json.loads(json.dumps(sent.model_dump(mode="json"))))

    assert arrived == sent
    assert arrived.effective("mail") == sent.effective("mail")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().limits.max_payload_bytes = 1


# ---- reloading ----


def changed(**sections: Any) -> Config:
    return Config.model_validate(sections)


@pytest.mark.parametrize("key", RESTART_ONLY)
def test_a_key_that_needs_a_restart_is_named_and_kept(key: str) -> None:
    old, new = Config(), made(key, RESTART_ONLY[key])

    assert config.restart_keys(old, new) == [key]
    assert config.with_live(old, new) == old


def test_the_tls_files_need_a_restart() -> None:
    new = changed(server={"tls_cert_path": "c", "tls_key_path": "k"})

    assert config.restart_keys(Config(), new) == ["server.tls_cert_path", "server.tls_key_path"]
    assert config.with_live(Config(), new) == Config()


LIVE: dict[str, object] = {
    "server.strict_queues": True,
    "server.shutdown_grace_ms": 7,
    "auth.api_keys": ["a"],
    "storage.dedup_window_ms": 7,
    "limits.retry_backoff": "exponential",
    "limits.allowed_encodings": ["a"],
    "limits.default_max_attempts": 4,
    "limits.max_response_bytes": 70_000,
} | {
    key: 7
    for key, *_ in BOUNDS
    if key.startswith("limits.")
    and key not in ("limits.max_message_bytes", "limits.default_max_attempts", "limits.max_response_bytes")
}


@pytest.mark.parametrize("key", LIVE)
def test_a_live_key_is_taken_over_without_a_restart(key: str) -> None:
    new = made(key, LIVE[key])

    assert new != Config()
    assert config.restart_keys(Config(), new) == []
    assert config.with_live(Config(), new) == new


def test_every_key_either_reloads_or_needs_a_restart() -> None:
    keys = {f"{section}.{name}" for section, names in DEFAULTS.items() for name in names}

    assert set(LIVE) | set(RESTART_ONLY) | {"server.tls_cert_path", "server.tls_key_path"} == keys
    assert not set(LIVE) & set(RESTART_ONLY)


def test_queues_are_taken_over_without_a_restart() -> None:
    new = with_queue(default_priority=3)

    assert config.restart_keys(Config(), new) == []
    assert config.with_live(Config(), new).effective("mail").default_priority == 3


def test_a_reload_takes_live_keys_from_the_new_file_and_the_rest_from_the_running_server() -> None:
    old = changed(server={"routers": 1}, limits={"default_priority": 1})
    new = changed(server={"routers": 2}, limits={"default_priority": 2})

    mixed = config.with_live(old, new)

    assert (mixed.server.routers, mixed.limits.default_priority) == (1, 2)


def test_a_reload_whose_live_keys_do_not_fit_the_running_server_is_refused() -> None:
    new = changed(limits={"max_message_bytes": 40_000_000, "max_payload_bytes": 30_000_000})

    with pytest.raises(
        ConfigError, match=r"^limits\.max_payload_bytes is 30000000; allowed: an integer from 1 to 1677"
    ):
        config.with_live(Config(), new)


# ---- the example file ----


def uncommented(text: str) -> str:
    return re.sub(r"(?m)^#(?=[a-z_]+ = )", "", text)


def with_examples(text: str) -> str:
    return re.sub(r"(?m)^# Example: ", "", uncommented(text))


def test_the_example_file_changes_nothing_as_it_is(load_text: Load) -> None:
    assert load_text(config.example()).config == Config()


def test_the_example_file_uncommented_is_the_defaults(load_text: Load) -> None:
    loaded = load_text(uncommented(config.example()))

    assert loaded.config == Config()
    assert loaded.warnings == []
    unset = {f"{section}.{name}" for section, keys in DEFAULTS.items() for name, value in keys.items() if value is None}
    assert {key for key, source in loaded.sources.items() if source == "default"} == unset | {"queues"}


def test_every_example_in_the_example_file_is_valid(load_text: Load) -> None:
    loaded = load_text(with_examples(config.example()))

    assert "default" not in loaded.sources.values()
    assert loaded.config.effective("mail").allowed_job_types == ("welcome", "receipt")


def test_every_key_in_the_example_file_says_what_it_does() -> None:
    text = config.example()

    for section, keys in DEFAULTS.items():
        for name in keys:
            block = re.search(rf"(?m)^# (.+)\n# Allowed: (.+)\.\n#(?: Example: )?{name} = ", text)
            assert block is not None, f"{section}.{name}"
