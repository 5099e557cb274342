"""The front on a completion queue of its own: a third of the CPU of `front_aio`, and it knows what left.

The public `grpc.server` owns ports, TLS, health, reflection, unknown methods and the graceful stop.
Before it starts, its server in the C core is given a second completion queue, and the eight methods
are registered there; one thread polls that queue. What happens to a call, each line one event:

    arrived    metadata and deadline are there; ask for the message, and for the next call
    received   the message is there; watch for the end (watched methods), give it to the receiver
    closed     a watched call ended, by its answer or before
    sent       the answer was written, or could not be; for the other methods the end is part of it

Answers may start from any thread. An event is a Python object that keeps its call alive, and the C
core cannot shut down while a call is alive: whatever has ended must be let go of.

Everything from `cygrpc` is private to grpcio. It is used in this module only, and tried at
construction: `FrontUnavailable` then names what is missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Protocol, TypeVar

import grpc
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
    Call,
    FrontOptions,
    FrontUnavailable,
    Receiver,
    Status,
    bind,
    channel_arguments,
    paths,
    shortened,
)

try:
    from grpc._cython import cygrpc
except ImportError:
    cygrpc = None

# Calls of one method that the C core may hand over before we ask again. More of them cost memory
# only; with few, a burst waits in the core between our turns.
REQUESTED_AHEAD = 64
# The core gives the largest 64-bit number of seconds for a call without a deadline; a real one is
# not beyond this wall clock time.
DEADLINE_MAX_S = float(1 << 60)
# Threads for health and reflection. Streams of the health service do not hold one.
SIDE_THREADS = 4
# How long connections may take to end by themselves when their calls are answered, in seconds. They take
# milliseconds, unless somebody watches the health service.
LAST_ANSWERS_S = 1.0
# Seconds between looks for calls that came out of the C core after the grace was over.
LATE_CALLS_INTERVAL_S = 0.05
# Events between two pieces of work that others hand over, up to which the polling thread counts as idle: those of
# two calls. A hop to it costs 100 µs then.
QUIET_EVENTS = 6
# Seconds that a call to ourselves may take in the trial: far more than the milliseconds it needs.
TRIAL_TIMEOUT_S = 20.0

_PRIVATE_NAMES = (
    "Server.register_completion_queue",
    "Server.register_method",
    "Server.request_registered_call",
    "CompletionQueue.poll",
    "CompletionQueue.shutdown",
    "Call.start_server_batch",
    "RequestCallEvent.call",
    "RequestCallEvent.call_details",
    "RequestCallEvent.invocation_metadata",
    "RequestCallEvent.success",
    "BatchOperationEvent.batch_operations",
    "BatchOperationEvent.success",
    "CompletionType.operation_complete",
    "CompletionType.queue_shutdown",
    "ReceiveMessageOperation.message",
    "ReceiveCloseOnServerOperation",
    "SendInitialMetadataOperation",
    "SendMessageOperation",
    "SendStatusFromServerOperation",
)

_Stream = TypeVar("_Stream", bound=Callable[..., None])

log = structlog.get_logger()


class _Operation(Protocol):
    """One step of a batch; only that of a receive-message operation has a message."""

    def message(self) -> bytes | None: ...


class _CoreCall(Protocol):
    """A call of the C core. It lives as long as this object or a batch of its own does."""

    def start_server_batch(self, operations: tuple[_Operation, ...], tag: object) -> int:
        """0, or the error with which the core refuses the batch; then no event follows."""


class _CallDetails(Protocol):
    deadline: float


class _ArrivedEvent(Protocol):
    success: bool
    call: _CoreCall
    call_details: _CallDetails
    invocation_metadata: tuple[tuple[str, str], ...]


class _BatchEvent(Protocol):
    success: bool
    batch_operations: tuple[_Operation, ...]


class QueueCall:
    """A call of the C core, until its answer has left or it has ended."""

    __slots__ = (
        "_answer_lost",
        "_close_told",
        "_core_call",
        "_front",
        "_refused",
        "authorization",
        "deadline",
        "method",
        "request",
        "watched",
    )

    def __init__(
        self, front: QueueFront, core_call: _CoreCall, method: str, authorization: str | None, deadline: float
    ) -> None:
        self.method = method
        self.request = b""
        self.authorization = authorization
        self.deadline = deadline
        self.watched = method in WATCHED_METHODS
        self._front = front
        self._core_call: _CoreCall | None = core_call
        # The front answered it: that is not the receiver's answer.
        self._refused = False
        # Where an answer comes after the end; both under the front's lock.
        self._close_told = False
        self._answer_lost = False

    def reply(self, answer: bytes) -> None:
        self._answer(
            (
                cygrpc.SendInitialMetadataOperation((), 0),
                cygrpc.SendMessageOperation(answer, 0),
                cygrpc.SendStatusFromServerOperation((), 0, b"", 0),
            )
        )

    def fail(self, status: Status, text: str) -> None:
        self._answer(_failure(status, text))

    def refuse(self, status: Status, text: str) -> None:
        """Answer for the receiver, if the call is still unanswered; a watched call is told as closed."""
        if not self._front.claim(self):
            return
        self._refused = True
        self._send(_failure(status, text))
        if self.watched:
            self._tell_closed()

    # -- events, in the polling thread ----------------------------------------------------------

    def begin(self) -> None:
        """Ask for the message."""
        assert self._core_call is not None
        if self._core_call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self._received):
            self._let_go()

    def _received(self, event: _BatchEvent) -> None:
        request = event.batch_operations[0].message()
        if request is None:
            self._dismiss()
            return
        self.request = request
        if self.watched:
            assert self._core_call is not None
            if self._core_call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self._closed):
                self._let_go()
                return
        self._front.give(self)

    def _dismiss(self) -> None:
        """No message came: the client has gone, it was too large (then it is answered), or there is none."""
        core_call, self._core_call = self._core_call, None
        assert core_call is not None
        operations = _failure(Status.INTERNAL, NO_MESSAGE_TEXT)
        if core_call.start_server_batch((*operations, cygrpc.ReceiveCloseOnServerOperation(0)), self._dismissed):
            self._let_go()

    def _dismissed(self, event: _BatchEvent) -> None:
        self._let_go()

    def _closed(self, event: _BatchEvent) -> None:
        if not self._front.claim(self):
            return  # answered; `_sent` tells the rest
        self._let_go()
        self._tell_closed()

    def _sent(self, event: _BatchEvent) -> None:
        self._let_go()
        if self.watched and not self._refused:
            self._front.tell_left(self, event.success)

    # -- the end --------------------------------------------------------------------------------

    def _answer(self, operations: tuple[_Operation, ...]) -> None:
        if self._front.claim(self):
            self._send(operations)
        elif self.watched:
            self._lose()

    def _send(self, operations: tuple[_Operation, ...]) -> None:
        """Start the batch that answers; only for whoever has claimed the call."""
        core_call, self._core_call = self._core_call, None
        assert core_call is not None
        if not self.watched:
            operations = (*operations, cygrpc.ReceiveCloseOnServerOperation(0))
        error = core_call.start_server_batch(operations, self._sent)
        if error:
            log.error("the gRPC core refused an answer", method=self.method, core_error=error)
            self._let_go()
            if self.watched and not self._refused:
                self._front.tell_left_elsewhere(self)

    def _lose(self) -> None:
        """An answer that came after the end, or a second one, which is not told of."""
        with self._front.lock:
            self._answer_lost = True
            told = self._close_told
        if told:
            self._front.tell_left_elsewhere(self)

    def _tell_closed(self) -> None:
        self._front.tell_closed(self)
        with self._front.lock:
            self._close_told = True
            lost = self._answer_lost
        if lost:
            self._front.tell_left(self, False)

    def _let_go(self) -> None:
        self._core_call = None
        self._front.ended(self)


def _failure(status: Status, text: str) -> tuple[_Operation, ...]:
    """The operations that answer with a status."""
    details = shortened(text).encode()
    return (
        cygrpc.SendInitialMetadataOperation((), 0),
        cygrpc.SendStatusFromServerOperation((), int(status), details, 0),
    )


class _Method:
    """Asks the C core for the calls of one method."""

    def __init__(self, front: QueueFront, method: str, path: str) -> None:
        self._front = front
        self._method = method
        self._path = path

    def request(self) -> None:
        self._front.request(self._path, self._arrived)

    def _arrived(self, event: _ArrivedEvent) -> None:
        front = self._front
        front.requested -= 1
        if not event.success:  # the server is stopping
            front.look_for_idle()
            return
        try:
            self.request()
        except ValueError:  # it began to stop this moment
            if not front.stopping:
                raise
        authorization = None
        for key, value in event.invocation_metadata:
            if key == "authorization":
                authorization = value
                break
        deadline = event.call_details.deadline
        if deadline > DEADLINE_MAX_S:
            deadline = inf
        front.arrived(event.call, QueueCall(front, event.call, self._method, authorization, deadline))


class QueueFront:
    """See `front.Front`. Raises FrontUnavailable when the installed grpcio does not fit.

    Without `trial` only the names are looked up.
    """

    name = "queue"

    def __init__(self, options: FrontOptions, receiver: Receiver, trial: bool = True) -> None:
        _check_names()
        if trial:
            _trial.once()
        self.port = 0
        self.lock = threading.Lock()
        self.requested = 0  # calls asked for and not arrived; used by the polling thread only
        self.stopping = False
        self._options = options
        self._receiver = receiver
        # All calls from their arrival to their end. A set's add, remove and discard are atomic.
        self._calls: set[QueueCall] = set()
        # Calls that the receiver has and nobody has answered. Who removes one decides its end.
        self._unanswered: set[QueueCall] = set()
        # The call that arrived last, for `run_soon`; under the lock, None before the first and from the stop on.
        self._last_call: _CoreCall | None = None
        self._events = 0  # polled so far
        self._events_before = 0  # when work was last handed over
        self._idle = threading.Event()
        self._stop_lock = threading.Lock()
        self._stopped = False
        self._thread: threading.Thread | None = None

        self._server = grpc.server(
            ThreadPoolExecutor(SIDE_THREADS, thread_name_prefix="grpc-side"), options=channel_arguments(options)
        )
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        _ = queue_pb2  # reflection describes what is loaded
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        core = getattr(self._server, "_cy_server", None)
        if not isinstance(core, cygrpc.Server):
            raise FrontUnavailable("grpc.server() has no _cy_server of the expected kind")
        self._core = core
        self._queue = cygrpc.CompletionQueue()
        core.register_completion_queue(self._queue)
        for path in paths().values():
            core.register_method(path)

    def start(self) -> None:
        self.port = bind(self._server, self._options)
        self._server.start()
        for method, path in paths().items():
            intake = _Method(self, method, path)
            for _ in range(REQUESTED_AHEAD):
                intake.request()
        # A daemon: a process that dies of something else must not hang on it.
        self._thread = threading.Thread(target=self._poll, name="grpc-front", daemon=True)
        self._thread.start()

    def run_soon(self, work: Callable[[], None]) -> bool:
        events = self._events
        is_quiet = events - self._events_before <= QUIET_EVENTS
        self._events_before = events
        return not is_quiet and self.post(work)

    def post(self, work: Callable[[], None]) -> bool:
        """Have the polling thread do this next; False before the first call and from the stop on."""
        # A batch without operations is an event at once, on the queue of any call, even of one that has ended.
        with self.lock:
            call = self._last_call
            return call is not None and call.start_server_batch((), lambda event: work()) == 0

    def set_serving(self, serving: bool) -> None:
        self._health.show(serving)

    def stop(self, grace_s: float) -> None:
        with self._stop_lock:
            if self._stopped:
                return
            self._stopped = True
            self.set_serving(False)
            with self.lock:
                self.stopping = True
                self._last_call = None  # the server does not end while somebody has a call of it
            gone = self._server.stop(max(grace_s, 0.0))
            if self._thread is not None:
                if self._idle.wait(max(grace_s, 0.0)):
                    # The core has the last answers; a connection that is cancelled now may be reset under them.
                    gone.wait(min(grace_s, LAST_ANSWERS_S))
                # Our calls are done, or their time is up: what is left is cancelled now.
                ended = self._server.stop(0)
                self._refuse_until(ended)
            # Nobody holds a call of the C core by now: a batch on a queue that is shut down is fatal.
            self._queue.shutdown()
            if self._thread is not None:
                self._thread.join()
            self._health.close()

    def _refuse_until(self, ended: threading.Event) -> None:
        """End what the receiver still has: the core waits for it, and nobody is told of its cancellation."""
        while True:
            for call in list(self._unanswered):
                if not call.watched:
                    call.refuse(Status.UNAVAILABLE, STOPPING_TEXT)
            # Calls that were on their way when the grace ended are still given to the receiver.
            if ended.wait(LATE_CALLS_INTERVAL_S) and self._idle.wait(LATE_CALLS_INTERVAL_S):
                return

    def _poll(self) -> None:
        while True:
            event = self._queue.poll(None)
            self._events += 1
            if event.completion_type == cygrpc.CompletionType.queue_shutdown:
                return
            try:
                event.tag(event)
            except Exception:
                log.exception("an event of the gRPC front failed")
            # It would keep a call alive that has ended, and the next poll would spin.
            event = None

    # -- for the calls --------------------------------------------------------------------------

    def request(self, path: str, arrived: object) -> None:
        self._core.request_registered_call(self._queue, self._queue, path, arrived)
        self.requested += 1

    def arrived(self, core_call: _CoreCall, call: QueueCall) -> None:
        self._calls.add(call)
        with self.lock:
            if not self.stopping:
                self._last_call = core_call
        call.begin()

    def give(self, call: QueueCall) -> None:
        """The whole request is there."""
        self._unanswered.add(call)
        try:
            self._receiver.call_arrived(call)
        except Exception:
            log.exception("a call was not taken", method=call.method)
            call.refuse(Status.INTERNAL, INTERNAL_TEXT)

    def claim(self, call: QueueCall) -> bool:
        """True for the one that may decide how the call ends."""
        try:
            self._unanswered.remove(call)
        except KeyError:
            return False
        return True

    def ended(self, call: QueueCall) -> None:
        self._calls.discard(call)
        if self.stopping:
            self.look_for_idle()

    def look_for_idle(self) -> None:
        """When the core hands over no more calls and all have ended, `stop` need not wait longer."""
        if self.stopping and not self.requested and not self._calls:
            self._idle.set()

    def tell_closed(self, call: QueueCall) -> None:
        try:
            self._receiver.call_closed(call)
        except Exception:
            log.exception("the end of a call was not taken", method=call.method)

    def tell_left(self, call: QueueCall, left: bool) -> None:
        try:
            self._receiver.answer_left(call, left)
        except Exception:
            log.exception("the fate of an answer was not taken", method=call.method, left=left)

    def tell_left_elsewhere(self, call: QueueCall) -> None:
        """Tell False from another thread: the receiver may hold its lock here. Too rare for a thread that waits."""
        threading.Thread(target=self.tell_left, args=(call, False), name="grpc-front-late", daemon=True).start()


class _Watcher:
    """A stream of the health service, which gets a status when it is another than the last."""

    def __init__(self, send: Callable[[object], None], service: str) -> None:
        self._send = send
        self._service = service
        self._last: object = None

    def tell(self, statuses: dict[str, object]) -> None:
        status = statuses.get(self._service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        if status != self._last:
            self._last = status
            self._send(health_pb2.HealthCheckResponse(status=status))


def _without_a_thread(stream: _Stream) -> _Stream:
    """Let grpc.server give the method a function that sends, instead of a thread that waits with it."""
    setattr(stream, "experimental_non_blocking", True)  # noqa: B010
    return stream


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health service of grpc.server without its deadlock.

    grpcio-health-checking sends under the lock that the end of a stream takes, and a send waits for
    the thread that ends streams: a client that leaves while the health changes stops both for ever.
    Here one thread sends, and nothing waits for it.
    """

    def __init__(self) -> None:
        self._statuses = _statuses(False)
        self._watchers: set[_Watcher] = set()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="grpc-health")
        self._closed = False

    def show(self, serving: bool) -> None:
        self._statuses = _statuses(serving)
        for watcher in list(self._watchers):
            self._tell(watcher)

    def close(self) -> None:
        """Only when the server has ended: then no send waits any more."""
        self._closed = True
        self._sender.shutdown()

    def Check(self, request: _HealthRequest, context: _HealthContext) -> object:
        status = self._statuses.get(request.service)
        if status is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    @_without_a_thread
    def Watch(self, request: _HealthRequest, context: _HealthContext, send: Callable[[object], None]) -> None:
        watcher = _Watcher(send, request.service)
        self._watchers.add(watcher)
        if context.add_callback(lambda: self._watchers.discard(watcher)):
            self._tell(watcher)
        else:  # it has ended already
            self._watchers.discard(watcher)

    def _tell(self, watcher: _Watcher) -> None:
        """Send what is so then; what changed in between is skipped."""
        try:
            self._sender.submit(lambda: watcher.tell(self._statuses))
        except RuntimeError:
            if not self._closed:
                raise


