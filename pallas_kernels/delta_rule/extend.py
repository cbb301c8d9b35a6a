"""Sequences that are continued by the gated delta rule on an NVIDIA GPU, under `MmaDeltaRuleContract`.

A few tokens are computed as rows of their own. Parts of prompts are computed in whole chunks, of which the first begins
with rows that are kept: by kernels for Hopper where there are such, and by Triton kernels elsewhere.
"""

from typing import Any, Final

import jax

from pallas_kernels.contract import MmaDeltaRuleContract, honour
from pallas_kernels.delta_rule.jax_triton.launch import Arrays, few_rows, form_of
from pallas_kernels.delta_rule.jax_triton.launch_parts import Part, by_triton, finished
from pallas_kernels.delta_rule.schedule.jax_triton import Schedule, Sizes, decode_schedule, parts_schedule
from pallas_kernels.delta_rule.slots import in_slots
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.target import Target

FEW: Final = 8
"""Most tokens that are computed as rows of their own instead of in whole chunks."""


@in_32_bits
def gated_delta_rule_extend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    kept_key: jax.Array,
    residual: jax.Array,
    inverse: jax.Array,
    decay: jax.Array,
    edge: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    slots: jax.Array | None = None,
    *,
    scale: float,
    contract: MmaDeltaRuleContract,
    target: Target,
    schedule: Schedule | None = None,
) -> Arrays:
    """Computes tokens of sequences that have a state, see `pallas_kernels.delta_rule.portable.gated_delta_rule_extend`.

    Few tokens are computed in the slots of their sequences, and so are parts of prompts on Hopper. Other kernels use
    copies of what sequences keep.

    Guarantee: row-invariant: an output depends on the tokens of its sequence up to its own alone.
    """
    honour("gated_delta_rule_extend", contract, MmaDeltaRuleContract())
    tokens, kept = (query, key, value, g, beta), (state, kept_key, residual, inverse, decay)
    b, count, h, v = value.shape
    sizes = Sizes(value.dtype.name, key.shape[3], v, heads=b * h, tokens=count)
    if count <= FEW:
        places = start, lengths, slots
        plan = schedule or decode_schedule(sizes, target.features, in_slots=slots is not None)
        if plan.mosaic:
            return _few_by_mosaic(tokens, (*kept, edge), places, scale, plan)
        return few_rows(tokens, (*kept, edge), *places, scale, form_of(key, value), plan, target)

    plan = schedule or parts_schedule(sizes, target.features)

    def continued(*kept: jax.Array, slots: jax.Array | None = None) -> Arrays:
        arrays: tuple[Any, ...] = (*tokens, *kept, start, lengths, slots)
        return (_by_mosaic if plan.mosaic else by_triton)(Part(*arrays), scale, plan, target)

    if plan.mosaic or slots is None:
        return continued(*kept, edge, slots=slots)
    return in_slots(continued, kept, edge, lengths, slots)


def _few_by_mosaic(tokens: Arrays, kept: Arrays, places: tuple[Any, ...], scale: float, plan: Schedule) -> Arrays:
    """Computes at most 8 tokens as rows of their own on Hopper."""
    from pallas_kernels.delta_rule.hopper.few import few_rows

    start, lengths, slots = places
    where = kept[-1], start, lengths, lengths if slots is None else slots  # the last one is not read without slots
    options: dict[str, Any] = {"in_slots": slots is not None, "columns": plan.columns, "scale": scale}
    return few_rows(tokens, kept[:-1], where, **options)


def _by_mosaic(x: Part, scale: float, plan: Schedule, target: Target) -> Arrays:
    """Computes tokens in whole chunks on Hopper."""
    from pallas_kernels.delta_rule.hopper.rows import KeptRows, Tokens, rows
    from pallas_kernels.delta_rule.hopper.scan import Chunks, Kept, scan

    kept = KeptRows(x.kept_key, x.inverse, x.decay, x.edge, x.start, x.slots)
    found = rows(Tokens(x.query, x.key, x.g, x.beta, x.lengths, kept))
    inverse, weights, logs, betas, grown, later, first_keys, last_keys = found
    state, residual = (jax.new_ref(a) for a in (x.state, x.residual))
    of_rows = (inverse, weights, grown, later, betas)
    known = Kept(first_keys, residual, x.edge, x.start, x.slots)
    chunks = Chunks(x.query, x.key, x.value, *of_rows, state, x.lengths, known)
    y, flags = scan(chunks, scale=scale, keep_edges=False, stages=plan.stages)
    x = x._replace(state=state[...], residual=residual[...])
    return finished(x, (inverse, weights, logs, betas), (first_keys, last_keys), y, flags, scale, plan, target)
