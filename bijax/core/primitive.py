"""Kernels as JAX primitives.

A kernel loops over tiles of fixed shape. If that loop were visible to `vmap`, the mapped axis would be merged into
the tile and its shape would depend on the batch again. As a primitive the kernel stays whole until it is lowered:
`vmap` folds the mapped axis into the rows (or repeats the kernel for each entry), and the backend is chosen for the
platform that the program is lowered for.
"""

import functools
import importlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from bijax.core.architecture import target_for
from bijax.core.contexts import on_several_devices
from bijax.core.contracts import without_recording
from bijax.core.lowering_cache.lowered_forms import is_own, lower_once
from bijax.core.partitioning import has_several_devices, is_partitioned, mark
from bijax.core.tag import kernel_code
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.xla.manual_axes import result_type, vary_alike
from pallas_kernels.parts.xla.opaque import apart_in_loops
from pallas_kernels.runtime.own_settings import of_width, own_tracing, without_mesh

Arrays = tuple[jax.Array, ...]
Kernel = Callable[..., Arrays]
Backend = Callable[..., Arrays]
"""A function of a target, arrays and hashable keyword parameters."""
FoldRule = Callable[[int, Arrays, Sequence[int | None], dict[str, Any]], Arrays | None]


def define_kernel(
    name: str,
    backend: Backend,
    fold: FoldRule | None = None,
    shapes: Kernel | None = None,
    *,
    lowered_once: bool = True,
) -> Callable[..., Arrays]:
    """Makes a primitive of a kernel.

    Args:
        name: Name of the primitive; it gets the prefix `bijax_`.
        backend: Maps the target, arrays and hashable keyword parameters to a tuple of arrays, which
            have the same shapes and dtypes on all targets.
        fold: Rule for `vmap`: maps (axis size, arrays, mapped axes, parameters) to results that have the mapped axis
            in front, by one call on more rows; None when this call cannot be folded. Such a call is
            repeated for every entry of the axis.
        shapes: A function of the same arguments that is cheap to trace and gives the shapes and dtypes of the results;
            by default the backend for the CPU.
        lowered_once: Whether equal calls share one lowered module (`bijax.core.lowering_cache.lowered_forms`).

    Returns:
        A function of arrays and keyword parameters that returns a tuple of arrays.
    """
    primitive = Primitive(f"bijax_{name}")
    primitive.multiple_results = True
    backends = {platform: _on_platform(backend, platform) for platform in PLATFORMS}

    def call(*arrays: jax.Array, **parameters: Hashable) -> Arrays:
        return tuple(primitive.bind(*vary_alike(arrays), **parameters))

    @functools.cache
    def compiled(parameters: tuple[tuple[str, Hashable], ...]) -> Kernel:
        return jax.jit(functools.partial(call, **dict(parameters)))

    def evaluate(*arrays: jax.Array, **parameters: Hashable) -> Arrays:
        # A kernel is compiled under jax.disable_jit too: its bits are those of the compiled program. Nor can it be run
        # op by op, as jax.debug_nans and jax.debug_infs do with a program that has such a result.
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            results = compiled(tuple(sorted(parameters.items())))(*arrays)
        _check_values(primitive.name, results)
        return results

    cheapest = shapes or backends["cpu"]

    @functools.cache
    def results(avals: tuple[jax.ShapeDtypeStruct, ...], parameters: tuple[tuple[str, Hashable], ...]) -> Arrays:
        with own_tracing(), of_width(avals), without_recording():
            return tuple(jax.eval_shape(functools.partial(cheapest, **dict(parameters)), *avals))

    def abstract(*avals: Any, **parameters: Hashable) -> list[Any]:
        arguments = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
        found = results(arguments, tuple(sorted(parameters.items())))
        return [result_type(s.shape, s.dtype, avals) for s in found]

    def batch(arrays: Arrays, axes: Sequence[int | None], **parameters: Hashable) -> tuple[Arrays, tuple[int, ...]]:
        size = next(a.shape[d] for a, d in zip(arrays, axes, strict=True) if d is not None)
        if size == 0:
            one = abstract(*(_entry(a, d) for a, d in zip(arrays, axes, strict=True)), **parameters)
            return tuple(jnp.zeros((0, *r.shape), r.dtype) for r in one), (0,) * len(one)
        results = fold(size, arrays, axes, parameters) if fold else None
        if results is None:
            results = _repeat(functools.partial(call, **parameters), arrays, axes)
        return results, (0,) * len(results)

    def no_derivative(*_: Any, **__: Any) -> None:
        raise UnsupportedError(
            f"The kernel {primitive.name} has no derivative of its own: expected reverse-mode differentiation of a"
            " bijax operation, once. Forward mode (jax.jvp, jax.linearize, jax.jacfwd) and differentiating twice"
            " through this operation are not supported; use jax.grad, jax.vjp or jax.jacrev."
        )

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = no_derivative
    for platform, kernel in backends.items():
        mlir.register_lowering(primitive, _rule(primitive.name, kernel, lowered_once), platform=platform)
    KERNELS[primitive.name] = backends
    return call


def _on_platform(backend: Backend, platform: str) -> Kernel:
    @functools.wraps(backend)
    def kernel(*arrays: jax.Array, **parameters: Hashable) -> Arrays:
        if platform == "cpu":
            return apart_in_loops(backend(target_for(platform), *arrays, **parameters))
        return backend(target_for(platform), *arrays, **parameters)

    return kernel


