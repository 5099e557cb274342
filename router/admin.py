"""What operators ask for, put together from commands to the shards (`common.wire.AdminCommand`).

Every method blocks, so it needs a thread of its own. Shards work in bounded steps; here they are
repeated until the answer is whole, so long work never holds up anybody else's. Where a step is about a
slot it goes to the owner of the moment: a slot may move between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Any, Protocol

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from common import admin_pb2 as pb
from common import job_ids
from common.queue_pb2 import DeadLetterCause, Job
from common.slots import SHARDS_MAX, SLOT_COUNT, SlotMap, slot_of
from common.wire import MOVED, AdminCommand, JobRow, JobState, Op, QueueRow, Totals
from router.front import Status
from router.resharding import MoveOutcome

LIMIT_DEFAULT = 100
LIMIT_MAX = 1_000
# A page ends when its entries have this many bytes, so that it fits into what gRPC clients take.
PAGE_BYTES = 1024 * 1024
# Of a payload in a list.
PREVIEW_BYTES = 256
# How often a deletion looks whether jobs are still in flight, in seconds. Each look also keeps the
# queue closing, so it must be well below the 30 s that a shard waits for the next one.
HEARTBEAT_S = 0.5

# How often a step follows a slot that has moved. Who hears that it has can know where it is.
MOVES_MAX = 100
# Slots of one move: what is held at once while it is switched.
MOVE_SLOTS_MAX = 64

# Where a list over several shards goes on: the shard; its own cursor follows.
_SHARD = Struct(">H")


class Shards(Protocol):
    """The way to the shards."""

    def ask(self, shard: int, arguments: list[Any]) -> tuple[int, Any]:
        """Status and data of an operation without its id; UNAVAILABLE when the shard is down or ends."""


class Slots(Protocol):
    """The slot map that holds now, and the ways to change it."""

    def slot_map(self) -> SlotMap: ...

    def move(self, slots: list[int], target: int, bytes_per_second: int, patience: Patience) -> MoveOutcome | str:
        """Move slots of one shard to another; why not, as a text. Raises Refused when nobody waits any more."""

    def set_shards(self, shards: int, patience: Patience) -> str | None:
        """Change the number of shards; why not, as a text. Raises Refused when nobody waits any more."""


class Refused(Exception):
    """Why a call fails, for its caller to read."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Patience(Protocol):
    """Whether somebody still waits for the answer."""

    def is_over(self) -> bool:
        """The caller has gone, or the server stops."""

    def pause(self, seconds: float) -> None:
        """Wait, shorter when it is over meanwhile."""


