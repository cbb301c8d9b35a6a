"""Functions that XLA:CPU computes by polynomials or iterations: alone, in batches, and in loops."""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal
from bijax.transform.rules._elementwise import VECTORS
from tests.arrays import on_device
from tests.tiers import full_only
from tests.transform.vector_functions import FUNCTIONS, WITHOUT_TEST

ROWS = 16

# They take most of the time to compile; numbers of 16 bits are widened first, so their code is that for float32.
LONG = frozenset("bessel_i0e bessel_i1e digamma erf_inv igamma igamma_grad_a igammac lgamma polygamma zeta".split())


def test_every_such_primitive_is_here() -> None:
    assert set(FUNCTIONS) | WITHOUT_TEST == set(VECTORS)


@pytest.mark.parametrize(
    ("columns", "dtype", "names", "batches"),
    [
        (5, jnp.float16, sorted(FUNCTIONS.keys() - LONG)[::2], ((0, 1),)),
        full_only(33, jnp.float32, FUNCTIONS.keys(), ((0, 1), (7, 8))),
        full_only(5, jnp.float16, FUNCTIONS.keys() - LONG, ((0, 1), (7, 8))),
        full_only(33, jnp.float32, FUNCTIONS.keys(), ((3, 12),)),
        full_only(5, jnp.float16, FUNCTIONS.keys() - LONG, ((3, 12),)),
        full_only(5, jnp.float16, LONG, ((0, 1), (7, 8), (3, 12))),
    ],
    ids=["half of them", "float32", "float16", "float32 in another batch", "float16 in another batch", "float16, long"],
)
def test_alone_in_a_batch_and_in_a_loop(
    columns: int, dtype: jnp.dtype, names: Collection[str], batches: tuple[tuple[int, int], ...]
) -> None:
    def functions(x: jax.Array, y: jax.Array, _: int) -> dict[str, jax.Array]:
        return {name: FUNCTIONS[name](x, y) for name in sorted(names)}

    def looped(x: jax.Array, y: jax.Array, parts: int) -> dict[str, jax.Array]:
        cut = [a.reshape(parts, ROWS // parts, -1) for a in (x, y)]
        return {n: r.reshape(x.shape) for n, r in lax.map(lambda xy: functions(*xy, 0), tuple(cut)).items()}

    x, y = on_device(np.random.default_rng(columns).standard_normal((2, ROWS, columns)) * 2, dtype)
    program, loop = (jax.jit(bijax.invariant(f), static_argnums=2) for f in (functions, looped))

    def bits(results: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        return {n: np.asarray(r).view({2: np.uint16, 4: np.uint32}[r.dtype.itemsize]) for n, r in results.items()}

    expected = bits(program(x, y, 0))
    for first, last in batches:
        for name, actual in bits(program(x[first:last], y[first:last], 0)).items():
            assert (actual == expected[name][first:last]).all(), (name, first, last)
    for name, actual in bits(loop(x, y, 4)).items():
        assert (actual == expected[name]).all(), name


def test_functions_made_of_others_are_accurate() -> None:
    x = jnp.asarray([0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 8, -27, 2e-38, 1e38, 0.3, -1.5, 1e4])
    for function, exact, limit in (
        (lax.cbrt, np.cbrt, 1.5),
        (lax.atan, np.arctan, 1.0),
        (lax.tan, np.tan, 2.5),
        (lambda x: jnp.log2(jnp.abs(x) + 1), lambda x: np.log2(np.abs(x) + 1), 2.0),
    ):
        small = jnp.where(jnp.abs(x) < 100, x, 1.0) if function is lax.tan else x
        actual = np.asarray(jax.jit(bijax.invariant(function))(small), np.float64)
        with np.errstate(invalid="ignore"):
            wanted = exact(np.asarray(small, np.float64))
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(actual[~finite], wanted[~finite])
        ulp = np.abs(actual[finite] - wanted[finite]) / np.spacing(np.abs(wanted[finite]).astype(np.float32))
        assert ulp.max() <= limit, (function, ulp)


def test_cube_roots_of_subnormal_numbers() -> None:
    """A CPU's arithmetic sees zeros, whose roots are zeros of the same sign; plain JAX gives other numbers."""
    x = np.array([1e-40, -1e-40, 3e-45, 1.18e-38], np.float32)
    zeros = np.copysign(np.float32(0), x)
    found = np.asarray(jax.jit(bijax.invariant(lax.cbrt))(x))
    assert_bits_equal(found[:3], zeros[:3])
    assert found[3] > 2e-13
    assert (np.asarray(jax.jit(lax.cbrt)(x))[:3] != zeros[:3]).any()
