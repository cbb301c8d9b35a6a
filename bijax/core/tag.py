"""The tag that says how an equation is to be lowered.

Every equation of a traced program can carry metadata; it is part of the keys of JAX's trace and compilation caches, is
inherited by what autodiff and `vmap` make of an equation, and ends up as an attribute of the compiled instruction.
`bijax.transform` tags what it makes invariant; kernel code is tagged here, so that it is left unchanged.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels.runtime.own_settings import own_tracing

TAG: Final = "bijax"
"""Name of the attribute."""

KERNEL: Final = "kernel"
"""Value of the attribute for code whose bits a contract already fixes."""


class _Inside(threading.local):
    value: bool = False


_inside = _Inside()


@contextlib.contextmanager
def kernel_code() -> Iterator[None]:
    """Tags the equations that are traced inside as the code of a kernel.

    The caller's settings for promotion and precision apply to the caller's code: a promotion in a kernel is no mistake
    of theirs, and a kernel's contract fixes the order of its sums.
    """
    outer, _inside.value = _inside.value, True
    try:
        with set_xla_metadata(**{TAG: KERNEL}), own_tracing():
            yield
    finally:
        _inside.value = outer


def in_kernel_code() -> bool:
    """Returns whether this thread is inside `kernel_code`."""
    return _inside.value
