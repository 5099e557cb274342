"""Whatever clients send, the answer is one of the contract and the server goes on as before.

Two kinds of requests: messages of the schema with random contents, many of them near the limits and
some of them about jobs that really are in flight; and bytes that are, or once were, such a message.
`FUZZ_SEED` in the environment repeats the requests of an earlier run (which of them meet a job in
flight depends on the answers, and so on the run).
"""

from __future__ import annotations

import os
import random
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from common import queue_pb2 as pb
from tests.conformance.service import CALL_TIMEOUT_S, METHODS, SERVICE, Service, new_job, new_queue
from tests.integration.server import Server

TOML = """
[limits]
max_lease_duration_ms = 2000
max_attempts_ceiling = 5
max_reserve_batch = 5
max_reserve_queues = 4
max_wait_timeout_ms = 20
max_enqueue_batch = 6
max_queue_depth = 20
max_payload_bytes = 1000
max_custom_entries = 3
max_custom_total_bytes = 200
max_custom_key_bytes = 20
max_queue_name_bytes = 40
max_job_type_bytes = 30
max_idempotency_key_bytes = 20
max_schedule_horizon_ms = 2000
max_response_bytes = 65536
[storage]
dead_letter_retention_ms = 2000
dedup_window_ms = 1000
"""
# The statuses that the contract knows for requests that are messages. What is none is INTERNAL.
OF_BATCHES = {"OK", "INVALID_ARGUMENT"}
OF_LEASES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"}
STATUSES = {
    "EnqueueBatch": OF_BATCHES,
    "EnqueueAtomic": OF_BATCHES,
    "Reserve": {"OK", "INVALID_ARGUMENT"},
    "Ack": OF_LEASES,
    "Nack": OF_LEASES,
    "Extend": OF_LEASES,
    "DrainDeadLetters": {"OK", "INVALID_ARGUMENT"},
    "GetServerInfo": {"OK"},
}
# Of every text, what a client sees of it at most.
TEXT_BYTES_MAX = 400
# Messages after which a server has seen everything once: what it holds from then on, it keeps.
WARM_UP = 4_000
MESSAGES = {"queue": 14_000, "aio": 6_000}
CALLS_AT_ONCE = 64
CHANNELS = 4
# What a process may hold more than after its warm-up, mostly in the write buffers of its store; it is
# about 1 MB. Anything kept of each message would show: they are some 2 kB each.
GROWTH_BYTES_MAX = 8 * 1024 * 1024


class Sender:
    """Sends requests, many at a time, and judges each answer. `faults` is what the contract does not allow."""

    def __init__(self, address: str) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
        self._channels = [grpc.insecure_channel(address, options) for _ in range(CHANNELS)]
        self._calls = [
            {method: channel.unary_unary(f"/{SERVICE}/{method}") for method in METHODS} for channel in self._channels
        ]
        self._free = threading.Semaphore(CALLS_AT_ONCE)
        self._lock = threading.Lock()
        self._sent = 0
        self.leases: deque[tuple[str, int]] = deque(maxlen=500)  # ids and attempts of jobs in flight
        self.statuses: Counter[tuple[str, str]] = Counter()
        self.outcomes: Counter[str] = Counter()  # of single jobs: "new", "deduplicated" or the reason of a rejection
        self.faults: list[str] = []

    def send(self, method: str, request: bytes) -> None:
        self._free.acquire()
        self._sent += 1
        future = self._calls[self._sent % CHANNELS][method].future(request, timeout=CALL_TIMEOUT_S)
        future.add_done_callback(lambda done: self._answered(method, request, done))

    def wait(self) -> None:
        """Until all calls are answered."""
        for _ in range(CALLS_AT_ONCE):
            self._free.acquire()
        self._free.release(CALLS_AT_ONCE)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _count(self, outcomes: list[str]) -> None:
        with self._lock:
            self.outcomes.update(outcomes)

    def _answered(self, method: str, request: bytes, done: grpc.Future) -> None:
        try:
            fault = self._fault(method, request, done)
        except Exception as error:
            fault = repr(error)
        with self._lock:
            if fault is not None:
                self.faults.append(f"{method} {request.hex()[:2000]}: {fault}")
        self._free.release()

    def _fault(self, method: str, request: bytes, done: grpc.Future) -> str | None:
        code = done.code().name
        with self._lock:
            self.statuses[method, code] += 1
        sent = parsed(METHODS[method][0], request)
        if code not in ({"INTERNAL"} if sent is None else STATUSES[method]):
            return f"{code}: {done.details()}"
        if code != "OK":
            text = done.details()
            return None if 0 < len(text.encode()) <= TEXT_BYTES_MAX else f"{code} with a text of {len(text)}"
        answer = METHODS[method][1].FromString(done.result())
        return self._answer_fault(sent, answer)

    def _answer_fault(self, sent: Any, answer: Any) -> str | None:
        match answer:
            case pb.EnqueueBatchResponse():
                outcomes = [outcome(result) for result in answer.results]
                self._count(outcomes)
                whole = len(outcomes) == len(sent.jobs) and "" not in outcomes
            case pb.EnqueueAtomicResponse(rejection=rejection) if answer.HasField("rejection"):
                indexes = [error.index for error in rejection.errors]
                whole = bool(indexes) and indexes == sorted(set(indexes)) and indexes[-1] < len(sent.jobs)
            case pb.EnqueueAtomicResponse():
                whole = len(answer.success.responses) == len(sent.jobs)
            case pb.ReserveResponse():
                whole = len(answer.jobs) <= min(sent.max_jobs or 1, 5) and all(
                    job.queue in sent.queues and 1 <= job.attempt <= job.max_attempts <= 5 for job in answer.jobs
                )
                self.leases.extend((job.id, job.attempt) for job in answer.jobs)
            case pb.DrainDeadLettersResponse():
                whole = len(answer.records) <= min(sent.max or 1, 5) and all(
                    record.cause and record.job.queue for record in answer.records
                )
            case pb.GetServerInfoResponse():
                whole = list(answer.supported_protocol_versions) == ["v1"]
            case _:
                whole = answer.job_id == sent.job_id.lower()
        return None if whole else f"an answer that does not fit: {answer}"


