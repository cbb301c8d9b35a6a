"""Operations that choose values, and how their batches are compared."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS = 40


def row_numbers(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape)


def scattered(x: jax.Array, how: str) -> jax.Array:
    """Values of a row meet in four places."""
    place = jnp.zeros((x.shape[0], 4), x.dtype).at[jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1]) % 4]
    return getattr(place, how)(x)


CHOICES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "argmax": lambda x: lax.argmax(x, 1, jnp.int32),
    "argmin": lambda x: lax.argmin(x, 1, jnp.int32),
    "sort": lambda x: lax.sort(x),
    "sort with ties": lambda x: lax.sort((x, row_numbers(x)), num_keys=1)[1],
    "top_k": lambda x: lax.top_k(x, min(3, x.shape[1]))[1],
    "cummax": lambda x: lax.cummax(x, 1),
    "cummin": lambda x: lax.cummin(x, 1),
    "reduce_or": lambda x: lax.reduce_or(x > 1, (1,)),
    "scatter": lambda x: scattered(x, "set"),
    "scatter-max": lambda x: scattered(x, "max"),
    "scatter-min": lambda x: scattered(x, "min"),
}


def tied_rows(columns: int) -> jax.Array:
    x = np.random.default_rng(columns).integers(-3, 3, (ROWS, columns)).astype(np.float32)
    x[3], x[5, ::2], x[9] = np.nan, np.nan, np.inf
    x[7], x[7, ::2] = 0.0, -0.0
    return jnp.asarray(x)


def bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array.view(np.uint32) if array.dtype.kind == "f" else array


def check_choices(program: Callable[[jax.Array], jax.Array], columns: int) -> None:
    x = tied_rows(columns)
    expected = bits(program(x))
    for rows in (1, 2, 8, 17):
        for start in (0, 3, ROWS - rows):
            actual = bits(program(x[start : start + rows]))
            assert (actual == expected[start : start + rows]).all(), (rows, start)
