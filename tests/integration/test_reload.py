"""What is saved to the configuration file takes effect in a running server: seen by clients, through every router."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from google.protobuf.message import Message

from common import config_file, config_keys
from common import queue_pb2 as pb
from common.config import Config, ConfigError, Loaded, QueueSection, load_again
from common.config_file import ConfigFile
from tests.integration.clients import CHANNEL_OPTIONS, SERVICE
from tests.integration.conftest import StartServer
from tests.integration.server import WAIT_S, Entry, Server

DAY_S = 86_400
SECRET = "the-key-of-the-tests"
TAKEN = "configuration reloaded"
SAME = "configuration read again, nothing has changed"
BROKEN = "configuration not reloaded, the running one stays"
# Long names are what max_queue_name_bytes is tried with; all others have fewer bytes.
LONG_NAME_BYTES = 60

_Answer = TypeVar("_Answer", bound=Message)

Metadata = list[tuple[str, str]]
Settings = dict[str, object]
Probe = Callable[["Client", str], object]


class Client:
    """A connection of its own, and with it one router."""

    def __init__(self, address: str, key: str | None = SECRET) -> None:
        self._channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        grpc.channel_ready_future(self._channel).result(WAIT_S)
        # An open server takes no notice of it.
        self._metadata = [] if key is None else [("authorization", f"Bearer {key}")]

    def close(self) -> None:
        self._channel.close()

    def begin(
        self,
        method: str,
        request: Message,
        answer: type[_Answer],
        metadata: Metadata | None = None,
        timeout_s: float = WAIT_S,
    ) -> grpc.Future:
        """A call on its way. When later calls of this connection are answered, it has come to the router."""
        stub = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return stub.future(request, timeout=timeout_s, metadata=self._metadata if metadata is None else metadata)

    def call(self, method: str, request: Message, answer: type[_Answer], metadata: Metadata | None = None) -> _Answer:
        return self.begin(method, request, answer, metadata).result()

    def enqueue(self, *jobs: pb.EnqueueRequest) -> list[pb.JobResult]:
        answer = self.call("EnqueueBatch", pb.EnqueueBatchRequest(jobs=jobs), pb.EnqueueBatchResponse)
        return list(answer.results)

    def begin_reserve(self, *queues: str, max_jobs: int = 1, wait_ms: int = 0, lease_s: int = 60) -> grpc.Future:
        request = pb.ReserveRequest(queues=queues, max_jobs=max_jobs)
        request.wait_timeout.FromMilliseconds(wait_ms)
        request.lease_duration.FromSeconds(lease_s)
        return self.begin("Reserve", request, pb.ReserveResponse)

    def reserve(self, *queues: str, max_jobs: int = 1, wait_ms: int = 0, lease_s: int = 60) -> list[pb.Job]:
        poll = self.begin_reserve(*queues, max_jobs=max_jobs, wait_ms=wait_ms, lease_s=lease_s)
        return list(poll.result().jobs)

    def reserve_one(self, queue: str, lease_s: int = 60) -> pb.Job:
        (job,) = self.reserve(queue, lease_s=lease_s)
        return job

    def ack(self, job: pb.Job) -> None:
        self.call("Ack", pb.AckRequest(job_id=job.id, attempt=job.attempt), pb.AckResponse)

    def nack(self, job: pb.Job, *, at_once: bool = False) -> None:
        request = pb.NackRequest(job_id=job.id, attempt=job.attempt)
        if at_once:
            request.retry.delay.SetInParent()
        self.call("Nack", request, pb.NackResponse)

    def info(self, metadata: Metadata | None = None) -> pb.GetServerInfoResponse:
        return self.call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse, metadata)


def job(queue: str, *, text: str = "", **fields: object) -> pb.EnqueueRequest:
    request = pb.EnqueueRequest(queue=queue, **{"job_type": "letter", **fields})
    if text:
        request.payload.CopyFrom(pb.Payload(data=text.encode(), encoding="text"))
    return request


def custom(**values: str) -> dict[str, pb.PrimitiveValue]:
    return {name: pb.PrimitiveValue(string_value=value) for name, value in values.items()}


def code_of(call: Callable[[], object]) -> str:
    """The name of the status that a call ends with."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


