"""Scatters that combine: updates meet in the order of their indices, whatever else is scattered."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bijax.lax import scatter
from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.errors import UnsupportedError
from tests.arrays import on_device
from tests.lax.primitive_cases import FLOATS, equations, lowers_for_cuda, normal, substitute

RULES = {
    "scatter-add": scatter.scatter_add,
    "scatter_add": scatter.scatter_add,
    "scatter-sub": scatter.scatter_sub,
    "scatter_sub": scatter.scatter_sub,
    "scatter-mul": scatter.scatter_mul,
    "scatter_mul": scatter.scatter_mul,
}

WINDOWS = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
PARTS = lax.ScatterDimensionNumbers((1,), (0,), (0,))

Case = tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]

# function of operand, indices and updates, and their shapes
CASES: dict[str, Case] = {
    "rows": (lambda x, i, u: x.at[i].add(u), (20, 4), (50,), (50, 4)),
    "clipped rows": (lambda x, i, u: x.at[i].add(u, mode="clip"), (20, 4), (50,), (50, 4)),
    "promised rows": (lambda x, i, u: x.at[i % 20].add(u, mode="promise_in_bounds"), (20, 4), (50,), (50, 4)),
    "products": (lambda x, i, u: x.at[i].mul(u), (20,), (50,), (50,)),
    "differences": (lambda x, i, u: x.at[i].subtract(u), (20, 2), (3, 5), (3, 5, 2)),
    "elements": (lambda x, i, u: x.at[i, i[::-1]].add(u), (20, 20), (50,), (50,)),
    "columns": (lambda x, i, u: x.at[:, i].add(u), (5, 20, 3), (50,), (5, 50, 3)),
    "windows": (lambda x, i, u: lax.scatter_add(x, i, u, WINDOWS), (6, 7), (9, 2), (9, 3, 2)),
    "clipped windows": (lambda x, i, u: lax.scatter_add(x, i, u, WINDOWS, mode="clip"), (6, 7), (9, 2), (9, 3, 2)),
    "parts of rows": (lambda x, i, u: lax.scatter_add(x, i, u, PARTS), (6, 7), (9, 1), (9, 4)),
    "vmap of all": (jax.vmap(lambda x, i, u: x.at[i].add(u)), (3, 20, 4), (3, 50), (3, 50, 4)),
    "vmap of updates": (jax.vmap(lambda x, i, u: x.at[i].add(u), (0, None, 0)), (3, 20, 4), (50,), (3, 50, 4)),
    "vmap of windows": (
        jax.vmap(lambda x, i, u: lax.scatter_add(x, i, u, WINDOWS), (2, 1, 0)),
        (6, 7, 3),
        (9, 3, 2),
        (3, 9, 3, 2),
    ),
    "segments": (lambda x, i, u: jax.ops.segment_sum(u, i, 20), (20, 4), (50,), (50, 4)),
    "unique": (lambda x, i, u: x.at[jnp.arange(50) * 2 % 101].add(u, unique_indices=True), (100,), (50,), (50,)),
    "a scalar": (lambda x, i, u: x.at[()].add(u), (), (1,), ()),
    "no updates": (lambda x, i, u: lax.scatter_add(x, i, u, PARTS), (6, 7), (0, 1), (0, 4)),
    "nothing": (lambda x, i, u: lax.scatter_add(x, i, u, PARTS), (6, 0), (9, 1), (9, 0)),
}


def operands(case: Case, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    _, shape, indices, updates = case
    i = np.random.default_rng(0).integers(-3, max(shape, default=0) + 3, indices)
    return normal(1, *shape, dtype=dtype), jnp.asarray(i, jnp.int32), normal(2, *updates, dtype=dtype)


@pytest.mark.tier("full", fast=("differences", "elements", "windows", "vmap of windows", "unique"))
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_order_of_indices(name: str) -> None:
    """XLA:CPU, too, scatters in the order of the indices: with float32 the bits are the same."""
    case = CASES[name]
    args = operands(case, "float32")
    assert len([e for n in RULES for e in equations(case[0], *args, name=n)]) == 1
    assert_bits_equal(jax.jit(substitute(case[0], RULES))(*args), jax.jit(case[0])(*args))


@pytest.mark.tier("full", fast=("float16", "float64"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_narrow_sums_are_rounded_once(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        case = CASES["rows"]
        x, i, u = operands(case, "float32")
        x, u = x.astype(dtype), u.astype(dtype)
        wide = "float64" if dtype == "float64" else "float32"
        ours = jax.jit(substitute(case[0], RULES))(x, i, u)
        assert ours.dtype == dtype
        assert_bits_equal(ours, jax.jit(case[0])(x.astype(wide), i, u.astype(wide)).astype(dtype))
        if dtype != "float64":  # the control: stock rounds at every step
            assert (np.asarray(ours) != np.asarray(jax.jit(case[0])(x, i, u))).any()


def test_updates_for_others_do_not_matter() -> None:
    """Rows of a table with the updates of others between, before and after them, hostile ones included."""
    rng = np.random.default_rng(3)
    for name, mine in hostile_rows(3, (40, 5), "float32").items():
        ids = rng.integers(0, 4, 40)
        alone = _add(jnp.zeros((4, 5)), ids, mine)
        for others in (1, 60, 300):
            where = np.sort(rng.choice(40 + others, 40, replace=False))
            all_ids = rng.integers(4, 9, 40 + others)
            rows = rng.choice(np.array([np.nan, np.inf, 1e30, 1.0], np.float32), (40 + others, 5))
            all_ids[where], rows[where] = ids, mine
            assert_bits_equal(_add(jnp.zeros((9, 5)), all_ids, rows)[:4], alone, err_msg=f"{name} {others}")


@jax.jit
def _add(x: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return substitute(lambda x, ids, rows: x.at[ids].add(rows), RULES)(x, ids, rows)


def test_untouched_elements_stay_as_they_are() -> None:
    x = on_device(hostile_rows(4, (9, 3), "float32")["denormal"]).at[0].set(-0.0)
    assert_bits_equal(_add(x, jnp.array([5, 9, -10]), jnp.ones((3, 3)))[:5], x[:5])


def test_gradient_of_a_look_up() -> None:
    """Cut at any row the sum goes on where it stopped, and examples of zeros after change nothing."""
    table, names = jnp.zeros((30, 4)), on_device(np.random.default_rng(5).integers(0, 30, (6, 50)))
    g = normal(5, 6, 50, 4)

    def gradient(names: jax.Array, g: jax.Array) -> jax.Array:
        return jax.vjp(lambda t: t[names], table)[1](g)[0]

    run = jax.jit(substitute(gradient, RULES))
    whole = run(names, g)
    assert_bits_equal(run(jnp.pad(names, ((0, 2), (0, 0))), jnp.pad(g, ((0, 2), (0, 0), (0, 0)))), whole)
    flat_names, flat = names.ravel(), g.reshape(300, 4)
    assert_bits_equal(_add(_add(table, flat_names[:77], flat[:77]), flat_names[77:], flat[77:]), whole)
    mapped = jax.jit(substitute(jax.vmap(gradient), RULES))(names, g)
    assert_bits_equal(mapped[2], run(names[2], g[2]))


def test_one_window_for_each_entry_of_a_batch_is_no_loop() -> None:
    """The gradient of `jnp.take_along_axis`: no windows can meet, which JAX does not say."""
    x, i, u = normal(6, 7, 9), on_device(np.random.default_rng(6).integers(-12, 12, (7, 1))), normal(7, 7, 1)

    def gradient(u: jax.Array, i: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: jnp.take_along_axis(x, i, 1), x)[1](u)[0]

    ours = substitute(gradient, RULES)
    assert not equations(ours, u, i, name="while")
    assert not equations(ours, u, i, name="bijax_scatter")
    assert_bits_equal(jax.jit(ours)(u, i), jax.jit(gradient)(u, i))


@pytest.mark.tier("full")
def test_narrow_and_wide_indices() -> None:
    x, u = jnp.zeros(300), jnp.ones(4)
    with jax.enable_x64(True):
        for dtype in ("int8", "uint8", "int32", "uint32", "int64"):
            i = jnp.array([1, 127, 1, 5], dtype)[:, None]
            numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
            for mode in ("clip", "drop"):
                y = scatter.scatter_add(x, i, u, dimension_numbers=numbers, mode=mode)
                assert np.flatnonzero(y).tolist() == [1, 5, 127]
                assert y[1] == 2


def test_errors_and_other_platforms() -> None:
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    z = jnp.zeros(3, jnp.complex64)
    with pytest.raises(UnsupportedError, match="scatter_add: a batch-invariant order is defined for"):
        scatter.scatter_add(z, jnp.zeros((1, 1), jnp.int32), z[:1], dimension_numbers=numbers, mode="drop")
    for dtype in FLOATS[:2]:
        case = CASES["vmap of all"]
        assert lowers_for_cuda(substitute(case[0], RULES), *operands(case, dtype))
