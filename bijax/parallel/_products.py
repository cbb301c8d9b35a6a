"""Products whose weights are cut over devices, with gradients: 1, 2, 4 and 8 devices have the same bits."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from bijax.core.checks import axis_index, describe, flag, float_array, same_dtype
from bijax.dispatch.matmul import Product, matmul_kernel, weight_gradient_kernel
from bijax.dispatch.trees import leaves_kernel
from bijax.ops.elementwise.call import elementwise
from bijax.ops.matmul._arguments import check_operands, precision_of, result_dtype
from bijax.ops.rows.sum_rows import sum_rows
from bijax.parallel._axes import Axis, check_differentiable, check_equal_on_all, leaves_of, vary_over, vary_over_others
from bijax.parallel._sums import gathered, scattered, summed

_COLUMN, _ROW = "bijax.parallel.column_parallel", "bijax.parallel.row_parallel"


@dataclass(frozen=True)
class _Cut:
    """How a product is cut.

    Attributes:
        product: The product of one device.
        axis: The mesh axis.
        leaves: Leaves of the sum that is cut, on all devices together.
        own: Leaves on this device.
        dimension: Dimension of the activations that is cut outside of the product; None if they are whole there.
    """

    product: Product
    axis: Axis
    leaves: int
    own: int
    dimension: int | None

    def subtree(self, out_dtype: str, transpose_w: bool) -> Product:
        """Returns the product of this device's leaves: rounded to `out_dtype` if it has all of them, else float32."""
        dtype = out_dtype if self.own == self.leaves else "float32"
        return replace(self.product, transpose_w=transpose_w, out_dtype=dtype, splits=self.own)


