"""Which packages of the kernels through jax-triton are installed; without them portable programs serve."""

import importlib.util
import re
from typing import Final

import pytest

HAS_JAX_TRITON: Final = all(importlib.util.find_spec(n) for n in ("triton", "jax_triton", "jax_cuda13_plugin"))
"""Whether programs are lowered with these kernels here."""

needs_jax_triton = pytest.mark.skipif(not HAS_JAX_TRITON, reason="needs jax-triton, triton and jax-cuda13-plugin")


def launches_in(text: str) -> int:
    """Returns how many kernels a lowered program launches, by calls of either kind."""
    return len(re.findall(r"@(?:triton_kernel_call|__gpu\$xla\.gpu\.ptx)", text))


def skip_without_jax_triton() -> None:
    """Skips a module where jax-triton is missing, without importing it: version 0.3 changes the environment."""
    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("needs jax-triton", allow_module_level=True)
