"""A shard's turns, from the envelopes of routers to the envelopes that answer them.

A turn: what is due and what came in is applied, `close` gathers the results, `write` hands the
changes to the store. Results leave, as messages for the shell to send, when they are durable. There
is no socket, clock or thread in here, so the simulator runs the same turns as the process.
"""

from __future__ import annotations

from collections.abc import Callable

from common import wire
from shard.commit import Answers, GroupCommit
from shard.machine import Machine
from shard.state import Instant
from shard.store import Store

INTERNAL = 13


# Jobs put, leased and deleted, about: the sync of one turn goes on while the next is applied, and its results are
# worked off by routers meanwhile.
TURN_CHANGES = 2_048


class Turns:
    """The turns of one shard process. `begin_sync` starts a sync, whose end `synced` or `failed` tells."""

    def __init__(
        self, machine: Machine, store: Store, name: str, generation: int, begin_sync: Callable[[], None]
    ) -> None:
        self._machine = machine
        self._store = store
        self._name = name
        self._generation = generation
        self._begin_sync = begin_sync
        self._commit = GroupCommit()
        # (router, message) in the order in which they are to leave; the shell empties it.
        self.messages: list[tuple[str, bytes]] = []
        self._numbers: dict[str, int] = {}
        self._gone: set[str] = set()  # names are never used again

    @property
    def is_idle(self) -> bool:
        """Nothing waits for a sync."""
        return self._commit.is_idle

    @property
    def is_full(self) -> bool:
        """What else has come had better be the next turn's. One envelope at least belongs to this one: what is due
        may fill a turn on its own, and the next, and nobody would be served meanwhile."""
        return sum(map(len, self._store.pending)) >= TURN_CHANGES

    def take(self, message: bytes, now: Instant) -> int | None:
        """Apply an envelope; how many operations it had. None: it is from a router that has ended, or for
        another process. Raises WireError for what is no envelope."""
        envelope = wire.unpack(message)
        if envelope.generation != self._generation or envelope.sender in self._gone:
            return None
        for operation in envelope.items:
            self._machine.apply(envelope.sender, operation, now, envelope.epoch)
        self._commit.answers.envelope_applied(envelope.sender, envelope.number)
        return len(envelope.items)

    def router_gone(self, router: str, now: Instant) -> None:
        """A router process has ended: nothing of it is taken any more, and nothing sent to it."""
        self._gone.add(router)
        self._numbers.pop(router, None)
        self._machine.router_gone(router, now)

    def close(self) -> None:
        """Everything of this turn is applied."""
        for router, result in self._machine.results:
            self._commit.answers.add(router, result)
        self._machine.results.clear()
        self._machine.end_turn()

    def write(self) -> None:
        """Write the closed turn. Raises StoreBusy, after which it can be tried again, or StoreError."""
        answers = self._commit.written(self._store.write())
        if answers is not None:
            self._leave(answers)
        self._sync_if_need_be()

    def synced(self) -> None:
        """The sync that was begun has returned."""
        answers = self._commit.synced()
        self._sync_if_need_be()
        self._leave(answers)

    def failed(self, error: str) -> None:
        """A write or sync has failed: nothing that waited for it is known to be done. `error` is one line."""
        for answers in self._commit.abandoned():
            for results in answers.results.values():
                for result in results:
                    result[1:] = [INTERNAL, f"the write failed, the outcome is unknown: {error}"]
            # Not acknowledged: what their envelopes gave back has to be given back again to our successor.
            answers.numbers.clear()
            self._leave(answers)

    def _sync_if_need_be(self) -> None:
        if self._commit.begins_sync():
            self._begin_sync()

    def _leave(self, answers: Answers) -> None:
        for router in answers.routers():
            if router in self._gone:
                continue
            number = self._numbers[router] = answers.numbers.get(router, self._numbers.get(router, 0))
            results = answers.results.get(router, [])
            self.messages.append(
                (router, wire.pack(self._generation, self._name, number, results, self._machine.epoch))
            )
