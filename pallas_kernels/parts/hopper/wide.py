"""Rows of GPU memory in vectors of 16 bytes or less, also in the memory of another GPU.

Mosaic GPU knows no alignment of a reference to another GPU's memory, so its own loads and stores there have one element
each: a thread that has 16 elements of 16 bits loads 16 times, and a warp moves whole sectors for 2 bytes of each.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.parts.hopper.inline import fragmented, held, inline

_GLOBAL = 1
"""The address space of GPU memory."""


def load_wide(ref: Any, *, columns: int, dtype: Any, vector: int) -> Any:
    """Returns a row (columns,) of a reference that `plgpu.remote_ref` may have made.

    Args:
        ref: The row, which begins at a multiple of a vector.
        columns: Its length, a multiple of 128 vectors.
        dtype: Its dtype.
        vector: Elements that a thread loads at once, 16 bytes at most.
    """

    @inline(plgpu.RefType(), result=held((columns,), _layout(columns, vector), dtype))
    def load(source: Any) -> Any:
        layout = fragmented_array.WGStridedFragLayout((columns,), vector)
        kind = ir.VectorType.get((vector,), ir.MemRefType(source.type).element_type)
        registers = np.empty(layout.registers_shape((columns,)), dtype=object)
        for number, pointer in enumerate(_pointers(source, layout)):
            registers[number] = llvm.load(kind, pointer, alignment=_bytes(kind))
        return fragmented(registers, layout)

    return load(ref)


def store_wide(ref: Any, value: Any, *, columns: int, vector: int) -> None:
    """Stores a row (columns,) to a reference that `plgpu.remote_ref` may have made, as `load_wide` loads it."""

    @inline(plgpu.RefType(), _layout(columns, vector))
    def store(target: Any, row: Any) -> None:
        for register, pointer in zip(row.registers.flat, _pointers(target, row.layout), strict=True):
            llvm.store(register, pointer, alignment=_bytes(register.type))

    store(ref, value)


def _layout(columns: int, vector: int) -> Any:
    return plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)


def _pointers(ref: Any, layout: Any) -> Any:
    """Yields where each of a thread's vectors is."""
    element = ir.MemRefType(ref.type).element_type
    start = llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), utils.memref_ptr(ref))
    for index in layout.linear_thread_idxs():
        offset = arith.index_cast(ir.IntegerType.get_signless(64), index)
        yield utils.getelementptr(start, [offset], element)


def _bytes(vector: Any) -> int:
    kind = ir.VectorType(vector)
    return int(kind.shape[0]) * int(utils.bitwidth(kind.element_type)) // 8