def column_parallel(
    x: Any,
    w: Any,
    axis: Axis,
    *,
    bias: Any = None,
    gather_dimension: int | None = None,
    leaves: int = 8,
    transpose_w: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Multiplies rows by weights whose columns are cut over devices: x @ w + bias.

    Each device computes its columns, under the contract of `bijax.matmul`. The gradient of `x` is a sum over all
    columns, which are cut: each device adds its leaves of it, and the devices add as a fixed tree (`KSplitContract`).

    Args:
        x: (..., K) float32, bfloat16 or float16, the same on all devices; with `gather_dimension` this device's part.
        w: (K, N / D) of the same dtype, this device's columns; (N / D, K) with `transpose_w`.
        axis: Name of the mesh axis, or a tuple of names; None for one device.
        bias: (N / D,) of the same dtype.
        gather_dimension: Dimension of `x` that is cut over the devices, and gathered first (sequence parallelism); its
            gradient is then cut too. None if `x` is whole.
        leaves: Leaves of the gradient's sum on all devices together, a power of two: the most devices. It fixes bits.
        transpose_w: Whether `w` is stored as (N / D, K).
        precision: As in `bijax.matmul`.
        preferred_element_type: Dtype of the result; `x.dtype` by default.

    Returns:
        (..., N / D), this device's columns.

    Raises:
        TypeError: If a dtype or the axis is invalid.
        ValueError: If shapes do not fit, the axis is unknown or its number of devices is not a power of two or more
            than `leaves`, the columns cannot be cut into leaves, or `x` varies over the axis and `gather_dimension` is
            None.
        UnsupportedError: When differentiated, if `jax.shard_map` has `check_vma=False`.

    Guarantee: row-invariant. The result and all gradients have the same bits on 1, 2, 4, ... `leaves` devices; the
    result those of `bijax.matmul`. The gradient of `w` is split-invariant as that of `bijax.matmul`.

    Source: M. Shoeybi et al., "Megatron-LM" (https://arxiv.org/abs/1909.08053); V. Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models" (https://arxiv.org/abs/2205.05198) for sequence parallelism.

    Example:
        >>> x, w = jnp.ones((2, 64)), jnp.ones((64, 16))
        >>> column_parallel(x, w, None).shape
        (2, 16)
    """
    x, w, bias, product = _operands(_COLUMN, x, w, bias, transpose_w, precision, preferred_element_type)
    own = leaves_of(_COLUMN, axis, leaves)
    _check_leaves(_COLUMN, "columns of w", w.shape[0 if product.transpose_w else 1], own, w)
    dimension = _rows_dimension(_COLUMN, "gather_dimension", gather_dimension, x)
    if dimension is None:
        check_equal_on_all(_COLUMN, "x", x, axis, "pass gather_dimension if its rows are cut over the devices")
    else:
        x = vary_over(axis, x)
    w, bias = vary_over(axis, w), None if bias is None else vary_over(axis, bias)
    x, w, bias = vary_over_others(axis, (x, w, bias))
    return _column(x, w, bias, _Cut(product, axis, leaves, own, dimension))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _column(x: jax.Array, w: jax.Array, bias: jax.Array | None, cut: _Cut) -> jax.Array:
    x = x if cut.dimension is None else gathered(x, cut.axis, cut.dimension, to="varying")
    (y,) = matmul_kernel(_as_rows(x), w, *(() if bias is None else (bias,)), product=cut.product)
    return y.reshape(*x.shape[:-1], y.shape[1])


def _column_forward(x: jax.Array, w: jax.Array, bias: jax.Array | None, cut: _Cut) -> tuple[jax.Array, Any]:
    check_differentiable(_COLUMN, cut.axis)
    return _column(x, w, bias, cut), (x, w, bias)


def _column_backward(cut: _Cut, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, w, bias = saved
    whole = x if cut.dimension is None else gathered(x, cut.axis, cut.dimension, to="varying")
    product = cut.subtree(x.dtype.name, not cut.product.transpose_w)
    (part,) = leaves_kernel(_as_rows(g), w, product=product, leaves=cut.leaves)
    dx = _over_devices(part.reshape(whole.shape), cut, x.dtype)
    return dx, _weight_gradient(whole, g, w, cut), _bias_gradient(g, bias)


_column.defvjp(_column_forward, _column_backward)


def row_parallel(
    x: Any,
    w: Any,
    axis: Axis,
    *,
    bias: Any = None,
    scatter_dimension: int | None = None,
    leaves: int = 8,
    transpose_w: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Multiplies rows by weights whose rows are cut over devices, and adds over the devices: x @ w + bias.

    K is cut into `leaves` parts of equal length, each summed by itself under the contract of `bijax.matmul` for that
    length. The sums are added in float32 as a fixed binary tree, of which each device has a subtree; what travels is
    float32; the bias is added to the sum, which is rounded once (`pallas_kernels.contract.KSplitContract`).

    Args:
        x: (..., K / D) float32, bfloat16 or float16, this device's columns.
        w: (K / D, N) of the same dtype, this device's rows; (N, K / D) with `transpose_w`.
        axis: Name of the mesh axis, or a tuple of names; None for one device.
        bias: (N,) of the same dtype, the same on all devices.
        scatter_dimension: Dimension of the result that is cut over the devices (reduce-scatter, for sequence
            parallelism); None if all devices need the whole result (all-reduce).
        leaves: Leaves of the sum on all devices together, a power of two: the most devices. It fixes the bits.
        transpose_w: Whether `w` is stored as (N, K / D).
        precision: As in `bijax.matmul`.
        preferred_element_type: Dtype of the result; `x.dtype` by default.

    Returns:
        (..., N), the same on all devices; with `scatter_dimension` this device's part of it.

    Raises:
        TypeError: If a dtype or the axis is invalid.
        ValueError: If shapes do not fit, the axis is unknown or its number of devices is not a power of two or more
            than `leaves`, K cannot be cut into leaves, `bias` varies over the axis, or the devices do not divide
            `scatter_dimension`.
        UnsupportedError: When differentiated, if `jax.shard_map` has `check_vma=False`.

    Guarantee: row-invariant. The result and all gradients have the same bits on 1, 2, 4, ... `leaves` devices, with and
    without `scatter_dimension`; on one device those of `bijax.matmul(split_k=leaves)` where K / leaves is a multiple of
    64.

    Source: the project's design; M. Shoeybi et al., "Megatron-LM" (https://arxiv.org/abs/1909.08053) for the cut.

    Example:
        >>> x, w = jnp.ones((2, 64)), jnp.ones((64, 3))
        >>> row_parallel(x, w, None).tolist()
        [[64.0, 64.0, 64.0], [64.0, 64.0, 64.0]]
    """
    x, w, bias, product = _operands(_ROW, x, w, bias, transpose_w, precision, preferred_element_type)
    own = leaves_of(_ROW, axis, leaves)
    _check_leaves(_ROW, "elements of K", x.shape[-1], own, x)
    dimension = _rows_dimension(_ROW, "scatter_dimension", scatter_dimension, x)
    count = leaves // own
    if dimension is not None and x.shape[dimension] % count:
        raise ValueError(
            f"{_ROW}: the {count} devices of axis {axis!r} must divide the scatter_dimension {dimension}, got x"
            f" {describe(x)}; pad its rows."
        )
    if bias is not None:
        check_equal_on_all(_ROW, "bias", bias, axis, "pass the whole bias, which is added once")
    x, w = vary_over(axis, x), vary_over(axis, w)
    x, w, bias = vary_over_others(axis, (x, w, bias))
    return _row(x, w, bias, _Cut(product, axis, leaves, own, dimension))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _row(x: jax.Array, w: jax.Array, bias: jax.Array | None, cut: _Cut) -> jax.Array:
    product = cut.subtree(cut.product.out_dtype if bias is None else "float32", cut.product.transpose_w)
    (part,) = leaves_kernel(_as_rows(x), w, product=product, leaves=cut.leaves)
    part = part.reshape(*x.shape[:-1], part.shape[1])
    if bias is None:
        return _over_devices(part, cut, jnp.dtype(cut.product.out_dtype))
    return _add_bias(_over_devices(part, cut, jnp.dtype("float32")), bias, jnp.dtype(cut.product.out_dtype))


def _row_forward(x: jax.Array, w: jax.Array, bias: jax.Array | None, cut: _Cut) -> tuple[jax.Array, Any]:
    check_differentiable(_ROW, cut.axis)
    return _row(x, w, bias, cut), (x, w, bias)


def _row_backward(cut: _Cut, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, w, bias = saved
    if cut.dimension is not None:
        g = gathered(g, cut.axis, cut.dimension, to="invarying")
    product = replace(cut.product, transpose_w=not cut.product.transpose_w, out_dtype=x.dtype.name)
    (dx,) = matmul_kernel(_as_rows(g), w, product=product)
    return dx.reshape(x.shape), _weight_gradient(x, g, w, cut), _bias_gradient(g, bias)


_row.defvjp(_row_forward, _row_backward)


def _over_devices(part: jax.Array, cut: _Cut, dtype: Any) -> jax.Array:
    if cut.own == cut.leaves and part.dtype == dtype:  # one device has the whole sum
        of_all = cut.axis is None or cut.dimension is not None
        return part if of_all else gathered(part, cut.axis, 0, to="invarying")
    if cut.dimension is None:
        return summed(part, cut.axis, dtype.name)
    return scattered(part, cut.axis, cut.dimension, dtype.name)


def _add_bias(total: jax.Array, bias: jax.Array, dtype: Any) -> jax.Array:
    return _bias_program(dtype.name)(total, bias)


@functools.cache
def _bias_program(dtype: str) -> Any:
    return elementwise(lambda total, bias: (total + bias.astype(jnp.float32)).astype(dtype))


def _weight_gradient(x: jax.Array, g: jax.Array, w: jax.Array, cut: _Cut) -> jax.Array:
    product = replace(cut.product, out_dtype=w.dtype.name)
    return weight_gradient_kernel(_as_rows(x), _as_rows(g), product=product)[0]


def _bias_gradient(g: jax.Array, bias: jax.Array | None) -> jax.Array | None:
    return None if bias is None else sum_rows(_as_rows(g)).astype(bias.dtype)


def _as_rows(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _operands(
    op: str, x: Any, w: Any, bias: Any, transpose_w: Any, precision: Any, preferred: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None, Product]:
    """Returns checked operands, and the product of one device."""
    x, w = float_array(op, "x", x), float_array(op, "w", w)
    bias = None if bias is None else float_array(op, "bias", bias)
    same_dtype(op, x=x, w=w, bias=bias)
    transpose_w = flag(op, "transpose_w", transpose_w)
    if w.ndim != 2:
        raise ValueError(f"{op}: w must have two dimensions, got {describe(w)}.")
    check_operands(op, x, w, bias, transpose_w)
    return x, w, bias, Product(result_dtype(op, x, preferred).name, transpose_w, precision_of(op, precision))


def _check_leaves(op: str, what: str, length: int, own: int, array: jax.Array) -> None:
    if length % own or not length:
        raise ValueError(
            f"{op}: the {what} of this device must be a positive multiple of its {own} leaves of the sum, got {length}"
            f" in {describe(array)}; pad the whole weights with zeros to a multiple of the leaves."
        )


def _rows_dimension(op: str, name: str, dimension: int | None, x: jax.Array) -> int | None:
    """Returns a dimension of the rows counted from the front, or None."""
    if dimension is None:
        return None
    found = axis_index(op, dimension, x.ndim)
    if found == x.ndim - 1:
        raise ValueError(f"{op}: {name} must be a dimension of rows, got {dimension}, the last one of {describe(x)}.")
    return found
