"""What the factors of 8-bit keys and values are multiplied into: see `EightBitContract`."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.parts.hopper.tile import ROWS, TILE, Arithmetic, along


def factors_of(factors: Any, sequence: Any, head: Any) -> Any:
    """Returns the factors of a head's columns (H,), in GPU memory, of those of all heads (B or 1, K, H)."""
    return factors.at[sequence if factors.shape[0] > 1 else 0, head]


def scale_rows(queries: Any, factors: Any, unit: float, interpret: bool) -> None:
    """Multiplies queries by the factors of their keys. The products may read them next.

    Args:
        queries: Shared memory (64, H) of 16-bit numbers, stored as `tile.tiled` says.
        factors: (H,) float32 in GPU memory.
        unit: That of the contract.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    numbers = plgpu.load(queries, layout=TILE).astype(jnp.float32)
    queries[...] = _products(numbers, factors, unit, interpret).astype(queries.dtype)
    plgpu.commit_smem()


def scaled_rows(results: jax.Array, factors: Any, unit: float, dtype: Any, interpret: bool) -> jax.Array:
    """Returns results of `dtype` times the factors of their values.

    Args:
        results: (64, V) float32, to be rounded first.
        factors: (V,) float32 in GPU memory.
        unit: That of the contract.
        dtype: bfloat16 or float16.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    rounded = results.astype(dtype).astype(jnp.float32)
    return _products(rounded, factors, unit, interpret).astype(dtype)


def _products(numbers: jax.Array, factors: Any, unit: float, interpret: bool) -> jax.Array:
    math = Arithmetic(interpret=interpret)
    whole = along(factors, 0, (ROWS, numbers.shape[1]), 1, interpret)
    return math.product(numbers, math.scaled(whole, 1 / unit))
