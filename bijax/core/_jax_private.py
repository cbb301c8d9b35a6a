"""Private parts of JAX that programs for several devices need, with the reason.

- `mlir.wrap_with_sharding_op` marks a value of a program with a sharding, and `mlir.add_manual_axes` says which axes
  of a mesh are manual. `jax.lax.with_sharding_constraint` needs a mesh of devices, which a program being lowered may
  not have. `core.physical_aval` is the type of a key's underlying array.
- `config._check_vma` says whether types name the axes of `jax.shard_map` over which values vary: code that is traced
  while its body is lowered takes values without such types.

`bijax.core.lowering_cache._jax_private` holds the caches' part.
"""

import contextlib
from typing import Any

import jax
from jax._src import config, core
from jax._src.interpreters import mlir


def missing() -> list[str]:
    """Returns what this version of JAX lacks of these."""
    wanted = (
        (mlir, "wrap_with_sharding_op"),
        (mlir, "add_manual_axes"),
        (core, "physical_aval"),
        (config, "_check_vma"),
    )
    return [f"there is no {m.__name__}.{name}" for m, name in wanted if not callable(getattr(m, name, None))]


def without_varying_types() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which types do not name the axes over which values vary."""
    context: contextlib.AbstractContextManager[Any] = config._check_vma(False)
    return context


def replicated(ctx: Any, value: Any, aval: Any) -> Any:
    """Marks an array in a program being lowered as replicated.

    Args:
        ctx: Context of the rule.
        value: The array.
        aval: Its type.
    """
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        aval = core.physical_aval(aval)
    context = ctx.module_context.axis_context
    everywhere = jax.sharding.PartitionSpec()
    if getattr(context, "manual_axes", None):
        mesh = jax.sharding.NamedSharding(context.mesh.abstract_mesh, everywhere)
        sharding = mlir.add_manual_axes(context, mesh, aval.ndim)
    else:
        sharding = jax.sharding.NamedSharding(jax.sharding.AbstractMesh((), ()), everywhere)
    shardy = config.use_shardy_partitioner.value
    form = sharding._to_sdy_sharding(aval.ndim) if shardy else sharding._to_xla_hlo_sharding(aval.ndim).to_proto()
    return mlir.wrap_with_sharding_op(ctx, value, aval, form)
