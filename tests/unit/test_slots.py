"""The slot map: how it changes, and what is left of it when it cannot be stored."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from common.slots import SLOT_COUNT, SlotMap, SlotMapError


def test_moved_slots_have_the_new_owner_and_the_epoch_is_the_next() -> None:
    moved = SlotMap.even(2).moved([0, 2], 1)
    assert (moved.epoch, moved.shards) == (2, 2)
    assert moved.owners[:4] == (1, 1, 1, 1)
    assert moved.owners[4:] == SlotMap.even(2).owners[4:]


@pytest.mark.parametrize(("slots", "target"), [([0], 2), ([0], -1), ([SLOT_COUNT], 0), ([-1], 0)])
def test_a_move_of_no_slot_or_to_no_shard_is_refused(slots: list[int], target: int) -> None:
    with pytest.raises(SlotMapError):
        SlotMap.even(2).moved(slots, target)


def test_added_shards_own_nothing_at_first() -> None:
    grown = SlotMap.even(2).resized(4)
    assert (grown.epoch, grown.shards, grown.owners) == (2, 4, SlotMap.even(2).owners)


def test_shards_that_own_slots_are_not_taken_away() -> None:
    slot_map = SlotMap.even(4).moved(SlotMap.even(4).slots_of(2), 0)
    with pytest.raises(
        SlotMapError, match=r"^there cannot be 2 shards while shard 3 owns slots; move them away first$"
    ):
        slot_map.resized(2)


def test_shards_that_own_nothing_are_taken_away() -> None:
    shrunk = SlotMap.even(2).moved(SlotMap.even(2).slots_of(1), 0).resized(1)
    assert shrunk == SlotMap(3, 1, (0,) * SLOT_COUNT)


def test_a_saved_map_is_read_again(tmp_path: Path) -> None:
    slot_map = SlotMap.even(3).moved([5, 6], 0)
    slot_map.save(tmp_path)
    assert SlotMap.load(tmp_path) == slot_map


@pytest.mark.parametrize("step", ["open", "fsync"])
def test_a_map_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    SlotMap.even(2).save(tmp_path)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    if step == "open":
        monkeypatch.setattr(Path, "open", fail)
    else:
        monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        SlotMap.even(2).moved([0], 1).save(tmp_path)
    monkeypatch.undo()
    assert SlotMap.load(tmp_path) == SlotMap.even(2)


def test_a_map_of_which_nobody_knows_whether_it_is_stored_is_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def fail_for_folders(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "input/output error")
        sync(fd)

    monkeypatch.setattr(os, "fsync", fail_for_folders)
    with pytest.raises(SlotMapError, match="is not known"):
        SlotMap.even(2).save(tmp_path)
