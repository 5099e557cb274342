"""The control channel: what the supervisor and its children say to each other.

Each child inherits one end of a Unix socket pair; its number is in the child's arguments
(`--control-fd N`). Both sides write one JSON object per line; `kind` says what it is. The channel
is also how a child learns that the supervisor is gone: the end of file arrives within a
millisecond, even after SIGKILL, and the child then ends by itself.

The supervisor and its children run the same version, so an unknown kind or field is an error.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from pydantic_core import from_json

CONTROL_FD_OPTION = "--control-fd"
# The longest line in bytes. The largest message is a configuration; ten thousand declared queues
# are about 5 MB.
LINE_BYTES_MAX = 16 << 20
# What may wait for a child that does not read. Beyond it the child is taken for dead.
UNREAD_BYTES_MAX = 64 << 20

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

# A configuration as `Config.model_dump(mode="json")` gives it.
JsonObject = dict[str, JsonValue]


class ControlError(Exception):
    """The channel carries something that is no message, or there is no channel; the text is one line."""


class Message(BaseModel):
    """What all messages have in common: they do not change, and they have no fields but their own.

    No process meets all of them, so each is made ready when it is first met.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class ShardAddress(Message):
    """Where a shard process listens. `generation` tells it from the processes before and after it."""

    index: int
    generation: int
    address: str


# -- supervisor to shard ------------------------------------------------------------------------


class StartShard(Message):
    """The first message to a shard. `owners` is the shard index of each slot; `address` is ipc://…"""

    kind: Literal["start_shard"] = "start_shard"
    index: int
    name: str
    generation: int
    directory: str
    address: str
    config: JsonObject
    epoch: int
    owners: list[int]
    shards: int
    routers: list[str]  # those that live, by name; the others follow as `router_up`


class RouterUp(Message):
    """A router process of this name has been started."""

    kind: Literal["router_up"] = "router_up"
    name: str


class RouterDown(Message):
    """This incarnation of a router has ended and will never answer: what it had not confirmed comes back."""

    kind: Literal["router_down"] = "router_down"
    name: str


class Stop(Message):
    """Sync, close and end with status 0. No router is left when this is sent."""

    kind: Literal["stop"] = "stop"


# -- supervisor to router -----------------------------------------------------------------------


class StartRouter(Message):
    """The first message to a router.

    `name` is never used again by another process of this data directory; `address` (ipc://…) is
    where shards send answers; `listen` is host:port for the gRPC clients; `up` are the shards that
    are ready now, the others follow as `shard_up`.
    """

    kind: Literal["start_router"] = "start_router"
    index: int
    name: str
    address: str
    listen: str
    config: JsonObject
    epoch: int
    owners: list[int]
    shards: int
    up: list[ShardAddress]


class ShardUp(Message):
    """A shard process is ready to take operations."""

    kind: Literal["shard_up"] = "shard_up"
    index: int
    generation: int
    address: str


class ShardDown(Message):
    """A shard process has ended; a later `shard_up` of this index has a larger generation."""

    kind: Literal["shard_down"] = "shard_down"
    index: int
    generation: int


class MapRefused(Message):
    """The request of this number changed nothing. `text` is one line: why, and what to do about it."""

    kind: Literal["map_refused"] = "map_refused"
    request: int
    text: str


class Serving(Message):
    """Every shard has been ready: health turns SERVING."""

    kind: Literal["serving"] = "serving"


class Drain(Message):
    """Take no new calls, let the running ones end within `grace_ms` milliseconds, end with status 0."""

    kind: Literal["drain"] = "drain"
    grace_ms: int


# -- supervisor to both -------------------------------------------------------------------------


class ConfigChanged(Message):
    """The configuration after a reload; only keys that take effect live differ from the one before."""

    kind: Literal["config"] = "config"
    config: JsonObject


class SlotMapChanged(Message):
    """The slot map that holds from now on; it is on the disk already. Shards hear of it before routers do."""

    kind: Literal["slot_map"] = "slot_map"
    epoch: int
    shards: int
    owners: list[int]


# -- child to supervisor ------------------------------------------------------------------------


class Ready(Message):
    """The child serves: a shard takes operations, a router listens."""

    kind: Literal["ready"] = "ready"


class Served(Message):
    """A router has taken `serving`: health says SERVING from now on."""

    kind: Literal["served"] = "served"


class Fatal(Message):
    """The child cannot go on and ends. `text` is one line: what is wrong and what to do about it."""

    kind: Literal["fatal"] = "fatal"
    text: str


class CommitMove(Message):
    """Give these slots, of one owner, to `target`; what they hold is there and synced.

    Refused unless owner and target are still the processes of these generations: another owner has
    served since, another target has deleted what it did not own. The answer is a `slot_map` for
    everybody, or `map_refused` with the number of the request.
    """

    kind: Literal["commit_move"] = "commit_move"
    request: int
    slots: list[int]
    target: int
    source_generation: int
    target_generation: int


class SetShards(Message):
    """Have this many shards from now on. New ones own nothing yet; those that go must own nothing any more.

    The answer is a `slot_map` for everybody, or `map_refused` with the number of the request.
    """

    kind: Literal["set_shards"] = "set_shards"
    request: int
    shards: int


