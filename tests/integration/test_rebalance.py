"""Slots that move on real servers, running and stopped, by the commands that operators use."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sepp import RetryDirective, SeppClient

from common.admin_socket import SOCKET_FILE
from common.cli import main
from common.data_directory import holder_of
from common.slots import SlotMap
from tests.integration.clients import connected, job, park, reserve, reserve_one, settled, texts
from tests.integration.conftest import StartServer
from tests.integration.server import ROOT, WAIT_S, Server, wait_until_gone

QUEUES = [f"queue-{number}" for number in range(40)]
JOBS = 400
KEEP_DEAD_LETTERS = {"SEPP_STORAGE__DEAD_LETTER_RETENTION_MS": "86400000"}
STOPPED = "no server is running there; one is started that serves nobody else\n"


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


def environment(server: Server) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SEPP_")}
    return {**environ, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(server.home / "run")}


def run(server: Server, *arguments: str) -> Outcome:
    """A command of `seppd rebalance`, in this process: one of its own would take most of the time of a test."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SEPP_")]:
            patch.delenv(name)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("XDG_RUNTIME_DIR", str(server.home / "run"))
        patch.chdir(server.home)
        with pytest.raises(SystemExit) as end:
            main(["rebalance", *arguments, "--db-path", str(server.data)])
    assert isinstance(end.value.code, int)
    return Outcome(end.value.code, out.getvalue(), err.getvalue())


def done(server: Server, *arguments: str) -> Any:
    """What a command that has to succeed says in JSON."""
    outcome = run(server, *arguments, "--json")
    assert outcome.status == 0, outcome.out + outcome.err
    return json.loads(outcome.out)


def assert_verified(server: Server) -> int:
    """The records that were looked at."""
    found = done(server, "verify")
    assert found["findings"] == 0
    return sum(int(shard["records"]) for shard in found["shards"])


def slot_counts(server: Server) -> list[int]:
    return [shard["slots"] for shard in done(server, "status")["shards"]]


async def fill(client: SeppClient, payload: str = "") -> set[str]:
    """Jobs in many queues; their ids."""
    ids: set[str] = set()
    for number in range(0, JOBS, 100):
        wanted = [job(QUEUES[each % len(QUEUES)], f"{each}{payload}") for each in range(number, number + 100)]
        ids |= {ack.job_id for ack in await client.enqueue_batch(wanted)}
    return ids


async def drained(client: SeppClient, queues: Sequence[str] = QUEUES) -> list[str]:
    """The ids of all ready jobs, which are acknowledged."""
    found: list[str] = []
    for start in range(0, len(queues), 20):
        while jobs := await reserve(client, *queues[start : start + 20], max_jobs=100):
            for each in jobs:
                await client.ack(each.ctx)
            found += [each.ctx.id for each in jobs]
    return found


async def beside(server: Server, *arguments: str) -> Any:
    """What a command says in JSON that runs beside the clients of this process."""
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "common", "rebalance", *arguments, "--json", "--db-path", str(server.data)),
        cwd=server.home,
        env=environment(server),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(command.communicate(), 2 * WAIT_S)
    assert command.returncode == 0, err.decode()
    return json.loads(out)


class Work:
    """A client that enqueues and acknowledges one job after another; entering starts it, leaving ends it."""

    def __init__(self, client: SeppClient, queues: Sequence[str]) -> None:
        self.enqueued: list[str] = []
        self.acked: list[str] = []
        self._client = client
        self._queues = queues
        self._is_over = False

    async def __aenter__(self) -> Work:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await self._task

    async def _run(self) -> None:
        number = 0
        while not self._is_over:
            queue = self._queues[number % len(self._queues)]
            number += 1
            self.enqueued.append((await self._client.enqueue(job(queue))).job_id)
            found = await reserve_one(self._client, queue)
            await self._client.ack(found.ctx)
            self.acked.append(found.ctx.id)


async def test_shards_are_added_and_taken_away_while_clients_are_served(new_server: StartServer) -> None:
    server = new_server(shards=2).start()
    async with connected(server.address) as client:
        ids = await fill(client)
        held = await reserve_one(client, QUEUES[0])
        poll = await park(client, "quiet")
        before = done(server, "status")
        assert done(server, "apply", "--shards", "3", "--dry-run")["slots"] == 1365
        assert done(server, "status") == before

        async with Work(client, [f"busy-{number}" for number in range(20)]) as work:
            grown = await beside(server, "apply", "--shards", "3")
            assert (grown["slots"], grown["shards"], grown["complete"]) == (1365, 3, True)
            shrunk = await beside(server, "apply", "--shards", "1")
        assert (shrunk["shards"], shrunk["complete"]) == (1, True)
        assert work.acked == work.enqueued
        assert slot_counts(server) == [4096]
        assert assert_verified(server) > JOBS

        await client.enqueue(job("quiet", "at last"))
        assert texts(await settled(poll)) == ["at last"]
        await client.ack(held.ctx)
        assert sorted([*await drained(client), held.ctx.id]) == sorted(ids)
    assert server.stop() == 0
    assert [path.name for path in server.data.glob("shard-*")] == ["shard-0"]


