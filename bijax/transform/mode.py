"""The batch-invariant mode, for code that cannot be wrapped."""

import contextlib
from collections.abc import Iterable, Iterator

from bijax.core.checks import flag
from bijax.transform.hook.allowed import allowed_names
from bijax.transform.hook.lowering import install
from bijax.transform.hook.state import (
    OFF,
    Request,
    close_everywhere,
    close_requests,
    current,
    open_everywhere,
    open_request,
    requested,
)


def enable_batch_invariant_mode(
    *, allow: Iterable[str] = (), all_threads: bool = False, fuse_rows: bool = True
) -> None:
    """Makes everything that this thread traces afterwards batch-invariant, as `bijax.invariant` does.

    Already-jitted functions are traced again. Other threads are not affected, unless requested: call it in
    each, or wrap what they run with `bijax.invariant`.

    Args:
        allow: Names of primitives that would be refused and should be left to XLA, as for `bijax.invariant`.
        all_threads: Whether it applies to every thread, running or started later. A thread inside a block of
            `set_batch_invariant_mode`, or in which the mode was enabled or disabled separately, keeps its own setting.
            `disable_batch_invariant_mode(all_threads=True)` ends it, in any thread.
        fuse_rows: Whether operations on rows may become one kernel, as for `bijax.invariant`.

    Raises:
        TypeError: If `allow` does not hold names, or `all_threads` or `fuse_rows` is not a bool.
        ValueError: If it holds a name that no primitive has.

    Example:
        >>> enable_batch_invariant_mode()
        >>> is_batch_invariant_mode_enabled()
        True
        >>> disable_batch_invariant_mode()
        >>> is_batch_invariant_mode_enabled()
        False
    """
    fused = flag("enable_batch_invariant_mode", "fuse_rows", fuse_rows)
    request = Request(True, allowed_names(allow), fused)
    everywhere = flag("enable_batch_invariant_mode", "all_threads", all_threads)
    install()
    if everywhere:
        open_everywhere(request)
    else:
        open_request(request)


def disable_batch_invariant_mode(*, all_threads: bool = False) -> None:
    """Ends the mode in this thread, however often it was enabled; does nothing if it is not.

    Inside a `with set_batch_invariant_mode():` block it applies until the block ends and restores the old state.

    Args:
        all_threads: Whether it ends in all threads except those that enabled it separately.

    Raises:
        TypeError: If `all_threads` is not a bool.
    """
    if flag("disable_batch_invariant_mode", "all_threads", all_threads):
        close_everywhere()
    else:
        close_requests()


def set_batch_invariant_mode(
    enabled: bool = True, *, allow: Iterable[str] = (), fuse_rows: bool = True
) -> "contextlib._GeneratorContextManager[None]":
    """Sets the mode inside a `with` block or a decorated function, and restores it afterwards.

    As a decorator it needs parentheses, `@set_batch_invariant_mode()`.

    Args:
        enabled: Whether what is traced inside is made invariant. With False, a part of an invariant program stays
            unchanged.
        allow: Names of primitives that would be refused and should be left to XLA, as for `bijax.invariant`.
        fuse_rows: Whether operations on rows may become one kernel, as for `bijax.invariant`.

    Raises:
        TypeError: If `enabled` or `fuse_rows` is not a bool, or `allow` does not hold names.
        ValueError: If `allow` holds a name that no primitive has.

    Guarantee: as `bijax.invariant`, for programs that are traced inside as a whole. In a block inside a traced
    function, a product computed before the block may be contracted with a sum in it (on the CPU).

    Example:
        >>> with set_batch_invariant_mode():
        ...     is_batch_invariant_mode_enabled()
        True
        >>> is_batch_invariant_mode_enabled()
        False
    """
    if callable(enabled):
        raise TypeError(
            f"set_batch_invariant_mode: enabled must be True or False, got the function {enabled!r}; as a decorator,"
            " write @set_batch_invariant_mode() with parentheses."
        )
    enabled = flag("set_batch_invariant_mode", "enabled", enabled)
    fused = flag("set_batch_invariant_mode", "fuse_rows", fuse_rows)
    return _inside(Request(True, allowed_names(allow), fused) if enabled else OFF)


@contextlib.contextmanager
def _inside(request: Request) -> Iterator[None]:
    if request.enabled:
        install()
    with requested(request):
        yield


def is_batch_invariant_mode_enabled() -> bool:
    """Returns whether what this thread traces now is made invariant.

    Example:
        >>> is_batch_invariant_mode_enabled()
        False
    """
    return current().enabled
