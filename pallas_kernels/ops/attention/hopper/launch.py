"""From the arrays of a call to a kernel: many queries or a few, contiguous keys or pages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import SplitAttentionContract, eight_bit_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.ops.attention.hopper._keys import KeySource
from pallas_kernels.ops.attention.hopper._pairs import bits_of_mask, with_whole_blocks
from pallas_kernels.ops.attention.hopper._scores import Scoring, in_bits
from pallas_kernels.ops.attention.hopper._sight import Sight
from pallas_kernels.ops.attention.hopper.cascade import Cascade, shared_splits
from pallas_kernels.ops.attention.hopper.decode import Body, decode
from pallas_kernels.ops.attention.hopper.prefill import Call, Further, Lengths, prefill
from pallas_kernels.parts.eight_bits import numbers, scaled_queries
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.xla.pages import pages_inside
from pallas_kernels.schedule.hopper.attention import DecodeSchedule, PrefillSchedule, Problem, attention_schedule

_ROWS = 8  # the copy engine reads tiles of so many rows
_COPIED_BYTES = 1 << 30  # of copies of caches of several sequences at once


@in_32_bits
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    limits: jax.Array,
    page_table: jax.Array | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    common_prefix: jax.Array | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    contract: SplitAttentionContract,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    schedule: PrefillSchedule | DecodeSchedule | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attends to keys in a contiguous or a paged cache.

    Args:
        query: (B, T, N, H) bfloat16 or float16; H is 64, 96, 128, 192 or 256.
        key: (B, S, K, H) of the same dtype, or int8 or float8_e4m3fn, K a divisor of N; or
            (P, page, K, H) with a page table.
        value: Of the shape and dtype of `key`; of heads of 192 it may be 128 wide.
        limits: (B, 3) int32, three numbers of each sequence: absolute position of the first query, queries (later
            ones see nothing; negative: all results of the sequence are nan), keys (what the cache holds beyond is never
            seen).
        page_table: (B, n) int32, the pages of each sequence in order. Where an entry that holds keys is not in [0, P),
            all results of the sequence are nan.
        sinks: (B or 1, N), a score for each head that joins the sum of the exponentials and belongs to no key.
        slopes: (B or 1, N), times the key's position minus the query's, added to the scores.
        key_scale: (B or 1, K, H or 1), the factors of keys of 8 bits; see `EightBitContract`.
        value_scale: The same for the values.
        common_prefix: (1,) int32, so many keys at the start of every sequence, or all of a shorter one, are those of
            the first one in the cache. A few queries without a window, slopes, bias or mask read what they share once.
        bias: (B or 1, N or 1, T or 1, S or 1) floats, added to the scaled scores.
        mask: bool of such a shape; false where a query does not see a key.
        contract: Order of all sums.
        scale: Factor of the scores; see `supports_scale`.
        causal: Whether a query sees no later position than its own.
        window: Keys before and after its own position that a query sees at most.
        soft_cap: Scores are bent to stay below this magnitude; see `supports_cap`.
        schedule: Of the kernel for many queries or of the one for a few; by default `attention_schedule` chooses.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        The outputs (B, T, N, V) and the log-sum-exp (B, T, N) of the scores, float32. A query that sees no key gives
        zeros and -inf.

    Raises:
        UnsupportedError: If the contract is another one, or `scale` or `soft_cap` is out of range.

    Guarantee: row-invariant; the schedule changes no bit.
    """
    if not isinstance(contract, SplitAttentionContract):
        raise UnsupportedError(f"attention on a Hopper GPU: expected a SplitAttentionContract, got {contract!r}.")
    scoring = Scoring.of(scale, soft_cap)
    (batch, length, heads, size), value_size = query.shape, value.shape[3]
    page, paged = key.shape[1], page_table is not None
    capacity = page * (1 if page_table is None else page_table.shape[1])
    if 0 in query.shape or 0 in key.shape or not capacity:
        wrong = jnp.asarray(limits)[:, 1, None, None] < 0
        lse = jnp.broadcast_to(jnp.where(wrong, jnp.nan, -jnp.inf).astype(jnp.float32), query.shape[:3])
        out = jnp.where(wrong, jnp.nan, 0.0).astype(query.dtype)[..., None]
        return jnp.broadcast_to(out, (*query.shape[:3], value_size)), lse
    sight = Sight.of(causal, window, mask is not None)
    factors = (x for x in (key_scale, value_scale) if x is not None)
    nothing_added = all(x is None for x in (slopes, bias, mask))
    shares = common_prefix is not None and batch > 1 and sight.before is None and nothing_added
    shares = shares and capacity > contract.split and all(x.shape[0] == 1 for x in factors)
    if schedule is None:
        schedule = attention_schedule(
            Problem(
                batch=batch,
                queries=length,
                key_heads=key.shape[2],
                group=heads // key.shape[2],
                size=size,
                value_size=value_size,
                capacity=capacity,
                reach=sight.reach(length, capacity),
                split=contract.split,
                sees_all=not causal and window is None,
                eight_bits=key_scale is not None,
                plain=soft_cap is None and nothing_added,
                pairs=bias is not None or mask is not None,
                shares=shares,
                paged=paged,
            )
        )
    block = contract.key_block
    few = isinstance(schedule, DecodeSchedule)
    unit = 1.0 if key_scale is None else eight_bit_contract(key.dtype.name).unit
    if key_scale is not None and value_scale is not None:
        key_scale, value_scale = (
            _whole(x.astype(jnp.float32), stored) for x, stored in ((key_scale, key), (value_scale, value))
        )
        if not few:
            # As many queries read the cache, it is cheap to make 16 bits of it once.
            copied = 2 * batch * capacity * key.shape[2] * (size + value_size)
            if batch > 1 and copied > _COPIED_BYTES:
                given = {
                    "sinks": sinks,
                    "slopes": slopes,
                    "key_scale": key_scale,
                    "value_scale": value_scale,
                    "bias": bias,
                    "mask": mask,
                }
                own = {"query": query, "limits": limits}
                caches = {"key": key, "value": value}
                if page_table is None:
                    own, caches = own | caches, {}
                else:
                    own["page_table"] = page_table
                call_one = partial(
                    attention,
                    contract=contract,
                    scale=scale,
                    causal=causal,
                    window=window,
                    soft_cap=soft_cap,
                    schedule=schedule,
                    interpret=interpret,
                    **caches,
                )
                return _one_by_one(call_one, own, given)
    copies = key_scale is not None and not few
    if page_table is not None and page is not None and (copies or page % 8 or (block % page and page % block)):
        limits = jnp.asarray(limits, jnp.int32)
        inside = pages_inside(page_table, limits[:, 2], page, key.shape[0])
        limits = jnp.stack([limits[:, 0], jnp.where(inside, limits[:, 1], -1), limits[:, 2]], axis=1)
        key, value, page_table = _gathered(key, page_table), _gathered(value, page_table), None
    if copies and key_scale is not None and value_scale is not None:
        query, key_scale = scaled_queries(query, key_scale, key.dtype), None
        key, value = numbers(key, query.dtype), numbers(value, query.dtype)
    if page_table is None:
        key, value = (padded(x) for x in (key, value))
    rounded = query if few else padded(query)
    lengths = Lengths.within(limits, length, capacity)
    call = Call(
        contract,
        scoring,
        sight,
        KeySource(block) if page_table is None else KeySource(block, key.shape[1], key.shape[0]),
        batch,
        rounded.shape[1],
        heads,
        heads // key.shape[2],
        size,
        value_size,
        capacity,
        unit,
        interpret,
    )
    slopes, sinks = (None if x is None else in_bits(x) for x in (slopes, sinks))
    bias = None if bias is None else with_whole_blocks(bias, block)
    mask = None if mask is None else bits_of_mask(mask, block)
    further = Further(page_table, slopes, sinks, key_scale, value_scale, bias=bias, mask=mask)
    if isinstance(schedule, DecodeSchedule):
        body = Body(call, schedule)
        if common_prefix is not None and shares and not (schedule.whole or schedule.swap):
            body = Cascade(call, schedule)
            further = further._replace(shared=shared_splits(common_prefix, lengths, call, page if paged else None))
        out, lse = decode(rounded, key, value, lengths, further, body=body)
    else:
        out, lse = prefill(rounded, key, value, lengths, further, call=call, schedule=schedule)
        out, lse = out[:, :length], jnp.moveaxis(lse, 1, 2)[:, :length]
    return out, lse


