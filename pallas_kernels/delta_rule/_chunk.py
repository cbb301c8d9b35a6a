"""Any rows of one chunk of the gated delta rule, in any number, and the state at its end: see `DeltaRuleContract`.

Shapes: B sequences, J key heads, H value heads (J divides H), D and V their widths, C rows of a chunk, R rows that are
computed together.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import DeltaRuleContract
from pallas_kernels.delta_rule._sequences import get, put
from pallas_kernels.delta_rule._substitution import substitute
from pallas_kernels.parts.xla.lanes import run_flat
from pallas_kernels.parts.xla.opaque import apart_from_sums
from pallas_kernels.parts.xla.positions import fold_positions
from pallas_kernels.parts.xla.tiles import isolate

Product = Callable[[jax.Array, jax.Array, bool], jax.Array]
"""Multiplies stacks (G, M, K) by (G, K, N), or by (G, N, K) if the flag is set, and returns (G, M, N) float32."""


class Rows(NamedTuple):
    """The tokens of some rows.

    Attributes:
        query: (B, J, R, D).
        key: (B, J, R, D).
        value: (B, H, R, V).
        g: (B, H, R) float32.
        beta: (B, H, R) float32.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    g: jax.Array
    beta: jax.Array


class Chunk(NamedTuple):
    """What is kept of the rows of a chunk. Rows that were not computed yet may hold anything.

    Attributes:
        key: (B, J, C, D) keys, zeros where they were not finite.
        residual: (B, H, C, V), r of the contract.
        inverse: (B, H, C, C) float32, T of the contract.
        decay: (B, H, C) float32, G of the contract.
    """

    key: jax.Array
    residual: jax.Array
    inverse: jax.Array
    decay: jax.Array


def no_rows(like: Rows, chunk: int) -> Chunk:
    """Returns a chunk without rows for tokens of these sizes."""
    (b, j, _, d), (_, h, _, v) = like.key.shape, like.value.shape
    return Chunk(
        jnp.zeros((b, j, chunk, d), like.key.dtype),
        jnp.zeros((b, h, chunk, v), like.value.dtype),
        jnp.zeros((b, h, chunk, chunk), jnp.float32),
        jnp.zeros((b, h, chunk), jnp.float32),
    )


def compute_rows(
    tokens: Rows,
    rows: jax.Array,
    valid: jax.Array,
    state: jax.Array,
    kept: Chunk,
    *,
    scale: float,
    product: Product,
    contract: DeltaRuleContract,
) -> tuple[jax.Array, Chunk]:
    """Computes rows of a chunk whose earlier rows are known.

    Args:
        tokens: The tokens of the rows.
        rows: (B, R) int32, their places in the chunk, ascending by one: 0, 1, ... if R is the length of the chunk.
        valid: (B, R) bool, which rows to compute; a contiguous run in each sequence, which may be empty.
        state: (B, H, D, V) float32, at the chunk's edge.
        kept: The chunk with all rows before the first valid one.
        scale: Factor of the outputs.
        product: Multiplies stacks of matrices.
        contract: The order of the computation.

    Returns:
        The outputs (B, H, R, V), of no meaning where a row is not valid, and the chunk with the rows.
    """
    dtype, c = tokens.value.dtype, contract.chunk
    group = tokens.value.shape[1] // tokens.key.shape[1]
    column = jnp.arange(c, dtype=jnp.int32)
    first = jnp.where(valid, rows, c).min(1)
    count = jnp.where(valid, rows + 1, 0).max(1)
    there = (column < count[:, None])[:, None, :, None]  # (B, 1, C, 1)
    seen = (column <= rows[:, :, None])[:, None]  # (B, 1, R, C)
    earlier = (column < rows[:, :, None])[:, None]
    place = _Placement(rows, valid, c)

    unusable = jnp.repeat(~jnp.isfinite(tokens.key.astype(jnp.float32)).all(-1), group, 1)
    unusable = unusable | ~(tokens.g < jnp.inf) | ~jnp.isfinite(tokens.beta)
    beta = jnp.where(unusable, 0, tokens.beta)
    key = jnp.where(jnp.isfinite(tokens.key), tokens.key, 0)
    logs = _summed(jnp.where(unusable, 0, jnp.maximum(tokens.g, contract.least)), valid, first, kept.decay)
    decay, keys = place(kept.decay[..., None], logs[..., None])[..., 0], place(kept.key, key)

    between = jnp.where(seen, logs[..., None] - decay[:, :, None], 0)
    ages, grown = exp(between), exp(logs)[..., None]
    both = jnp.concatenate([key, tokens.query], 2)
    of_keys, of_query = jnp.split(multiply(product, both, keys, True), 2, 2)
    a = beta[..., None] * (jnp.repeat(of_keys, group, 1) * ages)
    b = jnp.where(seen, jnp.repeat(of_query, group, 1) * ages, 0).astype(dtype)
    (a,) = isolate(jnp.where(earlier, a, 0))
    known = jnp.where((column < first[:, None])[:, None, :, None], kept.inverse, 0)
    solved, usable = substitute(a, known, rows, valid, first, dtype)
    inverse = jnp.where(there, place(kept.inverse, solved), 0)
    weights = _positive_zero(multiply(product, b, inverse.astype(dtype))).astype(dtype)

    told, asked = jnp.split(multiply(product, jnp.repeat(both, group, 1), state.astype(dtype)), 2, 2)
    told, asked = isolate(apart_from_sums(grown * told), apart_from_sums(grown * asked))
    fresh = (beta[..., None] * (tokens.value.astype(jnp.float32) - told)).astype(dtype)
    fine = jnp.isfinite(fresh) & ~unusable[..., None] & usable[..., None]
    residual = place(kept.residual, jnp.where(fine, fresh, jnp.nan))
    # A row that is not finite makes the later ones nan. It must not reach the rows before it, whose factors are zeros.
    lost = jnp.where(jnp.isnan(residual) & there, column[:, None], c).min(2)
    inside = _positive_zero(multiply(product, weights, _finite(residual, there)))
    y = (jnp.float32(scale) * (asked + inside)).astype(dtype)
    y = jnp.where(rows[:, None, :, None] >= lost[:, :, None], jnp.nan, y)
    (y, *chunk) = isolate(y, keys, residual, place(kept.inverse, solved), decay)
    return y, Chunk(*chunk)


