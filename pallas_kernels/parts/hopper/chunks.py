"""Tiles in memory, each thread's numbers in its own chunks: it reads what it wrote, so no barrier is needed."""

from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, joined
from pallas_kernels.parts.hopper.tile import TILE, WARPGROUP, i32, thread_of_warpgroup

_CHUNK: Final = 4  # numbers that a thread moves at once


def put_away(tile: jax.Array, ref: Any, interpret: Any) -> None:
    """Stores a tile in chunks.

    Args:
        tile: (64 m, 8 n) float32.
        ref: As many elements, (size,) float32 of shared or of GPU memory.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        ref[...] = tile.reshape(-1)
        return

    @inline(TILE, plgpu.RefType())
    def store(tile: Any, ref: Any) -> None:
        pairs = list(tile.registers.flat)
        for at, place in enumerate(places(ref, len(pairs))):
            llvm.store(joined([element(pairs[2 * at + i // 2], i % 2) for i in range(_CHUNK)]), place)

    store(tile, ref)


def take_back(ref: Any, shape: tuple[int, int], interpret: Any) -> jax.Array:
    """Loads a float32 tile of `shape` that `put_away` stored."""
    if interpret:
        tile: jax.Array = ref[...].reshape(shape)
        return tile

    @inline(plgpu.RefType(), result=held(shape, TILE))
    def load(ref: Any) -> Any:
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for at, place in enumerate(places(ref, registers.size)):
            registers.flat[2 * at], registers.flat[2 * at + 1] = read(place)
        return fragmented(registers, layout)

    return load(ref)


def places(ref: Any, pairs: int) -> Iterator[Any]:
    """Yields where this thread's chunks are, two pairs of numbers in each; the threads of a warp write side by side."""
    f32 = ir.F32Type.get()
    offset = arith.muli(thread_of_warpgroup(), i32(_CHUNK))
    base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [offset], f32)
    for at in range(pairs // 2):
        yield mgpu.utils.getelementptr(base, [at * _CHUNK * WARPGROUP], f32)


def read(place: Any) -> list[Any]:
    """Returns the two pairs of numbers of a chunk."""
    chunk = llvm.load(ir.VectorType.get((_CHUNK,), ir.F32Type.get()), place)
    return [joined([element(chunk, 2 * half + i) for i in range(2)]) for half in range(2)]
