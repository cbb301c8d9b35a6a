"""Sums over devices, in the order of the devices.

Libraries add the shards of an all-reduce in an order that depends on the message size and the topology. Here the shards
are gathered, which computes nothing, and each element is summed over the devices in ascending order.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from bijax.lax.reduce import reduce_sum

Groups = Sequence[Sequence[int]] | None

_GATHERED_ELEMENTS: Final = 1 << 14  # below, one message to everybody is cheaper than two rounds of parts


def psum(x: jax.Array, *, axes: tuple[Any, ...], axis_index_groups: Groups = None) -> jax.Array:
    """Adds `x` over named axes of devices, with the parameters of the primitive `psum`.

    Args:
        x: Array of any shape and floating dtype; float16 and bfloat16 are added in float32.
        axes: Names of axes; integers among them are dimensions of `x`, over which is added first.
        axis_index_groups: Groups of devices that add among themselves.

    Returns:
        Array of the shape and dtype of `x`, without the dimensions among the axes.

    Guarantee: each element is the sum over the devices, in ascending order, whatever the shape.
    """
    dimensions = tuple(a for a in axes if isinstance(a, int))
    if dimensions:
        x = reduce_sum(x, axes=dimensions)
    axes = tuple(a for a in axes if not isinstance(a, int))
    if not axes:
        return x
    n = _devices(axes, axis_index_groups)
    if n == 1 or x.size == 0:
        return x
    groups: dict[str, Any] = {"axis_index_groups": axis_index_groups}
    if x.size <= _GATHERED_ELEMENTS:
        return _add_upwards(lax.all_gather(x, axes, axis=0, **groups))
    flat = jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1)
    part = _add_upwards(lax.all_to_all(flat, axes, split_axis=0, concat_axis=0, tiled=True, **groups))
    whole: jax.Array = lax.all_gather(part, axes, axis=0, tiled=True, **groups)
    return whole[: x.size].reshape(x.shape)


def reduce_scatter(
    x: jax.Array,
    *,
    scatter_dimension: int,
    axis_name: Any,
    axis_index_groups: Groups = None,
    axis_size: int,
    tiled: bool,
) -> jax.Array:
    """Adds `x` over a named axis and keeps this device's part, with the parameters of the primitive `reduce_scatter`.

    Guarantee: each element is the sum over the devices, in ascending order, whatever the shape.
    """
    parts = jnp.moveaxis(x, scatter_dimension, 0)
    parts = parts.reshape(axis_size, parts.shape[0] // axis_size, *parts.shape[1:])
    mine = _add_upwards(
        lax.all_to_all(parts, axis_name, split_axis=0, concat_axis=0, tiled=True, axis_index_groups=axis_index_groups)
    )
    return (
        jnp.moveaxis(mine, 0, scatter_dimension)
        if tiled
        else mine.reshape(tuple(s for i, s in enumerate(x.shape) if i != scatter_dimension))
    )


def _devices(axes: tuple[Any, ...], groups: Groups) -> int:
    return len(groups[0]) if groups else math.prod(lax.axis_size(a) for a in axes)


def _add_upwards(shards: jax.Array) -> jax.Array:
    wide = jnp.promote_types(shards.dtype, jnp.float32)
    total = functools.reduce(lax.add, (lax.index_in_dim(shards, i, 0, False).astype(wide) for i in range(len(shards))))
    return total.astype(shards.dtype)
