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
    "in a loop": doubled_in_turn,
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


def test_plain_jax_writes_too_early() -> None:
    """The control. A version of XLA in which this passes needs none of it."""
    x = rows(1, 1, "float32")
    found = np.asarray(mapped(PROGRAMS["set"], (1, 0))(x))
    assert (found[0, 1:] != x[:-1, 0]).any()
