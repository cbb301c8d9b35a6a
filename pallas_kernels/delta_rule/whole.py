"""Whole sequences by the gated delta rule on an NVIDIA GPU, under `MmaDeltaRuleContract`.

Triton kernels compute what the rows of a chunk have between them. The walk over the chunks is a kernel for Hopper where
there is one, and a Triton kernel elsewhere.
"""

from typing import Any

import jax

from pallas_kernels.contract import MmaDeltaRuleContract, honour
from pallas_kernels.delta_rule.jax_triton.launch import Arrays, Whole, repaired, rows_of_chunks, scan
from pallas_kernels.delta_rule.schedule.jax_triton import Schedule, Sizes, chunks_schedule
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.target import Target


@in_32_bits
def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    keep_edges: bool,
    contract: MmaDeltaRuleContract,
    target: Target,
    schedule: Schedule | None = None,
) -> Arrays:
    """Computes whole sequences, see `pallas_kernels.delta_rule.portable.gated_delta_rule`.

    Guarantee: row-invariant: an output depends on the tokens of its sequence up to its own alone. The bits are those of
    `gated_delta_rule_extend`.
    """
    honour("gated_delta_rule", contract, MmaDeltaRuleContract())
    x = Whole(query, key, value, g, beta, state, lengths)
    plan = schedule or plan_of(x, target)
    options: dict[str, Any] = {"scale": scale, "keep_edges": keep_edges}
    computed = rows_of(x, plan=plan, target=target)
    rows = computed[:4]
    if plan.mosaic:
        from pallas_kernels.delta_rule.hopper.scan import Chunks
        from pallas_kernels.delta_rule.hopper.scan import scan as walk

        inverse, weights, _, betas, grown, later = computed
        of_rows = (inverse, weights, grown, later, betas)
        chunks = Chunks(query, key, value, *of_rows, state, lengths)
        found: Arrays = walk(chunks, **options, stages=plan.stages)
    else:
        found = scan(x, rows, **options, plan=plan, target=target)
    y, last, edges = repaired(x, rows, found, **options, plan=plan, target=target)
    return (y, last, edges) if keep_edges else (y, last)


def rows_of(x: Whole, *, plan: Schedule, target: Target) -> Arrays:
    """Returns what `rows_of_chunks` does, and with the kernel for Hopper also E(G) and E(G of the last row - G)."""
    if not plan.mosaic:
        return rows_of_chunks(x, plan=plan, target=target)
    from pallas_kernels.delta_rule.hopper.rows import Tokens, rows

    return tuple(rows(Tokens(x.query, x.key, x.g, x.beta, x.lengths)))


def plan_of(x: Whole, target: Target) -> Schedule:
    """Returns the schedule of whole sequences."""
    b, tokens, h, v = x.value.shape
    sizes = Sizes(x.value.dtype.name, x.key.shape[3], v, heads=b * h, tokens=tokens)
    return chunks_schedule(sizes, target.features)
