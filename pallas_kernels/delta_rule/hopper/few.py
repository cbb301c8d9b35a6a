"""The launch of the kernel for at most 8 tokens of each sequence on Hopper."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import MmaDeltaRuleContract
from pallas_kernels.delta_rule.hopper.few_form import LANES, WARPS, Arrays, Form
from pallas_kernels.delta_rule.hopper.few_one import program_of
from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.lanes import Lanes, Number
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.tile import WARPGROUP


def few_rows(
    tokens: tuple[jax.Array, ...],
    kept: tuple[jax.Array, ...],
    places: tuple[jax.Array, ...],
    *,
    in_slots: bool,
    columns: int,
    scale: float,
) -> tuple[jax.Array, ...]:
    """Runs the kernel; shapes as for `portable.gated_delta_rule_extend`.

    Args:
        tokens: Queries, keys, values, gates and betas.
        kept: States, keys, residuals, T and G.
        places: Edges, first positions, lengths and slots.
        in_slots: Whether what is kept is in slots.
        columns: Columns of a block, 32, 64 or 128.
        scale: Factor of the outputs.

    Returns:
        The outputs, what is kept, and the edges.
    """
    (b, count, h, _), key_heads = tokens[2].shape, tokens[0].shape[2]
    least = MmaDeltaRuleContract().least
    form = Form(count, key_heads, h, columns // (8 * WARPS), in_slots, scale, least)

    def kernel(given: Any, out: Any, new_edge: Any, shared: Any) -> None:
        refs = [*given, out, new_edge]
        block = lax.axis_index("block")

        @inline(plgpu.Layout.WG_SPLAT(()), plgpu.RefType(), *[plgpu.RefType()] * len(refs))
        def run(block: Any, shared: Any, *arrays: Any) -> None:
            program_of(form)(Lanes(shared), Arrays(*arrays), form, Number(block.registers.item())).run()

        run(block, shared, *refs)

    changed = [jax.new_ref(a) for a in kept]
    y, edge = launch(
        "delta_rule_few_rows",
        kernel,
        [jax.ShapeDtypeStruct(tokens[2].shape, tokens[2].dtype), jax.ShapeDtypeStruct((b,), jnp.int32)],
        {"block": b * h * form.parts},
        [plgpu.SMEM((form.words,), jnp.float32)],
        warpgroups={"warpgroup": WARPS * LANES // WARPGROUP},
        by_lanes=True,
        interpret=False,
        changes=True,
    )((*tokens, *places, *changed))
    return y, *(a[...] for a in changed), edge
