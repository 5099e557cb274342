"""The front on the public `grpc.aio`: three times the CPU of `front_queue`, and nothing private to grpcio.

An event loop of its own runs in a thread of its own; everything about a call is decided there, and
answers from other threads are carried over. Requests and answers are bytes: there are no serializers.
All methods are served as if requests came in a stream, which looks the same on the wire: a call
without any message would otherwise never be answered.

What it can tell of a watched call is less than the other front's:

- Answers are a stream too, because grpc.aio reports the fate of a message only there: `answer_left`
  is False when the loop hears of the end before or while the message is written, else True. A gap
  remains: a message that grpc.aio has accepted for a call that has just ended counts as left, and so
  does every `fail`, whose status is sent where no handler can look. A lease that is handed out in the
  gap comes back when it ends.
- `call_closed` comes when the loop gets to it, behind the calls that came before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common import queue_pb2
from router.front import (
    INTERNAL_TEXT,
    NO_MESSAGE_TEXT,
    SERVICE,
    STOPPING_TEXT,
    WATCHED_METHODS,
    FrontOptions,
    Receiver,
    Status,
    bind,
    channel_arguments,
    paths,
    shortened,
)

# Seconds that handlers may take to notice that they were cancelled, after the stop.
LAST_HANDLERS_TIMEOUT_S = 5.0

_CODES = {code.value[0]: code for code in grpc.StatusCode}

log = structlog.get_logger()


class _Context(Protocol):
    """What we use of a grpc.aio call's context."""

    def time_remaining(self) -> float | None: ...

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]: ...

    def set_code(self, code: object) -> None: ...

    def set_details(self, details: str) -> None: ...

    async def read(self) -> object:
        """The next message, or `grpc.aio.EOF`."""

    async def write(self, message: bytes) -> None: ...

    async def abort(self, code: object, details: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    status: Status
    message: bytes
    text: str


class AioCall:
    """A call whose handler waits in the loop for the answer."""

    __slots__ = ("_front", "_waiter", "answer", "authorization", "closed", "deadline", "method", "request", "watched")

    def __init__(
        self, front: AioFront, method: str, request: bytes, authorization: str | None, deadline: float
    ) -> None:
        self.method = method
        self.request = request
        self.authorization = authorization
        self.deadline = deadline
        self.watched = method in WATCHED_METHODS
        # Set once, from any thread, by whoever has claimed the call.
        self.answer: _Answer | None = None
        # It ended before it was answered, or the front answered it; used in the loop only.
        self.closed = False
        self._front = front
        self._waiter: asyncio.Future[None] | None = None

    def reply(self, answer: bytes) -> None:
        self._settle(_Answer(Status.OK, answer, ""))

    def fail(self, status: Status, text: str) -> None:
        self._settle(_Answer(status, b"", shortened(text)))

    def _settle(self, answer: _Answer) -> None:
        if self._front.claim(self):
            self.answer = answer
            self._front.soon(self._wake)
        elif self.watched:
            self._front.soon(self._lose)

    # -- in the loop ----------------------------------------------------------------------------

    async def answered(self) -> _Answer:
        """Wait for the answer; CancelledError when the call ends first."""
        if self.answer is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        assert self.answer is not None
        return self.answer

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lose(self) -> None:
        """An answer came after the end; that of a call which was answered before is not told of."""
        if self.closed:
            self._front.tell_left(self, False)


class AioFront:
    """See `front.Front`."""

    name = "aio"

    def __init__(self, options: FrontOptions, receiver: Receiver) -> None:
        self.port = 0
        self._options = options
        self._receiver = receiver
        # Calls that the receiver has and nobody has answered. Who removes one decides its end.
        self._unanswered: set[AioCall] = set()
        self._running = 0  # handlers of the eight methods; used in the loop only
        self._idle = asyncio.Event()
        self._health = _Health()
        self._serving = False
        self._stop_lock = threading.Lock()
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="grpc-front", daemon=True)

    def start(self) -> None:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except BaseException:
            self._end_loop()
            raise

    def run_soon(self, work: Callable[[], None]) -> bool:
        if not self._thread.is_alive() or self._stopped:
            return False
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:  # it was closed this moment
            return False
        return True

    def set_serving(self, serving: bool) -> None:
        self._serving = serving
        if self._thread.is_alive():
            self.soon(self._publish)

    def stop(self, grace_s: float) -> None:
        with self._stop_lock:
            if self._stopped:
                return
            if self._thread.is_alive():
                asyncio.run_coroutine_threadsafe(self._close(grace_s), self._loop).result()
            self._end_loop()

    # -- the loop -------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _end_loop(self) -> None:
        self._stopped = True
        if self._thread.is_alive():
            self.soon(self._loop.stop)
            self._thread.join()
        elif not self._loop.is_closed():
            self._loop.close()

    async def _open(self) -> None:
        server = grpc.aio.server(options=channel_arguments(self._options))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._health.show(self._serving)
        _ = queue_pb2  # reflection describes what is loaded
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        server.add_generic_rpc_handlers((_Handlers(self),))
        self.port = bind(server, self._options)
        await server.start()
        self._server = server

    async def _close(self, grace_s: float) -> None:
        self._serving = False
        self._publish()
        stopping = asyncio.ensure_future(self._server.stop(grace_s if grace_s > 0 else None))
        await self._wait_for_handlers(grace_s)
        self._health.end_watches()
        await stopping
        # Those that the stop has cancelled have yet to tell so.
        if not await self._wait_for_handlers(LAST_HANDLERS_TIMEOUT_S):
            log.error("calls outlived the gRPC server", calls=self._running)
        # Its destructor would use the loop, which is closed by then.
        del self._server

    async def _wait_for_handlers(self, timeout_s: float) -> bool:
        """False when there are still some after `timeout_s`."""
        if self._running:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout_s)
        return not self._running

    def _publish(self) -> None:
        task = self._loop.create_task(self._health.show(self._serving))
        self._publishing = task  # or the task may be collected before it has run

    def soon(self, action: Callable[[], object]) -> None:
        """Do it in the loop, in the order of these calls; after the stop, nothing."""
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    # -- handlers -------------------------------------------------------------------------------

    async def serve(self, method: str, requests: object, context: _Context) -> bytes:
        """A call that is answered in one step. CancelledError is passed on: grpc.aio leaks what swallows it."""
        self._running += 1
        try:
            call = await self._call(method, context)
            if call is None:
                return b""
            answer = await self._answer_of(call)
        finally:
            self._handler_ended()
        _set_status(context, answer.status, answer.text)
        return answer.message

    async def serve_watched(self, method: str, requests: object, context: _Context) -> None:
        """A call whose answer is followed until it is written."""
        self._running += 1
        try:
            call = await self._call(method, context)
            if call is None:
                return
            answer = await self._answer_of(call)
            if call.closed:
                _set_status(context, answer.status, answer.text)
            else:
                await self._write(call, answer, context)
        finally:
            self._handler_ended()

    async def _call(self, method: str, context: _Context) -> AioCall | None:
        """The call with its whole request, None when there is no message: then it has its status."""
        request = await context.read()
        if not isinstance(request, bytes):
            # One that was too large is answered already, and the client keeps that answer.
            _set_status(context, Status.INTERNAL, NO_MESSAGE_TEXT)
            return None
        remaining_s = context.time_remaining()
        deadline = inf if remaining_s is None else time.time() + remaining_s
        authorization = None
        for key, value in context.invocation_metadata():
            if key == "authorization":
                authorization = value
                break
        return AioCall(self, method, request, authorization, deadline)

    async def _answer_of(self, call: AioCall) -> _Answer:
        self._unanswered.add(call)
        try:
            self._receiver.call_arrived(call)
        except Exception:
            log.exception("a call was not taken", method=call.method)
            self._refuse(call)
        try:
            return await call.answered()
        except asyncio.CancelledError:
            if self.claim(call):
                self._close_call(call)
            elif call.watched:
                self.tell_left(call, False)
            raise

    async def _write(self, call: AioCall, answer: _Answer, context: _Context) -> None:
        left = False
        try:
            if answer.status is Status.OK:
                await context.write(answer.message)
            else:
                _set_status(context, answer.status, answer.text)
            left = True
        except Exception as error:
            # The connection is gone: nobody is there to be told, only the receiver.
            log.debug("an answer was not written", method=call.method, error=str(error))
        finally:
            self.tell_left(call, left)

    def _refuse(self, call: AioCall) -> None:
        """Answer for the receiver, if the call is still unanswered; a watched call is told as closed."""
        if self.claim(call):
            call.answer = _Answer(Status.INTERNAL, b"", INTERNAL_TEXT)
            self._close_call(call)

    def _close_call(self, call: AioCall) -> None:
        call.closed = True
        if not call.watched:
            return
        try:
            self._receiver.call_closed(call)
        except Exception:
            log.exception("the end of a call was not taken", method=call.method)

    def _handler_ended(self) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    def claim(self, call: AioCall) -> bool:
        """True for the one that may decide how the call ends; from any thread."""
        try:
            self._unanswered.remove(call)
        except KeyError:
            return False
        return True

    def tell_left(self, call: AioCall, left: bool) -> None:
        try:
            self._receiver.answer_left(call, left)
        except Exception:
            log.exception("the fate of an answer was not taken", method=call.method, left=left)


