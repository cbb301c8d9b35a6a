"""Products of 8-bit matrices in any storage order, by `int8.quant_matmul`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import Float8Contract, QuantContract
from pallas_kernels.matmul.hopper.int8 import quant_matmul
from pallas_kernels.matmul.schedule.hopper.int8 import transposes_in_kernel
from pallas_kernels.parts.served import served_if

_NEEDS = "operands that quant_matmul takes"


@served_if(lambda x, w, *_, **__: quant_matmul.serves(x, w), _NEEDS)
def quantized_product(
    x: jax.Array,
    w: jax.Array,
    row_scale: jax.Array,
    column_scale: jax.Array,
    *,
    contract: QuantContract | Float8Contract,
    transposed: tuple[bool, bool],
    bias: jax.Array | None,
    out_dtype: Any,
) -> jax.Array:
    """Returns (x @ w) * row_scale * column_scale + bias; `transposed` says which operands are stored transposed.

    Guarantee: row-invariant.
    """
    x = x.T if transposed[0] else x
    along_k = _along_k(x, transposed[1])
    w = w.T if along_k and not transposed[1] else w
    options: dict[str, Any] = {"contract": contract, "bias": bias, "out_dtype": out_dtype}
    return quant_matmul(x, w, row_scale, column_scale, transpose_w=along_k, **options)


@served_if(lambda x, w, row, column, sizes, **_: quant_matmul.serves(x, w, sizes=sizes), _NEEDS)
def quantized_groups(
    x: jax.Array,
    w: jax.Array,
    row_scale: jax.Array,
    column_scale: jax.Array,
    sizes: jax.Array,
    *,
    contract: QuantContract | Float8Contract,
    out_dtype: Any,
) -> jax.Array:
    """Returns the same for rows in groups of `sizes`, each with the weights (K, N) of its group.

    Guarantee: row-invariant.
    """
    along_k = _along_k(x, False, w.shape[0])
    w = w.swapaxes(1, 2) if along_k else w
    options: dict[str, Any] = {"contract": contract, "sizes": sizes, "out_dtype": out_dtype}
    return quant_matmul(x, w, row_scale, column_scale, transpose_w=along_k, **options)


def _along_k(x: jax.Array, are_along_k: bool, *groups: int) -> bool:
    """Returns whether to pass (N, K) weights to the kernel."""
    return are_along_k or x.dtype == jnp.float8_e4m3fn or not transposes_in_kernel(x.shape[0], *groups)
