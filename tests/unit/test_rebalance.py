"""Carrying out a plan, on a server that is not there: steps, stops, refusals; and the lock against a second one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

import common.rebalance as rebalance_module
from common import admin_pb2 as pb
from common.admin_client import AdminUnavailableError
from common.admin_socket import AdminError
from common.rebalance import (
    BATCH_S,
    BYTES_PER_S,
    JOBS_PER_S,
    RETRY_S,
    SHRINK_RETRY_S,
    BatchMoved,
    Event,
    Plan,
    Postponed,
    Rebalance,
    ShardsSet,
    Share,
    Stop,
    Summary,
    batch_seconds,
    even_plan,
    shares,
    single_plan,
)
from common.rebalance_lock import LOCK_FILE, rebalance_lock, rebalancing_process
from common.rebalance_plan import BATCH_SLOTS, Batch, By, Load
from common.slots import SHARDS_MAX, SLOT_COUNT, SlotMap


class Calls:
    """A cluster of nothing but a slot map. `refusals` are raised first, by method, None for a call that is let
    through; with `does_what_it_refuses` they come late, as when an answer is lost."""

    def __init__(self, shards: int, loads: Mapping[int, Load] | None = None) -> None:
        self.map = SlotMap.even(shards)
        self.loads = dict(loads or {})
        self.up: list[bool] = [True] * SHARDS_MAX
        self.refusals: dict[str, list[AdminError | None]] = {}
        self.does_what_it_refuses = False
        self.on_move: Callable[[], None] = lambda: None
        self.log: list[tuple[object, ...]] = []

    def slot_map(self, with_loads: bool) -> pb.ShowSlotMapResponse:
        return pb.ShowSlotMapResponse(
            epoch=self.map.epoch,
            shards=self.map.shards,
            owners=self.map.owners,
            loads=[pb.SlotLoad(slot=slot, jobs=load.jobs, bytes=load.bytes) for slot, load in self.loads.items()]
            if with_loads
            else (),
        )

    def set_shards(self, shards: int) -> pb.SetShardsResponse:
        self.log.append(("shards", shards))
        with self._refusing("shards"):
            self.map = self.map.resized(shards)
        return pb.SetShardsResponse(epoch=self.map.epoch)

    def move_slots(self, slots: Sequence[int], target: int, bytes_per_second: int) -> pb.MoveSlotsResponse:
        self.log.append(("move", len(slots), self.map.owners[slots[0]], target))
        with self._refusing("move"):
            self.map = self.map.moved(slots, target)
        self.on_move()
        loads = [self.loads.get(slot, Load()) for slot in slots]
        return pb.MoveSlotsResponse(
            epoch=self.map.epoch,
            records=sum(3 * load.jobs for load in loads),
            bytes=sum(load.bytes for load in loads),
            hold_ms=len(slots),
        )

    def verify_shard(self, shard: int) -> Iterator[pb.VerifyShardResponse]:
        raise NotImplementedError

    def shards(self) -> list[pb.Shard]:
        self.log.append(("look",))
        found = [pb.Shard(index=index, up=self.up[index]) for index in range(self.map.shards)]
        self.up = [True] * SHARDS_MAX
        return found

    def _refusing(self, method: str) -> _Refusing:
        waiting = self.refusals.get(method, [])
        return _Refusing(waiting.pop(0) if waiting else None, self.does_what_it_refuses)

    def moves(self) -> list[tuple[object, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == "move"]


class _Refusing(suppress):
    """Raises before what is inside, or after it."""

    def __init__(self, error: AdminError | None, is_late: bool) -> None:
        super().__init__()
        self._error = error
        self._is_late = is_late

    def __enter__(self) -> None:
        if self._error is not None and not self._is_late:
            raise self._error

    def __exit__(self, *_: object) -> bool:
        if self._error is not None and self._is_late:
            raise self._error
        return False


class Pauses(Stop):
    """Notes pauses and does not make them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[float] = []

    def pause(self, seconds: float) -> None:
        self.made.append(seconds)


class Run:
    """A run with all that it says."""

    def __init__(self, cluster: Calls, plan: Plan, bytes_per_second: int = 0) -> None:
        self.events: list[Event] = []
        self.pauses = Pauses()
        self._rebalance = Rebalance(cluster, plan, bytes_per_second, self.events.append, self.pauses)

    def run(self) -> Summary:
        return self._rebalance.run()

    @property
    def postponed(self) -> list[Postponed]:
        return [event for event in self.events if isinstance(event, Postponed)]


def plan_for(cluster: Calls, shards: int | None, by: By = By.SLOTS) -> Plan:
    return even_plan(cluster.slot_map(True), shards, by)