async def test_ctrl_c_stops_after_the_current_slots_and_the_same_command_goes_on(new_server: StartServer) -> None:
    server = new_server(shards=2).start()
    async with connected(server.address) as client:
        ids = await fill(client, "." * 2_000)
        # Slow enough that it is not done before it is interrupted: one second for each of 32 batches.
        arguments = ["apply", "--shards", "1", "--rate-limit", "0.013", "--db-path", str(server.data)]
        with subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "rebalance.py"), *arguments],
            cwd=server.home,
            env=environment(server),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as command:
            assert command.stdout is not None and command.stderr is not None
            assert command.stderr.readline().startswith("from shard 1 to 0: 64 slots, ")
            second = run(server, "apply", "--shards", "3")
            assert (second.status, second.out) == (1, "")
            assert second.err.startswith(f"seppd: process {command.pid} is moving or verifying slots of ")
            assert done(server, "status")["moving_process"] == command.pid
            command.send_signal(signal.SIGINT)
            out, _ = command.communicate(timeout=WAIT_S)
        assert command.returncode == 130
        assert out.endswith("; stopped before the end: the same command goes on\n")
        left = slot_counts(server)[1]
        assert 0 < left < 2048
        assert done(server, "status")["moving_process"] is None
        assert_verified(server)
        assert done(server, "apply", "--shards", "1")["slots"] == left
        assert_verified(server)
        assert sorted(await drained(client)) == sorted(ids)


async def test_a_stopped_directory_is_grown_and_serves_afterwards(new_server: StartServer) -> None:
    server = new_server(shards=1, toml="[server]\nshards = 2\n", settings=KEEP_DEAD_LETTERS).start()
    async with connected(server.address) as client:
        ids = await fill(client)
        await client.enqueue(job("dead", "letter"))
        buried = await reserve_one(client, "dead")
        assert await client.nack(buried.ctx, RetryDirective.DEAD_LETTER)
    assert server.stop() == 0
    server.shards = None  # what the file says holds from here on

    grown = run(server, "apply", "--shards", "2", "--json")
    assert grown.status == 0 and grown.err.startswith(STOPPED), grown.err
    found = json.loads(grown.out)
    assert (found["slots"], found["shards"], found["warning"]) == (2048, 2, None)
    assert holder_of(server.data) is None

    server.start()
    assert slot_counts(server) == [2048, 2048]
    assert_verified(server)
    async with connected(server.address) as client:
        assert sorted(await drained(client)) == sorted(ids)
        (letter,) = await client.drain_dead_letters("dead", 10)
    assert letter.job_id == buried.ctx.id


def test_a_private_server_ends_with_the_command_that_started_it(new_server: StartServer) -> None:
    server = new_server()  # never started: an empty directory will do
    make_directory(server.data)
    program = (
        "import os, signal, sys; from pathlib import Path; from common.rebalance_offline import private_server\n"
        "with private_server(Path(sys.argv[1]), None, os.environ): print(flush=True); signal.pause()"
    )
    no_such_file = {"SEPP_SERVER__TLS_CERT_PATH": "none.pem", "SEPP_SERVER__TLS_KEY_PATH": "none.pem"}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(server.data)],
        cwd=server.home,
        env={**environment(server), "SEPP_SERVER__DB_PATH": str(server.data), **no_such_file},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "\n"
        pid = holder_of(server.data)
        assert pid
        assert slot_counts(server) == [4096]
        command.kill()
        command.wait(WAIT_S)
        wait_until_gone(pid)
    assert not (server.data / SOCKET_FILE).exists()


def test_a_private_server_that_cannot_start_says_why(new_server: StartServer) -> None:
    server = new_server()
    make_directory(server.data)
    (server.data / "shard-0").rmdir()
    outcome = run(server, "status")
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err.startswith(f"{STOPPED}seppd: {server.data}/shard-0 is missing, and with it the jobs of shard 0")


def make_directory(path: Path) -> None:
    """The data directory of a server with one shard that was never used."""
    path.mkdir()
    (path / "shard-0").mkdir()
    SlotMap.even(1).save(path)


def test_what_the_operators_page_shows_is_what_the_commands_print(new_server: StartServer) -> None:
    """Numbers that differ from run to run stand for any number; an ellipsis for more lines like the last one."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (example,) = re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    server = new_server(shards=2).start()
    asyncio.run(fill_for_the_page(server.address))
    shown = re.findall(r"^\$ seppd rebalance (.*)\n((?:(?!\$ ).*\n)*)", example, re.MULTILINE)
    assert [arguments.split()[0] for arguments, _ in shown] == ["status", "plan", "apply", "move", "verify"]
    for arguments, text in shown:
        outcome = run(server, *arguments.split())
        assert outcome.status == 0, outcome.err
        assert shape(outcome.err + outcome.out) == shape(text)


async def fill_for_the_page(address: str) -> None:
    async with connected(address) as client:
        for number in range(9):
            await client.enqueue_batch(
                [job(QUEUES[each % 27], "." * 20_000) for each in range(number * 30, number * 30 + 30)]
            )
        await client.enqueue_batch([job("mail", "." * 20_000) for _ in range(30)])


def shape(text: str) -> list[str]:
    """The lines without their numbers, and each that is like the one before left out."""
    lines = [" ".join(re.sub(r"\d+(\.\d+)?", "N", line).split()) for line in text.splitlines() if line != "…"]
    lines = [re.sub(r"\bN (slot|job|batch)(s|es)?\b", r"N \1", line) for line in lines]
    return [line for place, line in enumerate(lines) if place == 0 or line != lines[place - 1]]
