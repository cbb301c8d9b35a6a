"""Arithmetic of row kernels on the columns that a warpgroup holds: the same instructions in every schedule.

Products, quotients and roots are correctly rounded and never contracted to a fused multiply-add (`mul.rn`, `div.rn`,
`sqrt.rn`; Mosaic's own products may be contracted); fused multiply-adds are explicit (`fma.rn`).
`exponential` is `ex2.approx.ftz.f32` of the rounded product x * log2(e): results below 2**-126 are 0. PTX gives ex2 a
relative error of 2**-22.5; the rounding of the product adds |x| * 2**-24 or so. `exact` corrects the latter by the
product's error, taken with fused multiply-adds. `logarithm` is the `logf` of CUDA's libdevice.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.parts.hopper.registers import apply_ptx
from pallas_kernels.parts.ptx import EXPONENTIAL, PLAIN_EXPONENTIAL, SILU, hexadecimal

WARPGROUP: Final = 128
"""Threads of a warpgroup."""

LARGER: Final = "max.NaN.f32 $0, $1, $2;"

_FUSED: Final = "fma.rn.f32 $0, $1, $2, $3;"


def strided(width: int) -> Any:
    """Returns the layout of `width` columns in which thread i holds the i-th group of width / 128 neighbours."""
    return plgpu.Layout.WG_STRIDED((width,), vec_size=width // WARPGROUP)


def product(a: jax.Array, b: jax.Array, interpret: Any) -> jax.Array:
    """Multiplies float32 columns or scalars; the product is always rounded, never contracted."""
    if interpret:
        return _apart(a * b)
    shape = a.shape or b.shape
    if shape:
        a, b = (x if x.shape else plgpu.layout_cast(jnp.broadcast_to(x, shape), strided(shape[0])) for x in (a, b))
    return _apply("mul.rn.f32 $0, $1, $2;", a, b)


def quotient(a: jax.Array, b: jax.Array, interpret: Any) -> jax.Array:
    """Divides float32 numbers, correctly rounded."""
    if interpret:
        return _apart(a) / _apart(b)
    return _apply("div.rn.f32 $0, $1, $2;", a, b)


def square_root(x: jax.Array, interpret: Any) -> jax.Array:
    """Takes the square root of a float32 number, correctly rounded."""
    if interpret:
        return _apart(jnp.sqrt(x))
    return _apply("sqrt.rn.f32 $0, $1;", x)


def magnitude(x: jax.Array, interpret: Any) -> jax.Array:
    """Returns abs(x) for float32 columns."""
    return jnp.abs(x) if interpret else _apply("abs.f32 $0, $1;", x)


def larger(a: jax.Array, b: jax.Array, interpret: Any) -> jax.Array:
    """Returns the elementwise maximum of float32 columns, propagating nan."""
    return jnp.maximum(a, b) if interpret else _apply(LARGER, a, b)


def exponential(x: jax.Array, interpret: Any, *, exact: bool = False) -> jax.Array:
    """Returns exp(x) for float32 columns or a scalar; with `exact`, x must be at most 0 (or nan)."""
    if interpret:
        return _apart(jnp.exp(_apart(x)))
    return _apply(EXPONENTIAL if exact else PLAIN_EXPONENTIAL, x)


def logarithm(x: jax.Array) -> jax.Array:
    """Returns the natural logarithm of a float32 number."""
    return jnp.log(x)


def silu(x: jax.Array, interpret: Any) -> jax.Array:
    """Returns x / (1 + exp(-x)) for float32 columns."""
    if interpret:
        return _apart(jax.nn.silu(_apart(x)))
    return _apply(SILU, x)


def fused(a: jax.Array, b: jax.Array, c: jax.Array, interpret: Any) -> jax.Array:
    """Returns a * b + c for float32 columns, rounded once on the GPU."""
    if interpret:
        return _apart(a * b) + c
    return _apply(_FUSED, a, b, c)


def columns_of(ptx: str, operands: Sequence[jax.Array | np.float32]) -> jax.Array:
    """Applies PTX instructions elementwise to float32 columns, scalars and constants.

    Args:
        ptx: The instructions; $0 is the result, $1, $2, ... the operands.
        operands: Columns of the same width, scalars of the row, and constants, which become immediates.
    """
    arrays = [o for o in operands if not isinstance(o, np.float32)]
    shape = next((a.shape for a in arrays if a.shape), ())
    at = iter(range(1, len(arrays) + 1))
    # In descending order, so that no placeholder is replaced twice.
    names = [hexadecimal(o) if isinstance(o, np.float32) else f"${next(at)}" for o in operands]
    for i in range(len(names), 0, -1):
        ptx = ptx.replace(f"${i}", f"@{i}")
    for i, name in enumerate(names, 1):
        ptx = ptx.replace(f"@{i}", name)
    if shape:
        arrays = [a if a.shape else plgpu.layout_cast(jnp.broadcast_to(a, shape), strided(shape[0])) for a in arrays]
    return _apply(ptx, *arrays)


def _apart(x: jax.Array) -> jax.Array:
    (apart,) = lax.optimization_barrier((x,))
    return apart


def _apply(ptx: str, *operands: jax.Array) -> jax.Array:
    """Applies PTX elementwise to float32 operands of the same shape; $0 is the result, $1, $2, ... the operands."""
    shape = operands[0].shape
    return apply_ptx(ptx, strided(shape[0]) if shape else plgpu.Layout.WG_SPLAT(()), *operands)
