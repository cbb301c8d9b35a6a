"""The GPU for which a program is lowered."""

from typing import Final

import jax
from jax.extend.backend import backends

HOPPER: Final = "sm_90"


def cuda_architecture() -> str:
    """Returns the architecture of this process's GPU, for example 'sm_90'.

    A process without one lowers for Hopper, so that a program for a GPU can be exported and read anywhere.
    """
    if "cuda" not in backends():
        return HOPPER
    capability = getattr(jax.local_devices(backend="cuda")[0], "compute_capability", "unknown")
    return f"sm_{str(capability).replace('.', '')}"
