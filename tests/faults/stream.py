"""Producers and workers that go on whatever happens, and a record of what the server has told them.

Every job has a text of its own. What is known of it comes from answers alone:

- confirmed: its enqueue was answered with OK, so it must be delivered until it is acked;
- acked: its ack was answered with OK, so it must not be delivered again;
- in doubt: an ack was sent and its answer was lost, so either may be true.

The clients must have no retry policy: one that repeats an enqueue whose connection broke may store it
twice, and one that repeats an ack cannot tell whether the first was done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import count

from sepp import EnqueueRequest, Payload, SeppClient
from sepp.errors import ClientError, LeaseError

from tests.integration.clients import reserve, texts
from tests.integration.server import WAIT_S

# Short, so that what a killed worker or router held comes back within the test; the job of a worker
# that is slower than this is delivered twice, which the record allows for.
LEASE = timedelta(seconds=2)
WAIT = timedelta(seconds=0.5)
# More than any job is delivered in a test: none may become a dead letter.
ATTEMPTS = 100
# Between two tries of a client whose server is away, in seconds.
PAUSE_S = 0.05

_numbers = count()


class Stream:
    """Jobs on their way through some queues. `texts` are what jobs are known by."""

    def __init__(self, *queues: str) -> None:
        self.queues = queues
        self.confirmed: dict[str, str] = {}  # text: queue
        self.acked: dict[str, int] = {}  # text: the attempt that was acked
        self.in_doubt: set[str] = set()
        self.revenants: list[tuple[str, int]] = []  # delivered after their ack was confirmed, and the attempt
        self.acks = Counter[str]()  # by queue
        self._tasks: list[asyncio.Task[None]] = []
        self._moved = asyncio.Condition()

    # -- those who work -------------------------------------------------------------------------

    def produce(self, client: SeppClient, queue: str) -> None:
        self._tasks.append(asyncio.create_task(self._produce(client, queue)))

    def work(self, client: SeppClient, *queues: str) -> None:
        self._tasks.append(asyncio.create_task(self._work(client, *queues)))

    async def until(self, enough: Callable[[], bool]) -> None:
        """Until the record shows something."""
        async with self._moved:
            await asyncio.wait_for(self._moved.wait_for(enough), WAIT_S)

    async def end(self) -> None:
        """Everybody stops; what is under way is given up."""
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        self._tasks.clear()

    async def _produce(self, client: SeppClient, queue: str) -> None:
        while True:
            text = f"job {next(_numbers)}"
            try:
                await client.enqueue(
                    EnqueueRequest(queue, "letter", Payload(text.encode(), "text"), max_attempts=ATTEMPTS)
                )
            except ClientError:  # it may be stored or not
                await asyncio.sleep(PAUSE_S)
                continue
            self.confirmed[text] = queue
            await self._tell()

    async def _work(self, client: SeppClient, *queues: str) -> None:
        while True:
            try:
                await self.take(client, *queues, wait=WAIT)
            except ClientError:
                await asyncio.sleep(PAUSE_S)

    async def take(self, client: SeppClient, *queues: str, wait: timedelta) -> int:
        """Reserve some jobs and ack them; how many came. Raises ClientError."""
        jobs = await reserve(client, *queues, max_jobs=8, lease=LEASE, wait=wait)
        named = list(zip(texts(jobs), jobs, strict=True))
        # An answer with an earlier attempt may only have been slow.
        again = [(text, one.ctx.attempt) for text, one in named if one.ctx.attempt >= self.acked.get(text, ATTEMPTS)]
        self.revenants += again
        for text, one in named:
            try:
                await client.ack(one.ctx)
            except LeaseError:  # its lease has ended: it comes again
                continue
            except (ClientError, asyncio.CancelledError):
                self.in_doubt.add(text)
                raise
            self.acked[text] = one.ctx.attempt
            self.acks[one.ctx.queue] += 1
            await self._tell()
        return len(jobs)

    async def _tell(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    # -- the judgement --------------------------------------------------------------------------

    @property
    def missing(self) -> set[str]:
        """Confirmed jobs that have not been acked, as far as anybody knows."""
        return self.confirmed.keys() - self.acked.keys() - self.in_doubt

    async def settle(self, client: SeppClient) -> None:
        """Take what is left until every confirmed job is accounted for and nothing more comes."""
        give_up_at = asyncio.get_running_loop().time() + WAIT_S
        while await self.take(client, *self.queues, wait=LEASE + WAIT) or self.missing:
            assert asyncio.get_running_loop().time() < give_up_at, f"lost: {sorted(self.missing)}"
        assert self.revenants == [], f"acked, and delivered again: {self.revenants}"
