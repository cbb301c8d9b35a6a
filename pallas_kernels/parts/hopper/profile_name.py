"""Names of kernels in profiles and compiled code, derived from the function that defines the body."""

import functools
from collections.abc import Callable
from typing import Any


def profile_name(body: Callable[..., Any]) -> str:
    """Returns the name of the module-level function that created a body.

    Args:
        body: A function, possibly with arguments bound.

    Example:
        >>> def log_softmax():
        ...     def step(): ...
        ...     return functools.partial(step)
        >>> profile_name(log_softmax())
        'log_softmax'
    """
    while isinstance(body, functools.partial):
        body = body.func
    return body.__qualname__.partition(".")[0].strip("_")
