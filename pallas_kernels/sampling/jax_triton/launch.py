"""Draws tokens on NVIDIA GPUs from Ampere on."""

from typing import Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import GUMBEL, GumbelContract, honour
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.xla.tiles import next_power_of_two
from pallas_kernels.sampling.jax_triton.kernels import draw_kernel, merge_kernel
from pallas_kernels.sampling.schedule.jax_triton import STEP_COLUMNS, DrawTile, draw_tile
from pallas_kernels.target import Target

NO_TOKEN: Final = -1


@in_32_bits
def draw(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    target: Target,
    contract: GumbelContract = GUMBEL,
    tile: DrawTile | None = None,
) -> jax.Array:
    """Draws a token from each row.

    Args:
        logits: (R, V) float32; -inf for tokens that must not be drawn.
        temperature: (R,) float32, at least 0; at 0 (or below 2**-64) the first maximum of the logits is drawn.
        seeds: (R, 2) uint32.
        positions: (R,) uint32.
        target: The GPU that the program is lowered for.
        contract: How noise is generated and added.
        tile: Columns and warps of a program; chosen from the shape by default. The bits do not depend on it.

    Returns:
        (R,) int32, the lowest token among equals; -1 for a row that contains nan or only -inf.

    Raises:
        UnsupportedError: If the contract is not supported.

    Guarantee: row-invariant.
    """
    honour("draw", contract, GUMBEL)
    rows, width = logits.shape
    if not rows:
        return jnp.zeros(0, jnp.int32)
    tile = tile or draw_tile(rows, width)
    parts = -(-width // (tile.steps * STEP_COLUMNS))
    sizes = {"WIDTH": width, "PARTS": parts}
    parts_found = launch(
        draw_kernel,
        logits,
        temperature,
        seeds,
        positions,
        target=target,
        out=[jax.ShapeDtypeStruct((rows, parts), jnp.float32), jax.ShapeDtypeStruct((rows, parts), jnp.int32)],
        grid=(rows * parts,),
        warps=tile.warps,
        stages=1,
        fuses=False,
        constants=sizes | {"STEPS": tile.steps},
    )
    (tokens,) = launch(
        merge_kernel,
        *parts_found,
        target=target,
        out=[jax.ShapeDtypeStruct((rows,), jnp.int32)],
        grid=(rows,),
        warps=1,
        stages=1,
        fuses=False,
        constants=sizes | {"SLOTS": next_power_of_two(parts)},
    )
    return tokens
