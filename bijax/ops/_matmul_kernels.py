"""The kernels of matmul as primitives: products, stacks of products, and the gradients of weights."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bijax.ops._primitive import Arrays, define_kernel, fold_rows, unfold_rows
from pallas_kernels.contract import ChunkContract, MatmulContract
from pallas_kernels.matmul import cpu, cpu_gradient, stacked, tiled


def _fold_matmul(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    """Rows of a mapped x are more rows; mapped weights are a stack of products."""
    if axes[1] is None:
        (rows,) = fold_rows(size, arrays[:1], axes[:1])
        return unfold_rows(size, matmul_kernel(rows, arrays[1], **parameters))
    return stacked_matmul_kernel(*_entries_in_front(size, arrays, axes), **parameters)


def _fold_stacked_matmul(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    """Stacks of a mapped axis are one stack."""
    return unfold_rows(size, stacked_matmul_kernel(*fold_rows(size, arrays, axes), **parameters))


def _fold_stacked_gradient(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    return unfold_rows(size, stacked_weight_gradient_kernel(*fold_rows(size, arrays, axes), **parameters))


def _entries_in_front(size: int, arrays: Arrays, axes: Sequence[int | None]) -> Arrays:
    return tuple(
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(arrays, axes, strict=True)
    )


def _cpu_matmul(x: jax.Array, w: jax.Array, *, contract: MatmulContract, transpose_w: bool) -> Arrays:
    return (cpu.matmul(x, w, contract=contract, transpose_w=transpose_w),)


def _tiled_matmul(x: jax.Array, w: jax.Array, *, contract: MatmulContract, transpose_w: bool) -> Arrays:
    return (tiled.matmul(x, w, contract=contract, transpose_w=transpose_w),)


def _cpu_stacked_matmul(x: jax.Array, w: jax.Array, *, contract: MatmulContract, transpose_w: bool) -> Arrays:
    return (stacked.matmul(x, w, contract=contract, transpose_w=transpose_w),)


def _tiled_stacked_matmul(x: jax.Array, w: jax.Array, *, contract: MatmulContract, transpose_w: bool) -> Arrays:
    return (tiled.stacked_matmul(x, w, contract=contract, transpose_w=transpose_w),)


def _cpu_gradient(
    x: jax.Array, g: jax.Array, total: jax.Array, *, contract: ChunkContract, transpose_w: bool
) -> Arrays:
    return (cpu_gradient.weight_gradient(x, g, contract=contract, transpose_w=transpose_w, accumulate=total),)


def _tiled_gradient(
    x: jax.Array, g: jax.Array, total: jax.Array, *, contract: ChunkContract, transpose_w: bool
) -> Arrays:
    return (tiled.weight_gradient(x, g, contract=contract, transpose_w=transpose_w, accumulate=total),)


def _cpu_stacked_gradient(x: jax.Array, g: jax.Array, *, contract: ChunkContract) -> Arrays:
    return (cpu_gradient.stacked_weight_gradient(x, g, contract=contract),)


def _tiled_stacked_gradient(x: jax.Array, g: jax.Array, *, contract: ChunkContract) -> Arrays:
    return (tiled.stacked_weight_gradient(x, g, contract=contract),)


matmul_kernel = define_kernel("matmul", {"cpu": _cpu_matmul, "cuda": _tiled_matmul}, _fold_matmul)
"""(M, K) x (K, N), or (N, K) with `transpose_w`; parameters `contract: MatmulContract`, `transpose_w`."""

stacked_matmul_kernel = define_kernel(
    "stacked_matmul", {"cpu": _cpu_stacked_matmul, "cuda": _tiled_stacked_matmul}, _fold_stacked_matmul
)
"""(G, M, K) x (G, K, N), or (G, N, K) with `transpose_w`; parameters as those of `matmul_kernel`."""

weight_gradient_kernel = define_kernel("weight_gradient", {"cpu": _cpu_gradient, "cuda": _tiled_gradient})
"""(M, K), (M, N) and a sum to continue; parameters `contract: ChunkContract`, `transpose_w`."""

stacked_weight_gradient_kernel = define_kernel(
    "stacked_weight_gradient", {"cpu": _cpu_stacked_gradient, "cuda": _tiled_stacked_gradient}, _fold_stacked_gradient
)
"""(G, M, K), (G, M, N); parameter `contract: ChunkContract`."""
