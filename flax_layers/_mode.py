"""The mode in which the methods of an invariant layer run."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator

import bijax


@contextlib.contextmanager
def invariant_mode() -> Iterator[None]:
    """Makes code traced inside batch-invariant.

    Example:
        >>> with invariant_mode():
        ...     bijax.is_batch_invariant_mode_enabled()
        True
    """
    # Where the mode is on already, its `allow` stays.
    with contextlib.nullcontext() if bijax.is_batch_invariant_mode_enabled() else bijax.set_batch_invariant_mode():
        yield


def invariant_function[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that computes what another one does, batch-invariantly.

    Example:
        >>> invariant_function(len)([1, 2])
        2
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with invariant_mode():
            return function(*args, **kwargs)

    return run


def check_method(cls: type, name: str) -> None:
    """Checks that a class's method computes during its call, and so inside the mode.

    Raises:
        TypeError: If its body runs later.

    Example:
        >>> check_method(dict, "get")
    """
    method = getattr(cls, name)
    body = inspect.unwrap(method)
    called = body if inspect.isroutine(body) else type(body).__call__
    tests = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(test(f) for f in (method, body, called) for test in tests):
        raise TypeError(
            f"invariant_layer: expected methods that return their results, got {cls.__qualname__}.{name}, whose body"
            " runs after the call; let its name start with an underscore, and call it inside of a method that returns."
        )
