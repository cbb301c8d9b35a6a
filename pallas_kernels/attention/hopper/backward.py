"""From the arrays of a backward pass to its kernels."""

import math
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.call import AttentionCall, AttentionResults
from pallas_kernels.attention.hopper._delta import delta
from pallas_kernels.attention.hopper._gradient_launch import gradients
from pallas_kernels.attention.hopper._gradient_scratch import scratch_types, wide_scratch_types
from pallas_kernels.attention.hopper._gradient_steps import GradientCall, Operands
from pallas_kernels.attention.hopper._gradient_tiles import Tiles
from pallas_kernels.attention.hopper._mask_bounds import MaskBounds
from pallas_kernels.attention.hopper._operands import padded
from pallas_kernels.attention.hopper._scores import Scoring, in_bits
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.hopper.gradients import Body
from pallas_kernels.attention.hopper.wide_gradients import WideBody
from pallas_kernels.attention.schedule.gradient_order import gradient_order
from pallas_kernels.attention.schedule.hopper import GradientSchedule, gradient_schedule
from pallas_kernels.contract import KEY_BLOCK, AttentionGradientContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.hopper.residency import resident_blocks
from pallas_kernels.parts.in_32_bits import in_32_bits

_COLUMNS: Final = 64


@in_32_bits
def attention_gradients(
    call: AttentionCall,
    results: AttentionResults,
    *,
    contract: AttentionGradientContract,
    schedule: GradientSchedule | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of `attention` over a contiguous cache.

    Args:
        call: The call: bfloat16 or float16, H is 64, 96, 128, 192 or 256, V is H, or 128 for heads of 192. Of the
            optional arrays it takes the slopes alone.
        results: The results of `attention`, and the gradient of the outputs.
        contract: Order of all sums.
        schedule: Tiles and order; chosen by the head size and the mask by default.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        The gradients of `query`, `key` and `value`, with their shapes and dtypes; zeros for what nothing sees.

    Raises:
        UnsupportedError: If the contract is another one, or `scale` or `soft_cap` is out of range.

    Guarantee: row-invariant for `query`; a row is a query with the keys that it sees. The gradients of keys and values
    depend on their own sequence alone. The schedule changes no bit.
    """
    if not isinstance(contract, AttentionGradientContract):
        raise UnsupportedError(f"attention on a Hopper GPU: expected an AttentionGradientContract, got {contract!r}.")
    scoring, options = Scoring.of(call.options), call.options
    query, key, value, out, cotangent = call.query, call.key, call.values, results.out, results.cotangent
    (batch, length, heads, width), value_width = query.shape, value.shape[3]
    capacity, key_heads = key.shape[1:3]
    if call.is_empty:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    size, value_size, wide = width, value_width, contract.key_block < KEY_BLOCK
    if not wide:  # columns of zeros add nothing to any sum
        size = value_size = -(-width // _COLUMNS) * _COLUMNS
        query, key, value, out, cotangent = (_widened(x, size) for x in (query, key, value, out, cotangent))
    chosen = schedule is None
    if schedule is None:
        sees_all = not options.causal and options.window is None
        schedule = gradient_schedule(size, sees_all, value_size, blocks=resident_blocks())
    tiles = Tiles(
        mask_bounds=MaskBounds.of(options),
        block=contract.key_block,
        rows=schedule.rows,
        batch=batch,
        heads=key_heads,
        group=heads // key_heads,
        queries=length,
        keys=capacity,
        grid=schedule.blocks,
        together=schedule.heads,
        to_and_fro=schedule.to_and_fro,
    )
    lengths = Lengths.within(call.limits, length, capacity)
    query, cotangent, out, key, value = (padded(x) for x in (query, cotangent, out, key, value))
    deltas = delta(out, cotangent, chains=contract.sum_chains, interpret=interpret)
    given = Operands(query, key, value, cotangent, _stats(results.lse, deltas, tiles), _marks(key, tiles))
    if call.alibi_slopes is not None:
        given = given._replace(slopes=in_bits(call.alibi_slopes))
    if chosen and not wide and options.causal and options.window is None and length == capacity:
        schedule = replace(schedule, order=gradient_order(tiles.work))
    carried = 0
    if schedule.order is not None:
        given = given._replace(order=jnp.asarray(schedule.order.table))
        carried = schedule.order.carried * batch * key_heads
    own = GradientCall(tiles, options.scale, scoring, size, value_size, interpret, carried)
    body = (WideBody if wide else Body)(own, schedule)
    types = (wide_scratch_types if wide else scratch_types)(own, schedule, query.dtype)
    sums, dk, dv = gradients(given, lengths, body=body, scratch_types=types)
    first_blocks, last_blocks = tiles.blocks_of_tiles(lengths)
    seen = jnp.repeat(first_blocks <= last_blocks, tiles.rows, axis=1)[:, :length, None, None]
    dq = jnp.where(seen, sums[:, :length, :, :width], 0) * jnp.float32(options.scale)
    return dq.astype(query.dtype), dk[:, :capacity, :, :width], dv[:, :capacity, :, :value_width]


def _widened(x: jax.Array, size: int) -> jax.Array:
    """Returns heads (..., H) zero-padded."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def _stats(lse: jax.Array, deltas: jax.Array, tiles: Tiles) -> jax.Array:
    """Returns the numbers for queries (B, N, 3, T'); a row whose delta is not finite is nan in both."""
    room, width = tiles.across * tiles.rows, deltas.shape[2]
    deltas = jnp.pad(deltas, ((0, 0), (0, 0), (0, max(room - width, 0))))[:, :, :room]
    lse = jnp.pad(jnp.moveaxis(lse, 1, 2), ((0, 0), (0, 0), (0, room - lse.shape[1])))
    lse = jnp.where(jnp.isfinite(deltas), lse * -np.float32(math.log2(math.e)), jnp.nan)
    return jnp.stack([lse, deltas, _any_in_each(~jnp.isfinite(lse), tiles.rows)], axis=2)


def _marks(key: jax.Array, tiles: Tiles) -> jax.Array:
    """Returns a number for each key (B, K, S'): 1 where it is not finite, 2 where another one of its block is not."""
    bad = jnp.moveaxis(~jnp.isfinite(key).all(axis=3), 1, 2)
    bad = jnp.pad(bad, ((0, 0), (0, 0), (0, tiles.blocks * tiles.block - bad.shape[2])))
    return jnp.where(bad, 1.0, 2.0 * _any_in_each(bad, tiles.block)).astype(jnp.float32)


def _any_in_each(flags: jax.Array, width: int) -> jax.Array:
    """Returns 1 where any of the `width` flags around is true, else 0, float32."""
    parts = flags.reshape(*flags.shape[:-1], -1, width)
    found = jnp.broadcast_to(parts.any(axis=-1, keepdims=True), parts.shape)
    return found.astype(jnp.float32).reshape(flags.shape)
