"""What operators see of a running server and do to it, through the command line and through the socket."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sepp import EnqueueRequest, Job, Payload, RetryDirective, SeppClient
from sepp.errors import JobNotFoundError, JobRejectedError, QueueClosing

from common.admin_client import AdminClient
from common.admin_socket import AdminError
from common.cli import main
from tests.integration.clients import connected, job, park, reserve, reserve_one, settled, texts
from tests.integration.conftest import StartServer
from tests.integration.server import ROOT, WAIT_S, Server

DAY_MS = 86_400_000
KEEP_DEAD_LETTERS = {"SEPP_STORAGE__DEAD_LETTER_RETENTION_MS": str(DAY_MS)}


@pytest.fixture(scope="module", params=[1, 4], ids=["1-shard", "4-shards"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server that keeps dead letters; the tests of this module share it, each with queues of its own."""
    shards: int = request.param
    with Server(shards=shards, routers=min(shards, 2), settings=KEEP_DEAD_LETTERS) as running:
        yield running.start()


@pytest.fixture
def queue(server: Server) -> str:
    return f"queue-{uuid.uuid4().hex}"


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


def command(server: Server, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "common", *arguments, "--db-path", str(server.data)]


def environment() -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SEPP_")}
    return {**environ, "PYTHONPATH": str(ROOT)}


def run(server: Server, *arguments: str) -> Outcome:
    """A command as `seppd` runs it, in this process: one of its own would take most of the time of a test."""
    out, err = io.StringIO(), io.StringIO()
    nobody = io.StringIO()  # no terminal, so nobody to ask
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", nobody)
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--db-path", str(server.data)])
    assert isinstance(end.value.code, int)
    return Outcome(end.value.code, out.getvalue(), err.getvalue())


def printed(server: Server, *arguments: str) -> str:
    """What a command that has to succeed prints."""
    outcome = run(server, *arguments)
    assert (outcome.status, outcome.err) == (0, "")
    return outcome.out


def plain(server: Server, *arguments: str) -> Any:
    """What a command says in JSON."""
    return json.loads(printed(server, *arguments, "--json"))


def failure(server: Server, *arguments: str) -> str:
    """The only line of a command that has to fail, without its `seppd: `."""
    outcome = run(server, *arguments)
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err.startswith("seppd: ") and outcome.err.count("\n") == 1, outcome.err
    return outcome.err.removeprefix("seppd: ").rstrip("\n")


def cells(table: str) -> list[list[str]]:
    """The words of a printed table, line by line, without those of its head."""
    return [line.split() for line in table.splitlines()[1:]]


def admin(server: Server) -> AdminClient:
    return AdminClient(server.data)


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


async def bury(client: SeppClient, queue: str, text: str, reason: str = "") -> Job:
    """A dead letter, of the job that is next."""
    await client.enqueue(job(queue, text, priority=9))
    found = await reserve_one(client, queue)
    assert texts([found]) == [text]
    assert await client.nack(found.ctx, RetryDirective.DEAD_LETTER, reason)
    return found


# -- the socket ---------------------------------------------------------------------------------


def test_only_the_servers_user_may_open_the_socket(server: Server) -> None:
    mode = (server.data / "admin.sock").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_a_deep_data_directory_and_api_keys_are_no_hindrance(new_server: StartServer, tmp_path: Path) -> None:
    deep = Path(tmp_path, *["d" * 50] * 5)
    server = new_server(settings={"SEPP_AUTH__API_KEYS": '["secret"]'}, data=deep).start()
    assert plain(server, "queues") == []
    assert printed(server, "dead", "drain") == ""
    assert stat.S_IMODE((deep / "admin.sock").stat().st_mode) == 0o600


def test_clients_of_two_servers_one_after_the_other_each_see_their_own(new_server: StartServer) -> None:
    servers = [new_server(shards=shards).start() for shards in (1, 2)]
    # Again and again: gRPC keeps connections by their address, which is that of a descriptor, and now and then the
    # next client's has the same number.
    for server in servers * 10:
        with AdminClient(server.data) as client:
            assert [shard.index for shard in client.shards()] == list(range(server.shards or 0))


