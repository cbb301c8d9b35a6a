"""From the arrays of parts of prompts, which continue sequences, to the Triton kernels of the gated delta rule."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.jax_triton.launch import Arrays, Form, careful, form_of, like, scratch_of_chunks
from pallas_kernels.delta_rule.schedule.jax_triton import Schedule
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.target import Target


class Part(NamedTuple):
    """Tokens of sequences, and what is kept of these; shapes and slots as for `portable.gated_delta_rule_extend`."""

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
    slots: jax.Array | None = None

    @property
    def form(self) -> Form:
        """The sizes that kernels depend on."""
        return form_of(self.key, self.value)

    @property
    def read(self) -> Arrays:
        """What the walks read of the tokens."""
        return self.query, self.key, self.value

    @property
    def places(self) -> Arrays:
        """Where the tokens are."""
        return self.edge, self.start, self.lengths

    @property
    def chunks(self) -> int:
        """Chunks that the tokens may be in."""
        return 1 + -(-self.value.shape[1] // self.decay.shape[2])


def by_triton(x: Part, scale: float, plan: Schedule, target: Target) -> Arrays:
    """Computes tokens in whole chunks, of which the first begins with rows that are kept; not in slots."""
    from pallas_kernels.delta_rule.jax_triton.kernels import (
        careful_extend_scan_kernel,
        extend_chunk_kernel,
        extend_scan_kernel,
    )

    b, tokens, h, v = x.value.shape
    sizes = tokens, x.chunks
    common: dict[str, Any] = {"target": target, "fuses": False}
    *rows, new_key, new_inverse, new_decay, new_edge = launch(
        extend_chunk_kernel, *(x.query, x.key, x.g, x.beta), *(x.kept_key, x.inverse, x.decay), *x.places, *sizes,
        out=[*scratch_of_chunks(x.value, x.chunks, x.decay.shape[2]), *like(x.kept_key, x.inverse, x.decay, x.edge)],
        grid=(b * h, x.chunks), warps=plan.chunk_warps, stages=1, constants={"form": x.form}, **common,
    )  # fmt: skip
    grid = (b * h * (v // plan.columns),)
    y, state, residual, flags = launch(
        extend_scan_kernel, *x.read, *rows, x.kept_key, x.state, x.residual, *x.places, *sizes,
        out=[*like(x.value, x.state, x.residual), jax.ShapeDtypeStruct(grid, jnp.int32)], aliases={8: 1, 9: 2},
        grid=grid, warps=plan.warps, stages=plan.stages,
        constants={"SCALE": scale, "COLUMNS": plan.columns, "form": x.form}, **common,
    )  # fmt: skip
    y, state, residual = launch(
        careful_extend_scan_kernel, *x.read, *rows, x.kept_key, *x.places, flags, y, state, residual, *sizes,
        out=like(x.value, x.state, x.residual), aliases={12: 0, 13: 1, 14: 2},
        **careful(plan, flags.shape[0], {"SCALE": scale, "form": x.form}), **common,
    )  # fmt: skip
    return y, state, new_key, residual, new_inverse, new_decay, new_edge


def finished(
    x: Part, rows: Arrays, keys: Arrays, y: jax.Array, flags: jax.Array, scale: float, plan: Schedule, target: Target
) -> Arrays:
    """Computes again what has a flag, so that nan does not reach the tokens before it, and keeps the last chunk.

    Args:
        x: The tokens, and what is kept of the sequences; state and residuals are new ones where there is no flag.
        rows: T, P, G and beta of the chunks.
        keys: Those of the first chunk, and those to keep of the last one.
        y: The outputs.
        flags: 1 for `plan.columns` columns of a head of which nothing is to be used.
        scale: Factor of the outputs.
        plan: The schedule.
        target: The GPU.
    """
    from pallas_kernels.delta_rule.jax_triton.parts import finish_parts_kernel

    kept = (x.state, x.residual, x.kept_key, x.inverse, x.decay)
    slots = x.lengths if x.slots is None else x.slots  # not read without slots
    constants = {"SCALE": scale, "SLOTS": x.slots is not None, "form": x.form}
    y, state, residual, key, inverse, decay, edge = launch(
        finish_parts_kernel, *x.read, *rows, *keys, *x.places, slots, flags, y, *kept, x.value.shape[1], x.chunks,
        out=like(x.value, *kept, x.edge), aliases={14 + i: i for i in range(6)}, target=target, fuses=False,
        **careful(plan, flags.shape[0], constants),
    )  # fmt: skip
    return y, state, key, residual, inverse, decay, edge
