import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from common import queue_pb2 as _queue_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_READY: _ClassVar[JobState]
    JOB_STATE_SCHEDULED: _ClassVar[JobState]
    JOB_STATE_LEASED: _ClassVar[JobState]
    JOB_STATE_DEAD: _ClassVar[JobState]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_READY: JobState
JOB_STATE_SCHEDULED: JobState
JOB_STATE_LEASED: JobState
JOB_STATE_DEAD: JobState

class Queue(_message.Message):
    __slots__ = ("name", "shard", "slot", "ready", "scheduled", "leased", "dead", "keys", "waiting", "oldest_enqueued_at", "closing_until")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OLDEST_ENQUEUED_AT_FIELD_NUMBER: _ClassVar[int]
    CLOSING_UNTIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    shard: int
    slot: int
    ready: int
    scheduled: int
    leased: int
    dead: int
    keys: int
    waiting: int
    oldest_enqueued_at: _timestamp_pb2.Timestamp
    closing_until: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., shard: _Optional[int] = ..., slot: _Optional[int] = ..., ready: _Optional[int] = ..., scheduled: _Optional[int] = ..., leased: _Optional[int] = ..., dead: _Optional[int] = ..., keys: _Optional[int] = ..., waiting: _Optional[int] = ..., oldest_enqueued_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping[str, object]]] = ..., closing_until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping[str, object]]] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("index", "up", "slots", "queues", "ready", "scheduled", "leased", "dead", "keys", "waiting")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    index: int
    up: bool
    slots: int
    queues: int
    ready: int
    scheduled: int
    leased: int
    dead: int
    keys: int
    waiting: int
    def __init__(self, index: _Optional[int] = ..., up: _Optional[bool] = ..., slots: _Optional[int] = ..., queues: _Optional[int] = ..., ready: _Optional[int] = ..., scheduled: _Optional[int] = ..., leased: _Optional[int] = ..., dead: _Optional[int] = ..., keys: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class JobEntry(_message.Message):
    __slots__ = ("job", "state", "payload_bytes", "due_at", "failed_at", "cause", "last_reason")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_FIELD_NUMBER: _ClassVar[int]
    FAILED_AT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    LAST_REASON_FIELD_NUMBER: _ClassVar[int]
    job: _queue_pb2.Job
    state: JobState
    payload_bytes: int
    due_at: _timestamp_pb2.Timestamp
    failed_at: _timestamp_pb2.Timestamp
    cause: _queue_pb2.DeadLetterCause
    last_reason: str
    def __init__(self, job: _Optional[_Union[_queue_pb2.Job, _Mapping[str, object]]] = ..., state: _Optional[_Union[JobState, str]] = ..., payload_bytes: _Optional[int] = ..., due_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping[str, object]]] = ..., failed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping[str, object]]] = ..., cause: _Optional[_Union[_queue_pb2.DeadLetterCause, str]] = ..., last_reason: _Optional[str] = ...) -> None: ...

class ListQueuesRequest(_message.Message):
    __slots__ = ("cursor",)
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    cursor: bytes
    def __init__(self, cursor: _Optional[bytes] = ...) -> None: ...

