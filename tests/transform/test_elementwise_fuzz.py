"""Random programs of element-wise operations, broadcasts and row reductions: batch sizes, positions, loops."""

import pytest

import bijax
from tests.tiers import full_only
from tests.transform.elementwise_programs import FEW, SIZES, batches_that_differ, program


@pytest.mark.tier("full", fast=("few-0-rows",))
@pytest.mark.parametrize("rows", [False, True], ids=["elementwise", "rows"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [FEW, full_only(SIZES)], ids=["few", "many"])
def test_random_programs_are_invariant(sizes: tuple[int, ...], seed: int, rows: bool) -> None:
    assert not batches_that_differ(bijax.invariant(program(seed, rows)), seed, sizes)


def test_the_same_programs_without_the_transform_are_not() -> None:
    assert any(batches_that_differ(program(seed, rows), seed, FEW) for seed in range(9) for rows in (True, False))
