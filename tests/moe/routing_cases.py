"""Calls of the kernels that route tokens, for the tests on a CPU and on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_rows.portable import rows_of_tokens
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


SUMS = [
    ("bfloat16", 7, 3, 24, 100, "some"),
    ("float32", 5, 8, 41, 2100, "twice"),
    ("float16", 4, 1, 4, 513, "after the last"),
    ("bfloat16", 9, 4, 1030, 24, "twice"),
    ("float32", 6, 5, 1100, 600, "some"),
]
"""Dtype, tokens, places of each, rows, columns, and what is wrong with the rows' places."""


def rows_to_add(dtype: str, tokens: int, topk: int, size: int, columns: int, wrong: str) -> tuple[Any, ...]:
    """Returns rows with nan, infinities, both zeros and subnormal numbers, their places, and weights."""
    draw = np.random.default_rng(3)
    rows = draw.standard_normal((size, columns)) * np.exp2(draw.integers(-12, 12, (size, 1)))
    rows[0], rows[1, ::3], rows[2], rows[3] = np.nan, np.inf, -0.0, rows[3] * 1e-39
    places = np.full(size, -1)
    used = draw.permutation(tokens * topk)[: max(1, tokens * topk - 3)]
    places[draw.permutation(size)[: used.size]] = used[:size]
    if wrong == "twice":
        places[np.flatnonzero(places < 0)[0]] = used[0]
    elif wrong == "after the last":
        places[1] = tokens * topk
    weights = draw.standard_normal((tokens, topk)).astype(np.float32)
    weights[0], weights[-1, 0] = -0.0, np.inf
    offset = on_device(places, jnp.int32)
    row = rows_of_tokens(offset, places=tokens * topk).reshape(tokens, topk)
    return on_device(rows, jnp.float32).astype(dtype), offset, row, on_device(weights)
