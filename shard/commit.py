"""Group commit: results leave when the sync that began after their writes has returned.

While one sync runs (in a thread of its own, without the interpreter's lock), turns go on being
applied and written; their results gather and share the next sync. At most one sync is in the air.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue

from common.wire import Result
from shard.store import Store, StoreError


class Answers:
    """The results of some turns, by router, and the number of the last envelope they answer."""

    def __init__(self) -> None:
        self.results: dict[str, list[Result]] = {}
        self.numbers: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self.results or self.numbers)

    def add(self, router: str, result: Result) -> None:
        self.results.setdefault(router, []).append(result)

    def envelope_applied(self, router: str, number: int) -> None:
        self.numbers[router] = number

    def routers(self) -> list[str]:
        return list(self.results.keys() | self.numbers.keys())


class GroupCommit:
    """Which answers wait for which sync. All methods but the thread's are for the shard's one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._gathering = Answers()
        self._unsynced = False  # something was written since the last sync began
        self._in_air: Answers | None = None
        self._error: StoreError | None = None
        self._work: SimpleQueue[bool] = SimpleQueue()
        self._done: SimpleQueue[StoreError | None] = SimpleQueue()
        # Readable when a sync has ended: the shard polls it beside its sockets.
        self.wake_fd, self._wake_end = os.pipe()
        os.set_blocking(self.wake_fd, False)
        self._thread = threading.Thread(target=self._sync, name="sync", daemon=True)
        self._thread.start()

    @property
    def answers(self) -> Answers:
        """Where the turn that is being applied leaves its answers."""
        return self._gathering

    def written(self, changed: bool) -> Answers | None:
        """The turn was written; returns its answers when they need not wait for any sync."""
        self._unsynced = self._unsynced or changed
        if self._in_air is not None:
            return None
        if not self._unsynced:
            answers, self._gathering = self._gathering, Answers()
            return answers
        self._begin()
        return None

    def finished(self) -> Answers | None:
        """Called when `wake_fd` is readable: the answers whose sync has returned.

        Raises StoreError when it failed; what was written is then of unknown outcome.
        """
        try:
            os.read(self.wake_fd, 64)
        except BlockingIOError:
            return None
        error = self._done.get()
        if error is not None:
            raise error
        answers, self._in_air = self._in_air, None
        if self._unsynced:
            self._begin()
        elif self._gathering:  # turns that changed nothing, but may have seen what was not yet durable
            assert answers is not None
            self._merge(answers, self._gathering)
            self._gathering = Answers()
        return answers

    @property
    def idle(self) -> bool:
        """Nothing waits for a sync."""
        return self._in_air is None and not self._unsynced and not self._gathering

    def abandoned(self) -> list[Answers]:
        """After a failure: all answers that have not left."""
        left = [self._gathering] if self._in_air is None else [self._in_air, self._gathering]
        self._gathering, self._in_air = Answers(), None
        return left

    def close(self) -> None:
        """End the thread; it finishes a sync that is running."""
        self._work.put(False)
        self._thread.join()
        os.close(self.wake_fd)
        os.close(self._wake_end)

    def _begin(self) -> None:
        self._in_air, self._gathering = self._gathering, Answers()
        self._unsynced = False
        self._work.put(True)

    def _sync(self) -> None:
        while self._work.get():
            error: StoreError | None = None
            try:
                self._store.sync()
            except StoreError as failure:
                error = failure
            self._done.put(error)
            os.write(self._wake_end, b"\x00")

    @staticmethod
    def _merge(into: Answers, other: Answers) -> None:
        for router, results in other.results.items():
            into.results.setdefault(router, []).extend(results)
        into.numbers.update(other.numbers)