class _HealthRequest(Protocol):
    service: str


class _HealthContext(Protocol):
    def set_code(self, code: object) -> None: ...

    def add_callback(self, ended: Callable[[], None]) -> bool: ...


def _statuses(serving: bool) -> dict[str, object]:
    kind = health_pb2.HealthCheckResponse
    return dict.fromkeys(("", SERVICE), kind.SERVING if serving else kind.NOT_SERVING)


# -- does the installed grpcio fit? ---------------------------------------------------------------


def _check_names() -> None:
    if cygrpc is None:
        raise FrontUnavailable("grpc._cython.cygrpc cannot be imported")
    for name in _PRIVATE_NAMES:
        found: object = cygrpc
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise FrontUnavailable(f"grpc._cython.cygrpc has no {name}")


class _TrialReceiver:
    """Answers with what it saw, or waits for the client to go."""

    def __init__(self) -> None:
        self.seen: list[Call] = []
        self.waiting = threading.Event()
        self.closed = threading.Event()
        self.left = threading.Event()

    def call_arrived(self, call: Call) -> None:
        self.seen.append(call)
        if call.request == b"wait":
            self.waiting.set()
        else:
            call.reply(call.request + b"!")

    def call_closed(self, call: Call) -> None:
        self.closed.set()

    def answer_left(self, call: Call, left: bool) -> None:
        if left:
            self.left.set()


