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

_OLD: Final = "triton_kernel_call"
_TYPED: Final = "triton_kernel_call_ffi"
_VERSION: Final = 4


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
        described = _described(attributes)
        if described:
            with value.context:
                described["opaque"] = ir.StringAttr.get(shortened(ir.StringAttr(described["opaque"]).value_bytes))
                attributes["backend_config"] = ir.DictAttr.get(described)
                attributes["call_target_name"] = ir.StringAttr.get(_TYPED)
                attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _VERSION)


def _described(attributes: Any) -> dict[str, Any]:
    """Returns the attributes that a typed call has for the handler; none if an operation is no launch."""
    if "call_target_name" not in attributes or "backend_config" not in attributes:
        return {}
    target, config = ir.StringAttr(attributes["call_target_name"]).value, attributes["backend_config"]
    if target == _OLD:
        return {"opaque": config}
    if target != _TYPED or not isinstance(config, ir.DictAttr) or "opaque" not in config:
        return {}
    return {named.name: named.attr for named in config}


@functools.cache
def _has_handler() -> bool:
    """Whether the CUDA plugin of this jaxlib registers the handler."""
    try:
        from jaxlib import gpu_triton

        plugin: Any = gpu_triton._cuda_triton
        return _TYPED in plugin.registrations()
    except (ImportError, AttributeError):
        return False
