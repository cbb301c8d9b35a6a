"""Tiles spilled to memory, each thread's numbers in its own chunks."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.parts.hopper.chunks import places, read, take_back
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, elementwise, joined, number_of
from pallas_kernels.parts.hopper.tile import ROW, ROWS, TILE, i32, thread_of_warpgroup

_AT_ONCE: Final = 4  # chunks that are read before the first of them is written


def spill(tile: jax.Array, kept: jax.Array, ref: Any, begins: jax.Array, interpret: bool) -> None:
    """Replaces the spilled tile by fma(spilled, kept, tile).

    Proceeds a few chunks at a time: there are no registers for a second tile next to scores and weights.

    Args:
        tile: (64, n) float32.
        kept: The same, factors of the spilled tile.
        ref: (64 * n,) float32 of shared or of GPU memory.
        begins: Whether nothing is spilled yet; then zeros are used.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        ref[...] = (jnp.where(begins, 0.0, ref[...].reshape(tile.shape)) * kept + tile).reshape(-1)
        return

    @inline(TILE, TILE, plgpu.RefType(), plgpu.Layout.WG_SPLAT)
    def update(tile: Any, kept: Any, ref: Any, begins: Any) -> None:
        begins = begins.registers.item()
        values, factors = (list(x.registers.flat) for x in (tile, kept))
        chunks = list(places(ref, len(values)))

        def write(old: list[Any], first: int) -> None:
            for at, chunk in enumerate(old, first):
                two = [elementwise("fma.rn.f32 $0, $1, $2, $3;", [pair, factors[i], values[i]]) for i, pair in chunk]
                llvm.store(joined([element(pair, i) for pair in two for i in range(2)]), chunks[at])

        zero = joined([mgpu.c(0.0, ir.F32Type.get())] * 2)
        with mgpu.when(begins):
            write([[(2 * at, zero), (2 * at + 1, zero)] for at in range(len(chunks))], 0)
        with mgpu.when(arith.xori(begins, mgpu.c(1, ir.IntegerType.get_signless(1)))):
            for first in range(0, len(chunks), _AT_ONCE):
                old = [
                    [(2 * at + i, pair) for i, pair in enumerate(read(chunks[at]))]
                    for at in range(first, min(first + _AT_ONCE, len(chunks)))
                ]
                write(old, first)

    update(tile, kept, ref, begins)


def reload(ref: Any, columns: int, interpret: bool) -> jax.Array:
    """Loads a float32 tile of 64 rows that `spill` spilled; no barrier is needed."""
    return take_back(ref, (ROWS, columns), interpret)


def spill_rows(numbers: Sequence[jax.Array], ref: Any, interpret: bool) -> None:
    """Spills numbers for rows (64,), float32, to shared memory (n, 64); see `reload_rows`."""
    if interpret:
        for at, x in enumerate(numbers):
            ref.at[at][...] = x
        return

    @inline(*[ROW] * len(numbers), plgpu.RefType())
    def store(*given: Any) -> None:
        *numbers, ref = given
        places = _rows(ref)
        for x, pair in zip(numbers, places, strict=True):
            for register, place in zip(x.registers.flat, pair, strict=True):
                llvm.store(number_of(register), place)

    store(*numbers, ref)


def reload_rows(ref: Any, interpret: bool) -> tuple[jax.Array, ...]:
    """Loads numbers that `spill_rows` spilled; a thread reads only its own writes, so no barrier is needed."""
    count = ref.shape[0]
    if interpret:
        return tuple(ref[at] for at in range(count))
    result = held((ROWS,), ROW)

    @inline(plgpu.RefType(), result=(result,) * count)
    def load(ref: Any) -> Any:
        layout, f32 = ROW.to_mgpu(), ir.F32Type.get()
        found = []
        for pair in _rows(ref):
            registers = np.empty(layout.registers_shape((ROWS,)), dtype=object)
            for at, place in enumerate(pair):
                registers.flat[at] = llvm.load(ir.VectorType.get((1,), f32), place)
            found.append(fragmented(registers, layout))
        return tuple(found)

    return load(ref)


def _rows(ref: Any) -> list[tuple[Any, Any]]:
    """Returns where the numbers of this thread's two rows are; the threads that share rows have the same places."""
    f32, thread = ir.F32Type.get(), thread_of_warpgroup()
    warp, lane = arith.divui(thread, i32(32)), arith.remui(thread, i32(32))
    row = arith.addi(arith.muli(warp, i32(16)), arith.divui(lane, i32(4)))
    base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [row], f32)
    count = ir.MemRefType(ref.type).shape[0]
    return [
        (mgpu.utils.getelementptr(base, [at * ROWS], f32), mgpu.utils.getelementptr(base, [at * ROWS + 8], f32))
        for at in range(count)
    ]
