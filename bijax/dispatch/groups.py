"""Products of rows in groups (experts) as primitives: rows times the weights of their group, and its gradients.

Both take the parameter `product: Product`, as the matmul kernels do. Where no kernel serves a call, it is computed
as products of tiles. Group sizes that are negative or add up to more than the number of rows give nan.
"""

from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.core.contracts import run
from bijax.core.primitive import Arrays, define_kernel
from bijax.dispatch.kernels import run_if_served
from bijax.dispatch.matmul import Product, matmul_kernel, stacked_matmul_kernel, weight_gradient_kernel
from bijax.dispatch.routing import pick_kernel
from pallas_kernels.contract import ChunkContract, chunk_contract
from pallas_kernels.ragged_dot.portable import multiply_groups, sum_groups
from pallas_kernels.target import Target

_WIDE: Final = "float64"


def _portable_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, *, product: Product) -> Arrays:
    one = replace(product, out_dtype=_sums(x, w, product))

    def rows_of_a_group(x: jax.Array, w: jax.Array) -> jax.Array:
        return _in_float64(x, w, one) if one.out_dtype == _WIDE else matmul_kernel(x, w, product=one)[0]

    y = multiply_groups(x, w, sizes, product=rows_of_a_group)
    return (y.astype(product.out_dtype),)


def _portable_weight_gradient(x: jax.Array, g: jax.Array, sizes: jax.Array, *, product: Product) -> Arrays:
    one = replace(product, out_dtype=_sums(x, g, product))
    is_wide = one.out_dtype == _WIDE

    def sum_of_rows(x: jax.Array, g: jax.Array) -> jax.Array:
        if is_wide:
            return _in_float64(x.T, g, replace(one, transpose_w=False))
        return weight_gradient_kernel(x, g, product=one)[0]

    contract = ChunkContract(accumulator=_WIDE) if is_wide else chunk_contract()
    y = run(sum_groups, x, g, sizes, product=sum_of_rows, contract=contract)
    return (y.astype(product.out_dtype),)


def _in_float64(x: jax.Array, w: jax.Array, product: Product) -> jax.Array:
    """Multiplies two matrices as a stack, the only kernel for float64, which `bijax.lax.dot_general` calls too."""
    (stack,) = stacked_matmul_kernel(*(a[None].astype(jnp.float64) for a in (x, w)), product=product)
    return stack[0]


def _sums(a: jax.Array, b: jax.Array, product: Product) -> str:
    return _WIDE if _WIDE in (a.dtype.name, b.dtype.name, product.out_dtype) else "float32"


def _multiply(
    target: Target, x: jax.Array, w: jax.Array, sizes: jax.Array, *, product: Product, zero_unused: bool = True
) -> Arrays:
    options: dict[str, Any] = {"transpose_w": product.transpose_w, "out_dtype": product.out_dtype}
    if not zero_unused:  # kernels that others register need not know it
        options["zero_unused"] = False
    y = run_if_served("group_matmul", target, None, x, w, sizes, like=_products_like, **options)
    return _portable_matmul(x, w, sizes, product=product) if y is None else (y,)


def _sum_products(target: Target, x: jax.Array, g: jax.Array, sizes: jax.Array, *, product: Product) -> Arrays:
    options = {"out_dtype": product.out_dtype, "pick": _pick}
    y = run_if_served("group_weight_gradient", target, None, x, g, sizes, like=_gradients_like, **options)
    return _portable_weight_gradient(x, g, sizes, product=product) if y is None else (y,)


def _pick(x: jax.Array, places: jax.Array) -> jax.Array:
    return pick_kernel(x, places[:, None])[0]


def _products_like(
    x: jax.Array, w: jax.Array, _: jax.Array, *, out_dtype: Any, transpose_w: bool = False, **__: Any
) -> jax.Array:
    return jnp.zeros((x.shape[0], w.shape[-2 if transpose_w else -1]), out_dtype)


def _gradients_like(x: jax.Array, g: jax.Array, sizes: jax.Array, *, out_dtype: Any, **_: Any) -> jax.Array:
    return jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), out_dtype)


def _product_shape(x: jax.Array, w: jax.Array, sizes: jax.Array, *, product: Product, **_: Any) -> Arrays:
    return (_products_like(x, w, sizes, out_dtype=product.out_dtype, transpose_w=product.transpose_w),)


def _gradient_shape(x: jax.Array, g: jax.Array, sizes: jax.Array, *, product: Product) -> Arrays:
    return (_gradients_like(x, g, sizes, out_dtype=product.out_dtype),)


group_matmul_kernel = define_kernel("group_matmul", _multiply, shapes=_product_shape)
"""(M, K) x (G, K, N), or (G, N, K) with `transpose_w`, and sizes (G,) int32; see `bijax.group_matmul`."""

group_weight_gradient_kernel = define_kernel("group_weight_gradient", _sum_products, shapes=_gradient_shape)
"""(M, K), (M, N), and sizes (G,) int32."""
