"""Heads, tables, rows and caches for the kernels that turn and store."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = tuple[jax.Array, ...]


def case(
    shape: tuple[int, int, int, int],
    dtype: Any,
    *,
    to_rotate: bool = False,
    exact: bool = False,
    stored: int | None = None,
) -> Arrays:
    """Returns the arguments of `rotate_and_store`; the rows of the first two of four or more tokens are no rows.

    Args:
        shape: Tokens, heads of queries, heads of keys, their width.
        dtype: Of heads and caches.
        to_rotate: Whether other queries and keys than those in the heads are rotated.
        exact: Whether products are exact in float32, so that a sum has one value, contracted with them or not.
        stored: Rows of the caches; a few more than tokens by default.
    """
    tokens, queries, keys, width = shape
    stored = tokens + 3 if stored is None else stored
    draw = np.random.default_rng(width)

    def numbers(*shape: int) -> jax.Array:
        found = draw.standard_normal(shape)
        return jnp.asarray(np.round(found * 64) / 64 if exact else found, dtype)

    angles = draw.uniform(0, 100, (tokens, width // 2))
    cos, sin = (np.round(f(angles) * 256) / 256 if exact else f(angles) for f in (np.cos, np.sin))
    tables = (jnp.asarray(table, jnp.float32) for table in (cos, sin))
    rows = draw.permutation(stored)[:tokens].astype(np.int32)
    if tokens > 3:
        rows[:2] = -1, stored
    caches = (numbers(stored, keys, width) for _ in range(2))
    more = [numbers(tokens, queries + keys, width)] if to_rotate else []
    return (numbers(tokens, queries + 2 * keys, width), *tables, jnp.asarray(rows), *caches, *more)


def in_groups(heads: jax.Array, keys: int, groups: int) -> jax.Array:
    """Returns heads (..., N + 2 * K, H) put into groups, each with an equal share of queries, keys and values."""
    *_, number, _ = heads.shape
    parts = jnp.split(heads, (number - 2 * keys, number - keys), axis=-2)
    by_group = [jnp.split(part, groups, axis=-2) for part in parts]
    return jnp.concatenate([part for group in zip(*by_group, strict=True) for part in group], axis=-2)
