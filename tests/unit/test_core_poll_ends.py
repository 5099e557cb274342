"""A Reserve whose call ends, at every point of its way: nothing stays claimed or registered anywhere.

What is checked after each test (`RouterDriver.finish`): no shard holds a parked operation, a wake-up
or a claim of it, and the core remembers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from common.wire import Op, Operation
from router.front import Status
from tests.unit.router_driver import (
    INTERNAL,
    FakeCall,
    FakeShard,
    RouterDriver,
    drivers,
    leased,
    queue_on,
)

LEFT, RIGHT = queue_on(0), queue_on(1)
WAIT_MS = 60_000

State = Callable[[RouterDriver], FakeCall]
End = Callable[[RouterDriver, FakeCall], None]


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    yield from drivers()


def taken(router: RouterDriver, kind: Op) -> list[tuple[FakeShard, Operation]]:
    """The operations of a kind that shards have taken and not answered."""
    for shard in router.shards:
        shard.envelopes()
    return [(shard, op) for shard in router.shards for op in shard.waiting.values() if op[1] == kind]


# ---- how far the poll has come


def unsent(router: RouterDriver) -> FakeCall:
    router.shards[0].crowd()
    return router.reserve(LEFT, wait_ms=WAIT_MS)


def sent(router: RouterDriver) -> FakeCall:
    return router.reserve(LEFT, wait_ms=WAIT_MS)


def parked(router: RouterDriver) -> FakeCall:
    call = router.reserve(LEFT, wait_ms=WAIT_MS)
    router.shards[0].envelopes()
    router.shards[0].send()
    return call


def held(router: RouterDriver) -> FakeCall:
    router.shards[0].down()
    return router.reserve(LEFT, wait_ms=WAIT_MS)


def asked_again(router: RouterDriver) -> FakeCall:
    call = parked(router)
    router.shards[0].down()
    return call


def claiming_first(router: RouterDriver) -> FakeCall:
    return router.reserve(LEFT, RIGHT, wait_ms=WAIT_MS)


def claiming_second(router: RouterDriver) -> FakeCall:
    call = claiming_first(router)
    router.shards[0].answer(router.shards[0].operation(), [])
    router.shards[1].envelopes()
    return call


def watches_unsent(router: RouterDriver) -> FakeCall:
    call = claiming_second(router)
    router.shards[0].crowd()
    router.shards[1].serve()
    return call


def watching(router: RouterDriver) -> FakeCall:
    call = claiming_second(router)
    router.shards[1].serve()
    for shard in router.shards:
        shard.envelopes()
        shard.send()
    return call


def woken(router: RouterDriver) -> FakeCall:
    """The second shard is told of a job while the first is claimed from."""
    call = watching(router)
    (watch,) = router.shards[1].waiting.values()
    router.shards[1].answer(watch, True)
    router.shards[0].envelopes()
    return call


def woken_claim_unsent(router: RouterDriver) -> FakeCall:
    call = watching(router)
    router.shards[0].crowd()
    watch, *_ = router.shards[0].waiting.values()
    router.shards[0].send([watch[0], Status.OK, True], number=0)
    assert router.shards[0].envelopes() == []
    return call


def woken_claim_sent(router: RouterDriver) -> FakeCall:
    call = watching(router)
    (watch,) = router.shards[0].waiting.values()
    router.shards[0].answer(watch, True)
    router.shards[0].envelopes()
    return call


def woken_twice(router: RouterDriver) -> FakeCall:
    call = woken_claim_sent(router)
    watch, *_ = router.shards[1].waiting.values()
    router.shards[1].answer(watch, True)
    return call


def watching_half(router: RouterDriver) -> FakeCall:
    """One of its shards is down."""
    call = watching(router)
    router.shards[1].down()
    return call


STATES = [
    unsent,
    sent,
    parked,
    held,
    asked_again,
    claiming_first,
    claiming_second,
    watches_unsent,
    watching,
    woken,
    woken_claim_unsent,
    woken_claim_sent,
    woken_twice,
    watching_half,
]


# ---- how it ends


def closed(router: RouterDriver, call: FakeCall) -> None:
    router.closed(call)


def server_stops(router: RouterDriver, call: FakeCall) -> None:
    router.core.drain(router.now)
    assert router.reserved(call) == []


def closed_with_an_answer_on_its_way(router: RouterDriver, call: FakeCall) -> None:
    """The server stopped, but the answer met the end of the call."""
    server_stops(router, call)
    router.closed(call)
    router.left(call, False)


def wait_over(router: RouterDriver, call: FakeCall) -> None:
    """The answer waits for a claim that is under way."""
    router.pass_ms(WAIT_MS)


def closed_when_the_wait_was_over(router: RouterDriver, call: FakeCall) -> None:
    """Perhaps in the moment in which the answer would have left."""
    wait_over(router, call)
    was_answered = router.is_answered(call)
    router.closed(call)
    if was_answered:
        router.left(call, False)


ENDS_WITHOUT_THE_CLAIM = [closed, server_stops, closed_with_an_answer_on_its_way, closed_when_the_wait_was_over]

each_state = pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
each_end = pytest.mark.parametrize("end", [*ENDS_WITHOUT_THE_CLAIM, wait_over], ids=lambda end: end.__name__)
each_end_without_the_claim = pytest.mark.parametrize("end", ENDS_WITHOUT_THE_CLAIM, ids=lambda end: end.__name__)


@each_end
@each_state
def test_a_poll_that_ends_leaves_nothing_behind(router: RouterDriver, state: State, end: End) -> None:
    call = state(router)
    end(router, call)


@each_state
def test_a_poll_whose_wait_is_over_is_answered_with_nothing_when_nothing_was_claimed(
    router: RouterDriver, state: State
) -> None:
    call = state(router)
    wait_over(router, call)
    router.serve()
    assert router.reserved(call) == []


@each_end_without_the_claim
@each_state
def test_jobs_that_were_claimed_before_the_shard_heard_of_the_end_are_given_back(
    router: RouterDriver, state: State, end: End
) -> None:
    call = state(router)
    claims = taken(router, Op.RESERVE)
    end(router, call)
    for shard, operation in claims:
        shard.answer(operation, [leased(operation[2][0])])
        shard.send()
        shard.envelopes()
        assert operation[0] in shard.given_back


@each_state
def test_jobs_that_were_claimed_before_the_shard_heard_of_the_end_of_the_wait_are_in_the_answer(
    router: RouterDriver, state: State
) -> None:
    call = state(router)
    claims = taken(router, Op.RESERVE)
    wait_over(router, call)
    for shard, operation in claims:
        shard.answer(operation, [leased(operation[2][0])])
    assert not claims or router.reserved(call) == [(operation[2][0], 1) for _, operation in claims]


@each_state
def test_a_wait_that_ends_while_a_shard_dies_is_over_at_once(router: RouterDriver, state: State) -> None:
    call = state(router)
    for shard in router.shards:
        shard.envelopes()
    wait_over(router, call)
    for shard in router.shards:
        if shard.generation:
            shard.down()
    assert router.reserved(call) == []
    assert router.core.next_timer_ms() is None


@each_end
@each_state
def test_a_write_that_fails_after_the_end_leaves_nothing_behind(router: RouterDriver, state: State, end: End) -> None:
    call = state(router)
    claims = taken(router, Op.RESERVE)
    end(router, call)
    for shard, operation in claims:
        shard.answer(operation, "the write failed", INTERNAL)
        shard.restart()


@each_end
@each_state
def test_wake_ups_that_meet_the_end_are_passed_on(router: RouterDriver, state: State, end: End) -> None:
    call = state(router)
    watches = taken(router, Op.WATCH)
    end(router, call)
    for shard, operation in watches:
        shard.answer(operation, True)


@each_end
@each_state
@pytest.mark.parametrize("dying", [0, 1])
def test_a_shard_that_dies_after_the_end_gets_back_what_it_may_have_claimed(
    router: RouterDriver, state: State, end: End, dying: int
) -> None:
    call = state(router)
    for shard in router.shards:
        shard.envelopes()
    end(router, call)
    for shard in router.shards:
        shard.envelopes()
    if router.shards[dying].generation:
        router.shards[dying].restart()


def claimed_from_the_first(router: RouterDriver) -> FakeCall:
    call = router.reserve(LEFT, RIGHT, max_jobs=2, wait_ms=WAIT_MS)
    router.shards[0].answer(router.shards[0].operation(), [leased(LEFT)])
    return call


@pytest.mark.parametrize("end", [closed, closed_when_the_wait_was_over])
def test_jobs_of_an_earlier_shard_are_given_back_when_the_call_ends_in_the_next(router: RouterDriver, end: End) -> None:
    call = claimed_from_the_first(router)
    end(router, call)
    router.shards[0].envelopes()
    assert len(router.shards[0].given_back) == 1


def test_jobs_of_an_earlier_shard_are_answered_when_the_server_stops_in_the_next(router: RouterDriver) -> None:
    call = claimed_from_the_first(router)
    router.core.drain(router.now)
    assert router.reserved(call) == [(LEFT, 1)]


def test_jobs_of_an_earlier_shard_are_answered_with_those_of_the_next_when_the_wait_ends_between_them(
    router: RouterDriver,
) -> None:
    call = claimed_from_the_first(router)
    wait_over(router, call)
    assert not router.is_answered(call)
    router.shards[1].answer(router.shards[1].operation(), [leased(RIGHT)])
    assert router.reserved(call) == [(LEFT, 1), (RIGHT, 1)]


@pytest.mark.parametrize("end", [closed_with_an_answer_on_its_way, closed_when_the_wait_was_over])
def test_an_end_is_told_to_a_shard_once(router: RouterDriver, end: End) -> None:
    call = parked(router)
    end(router, call)
    assert len(router.shards[0].operations()) == 1


def test_an_answer_that_came_after_the_wait_and_meets_the_end_of_its_call_gives_its_jobs_back(
    router: RouterDriver,
) -> None:
    call = parked(router)
    (operation,) = router.shards[0].waiting.values()
    wait_over(router, call)
    router.shards[0].answer(operation, [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]
    router.closed(call)
    router.left(call, False)
    router.shards[0].envelopes()
    assert router.shards[0].given_back == [operation[0]]


def test_an_answer_that_meets_the_end_of_its_call_gives_its_jobs_back(router: RouterDriver) -> None:
    call = parked(router)
    (operation,) = router.shards[0].waiting.values()
    router.shards[0].answer(operation, [leased(LEFT)])
    assert router.reserved(call) == [(LEFT, 1)]
    router.closed(call)
    router.left(call, False)
    router.shards[0].envelopes()
    assert router.shards[0].given_back == [operation[0]]
    assert router.shards[0].confirmed == []


def test_no_result_comes_after_that_of_the_cancellation(router: RouterDriver) -> None:
    call = parked(router)
    (operation,) = router.shards[0].waiting.values()
    router.closed(call)
    router.serve()
    assert operation[0] not in router.core.shards[0]._sent
