"""Convolutions as matrix products and additions, on any platform that JAX runs on.

The kernel positions are split into groups; the terms of a group are concatenated and multiplied with the weights by a
row-invariant product; the group sums are added in ascending order in float32. The group size depends only on the
number of kernel positions and input features.
"""

import functools
import math
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.contract import ConvContract, honour
from pallas_kernels.parts.xla.opaque import opaque_zero
from pallas_kernels.parts.xla.positions import Window, fold_positions, split_index
from pallas_kernels.parts.xla.tiles import FROM_ZERO, isolate, pad_rows

Product = Callable[[jax.Array, jax.Array], jax.Array]

_TILE_ELEMENTS: Final = 1 << 19
_COLUMNS: Final = 256


def correlate(
    x: jax.Array, w: jax.Array, *, window: Window, product: Product, dtype: DTypeLike, contract: ConvContract
) -> jax.Array:
    """Sums over the window positions and the features, at every output location.

    Args:
        x: (N, spatial..., G, C), padded.
        w: (G, O, positions, C), the positions in row-major order.
        window: The window over `x`, of the rank of `x`.
        product: Multiplies (G, M, K) by (G, O, K), or (M, K) by (O, K), in its accumulator dtype. The bits of an
            element must depend on its row, its column and K alone.
        dtype: Accumulator dtype.
        contract: Groups of positions.

    Returns:
        (N, spatial..., G, O) of `dtype`.

    Guarantee: row-invariant, if the product is.
    """
    counts = window.counts(x.shape)
    g, o, positions, c = w.shape
    at_once = _group(positions, c, contract.terms)
    # Flattened, because the layout that a barrier passes to a transpose would split it into two kernels.
    x, flat = isolate(x, w.reshape(-1))
    w = flat.reshape(w.shape)

    def group(x: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
        terms = _side_by_side(x, window, start, size)
        weights = lax.dynamic_slice_in_dim(w, start, size, axis=2, **FROM_ZERO).reshape(g, o, size * c)
        terms, weights = isolate(terms, weights)
        return isolate(_stacked(product, terms.reshape(-1, g, size * c), weights))[0]

    def tile(x: jax.Array) -> jax.Array:
        whole = positions // at_once
        total = _add_upwards(lambda i: group(x, i * at_once, at_once), whole)
        if positions % at_once:
            total = total + group(x, whole * at_once, positions % at_once)
        return total.reshape(*window.counts(x.shape)[:-2], g, o)

    # A single position needs no more memory than the input.
    tile_shape = (counts[0], counts[1]) if positions == 1 else _tile_shape(counts, g * c * at_once)
    out = jax.ShapeDtypeStruct((*counts[:-2], g, o), dtype)
    return isolate(_tiles(tile, x, window, tile_shape, out))[0]


def _add_upwards(term: Callable[[jax.Array | int], jax.Array], terms: int) -> jax.Array:
    """Returns `term(0) + term(1) + ...`, added sequentially; one program computes all terms."""
    if terms == 1:
        return term(0)
    shape = jax.eval_shape(term, jnp.int32(0))
    # Adding -0 leaves every term unchanged; adding +0 would turn -0 into +0.
    first = jnp.full(shape.shape, -0.0, shape.dtype)
    return lax.fori_loop(jnp.int32(0), jnp.int32(terms), lambda i, total: isolate(total + term(i))[0], first)


def _side_by_side(x: jax.Array, window: Window, start: jax.Array | int, size: int) -> jax.Array:
    """(N, spatial..., G, C) to (N, places..., G, size * C): the elements at `size` positions from `start` on.

    One gather: concatenated slices would compile a program for each position.
    """
    if size == 1:
        return window.read(x, start)
    *counts, g = window.counts(x.shape)[1:-1]
    n, *spatial, _, c = x.shape
    # The row of an element is a sum of one term per dimension.
    steps = [g * math.prod(spatial[axis + 1 :]) for axis in range(len(spatial))]
    positions = np.arange(size, dtype=np.int32)
    first = window.starts(positions + start if isinstance(start, int) else jnp.asarray(positions) + start)[1:-2]
    places = zip(counts, window.strides[1:-2], steps, strict=True)
    along = [np.arange(count, dtype=np.int32) * (stride * step) for count, stride, step in places]
    along += [np.arange(g, dtype=np.int32), sum(a * step for a, step in zip(first, steps, strict=True))]
    dims = (*counts, g, size)
    row = functools.reduce(lax.add, (lax.broadcast_in_dim(a, dims, (axis,)) for axis, a in enumerate(along)))
    numbers = lax.GatherDimensionNumbers(offset_dims=(0, 2), collapsed_slice_dims=(1,), start_index_map=(1,))
    flat = x.reshape(n, math.prod(spatial) * g, c)
    taken = lax.gather(flat, row.reshape(-1, 1), numbers, slice_sizes=(n, 1, c), mode="clip")
    return taken.reshape(n, *counts, g, size * c)


def _group(positions: int, features: int, terms: int) -> int:
    """Returns the positions per group: as large as the terms of one product allow, with groups of nearly equal size."""
    groups = -(-positions // max(1, terms // features))
    return -(-positions // groups)


def _stacked(product: Product, rows: jax.Array, weights: jax.Array) -> jax.Array:
    """(M, G, K) times (G, O, K) to (M, G, O)."""
    if weights.shape[0] == 1:
        return product(rows[:, 0], weights[0])[:, None]
    return product(rows.transpose(1, 0, 2), weights).transpose(1, 0, 2)


def _tile_shape(counts: tuple[int, ...], terms: int) -> tuple[int, int]:
    """Returns how many examples, and places along the first spatial axis, have terms that fit in a core's cache."""
    places = math.prod(counts[1:-2])
    if places * terms <= _TILE_ELEMENTS:
        return min(counts[0], _TILE_ELEMENTS // (places * terms)), counts[1]
    return 1, max(1, _TILE_ELEMENTS // (places // counts[1] * terms))


def _tiles(
    tile: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    window: Window,
    tile_shape: tuple[int, int],
    out: jax.ShapeDtypeStruct,
) -> jax.Array:
    """Runs a window program over tiles of `x`; the last tile along an axis overlaps the previous one."""
    counts = out.shape[:2]
    if tile_shape == counts:
        return tile(x)
    size = ((tile_shape[1] - 1) * window.strides[1] + (window.size[1] - 1) * window.dilation[1]) + 1
    parts = tuple(-(-n // t) for n, t in zip(counts, tile_shape, strict=True))
    rest = [jnp.int32(0)] * (x.ndim - 2)

    def read(start: tuple[jax.Array, jax.Array]) -> jax.Array:
        example, place = start
        starts = [example, place * window.strides[1], *rest]
        return lax.dynamic_slice(x, starts, (tile_shape[0], size, *x.shape[2:]), allow_negative_indices=False)

    def body(i: jax.Array, y: jax.Array) -> jax.Array:
        example, place = (
            lax.min(at * size, jnp.int32(n - size))
            for at, n, size in zip(split_index(i, parts[1]), counts, tile_shape, strict=True)
        )
        some = tile(read((example, place)))
        return lax.dynamic_update_slice(y, some, [example, place, *rest], allow_negative_indices=False)

    y = jnp.zeros(out.shape, out.dtype)
    return lax.fori_loop(jnp.int32(0), jnp.int32(math.prod(parts)), body, y)


def correlate_one_feature(x: jax.Array, w: jax.Array, *, window: Window, contract: ConvContract) -> jax.Array:
    """Sums over the window positions for a single input feature (a depthwise convolution, a filter).

    The products are rounded and added in ascending order.

    Args:
        x: (N, spatial..., G, 1), padded, in the accumulator dtype.
        w: (positions, G, 1, O), of the same dtype.
        window: The window over `x`, of the rank of `x`.
        contract: Order of the sum.

    Returns:
        (N, spatial..., G, O) of the dtype of `x`.

    Guarantee: row-invariant.
    """
    honour("conv_general_dilated", contract, ConvContract())
    x, w = isolate(x, w)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    hidden = opaque_zero().astype(unsigned)

    def term(position: jax.Array | int) -> jax.Array:
        scaled = window.read(x, position) * lax.dynamic_index_in_dim(w, position, keepdims=False, **FROM_ZERO)[:, 0]
        # Whether XLA contracts a product with a sum in the same fusion depends on the shape of the loop.
        return lax.bitcast_convert_type(lax.bitcast_convert_type(scaled, unsigned) ^ hidden, x.dtype)

    total = fold_positions(lambda total, position: total + term(position), term(0), 1, w.shape[0])
    return isolate(total)[0]


def correlate_examples(
    x: jax.Array, w: jax.Array, *, window: Window, product: Product, contract: ConvContract
) -> jax.Array:
    """Sums over examples (the gradient of a convolution's weights): the contracted features come first in memory.

    A group has at most 128 terms, but at least one example; group sums are added in ascending order.

    Args:
        x: (E, spatial..., G, N), padded; E examples are summed over.
        w: (E, positions, G, O), the positions in row-major order.
        window: The window over `x`, of the rank of `x`; its size matches `w`.
        product: Maps (G, R, N) and (G, R, O), or both without G, to the sums (G, N, O) of the rows' outer products,
            in its accumulator dtype. Trailing rows of zeros must not change the result, and the bits of an element
            must depend on its two columns alone.
        contract: Groups of examples.

    Returns:
        (N, spatial..., G, O) in the accumulator dtype.

    Guarantee: split-invariant, for cuts at multiples of a group's examples; trailing examples of zeros change nothing.
    """
    counts = window.counts(x.shape)[1:-2]
    examples, positions, g, o = w.shape
    n = x.shape[-1]
    # Places and positions are exchanged: a place of `window` is a position in the window below, and vice versa.
    places = Window((1, *counts, 1, 1), window.dilation, window.strides)
    spans = tuple(
        (p - 1) * s + (k - 1) * d + 1
        for p, s, k, d in zip(counts, window.strides[1:-2], window.size[1:-2], window.dilation[1:-2], strict=True)
    )
    x, w = isolate(lax.slice(x, (0,) * x.ndim, (examples, *spans, g, n)), w)
    together = min(examples, max(1, contract.rows // positions))
    x, w = (pad_rows(a, -(-examples // together) * together) for a in (x, w))

    def outer(start: jax.Array | int, size: int) -> jax.Array:
        def group(i: jax.Array | int) -> jax.Array:
            part = lax.dynamic_slice_in_dim(x, i * together, together, **FROM_ZERO)
            terms = _side_by_side(part, places, start, size)
            (terms,) = isolate(terms.reshape(together * positions, g, size * n))
            rows = lax.dynamic_slice_in_dim(w, i * together, together, **FROM_ZERO).reshape(together * positions, g, o)
            if g == 1:
                return isolate(product(terms[:, 0], rows[:, 0])[None])[0]
            return isolate(product(terms.transpose(1, 0, 2), rows.transpose(1, 0, 2)))[0]

        total = _add_upwards(group, x.shape[0] // together)
        return total.reshape(g, size, n, o).transpose(1, 0, 2, 3)

    at_once = max(1, min(places.positions, _COLUMNS // n))
    whole = places.positions // at_once
    if whole == 1:
        sums = outer(0, at_once)
    else:
        sums = lax.map(lambda i: outer(i * at_once, at_once), jnp.arange(whole, dtype=jnp.int32))
        sums = sums.reshape(whole * at_once, g, n, o)
    if places.positions % at_once:
        sums = lax.concatenate([sums, outer(whole * at_once, places.positions % at_once)], 0)
    return isolate(sums.transpose(2, 0, 1, 3).reshape(n, *counts, g, o))[0]