def _one_by_one(
    call: Callable[..., tuple[jax.Array, jax.Array]], own: dict[str, jax.Array], given: dict[str, jax.Array | None]
) -> tuple[jax.Array, jax.Array]:
    """Calls attention for one sequence after the other, so that a copy of one cache exists at a time.

    Args:
        call: Takes the arrays by name.
        own: Arrays (B, ...).
        given: Arrays (B or 1, ...), or None.
    """
    batch = own["query"].shape[0]

    def one(sequence: jax.Array) -> tuple[jax.Array, jax.Array]:
        arrays = own | {name: x for name, x in given.items() if x is not None}
        alone = {
            name: lax.dynamic_slice_in_dim(x, sequence, 1) if x.shape[0] == batch else x for name, x in arrays.items()
        }
        out, lse = call(**alone)
        return out[0], lse[0]

    found: tuple[jax.Array, jax.Array] = lax.map(one, jnp.arange(batch, dtype=jnp.int32))
    return found


def _whole(factors: jax.Array, cache: jax.Array) -> jax.Array:
    """Returns factors (B or 1, K, H or 1) for each column of a head."""
    return jnp.broadcast_to(factors, (*factors.shape[:2], cache.shape[3]))


def padded(x: jax.Array) -> jax.Array:
    """Returns (B, S, ...) with S rounded up to the rows of a tile."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % _ROWS), *[(0, 0)] * (x.ndim - 2)])


def _gathered(pages: jax.Array, table: jax.Array) -> jax.Array:
    """Returns a contiguous cache (B, n * page, K, H): pages of sizes that blocks cannot be copied from."""
    found = jnp.take(pages, table, axis=0, mode="clip")
    return found.reshape(table.shape[0], -1, *pages.shape[2:])