def _check_values(name: str, results: Arrays) -> None:
    """Raises as JAX does under `jax.debug_nans` and `jax.debug_infs`, for results computed without tracing.

    Checks only the first result for infinities: others, such as the log-sum-exp of no scores, may be infinite.
    """
    nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
    if not (nans or infs):
        return
    for place, result in enumerate(results):
        if not jnp.issubdtype(result.dtype, jnp.floating):
            continue
        for values in (np.asarray(shard.data) for shard in result.addressable_shards):
            if nans and np.isnan(values).any():
                raise FloatingPointError(f"invalid value (nan) encountered in {name}")
            if infs and place == 0 and np.isinf(values).any():
                raise FloatingPointError(f"invalid value (inf) encountered in {name}")


PLATFORMS: Final = ("cpu", "cuda")
"""The platforms of JAX for which kernels are lowered."""


KERNELS: Final[dict[str, dict[str, Kernel]]] = {}
"""The backends of every kernel, by the name of its primitive and the platform."""


BEFORE_LOWERING: Final[list[Callable[[], None]]] = []
"""Called before a kernel is lowered for CUDA: installs the fences of its element-wise code."""


_FENCES: Final = "bijax.transform.hook.lowering"
"""The module that fills the two lists, loaded by name: a program that uses operations alone never imports it."""


LOWERED_IN: Final[list[Callable[[], AbstractContextManager[None]]]] = []
"""Contexts in which kernels are lowered: they isolate kernels from the program's request."""


def _rule(name: str, kernel: Kernel, lowered_once: bool) -> Callable[..., Any]:
    lower = (
        lower_once(_tagged(kernel), name=name) if lowered_once and is_own(kernel) else mlir.lower_fun(_tagged(kernel))
    )

    def rule(ctx: Any, *operands: Any, **parameters: Hashable) -> Any:
        if "cuda" in (ctx.platforms or ctx.module_context.platforms):
            importlib.import_module(_FENCES)
            for prepare in BEFORE_LOWERING:
                prepare()
        # The same state for every caller: one lowered module serves plain kernel models and invariant ones.
        with ExitStack() as stack:
            for manager in (*LOWERED_IN, kernel_code, without_mesh):
                stack.enter_context(manager())
            stack.enter_context(on_several_devices(has_several_devices(ctx.module_context)))
            stack.enter_context(of_width((*ctx.avals_in, *ctx.avals_out)))
            # Shardings and the axes of manual meshes belong to the kernel's arrays, not to its body.
            plain = [jax.core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in ctx.avals_in]
            if not is_partitioned(ctx.module_context):
                return lower(ctx.replace(avals_in=plain), *operands, **parameters)
            operands = tuple(mark(ctx, x, aval) for x, aval in zip(operands, plain, strict=True))
            results = lower(ctx.replace(avals_in=plain), *operands, **parameters)
            return [mark(ctx, x, aval) for x, aval in zip(results, ctx.avals_out, strict=True)]

    return rule


def _tagged(kernel: Kernel) -> Kernel:
    """Returns the kernel with its equations tagged, so that `bijax.invariant` leaves them as they are."""

    @functools.wraps(kernel)
    def tagged(*arrays: jax.Array, **parameters: Hashable) -> Arrays:
        with kernel_code():
            return kernel(*arrays, **parameters)

    return tagged


def in_front(size: int, arrays: Arrays, axes: Sequence[int | None]) -> Arrays:
    """Returns the arrays with the mapped axis in front, repeated along it where they lack it.

    Args:
        size: Length of the mapped axis.
        arrays: The arrays.
        axes: Position of the mapped axis in each, None where an array does not carry it.
    """
    return tuple(
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(arrays, axes, strict=True)
    )


def fold_rows(size: int, arrays: Arrays, axes: Sequence[int | None]) -> Arrays:
    """Returns the arrays with the mapped axis merged into their rows: (size * M, ...) each.

    Args:
        size: Length of the mapped axis.
        arrays: Arrays with M rows in front when the mapped axis is left out.
        axes: Position of the mapped axis in each, None where an array does not carry it.
    """
    return tuple(a.reshape(size * a.shape[1], *a.shape[2:]) for a in in_front(size, arrays, axes))


def unfold_rows(size: int, arrays: Arrays) -> Arrays:
    """Returns arrays of (size * M, ...) as (size, M, ...)."""
    return tuple(a.reshape(size, a.shape[0] // size, *a.shape[1:]) for a in arrays)


def fold_some(
    call: Kernel,
    size: int,
    arrays: Arrays,
    axes: Sequence[int | None],
    shared: Sequence[bool],
    parameters: dict[str, Any],
) -> Arrays | None:
    """Calls a kernel once for all entries of the mapped axis, which its rows take; None if a shared array has entries.

    Args:
        call: The kernel, whose results have rows in front too.
        size: As for `fold_rows`.
        arrays: The arrays.
        axes: As for `fold_rows`.
        shared: Which arrays have no rows, and are the same for all entries.
        parameters: Those of the call.
    """
    if any(s and axis is not None for s, axis in zip(shared, axes, strict=True)):
        return None
    folded = [a if s else fold_rows(size, (a,), (d,))[0] for a, d, s in zip(arrays, axes, shared, strict=True)]
    return unfold_rows(size, call(*folded, **parameters))


def _entry(array: jax.Array, axis: int | None) -> jax.ShapeDtypeStruct:
    """Returns the shape of one entry of the mapped axis."""
    return jax.ShapeDtypeStruct(tuple(n for a, n in enumerate(array.shape) if a != axis), array.dtype)


def _repeat(call: Kernel, arrays: Arrays, axes: Sequence[int | None]) -> Arrays:
    """Calls the kernel once for every entry of the mapped axis."""
    mapped = [jnp.moveaxis(a, d, 0) for a, d in zip(arrays, axes, strict=True) if d is not None]

    def one(entries: list[jax.Array]) -> Arrays:
        left = iter(entries)
        return call(*(a if d is None else next(left) for a, d in zip(arrays, axes, strict=True)))

    return tuple(lax.map(one, mapped))
