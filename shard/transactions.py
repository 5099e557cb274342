"""What routers ask of transactions, and what a shard asks them: operations and results around `participant`."""

from __future__ import annotations

from collections.abc import Callable, Set

from common.wire import Op, Operation, Result
from shard.participant import Participant

OK = 0
# How long a shard waits before it asks again what became of a transaction, in ms.
ASK_AGAIN_MS = 1_000


class Transactions:
    """The operations DECIDE to FORGET of one shard. `routers` are those that live, `results` take the answers."""

    def __init__(self, participant: Participant, routers: Set[str], results: list[tuple[str, Result]]) -> None:
        self._participant = participant
        self._routers = routers
        self._results = results
        self._asked = 0  # questions put to routers, which take them in turn
        self._ask_at = 0  # monotonic ms
        self.handlers: dict[int, Callable[[str, Operation], None]] = {
            Op.DECIDE: self._decide,
            Op.COMMIT: self._commit,
            Op.ABORT: self._abort,
            Op.RESOLVE: self._resolve,
            Op.FORGET: self._forget,
        }

    def next_question(self) -> int | None:
        """When routers are asked next, monotonic ms."""
        return self._ask_at if self._participant.is_in_doubt and self._routers else None

    def ask(self, mono_ms: int) -> None:
        """Put what is open here, and whose coordinator has died, to a router: another one each time."""
        if self._participant.is_in_doubt and self._routers and mono_ms >= self._ask_at:
            self._ask_at = mono_ms + ASK_AGAIN_MS
            self._asked += 1
            router = sorted(self._routers)[self._asked % len(self._routers)]
            for question in self._participant.questions():
                self._results.append((router, [0, OK, question]))

    def _decide(self, router: str, operation: Operation) -> None:
        op_id, _, transaction, participants = operation
        self._results.append((router, [op_id, OK, self._participant.decide(router, transaction, participants)]))

    def _commit(self, router: str, operation: Operation) -> None:
        self._participant.commit(operation[2])
        self._results.append((router, [operation[0], OK, None]))

    def _abort(self, router: str, operation: Operation) -> None:
        self._participant.abort(operation[2])
        self._results.append((router, [operation[0], OK, None]))

    def _resolve(self, router: str, operation: Operation) -> None:
        op_id, _, transaction, coordinator = operation
        # What a coordinator asks itself comes after all that it asked before.
        may_prepare = coordinator in self._routers and coordinator != router
        self._results.append((router, [op_id, OK, self._participant.resolve(coordinator, transaction, may_prepare)]))

    def _forget(self, router: str, operation: Operation) -> None:
        self._participant.forget(operation[2])
        self._results.append((router, [operation[0], OK, None]))
