"""Whether equations being traced or lowered should be made invariant.

The request has two parts. A tag on every equation traced inside stays with the equation until it is lowered, wherever
that happens, and through autodiff and `vmap`. A context value covers equations that were traced before (without the
tag) and are lowered inside. Both are part of the keys of JAX's caches, so nothing compiled on one side is used on the
other. Both are per thread, except a context value that applies to every thread without its own.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final

from jax.experimental.xla_metadata import set_xla_metadata
from jax.stages import Compiled

from bijax.core.contexts import OFF as OFF
from bijax.core.contexts import Request as Request
from bijax.core.contexts import request_context
from bijax.core.tag import KERNEL, TAG
from bijax.transform.hook.watch import Watch

INVARIANT: Final = "invariant"
"""Tag of an equation that should be made invariant."""

PLAIN: Final = "plain"
"""Tag of an equation that should stay unchanged in an invariant program."""

ALLOWED: Final = "bijax_allowed"
"""Attribute that lists the primitives that the caller allows."""

APART: Final = "bijax_apart"
"""Attribute of an equation that must not become part of a row program."""


BEFORE_CALLS: Final[list[Callable[[Compiled], None]]] = []
"""Called before a compiled program runs in any thread, while a request is active in one."""


def current() -> Request:
    """Returns the active request of this thread."""
    return request_context.value


def tagged(request: Request) -> contextlib.AbstractContextManager[None]:
    """Tags the equations that are traced inside, in this thread, with a request."""
    tag = INVARIANT if request.enabled else PLAIN
    return set_xla_metadata(
        **{TAG: tag, ALLOWED: " ".join(request.allowed) or None, APART: None if request.fuse_rows else "true"}
    )


def untagged() -> contextlib.AbstractContextManager[None]:
    """Leaves the equations that are traced inside, in this thread, without a tag."""
    return set_xla_metadata(**{TAG: None, ALLOWED: None, APART: None})


def _before_calls(program: Compiled) -> None:
    for check in BEFORE_CALLS:
        check(program)


class _Change:
    """Activates a request in this thread; a class, because it may stay open indefinitely."""

    def __init__(self, request: Request) -> None:
        self.watch = Watch(_before_calls) if request.enabled else None
        self._managers = (request_context(request), tagged(request), self.watch or contextlib.nullcontext())

    def __enter__(self) -> None:
        for manager in self._managers:
            manager.__enter__()

    def __exit__(self, *error: object) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(None, None, None)


class _Opened(threading.local):
    """Changes in this thread, inside the innermost `requested` block, that are still open.

    A thread may end without closing them. Its state ends with it, and so do its watches, which are of the process.
    """

    def __init__(self) -> None:
        self.changes: list[_Change] = []
        self.watches: list[Watch] = []
        self._thread = _Thread()
        weakref.finalize(self._thread, _end, self.watches).atexit = False


class _Thread:
    """Lives as long as the state of a thread."""


def _end(watches: list[Watch]) -> None:
    while watches:
        watches.pop().__exit__()


_opened = _Opened()
_everywhere: Final[list[Watch]] = []
_everywhere_lock: Final = threading.Lock()


@contextlib.contextmanager
def requested(request: Request) -> Iterator[None]:
    """Activates a request for what is traced or lowered inside, in this thread."""
    outer, _opened.changes = _opened.changes, []
    try:
        with contextlib.nullcontext() if request == current() else _Change(request):
            try:
                yield
            finally:
                _close()
    finally:
        _opened.changes = outer


def open_request(request: Request) -> None:
    """Activates a request until `close_requests`, or until the enclosing `requested` block ends."""
    change = _Change(request)
    change.__enter__()
    _opened.changes.append(change)
    if change.watch:
        _opened.watches.append(change.watch)


def close_requests() -> None:
    """Undoes every `open_request` in the innermost `requested` block, and ends the request of that block."""
    _close()
    if current().enabled:
        open_request(OFF)


def open_everywhere(request: Request) -> None:
    """Activates a request in this thread, and in all threads without their own, until `close_everywhere`."""
    with _everywhere_lock:
        _close_everywhere()
        watch = Watch(_before_calls)
        watch.__enter__()
        _everywhere.append(watch)
        request_context.set_global(request)
    _close()
    if current() != request:
        open_request(request)


def close_everywhere() -> None:
    """Undoes `open_everywhere`. Requests that other threads opened themselves stay active."""
    with _everywhere_lock:
        _close_everywhere()
    close_requests()


def _close_everywhere() -> None:
    request_context.set_global(OFF)
    while _everywhere:
        _everywhere.pop().__exit__()


def _close() -> None:
    while _opened.changes:
        change = _opened.changes.pop()
        change.__exit__()
        if change.watch:
            _opened.watches.remove(change.watch)


def of_equation(metadata: dict[str, str] | None) -> Request:
    """Returns the request for an equation being lowered.

    Args:
        metadata: Metadata of the equation.
    """
    tag = (metadata or {}).get(TAG)
    if tag is None:
        return current()
    if tag in (KERNEL, PLAIN):
        return OFF
    found = metadata or {}
    return Request(True, tuple(found.get(ALLOWED, "").split()), APART not in found)
