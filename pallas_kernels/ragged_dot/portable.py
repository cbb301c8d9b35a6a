"""Grouped matrix products, tile by tile, on any platform that JAX runs on.

The first tile of a group starts at the group's first row, so no tile is shared; a loop visits only tiles that contain
rows, whatever the group sizes. Rows of a tile past the end of its group are masked out.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import ChunkContract
from pallas_kernels.parts.xla.tiles import FROM_ZERO, isolate, next_power_of_two, pad_rows

Product = Callable[[jax.Array, jax.Array], jax.Array]

_FEWEST_ROWS: Final = 8
_MOST_ROWS: Final = 128


def multiply_groups(x: jax.Array, w: jax.Array, sizes: jax.Array, *, product: Product) -> jax.Array:
    """Multiplies each row by the weights of its group.

    Args:
        x: (M, K), sorted by group.
        w: (G, ...), the weights of each group.
        sizes: (G,) integers, the number of rows in each group.
        product: Multiplies (T, K) by one entry of `w` to (T, N), in its accumulator dtype. The bits of a row must not
            depend on the number of rows or on the other rows.

    Returns:
        (M, N) in the accumulator dtype. Rows after the last group are zero. If sizes are negative or add up to more
        than M, floating-point results are nan.

    Guarantee: row-invariant, if the product is; a row depends on itself and on the weights of its group alone.

    Example:
        >>> x, w = jnp.ones((3, 2)), jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
        >>> multiply_groups(x, w, jnp.array([1, 1]), product=jnp.matmul).tolist()
        [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]]
    """
    m = x.shape[0]
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, next_power_of_two(m // w.shape[0])))
    n = jax.eval_shape(product, jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype), w[0])
    x, w = isolate(pad_rows(x, m + rows), w)

    def step(group: jax.Array, start: jax.Array, inside: jax.Array, y: jax.Array) -> jax.Array:
        tile = lax.dynamic_slice_in_dim(x, start, rows, **FROM_ZERO)
        (result,) = isolate(product(*isolate(tile, lax.dynamic_index_in_dim(w, group, keepdims=False, **FROM_ZERO))))
        before = lax.dynamic_slice_in_dim(y, start, rows, **FROM_ZERO)
        return lax.dynamic_update_slice_in_dim(y, jnp.where(inside[:, None], result, before), start, 0, **FROM_ZERO)

    sizes, start = _known_to_fit(sizes, m, n.dtype)
    y = _visit_tiles(step, sizes, rows, jnp.full((m + rows, n.shape[1]), start))
    return isolate(y[:m])[0]


def sum_groups(x: jax.Array, g: jax.Array, sizes: jax.Array, *, product: Product, contract: ChunkContract) -> jax.Array:
    """Sums the outer products of the rows of each group: the gradient of the weights in `multiply_groups`.

    A group's rows are summed in chunks starting at its first row; chunk sums are added in ascending order.

    Args:
        x: (M, K), sorted by group.
        g: (M, N), one row for each row of `x`.
        sizes: (G,) integers, the number of rows in each group.
        product: Maps (T, K) and (T, N) to the sums (K, N) of the rows' outer products, in its accumulator dtype;
            trailing rows of zeros must not change the result.
        contract: Chunks of rows.

    Returns:
        (G, K, N) in the accumulator dtype. Floating-point results are nan if sizes are negative or sum to more than M.

    Guarantee: a group's sum depends on its own rows alone, not on their positions.

    Example:
        >>> from pallas_kernels.contract import chunk_contract
        >>> x, g = jnp.ones((3, 1)), jnp.arange(3.0)[:, None]
        >>> sum_groups(x, g, jnp.array([1, 2]), product=lambda x, g: x.T @ g, contract=chunk_contract()).tolist()
        [[[0.0]], [[3.0]]]
    """
    m = x.shape[0]
    rows = min(contract.rows, m)
    shapes = (jax.ShapeDtypeStruct((rows, a.shape[1]), a.dtype) for a in (x, g))
    one = jax.eval_shape(product, *shapes)
    x, g = isolate(*(pad_rows(a, m + rows) for a in (x, g)))

    def step(group: jax.Array, start: jax.Array, inside: jax.Array, total: jax.Array) -> jax.Array:
        tiles = (lax.dynamic_slice_in_dim(a, start, rows, **FROM_ZERO) for a in (x, g))
        parts = (jnp.where(inside[:, None], tile, jnp.zeros((), tile.dtype)) for tile in tiles)
        (part,) = isolate(product(*isolate(*parts)))
        so_far = lax.dynamic_index_in_dim(total, group, keepdims=False, **FROM_ZERO)
        return lax.dynamic_update_index_in_dim(total, isolate(so_far + part)[0], group, 0, **FROM_ZERO)

    sizes, start = _known_to_fit(sizes, m, one.dtype)
    total = jnp.full((sizes.shape[0], *one.shape), start)
    return isolate(_visit_tiles(step, sizes, rows, total) if m else total)[0]


def _known_to_fit(sizes: jax.Array, m: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the sizes and the initial value of the results: zero sizes and nan if the sizes do not fit `m` rows."""
    possible = (sizes >= 0) & (sizes <= m)
    sizes = jnp.where(possible, sizes.astype(jnp.int32), 0)
    # The first sum that overflows is negative.
    ends = lax.cumsum(sizes)
    fit = jnp.all(possible & (ends >= 0) & (ends <= m))
    other = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0
    return jnp.where(fit, sizes, 0), jnp.where(fit, jnp.zeros((), dtype), jnp.asarray(other, dtype))


def _visit_tiles(
    step: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array],
    sizes: jax.Array,
    rows: int,
    state: jax.Array,
) -> jax.Array:
    """Calls `step` with the group, the start and the valid rows of every tile, in ascending order."""
    ends = lax.cumsum(sizes)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tiles = -((starts - ends) // rows)
    totals = lax.cumsum(tiles)

    def body(i: jax.Array, state: jax.Array) -> jax.Array:
        group = jnp.sum(totals <= i, dtype=jnp.int32)
        start = starts[group] + (i - (totals - tiles)[group]) * rows
        return step(group, start, start + lax.iota(jnp.int32, rows) < ends[group], state)

    return lax.fori_loop(jnp.int32(0), totals[-1], body, state)