def counts(cluster: Calls) -> list[int]:
    return [len(cluster.map.slots_of(shard)) for shard in range(cluster.map.shards)]


def later(text: str = "a shard is down") -> AdminUnavailableError:
    return AdminUnavailableError(text)


# -- plans ------------------------------------------------------------------------------------------


def test_a_plan_says_what_each_shard_owns_before_and_after() -> None:
    cluster = Calls(2, {0: Load(5, 50), 1: Load(7, 70)})
    plan = plan_for(cluster, 1)
    assert plan.before() == [Share(0, 2048, 5, 50), Share(1, 2048, 7, 70)]
    assert plan.after() == [Share(0, 4096, 12, 120)]
    assert (plan.slots, plan.jobs, plan.bytes, len(plan.batches)) == (2048, 7, 70, 32)


def test_without_a_number_the_shards_that_there_are_are_evened_out() -> None:
    cluster = Calls(2, {0: Load(8, 0), 2: Load(8, 0)})
    assert not plan_for(cluster, None).changes_anything
    assert [share.jobs for share in plan_for(cluster, None, By.JOBS).after()] == [8, 8]


@pytest.mark.parametrize("shards", [0, 65])
def test_a_number_of_shards_that_cannot_be_is_refused(shards: int) -> None:
    with pytest.raises(AdminError, match=f"1 to 64 shards, not {shards}"):
        plan_for(Calls(2), shards)