class ListQueuesResponse(_message.Message):
    __slots__ = ("queues", "cursor")
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    queues: _containers.RepeatedCompositeFieldContainer[Queue]
    cursor: bytes
    def __init__(self, queues: _Optional[_Iterable[_Union[Queue, _Mapping[str, object]]]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ShowQueueRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class PurgeQueueRequest(_message.Message):
    __slots__ = ("queue",)
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    def __init__(self, queue: _Optional[str] = ...) -> None: ...

class PurgeQueueResponse(_message.Message):
    __slots__ = ("removed_jobs",)
    REMOVED_JOBS_FIELD_NUMBER: _ClassVar[int]
    removed_jobs: int
    def __init__(self, removed_jobs: _Optional[int] = ...) -> None: ...

class DeleteQueueRequest(_message.Message):
    __slots__ = ("queue", "wait")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    wait: bool
    def __init__(self, queue: _Optional[str] = ..., wait: _Optional[bool] = ...) -> None: ...

class DeleteQueueResponse(_message.Message):
    __slots__ = ("removed_jobs", "removed_dead_letters", "removed_keys")
    REMOVED_JOBS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    removed_jobs: int
    removed_dead_letters: int
    removed_keys: int
    def __init__(self, removed_jobs: _Optional[int] = ..., removed_dead_letters: _Optional[int] = ..., removed_keys: _Optional[int] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("queue", "state", "cursor", "limit")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    state: JobState
    cursor: bytes
    limit: int
    def __init__(self, queue: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., cursor: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs", "cursor")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobEntry]
    cursor: bytes
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobEntry, _Mapping[str, object]]]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ShowJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("queue", "cursor", "limit")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    cursor: bytes
    limit: int
    def __init__(self, queue: _Optional[str] = ..., cursor: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("jobs", "cursor")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobEntry]
    cursor: bytes
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobEntry, _Mapping[str, object]]]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class DeadLetterSelection(_message.Message):
    __slots__ = ("queue", "job_ids")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    job_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, queue: _Optional[str] = ..., job_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RequeueDeadLettersResponse(_message.Message):
    __slots__ = ("requeued", "missing_job_ids")
    REQUEUED_FIELD_NUMBER: _ClassVar[int]
    MISSING_JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    requeued: int
    missing_job_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requeued: _Optional[int] = ..., missing_job_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteDeadLettersResponse(_message.Message):
    __slots__ = ("deleted", "missing_job_ids")
    DELETED_FIELD_NUMBER: _ClassVar[int]
    MISSING_JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    missing_job_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, deleted: _Optional[int] = ..., missing_job_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainDeadLettersRequest(_message.Message):
    __slots__ = ("queue", "max")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    queue: str
    max: int
    def __init__(self, queue: _Optional[str] = ..., max: _Optional[int] = ...) -> None: ...

class ShowSlotMapRequest(_message.Message):
    __slots__ = ("with_loads",)
    WITH_LOADS_FIELD_NUMBER: _ClassVar[int]
    with_loads: bool
    def __init__(self, with_loads: _Optional[bool] = ...) -> None: ...

class SlotLoad(_message.Message):
    __slots__ = ("slot", "jobs", "bytes")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    jobs: int
    bytes: int
    def __init__(self, slot: _Optional[int] = ..., jobs: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ShowSlotMapResponse(_message.Message):
    __slots__ = ("epoch", "shards", "owners", "loads")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    shards: int
    owners: _containers.RepeatedScalarFieldContainer[int]
    loads: _containers.RepeatedCompositeFieldContainer[SlotLoad]
    def __init__(self, epoch: _Optional[int] = ..., shards: _Optional[int] = ..., owners: _Optional[_Iterable[int]] = ..., loads: _Optional[_Iterable[_Union[SlotLoad, _Mapping[str, object]]]] = ...) -> None: ...

class SetShardsRequest(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: int
    def __init__(self, shards: _Optional[int] = ...) -> None: ...

class SetShardsResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class MoveSlotsRequest(_message.Message):
    __slots__ = ("slots", "to", "rate_limit_bytes_per_second")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    RATE_LIMIT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    to: int
    rate_limit_bytes_per_second: int
    def __init__(self, slots: _Optional[_Iterable[int]] = ..., to: _Optional[int] = ..., rate_limit_bytes_per_second: _Optional[int] = ...) -> None: ...

class MoveSlotsResponse(_message.Message):
    __slots__ = ("epoch", "records", "bytes", "hold_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    records: int
    bytes: int
    hold_ms: int
    def __init__(self, epoch: _Optional[int] = ..., records: _Optional[int] = ..., bytes: _Optional[int] = ..., hold_ms: _Optional[int] = ...) -> None: ...

class VerifyShardRequest(_message.Message):
    __slots__ = ("shard", "cursor")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    shard: int
    cursor: bytes
    def __init__(self, shard: _Optional[int] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class VerifyShardResponse(_message.Message):
    __slots__ = ("findings", "records", "cursor")
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    findings: _containers.RepeatedScalarFieldContainer[str]
    records: int
    cursor: bytes
    def __init__(self, findings: _Optional[_Iterable[str]] = ..., records: _Optional[int] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ListShardsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListShardsResponse(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    def __init__(self, shards: _Optional[_Iterable[_Union[Shard, _Mapping[str, object]]]] = ...) -> None: ...
