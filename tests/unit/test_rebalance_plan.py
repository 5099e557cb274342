"""Plans: which slots move, how few they are, and how they are put into batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.rebalance_plan import (
    BATCH_BYTES,
    BATCH_JOBS,
    BATCH_SLOTS,
    NOTHING,
    TOLERANCE,
    Batch,
    By,
    Load,
    Move,
    batches,
    plan,
)
from common.slots import SHARDS_MAX, SLOT_COUNT, SlotMap

numbers_of_shards = st.integers(1, SHARDS_MAX)


@st.composite
def slot_maps(draw: st.DrawFn) -> SlotMap:
    """Maps as they come about: dealt out evenly, then with slots moved to and fro."""
    shards = draw(numbers_of_shards)
    slot_map = SlotMap.even(shards)
    for _ in range(draw(st.integers(0, 4))):
        start, step = draw(st.integers(0, SLOT_COUNT - 1)), draw(st.integers(1, 50))
        slots = range(start, min(SLOT_COUNT, start + draw(st.integers(1, 3_000))), step)
        slot_map = slot_map.moved(slots, draw(st.integers(0, shards - 1)))
    return slot_map


loads_of_slots = st.dictionaries(
    st.integers(0, SLOT_COUNT - 1),
    st.builds(
        Load, st.one_of(st.integers(0, 20), st.integers(0, 1_000_000)), st.one_of(st.integers(0, 99), st.just(1 << 40))
    ),
    max_size=300,
)


def after(slot_map: SlotMap, moves: list[Move], shards: int) -> SlotMap:
    """The map when all has been moved and the number of shards is the new one."""
    owners = list(slot_map.owners)
    for move in moves:
        assert owners[move.slot] == move.source
        owners[move.slot] = move.target
    return SlotMap(slot_map.epoch + 1, shards, tuple(owners))


def counts(slot_map: SlotMap) -> list[int]:
    found = Counter(slot_map.owners)
    return [found[shard] for shard in range(slot_map.shards)]


def sums(slot_map: SlotMap, weights: Mapping[int, int]) -> list[int]:
    found = [0] * slot_map.shards
    for slot, weight in weights.items():
        found[slot_map.owners[slot]] += weight
    return found


def fewest(slot_map: SlotMap, shards: int) -> int:
    """How many slots have to move at least so that the counts differ by one at most."""
    before = Counter(slot_map.owners)
    quota, more = divmod(SLOT_COUNT, shards)
    staying = sorted((before[shard] for shard in range(shards)), reverse=True)
    return SLOT_COUNT - sum(min(count, quota + (place < more)) for place, count in enumerate(staying))


# -- by count -----------------------------------------------------------------------------------


@given(slot_maps(), numbers_of_shards, loads_of_slots)
@settings(max_examples=60, deadline=None)
def test_by_count_shards_end_within_one_slot_with_as_few_moves_as_can_be(
    slot_map: SlotMap, shards: int, loads: dict[int, Load]
) -> None:
    moves = plan(slot_map, shards, loads, By.SLOTS)
    even = after(slot_map, moves, shards)
    assert max(counts(even)) - min(counts(even)) <= 1
    assert len(moves) == fewest(slot_map, shards)


@given(slot_maps(), numbers_of_shards, loads_of_slots, st.sampled_from(By))
@settings(max_examples=60, deadline=None)
def test_a_plan_that_was_carried_out_leaves_nothing_to_plan(
    slot_map: SlotMap, shards: int, loads: dict[int, Load], by: By
) -> None:
    even = after(slot_map, plan(slot_map, shards, loads, by), shards)
    assert plan(even, shards, loads, by) == []


@given(slot_maps(), numbers_of_shards, loads_of_slots, st.sampled_from(By))
@settings(max_examples=60, deadline=None)
def test_every_slot_moves_once_at_most_and_never_to_where_it_is(
    slot_map: SlotMap, shards: int, loads: dict[int, Load], by: By
) -> None:
    moves = plan(slot_map, shards, loads, by)
    assert [move.slot for move in moves] == sorted({move.slot for move in moves})
    assert all(move.source != move.target for move in moves)
    assert moves == plan(slot_map, shards, loads, by)


@given(slot_maps(), st.integers(0, 4_000))
@settings(max_examples=30, deadline=None)
def test_a_plan_that_was_cut_short_goes_on_without_moving_anything_again(slot_map: SlotMap, done: int) -> None:
    moves = plan(slot_map, slot_map.shards, {}, By.SLOTS)
    half = after(slot_map, moves[:done], slot_map.shards)
    assert len(plan(half, half.shards, {}, By.SLOTS)) == len(moves[done:])


@pytest.mark.parametrize(
    ("before", "shards", "moves"), [(1, 1, 0), (2, 4, 2_048), (4, 1, 3_072), (3, 2, 1_365), (1, 64, 4_032)]
)
def test_the_number_of_moves_from_an_even_map(before: int, shards: int, moves: int) -> None:
    assert len(plan(SlotMap.even(before), shards, {}, By.SLOTS)) == moves


def test_doubling_deals_slots_out_in_turn_as_a_new_directory_does() -> None:
    doubled = after(SlotMap.even(2), plan(SlotMap.even(2), 4, {}, By.SLOTS), 4)
    assert doubled.owners == SlotMap.even(4).owners


# -- by load ------------------------------------------------------------------------------------


@given(slot_maps(), numbers_of_shards, loads_of_slots, st.sampled_from([By.JOBS, By.BYTES]))
@settings(max_examples=60, deadline=None)
def test_by_load_shards_differ_by_a_part_of_the_mean_or_by_a_third_more_than_the_largest_slot(
    slot_map: SlotMap, shards: int, loads: dict[int, Load], by: By
) -> None:
    even = after(slot_map, plan(slot_map, shards, loads, by), shards)
    weights = {slot: load.jobs if by == By.JOBS else load.bytes for slot, load in loads.items()}
    found = sums(even, weights)
    allowed = max(1, TOLERANCE * sum(found) / shards, max(weights.values(), default=0) * 4 / 3 + 1)
    assert max(found) - min(found) <= allowed


def test_by_load_the_largest_slots_move_first() -> None:
    loads = {0: Load(100), 2: Load(60), 4: Load(40), 6: Load(1)}
    moves = plan(SlotMap.even(2), 2, loads, By.JOBS)
    assert [move for move in moves if move.slot in loads] == [Move(0, 0, 1)]


def test_a_slot_that_is_nearly_all_of_the_load_stays_where_it_is() -> None:
    loads = {0: Load(1_000_000), 2: Load(30)}
    moves = plan(SlotMap.even(2), 2, loads, By.JOBS)
    assert [move for move in moves if move.slot in loads] == [Move(2, 0, 1)]


def test_by_bytes_and_by_jobs_are_two_plans() -> None:
    loads = {0: Load(10, 1), 2: Load(10, 1), 1: Load(1, 100), 3: Load(1, 100)}
    moved = {by: [move for move in plan(SlotMap.even(2), 2, loads, by) if move.slot in loads] for by in By}
    assert moved == {By.SLOTS: [], By.JOBS: [Move(0, 0, 1), Move(3, 1, 0)], By.BYTES: [Move(1, 1, 0)]}


def test_slots_without_load_are_spread_by_count() -> None:
    even = after(SlotMap.even(1), plan(SlotMap.even(1), 2, {7: Load(5), 8: Load(5)}, By.JOBS), 2)
    assert counts(even) == [2_048, 2_048]
    assert even.owners[7] != even.owners[8]


# -- batches ------------------------------------------------------------------------------------


@given(slot_maps(), numbers_of_shards, loads_of_slots)
@settings(max_examples=30, deadline=None)
def test_batches_hold_every_move_once_within_their_limits(
    slot_map: SlotMap, shards: int, loads: dict[int, Load]
) -> None:
    moves = plan(slot_map, shards, loads, By.SLOTS)
    made = batches(moves, loads)
    held = [Move(slot, batch.source, batch.target) for batch in made for slot in batch.slots]
    assert sorted(held, key=lambda move: move.slot) == moves
    for batch in made:
        assert batch.jobs == sum(loads.get(slot, NOTHING).jobs for slot in batch.slots)
        assert batch.bytes == sum(loads.get(slot, NOTHING).bytes for slot in batch.slots)
        assert 1 <= len(batch.slots) <= BATCH_SLOTS
        assert batch.jobs <= BATCH_JOBS or len(batch.slots) == 1
        assert batch.bytes <= BATCH_BYTES or len(batch.slots) == 1


def test_a_slot_with_many_jobs_is_a_batch_of_its_own() -> None:
    moves = [Move(slot, 0, 1) for slot in (2, 4, 6)]
    loads = {2: Load(5, 50), 4: Load(BATCH_JOBS + 1, 7)}
    assert batches(moves, loads) == [
        Batch(0, 1, (2,), 5, 50),
        Batch(0, 1, (4,), BATCH_JOBS + 1, 7),
        Batch(0, 1, (6,), 0, 0),
    ]


def test_slots_with_many_bytes_are_batches_of_their_own() -> None:
    moves = [Move(slot, 0, 1) for slot in (2, 4, 6)]
    loads = {2: Load(1, BATCH_BYTES), 4: Load(1, 1), 6: Load(1, BATCH_BYTES - 1)}
    assert [batch.slots for batch in batches(moves, loads)] == [(2,), (4, 6)]


def test_a_batch_has_one_source_and_one_target() -> None:
    moves = [Move(0, 1, 0), Move(1, 0, 1), Move(2, 0, 2), Move(3, 0, 1)]
    assert [(batch.source, batch.target, batch.slots) for batch in batches(moves, {})] == [
        (0, 1, (1, 3)),
        (0, 2, (2,)),
        (1, 0, (0,)),
    ]
