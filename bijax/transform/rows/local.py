"""Operations on the rows of one device: which can be computed so, and with which parameters."""

import math
from collections.abc import Sequence
from typing import Any, Final

import jax
from jax import lax

from bijax.transform.rows.elementwise import NAMES
from bijax.transform.rows.library import ROWS
from bijax.transform.rows.value import Value

_WITHOUT_SHAPES: Final = (
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum expand_dims optimization_barrier reduce_and reduce_max"
    " reduce_min reduce_or reduce_prod reduce_sum reduce_xor sort squeeze transpose"
)
"""Operations on arrays that all hold rows, none of whose parameters is a shape."""

_WEIGHTS: Final = frozenset(
    {"bijax_joined_matmul", "bijax_k_split_matmul", "bijax_matmul", "conv_general_dilated", "dot_general"}
)
"""Products of rows with an array that belongs to none."""

_KERNELS: Final = frozenset(f"bijax_{name}" for name in ROWS.split())
_SHARDINGS: Final = ("out_sharding", "sharding")
_NOT_LOCAL: Final = frozenset({"device_put", "pbroadcast", "pvary", "reshard", "sharding_constraint"})


def rows_along(value: Value, shape: Sequence[int], rows: int) -> int | None:
    """Returns the axis of an array whose first digit is the row, if all rows are there and nothing has touched them.

    Args:
        value: What is known of the array.
        shape: Its shape.
        rows: Number of rows.
    """
    if value.rows is None or value.mixing or value.rows.first or len(value.rows.factors) != 1:
        return None
    (factor,) = value.rows.factors
    whole = factor.axis >= 0 and (factor.outer, factor.size, factor.weight) == (1, rows, 1)
    return factor.axis if whole and factor.stride * rows == shape[factor.axis] else None


def local_parameters(eqn: Any, operands: Sequence[int | None], results: Sequence[int], count: int) -> Any:
    """Returns the parameters of an operation for the rows of one device; None if it is not known to compute them.

    Args:
        eqn: The equation.
        operands: The axis of each operand that holds rows; None for arrays that belong to no row.
        results: The axis of each result that does.
        count: Number of devices.
    """
    # On explicit meshes some parameters name the sharding of the result.
    params: dict[str, Any] = {k: None if k in _SHARDINGS else v for k, v in eqn.params.items()}
    name = eqn.primitive.name
    shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]
    out = list(eqn.outvars[0].aval.shape)
    axis = results[0]
    out[axis] //= count
    shared = [shape for shape, rows in zip(shapes, operands, strict=True) if rows is None]
    if name in NAMES and name not in _NOT_LOCAL:
        return params
    if name in _WITHOUT_SHAPES.split():
        return None if shared else params
    if name in _WEIGHTS:
        return params if _is_product(name, params, operands, shapes) else None
    if name in _KERNELS:
        return None if any(len(shape) > 1 and shape[0] == shapes[0][0] for shape in shared) else params
    if name == "gather":
        batch = params["dimension_numbers"].operand_batching_dims
        if operands[0] is None:
            return None if batch else params
        return params if operands[0] in batch and operands[1] is not None else None
    if name == "concatenate":
        return params if params["dimension"] != axis else None
    if shared and any(shared):  # what is left takes scalars besides rows
        return None
    match name:
        case "broadcast_in_dim":
            return params | {"shape": tuple(out)}
        case "reshape" if params["dimensions"] is None:
            return params | {"new_sizes": tuple(out)}
        case "split" if params["axis"] != axis:
            return params
        case "pad" if tuple(params["padding_config"][axis]) == (0, 0, 0):
            return params
        case "slice":
            bounds = (
                params["start_indices"][axis],
                params["limit_indices"][axis],
                (params["strides"] or {axis: 1})[axis],
            )
            limits = list(params["limit_indices"])
            limits[axis] = out[axis]
            return params | {"limit_indices": tuple(limits)} if bounds == (0, shapes[0][axis], 1) else None
    return None


def _is_product(name: str, params: Any, operands: Sequence[int | None], shapes: Sequence[Any]) -> bool:
    """Returns whether a product multiplies rows by an array that belongs to none, or rows by their own arrays."""
    if name == "dot_general":
        batch = params["dimension_numbers"][1]
        return all(rows is not None or not axes for rows, axes in zip(operands, batch, strict=True))
    if name == "conv_general_dilated" and operands[0] != params["dimension_numbers"].lhs_spec[0]:
        return False  # rows are groups of features
    first, second, *more = operands
    if name == "bijax_joined_matmul":
        return first is not None and second is more[0] is None
    small = all(rows is not None or len(shape) < 2 for rows, shape in zip(more, shapes[2:], strict=True))
    return first is not None and second is None and small


def local_call(eqn: Any, params: Any, arrays: Sequence[Any], axis: int, size: int) -> list[jax.Array]:
    """Computes an equation for the rows of one device.

    Args:
        eqn: The equation.
        params: Its parameters, as `local_parameters` returns them.
        arrays: The operands.
        axis: The axis of the first result that holds rows.
        size: Its length on one device.
    """
    if eqn.primitive.name in {*NAMES, "concatenate"}:  # an array may have an entry for each row, all the same
        rank, whole = len(eqn.outvars[0].aval.shape), eqn.outvars[0].aval.shape[axis]
        arrays = [
            lax.slice_in_dim(x, 0, size, axis=axis)
            if jax.numpy.ndim(x) == rank and x.shape[axis] == whole != size
            else x
            for x in arrays
        ]
    found = eqn.primitive.bind(*arrays, **params)
    return list(found) if eqn.primitive.multiple_results else [found]


def elements(eqn: Any) -> int:
    """Returns the number of elements that an equation computes."""
    return sum(math.prod(v.aval.shape) for v in eqn.outvars)
