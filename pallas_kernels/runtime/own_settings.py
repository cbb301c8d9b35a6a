"""JAX's settings while the library traces, compiles and runs its own programs.

A caller may have set a mesh, a precision, x64 mode, nan checks or a transfer guard. These settings are meant for the
caller's program. Results that the library computes for itself while that program is traced or lowered must not depend
on them, since they are cached for the whole process.

Not changed: logging (`jax_log_compiles`, `jax_explain_cache_misses`), caches, compiler options, the implementation of
new random keys (the library creates none), and flags for parts of JAX that the library does not use.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import jax

_WIDE: Final = frozenset({"int64", "uint64", "float64", "complex128"})


def without_mesh() -> AbstractContextManager[Any]:
    """Returns a context in which what is traced knows of no mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


_TRACING: Final[tuple[Callable[[], AbstractContextManager[Any]], ...]] = (
    lambda: jax.numpy_dtype_promotion("standard"),
    lambda: jax.numpy_rank_promotion("allow"),
    lambda: jax.default_matmul_precision(None),
    lambda: jax.allow_f16_reductions(True),
)
_RUNNING: Final[tuple[Callable[[], AbstractContextManager[Any]], ...]] = (
    without_mesh,
    lambda: jax.disable_jit(False),
    lambda: jax.no_tracing(False),
    lambda: jax.no_execution(False),
    lambda: jax.check_tracer_leaks(False),
    lambda: jax.debug_key_reuse(False),
    lambda: jax.debug_nans(False),
    lambda: jax.debug_infs(False),
    lambda: jax.transfer_guard("allow"),
    lambda: jax.default_device(None),
)


@contextlib.contextmanager
def own_tracing() -> Iterator[None]:
    """Sets the configuration for tracing the library's own code as part of a caller's program.

    The mesh and x64 mode follow the program; `of_width` sets the latter.
    """
    with contextlib.ExitStack() as stack:
        for setting in _TRACING:
            stack.enter_context(setting())
        yield


@contextlib.contextmanager
def own_settings(arrays: Iterable[Any]) -> Iterator[None]:
    """Sets the configuration for compiling and running the library's own programs.

    Args:
        arrays: The arguments of the program, arrays or their shapes; they determine whether x64 mode is needed.
    """
    with own_tracing(), of_width(arrays), contextlib.ExitStack() as stack:
        for setting in _RUNNING:
            stack.enter_context(setting())
        yield


def of_width(arrays: Iterable[Any]) -> AbstractContextManager[Any]:
    """Returns a context that enables x64 mode if any array has a 64-bit dtype, and disables it otherwise.

    In x64 mode Python numbers are 64 bits wide, so code that uses them compiles differently.

    Args:
        arrays: Anything with a dtype; objects without one count as narrow.
    """
    return jax.enable_x64(any(map(_is_wide, arrays)))


def _is_wide(array: Any) -> bool:
    return getattr(getattr(array, "dtype", None), "name", "") in _WIDE
