"""The merge of the splits that decode computed in different blocks, by the formula of the contract.

A block takes four rows of a sequence, a warp each, and walks their splits upwards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_kernels.contract import LEAST
from pallas_kernels.ops.attention.hopper._online import Stats, merge_stats, result
from pallas_kernels.parts.hopper.tile import Arithmetic, across, store_few

MERGED_ROWS: Final = 4
"""Rows of a block."""

_TOGETHER: Final = 16  # splits


def _layout(size: int) -> Any:
    """Returns the layout of (4, size) in which a warp has a row, and a lane neighbouring columns of it."""
    width = next(width for width in (128, 64, 32) if size % width == 0)
    tiling = fragmented_array.Tiling(((MERGED_ROWS, width), (width // 32,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def merge(
    values: jax.Array,
    stats: jax.Array,
    lengths: tuple[jax.Array, jax.Array, jax.Array],
    sinks: jax.Array | None,
    splits_of: Callable[[Any, Any, Any], tuple[Any, Any]],
    *,
    rows: int,
    group: int,
    dtype: Any,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Merges the splits of each row.

    Args:
        values: (B, splits, R, H) float32, the weighted values of each split; R a multiple of 4.
        stats: (B, splits, 2, R) float32, their maxima and totals.
        lengths: Position of the first query, queries and keys of each sequence, (B,) int32 each.
        sinks: (B or 1, R) float32, a score of each row in units of ln(2) that belongs to no key; None without sinks.
        splits_of: Maps them to the first and the end of the splits that were computed.
        rows: Rows of a key head: query by query, and in a query the heads of its group.
        group: Query heads to a key head.
        dtype: Dtype of the outputs.
        interpret: False, or parameters of Mosaic's interpreter.

    Returns:
        The outputs (B, R, H) of `dtype` and the log-sum-exp (B, R), float32.
    """
    batch, _, padded, size = values.shape
    layout, together = _layout(size), min(_TOGETHER, values.shape[1])
    math = Arithmetic(layout, bool(interpret))

    def kernel(values_ref: Any, stats_ref: Any, offsets_ref: Any, queries_ref: Any, keys_ref: Any, *refs: Any) -> None:
        *sinks_ref, out_ref, lse_ref = refs
        sequence, part = lax.axis_index("sequence"), pl.ds(lax.axis_index("part") * MERGED_ROWS, MERGED_ROWS)
        queries = queries_ref[sequence]
        begin, stop = splits_of(offsets_ref[sequence], queries, keys_ref[sequence])
        load = partial(plgpu.load, optimized=False)
        row_layout = layout.reduce(1)

        def read(first: Any) -> list[Any]:
            """Starts to read some splits from one on; behind the last one it is read again."""
            splits = [jnp.minimum(first + j, jnp.maximum(stop - 1, 0)) for j in range(together)]
            return [
                (
                    *(load(stats_ref.at[sequence, split, i, part], layout=row_layout) for i in range(2)),
                    load(values_ref.at[sequence, split, part], layout=layout),
                )
                for split in splits
            ]

        def several(i: Any, carry: Any) -> Any:
            """Takes some splits, while the next ones are read; those behind the last one change nothing."""
            before, total, there = carry
            first = begin + i * together
            following = read(first + together)
            for j, (maximum, sums, found) in enumerate(there):
                inside = jnp.full((MERGED_ROWS,), first + j, jnp.int32) < jnp.full((MERGED_ROWS,), stop, jnp.int32)
                split = Stats(jnp.where(inside, maximum, LEAST), jnp.where(inside, sums, 0.0))
                found = jnp.where(across(inside, size), found, 0.0)
                before, kept, taken = merge_stats(before, split, math)
                total = math.fused(total, across(kept, size), math.product(found, across(taken, size)))
            return before, total, following

        def full(shape: tuple[int, ...], value: float) -> jax.Array:
            filled: jax.Array = plgpu.layout_cast(
                jnp.full(shape, value, jnp.float32), layout if len(shape) == 2 else row_layout
            )
            return filled

        start = (Stats(full((MERGED_ROWS,), LEAST), full((MERGED_ROWS,), 0)), full((MERGED_ROWS, size), 0), read(begin))
        merged, total, _ = lax.fori_loop(0, lax.div(stop - begin + (together - 1), together), several, start)
        row = part.start + plgpu.broadcasted_iota(jnp.int32, (MERGED_ROWS, size), 0, layout=layout)
        query = lax.div(lax.rem(row, jnp.full_like(row, rows)), jnp.full_like(row, group))
        sink = None
        if sinks is not None:
            sink = load(sinks_ref[0].at[sequence if sinks.shape[0] > 1 else 0, part], layout=row_layout)
        out, lse = result(total, merged, query < queries, sink, math)
        store_few(out_ref.at[sequence, part], out.astype(dtype), bool(interpret))
        store_few(lse_ref.at[sequence, part], lse, bool(interpret))

    launch = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((batch, padded, size), dtype),
            jax.ShapeDtypeStruct((batch, padded), jnp.float32),
        ],
        # The last axis of the grid is the long one: the others end at 65535.
        grid=(padded // MERGED_ROWS, batch),
        grid_names=("part", "sequence"),
        kernel_name="attention_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    out, lse = launch(values, stats, *lengths, *([] if sinks is None else [sinks]))
    return out, lse
