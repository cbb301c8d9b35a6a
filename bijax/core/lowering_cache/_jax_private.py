"""Private parts of JAX that the caches of lowered kernels need, with the reason for each.

- `config.trace_context` has all that JAX's own caches of traced programs depend on: settings, contexts, metadata.
- `_jax_mlir_ext.inlined_func_call` copies a function's body to its call site, as JAX does with its own rules.
- `util.cache` makes a cache that `jax.clear_caches` empties.
- `core.trace_ctx` holds the axes of `jax.shard_map` while its body is lowered, `config._check_vma` whether it checks
  types, and `SPMDAxisContext` is the context of that body: kernels are lowered the same way on all meshes.
- `ShardingContext` is the context of a program outside of it: kernels are lowered the same way for all numbers of
  devices but one.
- `config.persistent_cache_min_compile_time_secs`, which is public for the process, can be set for a thread.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import config, core, sharding_impls, util
from jaxlib.mlir._mlir_libs import _jax_mlir_ext


def missing() -> list[str]:
    """Returns what this version of JAX lacks of these."""
    wanted = (
        (config, "trace_context"),
        (config, "trace_context_names"),
        (_jax_mlir_ext, "inlined_func_call"),
        (util, "cache"),
        (config, "persistent_cache_min_compile_time_secs"),
        (config, "_check_vma"),
        (core.TracingContext, "set_axis_env"),
        (sharding_impls, "SPMDAxisContext"),
        (sharding_impls, "ShardingContext"),
    )
    return [f"there is no {m.__name__}.{name}" for m, name in wanted if not callable(getattr(m, name, None))]


@contextlib.contextmanager
def as_on_any_mesh(ctx: Any) -> Iterator[Any]:
    """Yields the context of a rule inside `jax.shard_map` over all axes, with a mesh that represents all others."""
    axes = core.trace_ctx.axis_env
    core.trace_ctx.set_axis_env(core.top_axis_env)
    try:
        with config._check_vma(False):
            yield ctx.replace(module_context=ctx.module_context.replace(axis_context=_ANY_MESH))
    finally:
        core.trace_ctx.set_axis_env(axes)


_ANY_MESH: Any = sharding_impls.SPMDAxisContext(
    jax.sharding.AbstractMesh((2,), ("any",)),  # type: ignore[arg-type]
    manual_axes=frozenset({"any"}),
)


def as_partitioned(ctx: Any) -> Any:
    """Returns the context of a rule in a program that XLA partitions, with two devices for any number above one."""
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=_SEVERAL_DEVICES))


_SEVERAL_DEVICES: Any = sharding_impls.ShardingContext(2)


def state_of_tracing() -> str | None:
    """Returns the state that traced programs depend on as text; None if it has no text, or if an axis is mapped."""
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
    return _jax_mlir_ext.inlined_func_call(function.operation, list(operands))


def every_compilation_cached() -> contextlib.AbstractContextManager[Any]:
    """What this thread compiles inside is kept in JAX's compilation cache, if there is one, however short it took."""
    return config.persistent_cache_min_compile_time_secs(0.0)


@dataclasses.dataclass
class Kept:
    """A cache entry.

    Attributes:
        forms: The lowered module, once it exists.
        lock: Held by the thread that lowers it.
    """

    forms: list[bytes] = dataclasses.field(default_factory=list)
    lock: Any = dataclasses.field(default_factory=threading.RLock)


def kept(question: str) -> Kept:
    """Returns what is kept for a question, empty at first, until it is forgotten."""
    return _kept(question)


_kept: Any = util.cache(max_size=2048, trace_context_in_key=False)(lambda question: Kept())
