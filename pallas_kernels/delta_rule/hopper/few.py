"""The launch of the kernel for at most 8 tokens of each sequence on Hopper."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import MmaDeltaRuleContract
from pallas_kernels.delta_rule.hopper.few_rows import Arrays, Form, Program
from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.lanes import Lanes
from pallas_kernels.parts.hopper.launch import launch

_READ = ("query", "key", "value", "g", "beta", "edge", "start", "lengths", "slots")
_CHANGED = ("state", "kept_key", "residual", "inverse", "decay")


def few(tokens: tuple[jax.Array, ...], places: tuple[jax.Array, ...], kept: tuple[jax.Array, ...], *, in_slots: bool, tiles: int, scale: float) -> tuple[jax.Array, ...]:
    """Returns outputs, what is kept, edges and turns."""
    query, key, value, *_ = tokens
    b, count, h, size = value.shape
    form = Form(count, key.shape[2], h, tiles, in_slots, scale, MmaDeltaRuleContract().least)
    shape = jax.ShapeDtypeStruct
    turns = shape((b * (h + form.key_heads),), jnp.int32)

    def kernel(given: Any, out: Any, new_edge: Any, turns: Any, shared: Any) -> None:
        refs = [*given, out, new_edge, turns]
        block = lax.axis_index("block")

        @inline(plgpu.Layout.WG_SPLAT(()), plgpu.RefType(), *[plgpu.RefType()] * len(refs))
        def run(block: Any, shared: Any, *arrays: Any) -> None:
            from pallas_kernels.parts.hopper.lanes import Number

            Program(Lanes(shared), Arrays(*arrays), form, b, Number(block.registers.item())).run()

        run(block, shared, *refs)

    changed = [jax.new_ref(a) for a in kept]
    y, new_edge, turns = launch(
        "delta_rule_few",
        kernel,
        [shape(value.shape, value.dtype), shape((b,), jnp.int32), turns],
        {"block": b * h * form.parts},
        [plgpu.SMEM((form.words,), jnp.float32)],
        by_lanes=True,
        interpret=False,
        changes=True,
    )((*tokens, *places, *changed))
    return y, *(a[...] for a in changed), new_edge, turns
