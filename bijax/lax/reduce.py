"""Reductions over any axes, with the operands and parameters of JAX's own primitives."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax

from bijax.core.contracts import run
from pallas_kernels.contract import row_contract
from pallas_kernels.parts.xla.row_major import row_major
from pallas_kernels.rows.fold import Choice, Fold, choose_axes, choose_axis, fold_axis


def reduce_sum(operand: jax.Array, *, axes: Sequence[int], out_sharding: Any = None, on_gpu: bool = False) -> jax.Array:
    """Adds along axes, in float32 (float64 for float64), in the order of `pallas_kernels.contract.RowContract`.

    Args:
        operand: Array of any shape, float32, bfloat16, float16 or float64.
        axes: Axes to add along, in any order; the order does not matter.
        out_sharding: Not used.
        on_gpu: Whether the program is for a GPU. The bits are the same.

    Returns:
        An array of the dtype of `operand` without the axes, rounded once; the bits of `bijax.sum`.

    Raises:
        UnsupportedError: If the dtype is not one of the four.

    Guarantee: row-invariant. (Rows are the elements of one result.)

    Example:
        >>> reduce_sum(jax.numpy.ones((2, 300)), axes=(1,)).tolist()
        [300.0, 300.0]
    """
    del out_sharding
    return _fold(operand, axes, "sum", on_gpu)


def reduce_prod(
    operand: jax.Array, *, axes: Sequence[int], out_sharding: Any = None, on_gpu: bool = False
) -> jax.Array:
    """Multiplies along axes, as `reduce_sum` adds.

    Guarantee: row-invariant. (Rows are the elements of one result.)

    Example:
        >>> reduce_prod(jax.numpy.full((2, 3), 2.0), axes=(1,)).tolist()
        [8.0, 8.0]
    """
    del out_sharding
    return _fold(operand, axes, "prod", on_gpu)


def reduce_max(operand: jax.Array, *, axes: Sequence[int], out_sharding: Any = None, on_gpu: bool = False) -> jax.Array:
    """Returns the maxima along axes: nan where the elements hold a nan, +0 rather than -0.

    Args:
        operand: Array of any shape and of any floating dtype.
        axes: Axes along which to choose.
        out_sharding: Not used.
        on_gpu: As for `reduce_sum`.

    Returns:
        An array of the dtype of `operand` without the axes.

    Guarantee: row-invariant. (Rows are the elements of one result.)

    Example:
        >>> reduce_max(jax.numpy.arange(6.0).reshape(2, 3), axes=(1,)).tolist()
        [2.0, 5.0]
    """
    del out_sharding
    return _choose(operand, axes, "max", on_gpu)


def reduce_min(operand: jax.Array, *, axes: Sequence[int], out_sharding: Any = None, on_gpu: bool = False) -> jax.Array:
    """Returns the minima along axes: nan where the elements hold a nan, -0 rather than +0; see `reduce_max`.

    Guarantee: row-invariant. (Rows are the elements of one result.)

    Example:
        >>> reduce_min(jax.numpy.arange(6.0).reshape(2, 3), axes=(0,)).tolist()
        [0.0, 1.0, 2.0]
    """
    del out_sharding
    return _choose(operand, axes, "min", on_gpu)


def _fold(operand: jax.Array, axes: Sequence[int], fold: Fold, on_gpu: bool) -> jax.Array:
    if not axes:
        return operand
    if on_gpu:
        arranged, axis = _merged(operand, axes)
        options: dict[str, Any] = {"contract": row_contract(), "axis": axis, "fused": True}
        total: jax.Array = run(fold_axis, arranged, fold=fold, **options)
        return total.astype(operand.dtype)
    arranged, shape = _arrange(operand, axes)
    return run(fold_axis, arranged, fold=fold, contract=row_contract()).reshape(shape).astype(operand.dtype)


def _choose(operand: jax.Array, axes: Sequence[int], choice: Choice, on_gpu: bool) -> jax.Array:
    if not axes:
        return operand
    if on_gpu:
        return choose_axes(operand, choice=choice, axes=axes)
    # The order does not matter, so axes that are not adjacent need no transposed copy.
    for axis in sorted(axes, reverse=True):
        if axis + 1 not in axes:
            run = [a for a in range(axis + 1) if all(b in axes for b in range(a, axis + 1))]
            arranged, shape = _arrange(operand, run)
            operand = choose_axis(arranged, choice=choice, contract=row_contract()).reshape(shape)
    return operand


def _merged(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, int]:
    """Returns `x` with several axes merged into one, and the index of that axis.

    The other dimensions are not merged, since XLA:GPU would copy the array into the layout of the merged ones.
    """
    axes = sorted(axes)
    if axes[-1] - axes[0] >= len(axes):
        kept = [a for a in range(x.ndim) if a not in axes]
        x = x.transpose((*kept, *axes))
        axes = range(len(kept), x.ndim)
    before, along, after = (x.shape[i:j] for i, j in itertools.pairwise((0, axes[0], axes[-1] + 1, x.ndim)))
    return x.reshape(*before, math.prod(along), *after), len(before)


def _arrange(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns `x` as (A, R, B), with the elements along the axes in row-major order as R, and the result's shape."""
    axes = sorted(axes)
    kept = [a for a in range(x.ndim) if a not in axes]
    shape = tuple(x.shape[a] for a in kept)
    if axes[-1] - axes[0] >= len(axes):
        x = row_major(x.transpose((*kept, *axes)))
        axes = range(len(kept), x.ndim)
    edges = (0, axes[0], axes[-1] + 1, x.ndim)
    before, length, after = (math.prod(x.shape[i:j]) for i, j in itertools.pairwise(edges))
    return x.reshape(before, length, after), shape
