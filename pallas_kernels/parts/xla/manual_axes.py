"""Arrays inside `jax.shard_map`: the mesh axes over which they vary.

JAX records these axes in an array's type. JAX's operations cast their arguments to a common type, and the derivative of
that cast is the sum over the devices; operations of this library must do the same, otherwise the gradient of
replicated weights would only include one device's rows.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def vary_alike(arguments: Sequence[Any]) -> Sequence[Any]:
    """Returns the arguments with all arrays cast to vary over the same mesh axes.

    Args:
        arguments: Pytrees of arrays. Leaves that are not JAX arrays are unchanged.
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
    """Returns the mesh axes over which an array of this type varies."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def vary_as(x: jax.Array, aval: Any) -> jax.Array:
    """Casts an array that is equal on all devices to vary over the mesh axes of another array's type."""
    axes = tuple(sorted(varying_axes(aval), key=str))
    return lax.pcast(x, axes, to="varying") if axes else x


def result_type(shape: Sequence[int], dtype: Any, arguments: Sequence[Any]) -> jax.core.ShapedArray:
    """Returns the type of a result that varies over all mesh axes of the argument types."""
    like = max(arguments, key=lambda aval: len(varying_axes(aval)), default=None)
    if like is None or not varying_axes(like):
        return jax.core.ShapedArray(tuple(shape), dtype)
    nowhere = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    return jax.core.ShapedArray(tuple(shape), dtype, sharding=nowhere, manual_axis_type=like.manual_axis_type)
