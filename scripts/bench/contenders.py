"""The servers that are compared, each with what it can be measured at.

All do the same work with the same payloads and the same load, and sync before they answer. A contender that is
not installed is left out, and `missing` says how to get it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import grpc
import peers
import raw_calls
from google.protobuf.duration_pb2 import Duration
from raw_calls import CallFailedError, GrpcConnection, Lane
from servers import (
    PAYLOAD_BYTES,
    Running,
    batch,
    body_file,
    calls_per_second,
    framed,
    free_port,
    listening,
    seppd,
    started,
)

from common import queue_pb2 as pb
from common.slots import SlotMap, slot_of

LEASE = Duration(seconds=36_000)
BATCH = 256
# Jobs of one call of `raw_calls`, whose messages fit into one frame.
SMALL_BATCH = 40
QUEUE = "bench"
# What is done through the usual client of each.
BY_CLIENT = ("client's enqueue", "client's round trip")


class Work(NamedTuple):
    """One row: `calls` calls of a kind with so many jobs each, over so many connections."""

    kind: str
    connections: int
    jobs: int
    calls: int

    def __str__(self) -> str:
        what = self.kind if "trip" in self.kind or self.kind in BY_CLIENT else f"{self.kind} {self.jobs}"
        return f"{what}, {self.connections} conn."


class Contender(Protocol):
    name: str

    def can(self, work: Work) -> bool: ...

    def measure(self, work: Work) -> dict[str, float]:
        """`rate`, in jobs per second, and for round trips `p50`, `p99` and `p999` in ms."""

    def check(self) -> str | None:
        """Every job that was taken must be there once; what is wrong, if anything."""


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In ms."""
    ordered = sorted(seconds)
    return {
        name: 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * part))]
        for name, part in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))
    }


# -- whatever speaks sepp.v1 ------------------------------------------------------------------------


