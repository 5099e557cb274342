"""The disk of a shard: it outlives the shard's processes, and loses what was not synced when one dies."""

from __future__ import annotations

from shard.store_memory import MemoryStore
from tests.simulation.witness import Witness
from tests.simulation.world import World


class Disk:
    """One store with its witness."""

    def __init__(self, world: World, witness: Witness) -> None:
        self.store = MemoryStore()
        self.witness = witness
        self.is_of_no_use = False  # its shard was taken away
        self._world = world

    def end_sync(self, reach: int) -> None:
        """Raises StoreError."""
        before = self.store.unsynced
        self.store.end_sync(reach)
        if not self.is_of_no_use:
            self.witness.synced(before - self.store.unsynced)

    def crash(self) -> None:
        """A process or the whole host died: the front of what was not synced may have survived."""
        kept = self._world.number(0, self.store.unsynced)
        self.store = self.store.crash(kept)
        if not self.is_of_no_use:
            self.witness.crashed(kept, self.store)

    def closed(self) -> None:
        """The process has ended in order, with everything synced."""
        self.store = self.store.crash()
        if not self.is_of_no_use:
            self.witness.closed(self.store)
