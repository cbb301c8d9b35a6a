"""Calls of the kernels that route tokens, for the tests on a CPU and on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.arrays import on_device


def scores(rows: int, columns: int, dtype: str) -> jax.Array:
    """Returns numbers with ties, both zeros, infinities, nans and subnormal numbers."""
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    x[0] = np.round(x[0])
    x[0, :4] = 0.0, -0.0, 1e-40, -0.0
    x[-1, ::3] = np.nan
    x[-1, 1] = np.inf
    x[rows // 2, 1:] = -np.inf
    return jnp.asarray(x).astype(dtype)


def numbers(size: int, low: int, high: int) -> jax.Array:
    return on_device(np.random.default_rng(1).integers(low, high, size), jnp.int32)


SORTS: dict[str, tuple[int, dict[str, int]]] = {
    "all experts": (64, {"first": 0, "end": 16, "allocated": 64, "topk": 4}),
    "a rank, rows too few": (300, {"first": 3, "end": 9, "allocated": 10, "topk": 3}),
    "more rows than places": (5, {"first": 0, "end": 40, "allocated": 70}),
}
COUNTS: dict[str, tuple[list[int], int]] = {
    "some": ([1, 0, 33, 2], 40),
    "negative": ([3, -1], 5),
    "too many": ([2**31 - 1, 2**31 - 1, 5], 5),
}
PLACES: dict[str, tuple[list[int], int]] = {
    "some": ([2, -1, 0, 5, 3], 6),
    "twice": ([1, 4, 1, -7], 6),
    "after the last": ([1, 6, 0], 6),
}


def rows_and_places(dtype: str, columns: int) -> tuple[Any, Any]:
    x = on_device(np.random.default_rng(2).integers(-100, 100, (5, columns))).astype(dtype)
    return x, numbers(9, -2, 5)[:, None]
