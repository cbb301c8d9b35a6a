"""From a call of latent attention to its kernel."""

from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._keys import KeySource
from pallas_kernels.attention.hopper._latent_columns import NARROW
from pallas_kernels.attention.hopper._latent_items import Items
from pallas_kernels.attention.hopper._mask_bounds import MaskBounds
from pallas_kernels.attention.hopper._online import LN2, Stats
from pallas_kernels.attention.hopper._operands import gathered, in_whole_rows, padded
from pallas_kernels.attention.hopper.latent import run
from pallas_kernels.attention.hopper.latent_scores import scores_of_blocks
from pallas_kernels.attention.hopper.latent_values import values_of_splits
from pallas_kernels.attention.hopper.launch import of_no_keys
from pallas_kernels.attention.hopper.merge import merge
from pallas_kernels.attention.schedule.hopper_latents import (
    LATENT_SIZES,
    LatentSchedule,
    latent_schedule,
    takes_latents,
)
from pallas_kernels.contract import MmaAttentionContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.hopper.logarithm import log2
from pallas_kernels.parts.hopper.tile import Arithmetic, across
from pallas_kernels.parts.in_32_bits import in_32_bits

_LOG2E: Final = float(np.float32(np.log2(np.e)))
_ROWS: Final = 8  # TMA reads tiles of so many rows
_MERGED_TOGETHER: Final = 2  # splits: many are of the capacity alone
_BLOCK: Final = 64


@in_32_bits
def latent_attention(
    call: AttentionCall,
    *,
    contract: MmaAttentionContract,
    schedule: LatentSchedule | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attends to latents in a contiguous or a paged cache.

    Args:
        call: The call: bfloat16 or float16, one key head of 576 columns, of which the first 512 are the values. A cache
            of other than a multiple of 8 latents is copied, and pages that neither divide 64 nor are multiples of it.
        contract: Order of all sums.
        schedule: By default `latent_schedule` chooses.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        The outputs (B, T, N, V) of the query's dtype and the log-sum-exp (B, T, N) of the scores, float32. A query
        that sees no key gives zeros and -inf.

    Raises:
        UnsupportedError: If the kernel does not serve the call.

    Guarantee: row-invariant; a row is a query with the keys that it sees.
    """
    check(call, contract)
    if call.is_empty:
        return of_no_keys(call)
    (batch, length, heads, size), capacity = call.query.shape, call.capacity
    source = KeySource(contract.key_block)
    if call.page_table is not None and not in_whole_rows(call.key.shape[1], contract.key_block):
        call = gathered(call)
    if call.page_table is None:
        call = replace(call, key=padded(call.key))
    else:
        source = KeySource(contract.key_block, call.key.shape[1], call.key.shape[0])
    items = Items(
        contract=contract,
        schedule=schedule or latent_schedule(batch, length * heads, -(-capacity // contract.split)),
        factor=float(np.float32(call.options.scale * _LOG2E)),
        mask_bounds=MaskBounds.of(call.options),
        source=source,
        batch=batch,
        queries=length,
        heads=heads,
        size=size,
        value_size=call.value_size,
        capacity=capacity,
        interpret=interpret,
    )
    rows = call.query.reshape(batch, items.rows, size)
    rows = jnp.pad(rows, ((0, 0), (0, -items.rows % (NARROW if items.schedule.spread else _ROWS)), (0, 0)))
    call = replace(call, query=rows, common_prefix=None, limits=jnp.asarray(call.limits, jnp.int32))
    if items.schedule.spread:
        out, lse = values_of_splits(call, scores_of_blocks(call, items), items)
    else:
        out, lse, *_ = run(call, items)
    if not items.schedule.whole:
        out, lse = merge(
            out,
            lse,
            call,
            setup=items,
            rows=items.rows,
            dtype=rows.dtype,
            splits_of=items.splits_seen,
            result_of=_result,
            together=_MERGED_TOGETHER,
        )
    out, lse = (x[:, : items.rows].reshape(batch, length, heads, *x.shape[2:]) for x in (out, lse))
    return out, lse


def check(call: AttentionCall, contract: MmaAttentionContract) -> None:
    """Checks what the kernel is given.

    Raises:
        UnsupportedError: If the kernel does not serve the call, or not under the contract.
    """
    if not isinstance(contract, MmaAttentionContract) or (contract.version, contract.key_block) != (3, _BLOCK):
        raise UnsupportedError(
            "latent attention on a Hopper GPU: expected an MmaAttentionContract of version 3 with blocks of"
            f" {_BLOCK} keys, got {contract!r}."
        )
    if not takes_latents(call):
        size, values = LATENT_SIZES
        raise UnsupportedError(
            f"latent attention on a Hopper GPU: expected {size} columns of 16 bits, {values} of them values, and"
            f" nothing but causality that hides a latent; got queries {call.query.shape}, latents {call.key.shape} of"
            f" {call.key.dtype}, {call.options}, optional arrays {list(call.present)}."
        )


def _result(values: jax.Array, stats: Stats, sink: None, math_: Arithmetic) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs (rows, n) and the log-sum-exp (rows,); zeros and -inf for a total of 0."""
    columns = values.shape[1]
    some = stats.total != 0
    sums = jnp.where(some, stats.total, 1.0)
    out = math_.fused(values, across(math_.reciprocal(sums), columns), 0.0)
    lse = math_.scaled(stats.maximum + log2(sums, math_.interpret, math_.layout.reduce(1)), LN2)
    return jnp.where(across(some, columns), out, 0.0), jnp.where(some, lse, -jnp.inf)
