"""Instructions used by the fences of every platform."""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters.mlir import ir

Value = Any


def positions(shaped: Any) -> Value:
    """Returns the position of each element in an array, counted over all dimensions, as unsigned integers.

    Args:
        shaped: Type of an array of floating-point numbers; the integers have the same width.
    """
    element = shaped.element_type
    integers = ir.IntegerType.get_unsigned(element.width)
    first = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)
    flat = hlo.iota(ir.RankedTensorType.get([math.prod(shaped.shape)], integers), first)
    return hlo.reshape(ir.RankedTensorType.get(shaped.shape, integers), flat)


def repeated(value: Value, shape: Sequence[int]) -> Value:
    """Returns the value with the last dimensions of a shape, in which it may have length 1 or which it may lack."""
    held = ir.RankedTensorType(value.type)
    if tuple(held.shape) == tuple(shape):
        return value
    return spread(value, ir.RankedTensorType.get(shape, held.element_type))


def spread(value: Value, shaped: Any) -> Value:
    """Returns the value with the last dimensions of an array's type, as `repeated` does; a scalar is broadcast."""
    last = range(shaped.rank - ir.RankedTensorType(value.type).rank, shaped.rank)
    return hlo.broadcast_in_dim(shaped, value, ir.DenseI64ArrayAttr.get(list(last)))
