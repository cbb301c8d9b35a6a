"""Ahead-of-time compilation for the CPU, possible while another program is being traced."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.runtime.own_settings import own_settings


def ahead_of_time(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Returns the compiled function, for use while another program is being traced.

    It is compiled and run under the library's own settings (`own_settings`), not the caller's.
    """
    device = jax.local_devices(backend="cpu")[0]
    with own_settings(arguments), jax.default_device(device):
        # A jitted call would become part of the program being traced.
        compiled = jax.jit(function).lower(*arguments).compile()

    def run(*arrays: Any) -> Any:
        with own_settings(arguments), jax.default_device(device):
            return compiled(*arrays)

    return run