class GrpcServer:
    """A server of the protocol: this one, or the reference server."""

    def __init__(self, name: str, address: str, queues: dict[str, list[str]] | None = None) -> None:
        self.name = name
        self._address = address
        self._queues = queues or {}
        self._last_rate: dict[str, float] = {}
        self.ready = 0  # what must be there, as far as this has gone
        self.leased = 0

    def can(self, work: Work) -> bool:
        kinds = ("enqueue", "reserve", "ack", "round trip", "round trip at half load")
        return work.kind in (*kinds, *BY_CLIENT, *self._queues)

    def measure(self, work: Work) -> dict[str, float]:
        match work.kind:
            case "enqueue":
                return {"rate": self._enqueue(work, "EnqueueBatch", [QUEUE])}
            case "reserve":
                return {"rate": self._reserve(work)}
            case "ack":
                return {"rate": self._ack(work)}
            case "round trip":
                return self._round_trips(work, 0.0)
            case "round trip at half load":
                return self._round_trips(work, self._last_rate["round trip"] / 2)
            case kind if kind in BY_CLIENT:
                if kind == "client's enqueue":
                    self.ready += work.calls
                return by_client([*peers.PYTHON, "by_sepp.py"], work, self._address, Path.cwd())
            case _:
                return {"rate": self._enqueue(work, "EnqueueAtomic", self._queues[work.kind])}

    def check(self) -> str | None:
        """The protocol has no way to ask; see `Seppd`."""
        return None

    def _enqueue(self, work: Work, method: str, queues: list[str]) -> float:
        names = [queues[number % len(queues)] for number in range(work.jobs)]
        with body_file(framed(batch(names))) as body:
            rate = calls_per_second(self._address, method, body, work.connections, work.calls)
        self.ready += work.calls * work.jobs
        return rate * work.jobs

    def _fill(self, jobs: int) -> None:
        """Have at least so many ready."""
        if self.ready < jobs:
            count = -(-(jobs - self.ready) // SMALL_BATCH)
            self._run([calls("EnqueueBatch", [batch([QUEUE] * SMALL_BATCH)] * count)], 1)
            self.ready += count * SMALL_BATCH

    def _reserve(self, work: Work) -> float:
        self._fill(work.calls * work.jobs)
        request = pb.ReserveRequest(queues=[QUEUE], max_jobs=work.jobs, lease_duration=LEASE)
        with body_file(framed(request.SerializeToString())) as body:
            rate = calls_per_second(self._address, "Reserve", body, work.connections, work.calls)
        self.ready -= work.calls * work.jobs
        self.leased += work.calls * work.jobs
        return rate * work.jobs

    def _ack(self, work: Work) -> float:
        self._fill(work.calls)
        acks: list[bytes] = []

        def take() -> Lane:
            request = pb.ReserveRequest(queues=[QUEUE], lease_duration=LEASE)
            while len(acks) < work.calls:
                request.max_jobs = min(BATCH, work.calls - len(acks))
                answer = yield "Reserve", request.SerializeToString()
                acks.extend(ack(job) for job in pb.ReserveResponse.FromString(answer).jobs)

        self._run([take()], 1)
        self.ready -= work.calls
        began = time.monotonic()
        self._run(
            [calls("Ack", acks[place :: work.connections]) for place in range(work.connections)], work.connections
        )
        return work.calls / (time.monotonic() - began)

    def _round_trips(self, work: Work, rate: float) -> dict[str, float]:
        """Enqueue, reserve, ack, one after the other on each connection; at a `rate` per second, or as fast as it goes.

        At a rate a trip counts from the moment at which it was to begin, so that what waits behind a slow one counts.
        They have a queue of their own, which nothing is left in.
        """
        seconds: list[float] = []
        enqueue = batch(["trip"])
        reserve = pb.ReserveRequest(queues=["trip"], max_jobs=1, lease_duration=LEASE).SerializeToString()
        trips = work.calls // work.connections
        interval = work.connections / rate if rate else 0.0

        def trip(start: float) -> Lane:
            for number in range(trips):
                due = start + number * interval if rate else time.monotonic()
                if due > time.monotonic():
                    yield due
                yield "EnqueueBatch", enqueue
                answer = yield "Reserve", reserve
                (job,) = pb.ReserveResponse.FromString(answer).jobs
                yield "Ack", ack(job)
                seconds.append(time.monotonic() - due)

        began = time.monotonic()
        starts = [began + place * interval / work.connections for place in range(work.connections)]
        self._run([trip(start) for start in starts], work.connections)
        found = len(seconds) / (time.monotonic() - began)
        if not rate:
            self._last_rate["round trip"] = found
        return {"rate": found, **percentiles(seconds)}

    def _run(self, lanes: list[Lane], connections: int) -> None:
        raw_calls.run(lanes, connections, lambda: GrpcConnection(self._address))


def ack(job: pb.Job) -> bytes:
    return pb.AckRequest(job_id=job.id, attempt=job.attempt).SerializeToString()


def calls(method: str, messages: list[bytes]) -> Lane:
    for message in messages:
        yield method, message


class Seppd(GrpcServer):
    """This server."""

    def __init__(self, name: str, running: Running, queues: dict[str, list[str]] | None = None) -> None:
        super().__init__(name, running.address, queues)
        self._running = running

    def measure(self, work: Work) -> dict[str, float]:
        if work.kind == "reserve":
            self._fill(work.calls * work.jobs)  # what it costs is another row's
        before = {kind: self._running.cpu_s(kind) for kind in ("router", "shard")}
        figures = super().measure(work)
        if work.kind in ("enqueue", "reserve"):
            for kind, used in before.items():
                cpu_s = self._running.cpu_s(kind) - used
                figures[f"{kind} cpu"] = cpu_s * 1e6 / (work.calls * work.jobs)
        return figures

    def check(self) -> str | None:
        found = self._running.stored_jobs(), self._running.leased_jobs()
        expected = self.ready, self.leased
        return None if found == expected else f"{self.name}: {found} jobs are ready and leased, not {expected}"

    def memory(self) -> dict[str, float]:
        return {kind: self._running.memory_mb(kind) for kind in ("router", "shard")}


class BareServer(GrpcServer):
    """A grpc.aio server whose only handler answers constant bytes: what asyncio can do at best."""

    def can(self, work: Work) -> bool:
        return work.kind == "enqueue" and work.jobs == 1


async def serve_bare() -> None:
    async def answer(_request: bytes, _context: object) -> bytes:
        return b"\x0a\x28\x0a\x26\x0a\x24" + b"0" * 36

    handler = grpc.method_handlers_generic_handler(
        "sepp.v1.QueueService", {"EnqueueBatch": grpc.unary_unary_rpc_method_handler(answer)}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), file=sys.stderr, flush=True)
    await server.wait_for_termination()


