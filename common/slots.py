"""Slots: how a queue finds its shard.

A queue's slot is the low 12 bits of the CRC-32 of its UTF-8 name. The slot map says which shard
owns each of the 4 096 slots; its epoch only grows. All data of a queue lives in its slot's shard.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from zlib import crc32

SLOT_COUNT = 4096
SLOT_MAP_FILE = "slots.json"
# Shards that a resharding may ask for: each is a process with a database of its own, of about 64 slots then.
SHARDS_MAX = 64
# Version of everything below the data directory. Raise it when a stored layout changes.
FORMAT_VERSION = 1


class SlotMapError(Exception):
    """The slot map file cannot be used; the message is one line and says what to do."""


def slot_of(queue: str) -> int:
    """The slot, 0 to 4 095, of a queue name."""
    return crc32(queue.encode()) & 0xFFF


def slots_owned(shard: int, owners: Sequence[int]) -> list[int]:
    """The slots that a shard owns, in order; `owners` is the shard index of each slot."""
    return list(compress(range(SLOT_COUNT), map(shard.__eq__, owners)))


@dataclass(frozen=True)
class SlotMap:
    """Which shard owns which slot. `owners[slot]` is a shard index; `epoch` grows with every change."""

    epoch: int
    shards: int
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.owners) != SLOT_COUNT:
            raise SlotMapError(f"a slot map has {SLOT_COUNT} owners, this one has {len(self.owners)}")
        if self.epoch < 1 or self.shards < 1:
            raise SlotMapError(f"epoch {self.epoch} and shards {self.shards} must be at least 1")
        if min(self.owners) < 0 or max(self.owners) >= self.shards:
            raise SlotMapError(f"an owner is outside of the {self.shards} shards")

    @classmethod
    def even(cls, shards: int) -> SlotMap:
        """The first map of a new directory: slots dealt out in turn.

        Not in blocks: names that differ in a number only have CRCs that differ in few bits, and 32 of
        them were spread 12, 14, 0 and 6 over four blocks, but 8 to each shard in turn.
        """
        return cls(epoch=1, shards=shards, owners=tuple(slot % shards for slot in range(SLOT_COUNT)))

    def slots_of(self, shard: int) -> list[int]:
        """The slots that a shard owns, in order."""
        return slots_owned(shard, self.owners)

    def changed_since(self, before: SlotMap) -> frozenset[int]:
        """The slots that had another owner in an earlier map."""
        return frozenset(slot for slot in range(SLOT_COUNT) if self.owners[slot] != before.owners[slot])

    def moved(self, slots: Collection[int], target: int) -> SlotMap:
        """The next map, in which `target` owns these slots. Raises SlotMapError for slots and shards that are none."""
        if not all(0 <= slot < SLOT_COUNT for slot in slots):
            raise SlotMapError(f"a slot is outside of 0 to {SLOT_COUNT - 1}")
        owners = list(self.owners)
        for slot in slots:
            owners[slot] = target
        return SlotMap(self.epoch + 1, self.shards, tuple(owners))

    def resized(self, shards: int) -> SlotMap:
        """The next map, with another number of shards and the same owners.

        Raises SlotMapError when one of the shards that go owns a slot.
        """
        busy = sorted({owner for owner in self.owners if owner >= shards})
        if busy:
            named = ", ".join(map(str, busy))
            raise SlotMapError(f"there cannot be {shards} shards while shard {named} owns slots; move them away first")
        return SlotMap(self.epoch + 1, shards, self.owners)

    def save(self, directory: Path) -> None:
        """Replace the file atomically; when this returns the new map is on the disk.

        Raises OSError when the old one still is, and SlotMapError when nobody can tell which one is: then
        nothing may go on by either, and the next start goes by what it finds.
        """
        text = json.dumps(
            {
                "format": FORMAT_VERSION,
                "epoch": self.epoch,
                "shards": self.shards,
                "owners": list(self.owners),
            }
        )
        path = directory / SLOT_MAP_FILE
        scratch = directory / (SLOT_MAP_FILE + ".new")
        with scratch.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(directory, os.O_RDONLY)
        try:
            scratch.replace(path)
            _sync_replaced(folder, path)
        finally:
            os.close(folder)

    @classmethod
    def load(cls, directory: Path) -> SlotMap | None:
        """The map of a data directory, None when it has none yet.

        Raises SlotMapError for another format version and for a damaged file.
        """
        path = directory / SLOT_MAP_FILE
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        try:
            found = json.loads(text)
            version = found["format"]
        except (ValueError, TypeError, KeyError) as error:
            raise SlotMapError(
                f"{path} is damaged ({error}); restore it from a backup of this data directory"
            ) from error
        if version != FORMAT_VERSION:
            raise SlotMapError(
                f"{directory} has format version {version!r}, this seppd reads version {FORMAT_VERSION}; "
                "start the seppd that wrote it"
            )
        try:
            return cls(found["epoch"], found["shards"], tuple(found["owners"]))
        except (TypeError, KeyError, SlotMapError) as error:
            raise SlotMapError(
                f"{path} is damaged ({error}); restore it from a backup of this data directory"
            ) from error


def _sync_replaced(folder: int, path: Path) -> None:
    try:
        os.fsync(folder)
    except OSError as error:
        raise SlotMapError(
            f"{path} was replaced, and whether that is on the disk is not known ({error.strerror}); "
            f"look after the disk and start seppd again"
        ) from error
