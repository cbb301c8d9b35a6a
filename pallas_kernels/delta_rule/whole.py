"""Whole sequences by the gated delta rule on an NVIDIA GPU, under `MmaDeltaRuleContract`.

Triton kernels compute what the rows of a chunk have between them, and walk over the chunks. On Hopper Mosaic kernels do
both: one for each, or a single one where the heads leave multiprocessors free.
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
    rows, found = (_by_mosaic if plan.mosaic else _by_triton)(x, options, plan, target)
    y, last, edges = repaired(x, rows, found, **options, plan=plan, target=target)
    return (y, last, edges) if keep_edges else (y, last)


def _by_triton(x: Whole, options: dict[str, Any], plan: Schedule, target: Target) -> tuple[Arrays, Arrays]:
    """Returns T, P, G and beta of chunks, and what the walk returns."""
    rows = rows_of_chunks(x, plan=plan, target=target)
    return rows, scan(x, rows, **options, plan=plan, target=target)


def _by_mosaic(x: Whole, options: dict[str, Any], plan: Schedule, target: Target) -> tuple[Arrays, Arrays]:
    """Does the same on Hopper, by one kernel or by two."""
    from pallas_kernels.delta_rule.hopper.joined import rows_and_scan
    from pallas_kernels.delta_rule.hopper.rows import Tokens
    from pallas_kernels.delta_rule.hopper.scan import Chunks
    from pallas_kernels.delta_rule.hopper.scan import scan as walk

    tokens = Tokens(x.query, x.key, x.g, x.beta, x.lengths)
    if plan.workers:
        rows, found = rows_and_scan(tokens, x.value, x.state, **options, stages=plan.stages, workers=plan.workers)
        return tuple(rows[:4]), found
    inverse, weights, logs, betas, grown, later = rows_of(x, plan=plan, target=target)
    chunks = Chunks(
        x.query,
        x.key,
        x.value,
        inverse=inverse,
        weights=weights,
        grown=grown,
        later=later,
        betas=betas,
        state=x.state,
        lengths=x.lengths,
    )
    return (inverse, weights, logs, betas), walk(chunks, **options, stages=plan.stages)


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
