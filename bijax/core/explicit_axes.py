"""Arrays of explicit meshes, whose types name the axes that they are sharded along (`jax.sharding.AxisType.Explicit`).

The library's operations compute whole arrays: they merge axes into rows and cut rows into tiles, and JAX has no type
for the result where an axis is sharded. So sharded arrays are gathered first; the derivative of that shards the
gradient like the argument. Use `jax.shard_map` to divide the work.
"""

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.errors import UnsupportedError


def gathered(x: jax.Array) -> jax.Array:
    """Returns an array that is whole on every device, if its type says that it is cut, and as it is if not.

    Raises:
        UnsupportedError: If its type is unreduced or reduced.
    """
    sharding = jax.typeof(x).sharding
    if is_partial(sharding, gradients=True):
        raise UnsupportedError(
            f"bijax: expected an array whose type is neither unreduced nor reduced, got {jax.typeof(x).str_short()};"
            " XLA adds its parts in an order of its own. Use jax.lax.psum in jax.shard_map."
        )
    if not is_cut(sharding):
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def gathered_once(*arrays: Any) -> tuple[Any, ...]:
    """Returns the arguments of an operation, sharded arrays as `gathered` does; one that is passed twice only once.

    The gradient of an array that is several arguments is a sum, which JAX adds in the reverse order of the program's
    steps. With a step for each argument, three parts would be added in another order than on one device.

    Args:
        *arrays: Any values. Values that are not JAX arrays are returned unchanged.
    """
    whole = {id(x): gathered(x) for x in arrays if isinstance(x, jax.Array)}
    return tuple(whole.get(id(x), x) for x in arrays)


def is_cut(sharding: Any) -> bool:
    """Returns whether the sharding of a type shards an array along an explicit mesh axis.

    Args:
        sharding: The sharding of a `jax.core.ShapedArray`, None if it has none.
    """
    if sharding is None or sharding.mesh.empty or all(axes is None for axes in sharding.spec.partitions):
        return False
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    named = (axis for axes in sharding.spec.partitions for axis in (axes if isinstance(axes, tuple) else (axes,)))
    return any(types.get(axis) == AxisType.Explicit for axis in named)


def is_partial(sharding: Any, *, gradients: bool = False) -> bool:
    """Returns whether a sharding is unreduced: values are the sums of the devices' parts.

    Args:
        sharding: A sharding, the sharding of a type, or a specification; False for anything else.
        gradients: Whether those count, too, whose gradients are unreduced, which JAX calls reduced.
    """
    spec = getattr(sharding, "spec", sharding)
    return isinstance(spec, PartitionSpec) and bool(spec.unreduced or (gradients and spec.reduced))
