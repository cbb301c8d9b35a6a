"""From the arrays of the gated delta rule to its Triton kernels."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.contract import MmaDeltaRuleContract
from pallas_kernels.delta_rule.schedule.jax_triton import CAREFUL, EDGES, Schedule
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.target import Target

Arrays = tuple[jax.Array, ...]

_CHUNK: Final = MmaDeltaRuleContract().chunk


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
    least: float = MmaDeltaRuleContract().least

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads


def form_of(key: jax.Array, value: jax.Array) -> Form:
    """Returns the sizes of keys (B, T, J, D) and values (B, T, H, V)."""
    return Form(key.shape[2], value.shape[2], key.shape[3], value.shape[3])


def like(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of arrays."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def scratch_of_chunks(value: jax.Array, chunks: int, size: int) -> list[jax.ShapeDtypeStruct]:
    """T, P, G and beta of all chunks."""
    shape = (value.shape[0], value.shape[2], chunks, size)
    square = jax.ShapeDtypeStruct((*shape, size), value.dtype)
    line = jax.ShapeDtypeStruct(shape, jnp.float32)
    return [square, square, line, line]


def careful(plan: Schedule, programs: int, constants: dict[str, Any]) -> dict[str, Any]:
    """The launch that computes again what is not finite."""
    columns = min(plan.columns, CAREFUL.columns)
    return {
        "grid": (programs * (plan.columns // columns),),
        "warps": CAREFUL.warps,
        "stages": CAREFUL.stages,
        "constants": constants | {"COLUMNS": columns, "FLAGGED": plan.columns},
    }


class Whole(NamedTuple):
    """Whole sequences.

    Attributes:
        query: (B, T, J, D).
        key: (B, T, J, D).
        value: (B, T, H, V).
        g: (B, T, H) float32.
        beta: (B, T, H) float32.
        state: (B, H, D, V) float32, before the first token.
        lengths: (B,) int32.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    g: jax.Array
    beta: jax.Array
    state: jax.Array
    lengths: jax.Array

    @property
    def form(self) -> Form:
        """The sizes that kernels depend on."""
        return form_of(self.key, self.value)

    @property
    def read(self) -> Arrays:
        """What the walks read of the tokens."""
        return self.query, self.key, self.value

    @property
    def chunks(self) -> int:
        """Chunks of the longest sequence that there can be."""
        return -(-self.value.shape[1] // _CHUNK)

    def results(self, keep_edges: bool) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of the outputs, the last states, and the states at edges."""
        edges = (self.state.shape[0], self.chunks, *self.state.shape[1:]) if keep_edges else (1,)
        return [*like(self.value, self.state), jax.ShapeDtypeStruct(edges, jnp.float32)]


def rows_of_chunks(x: Whole, *, plan: Schedule, target: Target) -> tuple[jax.Array, ...]:
    """Returns T and P of all chunks, (B, H, N, 64, 64) with the columns first, and G and beta, (B, H, N, 64)."""
    from pallas_kernels.delta_rule.jax_triton.kernels import chunk_kernel

    b, tokens, h, _ = x.value.shape
    return launch(
        chunk_kernel, x.query, x.key, x.g, x.beta, x.lengths, tokens, x.chunks,
        out=scratch_of_chunks(x.value, x.chunks, _CHUNK), grid=(b * h, x.chunks), warps=plan.chunk_warps, stages=1,
        fuses=False, target=target, constants={"form": x.form},
    )  # fmt: skip


def scan(
    x: Whole, rows: Arrays, *, scale: float, keep_edges: bool, plan: Schedule, target: Target
) -> tuple[jax.Array, ...]:
    """Walks over the chunks.

    Returns:
        Outputs, last states, states at edges, and a flag for each program: 1 if nothing of it is to be used.
    """
    from pallas_kernels.delta_rule.jax_triton.kernels import scan_kernel

    b, tokens, h, v = x.value.shape
    grid = (b * h * (v // plan.columns),)
    return launch(
        scan_kernel, *x.read, *rows, x.state, x.lengths, tokens, x.chunks,
        out=[*x.results(keep_edges), jax.ShapeDtypeStruct(grid, jnp.int32)], grid=grid, warps=plan.warps,
        stages=plan.stages, constants={"SCALE": scale, "EDGES": keep_edges, "COLUMNS": plan.columns, "form": x.form},
        fuses=False, target=target,
    )  # fmt: skip


def repaired(
    x: Whole, rows: Arrays, found: Arrays, *, scale: float, keep_edges: bool, plan: Schedule, target: Target
) -> Arrays:
    """Computes again what a walk has flagged, so that nan does not reach the tokens before it.

    Args:
        x: The sequences.
        rows: As `rows_of_chunks` returns them.
        found: As `scan` returns it, one flag for `plan.columns` columns of a head.
        scale: Factor of the outputs.
        keep_edges: Whether states at edges are kept.
        plan: The schedule of the walk.
        target: The GPU.

    Returns:
        Outputs, last states, and states at edges.
    """
    from pallas_kernels.delta_rule.jax_triton.kernels import careful_scan_kernel

    *results, flags = found
    constants = {"SCALE": scale, "EDGES": keep_edges, "form": x.form}
    return launch(
        careful_scan_kernel, *x.read, *rows, x.state, x.lengths, flags, *results,
        x.value.shape[1], x.chunks, out=x.results(keep_edges), aliases={10: 0, 11: 1, 12: 2}, fuses=False,
        target=target, **careful(plan, flags.shape[0], constants),
    )  # fmt: skip


def few_rows(
    tokens: Arrays,
    kept: Arrays,
    start: jax.Array,
    lengths: jax.Array,
    slots: jax.Array | None,
    scale: float,
    form: Form,
    plan: Schedule,
    target: Target,
) -> Arrays:
    """Computes at most 8 tokens as rows of their own."""
    from pallas_kernels.delta_rule.jax_triton.decode import columns_kernel, decode_kernel, edges_kernel, rows_kernel

    (query, key, value, g, beta), (state, kept_key, residual, inverse, decay, edge) = tokens, kept
    b, count, h, v = value.shape
    common: dict[str, Any] = {"stages": 1, "fuses": False, "target": target}
    columns = {"N": count, "SCALE": scale, "COLUMNS": plan.columns, "SLOTS": slots is not None, "form": form}
    places = (edge, start, lengths, lengths if slots is None else slots)  # the last one is not read without slots
    of_rows, kept = (kept_key, inverse, decay), (state, residual, kept_key, inverse, decay)
    if plan.rows_warps == 0:
        y, new_state, new_residual, new_key, new_inverse, new_decay, new_edge = launch(
            decode_kernel, *tokens, *kept, *places,
            out=like(value, *kept, edge), aliases={5 + i: 1 + i for i in range(5)},
            grid=(b * h * (v // (plan.columns * plan.pieces)),), warps=plan.warps,
            constants=columns | {"PIECES": plan.pieces}, **common,
        )  # fmt: skip
        return y, new_state, new_key, new_residual, new_inverse, new_decay, new_edge
    scratch = [jax.ShapeDtypeStruct((b, h, count, decay.shape[2]), value.dtype)]
    scratch += [jax.ShapeDtypeStruct((b, h, count, 2), jnp.float32)]
    scratch += [jax.ShapeDtypeStruct((b * (h + form.key_heads),), jnp.int32)]
    new_key, new_inverse, new_decay, new_edge, weights, factors, turns = launch(
        rows_kernel, query, key, g, beta, *of_rows, *places, b,
        out=[*like(*of_rows, edge), *scratch], aliases={4: 0, 5: 1, 6: 2}, grid=(b * h,),
        warps=plan.rows_warps, constants={"N": count, "SLOTS": slots is not None, "form": form}, **common,
    )  # fmt: skip
    y, new_state, new_residual = launch(
        columns_kernel, query, key, value, *places, weights, factors, state, residual,
        out=like(value, state, residual), aliases={9: 1, 10: 2}, grid=(b * h * (v // plan.columns),),
        warps=plan.warps, constants=columns, **common,
    )  # fmt: skip
    lanes = min(b, EDGES.pieces)
    turned = {"COLUMNS": EDGES.columns, "LANES": lanes, "MOST": 1 << (-(-b // lanes) - 1).bit_length()}
    kept = (new_state, new_residual, new_key, new_inverse, new_decay)
    y, new_state, new_residual, new_key, new_inverse, new_decay, _ = launch(
        edges_kernel, *tokens, *places, y, *kept, turns, b,
        out=like(value, *kept, turns), aliases={9 + i: i for i in range(7)},
        grid=(lanes * h * (v // EDGES.columns),), warps=EDGES.warps,
        constants=columns | turned, **common,
    )  # fmt: skip
    return y, new_state, new_key, new_residual, new_inverse, new_decay, new_edge
