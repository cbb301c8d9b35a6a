"""How tests run and lower Hopper's attention kernels."""

from collections.abc import Callable
from typing import Any, Final

import jax

from tests.unit.mosaic import interpreter

# More copies are in flight than the interpreter's 5 threads for them; one thread's copies hide each other's races.
INTERPRETER: Final = interpreter(num_tma_threads_per_device=60)


def lowered(function: Callable[..., Any], *args: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