# -- beanstalkd -------------------------------------------------------------------------------------


class BeanstalkConnection:
    """The text protocol of beanstalkd; a call is the bytes of a command."""

    def __init__(self, address: str) -> None:
        self.socket = raw_calls.connected(address)
        self._unread = b""
        self._lane: Lane | None = None

    def call(self, lane: Lane, call: bytes) -> bytes:
        self._lane = lane
        return call

    def take(self, data: bytes) -> tuple[list[tuple[Lane, bytes]], bytes]:
        self._unread += data
        line, end, rest = self._unread.partition(b"\r\n")
        if not end:
            return [], b""
        if line.startswith(b"RESERVED"):
            if len(rest) < int(line.split()[2]) + 2:
                return [], b""
        elif not line.startswith((b"INSERTED", b"DELETED")):
            raise CallFailedError(f"beanstalkd answered {line!r}")
        self._unread = b""
        assert self._lane is not None
        return [(self._lane, line)], b""


class Beanstalkd:
    name = "beanstalkd -f 0"

    def __init__(self, address: str) -> None:
        self._address = address
        self._ready = 0

    def can(self, work: Work) -> bool:
        return work.jobs == 1 and work.kind in ("enqueue", "reserve", "ack", "round trip")

    def measure(self, work: Work) -> dict[str, float]:
        share = work.calls // work.connections
        put = b"put 0 0 3600 %d\r\n%b\r\n" % (PAYLOAD_BYTES, b"x" * PAYLOAD_BYTES)
        seconds: list[float] = []

        def puts(count: int) -> Lane:
            for _ in range(count):
                yield put

        def trips() -> Lane:
            for _ in range(share):
                began = time.monotonic()
                yield put
                line = yield b"reserve\r\n"
                yield b"delete %b\r\n" % line.split()[1]
                seconds.append(time.monotonic() - began)

        def reserves() -> Lane:
            # A connection that ends gives back what it has reserved: jobs are deleted by who reserved them.
            taken = []
            for _ in range(share):
                line = yield b"reserve\r\n"
                taken.append(line.split()[1])
            reserved.append(time.monotonic())
            while len(reserved) < work.connections:
                yield time.monotonic() + 0.001
            for number in taken:
                yield b"delete %b\r\n" % number

        reserved: list[float] = []
        if work.kind in ("reserve", "ack"):
            self._run([puts(share) for _ in range(work.connections)], work.connections)
        began = time.monotonic()
        match work.kind:
            case "enqueue":
                self._run([puts(share) for _ in range(work.connections)], work.connections)
                self._ready += share * work.connections
            case "round trip":
                self._run([trips() for _ in range(work.connections)], work.connections)
            case _:
                self._run([reserves() for _ in range(work.connections)], work.connections)
        ended = time.monotonic()
        if work.kind == "reserve":
            ended = max(reserved)
        elif work.kind == "ack":
            began = max(reserved)
        figures = {"rate": share * work.connections / (ended - began)}
        return figures | percentiles(seconds) if seconds else figures

    def check(self) -> str | None:
        with raw_calls.connected(self._address) as connection:
            connection.sendall(b"stats-tube default\r\n")
            text = connection.recv(1 << 16).decode()
        ready = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("current-jobs-ready"))
        return None if ready == self._ready else f"{self.name}: {ready} jobs are ready, not {self._ready}"

    def _run(self, lanes: list[Lane], connections: int) -> None:
        raw_calls.run(lanes, connections, lambda: BeanstalkConnection(self._address))


# -- through the usual client --------------------------------------------------------------------------


def by_client(program: list[str], work: Work, address: str, cwd: Path) -> dict[str, float]:
    kind = work.kind.removeprefix("client's ")
    found = peers.run_client(program, kind, work.connections, work.calls, address, cwd)
    seconds = found.pop("seconds")
    return found | percentiles(seconds) if seconds else found


