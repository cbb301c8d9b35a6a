"""Kernels are compiled while the program around them is still being lowered.

XLA turns the Mosaic kernels of a program into machine code one after the other, half a second each, and keeps those
that the process has compiled, whichever program they were for. So a kernel is compiled in a thread of its own as soon
as it is lowered, as a program of this kernel alone, which is never run. Until Python has lowered the others, most are
ready, and XLA finds them when it compiles the program.

Such a program is entered into JAX's compilation cache however short it took: a process that has another program of
the same kernels loads them. Where a kernel is not ready, or could not be compiled, XLA does so as it would have.
"""

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from bijax.core import _jax_private
from bijax.core.architecture import cuda_device

_TARGET: Final = "mosaic_gpu"  # and a version
_THREADS: Final = 16

_begun: Final[set[bytes]] = set()
_lock: Final = threading.Lock()

Attributes = dict[str, Any]


def compile_ahead(form: bytes) -> None:
    """Begins to compile the kernels in a lowered form, if this process has the GPU that it was lowered for.

    Args:
        form: A module as MLIR's bytecode.
    """
    if _TARGET.encode() in form and (device := cuda_device()) is not None:
        _pool().submit(_compile_kernels, form, device)


def _compile_kernels(form: bytes, device: jax.Device) -> None:
    for target, attributes in _kernels(form):
        with _lock:
            is_new = attributes["kernel_hash"] not in _begun
            _begun.add(attributes["kernel_hash"])
        if is_new:
            _pool().submit(_compile, target, attributes, device)


def _kernels(form: bytes) -> list[tuple[str, Attributes]]:
    """Returns the target and the attributes of each kernel."""
    found: list[tuple[str, Attributes]] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target.startswith(_TARGET):
                found.append((target, _attributes(operation.attributes["mhlo.backend_config"])))
        return ir.WalkResult.ADVANCE

    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        ir.Module.parse(form, context).operation.walk(visit)
    return found


def _attributes(config: Any) -> Attributes:
    entries: Any = ir.DictAttr(config)
    named = ((entry.name, entry.attr) for entry in entries)
    return {name: value.value_bytes if isinstance(value, ir.StringAttr) else value.value for name, value in named}


def _compile(target: str, attributes: Attributes, device: jax.Device) -> None:
    with _jax_private.every_compilation_cached():
        _alone(target, attributes, device).lower().compile()


def _alone(target: str, attributes: Attributes, device: jax.Device) -> Any:
    """Returns a program whose one instruction is a kernel."""
    # The machine code depends on the attributes alone: operands and results are those of the call.
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((), "float32"))

    def bijax_kernel_ahead() -> jax.Array:
        result: jax.Array = call(**attributes)
        return result

    return jax.jit(bijax_kernel_ahead, out_shardings=jax.sharding.SingleDeviceSharding(device))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(_THREADS, processors), "bijax_kernels_ahead")
