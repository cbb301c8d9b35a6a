"""Products of rows in groups (experts) as primitives: each row by the weights of its group, and the groups' gradients.

Both take the parameter `product: Product`, as the kernels of matmul do. Sizes of groups that are negative or add up
to more rows than there are give nan.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from bijax.core.architecture import HOPPER, cuda_architecture
from bijax.core.contracts import run
from bijax.core.on_first_use import on_first_use
from bijax.core.primitive import Arrays, define_kernel
from bijax.dispatch.matmul import Product
from bijax.dispatch.matmul_kernels import matmul_kernel, weight_gradient_kernel
from bijax.dispatch.routing import pick_kernel
from pallas_kernels.contract import WgmmaChunkContract, WgmmaContract, chunk_contract
from pallas_kernels.ops.ragged_dot.portable import multiply_groups, sum_groups

if TYPE_CHECKING:
    from pallas_kernels.ops.matmul.hopper import groups
else:
    groups = on_first_use("pallas_kernels.ops.matmul.hopper.groups")

_WIDE: Final = "float64"


def _portable_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, *, product: Product) -> Arrays:
    one = replace(product, out_dtype=_sums(x, w, product))
    y = multiply_groups(x, w, sizes, product=lambda x, w: matmul_kernel(x, w, product=one)[0])
    return (y.astype(product.out_dtype),)


def _portable_weight_gradient(x: jax.Array, g: jax.Array, sizes: jax.Array, *, product: Product) -> Arrays:
    one = replace(product, out_dtype=_sums(x, g, product))
    y = run(
        sum_groups,
        x,
        g,
        sizes,
        product=lambda x, g: weight_gradient_kernel(x, g, product=one)[0],
        contract=chunk_contract(),
    )
    return (y.astype(product.out_dtype),)


def _sums(a: jax.Array, b: jax.Array, product: Product) -> str:
    return _WIDE if _WIDE in (a.dtype.name, b.dtype.name, product.out_dtype) else "float32"


def _cuda_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, *, product: Product) -> Arrays:
    if cuda_architecture() != HOPPER or not groups.group_matmul.serves(x, w, sizes):
        return _portable_matmul(x, w, sizes, product=product)
    y = run(
        groups.group_matmul,
        x,
        w,
        sizes,
        like=_products_like,
        contract=WgmmaContract(),
        transpose_w=product.transpose_w,
        out_dtype=product.out_dtype,
    )
    return (y,)


def _cuda_weight_gradient(x: jax.Array, g: jax.Array, sizes: jax.Array, *, product: Product) -> Arrays:
    if cuda_architecture() != HOPPER or not groups.group_weight_gradient.serves(x, g, sizes):
        return _portable_weight_gradient(x, g, sizes, product=product)
    y = run(
        groups.group_weight_gradient,
        x,
        g,
        sizes,
        like=_gradients_like,
        contract=WgmmaChunkContract(),
        pick=lambda x, places: pick_kernel(x, places[:, None])[0],
        out_dtype=product.out_dtype,
    )
    return (y,)


def _products_like(
    x: jax.Array, w: jax.Array, _: jax.Array, *, out_dtype: Any, transpose_w: bool = False, **__: Any
) -> jax.Array:
    return jnp.zeros((x.shape[0], w.shape[-2 if transpose_w else -1]), out_dtype)


def _gradients_like(x: jax.Array, g: jax.Array, sizes: jax.Array, *, out_dtype: Any, **_: Any) -> jax.Array:
    return jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), out_dtype)


def _product_shape(x: jax.Array, w: jax.Array, sizes: jax.Array, *, product: Product) -> Arrays:
    return (_products_like(x, w, sizes, out_dtype=product.out_dtype, transpose_w=product.transpose_w),)


def _gradient_shape(x: jax.Array, g: jax.Array, sizes: jax.Array, *, product: Product) -> Arrays:
    return (_gradients_like(x, g, sizes, out_dtype=product.out_dtype),)


group_matmul_kernel = define_kernel(
    "group_matmul", {"cpu": _portable_matmul, "cuda": _cuda_matmul}, shapes=_product_shape
)
"""(M, K) x (G, K, N), or (G, N, K) with `transpose_w`, and sizes (G,) int32."""

group_weight_gradient_kernel = define_kernel(
    "group_weight_gradient", {"cpu": _portable_weight_gradient, "cuda": _cuda_weight_gradient}, shapes=_gradient_shape
)
"""(M, K), (M, N), and sizes (G,) int32."""
