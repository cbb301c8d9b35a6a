"""Storing keys and values in a cache: contiguous or in blocks, as they are or quantised to 8 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from bijax.core.checks import FLOATS, describe, float_array, integer_array
from bijax.core.forward_only import forward_only
from bijax.ops._engine_arguments import cache_scale, check_shape
from bijax.ops._sequences import locate_tokens
from bijax.ops.attention._options import QUANTISED
from bijax.ops.elementwise.call import elementwise
from bijax.ops.kv_cache._write import Blocks, Targets, find_targets, write

Stored = tuple[jax.Array, jax.Array, jax.Array]


def store_kv_cache(
    key: ArrayLike,
    value: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    *,
    kv_ids: ArrayLike | None = None,
    q_lens: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    accum_q_len: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    max_q_len: int | None = None,
) -> Stored:
    """Appends keys and values to their slots of a cache.

    Token i of sequence b goes to `cache[kv_ids[b], :, kv_lens[b] + i]`. Where the caches are donated
    (`jax.jit(..., donate_argnames=("k_cache", "v_cache"))`), they are written in place.

    Args:
        key: (B, L, K, D), padded, or (T, K, D), packed, float32, bfloat16 or float16.
        value: Of the shape and dtype of `key`.
        k_cache: (slots, K, S, D) of the dtype of `key`, or int8 or float8_e4m3fn.
        v_cache: Of the shape and dtype of `k_cache`.
        kv_ids: (B,) ints, the slot of each sequence; 0, 1, 2, ... by default.
        q_lens: (B,) ints, the tokens of each sequence; by default L, or the differences of `accum_q_len`.
        kv_lens: (B,) ints, the tokens that each slot has already; 0 by default.
        accum_q_len: (B + 1,) ints, for packed tokens: cumulative token counts, from 0; the running sums of `q_lens` by
            default.
        key_scale: (K, D), or (K,) for one scale per head, of a floating dtype; for 8-bit caches only. The cache stores
            key / key_scale, computed in float32, rounded to nearest even and clamped to the largest magnitude of the
            dtype (127 for int8, 448 for float8_e4m3fn).
        value_scale: As `key_scale`, for the values.
        max_q_len: The largest length allowed in `q_lens`.

    Returns:
        k_cache, v_cache, and stored, (B,) bool: False for a sequence that was not written. That is one with a traced
        length, slot or past length that points outside the cache, or to the place of another token, or, in
        a cache of 8 bits, with a quotient that is inf or nan.

    Raises:
        TypeError: If a dtype is unsupported, or the dtypes of keys, values and caches differ.
        ValueError: If the shapes do not fit, scales are missing or not used, or known numbers point outside the cache
            or to one place twice.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant: the stored values depend on the token alone, and the rest of the cache does not change.

    Source: "store_kv_cache" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> key, cache = jnp.ones((1, 2, 1, 1)), jnp.zeros((2, 1, 4, 1))
        >>> k_cache, v_cache, stored = store_kv_cache(key, 2 * key, cache, cache, kv_ids=[1], kv_lens=[1])
        >>> k_cache[1, 0, :, 0].tolist(), v_cache[1, 0, :, 0].tolist(), stored.tolist()
        ([0.0, 1.0, 1.0, 0.0], [0.0, 2.0, 2.0, 0.0], [True])
    """
    op = "bijax.store_kv_cache"
    caches = _caches(op, k_cache, v_cache, "(slots, K, S, D)")
    slots, _, size, _ = caches[0].shape
    blocks = Blocks(np.arange(slots, dtype=np.int32)[:, None], slots, size)
    lengths = {"q_lens": q_lens, "accum_q_len": accum_q_len, "max_q_len": max_q_len}
    places = {"kv_ids": kv_ids, "kv_lens": kv_lens}
    return _store(op, (key, value), caches, blocks, lengths, places, (key_scale, value_scale))


def store_paged_kv_cache(
    key: ArrayLike,
    value: ArrayLike,
    block_table: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    *,
    kv_ids: ArrayLike | None = None,
    q_lens: ArrayLike | None = None,
    kv_lens: ArrayLike | None = None,
    accum_q_len: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    max_q_len: int | None = None,
) -> Stored:
    """Appends keys and values to their slots of a paged cache.

    Token i of sequence b is token j = kv_lens[b] + i of its slot, and goes to
    `cache[block_table[kv_ids[b], j // size], :, j % size]`. Everything else is as in `store_kv_cache`.

    Args:
        key: (B, L, K, D), padded, or (T, K, D), packed, float32, bfloat16 or float16.
        value: Of the shape and dtype of `key`.
        block_table: (slots, blocks of a slot) ints in [0, blocks). Unused entries are ignored.
        k_cache: (blocks, K, size, D) of the dtype of `key`, or int8 or float8_e4m3fn.
        v_cache: Of the shape and dtype of `k_cache`.
        kv_ids: (B,) ints, the slot of each sequence; 0, 1, 2, ... by default.
        q_lens: (B,) ints, the tokens of each sequence; by default L, or the differences of `accum_q_len`.
        kv_lens: (B,) ints, the tokens that each slot has already; 0 by default.
        accum_q_len: (B + 1,) ints, for packed tokens; the running sums of `q_lens` by default.
        key_scale: (K, D) or (K,) of a floating dtype, for a cache of 8 bits.
        value_scale: As `key_scale`, for the values.
        max_q_len: The largest length allowed in `q_lens`.

    Returns:
        k_cache, v_cache, and stored, (B,) bool: False for a sequence that was not written.

    Raises:
        TypeError: If a dtype is unsupported, or the dtypes of keys, values and caches differ.
        ValueError: If the shapes do not fit, scales are missing or not used, or known numbers point outside the cache
            or to one place twice.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant: the stored values depend on the token alone, and the rest of the cache does not change.

    Source: "store_paged_kv_cache" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> key, cache = jnp.array([1.0, 2.0]).reshape(1, 2, 1, 1), jnp.zeros((3, 1, 2, 1))
        >>> k_cache, _, stored = store_paged_kv_cache(key, key, [[2, 0]], cache, cache, kv_lens=[1])
        >>> k_cache[:, 0, :, 0].tolist(), stored.tolist()
        ([[2.0, 0.0], [0.0, 0.0], [0.0, 1.0]], [True])
    """
    op = "bijax.store_paged_kv_cache"
    caches = _caches(op, k_cache, v_cache, "(blocks, K, size, D)")
    blocks = table_blocks(op, block_table, caches[0].shape[0], caches[0].shape[2])
    lengths = {"q_lens": q_lens, "accum_q_len": accum_q_len, "max_q_len": max_q_len}
    places = {"kv_ids": kv_ids, "kv_lens": kv_lens}
    return _store(op, (key, value), caches, blocks, lengths, places, (key_scale, value_scale))


def table_blocks(op: str, block_table: Any, number: int, size: int) -> Blocks:
    """Returns the blocks of a paged cache by slot.

    Args:
        op: Name of the operation, for errors.
        block_table: (slots, blocks of a slot) ints.
        number: Blocks of the cache.
        size: Tokens of a block.

    Raises:
        TypeError: If the table does not hold integers.
        ValueError: If it has another rank.
    """
    table = integer_array(op, "block_table", block_table)
    check_shape(op, "block_table", table, ("slots", "blocks of a slot"), {})
    return Blocks(table, number, size)


def cache_array(op: str, name: str, cache: Any) -> jax.Array:
    """Returns a cache as an array.

    Raises:
        TypeError: If it is not an array of a supported dtype.
    """
    if getattr(cache, "dtype", None) is None or str(cache.dtype) not in (*FLOATS, *QUANTISED):
        came = type(cache).__name__ if getattr(cache, "dtype", None) is None else describe(cache)
        raise TypeError(f"{op}: {name} must be an array of {', '.join((*FLOATS, *QUANTISED))}, got {came}.")
    return jnp.asarray(cache)


def check_scale(op: str, name: str, scale: Any, cache_name: str, cache: jax.Array) -> None:
    """Checks that there is a scale exactly if the cache is quantised.

    Raises:
        ValueError: If not.
    """
    quantised = str(cache.dtype) in QUANTISED
    if (scale is None) == quantised:
        wanted = f"{'is needed for' if quantised else 'belongs to'} a cache of {' or '.join(QUANTISED)}"
        came = f"got {'none' if scale is None else 'one'} with {cache_name} {describe(cache)}"
        raise ValueError(f"{op}: {name} {wanted}, {came}.")


def _caches(op: str, k_cache: Any, v_cache: Any, dims: str) -> tuple[jax.Array, jax.Array]:
    caches = []
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        caches.append(cache_array(op, name, cache))
    k, v = caches
    if k.dtype != v.dtype:
        raise TypeError(f"{op}: k_cache and v_cache must share one dtype, got {describe(k)} and {describe(v)}.")
    if k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"{op}: k_cache and v_cache must have the dimensions {dims}, got {describe(k)} and {describe(v)}."
        )
    return k, v


def _store(
    op: str,
    rows: tuple[Any, Any],
    caches: tuple[jax.Array, jax.Array],
    blocks: Blocks,
    lengths: dict[str, Any],
    places: dict[str, Any],
    scales: tuple[Any, Any],
) -> Stored:
    key, value = (float_array(op, n, x) for n, x in zip(("key", "value"), rows, strict=True))
    quantised = str(caches[0].dtype) in QUANTISED
    if len({x.dtype for x in (key, value, *([] if quantised else caches))}) > 1:
        raise TypeError(
            f"{op}: key, value and caches that are not {' or '.join(QUANTISED)} must share one dtype, got key"
            f" {describe(key)}, value {describe(value)} and k_cache {describe(caches[0])}."
        )
    heads, width = caches[0].shape[1], caches[0].shape[3]
    if key.ndim not in (3, 4) or key.shape[-2:] != (heads, width) or key.shape != value.shape:
        raise ValueError(
            f"{op}: key and value must have the dimensions (B, L, {heads}, {width}) or (T, {heads}, {width}) for"
            f" k_cache {describe(caches[0])}, got key {describe(key)} and value {describe(value)}."
        )
    factors = _scales(op, scales, (heads, width), caches[0])
    tokens = locate_tokens(op, key.shape[:-2], **lengths, name="key")
    flat = [x.reshape(tokens.inside.size, heads, width) for x in (key, value)]
    allowed = None
    if quantised:
        pairs = [quantise(op, x, s, caches[0].dtype) for x, s in zip(flat, factors, strict=True)]
        flat = [pairs[0][0], pairs[1][0]]
        allowed = (pairs[0][1] & pairs[1][1]).reshape(tokens.inside.shape)
    targets = find_targets(op, tokens, blocks, **places, allowed=allowed)

    def compute(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, value, block, offset, stored, k_cache, v_cache = arrays
        found = Targets(block, offset, stored)
        return write(k_cache, key, found), write(v_cache, value, found)

    k, v = forward_only(op, compute, *flat, targets.block, targets.offset, targets.stored, *caches)
    return k, v, targets.stored


def _scales(op: str, scales: tuple[Any, Any], shape: tuple[int, int], cache: jax.Array) -> list[Any]:
    found = []
    for name, scale in zip(("key_scale", "value_scale"), scales, strict=True):
        check_scale(op, name, scale, "k_cache", cache)
        found.append(None if scale is None else cache_scale(op, name, scale, dict(zip("KD", shape, strict=True))))
    return found


def _divided(x: jax.Array, scale: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    quotient = x.astype(jnp.float32) / scale.astype(jnp.float32)
    finite = jnp.isfinite(quotient)
    return jnp.clip(jnp.where(finite, quotient, jnp.float32(0)), jnp.float32(-largest), jnp.float32(largest)), finite


def _to_int8(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    quotient, finite = _divided(x, scale, 127)
    return jnp.round(quotient).astype(jnp.int8), finite


def _to_e4m3(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _divided(x, scale, 448)


_divide_to_int8: Any = elementwise(_to_int8)
_divide_to_e4m3: Any = elementwise(_to_e4m3)


def quantise(op: str, x: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns x (T, K, D) in 8 bits, and (T,) which tokens can be stored so: none with an inf or nan.

    Args:
        op: Name of the operation, for errors.
        x: Keys or values of tokens.
        scale: (K, D) or (K,).
        dtype: int8 or float8_e4m3fn.
    """
    divide = _divide_to_int8 if dtype == jnp.int8 else _divide_to_e4m3

    def compute(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, finite = divide(x, scale[None] if scale.ndim == 2 else scale[None, :, None])
        return y.astype(dtype), jnp.all(finite, axis=(1, 2))

    y, finite = forward_only(op, compute, x, scale)
    return y, finite
