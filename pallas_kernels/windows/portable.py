"""Sums, maxima and minima over sliding windows, and the selections of pooling, on any platform that JAX runs on.

A window is reduced axis by axis, in ascending order along each. Every step is a correctly rounded addition or an exact
comparison, so the bits do not depend on the number of windows; there are no products to contract with additions.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import FoldContract, honour
from pallas_kernels.parts.xla.accumulator import accumulator
from pallas_kernels.parts.xla.lanes import Combine
from pallas_kernels.parts.xla.positions import Window, fold_positions
from pallas_kernels.parts.xla.tiles import in_one_loop, isolate
from pallas_kernels.parts.xla.total_order import from_ordered, to_ordered


def sum_windows(x: jax.Array, *, window: Window, contract: FoldContract) -> jax.Array:
    """Adds the elements of every window.

    Args:
        x: Array of any floating dtype, padded.
        window: The window; it has the rank of `x`.
        contract: Order of the sums.

    Returns:
        float32, or float64 for float64, one element for each window. A sum of zeros is +0.

    Raises:
        UnsupportedError: If the dtype is not a floating one of 16, 32 or 64 bits.

    Guarantee: row-invariant.

    Example:
        >>> window = Window((2,), (1,), (1,))
        >>> sum_windows(jnp.arange(5.0), window=window, contract=FoldContract("window")).tolist()
        [1.0, 3.0, 5.0, 7.0]
    """
    honour("reduce_window_sum", contract, FoldContract("window"))
    dtype = accumulator("reduce_window_sum", x.dtype)
    total = _reduce(lax.add, isolate(x)[0].astype(dtype), window)
    return isolate(jnp.where(total == 0, jnp.zeros((), dtype), total))[0]


def choose_in_windows(x: jax.Array, *, window: Window, smallest: bool) -> jax.Array:
    """Returns the largest (or smallest) element of every window, propagating nan.

    Args:
        x: Array of any floating dtype, padded.
        window: The window; it has the rank of `x`.
        smallest: Which end to choose.

    Returns:
        An array of the dtype of `x`, one element for each window.

    Guarantee: row-invariant.

    Example:
        >>> choose_in_windows(jnp.arange(4.0), window=Window((2,), (2,), (1,)), smallest=False).tolist()
        [1.0, 3.0]
    """
    ordered = in_one_loop(functools.partial(to_ordered, nan_first=smallest), *isolate(x))
    chosen = _reduce(lax.min if smallest else lax.max, ordered, window)
    back = functools.partial(from_ordered, dtype=x.dtype, nan_first=smallest)
    return isolate(in_one_loop(back, chosen))[0]


def _reduce(combine: Combine, x: jax.Array, window: Window) -> jax.Array:
    if 0 in window.counts(x.shape):
        return jnp.zeros(window.counts(x.shape), x.dtype)
    for axis in range(x.ndim):
        along = _only(window, axis)
        if along.size[axis] > 1 or along.strides[axis] > 1:

            def step(total: jax.Array, position: jax.Array | int, x: jax.Array = x, along: Window = along) -> jax.Array:
                return combine(total, along.read(x, position))

            (x,) = isolate(fold_positions(step, along.read(x, 0), 1, along.positions))
    return x


def _only(window: Window, axis: int) -> Window:
    """Returns the window that reduces one axis only."""
    size, strides, dilation = (
        tuple(n if a == axis else 1 for a, n in enumerate(numbers))
        for numbers in (window.size, window.strides, window.dilation)
    )
    return Window(size, strides, dilation)


def gather_selected(values: jax.Array, x: jax.Array, *, window: Window, smallest: bool) -> jax.Array:
    """Returns from every window the value at the position of the first largest (or smallest) element.

    Args:
        values: Array of the shape of `x`, padded with zeros.
        x: Array of any floating dtype, padded with -inf (or +inf).
        window: The window; it has the rank of `x`.
        smallest: Which end to choose.

    Returns:
        One value for each window; 0 for windows that contain only padding.

    Guarantee: row-invariant.

    Example:
        >>> x = jnp.array([3.0, 1.0, 2.0, 4.0])
        >>> gather_selected(10 * x, x, window=Window((2,), (2,), (1,)), smallest=False).tolist()
        [30.0, 40.0]
    """
    values, x = isolate(values, x)
    counts = window.counts(x.shape)
    if 0 in counts:
        return jnp.zeros(counts, values.dtype)
    prefers = lax.le if smallest else lax.ge

    def step(state: tuple[jax.Array, jax.Array], position: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        best, value = state
        candidate = window.read(x, position)
        keep = prefers(best, candidate)
        return lax.select(keep, best, candidate), lax.select(keep, value, window.read(values, position))

    first = jnp.full(counts, jnp.inf if smallest else -jnp.inf, x.dtype), jnp.zeros(counts, values.dtype)
    return isolate(fold_positions(step, first, 0, window.positions)[1])[0]


def scatter_selected(
    source: jax.Array, x: jax.Array, *, window: Window, smallest: bool, contract: FoldContract
) -> jax.Array:
    """Adds the value of every window at the position of its first largest (or smallest) element.

    If several windows select an element, their values are added in the order of its position in them.

    Args:
        source: One value for each window, of any floating dtype.
        x: Array of any floating dtype, padded with -inf (or +inf).
        window: The window; it has the rank of `x` and is not dilated.
        smallest: Which end to choose.
        contract: Order of the sums.

    Returns:
        Array of the shape of `x`, float32, or float64 for float64.

    Raises:
        UnsupportedError: If the dtype of `source` is not a floating one of 16, 32 or 64 bits.

    Guarantee: row-invariant.

    Example:
        >>> x = jnp.array([3.0, 1.0, 2.0, 4.0])
        >>> options = {"window": Window((2,), (2,), (1,)), "smallest": False, "contract": FoldContract("window")}
        >>> scatter_selected(jnp.array([7.0, 8.0]), x, **options).tolist()
        [7.0, 0.0, 0.0, 8.0]
    """
    honour("select_and_scatter_add", contract, FoldContract("window"))
    dtype = accumulator("select_and_scatter_add", source.dtype)
    source, x = isolate(source.astype(dtype), x)
    if 0 in source.shape:
        return jnp.zeros(x.shape, dtype)
    prefers = lax.le if smallest else lax.ge

    def select(state: tuple[jax.Array, jax.Array], position: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        best, winner = state
        candidate = window.read(x, position)
        keep = prefers(best, candidate)
        return lax.select(keep, best, candidate), jnp.where(keep, winner, jnp.int32(position))

    first = window.read(x, 0), jnp.zeros(source.shape, jnp.int32)
    (winner,) = isolate(fold_positions(select, first, 1, window.positions)[1])

    def add(total: jax.Array, position: jax.Array | int) -> jax.Array:
        share = jnp.where(winner == position, source, jnp.zeros((), dtype))
        spread = lax.pad(share, jnp.zeros((), dtype), [(0, 0, stride - 1) for stride in window.strides])
        starts = window.starts(position)
        here = lax.dynamic_slice(total, starts, spread.shape)
        return lax.dynamic_update_slice(total, here + spread, starts)

    return isolate(fold_positions(add, jnp.zeros(x.shape, dtype), 0, window.positions))[0]
