"""Kernels that only serve some calls, with a predicate that dispatch evaluates before it chooses."""

import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels.errors import UnsupportedError


class Served[**P, R]:
    """A kernel with a predicate for the calls that it serves.

    Any other call raises an error: there is no fallback to another program.

    Args:
        kernel: The kernel.
        serves: Takes the arguments of the kernel; returns whether the kernel serves them.
        needs: The kernel's requirements, for the error message.

    Example:
        >>> import jax.numpy as jnp
        >>> @served_if(lambda x: x.ndim == 2, "a matrix")
        ... def twice(x):
        ...     return x + x
        >>> twice.serves(jnp.ones(3))
        False
        >>> twice(jnp.ones(3))
        Traceback (most recent call last):
            ...
        pallas_kernels.errors.UnsupportedError: twice: expected a matrix, got float32[3].
    """

    def __init__(self, kernel: Callable[P, R], serves: Callable[..., bool], needs: str) -> None:
        functools.update_wrapper(self, kernel)
        self._kernel, self._serves, self._needs = kernel, serves, needs

    def serves(self, *args: Any, **kwargs: Any) -> bool:
        """Returns whether the kernel serves a call with these arguments."""
        return self._serves(*args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the kernel.

        Raises:
            UnsupportedError: If it does not serve the call.
        """
        if not self._serves(*args, **kwargs):
            arrays: list[Any] = [a for a in (*args, *kwargs.values()) if hasattr(a, "dtype")]
            came = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
            name = getattr(self._kernel, "__name__", repr(self._kernel))
            raise UnsupportedError(f"{name}: expected {self._needs}, got {came}.")
        return self._kernel(*args, **kwargs)


def served_if[**P, R](serves: Callable[..., bool], needs: str) -> Callable[[Callable[P, R]], Served[P, R]]:
    """Returns a decorator that makes a kernel reject calls that it does not serve; see `Served`."""
    return lambda kernel: Served(kernel, serves, needs)
