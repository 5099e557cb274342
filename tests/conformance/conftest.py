"""Servers that all tests in here share, each with a configuration of its own; started when first asked for.

They live as long as the session, whatever the order of the tests: every test uses queues of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conformance.service import Service
from tests.integration.server import Server

# Limits so small that a test can stand on both sides of each.
LIMITED = """
[limits]
max_lease_duration_ms = 60000
default_max_attempts = 3
max_attempts_ceiling = 5
default_priority = 2
max_reserve_batch = 4
max_reserve_queues = 3
max_wait_timeout_ms = 300
max_enqueue_batch = 6
max_payload_bytes = 64
max_custom_entries = 3
max_custom_total_bytes = 40
max_custom_key_bytes = 8
max_queue_name_bytes = 24
max_job_type_bytes = 12
max_idempotency_key_bytes = 10
max_schedule_horizon_ms = 3600000
[storage]
dead_letter_retention_ms = 600000
[[queues]]
name = "lean"
max_lease_duration_ms = 5000
default_priority = 7
default_max_attempts = 1
max_attempts_ceiling = 2
[[queues]]
name = "small"
max_payload_bytes = 8
max_custom_entries = 1
max_custom_total_bytes = 10
max_custom_key_bytes = 4
max_schedule_horizon_ms = 60000
[[queues]]
name = "soon"
max_schedule_horizon_ms = 200
[[queues]]
name = "typed"
allowed_job_types = ["mail", "sms"]
[[queues]]
name = "encoded"
allowed_encodings = ["json", "cbor"]
[[queues]]
name = "sealed"
allowed_encodings = []
[[queues]]
name = "choosy"
allowed_job_types = ["letter"]
allowed_encodings = ["json"]
[[queues]]
name = "steady"
retry_delay_ms = 200
[[queues]]
name = "backoff"
retry_delay_ms = 100
retry_backoff = "exponential"
retry_delay_max_ms = 300
[[queues]]
name = "shut"
max_queue_depth = 0
"""
# Queues of depth 2, one for each test that fills one.
CAPPED = tuple(f"capped-{number}" for number in range(10))
LIMITED += "".join(f'[[queues]]\nname = "{name}"\nmax_queue_depth = 2\n' for name in CAPPED)

STRICT = """
[server]
strict_queues = true
[limits]
allowed_encodings = ["json", "cbor"]
max_queue_name_bytes = 24
[[queues]]
name = "known"
[[queues]]
name = "raw"
allowed_encodings = ["raw"]
"""

KEYED = """
[auth]
api_keys = [{ name = "first", key = "key-one" }, { name = "second", key = "key-two" }]
[limits]
allowed_encodings = []
"""

LOCKED = """
[auth]
api_keys = []
"""

# What is kept for a while only is kept for less than a test takes.
BRIEF = """
[storage]
dead_letter_retention_ms = 200
dedup_window_ms = 200
"""


@contextmanager
def serving(toml: str, shards: int = 1) -> Iterator[Service]:
    with Server(shards=shards, toml=toml) as server:
        service = Service(server.start().address)
        try:
            yield service
        finally:
            service.close()


@pytest.fixture(scope="session")
def limited() -> Iterator[Service]:
    """A server with two shards and small limits."""
    with serving(LIMITED, shards=2) as service:
        yield service


@pytest.fixture(scope="session")
def strict() -> Iterator[Service]:
    """A server that knows two queues, `known` and `raw`, and wants JSON or CBOR."""
    with serving(STRICT) as service:
        yield service


@pytest.fixture(scope="session")
def plain() -> Iterator[Service]:
    """A server with nothing configured."""
    with serving("") as service:
        yield service


@pytest.fixture(scope="session")
def keyed() -> Iterator[Service]:
    """A server with two API keys that takes no payloads."""
    with serving(KEYED) as service:
        yield service


@pytest.fixture(scope="session")
def locked() -> Iterator[Service]:
    """A server with an empty list of API keys."""
    with serving(LOCKED) as service:
        yield service


@pytest.fixture(scope="session")
def brief() -> Iterator[Service]:
    """A server that forgets dead letters and idempotency keys after 200 ms."""
    with serving(BRIEF) as service:
        yield service
