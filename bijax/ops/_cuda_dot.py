"""The product of the portable programs on a GPU: one chain of fused multiply-adds for each element."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from bijax.ops._contracts import run
from bijax.ops._matmul_backends import sums_like
from bijax.ops._on_first_use import on_first_use
from pallas_kernels.contract import MatmulContract

if TYPE_CHECKING:
    from pallas_kernels.ops.matmul import triton
else:
    triton = on_first_use("pallas_kernels.ops.matmul.triton")

Axes = tuple[Sequence[int], Sequence[int]]


def fused_chain_dot(a: jax.Array, b: jax.Array, dimensions: tuple[Axes, Axes]) -> jax.Array:
    """Returns what `lax.dot_general` returns for float32 operands with one contracted and one free dimension each.

    Args:
        a: float32.
        b: float32.
        dimensions: As in `lax.dot_general`.

    Guarantee: row-invariant; the same bits in a stack as alone.

    Example:
        >>> x, w = jax.ShapeDtypeStruct((7, 3, 5), "float32"), jax.ShapeDtypeStruct((7, 5, 2), "float32")
        >>> jax.eval_shape(lambda x, w: fused_chain_dot(x, w, (((2,), (1,)), ((0,), (0,)))), x, w).shape
        (7, 3, 2)
    """
    ((a_sum,), (b_sum,)), (a_batch, b_batch) = dimensions
    # As a rule the last axis of `b` is free; then its entries are (K, N) and need no copy.
    by_columns = b_sum != b.ndim - 1
    rows = _stack(a, a_batch, (a_sum,), last=True)
    columns = _stack(b, b_batch, (b_sum,), last=not by_columns)
    contract = MatmulContract(a.shape[a_sum])
    y = run(triton.matmul, rows, columns, like=sums_like, contract=contract, transpose_w=not by_columns)
    return y.reshape(*(a.shape[i] for i in a_batch), *y.shape[1:])


def _stack(x: jax.Array, batch: Sequence[int], contracted: Sequence[int], *, last: bool) -> jax.Array:
    """Returns a stack of matrices, with the contracted dimension last or before the free one."""
    free = [i for i in range(x.ndim) if i not in batch and i not in contracted]
    order = (*batch, *free, *contracted) if last else (*batch, *contracted, *free)
    x = x.transpose(order)
    return x.reshape(-1, *x.shape[-2:])
