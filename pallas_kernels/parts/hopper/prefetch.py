"""Prefetches into the L2 cache of a GPU."""

from typing import Any, Final

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup

_THREADS: Final = 128
_LINE_BYTES: Final = 128


def prefetch(ref: Any, row: Any, column: Any, shape: tuple[int, int]) -> None:
    """Starts to copy a window of a matrix in GPU memory into the L2 cache; a warpgroup calls it.

    Args:
        ref: The matrix, whose rows are contiguous.
        row: First row of the window.
        column: First column.
        shape: Rows and columns of the window, which lies inside of the matrix.
    """
    (rows, columns), whole = shape, ref.shape[1]
    line = max(1, min(columns, _LINE_BYTES // jnp.dtype(ref.dtype).itemsize))
    lines = -(-columns // line)

    @inline(plgpu.RefType(()), *[plgpu.Layout.WG_SPLAT(())] * 2)
    def start(ref: Any, row: Any, column: Any) -> None:
        row, column = (number.registers.item() for number in (row, column))
        kind, base, thread = ir.MemRefType(ref.type).element_type, mgpu.utils.memref_ptr(ref), thread_of_warpgroup()
        for first in range(0, rows * lines, _THREADS):
            index = arith.addi(thread, i32(first))
            at = arith.muli(arith.addi(row, arith.divui(index, i32(lines))), i32(whole))
            at = arith.addi(arith.addi(at, column), arith.muli(arith.remui(index, i32(lines)), i32(line)))
            place = mgpu.utils.getelementptr(base, [at], kind)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, index, i32(rows * lines))):
                mgpu.utils.inline_ptx("prefetch.global.L2 [$0];", place, has_side_effects=True)

    start(ref, jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32))
