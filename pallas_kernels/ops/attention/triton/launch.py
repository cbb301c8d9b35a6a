"""From the arrays of a call to the kernels."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import MmaAttentionContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.ops.attention.programs import row_products
from pallas_kernels.ops.attention.sight import Sight, sight
from pallas_kernels.ops.attention.triton._tile import Call, Refs
from pallas_kernels.ops.attention.triton.backward import key_kernel, query_kernel
from pallas_kernels.ops.attention.triton.forward import forward_kernel
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.triton.launch import launch
from pallas_kernels.schedule.triton.attention import AttentionTile, attention_tile

_WIDTH: Final = 16  # the narrowest piece of a head
_WIDEST: Final = 512  # for more, neither the shared memory nor the registers of a block suffice


@in_32_bits
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    page_table: jax.Array | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    contract: MmaAttentionContract,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attends to keys in a contiguous or a paged cache.

    Args:
        query: (B, T, N, H) float32, bfloat16 or float16.
        key: (B, S, K, H) of the same dtype, K a divisor of N; or (P, page, K, H) with a page table.
        value: Of the shape and dtype of `key`.
        offsets: (B,) int32, absolute position of the first query of each sequence.
        query_lengths: (B,) int32; later queries see nothing.
        key_lengths: (B,) int32; what the cache holds beyond is never seen.
        page_table: (B, n) int32, the pages of each sequence in order.
        bias: (B or 1, N or 1, T or 1, S or 1), added to the scaled scores.
        mask: bool of such a shape; false where a query does not see a key.
        contract: Order of all sums.
        scale: Factor of the scores.
        causal: Whether a query sees no later position than its own.
        window: Keys before and after its own position that a query sees at most.
        tile: Rows, warps and stages; chosen by the width of a head by default.
        interpret: Whether to run on a CPU.

    Returns:
        The outputs (B, T, N, H) of the query's dtype and the log-sum-exp (B, T, N) of the scores, float32. A query
        that sees no key gives zeros and -inf.

    Raises:
        UnsupportedError: If the contract is of another kind, or the head is wider than 512.

    Guarantee: row-invariant; a row is a query with the keys that it sees.

    Example:
        >>> from pallas_kernels.contract import mma_attention_contract
        >>> q, k, n = jnp.ones((1, 1, 2, 16)), jnp.ones((1, 3, 1, 16)), jnp.ones(1, jnp.int32)
        >>> contract = mma_attention_contract("float32", 16)
        >>> attention(q, k, k, 0 * n, n, 3 * n, contract=contract, scale=1.0, interpret=True)[0][0, 0, :, 0].tolist()
        [1.0, 1.0]
    """
    length, size = query.shape[1], query.shape[3]
    _check(contract, size)
    capacity = key.shape[1] * (1 if page_table is None else page_table.shape[1])
    if 0 in query.shape or 0 in key.shape or not capacity:
        return jnp.zeros_like(query), jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
    seen = _seen(length, capacity, offsets, query_lengths, key_lengths, causal, window)
    given = _given(query, key, value, seen, bias, mask)
    if page_table is not None:
        given["table"] = jnp.clip(page_table, 0, key.shape[0] - 1)
    call = _call(given, contract.key_block, contract.row_block, scale, capacity, interpret)
    tile = attention_tile(size, query.dtype.itemsize) if tile is None else tile
    tiles = -(-call.rows // tile.rows)

    def kernel(*refs: Any) -> None:
        *read, out, lse = refs
        forward_kernel(_refs(given, read), out, lse, call=call, count=tile.rows, tiles=tiles)

    out, lse = launch(
        kernel,
        *given.values(),
        blocks=query.shape[0] * call.heads * tiles,
        out=[_like(given["query"]), jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)],
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )
    return out[..., :size], lse


