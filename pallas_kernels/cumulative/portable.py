"""Cumulative reductions by fixed blocks, on any platform that JAX runs on.

The order is that of `ScanContract`: an element depends on its prefix alone, which is always reduced in the same way.
"""

from collections.abc import Callable
from typing import Final, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, ScanContract, honour
from pallas_kernels.parts.xla.accumulator import accumulator
from pallas_kernels.parts.xla.lanes import Combine, run_flat
from pallas_kernels.parts.xla.tiles import isolate

Scan = Literal["sum", "prod", "logsumexp"]

_STEPS_AT_ONCE: Final = 2


def scan_axis(
    x: jax.Array, *, scan: Scan, contract: ScanContract, functions: ElementwiseContract = XLA_FUNCTIONS
) -> jax.Array:
    """Reduces every prefix along the middle axis.

    Args:
        x: (A, N, B) of any floating dtype.
        scan: The reduction of a prefix.
        contract: Order of the combinations.
        functions: How exp and log are computed.

    Returns:
        (A, N, B) float32, or float64 for float64. A sum of zeros is +0.

    Raises:
        UnsupportedError: If the dtype is not a floating one of 16, 32 or 64 bits.

    Guarantee: row-invariant; an element depends on its prefix alone, not on the length of the axis.

    Example:
        >>> scan_axis(jnp.ones((1, 4, 1)), scan="sum", contract=ScanContract()).ravel().tolist()
        [1.0, 2.0, 3.0, 4.0]
    """
    honour(f"cum{scan}", functions, XLA_FUNCTIONS)
    dtype = accumulator(f"cum{scan}", x.dtype)
    if 0 in x.shape:
        return x.astype(dtype)
    (x,) = isolate(x)
    result = _scan(x.astype(dtype), _COMBINE[scan], contract)
    if scan == "sum":
        result = jnp.where(result == 0, jnp.zeros((), dtype), result)
    return isolate(result)[0]


def _scan(x: jax.Array, combine: Combine, contract: ScanContract) -> jax.Array:
    """(A, N, B) to (A, N, B)."""
    a, n, b = x.shape
    block = min(n, contract.block)
    blocks = -(-n // block)
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, blocks * block - n, 0), (0, 0, 0)])
    x = x.reshape(a, blocks, block, b)
    distance, step = 1, 0
    while distance < block:
        earlier = lax.slice_in_dim(x, 0, block - distance, axis=2)
        later = combine(earlier, lax.slice_in_dim(x, distance, block, axis=2))
        x = lax.concatenate([lax.slice_in_dim(x, 0, distance, axis=2), later], 2)
        distance, step = 2 * distance, step + 1
        if step % _STEPS_AT_ONCE == 0:
            (x,) = isolate(x)
    if blocks > 1:
        (x,) = isolate(x)
        before = _scan(x[:, :-1, -1], combine, contract)[:, :, None]
        # The first block is unchanged: even adding zero would flush its denormals to zero.
        rest = combine(jnp.broadcast_to(before, (a, blocks - 1, block, b)), x[:, 1:])
        x = lax.concatenate([x[:, :1], rest], 1)
    return lax.slice_in_dim(x.reshape(a, blocks * block, b), 0, n, axis=1)


def _log_add(x: jax.Array, y: jax.Array) -> jax.Array:
    """log(exp(x) + exp(y)) on whole vectors."""

    def program(x: jax.Array, y: jax.Array) -> tuple[jax.Array]:
        larger = lax.max(x, y)
        distance = x - y
        # The difference of equal infinities is undefined; the sum propagates them, and nans.
        return (jnp.where(distance != distance, x + y, larger + lax.log1p(lax.exp(-lax.abs(distance)))),)

    return run_flat(program, x, y)[0]


_COMBINE: Final[dict[str, Callable[[jax.Array, jax.Array], jax.Array]]] = {
    "sum": lax.add,
    "prod": lax.mul,
    "logsumexp": _log_add,
}
