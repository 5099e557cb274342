"""What goes from a router to a shard: envelopes, their numbers, sizes and generations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common import queue_pb2 as pb
from common import wire
from common.wire import Op, WireError
from router.front import Status
from router.outbound import ENVELOPE_BYTES, ENVELOPE_JOBS
from tests.unit.router_driver import RouterDriver, configured, drivers, job_id_on, leased, queue_on

QUEUE = queue_on(0)
JOB = job_id_on(QUEUE)
MIB = 1024 * 1024


@pytest.fixture
def router() -> Iterator[RouterDriver]:
    yield from drivers()


def test_an_operation_for_an_idle_shard_leaves_at_once(router: RouterDriver) -> None:
    router.ack(JOB)
    assert [len(envelope.items) for envelope in router.shards[0].envelopes()] == [1]


def test_at_most_two_envelopes_are_unanswered_and_meanwhile_operations_gather(router: RouterDriver) -> None:
    for _ in range(5):
        router.ack(JOB)
    assert [len(envelope.items) for envelope in router.shards[0].envelopes()] == [1, 1]
    router.shards[0].send(number=1)
    assert [len(envelope.items) for envelope in router.shards[0].envelopes()] == [3]


def test_an_answer_with_a_number_answers_all_envelopes_up_to_it(router: RouterDriver) -> None:
    for _ in range(2):
        router.ack(JOB)
    router.shards[0].envelopes()
    router.shards[0].send(number=2)
    for _ in range(3):
        router.ack(JOB)
    assert [envelope.number for envelope in router.shards[0].envelopes()] == [3, 4]


def test_results_of_number_0_answer_no_envelope(router: RouterDriver) -> None:
    for _ in range(3):
        router.ack(JOB)
    first, _ = router.shards[0].operations()
    router.shards[0].send([first[0], Status.OK, None], number=0)
    assert router.shards[0].envelopes() == []


def test_an_older_number_does_not_take_back_a_newer_one(router: RouterDriver) -> None:
    for _ in range(2):
        router.ack(JOB)
    router.shards[0].envelopes()
    router.shards[0].send(number=2)
    router.shards[0].send(number=1)
    for _ in range(2):
        router.ack(JOB)
    assert len(router.shards[0].envelopes()) == 2


def test_shards_have_envelopes_of_their_own(router: RouterDriver) -> None:
    for _ in range(3):
        router.ack(JOB)
        router.ack(job_id_on(queue_on(1)))
    assert [len(shard.envelopes()) for shard in router.shards] == [2, 2]


def test_numbers_start_again_with_each_process_of_a_shard(router: RouterDriver) -> None:
    router.ack(JOB)
    router.shards[0].serve()
    router.shards[0].restart()
    router.ack(JOB)
    assert [envelope.number for envelope in router.shards[0].envelopes()] == [1]


def test_an_envelope_holds_a_bounded_number_of_operations(router: RouterDriver) -> None:
    for _ in range(2 + ENVELOPE_JOBS + 1):
        router.ack(JOB)
    router.shards[0].serve()
    assert [len(envelope.items) for envelope in router.shards[0].envelopes()] == [ENVELOPE_JOBS, 1]


@pytest.mark.parametrize("method", ["EnqueueBatch", "Reserve"])
def test_an_envelope_has_or_asks_for_a_bounded_number_of_jobs(router: RouterDriver, method: str) -> None:
    for _ in range(2):
        router.ack(JOB)
    for _ in range(ENVELOPE_JOBS // 256 + 1):
        if method == "Reserve":
            router.reserve(QUEUE, max_jobs=256)
        else:
            router.enqueue(*[QUEUE] * 256)
    router.shards[0].serve()
    assert [len(envelope.items) for envelope in router.shards[0].envelopes()] == [ENVELOPE_JOBS // 256, 1]


def test_an_envelope_holds_about_a_bounded_number_of_bytes(router: RouterDriver) -> None:
    job = pb.EnqueueRequest(queue=QUEUE, job_type="t", payload=pb.Payload(data=bytes(MIB), encoding="e"))
    for _ in range(2):
        router.ack(JOB)
    for _ in range(ENVELOPE_BYTES // MIB + 1):
        router.call("EnqueueBatch", pb.EnqueueBatchRequest(jobs=[job]))
    router.shards[0].serve()
    assert [len(envelope.items) for envelope in router.shards[0].envelopes()] == [ENVELOPE_BYTES // MIB, 1]


def test_an_operation_above_the_size_of_an_envelope_leaves_alone() -> None:
    limits = {"max_payload_bytes": ENVELOPE_BYTES, "max_message_bytes": 2 * ENVELOPE_BYTES}
    router = RouterDriver(config=configured(limits=limits))
    job = pb.EnqueueRequest(queue=QUEUE, job_type="t", payload=pb.Payload(data=bytes(ENVELOPE_BYTES), encoding="e"))
    for _ in range(2):
        router.ack(JOB)
    router.call("EnqueueBatch", pb.EnqueueBatchRequest(jobs=[job]))
    router.ack(JOB)
    router.shards[0].serve()
    assert [[op[1] for op in envelope.items] for envelope in router.shards[0].envelopes()] == [[Op.ENQUEUE], [Op.ACK]]
    router.finish()


def test_operations_leave_in_the_order_of_their_calls(router: RouterDriver) -> None:
    ids = [job_id_on(QUEUE, number) for number in range(10)]
    for job_id in ids:
        router.ack(job_id)
    sent = router.shards[0].operations()
    router.shards[0].send(number=1)
    sent += router.shards[0].operations()
    assert [operation[2] for operation in sent] == ids


def test_op_ids_are_never_used_twice(router: RouterDriver) -> None:
    for _ in range(20):
        router.ack(JOB)
        router.enqueue(QUEUE, queue_on(1))
    seen: list[int] = []
    for shard in router.shards * 3:
        seen += [operation[0] for operation in shard.operations()]
        shard.serve()
    assert len(seen) == len(set(seen)) == 60


# ---- generations


def test_the_envelope_of_a_process_that_has_ended_is_ignored(router: RouterDriver) -> None:
    router.ack(JOB)
    shard = router.shards[0]
    first = shard.operation()
    old_generation = shard.generation
    shard.restart()
    call = router.ack(JOB)
    second = shard.operation()
    late = wire.pack(old_generation, shard.name, 1, [[first[0], Status.OK, None], [second[0], Status.OK, None]])
    router.core.envelope(late, router.now)
    assert not router.is_answered(call)
    # Nor does its number answer an envelope to the successor.
    for _ in range(2):
        router.ack(JOB)
    assert len(shard.envelopes()) == 1


def test_the_end_of_an_older_process_does_not_harm_its_successor(router: RouterDriver) -> None:
    old_generation = router.shards[0].generation
    router.shards[0].restart()
    call = router.ack(JOB)
    router.core.shard_down(0, old_generation, router.now)
    router.shards[0].serve()
    assert router.is_answered(call)


def test_a_result_that_nobody_waits_for_is_ignored(router: RouterDriver) -> None:
    router.shards[0].send([12345, Status.OK, None])


def test_a_second_result_of_one_operation_is_ignored(router: RouterDriver) -> None:
    call = router.ack(JOB)
    operation = router.shards[0].operation()
    for _ in range(2):
        router.shards[0].answer(operation)
    assert router.is_answered(call)


@pytest.mark.parametrize("message", [b"", b"\xc1", wire.pack(1, "s", 1, [])[:-1], b"\x95\x02\x01\xa1s\x01\x90"])
def test_what_is_no_envelope_is_told_to_the_caller(router: RouterDriver, message: bytes) -> None:
    with pytest.raises(WireError):
        router.core.envelope(message, router.now)


# ---- confirmations and what comes back


def test_confirmations_gather_like_operations_and_go_first(router: RouterDriver) -> None:
    calls = [router.reserve(QUEUE), router.reserve(QUEUE)]
    operations = router.shards[0].operations()
    for number, operation in enumerate(operations):
        router.shards[0].send([operation[0], Status.OK, [leased(QUEUE, number)]], number=0)
    router.ack(JOB)
    for call in calls:
        router.left(call)
    assert router.shards[0].envelopes() == []
    router.shards[0].send(number=2)
    (envelope,) = router.shards[0].envelopes()
    assert envelope.items[0] == [0, Op.CONFIRM, [operation[0] for operation in operations]]
    assert [operation[1] for operation in envelope.items[1:]] == [Op.ACK]


def test_what_is_given_back_to_a_shard_that_ends_is_given_back_to_its_successor_until_one_has_answered(
    router: RouterDriver,
) -> None:
    shard = router.shards[0]
    call = router.reserve(QUEUE)
    operation = shard.operation()
    shard.answer(operation, [leased(QUEUE)])
    router.left(call, False)
    for _ in range(3):
        assert [envelope.items for envelope in shard.envelopes()] == [[[0, Op.GIVE_BACK, [operation[0]]]]]
        shard.restart()
    shard.envelopes()
    shard.send()
    shard.restart()
    assert shard.envelopes() == []


def test_what_is_given_back_while_the_shard_is_down_waits_for_its_successor(router: RouterDriver) -> None:
    shard = router.shards[0]
    call = router.reserve(QUEUE)
    operation = shard.operation()
    shard.answer(operation, [leased(QUEUE)])
    shard.down()
    router.left(call, False)
    shard.up()
    assert [envelope.items for envelope in shard.envelopes()] == [[[0, Op.GIVE_BACK, [operation[0]]]]]
