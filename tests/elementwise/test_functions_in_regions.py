"""Functions that scatters and reductions carry, applied outside of XLA's regions: the results are those of JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal
from tests.lax.primitive_cases import normal

pytestmark = pytest.mark.usefixtures("hopper")

X = normal(0, 7, 6)
OVERLAPPING = lax.ScatterDimensionNumbers((1,), (0,), (0, 1))
STARTS = jnp.array([[2, 1], [2, 2], [2, 1], [0, 4], [0, 3], [9, 0]])

APPLYING: dict[str, Callable[[jax.Array, Callable[[jax.Array], jax.Array]], jax.Array]] = {
    "rows": lambda x, f: x.at[jnp.arange(2)].apply(f),
    "repeated rows": lambda x, f: x.at[jnp.array([1, 1, 3, 1])].apply(f),
    "more indices than elements": lambda x, f: x[:1, :1].at[jnp.zeros(9, jnp.int32)].apply(f),
    "a slice": lambda x, f: x.at[1:4, ::2].apply(f),
    "columns": lambda x, f: x.at[:, jnp.array([0, 2, 0])].apply(f),
    "elements": lambda x, f: x.at[jnp.array([0, 0, 1]), jnp.array([1, 1, 2])].apply(f),
    "a mask": lambda x, f: x.at[np.asarray(X) > 0].apply(f),
    "all": lambda x, f: x.at[...].apply(f),
    "none": lambda x, f: x.at[jnp.zeros(0, jnp.int32)].apply(f),
    "a scalar": lambda x, f: x[0, 0].at[()].apply(f),
    "outside": lambda x, f: x.at[jnp.array([100, -1, 1])].apply(f),
    "clipped": lambda x, f: x.at[jnp.array([100, 6, 1])].apply(f, mode="clip", unique_indices=True),
    "promised": lambda x, f: x.at[jnp.array([5, 5])].apply(f, mode="promise_in_bounds"),
    "unique": lambda x, f: x.at[jnp.array([5, 2])].apply(f, unique_indices=True),
    "windows that overlap": lambda x, f: lax.scatter_apply(x, STARTS, f, OVERLAPPING, update_shape=(6, 2)),
    "vmap of both": lambda x, f: jax.vmap(lambda row, i: row.at[i].apply(f))(x, jnp.arange(14).reshape(7, 2) % 5 % 2),
    "vmap of the array": lambda x, f: jax.vmap(lambda row: row.at[jnp.array([1, 1, 0])].apply(f))(x),
    "vmap of the indices": lambda x, f: jax.vmap(lambda i: x.at[i].apply(f))(jnp.array([[1, 1], [0, 2]])),
}


def doubled_and_one(v: jax.Array) -> jax.Array:
    """Exact, so that the bits are those of JAX: twice the number and one, in the number's own dtype."""
    return v + v + jnp.ones((), v.dtype)


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_scatters_apply_a_function_as_often_as_indices_meet(dtype: str) -> None:
    x = jnp.round(X * 4).astype(dtype)

    def program(x: jax.Array) -> dict[str, jax.Array]:
        return {name: apply(x, doubled_and_one) for name, apply in APPLYING.items()}

    actual, expected = jax.jit(bijax.invariant(program))(x), jax.jit(program)(x)
    for name in APPLYING:
        assert_bits_equal(actual[name], expected[name], err_msg=name)
    assert not jnp.array_equal(expected["rows"], x)


def test_functions_that_the_compiler_would_not_take_in_a_region() -> None:
    for f in (jnp.square, lambda v: v * 1.3, lambda v: v / 3.0, jax.nn.silu):
        eager = bijax.invariant(lambda x, f=f: x.at[jnp.array([1, 1])].apply(f))
        np.testing.assert_allclose(eager(X), X.at[1].set(f(f(X[1]))), rtol=1e-6)


def test_control_flow_in_a_function() -> None:
    def grown(v: jax.Array) -> jax.Array:
        return lax.while_loop(lambda v: jnp.abs(v) < 10, lambda v: v * 3, v)

    # XLA:CPU aborts where a loop stands in its region.
    run = jax.jit(bijax.invariant(lambda x: x.at[1:3].apply(grown)))
    np.testing.assert_allclose(run(X), X.at[1:3].set(jax.vmap(jax.vmap(grown))(X[1:3])), rtol=1e-6)


