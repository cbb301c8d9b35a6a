"""Tracing of kernels with 32-bit indices."""

import functools
from collections.abc import Callable

import jax


def in_32_bits[**Parameters, Result](launch: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a function trace its kernel without 64-bit types, whatever the user's `jax_enable_x64`.

    In x64 mode, JAX treats Python numbers as 64 bits wide, but kernel indices have 32 bits, and the two do not mix.
    """

    @functools.wraps(launch)
    def traced(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with jax.enable_x64(False):
            return launch(*args, **kwargs)

    return traced
