"""The admin service of a server: a public gRPC server on a Unix socket in the data directory.

The socket is the key: it has mode 0600 from the moment it exists, so only the server's user gets in.
One router of a server has it, that of index 0; the one that is started in its place takes it over.
Calls are seldom, so each takes a thread of a small pool and blocks in it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.message import Message

from common import admin_pb2 as pb
from common import queue_pb2
from common.admin_socket import SERVICE, SOCKET_FILE, socket_target
from common.slots import SlotMap
from router.admin import Admin, Patience, Refused, Shards, Slots
from router.front import INTERNAL_TEXT, Call, Status, shortened
from router.resharding import MoveDone, MoveOutcome

# Calls at a time; a deletion that waits for jobs in flight takes one for as long as it waits.
THREADS = 8
# How long a shard may take to answer one operation, in seconds. It never takes as long unless it hangs.
ANSWER_S = 30.0
# How long calls may go on when the server stops, in seconds. They look for its end between operations.
STOP_GRACE_S = 1.0
# How often a call that changes the slot map looks whether its caller still waits, in seconds.
LOOK_S = 0.5
# Records of one step of a drain; `limits.max_reserve_batch` can lower it.
DRAIN_BATCH = 256
SOCKET_MODE = 0o600

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_Request = TypeVar("_Request", bound=Message)
_Outcome = TypeVar("_Outcome")


class Router(Protocol):
    """What the service needs of the router that it is part of. All return at once, from any thread.

    What is given as `done` is called once and must not block.
    """

    def ask(self, shard: int, arguments: list[Any], done: Callable[[int, Any], None]) -> None:
        """Send an operation without its id; status and data go to `done`."""

    def slot_map(self) -> SlotMap:
        """The one that holds now."""

    def begin_move(self, slots: list[int], target: int, bytes_per_second: int, done: MoveDone) -> None:
        """Move slots of one shard to another; 0 bytes per second is as fast as it goes. `done` gets what
        came of it, or why not."""

    def set_shards(self, shards: int, done: Callable[[str | None], None]) -> None:
        """Change the number of shards. `done` gets None, or why not."""

    def call_trusted(self, call: Call) -> None:
        """Take a call as one of a client, without asking for its key."""

    def call_closed(self, call: Call) -> None:
        """Nobody waits for the answer of a trusted call any more."""

    def answer_left(self, call: Call, left: bool) -> None:
        """Whether the answer of a trusted call has left."""


class AdminService:
    """The service on `directory`/admin.sock."""

    def __init__(self, directory: Path, router: Router) -> None:
        self._directory = directory
        self._router = router
        self._admin = Admin(_Asking(router), _Changing(router))
        self._stopping = threading.Event()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """Listen and serve. Where that cannot be had it is logged: clients are served all the same."""
        try:
            self._server = self._listening()
        except (OSError, RuntimeError) as error:
            path = str(self._directory / SOCKET_FILE)
            log.error("the admin socket cannot be had, the server runs without it", path=path, reason=str(error))

    def stop(self) -> threading.Event:
        """Take no more calls and end the running ones within STOP_GRACE_S; the event is set when it is over."""
        self._stopping.set()
        if self._server is not None:
            over: threading.Event = self._server.stop(STOP_GRACE_S)
            return over
        return self._stopping

    def _listening(self) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(THREADS, "admin"), options=[("grpc.max_send_message_length", -1)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._methods()),))
        # Never closed: the server unlinks the socket by this way when it stops.
        descriptor = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        # A socket gets its mode from the mask when it is bound. The mask is the process's; a router
        # creates no other file at this moment.
        before = os.umask(0o777 & ~SOCKET_MODE)
        try:
            # What a killed router has left there is replaced.
            if not server.add_insecure_port(socket_target(descriptor)):
                raise RuntimeError("no reason given")
        finally:
            os.umask(before)
        server.start()
        return server

    # -- methods ----------------------------------------------------------------------------------

    def _methods(self) -> dict[str, Any]:
        admin = self._admin
        return {
            "ListQueues": self._unary(pb.ListQueuesRequest, lambda request, _: admin.list_queues(request)),
            "ShowQueue": self._unary(pb.ShowQueueRequest, lambda request, _: admin.show_queue(request)),
            "PurgeQueue": self._unary(pb.PurgeQueueRequest, admin.purge_queue),
            "DeleteQueue": self._unary(pb.DeleteQueueRequest, admin.delete_queue),
            "ListJobs": self._unary(pb.ListJobsRequest, lambda request, _: admin.list_jobs(request)),
            "ShowJob": self._unary(pb.ShowJobRequest, lambda request, _: admin.show_job(request)),
            "ListDeadLetters": self._unary(
                pb.ListDeadLettersRequest, lambda request, _: admin.list_dead_letters(request)
            ),
            "RequeueDeadLetters": self._unary(
                pb.DeadLetterSelection, lambda request, _: admin.requeue_dead_letters(request)
            ),
            "DeleteDeadLetters": self._unary(
                pb.DeadLetterSelection, lambda request, _: admin.delete_dead_letters(request)
            ),
            "DrainDeadLetters": grpc.unary_stream_rpc_method_handler(
                self._drain, request_deserializer=pb.DrainDeadLettersRequest.FromString
            ),
            "ListShards": self._unary(pb.ListShardsRequest, lambda request, _: admin.list_shards(request)),
            "ShowSlotMap": self._unary(pb.ShowSlotMapRequest, lambda request, _: admin.show_slot_map(request)),
            "SetShards": self._unary(pb.SetShardsRequest, admin.set_shards),
            "MoveSlots": self._unary(pb.MoveSlotsRequest, admin.move_slots),
            "VerifyShard": self._unary(pb.VerifyShardRequest, lambda request, _: admin.verify_shard(request)),
        }

    def _unary(self, kind: type[_Request], answer: Callable[[_Request, _CallPatience], Message]) -> Any:
        def handle(request: _Request, context: grpc.ServicerContext) -> Message:
            try:
                return answer(request, _CallPatience(context, self._stopping))
            except Refused as refused:
                self._abort(context, refused)
            except Exception:
                log.exception("an admin call failed")
                context.abort(grpc.StatusCode.INTERNAL, INTERNAL_TEXT)
            raise AssertionError("abort raises")

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=kind.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    @staticmethod
    def _abort(context: grpc.ServicerContext, refused: Refused) -> None:
        context.abort(_CODES[int(refused.status)], shortened(refused.text))

    def _drain(self, request: pb.DrainDeadLettersRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        """gRPC asks for the next answer when the one before has been sent, and lets go of this when it cannot be."""
        try:
            if request.HasField("queue"):
                self._admin.show_queue(pb.ShowQueueRequest(queue=request.queue))
            yield from self._drained(request)
        except Refused as refused:
            self._abort(context, refused)

    def _drained(self, request: pb.DrainDeadLettersRequest) -> Iterator[bytes]:
        left_to_take = request.max or inf
        taken = 1
        while taken and left_to_take > 0 and not self._stopping.is_set():
            call = _DrainCall(request, int(min(left_to_take, DRAIN_BATCH)))
            self._router.call_trusted(call)
            answer = self._answer_of(call)
            taken = len(queue_pb2.DrainDeadLettersResponse.FromString(answer).records)
            left_to_take -= taken
            has_left = False
            try:
                if taken:
                    yield answer
                has_left = True
            finally:
                self._router.answer_left(call, has_left)

    def _answer_of(self, call: _DrainCall) -> bytes:
        try:
            return call.wait()
        except Refused:
            self._router.answer_left(call, False)
            raise
        except TimeoutError as error:
            self._router.call_closed(call)
            raise Refused(Status.UNAVAILABLE, "a shard does not answer") from error


class _CallPatience:
    """See `router.admin.Patience`."""

    def __init__(self, context: grpc.ServicerContext, stopping: threading.Event) -> None:
        self._context = context
        self._stopping = stopping

    def is_over(self) -> bool:
        return self._stopping.is_set() or not self._context.is_active()

    def pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)


class _Asking(Shards):
    """Operations for a thread that waits for their result."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def ask(self, shard: int, arguments: list[Any]) -> tuple[int, Any]:
        answer: Future[tuple[int, Any]] = Future()
        self._router.ask(shard, arguments, lambda status, data: answer.set_result((status, data)))
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            return Status.UNAVAILABLE, f"shard {shard} does not answer"


