"""What becomes of claims whose answers never left, or whose router has ended."""

from __future__ import annotations

from common.wire import Strategy
from shard.machine import FAILED_PRECONDITION, NOT_FOUND
from shard.store import Family
from tests.unit import shard_driver
from tests.unit.shard_driver import LEASE_MS, OTHER_ROUTER, Shard, bodies, job, rows

home, shard = shard_driver.home, shard_driver.shard


# -- answers that never left ------------------------------------------------------------------


def test_a_job_given_back_has_the_same_attempt_and_place(shard: Shard) -> None:
    shard.enqueue_all(job(body=b"1"), job(body=b"2"), job(body=b"3"))
    shard.reserve(max_jobs=2)
    shard.give_back(shard.last_op)
    assert shard.counts() == (3, 0, 0, 0)
    assert [(leased.body, leased.attempt) for leased in shard.reserve(max_jobs=3)] == [(b"1", 1), (b"2", 1), (b"3", 1)]


def test_a_job_given_back_leaves_no_trace(shard: Shard) -> None:
    shard.enqueue_all(job(body=b"1", max_attempts=1), job(body=b"2", priority=3))
    before = [rows(shard.store, family) for family in Family if family != Family.QUEUES]
    shard.reserve(max_jobs=2)
    shard.give_back(shard.last_op)
    assert [rows(shard.store, family) for family in Family if family != Family.QUEUES] == before
    assert shard.next_wake_ms() is None


def test_a_job_given_back_on_its_last_attempt_is_delivered_again(shard: Shard) -> None:
    shard.enqueue(max_attempts=1)
    shard.reserve()
    shard.give_back(shard.last_op)
    assert [leased.attempt for leased in shard.reserve()] == [1]


def test_a_job_given_back_cannot_be_settled_under_the_old_lease(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.give_back(shard.last_op)
    assert shard.ack(leased) == NOT_FOUND


def test_a_confirmed_claim_is_not_given_back(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    claim = shard.last_op
    shard.confirm(claim)
    shard.give_back(claim)
    assert shard.counts() == (0, 0, 1, 0)
    assert shard.ack(leased) == 0


def test_giving_back_an_unknown_claim_does_nothing(shard: Shard) -> None:
    shard.enqueue()
    shard.give_back(4711)
    assert shard.counts() == (1, 0, 0, 0)


def test_a_claim_is_given_back_once(shard: Shard) -> None:
    shard.enqueue()
    shard.reserve()
    claim = shard.last_op
    shard.give_back(claim)
    leased = shard.reserve_one()
    shard.give_back(claim)
    assert shard.ack(leased) == 0


def test_a_lease_that_expired_meanwhile_is_not_given_back(shard: Shard) -> None:
    shard.enqueue()
    shard.reserve()
    claim = shard.last_op
    shard.pass_time(LEASE_MS)
    second = shard.reserve_one()
    shard.give_back(claim)
    assert shard.counts() == (0, 0, 1, 0)
    assert second.attempt == 2


def test_only_what_was_not_settled_of_a_claim_is_given_back(shard: Shard) -> None:
    shard.enqueue_all(*(job(body=b"%d" % number) for number in range(4)))
    taken = shard.reserve(max_jobs=4)
    claim = shard.last_op
    shard.ack(taken[0])
    shard.nack(taken[2], Strategy.DEAD_LETTER)
    shard.give_back(claim)
    assert [(leased.body, leased.attempt) for leased in shard.reserve(max_jobs=4)] == [(b"1", 1), (b"3", 1)]


def test_several_claims_are_given_back_together(shard: Shard) -> None:
    shard.enqueue_all(job(body=b"1"), job(body=b"2"))
    claims = []
    for _ in range(2):
        shard.reserve()
        claims.append(shard.last_op)
    shard.give_back(*reversed(claims))
    assert bodies(shard.reserve(max_jobs=2)) == [b"1", b"2"]


def test_claims_are_forgotten_when_their_leases_have_ended(shard: Shard) -> None:
    shard.enqueue_all(job(), job(), job(max_attempts=1))
    acked, nacked, _ = shard.reserve(max_jobs=3)
    shard.ack(acked)
    shard.nack(nacked, Strategy.DEAD_LETTER)
    shard.pass_time(LEASE_MS)
    assert shard.machine._claims == {}


# -- a router that has ended ------------------------------------------------------------------


def test_unconfirmed_leases_of_a_router_that_is_gone_end_with_the_next_attempt(shard: Shard) -> None:
    shard.enqueue(body=b"1")
    lost = shard.reserve_one()
    shard.router_gone()
    (again,) = shard.reserve(router=OTHER_ROUTER)
    assert (again.body, again.attempt) == (b"1", 2)
    assert shard.ack(lost) == FAILED_PRECONDITION
    assert shard.ack(again) == 0


def test_confirmed_leases_of_a_router_that_is_gone_stand(shard: Shard) -> None:
    shard.enqueue()
    leased = shard.reserve_one()
    shard.confirm(shard.last_op)
    shard.router_gone()
    assert shard.counts() == (0, 0, 1, 0)
    assert shard.ack(leased) == 0


def test_leases_of_other_routers_stand(shard: Shard) -> None:
    shard.enqueue()
    (leased,) = shard.reserve(router=OTHER_ROUTER)
    shard.router_gone()
    assert shard.ack(leased) == 0


def test_a_job_on_its_last_attempt_keeps_its_lease_when_the_router_is_gone(shard: Shard) -> None:
    shard.enqueue(max_attempts=1)
    leased = shard.reserve_one()
    shard.router_gone()
    assert shard.counts() == (0, 0, 1, 0)
    shard.pass_time(LEASE_MS - 1)
    assert shard.ack(leased) == 0