class _Trial:
    """Three calls to ourselves on loopback, once in the life of a process: some milliseconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed = False

    def once(self) -> None:
        with self._lock:
            if not self._passed:
                self._run()
                self._passed = True

    def _run(self) -> None:
        receiver = _TrialReceiver()
        try:
            front = QueueFront(FrontOptions("127.0.0.1:0", 1024), receiver, trial=False)
            try:
                front.start()
                self._call(front, receiver)
            finally:
                front.stop(0)
        except FrontUnavailable:
            raise
        except Exception as error:
            # Whatever goes wrong here, the other front does not depend on it.
            raise FrontUnavailable(f"a trial call failed: {type(error).__name__}: {error}") from error

    def _call(self, front: QueueFront, receiver: _TrialReceiver) -> None:
        here = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
        with grpc.insecure_channel(f"127.0.0.1:{front.port}", options=here) as channel:
            ack, reserve = (channel.unary_unary(f"/{SERVICE}/{method}") for method in ("Ack", "Reserve"))
            answer = ack(b"a", timeout=TRIAL_TIMEOUT_S, metadata=(("authorization", "trial"),))
            _expect(answer == b"a!", "the answer of a call")
            seen = receiver.seen[0]
            _expect(seen.authorization == "trial", "the metadata of a call")
            _expect(0 < seen.deadline - time.time() <= TRIAL_TIMEOUT_S, "the deadline of a call")
            done = threading.Event()
            _expect(front.post(done.set) and done.wait(TRIAL_TIMEOUT_S), "an event of our own")
            answer = reserve(b"b", timeout=TRIAL_TIMEOUT_S)
            _expect(answer == b"b!", "the answer of a watched call")
            _expect(receiver.left.wait(TRIAL_TIMEOUT_S), "the notice that an answer left")
            waiting = reserve.future(b"wait", timeout=TRIAL_TIMEOUT_S)
            _expect(receiver.waiting.wait(TRIAL_TIMEOUT_S), "a waiting call")
            waiting.cancel()
            _expect(receiver.closed.wait(TRIAL_TIMEOUT_S), "the notice that a call ended")


_trial = _Trial()


def _expect(seen: bool, what: str) -> None:
    if not seen:
        raise FrontUnavailable(f"in a trial call {what} was missing or wrong")