# -- what a client can see, one function for each kind of key ---------------------------------------


def outcome(**fields: object) -> Probe:
    """Of an enqueue: "success" or the rejection."""

    def probe(client: Client, queue: str) -> str:
        (result,) = client.enqueue(job(queue, **fields))
        return result.rejection.WhichOneof("reason") or "success"

    return probe


def outcome_in_the_far_future(client: Client, queue: str) -> object:
    request = job(queue)
    request.scheduled_at.FromSeconds(int(time.time()) + DAY_S)
    return client.enqueue(request)[0].rejection.WhichOneof("reason") or "success"


def outcome_of_a_long_name(client: Client, queue: str) -> object:
    return outcome()(client, queue.ljust(LONG_NAME_BYTES, "x"))


def outcome_of_the_second(client: Client, queue: str) -> object:
    return client.enqueue(job(queue), job(queue))[1].rejection.WhichOneof("reason") or "success"


def code_of_a_batch_of_two(client: Client, queue: str) -> object:
    return code_of(lambda: client.enqueue(job(queue), job(queue)))


def code_of_two_queues(client: Client, queue: str) -> object:
    return code_of(lambda: client.reserve(queue, f"{queue}-2"))


def code_without_a_key(client: Client, queue: str) -> object:
    return code_of(lambda: client.info([]))


def reserved(read: Callable[[pb.Job], object], **fields: object) -> Probe:
    """Something of a job as it is delivered."""

    def probe(client: Client, queue: str) -> object:
        client.enqueue(job(queue, **fields))
        delivered = client.reserve_one(queue)
        client.ack(delivered)
        return read(delivered)

    return probe


def number_reserved(**fields: object) -> Probe:
    """How many of two jobs one Reserve gives."""

    def probe(client: Client, queue: str) -> object:
        client.enqueue(job(queue, **fields), job(queue, **fields))
        delivered = client.reserve(queue, max_jobs=2)
        return len(delivered)

    return probe


def has_a_short_lease(client: Client, queue: str) -> object:
    """Five minutes are asked for; one or less is given."""
    client.enqueue(job(queue))
    delivered = client.reserve_one(queue, lease_s=300)
    client.ack(delivered)
    return delivered.lease_expires_at.ToSeconds() - time.time() < 60


def is_back_at_once(client: Client, queue: str) -> object:
    """A job that was nacked for the first time."""
    client.enqueue(job(queue))
    client.nack(client.reserve_one(queue))
    return take_all(client, queue, wait_ms=0)


def is_back_after_many_attempts(client: Client, queue: str) -> object:
    """A job that was nacked for the twentieth time; a delay of 1 ms that doubles is some minutes by then."""
    while take_all(client, queue, wait_ms=0):  # what an earlier try has left
        pass
    client.enqueue(job(queue, max_attempts=50))
    for _ in range(19):
        client.nack(client.reserve_one(queue), at_once=True)
    client.nack(client.reserve_one(queue))
    # Where the wait is too short for a slow machine, it is tried again.
    return take_all(client, queue, wait_ms=100)


def take_all(client: Client, queue: str, wait_ms: int) -> bool:
    """Whether there is a job; it is acked."""
    delivered = client.reserve(queue, wait_ms=wait_ms)
    for one in delivered:
        client.ack(one)
    return bool(delivered)


def waits_shortly(client: Client, queue: str) -> object:
    """A Reserve that asks for a minute, where a millisecond is the most."""
    return client.info().max_wait_timeout.ToMilliseconds() == 1 and client.reserve(queue, wait_ms=60_000) == []


def is_deduplicated(client: Client, queue: str) -> object:
    """The second of two enqueues with one key."""
    request = job(queue, idempotency_key=uuid.uuid4().hex)
    client.enqueue(request)
    return client.enqueue(request)[0].success.deduplicated


@dataclass(frozen=True)
class Case:
    """A value of a key, and what a client sees before and after it is saved. `base` is there all the time."""

    value: object
    probe: Probe
    before: object
    after: object
    base: Settings = field(default_factory=dict)


