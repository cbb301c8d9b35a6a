"""Random programs with products, loops, transposes and norms, the batch in any axis: values, gradients, scans."""

import pytest

from tests.fuzz.programs import Fuzz, differences

SIZES = (1, 8)


@pytest.mark.tier("full", fast=("0-alone",))
@pytest.mark.parametrize("kernels", [False, True], ids=["alone", "kernels"])
@pytest.mark.parametrize("seed", [0, 1, 9, 16])
def test_random_programs_are_invariant(seed: int, kernels: bool) -> None:
    assert not differences(Fuzz(seed, kernels), sizes=SIZES)


@pytest.mark.tier("full", fault=("4", "8", "14", "163"))
@pytest.mark.parametrize("seed", [*range(24), 163])
def test_programs_with_steps_that_found_faults_are_invariant(seed: int) -> None:
    """Shared values, flags in carries, constants of all dtypes, masks, sparse and foreign code."""
    assert not differences(Fuzz(seed, guests=True), sizes=SIZES)


def test_the_same_programs_without_the_transform_are_not() -> None:
    """The control; what differs at once comes first."""
    assert any(differences(Fuzz(seed), lambda f: f, SIZES) for seed in (0, 2, 5))
    assert any(differences(Fuzz(seed, guests=True), lambda f: f, SIZES) for seed in (14, 8, 4))
