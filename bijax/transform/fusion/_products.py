"""Products of a row program's results, which are then written as bfloat16 limbs.

A float32 result that only products with bfloat16 take, such as the gradient of logits, need not be written, read again
and split into bfloat16 limbs: the row program writes the limbs, and the products take them.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from jax import lax
from jax.extend.core import Primitive

from bijax.dispatch.precision import precision_name
from bijax.lax.product_of_parts import ProductOfParts
from bijax.transform.fusion._regions import Program
from pallas_kernels.contract import PartsChunkContract, ProductSpec

Equation = Any

PRODUCT: Final = Primitive("bijax_product_of_parts")
"""Replaces a product of a row program's result in a program being lowered."""


def products_of(v: Any, program: Program, wanted: Callable[[int], bool]) -> dict[int, ProductOfParts]:
    """Returns the products that take a float32 value, by index; none if it has other uses.

    Args:
        v: The value.
        program: The program.
        wanted: Whether the equation at an index should be made invariant.
    """
    places = program.users.get(v, [])
    if v in program.outvars or v.aval.dtype.name != "float32":
        return {}
    found = {at: _product(v, program.equations[at]) for at in places if wanted(at)}
    every = {at: product for at, product in found.items() if product is not None}
    alike = len({product.count for product in every.values()}) == 1
    return every if alike and len(every) == len(places) else {}


def _product(v: Any, eqn: Equation) -> ProductOfParts | None:
    if eqn.primitive.name != "dot_general" or eqn.invars[0] is eqn.invars[1]:
        return None
    side = 0 if eqn.invars[0] is v else 1
    other, (out,) = eqn.invars[1 - side].aval, eqn.outvars
    contracting, batch = eqn.params["dimension_numbers"]
    precision = eqn.params["precision"]
    if other.dtype.name != "bfloat16" or 0 in other.shape or out.aval.dtype.name == "float64":
        return None
    if isinstance(precision, lax.DotAlgorithmPreset):
        if precision.accumulation_type not in (None, np.float32):
            return None
    elif not (precision is None or isinstance(precision, tuple)):
        return None
    # In the order of the left operand's dimensions, which is that of the sums.
    pairs = sorted(zip(*contracting, strict=True))
    own, others = (tuple(int(pair[i]) for pair in pairs) for i in (side, 1 - side))
    entries, rank = len(batch[side]), len(v.aval.shape)
    rows = v.aval.shape[:-1]
    over_rows = own == tuple(range(entries, rank - 1))
    if tuple(batch[side]) != tuple(range(entries)) or not (over_rows or own == (rank - 1,)):
        return None
    count = ProductSpec(("float32", "bfloat16"), out.aval.dtype.name, precision=precision_name(precision)).parts
    if math.prod(rows[entries:]) % PartsChunkContract(count).rows:
        return None
    free = [d for d in range(len(other.shape)) if d not in others and d not in batch[1 - side]]
    if over_rows and (not free or max(free) < max(others)):
        return None  # if the other operand is stored by rows, the order is that of a product by weights
    together = tuple(map(int, batch[1 - side]))
    return ProductOfParts(count, tuple(rows), together, others, over_rows, side == 0, out.aval.dtype.name)
