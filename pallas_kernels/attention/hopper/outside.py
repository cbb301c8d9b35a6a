"""Whether indices in GPU memory lead outside of an array."""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.parts.hopper.inline import held, inline
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup

_WARP: Final = 32
_STEP: Final = 8 * _WARP  # entries that are loaded at once: a loop would wait for each load


def any_outside(table: Any, row: Any, entries: Any, size: int, interpret: bool) -> jax.Array:
    """Returns whether one of the first entries of a row is not in [0, size). Each warp looks at all of them.

    Args:
        table: (B, n) int32, in GPU memory.
        row: int32.
        entries: int32, up to n.
        size: Of what the entries are indices of.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        found = table.at[row][...]
        wrong = (found < 0) | (found >= size)
        wrong = wrong & (lax.iota(jnp.int32, table.shape[1]) < entries)
        return jnp.any(wrong)
    number = plgpu.Layout.WG_SPLAT(())
    result = held((), number, jnp.int32)

    @inline(plgpu.RefType(), number, number, result=result)
    def look(table: Any, row: Any, entries: Any) -> Any:
        index, word = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        row, end = arith.index_cast(index, row.registers.item()), entries.registers.item()
        lane = arith.remui(thread_of_warpgroup(), i32(_WARP))

        @mgpu.fori(arith.divui(arith.addi(end, i32(_STEP - 1)), i32(_STEP)), i32(0))  # type: ignore[untyped-decorator]
        def wrong(i: Any, found: Any) -> Any:
            first, last = arith.addi(arith.muli(i, i32(_STEP)), lane), arith.subi(end, i32(1))
            entries = (arith.minsi(arith.addi(first, i32(at)), last) for at in range(0, _STEP, _WARP))
            for number in [memref.load(table, [row, arith.index_cast(index, entry)]) for entry in entries]:
                # Negative ones are large without a sign.
                outside = arith.cmpi(arith.CmpIPredicate.uge, number, i32(size))
                found = arith.ori(found, arith.extui(word, outside))
            return found

        votes = mgpu.utils.inline_ptx(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
            wrong.result,
            result_types=word,
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(votes, (), is_signed=True)

    return look(table, *(jnp.asarray(x, jnp.int32) for x in (row, entries))) != 0
