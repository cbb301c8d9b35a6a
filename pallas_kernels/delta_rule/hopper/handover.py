"""Tiles that a warpgroup passes to another one as they are in registers, through shared memory.

Ordinary stores and loads, so a barrier at which all threads arrive is enough: operands of wgmma in shared memory would
need a fence between the two kinds of access, which takes as long as a small product.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, with_element
from pallas_kernels.parts.hopper.tile import ROWS, TILE, WARPGROUP, i32, thread_of_warpgroup

_WORDS: Final = 4  # of one instruction


def pass_registers(tile: jax.Array, ref: Any, interpret: bool) -> None:
    """Writes a tile (64, 64) to shared memory for `take_registers`: 16 bytes of all threads after one another.

    There is no barrier: readers wait on one at which all threads arrive afterwards.
    """
    if interpret:
        ref[...] = tile
        plgpu.commit_smem()
        return

    @inline(TILE, plgpu.RefType())
    def write(tile: Any, ref: Any) -> None:
        words = [word for register in tile.registers.flat for word in _words(register)]
        base = _own(ref)
        for at in range(0, len(words), _WORDS):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [base, *words[at : at + _WORDS]],
                f"st.shared.v4.b32 [$0 + {at * 4 * WARPGROUP}], {{$1, $2, $3, $4}};",
                "r,r,r,r,r,~{memory}",
                asm_dialect=0,
                has_side_effects=True,
            )

    write(tile, ref)


def take_registers(ref: Any, dtype: Any, interpret: bool) -> jax.Array:
    """Reads what `pass_registers` has written."""
    if interpret:
        read: jax.Array = ref[...]
        plgpu.commit_smem()
        return read

    @inline(plgpu.RefType(), result=held((ROWS, ROWS), TILE, dtype))
    def load(ref: Any) -> Any:
        layout, word = mgpu.WGMMA_LAYOUT, ir.IntegerType.get_signless(32)
        element_type = ir.MemRefType(ref.type).element_type
        count = mgpu.utils.bitwidth(element_type) // 16  # words of two numbers
        kind, raw = ir.VectorType.get((2,), element_type), ir.VectorType.get((count,), word)
        base, words = _own(ref), []
        for at in range(0, ROWS * ROWS * count // 256, _WORDS):
            struct = llvm.inline_asm(
                llvm.StructType.get_literal([word] * _WORDS),
                [base],
                f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {at * 4 * WARPGROUP}];",
                "=r,=r,=r,=r,r,~{memory}",
                asm_dialect=0,
                has_side_effects=True,
            )
            words += [llvm.extractvalue(word, struct, [i]) for i in range(_WORDS)]
        registers = np.empty(ROWS * ROWS // 256, dtype=object)
        for at in range(registers.size):
            register = llvm.mlir_undef(raw)
            for i in range(count):
                register = with_element(register, i, words[at * count + i])
            registers[at] = vector.bitcast(kind, register)
        return fragmented(registers.reshape(layout.registers_shape((ROWS, ROWS))), layout)

    return load(ref)


def _words(register: Any) -> list[Any]:
    """Returns a register of two numbers as words of 32 bits."""
    count = mgpu.utils.bitwidth(ir.VectorType(register.type).element_type) // 16
    words = vector.bitcast(ir.VectorType.get((count,), ir.IntegerType.get_signless(32)), register)
    return [element(words, i) for i in range(count)]


def _own(ref: Any) -> Any:
    """Returns the address of a thread's 16 bytes of a tile."""
    base = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))
    return arith.addi(base, arith.muli(thread_of_warpgroup(), i32(16)))
