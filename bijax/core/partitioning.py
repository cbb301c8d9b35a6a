"""Programs that XLA divides among devices by itself: `jax.jit` with sharded arguments or results.

XLA cuts an array wherever it likes, in the middle of a sum and of a tile too. Under `jax.shard_map` it does not: there
the program says what a device computes. So where XLA is free to cut, the values that an invariant operation reads and
gives are marked as whole on every device. Between such marks nothing is cut, and each device computes what one device
alone would. Gathering moves bytes and computes nothing.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from bijax.core import _jax_private
from pallas_kernels.errors import UnsupportedError

WHOLE: Final = Primitive("bijax_whole")
"""The identity. Where XLA may cut the program, its result is whole on every device; elsewhere it is nothing."""


def whole_array(x: jax.Array) -> jax.Array:
    """Returns an array that XLA does not cut.

    Of an array that it has cut XLA gathers rows by adding zeros of the devices that do not hold them, and -0 + 0 is 0.
    """
    return WHOLE.bind(x)


def is_partitioned(module: Any) -> bool:
    """Returns whether XLA may cut the values of what is being lowered.

    Args:
        module: Context of the module.
    """
    context = module.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return (getattr(context, "num_devices", 1) or 1) > 1
    return any(size > 1 for axis, size in mesh.shape.items() if axis not in context.manual_axes)


def refused(module: Any) -> str:
    """Returns why no value can be marked in what is being lowered, nothing if they can.

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
    """Marks a value as whole on every device.

    Args:
        ctx: Context of the rule.
        value: The value.
        aval: Its type; what is no array stays as it is.

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
    return [mark(ctx, value, ctx.avals_in[0]) if is_partitioned(ctx.module_context) else value]


WHOLE.def_impl(_evaluate)
WHOLE.def_abstract_eval(lambda aval: aval)
ad.deflinear2(WHOLE, lambda cotangent, _: [whole_array(cotangent)])
batching.primitive_batchers[WHOLE] = lambda arrays, axes: (whole_array(arrays[0]), axes[0])
mlir.register_lowering(WHOLE, _lower, cacheable=False)
