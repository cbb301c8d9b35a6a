"""Quotients of columns by their row's scale, rounded to 8 bits, on a Hopper GPU and under Mosaic's interpreter.

A quotient is first rounded to float32, like a division, and then to 8 bits. With r = 1 / scale rounded, q = h * r is
corrected twice by the remainder h - q * scale, computed by a fused multiply-add: then q is the rounded quotient
(Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). A division takes twice
as many instructions. If the scale is small, both are multiplied by 2**64, so that no remainder is subnormal.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.contract import QuantizeContract
from pallas_kernels.parts.hopper.arithmetic import quotient, strided
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, with_element
from pallas_kernels.parts.ptx import FLOAT_QUOTIENT, INTEGER_QUOTIENT, LARGE_POWER, SMALL_SCALE
from pallas_kernels.parts.xla.narrow import round_quotient

_WORD: Final = 4  # bytes
_NUMBER: Final = plgpu.Layout.WG_SPLAT(())

_BYTES: Final = """{
    .reg .b32 low, high;
    prmt.b32 low, $1, $2, 0x0040;
    prmt.b32 high, $3, $4, 0x0040;
    prmt.b32 low, low, high, 0x5410;
    and.b32 $0, low, $5;
}"""
_E4M3: Final = """{
    .reg .b16 low, high;
    .reg .f32 a, b, c, d;
    .reg .b32 both;
    mov.b32 a, $1;
    mov.b32 b, $2;
    mov.b32 c, $3;
    mov.b32 d, $4;
    cvt.rn.satfinite.e4m3x2.f32 low, b, a;
    cvt.rn.satfinite.e4m3x2.f32 high, d, c;
    mov.b32 both, {low, high};
    and.b32 $0, both, $5;
}"""


def rounded_quotients(
    h: jax.Array, scale: jax.Array, used: jax.Array, contract: QuantizeContract, interpret: Any
) -> jax.Array:
    """Divides float32 columns by their row's scale, rounds to 8 bits and returns the bits as int8.

    Args:
        h: Columns, a multiple of 128, whose quotients are at most the contract's largest number.
        scale: At least 2**-126; if it is not finite, the columns become zeros.
        used: Whether the row is used; the columns of an unused row become zeros.
        contract: The format.
        interpret: Whether the interpreter runs the kernel.

    Returns:
        The columns, int8.
    """
    is_integer = contract.format == "int8"
    good = used & (jnp.abs(scale) < jnp.inf)
    if interpret:
        y = round_quotient(h, jnp.broadcast_to(scale, h.shape), contract)
        return jnp.where(good, y if is_integer else lax.bitcast_convert_type(y, jnp.int8), jnp.int8(0))
    power = jnp.where(scale < SMALL_SCALE, LARGE_POWER, jnp.float32(1))
    divisor = jnp.where(good, scale * power, jnp.float32(1))
    reciprocal = quotient(jnp.float32(1), divisor, interpret)
    mask = jnp.where(good, jnp.int32(-1), jnp.int32(0))
    layout = strided(h.shape[0])
    each, pack = (INTEGER_QUOTIENT, _BYTES) if is_integer else (FLOAT_QUOTIENT, _E4M3)

    @inline(layout, _NUMBER, _NUMBER, _NUMBER, _NUMBER, result=held(h.shape, layout, jnp.int8))
    def narrow(h: Any, *numbers: Any) -> Any:
        *of_row, mask = (n.registers.item() for n in numbers)
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        registers = h.registers.copy()
        width = ir.VectorType(registers.item().type).shape[0]
        bits = [
            mgpu.utils.inline_ptx(each, element(registers.item(), i), *of_row, result_types=i32) for i in range(width)
        ]
        words = llvm.mlir_undef(ir.VectorType.get((-(-width // _WORD),), i32))
        for i in range(0, width, _WORD):
            four = (bits[i : i + _WORD] * _WORD)[:_WORD]
            word = mgpu.utils.inline_ptx(pack, *four, mask, result_types=i32)
            words = with_element(words, i // _WORD, word)
        found = vector.bitcast(ir.VectorType.get((-(-width // _WORD) * _WORD,), i8), words)
        if width < _WORD:
            found = vector.extract_strided_slice(ir.VectorType.get((width,), i8), found, [0], [width], [1])
        registers[0] = found
        return fragmented(registers, h.layout, signed=True)

    return narrow(h, power, divisor, reciprocal, mask)
