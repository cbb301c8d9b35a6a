"""Products of what a row program computes, which is then written in the parts that they multiply.

A float32 result that nothing but products by bfloat16 takes, as the gradient of logits, need not be written, read
again and cut into bfloat16 parts: the row program writes the parts, and the products take them.
"""

import math
from collections.abc import Callable
from typing import Any, Final

from jax.extend.core import Primitive

from bijax.dispatch.matmul import Product, parts_of
from bijax.dispatch.precision import precision_name
from bijax.lax.product_of_parts import ProductOfParts
from bijax.transform._row_regions import Program
from pallas_kernels.contract import PartsChunkContract

Equation = Any

PRODUCT: Final = Primitive("bijax_product_of_parts")
"""Stands in a program that is lowered for a product of a row program's result."""


def products_of(v: Any, program: Program, wanted: Callable[[int], bool]) -> dict[int, ProductOfParts]:
    """Returns the products that take a float32 value, by their places; none if something else takes it too.

    Args:
        v: The value.
        program: The program.
        wanted: Whether the equation at a place is to be made invariant.
    """
    places = program.users.get(v, [])
    rows = v.aval.shape[:-1]
    if v in program.outvars or v.aval.dtype.name != "float32":
        return {}
    found = {at: _product(v, program.equations[at]) for at in places if wanted(at)}
    every = {at: product for at, product in found.items() if product is not None}
    counts = {product.count for product in every.values()}
    whole = len(counts) == 1 and math.prod(rows) % PartsChunkContract(*counts).rows == 0
    return every if whole and len(every) == len(places) else {}


def _product(v: Any, eqn: Equation) -> ProductOfParts | None:
    if eqn.primitive.name != "dot_general" or eqn.invars[0] is eqn.invars[1]:
        return None
    side = 0 if eqn.invars[0] is v else 1
    other, (out,) = eqn.invars[1 - side].aval, eqn.outvars
    contracting, batch = eqn.params["dimension_numbers"]
    precision = eqn.params["precision"]
    if any(batch) or other.dtype.name != "bfloat16" or 0 in other.shape or out.aval.dtype.name == "float64":
        return None
    if not (precision is None or isinstance(precision, tuple)):
        return None
    rank = len(v.aval.shape)
    pairs = sorted(zip(contracting[side], contracting[1 - side], strict=True))
    own, others = (tuple(int(pair[i]) for pair in pairs) for i in (0, 1))
    free = [d for d in range(len(other.shape)) if d not in others]
    over_rows = own == tuple(range(rank - 1)) and own != (rank - 1,)
    if over_rows:
        # Where the other operand is stored by rows, the order is that of a product by weights.
        if not free or max(free) < max(others):
            return None
    elif own != (rank - 1,):
        return None
    count = parts_of(Product(out.aval.dtype.name, precision=precision_name(precision)))
    return ProductOfParts(count, tuple(v.aval.shape[:-1]), others, over_rows, side == 0, out.aval.dtype.name)
