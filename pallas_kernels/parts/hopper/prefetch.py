"""Asking for rows of GPU memory before they are needed, on a Hopper GPU."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup

_ALIGN = 16  # bytes


def prefetch_row(source: Any, row: Any, wanted: jax.Array, member: Any, members: int, interpret: Any) -> None:
    """Asks the L2 cache to fetch a warpgroup's part of a row.

    No register and no shared memory waits for it, so memory is busy while the row before it is computed.

    Args:
        source: Rows of whole 16 bytes.
        row: The row.
        wanted: Whether the row exists.
        member: The warpgroup's number.
        members: How many warpgroups there are.
        interpret: Whether the interpreter runs the kernel, which has no caches.
    """
    if interpret:
        return
    number = plgpu.Layout.WG_SPLAT(())
    size = source.shape[-1] * source.dtype.itemsize
    share = -(-size // (members * _ALIGN)) * _ALIGN

    @inline(plgpu.RefType(), number, number, number)
    def prefetch(source: Any, row: Any, wanted: Any, member: Any) -> None:
        i64 = ir.IntegerType.get_signless(64)
        first = arith.muli(member.registers.item(), i32(share))
        left = arith.minsi(i32(share), arith.subi(i32(size), first))
        mine = arith.cmpi(arith.CmpIPredicate.eq, thread_of_warpgroup(), i32(0))
        some = arith.cmpi(arith.CmpIPredicate.sgt, left, i32(0))
        exists = arith.cmpi(arith.CmpIPredicate.ne, wanted.registers.item(), i32(0))
        with mgpu.when(arith.andi(mine, arith.andi(some, exists))):
            offset = arith.muli(arith.extsi(i64, row.registers.item()), mgpu.c(size, i64))
            base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(source))
            address = arith.addi(base, arith.addi(offset, arith.extsi(i64, first)))
            mgpu.utils.inline_ptx("cp.async.bulk.prefetch.L2.global [$0], $1;", address, left, has_side_effects=True)

    numbers = (jnp.asarray(x, jnp.int32) for x in (row, wanted, member))
    prefetch(source, *numbers)
