"""The merge of the splits that decode computed in different blocks, by the formula of the contract.

A block takes four rows of a sequence, one per warp. First the factors of up to 128 splits are computed in parallel,
with neighbouring splits per lane: a factor needs only the largest score up to its split, and a maximum is independent
of order. Then the warp loops over the splits in ascending order, with one sum per step. TMA fetches many values at a
time: when one sequence is decoded, a block is alone on its multiprocessor and could not hide its loads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._merge_loop import MERGED_ROWS, TOGETHER, WARP, WIDEST, Form, MergeLoop
from pallas_kernels.attention.hopper._online import of_queries, result
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.registers import count, with_number
from pallas_kernels.parts.hopper.tile import Arithmetic, i32, store_few, thread_of_warpgroup


class Setup(Protocol):
    """What a merge knows before it runs; see `_setup.Setup`."""

    @property
    def queries(self) -> int:
        """Queries of each sequence."""

    @property
    def group(self) -> int:
        """Query heads per key head."""

    @property
    def unit(self) -> float:
        """Unit of 8-bit values; 1 for others."""

    @property
    def interpret(self) -> Any:
        """False, or parameters of Mosaic's interpreter."""

    def leads_outside(self, table: Any, sequence: Any, keys: Any) -> jax.Array | None:
        """Returns whether the page table of a sequence leads outside of the cache; None without pages."""


