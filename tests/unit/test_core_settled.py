"""When a router may end: not before every shard knows what became of its answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.wire import LeasedJob
from tests.unit.router_driver import WALL_MS, RouterDriver, drivers, job_id_on, queue_on


@pytest.fixture
def driver() -> Iterator[RouterDriver]:
    yield from drivers()


def job(number: int = 0) -> LeasedJob:
    return LeasedJob(job_id_on(queue_on(0), number), 1, WALL_MS + 30_000, b"")


def test_a_router_without_calls_is_settled(driver: RouterDriver) -> None:
    assert driver.core.is_settled


def test_a_router_is_not_settled_before_a_shard_has_taken_that_an_answer_left(driver: RouterDriver) -> None:
    call = driver.reserve(queue_on(0))
    shard = driver.shards[0]
    shard.answer(shard.operation(), [job()])
    driver.left(call)
    assert not driver.core.is_settled, "the confirmation is on its way"
    shard.envelopes()
    assert len(shard.confirmed) == 1
    shard.send()
    assert driver.core.is_settled


def test_a_router_is_not_settled_while_a_confirmation_waits_for_its_turn(driver: RouterDriver) -> None:
    call = driver.reserve(queue_on(0))
    shard = driver.shards[0]
    shard.answer(shard.operation(), [job()])
    shard.crowd()
    driver.left(call)
    assert shard.confirmed == []
    assert not driver.core.is_settled
    driver.serve()
    assert len(shard.confirmed) == 1
    assert driver.core.is_settled


def test_what_is_given_back_to_a_shard_that_is_down_is_not_settled_before_its_successor_has_it(
    driver: RouterDriver,
) -> None:
    call = driver.reserve(queue_on(0))
    shard = driver.shards[0]
    shard.answer(shard.operation(), [job()])
    shard.down()
    driver.left(call, left=False)
    assert not driver.core.is_settled
    shard.up()
    shard.envelopes()
    shard.send()
    assert driver.core.is_settled
