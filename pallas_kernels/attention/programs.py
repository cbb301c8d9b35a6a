"""Pieces of the attention programs whose bits do not depend on the number of rows around them."""

from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.contract import LANES, SCORE_BLOCK
from pallas_kernels.parts.xla.fused_chain import fused_dot
from pallas_kernels.parts.xla.rounded_chain import rounded_dot
from pallas_kernels.parts.xla.row_major import row_major
from pallas_kernels.parts.xla.tiles import isolate, isolated_dot
from pallas_kernels.parts.xla.where import where

Axes = tuple[tuple[int, ...], tuple[int, ...]]
DotDimensions = tuple[Axes, Axes]
Binary = Callable[[jax.Array, jax.Array], jax.Array]

WITH_KEYS: Final = (((3,), (3,)), ((0, 1), (0, 2)))
"""Dimensions of the product of rows (b, K, R, H) and keys (b, n, K, H)."""

WITH_VALUES: Final = (((3,), (1,)), ((0, 1), (0, 2)))
"""Dimensions of the product of weights (b, K, R, n) and values (b, n, K, V)."""

WIDTHS: Final = (32, 8, 1)
"""Lanes that each kernel of a tree leaves."""


def dot(a: jax.Array, b: jax.Array, dimensions: DotDimensions, *, fused: bool, crossed: bool = False) -> jax.Array:
    """Returns a product of float32 arrays with one contracted axis.

    Args:
        a: Left operand.
        b: Right operand.
        dimensions: As in `lax.dot_general`.
        fused: Whether it is chains of fused multiply-adds; otherwise one chain of rounded products.
        crossed: As in `Tile`; only with `WITH_KEYS` and `WITH_VALUES`.
    """
    if not fused:
        return rounded_dot(a, b, dimensions)
    if crossed:
        return _crossed(a, b, with_keys=dimensions == WITH_KEYS)
    # With the stacked axes first, XLA:CPU takes a right operand stored either way. So keys and values share one kernel
    # that moves them, and keys, which XLA would also transpose, take no longer than values.
    contracted, (batch, other_batch) = dimensions
    order = (*other_batch, *(axis for axis in range(b.ndim) if axis not in other_batch))
    if order != tuple(range(b.ndim)):
        b = row_major(b.transpose(order))
    dimensions = (contracted[0], (order.index(contracted[1][0]),)), (batch, tuple(range(len(other_batch))))
    return fused_dot(a, b, dimensions, block=SCORE_BLOCK)


def _crossed(a: jax.Array, b: jax.Array, *, with_keys: bool) -> jax.Array:
    """Multiplies rows (b, K, R, x) of all heads by what all heads store, (b, n, K, y), and keeps each head's own."""
    batch, heads, rows, length = a.shape
    number, size = b.shape[1], b.shape[3]
    stored = b.reshape(batch, number * heads, size) if with_keys else b.reshape(batch, number, heads * size)
    dimensions = ((2,), (2 if with_keys else 1,)), ((0,), (0,))
    every = isolated_dot(a.reshape(batch, heads * rows, length), stored, dimensions, precision=lax.Precision.HIGHEST)
    by_head = every.reshape(batch, heads, rows, *((number, heads) if with_keys else (heads, size)))
    axis = 4 if with_keys else 3
    own = [lax.index_in_dim(by_head[:, head], head, axis - 1, keepdims=False) for head in range(heads)]
    return jnp.stack(own, axis=1)