def _set_status(context: _Context, status: Status, text: str) -> None:
    if status is not Status.OK:
        context.set_code(_CODES[int(status)])
        context.set_details(text)


class _Handlers:
    """The eight methods for grpc.aio, which asks with every call."""

    def __init__(self, front: AioFront) -> None:
        self._by_path: dict[str, object] = {}
        for method, path in paths().items():
            if method in WATCHED_METHODS:
                handler = grpc.stream_stream_rpc_method_handler(partial(front.serve_watched, method))
            else:
                handler = grpc.stream_unary_rpc_method_handler(partial(front.serve, method))
            self._by_path[path] = handler

    def service(self, details: _CallDetails) -> object | None:
        return self._by_path.get(details.method)


class _CallDetails(Protocol):
    method: str


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    """The health service, whose streams end when the server stops: they would use up the whole grace."""

    def __init__(self) -> None:
        super().__init__()
        self._ending = asyncio.Event()

    async def show(self, serving: bool) -> None:
        kind = health_pb2.HealthCheckResponse
        status = kind.SERVING if serving else kind.NOT_SERVING
        for service in ("", SERVICE):
            await self.set(service, status)

    def end_watches(self) -> None:
        self._ending.set()

    async def Watch(self, request: object, context: _Context) -> None:
        watch = asyncio.ensure_future(super().Watch(request, context))
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((watch, ending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            ending.cancel()
            await asyncio.gather(watch, ending, return_exceptions=True)
        if self._ending.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING_TEXT)
