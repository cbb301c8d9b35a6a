"""Products of transposed matrices, without the transposed copy.

A model that multiplies by `w.T` requests a transpose and a product. XLA folds the two, but not through the barriers
around a kernel's tiles, and copying a large matrix would cost more than the product.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters.mlir import ir

from bijax.lax.dot_general import storage_may_change

Context = Any
Dot = tuple[Context, list[Any], dict[str, Any]]


def look_through_transposes(ctx: Context, operands: Sequence[Any], parameters: dict[str, Any]) -> Dot:
    """Replaces operands that are transposed matrices by the matrices, where that does not change bits.

    Args:
        ctx: Context of the lowering rule of `dot_general`.
        operands: Its two values.
        parameters: Its parameters.

    Returns:
        The same three for the product of the stored matrices.
    """
    contracting, batch = parameters["dimension_numbers"]
    avals, values, dims = list(ctx.avals_in), list(operands), [tuple(d) for d in contracting]
    if any(batch):
        return ctx, values, parameters
    for i, other in ((1, 0), (0, 1)):
        stored = _transposed(values[i])
        # If the other operand is stored by columns, the order differs: it is that of weight gradients.
        if stored is None or len(dims[i]) != 1 or dims[other] != (avals[other].ndim - 1,):
            continue
        columns = dims[i] == (0,)
        if columns or storage_may_change(avals[i].shape[dims[i][0]]):
            values[i], dims[i] = stored, (1 - dims[i][0],)
            avals[i] = jax.core.ShapedArray(avals[i].shape[::-1], avals[i].dtype)
            parameters = {**parameters, "dimension_numbers": (tuple(dims), batch), "as_columns": columns}
            break
    return ctx.replace(avals_in=avals), values, parameters


def _transposed(value: Any) -> Any:
    """Returns the matrix of which a value is the transpose, None if it is not a transpose."""
    owner = value.owner
    if not isinstance(owner, (ir.Operation, ir.OpView)) or owner.operation.name != "stablehlo.transpose":
        return None
    permutation: Any = owner.operation.attributes["permutation"]
    if list(permutation) != [1, 0]:
        return None
    return owner.operation.operands[0]