def outcome(result: pb.JobResult) -> str:
    """What became of a job in a word; empty when nobody could tell."""
    if result.WhichOneof("outcome") == "rejection":
        return result.rejection.WhichOneof("reason") or ""
    if not result.success.job_id:
        return ""
    return "deduplicated" if result.success.deduplicated else "new"


def parsed(kind: type[Message], request: bytes) -> Message | None:
    try:
        return kind.FromString(request)
    except DecodeError:
        return None


# ---- requests


class Requests:
    """Random requests of a seed."""

    def __init__(self, seed: str, leases: deque[tuple[str, int]]) -> None:
        self._random = random.Random(seed)
        self._leases = leases
        self._queues = [f"queue-{number}" for number in range(6)]
        self._texts: list[Callable[[], str]] = [
            lambda: "",
            lambda: self._random.choice(self._queues),
            lambda: self._random.choice(self._queues),
            lambda: self._random.choice(self._queues),
            lambda: self._random.choice((".", "..", "a/b", "\0", "\x7f", " ", "%s{0}$", "Bearer", "\u202e", "e\u0301")),
            lambda: "😀é€a"[self._random.randrange(4)] * self._random.choice((1, 5, 10, 20, 30, 41, 257, 2000)),
            lambda: "".join(chr(self._random.choice((65, 233, 0x20AC, 0x1F600, 31))) for _ in range(9)),
            lambda: str(uuid.UUID(int=self._random.getrandbits(128))),
        ]

    def message(self) -> tuple[str, bytes]:
        """A message of one of the methods."""
        method = self._random.choice(tuple(METHODS))
        message = METHODS[method][0]()
        self._fill(message)
        self._make_likely(message)
        if method == "EnqueueAtomic" and self._random.random() < 0.7:
            for job in message.jobs[1:]:
                job.queue = message.jobs[0].queue
        return method, message.SerializeToString()

    def bytes(self) -> tuple[str, bytes]:
        """Bytes that are hardly a message."""
        method, request = self.message()
        chance = self._random.random()
        if chance < 0.3 or not request:
            return method, self._random.randbytes(self._random.choice((1, 2, 3, 8, 40, 300)))
        place = self._random.randrange(len(request))
        if chance < 0.6:  # one byte is another
            return method, request[:place] + self._random.randbytes(1) + request[place + 1 :]
        if chance < 0.8:  # cut off
            return method, request[:place]
        return method, request[:place] + self._random.randbytes(3) + request[place:]

    def _make_likely(self, message: Message) -> None:
        """Random contents alone hardly ever get beyond the first check: mostly mend the commonest faults."""
        match message:
            case pb.EnqueueBatchRequest():
                del message.jobs[7:]
                if not message.jobs and self._random.random() < 0.7:
                    message.jobs.add()
                for job in message.jobs:
                    if self._random.random() < 0.7:
                        self._mend(job)
            case pb.ReserveRequest() if self._random.random() < 0.7:
                del message.queues[:]
                message.queues.extend(self._random.sample(self._queues, self._random.randint(1, 4)))
                message.lease_duration.seconds = self._random.randint(0, 3)
                message.lease_duration.nanos = self._random.choice((1, 5_000_000, 999_999_999))
                for name in ("wait_timeout", "worker_id"):
                    if self._random.random() < 0.7:
                        message.ClearField(name)
            case pb.AckRequest() | pb.NackRequest() | pb.ExtendRequest() if self._leases:
                if self._random.random() < 0.8:
                    message.job_id, message.attempt = self._random.choice(self._leases)
                    for name in sorted({"worker_id", "retry"}.intersection(message.DESCRIPTOR.fields_by_name)):
                        if self._random.random() < 0.7:
                            message.ClearField(name)
                    if isinstance(message, pb.ExtendRequest) and self._random.random() < 0.7:
                        message.lease_duration.FromMilliseconds(self._random.choice((1, 1000, 3000)))

    def _mend(self, job: pb.EnqueueRequest) -> None:
        job.queue, job.job_type = self._random.choice(self._queues), "letter"
        for field in job.DESCRIPTOR.fields[2:]:
            if self._random.random() < 0.8:
                job.ClearField(field.name)
        if self._random.random() < 0.2:
            job.idempotency_key = self._random.choice("abc")

    def _fill(self, message: Message) -> None:
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < 0.4:
                continue
            if is_map(field):
                entries = getattr(message, field.name)
                for _ in range(self._random.choice((1, 2, 4))):
                    self._fill(entries[self._text()])
            elif field.is_repeated:
                self._fill_repeated(message, field)
            elif field.message_type is not None:
                child = getattr(message, field.name)
                child.SetInParent()
                self._fill(child)
            else:
                setattr(message, field.name, self._scalar(field))

    def _fill_repeated(self, message: Message, field: FieldDescriptor) -> None:
        values = getattr(message, field.name)
        for _ in range(self._random.choice((0, 1, 1, 2, 3, 6, 7))):
            if field.message_type is not None:
                self._fill(values.add())
            else:
                values.append(self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        match field.type:
            case FieldDescriptor.TYPE_STRING:
                return self._text()
            case FieldDescriptor.TYPE_BYTES:
                return self._random.randbytes(self._random.choice((0, 1, 100, 999, 1000, 1001, 5000)))
            case FieldDescriptor.TYPE_UINT32:
                return self._random.choice((0, 1, 1, 2, 5, 9, 10, 2**31 - 1, 2**31, 2**32 - 1))
            case FieldDescriptor.TYPE_INT64:
                return self._random.choice((0, 1, -1, 3, 10**9, 1_800_000_000, 315_576_000_001, 2**63 - 1, -(2**63)))
            case FieldDescriptor.TYPE_INT32:
                return self._random.choice((0, 1, -1, 10**6, 999_999_999, 10**9, 2**31 - 1, -(2**31)))
            case FieldDescriptor.TYPE_DOUBLE:
                return self._random.choice((0.0, -0.0, 1.5, float("inf"), float("nan"), 5e-324))
            case FieldDescriptor.TYPE_BOOL:
                return self._random.random() < 0.5
            case _:
                raise AssertionError(f"requests have no fields like {field.full_name}")

    def _text(self) -> str:
        return self._random.choice(self._texts)()


def is_map(field: FieldDescriptor) -> bool:
    kind: Descriptor | None = field.message_type
    return kind is not None and kind.GetOptions().map_entry


# ---- the server


@contextmanager
def unharmed(server: Server) -> Iterator[None]:
    """Afterwards the same processes are there, nothing was logged as an error, and jobs still go through."""
    before = sorted(server.processes())
    yield
    assert sorted(server.processes()) == before
    bad = [entry for entry in server.log.entries if entry.get("level") in ("error", "critical") or "line" in entry]
    assert bad == []
    service = Service(server.address)
    queue = new_queue()
    (job_id,) = service.accepted(new_job(queue))
    job = service.reserve_one(queue)
    service.ack(job)
    assert (job.id, service.reserve(queue)) == (job_id, [])
    service.close()
    assert server.stop() == 0


def resident_bytes(server: Server) -> dict[str, int]:
    """What each router and shard holds in memory."""
    children = [entry["child"] for entry in server.log.entries if entry.get("event") == "child is ready"]
    page = os.sysconf("SC_PAGE_SIZE")
    return {child: int(Path(f"/proc/{server.pid_of(child)}/statm").read_text().split()[1]) * page for child in children}


@pytest.mark.parametrize("front", ["queue", "aio"])
def test_random_requests_get_answers_of_the_contract_and_harm_nothing(front: str) -> None:
    seed = os.environ.get("FUZZ_SEED") or uuid.uuid4().hex
    print(f"FUZZ_SEED={seed}")
    with Server(shards=2, front=front, toml=TOML) as server:
        server.start()
        with unharmed(server):
            sender = Sender(server.address)
            requests = Requests(seed, sender.leases)
            send(sender, requests, WARM_UP)
            warm = resident_bytes(server)
            send(sender, requests, MESSAGES[front])
            grown = {child: size - warm[child] for child, size in resident_bytes(server).items()}
            sender.close()
        print(sorted(sender.statuses.items()), sender.outcomes, grown, sep="\n")
        assert sender.faults[:5] == [], f"{len(sender.faults)} answers, FUZZ_SEED={seed}"
        # Otherwise only the first checks were reached.
        assert {"new", "deduplicated", "queue_full", "invalid_request"} <= sender.outcomes.keys()
        for method, statuses in STATUSES.items():
            assert statuses <= {code for of, code in sender.statuses if of == method}, method
        assert {child: size for child, size in grown.items() if size > GROWTH_BYTES_MAX} == {}


def send(sender: Sender, requests: Requests, count: int) -> None:
    for number in range(count):
        sender.send(*(requests.bytes() if number % 4 == 0 else requests.message()))
    sender.wait()
