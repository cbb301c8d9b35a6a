"""Launches by XLA's typed interface for custom calls (FFI), which jax-triton 0.4 uses and jax-triton 0.3 does not.

XLA records typed calls in its command buffers (CUDA graphs). Each call by the old interface ends one: a step of a model
with 15 launches was 16 graphs, and the GPU waited for the host between them. What describes a launch is made short
in both versions, see `description`.
"""

import functools
from collections.abc import Iterable
from typing import Any, Final

from jax.interpreters.mlir import ir

from pallas_kernels.parts.jax_triton.description import shortened
from pallas_kernels.parts.jax_triton.native_calls import make_native

_OLD: Final = "triton_kernel_call"
_TYPED: Final = "triton_kernel_call_ffi"
_VERSION: Final = 4
_TARGET: Final = "call_target_name"
_CONFIGS: Final = ("backend_config", "mhlo.backend_config")


def make_typed(values: Iterable[Any]) -> None:
    """Makes the launches whose results `values` are short typed calls, where jaxlib has the handler for them.

    The handler reads the same description of the kernel as that of the old interface.

    Args:
        values: Values of MLIR, or sequences of them.
    """
    if not _has_handler():
        return
    for value in values:
        if not isinstance(value, ir.Value):
            make_typed(value)
            continue
        attributes: Any = getattr(value.owner, "attributes", {})
        target = ir.StringAttr(attributes[_TARGET]).value if _TARGET in attributes else None
        if target in (_OLD, _TYPED) and make_native(value.owner, _description(attributes)):
            continue
        if target == _OLD:
            with value.context:
                attributes["backend_config"] = ir.DictAttr.get({"opaque": _short(attributes["backend_config"])})
                attributes[_TARGET] = ir.StringAttr.get(_TYPED)
                attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _VERSION)
        elif target == _TYPED:
            _shorten(attributes, value.context)


def _description(attributes: Any) -> bytes:
    """Returns what a call passes to its handler; nothing if it is somewhere else."""
    found = (attributes[name] for name in _CONFIGS if name in attributes)
    for config in found:
        text = config["opaque"] if isinstance(config, ir.DictAttr) and "opaque" in config else config
        if isinstance(text, ir.StringAttr) and text.value_bytes:
            return bytes(text.value_bytes)
    return b""


def _shorten(attributes: Any, context: ir.Context) -> None:
    """Makes the description of a typed call short, wherever this version of JAX keeps what is meant for the handler."""
    for name in _CONFIGS:
        config: Any = attributes.get(name)
        describes = isinstance(config, ir.DictAttr) and "opaque" in config
        if describes:
            with context:
                others = {attribute.name: attribute.attr for attribute in config}
                attributes[name] = ir.DictAttr.get(others | {"opaque": _short(config["opaque"])})


def _short(description: Any) -> ir.StringAttr:
    return ir.StringAttr.get(shortened(ir.StringAttr(description).value_bytes))


@functools.cache
def _has_handler() -> bool:
    """Whether the CUDA plugin of this jaxlib registers the handler."""
    try:
        from jaxlib import gpu_triton

        plugin: Any = gpu_triton._cuda_triton
        return _TYPED in plugin.registrations()
    except (ImportError, AttributeError):
        return False
