"""What a router's core does with any call, and what it remembers of calls that have ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common import queue_pb2 as pb
from router import core as core_module
from router.core import HOLD_MS
from router.front import Status
from tests.unit.router_driver import (
    VERSION,
    WALL_MS,
    RouterDriver,
    configured,
    drivers,
    job_id_on,
    leased,
    queue_on,
)

KEYED = {"api_keys": [{"name": "one", "key": "first-key"}, {"name": "two", "key": "second-key"}]}
ALL_METHODS = ("EnqueueBatch", "Reserve", "Ack", "Nack", "Extend", "GetServerInfo")


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    yield from drivers()


# ---- arrival


def test_server_info_is_answered_without_a_shard() -> None:
    router = RouterDriver(up=False)
    info = router.answer(router.call("GetServerInfo"), pb.GetServerInfoResponse)
    assert (info.server_version, info.server_time.ToMilliseconds(), info.max_reserve_batch) == (VERSION, WALL_MS, 256)


def test_an_unknown_method_is_unimplemented(router: RouterDriver) -> None:
    call = router.call("Requeue")
    assert router.failure(call).status == Status.UNIMPLEMENTED


@pytest.mark.parametrize("method", ALL_METHODS)
def test_bytes_that_are_no_message_are_an_internal_error(router: RouterDriver, method: str) -> None:
    call = router.call(method, b"\xff")
    assert router.failure(call).status == Status.INTERNAL


@pytest.mark.parametrize("method", ALL_METHODS[:5])
def test_text_that_is_not_utf_8_is_an_internal_error(router: RouterDriver, method: str) -> None:
    # Field 1 is text, a list of texts, or a message whose field 1 is text.
    request = b"\x0a\x04\x0a\x02\xff\xfe" if method == "EnqueueBatch" else b"\x0a\x02\xff\xfe"
    call = router.call(method, request)
    assert router.failure(call).status == Status.INTERNAL


@pytest.mark.parametrize("method", ALL_METHODS[:5])
def test_an_empty_request_is_an_invalid_argument(router: RouterDriver, method: str) -> None:
    call = router.call(method)
    assert router.failure(call).status == Status.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer other-key",
        "Bearer first-key ",
        "Bearer  first-key",
        "bearer first-key",
        "first-key",
        "Basic first-key",
    ],
)
@pytest.mark.parametrize("method", ["GetServerInfo", "Reserve", "Requeue"])
def test_a_call_without_a_listed_key_is_unauthenticated(method: str, authorization: str | None) -> None:
    router = RouterDriver(config=configured(auth=KEYED))
    call = router.call(method, authorization=authorization)
    assert router.failure(call).status == Status.UNAUTHENTICATED


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_a_call_with_any_listed_key_is_served(key: str) -> None:
    router = RouterDriver(config=configured(auth=KEYED))
    call = router.call("GetServerInfo", authorization=f"Bearer {key}")
    assert router.answer(call, pb.GetServerInfoResponse).server_version == VERSION


def test_an_empty_list_of_keys_refuses_everybody() -> None:
    router = RouterDriver(config=configured(auth={"api_keys": []}))
    call = router.call("GetServerInfo", authorization="Bearer ")
    assert router.failure(call).status == Status.UNAUTHENTICATED


def test_a_new_configuration_holds_from_the_next_call_on(router: RouterDriver) -> None:
    before = router.call("GetServerInfo")
    router.core.configure(configured(limits={"max_reserve_batch": 7}, auth=KEYED))
    refused = router.call("GetServerInfo")
    after = router.call("GetServerInfo", authorization="Bearer first-key")
    assert router.answer(before, pb.GetServerInfoResponse).max_reserve_batch == 256
    assert router.failure(refused).status == Status.UNAUTHENTICATED
    assert router.answer(after, pb.GetServerInfoResponse).max_reserve_batch == 7


# ---- capacity


@pytest.fixture
def narrow() -> Iterator[RouterDriver]:
    """A router that lets three operations wait for a shard."""
    yield from drivers(config=configured(storage={"command_queue_capacity": 3}))


def test_what_exceeds_the_capacity_of_a_shard_is_refused_at_once(narrow: RouterDriver) -> None:
    queue = queue_on(0)
    waiting = [narrow.ack(job_id_on(queue, number)) for number in range(3)]
    calls = [narrow.ack(job_id_on(queue)), narrow.enqueue(queue), narrow.reserve(queue)]
    assert [narrow.failure(call).status for call in calls] == [Status.RESOURCE_EXHAUSTED] * 3
    assert not any(narrow.is_answered(call) for call in waiting)
    _answer_all(narrow)


def test_operations_that_wait_for_a_shard_that_is_down_count_as_waiting(narrow: RouterDriver) -> None:
    narrow.shards[0].down()
    for number in range(3):
        narrow.ack(job_id_on(queue_on(0), number))
    assert narrow.failure(narrow.ack(job_id_on(queue_on(0)))).status == Status.RESOURCE_EXHAUSTED
    narrow.shards[0].up()
    _answer_all(narrow)


def test_there_is_room_again_when_an_operation_is_answered(narrow: RouterDriver) -> None:
    queue = queue_on(0)
    for number in range(3):
        narrow.ack(job_id_on(queue, number))
    first, *_ = narrow.shards[0].operations()
    narrow.shards[0].answer(first, number=1) if False else narrow.shards[0].answer(first)
    call = narrow.ack(job_id_on(queue))
    assert not narrow.is_answered(call)
    _answer_all(narrow)
