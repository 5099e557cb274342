"""What the router's core sees of gRPC: calls with bytes in them, and a front that brings them.

Two fronts implement this: `front_queue` on a completion queue of its own, and `front_aio` on the
public `grpc.aio`; `fronts` chooses. Nothing else in the router knows gRPC, and this module does not
load it before a front listens, so that the core can be used without it.

How a call ends. A call is given to the receiver once, with its whole request, and the receiver
answers it once with `reply` or `fail`. Of a call of the watched methods the receiver also hears:

- `answer_left`, exactly once after each `reply` or `fail`, and never from within them, so that a
  receiver may answer under its own lock;
- `call_closed`, at most once and only when the call ended before it was answered. Where an answer
  and the end meet, one of them wins: a `reply` that wins is never followed by `call_closed`, one
  that loses is followed by `call_closed`, where that is not yet told, and then `answer_left(False)`.

Of a call of the other methods nothing more is heard, and answering one that has ended does nothing.
Once `stop` has returned the front tells of nothing any more.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

SERVICE = "sepp.v1.QueueService"
METHODS = (
    "EnqueueBatch",
    "EnqueueAtomic",
    "Reserve",
    "Ack",
    "Nack",
    "Extend",
    "DrainDeadLetters",
    "GetServerInfo",
)
# Calls of these methods may wait, or hand out what must come back when the client has gone: the
# front tells of their end (`call_closed`) and whether their answer left (`answer_left`). The others
# are answered in one step, and the front saves the event.
WATCHED_METHODS = frozenset({"Reserve", "DrainDeadLetters"})

# Calls that may wait in the C core for Python to take them. Above the first number new calls are
# refused at random, above the second always, and the client sees CANCELLED without having asked for
# it. The core's own 1 000 and 3 000 are less than one burst of a busy client.
PENDING_CALLS_MAX = 100_000
PENDING_CALLS_HARD_MAX = 200_000
# A connection that pings more often than this while it sends no data is closed. Clients that hold a
# long poll open keep it alive with pings, commonly every 10 to 30 s; the core's own limit, five
# minutes (two hours without a call), would cut them off.
PING_INTERVAL_MIN_MS = 5_000
# The text of a failed call, in bytes of UTF-8. It travels percent-encoded in a header: clients turn
# one of more than some 16 KiB into RESOURCE_EXHAUSTED, so that the intended status gets lost.
TEXT_BYTES_MAX = 400

# What a client is told when the fault is ours: nothing about the inside.
INTERNAL_TEXT = "internal error"
NO_MESSAGE_TEXT = "the request has no message"
STOPPING_TEXT = "the server is stopping"


class Status(IntEnum):
    """The gRPC status codes that this server answers with."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class Call(Protocol):
    """One call in progress. `reply` and `fail` may be called from any thread, once, and never block."""

    method: str
    request: bytes
    # The value of the `authorization` metadata, the first if there are several, None when the
    # client sent none.
    authorization: str | None
    # Wall clock seconds (time.time()) at which the client gives up, math.inf for never.
    deadline: float

    def reply(self, answer: bytes) -> None:
        """Answer with a message."""

    def fail(self, status: Status, text: str) -> None:
        """Answer with a status other than OK; the text is cut after TEXT_BYTES_MAX bytes."""


class Receiver(Protocol):
    """Who is told of calls; from any thread, and must not block.

    What a receiver raises is logged. Out of `call_arrived` it also ends the call with INTERNAL,
    unless that was answered before; for a watched call `call_closed` follows.
    """

    def call_arrived(self, call: Call) -> None:
        """A whole request is there."""

    def call_closed(self, call: Call) -> None:
        """A watched call ended before it was answered: cancelled, past its deadline, or cut off."""

    def answer_left(self, call: Call, left: bool) -> None:
        """The answer of a watched call was written to its connection (True), or could not be (False).

        True is no receipt: the client may have gone before it read it.
        """


