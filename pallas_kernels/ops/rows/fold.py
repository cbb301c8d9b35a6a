"""Sums, products, maxima and minima along one axis by fixed trees, on any platform that JAX runs on."""

from typing import Final, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import RowContract
from pallas_kernels.parts.xla.accumulator import accumulator
from pallas_kernels.parts.xla.lanes import Combine, fold_lanes
from pallas_kernels.parts.xla.tiles import isolate
from pallas_kernels.parts.xla.total_order import from_ordered, largest, ordered_infinity, to_ordered

Fold = Literal["sum", "prod"]
Choice = Literal["max", "min"]

_FOLDS: Final[dict[str, tuple[Combine, int]]] = {"sum": (lax.add, 0), "prod": (lax.mul, 1)}


def fold_axis(x: jax.Array, *, fold: Fold, contract: RowContract) -> jax.Array:
    """Adds or multiplies along the middle axis.

    Nothing but additions (or multiplications) happens here, so the rows need no tiles: the bits are those of any other
    shape.

    Args:
        x: (A, R, B) of any floating dtype.
        fold: Whether to add or to multiply.
        contract: Order of the operations.

    Returns:
        (A, B) float32, or float64 for float64. A sum of zeros is +0, whatever their signs; the sum of nothing is 0,
        the product of nothing 1.

    Raises:
        UnsupportedError: If the dtype is not a floating one of 16, 32 or 64 bits.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> fold_axis(jnp.full((1, 3, 1), 2.0), fold="prod", contract=row_contract()).tolist()
        [[8.0]]
    """
    dtype = accumulator(f"reduce_{fold}", x.dtype)
    combine, unit = _FOLDS[fold]
    if 0 in x.shape:
        return jnp.full((x.shape[0], x.shape[2]), unit, dtype)
    total = _fold(combine, isolate(x)[0], unit, contract, dtype)
    if fold == "sum":
        total = jnp.where(total == 0, jnp.zeros((), dtype), total)
    return isolate(total)[0]


def choose_axis(x: jax.Array, *, choice: Choice, contract: RowContract) -> jax.Array:
    """Returns the largest or smallest element along the middle axis, which no order of comparisons changes.

    Args:
        x: (A, R, B) of a floating dtype of 16, 32 or 64 bits, float8_e3m4, float8_e4m3, float8_e4m3fn or float8_e5m2.
        choice: Which one.
        contract: Order of the comparisons; it fixes no bit.

    Returns:
        (A, B) of the dtype of `x`. It is nan where the elements hold one; -0 is smaller than +0; of nothing the maximum
        is -inf and the minimum +inf (the smallest and the largest number where a dtype has no infinities).

    Raises:
        UnsupportedError: If the dtype is none of these.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> choose_axis(jnp.array([[[1.0], [3.0]]]), choice="max", contract=row_contract()).tolist()
        [[3.0]]
    """
    smallest = choice == "min"
    if 0 in x.shape:
        return jnp.full((x.shape[0], x.shape[2]), largest(x.dtype) if smallest else -largest(x.dtype), x.dtype)
    ordered = to_ordered(*isolate(x), nan_first=smallest)
    unit = ordered_infinity(x.dtype, negative=not smallest)
    chosen = _fold(lax.min if smallest else lax.max, ordered, unit, contract, ordered.dtype)
    return isolate(from_ordered(chosen, x.dtype, nan_first=smallest))[0]


def _fold(combine: Combine, x: jax.Array, unit: int, contract: RowContract, dtype: jnp.dtype) -> jax.Array:
    """(A, R, B) to (A, B)."""
    a, r, b = x.shape
    return fold_lanes(combine, x.reshape(a, r) if b == 1 else x, unit, contract, dtype).reshape(a, b)
