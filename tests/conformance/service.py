"""The service as tests speak to it: messages of the schema in and out, over a channel of their own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from common import queue_pb2 as pb

SERVICE = "sepp.v1.QueueService"
# By method: the types of its request and of its answer.
METHODS: dict[str, tuple[type[Message], type[Message]]] = {
    "EnqueueBatch": (pb.EnqueueBatchRequest, pb.EnqueueBatchResponse),
    "EnqueueAtomic": (pb.EnqueueBatchRequest, pb.EnqueueAtomicResponse),
    "Reserve": (pb.ReserveRequest, pb.ReserveResponse),
    "Ack": (pb.AckRequest, pb.AckResponse),
    "Nack": (pb.NackRequest, pb.NackResponse),
    "Extend": (pb.ExtendRequest, pb.ExtendResponse),
    "DrainDeadLetters": (pb.DrainDeadLettersRequest, pb.DrainDeadLettersResponse),
    "GetServerInfo": (pb.GetServerInfoRequest, pb.GetServerInfoResponse),
}
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
)
# A call that takes longer than this will never end.
CALL_TIMEOUT_S = 60.0
LEASE_MS = 60_000
# Longer than any test waits: a poll that is to be answered early.
LONG_WAIT_MS = 120_000

Metadata = Sequence[tuple[str, str]]


class Refused(Exception):
    """A call that ended with another status than OK."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class Service:
    """One server's methods. What is refused raises `Refused`."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)

    def close(self) -> None:
        self.channel.close()

    def exchange(self, method: str, request: bytes, metadata: Metadata = ()) -> bytes:
        """Bytes in, bytes out."""
        try:
            answer: bytes = self._callable(method)(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            raise Refused(error.code().name, error.details()) from None
        return answer

    def code(self, method: str, request: Message | bytes, metadata: Metadata = ()) -> str:
        """The name of the status that a call ends with; one that is not OK must say why."""
        try:
            self.exchange(method, request if isinstance(request, bytes) else request.SerializeToString(), metadata)
        except Refused as refused:
            assert refused.text, f"{refused.code} without a text"
            return refused.code
        return "OK"

    def text(self, method: str, request: Message) -> str:
        """What a call is refused with, in words."""
        try:
            self.exchange(method, request.SerializeToString())
        except Refused as refused:
            return refused.text
        raise AssertionError(f"{method} was not refused")

    def future(self, method: str, request: Message) -> grpc.Future:
        """A call that is under way; its result is the bytes of the answer."""
        return self._callable(method).future(request.SerializeToString(), timeout=2 * CALL_TIMEOUT_S)

    # -- the methods ------------------------------------------------------------------------------

    def enqueue(self, *jobs: pb.EnqueueRequest) -> list[pb.JobResult]:
        answer = self._call("EnqueueBatch", pb.EnqueueBatchRequest(jobs=jobs), pb.EnqueueBatchResponse)
        assert len(answer.results) == len(jobs)
        return list(answer.results)

    def accepted(self, *jobs: pb.EnqueueRequest) -> list[str]:
        """The ids of jobs that nothing speaks against."""
        results = self.enqueue(*jobs)
        assert [result.WhichOneof("outcome") for result in results] == ["success"] * len(jobs), results
        return [result.success.job_id for result in results]

    def rejection(self, job: pb.EnqueueRequest) -> pb.JobRejection:
        (result,) = self.enqueue(job)
        assert result.WhichOneof("outcome") == "rejection", result
        return result.rejection

    def enqueue_atomic(self, *jobs: pb.EnqueueRequest) -> pb.EnqueueAtomicResponse:
        return self._call("EnqueueAtomic", pb.EnqueueBatchRequest(jobs=jobs), pb.EnqueueAtomicResponse)

    def reserve(self, *queues: str, lease_ms: int = LEASE_MS, wait_ms: int = 0, max_jobs: int = 100) -> list[pb.Job]:
        request = reserve_request(*queues, lease_ms=lease_ms, wait_ms=wait_ms, max_jobs=max_jobs)
        return list(self._call("Reserve", request, pb.ReserveResponse).jobs)

    def reserve_one(self, *queues: str, lease_ms: int = LEASE_MS) -> pb.Job:
        """The job that is there, or comes."""
        give_up_at = time.monotonic() + CALL_TIMEOUT_S
        # One that is there is asked for without a wait: none that ends in this moment can take it along.
        jobs = self.reserve(*queues, lease_ms=lease_ms, max_jobs=1)
        while not jobs:
            assert time.monotonic() < give_up_at, "no job comes"
            jobs = self.reserve(*queues, lease_ms=lease_ms, wait_ms=LONG_WAIT_MS, max_jobs=1)
        (job,) = jobs
        return job

    def ack(self, job: pb.Job) -> pb.AckResponse:
        return self._call("Ack", pb.AckRequest(job_id=job.id, attempt=job.attempt), pb.AckResponse)

    def nack(self, job: pb.Job, retry: pb.NackRetry | None = None, reason: str | None = None) -> bool:
        """Whether the job is dead now."""
        request = pb.NackRequest(job_id=job.id, attempt=job.attempt, retry=retry, reason=reason)
        answer = self._call("Nack", request, pb.NackResponse)
        assert answer.job_id == job.id
        return answer.dead_lettered

    def extend(self, job: pb.Job, lease: Duration) -> pb.ExtendResponse:
        request = pb.ExtendRequest(job_id=job.id, attempt=job.attempt, lease_duration=lease)
        return self._call("Extend", request, pb.ExtendResponse)

    def drain(self, queue: str | None = None, max: int | None = 100) -> list[pb.DeadLetterRecord]:
        request = pb.DrainDeadLettersRequest(queue=queue, max=max)
        return list(self._call("DrainDeadLetters", request, pb.DrainDeadLettersResponse).records)

    def drained(self, queue: str) -> pb.DeadLetterRecord:
        """The dead letter that is there, or comes."""
        give_up_at = time.monotonic() + CALL_TIMEOUT_S
        while not (records := self.drain(queue)):
            assert time.monotonic() < give_up_at, "no dead letter comes"
            time.sleep(0.01)
        (record,) = records
        return record

    def info(self, metadata: Metadata = ()) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse.FromString(self.exchange("GetServerInfo", b"", metadata))

    def _call(self, method: str, request: Message, answer: Any) -> Any:
        return answer.FromString(self.exchange(method, request.SerializeToString()))

    def _callable(self, method: str) -> grpc.UnaryUnaryMultiCallable:
        return self.channel.unary_unary(f"/{SERVICE}/{method}")


# -- requests and what they are made of -----------------------------------------------------------


def new_queue(prefix: str = "q") -> str:
    """A name that no other test uses, of 17 bytes with the usual prefix."""
    return prefix + uuid.uuid4().hex[:16]


def new_job(queue: str, text: str = "", /, **fields: Any) -> pb.EnqueueRequest:
    """A job that nothing speaks against; `text` is its payload."""
    if text:
        fields["payload"] = pb.Payload(data=text.encode(), encoding="text")
    return pb.EnqueueRequest(**{"queue": queue, "job_type": "letter"} | fields)


def texts(jobs: Iterable[pb.Job]) -> list[str]:
    """The payloads of jobs, in order."""
    return [job.payload.data.decode() for job in jobs]


def reserve_request(*queues: str, lease_ms: int = LEASE_MS, wait_ms: int = 0, max_jobs: int = 1) -> pb.ReserveRequest:
    return pb.ReserveRequest(
        queues=queues, lease_duration=duration(lease_ms), wait_timeout=duration(wait_ms), max_jobs=max_jobs
    )


def dead_letter() -> pb.NackRetry:
    retry = pb.NackRetry()
    retry.dead_letter.SetInParent()
    return retry


def delay(milliseconds: int) -> pb.NackRetry:
    return pb.NackRetry(delay=duration(milliseconds))


def duration(milliseconds: int) -> Duration:
    whole = Duration()
    whole.FromMilliseconds(milliseconds)
    return whole


def instant(milliseconds: int) -> Timestamp:
    """Milliseconds since the epoch."""
    whole = Timestamp()
    whole.FromMilliseconds(milliseconds)
    return whole


def now_ms() -> int:
    """Wall time, cut to the millisecond as the server's instants are."""
    return time.time_ns() // 1_000_000


def text_of(size: int, character: str = "é") -> str:
    """A text of as many bytes of UTF-8, made of one character as far as it goes."""
    width = len(character.encode())
    return "a" * (size % width) + character * (size // width)


def custom(**values: str | float | int | bool) -> dict[str, pb.PrimitiveValue]:
    return {key: value_of(value) for key, value in values.items()}


def value_of(value: str | float | int | bool) -> pb.PrimitiveValue:
    match value:
        case bool():
            return pb.PrimitiveValue(bool_value=value)
        case int():
            return pb.PrimitiveValue(int_value=value)
        case float():
            return pb.PrimitiveValue(double_value=value)
        case _:
            return pb.PrimitiveValue(string_value=value)