ToChild = (
    StartShard
    | RouterUp
    | RouterDown
    | Stop
    | StartRouter
    | ShardUp
    | ShardDown
    | MapRefused
    | Serving
    | Drain
    | ConfigChanged
    | SlotMapChanged
)
FromChild = Ready | Served | Fatal | CommitMove | SetShards

_M = TypeVar("_M", bound=Message)


def _by_kind(*models: type[_M]) -> dict[object, type[_M]]:
    return {model.model_fields["kind"].default: model for model in models}


_TO_CHILD: dict[object, type[ToChild]] = _by_kind(
    StartShard,
    RouterUp,
    RouterDown,
    Stop,
    StartRouter,
    ShardUp,
    ShardDown,
    MapRefused,
    Serving,
    Drain,
    ConfigChanged,
    SlotMapChanged,
)
_FROM_CHILD: dict[object, type[FromChild]] = _by_kind(Ready, Served, Fatal, CommitMove, SetShards)


def encode(message: Message) -> bytes:
    """The line of a message, its line end included."""
    return message.model_dump_json().encode() + b"\n"


def decode_to_child(line: bytes) -> ToChild:
    """The message of a line that a child received. Raises ControlError."""
    return _decode(_TO_CHILD, line)


def decode_from_child(line: bytes) -> FromChild:
    """The message of a line that the supervisor received. Raises ControlError."""
    return _decode(_FROM_CHILD, line)


def _decode(models: dict[object, type[_M]], line: bytes) -> _M:
    try:
        plain = from_json(line)
    except ValueError as error:
        raise ControlError(f"not a control message: {one_line(str(error))}") from error
    kind = plain.get("kind") if isinstance(plain, dict) else None
    model = models.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise ControlError(f"not a control message: kind: is none of {', '.join(map(str, models))}")
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        raise ControlError(f"not a control message: {where}: {first['msg']}") from error


def one_line(text: str) -> str:
    """A text for people without its line ends, cut at a thousand characters."""
    return " ".join(text.split())[:1000]


def control_fd(arguments: Sequence[str]) -> int:
    """The number after `--control-fd`. Raises ControlError when somebody started the child by hand."""
    if len(arguments) == 2 and arguments[0] == CONTROL_FD_OPTION and arguments[1].isdecimal():
        return int(arguments[1])
    raise ControlError("this process is started by the supervisor; run `seppd serve` instead")


class ControlLink:
    """The child's end: a thread that reads, and `send` for any thread.

    `on_message` is called from the reading thread for every message in order, `on_end` once when the
    supervisor is gone, also when it sends what cannot be read or when `on_message` raises: a child
    that cannot follow its supervisor has to end. After `close`, `on_end` is not called.
    """

    def __init__(self, fd: int, on_message: Callable[[ToChild], None], on_end: Callable[[], None]) -> None:
        try:
            self._socket = socket.socket(fileno=fd)
        except OSError as error:
            raise ControlError(f"file descriptor {fd} is no control channel: {error.strerror}") from error
        # It was inherited on purpose; it must not reach what this process starts, because then the
        # supervisor would not see its end.
        self._socket.set_inheritable(False)
        self._on_message = on_message
        self._on_end = on_end
        self._closed = False
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="control", daemon=True)

    def start(self) -> None:
        """Begin to read. The handlers may be called before this returns."""
        self._thread.start()

    def send(self, message: FromChild) -> None:
        """Write a message; a supervisor that is gone is reported by `on_end`, not here."""
        with self._sending, suppress(OSError):
            self._socket.sendall(encode(message))

    def close(self) -> None:
        """Stop reading and close the channel. May be called from a handler, and twice."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        try:
            self._read_lines()
        except Exception:
            if not self._closed:
                log.exception("control channel failed")
        if not self._closed:
            self._on_end()

    def _read_lines(self) -> None:
        with self._socket.makefile("rb") as lines:
            while not self._closed:
                try:
                    line = lines.readline(LINE_BYTES_MAX)
                except OSError:  # a reset says what an end of file says
                    return
                if not line.endswith(b"\n"):
                    if len(line) == LINE_BYTES_MAX:
                        raise ControlError(f"a control message is longer than {LINE_BYTES_MAX} bytes")
                    return
                self._on_message(decode_to_child(line))


class SupervisorLink:
    """The supervisor's end of one child's channel, on the running event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> SupervisorLink:
        """Take over one end of a socket pair."""
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=LINE_BYTES_MAX)
        return cls(reader, writer)

    def send(self, message: ToChild) -> bool:
        """Write without waiting; False when the child has left so much unread that it must be hung."""
        if self._writer.is_closing():
            return True  # the child has ended, and whoever watches it is about to say so
        self._writer.write(encode(message))
        return self._writer.transport.get_write_buffer_size() <= UNREAD_BYTES_MAX

    async def receive(self) -> FromChild | None:
        """The next message, None at the end of the channel. Raises ControlError."""
        try:
            line = await self._reader.readline()
        except OSError:  # a reset says what an end of file says
            return None
        except ValueError as error:
            raise ControlError(f"a control message is longer than {LINE_BYTES_MAX} bytes") from error
        return decode_from_child(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Close the channel: a child that still lives sees the end of file."""
        self._writer.close()
