"""The statuses with which each method refuses a whole request."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from common import queue_pb2 as pb
from tests.conformance.service import (
    LONG_WAIT_MS,
    METHODS,
    Service,
    duration,
    new_job,
    new_queue,
    reserve_request,
    text_of,
)
from tests.integration.server import Server

# Of the right shape, and of no job.
NO_JOB = "00000000-0000-7000-8000-000000000000"
LONGEST_VALID_S = 315_576_000_000
BATCH = 6
RESERVE_QUEUES = 3


def batch(count: int) -> pb.EnqueueBatchRequest:
    queue = new_queue()
    return pb.EnqueueBatchRequest(jobs=[new_job(queue) for _ in range(count)])


# ---- EnqueueBatch, EnqueueAtomic


@pytest.mark.parametrize("method", ["EnqueueBatch", "EnqueueAtomic"])
@pytest.mark.parametrize(
    ("count", "code"),
    [(0, "INVALID_ARGUMENT"), (1, "OK"), (BATCH - 1, "OK"), (BATCH, "OK"), (BATCH + 1, "INVALID_ARGUMENT")],
)
def test_a_batch_has_at_least_one_job_and_no_more_than_the_limit(
    limited: Service, method: str, count: int, code: str
) -> None:
    assert limited.code(method, batch(count)) == code


@pytest.mark.parametrize("method", ["EnqueueBatch", "EnqueueAtomic"])
def test_a_batch_over_the_limit_is_refused_before_its_jobs_are_looked_at(limited: Service, method: str) -> None:
    request = pb.EnqueueBatchRequest(jobs=[new_job("") for _ in range(BATCH + 1)])
    assert limited.text(method, request) == "jobs has 7 entries; 1 to 6 are allowed"


# ---- Reserve


def reserve(**fields: Any) -> pb.ReserveRequest:
    return pb.ReserveRequest(**{"queues": ["some"], "lease_duration": duration(1000)} | fields)


MALFORMED_RESERVES: dict[str, pb.ReserveRequest] = {
    "no queues": reserve(queues=[]),
    "an empty name": reserve(queues=["some", ""]),
    "the name .": reserve(queues=["."]),
    "the name ..": reserve(queues=[".."]),
    "a slash in a name": reserve(queues=["a/b"]),
    "a control character in a name": reserve(queues=["a\tb"]),
    "no lease": pb.ReserveRequest(queues=["some"]),
    "a lease of 0": reserve(lease_duration=Duration()),
    "a negative lease": reserve(lease_duration=Duration(nanos=-1)),
    "a lease that is no valid duration": reserve(lease_duration=Duration(seconds=LONGEST_VALID_S + 1)),
    "a lease of two signs": reserve(lease_duration=Duration(seconds=1, nanos=-1)),
    "a negative wait": reserve(wait_timeout=Duration(nanos=-1)),
    "a wait that is no valid duration": reserve(wait_timeout=Duration(nanos=10**9)),
    "an empty worker": reserve(worker_id=""),
    "no job wanted": reserve(max_jobs=0),
}


@pytest.mark.parametrize("request_", MALFORMED_RESERVES.values(), ids=MALFORMED_RESERVES.keys())
def test_a_malformed_reserve_is_an_invalid_argument(limited: Service, request_: pb.ReserveRequest) -> None:
    assert limited.code("Reserve", request_) == "INVALID_ARGUMENT"


@pytest.mark.parametrize(("size", "code"), [(23, "OK"), (24, "OK"), (25, "INVALID_ARGUMENT")])
def test_a_queue_name_over_the_limit_cannot_be_reserved_from(limited: Service, size: int, code: str) -> None:
    assert limited.code("Reserve", reserve_request(text_of(size, "€"))) == code


@pytest.mark.parametrize(
    ("count", "code"), [(RESERVE_QUEUES - 1, "OK"), (RESERVE_QUEUES, "OK"), (RESERVE_QUEUES + 1, "INVALID_ARGUMENT")]
)
def test_a_reserve_lists_no_more_queues_than_the_limit(limited: Service, count: int, code: str) -> None:
    assert limited.code("Reserve", reserve_request(*[new_queue() for _ in range(count)])) == code


def test_strict_mode_refuses_to_reserve_from_undeclared_queues_and_lists_them(strict: Service) -> None:
    request = reserve_request("one", "known", "two", "raw", "three")
    assert strict.code("Reserve", request) == "FAILED_PRECONDITION"
    assert strict.text("Reserve", request).endswith("'one', 'two', 'three'")


def test_strict_mode_reserves_from_declared_queues(strict: Service) -> None:
    assert strict.code("Reserve", reserve_request("known", "raw")) == "OK"


def test_a_malformed_reserve_is_malformed_in_strict_mode_too(strict: Service) -> None:
    assert strict.code("Reserve", reserve(queues=["unknown", "a/b"])) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("front", ["queue", "aio"])
def test_a_waiting_reserve_is_answered_with_no_jobs_when_the_server_stops(front: str) -> None:
    with Server(shards=2, front=front) as server:
        service = Service(server.start().address)
        over_one = service.future("Reserve", reserve_request("a", wait_ms=LONG_WAIT_MS))
        over_both = service.future(
            "Reserve", reserve_request(server.queue_on(0), server.queue_on(1), wait_ms=LONG_WAIT_MS)
        )
        service.reserve("a")  # what was sent before over this connection has arrived
        server.terminate()
        assert (over_one.result(), over_both.result()) == (b"", b"")
        assert server.exit_status() == 0
        service.close()


# ---- Ack, Nack, Extend


def lease_request(method: str, job_id: str, attempt: int, **fields: Any) -> Message:
    if method == "Extend":
        fields.setdefault("lease_duration", duration(1000))
    request_type, _ = METHODS[method]
    return request_type(job_id=job_id, attempt=attempt, **fields)


LEASE_METHODS = ["Ack", "Nack", "Extend"]
of_each = pytest.mark.parametrize("method", LEASE_METHODS)


@of_each
@pytest.mark.parametrize(
    "job_id",
    [
        "",
        "job",
        NO_JOB.replace("-", ""),
        f"{{{NO_JOB}}}",
        f"urn:uuid:{NO_JOB}",
        f"{NO_JOB} ",
        NO_JOB[:-1],
        f"{NO_JOB}0",
        NO_JOB.replace("7", "g"),
        NO_JOB.replace("7", "\uff17"),
        "0000000-00000-7000-8000-000000000000",
    ],
)
def test_what_is_no_hyphenated_uuid_is_an_invalid_argument(limited: Service, method: str, job_id: str) -> None:
    assert limited.code(method, lease_request(method, job_id, 1)) == "INVALID_ARGUMENT"


@of_each
def test_an_attempt_of_0_is_an_invalid_argument(limited: Service, method: str) -> None:
    assert limited.code(method, lease_request(method, NO_JOB, 0)) == "INVALID_ARGUMENT"


@of_each
def test_an_empty_worker_is_an_invalid_argument(limited: Service, method: str) -> None:
    assert limited.code(method, lease_request(method, NO_JOB, 1, worker_id="")) == "INVALID_ARGUMENT"


@of_each
@pytest.mark.parametrize(
    "job_id", [NO_JOB, "550e8400-e29b-41d4-a716-446655440000", "f" * 8 + "-ffff" * 3 + "-" + "f" * 12]
)
def test_a_job_that_never_was_is_not_found(limited: Service, method: str, job_id: str) -> None:
    assert limited.code(method, lease_request(method, job_id, 1)) == "NOT_FOUND"


@of_each
def test_a_random_uuid_is_not_found(limited: Service, method: str) -> None:
    assert limited.code(method, lease_request(method, str(uuid.uuid4()), 1)) == "NOT_FOUND"


@of_each
def test_a_job_that_is_ready_is_not_found(limited: Service, method: str) -> None:
    (job_id,) = limited.accepted(new_job(new_queue()))
    assert limited.code(method, lease_request(method, job_id, 1)) == "NOT_FOUND"


@of_each
def test_an_acked_job_is_not_found(limited: Service, method: str) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue))
    job = limited.reserve_one(queue)
    limited.ack(job)
    assert limited.code(method, lease_request(method, job.id, 1)) == "NOT_FOUND"


@of_each
def test_a_job_whose_last_lease_has_run_out_is_not_found(limited: Service, method: str) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue, max_attempts=1))
    job = limited.reserve_one(queue, lease_ms=1)
    limited.drained(queue)
    assert limited.code(method, lease_request(method, job.id, 1)) == "NOT_FOUND"


@of_each
def test_a_lease_that_went_to_another_worker_is_a_failed_precondition(limited: Service, method: str) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue))
    first = limited.reserve_one(queue, lease_ms=1)
    second = limited.reserve_one(queue)
    assert (second.id, second.attempt) == (first.id, 2)
    assert limited.code(method, lease_request(method, first.id, first.attempt)) == "FAILED_PRECONDITION"
    limited.ack(second)


@of_each
def test_an_attempt_that_was_never_given_out_is_a_failed_precondition(limited: Service, method: str) -> None:
    queue = new_queue()
    limited.accepted(new_job(queue))
    job = limited.reserve_one(queue)
    assert limited.code(method, lease_request(method, job.id, 2**32 - 1)) == "FAILED_PRECONDITION"
    limited.ack(job)


def test_a_nack_with_a_retry_but_no_strategy_is_an_invalid_argument(limited: Service) -> None:
    request = lease_request("Nack", NO_JOB, 1, retry=pb.NackRetry())
    assert limited.code("Nack", request) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("delay", [Duration(nanos=-1), Duration(seconds=-1), Duration(seconds=LONGEST_VALID_S + 1)])
def test_a_nack_with_a_negative_or_invalid_delay_is_an_invalid_argument(limited: Service, delay: Duration) -> None:
    request = lease_request("Nack", NO_JOB, 1, retry=pb.NackRetry(delay=delay))
    assert limited.code("Nack", request) == "INVALID_ARGUMENT"


def test_an_extension_without_a_lease_is_an_invalid_argument(limited: Service) -> None:
    assert limited.code("Extend", pb.ExtendRequest(job_id=NO_JOB, attempt=1)) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("lease", [Duration(), Duration(nanos=-1), Duration(seconds=-1)])
def test_an_extension_by_0_or_less_is_an_invalid_argument(limited: Service, lease: Duration) -> None:
    request = lease_request("Extend", NO_JOB, 1, lease_duration=lease)
    assert limited.code("Extend", request) == "INVALID_ARGUMENT"


# ---- DrainDeadLetters, GetServerInfo


@pytest.mark.parametrize(
    "request_",
    [
        pb.DrainDeadLettersRequest(queue=""),
        pb.DrainDeadLettersRequest(max=0),
        pb.DrainDeadLettersRequest(queue="q", max=0),
    ],
    ids=["an empty queue", "no record wanted", "no record of a queue wanted"],
)
def test_a_malformed_drain_is_an_invalid_argument(limited: Service, request_: pb.DrainDeadLettersRequest) -> None:
    assert limited.code("DrainDeadLetters", request_) == "INVALID_ARGUMENT"


def test_the_servers_info_is_always_given(limited: Service) -> None:
    assert limited.code("GetServerInfo", pb.GetServerInfoRequest()) == "OK"


# ---- UNAUTHENTICATED, INTERNAL, and the rest of gRPC

VALID: dict[str, Callable[[], Message]] = {
    "EnqueueBatch": lambda: batch(1),
    "EnqueueAtomic": lambda: batch(1),
    "Reserve": lambda: reserve_request("some"),
    "Ack": lambda: lease_request("Ack", NO_JOB, 1),
    "Nack": lambda: lease_request("Nack", NO_JOB, 1),
    "Extend": lambda: lease_request("Extend", NO_JOB, 1),
    "DrainDeadLetters": pb.DrainDeadLettersRequest,
    "GetServerInfo": pb.GetServerInfoRequest,
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_wants_a_key_where_keys_are_configured(keyed: Service, method: str) -> None:
    assert keyed.code(method, VALID[method]()) == "UNAUTHENTICATED"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_a_listed_key(keyed: Service, method: str) -> None:
    code = keyed.code(method, VALID[method](), [("authorization", "Bearer key-two")])
    assert code == ("NOT_FOUND" if method in LEASE_METHODS else "OK")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bytes_", [b"\xff", b"\x0a", b"\x0a\x05ab", b"\x07"])
def test_bytes_that_are_no_message_are_an_internal_error(limited: Service, method: str, bytes_: bytes) -> None:
    assert limited.code(method, bytes_) == "INTERNAL"


@pytest.mark.parametrize("method", ["Reserve", "Ack", "Nack", "Extend", "DrainDeadLetters"])
def test_a_text_that_is_no_utf8_is_an_internal_error(limited: Service, method: str) -> None:
    assert limited.code(method, b"\x0a\x02\xc3\x28") == "INTERNAL"


def test_a_job_with_a_text_that_is_no_utf8_is_an_internal_error(limited: Service) -> None:
    assert limited.code("EnqueueBatch", b"\x0a\x04\x0a\x02\xc3\x28") == "INTERNAL"


def test_a_message_over_the_limit_is_refused_as_exhausting(plain: Service) -> None:
    assert plain.code("EnqueueBatch", bytes(16_777_217)) == "RESOURCE_EXHAUSTED"


def test_a_message_at_the_limit_is_read(plain: Service) -> None:
    # Unknown field 15 of as many bytes as make up the whole: a batch without jobs.
    size = 16_777_216
    head = b"\x7a\xfb\xff\xff\x07"
    assert plain.code("EnqueueBatch", head + bytes(size - len(head))) == "INVALID_ARGUMENT"


def test_a_method_that_the_schema_does_not_have_is_unimplemented(limited: Service) -> None:
    assert limited.code("Peek", b"") == "UNIMPLEMENTED"
