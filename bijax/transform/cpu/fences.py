"""Stopping XLA:CPU's rewrites of element-wise code, in the lowered program.

XLA and LLVM see through everything but an unknown value, so a zero is derived from such a value
(`pallas_kernels.parts.xla.opaque` explains why a constant after a barrier is not enough). It costs an integer
operation per element and no pass over memory, since the fused loop remains one loop.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from bijax.transform.rules.values import positions, spread
from pallas_kernels.parts.xla.opaque import emit_opaque_number, emit_opaque_zero

Value = Any


_ARITHMETIC: Final = frozenset(f"stablehlo.{name}" for name in ("add", "divide", "dot_general", "multiply", "subtract"))
_MOVES: Final = frozenset(f"stablehlo.{name}" for name in ("broadcast_in_dim", "reshape", "slice", "transpose"))
_OF_ZERO: Final = ("broadcast_in_dim", "convert", "shift_right_logical", "optimization_barrier")


def fence_product(product: Value) -> Value:
    """Returns a floating-point value that cannot be contracted with a sum.

    LLVM contracts a product and a sum into a fused multiply-add where it finds both in a loop body; whether it does
    depends on loop unrolling and hoisting, and so on the shape.
    """
    shaped = ir.RankedTensorType(product.type)
    element: Any = shaped.element_type
    integers = ir.RankedTensorType.get(shaped.shape, ir.IntegerType.get_unsigned(element.width))
    bits = hlo.bitcast_convert(integers, product)
    zero = spread(_as_wide_as(bits, emit_opaque_zero()), integers)
    # Not xor: two in a row would cancel.
    return hlo.bitcast_convert(shaped, hlo.or_(bits, zero))


def hide_constant(constant: Value) -> Value:
    """Returns a value of any element type that no compiler can identify as constant.

    Hide it only once: a second xor with the same zero would cancel the first.
    """
    shaped = ir.RankedTensorType(constant.type)
    if isinstance(shaped.element_type, ir.ComplexType):
        return hlo.complex(*(fence_product(part) for part in (hlo.real(constant), hlo.imag(constant))))
    if isinstance(shaped.element_type, ir.IntegerType):
        # Not `or`, which of bits that are all ones, such as a true bool, would still be constant.
        return hlo.xor(constant, spread(_as_wide_as(constant, emit_opaque_zero()), shaped))
    return fence_product(constant)


def alone(values: Sequence[Value]) -> list[Value]:
    """Returns values after a barrier, so that they are computed in a separate loop."""
    return list(hlo.OptimizationBarrierOp(list(values)).results)


def without_subnormal_numbers(value: Value) -> Value:
    """Returns the floating-point values as arithmetic sees them, with subnormal numbers as zeros.

    XLA:CPU runs with subnormal numbers flushed to zero, but LLVM does not know that and may compare their bits. So the
    processor multiplies by an opaque one. A value that was just computed holds none.
    """
    if _is_computed(value):
        return value
    shaped = ir.RankedTensorType(value.type)
    scalar = ir.RankedTensorType.get([], shaped.element_type)
    one = hlo.constant(ir.DenseElementsAttr.get_splat(scalar, ir.FloatAttr.get(shaped.element_type, 1.0)))
    return hlo.multiply(value, spread(fence_product(one), shaped))


def _is_computed(value: Value) -> bool:
    """Returns whether a floating-point value is computed by arithmetic, which flushes subnormal numbers to zero."""
    while True:
        if (inside := _inside_of_fence(value)) is not None:
            value = inside
        elif _name(value) in _MOVES:
            value = value.owner.operands[0]
        else:
            return _name(value) in _ARITHMETIC


def _inside_of_fence(value: Value) -> Value | None:
    """Returns the argument of `fence_product`, if that returned the value."""
    if _name(value) != "stablehlo.bitcast_convert":
        return None
    bits = value.owner.operands[0]
    if _name(bits) != "stablehlo.or" or _name(bits.owner.operands[0]) != "stablehlo.bitcast_convert":
        return None
    zero = bits.owner.operands[1]
    while _name(zero).removeprefix("stablehlo.") in _OF_ZERO:
        zero = zero.owner.operands[0]
    return bits.owner.operands[0].owner.operands[0] if _name(zero) == "stablehlo.replica_id" else None


def _name(value: Value) -> str:
    """Returns the name of the operation that makes a value, "" for parameters."""
    return getattr(value.owner, "name", "")


def hide(value: Value) -> Value:
    """Returns a floating-point value whose origin XLA cannot see.

    XLA turns division by a broadcast or constant into a product with its reciprocal, but not where the broadcast
    repeats nothing, as in a batch of one. It turns x / y / z into x / (y * z), but not where something is between
    the two, which may depend on the batch too.

    The value is selected by a condition that always holds, and the alternative differs from element to element: XLA
    computes a select between two broadcasts once and broadcasts the result, and drops a select between equal values.
    """
    shaped = ir.RankedTensorType(value.type)
    mask = ir.RankedTensorType.get(shaped.shape, ir.IntegerType.get_signless(1))
    # Not from the opaque zero: LLVM would infer 0 where the comparison holds, and see through `fence_product`.
    number, none = emit_opaque_number(), mlir.ir_constant(np.uint32(2**31 - 1))
    true = hlo.compare(number, none, hlo.ComparisonDirectionAttr.get("NE"))
    places = positions(shaped)
    other = hlo.or_(places, spread(_as_wide_as(places, number), places.type))
    return hlo.select(spread(true, mask), value, hlo.bitcast_convert(shaped, other))


def _as_wide_as(integers: Value, number: Value) -> Value:
    """Returns a number as a scalar of the element type of an array of integers."""
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(integers.type).element_type)
    return number if number.type == scalar else hlo.convert(scalar, number)
