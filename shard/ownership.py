"""Which slots a shard owns, and what that means for the operations that come in.

How it works. An operation about a slot is applied if the slot is ours by the newest map that is known
here, and refused as MOVED if it is not: its router sends it where the slot is. Two kinds have to wait:

    ahead    sent by a newer map than ours, which is on its way: it is applied when that has come
    held     about slots that are leaving (see `migration`): it is applied, or refused, when that is over

Both keep their order. What ends something that was begun here is never made to wait (`_ENDINGS`), so what
it ends must not be waiting either: a CANCEL takes out the poll, an ABORT the PREPARE that it is about.

While slots are held no timer fires on this shard: what was copied of a held slot must not change any
more. That is a matter of milliseconds, and no longer than a tenth of a second in a row.

The newest epoch is stored. A shard that is started by an older map says so and does not start: by such
a map it would delete what it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from common.slots import SLOT_COUNT, slots_owned
from common.wire import MoveCommand, Op, Operation, slots_of
from shard import keys
from shard.migration import Arrival, Departure, Sweep, rows_of, slot_of_row
from shard.store import Family, Store, StoreError

# Operations that end what other operations have begun here.
_ENDINGS = frozenset(
    {
        Op.CANCEL,
        Op.CONFIRM,
        Op.GIVE_BACK,
        Op.KEEP,
        Op.DECIDE,
        Op.COMMIT,
        Op.ABORT,
        Op.RESOLVE,
        Op.FORGET,
    }
)


# How long the shell may sleep while slots are held and no timer fires, in ms.
HELD_MS = 100


class MoveRefused(Exception):
    """A step of a move that cannot be taken; the text says why."""


class SlotJobs(Protocol):
    """What the state machine does for slots that come and go."""

    def apply_here(self, router: str, operation: Operation) -> None:
        """Apply an operation: nothing is in its way."""

    def refuse_moved(self, router: str, operation: Operation) -> None:
        """Answer that the operation is about a slot of another shard."""

    def never_applied(self, operation: Operation) -> None:
        """An operation will not be applied, here or elsewhere, and is not answered."""

    def load_slots(self, slots: Iterable[int]) -> None:
        """Take what is stored of slots into memory."""

    def drop_slots(self, slots: frozenset[int]) -> None:
        """Forget slots, and answer MOVED to everybody who waits for something of them."""

    def is_open(self, slots: frozenset[int]) -> bool:
        """Whether something of these slots was begun and is not over."""

    def gives_back_loaded(self, op_ids: list[int], slots: frozenset[int]) -> bool:
        """Whether one of these claims has jobs of these slots and was made before our start."""

    def too_late(self, router: str, operation: Operation) -> None:
        """Answer a PREPARE whose transaction is settled."""

    def serve_slots(self, slots: frozenset[int]) -> None:
        """Hand out what is ready in these slots to those who wait for it."""

    def not_before(self, wall_ms: int) -> None:
        """Our wall clock never runs behind this."""


class Ownership:
    """The slots of one shard. `owners` is the shard of each slot by the map of that epoch; None: all are ours.

    Raises StoreError for a map that is older than one by which the shard has served.
    """

    def __init__(self, store: Store, shard: int, owners: Sequence[int] | None, epoch: int, jobs: SlotJobs) -> None:
        self.epoch = epoch
        self.owned = _owned_by(shard, owners)
        self.held_slots: frozenset[int] = frozenset()
        self.sweep = Sweep(store)
        self._store = store
        self._shard = shard
        self._jobs = jobs
        self._departure: Departure | None = None
        self._arrival: Arrival | None = None
        self._ahead: list[tuple[str, Operation, int]] = []  # with the epoch by which it was sent
        self._steps: dict[str, Callable[..., object]] = {
            MoveCommand.CLEAR: self._clear,
            MoveCommand.OPEN: self._open,
            MoveCommand.READ: self._read,
            MoveCommand.CHANGES: self._changes,
            MoveCommand.HOLD: self._hold,
            MoveCommand.PAUSE: self._pause,
            MoveCommand.RESUME: self._resume,
            MoveCommand.RECEIVE: self._receive,
            MoveCommand.DISCARD: self._discard,
        }
        stored = store.get(Family.META, keys.EPOCH)
        stored_epoch = 1 if stored is None else keys.read_epoch_value(stored)
        if stored_epoch > epoch:
            raise StoreError(
                f"shard {shard} has served by slot map {stored_epoch}, and slots.json holds map {epoch}: it is older "
                "than the data, and by it jobs would be deleted; restore the slots.json that belongs to this data"
            )
        if stored_epoch < epoch:
            store.put(Family.META, keys.EPOCH, keys.epoch_value(epoch))

    def is_on_the_way(self, slot: int) -> bool:
        """Whether a slot that is not owned is arriving, or is being deleted."""
        return (self._arrival is not None and slot in self._arrival.slots) or self.sweep.has_any((slot,))

    # -- operations ---------------------------------------------------------------------------

    def take(self, router: str, operation: Operation, epoch: int) -> None:
        """An operation that was sent by the map of this epoch."""
        kind = operation[1]
        if kind == Op.CANCEL:
            for _, cancelled in self._take_out(lambda waiting: bool(waiting[0] == operation[2])):
                self._jobs.never_applied(cancelled)
        elif kind in (Op.ABORT, Op.RESOLVE):
            about = operation[2]
            for owner, prepare in self._take_out(lambda waiting: waiting[1] == Op.PREPARE and waiting[2] == about):
                self._jobs.too_late(owner, prepare)
        if kind in _ENDINGS:
            if kind == Op.GIVE_BACK and self._departure is not None and self._changes_held(operation[2]):
                self._departure.held.append((router, operation))
            else:
                self._jobs.apply_here(router, operation)
        elif epoch > self.epoch:
            self._ahead.append((router, operation, epoch))
        else:
            self.apply_if_ours(router, operation)

    def apply_if_ours(self, router: str, operation: Operation) -> None:
        """Apply an operation, refuse it, or hold it."""
        slots = slots_of(operation)
        if not slots <= self.owned:
            self._jobs.refuse_moved(router, operation)
        elif self._departure is not None and (slots & self.held_slots or self._hands_out_all(operation)):
            self._departure.held.append((router, operation))
        else:
            self._jobs.apply_here(router, operation)

    def _hands_out_all(self, operation: Operation) -> bool:
        """A drain of all queues, while some of them are held."""
        return bool(self.held_slots and operation[1] == Op.DRAIN and operation[2] is None)

    def _changes_held(self, op_ids: list[int]) -> bool:
        """Whether giving these back changes what is held: HOLD does not wait for claims of before our start."""
        return bool(self.held_slots) and self._jobs.gives_back_loaded(op_ids, self.held_slots)

    def _take_out(self, is_meant: Callable[[Operation], bool]) -> list[tuple[str, Operation]]:
        """Operations that wait here and are not to be applied any more."""
        found = [(router, operation) for router, operation, _ in self._ahead if is_meant(operation)]
        if found:
            self._ahead = [entry for entry in self._ahead if not is_meant(entry[1])]
        departure = self._departure
        if departure is not None:
            found += [entry for entry in departure.held if is_meant(entry[1])]
            departure.held = [entry for entry in departure.held if not is_meant(entry[1])]
        return found

    # -- events -------------------------------------------------------------------------------

    def map_changed(self, epoch: int, owners: Sequence[int]) -> None:
        """The slot map was replaced: some slots may be ours from now on, others no more."""
        before, self.owned, self.epoch = self.owned, _owned_by(self._shard, owners), epoch
        self._store.put(Family.META, keys.EPOCH, keys.epoch_value(epoch))
        lost = before - self.owned
        held: list[tuple[str, Operation]] = []
        if self._departure is not None and self._departure.slots <= lost:
            held = self._departure.held
            self._departure, self.held_slots = None, frozenset()
        if lost:
            self._jobs.drop_slots(lost)
            self.sweep.add(lost)
        if self._arrival is not None and self._arrival.slots & self.owned:
            self._arrival = None
        if self.owned - before:
            self._jobs.load_slots(sorted(self.owned - before))
        for router, operation in held:
            self.apply_if_ours(router, operation)
        ahead, self._ahead = self._ahead, []
        for router, operation, sent_by in ahead:
            self.take(router, operation, sent_by)

    def router_gone(self, router: str) -> None:
        """A router has ended: what it drove is given up, and nobody waits for its answers."""
        self._ahead = [entry for entry in self._ahead if entry[0] != router]
        if self._departure is not None:
            self._departure.held = [entry for entry in self._departure.held if entry[0] != router]
        self._resume(router)
        self._discard(router)

    def end_turn(self) -> None:
        """Everything of this turn is in the store's changes."""
        if self._departure is not None:
            self._departure.note(self._store.pending)

    # -- moves --------------------------------------------------------------------------------

    def step(self, router: str, command: str, arguments: list[Any]) -> object:
        """One step of a move (see `common.wire.MoveCommand`). Raises MoveRefused."""
        return self._steps[command](router, *arguments)

    def _clear(self, router: str, slots: list[int]) -> bool:
        if not self.owned.isdisjoint(slots):
            raise MoveRefused(f"shard {self._shard} owns some of these slots already")
        if self._arrival is not None and self._arrival.router != router:
            raise MoveRefused(f"{self._arrival.router} moves slots to shard {self._shard} already")
        if self._arrival is None or self._arrival.slots != frozenset(slots):
            self._drop_arrival()
            self._arrival = Arrival(router, slots)
            self.sweep.add(slots)
        return not self.sweep.has_any(slots)

    def _receive(self, router: str, rows: list[list[Any]], wall_ms: int) -> None:
        arrival = self._arrival
        if arrival is None or arrival.router != router or self.sweep.has_any(arrival.slots):
            raise MoveRefused(f"shard {self._shard} expects no slots from {router}")
        self._jobs.not_before(wall_ms)
        for family, key, value in rows_of(rows):
            assert slot_of_row(family, key) in arrival.slots
            if value is None:
                self._store.delete(family, key)
            else:
                self._store.put(family, key, value)

    def _discard(self, router: str) -> None:
        if self._arrival is not None and self._arrival.router == router:
            self._drop_arrival()

    def _drop_arrival(self) -> None:
        if self._arrival is not None:
            self.sweep.add(self._arrival.slots)
            self._arrival = None

    def _open(self, router: str, slots: list[int]) -> None:
        if not self.owned.issuperset(slots):
            raise MoveRefused(f"shard {self._shard} does not own all of these slots")
        if self._departure is not None and self._departure.router != router:
            raise MoveRefused(f"{self._departure.router} moves slots from shard {self._shard} already")
        self._end_departure()
        self._departure = Departure(self._store, router, slots)

    def _read(self, router: str, max_bytes: int) -> object:
        return self._departure_of(router).read(max_bytes)

    def _changes(self, router: str, max_bytes: int) -> object:
        return self._departure_of(router).changes(max_bytes)

    def _hold(self, router: str) -> bool:
        departure = self._departure_of(router)
        self.held_slots = departure.slots
        return not self._jobs.is_open(departure.slots)

    def _pause(self, router: str) -> None:
        departure = self._departure_of(router)
        held, departure.held = departure.held, []
        self._let_go(departure, held)

    def _resume(self, router: str) -> None:
        if self._departure is not None and self._departure.router == router:
            self._end_departure()

    def _end_departure(self) -> None:
        departure, self._departure = self._departure, None
        if departure is not None:
            self._let_go(departure, departure.held)

    def _let_go(self, departure: Departure, held: list[tuple[str, Operation]]) -> None:
        """Serve as if nothing had been held."""
        self.held_slots = frozenset()
        for router, operation in held:
            self.apply_if_ours(router, operation)
        self._jobs.serve_slots(departure.slots)

    def _departure_of(self, router: str) -> Departure:
        if self._departure is None or self._departure.router != router:
            raise MoveRefused(f"shard {self._shard} knows of no move by {router}")
        return self._departure


def _owned_by(shard: int, owners: Sequence[int] | None) -> frozenset[int]:
    if owners is None:
        return frozenset(range(SLOT_COUNT))
    return frozenset(slots_owned(shard, owners))
