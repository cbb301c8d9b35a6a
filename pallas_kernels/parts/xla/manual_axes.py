"""Arrays inside of `jax.shard_map`: along which axes of the mesh they differ from device to device.

JAX has these axes in an array's type. An operation of JAX casts its arguments to a common type, and the derivative of
such a cast is the sum over the devices; an operation of this library has to do the same, or the gradient of replicated
weights would be that of one device's rows.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def vary_alike(arguments: Sequence[Any]) -> Sequence[Any]:
    """Returns the arguments, all their arrays cast so that they differ along the same axes of the mesh.

    Args:
        arguments: Trees of arrays. What is no JAX array stays as it is.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arguments
    leaves = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)]
    axes = sorted(frozenset().union(*(varying_axes(jax.typeof(x)) for x in leaves)), key=str)
    if not axes:
        return arguments

    def cast(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        missing = tuple(axis for axis in axes if axis not in varying_axes(jax.typeof(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arguments)


def varying_axes(aval: Any) -> frozenset[Any]:
    """Returns the axes along which an array differs, given its type."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def vary_as(x: jax.Array, aval: Any) -> jax.Array:
    """Returns an array that is the same on all devices, cast so that it differs as an array of another type does."""
    axes = tuple(sorted(varying_axes(aval), key=str))
    return lax.pcast(x, axes, to="varying") if axes else x


def result_type(shape: Sequence[int], dtype: Any, arguments: Sequence[Any]) -> jax.core.ShapedArray:
    """Returns the type of a result that differs along the axes along which the arguments do, given their types."""
    like = max(arguments, key=lambda aval: len(varying_axes(aval)), default=None)
    if like is None or not varying_axes(like):
        return jax.core.ShapedArray(tuple(shape), dtype)
    nowhere = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    return jax.core.ShapedArray(tuple(shape), dtype, sharding=nowhere, manual_axis_type=like.manual_axis_type)
