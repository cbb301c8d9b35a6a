"""Runs launches on a CPU by Triton's interpreter, in a process with TRITON_INTERPRET=1.

A launch that reads or writes outside its arrays is an error. The kernels compute with numpy: what they compute can be
compared with float64, their bits are those of a GPU only where the arithmetic is exact.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import jax
import numpy as np

from pallas_kernels.parts.jax_triton.launch import Launch, launch_p

_NAMES: Final = {"bool": "int1"}


class _Buffer:
    """A numpy array as the interpreter reads it: an address and a dtype."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, _NAMES.get(array.dtype.name, array.dtype.name)

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def interpret_launches() -> None:
    """Makes the launches of this process run in the interpreter; call the kernels' functions outside of `jax.jit`."""
    launch_p.def_impl(_run)


def _run(*arrays: jax.Array, described: Launch) -> list[jax.Array]:
    from triton.runtime.interpreter import InterpretedFunction

    buffers = iter([_Buffer(np.array(a)) for a in arrays])
    arguments = [a if isinstance(a, int) else next(buffers) for a in described.arguments]
    # A result that a kernel does not write shows up as nan, or as a number that stands out.
    results = [_Buffer(_unwritten(r)) for r in described.results]
    for array, result in described.aliases:
        results[result] = _Buffer(np.array(arrays[array]))
    kernel, held = described.kernel, [x for x in (*arguments, *results) if isinstance(x, _Buffer)]
    assert isinstance(kernel, InterpretedFunction), "set TRITON_INTERPRET=1 before Triton is imported"
    with _within([x.array for x in held], described.name):
        _execute(kernel.rewrite(), kernel.arg_names, described.grid, (*arguments, *results), dict(described.constants))
    return [jax.numpy.asarray(r.array) for r in results]


@contextlib.contextmanager
def _within(arrays: list[np.ndarray], name: str) -> Iterator[None]:
    """Checks each address that the interpreter reads or writes inside."""
    from triton.runtime.interpreter import InterpreterBuilder

    builder: Any = InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    bounds = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]

    def check(pointers: Any, mask: Any, what: str) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        at = pointers.data[mask.data].astype(np.int64)
        inside = np.zeros(at.shape, bool)
        for first, end in bounds:
            inside |= (at >= first) & (at + size <= end)
        if not inside.all():
            raise IndexError(f"{name} {what} {(~inside).sum()} elements outside its arrays.")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "reads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "writes")
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def _unwritten(result: jax.ShapeDtypeStruct) -> np.ndarray:
    inexact = jax.numpy.issubdtype(result.dtype, np.inexact)
    value: Any = np.nan if inexact else np.bool_(True) if result.dtype == bool else 77
    return np.full(result.shape, value, result.dtype)


def _execute(function: Any, names: Any, grid: tuple[int, ...], arguments: Any, constants: dict[str, Any]) -> None:
    from triton.runtime.interpreter import GridExecutor

    class Executor(GridExecutor):
        """Takes addresses of this process as they are: Triton copies arrays of PyTorch to the host and back."""

        def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
            return args, kwargs

        def _restore_args_dev(self, *_: Any) -> None:
            return None

    Executor(function, names, grid, ())(*arguments, **constants)
