"""Ahead-of-time compilation for the CPU, possible while another program is being traced."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from pallas_kernels.runtime.own_settings import own_settings


def ahead_of_time(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Returns the compiled function, for use while another program is being traced.

    It is lowered here and compiled in a thread; the first call waits for it. So operands can be made, and other
    programs lowered, while XLA compiles it. It is compiled and run under the library's own settings (`own_settings`),
    not the caller's.
    """
    device = jax.local_devices(backend="cpu")[0]
    with own_settings(arguments), jax.default_device(device):
        # A jitted call would become part of the program being traced.
        lowered = jax.jit(function).lower(*arguments)

    def compile_it() -> Any:
        with own_settings(arguments), jax.default_device(device):
            return lowered.compile()

    compiled = _pool().submit(compile_it)

    def run(*arrays: Any) -> Any:
        program = compiled.result()
        with own_settings(arguments), jax.default_device(device):
            return program(*arrays)

    return run


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Returns the threads that compile: two, because most of a small program's compilation runs in one thread."""
    return ThreadPoolExecutor(2, "bijax_ahead_of_time")
