"""Launches by XLA's typed interface for custom calls (FFI), which jax-triton 0.4 uses and jax-triton 0.3 does not.

XLA records typed calls in its command buffers (CUDA graphs). Each call by the old interface ends one: a step of a model
with 15 launches was 16 graphs, and the GPU waited for the host between them.
"""

import functools
from collections.abc import Iterable
from typing import Any, Final

from jax.interpreters.mlir import ir

_OLD: Final = "triton_kernel_call"
_TYPED: Final = "triton_kernel_call_ffi"
_VERSION: Final = 4


def make_typed(values: Iterable[Any]) -> None:
    """Makes the launches whose results `values` are typed calls, where jaxlib has the handler for them.

    The handler reads the same description of the kernel.

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
        if "call_target_name" in attributes and ir.StringAttr(attributes["call_target_name"]).value == _OLD:
            with value.context:
                number = ir.IntegerType.get_signless(32)
                attributes["backend_config"] = ir.DictAttr.get({"opaque": attributes["backend_config"]})
                attributes["call_target_name"] = ir.StringAttr.get(_TYPED)
                attributes["api_version"] = ir.IntegerAttr.get(number, _VERSION)


@functools.cache
def _has_handler() -> bool:
    """Whether the CUDA plugin of this jaxlib registers the handler."""
    try:
        from jaxlib import gpu_triton

        plugin: Any = gpu_triton._cuda_triton
        return _TYPED in plugin.registrations()
    except (ImportError, AttributeError):
        return False