def lane_tree(x: jax.Array, op: Binary, widths: Sequence[int] = WIDTHS, *, isolated: bool = True) -> jax.Array:
    """Reduces the last axis by a halving tree: lane i with lane i + n/2, and so on.

    The operations are exact or correctly rounded, so that their bits do not depend on how they are compiled. A few
    kernels of several levels each are faster than one kernel for each level. They run over the rows of a matrix, for
    which XLA:CPU compiles fewer nested loops.

    Args:
        x: (..., n), n a power of two.
        op: `lax.add` or `larger`.
        widths: Lanes that each kernel leaves, 1 at the end. They do not affect the bits.
        isolated: Whether a barrier follows. Without one, what uses the result joins the last kernel.

    Returns:
        (...).
    """
    before = x.shape[:-1]
    x = x.reshape(-1, x.shape[-1])
    for width in widths:
        parts = [x[..., i : i + width] for i in range(0, x.shape[-1], width)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [op(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
        (x,) = isolate(parts[0]) if isolated or width > 1 else parts
    return x[..., 0].reshape(before)


def row_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the sums (..., R) of a * b (..., R, H), in blocks of lanes upwards and a tree over the lanes."""
    (products,) = isolate(a * b)
    missing = -products.shape[-1] % LANES
    products = jnp.pad(products, [(0, 0)] * (products.ndim - 1) + [(0, missing)])
    total = products[..., :LANES]
    for i in range(LANES, products.shape[-1], LANES):
        total = total + products[..., i : i + LANES]
    return lane_tree(total, lax.add)


def larger(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the larger one; either where one is nan, which `lax.max` would not do, at a third of its cost."""
    return lax.select(lax.gt(a, b), a, b)


def seen_product(
    weights: jax.Array,
    seen: jax.Array,
    values: jax.Array,
    dimensions: DotDimensions,
    *,
    fused: bool,
    finite: bool = False,
    crossed: bool = False,
) -> jax.Array:
    """Multiplies weights by values, where values that a row does not see leave no trace in it.

    A weight of zero would still carry nan and infinities (0 * inf is nan) and the sign of a zero. So zeros come out
    as +0, and values that are not finite take part only in the rows that see them.

    Args:
        weights: Zero where `seen` is false.
        seen: bool, of a shape that is broadcast to that of `weights`.
        values: The other operand; its last axis is a free one.
        dimensions: As in `lax.dot_general`. The result's last two axes must be a free axis of the weights and the
            last axis of the values.
        fused: As for `dot`.
        finite: Whether all values are known to be finite.
        crossed: As for `dot`.

    Returns:
        float32.
    """
    plain = dot(weights, values, dimensions, fused=fused, crossed=crossed)

    def careful() -> jax.Array:
        return _product_with_specials(weights, seen, values, dimensions, fused)

    # A value that is not finite shows in every row, so one row tells.
    product = plain if finite else lax.cond(jnp.all(jnp.isfinite(plain[..., 0, :])), lambda: plain, careful)
    return where(lax.eq(product, np.float32(0)), 0.0, product)


def _product_with_specials(
    weights: jax.Array, seen: jax.Array, values: jax.Array, dimensions: DotDimensions, fused: bool
) -> jax.Array:
    """Adds what IEEE arithmetic makes of nan and infinities to the product of the finite values."""
    infinite = where(lax.eq(lax.abs(values), np.float32(np.inf)), lax.sign(values), 0.0)
    finite = where(lax.is_finite(values), values, 0.0)
    # One dot with another batch dimension takes all three sums; those of small integers are exact in any order.
    left = stacked(lax.sign(weights), jnp.broadcast_to(seen, weights.shape).astype(jnp.float32), weights)
    right = stacked(infinite, lax.bitwise_not(lax.is_finite(values)).astype(jnp.float32), finite)
    contracted, batched = dimensions
    first = (*batched[1], *contracted[1])
    order = (*first, *(axis for axis in range(values.ndim) if axis not in first))
    right = row_major(right.transpose(0, *_shifted(order)))  # in one kernel with what is stacked
    batch = tuple(range(len(first)))
    sums = dot(
        left, right, ((_shifted(contracted[0]), (len(first),)), ((0, *_shifted(batched[0])), batch)), fused=fused
    )
    # Flat arrays, which XLA:CPU compiles to one loop.
    (flat,) = isolate(sums.reshape(3, -1))
    signs, specials, product = flat[0], flat[1], flat[2]
    # Infinities of one sign give it, anything else that is seen gives nan: a nan, an infinity with the weight zero,
    # and infinities of both signs.
    signed = lax.add(product, lax.mul(signs, np.float32(np.inf)))
    result = where(lax.eq(lax.abs(signs), specials), signed, np.nan)
    return isolate(where(lax.eq(specials, np.float32(0)), product, result))[0].reshape(sums.shape[1:])


def stacked(*arrays: jax.Array) -> jax.Array:
    """Returns arrays of one dtype and of the shape of the first one along a new first axis, as a choice by the index.

    A concatenation on a CPU is a kernel of its own, which XLA compiles anew wherever it stands.
    """
    shape = (len(arrays), *arrays[0].shape)
    index = lax.broadcasted_iota(jnp.int32, shape, 0)
    result = jnp.broadcast_to(arrays[-1], shape)
    for i, array in enumerate(arrays[:-1]):
        result = lax.select(lax.eq(index, np.int32(i)), jnp.broadcast_to(array, shape), result)
    return result


def _shifted(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis + 1 for axis in axes)
