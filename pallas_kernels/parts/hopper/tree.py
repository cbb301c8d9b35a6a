"""The tree that reduces the 128 lanes of a warpgroup, on a Hopper GPU and under Mosaic's interpreter.

Lanes at distances 64 and 32 are combined through shared memory, nearer lanes by shuffles.
"""

from typing import Any, Final, Literal

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.parts.hopper.arithmetic import WARPGROUP, strided
from pallas_kernels.parts.hopper.inline import held, inline

Combine = Literal["add", "max"]
Fold = Literal["add", "max", "greatest", "largest"]
"""The reductions of a row: "greatest" is the maximum, propagating nan, and "largest" the same for non-negative
numbers."""

_WARP: Final = 32


def combine_lanes(lanes: jax.Array, scratch: Any, combine: Combine, interpret: Any) -> jax.Array:
    """Reduces 128 lanes by the halving tree.

    Args:
        lanes: (128,) float32.
        scratch: Shared memory, (128,) float32. Consecutive calls must use different scratch.
        combine: "add", or "max" (the larger, a if neither is larger).
        interpret: Whether the interpreter runs the kernel.

    Returns:
        A float32 scalar, held by every thread.
    """
    if interpret:
        while lanes.shape[0] > 1:
            half = lanes.shape[0] // 2
            low, high = lanes[:half], lanes[half:]
            lanes = low + high if combine == "add" else jnp.where(low > high, low, high)
        return lanes[0]
    number = held((), plgpu.Layout.WG_SPLAT(()))

    @inline(strided(WARPGROUP), plgpu.RefType(), result=number)
    def tree(lanes: Any, scratch: Any) -> Any:
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(WARPGROUP, i32))
        own = vector.extract(lanes.registers.item(), dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
        memref.store(own, scratch, [arith.index_cast(index, thread)])
        mgpu.warpgroup_barrier()
        near = arith.remui(thread, mgpu.c(_WARP, i32))
        at = [arith.index_cast(index, arith.addi(near, mgpu.c(i * _WARP, i32))) for i in range(4)]
        quarter = [memref.load(scratch, [i]) for i in at]
        total = join(join(quarter[0], quarter[2]), join(quarter[1], quarter[3]))
        distance = _WARP // 2
        while distance:
            total = join(total, mgpu.utils.shfl_bfly(total, distance))
            distance //= 2
        return mgpu.FragmentedArray.splat(total, ())

    def join(a: Any, b: Any) -> Any:
        if combine == "add":
            return arith.addf(a, b)
        return arith.select(arith.cmpf(arith.CmpFPredicate.OGT, a, b), a, b)

    return tree(lanes, scratch)
