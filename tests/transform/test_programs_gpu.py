"""Whole random programs on a GPU, from which the transform keeps XLA's rewrites away; see `tests.fuzz.run` for more."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from tests.fuzz.programs import Fuzz, differences
from tests.fuzz.run import unfenced
from tests.transform.cells import CELLS, sizes_that_differ

pytestmark = pytest.mark.gpu

_OFTEN = 7  # a sample of the seeds that `tests.fuzz.run` goes through


@pytest.fixture(autouse=True)
def _memory() -> None:
    jax.clear_caches()


@pytest.mark.parametrize("kernels", [False, True], ids=["alone", "kernels"])
@pytest.mark.parametrize("seed", range(0, 50 * _OFTEN, _OFTEN + 1))
def test_random_programs_are_invariant(seed: int, kernels: bool) -> None:
    assert not differences(Fuzz(seed, kernels))


@pytest.mark.parametrize("scan", [False, True], ids=["alone", "scan"])
@pytest.mark.parametrize("name", CELLS)
def test_cells_are_invariant(name: str, scan: bool) -> None:
    assert not sizes_that_differ(CELLS[name](), bijax.invariant, (1, 2, 5, 8, 17, 33, 64), scan)


@pytest.mark.parametrize("size", [8, 32, 33])
@pytest.mark.parametrize("f", [jnp.tanh, lambda x: lax.rsqrt(jnp.abs(x) + 0.1), lambda x: (x + 1.1) + 2.3])
def test_float64_keeps_its_lower_half_where_it_is_transposed(f: Callable[[jax.Array], jax.Array], size: int) -> None:
    """With an integer fence ptxas 13.0 stores the lower half of a double as a number of its own."""
    draw = np.random.default_rng(size)
    x, w = draw.standard_normal((size, 8, 8)), draw.standard_normal((8, 16))

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return f(x @ w).transpose(2, 1, 0)

    with jax.enable_x64(True):
        found = jax.jit(bijax.invariant(program))(x, w)
        with jax.default_device(jax.devices("cpu")[0]):
            expected = program(x, w)
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_plain_programs_are_not() -> None:
    assert any(differences(Fuzz(seed), lambda f: f) for seed in range(4))


def test_programs_without_the_fences_are_not() -> None:
    """What these seeds found before element-wise code was fenced (H200, jax 0.11.2)."""
    with unfenced():
        assert any(differences(Fuzz(seed, kernels)) for seed, kernels in ((2, False), (9, False), (18, True)))
