"""What a router's core does with any call, and what it remembers of calls that have ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common import queue_pb2 as pb
from router import core as core_module
from router import outbound
from router.front import METHODS, Status
from tests.unit.router_driver import (
    VERSION,
    WALL_MS,
    RouterDriver,
    assert_idle,
    configured,
    drivers,
    job_id_on,
    leased,
    queue_on,
)

KEYED = {"api_keys": [{"name": "one", "key": "first-key"}, {"name": "two", "key": "second-key"}]}
METHODS_WITH_TEXT = ("EnqueueBatch", "EnqueueAtomic", "Reserve", "Ack", "Nack", "Extend", "DrainDeadLetters")


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


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message_are_an_internal_error(router: RouterDriver, method: str) -> None:
    call = router.call(method, b"\xff")
    assert router.failure(call).status == Status.INTERNAL


@pytest.mark.parametrize("method", METHODS_WITH_TEXT)
def test_text_that_is_not_utf_8_is_an_internal_error(router: RouterDriver, method: str) -> None:
    # Field 1 is text, a list of texts, or a message whose field 1 is text.
    request = b"\x0a\x04\x0a\x02\xff\xfe" if method.startswith("Enqueue") else b"\x0a\x02\xff\xfe"
    call = router.call(method, request)
    assert router.failure(call).status == Status.INTERNAL


@pytest.mark.parametrize("method", METHODS_WITH_TEXT[:6])
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


def test_a_call_for_several_shards_is_refused_when_one_of_them_is_full(narrow: RouterDriver) -> None:
    for number in range(3):
        narrow.ack(job_id_on(queue_on(0), number))
    calls = [narrow.enqueue(queue_on(1), queue_on(0)), narrow.reserve(queue_on(1), queue_on(0))]
    assert [narrow.failure(call).status for call in calls] == [Status.RESOURCE_EXHAUSTED] * 2
    assert narrow.shards[1].operations() == []


def test_a_full_shard_does_not_hinder_another(narrow: RouterDriver) -> None:
    for number in range(3):
        narrow.ack(job_id_on(queue_on(0), number))
    call = narrow.enqueue(queue_on(1))
    narrow.shards[1].serve()
    assert len(narrow.answer(call, pb.EnqueueBatchResponse).results) == 1


def test_operations_that_wait_for_a_shard_that_is_down_count_as_waiting(narrow: RouterDriver) -> None:
    narrow.shards[0].down()
    for number in range(3):
        narrow.ack(job_id_on(queue_on(0), number))
    assert narrow.failure(narrow.ack(job_id_on(queue_on(0)))).status == Status.RESOURCE_EXHAUSTED


def test_there_is_room_again_when_an_operation_is_answered(narrow: RouterDriver) -> None:
    for number in range(3):
        narrow.ack(job_id_on(queue_on(0), number))
    first, *_ = narrow.shards[0].operations()
    narrow.shards[0].answer(first)
    assert not narrow.is_answered(narrow.ack(job_id_on(queue_on(0))))


def test_there_is_room_again_when_operations_are_withdrawn(narrow: RouterDriver) -> None:
    narrow.shards[0].down()
    for number in range(3):
        narrow.ack(job_id_on(queue_on(0), number), deadline=narrow.in_ms(1_000))
    narrow.pass_ms(1_000)
    assert not narrow.is_answered(narrow.ack(job_id_on(queue_on(0))))


def test_there_is_room_again_when_operations_are_lost(narrow: RouterDriver) -> None:
    for number in range(2):
        narrow.ack(job_id_on(queue_on(0), number))
    narrow.shards[0].restart()
    calls = [narrow.ack(job_id_on(queue_on(0), number)) for number in range(3)]
    assert not any(narrow.is_answered(call) for call in calls)


def test_parked_polls_do_not_count_as_waiting(narrow: RouterDriver) -> None:
    for _ in range(5):
        narrow.reserve(queue_on(0), wait_ms=60_000)
        narrow.reserve(queue_on(0), queue_on(1), wait_ms=60_000)
        narrow.serve()
    assert not narrow.is_answered(narrow.ack(job_id_on(queue_on(0))))


def test_a_shard_is_full_as_well_when_too_many_bytes_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "WAITING_BYTES_MAX", 1_000)
    router = RouterDriver()
    job = pb.EnqueueRequest(queue=queue_on(0), job_type="t", payload=pb.Payload(data=bytes(999), encoding="e"))
    router.call("EnqueueBatch", pb.EnqueueBatchRequest(jobs=[job]))
    assert router.failure(router.ack(job_id_on(queue_on(0)))).status == Status.RESOURCE_EXHAUSTED
    router.serve()
    assert not router.is_answered(router.ack(job_id_on(queue_on(0))))
    router.finish()


# ---- memory


def test_timers_of_waits_that_ended_early_do_not_pile_up(router: RouterDriver) -> None:
    for _ in range(6_000):
        call = router.reserve(queue_on(0), wait_ms=300_000)
        router.shards[0].answer(router.shards[0].operation(), [leased(queue_on(0))])
        router.left(call)
    assert len(router.core._timers) <= 4_096


def test_timers_are_seldom_sorted_out_while_all_of_them_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    monkeypatch.setattr(core_module, "heapify", lambda timers: rounds.append(len(timers)))
    router = RouterDriver(config=configured(storage={"command_queue_capacity": 20_000}), up=False)
    for number in range(6_000):
        router.ack(job_id_on(queue_on(0), number))
    assert len(rounds) <= 2
    router.finish()


def test_calls_that_give_up_while_a_shard_is_down_do_not_pile_up() -> None:
    router = RouterDriver(up=False)
    for _ in range(1_000):
        router.enqueue(queue_on(0), deadline=router.in_ms(100))
        router.pass_ms(100)
    assert len(router.core.shards[0]._unsent) <= 200
    router.finish()


def test_calls_that_give_up_before_they_are_sent_do_not_pile_up(router: RouterDriver) -> None:
    calls = [router.ack(job_id_on(queue_on(0), number)) for number in range(2)]
    for _ in range(1_000):
        router.closed(router.reserve(queue_on(0)))
    assert len(router.core.shards[0]._unsent) <= 200
    assert len(router.shards[0].operations()) == len(calls)


def test_a_poll_that_was_answered_is_remembered_until_its_answer_has_left(router: RouterDriver) -> None:
    call = router.reserve(queue_on(0))
    router.serve()
    assert len(router.core._watched) == 1
    router.left(call)
    assert_idle(router.core)


def test_the_end_of_a_call_that_was_refused_means_nothing(router: RouterDriver) -> None:
    call = router.reserve("")
    assert router.failure(call).status == Status.INVALID_ARGUMENT
    router.left(call)
    router.closed(call)
    assert_idle(router.core)
