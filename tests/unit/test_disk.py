"""What a shard does when its disk is almost full."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.wire import Op
from shard import disk
from tests.unit import shard_driver
from tests.unit.shard_driver import Shard

home, shard = shard_driver.home, shard_driver.shard
MIB = 1 << 20


def file_system(monkeypatch: pytest.MonkeyPatch, size_bytes: int, free_bytes: int) -> None:
    found = SimpleNamespace(f_frsize=4096, f_blocks=size_bytes // 4096, f_bavail=free_bytes // 4096)
    monkeypatch.setattr(os, "statvfs", lambda _: found)


def test_there_is_room_at_the_reserve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file_system(monkeypatch, 100_000 * MIB, 128 * MIB)
    assert disk.shortage(tmp_path) is None


def test_below_the_reserve_the_text_says_how_much_is_free_and_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file_system(monkeypatch, 100_000 * MIB, 127 * MIB)
    assert disk.shortage(tmp_path) == ("the disk is almost full, 127 MiB are free: no job is taken until 128 are")


def test_a_small_file_system_keeps_a_twentieth_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file_system(monkeypatch, 200 * MIB, 10 * MIB)
    assert disk.shortage(tmp_path) is None
    file_system(monkeypatch, 200 * MIB, 9 * MIB)
    assert disk.shortage(tmp_path) is not None


def test_no_job_is_taken_while_the_disk_is_almost_full_and_jobs_can_still_be_ended(shard: Shard) -> None:
    shard.enqueue(body=b"earlier")
    shard.machine.shortage = "full"
    job = shard_driver.job("q", b"late")
    for kind in (Op.ENQUEUE, Op.ENQUEUE_ATOMIC):
        assert shard.answer(shard.send(kind, b"abc", [job])) == [13, "full"]
    assert shard.answer(shard.send(Op.PREPARE, 7, 0, b"abc", [job])) == [13, "full"]
    leased = shard.reserve_one()
    assert leased.body == b"earlier"
    shard.ack(leased)
    assert shard.counts("q") == (0, 0, 0, 0)
    shard.machine.shortage = None
    shard.enqueue(body=b"later")
    assert shard.reserve_one().body == b"later"
