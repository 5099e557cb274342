"""A real server that cannot start: one line, status 1, and what was there before is there afterwards."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.clients import connected, job, reserve, texts
from tests.integration.conftest import StartServer
from tests.integration.server import Server

# Permissions mean nothing to root unless this capability is given up (PR_CAPBSET_DROP, CAP_DAC_OVERRIDE).
AS_ANY_USER = (
    sys.executable,
    "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])",
)
JOBS = [f"job {number}" for number in range(30)]


def refused(server: Server) -> str:
    """The one line of a start that has to fail."""
    server.launch()
    assert server.exit_status() == 1
    assert server.processes() == []
    (line,) = server.log.plain_lines()
    assert line.startswith("seppd: "), line
    return line.removeprefix("seppd: ")


async def fill(server: Server) -> str:
    """Put JOBS into a running server, one by one; the queue that holds them, on shard 0."""
    queue = server.queue_on(0)
    async with connected(server.address) as client:
        for text in JOBS:
            await client.enqueue(job(queue, text))
    return queue


async def has_all_jobs(server: Server, queue: str) -> bool:
    async with connected(server.address) as client:
        return texts(await reserve(client, queue, max_jobs=100)) == JOBS


async def test_a_port_that_another_server_has_is_refused_and_that_one_goes_on(new_server: StartServer) -> None:
    first = new_server(routers=2).start()
    queue = await fill(first)
    second = new_server(settings={"SEPP_SERVER__LISTEN_ADDR": first.address})
    assert refused(second) == (
        f"listen address {first.address} is in use by another process; stop it or choose another server.listen_addr"
    )
    assert await has_all_jobs(first, queue)


async def test_data_that_another_server_holds_is_refused_and_that_one_goes_on(new_server: StartServer) -> None:
    first = new_server(shards=2).start()
    queue = await fill(first)
    second = new_server(shards=2, data=first.data)
    assert refused(second) == (
        f"server.db_path {first.data} is in use by process {first.pid}; stop it or choose another server.db_path"
    )
    assert first.stop() == 0
    first.restart()
    assert await has_all_jobs(first, queue)


async def test_another_number_of_shards_is_refused_and_no_job_is_lost(new_server: StartServer) -> None:
    server = new_server(shards=2).start()
    queue = await fill(server)
    server.kill_all()
    server.shards = 3
    assert "has 2 shards; run `seppd rebalance apply --shards " in refused(server)
    server.shards = 2
    server.restart()
    assert await has_all_jobs(server, queue)


async def test_a_number_of_shards_that_is_left_out_is_that_of_the_data(new_server: StartServer) -> None:
    server = new_server(shards=3).start()
    queue = await fill(server)
    server.kill_all()
    server.shards = None
    server.restart()
    assert await has_all_jobs(server, queue)
    assert server.pid_of("shard-2")


async def test_data_of_another_format_version_are_refused_and_not_touched(new_server: StartServer) -> None:
    server = new_server().start()
    queue = await fill(server)
    server.kill_all()
    slot_map = server.data / "slots.json"
    ours = slot_map.read_text()
    slot_map.write_text(json.dumps({**json.loads(ours), "format": 99}))
    assert f"{server.data} has format version 99, this seppd reads version 1" in refused(server)
    slot_map.write_text(ours)
    server.restart()
    assert await has_all_jobs(server, queue)


@pytest.mark.parametrize("folder", ["", "shard-0"], ids=["whole", "one-shard"])
async def test_data_that_may_not_be_written_are_refused_and_not_touched(new_server: StartServer, folder: str) -> None:
    server = new_server(shards=2, launcher=AS_ANY_USER).start()
    queue = await fill(server)
    server.kill_all()
    protected = server.data / folder
    modes = {path: path.stat().st_mode for path in (protected, *protected.glob("*"))}
    for path, mode in modes.items():
        path.chmod(mode & 0o555)
    text = refused(server)
    assert str(protected) in text and "ermission denied" in text
    for path, mode in modes.items():
        path.chmod(mode)
    server.restart()
    assert await has_all_jobs(server, queue)


def flip_a_byte(log: Path) -> None:
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 0x01
    log.write_bytes(content)


def cut_in_half(log: Path) -> None:
    os.truncate(log, log.stat().st_size // 2)


def empty(log: Path) -> None:
    os.truncate(log, 0)


@pytest.mark.parametrize("damage", [flip_a_byte, cut_in_half, empty])
async def test_a_damaged_log_is_refused_until_its_directory_is_restored(
    new_server: StartServer, damage: Callable[[Path], None]
) -> None:
    server = new_server(shards=2).start()
    queue = await fill(server)
    server.kill_all()
    directory, backup = server.data / "shard-0", server.home / "backup"
    shutil.copytree(directory, backup)
    (log,) = [path for path in directory.glob("*.log") if path.stat().st_size]
    damage(log)
    for _ in range(2):  # a second try says the same, and has not begun anew either
        text = refused(server)
        assert text.startswith(f"shard-0: {directory} is damaged (")
        assert "restore this directory as a whole from a backup" in text
    shutil.rmtree(directory)
    shutil.copytree(backup, directory)
    server.restart()
    assert await has_all_jobs(server, queue)