CUSTOM = custom(aa="1", bb="2")
DOUBLING: Settings = {"retry_delay_ms": 1, "retry_backoff": "exponential"}
# By key; those that a declared queue may have as well are tried in both places.
CASES = {
    "server.strict_queues": Case(True, outcome(), "success", "unknown_queue"),
    "auth.api_keys": Case([{"name": "t", "key": SECRET}], code_without_a_key, "OK", "UNAUTHENTICATED"),
    "limits.max_lease_duration_ms": Case(5_000, has_a_short_lease, False, True),
    "limits.default_max_attempts": Case(4, reserved(lambda job: job.max_attempts), 3, 4),
    "limits.max_attempts_ceiling": Case(50, reserved(lambda job: job.max_attempts, max_attempts=1_000), 100, 50),
    "limits.default_priority": Case(3, reserved(lambda job: job.priority), 0, 3),
    "limits.retry_delay_ms": Case(3_000_000, is_back_at_once, True, False),
    "limits.retry_backoff": Case("exponential", is_back_after_many_attempts, True, False, {"retry_delay_ms": 1}),
    "limits.retry_delay_max_ms": Case(1, is_back_after_many_attempts, False, True, DOUBLING),
    "limits.max_reserve_batch": Case(1, number_reserved(), 2, 1),
    "limits.max_reserve_queues": Case(1, code_of_two_queues, "OK", "INVALID_ARGUMENT"),
    "limits.max_wait_timeout_ms": Case(1, waits_shortly, False, True),
    "limits.max_enqueue_batch": Case(1, code_of_a_batch_of_two, "OK", "INVALID_ARGUMENT"),
    "limits.max_queue_depth": Case(1, outcome_of_the_second, "success", "queue_full"),
    "limits.max_payload_bytes": Case(4, outcome(text="12345"), "success", "payload_too_large"),
    "limits.max_response_bytes": Case(65_536, number_reserved(text="x" * 40_000), 2, 1),
    "limits.max_custom_entries": Case(1, outcome(custom=CUSTOM), "success", "custom_entries_too_many"),
    "limits.max_custom_total_bytes": Case(5, outcome(custom=CUSTOM), "success", "custom_map_too_large"),
    "limits.max_custom_key_bytes": Case(1, outcome(custom=CUSTOM), "success", "custom_key_too_long"),
    "limits.max_queue_name_bytes": Case(LONG_NAME_BYTES - 1, outcome_of_a_long_name, "success", "queue_name_too_long"),
    "limits.max_job_type_bytes": Case(5, outcome(), "success", "job_type_name_too_long"),
    "limits.max_idempotency_key_bytes": Case(
        4, outcome(idempotency_key="12345"), "success", "idempotency_key_too_long"
    ),
    "limits.max_schedule_horizon_ms": Case(1_000, outcome_in_the_far_future, "success", "scheduled_too_far"),
    "limits.allowed_encodings": Case(["json"], outcome(text="x"), "success", "encoding_not_allowed"),
    "storage.dedup_window_ms": Case(1, is_deduplicated, True, False),
}
CASES_OF_QUEUES = {
    name: case for key, case in CASES.items() if (name := key.partition(".")[2]) in QueueSection.model_fields
} | {"allowed_job_types": Case(["parcel"], outcome(), "success", "job_type_not_allowed")}
# Not seen before the server stops; it has a test of its own.
SEEN_AT_THE_STOP = "server.shutdown_grace_ms"


