"""Concatenation and splitting of arrays that compile fast on a CPU, derivatives included.

XLA:CPU copies the operands of a concatenation in nested loops over the dimensions before the axis, in a separate kernel
for each concatenation. LLVM takes up to five times longer for three nested loops than for one, and a model with rotary
embeddings has a concatenation in each layer. A matrix needs only one loop.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels.parts.xla.manual_axes import result_type, vary_alike

Value = Any

# `bijax.invariant` leaves primitives with this prefix unchanged.
_join_p: Final = Primitive("bijax_join")
_cut_p: Final = Primitive("bijax_cut")
_cut_p.multiple_results = True


def join(arrays: Sequence[jax.Array], axis: int) -> jax.Array:
    """Concatenates arrays of the same dtype, like `lax.concatenate`.

    Args:
        arrays: At least one, with shapes that differ only along the axis.
        axis: Which axis, non-negative.

    Example:
        >>> join([jax.numpy.ones((2, 2, 1)), jax.numpy.zeros((2, 2, 2))], 2).shape
        (2, 2, 3)
    """
    return _join_p.bind(*vary_alike(arrays), dimension=axis)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits an array with an even number of columns into two halves.

    The derivative of `jnp.split` uses `lax.concatenate`; the derivative of this function uses `join`.

    Example:
        >>> [half.tolist() for half in halves(jax.numpy.arange(4))]
        [[0, 1], [2, 3]]
    """
    half = x.shape[-1] // 2
    first, second = _cut_p.bind(x, sizes=(half, half), axis=x.ndim - 1)
    return first, second


def of_matrices(*arrays: jax.Array, dimension: int) -> jax.Array:
    """Concatenates non-empty arrays as matrices: the dimensions before the axis become rows."""
    before, after = arrays[0].shape[:dimension], arrays[0].shape[dimension + 1 :]
    rows = math.prod(before)
    joined = lax.concatenate([x.reshape(rows, math.prod(x.shape[dimension:])) for x in arrays], 1)
    return joined.reshape(*before, sum(x.shape[dimension] for x in arrays), *after)


def would_be_nested(ctx: mlir.LoweringRuleContext, dimension: int) -> bool:
    """Returns whether XLA:CPU would emit nested loops for a concatenation that can be one of matrices."""
    (out,) = ctx.avals_out
    lengths = [n for a in (*ctx.avals_in, out) for n in a.shape]
    if not all(isinstance(n, int) and n for n in lengths) or jnp.issubdtype(out.dtype, jax.dtypes.extended):
        return False
    # A reshape would move shards.
    on_one_device = getattr(ctx.module_context.axis_context, "num_devices", 0) in (None, 1)
    return on_one_device and sum(n != 1 for n in out.shape[:dimension]) > 1


def _lower_for_cpu(ctx: mlir.LoweringRuleContext, *operands: Value, dimension: int) -> Sequence[Value]:
    function = of_matrices if would_be_nested(ctx, dimension) else _as_it_is
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands, dimension=dimension)


def _as_it_is(*arrays: jax.Array, dimension: int) -> jax.Array:
    return lax.concatenate(arrays, dimension)


def _abstract(*arrays: jax.core.ShapedArray, dimension: int) -> jax.core.ShapedArray:
    first = arrays[0]
    length = sum(a.shape[dimension] for a in arrays)
    shape = (*first.shape[:dimension], length, *first.shape[dimension + 1 :])
    return result_type(shape, first.dtype, arrays)


def _join_transposed(cotangent: jax.Array, *arrays: Any, dimension: int) -> list[jax.Array]:
    sizes = tuple((x.aval if ad.is_undefined_primal(x) else x).shape[dimension] for x in arrays)
    return _cut_p.bind(cotangent, sizes=sizes, axis=dimension)


def _cut(x: jax.Array, *, sizes: tuple[int, ...], axis: int) -> list[jax.Array]:
    return list(lax.split(x, sizes, axis))


def _pieces(x: jax.core.ShapedArray, *, sizes: tuple[int, ...], axis: int) -> list[jax.core.ShapedArray]:
    return [result_type((*x.shape[:axis], n, *x.shape[axis + 1 :]), x.dtype, [x]) for n in sizes]


def _cut_transposed(cotangents: Sequence[Any], _: Any, *, sizes: tuple[int, ...], axis: int) -> list[jax.Array]:
    return [join([ad.instantiate_zeros(c) for c in cotangents], axis)]


def _cut_batched(
    arrays: Sequence[jax.Array], axes: Sequence[int], *, sizes: tuple[int, ...], axis: int
) -> tuple[list[jax.Array], list[int]]:
    (x,), (mapped,) = arrays, axes
    pieces: list[jax.Array] = _cut_p.bind(jnp.moveaxis(x, mapped, 0), sizes=sizes, axis=axis + 1)
    return pieces, [0] * len(pieces)


def _join_batched(arrays: Sequence[jax.Array], axes: Sequence[Any], *, dimension: int) -> tuple[jax.Array, int]:
    size = next(x.shape[d] for x, d in zip(arrays, axes, strict=True) if d is not None)
    in_front = [batching.bdim_at_front(x, d, size) for x, d in zip(arrays, axes, strict=True)]
    return join(in_front, dimension + 1), 0


_join_p.def_impl(jax.jit(_as_it_is, static_argnames="dimension"))
_join_p.def_abstract_eval(_abstract)
ad.deflinear2(_join_p, _join_transposed)
batching.primitive_batchers[_join_p] = _join_batched
mlir.register_lowering(_join_p, mlir.lower_fun(_as_it_is, multiple_results=False))
mlir.register_lowering(_join_p, _lower_for_cpu, platform="cpu")

_cut_p.def_impl(jax.jit(_cut, static_argnames=("sizes", "axis")))
_cut_p.def_abstract_eval(_pieces)
ad.deflinear2(_cut_p, _cut_transposed)
batching.primitive_batchers[_cut_p] = _cut_batched
mlir.register_lowering(_cut_p, mlir.lower_fun(_cut, multiple_results=True))