def test_an_estimate_adds_up_batches_jobs_and_bytes() -> None:
    batch = Batch(0, 1, (3,), JOBS_PER_S, 2 * BYTES_PER_S)
    assert batch_seconds(batch, 0) == pytest.approx(BATCH_S + 3)
    assert batch_seconds(batch, BYTES_PER_S // 10) == pytest.approx(BATCH_S + 20)
    assert Plan(SlotMap.even(2), {}, 2, (batch, batch)).seconds(0) == pytest.approx(2 * (BATCH_S + 3))


def test_a_single_slot_moves_where_it_is_told_to() -> None:
    plan = single_plan(Calls(2, {4: Load(3, 30)}).slot_map(True), {4}, 1)
    assert (plan.shards, plan.batches) == (2, (Batch(0, 1, (4,), 3, 30),))


def test_slots_of_several_shards_move_to_one_and_those_that_are_there_stay() -> None:
    plan = single_plan(Calls(3).slot_map(True), {0, 1, 2}, 2)
    assert [(batch.source, batch.slots) for batch in plan.batches] == [(0, (0,)), (1, (1,))]


def test_a_slot_gets_a_new_shard_of_its_own() -> None:
    plan = single_plan(Calls(2).slot_map(True), {4}, None)
    assert (plan.shards, plan.batches) == (3, (Batch(0, 2, (4,), 0, 0),))


def test_a_slot_gets_an_empty_shard_where_there_is_one() -> None:
    cluster = Calls(2)
    cluster.map = cluster.map.resized(4)
    plan = single_plan(cluster.slot_map(True), {4}, None)
    assert (plan.shards, plan.batches[0].target) == (4, 2)


def test_what_was_to_get_a_new_shard_goes_on_to_the_one_it_has() -> None:
    cluster = Calls(2)
    cluster.map = cluster.map.resized(3).moved([4], 2)
    plan = single_plan(cluster.slot_map(True), {4, 5}, None)
    assert (plan.shards, plan.batches) == (3, (Batch(1, 2, (5,), 0, 0),))


@pytest.mark.parametrize(
    ("slots", "target", "text"),
    [
        ({4096}, 0, "slots are 0 to 4095, not 4096"),
        ({-1}, 0, "slots are 0 to 4095, not -1"),
        ({1}, 2, "shards are 0 to 1, not 2; `--to new` adds one"),
        ({1}, 1, "slot 1 is on shard 1 already"),
        ({1, 3, 5, 7, 9}, 1, "slots 1, 3, 5 and 2 more are on shard 1 already"),
    ],
)
def test_a_move_that_makes_no_sense_is_refused(slots: set[int], target: int, text: str) -> None:
    with pytest.raises(AdminError) as error:
        single_plan(Calls(2).slot_map(True), slots, target)
    assert str(error.value) == text


def test_a_slot_that_has_a_shard_of_its_own_stays_there() -> None:
    cluster = Calls(2)
    cluster.map = cluster.map.resized(3).moved([4], 2)
    with pytest.raises(AdminError, match="slot 4 is on shard 2 already"):
        single_plan(cluster.slot_map(True), {4}, None)


def test_there_is_no_sixty_fifth_shard() -> None:
    with pytest.raises(AdminError, match="there are 64 shards"):
        single_plan(Calls(64).slot_map(True), {4}, None)


# -- runs -------------------------------------------------------------------------------------------


def test_growing_adds_shards_first_and_then_moves_slots_to_them() -> None:
    cluster = Calls(2, {0: Load(5, 50)})
    run = Run(cluster, plan_for(cluster, 3))
    summary = run.run()
    assert cluster.log[:3] == [("shards", 3), ("look",), ("move", 64, 0, 2)]
    assert sorted(counts(cluster)) == [1365, 1365, 1366]
    assert (summary.slots, summary.shards, summary.is_complete) == (1365, 3, True)
    assert summary.epoch == cluster.map.epoch
    assert run.events[0] == ShardsSet(3)


def test_shrinking_moves_slots_first_and_then_takes_shards_away() -> None:
    cluster = Calls(3)
    summary = Run(cluster, plan_for(cluster, 1)).run()
    assert cluster.log[-1] == ("shards", 1)
    assert [entry for entry in cluster.log if entry[0] == "shards"] == [("shards", 1)]
    assert counts(cluster) == [4096]
    assert (summary.slots, summary.shards) == (2730, 1)


@pytest.mark.parametrize(("shards", "then"), [(1, 64), (64, 1), (5, 7), (7, 5)])
def test_any_number_of_shards_becomes_any_other(shards: int, then: int) -> None:
    cluster = Calls(shards)
    Run(cluster, plan_for(cluster, then)).run()
    assert max(counts(cluster)) - min(counts(cluster)) <= 1
    assert (len(counts(cluster)), sum(counts(cluster))) == (then, SLOT_COUNT)


def test_a_summary_adds_up_what_was_moved_and_has_the_longest_hold() -> None:
    cluster = Calls(2, {1: Load(5, 50), 3: Load(6, 60)})
    run = Run(cluster, plan_for(cluster, 1), 1_000)
    summary = run.run()
    assert (summary.slots, summary.jobs, summary.records, summary.bytes) == (2048, 11, 33, 110)
    assert summary.hold_ms == BATCH_SLOTS
    moved = [event for event in run.events if isinstance(event, BatchMoved)]
    assert (len(moved), sum(event.batch.jobs for event in moved)) == (32, 11)


def test_a_rate_holds_over_batches_that_are_too_small_for_the_server_to_slow_down() -> None:
    cluster = Calls(2, {1: Load(5, 50), 129: Load(1, 10)})
    run = Run(cluster, plan_for(cluster, 1), 10)
    run.run()
    pauses = [pause_s for pause_s in run.pauses.made if pause_s]
    assert len(pauses) == 2
    assert 0 < pauses[0] <= 5 and 0 < pauses[1] <= 1
    assert len(run.pauses.made) == 31


def test_nothing_to_do_does_nothing() -> None:
    cluster = Calls(2)
    summary = Run(cluster, plan_for(cluster, 2)).run()
    assert cluster.log == []
    assert (summary.slots, summary.shards, summary.is_complete) == (0, 2, True)


def test_moves_wait_until_the_shards_that_were_added_serve() -> None:
    cluster = Calls(1)
    cluster.up[2] = False
    Run(cluster, plan_for(cluster, 3)).run()
    assert cluster.log[:4] == [("shards", 3), ("look",), ("look",), ("move", 64, 0, 1)]


def test_a_shard_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalance_module, "UP_S", 0.0)
    cluster = Calls(1)
    cluster.up[2] = False
    with pytest.raises(AdminError, match="shard 2 does not start"):
        Run(cluster, plan_for(cluster, 3)).run()
    assert cluster.moves() == []


def test_a_stop_ends_it_after_the_current_batch_and_the_next_run_does_the_rest() -> None:
    cluster = Calls(3)
    run = Run(cluster, plan_for(cluster, 1))

    def stop_after_two() -> None:
        run.pauses.is_asked = len(cluster.moves()) == 2

    cluster.on_move = stop_after_two
    summary = run.run()
    assert (summary.slots, summary.shards, summary.is_complete) == (128, 3, False)
    rest = plan_for(cluster, 1)
    assert rest.slots == 2730 - 128
    assert Run(cluster, rest).run().is_complete
    assert counts(cluster) == [4096]


def test_after_a_stop_another_number_may_be_wanted() -> None:
    cluster = Calls(2)
    run = Run(cluster, plan_for(cluster, 4))
    cluster.on_move = lambda: setattr(run.pauses, "is_asked", True)
    assert not run.run().is_complete
    assert Run(cluster, plan_for(cluster, 2)).run().is_complete
    assert counts(cluster) == [2048, 2048]