class Running:
    """A server, a client for each of its routers, and its configuration file."""

    def __init__(self, server: Server, routers: int) -> None:
        self.server = server
        self.routers = routers
        self.file = server.home / "sepp.toml"
        self.clients: list[Client] = []

    def connect(self) -> Running:
        """A client for every router: which one takes a connection is decided by the kernel."""
        covered: set[str] = set()
        while len(covered) < self.routers:
            known = self.server.connections()
            client = Client(self.server.address)
            (router,) = {place for link, place in self.server.connections().items() if link not in known}
            if router in covered:
                client.close()
            else:
                covered.add(router)
                self.clients.append(client)
        return self

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.clients.clear()

    def save(self, text: str) -> None:
        """As an editor does that writes beside the file and renames."""
        beside = self.file.with_name("sepp.toml~")
        beside.write_text(text)
        beside.rename(self.file)

    def next_entry(self, act: Callable[[], object], **fields: object) -> Entry:
        """The entry of the log that an action leads to."""
        known = {id(entry) for entry in self.server.log.entries}
        act()
        return self.server.log.wait_for(
            lambda entry: id(entry) not in known and all(entry.get(name) == value for name, value in fields.items())
        )

    def reload(self, text: str = "") -> list[str]:
        """Save something else, wait until the supervisor has taken it, and give the keys that differ."""
        known = {id(entry) for entry in self.server.log.entries}
        self.save(f"{text}\n# {uuid.uuid4()}\n")
        entry = self.server.log.wait_for(lambda entry: id(entry) not in known and entry.get("event") in (TAKEN, SAME))
        return entry.get("keys", [])

    def sighup(self) -> None:
        os.kill(self.server.pid, signal.SIGHUP)

    def see(self, probe: Probe, expected: object, queue: str | None = None) -> None:
        """Every client comes to see it."""
        give_up_at = time.monotonic() + WAIT_S
        for client in self.clients:
            while (found := probed(probe, client, queue or new_queue())) != expected:
                assert time.monotonic() < give_up_at, f"{found!r} is not {expected!r}"
                time.sleep(0.01)


def probed(probe: Probe, client: Client, queue: str) -> object:
    """What a probe finds; a call that fails meets what was configured before, which a router may still go by."""
    try:
        return probe(client, queue)
    except grpc.RpcError as error:
        return error


def new_queue() -> str:
    return f"queue-{uuid.uuid4().hex}"


def toml(settings: Settings) -> str:
    """Dotted keys with their values; what JSON can say of them, TOML can."""
    lines = [f"{key} = {value_text(value)}" for key, value in settings.items()]
    return "\n".join(lines) + "\n"