def test_a_router_that_is_started_again_has_the_socket_again(new_server: StartServer) -> None:
    server = new_server(routers=2).start()
    server.kill("router-0")
    server.wait_until_back("router-0")
    assert plain(server, "queues") == []


def test_without_a_server_the_commands_say_so_and_name_the_socket(new_server: StartServer) -> None:
    server = new_server()
    for arguments in (["queues"], ["queue", "delete", "q", "--yes"], ["shards", "--json"]):
        text = failure(server, *arguments)
        assert text.startswith("no server is running there: ") and f"{server.data}/admin.sock" in text
    server.start()
    assert server.stop() == 0
    assert not (server.data / "admin.sock").exists()
    assert f"{server.data}/admin.sock" in failure(server, "queues")


def test_a_socket_that_a_killed_server_left_says_that_there_is_none_and_is_replaced(new_server: StartServer) -> None:
    server = new_server().start()
    server.kill_all()
    assert (server.data / "admin.sock").exists()
    assert failure(server, "queues").startswith("no server is running there: ")
    server.restart()
    assert plain(server, "queues") == []


def test_the_configuration_says_where_the_server_is(new_server: StartServer) -> None:
    server = new_server(toml='[server]\ndb_path = "data"\n').start()
    for more in (["--config", "sepp.toml"], []):
        found = subprocess.run(
            [sys.executable, "-m", "common", "queues", "--json", *more],
            cwd=server.home,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert (found.returncode, found.stdout, found.stderr) == (0, "[]\n", "")


# -- looking --------------------------------------------------------------------------------------


async def test_queues_are_listed_by_name_with_their_shard_and_counters(server: Server) -> None:
    prefix = uuid.uuid4().hex
    names = [f"{prefix}-{number}" for number in range(6)]
    async with connected(server.address) as client:
        for name in reversed(names):
            await client.enqueue(job(name))
        await client.enqueue(job(names[0]))
        await reserve_one(client, names[0])
    rows = [row for row in cells(printed(server, "queues")) if row[0].startswith(prefix)]
    assert [row[:-1] for row in rows] == [
        [name, str(server.shard_of(name)), "1", "0", "1" if name == names[0] else "0", "0"] for name in names
    ]
    assert [row["name"] for row in plain(server, "queues") if row["name"].startswith(prefix)] == names


async def test_a_queue_is_shown_with_all_that_is_known_of_it(server: Server, queue: str) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    async with connected(server.address) as client:
        await bury(client, queue, "dead")
        ack = await client.enqueue(job(queue, "ready", key="k"))
        await client.enqueue(EnqueueRequest(queue, "letter", scheduled_at=soon))
        poll = await park(client, f"other-{queue}")
        shown = plain(server, "queue", "show", queue)
        poll.cancel()
    oldest = plain(server, "job", "show", ack.job_id)["enqueued_at"]
    assert shown == {
        "name": queue,
        "shard": server.shard_of(queue),
        "slot": shown["slot"],
        "ready": 1,
        "scheduled": 1,
        "in_flight": 0,
        "dead": 1,
        "keys": 1,
        "waiting_polls": 0,
        "oldest_enqueued_at": oldest,
        "closing_until": None,
    }
    assert ["dead", "1"] in cells("\n" + printed(server, "queue", "show", queue))


async def test_jobs_are_listed_in_every_state_with_what_they_carry(server: Server, queue: str) -> None:
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    async with connected(server.address) as client:
        await bury(client, queue, "1", "broken")
        await client.enqueue(job(queue, "2"))
        leased = await reserve_one(client, queue)
        await client.enqueue(EnqueueRequest(queue, "letter", Payload(b"\xff\xfe", "bin"), priority=3))
        await client.enqueue(EnqueueRequest(queue, "letter", scheduled_at=due, custom={"n": 4, "s": "t", "b": True}))
    lease, ready, scheduled, dead = plain(server, "jobs", queue)
    assert [row["state"] for row in (lease, ready, scheduled, dead)] == ["leased", "ready", "scheduled", "dead"]
    assert (lease["id"], lease["attempt"], lease["payload"]["text"]) == (leased.ctx.id, 1, "2")
    assert instant(lease["lease_expires_at"]) > datetime.now(UTC)
    assert (ready["priority"], ready["payload"]) == (3, {"encoding": "bin", "bytes": 2, "hex": "fffe"})
    assert (instant(scheduled["due_at"]), scheduled["payload"]) == (due, None)
    assert scheduled["custom"] == {"b": True, "n": 4, "s": "t"}
    assert (dead["cause"], dead["last_reason"]) == ("DEAD_LETTER_CAUSE_REJECTED", "broken")
    assert [row["state"] for row in plain(server, "jobs", queue, "--limit", "2")] == ["leased", "ready"]
    assert [row["id"] for row in plain(server, "jobs", queue, "--state", "dead")] == [dead["id"]]
    table = cells(printed(server, "jobs", queue, "--state", "ready"))
    assert [row[:6] for row in table] == [[ready["id"], queue, "ready", "letter", "3", "1/3"]]
    assert table[0][-1] == "fffe"


async def test_a_long_payload_is_cut_in_a_table_and_whole_where_its_job_is_shown(server: Server, queue: str) -> None:
    text = "é" * 5_000
    async with connected(server.address) as client:
        ack = await client.enqueue(job(queue, text))
    assert printed(server, "jobs", queue).rstrip().endswith("é… (10000 bytes)")
    assert plain(server, "jobs", queue)[0]["payload"] == {"encoding": "text", "bytes": 10_000, "text": "é" * 128}
    assert plain(server, "job", "show", ack.job_id)["payload"]["text"] == text


async def test_what_a_job_carries_cannot_steer_the_terminal(server: Server, queue: str) -> None:
    async with connected(server.address) as client:
        ack = await client.enqueue(job(queue, "\x1b[31mred\x9b0m\nnext"))
    for arguments in (["jobs", queue], ["job", "show", ack.job_id]):
        shown = printed(server, *arguments)
        assert "\x1b" not in shown and "\x9b" not in shown
        assert "red" in shown


async def test_looking_at_a_job_does_not_take_it(server: Server, queue: str) -> None:
    async with connected(server.address) as client:
        ack = await client.enqueue(job(queue, "1"))
        shown = plain(server, "job", "show", ack.job_id)
        assert (shown["state"], shown["queue"], shown["payload"]["text"]) == ("ready", queue, "1")
        found = await reserve_one(client, queue)
        assert (found.ctx.id, found.ctx.attempt) == (ack.job_id, 1)
        assert plain(server, "job", "show", ack.job_id)["state"] == "leased"
        await client.ack(found.ctx)
    assert failure(server, "job", "show", ack.job_id).startswith(f"there is no job {ack.job_id}")


async def test_the_shards_are_listed_with_what_they_hold(server: Server, queue: str) -> None:
    assert server.shards is not None
    async with connected(server.address) as client:
        await client.enqueue(job(queue))
        found = plain(server, "shards")
    assert [(shard["index"], shard["up"]) for shard in found] == [(index, True) for index in range(server.shards)]
    assert sum(shard["slots"] for shard in found) == 4096
    assert found[server.shard_of(queue)]["ready"] >= 1
    assert [row[0] for row in cells(printed(server, "shards"))] == [str(shard["index"]) for shard in found]


@pytest.mark.parametrize(
    "arguments",
    [
        ["queue", "show"],
        ["queue", "purge", "--yes"],
        ["queue", "delete", "--yes"],
        ["queue", "delete", "--yes", "--wait"],
        ["jobs"],
        ["dead", "list"],
        ["dead", "requeue"],
        ["dead", "delete", "--yes"],
        ["dead", "drain"],
    ],
    ids=" ".join,
)
def test_an_unknown_queue_is_said_to_be_unknown(server: Server, queue: str, arguments: list[str]) -> None:
    assert failure(server, *arguments, queue) == f"queue '{queue}' is unknown: nothing is stored under this name"


# -- dead letters -----------------------------------------------------------------------------------


async def test_dead_letters_are_listed_requeued_and_deleted(server: Server, queue: str) -> None:
    async with connected(server.address) as client:
        first, second, third = [await bury(client, queue, text, "why") for text in ("1", "2", "3")]
        await client.enqueue(job(queue, "4", priority=9))
        listed = plain(server, "dead", "list", queue)
        assert [row["id"] for row in listed] == [first.ctx.id, second.ctx.id, third.ctx.id]
        assert listed == [row for row in plain(server, "dead", "list", "--limit", "9999") if row["queue"] == queue]
        assert printed(server, "dead", "requeue", "--id", second.ctx.id) == "1 dead letter requeued\n"
        assert printed(server, "dead", "requeue", queue) == "2 dead letters requeued\n"
        found = await reserve(client, queue, max_jobs=9)
        assert texts(found) == ["1", "2", "3", "4"]
        assert [each.ctx.id for each in found[:3]] == [first.ctx.id, second.ctx.id, third.ctx.id]
        assert {each.ctx.attempt for each in found} == {1}
        for each in found:
            await client.nack(each.ctx, RetryDirective.DEAD_LETTER)
        assert (
            printed(server, "dead", "delete", "--id", first.ctx.id, "--id", third.ctx.id) == "2 dead letters deleted\n"
        )
        assert printed(server, "dead", "delete", queue, "--yes") == "2 dead letters deleted\n"
        assert plain(server, "queue", "show", queue)["dead"] == 0


async def test_an_id_that_is_no_dead_letter_is_named(server: Server, queue: str) -> None:
    async with connected(server.address) as client:
        ready = await client.enqueue(job(queue))
        dead = await bury(client, queue, "1")
    outcome = run(server, "dead", "requeue", "--id", ready.job_id, "--id", dead.ctx.id)
    assert (outcome.status, outcome.out) == (1, "1 dead letter requeued\n")
    assert outcome.err == f"seppd: not dead letters, or being drained by somebody else: {ready.job_id}\n"


async def test_drained_dead_letters_are_printed_whole_and_gone(server: Server, queue: str) -> None:
    async with connected(server.address) as client:
        buried = [await bury(client, queue, f"{number} " + "x" * 2_000, "why") for number in range(3)]
        out = printed(server, "dead", "drain", queue, "--max", "2")
        drained = [json.loads(line) for line in out.splitlines()]
        assert [row["id"] for row in drained] == [each.ctx.id for each in buried[:2]]
        assert drained[0]["payload"]["text"] == "0 " + "x" * 2_000
        assert (drained[0]["cause"], drained[0]["last_reason"]) == ("DEAD_LETTER_CAUSE_REJECTED", "why")
        assert plain(server, "queue", "show", queue)["dead"] == 1
        (left,) = await client.drain_dead_letters(queue)
        assert left.job_id == buried[2].ctx.id


def test_dead_letters_are_meant_by_queue_or_by_id_and_not_both(server: Server) -> None:
    for arguments in (["requeue"], ["requeue", "q", "--id", "x"], ["delete", "--yes"]):
        assert failure(server, "dead", *arguments).startswith("give a queue")
    assert "no job id" in failure(server, "dead", "requeue", "--id", "x")


# -- purging and deleting ---------------------------------------------------------------------------


async def test_a_purge_removes_what_waits_and_says_how_much(server: Server, queue: str) -> None:
    async with connected(server.address) as client:
        await bury(client, queue, "dead")
        for number in range(4):
            await client.enqueue(job(queue, str(number)))
        held = await reserve_one(client, queue)
        assert printed(server, "queue", "purge", queue, "--yes") == "3 jobs removed\n"
        shown = plain(server, "queue", "show", queue)
        assert (shown["ready"], shown["in_flight"], shown["dead"]) == (0, 1, 1)
        await client.ack(held.ctx)


async def test_what_cannot_be_undone_is_not_done_without_a_yes(server: Server, queue: str) -> None:
    async with connected(server.address) as client:
        await client.enqueue(job(queue))
    for arguments in (["queue", "purge", queue], ["queue", "delete", queue], ["dead", "delete", queue]):
        assert failure(server, *arguments).endswith("say --yes")
    assert plain(server, "queue", "show", queue)["ready"] == 1


async def test_a_queue_with_jobs_in_flight_is_not_deleted(server: Server, queue: str) -> None:
    async with connected(server.address) as client:
        await client.enqueue(job(queue))
        held = await reserve_one(client, queue)
        text = failure(server, "queue", "delete", queue, "--yes")
        assert text == f"queue '{queue}' has jobs in flight, 1: let them finish, or delete with wait"
        await client.enqueue(job(queue))  # it is open
        await client.ack(held.ctx)


async def test_a_deletion_with_wait_ends_when_the_last_job_in_flight_does(server: Server, queue: str) -> None:
    async with connected(server.address) as client:
        for number in range(3):
            await client.enqueue(job(queue, str(number), key=f"k{number}"))
        acked = await reserve_one(client, queue)
        late = await reserve_one(client, queue, lease=timedelta(milliseconds=1))
        deletion = subprocess.Popen(
            command(server, "queue", "delete", queue, "--yes", "--wait"),
            cwd=server.home,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        with deletion:
            await until_closing(client, queue)
            poll = await park(client, queue)
            assert deletion.poll() is None
            with admin(server) as looking:
                assert looking.queue(queue).HasField("closing_until")
            await client.ack(acked.ctx)
            out, _ = await asyncio.to_thread(deletion.communicate, timeout=WAIT_S)
        assert deletion.returncode == 0
        assert out.startswith(f"queue {queue} deleted, with ")
        assert out.endswith(", 0 dead letters, 3 idempotency keys\n")
        with pytest.raises(JobNotFoundError):
            await client.ack(late.ctx)
        again = await client.enqueue(job(queue, "new", key="k0"))
        assert not again.deduplicated
        assert texts(await settled(poll)) == ["new"]


async def until_closing(client: SeppClient, queue: str) -> None:
    """Enqueue until that is refused."""
    while True:
        try:
            await client.enqueue(job(queue))
        except JobRejectedError as rejected:
            assert rejected.rejection == QueueClosing(queue)
            return


async def test_the_end_of_the_server_ends_a_deletion_that_waits(new_server: StartServer) -> None:
    server = new_server().start()
    async with connected(server.address) as client:
        await client.enqueue(job("q"))
        await reserve_one(client, "q")
        deletion = subprocess.Popen(
            command(server, "queue", "delete", "q", "--yes", "--wait"),
            cwd=server.home,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        with deletion:
            await until_closing(client, "q")
            assert server.stop() == 0
            _, err = deletion.communicate(timeout=WAIT_S)
    assert deletion.returncode == 1
    assert err.startswith("seppd: ") and err.count("\n") == 1


async def test_a_deletion_while_producers_run_keeps_all_that_was_accepted_after_it(server: Server, queue: str) -> None:
    accepted: list[tuple[float, str]] = []
    refused = 0
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def produce(client: SeppClient) -> None:
        nonlocal refused
        while not stopping.is_set():
            begun = loop.time()
            try:
                ack = await client.enqueue(job(queue))
            except JobRejectedError:
                refused += 1
            else:
                accepted.append((begun, ack.job_id))

    async with connected(server.address) as client:
        for _ in range(12):
            await client.enqueue_batch([job(queue, str(number)) for number in range(250)])
        held = await reserve_one(client, queue)  # the queue is closing until it is acknowledged
        producers = [asyncio.create_task(produce(client)) for _ in range(3)]
        with admin(server) as deleting:
            deletion = asyncio.create_task(asyncio.to_thread(deleting.delete, queue, True))
            while not refused:
                await asyncio.sleep(0)
            await client.ack(held.ctx)
            removed = await deletion
        deleted_at = loop.time()
        while not any(begun > deleted_at for begun, _ in accepted):
            await asyncio.sleep(0)
        stopping.set()
        await asyncio.gather(*producers)
        assert removed.removed_jobs >= 2_999
        left: list[str] = []
        while found := await reserve(client, queue, max_jobs=256):
            left += [each.ctx.id for each in found]
    assert removed.removed_jobs + len(left) == 2_999 + len(accepted)
    assert left == sorted(left)
    assert {job_id for begun, job_id in accepted if begun > deleted_at} <= set(left) <= {one for _, one in accepted}


async def test_the_socket_answers_what_it_cannot_do_with_a_reason(server: Server, queue: str) -> None:
    with admin(server) as client:
        with pytest.raises(AdminError, match="is unknown"):
            client.queue(queue)
        with pytest.raises(AdminError, match="no job id"):
            client.job("x")
