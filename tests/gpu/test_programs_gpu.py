"""Whole random programs on a GPU, from which the transform keeps XLA's rewrites away; see `tests.fuzz.run` for more."""

import jax
import pytest

from tests.fuzz.programs import Fuzz, differences
from tests.fuzz.run import unfenced

pytestmark = pytest.mark.gpu

_OFTEN = 7  # a sample of the seeds that `tests.fuzz.run` goes through


@pytest.fixture(autouse=True)
def _memory() -> None:
    jax.clear_caches()


@pytest.mark.parametrize("kernels", [False, True], ids=["alone", "kernels"])
@pytest.mark.parametrize("seed", range(0, 50 * _OFTEN, _OFTEN + 1))
def test_random_programs_are_invariant(seed: int, kernels: bool) -> None:
    assert not differences(Fuzz(seed, kernels))


def test_plain_programs_are_not() -> None:
    assert any(differences(Fuzz(seed), lambda f: f) for seed in range(4))


def test_programs_without_the_fences_are_not() -> None:
    """What these seeds found before element-wise code was fenced (H200, jax 0.11.2)."""
    with unfenced():
        assert any(differences(Fuzz(seed, kernels)) for seed, kernels in ((2, False), (9, False), (18, True)))
