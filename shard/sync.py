"""The thread that waits for the disk, so that turns go on meanwhile.

The store lets go of the interpreter's lock while it syncs.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue

from shard.store import Store, StoreError


class SyncThread:
    """Syncs a store when it is told to, one sync at a time. All methods are for the shard's one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._work: SimpleQueue[bool] = SimpleQueue()
        self._done: SimpleQueue[StoreError | None] = SimpleQueue()
        # Readable when a sync has ended: the shard polls it beside its sockets.
        self.wake_fd, self._wake_end = os.pipe()
        os.set_blocking(self.wake_fd, False)
        self._thread = threading.Thread(target=self._run, name="sync", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Make durable what is written by now."""
        self._work.put(True)

    def has_returned(self) -> bool:
        """Called when `wake_fd` is readable: whether the sync has ended.

        Raises StoreError when it failed; what was written is then of unknown outcome.
        """
        try:
            os.read(self.wake_fd, 64)
        except BlockingIOError:
            return False
        error = self._done.get()
        if error is not None:
            raise error
        return True

    def close(self) -> None:
        """End the thread; it finishes a sync that is running."""
        self._work.put(False)
        self._thread.join()
        os.close(self.wake_fd)
        os.close(self._wake_end)

    def _run(self) -> None:
        while self._work.get():
            error: StoreError | None = None
            try:
                self._store.sync()
            except StoreError as failure:
                error = failure
            self._done.put(error)
            os.write(self._wake_end, b"\x00")