class _Changing(Slots):
    """Changes of the slot map for a thread that waits for what comes of them."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def slot_map(self) -> SlotMap:
        return self._router.slot_map()

    def move(self, slots: list[int], target: int, bytes_per_second: int, patience: Patience) -> MoveOutcome | str:
        outcome: Future[MoveOutcome | str] = Future()
        self._router.begin_move(slots, target, bytes_per_second, outcome.set_result)
        return _awaited(outcome, patience)

    def set_shards(self, shards: int, patience: Patience) -> str | None:
        outcome: Future[str | None] = Future()
        self._router.set_shards(shards, outcome.set_result)
        return _awaited(outcome, patience)


def _awaited(outcome: Future[_Outcome], patience: Patience) -> _Outcome:
    """What comes, however long it takes. Raises Refused when nobody waits for it any more."""
    while True:
        try:
            return outcome.result(LOOK_S)
        except TimeoutError:
            if patience.is_over():
                text = "the server stops, or the caller has gone: what comes of the change is not known here"
                raise Refused(Status.UNAVAILABLE, text) from None


class _DrainCall:
    """A DrainDeadLetters of a client, as the core sees it; the thread that made it waits for the answer."""

    def __init__(self, request: pb.DrainDeadLettersRequest, count: int) -> None:
        self.method = "DrainDeadLetters"
        self.authorization: str | None = None
        self.deadline = inf
        queue = request.queue if request.HasField("queue") else None
        self.request = queue_pb2.DrainDeadLettersRequest(queue=queue, max=count).SerializeToString()
        self._answer: Future[bytes] = Future()

    def reply(self, answer: bytes) -> None:
        self._answer.set_result(answer)

    def fail(self, status: Status, text: str) -> None:
        self._answer.set_exception(Refused(status, text))

    def wait(self) -> bytes:
        """Raises Refused, and TimeoutError when nothing comes."""
        return self._answer.result(ANSWER_S)
