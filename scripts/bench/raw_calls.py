"""Calls over raw sockets, from one thread: the load where every call has a body of its own.

h2load sends one body over and over, which is right for enqueues and reserves; an ack names its job. A lane
is one client that does one thing after the other: a generator that yields calls and is sent their answers, or
yields a monotonic instant in seconds to wait for. For gRPC a call is `(method, message)`; frames are joined from
parts made ahead of time, and answers are looked through just far enough to find the message, so a call takes
35 µs and the system's 60, against 15 and 35 of h2load.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

Lane = Generator[Any, bytes, None]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE = 1, 4
# What we let the other side send without asking, and what it lets us until it says more, in bytes.
OUR_WINDOW = (1 << 31) - 1
FIRST_WINDOW = 65_535
MESSAGE_BYTES_MAX = 16_384 - 5
READ_BYTES = 1 << 18


class CallFailedError(Exception):
    """A call was not answered with a message."""


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def header_block(authority: str, method: str) -> bytes:
    """The headers of a call, as literals that no table remembers: the same bytes every time."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/sepp.v1.QueueService/{method}",
        ":authority": authority,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )


class Connection(Protocol):
    """One connection with some lanes; each has one call out at most."""

    socket: socket.socket

    def call(self, lane: Lane, call: Any) -> bytes:
        """What to send for a call of a lane."""

    def take(self, data: bytes) -> tuple[list[tuple[Lane, bytes]], bytes]:
        """What came in: answers for lanes, and what to send of our own accord. Raises CallFailedError."""


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    opened = socket.create_connection((host, int(port)))
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


class GrpcConnection:
    """HTTP/2 with what gRPC needs of it, and no more."""

    def __init__(self, address: str) -> None:
        self.socket = connected(address)
        settings = struct.pack(">HIHI", HEADER_TABLE_SIZE, 0, INITIAL_WINDOW_SIZE, OUR_WINDOW)
        more = struct.pack(">I", OUR_WINDOW - FIRST_WINDOW)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more))
        self._authority = address
        self._blocks: dict[str, bytes] = {}
        self._next_stream = 1
        self._lanes: dict[int, Lane] = {}  # by stream
        self._messages: dict[int, bytes] = {}
        self._window = FIRST_WINDOW
        self._waiting: deque[tuple[Lane, tuple[str, bytes]]] = deque()  # for the window
        self._unread = b""

    def call(self, lane: Lane, call: tuple[str, bytes]) -> bytes:
        method, message = call
        size = len(message) + 5
        if size > self._window:
            self._waiting.append((lane, call))
            return b""
        if size > MESSAGE_BYTES_MAX:
            raise ValueError(f"a message of {len(message)} bytes does not fit into one frame")
        self._window -= size
        stream = self._next_stream
        self._next_stream += 2
        self._lanes[stream] = lane
        block = self._blocks.get(method)
        if block is None:
            block = self._blocks[method] = header_block(self._authority, method)
        number = struct.pack(">I", stream)
        return b"".join(
            (
                struct.pack(">I", len(block) << 8 | HEADERS),
                b"\x04",
                number,
                block,
                struct.pack(">I", size << 8 | DATA),
                b"\x01",
                number,
                b"\0",
                struct.pack(">I", len(message)),
                message,
            )
        )

    def take(self, data: bytes) -> tuple[list[tuple[Lane, bytes]], bytes]:
        if self._unread:
            data = self._unread + data
        answers: list[tuple[Lane, bytes]] = []
        out: list[bytes] = []
        place, end = 0, len(data)
        while end - place >= 9:
            size = data[place] << 16 | data[place + 1] << 8 | data[place + 2]
            after = place + 9 + size
            if after > end:
                break
            kind, flags = data[place + 3], data[place + 4]
            if kind == DATA or kind == HEADERS:
                stream = int.from_bytes(data[place + 5 : place + 9], "big")
                if kind == DATA and size:
                    self._messages[stream] = self._messages.get(stream, b"") + data[place + 9 : after]
                if flags & END_STREAM:
                    message = self._messages.pop(stream, None)
                    if message is None:
                        raise CallFailedError(f"a call was refused: {data[place + 9 : after]!r}")
                    answers.append((self._lanes.pop(stream), message[5:]))
            else:
                out.append(self._control(kind, flags, data[place + 9 : after], data[place + 5 : place + 9]))
            place = after
        self._unread = data[place:]
        return answers, b"".join(out)

    def _control(self, kind: int, flags: int, body: bytes, stream: bytes) -> bytes:
        if kind == WINDOW_UPDATE:
            if stream == b"\0\0\0\0":
                self._window += int.from_bytes(body, "big")
                out = []
                while self._waiting and len(self._waiting[0][1][1]) + 5 <= self._window:
                    out.append(self.call(*self._waiting.popleft()))
                return b"".join(out)
        elif kind == SETTINGS and not flags & ACK:
            return frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            return frame(PING, ACK, 0, body)
        elif kind in (RST_STREAM, GOAWAY):
            raise CallFailedError(f"the server ended a call or the connection: {body!r}")
        return b""


def run(lanes: Iterable[Lane], connections: int, connect: Callable[[], Connection]) -> None:
    """Run lanes to their ends, dealt out over connections. Raises CallFailedError."""
    opened = [connect() for _ in range(connections)]
    by_fd = {each.socket.fileno(): each for each in opened}
    poll = select.epoll()
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    running = 0
    numbers = count()
    sleeping: list[tuple[float, int, Connection, Lane]] = []

    def proceed(connection: Connection, lane: Lane, answer: bytes | None) -> bytes:
        nonlocal running
        try:
            wanted = next(lane) if answer is None else lane.send(answer)
        except StopIteration:
            running -= 1
            return b""
        if isinstance(wanted, float):
            heappush(sleeping, (wanted, next(numbers), connection, lane))
            return b""
        return connection.call(lane, wanted)

    try:
        for place, lane in enumerate(lanes):
            running += 1
            connection = opened[place % connections]
            connection.socket.sendall(proceed(connection, lane, None))
        while running:
            timeout = max(0.0, sleeping[0][0] - time.monotonic()) if sleeping else -1
            for fd, _ in poll.poll(timeout):
                connection = by_fd[fd]
                data = connection.socket.recv(READ_BYTES)
                if not data:
                    raise CallFailedError("the server closed a connection")
                answers, out = connection.take(data)
                for lane, answer in answers:
                    out += proceed(connection, lane, answer)
                if out:
                    connection.socket.sendall(out)
            while sleeping and sleeping[0][0] <= time.monotonic():
                _, _, connection, lane = heappop(sleeping)
                if out := proceed(connection, lane, b""):
                    connection.socket.sendall(out)
    finally:
        poll.close()
        for each in opened:
            each.socket.close()
