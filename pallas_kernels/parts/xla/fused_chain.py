"""Products of matrices as chains of fused multiply-adds on a CPU.

XLA:CPU gives a dot to its own loops or to a library by the sizes of the dot, and these add in different orders: they
split the sum if it is long, if there are few columns, or if the columns are no whole number of vectors and there are
many rows. Sizes for which both add in ascending order, each product fused with its sum, are made by padding columns and
by splitting long sums. `tests/attention/test_chains.py` compares them with chains in NumPy.
"""

import functools
import math
import operator
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.xla.tiles import DimensionNumbers, isolated_dot

_FEW_ROWS: Final = 32
_LEAST_COLUMNS: Final = 32
_COLUMNS: Final = 64
_MOST_COLUMNS: Final = 256


def fused_dot(a: jax.Array, b: jax.Array, dimensions: DimensionNumbers, *, block: int) -> jax.Array:
    """Returns `lax.dot_general` of float32 arrays with one contracted axis, as ascending chains of fused multiply-adds.

    Args:
        a: Left operand.
        b: Right operand, with one free axis.
        dimensions: As in `lax.dot_general`.
        block: Elements of one chain, at most 256; the sums of longer ones are added in ascending order.

    Example:
        >>> fused_dot(jnp.ones((2, 3, 4)), jnp.ones((5, 2, 4)), (((2,), (2,)), ((0,), (1,))), block=128).shape
        (2, 3, 5)
    """
    (((left,), (right,)), (batch, other_batch)) = dimensions
    (free,) = (i for i in range(b.ndim) if i != right and i not in other_batch)
    rows = math.prod(n for i, n in enumerate(a.shape) if i != left and i not in batch)
    columns = b.shape[free]
    padded = max(columns, _LEAST_COLUMNS) if rows <= _FEW_ROWS else -(-columns // _COLUMNS) * _COLUMNS
    if padded > columns:
        b = jnp.pad(b, [(0, padded - columns if i == free else 0) for i in range(b.ndim)])

    def columns_of(first: int, last: int) -> jax.Array:
        y = _part(b, first, last, free)
        ends = ((k, min(k + block, a.shape[left])) for k in range(0, max(1, a.shape[left]), block))
        products = (
            isolated_dot(_part(a, *end, left), _part(y, *end, right), dimensions, precision=lax.Precision.HIGHEST)
            for end in ends
        )
        return functools.reduce(operator.add, products)

    parts = [columns_of(i, min(i + _MOST_COLUMNS, padded)) for i in range(0, padded, _MOST_COLUMNS)]
    result = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
    return result if padded == columns else result[..., :columns]


def _part(x: jax.Array, first: int, last: int, axis: int) -> jax.Array:
    return x if last - first == x.shape[axis] else lax.slice_in_dim(x, first, last, axis=axis)
