"""Programs that XLA partitions automatically: `jax.jit` with sharded arguments or results.

XLA partitions an array anywhere, also in the middle of a sum or a tile. Under `jax.shard_map` it does not: there the
program says what each device computes. So where XLA is free to partition, the inputs and outputs of an invariant
operation are marked as replicated. Nothing is partitioned between such marks, and each device computes what a single
device would. Gathering moves bytes and computes nothing.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import lower_with_sharding_in_types
from jax.interpreters import ad, batching, mlir

from bijax.core import _jax_private
from bijax.core.explicit_axes import is_cut
from pallas_kernels.errors import UnsupportedError

WHOLE: Final = Primitive("bijax_whole")
"""The identity. Where XLA may partition the program, its result is replicated; elsewhere it lowers to nothing."""


RETYPED: Final = Primitive("bijax_retyped")
"""The identity between variables whose types cut an array in different ways: its result is cut as `type` says."""


def whole_array(x: jax.Array) -> jax.Array:
    """Returns an array that XLA does not partition.

    XLA gathers rows of a partitioned array by adding zeros from devices that do not hold them, and -0 + 0 is 0.
    """
    return WHOLE.bind(x)


def has_several_devices(module: Any) -> bool:
    """Returns whether several devices run the program being lowered.

    Args:
        module: Context of the module.
    """
    context = module.axis_context
    mesh = getattr(context, "mesh", None)
    devices = getattr(context, "num_devices", 1) if mesh is None else mesh.size
    return (devices or 1) > 1


def is_partitioned(module: Any) -> bool:
    """Returns whether XLA may partition the values of the program being lowered.

    Args:
        module: Context of the module.
    """
    context = module.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return has_several_devices(module)
    return any(size > 1 for axis, size in mesh.shape.items() if axis not in context.manual_axes)


def refused(module: Any) -> str:
    """Returns why no value can be marked in the program being lowered, empty if they can.

    Args:
        module: Context of the module.
    """
    if getattr(module.axis_context, "manual_axes", None) and not jax.config.jax_use_shardy_partitioner:
        return (
            "it stands in a jax.shard_map over some axes of a mesh, of which the others are left to XLA's former"
            " partitioner; name all axes in `axis_names`, or set jax_use_shardy_partitioner"
        )
    return ""


def mark(ctx: Any, value: Any, aval: Any) -> Any:
    """Marks a value as replicated.

    Args:
        ctx: Context of the rule.
        value: The value.
        aval: Its type; a value that is no array is unchanged.

    Raises:
        UnsupportedError: If no value can be marked.
    """
    if why := refused(ctx.module_context):
        raise UnsupportedError(f"bijax: an operation cannot keep its bits where it is: {why}.")
    if not isinstance(aval, jax.core.ShapedArray) or aval.dtype == np.dtype(jax.dtypes.float0):
        return value
    return _jax_private.replicated(ctx, value, aval)


_compiled: Final = jax.jit(whole_array)


def _evaluate(x: jax.Array) -> jax.Array:
    if x.sharding.is_fully_replicated:
        return x
    with jax.disable_jit(False):
        gathered: jax.Array = _compiled(x)
    return gathered


def _lower(ctx: Any, value: Any) -> Sequence[Any]:
    if not is_partitioned(ctx.module_context):
        return [value]
    whole, (aval,) = mark(ctx, value, ctx.avals_in[0]), ctx.avals_out
    # A result is cut as its type says; where the mesh has automatic axes too, nothing else would say so.
    typed = isinstance(aval, jax.core.ShapedArray) and is_cut(aval.sharding)
    return [lower_with_sharding_in_types(ctx, whole, aval) if typed else whole]


WHOLE.def_impl(_evaluate)
WHOLE.def_abstract_eval(lambda aval: aval)
ad.deflinear2(WHOLE, lambda cotangent, _: [whole_array(cotangent)])
batching.primitive_batchers[WHOLE] = lambda arrays, axes: (whole_array(arrays[0]), axes[0])
mlir.register_lowering(WHOLE, _lower, cacheable=False)
mlir.register_lowering(
    RETYPED, lambda ctx, value, *, type: [lower_with_sharding_in_types(ctx, value, type)], cacheable=False
)