class Admin:
    """The calls of operators. All methods raise Refused."""

    def __init__(self, shards: Shards, slots: Slots) -> None:
        self._shards = shards
        self._slots = slots

    # -- queues and shards ----------------------------------------------------------------------

    def list_queues(self, request: pb.ListQueuesRequest) -> pb.ListQueuesResponse:
        """By shard and slot; the queues of a shard in the order in which they were made, within a slot."""
        shard, cursor = self._place(request.cursor)
        rows, following = self._ask(shard, AdminCommand.QUEUES, cursor)
        queues = [_queue(QueueRow(*row), shard) for row in rows]
        return pb.ListQueuesResponse(queues=queues, cursor=self._next_place(shard, following))

    def show_queue(self, request: pb.ShowQueueRequest) -> pb.Queue:
        shard, row = self._of_slot(slot_of(request.queue), AdminCommand.QUEUE, request.queue)
        return _queue(QueueRow(*row), shard)

    def list_shards(self, request: pb.ListShardsRequest) -> pb.ListShardsResponse:
        slot_map = self._slots.slot_map()
        return pb.ListShardsResponse(shards=[self._shard(shard, slot_map) for shard in range(slot_map.shards)])

    def _shard(self, shard: int, slot_map: SlotMap) -> pb.Shard:
        found = pb.Shard(index=shard, slots=len(slot_map.slots_of(shard)))
        try:
            parts = [Totals(*row) for row in self._steps(shard, AdminCommand.TOTALS)]
        except Refused as refused:
            if refused.status == Status.UNAVAILABLE:
                return found
            raise
        whole = Totals(*(sum(column) for column in zip(*parts, strict=True)))
        found.MergeFrom(pb.Shard(up=True, **whole._asdict()))
        return found

    def purge_queue(self, request: pb.PurgeQueueRequest, patience: Patience) -> pb.PurgeQueueResponse:
        removed = 0
        cursor: bytes | None = b""
        while cursor is not None:
            _go_on(patience)
            jobs, cursor = self._of_queue(request.queue, AdminCommand.PURGE, cursor)
            removed += jobs
        return pb.PurgeQueueResponse(removed_jobs=removed)

    def delete_queue(self, request: pb.DeleteQueueRequest, patience: Patience) -> pb.DeleteQueueResponse:
        """A caller that goes away ends it; the queue takes jobs again 30 s later."""
        name = request.queue
        number = self._close(name, request.wait, patience)
        answer = pb.DeleteQueueResponse()
        cursor: bytes | None = b""
        while cursor is not None:
            _go_on(patience)
            jobs, dead, keys, cursor = self._of_queue(name, AdminCommand.REMOVE, number, cursor)
            answer.removed_jobs += jobs
            answer.removed_dead_letters += dead
            answer.removed_keys += keys
        return answer

    def _close(self, name: str, may_wait: bool, patience: Patience) -> int:
        """Close a queue, and wait until no job of it is in flight; returns its number."""
        number: int = 0
        leased: int
        while True:
            number, leased = self._of_queue(name, AdminCommand.CLOSE, number, may_wait)
            if not leased:
                return number
            patience.pause(HEARTBEAT_S)
            _go_on(patience)

    # -- jobs -------------------------------------------------------------------------------------

    def list_jobs(self, request: pb.ListJobsRequest) -> pb.ListJobsResponse:
        if request.state == pb.JOB_STATE_UNSPECIFIED:
            raise Refused(Status.INVALID_ARGUMENT, "state is missing: READY, SCHEDULED, LEASED or DEAD")
        jobs: list[pb.JobEntry] = []
        limit = _limit(request.limit)
        cursor: bytes | None = request.cursor
        while cursor is not None and not _is_page(jobs, limit):
            arguments = (request.state, cursor, limit - len(jobs))
            rows, cursor = self._of_queue(request.queue, AdminCommand.JOBS, *arguments)
            jobs += _previews(rows)
        return pb.ListJobsResponse(jobs=jobs, cursor=cursor or b"")

    def show_job(self, request: pb.ShowJobRequest) -> pb.JobEntry:
        return _entry(self._find(request.job_id))

    def _find(self, job_id: str) -> JobRow:
        parsed = job_ids.parse(job_id)
        if parsed is None:
            raise Refused(Status.INVALID_ARGUMENT, f"{job_id!r} is no job id: a UUID with hyphens is")
        slot = job_ids.slot(parsed)
        row = None
        cursor: bytes | None = b""
        while cursor is not None:
            _, (row, cursor) = self._of_slot(slot, AdminCommand.FIND, parsed, cursor)
        if row is None:
            # A job that became ready meanwhile is now where it had been looked for first.
            _, (row, _) = self._of_slot(slot, AdminCommand.FIND, parsed, b"")
        if row is not None:
            return JobRow(*row)
        raise Refused(Status.NOT_FOUND, f"there is no job {job_id}: it was finished or deleted, or never existed")

    # -- dead letters -----------------------------------------------------------------------------

    def list_dead_letters(self, request: pb.ListDeadLettersRequest) -> pb.ListDeadLettersResponse:
        limit = _limit(request.limit)
        if request.HasField("queue"):
            one = self.list_jobs(
                pb.ListJobsRequest(queue=request.queue, state=pb.JOB_STATE_DEAD, cursor=request.cursor, limit=limit)
            )
            return pb.ListDeadLettersResponse(jobs=one.jobs, cursor=one.cursor)
        jobs: list[pb.JobEntry] = []
        place = request.cursor
        while not _is_page(jobs, limit):
            shard, cursor = self._place(place)
            rows, following = self._ask(shard, AdminCommand.DEAD, cursor, limit - len(jobs))
            jobs += _previews(rows)
            place = self._next_place(shard, following)
            if not place:
                break
        return pb.ListDeadLettersResponse(jobs=jobs, cursor=place)

    def requeue_dead_letters(self, request: pb.DeadLetterSelection) -> pb.RequeueDeadLettersResponse:
        """Shards do not look into jobs, so priority and max_attempts are read here and go with the command."""
        requeued = 0
        missing: list[str] = []
        for queue, letters in self._selected(request, missing):
            given = [[letter.at_ms, letter.job_id, *_terms_of(letter)] for letter in letters]
            done = self._of_queue(queue, AdminCommand.REQUEUE, given)
            requeued += len(done)
            if request.job_ids:
                missing += [job_ids.text(letter.job_id) for letter in letters if letter.job_id not in done]
        return pb.RequeueDeadLettersResponse(requeued=requeued, missing_job_ids=missing)

    def delete_dead_letters(self, request: pb.DeadLetterSelection) -> pb.DeleteDeadLettersResponse:
        deleted = 0
        missing: list[str] = []
        for queue, letters in self._selected(request, missing):
            given = [[letter.at_ms, letter.job_id] for letter in letters]
            done = self._of_queue(queue, AdminCommand.DELETE_DEAD, given)
            deleted += done
            if request.job_ids and not done:
                missing += [job_ids.text(letter.job_id) for letter in letters]
        return pb.DeleteDeadLettersResponse(deleted=deleted, missing_job_ids=missing)

    def _selected(self, request: pb.DeadLetterSelection, missing: list[str]) -> Iterator[tuple[str, list[JobRow]]]:
        """The dead letters that are meant, some of one queue at a time; ids that are none go to `missing`."""
        if request.HasField("queue") == bool(request.job_ids):
            raise Refused(Status.INVALID_ARGUMENT, "give a queue, or job ids, and not both")
        if request.job_ids:
            yield from self._by_id(request.job_ids, missing)
        else:
            yield from self._all_of(request.queue)

    def _by_id(self, wanted: Iterable[str], missing: list[str]) -> Iterator[tuple[str, list[JobRow]]]:
        for job_id in wanted:
            try:
                letter = self._find(job_id)
            except Refused as refused:
                if refused.status != Status.NOT_FOUND:
                    raise
                missing.append(job_id)
                continue
            if letter.state == JobState.DEAD:
                yield letter.queue, [letter]
            else:
                missing.append(job_id)

    def _all_of(self, queue: str) -> Iterator[tuple[str, list[JobRow]]]:
        """As many as there are at the start: one that dies again meanwhile is not taken up again."""
        left = QueueRow(*self._of_queue(queue, AdminCommand.QUEUE)).dead
        cursor: bytes | None = b""
        while cursor is not None and left > 0:
            try:
                arguments = (JobState.DEAD, cursor, min(left, LIMIT_MAX))
                rows, cursor = self._of_queue(queue, AdminCommand.JOBS, *arguments)
            except Refused as refused:
                if refused.status == Status.NOT_FOUND:  # the queue was deleted meanwhile
                    return
                raise
            left -= len(rows)
            yield queue, [JobRow(*row) for row in rows]

    # -- slots ------------------------------------------------------------------------------------

    def show_slot_map(self, request: pb.ShowSlotMapRequest) -> pb.ShowSlotMapResponse:
        """With loads, one that moves meanwhile may be missed, and is never given twice."""
        slot_map = self._slots.slot_map()
        loads: dict[int, pb.SlotLoad] = {}
        for shard in range(slot_map.shards) if request.with_loads else ():
            for rows in self._steps(shard, AdminCommand.SLOTS):
                for slot, jobs, size in rows:
                    loads[slot] = pb.SlotLoad(slot=slot, jobs=jobs, bytes=size)
        return pb.ShowSlotMapResponse(
            epoch=slot_map.epoch,
            shards=slot_map.shards,
            owners=slot_map.owners,
            loads=[loads[slot] for slot in sorted(loads)],
        )

    def set_shards(self, request: pb.SetShardsRequest, patience: Patience) -> pb.SetShardsResponse:
        if not 1 <= request.shards <= SHARDS_MAX:
            raise Refused(Status.INVALID_ARGUMENT, f"there can be 1 to {SHARDS_MAX} shards, not {request.shards}")
        slot_map = self._slots.slot_map()
        if request.shards == slot_map.shards:
            return pb.SetShardsResponse(epoch=slot_map.epoch)
        if max(slot_map.owners) >= request.shards:
            text = f"shard {max(slot_map.owners)} owns slots: move them to shards below {request.shards} first"
            raise Refused(Status.FAILED_PRECONDITION, text)
        why_not = self._slots.set_shards(request.shards, patience)
        if why_not is not None:
            raise Refused(Status.UNAVAILABLE, why_not)
        return pb.SetShardsResponse(epoch=self._slots.slot_map().epoch)

    def move_slots(self, request: pb.MoveSlotsRequest, patience: Patience) -> pb.MoveSlotsResponse:
        """A caller that goes away does not stop it."""
        self._check_move(request)
        outcome = self._slots.move(list(request.slots), request.to, request.rate_limit_bytes_per_second, patience)
        if isinstance(outcome, str):
            raise Refused(Status.UNAVAILABLE, outcome)
        return pb.MoveSlotsResponse(
            epoch=outcome.epoch, records=outcome.records, bytes=outcome.bytes, hold_ms=outcome.hold_ms
        )

    def _check_move(self, request: pb.MoveSlotsRequest) -> None:
        slot_map = self._slots.slot_map()
        slots = set(request.slots)
        if not 1 <= len(request.slots) <= MOVE_SLOTS_MAX or len(slots) < len(request.slots):
            raise Refused(Status.INVALID_ARGUMENT, f"give 1 to {MOVE_SLOTS_MAX} slots, each once")
        if max(slots) >= SLOT_COUNT:
            raise Refused(Status.INVALID_ARGUMENT, f"slots are 0 to {SLOT_COUNT - 1}, not {max(slots)}")
        if request.to >= slot_map.shards:
            raise Refused(Status.INVALID_ARGUMENT, f"shards are 0 to {slot_map.shards - 1}, not {request.to}")
        owners = {slot_map.owners[slot] for slot in slots}
        if len(owners) != 1:
            raise Refused(Status.FAILED_PRECONDITION, "the slots belong to several shards: move those of one at a time")
        if request.to in owners:
            raise Refused(Status.FAILED_PRECONDITION, f"the slots are on shard {request.to} already")

    def verify_shard(self, request: pb.VerifyShardRequest) -> pb.VerifyShardResponse:
        shards = self._slots.slot_map().shards
        if request.shard >= shards:
            raise Refused(Status.INVALID_ARGUMENT, f"shards are 0 to {shards - 1}, not {request.shard}")
        (findings, records), cursor = self._ask(request.shard, AdminCommand.VERIFY, request.cursor)
        return pb.VerifyShardResponse(findings=findings, records=records, cursor=cursor or b"")

    # -- shards -----------------------------------------------------------------------------------

    def _of_queue(self, queue: str, command: AdminCommand, *arguments: object) -> Any:
        """A command about a queue, to the owner of its slot."""
        return self._of_slot(slot_of(queue), command, queue, *arguments)[1]

    def _of_slot(self, slot: int, command: AdminCommand, *arguments: object) -> tuple[int, Any]:
        """The owner of a slot and what it answers. It may be another one by the time when it is asked."""
        for _ in range(MOVES_MAX):
            shard = self._slots.slot_map().owners[slot]
            status, data = self._shards.ask(shard, [Op.ADMIN, command, *arguments])
            if status == Status.OK:
                return shard, data
            if status != MOVED:
                raise Refused(status, data)
        raise Refused(Status.UNAVAILABLE, f"slot {slot} moves faster than it can be followed")

    def _ask(self, shard: int, command: AdminCommand, *arguments: object) -> Any:
        status, data = self._shards.ask(shard, [Op.ADMIN, command, *arguments])
        if status != Status.OK:
            raise Refused(status, data)
        return data

    def _steps(self, shard: int, command: AdminCommand, *arguments: object) -> list[Any]:
        """The results of a command that takes a cursor, until there is no more to do."""
        results = []
        cursor: bytes | None = b""
        while cursor is not None:
            result, cursor = self._ask(shard, command, *arguments, cursor)
            results.append(result)
        return results

    def _place(self, cursor: bytes) -> tuple[int, bytes]:
        """Shard and its cursor in a list over all shards."""
        if not cursor:
            return 0, b""
        shard_count = self._slots.slot_map().shards
        shard = _SHARD.unpack_from(cursor)[0] if len(cursor) >= _SHARD.size else shard_count
        if shard >= shard_count:
            raise Refused(Status.INVALID_ARGUMENT, "the cursor is not one that this server gave")
        return shard, cursor[_SHARD.size :]

    def _next_place(self, shard: int, following: bytes | None) -> bytes:
        if following is not None:
            return _SHARD.pack(shard) + following
        return _SHARD.pack(shard + 1) if shard + 1 < self._slots.slot_map().shards else b""


