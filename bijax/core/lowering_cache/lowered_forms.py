"""The lowered modules of kernels, made once for equal calls.

Lowering a kernel traces a program of a few dozen operations and emits an instruction for each, in Python; it takes
longer than the rest of a small model. The result depends on the kernel, its parameters, the shapes and dtypes of its
operands and the state of JAX, not on the surrounding program. So it is cached: in this process until
`jax.clear_caches()`, and for other processes on this machine where JAX has a folder for its compilation cache
(`pallas_kernels.runtime.disk_cache`).

A kernel computes on one device, so inside `jax.shard_map` over all axes its module is the same for every mesh. Where
XLA partitions the program, a kernel's operands and results are marked as replicated (`bijax.core.partitioning`), and
its module is the same for every number of devices but one.

A call without a stable text key is lowered every time: one with a user's function among its parameters, with unknown
shapes, for several platforms, or for export; one in a `jax.shard_map` that leaves axes to XLA; and one for a target
that has kernels registered by third parties.
"""

import contextlib
import dataclasses
import enum
import functools
import io
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from bijax.core.architecture import cuda_architecture, preferred_backend, target_for
from bijax.core.lowering_cache import _jax_private
from bijax.core.lowering_cache.kernels_ahead import compile_ahead, compile_ahead_of, make_ready
from bijax.core.partitioning import has_several_devices, is_partitioned
from bijax.core.record_tree import RecordTree
from pallas_kernels import registry
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.runtime.compiler_options import is_optimized
from pallas_kernels.runtime.disk_cache import is_on, keep, recall, source_digest
from pallas_kernels.runtime.gpu import driver_version, multiprocessors

Context = Any  # mlir.LoweringRuleContext, whose values are typed too abstractly for arrays
Rule = Callable[..., Sequence[Any]]

_MAIN: Final = "main"
_IN_SHARD_MAP: Final = "in shard_map"
_PARTITIONED: Final = "partitioned"
_LONGEST_WAIT: Final = 60.0  # seconds
_OWN: Final = frozenset({"bijax", "pallas_kernels"})
_KNOWN: Final = _OWN | {"builtins", "jax", "jaxlib", "ml_dtypes", "numpy"}
_OWN_CACHES: Final = ("lowering_cache", "cached_primitive_lowerings")


