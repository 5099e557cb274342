"""The recorded histories, each against both fronts, and with one shard and with four.

The histories of a group share a server, as when they were recorded. They are played together when the
first of them is asked for, because many only wait: those that use a queue in common one after the
other, in the order recorded, the rest at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import grpc
import pytest

from tests.conformance.histories import Case, Player, groups
from tests.conformance.service import CHANNEL_OPTIONS
from tests.integration.server import Server

# Histories that are played at the same time: enough that the sleeping ones overlap, few enough that
# the short leases in some of them do not run out while a call waits for its turn.
PLAYED_AT_ONCE = 8

GROUPS = groups()
CASES = [case for _, cases in GROUPS for case in cases]


class Setting(NamedTuple):
    """What the histories of one group are played against."""

    group: int
    shards: int
    front: str


class Stage:
    """Servers for the histories of a test run, and how each history went."""

    def __init__(self, wanted: dict[Setting, list[Case]]) -> None:
        self._wanted = wanted
        self._outcomes: dict[Setting, dict[str, Future[None]]] = {}

    def outcome(self, setting: Setting, case: Case) -> Future[None]:
        if setting not in self._outcomes:
            self._outcomes[setting] = play(setting, self._wanted[setting])
        return self._outcomes[setting][case.name]


def play(setting: Setting, cases: list[Case]) -> dict[str, Future[None]]:
    """Play histories on a server of their own; the outcome of each by its name."""
    outcomes: dict[str, Future[None]] = {case.name: Future() for case in cases}
    toml, _ = GROUPS[setting.group]
    with Server(shards=setting.shards, front=setting.front, toml=toml) as server:
        channel = channel_to(server.start())

        def restart(signal: str) -> grpc.Channel:
            nonlocal channel
            channel.close()
            if signal == "kill":
                server.kill_all()
            else:
                assert server.stop() == 0
            channel = channel_to(server.restart())
            return channel

        def play_in_order(train: list[Case]) -> None:
            for case in train:
                player = Player(channel, restart)
                try:
                    player.play(case)
                except Exception as error:
                    outcomes[case.name].set_exception(error)
                else:
                    outcomes[case.name].set_result(None)

        peaceful = [case for case in cases if not restarts(case)]
        with ThreadPoolExecutor(PLAYED_AT_ONCE) as pool:
            # The longest first, so that none is left to wait for at the end.
            for train in sorted(trains(peaceful), key=sleep_ms, reverse=True):
                pool.submit(play_in_order, train)
        for case in cases:
            if restarts(case):
                play_in_order([case])
        channel.close()
    return outcomes


def channel_to(server: Server) -> grpc.Channel:
    return grpc.insecure_channel(server.address, options=CHANNEL_OPTIONS)


def restarts(case: Case) -> bool:
    return any("restart" in step for step in case.steps)


def sleep_ms(train: list[Case]) -> int:
    return sum(step.get("sleep_ms", 0) for case in train for step in case.steps)


def trains(cases: Iterable[Case]) -> list[list[Case]]:
    """The histories in groups that have no queue in common, each in the order recorded."""
    found: list[tuple[set[str], list[Case]]] = []
    for case in cases:
        names, train = queues(case), [case]
        for other in [other for other in found if other[0] & names]:
            found.remove(other)
            names |= other[0]
            train = other[1] + train
        found.append((names, train))
    order = {case.name: number for number, case in enumerate(cases)}
    return [sorted(train, key=lambda case: order[case.name]) for _, train in found]


def queues(case: Case) -> set[str]:
    requests = [step.get("request", {}) for step in case.steps]
    enqueued = {job.get("queue", "") for request in requests for job in request.get("jobs", [])}
    reserved = {queue for request in requests for queue in request.get("queues", [])}
    return enqueued | reserved | {request["queue"] for request in requests if "queue" in request}


@pytest.fixture(scope="session")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Plays the histories that were selected, and no others."""
    wanted: dict[Setting, list[Case]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.originalname == test_a_history_goes_as_recorded.__name__:
            params = item.callspec.params
            case = params["case"]
            wanted.setdefault(Setting(case.group, params["shards"], params["front"]), []).append(case)
    # In the order recorded, whatever the order of the tests.
    order = {case.name: number for number, case in enumerate(CASES)}
    for cases in wanted.values():
        cases.sort(key=lambda case: order[case.name])
    yield Stage(wanted)


# A front does not see how many shards there are.
@pytest.mark.parametrize(("front", "shards"), [("queue", 1), ("queue", 4), ("aio", 1)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_history_goes_as_recorded(stage: Stage, case: Case, shards: int, front: str) -> None:
    stage.outcome(Setting(case.group, shards, front), case).result()


def test_every_history_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 384
