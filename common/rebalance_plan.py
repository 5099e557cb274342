"""Which slots have to move so that shards are even, and in which batches they do.

Pure functions on a slot map and on what the slots hold; the same arguments give the same plan. A plan
that was carried out in part is not kept: what is left of it is planned again from the map as it is then,
and nothing that has arrived is moved again.

Even by count means that no shard has two slots more than another. Even by load, jobs or bytes, cannot be
exact, because a slot moves whole: it is even when the fullest shard has no more than TOLERANCE of the mean
load beyond the emptiest one, or when no move of one slot would halve the difference. Slots that hold
nothing are then spread so that the counts are as even as the others let them be.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from common.slots import SLOT_COUNT, SlotMap

# Difference of load between two shards, as a part of the mean, that is not worth a move.
TOLERANCE = 0.05
# Slots, jobs and bytes that move at once. All of them are held while they are switched, a batch that fails
# is copied again, and who wants to stop waits for the end of one.
BATCH_SLOTS = 64
BATCH_JOBS = 10_000
BATCH_BYTES = 64_000_000


class By(StrEnum):
    """What is to be even."""

    SLOTS = "slots"
    JOBS = "jobs"
    BYTES = "bytes"


@dataclass(frozen=True)
class Load:
    """What a slot holds: jobs, dead letters counted, and about how many bytes."""

    jobs: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Move:
    """One slot goes from one shard to another."""

    slot: int
    source: int
    target: int


@dataclass(frozen=True)
class Batch:
    """Slots that go from one shard to another together, and what they held when they were planned."""

    source: int
    target: int
    slots: tuple[int, ...]
    jobs: int
    bytes: int


NOTHING = Load()


def plan(slot_map: SlotMap, shards: int, loads: Mapping[int, Load], by: By) -> list[Move]:
    """The moves after which `shards` shards own all slots evenly, by slot. `loads` are those of slots that hold
    something; they do not matter by count, and then there is no plan with fewer moves."""
    weights = [_weight(loads.get(slot, NOTHING), by) for slot in range(SLOT_COUNT)]
    owners = _even_by_load(slot_map.owners, shards, weights)
    owners = _even_by_count(owners, shards, [not weight for weight in weights])
    return [
        Move(slot, source, target)
        for slot, (source, target) in enumerate(zip(slot_map.owners, owners, strict=True))
        if source != target
    ]


def batches(moves: Collection[Move], loads: Mapping[int, Load]) -> list[Batch]:
    """The moves in batches of one source and one target, by these and by slot.

    Each has at most BATCH_SLOTS slots, BATCH_JOBS jobs and BATCH_BYTES bytes; a slot with more is one of its own.
    """
    ways: dict[tuple[int, int], list[int]] = {}
    for move in moves:
        ways.setdefault((move.source, move.target), []).append(move.slot)
    return [
        Batch(
            source,
            target,
            tuple(slots),
            jobs=sum(loads.get(slot, NOTHING).jobs for slot in slots),
            bytes=sum(loads.get(slot, NOTHING).bytes for slot in slots),
        )
        for (source, target), all_slots in sorted(ways.items())
        for slots in _parts(sorted(all_slots), loads)
    ]


def _weight(load: Load, by: By) -> int:
    match by:
        case By.SLOTS:
            return 0
        case By.JOBS:
            return load.jobs
        case By.BYTES:
            return load.bytes


def _parts(slots: Sequence[int], loads: Mapping[int, Load]) -> Iterator[list[int]]:
    part: list[int] = []
    jobs = size = 0
    for slot in slots:
        more = loads.get(slot, NOTHING)
        if part and (len(part) == BATCH_SLOTS or jobs + more.jobs > BATCH_JOBS or size + more.bytes > BATCH_BYTES):
            yield part
            part, jobs, size = [], 0, 0
        part.append(slot)
        jobs += more.jobs
        size += more.bytes
    if part:
        yield part


# -- by load ----------------------------------------------------------------------------------------


@dataclass
class _Shard:
    """A shard's slots that hold something, (weight, slot) in order, and the sum of their weights."""

    index: int
    slots: list[tuple[int, int]] = field(default_factory=list)
    load: int = 0

    def add(self, weighted: tuple[int, int]) -> None:
        insort(self.slots, weighted)
        self.load += weighted[0]

    def take(self, place: int) -> tuple[int, int]:
        weighted = self.slots.pop(place)
        self.load -= weighted[0]
        return weighted

    def worth_moving(self, gap: int) -> int | None:
        """The place of the slot that brings this shard and one with `gap` less load together best."""
        fitting = bisect_right(self.slots, (gap // 2, SLOT_COUNT))
        if fitting:
            return fitting - 1
        # All are larger than half of the gap: the smallest one turns it around, which must be worth its move.
        return 0 if self.slots and self.slots[0][0] <= gap * 3 // 4 else None


def _even_by_load(owners: Sequence[int], shards: int, weights: Sequence[int]) -> list[int]:
    """The owners after loaded slots have moved; those of slots without weight stay, even where no shard is."""
    found = [_Shard(index) for index in range(shards)]
    homeless: list[tuple[int, int]] = []
    for slot, weight in enumerate(weights):
        if weight and owners[slot] < shards:
            found[owners[slot]].add((weight, slot))
        elif weight:
            homeless.append((weight, slot))
    for weighted in sorted(homeless, reverse=True):
        min(found, key=_fullness).add(weighted)
    tolerance = max(1, int(TOLERANCE * sum(weights) / shards))
    while _one_move(found, tolerance):
        pass
    moved = list(owners)
    for shard in found:
        for _, slot in shard.slots:
            moved[slot] = shard.index
    return moved


def _one_move(shards: Sequence[_Shard], tolerance: int) -> bool:
    """Move the slot that evens out most between the emptiest shard and the fullest one that has such a slot."""
    by_load = sorted(shards, key=_fullness)
    emptiest = by_load[0]
    for shard in reversed(by_load):
        gap = shard.load - emptiest.load
        if gap <= tolerance:
            return False
        place = shard.worth_moving(gap)
        if place is not None:
            emptiest.add(shard.take(place))
            return True
    return False


def _fullness(shard: _Shard) -> tuple[int, int]:
    return shard.load, shard.index


# -- by count ---------------------------------------------------------------------------------------


def _even_by_count(owners: Sequence[int], shards: int, may_move: Sequence[bool]) -> list[int]:
    """The owners after as few slots as possible have moved; those of shards that go must be free to move."""
    of_shard: list[list[int]] = [[] for _ in range(max(shards, *(owner + 1 for owner in owners)))]
    for slot, owner in enumerate(owners):
        of_shard[owner].append(slot)
    movable = [[slot for slot in slots if may_move[slot]] for slots in of_shard]
    wanted = _even_counts([len(slots) for slots in of_shard], [len(slots) for slots in movable], shards)
    missing = {shard: count - len(of_shard[shard]) for shard, count in enumerate(wanted)}
    receivers = [shard for shard in range(shards) if missing[shard] > 0]
    moved = list(owners)
    for shard, slots in enumerate(of_shard):
        leaving = _spread(movable[shard], len(slots) - (wanted[shard] if shard < shards else 0))
        while leaving:
            receiver = receivers[0]
            for slot in _spread(leaving, min(missing[receiver], len(leaving))):
                moved[slot] = receiver
                missing[receiver] -= 1
            if not missing[receiver]:
                receivers.pop(0)
            leaving = [slot for slot in leaving if moved[slot] == shard]
    return moved


def _even_counts(counts: Sequence[int], free: Sequence[int], shards: int) -> list[int]:
    """How many slots each shard is to have. `free` of its slots may move, and all of those beyond `shards`."""
    wanted, left = list(counts[:shards]), list(free[:shards])
    for _ in range(sum(counts[shards:])):
        emptiest = min(range(shards), key=lambda shard: (wanted[shard], shard))
        wanted[emptiest] += 1
        left[emptiest] += 1
    while True:
        emptiest = min(range(shards), key=lambda shard: (wanted[shard], shard))
        giving = [shard for shard in range(shards) if left[shard]]
        fullest = max(giving, key=lambda shard: (wanted[shard], -shard), default=emptiest)
        if wanted[fullest] - wanted[emptiest] < 2:
            return wanted
        wanted[fullest] -= 1
        left[fullest] -= 1
        wanted[emptiest] += 1
        left[emptiest] += 1


def _spread(slots: Sequence[int], count: int) -> list[int]:
    """So many of some slots, at even distances: neighbours have similar names (see `SlotMap.even`)."""
    return [slots[(2 * number + 1) * len(slots) // (2 * count)] for number in range(max(0, count))]
