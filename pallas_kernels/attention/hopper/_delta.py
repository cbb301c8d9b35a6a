"""The sum of output times cotangent of each query, which the gradient of a softmax needs."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.hopper.tile import ROWS, TILE, Arithmetic, add_lanes, add_to_lanes, filled, tiled


def delta(out: jax.Array, cotangent: jax.Array, *, chains: int, interpret: Any) -> jax.Array:
    """Returns the sums (B, N, T') of the products of rows, float32; T' is T rounded up to a multiple of 64.

    Args:
        out: (B, T, N, H), T a multiple of 8.
        cotangent: Of the same shape and dtype.
        chains: Interleaved chains of each of the four lanes of a row; see `SplitAttentionContract`.
        interpret: False, or parameters of Mosaic's interpreter.
    """
    batch, length, heads, size = out.shape
    across, dtype = -(-length // ROWS), out.dtype
    math = Arithmetic(interpret=bool(interpret))

    def kernel(out_ref: Any, cotangent_ref: Any, sums: Any, a: Any, b: Any, full: Any) -> None:
        tile, head, sequence = (lax.axis_index(name) for name in ("tile", "head", "sequence"))
        rows = pl.ds(tile * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(out_ref.at[sequence, rows, head], a, full)
        plgpu.copy_gmem_to_smem(cotangent_ref.at[sequence, rows, head], b, full)
        plgpu.barrier_wait(full)
        x, y = (plgpu.load(ref, layout=TILE).astype(jnp.float32) for ref in (a, b))
        nothing = filled((ROWS,), 0)
        total = add_lanes(add_to_lanes(nothing, nothing, math.product(x, y), chains, bool(interpret)), bool(interpret))
        sums.at[sequence, head, rows][...] = total

    launch = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, heads, across * ROWS), jnp.float32),
        grid=(batch, heads, across),
        grid_names=("sequence", "head", "tile"),
        kernel_name="attention_delta",
        scratch_types=[
            *[plgpu.SMEM((ROWS, size), dtype, transforms=tiled(dtype))] * 2,
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    sums: jax.Array = launch(out, cotangent)
    return sums