def test_the_other_operand_of_a_region_is_not_used() -> None:
    # jax.lax.scatter_apply hides it from its function, which is what the replacement relies on.
    traced = jax.make_jaxpr(lambda x: x.at[0].apply(doubled_and_one))(X)
    (jaxpr,) = (e.params["update_jaxpr"] for e in traced.jaxpr.eqns if e.primitive.name == "scatter")
    assert all(jaxpr.invars[1] not in e.invars for e in jaxpr.eqns)


def mix(a: jax.Array, b: jax.Array) -> jax.Array:
    return a * b * 0.25 + a + b


def first_largest(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    later = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(later, a[0], b[0]), jnp.where(later, a[1], b[1])


def numbered(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)


ZERO, LOWEST = np.float32(0), (np.float32(-np.inf), np.int32(0))
REDUCING: dict[str, Callable[[jax.Array], Any]] = {
    "rows": lambda x: lax.reduce(x, ZERO, mix, (1,)),
    "columns": lambda x: lax.reduce(x, ZERO, mix, (0,)),
    "everything": lambda x: lax.reduce(x, ZERO, mix, (0, 1)),
    "no axis": lambda x: lax.reduce(x, ZERO, mix, ()),
    "nothing": lambda x: lax.reduce(x[:, :0], np.float32(2), mix, (1,)),
    "two arrays": lambda x: lax.reduce(numbered(x), LOWEST, first_largest, (0,)),
    "vmap": lambda x: jax.vmap(lambda row: lax.reduce(row, ZERO, mix, (0,)), 1)(x),
    "gradient": jax.grad(lambda x: lax.reduce(x, ZERO, mix, (1,)).sum()),
    "windows": lambda x: lax.reduce_window(x, ZERO, mix, (2, 3), (1, 2), "SAME"),
    "dilated windows": lambda x: lax.reduce_window(x, ZERO, mix, (2, 3), (2, 1), ((1, 0), (0, 2)), (1, 2), (2, 1)),
    "windows of two arrays": lambda x: lax.reduce_window(numbered(x), LOWEST, first_largest, (1, 3), (1, 1), "VALID"),
    "no windows": lambda x: lax.reduce_window(x[:1], ZERO, mix, (2, 3), (1, 2), "VALID"),
}


def test_reductions_by_a_function() -> None:
    def program(x: jax.Array) -> dict[str, Any]:
        return {name: reduction(x) for name, reduction in REDUCING.items()}

    actual, expected = jax.jit(bijax.invariant(program))(X), jax.jit(program)(X)
    for name in REDUCING:
        for a, e in zip(jax.tree.leaves(actual[name]), jax.tree.leaves(expected[name]), strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype), name
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5, err_msg=name)


def test_neighbours_are_combined_in_their_order() -> None:
    def second(a: jax.Array, b: jax.Array) -> jax.Array:
        """Associative, not commutative: the later of two that are not zero."""
        return jnp.where(b != 0, b, a)

    for length in range(1, 9):
        row = jnp.where(jnp.arange(8) < length, jnp.arange(1.0, 9.0), 0.0)
        assert bijax.invariant(lambda x: lax.reduce(x, ZERO, second, (0,)))(row) == length
    windows = bijax.invariant(lambda x: lax.reduce_window(x, ZERO, second, (3,), (1,), "VALID"))
    assert windows(jnp.arange(1.0, 6.0)).tolist() == [3.0, 4.0, 5.0]


def test_they_lower_for_a_gpu() -> None:
    for program in (APPLYING["repeated rows"], lambda x, _: REDUCING["rows"](x), lambda x, _: REDUCING["windows"](x)):
        run = jax.jit(bijax.invariant(lambda x, program=program: program(x, jnp.tanh)))
        text = run.trace(X).lower(lowering_platforms=("cuda",)).as_text()
        bodies = [part.split("stablehlo.return")[0] for part in text.split('"stablehlo.scatter"')[1:]]
        assert not any("tanh" in body for body in bodies)