def value_text(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {value_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(value_text, value)) + "]"
    return json.dumps(value)


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One server with two routers and two shards, for every test that leaves it as it was but for its file."""
    with Server(shards=2, routers=2) as server:
        running = Running(server.start(), 2).connect()
        yield running
        running.close()


@pytest.fixture
def running(shared: Running) -> Running:
    """The shared server with an empty file."""
    shared.reload()
    return shared


@pytest.fixture
def start_one(new_server: StartServer) -> Iterator[Callable[[Server], Running]]:
    """Starts a server with one router."""
    started: list[Running] = []

    def start(server: Server) -> Running:
        started.append(Running(server.start(), 1).connect())
        return started[-1]

    yield start
    for running in started:
        running.close()


# -- every live key ---------------------------------------------------------------------------------


def test_every_live_key_is_tried() -> None:
    live = {f"{section}.{name}" for section, name, key in config_keys.fields() if config_keys.extra(key, "live")}
    assert live == {*CASES, SEEN_AT_THE_STOP}
    assert set(QueueSection.model_fields) == {"name", *CASES_OF_QUEUES}


@pytest.mark.parametrize("key", CASES)
def test_a_saved_key_takes_effect_in_every_router(shared: Running, key: str) -> None:
    case = CASES[key]
    section = key.partition(".")[0]
    base = {f"{section}.{name}": value for name, value in case.base.items()}
    shared.reload(toml(base))
    shared.see(case.probe, case.before)
    assert shared.reload(toml({**base, key: case.value})) == [key]
    shared.see(case.probe, case.after)


@pytest.mark.parametrize("key", CASES_OF_QUEUES)
def test_a_saved_key_of_a_queue_takes_effect_in_every_router(shared: Running, key: str) -> None:
    case = CASES_OF_QUEUES[key]
    queue = new_queue()
    declared = f'[[queues]]\nname = "{queue}"\n{toml(case.base)}'
    shared.reload(declared)
    shared.see(case.probe, case.before, queue)
    assert shared.reload(declared + toml({key: case.value})) == [f"queues.{queue}.{key}"]
    shared.see(case.probe, case.after, queue)


def test_a_key_of_a_queue_leaves_other_queues_as_they_were(running: Running) -> None:
    queue = new_queue()
    running.reload(f'[[queues]]\nname = "{queue}"\nmax_payload_bytes = 4\n')
    running.see(outcome(text="12345"), "payload_too_large", queue)
    running.see(outcome(text="12345"), "success")


def test_a_queue_that_is_declared_while_the_server_runs_is_known_in_strict_mode(running: Running) -> None:
    running.reload("[server]\nstrict_queues = true\n")
    # A queue that got a job before its router heard of this would be known for that: each look has one of its own.
    running.see(outcome(), "unknown_queue")
    queue = new_queue()
    running.see(outcome(), "unknown_queue", queue)
    assert running.reload(f'[server]\nstrict_queues = true\n[[queues]]\nname = "{queue}"\n') == [f"queues.{queue}"]
    running.see(outcome(), "success", queue)


def test_the_grace_of_a_stop_is_the_one_that_was_saved_last(
    new_server: StartServer, start_one: Callable[[Server], Running]
) -> None:
    running = start_one(new_server())
    running.reload("[server]\nshutdown_grace_ms = 0\n")
    (client,) = running.clients
    running.server.pause("shard-0")
    request = pb.EnqueueBatchRequest(jobs=[job("mail")])
    # Within the grace that the server started with, half a minute, it would come to its deadline.
    call = client.begin("EnqueueBatch", request, pb.EnqueueBatchResponse, timeout_s=20)
    client.info()
    stopping = running.next_entry(running.server.terminate, event="stopping")
    assert (stopping["grace_ms"], code_of(call.result)) == (0, "UNAVAILABLE")
    running.server.resume("shard-0")
    assert running.server.exit_status() == 0


# -- one router, and processes that are started later -----------------------------------------------


def test_a_single_router_takes_a_saved_key_and_so_do_the_processes_after_it(
    new_server: StartServer, start_one: Callable[[Server], Running]
) -> None:
    running = start_one(new_server())
    running.see(outcome(text="12345"), "success")
    running.reload("[limits]\nmax_payload_bytes = 4\nmax_queue_depth = 1\n")
    running.see(outcome(text="12345"), "payload_too_large")
    running.see(outcome_of_the_second, "queue_full")
    for child in ("router-0", "shard-0"):
        running.server.kill(child)
        running.server.wait_until_back(child)
    running.close()
    running.connect()
    running.see(outcome(text="12345"), "payload_too_large")
    running.see(outcome_of_the_second, "queue_full")


def test_a_poll_that_waits_lives_through_a_reload(running: Running) -> None:
    queue = new_queue()
    client = running.clients[0]
    poll = client.begin_reserve(queue, wait_ms=60_000)
    client.info()
    running.reload("[limits]\nmax_reserve_batch = 12\n")
    running.see(reserve_batch, 12)
    assert not poll.done()
    client.enqueue(job(queue, text="late"))
    assert [one.payload.data for one in poll.result(WAIT_S).jobs] == [b"late"]


def reserve_batch(client: Client, queue: str) -> object:
    return client.info().max_reserve_batch


# -- what is not taken, and what is said ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "[limits]\nmax_payload_bytes = 0\n",
            "limits.max_payload_bytes is 0; allowed: an integer from 1 to 2147483647",
        ),
        ("[limits\n", "sepp.toml: not TOML: "),
        ("[limits]\nmax_paylod_bytes = 9\n", "did you mean max_payload_bytes?"),
        (
            "[limits]\nmax_message_bytes = 40000000\nmax_payload_bytes = 30000000\n",
            "limits.max_payload_bytes is 30000000; allowed: an integer from 1 to 16777216",
        ),
    ],
    ids=["out of bounds", "no TOML", "unknown key", "does not fit what needs a restart"],
)
def test_a_broken_file_changes_nothing_and_says_why(running: Running, text: str, reason: str) -> None:
    running.reload("[limits]\nmax_payload_bytes = 4\n")
    running.see(outcome(text="12345"), "payload_too_large")
    failed = running.next_entry(lambda: running.save(text), event=BROKEN)
    assert failed["level"] == "error" and reason in failed["reason"] and "\n" not in failed["reason"]
    assert running.next_entry(running.sighup, event=BROKEN)["reason"] == failed["reason"]
    running.see(outcome(text="12345"), "payload_too_large")


def test_a_key_that_needs_a_restart_is_named_and_keeps_its_value(running: Running) -> None:
    text = "[limits]\nmax_message_bytes = 2000000\nmax_reserve_batch = 13\n[storage]\nsweep_limit = 7\n"
    warned = running.next_entry(
        lambda: running.save(text), event="changed keys that need a restart keep their running values"
    )
    assert (warned["level"], warned["keys"]) == ("warning", ["limits.max_message_bytes", "storage.sweep_limit"])
    running.see(reserve_batch, 13)
    queue = new_queue()
    three = [job(queue, text="x" * 1_000_000) for _ in range(3)]
    assert [result.WhichOneof("outcome") for result in running.clients[0].enqueue(*three)] == ["success"] * 3


def test_a_removed_file_changes_nothing_until_there_is_one_again(running: Running) -> None:
    running.reload("[limits]\nmax_payload_bytes = 4\n")
    running.see(outcome(text="12345"), "payload_too_large")
    failed = running.next_entry(running.file.unlink, event=BROKEN)
    assert failed["reason"] == "sepp.toml: the configuration file is gone"
    assert running.next_entry(running.sighup, event=BROKEN)["reason"] == failed["reason"]
    running.see(outcome(text="12345"), "payload_too_large")
    running.reload("[limits]\nmax_payload_bytes = 5\n")
    running.see(outcome(text="12345"), "success")


def test_sighup_reads_the_configuration_again(running: Running) -> None:
    assert running.next_entry(running.sighup, event=SAME)["level"] == "debug"


def test_a_comment_changes_nothing(running: Running) -> None:
    assert running.next_entry(lambda: running.save("# nothing\n"), event=SAME)["level"] == "debug"


def test_a_file_that_appears_later_is_taken_and_the_environment_still_wins(
    new_server: StartServer, start_one: Callable[[Server], Running]
) -> None:
    server = new_server(settings={"SEPP_LIMITS__MAX_PAYLOAD_BYTES": "5"})
    (server.home / "sepp.toml").unlink()
    running = start_one(server)
    text = "[limits]\nmax_payload_bytes = 4\nmax_reserve_batch = 9\n[server]\nrouters = 7\n"
    assert running.reload(text) == ["limits.max_reserve_batch"]
    running.see(reserve_batch, 9)
    running.see(outcome(text="12345"), "success")
    running.see(outcome(text="123456"), "payload_too_large")
    assert [entry for entry in server.log.entries if entry.get("level") in ("warning", "error")] == []


def test_a_warning_is_logged_when_it_is_new(running: Running) -> None:
    text = "[admin]\nenabled = true\n"
    warned = running.next_entry(lambda: running.save(text), event="configuration")
    assert warned["warning"] == "[admin] has no use here and is ignored (sepp.toml)"
    count = len(warnings(running))
    running.reload(text)
    assert len(warnings(running)) == count


def warnings(running: Running) -> list[Entry]:
    return [entry for entry in running.server.log.entries if "warning" in entry]


# -- the file itself --------------------------------------------------------------------------------


class Watched:
    """A file that is watched, and the changes that are told."""

    def __init__(self, changes: AsyncGenerator[None, None]) -> None:
        self._changes = changes

    async def change(self) -> None:
        await asyncio.wait_for(anext(self._changes), WAIT_S)


@asynccontextmanager
async def watching(path: Path) -> AsyncGenerator[Watched, None]:
    async with aclosing(ConfigFile(path).changes()) as changes:
        yield Watched(changes)


class Looks:
    """Counts how often the content of a file is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._look = config_file._content
        self._wanted = 0
        self._reached = asyncio.Event()
        monkeypatch.setattr(config_file, "_content", self._count)

    def _count(self, path: Path) -> bytes:
        self._wanted -= 1
        if self._wanted == 0:
            self._reached.set()
        return self._look(path)

    async def more(self, count: int) -> None:
        """Until there were so many more."""
        self._wanted = count
        self._reached.clear()
        await asyncio.wait_for(self._reached.wait(), WAIT_S)
        await asyncio.sleep(0)


async def test_a_file_that_is_written_in_place_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "sepp.toml"
    path.write_text("a")
    async with watching(path) as watched:
        path.write_text("b")
        await watched.change()


async def test_a_file_that_is_replaced_is_a_change_each_time(tmp_path: Path) -> None:
    path = tmp_path / "sepp.toml"
    path.write_text("a")
    async with watching(path) as watched:
        for text in ("b", "c", "d"):
            (tmp_path / "new").write_text(text)
            (tmp_path / "new").rename(path)
            await watched.change()


async def test_a_file_that_appears_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "sepp.toml"
    async with watching(path) as watched:
        path.write_text("a")
        await watched.change()


async def test_a_file_that_appears_with_its_folder_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "later" / "sepp.toml"
    async with watching(path) as watched:
        path.parent.mkdir()
        path.write_text("a")
        await watched.change()


async def test_a_folder_that_is_replaced_is_still_watched(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "sepp.toml"
    path.parent.mkdir()
    path.write_text("a")
    async with watching(path) as watched:
        shutil.rmtree(path.parent)
        await watched.change()
        path.parent.mkdir()
        path.write_text("b")
        await watched.change()
        path.write_text("c")
        await watched.change()


async def test_a_swapped_link_on_the_way_is_a_change(tmp_path: Path) -> None:
    """As a mounted ConfigMap is updated."""
    for version in ("..1", "..2", "..3"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "sepp.toml").write_text(version)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "sepp.toml").symlink_to("..data/sepp.toml")
    async with watching(tmp_path / "sepp.toml") as watched:
        for version in ("..2", "..3"):
            (tmp_path / "..new").symlink_to(version)
            (tmp_path / "..new").rename(tmp_path / "..data")
            await watched.change()


async def test_a_file_behind_a_link_is_watched_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    (tmp_path / "far" / "real.toml").write_text("a")
    (tmp_path / "near" / "sepp.toml").symlink_to(tmp_path / "far" / "real.toml")
    async with watching(tmp_path / "near" / "sepp.toml") as watched:
        (tmp_path / "far" / "real.toml").write_text("b")
        await watched.change()


async def test_the_same_content_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sepp.toml"
    path.write_text("a")
    async with watching(path) as watched:
        looks = Looks(monkeypatch)
        change = asyncio.create_task(watched.change())
        (tmp_path / "new").write_text("a")
        (tmp_path / "new").rename(path)
        await looks.more(1)
        assert not change.done()
        path.write_text("b")
        await change


async def test_a_file_that_is_empty_for_a_moment_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sepp.toml"
    path.write_text("a")
    async with watching(path) as watched:
        looks = Looks(monkeypatch)
        change = asyncio.create_task(watched.change())
        path.write_text("")
        await looks.more(3)
        assert not change.done()
        path.write_text("b")
        await change


async def test_a_file_that_stays_empty_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "sepp.toml"
    path.write_text("a")
    async with watching(path) as watched:
        path.write_text("")
        await watched.change()


async def test_what_was_noted_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sepp.toml"
    path.write_text("a")
    file = ConfigFile(path)
    async with aclosing(file.changes()) as changes:
        path.write_text("b")
        file.note()
        looks = Looks(monkeypatch)
        change = asyncio.create_task(anext(changes))
        await looks.more(1)
        assert not change.done()
        path.write_text("c")
        await asyncio.wait_for(change, WAIT_S)


def test_a_pipe_is_read_once_and_not_again(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    ConfigFile(path).note()
    with pytest.raises(ConfigError, match="is no regular file and cannot be read again"):
        load_again(Loaded(Config(), [], path, {}), path, {})
