"""Products of rows by group: the bits of a row do not depend on how the others are shared out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bijax.lax.dot_general import dot_general
from bijax.lax.ragged_dot import ragged_dot_general
from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.errors import UnsupportedError
from tests.lax.primitive_cases import equations, lowers_for_cuda, normal, substitute

RULES = {"ragged_dot_general": ragged_dot_general}
G, K, N = 5, 70, 12


def everything(x: jax.Array, w: jax.Array, g: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
    y, pull = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
    return y, *pull(g)


RUN = jax.jit(substitute(everything, RULES))


def test_rows_keep_their_bits_among_others() -> None:
    rng = np.random.default_rng(0)
    w, g, expert = normal(0, G, K, N), np.asarray(normal(2, 12, N)), 2
    hostile = w.at[expert + 1 :].set(jnp.nan)
    for name, x in hostile_rows(1, (12, K), "float32").items():
        alone = RUN(x, w, g, jnp.array([0, 0, 12, 0, 0]))
        before, after = 140, 3
        total = before + 12 + after
        others = rng.choice(np.array([np.nan, np.inf, 1e30, 1.0], np.float32), (total, K + N))
        others[before : before + 12] = np.concatenate([x, g], 1)
        sizes = jnp.array([before - before // 2, before // 2, 12, after, 0])
        y, dx, dw = RUN(others[:, :K], hostile, others[:, K:], sizes)
        found = *(np.asarray(a)[before : before + 12] for a in (y, dx)), np.asarray(dw)[expert]
        assert_bits_equal(found, (alone[0], alone[1], np.asarray(alone[2])[expert]), err_msg=name)


@pytest.mark.tier("full")
def test_rows_have_the_bits_of_a_plain_product() -> None:
    x, w = normal(3, 40, K), normal(4, G, K, N)
    sizes = jnp.array([0, 17, 1, 20, 0])
    y = RUN(x, w, jnp.zeros((40, N)), sizes)[0]
    numbers = (((1,), (0,)), ((), ()))
    expected = [
        dot_general(x[a:b], w[i], dimension_numbers=numbers) for i, a, b in ((1, 0, 17), (2, 17, 18), (3, 18, 38))
    ]
    assert_bits_equal(y, jnp.concatenate([*expected, jnp.zeros((2, N))]))


def test_float64() -> None:
    """Products and sums of outer products have the accuracy of float64, and rows the bits of a plain product."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w, g = (rng.standard_normal(shape) for shape in ((40, K), (G, K, N), (40, N)))
        y, dx, dw = RUN(x, w, g, jnp.array([0, 40, 0, 0, 0]))
        for found, exact in ((y, x @ w[1]), (dx, g @ w[1].T), (np.asarray(dw)[1], x.T @ g)):
            np.testing.assert_allclose(found, exact, rtol=0, atol=1e-12)
        assert_bits_equal(y, dot_general(x, w[1], dimension_numbers=(((1,), (0,)), ((), ()))))
        alone = RUN(x[7:8], w, g[7:8], jnp.array([0, 1, 0, 0, 0]))
        assert_bits_equal((np.asarray(alone[0]), np.asarray(alone[1])), (np.asarray(y)[7:8], np.asarray(dx)[7:8]))


def test_stock_rows_do_not() -> None:
    """The control: stock multiplies all rows by all weights, so that a nan in one expert reaches the others."""
    x, w, g = normal(5, 12, K), normal(6, G, K, N), normal(7, 12, N)
    sizes = jnp.array([6, 0, 6, 0, 0])
    stock = [np.asarray(everything(x, a, g, sizes)[0]) for a in (w, w.at[4].set(jnp.nan))]
    ours = [RUN(x, a, g, sizes)[0] for a in (w, w.at[4].set(jnp.nan))]
    assert_bits_equal(*ours)
    assert (stock[0].view(np.uint32) != stock[1].view(np.uint32)).any()


