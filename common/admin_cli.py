"""The commands that look into a running server: `seppd queues`, `queue`, `jobs`, `job`, `dead`, `shards`.

They find the server by its data directory, like `serve` does, and speak to it over the admin socket
there. What goes wrong is raised, for `cli` to say in one line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.table import Table

from common import admin_pb2 as pb
from common.admin_client import AdminClient
from common.admin_socket import AdminError
from common.config import load
from common.queue_pb2 import DeadLetterCause, DeadLetterRecord, Job, PrimitiveValue

# Wide enough that no value is broken when the table goes into a file or a pipe.
_UNLIMITED_COLUMNS = 100_000
# Of a payload in a table, in characters.
_SHOWN_CHARACTERS = 60
# Of one value where a single thing is shown, in characters; --json shows all.
_SHOWN_WHOLE = 2_000
_LIMIT_DEFAULT = 100

Plain = dict[str, object]

app = typer.Typer()
queue_app = typer.Typer(help="Look at one queue, empty it, delete it.")
job_app = typer.Typer(help="Look at one job.")
dead_app = typer.Typer(help="Dead letters: list, requeue, delete, drain.")
app.add_typer(queue_app, name="queue")
app.add_typer(job_app, name="job")
app.add_typer(dead_app, name="dead")

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="The server's configuration file; else SEPP_CONFIG or ./sepp.toml.")
]
DbPathOption = Annotated[
    str | None, typer.Option("--db-path", help="server.db_path: the data directory of the running server.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The queue.")]
AnyNameArgument = Annotated[str | None, typer.Argument(metavar="[NAME]", help="The queue; all when left out.")]
IdsOption = Annotated[list[str] | None, typer.Option("--id", help="A job id; can be given several times.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="How many to show at most.")]


class State(StrEnum):
    """States of a job, as the command line calls them."""

    READY = "ready"
    SCHEDULED = "scheduled"
    LEASED = "leased"
    DEAD = "dead"


# In the order in which they are listed: the next to be finished first.
_STATES = {
    State.LEASED: pb.JOB_STATE_LEASED,
    State.READY: pb.JOB_STATE_READY,
    State.SCHEDULED: pb.JOB_STATE_SCHEDULED,
    State.DEAD: pb.JOB_STATE_DEAD,
}


# -- queues and shards ------------------------------------------------------------------------------


@app.command()
def queues(config: ConfigOption = None, db_path: DbPathOption = None, as_json: JsonOption = False) -> None:
    """List the queues that hold anything."""
    with _client(config, db_path) as client:
        found = client.queues()
    if as_json:
        print_json([_plain_queue(queue) for queue in found])
        return
    rows = [
        (one.name, one.shard, one.ready, one.scheduled, one.leased, one.dead, _age(one.oldest_enqueued_at))
        for one in found
    ]
    print_table(("queue", "shard", "ready", "scheduled", "in flight", "dead", "oldest"), rows)


@app.command()
def shards(config: ConfigOption = None, db_path: DbPathOption = None, as_json: JsonOption = False) -> None:
    """List the shards and what they hold."""
    with _client(config, db_path) as client:
        found = client.shards()
    if as_json:
        print_json([_plain_shard(shard) for shard in found])
        return
    rows = [
        (one.index, one.slots, one.queues, one.ready, one.scheduled, one.leased, one.dead, one.waiting)
        if one.up
        else (one.index, one.slots, "down", *[""] * 5)
        for one in found
    ]
    print_table(("shard", "slots", "queues", "ready", "scheduled", "in flight", "dead", "waiting polls"), rows)


@queue_app.command("show")
def queue_show(
    name: NameArgument, config: ConfigOption = None, db_path: DbPathOption = None, as_json: JsonOption = False
) -> None:
    """Show the counters of a queue."""
    with _client(config, db_path) as client:
        plain = _plain_queue(client.queue(name))
    _print_one(plain, as_json)


@queue_app.command("purge")
def queue_purge(
    name: NameArgument, yes: YesOption = False, config: ConfigOption = None, db_path: DbPathOption = None
) -> None:
    """Remove the ready and scheduled jobs of a queue. Jobs in flight, dead letters and keys stay."""
    with _client(config, db_path) as client:
        client.queue(name)
        _ask(f"Remove all ready and scheduled jobs of queue {name!r}?", yes)
        print(f"{counted(client.purge(name), 'job')} removed")


@queue_app.command("delete")
def queue_delete(
    name: NameArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no job of the queue is in flight.")] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    db_path: DbPathOption = None,
) -> None:
    """Delete a queue with all that is in it. While that lasts it takes no jobs and hands none out."""
    with _client(config, db_path) as client:
        client.queue(name)
        _ask(f"Delete queue {name!r} with its jobs, dead letters and idempotency keys?", yes)
        removed = client.delete(name, wait)
    jobs, dead = counted(removed.removed_jobs, "job"), counted(removed.removed_dead_letters, "dead letter")
    print(f"queue {name} deleted, with {jobs}, {dead}, {counted(removed.removed_keys, 'idempotency key')}")


# -- jobs -------------------------------------------------------------------------------------------


@app.command()
def jobs(
    name: NameArgument,
    state: Annotated[State | None, typer.Option("--state", help="Only jobs in this state.")] = None,
    limit: LimitOption = _LIMIT_DEFAULT,
    config: ConfigOption = None,
    db_path: DbPathOption = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs of a queue: those in flight, then the others in the order in which they are served."""
    found: list[pb.JobEntry] = []
    with _client(config, db_path) as client:
        for one in _STATES if state is None else (state,):
            found += client.jobs(name, _STATES[one], limit - len(found))
    _print_jobs(found, as_json)