def merge(
    values: jax.Array,
    stats: jax.Array,
    call: AttentionCall,
    *,
    setup: Setup,
    rows: int,
    dtype: Any,
    splits_of: Callable[[Any, Any, Any], tuple[Any, Any]],
    room: tuple[int, int] | None = None,
    place_of: Callable[[Any, Any], tuple[Any, Any]] = lambda sequence, row: (sequence, row),
    result_of: Callable[..., tuple[jax.Array, jax.Array]] = result,
    together: int = TOGETHER,
) -> tuple[jax.Array, jax.Array]:
    """Merges the splits of each row.

    Args:
        values: (B, splits, R, H) float32, the weighted values of each split; R a multiple of 4.
        stats: (B, 2, R, `padded_splits(splits)`) float32, their maxima and totals.
        call: The limits, the page table, the sinks, (B or 1, R) float32, per row, and the scales of 8-bit values are
            used.
        setup: The static parameters of the launch.
        rows: Rows of a key head: query-major, then the heads of its group.
        dtype: Dtype of the outputs.
        splits_of: Maps the limits of a sequence to the first and the end of its computed splits.
        room: B and R of the results, if they differ from `values` and `stats`.
        place_of: Maps a sequence of the results and the first of four rows to their position in `values` and `stats`.
        result_of: Gives outputs and the log-sum-exp of what was merged, as `result` does.
        together: Most splits whose values are copied together, whether or not they were computed; a power of two.

    Returns:
        The outputs (B, R, H) of `dtype` and the log-sum-exp (B, R), float32.
    """
    batch, splits, padded, size = values.shape
    batch, padded = room or (batch, padded)
    slices = -(-size // WIDEST)
    form = Form(splits, size // slices, bool(setup.interpret), together)
    own = call.only("page_table", "sinks", "value_scale")
    own = replace(own, query=None, key=None, value=None)  # type: ignore[arg-type]
    math = Arithmetic(form.layout, form.interpret)

    def kernel(
        values_ref: Any, stats_ref: Any, given: Any, out_ref: Any, lse_ref: Any, copied: Any, arrived: Any
    ) -> None:
        sequence, part = lax.axis_index("sequence"), pl.ds(lax.axis_index("part") * MERGED_ROWS, MERGED_ROWS)
        numbers = Lengths(given.limits)
        queries = numbers.queries[sequence]
        keys = numbers.keys[sequence]
        span = splits_of(numbers.offsets[sequence], queries, keys)
        place, first = place_of(sequence, part.start)
        if slices > 1:
            columns = pl.ds(lax.axis_index("slice") * form.size, form.size)
            values_ref, out_ref = values_ref.at[:, :, :, columns], out_ref.at[:, :, columns]
        key_loop = MergeLoop.of(
            form, values_ref, stats_ref, (place, pl.ds(first, MERGED_ROWS)), span, (copied, arrived)
        )
        key_loop.begin_copies()
        # The other loads overlap with them.
        wrong = setup.leads_outside(given.page_table, sequence, keys)
        factors = None
        if given.value_scale is not None:
            of_sequence = given.value_scale.at[sequence if given.value_scale.shape[0] > 1 else 0]
            like = form.full((MERGED_ROWS, form.size), 0)
            factors = math.scaled(_of_heads(of_sequence, part.start, rows, like, form), 1 / setup.unit)
        stats, total = key_loop.run()
        query = jnp.int32(0)
        if setup.queries > 1:
            row = part.start + plgpu.broadcasted_iota(jnp.int32, (MERGED_ROWS,), 0, layout=form.rows)
            query = lax.div(lax.rem(row, jnp.full_like(row, rows)), jnp.full_like(row, setup.group))
        stats = of_queries(stats, query, queries, wrong)
        sink = None
        if given.sinks is not None:
            of_rows = given.sinks.at[sequence if given.sinks.shape[0] > 1 else 0, part]
            sink = plgpu.load(of_rows, layout=form.rows, optimized=False)
        out, lse = result_of(total, stats, sink, math)
        out = out.astype(dtype)
        if factors is not None:
            out = math.product(out.astype(jnp.float32), factors).astype(dtype)
        store_few(out_ref.at[sequence, part], out, form.interpret)
        store_lse = partial(store_few, lse_ref.at[sequence, part], lse, form.interpret)
        store_lse() if slices == 1 else pl.when(lax.axis_index("slice") == 0)(store_lse)

    out, lse = launch(
        "attention_merge",
        kernel,
        [jax.ShapeDtypeStruct((batch, padded, size), dtype), jax.ShapeDtypeStruct((batch, padded), jnp.float32)],
        {"part": padded // MERGED_ROWS, "sequence": batch} | ({"slice": slices} if slices > 1 else {}),
        form.scratch(),
        parameters=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=setup.interpret,
    )(values, stats, own)
    return out, lse


def _of_heads(factors: Any, first: Any, rows: int, like: jax.Array, form: Form) -> jax.Array:
    """Returns the scales of each row's key head (4, H); rows after the last head use its scales.

    Args:
        factors: (K, H) float32 in GPU memory.
        first: Index of the first row.
        rows: Rows of a key head.
        like: (4, H) float32.
        form: The static parameters.
    """
    heads, size = factors.shape
    if form.interpret:
        of_rows = (jnp.minimum(lax.div(first + i, rows), heads - 1) for i in range(MERGED_ROWS))
        return jnp.stack([factors.at[head][...] for head in of_rows])
    result = held((MERGED_ROWS, size), form.layout)
    arguments = plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), form.layout

    @inline(*arguments, result=result)
    def load(factors: Any, first: Any, like: Any) -> Any:
        registers, f32 = like.registers.copy(), ir.F32Type.get()
        thread, (first,) = thread_of_warpgroup(), first.registers.flat
        warp, lane = arith.divui(thread, i32(WARP)), arith.remui(thread, i32(WARP))
        head = arith.minsi(arith.divui(arith.addi(first, warp), i32(rows)), i32(heads - 1))
        start, base = arith.muli(head, i32(size)), mgpu.utils.memref_ptr(factors)
        for at, register in enumerate(registers.flat):
            width = count(register)
            column = arith.addi(arith.muli(lane, i32(width)), i32(at * width * WARP))
            for i in range(width):
                place = mgpu.utils.getelementptr(base, [arith.addi(start, arith.addi(column, i32(i)))], f32)
                register = with_number(register, llvm.load(f32, place), i)
            registers.flat[at] = register
        return fragmented(registers, like.layout)

    return load(factors, jnp.int32(first), like)
