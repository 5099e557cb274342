"""The data directory: lock, runtime directory, slot map and generations."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import data_directory
from common.data_directory import DataDirectory, DataDirectoryError, holder_of
from common.slots import SlotMap, SlotMapError


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="sepp-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def environ(short: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(short)}


def test_a_missing_directory_is_created_for_its_user_only(tmp_path: Path, environ: dict[str, str]) -> None:
    with DataDirectory.open(tmp_path / "a" / "data", environ):
        assert stat.S_IMODE((tmp_path / "a" / "data").stat().st_mode) == 0o700


def test_the_lock_file_names_the_process_and_the_runtime_directory(tmp_path: Path, environ: dict[str, str]) -> None:
    with DataDirectory.open(tmp_path, environ) as directory:
        assert json.loads((tmp_path / "LOCK").read_text()) == {"pid": os.getpid(), "runtime": str(directory.runtime)}


def test_a_second_holder_is_told_the_pid_of_the_first(tmp_path: Path, environ: dict[str, str]) -> None:
    with DataDirectory.open(tmp_path, environ), pytest.raises(DataDirectoryError, match=rf"by process {os.getpid()};"):
        DataDirectory.open(tmp_path, environ)


def test_closing_frees_the_lock_and_removes_the_runtime_directory(
    tmp_path: Path, short: Path, environ: dict[str, str]
) -> None:
    DataDirectory.open(tmp_path, environ).close()
    assert list(short.iterdir()) == []
    DataDirectory.open(tmp_path, environ).close()


def test_processes_that_never_end_are_given_up_on(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_directory, "CHILDREN_END_S", 0.0)
    monkeypatch.setattr(data_directory, "_is_alive", lambda pid: False)
    with (
        DataDirectory.open(tmp_path, environ),
        pytest.raises(DataDirectoryError, match=rf"that process {os.getpid()} left behind;"),
    ):
        DataDirectory.open(tmp_path, environ)


def test_a_file_is_no_data_directory(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataDirectoryError, match=r"is not a directory; choose another one"):
            DataDirectory.open(path, environ)


def test_the_runtime_directory_is_for_its_user_only(tmp_path: Path, environ: dict[str, str]) -> None:
    with DataDirectory.open(tmp_path, environ) as directory:
        assert stat.S_IMODE(directory.runtime.stat().st_mode) == 0o700


def test_socket_paths_fit_where_the_data_and_the_usual_runtime_directory_lie_deep(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    environ = {"XDG_RUNTIME_DIR": str(deep), "TMPDIR": str(deep)}
    with DataDirectory.open(deep / "data", environ) as directory:
        assert directory.runtime.parent == Path(tempfile.gettempdir())
        address = directory.socket_address("s4095-1000000000000000000")
    assert len(address.removeprefix("ipc://").encode()) <= 107


def test_a_runtime_directory_that_was_left_behind_is_removed(
    tmp_path: Path, short: Path, environ: dict[str, str]
) -> None:
    left = Path(tempfile.mkdtemp(prefix="seppd-", dir=short))
    (left / "s0-1").write_text("")
    (tmp_path / "LOCK").write_text(json.dumps({"pid": 1, "runtime": str(left)}))
    with DataDirectory.open(tmp_path, environ) as directory:
        assert list(short.iterdir()) == [directory.runtime]


@pytest.mark.parametrize("name", ["precious", "seppd-open"])
def test_nothing_but_a_runtime_directory_is_removed(
    tmp_path: Path, short: Path, environ: dict[str, str], name: str
) -> None:
    other = short / name
    other.mkdir()
    other.chmod(0o755)
    (tmp_path / "LOCK").write_text(json.dumps({"pid": 1, "runtime": str(other)}))
    with DataDirectory.open(tmp_path, environ):
        assert other.is_dir()


def test_a_damaged_lock_file_does_no_harm(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "LOCK").write_bytes(b"\xff{")
    DataDirectory.open(tmp_path, environ).close()


def test_a_new_directory_gets_the_configured_number_of_shards(tmp_path: Path, environ: dict[str, str]) -> None:
    with DataDirectory.open(tmp_path, environ) as directory:
        assert directory.slot_map(3) == SlotMap.even(3)
        assert SlotMap.load(tmp_path) == SlotMap.even(3)
        assert [directory.shard_path(shard).is_dir() for shard in range(4)] == [True, True, True, False]


def test_a_new_directory_gets_half_of_the_cores_when_nothing_is_configured(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10)))
    with DataDirectory.open(tmp_path, environ) as directory:
        assert directory.slot_map(None).shards == 5


def test_half_of_one_core_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert data_directory.half_of_the_cores() == 1


def test_an_existing_directory_keeps_its_shards(tmp_path: Path, environ: dict[str, str]) -> None:
    with DataDirectory.open(tmp_path, environ) as directory:
        directory.slot_map(3)
        assert directory.slot_map(None) == directory.slot_map(3) == SlotMap.even(3)


def test_another_number_of_shards_names_the_command_that_changes_it(tmp_path: Path, environ: dict[str, str]) -> None:
    with DataDirectory.open(tmp_path, environ) as directory:
        directory.slot_map(3)
        expected = (
            r"is 4, but .* has 3 shards; run `seppd rebalance apply --shards 4`, set server\.shards to 3, or leave"
        )
        with pytest.raises(DataDirectoryError, match=expected):
            directory.slot_map(4)


def test_another_format_version_is_refused(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "slots.json").write_text('{"format": 2}')
    with DataDirectory.open(tmp_path, environ) as directory, pytest.raises(SlotMapError, match="has format version 2"):
        directory.slot_map(None)


def test_a_shard_directory_that_has_gone_is_not_replaced_by_an_empty_one(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    with DataDirectory.open(tmp_path, environ) as directory:
        directory.slot_map(2)
        directory.shard_path(1).rmdir()
        with pytest.raises(DataDirectoryError, match=r"shard-1 is missing"):
            directory.slot_map(2)


def test_the_missing_directory_of_a_shard_without_slots_is_made_anew(tmp_path: Path, environ: dict[str, str]) -> None:
    with DataDirectory.open(tmp_path, environ) as directory:
        directory.slot_map(2).resized(3).save(tmp_path)
        assert directory.slot_map(None).shards == 3
        assert stat.S_IMODE((tmp_path / "shard-2").stat().st_mode) == 0o700


def test_directories_of_shards_that_were_taken_away_are_deleted(tmp_path: Path, environ: dict[str, str]) -> None:
    with DataDirectory.open(tmp_path, environ) as directory:
        directory.slot_map(2)
        for name in ("shard-2", "shard-10"):
            (tmp_path / name / "below").mkdir(parents=True)
            (tmp_path / name / "CURRENT").write_text("x")
        directory.slot_map(2)
        assert sorted(path.name for path in tmp_path.glob("shard-*")) == ["shard-0", "shard-1"]


@pytest.mark.parametrize("name", ["shard-02", "shard-2.bak", "shard-two", "shard-", "my-shard-2"])
def test_what_is_no_directory_of_a_shard_is_not_deleted(tmp_path: Path, environ: dict[str, str], name: str) -> None:
    with DataDirectory.open(tmp_path, environ) as directory:
        directory.slot_map(1)
        (tmp_path / name).mkdir()
        directory.slot_map(1)
        assert (tmp_path / name).is_dir()


def test_a_file_or_a_link_named_like_a_shard_is_not_deleted(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    with DataDirectory.open(tmp_path / "data", environ) as directory:
        directory.slot_map(1)
        (directory.path / "shard-1").write_text("")
        (directory.path / "shard-2").symlink_to(tmp_path / "elsewhere")
        directory.slot_map(1)
        assert (directory.path / "shard-1").is_file() and (directory.path / "shard-2").is_symlink()


def test_an_added_shard_starts_with_an_empty_directory(tmp_path: Path, environ: dict[str, str]) -> None:
    with DataDirectory.open(tmp_path, environ) as directory:
        (tmp_path / "shard-1").mkdir()
        (tmp_path / "shard-1" / "CURRENT").write_text("old")
        directory.add_shard(1)
        assert list((tmp_path / "shard-1").iterdir()) == []
        directory.remove_shard(1)
        directory.remove_shard(1)
        assert not (tmp_path / "shard-1").exists()


def test_who_holds_a_directory_can_be_asked_without_taking_it(tmp_path: Path, environ: dict[str, str]) -> None:
    assert holder_of(tmp_path) is None
    with DataDirectory.open(tmp_path, environ):
        assert holder_of(tmp_path) == os.getpid()
    assert holder_of(tmp_path) is None
    DataDirectory.open(tmp_path, environ).close()


def test_data_without_a_slot_map_is_not_given_a_new_one(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "shard-0").mkdir()
    (tmp_path / "shard-0" / "CURRENT").write_text("")
    expected = pytest.raises(DataDirectoryError, match=r"data in shard-0, but no slots\.json")
    with DataDirectory.open(tmp_path, environ) as directory, expected:
        directory.slot_map(1)
    assert not (tmp_path / "slots.json").exists()


def test_a_first_start_that_was_cut_short_can_be_repeated(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "shard-0").mkdir()
    with DataDirectory.open(tmp_path, environ) as directory:
        assert directory.slot_map(2).shards == 2


def test_generations_grow_within_a_life_and_over_lives(tmp_path: Path, environ: dict[str, str]) -> None:
    given = []
    for _ in range(2):
        with DataDirectory.open(tmp_path, environ) as directory:
            given += [directory.next_generation() for _ in range(data_directory.GENERATION_BLOCK + 1)]
    assert given == sorted(set(given))
    assert given[0] == 1


def test_a_damaged_generation_file_is_refused_with_what_to_do(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "generation").write_text("junk")
    with DataDirectory.open(tmp_path, environ) as directory, pytest.raises(DataDirectoryError, match="write a number"):
        directory.next_generation()
