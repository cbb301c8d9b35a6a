"""Compiles kernels while the program around them is still being lowered.

XLA compiles the Mosaic kernels of a program one after another, half a second each, and caches them for the process,
whichever program they belong to. So each kernel is compiled in a thread as soon as it is lowered, as a program of this
kernel alone that is never run. Most are ready by the time Python has lowered the rest, and XLA finds them when it
compiles the program.

Such a program is stored in JAX's compilation cache however short the compilation: a process with another program of
the same kernels loads them. A kernel that is not ready, or failed to compile, is compiled by XLA as usual.
"""

import functools
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from bijax.core.architecture import cuda_device
from bijax.core.lowering_cache import _jax_private
from bijax.core.tag import kernel_code
from pallas_kernels.runtime.own_settings import own_settings

_TARGET: Final = "mosaic_gpu"  # and a version
_RUNTIME: Final = "jax.experimental.mosaic.gpu"  # locates the library that launches the kernels
_THREADS: Final = 16

_begun: Final[set[bytes]] = set()
_lock: Final = threading.Lock()

Attributes = dict[str, Any]
Kernel = tuple[str, Attributes]  # the target that XLA calls, and its attributes


def make_ready(form: bytes) -> None:
    """Imports what XLA needs to find to compile or load the kernels in a module lowered by another process.

    Args:
        form: A module as MLIR's bytecode.
    """
    if _TARGET.encode() in form:
        importlib.import_module(_RUNTIME)


def compile_ahead(form: bytes) -> None:
    """Starts compiling the kernels in a lowered module, if this process has the GPU that it was lowered for.

    Args:
        form: A module as MLIR's bytecode.
    """
    if _TARGET.encode() in form and (device := cuda_device()) is not None:
        _pool().submit(_compile_form, form, device)


def compile_ahead_of(results: Sequence[Any], operands: Sequence[Any], functions: Mapping[str, Any]) -> None:
    """Starts compiling the kernels that compute the results, as `compile_ahead` does.

    Args:
        results: MLIR values.
        operands: The MLIR values that the results were lowered from.
        functions: The module's functions by name.
    """
    if (device := cuda_device()) is None:
        return
    found: list[Kernel] = []
    values, known = [*results], {*operands}
    while values:
        value = values.pop()
        if value not in known and not isinstance(value.owner, ir.Block):
            _find(value.owner.operation, found, functions)
            values += value.owner.operands
        known.add(value)
    _begin(found, device)


def _begin(kernels: Sequence[Kernel], device: jax.Device) -> None:
    for target, attributes in kernels:
        with _lock:
            is_new = attributes["kernel_hash"] not in _begun
            _begun.add(attributes["kernel_hash"])
        if is_new:
            _pool().submit(_compile, target, attributes, device)


def _compile_form(form: bytes, device: jax.Device) -> None:
    context = mlir.make_ir_context()
    found: list[Kernel] = []
    with context, ir.Location.unknown(context):
        _find(ir.Module.parse(form, context).operation, found, {})
    _begin(found, device)


def _find(operation: Any, found: list[Kernel], functions: Mapping[str, Any]) -> None:
    """Adds the kernels in an operation, and in the functions that it calls."""

    def visit(inside: Any) -> Any:
        if inside.name == "func.call":
            name = ir.FlatSymbolRefAttr(inside.attributes["callee"]).value
            if name in functions:
                _find(functions[name].operation, found, functions)
        elif inside.name == "stablehlo.custom_call":
            target = ir.StringAttr(inside.attributes["call_target_name"]).value
            if target.startswith(_TARGET):
                found.append((target, _attributes(inside.attributes["mhlo.backend_config"])))
        return ir.WalkResult.ADVANCE

    operation.walk(visit)


def _attributes(config: Any) -> Attributes:
    entries: Any = ir.DictAttr(config)
    named = ((entry.name, entry.attr) for entry in entries)
    return {name: value.value_bytes if isinstance(value, ir.StringAttr) else value.value for name, value in named}


def _compile(target: str, attributes: Attributes, device: jax.Device) -> None:
    with own_settings(()), _jax_private.every_compilation_cached():
        _alone(target, attributes, device).lower().compile()


def _alone(target: str, attributes: Attributes, device: jax.Device) -> Any:
    """Returns a program with a kernel as its only instruction."""
    # The machine code depends only on the attributes; the call supplies operands and results.
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((), "float32"))

    def bijax_kernel_ahead() -> jax.Array:
        with kernel_code():  # not transformed where all threads are batch-invariant
            result: jax.Array = call(**attributes)
        return result

    return jax.jit(bijax_kernel_ahead, out_shardings=jax.sharding.SingleDeviceSharding(device))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(_THREADS, processors), "bijax_kernels_ahead")
