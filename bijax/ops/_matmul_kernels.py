"""The kernels of matmul as primitives: products, stacks of products, and the gradients of weights."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bijax.ops._primitive import Arrays, Kernel, define_kernel, fold_rows, unfold_rows
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


def _one_result(kernel: Callable[..., jax.Array]) -> Kernel:
    """Returns a kernel that gives a tuple, as `define_kernel` expects it."""
    return lambda *arrays, **parameters: (kernel(*arrays, **parameters),)


def _continued(kernel: Callable[..., jax.Array]) -> Kernel:
    """The same for a kernel whose third array is a sum to continue."""
    return lambda x, g, total, **parameters: (kernel(x, g, accumulate=total, **parameters),)


matmul_kernel = define_kernel(
    "matmul", {"cpu": _one_result(cpu.matmul), "cuda": _one_result(tiled.matmul)}, _fold_matmul
)
"""(M, K) x (K, N), or (N, K) with `transpose_w`; parameters `contract: MatmulContract`, `transpose_w`."""

stacked_matmul_kernel = define_kernel(
    "stacked_matmul",
    {"cpu": _one_result(stacked.matmul), "cuda": _one_result(tiled.stacked_matmul)},
    _fold_stacked_matmul,
)
"""(G, M, K) x (G, K, N), or (G, N, K) with `transpose_w`; parameters as those of `matmul_kernel`."""

weight_gradient_kernel = define_kernel(
    "weight_gradient", {"cpu": _continued(cpu_gradient.weight_gradient), "cuda": _continued(tiled.weight_gradient)}
)
"""(M, K), (M, N) and a sum to continue; parameters `contract: ChunkContract`, `transpose_w`."""

stacked_weight_gradient_kernel = define_kernel(
    "stacked_weight_gradient",
    {"cpu": _one_result(cpu_gradient.stacked_weight_gradient), "cuda": _one_result(tiled.stacked_weight_gradient)},
    _fold_stacked_gradient,
)
"""(G, M, K), (G, M, N); parameter `contract: ChunkContract`."""
