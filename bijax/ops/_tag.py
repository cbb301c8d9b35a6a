"""The tag that says how an equation is to be lowered.

Every equation of a traced program can carry metadata; it is part of the keys of JAX's trace and compilation caches, is
inherited by what autodiff and `vmap` make of an equation, and ends up as an attribute of the compiled instruction.
`bijax.transform` tags what it makes invariant; the code of a kernel is tagged here, so that it is left as it is.
"""

from contextlib import AbstractContextManager
from typing import Final

from jax.experimental.xla_metadata import set_xla_metadata

TAG: Final = "bijax"
"""Name of the attribute."""

KERNEL: Final = "kernel"
"""Value of the attribute for code whose bits a contract already fixes."""


def kernel_code() -> AbstractContextManager[None]:
    """Tags the equations that are traced inside as the code of a kernel."""
    manager: AbstractContextManager[None] = set_xla_metadata(**{TAG: KERNEL})
    return manager
