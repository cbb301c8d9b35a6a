"""Checks compiled programs that are called inside invariant functions, or in the mode.

A program that was compiled earlier is neither traced nor lowered when it is called, and JAX does not report the call.
So while a request is active in any thread, `jax.stages.Compiled.__call__` is a function that runs a check first; the
check reads the request of its own thread. When the last request ends, JAX's own function is restored.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from jax.stages import Compiled

Check = Callable[[Compiled], None]

_lock = threading.Lock()
_requests = 0
_stock: Callable[..., Any] = Compiled.__call__


class Watch:
    """Active while a request is; entered and left once."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def __enter__(self) -> None:
        global _requests, _stock
        with _lock:
            _requests += 1
            if _requests == 1 and not _is_ours(Compiled.__call__):
                _stock = Compiled.__call__
                Compiled.__call__ = _checked(_stock, self._check)  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        global _requests
        with _lock:
            _requests -= 1
            # A wrapper that another library installed around ours stays; ours then does nothing.
            if _requests == 0 and _is_ours(Compiled.__call__):
                Compiled.__call__ = _stock  # type: ignore[method-assign]


@functools.cache
def _checked(stock: Callable[..., Any], check: Check) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: Compiled, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return stock(self, *args, **kwargs)

    call._bijax_check = check  # type: ignore[attr-defined]
    return call


def _is_ours(call: Any) -> bool:
    return "_bijax_check" in vars(call)