@dataclass(frozen=True)
class FrontOptions:
    """How a front listens. Sizes in bytes; `tls` is (certificate chain, private key) in PEM.

    `address` is host:port, an IPv6 host in brackets; several fronts may share it. Port 0 picks a
    free one.
    """

    address: str
    max_message_bytes: int
    tls: tuple[bytes, bytes] | None = None


class Front(Protocol):
    """A gRPC server for the eight methods, with health and reflection beside them."""

    name: str
    # Where it listens, 0 before `start`.
    port: int

    def start(self) -> None:
        """Listen and serve. Raises FrontError when the address cannot be had; a front starts once."""

    def run_soon(self, work: Callable[[], None]) -> bool:
        """Have the thread that brings calls do this next. False when the caller had better do it.

        For any thread. Two threads that take turns for the interpreter's lock, several times for each call,
        cost a fifth more than one that does the work of both. Where that one has little to do, or is about to
        end, there is nothing to save by waking it.
        """

    def set_serving(self, serving: bool) -> None:
        """What the health service says of "" and of the queue service; not serving at first."""

    def stop(self, grace_s: float) -> None:
        """No new connections or calls; running calls have `grace_s` to end. Blocks until all has ended.

        What is still running after the grace is ended with UNAVAILABLE, and watched calls among it
        are reported closed. Streams of the health service do not prolong the stop. A second call
        waits for the first.
        """


MakeFront = Callable[[FrontOptions, Receiver], Front]


class FrontUnavailable(Exception):
    """This front cannot run with the installed grpcio; the text says which name or check is missing."""


class FrontError(Exception):
    """The front cannot listen; the text is one line and says where and why."""


def paths(methods: Sequence[str] = METHODS) -> dict[str, str]:
    """HTTP/2 path of each method."""
    return {method: f"/{SERVICE}/{method}" for method in methods}


def shortened(text: str) -> str:
    """The text of a failure, cut between characters to TEXT_BYTES_MAX bytes and safe to encode."""
    return text.encode(errors="replace")[:TEXT_BYTES_MAX].decode(errors="ignore")


def channel_arguments(options: FrontOptions) -> list[tuple[str, int]]:
    """How the C core is to listen, for both fronts."""
    return [
        ("grpc.so_reuseport", 1),  # routers share one port; the supervisor guards against a second server
        ("grpc.server.max_pending_requests", PENDING_CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS_HARD_MAX),
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MIN_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        # Answers are cut by `limits.max_response_bytes` where they are made, not refused here.
        ("grpc.max_send_message_length", -1),
    ]


class _Listener(Protocol):
    """What both kinds of public gRPC servers have."""

    def add_insecure_port(self, address: str) -> int: ...

    def add_secure_port(self, address: str, server_credentials: object) -> int: ...


def bind(server: _Listener, options: FrontOptions) -> int:
    """Give a server that is not started its port, and return the number. Raises FrontError."""
    import grpc  # here, so that the core can be used without it

    host, port = _host_and_port(options.address)
    try:
        if options.tls is None:
            bound = server.add_insecure_port(options.address)
        else:
            chain, key = options.tls
            bound = server.add_secure_port(options.address, grpc.ssl_server_credentials(((key, chain),)))
    except (RuntimeError, ValueError):
        bound = 0
    if bound:
        return bound
    # grpcio says neither what the system said nor whether it was TLS.
    reason = _refusal(host, port)
    if reason is None and options.tls is not None:
        reason = "the TLS certificate and the private key are not PEM or do not belong together"
    raise FrontError(f"cannot listen on {options.address}: {reason or 'no reason given'}")


def _host_and_port(address: str) -> tuple[str, int]:
    """The parts of host:port. grpcio would listen on port 443 without one, and wrap one above 65 535."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise FrontError(f"cannot listen on {address!r}: it is not host:port with a port up to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _refusal(host: str, port: int) -> str | None:
    """Why the system does not let us listen there, None when it does."""
    try:
        for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                # As the servers do it: only whoever does not share the port is in the way.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                probe.bind(where)
                probe.listen()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
