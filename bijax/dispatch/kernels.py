"""Runs the registered kernel for a call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from bijax.core.contracts import run
from bijax.core.primitive import Arrays, Backend
from pallas_kernels.registry import Found, find, find_or_none
from pallas_kernels.target import Target


def run_kernel(
    operation: str, target: Target, fixed: Any, *arrays: Any, like: Callable[..., Any] | None = None, **parameters: Any
) -> Any:
    """Runs the kernel that serves a call on a target, under its contract.

    Args:
        operation: Name of the operation; `git grep '"NAME"' pallas_kernels/backends` finds its kernels.
        target: The target that the program is lowered for.
        fixed: The properties that choose the contract, see `pallas_kernels.registry.find`.
        *arrays: The arrays.
        like: A function of the same arrays and parameters whose results have the same shapes and dtypes and which is
            cheap to trace, see `bijax.core.contracts.run`; None if the kernel is cheap to trace.
        **parameters: The parameters, and arrays by name.

    Raises:
        UnsupportedError: If no kernel serves the call.
    """
    return run_found(find(operation, target, fixed, *arrays, **parameters), arrays, parameters, like=like)


def run_if_served(
    operation: str, target: Target, fixed: Any, *arrays: Any, like: Callable[..., Any], **parameters: Any
) -> Any | None:
    """Runs the kernel as `run_kernel` does; returns None if no kernel serves the call."""
    found = find_or_none(operation, target, fixed, *arrays, **parameters)
    return None if found is None else run_found(found, arrays, parameters, like=like)


def run_found(
    found: Found, arrays: Arrays, parameters: dict[str, Any], *, like: Callable[..., Any] | None = None
) -> Any:
    """Runs a kernel that `pallas_kernels.registry.find` found, as `run_kernel` does."""
    _, function, contracts = found
    if like is None:
        return run(function, *arrays, **contracts, **parameters)
    return run(function, *arrays, like=partial(_without, like, tuple(contracts)), **contracts, **parameters)


def backend_of(operation: str, shapes: Callable[..., Any] | None = None) -> Backend:
    """Returns the backend of an operation whose contracts do not depend on the call.

    Args:
        operation: Name of the operation.
        shapes: As `like` of `run_kernel`; by default the kernel for a CPU.
    """
    like = shapes or partial(run_kernel, operation, Target("cpu"), None)

    def backend(target: Target, *arrays: jax.Array, **parameters: Any) -> Arrays:
        return as_tuple(run_kernel(operation, target, None, *arrays, like=like, **parameters))

    return backend


def as_tuple(results: Any) -> Arrays:
    """Returns the results of a kernel, which may be one array, as a tuple."""
    return results if isinstance(results, tuple) else (results,)


def _without(function: Callable[..., Any], names: tuple[str, ...], *arrays: Any, **options: Any) -> Any:
    return function(*arrays, **{name: value for name, value in options.items() if name not in names})
