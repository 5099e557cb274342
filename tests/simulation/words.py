"""Envelopes in words, for the trace of a run."""

from __future__ import annotations

from typing import Any

from common import job_ids, wire
from common.wire import MOVED, AdminCommand, Op, Question
from router.front import Status

# What is shown of one envelope, in operations or results.
ITEMS_SHOWN_MAX = 6


def job_in_words(job_id: bytes) -> str:
    """Slot and sequence: all that tells jobs of one run apart."""
    return f"job {job_ids.slot(job_id)}/{job_ids.sequence(job_id)}"


def envelope_in_words(message: bytes, results: bool) -> str:
    """Operations of a router, or results of a shard."""
    envelope = wire.unpack(message)
    words = [result_in_words(item) if results else operation_in_words(item) for item in envelope.items]
    if len(words) > ITEMS_SHOWN_MAX:
        words[ITEMS_SHOWN_MAX:] = [f"and {len(words) - ITEMS_SHOWN_MAX} more"]
    return f"#{envelope.number} " + ("; ".join(words) or "taken")


def operation_in_words(operation: list[Any]) -> str:
    op_id, kind, *arguments = operation
    name = Op(kind).name
    match kind:
        case Op.ENQUEUE | Op.ENQUEUE_ATOMIC:
            text = _jobs_in_words(arguments[1])
        case Op.PREPARE:
            text = f"tx {arguments[0]} home {arguments[1]} {_jobs_in_words(arguments[3])}"
        case Op.DECIDE:
            text = f"tx {arguments[0]} others {arguments[1]}"
        case Op.COMMIT | Op.ABORT | Op.FORGET | Op.RESOLVE:
            text = f"tx {' '.join(str(argument) for argument in arguments)}"
        case Op.RESERVE:
            queues, max_jobs, lease_ms, may_wait, _, settles = arguments
            text = f"{max_jobs} of {', '.join(queues)} for {lease_ms} ms"
            text += (", may wait" if may_wait else "") + (f", settles {settles}" if settles else "")
        case Op.ACK | Op.NACK | Op.EXTEND:
            text = f"{job_in_words(arguments[0])} attempt {' '.join(str(argument) for argument in arguments[1:])}"
        case Op.ADMIN:
            text = f"{AdminCommand(arguments[0]).name} {' '.join(_value(argument) for argument in arguments[1:])}"
        case _:
            text = " ".join(_value(argument) for argument in arguments)
    return f"{name} {text}" + (f" ({op_id})" if op_id else "")


def _jobs_in_words(jobs: list[Any]) -> str:
    each = [f"{job[0]}" + (f" key {job[4]}" if job[4] else "") + (" later" if job[3] else "") for job in jobs]
    return f"({len(jobs)} jobs: {', '.join(each)})"


def result_in_words(result: list[Any]) -> str:
    op_id, status, data = result
    if op_id == 0:
        return f"asks {Question(data[0]).name} tx {' '.join(str(part) for part in data[1:])}"
    if status != Status.OK:
        return f"{op_id} {_status(status)}"
    return f"{op_id} OK {_value(data)}".rstrip()


def _value(data: Any) -> str:
    if data is None:
        return ""
    if isinstance(data, bytes):
        return job_in_words(data) if len(data) == job_ids.JOB_ID_BYTES else (data.hex()[:16] or "-")
    if isinstance(data, list | tuple):
        shown = [_value(each) for each in data[:4]]
        return "[" + ", ".join(shown + (["…"] if len(data) > 4 else [])) + "]"
    return str(data)


def _status(status: int) -> str:
    return "MOVED" if status == MOVED else Status(status).name
