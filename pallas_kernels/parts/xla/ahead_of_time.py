"""Compiling a function for the CPU while another program may be being traced."""

from collections.abc import Callable
from typing import Any

import jax


def ahead_of_time(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Returns the compiled function, for use while another program is being traced."""
    # A jitted call in here would become a part of the program that is being traced.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.jit(function).lower(*arguments).compile()
