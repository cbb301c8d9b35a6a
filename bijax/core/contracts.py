"""Runs kernels, and records the contracts that a program is computed under."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, order=True)
class Use:
    """One contract under which a kernel runs.

    Attributes:
        contract: Id of the contract.
        dtypes: Dtypes of the kernel's arrays.
        kernel: Full name of the kernel's function.
        operation: "DTYPES -> DTYPES" of the operation that the kernel computes, if it is one of several that run as
            one; else empty.
    """

    contract: str
    dtypes: tuple[str, ...]
    kernel: str
    operation: str = ""


class _Recorder(threading.local):
    uses: list[Use] | None = None
    operation = ""


_recorder = _Recorder()


@contextlib.contextmanager
def recording() -> Iterator[list[Use]]:
    """Records the contracts of the kernels that are traced inside, in this thread.

    Kernels are not traced where a function gives the shapes of their results (`like` of `run`): no schedules are
    compared, no bodies traced. What is traced inside is of no other use.
    """
    outer, _recorder.uses = _recorder.uses, []
    try:
        yield _recorder.uses
    finally:
        _recorder.uses = outer


@contextlib.contextmanager
def recorded_as(operation: str) -> Iterator[None]:
    """Records the contracts inside as those of an operation, "DTYPES -> DTYPES", that is computed with others."""
    outer, _recorder.operation = _recorder.operation, operation
    try:
        yield
    finally:
        _recorder.operation = outer


@contextlib.contextmanager
def without_recording() -> Iterator[None]:
    """Traces real kernels inside, without recording: result shapes do not depend on the platform."""
    outer, _recorder.uses = _recorder.uses, None
    try:
        yield
    finally:
        _recorder.uses = outer


def is_recording() -> bool:
    """Returns whether contracts are recorded in this thread: what is traced does not run."""
    return _recorder.uses is not None


def run[R](kernel: Callable[..., R], *arguments: Any, like: Callable[..., R] | None = None, **options: Any) -> R:
    """Runs a kernel under the contracts among its options.

    Args:
        kernel: A function of `pallas_kernels`.
        *arguments: Its arrays.
        like: A function of the same arguments whose results have the same shapes and dtypes and which is cheap to
            trace; it replaces the kernel while contracts are recorded.
        **options: More arrays and parameters. Those that are contracts, or hold one as `contract`, are recorded.
    """
    if _recorder.uses is None:
        return kernel(*arguments, **options)
    note(kernel, *(getattr(value, "contract", value) for value in options.values()), arrays=(*arguments, options))
    if like is None:
        return kernel(*arguments, **options)
    arrays = {name: value for name, value in options.items() if _is_array(value)}
    others = {name: value for name, value in options.items() if name not in arrays}

    def results(arguments: tuple[Any, ...], arrays: dict[str, Any]) -> R:
        return like(*arguments, **arrays, **others)

    with recording():  # the stand-in for the kernel is not what runs
        shapes = jax.eval_shape(results, arguments, arrays)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def note(kernel: Callable[..., Any], *contracts: Any, arrays: Any = ()) -> None:
    """Records contracts of a function.

    Args:
        kernel: The function.
        *contracts: Contracts; anything without an id is ignored.
        arrays: Its arrays, in any tree.
    """
    if _recorder.uses is None:
        return
    function = kernel.func if isinstance(kernel, functools.partial) else kernel
    name = f"{function.__module__}.{function.__qualname__}"
    dtypes = tuple(str(x.dtype) for x in jax.tree.leaves(arrays) if _is_array(x))
    ids = [c.id for c in contracts if isinstance(getattr(c, "id", None), str)]
    _recorder.uses += [Use(i, dtypes, name, _recorder.operation) for i in ids]


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")