@job_app.command("show")
def job_show(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="The job's id.")],
    config: ConfigOption = None,
    db_path: DbPathOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a job in any state, without taking it."""
    with _client(config, db_path) as client:
        plain = _plain_job(client.job(job_id))
    _print_one(plain, as_json)


# -- dead letters -----------------------------------------------------------------------------------


@dead_app.command("list")
def dead_list(
    name: AnyNameArgument = None,
    limit: LimitOption = _LIMIT_DEFAULT,
    config: ConfigOption = None,
    db_path: DbPathOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, the oldest of a queue first."""
    with _client(config, db_path) as client:
        found = client.dead_letters(name, limit)
    _print_jobs(found, as_json)


@dead_app.command("requeue")
def dead_requeue(
    name: AnyNameArgument = None,
    ids: IdsOption = None,
    config: ConfigOption = None,
    db_path: DbPathOption = None,
) -> None:
    """Make dead letters jobs again: all of a queue, or those with the ids. They keep id and place."""
    selection = _selection(name, ids)
    with _client(config, db_path) as client:
        done = client.requeue(selection)
    print(f"{counted(done.requeued, 'dead letter')} requeued")
    _report_missing(done.missing_job_ids)


@dead_app.command("delete")
def dead_delete(
    name: AnyNameArgument = None,
    ids: IdsOption = None,
    yes: YesOption = False,
    config: ConfigOption = None,
    db_path: DbPathOption = None,
) -> None:
    """Delete dead letters: all of a queue, or those with the ids."""
    selection = _selection(name, ids)
    with _client(config, db_path) as client:
        if name is not None:
            client.queue(name)
            _ask(f"Delete all dead letters of queue {name!r}?", yes)
        done = client.delete_dead(selection)
    print(f"{counted(done.deleted, 'dead letter')} deleted")
    _report_missing(done.missing_job_ids)


@dead_app.command("drain")
def dead_drain(
    name: AnyNameArgument = None,
    limit: Annotated[int | None, typer.Option("--max", min=1, help="How many at most; else all.")] = None,
    config: ConfigOption = None,
    db_path: DbPathOption = None,
) -> None:
    """Print dead letters, oldest first, each whole and as one line of JSON, and delete what is printed."""
    with _client(config, db_path) as client:
        for record in client.drain(name, limit or 0):
            print(json.dumps(_plain_record(record), ensure_ascii=False), flush=True)


def _selection(name: str | None, ids: list[str] | None) -> pb.DeadLetterSelection:
    if (name is None) == (not ids):
        raise AdminError("give a queue, for all of its dead letters, or --id for single ones")
    return pb.DeadLetterSelection(queue=name, job_ids=ids or ())


def _report_missing(job_ids: Sequence[str]) -> None:
    if job_ids:
        raise AdminError(f"not dead letters, or being drained by somebody else: {', '.join(job_ids)}")


# -- the server -------------------------------------------------------------------------------------


def _client(config: Path | None, db_path: str | None) -> AdminClient:
    """Raises AdminError when no server is running there, ConfigError when the configuration does not say where."""
    environ = {**os.environ}
    if db_path is not None:
        environ["SEPP_SERVER__DB_PATH"] = db_path
    return AdminClient(Path(load(config, environ).config.server.db_path))


