"""Python callbacks: those that compute nothing pass, and those that only raise an error may do so.

The result of a callback is not known to be invariant. One that always raises has no result, and so does the check of a
value in a branch of `jax.lax.cond` (`equinox.error_if`). No program shows that a callback always raises, so a callback
in a branch is lowered with a guard, which raises if it returns.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from bijax.transform.errors import NotInvariantError

RAISING: Final = "pure_callback"
"""The callback that may raise an error in a branch."""

RETURNED: Final = (
    "bijax cannot see what the Python callback computes. In a branch of jax.lax.cond a callback may raise an error;"
    " this one returned a value"
)

GUARDED: Final = "in a branch it may only raise an error: if it returns, NotInvariantError is raised"


class _Branch(threading.local):
    inside: bool = False


_branch = _Branch()


@contextlib.contextmanager
def branches(name: str, parameters: dict[str, Any]) -> Iterator[None]:
    """Notes that the programs of a primitive run under a condition, if it is such a primitive.

    Args:
        name: Name of the primitive.
        parameters: Its parameters.
    """
    outer = _branch.inside
    _branch.inside = outer or is_conditional(name, parameters)
    try:
        yield
    finally:
        _branch.inside = outer


def is_conditional(name: str, parameters: dict[str, Any]) -> bool:
    """Returns whether the programs of a primitive run under a condition, other than the platform."""
    return name == "cond" and not parameters.get("branches_platforms")


def in_branch() -> bool:
    """Returns whether this thread lowers a program that runs under a condition."""
    return _branch.inside


def only_raising(parameters: dict[str, Any], operation: str, line: str) -> dict[str, Any]:
    """Returns the parameters of a callback with a guard that raises `NotInvariantError` if it returns.

    Args:
        parameters: Parameters of the primitive.
        operation: The operation, for the error.
        line: Where the user's program requests it.
    """
    callback: Callable[..., Any] = parameters["callback"]

    def guarded(*arrays: Any) -> Any:
        callback(*arrays)
        raise NotInvariantError(RAISING, operation, RETURNED, line)

    return {**parameters, "callback": guarded}