def lower_once(function: Callable[..., Any], *, name: str = "", multiple_results: bool = True) -> Rule:
    """Returns a rule that lowers a function of arrays as `jax.interpreters.mlir.lower_fun` does.

    Args:
        function: The function; its parameters are keyword arguments.
        name: A unique name; by default its name in its module. A function without
            one is lowered every time.
        multiple_results: Whether it returns a tuple.
    """
    lower = mlir.lower_fun(function, multiple_results=multiple_results)

    def rule(ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
        if not is_on():
            return list(lower(ctx, *operands, **parameters))
        with _as_cached(ctx) as alone:
            question = _question(alone, name or function, parameters)
        if question is None:
            results = list(lower(ctx, *operands, **parameters))
            if tuple(ctx.platforms or ctx.module_context.platforms) == ("cuda",):
                compile_ahead_of(results, operands, ctx.module_context.symbol_table)
            return results
        kept = _jax_private.kept(question)
        if not kept.forms:
            with _alone(kept.lock):
                if not kept.forms:
                    with _as_cached(ctx) as alone:
                        form, is_kept = _made(question, lower, alone, operands, parameters)
                    if not is_kept:
                        return _insert(ctx, form, operands)
                    kept.forms.append(form)
        return _insert(ctx, kept.forms[0], operands)

    return rule


def _as_cached(ctx: Context) -> contextlib.AbstractContextManager[Context]:
    """Returns a context manager of the rule's context, without the mesh where kernels are the same on others."""
    where = _where(ctx.module_context)
    if where == _IN_SHARD_MAP and not is_partitioned(ctx.module_context):
        return _jax_private.as_on_any_mesh(ctx)
    return contextlib.nullcontext(_jax_private.as_partitioned(ctx) if where == _PARTITIONED else ctx)


def _where(module: Any) -> str:
    """Returns in what a kernel is called that runs on several devices, or ""."""
    if getattr(module.axis_context, "manual_axes", None):
        return _IN_SHARD_MAP
    return _PARTITIONED if is_partitioned(module) else ""


def _made(
    question: str, lower: Rule, ctx: Context, operands: Sequence[Any], parameters: Mapping[str, Any]
) -> tuple[bytes, bool]:
    """Returns a lowered module, and whether to cache it."""
    stored = f"{question}\n{_sources()}"
    form = recall(stored)
    if form is not None:
        make_ready(form)
        compile_ahead(form)
        return form, True
    objects = _objects(ctx)
    form = _form(lower, ctx, operands, parameters)
    if _objects(ctx) != objects:  # it refers to objects with the lifetime of this program
        return form, False
    compile_ahead(form)
    keep(stored, form)
    return form, True


@contextlib.contextmanager
def _alone(lock: Any) -> Iterator[None]:
    """Waits for a thread that lowers the same module, with a timeout: it may wait for this thread elsewhere in JAX."""
    is_held = lock.acquire(timeout=_LONGEST_WAIT)
    try:
        yield
    finally:
        if is_held:
            lock.release()


def _form(lower: Rule, ctx: Context, operands: Sequence[Any], parameters: Mapping[str, Any]) -> bytes:
    """Lowers a function into a separate module."""
    module = ir.Module.create()
    caches: dict[str, Any] = {cache: {} for cache in _OWN_CACHES}
    inside = ctx.module_context.replace(
        module=module, ip=ir.InsertionPoint(module.body), symbol_table=ir.SymbolTable(module.operation), **caches
    )
    results = [mlir.aval_to_ir_type(inside, aval) for aval in ctx.avals_out]
    with ir.InsertionPoint(module.body):
        main = func.FuncOp(_MAIN, ([x.type for x in operands], results))
    with ir.InsertionPoint(main.add_entry_block()):
        # The names of the enclosing calls would stay in the module.
        alone = ctx.replace(module_context=inside, const_lowering={}, name_stack=type(ctx.name_stack)(), traceback=None)
        func.ReturnOp(lower(alone, *main.arguments, **parameters))
    form = io.BytesIO()
    module.operation.write_bytecode(form)
    return form.getvalue()


def _objects(ctx: Context) -> tuple[int, int]:
    """Returns how many objects of this process the program refers to."""
    return len(ctx.module_context.keepalives), len(ctx.module_context.host_callbacks)


def _insert(ctx: Context, form: bytes, operands: Sequence[Any]) -> list[Any]:
    """Inserts a cached module into the program being lowered."""
    module = ir.Module.parse(form, ctx.module_context.context)
    table = ctx.module_context.symbol_table
    name = mlir.merge_mlir_modules(ctx.module_context.module, _MAIN, module, table)
    main = table[name]
    results = _jax_private.inlined(main, operands)
    table.erase(main)
    return results


def _question(ctx: Context, function: Any, parameters: Mapping[str, Any]) -> str | None:
    """Returns everything that the lowered module depends on as text, None if it has no text."""
    module = ctx.module_context
    platforms = tuple(ctx.platforms or module.platforms)
    where, devices = _where(module), getattr(module.axis_context, "num_devices", 0)
    unknown = len(platforms) != 1 or bool(ctx.dim_var_values) or (not where and devices != 1)
    if unknown or module.lowering_parameters != mlir.LoweringParameters():
        return None
    if _has_foreign_kernels(platforms[0]):
        return None
    operands = [_operand(aval) for aval in ctx.avals_in]
    state = _jax_private.state_of_tracing()
    if state is None or None in operands:
        return None
    try:
        machine = _gpu() if platforms == ("cuda",) else is_optimized()
        called = f"{_text(function)} {_text(dict(parameters))}"
    except (_WithoutTextError, UnsupportedError):  # a kernel that asks for an architecture raises if none is known
        return None
    several = has_several_devices(module)
    return f"{platforms[0]} {machine} {preferred_backend()} {where} {several} {called} {operands}\n{state}"


def _has_foreign_kernels(platform: str) -> bool:
    """Returns whether kernels of unknown source are registered for the target."""
    foreign = [k for k in registry.added() if k.name.partition(":")[0].partition(".")[0] not in _OWN]
    return bool(foreign) and any(k.rank(target_for(platform)) is not None for k in foreign)


def _operand(aval: Any) -> str | None:
    if not isinstance(aval, jax.core.ShapedArray) or not all(isinstance(n, int) for n in aval.shape):
        return None
    plain = jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
    return f"{aval.dtype.name}{list(aval.shape)}{'*' if aval.weak_type else ''}" if aval == plain else None


@functools.cache
def _sources() -> str:
    return source_digest(Path(__file__).parents[2])


def _gpu() -> str:
    """Returns what the forms for a GPU depend on of this machine."""
    return f"{cuda_architecture()} {_compilers()} {driver_version()} {multiprocessors()}"


@functools.cache
def _compilers() -> tuple[str, ...]:
    """Returns the versions of the packages that compile parts of a lowered module for GPUs."""
    packages = "jax_cuda12_plugin", "jax_cuda13_plugin", "jax_triton", "triton"
    versions = (next((d.version for d in metadata.Distribution.discover(name=name)), "") for name in packages)
    return tuple(versions)


class _WithoutTextError(Exception):
    """A value without a text that identifies it."""


def _text(value: Any) -> str:
    """Returns a text that is equal for equal values, in every process, and differs for others."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{_text(type(value))}.{value.name}"
    if isinstance(value, np.dtype):
        return f"dtype {value.name}"
    if isinstance(value, Primitive):
        return f"primitive {value.name}"
    if isinstance(value, functools.partial):
        return f"partial{_text((value.func, value.args, value.keywords))}"
    if isinstance(value, (tuple, list, frozenset)):
        parts = [_text(v) for v in value]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, frozenset) else parts)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_text(value[k])}' for k in sorted(value))}}}"
    if isinstance(value, RecordTree):
        return f"records {_tree_text(value.tree)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{_text(type(value))}{_text(fields)}"
    if isinstance(value, (type, types.FunctionType)) or hasattr(value, "__wrapped__"):
        return _named(value)
    raise _WithoutTextError


def _tree_text(tree: Any) -> str:
    return f"{_text(tree.node_data())}[{', '.join(_tree_text(child) for child in tree.children())}]"


def _named(value: Any) -> str:
    """Returns the name of a function or class in a module whose source is known."""
    module, name = value.__module__, value.__qualname__
    if "<" in name or module.partition(".")[0] not in _KNOWN:
        raise _WithoutTextError
    return f"{module}.{name}"


def is_own(function: Callable[..., Any]) -> bool:
    """Returns whether a function belongs to this library, so that its source is part of the cache key."""
    return function.__module__.partition(".")[0] in _OWN
