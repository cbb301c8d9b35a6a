"""The backends of matmul: for each platform the kernels and the contract under which they sum.

A backend's functions take operands with any stack in front that the two share, and choose their contract themselves,
from the length of the sum, the storage of the weights, the dtype and the architecture; never from the number of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp

from bijax.ops._architecture import HOPPER, cuda_architecture
from pallas_kernels.contract import (
    MatmulContract,
    WgmmaChunkContract,
    WgmmaContract,
    chunk_contract,
    matmul_contract,
)
from pallas_kernels.matmul import cpu, cpu_gradient, mosaic_gpu, stacked, tiled

_WIDE: Final = MatmulContract(128, dtype="float64")


@dataclass(frozen=True)
class Product:
    """What a backend is told of a product besides its operands.

    Attributes:
        out_dtype: Dtype of the result, to which the sum is rounded once.
        transpose_w: Whether the weights are stored as (N, K).
        precision: See `bijax.ops._precision.precision_name`.
        as_columns: Whether weights stored as (N, K) stand for their transpose: the sum has the order of `x @ w` then.
    """

    out_dtype: str
    transpose_w: bool = False
    precision: str = "default"
    as_columns: bool = False


class Backend(NamedTuple):
    """The functions of a backend.

    Attributes:
        matmul: Maps x (..., M, K), w (..., K, N) or (..., N, K), a bias (N,) or None, and the product to (..., M, N).
        weight_gradient: Maps x (..., M, K), g (..., M, N), a float32 sum to continue or None, and the product of which
            it is the gradient to (..., K, N), or (..., N, K) with `transpose_w`.
    """

    matmul: Callable[[jax.Array, jax.Array, jax.Array | None, Product], jax.Array]
    weight_gradient: Callable[[jax.Array, jax.Array, jax.Array | None, Product], jax.Array]


def _fold_contract(x: jax.Array, w: jax.Array, product: Product) -> MatmulContract:
    if "float64" in (x.dtype.name, w.dtype.name, product.out_dtype):
        return _WIDE
    return matmul_contract(x.shape[-1], transpose_w=product.transpose_w and not product.as_columns)


def _rounded(y: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    y = y if bias is None else y + bias.astype(jnp.float32)
    return y.astype(product.out_dtype)


def _cpu_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    kernel = cpu.matmul if x.ndim == 2 else stacked.matmul
    y = kernel(x, w, contract=_fold_contract(x, w, product), transpose_w=product.transpose_w)
    return _rounded(y, bias, product)


def _cpu_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    return _fold_gradient(x, g, total, product, cpu_gradient.weight_gradient, cpu_gradient.stacked_weight_gradient)


def _portable_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    kernel = tiled.matmul if x.ndim == 2 else tiled.stacked_matmul
    y = kernel(x, w, contract=_fold_contract(x, w, product), transpose_w=product.transpose_w)
    return _rounded(y, bias, product)


def _portable_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    return _fold_gradient(x, g, total, product, tiled.weight_gradient, tiled.stacked_weight_gradient)


def _fold_gradient(
    x: jax.Array,
    g: jax.Array,
    total: jax.Array | None,
    product: Product,
    single: Callable[..., jax.Array],
    stack: Callable[..., jax.Array],
) -> jax.Array:
    contract = chunk_contract()
    left, right = (g, x) if product.transpose_w else (x, g)
    if x.ndim == 2:
        y = single(left, right, contract=contract, accumulate=total)
    elif total is None:
        y = stack(left, right, contract=contract)
    else:
        y = jax.lax.map(lambda e: single(e[0], e[1], contract=contract, accumulate=e[2]), (left, right, total))
    return y.astype(product.out_dtype)


def _hopper_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    return mosaic_gpu.matmul(
        x, w, contract=WgmmaContract(), transpose_w=product.transpose_w, bias=bias, out_dtype=product.out_dtype
    )


def _hopper_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    left, right = (g, x) if product.transpose_w else (x, g)
    return mosaic_gpu.weight_gradient(
        left, right, contract=WgmmaChunkContract(), accumulate=total, out_dtype=product.out_dtype
    )


CPU: Final = Backend(_cpu_matmul, _cpu_weight_gradient)
PORTABLE: Final = Backend(_portable_matmul, _portable_weight_gradient)
HOPPER_16_BIT: Final = Backend(_hopper_matmul, _hopper_weight_gradient)

CUDA: Final[dict[tuple[str, str], Backend]] = {
    (HOPPER, "bfloat16"): HOPPER_16_BIT,
    (HOPPER, "float16"): HOPPER_16_BIT,
}
"""The backend for an architecture and the dtype of the operands; `PORTABLE` serves every other pair."""


def _cuda_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    backend, x, w = _for_operands(x, w, product)
    return backend.matmul(x, w, bias, product)


def _cuda_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    backend, x, g = _for_operands(x, g, product)
    return backend.weight_gradient(x, g, total, product)


def _for_operands(a: jax.Array, b: jax.Array, product: Product) -> tuple[Backend, jax.Array, jax.Array]:
    """Returns the backend for two operands, and the operands in one dtype that holds the values of both."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    if product.out_dtype == "float64":
        dtype = jnp.dtype("float64")
    return CUDA.get((cuda_architecture(), dtype.name), PORTABLE), a.astype(dtype), b.astype(dtype)


PLATFORMS: Final = {"cpu": CPU, "cuda": Backend(_cuda_matmul, _cuda_weight_gradient)}
"""The backend that a platform's lowering calls."""
