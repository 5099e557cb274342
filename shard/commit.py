"""Group commit: results leave when the sync that began after their writes has returned.

While one sync runs, turns go on being applied and written; their results gather and share the next
sync. At most one sync is in the air. This is the rule alone: `turns` writes, `sync` waits for the disk.
"""

from __future__ import annotations

from common.wire import Result


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
        """Those that are answered, in the order in which they were first heard of."""
        return list(dict.fromkeys((*self.results, *self.numbers)))

    def merge(self, later: Answers) -> None:
        for router, results in later.results.items():
            self.results.setdefault(router, []).extend(results)
        self.numbers.update(later.numbers)


class GroupCommit:
    """Which answers wait for which sync."""

    def __init__(self) -> None:
        # Where the turn that is being applied leaves its answers.
        self.answers = Answers()
        self._unsynced = False  # something was written since the last sync began
        self._in_air: Answers | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing waits for a sync."""
        return self._in_air is None and not self._unsynced and not self.answers

    def written(self, changed: bool) -> Answers | None:
        """The turn was written; returns its answers when they need not wait for any sync."""
        self._unsynced = self._unsynced or changed
        if self._in_air is not None or self._unsynced:
            return None
        answers, self.answers = self.answers, Answers()
        return answers

    def begins_sync(self) -> bool:
        """Whether a sync has to begin now; what has gathered waits for it from here on."""
        if self._in_air is not None or not self._unsynced:
            return False
        self._in_air, self.answers = self.answers, Answers()
        self._unsynced = False
        return True

    def synced(self) -> Answers:
        """The sync in the air has returned; returns what waited for it."""
        answers, self._in_air = self._in_air, None
        assert answers is not None, "no sync is in the air"
        if not self._unsynced:  # turns that changed nothing, but may have seen what was not yet durable
            answers.merge(self.answers)
            self.answers = Answers()
        return answers

    def abandoned(self) -> list[Answers]:
        """After a failure: all answers that have not left."""
        left = [self.answers] if self._in_air is None else [self._in_air, self.answers]
        self.answers, self._in_air = Answers(), None
        return left
