"""Registers of arrays that a warpgroup holds: each holds a number or a vector of numbers."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.parts.hopper.inline import fragmented, held, inline


def element(register: Any, index: int) -> Any:
    """Returns an element of a vector."""
    return vector.extract(register, dynamic_position=[], static_position=_at(index))


def with_element(register: Any, index: int, number: Any) -> Any:
    """Returns a vector with one element replaced."""
    return vector.insert(number, register, dynamic_position=[], static_position=_at(index))


def count(register: Any) -> int:
    """Returns how many numbers a register holds."""
    return ir.VectorType(register.type).shape[0] if isinstance(register.type, ir.VectorType) else 1


def number_of(register: Any, index: int = 0) -> Any:
    """Returns an element of a register, which may be a vector."""
    return element(register, index) if isinstance(register.type, ir.VectorType) else register


def with_number(register: Any, number: Any, index: int = 0) -> Any:
    """Returns a register, which may be a vector, with one element replaced."""
    return with_element(register, index, number) if isinstance(register.type, ir.VectorType) else number


def joined(numbers: Sequence[Any]) -> Any:
    """Returns a vector of float32 numbers."""
    found = llvm.mlir_undef(ir.VectorType.get((len(numbers),), ir.F32Type.get()))
    for i, number in enumerate(numbers):
        found = with_element(found, i, number)
    return found


def elementwise(ptx: str, operands: Sequence[Any], pinned: bool = False) -> Any:
    """Applies float32 instructions to registers that each hold a number or a vector.

    Args:
        ptx: The instructions; $0 is the result, $1, $2, ... are the operands.
        operands: The registers.
        pinned: Whether LLVM keeps the instructions where they are, instead of moving them to where the result is used.
    """

    def apply(*numbers: Any) -> Any:
        return mgpu.utils.inline_ptx(ptx, *numbers, result_types=ir.F32Type.get(), has_side_effects=pinned)

    result = operands[0]
    if not isinstance(result.type, ir.VectorType):
        return apply(*operands)
    for i in range(ir.VectorType(result.type).shape[0]):
        result = with_element(result, i, apply(*(element(o, i) for o in operands)))
    return result


def _at(index: int) -> Any:
    return ir.DenseI64ArrayAttr.get([index])


def apply_ptx(ptx: str, layout: Any, *operands: jax.Array, pinned: bool = False) -> jax.Array:
    """Applies instructions to every element of float32 arrays that a warpgroup holds.

    Args:
        ptx: The instructions; $0 is the result, $1, $2, ... are the operands.
        layout: How the warpgroup holds the operands, and the result.
        *operands: Arrays of the same shape.
        pinned: As in `elementwise`.
    """
    like = held(operands[0].shape, layout)

    @inline(*(layout,) * len(operands), result=like)
    def apply(*operands: Any) -> Any:
        registers = operands[0].registers.copy()
        for at in range(registers.size):
            registers.flat[at] = elementwise(ptx, [o.registers.flat[at] for o in operands], pinned)
        return fragmented(registers, operands[0].layout)

    return apply(*operands)
