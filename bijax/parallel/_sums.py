"""Sums over devices, inside `jax.shard_map`, whose bits do not depend on how terms are spread over the devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.checks import axis_index, describe, float_array, float_dtype
from bijax.dispatch.trees import tree_kernel
from bijax.lax import collectives
from bijax.parallel._axes import (
    Axis,
    check_differentiable,
    check_equal_on_all,
    devices_of,
    leaves_of,
    names_of,
    vary_over,
)

_PSUM, _SCATTER, _TREE, _LEAVES = (
    f"bijax.parallel.{name}" for name in ("psum", "psum_scatter", "tree_sum", "broadcast_to_leaves")
)


def psum(x: Any, axis: Axis, *, dtype: Any = None) -> jax.Array:
    """Adds `x` over the devices of a mesh axis as a fixed binary tree, like `jax.lax.psum`.

    The terms travel in their dtype, are added in float32, (0 + 1) + (2 + 3), and rounded once. Half of the devices add
    half of the tree, so a program in which each of 2 devices first adds two terms with `tree_sum` has the bits of the
    one in which each of 4 devices has one term.

    Args:
        x: Array of any shape, float32, bfloat16 or float16: this device's term.
        axis: Name of a mesh axis, or a tuple of names; None for one device.
        dtype: Dtype of the result, that of `x` by default.

    Returns:
        The sum, with the shape of `x`; the same on all devices of the axis.

    Raises:
        TypeError: If a dtype or the axis is invalid.
        ValueError: If the axis is unknown, or its number of devices is not a power of two.
        UnsupportedError: When differentiated, if `jax.shard_map` has `check_vma=False`.

    Guarantee: row-invariant, each element being a row of its own: its bits depend on the terms in their order alone.
    The derivative is that of `jax.lax.psum`.

    Source: the project's design; the order as in "Deterministic Inference across Tensor Parallel Sizes That Eliminates
    Training-Inference Mismatch" (https://arxiv.org/abs/2511.17826).

    Example:
        >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> spec = jax.sharding.PartitionSpec
        >>> add = jax.shard_map(lambda x: psum(x, "model"), mesh=mesh, in_specs=spec("model"), out_specs=spec())
        >>> jax.jit(add)(jnp.arange(3.0)).tolist()
        [0.0, 1.0, 2.0]
    """
    x = float_array(_PSUM, "x", x)
    devices_of(_PSUM, axis)
    return _psum(vary_over(axis, x), axis, _dtype(_PSUM, dtype, x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _psum(x: jax.Array, axis: Axis, dtype: str) -> jax.Array:
    return summed(x, axis, dtype)


def _psum_forward(x: jax.Array, axis: Axis, dtype: str) -> tuple[jax.Array, jax.Array]:
    check_differentiable(_PSUM, axis)
    return summed(x, axis, dtype), jnp.zeros((0,), x.dtype)


def _psum_backward(axis: Axis, dtype: str, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (vary_over(axis, g.astype(like.dtype)),)


_psum.defvjp(_psum_forward, _psum_backward)


def psum_scatter(x: Any, axis: Axis, *, scatter_dimension: int = 0, dtype: Any = None) -> jax.Array:
    """Adds `x` over the devices of a mesh axis as `psum` does, and returns this device's part of the sum.

    Like `jax.lax.psum_scatter` with `tiled=True`.

    Args:
        x: Array of at least one dimension, float32, bfloat16 or float16: this device's term.
        axis: As for `psum`.
        scatter_dimension: Dimension of `x` that is cut over the devices, in their order.
        dtype: Dtype of the result, that of `x` by default.

    Returns:
        A part of the sum: the dimension is divided by the number of devices.

    Raises:
        TypeError: If a dtype or the axis is invalid.
        ValueError: As `psum`; if `x` has no such dimension, or the devices do not divide it.
        UnsupportedError: When differentiated, if `jax.shard_map` has `check_vma=False`.

    Guarantee: each element has the bits that it has in `psum`.

    Example:
        >>> psum_scatter(jnp.arange(3.0), None).tolist()
        [0.0, 1.0, 2.0]
    """
    x = float_array(_SCATTER, "x", x)
    dimension, count = axis_index(_SCATTER, scatter_dimension, x.ndim), devices_of(_SCATTER, axis)
    if x.shape[dimension] % count:
        raise ValueError(
            f"{_SCATTER}: the {count} devices of axis {axis!r} must divide dimension {dimension}, got x {describe(x)};"
            " pad it with zeros."
        )
    return _psum_scatter(vary_over(axis, x), axis, dimension, _dtype(_SCATTER, dtype, x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _psum_scatter(x: jax.Array, axis: Axis, dimension: int, dtype: str) -> jax.Array:
    return scattered(x, axis, dimension, dtype)


def _psum_scatter_forward(x: jax.Array, axis: Axis, dimension: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    check_differentiable(_SCATTER, axis)
    return scattered(x, axis, dimension, dtype), jnp.zeros((0,), x.dtype)


def _psum_scatter_backward(axis: Axis, dimension: int, dtype: str, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (gathered(g.astype(like.dtype), axis, dimension, to="varying"),)


_psum_scatter.defvjp(_psum_scatter_forward, _psum_scatter_backward)


def tree_sum(terms: Any, *, dtype: Any = None) -> jax.Array:
    """Adds arrays as the tree of `psum` adds those of devices, with one rounding.

    Args:
        terms: (n, ...) float32, bfloat16 or float16, in the order of the tree; n is a power of two.
        dtype: Dtype of the result, that of the terms by default.

    Returns:
        Array of shape (...).

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If the number of terms is not a power of two.

    Guarantee: row-invariant, each element being a row of its own.

    Example:
        >>> terms = jnp.asarray([[1e8], [1.0], [-1e8], [1.0]])
        >>> halves = [tree_sum(terms[:2]), tree_sum(terms[2:])]
        >>> bool((tree_sum(terms) == tree_sum(jnp.stack(halves))).all())
        True
    """
    terms = float_array(_TREE, "terms", terms)
    count = terms.shape[0] if terms.ndim else 0
    if count < 1 or count & (count - 1):
        raise ValueError(f"{_TREE}: the number of terms must be a power of two, got terms {describe(terms)}.")
    return _tree_sum(terms, _dtype(_TREE, dtype, terms))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _tree_sum(terms: jax.Array, dtype: str) -> jax.Array:
    return tree_kernel(terms, out_dtype=dtype)[0]


def _tree_sum_forward(terms: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    return _tree_sum(terms, dtype), jnp.zeros((terms.shape[0], 0), terms.dtype)


def _tree_sum_backward(dtype: str, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (jnp.broadcast_to(g.astype(like.dtype), (like.shape[0], *g.shape)),)


_tree_sum.defvjp(_tree_sum_forward, _tree_sum_backward)


def broadcast_to_leaves(x: Any, axis: Axis, *, leaves: int = 8) -> jax.Array:
    """Repeats an array that all devices have, once for each leaf, so that its gradient is a sum as a fixed tree.

    Use it for a weight that every device applies to another part of the data: the scale of a norm of cut heads, or of
    cut rows. Apply copy i to leaf i of the data. The gradient of `x` is then the sum of `leaves` gradients, as a tree
    over all devices, where JAX would add one gradient of each device.

    Args:
        x: (...) float32, bfloat16 or float16, the same on all devices of the axis.
        axis: As for `psum`.
        leaves: Number of leaves of all devices together, a power of two.

    Returns:
        (leaves / devices, ...), the copies of this device.

    Raises:
        TypeError: If a dtype or the axis is invalid.
        ValueError: As `psum`; if `leaves` is not a power of two, or there are more devices than leaves; if `x` varies
            over the axis.
        UnsupportedError: When differentiated, if `jax.shard_map` has `check_vma=False`.

    Guarantee: the gradient does not depend on the number of devices, if the data are cut into leaves at the same
    positions. It is computed in float32 and rounded once to the dtype of `x`.

    Example:
        >>> scale = jnp.ones(4)
        >>> broadcast_to_leaves(scale, None).shape
        (8, 4)
    """
    x = float_array(_LEAVES, "x", x)
    own = leaves_of(_LEAVES, axis, leaves)
    check_equal_on_all(_LEAVES, "x", x, axis, "pass the weight itself, not a part of it")
    return _to_leaves(x, axis, own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _to_leaves(x: jax.Array, axis: Axis, own: int) -> jax.Array:
    return vary_over(axis, jnp.broadcast_to(x, (own, *x.shape)))


def _to_leaves_forward(x: jax.Array, axis: Axis, own: int) -> tuple[jax.Array, jax.Array]:
    check_differentiable(_LEAVES, axis)
    return _to_leaves(x, axis, own), jnp.zeros((0,), x.dtype)


def _to_leaves_backward(axis: Axis, own: int, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    (subtree,) = tree_kernel(g, out_dtype="float32")
    return (summed(subtree, axis, like.dtype.name),)


_to_leaves.defvjp(_to_leaves_forward, _to_leaves_backward)


def summed(x: jax.Array, axis: Axis, dtype: str) -> jax.Array:
    """Returns the sum over the devices, the same on all of them, without checks and without a derivative."""
    if axis is None:
        return tree_kernel(x[None], out_dtype=dtype)[0]
    return collectives.psum(x, axes=names_of(axis), out_dtype=dtype, to="invarying")


def scattered(x: jax.Array, axis: Axis, dimension: int, dtype: str) -> jax.Array:
    """Returns this device's part of the sum over the devices, without checks and without a derivative."""
    if axis is None:
        return tree_kernel(x[None], out_dtype=dtype)[0]
    count = devices_of(_SCATTER, axis)
    options: dict[str, Any] = {"axis_name": names_of(axis), "axis_size": count, "tiled": True}
    return collectives.reduce_scatter(x, scatter_dimension=dimension, out_dtype=dtype, **options)


def gathered(x: jax.Array, axis: Axis, dimension: int, *, to: str) -> jax.Array:
    """Returns the parts of all devices along a dimension."""
    if axis is None:
        return x
    return lax.all_gather(x, names_of(axis), axis=dimension, tiled=True, to=to)


def _dtype(op: str, dtype: Any, x: jax.Array) -> str:
    return (x.dtype if dtype is None else float_dtype(op, "dtype", dtype)).name
