"""Scores of rows and keys, with all that is added to them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.pallas_triton._tile import Keys, Launch, Parts, Refs, Rows, dot, of_heads
from pallas_kernels.parts.pallas_triton.arithmetic import LOG2E, product


@dataclass(frozen=True)
class Scores:
    """Scores (R, n) of rows and keys, or (n, R).

    Attributes:
        masked: In units of ln(2), -inf where a key is not seen.
        seen: Which keys the rows see.
        bent: The hyperbolic tangents of the soft cap; None without one.
    """

    masked: jax.Array
    seen: jax.Array
    bent: jax.Array | None


def score_arrays(call: AttentionCall, offsets: jax.Array) -> dict[str, jax.Array]:
    """Returns the optional arrays that change scores by their names in `Refs`, as `scores` reads them.

    Args:
        call: The call.
        offsets: (B,) int32, positions of the first queries.
    """
    given = {}
    if call.bias is not None:
        given["bias"] = call.bias
    if call.mask is not None:
        given["mask"] = call.mask.astype(jnp.int8)
    if call.alibi_slopes is not None:
        given |= {"alibi_slopes": call.alibi_slopes.astype(jnp.float32), "offsets": offsets}
    return given


def scores(
    refs: Refs, launch: Launch, rows: Rows, keys: Keys, query: list[Parts], key: list[Parts], *, by_keys: bool = False
) -> Scores:
    """Returns the scores.

    Args:
        refs: Holds the bias, the mask and the slopes.
        launch: The static parameters.
        rows: R rows.
        keys: n keys.
        query: The parts of each piece of the rows' queries.
        key: The parts of each piece of the keys.
        by_keys: Whether the results are (n, R).
    """
    total = product_of_pieces(query, key, by_keys=by_keys)
    bent = None
    if launch.options.soft_cap is None:
        total = product(total, jnp.float32(launch.options.scale * float(LOG2E)), launch.interpret)
    else:
        bent = jnp.tanh(product(total, jnp.float32(launch.options.scale / launch.options.soft_cap), launch.interpret))
        total = product(bent, jnp.float32(launch.options.soft_cap * float(LOG2E)), launch.interpret)
    position = _lay(keys.position, by_keys)
    seen = (position >= _lay(rows.first, not by_keys)) & (position < _lay(rows.last, not by_keys))
    if refs.bias is not None:
        found = _of_scores(refs.bias, rows, keys, launch, by_keys).astype(jnp.float32)
        total = total + product(found, LOG2E, launch.interpret)
    if refs.alibi_slopes is not None:
        slope = product(of_heads(refs.alibi_slopes, rows.sequence, rows.query_head), LOG2E, launch.interpret)
        distance = position - _lay(refs.offsets[rows.sequence] + rows.query, not by_keys)
        total = total + product(_lay(slope, not by_keys), distance.astype(jnp.float32), launch.interpret)
    if refs.mask is not None:
        seen = seen & (_of_scores(refs.mask, rows, keys, launch, by_keys) != 0)
    return Scores(jnp.where(seen, total, -jnp.inf), seen, bent)


def product_of_pieces(a: list[Parts], b: list[Parts], *, by_keys: bool) -> jax.Array:
    """Returns the products (R, n) of rows and keys, or (n, R): one chain over all pieces of the head."""
    shape = (a[0][0].shape[0], b[0][0].shape[0])
    total = jnp.zeros(shape[::-1] if by_keys else shape, jnp.float32)
    for left, right in zip(a, b, strict=True):
        total = dot(total, left, right, (1, 1), swap=by_keys)
    return total


def _lay(x: jax.Array, along_rows: bool) -> jax.Array:
    return x[:, None] if along_rows else x[None]


def _of_scores(ref: Any, rows: Rows, keys: Keys, launch: Launch, by_keys: bool) -> jax.Array:
    """Reads what an array (B or 1, N or 1, T or 1, S or 1) holds for rows and keys."""
    sizes = (rows.query.shape[0], keys.position.shape[0])
    sizes = sizes[::-1] if by_keys else sizes
    held = jnp.minimum(keys.position, launch.capacity - 1)
    of_rows = (_lay(x, not by_keys) for x in (rows.query_head, rows.query))
    places = (rows.sequence, *of_rows, _lay(held, by_keys))
    whole = (jnp.broadcast_to(x if n > 1 else 0, sizes) for n, x in zip(ref.shape, places, strict=True))
    return ref[*(x.astype(jnp.int32) for x in whole)]
