"""The bfloat16 limbs of float32 columns on a Hopper GPU and under the interpreter: see `PartsContract`."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.hopper.arithmetic import columns_of

# The upper half of a finite number; a non-finite number unchanged.
_UPPER: Final = """
    .reg .pred p;
    .reg .f32 u;
    .reg .b32 b;
    abs.f32 u, $1;
    setp.lt.f32 p, u, 0f7F800000;
    mov.b32 b, $1;
    and.b32 b, b, 0xFFFF0000;
    mov.b32 u, b;
    selp.f32 u, u, $1, p;"""
_FIRST: Final = f"{{ {_UPPER} mov.f32 $0, u; }}"
_REST: Final = f"{{ {_UPPER} sub.rn.f32 u, $1, u; selp.f32 $0, u, 0f00000000, p; }}"


def limbs(x: jax.Array, count: int, interpret: Any) -> list[jax.Array]:
    """Returns the limbs of float32 columns, or of a scalar, the last one first and not yet rounded to bfloat16."""
    found, rest = list[jax.Array](), x
    for _ in range(count - 1):
        if interpret:
            rest = lax.optimization_barrier(rest)
            bits = lax.bitcast_convert_type(rest, jnp.int32) & jnp.int32(-65536)
            upper, finite = lax.bitcast_convert_type(bits, jnp.float32), jnp.isfinite(rest)
            found.append(jnp.where(finite, upper, rest))
            rest = jnp.where(finite, rest - upper, jnp.float32(0))
        else:
            found.append(columns_of(_FIRST, [rest]))
            rest = columns_of(_REST, [rest])
    return [rest, *found[::-1]]