def _go_on(patience: Patience) -> None:
    if patience.is_over():
        raise Refused(Status.UNAVAILABLE, "the server stops, or the caller has gone: run it again to finish")


def _limit(asked: int) -> int:
    return min(asked or LIMIT_DEFAULT, LIMIT_MAX)


def _is_page(jobs: list[pb.JobEntry], limit: int) -> bool:
    return len(jobs) >= limit or sum(job.ByteSize() for job in jobs) >= PAGE_BYTES


def _timestamp(instant_ms: int) -> Timestamp:
    return Timestamp(seconds=instant_ms // 1000, nanos=instant_ms % 1000 * 1_000_000)


def _queue(row: QueueRow, shard: int) -> pb.Queue:
    return pb.Queue(
        name=row.name,
        shard=shard,
        slot=row.slot,
        ready=row.ready,
        scheduled=row.scheduled,
        leased=row.leased,
        dead=row.dead,
        keys=row.keys,
        waiting=row.waiting,
        oldest_enqueued_at=_timestamp(row.oldest_ms) if row.oldest_ms else None,
        closing_until=_timestamp(row.closing_until_ms) if row.closing_until_ms else None,
    )


def _terms_of(row: JobRow) -> tuple[int, int]:
    """Priority and max_attempts, which were checked when the job was enqueued."""
    job = _stored_job(row)
    return job.priority, job.max_attempts


def _stored_job(row: JobRow) -> Job:
    try:
        return Job.FromString(row.body)
    except DecodeError as error:
        text = f"what is stored of job {job_ids.text(row.job_id)} is no job: {error}"
        raise Refused(Status.INTERNAL, text) from error


def _previews(rows: Iterable[list[Any]]) -> list[pb.JobEntry]:
    entries = [_entry(JobRow(*row)) for row in rows]
    for entry in entries:
        if entry.payload_bytes > PREVIEW_BYTES:
            entry.job.payload.data = entry.job.payload.data[:PREVIEW_BYTES]
    return entries


def _entry(row: JobRow) -> pb.JobEntry:
    job = _stored_job(row)
    job.id = job_ids.text(row.job_id)
    job.enqueued_at.CopyFrom(_timestamp(job_ids.accepted_at_ms(row.job_id)))
    job.attempt = row.attempt
    if row.state == JobState.LEASED:
        job.lease_expires_at.CopyFrom(_timestamp(row.at_ms))
    return pb.JobEntry(
        job=job,
        state=pb.JobState.Name(row.state),
        payload_bytes=len(job.payload.data),
        due_at=_timestamp(row.at_ms) if row.state == JobState.SCHEDULED else None,
        failed_at=_timestamp(row.at_ms) if row.state == JobState.DEAD else None,
        cause=DeadLetterCause.Name(row.cause),
        last_reason=row.reason,
    )
