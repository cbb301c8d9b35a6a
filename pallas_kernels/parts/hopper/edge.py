"""Loads and stores, by a warpgroup, of partial blocks of 128 columns in which only the first few are valid."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

from pallas_kernels.parts.hopper.arithmetic import WARPGROUP, strided
from pallas_kernels.parts.hopper.inline import fragmented, held, inline


def load_edge(row: Any, column: Any, valid: int, interpret: Any) -> jax.Array:
    """Loads the columns from `column` on as (128,) float32; those from the `valid`-th on are -inf and not read.

    Args:
        row: Reference to a row in memory, (C,).
        column: First column of the block; at least `valid` follow.
        valid: Number of valid columns.
        interpret: Whether the interpreter runs the kernel.
    """
    if interpret:
        block = row[pl.ds(column, valid)].astype(jnp.float32)
        return lax.pad(block, jnp.float32(-jnp.inf), [(0, WARPGROUP - valid, 0)])

    columns = held((WARPGROUP,), strided(WARPGROUP))

    @inline(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), result=columns)
    def load(row: Any, column: Any) -> Any:
        f32, thread = ir.F32Type.get(), _thread()
        exists = arith.cmpi(arith.CmpIPredicate.ult, thread, mgpu.c(valid, thread.type))
        # Threads without a valid column read the block's first one.
        at = arith.addi(column.registers.item(), arith.select(exists, thread, mgpu.c(0, thread.type)))
        value = memref.load(row, [arith.index_cast(ir.IndexType.get(), at)])
        if value.type != f32:
            value = arith.extf(f32, value)
        value = arith.select(exists, value, mgpu.c(float("-inf"), f32))
        registers = mgpu.FragmentedArray.splat(value, (WARPGROUP,)).registers.copy().reshape(1)
        registers[0] = vector.broadcast(ir.VectorType.get((1,), f32), value)
        return fragmented(registers, mgpu.WGStridedFragLayout((WARPGROUP,), 1))

    return load(row, jnp.int32(column))


def store_edge(row: Any, column: Any, valid: int, block: jax.Array, interpret: Any) -> None:
    """Stores the first `valid` columns of a (128,) block to a row in memory, from `column` on."""
    if interpret:
        row[pl.ds(column, valid)] = block[:valid]
        return

    @inline(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), strided(WARPGROUP))
    def store(row: Any, column: Any, block: Any) -> None:
        thread = _thread()
        exists = arith.cmpi(arith.CmpIPredicate.ult, thread, mgpu.c(valid, thread.type))
        branch = scf.IfOp(exists)  # type: ignore[call-arg]
        with ir.InsertionPoint(branch.then_block):
            at = arith.index_cast(ir.IndexType.get(), arith.addi(column.registers.item(), thread))
            value = vector.extract(
                block.registers.item(), dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])
            )
            memref.store(value, row, [at])
            scf.yield_([])

    store(row, jnp.int32(column), block)


def _thread() -> Any:
    """Index of the thread in its warpgroup."""
    return arith.remui(mgpu.utils.thread_idx(), mgpu.c(WARPGROUP, ir.IntegerType.get_signless(32)))