def test_a_refused_batch_is_tried_again_and_the_reason_told() -> None:
    cluster = Calls(2)
    cluster.refusals["move"] = [None, later(), later()]
    run = Run(cluster, plan_for(cluster, 1))
    assert run.run().is_complete
    what = "moving 64 slots from shard 1 to 0"
    assert run.postponed == [Postponed(what, "a shard is down", pause_s) for pause_s in RETRY_S[:2]]
    assert run.pauses.made == list(RETRY_S[:2])
    assert len(cluster.moves()) == 34


def test_a_batch_that_is_refused_again_and_again_ends_the_run_and_the_next_one_goes_on() -> None:
    cluster = Calls(2)
    cluster.refusals["move"] = [None, *[later("no room")] * 8]
    run = Run(cluster, plan_for(cluster, 1))
    with pytest.raises(AdminError) as error:
        run.run()
    assert str(error.value) == ("moving 64 slots from shard 1 to 0: no room; the same command goes on from there")
    assert run.pauses.made == list(RETRY_S)
    assert counts(cluster) == [2112, 1984]
    assert Run(cluster, plan_for(cluster, 1)).run().slots == 1984


def test_a_batch_that_moved_although_its_answer_was_lost_is_not_moved_again() -> None:
    cluster = Calls(2, {1: Load(5, 50)})
    cluster.refusals["move"] = [later()]
    cluster.does_what_it_refuses = True
    summary = Run(cluster, plan_for(cluster, 1)).run()
    assert len(cluster.moves()) == 32
    assert (summary.slots, summary.jobs, summary.bytes) == (2048, 5, 0)


def test_what_is_refused_for_good_ends_the_run_at_once() -> None:
    cluster = Calls(2)
    cluster.refusals["move"] = [AdminError("no sense")]
    run = Run(cluster, plan_for(cluster, 1))
    with pytest.raises(AdminError, match=r"^no sense$"):
        run.run()
    assert run.pauses.made == []


def test_a_stop_ends_the_wait_for_a_batch() -> None:
    cluster = Calls(2)
    cluster.refusals["move"] = [later()]
    run = Run(cluster, plan_for(cluster, 1))
    run.pauses.pause = lambda seconds: setattr(run.pauses, "is_asked", True)  # type: ignore[method-assign]
    summary = run.run()
    assert (summary.slots, summary.is_complete) == (0, False)


def test_shards_that_cannot_go_yet_are_waited_for_longer() -> None:
    cluster = Calls(2)
    cluster.refusals["shards"] = [later("shard 1 keeps 2 atomic batches")] * 18
    run = Run(cluster, plan_for(cluster, 1))
    assert run.run().shards == 1
    assert run.postponed[0].what == "taking shards away down to 1"
    assert run.pauses.made == list(SHRINK_RETRY_S[:18])
    assert sum(SHRINK_RETRY_S) > 60


def test_a_number_of_shards_whose_answer_was_lost_is_not_set_again() -> None:
    cluster = Calls(1)
    cluster.refusals["shards"] = [later()]
    cluster.does_what_it_refuses = True
    Run(cluster, plan_for(cluster, 2)).run()
    assert [entry for entry in cluster.log if entry[0] == "shards"] == [("shards", 2)]


def test_a_pause_ends_when_a_stop_is_asked_for() -> None:
    stop = Stop()
    stop.is_asked = True
    stop.pause(1_000.0)


def test_shares_count_slots_that_hold_nothing() -> None:
    assert shares([0, 0, 1], 3, {1: Load(4, 40)}) == [Share(0, 2, 4, 40), Share(1, 1, 0, 0), Share(2, 0, 0, 0)]


# -- the lock ---------------------------------------------------------------------------------------


def test_a_second_one_is_refused_and_told_who_is_at_it(tmp_path: Path) -> None:
    with rebalance_lock(tmp_path):
        assert rebalancing_process(tmp_path) == os.getpid()
        with (
            pytest.raises(AdminError, match=f"^process {os.getpid()} is moving or verifying slots of .* already"),
            rebalance_lock(tmp_path),
        ):
            pass
        assert rebalancing_process(tmp_path) == os.getpid()


def test_the_lock_is_free_again_afterwards(tmp_path: Path) -> None:
    assert rebalancing_process(tmp_path) is None
    with rebalance_lock(tmp_path):
        pass
    assert rebalancing_process(tmp_path) is None
    with rebalance_lock(tmp_path):
        pass


def test_the_number_of_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("1\n")
    assert rebalancing_process(tmp_path) is None
    with rebalance_lock(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"


def test_a_lock_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AdminError, match="cannot be opened"), rebalance_lock(tmp_path / "none"):
        pass
