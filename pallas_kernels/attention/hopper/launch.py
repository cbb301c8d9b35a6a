"""From a call to a kernel: many queries or a few, contiguous keys or pages."""

from dataclasses import replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._keys import KeySource
from pallas_kernels.attention.hopper._mask_bounds import MaskBounds
from pallas_kernels.attention.hopper._operands import one_by_one, readable, with_whole_factors
from pallas_kernels.attention.hopper._score_operands import prepared
from pallas_kernels.attention.hopper._scores import Scoring
from pallas_kernels.attention.hopper._setup import Lengths, Setup
from pallas_kernels.attention.hopper.cascade import Cascade, shared_splits
from pallas_kernels.attention.hopper.decode import Body, decode
from pallas_kernels.attention.hopper.prefill import prefill
from pallas_kernels.attention.schedule.hopper import DecodeSchedule, PrefillSchedule, Problem, attention_schedule
from pallas_kernels.contract import SplitAttentionContract, eight_bit_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.in_32_bits import in_32_bits

_COPIED_BYTES: Final = 1 << 30  # of copies of caches of several sequences at once


@in_32_bits
def attention(
    call: AttentionCall,
    *,
    contract: SplitAttentionContract,
    schedule: PrefillSchedule | DecodeSchedule | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attends to keys in a contiguous or a paged cache.

    Args:
        call: The call: bfloat16 or float16, H is 64, 96, 128, 192 or 256, V is H, or 128 for heads of 192. All results
            of a sequence are nan where its number of queries is negative, or where an entry of its page table that
            holds keys is not in [0, P). A few queries without a window, and with nothing that is added to their scores
            or hides keys, read the splits of a common prefix once.
        contract: Order of all sums.
        schedule: Of the kernel for many queries or of the one for a few; by default `attention_schedule` chooses.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        The outputs (B, T, N, V) and the log-sum-exp (B, T, N) of the scores, float32. A query that sees no key gives
        zeros and -inf.

    Raises:
        UnsupportedError: If the contract is another one, or the scale or the soft cap is out of range.

    Guarantee: row-invariant; the schedule changes no bit.
    """
    if not isinstance(contract, SplitAttentionContract):
        raise UnsupportedError(f"attention on a Hopper GPU: expected a SplitAttentionContract, got {contract!r}.")
    scoring = Scoring.of(call.options)
    if call.is_empty:
        return of_no_keys(call)
    length, capacity, page = call.query.shape[1], call.capacity, call.key.shape[1]
    problem = _problem(call, contract)
    schedule = attention_schedule(problem) if schedule is None else schedule
    few = isinstance(schedule, DecodeSchedule)
    if call.key_scale is not None:
        call = with_whole_factors(call)
        if not few and problem.batch > 1 and _copied_bytes(problem) > _COPIED_BYTES:
            alone = partial(attention, contract=contract, schedule=schedule, interpret=interpret)
            return one_by_one(alone, call)
    unit = 1.0 if call.key_scale is None else eight_bit_contract(call.key.dtype.name).unit
    block, paged = contract.key_block, problem.paged
    call = readable(call, block, packed=few)
    call = replace(call, limits=Lengths.within(call.limits, length, capacity).numbers)
    setup = Setup(
        contract=contract,
        scoring=scoring,
        mask_bounds=_mask_bounds(call),
        source=KeySource(block) if call.page_table is None else KeySource(block, page, call.key.shape[0]),
        batch=problem.batch,
        queries=call.query.shape[1],
        heads=call.query.shape[2],
        group=problem.group,
        size=problem.size,
        value_size=problem.value_size,
        capacity=capacity,
        unit=unit,
        interpret=interpret,
    )
    call = prepared(call, block)
    if not isinstance(schedule, DecodeSchedule):
        out, lse = prefill(replace(call, common_prefix=None), setup=setup, schedule=schedule)
        return out[:, :length], jnp.moveaxis(lse, 1, 2)[:, :length]
    body, shared = Body(setup, schedule), None
    if call.common_prefix is not None and problem.shares and not (schedule.whole or schedule.swap):
        body = Cascade(setup, schedule)
        shared = shared_splits(call.common_prefix, Lengths(call.limits), setup, page if paged else None)
    return decode(replace(call, common_prefix=shared), body)


def of_no_keys(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
    """Returns the results of a call without anything to compute."""
    rows = call.query.shape[:3]
    wrong = jnp.asarray(call.limits)[:, 1, None, None] < 0
    lse = jnp.broadcast_to(jnp.where(wrong, jnp.nan, -jnp.inf).astype(jnp.float32), rows)
    out = jnp.where(wrong, jnp.nan, 0.0).astype(call.query.dtype)[..., None]
    return jnp.broadcast_to(out, (*rows, call.value_size)), lse


def _mask_bounds(call: AttentionCall) -> MaskBounds:
    return MaskBounds.of(call.options, masked=call.mask is not None)


def _problem(call: AttentionCall, contract: SplitAttentionContract) -> Problem:
    """Returns what a schedule is chosen by."""
    (batch, length, heads, size), key_heads = call.query.shape, call.key.shape[2]
    mask_bounds, options, capacity = _mask_bounds(call), call.options, call.capacity
    factors = (x for x in (call.key_scale, call.value_scale) if x is not None)
    shares = call.common_prefix is not None and batch > 1 and mask_bounds.before is None and not call.changes_scores
    return Problem(
        batch=batch,
        queries=length,
        key_heads=key_heads,
        group=heads // key_heads,
        size=size,
        value_size=call.value_size,
        capacity=capacity,
        reach=mask_bounds.reach(length, capacity),
        split=contract.split,
        sees_all=not options.causal and options.window is None,
        eight_bits=call.key_scale is not None,
        plain=options.soft_cap is None and not call.changes_scores,
        pairs=call.bias is not None or call.mask is not None,
        shares=shares and capacity > contract.split and all(x.shape[0] == 1 for x in factors),
        paged=call.page_table is not None,
    )


def _copied_bytes(problem: Problem) -> int:
    """Returns the bytes of 16-bit copies of the caches of all sequences."""
    return 2 * problem.batch * problem.capacity * problem.key_heads * (problem.size + problem.value_size)