def _ask(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise AdminError("this cannot be undone, and there is nobody to ask: say --yes")
    typer.confirm(question, abort=True)


# -- what is printed ----------------------------------------------------------------------------------


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def printable(text: str) -> str:
    """On one line, and without what could steer a terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in " ".join(text.split()))


def print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=2))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    table = Table(*titles, box=None, pad_edge=False, show_header=any(titles))
    for row in rows:
        table.add_row(*(str(value) for value in row))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _UNLIMITED_COLUMNS
    console.print(table)


def _print_one(plain: Plain, as_json: bool) -> None:
    """What is known of one thing, a line each; what is not set is left out."""
    if as_json:
        print_json(plain)
        return
    rows = []
    for key, value in plain.items():
        if value is not None and value != {}:
            shown = printable(json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value))
            rows.append((key.replace("_", " "), shown if len(shown) <= _SHOWN_WHOLE else f"{shown[:_SHOWN_WHOLE]}…"))
    print_table(("", ""), rows)


def _print_jobs(found: Sequence[pb.JobEntry], as_json: bool) -> None:
    if as_json:
        print_json([_plain_job(entry) for entry in found])
        return
    rows = [
        (
            entry.job.id,
            entry.job.queue,
            _state(entry),
            printable(entry.job.job_type),
            entry.job.priority,
            f"{entry.job.attempt}/{entry.job.max_attempts}",
            _age(entry.job.enqueued_at),
            _moment_of(entry),
            _shown_payload(entry),
        )
        for entry in found
    ]
    print_table(("id", "queue", "state", "type", "priority", "attempt", "age", "until", "payload"), rows)


def _state(entry: pb.JobEntry) -> str:
    return pb.JobState.Name(entry.state).removeprefix("JOB_STATE_").lower()


def _moment_of(entry: pb.JobEntry) -> str:
    """When something happens to a job, or has happened to a dead letter."""
    if entry.HasField("failed_at"):
        cause = DeadLetterCause.Name(entry.cause).removeprefix("DEAD_LETTER_CAUSE_").lower()
        return f"{_instant(entry.failed_at)} {cause}"
    if entry.HasField("due_at"):
        return str(_instant(entry.due_at))
    return str(_instant(entry.job.lease_expires_at)) if entry.job.HasField("lease_expires_at") else ""


def _shown_payload(entry: pb.JobEntry) -> str:
    """As text when it is text, else in hexadecimal digits, on one line and cut."""
    _, shown = _readable(entry.job.payload.data, entry.payload_bytes)
    shown = printable(shown)
    if len(shown) > _SHOWN_CHARACTERS or len(entry.job.payload.data) < entry.payload_bytes:
        return f"{shown[:_SHOWN_CHARACTERS]}… ({entry.payload_bytes} bytes)"
    return shown


def _readable(data: bytes, whole_bytes: int) -> tuple[str, str]:
    """("text", …) or ("hex", …) of a payload, of which `data` may be only the beginning."""
    for cut in range(4 if len(data) < whole_bytes else 1):  # within a character, which has up to 4 bytes
        try:
            return "text", data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
    return "hex", data.hex()


def _instant(timestamp: Timestamp) -> str | None:
    """An instant as ISO 8601 in UTC, None when it is not set."""
    if not timestamp.seconds and not timestamp.nanos:
        return None
    moment = datetime.fromtimestamp(timestamp.seconds, UTC).replace(microsecond=timestamp.nanos // 1000)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _age(timestamp: Timestamp) -> str:
    """How long ago that was, in the largest unit that fits; nothing when it is not set."""
    if not timestamp.seconds:
        return ""
    seconds = max(0, int(time.time() - timestamp.seconds))
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _plain_queue(queue: pb.Queue) -> Plain:
    return {
        "name": queue.name,
        "shard": queue.shard,
        "slot": queue.slot,
        "ready": queue.ready,
        "scheduled": queue.scheduled,
        "in_flight": queue.leased,
        "dead": queue.dead,
        "keys": queue.keys,
        "waiting_polls": queue.waiting,
        "oldest_enqueued_at": _instant(queue.oldest_enqueued_at),
        "closing_until": _instant(queue.closing_until),
    }


def _plain_shard(shard: pb.Shard) -> Plain:
    if not shard.up:
        return {"index": shard.index, "up": False, "slots": shard.slots}
    return {
        "index": shard.index,
        "up": True,
        "slots": shard.slots,
        "queues": shard.queues,
        "ready": shard.ready,
        "scheduled": shard.scheduled,
        "in_flight": shard.leased,
        "dead": shard.dead,
        "keys": shard.keys,
        "waiting_polls": shard.waiting,
    }


def _plain_job(entry: pb.JobEntry) -> Plain:
    dead = entry.HasField("failed_at")
    return {
        "id": entry.job.id,
        "queue": entry.job.queue,
        "state": _state(entry),
        **_plain_content(entry.job, entry.payload_bytes),
        "due_at": _instant(entry.due_at),
        "lease_expires_at": _instant(entry.job.lease_expires_at),
        "failed_at": _instant(entry.failed_at),
        "cause": DeadLetterCause.Name(entry.cause) if dead else None,
        "last_reason": entry.last_reason if entry.HasField("last_reason") else None,
    }


def _plain_record(record: DeadLetterRecord) -> Plain:
    return {
        "id": record.job.id,
        "queue": record.job.queue,
        **_plain_content(record.job, len(record.job.payload.data)),
        "failed_at": _instant(record.failed_at),
        "cause": DeadLetterCause.Name(record.cause),
        "last_reason": record.last_reason if record.HasField("last_reason") else None,
    }


def _plain_content(job: Job, payload_bytes: int) -> Plain:
    payload: Plain | None = None
    if job.HasField("payload"):
        form, shown = _readable(job.payload.data, payload_bytes)
        payload = {"encoding": job.payload.encoding, "bytes": payload_bytes, form: shown}
    return {
        "job_type": job.job_type,
        "priority": job.priority,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "enqueued_at": _instant(job.enqueued_at),
        "scheduled_at": _instant(job.scheduled_at),
        "traceparent": job.trace_context.traceparent or None,
        "custom": {key: _plain_value(value) for key, value in sorted(job.custom.items())},
        "payload": payload,
    }


def _plain_value(value: PrimitiveValue) -> object:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
