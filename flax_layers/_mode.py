"""The mode in which the methods of an invariant layer run."""

import contextlib
from collections.abc import Iterator

import bijax


@contextlib.contextmanager
def invariant_mode() -> Iterator[None]:
    """Makes what is traced inside batch-invariant.

    Example:
        >>> with invariant_mode():
        ...     bijax.is_batch_invariant_mode_enabled()
        True
    """
    # Where the mode is on already, it may have been told to let some operations pass; that choice stays.
    with contextlib.nullcontext() if bijax.is_batch_invariant_mode_enabled() else bijax.set_batch_invariant_mode():
        yield
