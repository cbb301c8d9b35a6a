"""Sums, products, maxima and minima along one axis by fixed trees, on any platform that JAX runs on."""

import functools
from collections.abc import Sequence
from typing import Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.contract import RowContract
from pallas_kernels.parts.xla.accumulator import accumulator
from pallas_kernels.parts.xla.lanes import Combine, apart, fold_lanes
from pallas_kernels.parts.xla.tiles import in_one_loop, isolate, next_power_of_two
from pallas_kernels.parts.xla.total_order import from_ordered, largest, ordered_infinity, to_ordered

Fold = Literal["sum", "prod"]
Choice = Literal["max", "min"]

_SHORT: Final = 64
"""Maximum length of an axis along which a CPU combines a small array in one kernel."""

_SMALL: Final = 2**13
"""Maximum size of such an array: for a larger one, several faster passes take less time than to start them."""

_FOLDS: Final[dict[str, tuple[Combine, int]]] = {"sum": (lax.add, 0), "prod": (lax.mul, 1)}


def fold_axis(x: jax.Array, *, fold: Fold, contract: RowContract, axis: int = 1, fused: bool = False) -> jax.Array:
    """Adds or multiplies along an axis.

    There are only additions (or multiplications), so the rows need no tiles: the bits do not depend on the shape.

    Args:
        x: Array of any floating dtype: (A, R, B), or of any shape.
        fold: Whether to add or to multiply.
        contract: Order of the operations.
        axis: Which axis, non-negative.
        fused: Whether the computation of the array may be fused with the first additions, as on a GPU, where fences
            preserve the bits of both.

    Returns:
        The array without the axis, (A, B), float32, or float64 for float64. A sum of zeros is +0, whatever their
        signs; the sum of nothing is 0, the product of nothing 1.

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
        return jnp.full((*x.shape[:axis], *x.shape[axis + 1 :]), unit, dtype)
    total = _fold(combine, x if fused else apart(x), unit, contract, dtype, axis, fused)
    if fold == "sum":
        total = jnp.where(total == 0, jnp.zeros((), dtype), total)
    return isolate(total)[0]


def choose_axis(x: jax.Array, *, choice: Choice, contract: RowContract) -> jax.Array:
    """Returns the largest or smallest element along the middle axis, independent of the order of comparisons.

    Args:
        x: (A, R, B) of a floating dtype of 16, 32 or 64 bits, float8_e3m4, float8_e4m3, float8_e4m3fn or float8_e5m2.
        choice: Which one.
        contract: Order of the comparisons; it does not affect the bits.

    Returns:
        (A, B) of the dtype of `x`. It is nan if any element is nan; -0 is smaller than +0. If R is 0, the maximum is
        -inf and the minimum +inf (the smallest and largest number of a dtype without infinities).

    Raises:
        UnsupportedError: If the dtype is not one of these.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> choose_axis(jnp.array([[[1.0], [3.0]]]), choice="max", contract=row_contract()).tolist()
        [[3.0]]
    """
    smallest = choice == "min"
    if 0 in x.shape:
        return jnp.full((x.shape[0], x.shape[2]), largest(x.dtype) if smallest else -largest(x.dtype), x.dtype)
    (x,) = isolate(x)
    as_integers = functools.partial(to_ordered, nan_first=smallest)
    ordered = as_integers(x) if _is_small(x, axis=1) else in_one_loop(as_integers, x)
    unit = ordered_infinity(x.dtype, negative=not smallest)
    chosen = _fold(lax.min if smallest else lax.max, ordered, unit, contract, ordered.dtype, axis=1, fused=False)
    return isolate(from_ordered(chosen, x.dtype, nan_first=smallest))[0]


def choose_axes(x: jax.Array, *, choice: Choice, axes: Sequence[int]) -> jax.Array:
    """Equal to `choose_axis`, along any axes, with XLA's own integer reduction.

    On a GPU it takes one pass over the array, fused with the preceding code. (On a CPU it would be a scalar loop.)

    Args:
        x: As for `choose_axis`, of any shape.
        choice: Which one.
        axes: Axes along which to choose.

    Returns:
        The array without the axes.

    Raises:
        UnsupportedError: If the dtype is not supported by `choose_axis`.

    Guarantee: row-invariant.

    Example:
        >>> choose_axes(jnp.array([[1.0, -0.0], [3.0, jnp.nan]]), choice="max", axes=(1,)).tolist()
        [1.0, nan]
    """
    smallest = choice == "min"
    ordered = to_ordered(x, nan_first=smallest)
    # The initial value of the maximum is -inf, not the smallest integer, which is not a number.
    unit = np.asarray(ordered_infinity(x.dtype, negative=not smallest), ordered.dtype)
    chosen = lax.reduce(ordered, unit, lax.min if smallest else lax.max, tuple(axes))
    return from_ordered(chosen, x.dtype, nan_first=smallest)


def _fold(
    combine: Combine, x: jax.Array, unit: int, contract: RowContract, dtype: jnp.dtype, axis: int, fused: bool
) -> jax.Array:
    """Returns the array without the axis."""
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    if x.shape[axis + 1 :] == (1,):
        x = x.reshape(x.shape[:-1])
    if not fused and _is_small(x, axis):
        return _fold_short(combine, x.astype(dtype), axis).reshape(shape)
    return fold_lanes(combine, x, unit, contract, dtype, axis, fused).reshape(shape)


def _is_small(x: jax.Array, axis: int) -> bool:
    return x.shape[axis] <= _SHORT and x.size <= _SMALL


def _fold_short(combine: Combine, x: jax.Array, axis: int) -> jax.Array:
    """Combines the lanes of a row that is shorter than a block, in one kernel.

    It is the tree of `fold_lanes` without the padding, which XLA would compute in a kernel of its own. A neutral
    element changes at most a subnormal number or the sign of a zero, which the last step or its user makes equal.
    """
    lanes = [lax.slice_in_dim(x, i, i + 1, axis=axis) for i in range(x.shape[axis])]
    while len(lanes) > 1:
        half = next_power_of_two(len(lanes)) // 2
        high = lanes[half:]
        lanes = [*map(combine, lanes, high), *lanes[len(high) : half]]
    return lanes[0]
