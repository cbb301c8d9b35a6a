"""Convolution, with the operands and parameters of JAX's own primitive."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from bijax.core.contracts import run
from bijax.lax.conv_phases import correlate_in_phases, has_phases
from bijax.lax.dot_general import dot_general
from pallas_kernels.contract import ConvContract
from pallas_kernels.conv.portable import Product, correlate, correlate_examples, correlate_one_feature
from pallas_kernels.parts.xla.accumulator import accumulator
from pallas_kernels.parts.xla.positions import Window


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Convolves in float32 (float64 for float64), in an order fixed by the kernel and the input features.

    A convolution whose features precede the batch in `lhs` sums over examples: it is the weight gradient of another
    convolution. Its terms are taken example by example, in chunks of 128
    (`pallas_kernels.contract.ChunkContract`).

    Args:
        lhs: Array of float32, bfloat16, float16 or float64 (if `dot_general` takes it), of any spatial dimensions.
        rhs: The kernel, of the same dtype.
        window_strides: As in `jax.lax.conv_general_dilated`, like the following ones.
        padding: Zeros before and after each spatial dimension of `lhs`.
        lhs_dilation: Distance between the elements of `lhs`, which are separated by zeros.
        rhs_dilation: Distance between the elements of `rhs`.
        dimension_numbers: `jax.lax.ConvDimensionNumbers`.
        feature_group_count: Groups of features that are convolved separately.
        batch_group_count: Groups of examples that are convolved separately.
        precision: On the CPU every precision is full float32.
        preferred_element_type: Dtype of the result; by default the dtype of `lhs`.
        out_sharding: Not used.

    Returns:
        An array of the stock primitive's shape, rounded once.

    Raises:
        UnsupportedError: If the dtype is unsupported.

    Guarantee: row-invariant: an element depends only on its window and its output feature. A sum over examples does
    not change if examples of zeros follow.

    Example:
        >>> numbers = lax.conv_dimension_numbers((1, 1, 4), (1, 1, 2), ("NCH", "OIH", "NCH"))
        >>> x, w = jnp.arange(4.0).reshape(1, 1, 4), jnp.ones((1, 1, 2))
        >>> conv_general_dilated(x, w, window_strides=(1,), padding=((0, 0),), lhs_dilation=(1,), rhs_dilation=(1,),
        ...                      dimension_numbers=numbers).tolist()
        [[[1.0, 3.0, 5.0]]]
    """
    del out_sharding
    dtype = accumulator("conv_general_dilated", lhs.dtype)
    lhs_spec, rhs_spec, out_spec = dimension_numbers
    groups = feature_group_count * batch_group_count
    kernel = tuple(rhs.shape[a] for a in rhs_spec[2:])
    features = lhs.shape[lhs_spec[1]] // feature_group_count
    rows = lhs.shape[lhs_spec[0]] // batch_group_count
    columns = rhs.shape[rhs_spec[0]] // groups

    over_examples = lhs_spec[1] < lhs_spec[0]
    # (rows, spatial..., groups, features), or with features and rows swapped for sums over examples
    x = _split(lhs, lhs_spec, feature_group_count, batch_group_count, swap=over_examples)
    edges = [(low, high, hole - 1) for (low, high), hole in zip(padding, lhs_dilation, strict=True)]
    pad = functools.partial(
        lax.pad, padding_value=jnp.zeros((), x.dtype), padding_config=[(0, 0, 0), *edges, (0, 0, 0), (0, 0, 0)]
    )
    w = rhs.transpose((*rhs_spec[2:], rhs_spec[1], rhs_spec[0])).reshape(*kernel, features, groups, columns)
    window = _window(kernel, window_strides, rhs_dilation)
    counts = window.counts(jax.eval_shape(pad, x).shape)[1:-2]
    correlate_all = functools.partial(
        _correlate, strides=window_strides, dilation=rhs_dilation, precision=precision, dtype=dtype
    )

    if 0 in (rows, columns, groups, features, *counts, *kernel):
        y = jnp.zeros((rows, *counts, groups, columns), dtype)
    elif over_examples:
        product = _product(((0,), (0,)), precision, dtype)
        terms = w.reshape(math.prod(kernel), features, groups, columns).swapaxes(0, 1)
        y = run(correlate_examples, pad(x), terms, window=window, product=product, contract=ConvContract())
    elif has_phases(lhs_dilation, window_strides, rhs_dilation):
        y = correlate_in_phases(
            correlate_all,
            x,
            w,
            counts=counts,
            before=[low for low, _ in padding],
            holes=lhs_dilation,
            strides=window_strides,
            dilation=rhs_dilation,
            dtype=dtype,
        )
    else:
        y = correlate_all(pad(x), w)

    y = y.reshape(rows, *counts, groups * columns)
    order = (out_spec[0], *out_spec[2:], out_spec[1])
    out_dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    return y.transpose([order.index(a) for a in range(y.ndim)]).astype(out_dtype)


def _window(kernel: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> Window:
    return Window((1, *kernel, 1, 1), (1, *strides, 1, 1), (1, *dilation, 1, 1))


def _correlate(
    x: jax.Array, w: jax.Array, *, strides: Sequence[int], dilation: Sequence[int], precision: Any, dtype: Any
) -> jax.Array:
    """(N, spatial..., G, C), padded, and (spatial..., C, G, O) to (N, places..., G, O)."""
    kernel = w.shape[:-3]
    window = _window(kernel, strides, dilation)
    w = w.reshape(math.prod(kernel), *w.shape[-3:])
    if w.shape[1] == 1:
        w = w.transpose(0, 2, 1, 3).astype(dtype)
        return run(correlate_one_feature, x.astype(dtype), w, window=window, contract=ConvContract())
    product = _product(((1,), (1,)), precision, dtype)
    w = w.transpose(2, 3, 0, 1)
    return run(correlate, x, w, window=window, product=product, dtype=dtype, contract=ConvContract())


def _split(x: jax.Array, spec: Sequence[int], feature_groups: int, batch_groups: int, *, swap: bool) -> jax.Array:
    """Returns (rows, spatial..., groups, features) of the operand, or (features, spatial..., groups, rows)."""
    batch, feature, *spatial = spec
    # The groups are split off into an axis in place; one transpose does the rest.
    group, groups = (feature, feature_groups) if feature_groups > 1 else (batch, batch_groups)
    x = x.reshape(*x.shape[:group], groups, x.shape[group] // groups, *x.shape[group + 1 :])
    batch, feature, *spatial = (a + (a >= group) for a in (batch, feature, *spatial))
    first, last = (feature, batch) if swap else (batch, feature)
    return x.transpose((first, *spatial, group, last))


def _product(contracting: tuple[tuple[int], tuple[int]], precision: Any, dtype: Any) -> Product:
    """Returns the product over these axes of two matrices, or of two stacks of matrices."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        stack = tuple(range(a.ndim - 2))
        axes = ((len(stack) + contracting[0][0],), (len(stack) + contracting[1][0],))
        return dot_general(
            a, b, dimension_numbers=(axes, (stack, stack)), precision=precision, preferred_element_type=dtype
        )

    return product
