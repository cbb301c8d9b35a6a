"""From the arrays of the gated delta rule to its Triton kernels."""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import MmaDeltaRuleContract, honour
from pallas_kernels.delta_rule.schedule.jax_triton import CAREFUL, PARTS, Schedule, chunks_schedule, decode_schedule
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.target import Target

Arrays = tuple[jax.Array, ...]

FEW: Final = 8
"""Most tokens that are computed as rows of their own instead of in whole chunks."""


@dataclass(frozen=True)
class Form:
    """The sizes that the machine code of a kernel depends on.

    Attributes:
        key_heads: J.
        value_heads: H.
        key_size: D.
        value_size: V.
        least: Smallest gate.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    least: float

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads


def _form(key: jax.Array, value: jax.Array, contract: MmaDeltaRuleContract) -> Form:
    return Form(key.shape[2], value.shape[2], key.shape[3], value.shape[3], contract.least)


def _like(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def _scratch(value: jax.Array, chunks: int, size: int) -> list[jax.ShapeDtypeStruct]:
    """T, P, G and beta of all chunks."""
    shape = (value.shape[0], value.shape[2], chunks, size)
    square = jax.ShapeDtypeStruct((*shape, size), value.dtype)
    line = jax.ShapeDtypeStruct(shape, jnp.float32)
    return [square, square, line, line]


def _careful(plan: Schedule, programs: int, constants: dict[str, Any]) -> dict[str, Any]:
    """The launch that computes again what is not finite."""
    columns = min(plan.columns, CAREFUL.columns)
    return {
        "grid": (programs * (plan.columns // columns),),
        "warps": CAREFUL.warps,
        "stages": CAREFUL.stages,
        "constants": constants | {"COLUMNS": columns, "FLAGGED": plan.columns},
    }


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
    product: Any = None,
    together: bool = True,
    schedule: Schedule | None = None,
) -> Arrays:
    """Computes whole sequences, see `pallas_kernels.delta_rule.portable.gated_delta_rule`.

    `product` and `together` are for programs of XLA and mean nothing here.

    Guarantee: row-invariant: an output depends on the tokens of its sequence up to its own alone. The bits are those of
    `gated_delta_rule_extend`.
    """
    from pallas_kernels.delta_rule.jax_triton.kernels import careful_scan_kernel, chunk_kernel, scan_kernel

    honour("gated_delta_rule", contract, MmaDeltaRuleContract())
    form, (b, tokens, h, v) = _form(key, value, contract), value.shape
    chunks = -(-tokens // contract.chunk)
    plan = schedule or chunks_schedule(v, target.features, heads=b * h)
    common: dict[str, Any] = {"target": target, "fuses": False}
    rows = launch(
        chunk_kernel, query, key, g, beta, lengths, tokens, chunks,
        out=_scratch(value, chunks, contract.chunk), grid=(b * h, chunks), warps=plan.chunk_warps, stages=1,
        constants={"form": form}, **common,
    )  # fmt: skip
    edges_shape = (b, chunks, *state.shape[1:]) if keep_edges else (1,)
    results = [*_like(value, state), jax.ShapeDtypeStruct(edges_shape, jnp.float32)]
    constants = {"SCALE": scale, "EDGES": keep_edges, "form": form}
    grid = (b * h * (v // plan.columns),)
    y, last, edges, bad = launch(
        scan_kernel, query, key, value, *rows, state, lengths, tokens, chunks,
        out=[*results, jax.ShapeDtypeStruct(grid, jnp.int32)], grid=grid, warps=plan.warps, stages=plan.stages,
        constants=constants | {"COLUMNS": plan.columns}, **common,
    )  # fmt: skip
    y, last, edges = launch(
        careful_scan_kernel, query, key, value, *rows, state, lengths, bad, y, last, edges, tokens, chunks,
        out=results, aliases={10: 0, 11: 1, 12: 2}, **_careful(plan, grid[0], constants), **common,
    )  # fmt: skip
    return (y, last, edges) if keep_edges else (y, last)


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
    *,
    scale: float,
    contract: MmaDeltaRuleContract,
    target: Target,
    product: Any = None,
    together: bool = True,
    schedule: Schedule | None = None,
) -> Arrays:
    """Computes tokens of sequences that have a state, see `pallas_kernels.delta_rule.portable.gated_delta_rule_extend`.

    `product` and `together` are for programs of XLA and mean nothing here.

    Guarantee: row-invariant: an output depends on the tokens of its sequence up to its own alone.
    """
    honour("gated_delta_rule_extend", contract, MmaDeltaRuleContract())
    form, kept = _form(key, value, contract), (state, kept_key, residual, inverse, decay, edge)
    run = _rows if value.shape[1] <= FEW else _parts
    return run((query, key, value, g, beta), kept, start, lengths, scale, form, target, schedule)


def _parts(
    tokens: Arrays,
    kept: Arrays,
    start: jax.Array,
    lengths: jax.Array,
    scale: float,
    form: Form,
    target: Target,
    schedule: Schedule | None,
) -> Arrays:
    """Computes tokens in whole chunks, of which the first begins with the rows that are kept."""
    from pallas_kernels.delta_rule.jax_triton.kernels import (
        careful_extend_scan_kernel,
        extend_chunk_kernel,
        extend_scan_kernel,
    )

    (query, key, value, g, beta), (state, kept_key, residual, inverse, decay, edge) = tokens, kept
    b, count, h, v = value.shape
    chunk = decay.shape[2]
    chunks = 1 + -(-count // chunk)
    plan = schedule or PARTS
    common: dict[str, Any] = {"target": target, "fuses": False}
    *rows, new_key, new_inverse, new_decay, new_edge = launch(
        extend_chunk_kernel, query, key, g, beta, kept_key, inverse, decay, edge, start, lengths, count, chunks,
        out=[*_scratch(value, chunks, chunk), *_like(kept_key, inverse, decay, edge)], grid=(b * h, chunks),
        warps=plan.chunk_warps, stages=1, constants={"form": form}, **common,
    )  # fmt: skip
    results, constants = _like(value, state, residual), {"SCALE": scale, "form": form}
    grid = (b * h * (v // plan.columns),)
    y, new_state, new_residual, bad = launch(
        extend_scan_kernel,
        query, key, value, *rows, kept_key, state, residual, edge, start, lengths, count, chunks,
        out=[*results, jax.ShapeDtypeStruct(grid, jnp.int32)], aliases={8: 1, 9: 2}, grid=grid, warps=plan.warps,
        stages=plan.stages, constants=constants | {"COLUMNS": plan.columns}, **common,
    )  # fmt: skip
    y, new_state, new_residual = launch(
        careful_extend_scan_kernel,
        query, key, value, *rows, kept_key, edge, start, lengths, bad, y, new_state, new_residual, count, chunks,
        out=results, aliases={12: 0, 13: 1, 14: 2}, **_careful(plan, grid[0], constants), **common,
    )  # fmt: skip
    return y, new_state, new_key, new_residual, new_inverse, new_decay, new_edge


def _rows(
    tokens: Arrays,
    kept: Arrays,
    start: jax.Array,
    lengths: jax.Array,
    scale: float,
    form: Form,
    target: Target,
    schedule: Schedule | None,
) -> Arrays:
    """Computes at most 8 tokens as rows of their own."""
    from pallas_kernels.delta_rule.jax_triton.decode import decode_kernel

    (_, _, value, _, _), (state, kept_key, residual, inverse, decay, edge) = tokens, kept
    b, count, h, v = value.shape
    plan = schedule or decode_schedule(v, heads=b * h)
    constants = {"N": count, "SCALE": scale, "COLUMNS": plan.columns, "PIECES": plan.pieces, "form": form}
    y, new_state, new_residual, new_key, new_inverse, new_decay, new_edge = launch(
        decode_kernel, *tokens, state, residual, kept_key, inverse, decay, edge, start, lengths,
        out=_like(value, state, residual, kept_key, inverse, decay, edge), aliases={5: 1, 6: 2},
        grid=(b * h * (v // (plan.columns * plan.pieces)),), warps=plan.warps, stages=1, fuses=False, target=target,
        constants=constants,
    )  # fmt: skip
    return y, new_state, new_key, new_residual, new_inverse, new_decay, new_edge
