"""XLA:GPU's element-wise code, which the transform keeps, and row reductions, which it replaces: random programs."""

import pytest

import bijax
from tests.transform.test_elementwise_fuzz import batches_that_differ, program

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [False, True], ids=["elementwise", "rows"])
@pytest.mark.parametrize("seed", range(32))
def test_random_programs_are_invariant(seed: int, rows: bool) -> None:
    assert not batches_that_differ(bijax.invariant(program(seed, rows)), seed)


def test_some_programs_without_the_transform_are_not() -> None:
    assert any(batches_that_differ(program(seed, True), seed) for seed in range(32))
