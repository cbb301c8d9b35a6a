"""Candidate programs for a product over blocks of K, and for stacks of products.

XLA:CPU dispatches a dot to one of several libraries by its shape and its operands' layouts. A candidate program fixes
both; which candidates keep a contract's order for a shape is determined by comparison
(`pallas_kernels.matmul.cpu.verify`).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.xla.row_major import row_major
from pallas_kernels.parts.xla.tiles import FROM_ZERO, isolate, isolated_dot

_UNROLLED = 16
_LARGE = 1 << 20
_TRANSPOSED_ROWS = 128
_PANEL = 128
_PANEL_TRANSPOSED = 256
_PANEL_TURNED = 64

_VECTORS = 32

Stack = Callable[[jax.Array, jax.Array, bool], jax.Array]


def in_blocks(stack: Stack, x: jax.Array, w: jax.Array, k_block: int, *, transpose_x: bool = False) -> jax.Array:
    """Adds the products over the blocks of K in ascending order.

    Args:
        stack: `stack_rows` or `stack_columns`.
        x: (G, M, K) float32, or (G, K, M) with `transpose_x`.
        w: (G, K, N).
        k_block: Elements of K per block; the last one may be shorter.
        transpose_x: Whether `x` is stored as (G, K, M).

    Returns:
        (G, M, N).
    """
    if stack is stack_columns and not transpose_x:
        # Transposed at once: splitting into blocks first would copy the rows twice.
        (x,), transpose_x = isolate(row_major(x.transpose(0, 2, 1))), True
    g, k, n = w.shape
    m = x.shape[2 if transpose_x else 1]
    whole = k // k_block
    cut = whole * k_block
    total = None
    if whole:
        # (K, N) weights are a stack of blocks without a copy.
        if transpose_x:
            left = x[:, :cut].reshape(g * whole, k_block, m)
        else:
            left = row_major(x[:, :, :cut].reshape(g, m, whole, k_block).transpose(0, 2, 1, 3))
            left = left.reshape(g * whole, m, k_block)
        # Without the barrier XLA would repeat the slice in every block.
        right = w if cut == k else isolate(w[:, :cut])[0]
        partials = stack(left, right.reshape(g * whole, k_block, n), transpose_x)
        total = fold(isolate(partials.reshape(g, whole, m, n))[0])
    if cut < k:
        left, right = isolate(x[:, cut:] if transpose_x else x[:, :, cut:], w[:, cut:])
        (tail,) = isolate(stack(left, right, transpose_x))
        total = tail if total is None else total + tail
    return jnp.zeros((g, m, n), w.dtype) if total is None else total


def fold(partials: jax.Array) -> jax.Array:
    """(G, blocks, M, N): adds the blocks in ascending order."""

    def add(total: jax.Array, some: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, (some[:, i] for i in range(some.shape[1])), total)

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        return add(total, lax.dynamic_slice_in_dim(partials, 1 + i * _UNROLLED, _UNROLLED, 1, **FROM_ZERO))

    total = partials[:, 0]
    loops = (partials.shape[1] - 1) // _UNROLLED
    if loops > 1:
        total = lax.fori_loop(jnp.int32(0), jnp.int32(loops), body, total)
    else:
        loops = 0
    return add(total, partials[:, 1 + loops * _UNROLLED :])


def each_row(x: jax.Array, w: jax.Array, k_block: int) -> jax.Array:
    """(M, K) x (K, N): a product for each row, which reads the weights M times, but copies nothing.

    A library that takes several rows at once brings the weights into another order first.
    """
    rows = (in_blocks(stack_rows, x[i : i + 1][None], w[None], k_block)[0] for i in range(x.shape[0]))
    return jnp.concatenate(isolate(*rows))


def panels(x: jax.Array, w: jax.Array, k_block: int, *, transpose_w: bool, turned: bool = False) -> jax.Array:
    """(M, K) x (K, N), or (N, K): a panel of result columns at a time, with a separate product per block of K.

    A library that runs one block of a few columns as one chain may not do so for all columns, or for the whole of K.
    The weight slices are copied, but are small enough to stay in the cache.

    Args:
        x: (M, K) float32.
        w: (K, N), or (N, K) with `transpose_w`.
        k_block: Elements of K per block; the last one may be shorter.
        transpose_w: Whether `w` is stored as (N, K).
        turned: Whether (N, K) weights are transposed as they are copied. For few rows a library would transpose them
            itself, more slowly.
    """
    n = w.shape[0 if transpose_w else 1]
    width = _panel_width(n, _PANEL_TURNED if turned else _PANEL_TRANSPOSED if transpose_w else _PANEL)

    def product(start: jax.Array) -> jax.Array:
        if transpose_w:
            return _panel_of_rows(x, w, k_block, start, width, turned)
        (some,) = isolate(lax.dynamic_slice_in_dim(w, start, width, 1, **FROM_ZERO))
        return in_blocks(stack_rows, x[None], some[None], k_block)[0]

    return over_columns(product, x, n, width)


def over_columns(product: Callable[[jax.Array], jax.Array], x: jax.Array, n: int, width: int) -> jax.Array:
    """Multiplies rows a panel of columns at a time.

    Args:
        product: Maps the first column of a panel to the panel, (M, width).
        x: (M, K), the rows, whose dtype the result has.
        n: Columns of the result.
        width: Columns of a panel, at most N.

    Returns:
        (M, N).
    """

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(i * width, n - width)  # the last panel overlaps the previous one
        return lax.dynamic_update_slice_in_dim(out, isolate(product(start))[0], start, 1, **FROM_ZERO)

    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-n // width)), body, jnp.zeros((x.shape[0], n), x.dtype))


def _panel_of_rows(x: jax.Array, w: jax.Array, k_block: int, start: jax.Array, width: int, turned: bool) -> jax.Array:
    """(M, K) x the rows of (N, K) from `start` on, with a separate product per block of K."""
    k = x.shape[1]
    whole = k // k_block

    def block(first: jax.Array | int, length: int) -> jax.Array:
        left = lax.dynamic_slice_in_dim(x, first, length, 1, **FROM_ZERO)
        right = lax.dynamic_slice(w, (start, jnp.int32(first)), (width, length), **FROM_ZERO)
        if not turned:
            return isolated_dot(left, right, (((1,), (1,)), ((), ())))
        (right,) = isolate(row_major(right.T))
        return isolated_dot(left, right, (((1,), (0,)), ((), ())))

    if whole < 2:
        total = block(0, min(k, k_block))
    else:
        # One program for all blocks: slices at constant offsets would each compile to a separate kernel. A sum that
        # starts at -0 equals its first term.
        total = jnp.full((x.shape[0], width), -0.0, x.dtype)
        total = lax.fori_loop(
            jnp.int32(0), jnp.int32(whole), lambda i, total: total + block(i * k_block, k_block), total
        )
    if whole and k % k_block:
        total = total + block(whole * k_block, k % k_block)
    return total


def _panel_width(n: int, most: int) -> int:
    """Returns the columns per panel: about equal, in whole vectors."""
    each = -(-n // -(-n // most))
    return min(n, -(-each // _VECTORS) * _VECTORS)


def transposed(w: jax.Array) -> jax.Array:
    """(N, K) to (K, N) in memory, some rows at a time, so that data stays in the cache until it is used."""
    n, k = w.shape
    if n < _TRANSPOSED_ROWS or n * k < _LARGE:
        return isolate(row_major(w.T))[0]

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        some = lax.dynamic_slice_in_dim(w, i * _TRANSPOSED_ROWS, _TRANSPOSED_ROWS, **FROM_ZERO)
        return lax.dynamic_update_slice_in_dim(out, isolate(row_major(some.T))[0], i * _TRANSPOSED_ROWS, 1, **FROM_ZERO)

    loops = n // _TRANSPOSED_ROWS
    out = lax.fori_loop(jnp.int32(0), jnp.int32(loops), body, jnp.zeros((k, n), w.dtype))
    out = lax.dynamic_update_slice_in_dim(
        out, w[loops * _TRANSPOSED_ROWS :].T, loops * _TRANSPOSED_ROWS, 1, **FROM_ZERO
    )
    return isolate(out)[0]


def stack_rows(x: jax.Array, w: jax.Array, transpose_x: bool) -> jax.Array:
    """(S, M, b) x (S, b, N): every block is a product of row-major operands."""
    (x,) = isolate(row_major(x.transpose(0, 2, 1)) if transpose_x else x)
    return isolated_dot(x, w, (((2,), (1,)), ((0,), (0,))))


def stack_columns(x: jax.Array, w: jax.Array, transpose_x: bool) -> jax.Array:
    """The same with the rows stored as columns, which XLA dispatches to another library, faster for few rows."""
    (x,) = isolate(x if transpose_x else row_major(x.transpose(0, 2, 1)))
    return isolated_dot(x, w, (((1,), (1,)), ((0,), (0,))))
