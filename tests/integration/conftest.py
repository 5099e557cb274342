"""Servers to test against, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.integration.server import Server

StartServer = Callable[..., Server]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.fixture
def new_server() -> Iterator[StartServer]:
    """Makes servers, not started yet, with the arguments of `Server`; they end with the test."""
    with ExitStack() as servers:
        yield lambda **options: servers.enter_context(Server(**options))


@pytest.fixture(scope="module", params=[1, 4], ids=["1-shard", "4-shards"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server that the tests of a module share: each uses queues of its own."""
    shards: int = request.param
    with Server(shards=shards, routers=min(shards, 2)) as running:
        yield running.start()


@pytest.fixture(scope="module", params=["queue", "aio"])
def server_of_front(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server with each of the gRPC fronts."""
    with Server(front=request.param) as running:
        yield running.start()
