"""An EnqueueAtomic over several shards in a router's core: what each shard is sent, and what the client hears.

After each test nothing is left in the core, and every shard that promised something has heard its fate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common import job_ids, wire
from common import queue_pb2 as pb
from common.wire import Fate, Op, Operation, Outcome, Question, Vote
from router.coordinator import BUSY_RETRIES_MAX, BUSY_RETRY_MAX_MS
from router.core import DEADLINE_MARGIN_MS, HOLD_MS
from router.front import Status
from tests.unit.router_driver import INTERNAL, ROUTER, FakeCall, FakeShard, RouterDriver, drivers, job_id_on, queue_on

ATOMIC = "EnqueueAtomic"
SHARDS = 3
LEFT, RIGHT, THIRD = (queue_on(shard, 0, SHARDS) for shard in range(SHARDS))
DEAD_ROUTER = "router-9"
T = 77


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    yield from drivers(shards_count=SHARDS)


def enqueue(router: RouterDriver, *queues: str, **options: Any) -> FakeCall:
    return router.enqueue(*queues, method=ATOMIC, **options)


def accept(shard: FakeShard, operation: Operation) -> None:
    """Vote yes, with an id for each job."""
    shard.answer(operation, [Vote.YES, [job_id_on(job[0], place) for place, job in enumerate(operation[5])]])


def accept_all(router: RouterDriver, *shards: int) -> int:
    """All of these shards have voted yes; the transaction."""
    operations = [router.shards[shard].operation() for shard in shards]
    for shard, operation in zip(shards, operations, strict=True):
        assert operation[1] == Op.PREPARE
        accept(router.shards[shard], operation)
    (transaction,) = {operation[2] for operation in operations}
    found: int = transaction
    return found


def operations(router: RouterDriver) -> list[list[Any]]:
    """Kinds of the operations that each shard has been sent since the last look."""
    return [[operation[1] for operation in shard.operations()] for shard in router.shards]


def serve(router: RouterDriver, *shards: int, data: Any = None) -> None:
    """These answer the only operation that each has taken."""
    for shard in shards:
        (operation,) = router.shards[shard].waiting.values()
        router.shards[shard].answer(operation, data)


def decided(router: RouterDriver, *shards: int, deadline_ms: int = 0) -> tuple[FakeCall, int]:
    """A batch of which the shards have voted yes, its DECIDE sent to the first of them."""
    call = enqueue(
        router,
        *(queue_on(shard, 0, SHARDS) for shard in shards),
        **({"deadline": router.in_ms(deadline_ms)} if deadline_ms else {}),
    )
    transaction = accept_all(router, *shards)
    assert operations(router) == [[Op.DECIDE] if shard == shards[0] else [] for shard in range(SHARDS)]
    return call, transaction


def committing(router: RouterDriver, *shards: int, deadline_ms: int = 0) -> tuple[FakeCall, int]:
    """The same, decided, its COMMITs sent to the others."""
    call, transaction = decided(router, *shards, deadline_ms=deadline_ms)
    serve(router, shards[0], data=Fate.COMMITTED)
    assert operations(router) == [[Op.COMMIT] if shard in shards[1:] else [] for shard in range(SHARDS)]
    return call, transaction


def ids(router: RouterDriver, call: FakeCall) -> list[tuple[str, bool]]:
    responses = router.answer(call, pb.EnqueueAtomicResponse).success.responses
    return [(response.job_id, response.deduplicated) for response in responses]


def refusals(router: RouterDriver, call: FakeCall) -> list[tuple[int, str | None]]:
    errors = router.answer(call, pb.EnqueueAtomicResponse).rejection.errors
    return [(error.index, error.rejection.WhichOneof("reason")) for error in errors]


# ---- everybody agrees


def test_a_batch_over_several_shards_is_prepared_decided_committed_and_forgotten(router: RouterDriver) -> None:
    call = enqueue(router, RIGHT, LEFT, RIGHT)
    right, left = router.shards[1].operation(), router.shards[0].operation()
    transaction = right[2]
    home = 1
    assert right[1:5] == [Op.PREPARE, transaction, home, bytes(6)]
    assert left[1:5] == [Op.PREPARE, transaction, home, bytes(3)]
    assert [job[0] for job in right[5]] == [RIGHT, RIGHT]
    assert [job[0] for job in left[5]] == [LEFT]
    assert router.shards[2].operations() == []
    router.shards[0].answer(left, [Vote.YES, [[Outcome.DEDUPLICATED, job_id_on(LEFT, 9)]]])
    assert operations(router) == [[], [], []]
    router.shards[1].answer(right, [Vote.YES, [job_id_on(RIGHT, 1), job_id_on(RIGHT, 2)]])
    decide = router.shards[1].operation()
    assert decide[1:] == [Op.DECIDE, transaction, [0]]
    assert router.shards[0].operations() == []
    router.shards[1].answer(decide, Fate.COMMITTED)
    commit = router.shards[0].operation()
    assert commit[1:] == [Op.COMMIT, transaction]
    assert (router.shards[1].operations(), router.is_answered(call)) == ([], False)
    router.shards[0].answer(commit)
    assert ids(router, call) == [
        (job_ids.text(job_id_on(RIGHT, 1)), False),
        (job_ids.text(job_id_on(LEFT, 9)), True),
        (job_ids.text(job_id_on(RIGHT, 2)), False),
    ]
    forget = router.shards[1].operation()
    assert forget[1:] == [Op.FORGET, transaction]
    assert router.shards[0].operations() == []


def test_the_client_hears_of_success_when_all_shards_have_applied_it(router: RouterDriver) -> None:
    call, _ = committing(router, 0, 1, 2)
    serve(router, 2)
    assert not router.is_answered(call)
    serve(router, 1)
    assert len(ids(router, call)) == 3
    assert operations(router) == [[Op.FORGET], [], []]


def test_batches_at_the_same_time_are_transactions_of_their_own(router: RouterDriver) -> None:
    calls = [enqueue(router, LEFT, RIGHT) for _ in range(2)]
    left, right = (shard.operations() for shard in router.shards[:2])
    assert left[0][2] == right[0][2] != left[1][2] == right[1][2]
    accept(router.shards[0], left[0])
    accept(router.shards[0], left[1])
    accept(router.shards[1], right[1])
    decide = router.shards[0].operation()
    assert decide[1:3] == [Op.DECIDE, left[1][2]]
    router.shards[0].answer(decide, Fate.COMMITTED)
    router.shards[1].answer(router.shards[1].operation())
    assert [router.is_answered(call) for call in calls] == [False, True]


def test_a_batch_on_one_shard_needs_no_second_phase(router: RouterDriver) -> None:
    enqueue(router, LEFT, queue_on(0, 1, SHARDS))
    assert operations(router) == [[Op.ENQUEUE_ATOMIC], [], []]


# ---- somebody refuses


def test_the_refusals_of_all_shards_are_answered_in_order_of_index(router: RouterDriver) -> None:
    call = enqueue(router, RIGHT, LEFT, RIGHT, LEFT)
    left, right = router.shards[0].operation(), router.shards[1].operation()
    router.shards[1].answer(right, [Vote.REFUSED, [[1, [Outcome.QUEUE_FULL, 3]], [0, [Outcome.QUEUE_FULL, 3]]]])
    assert not router.is_answered(call)
    router.shards[0].answer(left, [Vote.REFUSED, [[1, [Outcome.QUEUE_CLOSING]]]])
    assert refusals(router, call) == [(0, "queue_full"), (2, "queue_full"), (3, "queue_closing")]
    assert operations(router) == [[], [], []]


def test_whoever_has_promised_something_lets_go_of_it_when_another_refuses(router: RouterDriver) -> None:
    call = enqueue(router, LEFT, RIGHT, THIRD)
    prepares = [shard.operation() for shard in router.shards]
    accept(router.shards[0], prepares[0])
    router.shards[1].answer(prepares[1], [Vote.REFUSED, [[0, [Outcome.QUEUE_FULL, 0]]]])
    accept(router.shards[2], prepares[2])
    assert refusals(router, call) == [(1, "queue_full")]
    assert [[operation[1:] for operation in shard.operations()] for shard in router.shards] == [
        [[Op.ABORT, prepares[0][2]]],
        [],
        [[Op.ABORT, prepares[0][2]]],
    ]


def test_a_refusal_counts_more_than_a_busy_key(router: RouterDriver) -> None:
    call = enqueue(router, LEFT, RIGHT)
    router.shards[0].answer(router.shards[0].operation(), [Vote.BUSY, None])
    router.shards[1].answer(router.shards[1].operation(), [Vote.REFUSED, [[0, [Outcome.QUEUE_CLOSING]]]])
    assert refusals(router, call) == [(1, "queue_closing")]
    assert router.core.next_timer_ms() is None


def test_a_batch_that_was_settled_without_its_coordinator_is_unavailable(router: RouterDriver) -> None:
    call = enqueue(router, LEFT, RIGHT)
    router.shards[0].answer(router.shards[0].operation(), [Vote.TOO_LATE, None])
    accept(router.shards[1], router.shards[1].operation())
    assert router.failure(call).status == Status.UNAVAILABLE
    assert operations(router) == [[], [Op.ABORT], []]


def test_a_home_that_took_its_promise_back_aborts_the_batch(router: RouterDriver) -> None:
    call, _ = decided(router, 0, 1)
    serve(router, 0, data=Fate.ABORTED)
    assert router.failure(call).status == Status.UNAVAILABLE
    assert operations(router) == [[Op.ABORT], [Op.ABORT], []]


# ---- another batch holds a key, or the last places of a queue


def busy(router: RouterDriver, **options: Any) -> tuple[FakeCall, int]:
    """A batch of which one shard has promised its part, and the other was busy."""
    call = enqueue(router, LEFT, RIGHT, **options)
    prepare = router.shards[0].operation()
    accept(router.shards[0], prepare)
    router.shards[1].answer(router.shards[1].operation(), [Vote.BUSY, None])
    transaction: int = prepare[2]
    return call, transaction


def test_a_batch_that_meets_a_held_key_lets_go_of_everything_and_tries_again_under_a_new_id(
    router: RouterDriver,
) -> None:
    call, transaction = busy(router)
    assert router.shards[0].operation()[1:] == [Op.ABORT, transaction]
    assert router.shards[1].operations() == []
    assert not router.is_answered(call)
    router.pass_ms(BUSY_RETRY_MAX_MS)
    assert accept_all(router, 0, 1) != transaction
    router.serve()
    assert len(ids(router, call)) == 2


def test_a_batch_that_was_busy_waits_twice_as_long_each_time_until_the_pauses_are_long_enough(
    router: RouterDriver,
) -> None:
    router.core.random_bytes = lambda count: b"\xff" * count
    busy(router)
    pauses = []
    for _ in range(8):
        timer_ms = router.core.next_timer_ms()
        assert timer_ms is not None
        pauses.append(timer_ms - router.now.mono_ms)
        router.pass_ms(pauses[-1])
        for shard in router.shards[:2]:
            for operation in shard.operations():
                shard.answer(operation, [Vote.BUSY, None] if operation[1] == Op.PREPARE else None)
    assert pauses == [4, 8, 16, 32, 64, 128, 250, 250]
    router.pass_ms(BUSY_RETRY_MAX_MS)


def test_a_batch_is_tried_again_a_limited_number_of_times(router: RouterDriver) -> None:
    call, _ = busy(router)
    for _ in range(BUSY_RETRIES_MAX):
        assert not router.is_answered(call)
        router.pass_ms(BUSY_RETRY_MAX_MS)
        for shard in router.shards[:2]:
            shard.envelopes()
            for operation in list(shard.waiting.values()):
                shard.answer(operation, [Vote.BUSY, None] if operation[1] == Op.PREPARE else None)
    assert router.failure(call).status == Status.UNAVAILABLE
    router.pass_ms(HOLD_MS)
    assert operations(router) == [[], [], []]


def test_a_batch_is_not_tried_again_after_its_deadline(router: RouterDriver) -> None:
    call, transaction = busy(router, deadline=router.in_ms(1))
    assert router.failure(call).status == Status.UNAVAILABLE
    assert router.shards[0].operation()[1:] == [Op.ABORT, transaction]
    assert router.core.next_timer_ms() is None


def test_a_batch_that_stayed_busy_is_told_of_both_causes_and_that_nothing_was_stored(router: RouterDriver) -> None:
    call, _ = busy(router, deadline=router.in_ms(1))
    text = router.failure(call).text
    assert "idempotency key" in text and "last places of a queue" in text and text.endswith(": nothing was stored")


def test_a_batch_whose_shard_goes_down_before_it_is_tried_again_is_unavailable(router: RouterDriver) -> None:
    call, _ = busy(router)
    router.shards[1].down()
    router.pass_ms(BUSY_RETRY_MAX_MS)
    assert router.failure(call).status == Status.UNAVAILABLE
    assert operations(router) == [[Op.ABORT], [], []]


def test_an_abort_of_an_earlier_attempt_reaches_the_successor_under_its_own_id(router: RouterDriver) -> None:
    _, transaction = busy(router)
    router.shards[0].operation()
    router.pass_ms(BUSY_RETRY_MAX_MS)
    router.shards[0].restart()
    assert router.shards[0].operations()[0][1:] == [Op.ABORT, transaction]


# ---- a shard that is down, or ends


def test_a_batch_for_a_shard_that_is_down_is_unavailable_and_nothing_is_sent(router: RouterDriver) -> None:
    router.shards[1].down()
    call = enqueue(router, LEFT, RIGHT)
    assert router.failure(call).status == Status.UNAVAILABLE
    assert operations(router) == [[], [], []]
    router.shards[1].up()
    assert operations(router) == [[], [], []]


@pytest.mark.parametrize("dying", [0, 1])
def test_a_shard_that_ends_before_it_has_voted_makes_the_batch_unavailable(router: RouterDriver, dying: int) -> None:
    call = enqueue(router, LEFT, RIGHT)
    prepares = [shard.operation() for shard in router.shards[:2]]
    router.shards[dying].restart()
    assert not router.is_answered(call)
    accept(router.shards[1 - dying], prepares[1 - dying])
    assert router.failure(call).status == Status.UNAVAILABLE
    assert operations(router) == [[Op.ABORT], [Op.ABORT], []]


@pytest.mark.parametrize("dying", [0, 1])
def test_a_shard_that_ends_before_it_was_asked_to_prepare_makes_the_batch_unavailable(
    router: RouterDriver, dying: int
) -> None:
    router.shards[dying].crowd()
    call = enqueue(router, LEFT, RIGHT)
    prepare = router.shards[1 - dying].operation()
    router.shards[dying].down()
    accept(router.shards[1 - dying], prepare)
    assert router.failure(call).status == Status.UNAVAILABLE
    assert router.shards[1 - dying].operation()[1] == Op.ABORT
    router.shards[dying].up()
    assert Op.PREPARE not in operations(router)[dying]


def test_shards_that_have_not_been_asked_are_not_when_another_has_ended(router: RouterDriver) -> None:
    router.shards[1].crowd()
    call = enqueue(router, LEFT, RIGHT)
    router.shards[0].operation()
    router.shards[0].restart()
    assert router.failure(call).status == Status.UNAVAILABLE
    router.shards[1].serve()
    assert Op.PREPARE not in operations(router)[1]


def test_a_failed_write_before_the_vote_is_an_internal_error_and_the_batch_is_aborted(router: RouterDriver) -> None:
    call = enqueue(router, LEFT, RIGHT)
    prepares = [shard.operation() for shard in router.shards[:2]]
    router.shards[0].answer(prepares[0], "the write failed", INTERNAL)
    accept(router.shards[1], prepares[1])
    assert router.failure(call).status == Status.INTERNAL
    router.shards[0].restart()
    assert operations(router) == [[Op.ABORT], [Op.ABORT], []]


def test_a_shard_that_ends_after_its_vote_commits_in_its_successor(router: RouterDriver) -> None:
    call, transaction = decided(router, 0, 1)
    router.shards[1].restart()
    serve(router, 0, data=Fate.COMMITTED)
    assert router.shards[1].operation()[1:] == [Op.COMMIT, transaction]
    serve(router, 1)
    assert len(ids(router, call)) == 2


def test_a_home_that_ends_before_it_was_asked_to_decide_makes_the_batch_unavailable(router: RouterDriver) -> None:
    call = enqueue(router, LEFT, RIGHT)
    prepares = [shard.operation() for shard in router.shards[:2]]
    accept(router.shards[0], prepares[0])
    router.shards[0].down()
    accept(router.shards[1], prepares[1])
    assert router.failure(call).status == Status.UNAVAILABLE
    router.shards[0].up()
    assert operations(router) == [[Op.ABORT], [Op.ABORT], []]


def test_a_home_that_ends_with_its_decide_unsent_makes_the_batch_unavailable(router: RouterDriver) -> None:
    call = enqueue(router, LEFT, RIGHT)
    prepares = [shard.operation() for shard in router.shards[:2]]
    accept(router.shards[0], prepares[0])
    router.shards[0].crowd()
    accept(router.shards[1], prepares[1])
    assert not router.is_answered(call)
    router.shards[0].restart()
    assert router.failure(call).status == Status.UNAVAILABLE
    assert operations(router) == [[Op.ABORT], [Op.ABORT], []]


@pytest.mark.parametrize("fate", Fate)
def test_a_home_that_ends_before_it_says_what_it_decided_is_asked_in_its_successor(
    router: RouterDriver, fate: Fate
) -> None:
    call, transaction = decided(router, 0, 1)
    router.shards[0].restart()
    resolve = router.shards[0].operation()
    assert resolve[1:] == [Op.RESOLVE, transaction, ROUTER]
    assert not router.is_answered(call)
    router.shards[0].answer(resolve, fate)
    if fate == Fate.COMMITTED:
        assert operations(router) == [[], [Op.COMMIT], []]
        serve(router, 1)
        assert len(ids(router, call)) == 2
    else:
        assert router.failure(call).status == Status.UNAVAILABLE
        assert operations(router) == [[Op.ABORT], [Op.ABORT], []]


def test_a_home_whose_write_of_the_decision_fails_is_asked_in_its_successor(router: RouterDriver) -> None:
    call, transaction = decided(router, 0, 1)
    serve_failure(router.shards[0])
    router.shards[0].restart()
    assert not router.is_answered(call)
    resolve = router.shards[0].operation()
    assert resolve[1:] == [Op.RESOLVE, transaction, ROUTER]
    router.shards[0].answer(resolve, Fate.COMMITTED)


def serve_failure(shard: FakeShard) -> None:
    """The only operation that it has taken fails in its write."""
    (operation,) = shard.waiting.values()
    shard.answer(operation, "the write failed", INTERNAL)


def test_the_question_about_a_decision_is_put_to_every_successor(router: RouterDriver) -> None:
    _, transaction = decided(router, 0, 1)
    for _ in range(3):
        router.shards[0].restart()
        assert router.shards[0].operation()[1:] == [Op.RESOLVE, transaction, ROUTER]


def test_a_client_whose_time_is_over_while_the_decision_is_unknown_hears_that_it_may_have_been_stored(
    router: RouterDriver,
) -> None:
    call, _ = decided(router, 0, 1, deadline_ms=2_000)
    router.shards[0].down()
    router.pass_ms(2_000 - DEADLINE_MARGIN_MS - 1)
    assert not router.is_answered(call)
    router.pass_ms(1)
    assert router.failure(call).status == Status.ABORTED
    router.shards[0].up()
    assert operations(router) == [[Op.RESOLVE], [], []]
    serve(router, 0, data=Fate.COMMITTED)
    assert operations(router) == [[], [Op.COMMIT], []]
    serve(router, 1)
    assert operations(router) == [[Op.FORGET], [], []]


def test_a_client_without_a_deadline_is_not_kept_waiting_for_a_decision_longer_than_others_are_held(
    router: RouterDriver,
) -> None:
    call, _ = decided(router, 0, 1)
    router.shards[0].down()
    router.pass_ms(HOLD_MS)
    assert router.failure(call).status == Status.ABORTED


def test_a_shard_that_ends_before_it_has_committed_commits_in_its_successor(router: RouterDriver) -> None:
    call, transaction = committing(router, 0, 1)
    router.shards[1].restart()
    assert not router.is_answered(call)
    assert router.shards[1].operation()[1:] == [Op.COMMIT, transaction]
    serve(router, 1)
    assert len(ids(router, call)) == 2


def test_a_shard_whose_write_of_the_commit_fails_commits_in_its_successor(router: RouterDriver) -> None:
    call, transaction = committing(router, 0, 1)
    serve_failure(router.shards[1])
    router.shards[1].restart()
    assert router.shards[1].operation()[1:] == [Op.COMMIT, transaction]
    serve(router, 1)
    assert len(ids(router, call)) == 2


def lose_the_commit(router: RouterDriver) -> None:
    committed_call, _ = committing(router, 0, 1, deadline_ms=2_000)
    router.shards[1].down()
    assert not router.is_answered(committed_call)


def leave_the_commit_unsent(router: RouterDriver) -> None:
    decided(router, 0, 1, deadline_ms=2_000)
    router.shards[1].crowd()
    serve(router, 0, data=Fate.COMMITTED)
    router.shards[1].down()


def commit_while_the_shard_is_down(router: RouterDriver) -> None:
    decided(router, 0, 1, deadline_ms=2_000)
    router.shards[1].down()
    serve(router, 0, data=Fate.COMMITTED)


@pytest.mark.parametrize("lose", [lose_the_commit, leave_the_commit_unsent, commit_while_the_shard_is_down])
def test_a_client_whose_time_is_over_while_a_shard_is_down_hears_that_it_may_have_been_stored(
    router: RouterDriver, lose: Callable[[RouterDriver], None]
) -> None:
    lose(router)
    call = next(call for call in router._calls if call.method == ATOMIC)
    router.pass_ms(2_000 - DEADLINE_MARGIN_MS - 1)
    assert not router.is_answered(call)
    router.pass_ms(1)
    assert router.failure(call).status == Status.ABORTED
    router.shards[1].up()
    assert operations(router) == [[], [Op.COMMIT], []]
    serve(router, 1)
    assert operations(router) == [[Op.FORGET], [], []]


def test_the_home_that_ends_while_the_others_commit_is_told_to_forget_in_its_successor(router: RouterDriver) -> None:
    call, transaction = committing(router, 0, 1)
    router.shards[0].down()
    serve(router, 1)
    assert len(ids(router, call)) == 2
    router.shards[0].up()
    assert router.shards[0].operation()[1:] == [Op.FORGET, transaction]


@pytest.mark.parametrize("fails", [False, True])
def test_a_home_that_ends_before_it_has_forgotten_is_told_again(router: RouterDriver, fails: bool) -> None:
    _, transaction = committing(router, 0, 1)
    serve(router, 1)
    assert router.shards[0].operation()[1:] == [Op.FORGET, transaction]
    if fails:
        serve_failure(router.shards[0])
    router.shards[0].restart()
    assert router.shards[0].operation()[1:] == [Op.FORGET, transaction]


@pytest.mark.parametrize("fails", [False, True])
def test_a_shard_that_ends_before_it_has_let_go_is_told_again(router: RouterDriver, fails: bool) -> None:
    call, transaction = decided(router, 0, 1)
    serve(router, 0, data=Fate.ABORTED)
    assert router.failure(call).status == Status.UNAVAILABLE
    assert router.shards[1].operation()[1:] == [Op.ABORT, transaction]
    if fails:
        serve_failure(router.shards[1])
    router.shards[1].restart()
    assert router.shards[1].operation()[1:] == [Op.ABORT, transaction]


# ---- what a dead router left


def ask(shard: FakeShard, *question: Any) -> None:
    """The shard asks of its own accord."""
    shard.send([0, Status.OK, list(question)], number=0)


@pytest.mark.parametrize(("fate", "consequence"), [(Fate.COMMITTED, Op.COMMIT), (Fate.ABORTED, Op.ABORT)])
def test_a_shard_that_asks_for_the_fate_of_its_promise_is_told_what_the_home_says(
    router: RouterDriver, fate: Fate, consequence: Op
) -> None:
    ask(router.shards[1], Question.RESOLVE, T, 2, DEAD_ROUTER)
    resolve = router.shards[2].operation()
    assert resolve[1:] == [Op.RESOLVE, T, DEAD_ROUTER]
    assert operations(router) == [[], [], []]
    router.shards[2].answer(resolve, fate)
    assert router.shards[1].operation()[1:] == [consequence, T]


def test_a_home_that_asks_to_finish_is_told_to_forget_when_all_others_have_committed(router: RouterDriver) -> None:
    ask(router.shards[0], Question.FINISH, T, [1, 2])
    assert operations(router) == [[], [Op.COMMIT], [Op.COMMIT]]
    serve(router, 1)
    assert router.shards[0].operations() == []
    serve(router, 2)
    assert router.shards[0].operation()[1:] == [Op.FORGET, T]


def test_a_question_that_is_being_answered_is_not_taken_up_again(router: RouterDriver) -> None:
    for _ in range(2):
        ask(router.shards[1], Question.RESOLVE, T, 2, DEAD_ROUTER)
    ask(router.shards[2], Question.FINISH, T, [1])
    assert operations(router) == [[], [], [Op.RESOLVE]]


def test_a_question_that_was_answered_may_be_asked_again(router: RouterDriver) -> None:
    for _ in range(2):
        ask(router.shards[1], Question.RESOLVE, T, 2, DEAD_ROUTER)
        assert operations(router) == [[], [], [Op.RESOLVE]]
        serve(router, 2, data=Fate.ABORTED)
        assert operations(router) == [[], [Op.ABORT], []]
        serve(router, 1)


def test_questions_about_several_transactions_are_answered_side_by_side(router: RouterDriver) -> None:
    router.shards[1].send(
        [0, Status.OK, [Question.RESOLVE, T, 2, DEAD_ROUTER]],
        [0, Status.OK, [Question.FINISH, T + 1, [0]]],
        number=0,
    )
    assert operations(router) == [[Op.COMMIT], [], [Op.RESOLVE]]


@pytest.mark.parametrize("fails", [False, True])
def test_a_recovery_goes_on_in_the_successors_of_shards_that_end(router: RouterDriver, fails: bool) -> None:
    ask(router.shards[1], Question.RESOLVE, T, 2, DEAD_ROUTER)
    assert router.shards[2].operation()[1] == Op.RESOLVE
    if fails:
        serve_failure(router.shards[2])
    router.shards[2].restart()
    assert router.shards[2].operation()[1:] == [Op.RESOLVE, T, DEAD_ROUTER]
    serve(router, 2, data=Fate.COMMITTED)
    assert router.shards[1].operation()[1:] == [Op.COMMIT, T]
    if fails:
        serve_failure(router.shards[1])
    router.shards[1].restart()
    assert router.shards[1].operation()[1:] == [Op.COMMIT, T]


@pytest.mark.parametrize("fails", [False, True])
def test_a_finish_goes_on_in_the_successors_of_shards_that_end(router: RouterDriver, fails: bool) -> None:
    ask(router.shards[0], Question.FINISH, T, [1])
    for shard, kind in ((1, Op.COMMIT), (0, Op.FORGET)):
        assert router.shards[shard].operation()[1:] == [kind, T]
        if fails:
            serve_failure(router.shards[shard])
        router.shards[shard].restart()
        assert router.shards[shard].operation()[1:] == [kind, T]
        serve(router, shard)


def test_a_recovery_waits_for_a_home_that_is_down(router: RouterDriver) -> None:
    router.shards[2].down()
    ask(router.shards[1], Question.RESOLVE, T, 2, DEAD_ROUTER)
    router.pass_ms(10 * HOLD_MS)
    router.shards[2].up()
    assert router.shards[2].operation()[1:] == [Op.RESOLVE, T, DEAD_ROUTER]


def test_a_question_whose_turn_could_not_be_written_is_passed_over(router: RouterDriver) -> None:
    router.shards[1].send([0, INTERNAL, "the write failed"], number=0)
    assert operations(router) == [[], [], []]


def test_a_question_of_a_process_that_has_ended_is_passed_over(router: RouterDriver) -> None:
    old = router.shards[1].generation
    router.shards[1].restart()
    question = [0, Status.OK, [Question.RESOLVE, T, 2, DEAD_ROUTER]]
    router.core.envelope(wire.pack(old, "shard-1", 0, [question]), router.now)
    assert operations(router) == [[], [], []]
