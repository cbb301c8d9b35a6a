"""JAX's settings while the library traces, compiles and runs something of its own.

A caller may have set a mesh, a precision, wide types, checks for nans or a guard against transfers. All of them are
meant for the caller's program. What the library finds out for itself while that program is traced or lowered must be
the same under each of them, since it is kept for the whole process.

Left as they are: what JAX reports of its work (`jax_log_compiles`, `jax_explain_cache_misses`), its caches and its
compiler's options, the kind of new random keys, of which the library makes none, and flags for parts of JAX that the
library does not use.
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
    """Puts the settings into force under which the library's own code is traced as a part of a caller's program.

    Meshes and the width of types follow the program; `of_width` sets the latter.
    """
    with contextlib.ExitStack() as stack:
        for setting in _TRACING:
            stack.enter_context(setting())
        yield


@contextlib.contextmanager
def own_settings(arrays: Iterable[Any]) -> Iterator[None]:
    """Puts the settings into force under which the library compiles and runs what it computes for itself.

    Args:
        arrays: The arguments of what is computed, arrays or their shapes; they say whether wide types are needed.
    """
    with own_tracing(), of_width(arrays), contextlib.ExitStack() as stack:
        for setting in _RUNNING:
            stack.enter_context(setting())
        yield


def of_width(arrays: Iterable[Any]) -> AbstractContextManager[Any]:
    """Returns a context with types of 64 bits if one of the arrays has them, without them if none has.

    A Python number is 64 bits wide where they are enabled, and code that counts with it is compiled in another way.

    Args:
        arrays: Anything with a dtype; what has none counts as narrow.
    """
    return jax.enable_x64(any(map(_is_wide, arrays)))


def _is_wide(array: Any) -> bool:
    return getattr(getattr(array, "dtype", None), "name", "") in _WIDE