def next_state(state: jax.Array, kept: Chunk, count: jax.Array, *, product: Product) -> jax.Array:
    """Returns the state after the first rows of a chunk.

    Args:
        state: (B, H, D, V) float32, at the chunk's edge.
        kept: The chunk.
        count: (B,) int32, the rows; for 0 the result is `state`.
        product: Multiplies stacks of matrices.
    """
    dtype, c = kept.residual.dtype, kept.decay.shape[2]
    group = kept.decay.shape[1] // kept.key.shape[1]
    inside = (jnp.arange(c, dtype=jnp.int32) < count[:, None])[:, None, :, None]
    last = get(kept.decay, count - 1, 1, 2)
    later = exp(jnp.where(inside[..., 0], last - kept.decay, 0))[..., None]
    inverse = jnp.where(inside, kept.inverse, 0).astype(dtype)
    u = multiply(product, inverse, _finite(kept.residual, inside))
    u = jnp.where(inside, u * later, 0).astype(dtype)
    keys = jnp.repeat(jnp.where(inside, kept.key, 0), group, 1)
    (added,) = isolate(multiply(product, keys.swapaxes(2, 3), u))
    (old,) = isolate(apart_from_sums(exp(last)[..., None] * state))
    broken = (jnp.isnan(kept.residual) & inside).any(2)[:, :, None]
    found = jnp.where(broken, jnp.nan, old + added)
    return isolate(jnp.where(count[:, None, None, None] > 0, found, state))[0]


class _Placement:
    """Writes rows into a chunk, where they are valid."""

    def __init__(self, rows: jax.Array, valid: jax.Array, chunk: int):
        self._whole = rows.shape[1] == chunk
        self._rows, self._valid = rows, valid

    def __call__(self, kept: jax.Array, new: jax.Array) -> jax.Array:
        """(B, N, C, X) with rows (B, N, R, X)."""
        if self._whole:
            return jnp.where(self._valid[:, None, :, None], new, kept)

        for i in range(new.shape[2]):
            # Places of rows that are not valid may be outside; slices are clamped, and nothing changes there.
            place = self._rows[:, i]
            old = get(kept, place, 1, 2)
            row = jnp.where(self._valid[:, i, None, None, None], new[:, :, i : i + 1], old)
            kept = put(kept, row, place, 2)
        return kept


def _summed(g: jax.Array, valid: jax.Array, first: jax.Array, decay: jax.Array) -> jax.Array:
    """(B, H, R): the sums of gates since the edge, one addition for each row, upwards."""
    place = jnp.arange(g.shape[2], dtype=jnp.int32)
    before = get(decay, first - 1, 1, 2)
    before = jnp.where((first > 0)[:, None, None], before, 0)
    (g,) = isolate(jnp.where(valid[:, None], g, 0))

    def add(total: jax.Array, i: jax.Array) -> jax.Array:
        one = lax.dynamic_slice_in_dim(g, i, 1, 2)
        return total + jnp.where(place >= i, one, 0)

    return isolate(fold_positions(add, jnp.broadcast_to(before, g.shape), 0, g.shape[2]))[0]


def multiply(product: Product, x: jax.Array, w: jax.Array, transpose_w: bool = False) -> jax.Array:
    """Multiplies (B, N, M, K) by (B, N, K, X), or by (B, N, X, K) with `transpose_w`, to float32."""
    x, w = isolate(x, w)
    y = product(x.reshape(-1, *x.shape[2:]), w.reshape(-1, *w.shape[2:]), transpose_w)
    return isolate(y)[0].reshape(*x.shape[:3], y.shape[2])


def exp(x: jax.Array) -> jax.Array:
    """Returns the exponentials of a float32 array of any shape."""
    return run_flat(lambda x: (jnp.exp(x),), x)[0]


def _finite(residual: jax.Array, there: jax.Array) -> jax.Array:
    return jnp.where(there & ~jnp.isnan(residual), residual, 0)


def _positive_zero(x: jax.Array) -> jax.Array:
    """Returns the sums with +0 for -0: the sign of a sum of zeros depends on those of the rows that are not seen."""
    return jnp.where(x == 0, jnp.float32(0), x)