INNER = lax.RaggedDotDimensionNumbers((((3,), (2,)), ((0,), (1,))), (1,), (0,))
OUTER = lax.RaggedDotDimensionNumbers((((3,), (2,)), ((0,), (1,))), (2,), (0,))
BATCH = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
SUM_OUTER = lax.RaggedDotDimensionNumbers((((1, 2), (0, 1)), ((), ())), (2,), ())
SUM_INNER = lax.RaggedDotDimensionNumbers((((2, 1), (1, 0)), ((), ())), (1,), ())


@pytest.mark.tier("full", fast=("outer batch-bfloat16", "no rows-bfloat16"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("numbers", "lhs", "rhs"),
    [
        (None, (20, 5), (4, 5, 3)),
        (INNER, (2, 20, 3, 5), (4, 2, 5, 3)),
        (OUTER, (2, 3, 20, 5), (4, 2, 5, 3)),
        (BATCH, (20, 2, 5), (20, 5, 3)),
        (SUM_OUTER, (4, 3, 20), (3, 20, 6)),
        (SUM_INNER, (4, 20, 3), (20, 3, 6)),
        (None, (0, 5), (4, 5, 3)),
        (None, (20, 0), (4, 0, 3)),
    ],
    ids=["plain", "inner batch", "outer batch", "batch", "outer sum", "inner sum", "no rows", "no columns"],
)
def test_results_are_those_of_lax(numbers: Any, lhs: tuple[int, ...], rhs: tuple[int, ...], dtype: str) -> None:
    sizes = jnp.array([3, 0, 9, 5])

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        if numbers is None:
            return lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
        return lax.ragged_dot_general(x, w, sizes, numbers)

    args = normal(8, *lhs, dtype=dtype), normal(9, *rhs, dtype=dtype)
    differentiable = numbers not in (BATCH, SUM_OUTER, SUM_INNER) and dtype == "float32"

    def program(x: jax.Array, w: jax.Array) -> Any:
        if not differentiable:
            return function(x, w)
        y, pull = jax.vjp(function, x, w)
        return y, pull(y)

    found = equations(program, *args, name="ragged_dot_general")
    assert len(found) == (3 if differentiable else 1)
    for equation in found:
        x, w = (normal(10 + i, *v.aval.shape, dtype=v.aval.dtype.name) for i, v in enumerate(equation.invars[:2]))
        stock = equation.primitive.bind(x, w, sizes, **equation.params)
        ours = jax.jit(lambda x, w, sizes, e=equation: ragged_dot_general(x, w, sizes, **e.params))(x, w, sizes)
        assert (stock.shape, stock.dtype) == (ours.shape, ours.dtype)
        bound = 60 * 6 * 6 * float(jnp.finfo(stock.dtype).eps)
        np.testing.assert_allclose(*(np.asarray(a, np.float64) for a in (ours, stock)), rtol=0, atol=bound)


@pytest.mark.tier("full")
def test_vmap_keeps_the_bits() -> None:
    x, w, g = normal(11, 3, 30, K), normal(12, 3, G, K, N), normal(13, 3, 30, N)
    sizes = jnp.array([[5, 5, 5, 5, 10], [0, 0, 30, 0, 0], [1, 2, 3, 4, 5]])
    mapped = jax.jit(substitute(jax.vmap(everything), RULES))(x, w, g, sizes)
    for i in range(3):
        one = RUN(x[i], w[i], g[i], sizes[i])
        assert_bits_equal(jax.tree.map(lambda a, i=i: a[i], mapped), one, err_msg=str(i))


def test_errors_and_other_platforms() -> None:
    x, w = jnp.ones((20, 5)), jnp.ones((4, 5, 3))
    numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    with pytest.raises(UnsupportedError, match="group_offset must be None"):
        ragged_dot_general(x, w, jnp.ones(4, int), ragged_dot_dimension_numbers=numbers, group_offset=jnp.zeros(1))
    assert lowers_for_cuda(substitute(everything, RULES), x, w, jnp.ones((20, 3)), jnp.array([5, 5, 5, 5]))
