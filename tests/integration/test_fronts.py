"""Both gRPC fronts against one suite: what the router's core may rely on, seen from a client and a receiver."""

from __future__ import annotations

import gc
import math
import random
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from router import front as front_module
from router.front import (
    METHODS,
    SERVICE,
    TEXT_BYTES_MAX,
    WATCHED_METHODS,
    Call,
    Front,
    FrontError,
    FrontOptions,
    FrontUnavailable,
    Status,
    shortened,
)
from router.front_aio import AioCall, AioFront
from router.front_queue import QueueCall, QueueFront, _Trial
from router.fronts import make_front

# Nothing here takes long; this only keeps a broken front from hanging the suite.
PATIENCE_S = 30.0
MESSAGE_BYTES_MAX = 100_000
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Script:
    """A receiver that does with each call what it was told, and keeps what it heard."""

    def __init__(self, act: Callable[[Call], None]) -> None:
        self.act = act
        self.on_closed: Callable[[Call], None] = lambda call: None
        self.arrived: SimpleQueue[Call] = SimpleQueue()
        self.closed: SimpleQueue[Call] = SimpleQueue()
        self.left: SimpleQueue[tuple[Call, bool]] = SimpleQueue()

    def call_arrived(self, call: Call) -> None:
        self.arrived.put(call)
        self.act(call)

    def call_closed(self, call: Call) -> None:
        self.on_closed(call)
        self.closed.put(call)

    def answer_left(self, call: Call, left: bool) -> None:
        self.left.put((call, left))


def echo(call: Call) -> None:
    call.reply(call.request)


def park(call: Call) -> None:
    """Leave it waiting."""


def stumble(call: Call) -> None:
    raise LookupError("a secret of ours")


Open = Callable[..., Front]


