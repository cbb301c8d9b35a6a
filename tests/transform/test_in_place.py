"""Arrays that are updated by parts of themselves on a CPU, where XLA writes while it still reads."""

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal

Program = Callable[[jax.Array], jax.Array]

INTO, FROM = np.array([1, 3, 5]), np.array([5, 0, 1])
SIZE: Final = 8


def ramp() -> jax.Array:
    return jnp.exp2(jnp.arange(SIZE))


def doubled_in_turn(x: jax.Array) -> jax.Array:
    def body(i: jax.Array, carry: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(carry, 2 * lax.dynamic_slice(carry, (i,), (3,)), (i + 1,))

    return lax.fori_loop(0, 3, body, x)


PROGRAMS: Final[dict[str, Program]] = {
    "set": lambda x: x.at[1:].set(x[:-1]),
    "add": lambda x: x.at[1:].add(x[:-1]),
    "multiply": lambda x: x.at[1:].multiply(x[:-1]),
    "max": lambda x: x.at[1:].max(2 * x[:-1]),
    "indices": lambda x: x.at[INTO].set(x[FROM]),
    "reversed": lambda x: x.at[:].set(x[::-1]),
    "a traced place": lambda x: lax.dynamic_update_slice(x, 2 * x[2:6], (x[0].astype(int) * 0 + 1,)),
    "twice": lambda x: (lambda y: y.at[2:].set(y[:-2]))(x.at[1:].set(x[:-1])),
    "of another shape": lambda x: x.reshape(2, 4).at[:, 1:].set(x.reshape(2, 4)[:, :-1]).reshape(SIZE),
    "computed once more": lambda x: (3 * x).at[1:].set((3 * x)[:-1]),
    "constants": lambda x: lax.dynamic_update_slice(ramp(), ramp()[:3], (x[0].astype(int) * 0 + 1,)).astype(x.dtype),
    "a branch": lambda x: lax.switch(0, [lambda a: 2 * a, lambda a: a], x).at[1:].set((2 * x)[:-1]),
    "one turn": lambda x: lax.scan(lambda c, _: (c.at[1:].set((3 * x)[:-1]), None), 3 * x, None, length=1)[0],
    "in a loop": doubled_in_turn,
    "constants of a function": lambda x: jax.jit(
        lambda a: lax.dynamic_update_slice(a, ramp()[:3], (x[0].astype(int) * 0 + 1,))
    )(ramp()).astype(x.dtype),
    "in a function": lambda x: jax.jit(lambda a, b: a.at[1:].set(b[:-1]))(x, x),
}


def mapped(program: Program, axes: tuple[int, int]) -> Program:
    return jax.jit(jax.vmap(program, *axes))


def rows(count: int, axis: int, dtype: str) -> np.ndarray:
    numbers = (np.arange(count * SIZE).reshape(count, SIZE) % 11 + 1).astype(jnp.dtype(dtype))
    return np.moveaxis(numbers, 0, axis)


@pytest.mark.tier("fault")
@pytest.mark.parametrize("axes", [(1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_update_is_computed_before_it_is_written(name: str, axes: tuple[int, int]) -> None:
    program = PROGRAMS[name]
    # Plain JAX writes too early where there is one row. Several rows, and integers, with one pair of axes.
    for dtype, count in (("float32", 1), *([("float32", 3), ("int32", 1)] if axes == (1, 0) else [])):
        x = rows(count, axes[0], dtype)
        with jax.disable_jit():  # one operation after the other
            expected = [np.asarray(program(jnp.asarray(row))) for row in np.moveaxis(x, axes[0], 0)]
        found = mapped(bijax.invariant(program), axes)(x)
        assert_bits_equal(found, np.stack(expected, axes[1]), err_msg=f"{count} of {dtype}")


@pytest.mark.tier("fault")
@pytest.mark.parametrize("moved", [lambda x: x[::-1], lambda x: x[jnp.arange(len(x))]], ids=["reversed", "taken"])
def test_an_array_that_is_moved_where_there_is_one_row(moved: Program) -> None:
    def program(x: jax.Array) -> jax.Array:
        return moved(x).T.at[1:].set(x.T[:-1])

    x = rows(1, 0, "float32")
    expected = np.concatenate([x.T[:1], x.T[:-1]])
    assert_bits_equal(jax.jit(bijax.invariant(program))(x), expected)
    assert (np.asarray(jax.jit(program)(x)) != expected).any()  # the control


@pytest.mark.parametrize(("name", "axes"), [("set", (1, 0)), ("computed once more", (1, 0)), ("constants", (0, 1))])
def test_plain_jax_writes_too_early(name: str, axes: tuple[int, int]) -> None:
    """The control. A version of XLA in which this passes needs none of it."""
    x = rows(1, axes[0], "float32")
    with jax.disable_jit():
        expected = PROGRAMS[name](jnp.asarray(x.reshape(SIZE)))
    assert (mapped(PROGRAMS[name], axes)(x).reshape(SIZE) != expected).any()
