"""Storing latents in a cache, contiguous or in blocks, as they are or quantised to 8 bits."""

from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from bijax.core.checks import describe, float_array
from bijax.core.forward_only import forward_only
from bijax.ops._sequences import locate_tokens
from bijax.ops.attention._options import QUANTISED, column_scales
from bijax.ops.kv_cache._write import Blocks, Targets, find_targets, write
from bijax.ops.kv_cache.store import cache_array, check_scale, quantise, table_blocks


def store_latent_cache(
    latents: ArrayLike,
    cache: ArrayLike,
    *,
    kv_ids: ArrayLike | None = None,
    q_lens: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    accum_q_len: ArrayLike | None = None,
    latent_scale: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Appends latents to their slots of a cache, as `bijax.store_kv_cache` does keys and values.

    Token i of sequence b goes to `cache[kv_ids[b], kv_lens[b] + i]`, as `bijax.latent_attention` reads it. Where the
    cache is donated (`jax.jit(..., donate_argnames="cache")`), it is written in place.

    Args:
        latents: (B, L, W), padded, or (T, W), packed, float32, bfloat16 or float16.
        cache: (slots, S, W) of the same dtype, or int8 or float8_e4m3fn.
        kv_ids: (B,) ints, the slot of each sequence; 0, 1, 2, ... by default.
        q_lens: (B,) ints, the tokens of each sequence; by default L, or the differences of `accum_q_len`.
        kv_lens: (B,) ints, the tokens that each slot has already; 0 by default.
        accum_q_len: (B + 1,) ints, for packed tokens: cumulative token counts, from 0; the running sums of `q_lens` by
            default.
        latent_scale: () or (W,) of a floating dtype; for 8-bit caches only. The cache stores latents / latent_scale,
            computed in float32, rounded to nearest even and clamped to the largest magnitude of the dtype (127 for
            int8, 448 for float8_e4m3fn).

    Returns:
        cache, and stored, (B,) bool: False for a sequence that was not written. That is one with a traced length, slot
        or past length that points outside the cache, or to the place of another token, or, in a cache of 8 bits, with
        a quotient that is inf or nan.

    Raises:
        TypeError: If a dtype is unsupported, or the dtypes of latents and cache differ.
        ValueError: If the shapes do not fit, the scale is missing or not used, or known numbers point outside the cache
            or to one place twice.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant: the stored values depend on the token alone, and the rest of the cache does not change.

    Example:
        >>> cache, stored = store_latent_cache(jnp.ones((1, 2, 1)), jnp.zeros((2, 4, 1)), kv_ids=[1], kv_lens=[1])
        >>> cache[1, :, 0].tolist(), stored.tolist()
        ([0.0, 1.0, 1.0, 0.0], [True])
    """
    op = "bijax.store_latent_cache"
    array = _cache(op, cache, "(slots, S, W)")
    blocks = Blocks(np.arange(array.shape[0], dtype=np.int32)[:, None], *array.shape[:2])
    lengths = {"q_lens": q_lens, "accum_q_len": accum_q_len}
    return _store(op, latents, array, blocks, lengths, {"kv_ids": kv_ids, "kv_lens": kv_lens}, latent_scale)


def store_paged_latent_cache(
    latents: ArrayLike,
    block_table: ArrayLike,
    cache: ArrayLike,
    *,
    kv_ids: ArrayLike | None = None,
    q_lens: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    accum_q_len: ArrayLike | None = None,
    latent_scale: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Appends latents to their slots of a paged cache.

    Token i of sequence b is token j = kv_lens[b] + i of its slot, and goes to `cache[block_table[kv_ids[b], j // size],
    j % size]`, as `bijax.paged_latent_attention` reads it. Everything else is as in `store_latent_cache`.

    Args:
        latents: (B, L, W), padded, or (T, W), packed, float32, bfloat16 or float16.
        block_table: (slots, blocks of a slot) ints in [0, blocks). Unused entries are ignored.
        cache: (blocks, size, W) of the dtype of `latents`, or int8 or float8_e4m3fn.
        kv_ids: (B,) ints, the slot of each sequence; 0, 1, 2, ... by default.
        q_lens: (B,) ints, the tokens of each sequence; by default L, or the differences of `accum_q_len`.
        kv_lens: (B,) ints, the tokens that each slot has already; 0 by default.
        accum_q_len: (B + 1,) ints, for packed tokens; the running sums of `q_lens` by default.
        latent_scale: () or (W,) of a floating dtype, for a cache of 8 bits.

    Returns:
        cache, and stored, (B,) bool: False for a sequence that was not written.

    Raises:
        TypeError: If a dtype is unsupported, or the dtypes of latents and cache differ.
        ValueError: If the shapes do not fit, the scale is missing or not used, or known numbers point outside the cache
            or to one place twice.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant: the stored values depend on the token alone, and the rest of the cache does not change.

    Example:
        >>> latents = jnp.array([1.0, 2.0]).reshape(1, 2, 1)
        >>> cache, stored = store_paged_latent_cache(latents, [[2, 0]], jnp.zeros((3, 2, 1)), kv_lens=[1])
        >>> cache[..., 0].tolist(), stored.tolist()
        ([[2.0, 0.0], [0.0, 0.0], [0.0, 1.0]], [True])
    """
    op = "bijax.store_paged_latent_cache"
    array = _cache(op, cache, "(blocks, size, W)")
    blocks = table_blocks(op, block_table, *array.shape[:2])
    lengths = {"q_lens": q_lens, "accum_q_len": accum_q_len}
    places = {"kv_ids": kv_ids, "kv_lens": kv_lens}
    return _store(op, latents, array, blocks, lengths, places, latent_scale)


def _cache(op: str, cache: Any, dims: str) -> jax.Array:
    array = cache_array(op, "cache", cache)
    if array.ndim != 3:
        raise ValueError(f"{op}: cache must have the dimensions {dims}, got {describe(array)}.")
    return array


def _store(
    op: str,
    latents: Any,
    cache: jax.Array,
    blocks: Blocks,
    lengths: dict[str, Any],
    places: dict[str, Any],
    scale: Any,
) -> tuple[jax.Array, jax.Array]:
    rows, quantised, width = float_array(op, "latents", latents), str(cache.dtype) in QUANTISED, cache.shape[2]
    if not quantised and rows.dtype != cache.dtype:
        raise TypeError(
            f"{op}: latents and a cache that is not {' or '.join(QUANTISED)} must share one dtype, got latents"
            f" {describe(rows)} and cache {describe(cache)}."
        )
    if rows.ndim not in (2, 3) or rows.shape[-1] != width:
        raise ValueError(
            f"{op}: latents must have the dimensions (B, L, {width}) or (T, {width}) for cache {describe(cache)}, got"
            f" {describe(rows)}."
        )
    factors = _scale(op, scale, cache)
    tokens = locate_tokens(op, rows.shape[:-1], **lengths, max_q_len=None, name="latents")
    flat, allowed = rows.reshape(tokens.inside.size, 1, width), None
    if factors is not None:
        flat, finite = quantise(op, flat, factors, cache.dtype)
        allowed = finite.reshape(tokens.inside.shape)
    targets = find_targets(op, tokens, blocks, **places, allowed=allowed)

    def compute(rows: jax.Array, block: jax.Array, offset: jax.Array, stored: jax.Array, cache: jax.Array) -> jax.Array:
        return write(cache[:, None], rows, Targets(block, offset, stored))[:, 0]

    written = forward_only(op, compute, flat, targets.block, targets.offset, targets.stored, cache)
    return written, targets.stored


def _scale(op: str, scale: Any, cache: jax.Array) -> jax.Array | None:
    """Returns the scales for one key head, (1,) or (1, W)."""
    check_scale(op, "latent_scale", scale, "cache", cache)
    if scale is None:
        return None
    factors = column_scales(op, "cache", scale, cache.shape[2])
    return factors.reshape((1,) if factors.ndim == 0 else (1, cache.shape[2]))
