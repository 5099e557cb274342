"""The control channel: messages on lines, and what each end learns of the other's end."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
from collections.abc import Iterator

import pytest

from common import control
from common.control import (
    CommitMove,
    ConfigChanged,
    ControlError,
    ControlLink,
    Drain,
    Fatal,
    MapRefused,
    Message,
    Ready,
    RouterDown,
    RouterUp,
    Served,
    Serving,
    SetShards,
    ShardAddress,
    ShardDown,
    ShardUp,
    SlotMapChanged,
    StartRouter,
    StartShard,
    Stop,
    SupervisorLink,
)

WAIT_S = 20.0

START_SHARD = StartShard(
    index=1,
    name="shard-1",
    generation=7,
    directory="/data/shard-1",
    address="ipc:///run/s1-7",
    config={"server": {"shards": None}},
    epoch=1,
    owners=[0, 1],
    shards=2,
    routers=["r0-8"],
)
START_ROUTER = StartRouter(
    index=0,
    name="r0-8",
    address="ipc:///run/r0-8",
    listen="127.0.0.1:50051",
    config={},
    epoch=1,
    owners=[0, 1],
    shards=2,
    up=[ShardAddress(index=1, generation=7, address="ipc:///run/s1-7")],
)
TO_CHILD = [
    START_SHARD,
    RouterUp(name="r1-9"),
    RouterDown(name="r0-8"),
    Stop(),
    START_ROUTER,
    ShardUp(index=1, generation=7, address="ipc:///run/s1-7"),
    ShardDown(index=1, generation=7),
    Serving(),
    Drain(grace_ms=30_000),
    ConfigChanged(config={"queues": [{"name": "mail"}]}),
    SlotMapChanged(epoch=2, shards=2, owners=[0, 1]),
    MapRefused(request=3, text="shard 1 was started again"),
]
FROM_CHILD = [
    Ready(),
    Served(),
    Fatal(text="disk\nfull"),
    CommitMove(request=3, slots=[5, 6], target=1, source_generation=7, target_generation=9),
    SetShards(request=4, shards=8),
]


class ChildEnd:
    """A link as a child has it, whose handlers put what they get into a queue; None is the end."""

    def __init__(self) -> None:
        self.supervisor, theirs = socket.socketpair()
        self.supervisor.settimeout(WAIT_S)
        self.heard: queue.Queue[Message | None] = queue.Queue()
        self.link = ControlLink(theirs.detach(), self.heard.put, lambda: self.heard.put(None))
        self.link.start()

    def next(self) -> Message | None:
        return self.heard.get(timeout=WAIT_S)


@pytest.fixture
def child() -> Iterator[ChildEnd]:
    end = ChildEnd()
    yield end
    end.link.close()
    end.supervisor.close()


@pytest.mark.parametrize("message", TO_CHILD, ids=lambda message: message.kind)
def test_a_message_to_a_child_survives_its_line(message: Message) -> None:
    line = control.encode(message)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert control.decode_to_child(line) == message


@pytest.mark.parametrize("message", FROM_CHILD, ids=lambda message: message.kind)
def test_a_message_from_a_child_survives_its_line(message: Message) -> None:
    line = control.encode(message)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert control.decode_from_child(line) == message


def test_a_line_says_its_kind_and_its_fields() -> None:
    assert json.loads(control.encode(Drain(grace_ms=5))) == {"kind": "drain", "grace_ms": 5}


@pytest.mark.parametrize(
    "line",
    [b"", b"junk\n", b"[]\n", b"{}\n", b'{"kind":"nothing"}\n', b'{"kind":"drain"}\n', b'{"kind":"stop","more":1}\n'],
)
def test_what_is_no_message_is_an_error_of_one_line(line: bytes) -> None:
    with pytest.raises(ControlError, match=r"^not a control message: ") as caught:
        control.decode_to_child(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("message", FROM_CHILD, ids=lambda message: message.kind)
def test_a_child_cannot_be_told_what_only_children_say(message: Message) -> None:
    with pytest.raises(ControlError):
        control.decode_to_child(control.encode(message))


def test_the_control_fd_is_read_from_the_arguments() -> None:
    assert control.control_fd(["--control-fd", "7"]) == 7


@pytest.mark.parametrize("arguments", [[], ["--control-fd"], ["--control-fd", "x"], ["7"], ["--control-fd", "7", "8"]])
def test_a_child_that_is_started_by_hand_names_the_command_to_use(arguments: list[str]) -> None:
    with pytest.raises(ControlError, match="run `seppd serve` instead"):
        control.control_fd(arguments)


def test_a_child_hears_messages_in_order(child: ChildEnd) -> None:
    child.supervisor.sendall(b"".join(control.encode(message) for message in TO_CHILD))
    assert [child.next() for _ in TO_CHILD] == TO_CHILD


def test_a_child_hears_a_message_that_comes_in_pieces(child: ChildEnd) -> None:
    line = control.encode(START_ROUTER)
    child.supervisor.sendall(line[:10])
    child.supervisor.sendall(line[10:])
    assert child.next() == START_ROUTER


def test_a_child_hears_of_the_end_of_its_supervisor(child: ChildEnd) -> None:
    child.supervisor.close()
    assert child.next() is None


def test_half_a_message_before_the_end_is_not_heard(child: ChildEnd) -> None:
    child.supervisor.sendall(control.encode(Stop())[:-1])
    child.supervisor.close()
    assert child.next() is None


def test_a_line_that_is_no_message_ends_the_child(child: ChildEnd) -> None:
    child.supervisor.sendall(b"junk\n" + control.encode(Stop()))
    assert child.next() is None
    assert child.heard.empty()


def test_a_handler_that_raises_ends_the_child() -> None:
    supervisor, theirs = socket.socketpair()
    heard: queue.Queue[str] = queue.Queue()

    def refuse(message: Message) -> None:
        raise ValueError("cannot")

    link = ControlLink(theirs.detach(), refuse, lambda: heard.put("end"))
    link.start()
    with supervisor:
        supervisor.sendall(control.encode(Stop()))
        assert heard.get(timeout=WAIT_S) == "end"
    link.close()


def test_a_child_is_heard_by_its_supervisor(child: ChildEnd) -> None:
    child.link.send(Ready())
    assert child.supervisor.recv(1000) == b'{"kind":"ready"}\n'


def test_sending_to_a_supervisor_that_is_gone_is_harmless(child: ChildEnd) -> None:
    child.supervisor.close()
    assert child.next() is None
    child.link.send(Fatal(text="too late"))
    assert child.heard.empty()


def test_a_link_that_was_closed_reports_no_end(child: ChildEnd) -> None:
    child.link.close()
    child.link.close()
    child.supervisor.close()
    assert child.heard.empty()


def test_the_channel_does_not_reach_the_processes_that_a_child_starts() -> None:
    ours, theirs = socket.socketpair()
    fd = theirs.detach()
    os.set_inheritable(fd, True)
    link = ControlLink(fd, lambda message: None, lambda: None)
    assert os.get_inheritable(fd) is False
    link.start()
    link.close()
    ours.close()


def test_a_descriptor_that_is_no_channel_is_refused() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(ControlError, match="is no control channel"):
            ControlLink(reading, lambda message: None, lambda: None)
    finally:
        os.close(reading)
        os.close(writing)


def test_the_supervisor_hears_messages_and_then_the_end() -> None:
    async def listen() -> list[Message | None]:
        ours, theirs = socket.socketpair()
        link = await SupervisorLink.open(ours)
        theirs.sendall(control.encode(Ready()) + control.encode(Fatal(text="no")) + b'{"kind":"rea')
        theirs.close()
        heard: list[Message | None] = [await link.receive() for _ in range(3)]
        link.close()
        return heard

    assert asyncio.run(listen()) == [Ready(), Fatal(text="no"), None]


def test_the_supervisor_refuses_what_is_no_message() -> None:
    async def listen() -> None:
        ours, theirs = socket.socketpair()
        link = await SupervisorLink.open(ours)
        with theirs:
            theirs.sendall(b"junk\n")
            with pytest.raises(ControlError):
                await link.receive()
        link.close()

    asyncio.run(listen())


def test_the_supervisor_can_send_to_a_child_that_is_gone() -> None:
    async def send() -> bool:
        ours, theirs = socket.socketpair()
        link = await SupervisorLink.open(ours)
        theirs.close()
        assert await link.receive() is None
        for _ in range(3):
            link.send(Stop())
        link.close()
        return link.send(Stop())

    assert asyncio.run(send()) is True


def test_a_child_that_reads_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "UNREAD_BYTES_MAX", 100_000)

    async def send() -> list[bool]:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        link = await SupervisorLink.open(ours)
        with theirs:
            sent = [link.send(RouterDown(name="r" * 50_000)) for _ in range(4)]
            link.close()
        return sent

    sent = asyncio.run(send())
    assert (sent[0], sent[-1]) == (True, False)
