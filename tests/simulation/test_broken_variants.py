"""The simulator can see: every server that is broken on purpose is found out, and by the rule that it breaks."""

from __future__ import annotations

import pytest

from tests.simulation.broken import VARIANTS, Variant
from tests.simulation.simulation import run

SEEDS_MAX = 1_000


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_broken_server_is_found_out(variant: Variant, record_property: pytest.FixtureRequest) -> None:
    with variant.entered():
        for seed in range(SEEDS_MAX):
            finding = run(seed, style=variant.style).finding
            if finding is not None:
                record_property("seeds", seed + 1)  # type: ignore[operator]
                assert finding.invariant in variant.invariants, finding
                return
    pytest.fail(f"{SEEDS_MAX} seeds of a broken server found nothing")
