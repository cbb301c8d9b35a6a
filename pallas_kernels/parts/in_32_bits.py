"""Tracing of kernels that count in 32 bits."""

import functools
from collections.abc import Callable

import jax


def in_32_bits[**Parameters, Result](launch: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a function trace its kernel without 64-bit types, whatever the user's `jax_enable_x64`.

    Where 64-bit types are enabled a Python number is 64 bits wide to JAX, the indices of a kernel are not, and the two
    do not mix.
    """

    @functools.wraps(launch)
    def traced(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with jax.enable_x64(False):
            return launch(*args, **kwargs)

    return traced
