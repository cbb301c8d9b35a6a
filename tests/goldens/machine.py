"""Which machine the bits of a program belong to.

Of a GPU that is its architecture. Programs for a CPU depend on the instructions that XLA compiles for, and on the
kernels that jaxlib chooses while a program runs. What `/proc/cpuinfo` says is not what decides: flags of XLA limit the
instructions, and two processors with the same instructions may round an approximate reciprocal square root apart. So
small programs are run, and hashes of their results name the machine:

- Whether a product and a sum are rounded once. All orders of sums are defined by such instructions.
- `rsqrt` starts with the processor's own approximation, which is one on Intel's and another one on AMD's.
- The gradients of attention's keys and values sum over 32 rows in one product of jaxlib, whose kernel depends on
  AVX-512 and, without it, on the size of the first cache.

Each case names only those that its program depends on, so that most hashes are shared by all processors.
"""

import functools
import hashlib
import platform
import re
from typing import Any, Final

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

from pallas_kernels.contract import XLA_FUNCTIONS

_ROWS: Final = 32
"""Rows over which a product of attention's gradients sums, on a CPU."""

_WIDTHS: Final = (64, 96, 128, 192, 256)


def machine_of(manifest: Any, program: str) -> str:
    """Returns the name of the machine that the bits of a program belong to.

    Args:
        manifest: What `bijax.contracts` says of it.
        program: The text of the compiled program.
    """
    on_cpu = manifest.platform == "cpu"
    parts = [_processor() if on_cpu else manifest.architecture]
    if XLA_FUNCTIONS.id in manifest.ids:
        parts.append(f"jaxlib {jaxlib.__version__}")
        if on_cpu and re.search(r"\brsqrt\(", program):
            parts.append(f"rsqrt {_rsqrt()}")
        if on_cpu and any(name.startswith("attention/") for name in manifest.ids):
            parts.append(f"products {_products()}")
    return ", ".join(parts)


@functools.cache
def _processor() -> str:
    a = np.float32(1 + 2**-12)
    fused = jax.jit(lambda a, b: a * a - b)(a, np.float32(1 + 2**-11))
    return platform.machine() + ("" if fused else " without FMA")


@functools.cache
def _rsqrt() -> str:
    x = np.random.default_rng(8).standard_normal((64, 100)).astype(np.float32) * np.float32(3)
    return _hash(jax.jit(lambda x: lax.rsqrt(jnp.abs(x)))(x))


@functools.cache
def _products() -> str:
    random = np.random.default_rng(0)
    product = jax.jit(lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((0,), (0,))), precision="highest"))
    pairs = [[random.standard_normal((2, _ROWS, n)).astype(np.float32) for n in (128, width)] for width in _WIDTHS]
    return _hash(*(product(*pair) for pair in pairs))


def _hash(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()[:8]