@pytest.fixture(params=["queue", "aio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_front(kind: str) -> Iterator[Open]:
    opened: list[Front] = []

    def open_one(script: Script, address: str = "127.0.0.1:0", tls: tuple[bytes, bytes] | None = None) -> Front:
        front = make_front(FrontOptions(address, MESSAGE_BYTES_MAX, tls), script, kind)
        opened.append(front)
        front.start()
        assert front.name == kind
        return front

    yield open_one
    for front in opened:
        front.stop(0)


@pytest.fixture
def dial() -> Iterator[Callable[..., grpc.Channel]]:
    channels: list[grpc.Channel] = []

    def dial_one(front: Front, *, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.ssl_target_name_override", "localhost"),
        )
        target = f"127.0.0.1:{front.port}"
        if credentials is None:
            channel = grpc.insecure_channel(target, options)
        else:
            channel = grpc.secure_channel(target, credentials, options)
        channels.append(channel)
        return channel

    yield dial_one
    for channel in channels:
        channel.close()


Dial = Callable[..., grpc.Channel]
T = TypeVar("T")


def rpc(channel: grpc.Channel, method: str) -> grpc.UnaryUnaryMultiCallable:
    """A method with bytes in and bytes out."""
    return channel.unary_unary(f"/{SERVICE}/{method}")


def failure(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details()


def heard(news: SimpleQueue[T]) -> T:
    return news.get(timeout=PATIENCE_S)


class Wire:
    """An HTTP/2 client by hand, for what a well-behaved one does not do."""

    DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.stream = self.socket.makefile("rb")
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.send(self.SETTINGS, 0, 0, b"")

    def send(self, kind: int, flags: int, stream: int, body: bytes, times: int = 1) -> None:
        frame = struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body
        self.socket.sendall(frame * times)

    def call(self, method: str, message: bytes) -> None:
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/{SERVICE}/{method}",
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in headers.items()
        )
        self.send(self.HEADERS, 4, 1, block)
        self.send(self.DATA, 1, 1, b"\0" + struct.pack(">I", len(message)) + message)

    def next_of(self, *kinds: int) -> tuple[int, bytes]:
        """The next frame of one of these kinds."""
        while True:
            head = self.stream.read(9)
            if len(head) < 9:
                raise EOFError
            body = self.stream.read(int.from_bytes(head[:3], "big"))
            if head[3] in kinds:
                return head[3], body

    def cut(self) -> None:
        """Close with a reset, as a killed client or a firewall does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.close()
        self.socket.close()


@pytest.fixture
def wire() -> Iterator[Callable[[Front], Wire]]:
    wires: list[Wire] = []

    def connect(front: Front) -> Wire:
        wires.append(Wire(front.port))
        return wires[-1]

    yield connect
    for one in wires:
        one.stream.close()
        one.socket.close()


# -- a call and its answer --------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_request_and_its_answer_arrive_as_they_were_sent(open_front: Open, dial: Dial, method: str) -> None:
    script = Script(lambda call: call.reply(call.request[::-1]))
    channel = dial(open_front(script))
    for request in (bytes(range(256)), b"", b"\0" * MESSAGE_BYTES_MAX):
        assert rpc(channel, method)(request, timeout=PATIENCE_S) == request[::-1]
        call = heard(script.arrived)
        assert (call.method, call.request) == (method, request)


def test_an_answer_may_be_larger_than_a_request(open_front: Open, dial: Dial) -> None:
    channel = dial(open_front(Script(lambda call: call.reply(b"x" * 5_000_000))))
    assert len(rpc(channel, "Reserve")(b"", timeout=PATIENCE_S)) == 5_000_000


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ((), None),
        ((("authorization", "Bearer abc"),), "Bearer abc"),
        ((("x-other", "1"), ("authorization", "first"), ("authorization", "second")), "first"),
    ],
)
def test_a_call_carries_its_authorization(
    open_front: Open, dial: Dial, metadata: tuple[tuple[str, str], ...], expected: str | None
) -> None:
    script = Script(echo)
    rpc(dial(open_front(script)), "Ack")(b"", timeout=PATIENCE_S, metadata=metadata)
    assert heard(script.arrived).authorization == expected


def test_a_call_carries_its_deadline(open_front: Open, dial: Dial) -> None:
    script = Script(echo)
    before = time.time()
    rpc(dial(open_front(script)), "Ack")(b"", timeout=1000)
    # A client rounds its timeout to what fits into the header.
    assert before + 999 < heard(script.arrived).deadline < time.time() + 1011


def test_a_call_without_a_deadline_has_an_infinite_one(open_front: Open, dial: Dial) -> None:
    script = Script(echo)
    rpc(dial(open_front(script)), "Ack")(b"")
    assert heard(script.arrived).deadline == math.inf


@pytest.mark.parametrize("method", ["Ack", "Reserve"])
@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_a_failure_arrives_with_its_status_and_text(open_front: Open, dial: Dial, method: str, status: Status) -> None:
    channel = dial(open_front(Script(lambda call: call.fail(status, "queue „äöü“ 🚀 % is full"))))
    code, text = failure(lambda: rpc(channel, method)(b"", timeout=PATIENCE_S))
    assert (code.value[0], text) == (int(status), "queue „äöü“ 🚀 % is full")


def test_a_long_text_is_cut(open_front: Open, dial: Dial) -> None:
    channel = dial(open_front(Script(lambda call: call.fail(Status.ABORTED, "é" * 100_000))))
    code, text = failure(lambda: rpc(channel, "Ack")(b"", timeout=PATIENCE_S))
    assert (code, text) == (grpc.StatusCode.ABORTED, "é" * (TEXT_BYTES_MAX // 2))


def test_a_text_is_cut_between_characters_and_can_always_be_encoded() -> None:
    assert shortened("x" + "é" * 400) == "x" + "é" * 199
    assert shortened("\ud800") == "?"


@pytest.mark.parametrize("method", ["Ack", "Reserve"])
def test_what_a_receiver_raises_stays_inside(open_front: Open, dial: Dial, method: str) -> None:
    script = Script(stumble)
    channel = dial(open_front(script))
    with capture_logs() as logs:
        code, text = failure(lambda: rpc(channel, method)(b"", timeout=PATIENCE_S))
    assert (code, text) == (grpc.StatusCode.INTERNAL, "internal error")
    assert [entry["method"] for entry in logs] == [method]
    script.act = echo
    assert rpc(channel, method)(b"next", timeout=PATIENCE_S) == b"next"


def test_a_watched_call_that_a_receiver_stumbled_over_is_reported_closed(open_front: Open, dial: Dial) -> None:
    script = Script(stumble)
    failure(lambda: rpc(dial(open_front(script)), "Reserve")(b"", timeout=PATIENCE_S))
    assert heard(script.closed) is heard(script.arrived)
    assert script.left.empty()


def test_a_receiver_that_stumbles_after_its_answer_has_answered(open_front: Open, dial: Dial) -> None:
    def answer_and_stumble(call: Call) -> None:
        call.reply(b"fine")
        stumble(call)

    channel = dial(open_front(Script(answer_and_stumble)))
    with capture_logs():
        assert rpc(channel, "Ack")(b"", timeout=PATIENCE_S) == b"fine"
        assert rpc(channel, "Reserve")(b"", timeout=PATIENCE_S) == b"fine"


@pytest.mark.parametrize("method", ["Ack", "Reserve"])
def test_calls_may_be_answered_from_many_threads(open_front: Open, dial: Dial, method: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        script = Script(lambda call: threads.submit(echo, call) and None)
        call = rpc(dial(open_front(script)), method)
        requests = [str(number).encode() for number in range(400)]
        answers = [call.future(request, timeout=PATIENCE_S) for request in requests]
        assert [answer.result() for answer in answers] == requests


# -- limits -----------------------------------------------------------------------------------------


def test_a_message_over_the_limit_is_refused_and_the_connection_lives(open_front: Open, dial: Dial) -> None:
    script = Script(echo)
    channel = dial(open_front(script))
    for method in ("EnqueueBatch", "Reserve"):
        too_large = b"x" * (MESSAGE_BYTES_MAX + 1)
        code, _ = failure(lambda: rpc(channel, method)(too_large, timeout=PATIENCE_S))  # noqa: B023
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert script.arrived.empty()
        assert rpc(channel, method)(b"fits", timeout=PATIENCE_S) == b"fits"
        assert heard(script.arrived).request == b"fits"


@pytest.mark.parametrize("method", ["Ack", "Reserve"])
def test_a_call_without_a_message_fails_and_is_not_given_to_the_receiver(
    open_front: Open, dial: Dial, method: str
) -> None:
    script = Script(echo)
    channel = dial(open_front(script))
    empty = channel.stream_unary(f"/{SERVICE}/{method}")
    code, text = failure(lambda: empty(iter(()), timeout=PATIENCE_S))
    assert (code, text) == (grpc.StatusCode.INTERNAL, "the request has no message")
    assert script.arrived.empty()
    assert script.closed.empty()


def test_no_call_of_a_burst_is_lost(open_front: Open, dial: Dial) -> None:
    # More calls than the C core lets wait by itself, while nobody takes them.
    all_sent = threading.Event()

    def hesitate(call: Call) -> None:
        assert all_sent.wait(PATIENCE_S)
        echo(call)

    call = rpc(dial(open_front(Script(hesitate))), "EnqueueBatch")
    answers = [call.future(b"", timeout=PATIENCE_S) for _ in range(2000)]
    all_sent.set()
    assert {answer.code() for answer in answers} == {grpc.StatusCode.OK}


def test_a_client_may_ping_without_calls(
    open_front: Open, wire: Callable[[Front], Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real interval is too long for a test; the C core counts the same way.
    monkeypatch.setattr(front_module, "PING_INTERVAL_MIN_MS", 1)
    client = wire(open_front(Script(echo)))
    for number in range(10):
        client.send(Wire.PING, 0, 0, struct.pack(">Q", number))
        assert client.next_of(Wire.PING, Wire.GOAWAY) == (Wire.PING, struct.pack(">Q", number))
        time.sleep(0.03)  # the pause is what is tested


def test_a_client_that_pings_without_a_pause_is_cut_off(open_front: Open, wire: Callable[[Front], Wire]) -> None:
    client = wire(open_front(Script(echo)))
    # In one piece: a server that closes while more comes takes its reason back.
    client.send(Wire.PING, 0, 0, b"8 bytes!", times=5)
    _, reason = client.next_of(Wire.GOAWAY)
    assert b"too_many_pings" in reason


# -- how a watched call ends ------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(WATCHED_METHODS))
def test_an_answer_that_left_is_reported_once(open_front: Open, dial: Dial, method: str) -> None:
    script = Script(echo)
    front = open_front(script)
    rpc(dial(front), method)(b"", timeout=PATIENCE_S)
    assert heard(script.left) == (heard(script.arrived), True)
    front.stop(0)
    assert script.left.empty()
    assert script.closed.empty()


def test_a_failure_that_left_is_reported_once(open_front: Open, dial: Dial) -> None:
    script = Script(lambda call: call.fail(Status.ABORTED, "no"))
    front = open_front(script)
    failure(lambda: rpc(dial(front), "Reserve")(b"", timeout=PATIENCE_S))
    assert heard(script.left) == (heard(script.arrived), True)
    front.stop(0)
    assert script.left.empty()
    assert script.closed.empty()


@pytest.mark.parametrize("method", sorted(WATCHED_METHODS))
def test_a_cancelled_call_is_reported_closed(open_front: Open, dial: Dial, method: str) -> None:
    script = Script(park)
    front = open_front(script)
    waiting = rpc(dial(front), method).future(b"", timeout=PATIENCE_S)
    call = heard(script.arrived)
    waiting.cancel()
    assert heard(script.closed) is call
    front.stop(0)
    assert script.closed.empty()
    assert script.left.empty()


def test_a_call_past_its_deadline_is_reported_closed(open_front: Open, dial: Dial) -> None:
    script = Script(park)
    code, _ = failure(lambda: rpc(dial(open_front(script)), "Reserve")(b"", timeout=0.3))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    if not script.arrived.empty():  # on a machine so slow that the call came too late there is no call
        assert heard(script.closed) is heard(script.arrived)


def test_a_call_whose_connection_is_cut_is_reported_closed(open_front: Open, wire: Callable[[Front], Wire]) -> None:
    script = Script(park)
    client = wire(open_front(script))
    client.call("Reserve", b"hello")
    call = heard(script.arrived)
    assert call.request == b"hello"
    client.cut()
    assert heard(script.closed) is call
    assert script.left.empty()


def test_an_answer_that_is_stuck_when_the_connection_is_cut_has_not_left(
    open_front: Open, wire: Callable[[Front], Wire]
) -> None:
    # The client grants 65 535 bytes and no more: the rest of the answer waits in the server.
    script = Script(lambda call: call.reply(b"x" * 1_000_000))
    client = wire(open_front(script))
    client.call("Reserve", b"")
    client.next_of(Wire.DATA)
    assert script.left.empty()
    client.cut()
    assert heard(script.left) == (heard(script.arrived), False)
    assert script.closed.empty()


def test_an_answer_after_the_end_has_not_left(open_front: Open, dial: Dial) -> None:
    script = Script(park)
    waiting = rpc(dial(open_front(script)), "Reserve").future(b"", timeout=PATIENCE_S)
    call = heard(script.arrived)
    waiting.cancel()
    assert heard(script.closed) is call
    call.reply(b"too late")
    assert heard(script.left) == (call, False)


def test_an_answer_within_the_report_of_the_end_is_reported_after_it(open_front: Open, dial: Dial) -> None:
    script = Script(park)
    seen: list[bool] = []

    def reply_anyway(call: Call) -> None:
        call.reply(b"too late")
        seen.append(script.left.empty())

    script.on_closed = reply_anyway
    waiting = rpc(dial(open_front(script)), "Reserve").future(b"", timeout=PATIENCE_S)
    call = heard(script.arrived)
    waiting.cancel()
    assert heard(script.left) == (call, False)
    assert seen == [True]


def test_a_receiver_may_hold_a_lock_while_it_answers_and_while_it_is_told(open_front: Open, dial: Dial) -> None:
    lock = threading.Lock()
    script = Script(park)

    def told(call: Call, left: bool) -> None:
        with lock:
            script.left.put((call, left))

    script.answer_left = told  # type: ignore[method-assign]
    channel = dial(open_front(script))
    for ended in (False, True):
        waiting = rpc(channel, "Reserve").future(b"", timeout=PATIENCE_S)
        call = heard(script.arrived)
        if ended:
            waiting.cancel()
            assert heard(script.closed) is call
        with lock:
            call.reply(b"")
        assert heard(script.left) == (call, not ended)


def test_a_second_answer_changes_nothing(open_front: Open, dial: Dial) -> None:
    def answer_twice(call: Call) -> None:
        call.reply(b"first")
        call.reply(b"second")
        call.fail(Status.ABORTED, "third")

    script = Script(answer_twice)
    front = open_front(script)
    channel = dial(front)
    for method in ("Ack", "Reserve"):
        assert rpc(channel, method)(b"", timeout=PATIENCE_S) == b"first"
    heard(script.arrived)
    assert heard(script.left) == (heard(script.arrived), True)
    front.stop(0)
    assert script.left.empty()


def test_when_answer_and_cancellation_meet_exactly_one_of_them_wins(open_front: Open, dial: Dial) -> None:
    script = Script(park)
    call_reserve = rpc(dial(open_front(script)), "Reserve")
    chance = random.Random(7)
    fates: list[tuple[bool, bool]] = []
    with ThreadPoolExecutor(1) as other:
        for _ in range(300):
            waiting = call_reserve.future(b"", timeout=PATIENCE_S)
            call = heard(script.arrived)
            pauses = [chance.uniform(0, 0.001), chance.uniform(0, 0.001)]

            def cancel(pause: float = pauses[0], waiting: grpc.Future = waiting) -> None:
                time.sleep(pause)
                waiting.cancel()

            cancelled = other.submit(cancel)
            time.sleep(pauses[1])
            call.reply(b"job")
            cancelled.result()
            told, left = heard(script.left)
            assert told is call
            closed = not script.closed.empty()
            if closed:
                assert heard(script.closed) is call
            got = not waiting.cancelled() and waiting.exception() is None
            assert not (left and closed)
            assert left or not got
            fates.append((closed, left))
    assert script.left.empty()
    assert script.closed.empty()
    assert script.arrived.empty()


# -- how another call ends --------------------------------------------------------------------------


def test_the_end_of_an_unwatched_call_is_not_told_and_a_late_answer_does_nothing(open_front: Open, dial: Dial) -> None:
    script = Script(park)
    front = open_front(script)
    channel = dial(front)
    waiting = rpc(channel, "Ack").future(b"", timeout=PATIENCE_S)
    call = heard(script.arrived)
    waiting.cancel()
    script.act = echo
    assert rpc(channel, "Ack")(b"next", timeout=PATIENCE_S) == b"next"
    call.reply(b"too late")
    assert rpc(channel, "Ack")(b"next", timeout=PATIENCE_S) == b"next"
    front.stop(0)
    assert script.closed.empty()
    assert script.left.empty()


def test_nothing_is_kept_of_a_finished_call(open_front: Open, dial: Dial) -> None:
    script = Script(echo)
    front = open_front(script)
    channel = dial(front)
    for method in ("Ack", "Reserve"):
        call = rpc(channel, method)
        for answer in [call.future(b"", timeout=PATIENCE_S) for _ in range(500)]:
            answer.result()
        script.act = park
        waiting = [call.future(b"", timeout=PATIENCE_S) for _ in range(50)]
        parked = [one for one in (heard(script.arrived) for _ in range(550)) if one.request == b""][500:]
        for one in waiting:
            one.cancel()
        if method in WATCHED_METHODS:
            for _ in range(50):
                heard(script.closed)
        for late in parked:
            late.reply(b"")
        del late, parked
        script.act = echo
    for _ in range(550):
        heard(script.left)
    front.stop(0)
    # A thread that has told of a late answer may be about to end.
    end = time.monotonic() + PATIENCE_S
    while calls_alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert calls_alive() == 0


def calls_alive() -> int:
    gc.collect()
    return sum(isinstance(one, QueueCall | AioCall) for one in gc.get_objects())


# -- work of others ----------------------------------------------------------------------------------


def test_work_that_a_busy_front_takes_runs_in_the_thread_that_brings_calls(open_front: Open, dial: Dial) -> None:
    threads: SimpleQueue[str] = SimpleQueue()

    def note(call: Call | None = None) -> None:
        threads.put(threading.current_thread().name)
        if call is not None:
            call.reply(b"")

    front = open_front(Script(note))
    ack = rpc(dial(front), "Ack")
    for _ in range(10):
        ack(b"", timeout=PATIENCE_S)
        assert heard(threads) == "grpc-front"
    assert front.run_soon(note)
    assert heard(threads) == "grpc-front"


def test_a_front_with_little_to_do_leaves_work_to_who_has_it(dial: Dial) -> None:
    front = make_front(FrontOptions("127.0.0.1:0", MESSAGE_BYTES_MAX), Script(echo), "queue")
    front.start()
    assert front.run_soon(pytest.fail) is False
    rpc(dial(front), "Ack")(b"", timeout=PATIENCE_S)
    assert front.run_soon(pytest.fail) is False
    front.stop(0)


def test_a_front_that_has_stopped_takes_no_work(open_front: Open, dial: Dial) -> None:
    front = open_front(Script(echo))
    rpc(dial(front), "Ack")(b"", timeout=PATIENCE_S)
    front.stop(0)
    assert front.run_soon(pytest.fail) is False


# -- beside the eight methods -----------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_says_what_it_was_told(open_front: Open, dial: Dial, service: str) -> None:
    front = open_front(Script(echo))
    health = health_pb2_grpc.HealthStub(dial(front))
    request = health_pb2.HealthCheckRequest(service=service)
    seen = health.Watch(request, timeout=PATIENCE_S)
    assert next(seen).status == NOT_SERVING
    for serving, status in ((True, SERVING), (False, NOT_SERVING)):
        front.set_serving(serving)
        assert next(seen).status == status
        assert health.Check(request, timeout=PATIENCE_S).status == status


def test_health_may_be_told_before_the_start(kind: str, dial: Dial) -> None:
    front = make_front(FrontOptions("127.0.0.1:0", MESSAGE_BYTES_MAX), Script(echo), kind)
    front.set_serving(True)
    front.start()
    try:
        health = health_pb2_grpc.HealthStub(dial(front))
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status == SERVING
    finally:
        front.stop(0)


def test_health_knows_no_other_service(open_front: Open, dial: Dial) -> None:
    health = health_pb2_grpc.HealthStub(dial(open_front(Script(echo))))
    request = health_pb2.HealthCheckRequest(service="another")
    assert failure(lambda: health.Check(request, timeout=PATIENCE_S))[0] is grpc.StatusCode.NOT_FOUND


def test_many_health_streams_leave_room_for_others(open_front: Open, dial: Dial) -> None:
    front = open_front(Script(echo))
    channel = dial(front)
    health = health_pb2_grpc.HealthStub(channel)
    streams = [health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S) for _ in range(50)]
    assert [next(stream).status for stream in streams] == [NOT_SERVING] * 50
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status == NOT_SERVING
    assert rpc(channel, "Ack")(b"", timeout=PATIENCE_S) == b""


def test_health_may_change_while_its_streams_end(open_front: Open, dial: Dial) -> None:
    front = open_front(Script(echo))
    for _ in range(20):
        channel = dial(front)
        health = health_pb2_grpc.HealthStub(channel)
        streams = [health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S) for _ in range(20)]
        for stream in streams:
            next(stream)
        with ThreadPoolExecutor(1) as other:
            closed = other.submit(channel.close)
            for serving in (True, False) * 5:
                front.set_serving(serving)
            closed.result()
    health = health_pb2_grpc.HealthStub(dial(front))
    end = time.monotonic() + PATIENCE_S
    while (status := health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status) != NOT_SERVING:
        assert time.monotonic() < end, status  # the last change is told after those before it


def reflect(channel: grpc.Channel, **request: str) -> reflection_pb2.ServerReflectionResponse:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = iter((reflection_pb2.ServerReflectionRequest(**request),))
    return next(stub.ServerReflectionInfo(requests, timeout=PATIENCE_S))


def test_reflection_lists_the_services(open_front: Open, dial: Dial) -> None:
    answer = reflect(dial(open_front(Script(echo))), list_services="")
    assert sorted(service.name for service in answer.list_services_response.service) == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "sepp.v1.QueueService",
    ]


def test_reflection_describes_the_queue_service(open_front: Open, dial: Dial) -> None:
    answer = reflect(dial(open_front(Script(echo))), file_containing_symbol=SERVICE)
    assert b"EnqueueAtomic" in answer.file_descriptor_response.file_descriptor_proto[0]


@pytest.mark.parametrize("path", [f"/{SERVICE}/Purge", "/another.Service/Ack"])
def test_another_method_is_unimplemented(open_front: Open, dial: Dial, path: str) -> None:
    channel = dial(open_front(Script(echo)))
    code, _ = failure(lambda: channel.unary_unary(path)(b"", timeout=PATIENCE_S))
    assert code is grpc.StatusCode.UNIMPLEMENTED


# -- listening --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    folder = tmp_path_factory.mktemp("tls")
    return make_certificate(folder)


def make_certificate(folder: Path) -> tuple[bytes, bytes]:
    chain, key = folder / "chain.pem", folder / "key.pem"
    made = ["-keyout", str(key), "-out", str(chain), "-days", "2", "-subj", "/CN=localhost"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(["openssl", "req", "-x509", *kind, *made, *name], check=True, capture_output=True)
    return chain.read_bytes(), key.read_bytes()


def test_a_call_over_tls_is_answered(open_front: Open, dial: Dial, certificate: tuple[bytes, bytes]) -> None:
    front = open_front(Script(echo), tls=certificate)
    channel = dial(front, credentials=grpc.ssl_channel_credentials(certificate[0]))
    assert rpc(channel, "Ack")(b"hello", timeout=PATIENCE_S) == b"hello"


def test_a_client_without_tls_fails_cleanly_on_a_tls_port(
    open_front: Open, dial: Dial, certificate: tuple[bytes, bytes]
) -> None:
    front = open_front(Script(echo), tls=certificate)
    code, _ = failure(lambda: rpc(dial(front), "Ack")(b"hello", timeout=PATIENCE_S))
    assert code is grpc.StatusCode.UNAVAILABLE
    channel = dial(front, credentials=grpc.ssl_channel_credentials(certificate[0]))
    assert rpc(channel, "Ack")(b"hello", timeout=PATIENCE_S) == b"hello"


def test_a_key_of_another_certificate_is_refused(
    open_front: Open, certificate: tuple[bytes, bytes], tmp_path: Path
) -> None:
    _, other_key = make_certificate(tmp_path)
    with pytest.raises(
        FrontError, match=r"cannot listen on 127\.0\.0\.1:0: the TLS certificate and .* belong together"
    ):
        open_front(Script(echo), tls=(certificate[0], other_key))


def test_a_port_that_another_program_holds_is_refused(open_front: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(FrontError) as raised:
            open_front(Script(echo), address)
    assert str(raised.value) == f"cannot listen on {address}: address already in use"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", ":50051", "127.0.0.1:99999", "127.0.0.1:http"])
def test_an_address_that_is_not_host_and_port_is_refused(open_front: Open, address: str) -> None:
    with pytest.raises(FrontError, match="it is not host:port"):
        open_front(Script(echo), address)


def test_fronts_share_a_port(open_front: Open, dial: Dial) -> None:
    first = open_front(Script(echo))
    second = open_front(Script(echo), f"127.0.0.1:{first.port}")
    assert second.port == first.port
    first.stop(0)
    assert rpc(dial(second), "Ack")(b"hello", timeout=PATIENCE_S) == b"hello"


def test_a_front_listens_on_ipv6(open_front: Open) -> None:
    front = open_front(Script(echo), "[::1]:0")
    socket.create_connection(("::1", front.port), timeout=PATIENCE_S).close()


# -- stopping ---------------------------------------------------------------------------------------


def test_a_stop_ends_what_is_parked(open_front: Open, dial: Dial) -> None:
    script = Script(park)
    front = open_front(script)
    channel = dial(front)
    waiting = [rpc(channel, method).future(b"", timeout=PATIENCE_S) for method in ("Reserve", "Ack")]
    parked = [heard(script.arrived), heard(script.arrived)]
    front.stop(0.05)
    assert [call.code() for call in waiting] == [grpc.StatusCode.UNAVAILABLE] * 2
    assert heard(script.closed) in [call for call in parked if call.method == "Reserve"]
    assert script.closed.empty()
    assert script.left.empty()


def test_a_stop_waits_for_a_call_and_no_longer(open_front: Open, dial: Dial) -> None:
    script = Script(park)
    front = open_front(script)
    channel = dial(front)
    waiting = [rpc(channel, method).future(b"", timeout=PATIENCE_S) for method in ("Reserve", "Ack")]
    parked = [heard(script.arrived), heard(script.arrived)]
    # A stream that would never end by itself must not prolong the stop.
    health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert next(health).status == NOT_SERVING
    grace_s = 10 * PATIENCE_S
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as other:
        stopped = other.submit(front.stop, grace_s)
        refused_within(front.port)
        assert not stopped.done()
        for call in parked:
            call.reply(b"done")
        stopped.result()
    assert time.monotonic() - begun < grace_s / 2
    assert [call.result() for call in waiting] == [b"done", b"done"]
    assert heard(script.left)[1]
    assert script.closed.empty()


def refused_within(port: int) -> None:
    """Wait until nobody listens there."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
        except ConnectionError:
            return
    raise AssertionError(f"somebody still listens on port {port}")


def test_a_stop_shows_in_the_health_streams_while_calls_are_running(open_front: Open, dial: Dial) -> None:
    script = Script(park)
    front = open_front(script)
    front.set_serving(True)
    channel = dial(front)
    waiting = rpc(channel, "Reserve").future(b"", timeout=PATIENCE_S)
    call = heard(script.arrived)
    health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert next(health).status == SERVING
    with ThreadPoolExecutor(1) as other:
        stopped = other.submit(front.stop, PATIENCE_S)
        assert next(health).status == NOT_SERVING
        call.reply(b"done")
        stopped.result()
    assert waiting.result() == b"done"


def test_every_answer_that_is_on_its_way_when_the_front_stops_arrives_or_is_reported(
    open_front: Open, dial: Dial
) -> None:
    for _ in range(10):
        script = Script(park)
        front = open_front(script)
        channel = dial(front)
        waiting = [rpc(channel, "Reserve").future(b"", timeout=PATIENCE_S) for _ in range(40)]
        parked = [heard(script.arrived) for _ in waiting]
        with ThreadPoolExecutor(2) as others:
            answered = others.submit(lambda: [call.reply(b"") for call in parked])  # noqa: B023
            others.submit(front.stop, 0).result()
            answered.result()
        fates: dict[Call, list[str]] = {call: [] for call in parked}
        while not script.closed.empty():
            fates[heard(script.closed)].append("closed")
        while not script.left.empty():
            call, left = heard(script.left)
            fates[call].append("left" if left else "lost")
        # Once `stop` has returned nothing more is told, so the last "lost" may be missing.
        assert {tuple(fate) for fate in fates.values()} <= {("left",), ("lost",), ("closed",), ("closed", "lost")}
        arrived = sum(call.code() is grpc.StatusCode.OK for call in waiting)
        assert arrived <= sum(fate == ["left"] for fate in fates.values())


def test_a_second_stop_is_harmless(open_front: Open) -> None:
    front = open_front(Script(echo))
    front.stop(0)
    front.stop(1)


def test_a_front_that_never_started_can_be_stopped(kind: str) -> None:
    make_front(FrontOptions("127.0.0.1:0", MESSAGE_BYTES_MAX), Script(echo), kind).stop(1)


def test_an_answer_after_the_stop_is_harmless(open_front: Open, dial: Dial) -> None:
    script = Script(park)
    front = open_front(script)
    channel = dial(front)
    # A call lives as long as the client keeps its future.
    waiting = [rpc(channel, method).future(b"", timeout=PATIENCE_S) for method in ("Ack", "Reserve")]
    parked = [heard(script.arrived), heard(script.arrived)]
    front.stop(0)
    assert [call.code() for call in waiting] == [grpc.StatusCode.UNAVAILABLE] * 2
    for call in parked:
        call.reply(b"too late")


def test_a_stopped_front_leaves_no_thread(open_front: Open, dial: Dial) -> None:
    front = open_front(Script(echo))
    rpc(dial(front), "Ack")(b"", timeout=PATIENCE_S)
    assert "grpc-front" in {thread.name for thread in threading.enumerate()}
    front.stop(0)
    assert "grpc-front" not in {thread.name for thread in threading.enumerate()}


# -- which front ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ReceiveCloseOnServerOperation", "SendMessageOperation"])
def test_the_aio_front_takes_over_where_an_inner_name_of_grpcio_is_missing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(cygrpc, name)
    with capture_logs() as logs:
        front = make_front(FrontOptions("127.0.0.1:0", MESSAGE_BYTES_MAX), Script(echo), "queue")
    assert isinstance(front, AioFront)
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert logs[0]["reason"] == f"grpc._cython.cygrpc has no {name}"
    front.stop(0)


def test_the_aio_front_takes_over_where_grpcio_has_another_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.front_queue.cygrpc", None)
    with capture_logs() as logs:
        front = make_front(FrontOptions("127.0.0.1:0", MESSAGE_BYTES_MAX), Script(echo), "queue")
    assert isinstance(front, AioFront)
    assert logs[0]["reason"] == "grpc._cython.cygrpc cannot be imported"
    front.stop(0)


def test_the_trial_notices_a_name_that_behaves_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mangled(cygrpc.SendMessageOperation):  # type: ignore[misc]
        def __new__(cls, message: bytes, flags: int) -> Mangled:
            made: Mangled = super().__new__(cls, message + b"?", flags)
            return made

    monkeypatch.setattr("router.front_queue._trial", _Trial())
    monkeypatch.setattr(cygrpc, "SendMessageOperation", Mangled)
    with pytest.raises(FrontUnavailable, match="in a trial call the answer of a call was missing or wrong"):
        QueueFront(FrontOptions("127.0.0.1:0", MESSAGE_BYTES_MAX), Script(echo))


def test_an_unknown_kind_of_front_is_an_error() -> None:
    with pytest.raises(ValueError, match="a front is one of queue, aio, not 'other'"):
        make_front(FrontOptions("127.0.0.1:0", MESSAGE_BYTES_MAX), Script(echo), "other")