class PeerServer:
    """Another job queue."""

    def __init__(self, peer: peers.Peer, address: str) -> None:
        self.name = peer.name
        self._peer = peer
        self._address = address
        self._ready = 0

    def can(self, work: Work) -> bool:
        return work.kind in BY_CLIENT

    def measure(self, work: Work) -> dict[str, float]:
        if work.kind == "client's enqueue":
            self._ready += work.calls
        return by_client(self._peer.program, work, self._address, Path.cwd())

    def check(self) -> str | None:
        ready = peers.run_client(self._peer.program, "count", 1, 1, self._address, Path.cwd())["ready"]
        return None if ready == self._ready else f"{self.name}: {ready} jobs are ready, not {self._ready}"


# -- starting them ----------------------------------------------------------------------------------


def queues_on(shard: int, number: int, shards: int) -> list[str]:
    """The first names of queues that live on a shard of a new server."""
    owners = SlotMap.even(shards).owners
    names = (f"bench-{n}" for n in range(100_000))
    return [name for _, name in zip(range(number), (n for n in names if owners[slot_of(n)] == shard), strict=False)]


class Contest:
    """The contenders that could be started, and of the others what is missing."""

    def __init__(self, stack: ExitStack, directory: Path, routers: int, kinds: set[str]) -> None:
        self.contenders: list[Contender] = []
        self.missing: list[str] = []
        if "enqueue" in kinds:
            command = [sys.executable, str(Path(__file__).with_name("compare.py")), "--bare"]
            self.contenders.append(BareServer("bare grpc.aio", stack.enter_context(started(command, {})).address))
        self.ours = Seppd("seppd", stack.enter_context(seppd("queue", 1, routers)))
        self.contenders.append(self.ours)
        if any(kind.startswith("atomic") for kind in kinds):
            first, second = queues_on(0, 2, 2)
            (other,) = queues_on(1, 1, 2)
            queues = {"atomic on one shard": [first, second], "atomic on two shards": [first, other]}
            running = stack.enter_context(seppd("queue", 2, routers))
            self.contenders.append(_OnlyAtomic("seppd, two shards", running, queues))
        self._add("sepp", "cargo install sepp", lambda: self._reference(stack, directory / "sepp"))
        self._add("beanstalkd", "apt install beanstalkd", lambda: self._beanstalkd(stack, directory / "beanstalkd"))
        if not kinds.isdisjoint(BY_CLIENT):
            for peer in peers.PEERS:
                self._add_peer(peer, stack, directory / peer.name)

    def _add(self, program: str, install: str, start: Callable[[], Contender]) -> None:
        if shutil.which(program) is None:
            self.missing.append(f"{program} is not installed and left out: {install}")
        else:
            self.contenders.append(start())

    def _add_peer(self, peer: peers.Peer, stack: ExitStack, directory: Path) -> None:
        missing = peer.missing()
        if missing is not None:
            self.missing.append(missing)
        else:
            directory.mkdir()
            address = stack.enter_context(peers.server_of(peer, directory))
            self.contenders.append(PeerServer(peer, address))

    @staticmethod
    def _reference(stack: ExitStack, directory: Path) -> Contender:
        directory.mkdir()
        port = free_port()
        environment = {
            "SEPP_SERVER__LISTEN_ADDR": f"127.0.0.1:{port}",
            "SEPP_SERVER__DB_PATH": str(directory / "db"),
            "SEPP_STORAGE__PERSIST_MODE": "sync_all",
        }
        return GrpcServer("sepp (reference)", stack.enter_context(listening(["sepp"], port, environment)))

    @staticmethod
    def _beanstalkd(stack: ExitStack, directory: Path) -> Contender:
        directory.mkdir()
        port = free_port()
        command = ["beanstalkd", "-l", "127.0.0.1", "-p", str(port), "-b", str(directory), "-f", "0"]
        return Beanstalkd(stack.enter_context(listening(command, port)))


class _OnlyAtomic(Seppd):
    """Two shards, for what needs two."""

    def can(self, work: Work) -> bool:
        return work.kind in self._queues


@contextmanager
def contest(routers: int, kinds: set[str]) -> Iterator[Contest]:
    """Those that can do something of these kinds."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="seppd-bench-")))
        yield Contest(stack, directory, routers, kinds)


def median(figures: list[dict[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in figures)


def run_bare() -> None:
    asyncio.run(serve_bare())
