"""Moving slots between the shards of a running server, one batch after another.

A run has three steps: shards are added, slots move by the plan, shards are taken away. The server does the
work and remembers it; nothing is written down here. A run that ends early, for whatever reason, leaves a map
with which the server goes on, and the next run plans again from there: what has arrived stays, and a batch
of which an answer was lost has moved or has not.

Everything goes through `Cluster`, so that this can be tried without a server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from common import admin_pb2 as pb
from common.admin_client import AdminUnavailableError
from common.admin_socket import AdminError
from common.rebalance_plan import NOTHING, Batch, By, Load, Move, batches, plan
from common.slots import SHARDS_MAX, SLOT_COUNT, SlotMap

# What an estimate goes by where no rate limit is slower: measured on two cores that had other work as well.
# A batch takes this long whatever is in it, in seconds;
BATCH_S = 0.04
# then jobs are copied, whatever their size, and their bytes, per second.
JOBS_PER_S = 8_000
BYTES_PER_S = 25_000_000
# Pauses before a call is made again that was refused for the moment, in seconds. A shard that was killed is
# back by then; one that is not needs somebody to look at it.
RETRY_S = (0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0)
# The same before shards end: transactions that they keep a part in have to be over, and shards that were
# taken away before have to have ended.
SHRINK_RETRY_S = (*RETRY_S, *[5.0] * 12)
# How long shards that were added may take to serve, and how often it is looked whether they do, in seconds.
UP_S = 60.0
UP_LOOK_S = 0.1
# How often a pause looks whether it is to end, in seconds.
STOP_LOOK_S = 0.1
# Slots that an error names; a batch can have sixty more.
SLOTS_NAMED = 3

GO_ON = "the same command goes on from there"

_T = TypeVar("_T")


class Cluster(Protocol):
    """A server as far as this needs it; `AdminClient` is one. Every method raises AdminError."""

    def slot_map(self, with_loads: bool) -> pb.ShowSlotMapResponse: ...

    def set_shards(self, shards: int) -> pb.SetShardsResponse: ...

    def move_slots(self, slots: Sequence[int], target: int, bytes_per_second: int) -> pb.MoveSlotsResponse: ...

    def verify_shard(self, shard: int) -> Iterator[pb.VerifyShardResponse]: ...

    def shards(self) -> list[pb.Shard]: ...


# -- what there is, and what is to be ---------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What a shard owns: slots, and the jobs, dead letters counted, and about how many bytes in them."""

    shard: int
    slots: int
    jobs: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What moves, in which batches, and how many shards there are at the end. `slot_map` and `loads` are those
    of the moment when it was made."""

    slot_map: SlotMap
    loads: Mapping[int, Load]
    shards: int
    batches: tuple[Batch, ...]

    @property
    def slots(self) -> int:
        return sum(len(batch.slots) for batch in self.batches)

    @property
    def jobs(self) -> int:
        return sum(batch.jobs for batch in self.batches)

    @property
    def bytes(self) -> int:
        return sum(batch.bytes for batch in self.batches)

    @property
    def changes_anything(self) -> bool:
        return bool(self.batches) or self.shards != self.slot_map.shards

    def seconds(self, bytes_per_second: int) -> float:
        """About how long it takes, with this rate limit; 0 is none."""
        return sum(batch_seconds(batch, bytes_per_second) for batch in self.batches)

    def before(self) -> list[Share]:
        return shares(self.slot_map.owners, self.slot_map.shards, self.loads)

    def after(self) -> list[Share]:
        owners = list(self.slot_map.owners)
        for batch in self.batches:
            for slot in batch.slots:
                owners[slot] = batch.target
        return shares(owners, self.shards, self.loads)


def batch_seconds(batch: Batch, bytes_per_second: int) -> float:
    """About how long a batch takes, with this rate limit; 0 is none."""
    copying = batch.jobs / JOBS_PER_S + batch.bytes / BYTES_PER_S
    return BATCH_S + (max(copying, batch.bytes / bytes_per_second) if bytes_per_second else copying)


def shares(owners: Sequence[int], shards: int, loads: Mapping[int, Load]) -> list[Share]:
    """What each shard owns."""
    slots, jobs, size = [0] * shards, [0] * shards, [0] * shards
    for slot, owner in enumerate(owners):
        load = loads.get(slot, NOTHING)
        slots[owner] += 1
        jobs[owner] += load.jobs
        size[owner] += load.bytes
    return [Share(shard, slots[shard], jobs[shard], size[shard]) for shard in range(shards)]


def known_map(answer: pb.ShowSlotMapResponse) -> SlotMap:
    """The slot map in an answer. Raises SlotMapError for one that cannot be."""
    return SlotMap(answer.epoch, answer.shards, tuple(answer.owners))


def known_loads(answer: pb.ShowSlotMapResponse) -> dict[int, Load]:
    return {load.slot: Load(load.jobs, load.bytes) for load in answer.loads}


def even_plan(answer: pb.ShowSlotMapResponse, shards: int | None, by: By) -> Plan:
    """The plan after which so many shards, None for those that there are, own all slots evenly.

    Raises AdminError for a number of shards that cannot be.
    """
    slot_map, loads = known_map(answer), known_loads(answer)
    wanted = slot_map.shards if shards is None else shards
    if not 1 <= wanted <= SHARDS_MAX:
        raise AdminError(f"there can be 1 to {SHARDS_MAX} shards, not {wanted}")
    return Plan(slot_map, loads, wanted, tuple(batches(plan(slot_map, wanted, loads, by), loads)))


def single_plan(answer: pb.ShowSlotMapResponse, slots: Collection[int], target: int | None) -> Plan:
    """The plan after which one shard owns these slots; None is one that owns nothing else.

    That is a shard without slots, where there is one, else one that is added. Slots that are there already
    stay; raises AdminError when all are, and for slots and shards that there are not.
    """
    slot_map, loads = known_map(answer), known_loads(answer)
    for slot in slots:
        if not 0 <= slot < SLOT_COUNT:
            raise AdminError(f"slots are 0 to {SLOT_COUNT - 1}, not {slot}")
    if target is None:
        target = _own_shard(slot_map, slots)
    elif not 0 <= target < slot_map.shards:
        raise AdminError(f"shards are 0 to {slot_map.shards - 1}, not {target}; `--to new` adds one")
    moves = [Move(slot, slot_map.owners[slot], target) for slot in sorted(slots) if slot_map.owners[slot] != target]
    if not moves:
        raise AdminError(f"{named_slots(sorted(slots))} on shard {target} already")
    return Plan(slot_map, loads, max(slot_map.shards, target + 1), tuple(batches(moves, loads)))


def _own_shard(slot_map: SlotMap, slots: Collection[int]) -> int:
    """A shard that owns none but these slots: then it was interrupted, or is done."""
    others = {owner for slot, owner in enumerate(slot_map.owners) if slot not in slots}
    own = next((shard for shard in range(slot_map.shards) if shard not in others), slot_map.shards)
    if own == SHARDS_MAX:
        raise AdminError(f"there are {SHARDS_MAX} shards, which is all that there can be")
    return own


def named_slots(slots: Sequence[int]) -> str:
    """Slots and a verb: "slot 7 is", "slots 7, 8, 9 and 61 more are"."""
    if len(slots) == 1:
        return f"slot {slots[0]} is"
    more = f" and {len(slots) - SLOTS_NAMED} more" if len(slots) > SLOTS_NAMED else ""
    return f"slots {', '.join(map(str, slots[:SLOTS_NAMED]))}{more} are"


# -- carrying it out --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardsSet:
    """There are so many shards now."""

    shards: int


@dataclass(frozen=True)
class BatchMoved:
    """A batch has moved: records and bytes that were copied, and how long operations on its slots were held.

    The three are 0 for one whose answer was lost.
    """

    batch: Batch
    records: int
    bytes: int
    hold_ms: int


@dataclass(frozen=True)
class Postponed:
    """Something was refused for the moment and is tried again after a pause."""

    what: str
    reason: str
    pause_s: float


Event = ShardsSet | BatchMoved | Postponed


@dataclass(frozen=True)
class Summary:
    """What a run did. `hold_ms` is the longest; `is_complete` is false when it was asked to stop."""

    slots: int
    jobs: int
    records: int
    bytes: int
    hold_ms: int
    seconds: float
    epoch: int
    shards: int
    is_complete: bool


class Stop:
    """Asks a run to end after what it is at. May be asked in a signal handler: it takes no lock."""

    def __init__(self) -> None:
        self.is_asked = False

    def pause(self, seconds: float) -> None:
        """Sleep, or less long when the end is asked for."""
        until = time.monotonic() + seconds
        while not self.is_asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, STOP_LOOK_S))


class Rebalance:
    """Carries out a plan. One `run` per object, which raises AdminError; `tell` hears what happens meanwhile."""

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        bytes_per_second: int,
        tell: Callable[[Event], None],
        stop: Stop,
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._bytes_per_second = bytes_per_second
        self._tell = tell
        self._stop = stop
        self._moved: list[BatchMoved] = []
        self._batch_begun = 0.0  # monotonic seconds

    def run(self) -> Summary:
        begun = time.monotonic()
        is_complete = self._grow() and self._move_all() and self._shrink()
        slot_map = known_map(self._cluster.slot_map(False))
        return Summary(
            slots=sum(len(moved.batch.slots) for moved in self._moved),
            jobs=sum(moved.batch.jobs for moved in self._moved),
            records=sum(moved.records for moved in self._moved),
            bytes=sum(moved.bytes for moved in self._moved),
            hold_ms=max((moved.hold_ms for moved in self._moved), default=0),
            seconds=time.monotonic() - begun,
            epoch=slot_map.epoch,
            shards=slot_map.shards,
            is_complete=is_complete,
        )

    def _grow(self) -> bool:
        shards = self._plan.shards
        if shards <= self._plan.slot_map.shards:
            return True
        return self._set_shards(f"adding shards up to {shards}", RETRY_S) and self._await_up()

    def _shrink(self) -> bool:
        shards = self._plan.shards
        if shards >= self._plan.slot_map.shards:
            return True
        return self._set_shards(f"taking shards away down to {shards}", SHRINK_RETRY_S)

    def _set_shards(self, what: str, pauses: Sequence[float]) -> bool:
        shards = self._plan.shards

        def attempt() -> bool:
            # Asked first: of a change that was made the answer may have been lost.
            if self._cluster.slot_map(False).shards != shards:
                self._cluster.set_shards(shards)
            return True

        if self._tried(what, attempt, pauses) is None:
            return False
        self._tell(ShardsSet(shards))
        return True

    def _await_up(self) -> bool:
        """Until the shards that were added serve: a move to one before that is refused."""
        give_up_at = time.monotonic() + UP_S
        while not self._stop.is_asked:
            why_not = self._why_not_up()
            if why_not is None:
                return True
            if time.monotonic() >= give_up_at:
                raise AdminError(f"{why_not}, the server's log says why; {GO_ON}")
            self._stop.pause(UP_LOOK_S)
        return False

    def _why_not_up(self) -> str | None:
        """Why not all shards serve, None when they do."""
        try:
            up = {shard.index for shard in self._cluster.shards() if shard.up}
        except AdminUnavailableError as error:
            return str(error)
        return next((f"shard {shard} does not start" for shard in range(self._plan.shards) if shard not in up), None)

    def _move_all(self) -> bool:
        for batch in self._plan.batches:
            self._wait_for_rate()
            if self._stop.is_asked:
                return False
            self._batch_begun = time.monotonic()
            moved = self._move(batch)
            if moved is None:
                return False
            self._moved.append(moved)
            self._tell(moved)
        return True

    def _wait_for_rate(self) -> None:
        """The server keeps to the rate within a batch, from its second read on; what is left is waited for here."""
        if self._moved and self._bytes_per_second:
            wanted_s = self._moved[-1].bytes / self._bytes_per_second
            self._stop.pause(max(0.0, self._batch_begun + wanted_s - time.monotonic()))

    def _move(self, batch: Batch) -> BatchMoved | None:
        """None when it did not come about before a stop was asked for."""

        def attempt() -> BatchMoved:
            owners = self._cluster.slot_map(False).owners
            slots = [slot for slot in batch.slots if owners[slot] == batch.source]
            if not slots:
                return BatchMoved(batch, 0, 0, 0)
            done = self._cluster.move_slots(slots, batch.target, self._bytes_per_second)
            return BatchMoved(batch, done.records, done.bytes, done.hold_ms)

        what = f"moving {_counted_slots(len(batch.slots))} from shard {batch.source} to {batch.target}"
        return self._tried(what, attempt, RETRY_S)

    def _tried(self, what: str, attempt: Callable[[], _T], pauses: Sequence[float]) -> _T | None:
        """What comes of it once it is not refused for the moment; None when a stop was asked for before."""
        for pause_s in pauses:
            try:
                return attempt()
            except AdminUnavailableError as error:
                self._tell(Postponed(what, str(error), pause_s))
                self._stop.pause(pause_s)
                if self._stop.is_asked:
                    return None
        try:
            return attempt()
        except AdminUnavailableError as error:
            raise AdminError(f"{what}: {error}; {GO_ON}") from error


def _counted_slots(number: int) -> str:
    return "1 slot" if number == 1 else f"{number} slots"
