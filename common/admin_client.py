"""The command line's end of the admin service."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from google.protobuf.message import Message

from common import admin_pb2 as pb
from common.admin_socket import SERVICE, SOCKET_FILE, AdminError, socket_target
from common.queue_pb2 import DeadLetterRecord, DrainDeadLettersResponse

_Answer = TypeVar("_Answer", bound=Message)


class AdminUnavailableError(AdminError):
    """Not now: nothing or a part was done, and the same call again does the rest."""


class AdminClient:
    """A connection to the server on a data directory. Every method raises AdminError."""

    def __init__(self, directory: Path) -> None:
        import grpc  # a tenth of a second, which commands that need no server should not take

        self._grpc = grpc
        self._descriptor = _open_where_a_server_runs(directory)
        self._channel = grpc.insecure_channel(
            socket_target(self._descriptor),
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.enable_http_proxy", 0),
                # The next client's descriptor may have the same number, and so the same address: with the pool that
                # channels share it would be connected to the server of this one.
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._channel.close()
        os.close(self._descriptor)

    # -- queues and shards ----------------------------------------------------------------------

    def queues(self) -> list[pb.Queue]:
        """All queues, by name."""
        found: list[pb.Queue] = []
        request = pb.ListQueuesRequest()
        while True:
            page = self._call("ListQueues", request, pb.ListQueuesResponse)
            found += page.queues
            if not page.cursor:
                return sorted(found, key=lambda queue: queue.name)
            request.cursor = page.cursor

    def queue(self, name: str) -> pb.Queue:
        return self._call("ShowQueue", pb.ShowQueueRequest(queue=name), pb.Queue)

    def purge(self, name: str) -> int:
        """How many jobs were removed."""
        return self._call("PurgeQueue", pb.PurgeQueueRequest(queue=name), pb.PurgeQueueResponse).removed_jobs

    def delete(self, name: str, wait: bool) -> pb.DeleteQueueResponse:
        return self._call("DeleteQueue", pb.DeleteQueueRequest(queue=name, wait=wait), pb.DeleteQueueResponse)

    def shards(self) -> list[pb.Shard]:
        return list(self._call("ListShards", pb.ListShardsRequest(), pb.ListShardsResponse).shards)

    # -- slots ------------------------------------------------------------------------------------

    def slot_map(self, with_loads: bool) -> pb.ShowSlotMapResponse:
        """Who owns which slot and, where that is asked for, what they hold; then all shards have to be up."""
        return self._call("ShowSlotMap", pb.ShowSlotMapRequest(with_loads=with_loads), pb.ShowSlotMapResponse)

    def set_shards(self, shards: int) -> pb.SetShardsResponse:
        return self._call("SetShards", pb.SetShardsRequest(shards=shards), pb.SetShardsResponse)

    def move_slots(self, slots: Sequence[int], target: int, bytes_per_second: int) -> pb.MoveSlotsResponse:
        """Move slots of one shard; 0 bytes per second is as fast as it goes. Returns when they have moved."""
        request = pb.MoveSlotsRequest(slots=slots, to=target, rate_limit_bytes_per_second=bytes_per_second)
        return self._call("MoveSlots", request, pb.MoveSlotsResponse)

    def verify_shard(self, shard: int) -> Iterator[pb.VerifyShardResponse]:
        """What is found in a shard, step by step."""
        request = pb.VerifyShardRequest(shard=shard)
        while True:
            step = self._call("VerifyShard", request, pb.VerifyShardResponse)
            yield step
            if not step.cursor:
                return
            request.cursor = step.cursor

    # -- jobs -------------------------------------------------------------------------------------

    def jobs(self, queue: str, state: pb.JobState, limit: int) -> list[pb.JobEntry]:
        """Up to `limit` jobs of a queue in one state; their payloads may be cut."""
        found: list[pb.JobEntry] = []
        request = pb.ListJobsRequest(queue=queue, state=state)
        while len(found) < limit:
            request.limit = min(limit - len(found), 1_000)
            page = self._call("ListJobs", request, pb.ListJobsResponse)
            found += page.jobs
            if not page.cursor:
                break
            request.cursor = page.cursor
        return found

    def job(self, job_id: str) -> pb.JobEntry:
        return self._call("ShowJob", pb.ShowJobRequest(job_id=job_id), pb.JobEntry)

    # -- dead letters -----------------------------------------------------------------------------

    def dead_letters(self, queue: str | None, limit: int) -> list[pb.JobEntry]:
        """Up to `limit` dead letters of a queue or of all; their payloads may be cut."""
        found: list[pb.JobEntry] = []
        request = pb.ListDeadLettersRequest(queue=queue)
        while len(found) < limit:
            request.limit = min(limit - len(found), 1_000)
            page = self._call("ListDeadLetters", request, pb.ListDeadLettersResponse)
            found += page.jobs
            if not page.cursor:
                break
            request.cursor = page.cursor
        return found

    def requeue(self, selection: pb.DeadLetterSelection) -> pb.RequeueDeadLettersResponse:
        return self._call("RequeueDeadLetters", selection, pb.RequeueDeadLettersResponse)

    def delete_dead(self, selection: pb.DeadLetterSelection) -> pb.DeleteDeadLettersResponse:
        return self._call("DeleteDeadLetters", selection, pb.DeleteDeadLettersResponse)

    def drain(self, queue: str | None, limit: int) -> Iterator[DeadLetterRecord]:
        """Take dead letters away, oldest first; `limit` 0 takes all."""
        method = self._channel.unary_stream(
            f"/{SERVICE}/DrainDeadLetters",
            request_serializer=pb.DrainDeadLettersRequest.SerializeToString,
            response_deserializer=DrainDeadLettersResponse.FromString,
        )
        try:
            for answer in method(pb.DrainDeadLettersRequest(queue=queue, max=limit)):
                yield from answer.records
        except self._grpc.RpcError as error:
            raise AdminError(error.details()) from error

    def _call(self, method: str, request: Message, kind: type[_Answer]) -> _Answer:
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=kind.FromString,
        )
        try:
            answer: _Answer = call(request)
        except self._grpc.RpcError as error:
            is_passing = error.code() is self._grpc.StatusCode.UNAVAILABLE
            raise (AdminUnavailableError if is_passing else AdminError)(error.details()) from error
        return answer


def _open_where_a_server_runs(directory: Path) -> int:
    """A descriptor of the directory, once something has answered on its socket. Raises AdminError."""
    path = directory / SOCKET_FILE
    try:
        descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(socket_target(descriptor).removeprefix("unix:"))
        except OSError:
            os.close(descriptor)
            raise
    except PermissionError as error:
        raise AdminError(f"{path} can be used by the server's user only: {error.strerror}") from error
    except OSError as error:
        raise AdminError(f"no server is running there: {path}: {error.strerror}") from error
    return descriptor