@in_32_bits
def gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    cotangent: jax.Array,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    contract: MmaAttentionContract,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    tile: AttentionTile | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the backward pass of `attention` over a contiguous cache.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H).
        value: (B, S, K, H).
        out: (B, T, N, H), the result of the forward pass.
        lse: (B, T, N) float32, its log-sum-exp.
        cotangent: (B, T, N, H), the gradient of `out`.
        offsets: (B,) int32.
        query_lengths: (B,) int32.
        key_lengths: (B,) int32.
        bias: As in `attention`.
        mask: As in `attention`.
        contract: Order of all sums.
        scale: Factor of the scores.
        causal: As in `attention`.
        window: As in `attention`.
        tile: Rows, warps and stages of the gradient of queries; chosen by the width of a head by default.
        interpret: Whether to run on a CPU.

    Returns:
        The gradients of `query`, `key` and `value`, of their shapes and dtypes.

    Raises:
        UnsupportedError: If the contract is of another kind, or the head is wider than 512.

    Guarantee: row-invariant; a row is a query for the gradient of the queries, a sequence for the others.
    """
    (batch, length, _, size), capacity = query.shape, key.shape[1]
    _check(contract, size)
    if 0 in query.shape or 0 in key.shape:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    seen = _seen(length, capacity, offsets, query_lengths, key_lengths, causal, window)
    given = _given(query, key, value, seen, bias, mask)
    delta = row_products(cotangent.astype(jnp.float32), out.astype(jnp.float32))
    given |= {"cotangent": _padded(cotangent), "lse": lse, "delta": delta}
    call = _call(given, contract.row_block, contract.row_block, scale, capacity, interpret)
    tile = attention_tile(size, query.dtype.itemsize, backward=True) if tile is None else tile
    tiles = -(-call.rows // tile.rows)

    def of_queries(*refs: Any) -> None:
        *read, gradient = refs
        query_kernel(_refs(given, read), gradient, call=call, count=tile.rows, tiles=tiles)

    options: dict[str, Any] = {"warps": tile.warps, "stages": tile.stages, "interpret": interpret}
    blocks = batch * call.heads * tiles
    (dq,) = launch(of_queries, *given.values(), blocks=blocks, out=[_like(given["query"])], **options)

    tiles = -(-capacity // tile.keys)
    given |= _queries_that_see(seen, tiles, tile.keys)

    def of_keys(*refs: Any) -> None:
        *read, of_key, of_value = refs
        key_kernel(_refs(given, read), of_key, of_value, call=call, count=tile.keys)

    shape = (batch, tiles * tile.keys, call.heads, call.size)
    result = jax.ShapeDtypeStruct(shape, key.dtype)
    dk, dv = launch(of_keys, *given.values(), blocks=batch * call.heads * tiles, out=[result, result], **options)
    return dq[..., :size], dk[:, :capacity, :, :size], dv[:, :capacity, :, :size]


def _check(contract: MmaAttentionContract, size: int) -> None:
    if not isinstance(contract, MmaAttentionContract):
        raise UnsupportedError(f"attention by Triton: expected an MmaAttentionContract, got {contract!r}.")
    if size > _WIDEST:
        raise UnsupportedError(f"attention by Triton: expected heads of at most {_WIDEST} elements, got {size}.")


def _seen(
    length: int,
    capacity: int,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    causal: bool,
    window: tuple[int, int] | None,
) -> Sight:
    """Returns what each query sees, before any mask."""
    indices = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (offsets.shape[0], length))
    limits = jnp.minimum(query_lengths, length), jnp.minimum(key_lengths, capacity)
    return sight(offsets, *limits, indices, causal=causal, window=window)


def _given(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: Sight, bias: jax.Array | None, mask: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns the arrays of a launch by their names in `Refs`."""
    query, key, value = (_padded(x) for x in (query, key, value))
    given = {"query": query, "key": key, "value": value, "first": seen.first, "last": seen.last}
    if bias is not None:
        given["bias"] = bias
    if mask is not None:
        given["mask"] = mask.astype(jnp.int8)
    return given


def _padded(x: jax.Array) -> jax.Array:
    missing = -x.shape[-1] % _WIDTH
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _call(
    given: dict[str, jax.Array], key_block: int, row_block: int, scale: float, capacity: int, interpret: bool
) -> Call:
    query, key = given["query"], given["key"]
    heads = key.shape[2]
    return Call(
        dtype=query.dtype.name,
        scale=scale,
        key_block=key_block,
        row_block=row_block,
        queries=query.shape[1],
        heads=heads,
        group=query.shape[2] // heads,
        size=query.shape[3],
        capacity=capacity,
        page=key.shape[1] if "table" in given else None,
        bias=given["bias"].shape if "bias" in given else None,
        mask=given["mask"].shape if "mask" in given else None,
        interpret=interpret,
    )


def _refs(given: dict[str, jax.Array], refs: list[Any]) -> Refs:
    return Refs(**dict(zip(given, refs, strict=True)))


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _queries_that_see(seen: Sight, tiles: int, keys: int) -> dict[str, jax.Array]:
    """Returns the range of queries that see any key of each tile, (B, tiles) int32."""
    start = jnp.arange(tiles, dtype=jnp.int32) * keys
    some = (seen.first[..., None] < start + keys) & (seen.last[..., None] > start)
    index = jnp.arange(seen.first.shape[1], dtype=jnp.int32)[:, None]
    begin = jnp.min(jnp.where(some, index, seen.first.shape[1]), axis=1)
    return {"begin": begin, "end": jnp.maximum(begin, jnp.max(jnp.where(some, index + 1, 0), axis=1))}
