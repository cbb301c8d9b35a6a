"""What is not public in JAX and the kernels' lowered forms need, with the reason for each.

- `config.trace_context` has all that JAX's own caches of traced programs depend on: settings, contexts, metadata.
- `_jax_mlir_ext.inlined_func_call` copies a function's body to where it is called, as JAX does with its own rules.
- `mlir.wrap_with_sharding_op` marks a value of a program with a sharding, and `mlir.add_manual_axes` says which axes
  of a mesh the program cuts by hand. `jax.lax.with_sharding_constraint` wants a mesh of devices, which a program that
  is being lowered need not have.
- `util.cache` makes a cache that `jax.clear_caches` empties.
- `config.persistent_cache_min_compile_time_secs`, which is public for the process, can be set for a thread.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import config, core, util
from jax._src.interpreters import mlir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext


def missing() -> list[str]:
    """Returns what this version of JAX lacks of it."""
    wanted = (
        (config, "trace_context"),
        (config, "trace_context_names"),
        (_jax_mlir_ext, "inlined_func_call"),
        (mlir, "wrap_with_sharding_op"),
        (mlir, "add_manual_axes"),
        (core, "physical_aval"),
        (util, "cache"),
        (config, "persistent_cache_min_compile_time_secs"),
    )
    return [f"there is no {m.__name__}.{name}" for m, name in wanted if not callable(getattr(m, name, None))]


def state_of_tracing() -> str | None:
    """Returns a text of the state that traced programs depend on; None if it has none, or if an axis is mapped."""
    return _text(config.trace_context())


@functools.lru_cache(maxsize=256)
def _text(state: tuple[Any, ...]) -> str | None:
    parts = []
    for name, value in zip(config.trace_context_names(), state, strict=True):
        if name == "axis_env_state":
            if value is not None and value.axis_sizes:
                return None
        elif hasattr(value, "val"):  # metadata
            parts.append(f"{name}={sorted(value.val.items())!r}")
        else:
            parts.append(f"{name}={value!r}")
    text = " ".join(parts)
    return None if " at 0x" in text else text


def inlined(function: Any, operands: Sequence[Any]) -> list[Any]:
    """Copies the body of a function of one block to the insertion point, and returns its results."""
    results: list[Any] = _jax_mlir_ext.inlined_func_call(function.operation, list(operands))
    return results


def replicated(ctx: Any, value: Any, aval: Any) -> Any:
    """Marks an array in a program that is being lowered as whole on every device.

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
        sharding: Any = mlir.add_manual_axes(context, mesh, aval.ndim)
    else:
        sharding = jax.sharding.NamedSharding(jax.sharding.AbstractMesh((), ()), everywhere)
    shardy = config.use_shardy_partitioner.value
    form = sharding._to_sdy_sharding(aval.ndim) if shardy else sharding._to_xla_hlo_sharding(aval.ndim).to_proto()
    return mlir.wrap_with_sharding_op(ctx, value, aval, form)


def every_compilation_cached() -> contextlib.AbstractContextManager[Any]:
    """What this thread compiles inside is kept in JAX's compilation cache, if there is one, however short it took."""
    manager: contextlib.AbstractContextManager[Any] = config.persistent_cache_min_compile_time_secs(0.0)
    return manager


@dataclasses.dataclass
class Kept:
    """What is kept for one question.

    Attributes:
        forms: The lowered form, if it is made.
        lock: Held by who makes it.
    """

    forms: list[bytes] = dataclasses.field(default_factory=list)
    lock: Any = dataclasses.field(default_factory=threading.RLock)


def kept(question: str) -> Kept:
    """Returns what is kept for a question, empty at first, until it is forgotten."""
    found: Kept = _kept(question)
    return found


_kept: Any = util.cache(max_size=2048, trace_context_in_key=False)(lambda question: Kept())
