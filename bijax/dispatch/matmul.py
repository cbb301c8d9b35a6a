r"""Products, stacks of products and gradients of weights as primitives.

Each takes one parameter, `product: Product`. The kernel and its contract are chosen when a program is lowered, from
the length of the sum, the storage of the weights, the dtypes and the target; never from the number of rows. To find
the kernels: `git grep '"matmul"\|"weight_gradient"' pallas_kernels/backends`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.contracts import note
from bijax.core.primitive import Arrays, Kernel, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import run_kernel
from pallas_kernels.contract import (
    MmaContract,
    PartsContract,
    ProductSpec,
    RoundedMatmulContract,
    SplitTreeContract,
    WgmmaContract,
    add_as_tree,
    split_length,
)
from pallas_kernels.registry import find, serves
from pallas_kernels.target import Target

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Product:
    """The parameters of a product.

    Attributes:
        out_dtype: Dtype of the result; the sum is rounded to it once.
        transpose_w: Whether the weights are stored as (N, K).
        precision: See `bijax.dispatch.precision.precision_name`.
        as_columns: Whether weights stored as (N, K) represent their transpose: the sum then has the order of `x @ w`.
        splits: Number of K splits, each summed under the contract for a whole K; the sums are added as a tree
            (`pallas_kernels.contract.add_as_tree`). 1 leaves K whole. Gradients of weights are not split.
    """

    out_dtype: str
    transpose_w: bool = False
    precision: str = "default"
    as_columns: bool = False
    splits: int = 1

    def spec(self, x: Any, w: Any, activation: str | None = None) -> ProductSpec:
        """Returns the properties that choose the contract of the product of rows and weights."""
        along_k, dtypes = self.transpose_w and not self.as_columns, (x.dtype.name, w.dtype.name)
        return ProductSpec(dtypes, self.out_dtype, x.shape[-1], along_k, self.precision, self.splits, activation)

    def gradient_spec(self, x: Any, g: Any) -> ProductSpec:
        """Returns the properties that choose the contract of the weight gradient."""
        return ProductSpec((x.dtype.name, g.dtype.name), self.out_dtype, precision=self.precision)


def multiply(target: Target, x: jax.Array, w: jax.Array, bias: jax.Array | None = None, *, product: Product) -> Arrays:
    """Multiplies x (M, K) by w (K, N) or (N, K), and adds a bias (N,); or stacks of both, or one x by a stack of w."""
    options = {"transpose_w": product.transpose_w, "bias": bias, "out_dtype": product.out_dtype}
    if not serves("matmul", target, replace(product, splits=1).spec(x, w), x, w, **options):
        x, w = _promoted(x, w, product)
    if product.splits > 1:
        return (_in_splits(target, x, w, bias, product),)
    return (run_kernel("matmul", target, product.spec(x, w), x, w, like=products_like, **options),)


def sum_products(
    target: Target, x: jax.Array, g: jax.Array, total: jax.Array | None = None, *, product: Product
) -> Arrays:
    """Returns the gradient of the weights in `multiply` from x (M, K) and g (M, N), or stacks of one or both of them.

    It has the shape of the weights, and continues a float32 sum `total` of that shape if it is present.
    """
    options = {"accumulate": total, "out_dtype": product.out_dtype}
    if not serves("weight_gradient", target, product.gradient_spec(x, g), x, g, **options):
        x, g = _promoted(x, g, product)
    left, right = (g, x) if product.transpose_w else (x, g)
    spec = product.gradient_spec(left, right)
    return (run_kernel("weight_gradient", target, spec, left, right, like=gradients_like, **options),)


def _promoted(a: jax.Array, b: jax.Array, product: Product) -> Arrays:
    """Promotes operands that no kernel takes to a dtype that holds their values and the sum."""
    dtype = _promoted_dtype(a, b, product)
    return a.astype(dtype), b.astype(dtype)


def _promoted_dtype(a: Any, b: Any, product: Product) -> Any:
    return jnp.dtype(jnp.float64) if product.out_dtype == "float64" else jnp.promote_types(a.dtype, b.dtype)


def _in_splits(target: Target, x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    """Splits K: in one kernel if one exists, otherwise as products that are added as a tree."""
    options = {"transpose_w": product.transpose_w, "bias": bias, "out_dtype": product.out_dtype}
    if serves("split_matmul", target, product.spec(x, w), x, w, **options):
        if w.ndim == 2:
            spec = product.spec(x, w)
            return run_kernel("split_matmul", target, spec, x, w, like=products_like, **options)
        x = jnp.broadcast_to(x, (*w.shape[:-2], *x.shape[-2:]))
        y = lax.map(lambda entry: _in_splits(target, entry[0], entry[1], bias, product), (x, w))
        return y
    k = x.shape[-1]
    length = split_length(k, product.splits)
    if length >= k:
        return multiply(target, x, w, bias, product=replace(product, splits=1))[0]
    note(add_as_tree, SplitTreeContract(product.splits), arrays=(x, w))
    part = replace(product, splits=1, out_dtype="float32")
    k_axis = w.ndim - (1 if product.transpose_w else 2)

    def k_split(index: int) -> jax.Array:
        start, stop = index * length, min(k, (index + 1) * length)
        return multiply(target, x[..., start:stop], lax.slice_in_dim(w, start, stop, axis=k_axis), product=part)[0]

    total: jax.Array = add_as_tree(k_split, -(-k // length))
    return (total if bias is None else total + bias.astype(jnp.float32)).astype(product.out_dtype)


def storage_is_free(target: Target, dtypes: tuple[Any, Any], length: int, product: Product) -> bool:
    """Returns whether products of two operands have the same order of summation whatever their storage and position.

    Args:
        target: The target that the program is lowered for.
        dtypes: Dtypes of the operands, whose dimensions do not count: a vector has the order of a matrix.
        length: Length of the sum.
        product: The product.
    """
    x, w = (jax.ShapeDtypeStruct(s, d) for s, d in zip(((1, length), (length, 1)), dtypes, strict=True))
    if not serves("matmul", target, product.spec(x, w), x, w):
        dtype = _promoted_dtype(x, w, product)
        x, w = jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(w.shape, dtype)
    contract = find("matmul", target, product.spec(x, w), x, w).contracts["contract"]
    return isinstance(contract, (MmaContract, WgmmaContract, PartsContract, RoundedMatmulContract))


def contract_of_sum(target: Target, dtypes: tuple[Any, Any], product: Product) -> Any:
    """Returns the contract of `sum_products` for operands of two dtypes."""
    x, g = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in dtypes)
    if not serves("weight_gradient", target, product.gradient_spec(x, g), x, g, out_dtype=product.out_dtype):
        dtype = _promoted_dtype(x, g, product)
        x, g = jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(g.shape, dtype)
    return find("weight_gradient", target, product.gradient_spec(x, g), x, g, out_dtype=product.out_dtype).contracts[
        "contract"
    ]


def products_like(
    x: jax.Array, w: jax.Array, *_: jax.Array, transpose_w: bool = False, out_dtype: Any = jnp.float32, **__: Any
) -> jax.Array:
    """Returns an array of the shape of a product."""
    return jnp.zeros((*w.shape[:-2], x.shape[-2], w.shape[-2 if transpose_w else -1]), out_dtype)


def gradients_like(x: jax.Array, g: jax.Array, *, out_dtype: Any = jnp.float32, **_: Any) -> jax.Array:
    """Returns an array of the shape of a weight gradient."""
    lead = x.shape[:-2] or g.shape[:-2]
    return jnp.zeros((*lead, x.shape[-1], g.shape[-1]), out_dtype)


def _fold_matmul(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays:
    """Folds a mapped x into more rows, and mapped weights into a stack of products."""
    if any(d is not None for d in axes[2:]):
        return _add_mapped_bias(matmul_kernel, size, arrays, axes, parameters)
    bias = arrays[2:]
    if axes[1] is None:
        (rows,) = fold_rows(size, arrays[:1], axes[:1])
        return unfold_rows(size, matmul_kernel(rows, arrays[1], *bias, **parameters))
    return stacked_matmul_kernel(*_in_front(arrays[:2], axes[:2]), *bias, **parameters)


def _fold_stacked_matmul(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays:
    """Merges the mapped axis into the stack."""
    if any(d is not None for d in axes[2:]):
        return _add_mapped_bias(stacked_matmul_kernel, size, arrays, axes, parameters)
    operands = _fold_stacks(size, arrays[:2], axes[:2])
    return unfold_rows(size, stacked_matmul_kernel(*operands, *arrays[2:], **parameters))


def _add_mapped_bias(
    kernel: Kernel, size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters
) -> Arrays:
    """Adds a bias per entry of the axis to the float32 sums, and then rounds, as a kernel does."""
    product: Product = parameters["product"]
    wide = replace(product, out_dtype="float32")
    if axes[0] is None and axes[1] is None:
        (y,) = kernel(*arrays[:2], product=wide)
        y = y[None]
    else:
        (y,) = jax.vmap(lambda x, w: kernel(x, w, product=wide), axes[:2])(*arrays[:2])
    (bias,) = _in_front(arrays[2:], axes[2:])
    bias = bias.astype(jnp.float32).reshape(size, *(1,) * (y.ndim - 2), bias.shape[1])
    return ((y + bias).astype(product.out_dtype),)


def _fold_gradient(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays:
    """Turns the mapped axis into a stack of gradients."""
    x, g, *total = _in_front(arrays, axes)
    total = [jnp.broadcast_to(t, (size, *t.shape[-2:])) for t in total]
    if x.ndim == g.ndim == 2:  # only the running sum is mapped
        x = jnp.broadcast_to(x, (size, *x.shape))
    return stacked_weight_gradient_kernel(x, g, *total, **parameters)


def _fold_stacked_gradient(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: Parameters) -> Arrays:
    return unfold_rows(size, stacked_weight_gradient_kernel(*_fold_stacks(size, arrays, axes), **parameters))


def _in_front(arrays: Arrays, axes: Sequence[int | None]) -> Arrays:
    """Returns the arrays with a mapped axis in front; those without it unchanged."""
    return tuple(a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(arrays, axes, strict=True))


def _fold_stacks(size: int, arrays: Arrays, axes: Sequence[int | None]) -> Arrays:
    """Merges the mapped axis into the stacks; a matrix shared by all entries is repeated."""
    arrays = _in_front(arrays, axes)
    matrices = [a.ndim - (d is not None) == 2 for a, d in zip(arrays, axes, strict=True)]
    entries = next(a.shape[-3] for a, matrix in zip(arrays, matrices, strict=True) if not matrix)
    whole = (
        jnp.broadcast_to(a[..., None, :, :], (*a.shape[:-2], entries, *a.shape[-2:])) if matrix else a
        for a, matrix in zip(arrays, matrices, strict=True)
    )
    return fold_rows(size, tuple(whole), [None if d is None else 0 for d in axes])


def _product_shape(x: jax.Array, w: jax.Array, *_: jax.Array, product: Product) -> Arrays:
    n = w.shape[-2 if product.transpose_w else -1]
    return (jnp.zeros((*w.shape[:-2], x.shape[-2], n), product.out_dtype),)


def _gradient_shape(x: jax.Array, g: jax.Array, *_: jax.Array, product: Product) -> Arrays:
    k, n, lead = x.shape[-1], g.shape[-1], x.shape[:-2] or g.shape[:-2]
    return (jnp.zeros((*lead, *((n, k) if product.transpose_w else (k, n))), product.out_dtype),)


matmul_kernel = define_kernel("matmul", multiply, _fold_matmul, _product_shape)
"""(M, K) x (K, N), or (N, K) with `transpose_w`; a third operand (N,) is a bias."""

stacked_matmul_kernel = define_kernel("stacked_matmul", multiply, _fold_stacked_matmul, _product_shape)
"""(G, M, K) or (M, K) x (G, K, N), or (G, N, K) with `transpose_w`; a third operand (N,) is a bias."""

weight_gradient_kernel = define_kernel("weight_gradient", sum_products, _fold_gradient, _gradient_shape)
"""(M, K), (M, N); a third operand is a float32 running sum."""

stacked_weight_gradient_kernel = define_kernel(
    "stacked_weight_gradient", sum_products, _fold_stacked_gradient, _gradient_shape
)
"""(G, M, K), (G, M, N), one of them may be a matrix; a third operand is a stack of float32 running sums."""
