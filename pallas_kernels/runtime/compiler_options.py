"""Caches in this process of what depends on the options of the compiler, which may change.

Comparisons of programs, and what they are compared with, are valid for the machine code that XLA makes. A setting of
JAX, `jax_disable_most_optimizations`, changes it for all programs that are compiled later.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax


def is_optimized() -> bool:
    """Returns whether XLA optimizes programs."""
    return not jax.config.read("jax_disable_most_optimizations")


class CachedForOptions[**P, R]:
    """A function of hashable arguments whose results are kept, for each setting of the compiler.

    Args:
        function: The function.
        maxsize: The number of results; the least recently used are dropped.
    """

    def __init__(self, function: Callable[P, R], maxsize: int | None) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self._found: Any = functools.lru_cache(maxsize)(lambda _, *args, **kwargs: function(*args, **kwargs))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns the result of the function."""
        found: R = self._found(is_optimized(), *args, **kwargs)
        return found

    def cache_clear(self) -> None:
        """Drops all results."""
        self._found.cache_clear()


def cached_for_options[**P, R](maxsize: int | None = None) -> Callable[[Callable[P, R]], CachedForOptions[P, R]]:
    """Returns a decorator, as `functools.lru_cache` does.

    Args:
        maxsize: The number of results; None for all.

    Example:
        >>> calls = []
        >>> @cached_for_options()
        ... def double(number):
        ...     calls.append(number)
        ...     return 2 * number
        >>> double(4), double(4), calls
        (8, 8, [4])
    """
    return functools.partial(CachedForOptions, maxsize=maxsize)
