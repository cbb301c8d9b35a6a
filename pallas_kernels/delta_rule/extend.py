"""Sequences that are continued by the gated delta rule on an NVIDIA GPU, under `MmaDeltaRuleContract`.

A few tokens are computed as rows of their own. Parts of prompts are computed in whole chunks, of which the first begins
with rows that are kept: by kernels for Hopper where there are such, and by Triton kernels elsewhere.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.contract import MmaDeltaRuleContract, honour
from pallas_kernels.delta_rule.jax_triton.launch import (
    Arrays,
    Form,
    careful,
    few_rows,
    form_of,
    like,
    scratch_of_chunks,
)
from pallas_kernels.delta_rule.schedule.jax_triton import Schedule, Sizes, parts_schedule
from pallas_kernels.delta_rule.slots import in_slots
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.target import Target

FEW: Final = 8
"""Most tokens that are computed as rows of their own instead of in whole chunks."""


class _Part(NamedTuple):
    """Tokens of sequences, and what is kept of these; shapes as for `portable.gated_delta_rule_extend`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    g: jax.Array
    beta: jax.Array
    state: jax.Array
    kept_key: jax.Array
    residual: jax.Array
    inverse: jax.Array
    decay: jax.Array
    edge: jax.Array
    start: jax.Array
    lengths: jax.Array

    @property
    def form(self) -> Form:
        """The sizes that kernels depend on."""
        return form_of(self.key, self.value)

    @property
    def chunks(self) -> int:
        """Chunks that the tokens may be in."""
        return 1 + -(-self.value.shape[1] // self.decay.shape[2])


class _Found(NamedTuple):
    """What the kernels return.

    Attributes:
        rows: T, P, G and beta of the chunks.
        kept: New keys, T, G and edges.
        y: The outputs.
        state: The new states.
        residual: The new residuals.
        flags: 1 for `Schedule.columns` of a head of which nothing is to be used; its state and residuals are those
            from before.
    """

    rows: Arrays
    kept: Arrays
    y: jax.Array
    state: jax.Array
    residual: jax.Array
    flags: jax.Array


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

    Programs for few tokens compute sequences in their slots; others compute them from copies of what they keep.

    Guarantee: row-invariant: an output depends on the tokens of its sequence up to its own alone.
    """
    honour("gated_delta_rule_extend", contract, MmaDeltaRuleContract())
    tokens, kept = (query, key, value, g, beta), (state, kept_key, residual, inverse, decay)
    if value.shape[1] <= FEW:
        form = form_of(key, value)
        return few_rows(tokens, (*kept, edge), start, lengths, slots, scale, form, target, schedule)

    def continued(*kept: jax.Array) -> Arrays:
        return _chunks(_Part(*tokens, *kept, start, lengths), scale, target, schedule)

    return continued(*kept, edge) if slots is None else in_slots(continued, kept, edge, lengths, slots)


def _chunks(x: _Part, scale: float, target: Target, schedule: Schedule | None) -> Arrays:
    """Computes tokens in whole chunks."""
    b, tokens, h, v = x.value.shape
    sizes = Sizes(x.value.dtype.name, x.key.shape[3], v, heads=b * h, tokens=tokens)
    plan = schedule or parts_schedule(sizes, target.features)
    found = _by_mosaic(x, scale, plan) if plan.mosaic else _by_triton(x, scale, plan, target)
    y, state, residual = _repaired(x, found, scale, plan, target)
    new_key, new_inverse, new_decay, new_edge = found.kept
    return y, state, new_key, residual, new_inverse, new_decay, new_edge


def _by_mosaic(x: _Part, scale: float, plan: Schedule) -> _Found:
    from pallas_kernels.delta_rule.hopper.rows import KeptRows, Tokens, rows
    from pallas_kernels.delta_rule.hopper.scan import Chunks, Kept, scan

    tokens = Tokens(x.query, x.key, x.g, x.beta, x.lengths)
    kept = KeptRows(x.kept_key, x.inverse, x.decay, x.edge, x.start)
    inverse, weights, logs, betas, grown, later, *new = rows(tokens._replace(kept=kept))
    state, residual = (jax.new_ref(a) for a in (x.state, x.residual))
    of_rows = (inverse, weights, grown, later, betas)
    chunks = Chunks(x.query, x.key, x.value, *of_rows, state, x.lengths, Kept(x.kept_key, residual, x.edge, x.start))
    y, flags = scan(chunks, scale=scale, keep_edges=False, stages=plan.stages)
    chunk = x.decay.shape[2]
    edge = x.edge + jnp.where(x.lengths > 0, (x.start - x.edge + x.lengths - 1) // chunk * chunk, 0)
    return _Found((inverse, weights, logs, betas), (*new, edge), y, state[...], residual[...], flags)


def _by_triton(x: _Part, scale: float, plan: Schedule, target: Target) -> _Found:
    from pallas_kernels.delta_rule.jax_triton.kernels import extend_chunk_kernel, extend_scan_kernel

    b, tokens, h, v = x.value.shape
    common: dict[str, Any] = {"target": target, "fuses": False}
    *rows, new_key, new_inverse, new_decay, new_edge = launch(
        extend_chunk_kernel,
        x.query, x.key, x.g, x.beta, x.kept_key, x.inverse, x.decay, x.edge, x.start, x.lengths, tokens, x.chunks,
        out=[*scratch_of_chunks(x.value, x.chunks, x.decay.shape[2]), *like(x.kept_key, x.inverse, x.decay, x.edge)],
        grid=(b * h, x.chunks), warps=plan.chunk_warps, stages=1, constants={"form": x.form}, **common,
    )  # fmt: skip
    grid = (b * h * (v // plan.columns),)
    y, state, residual, flags = launch(
        extend_scan_kernel,
        x.query, x.key, x.value, *rows, x.kept_key, x.state, x.residual, x.edge, x.start, x.lengths, tokens, x.chunks,
        out=[*like(x.value, x.state, x.residual), jax.ShapeDtypeStruct(grid, jnp.int32)], aliases={8: 1, 9: 2},
        grid=grid, warps=plan.warps, stages=plan.stages,
        constants={"SCALE": scale, "COLUMNS": plan.columns, "form": x.form}, **common,
    )  # fmt: skip
    return _Found(tuple(rows), (new_key, new_inverse, new_decay, new_edge), y, state, residual, flags)


def _repaired(x: _Part, found: _Found, scale: float, plan: Schedule, target: Target) -> Arrays:
    """Computes again what has a flag, so that nan does not reach the tokens before it."""
    from pallas_kernels.delta_rule.jax_triton.kernels import careful_extend_scan_kernel

    return launch(
        careful_extend_scan_kernel,
        x.query, x.key, x.value, *found.rows, x.kept_key, x.edge, x.start, x.lengths, found.flags, found.y, found.state,
        found.residual, x.value.shape[1], x.chunks,
        out=like(x.value, x.state, x.residual), aliases={12: 0, 13: 1, 14: 2}, target=target, fuses=False,
        **careful(plan, found.flags.shape[0], {"SCALE": scale, "form": x.form}),
    )  # fmt: skip
