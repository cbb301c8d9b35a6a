"""Runs a program of one fixed shape over the rows of an array, whatever their number.

XLA:CPU compiles element-wise code, reductions and dots differently for different shapes, and the differences affect
the bits (vector loop or scalar remainder, library call or generated code). A program of a fixed shape cannot differ,
so a batch is split into tiles of rows and the last tile is padded. Optimization barriers keep XLA from fusing the
program with surrounding code.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

Program = Callable[..., tuple[jax.Array, ...]]
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]

_UNROLLED: Final = range(9, 28)
"""Trip counts at which LLVM unrolls an inner loop over a few integer operations."""


FROM_ZERO: Final[Any] = {"allow_negative_indices": False}
"""Options of dynamic slices with non-negative indices. Otherwise JAX handles negative indices, which XLA:CPU compiles
to separate kernels that run in each iteration of a loop."""


def isolate(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays after a barrier that no fusion or rewrite crosses. Layout assignment does cross it."""
    return tuple(lax.optimization_barrier(arrays))


def isolated_dot(x: jax.Array, w: jax.Array, dimension_numbers: DimensionNumbers, **options: Any) -> jax.Array:
    """Returns `lax.dot_general`, compiled independently of surrounding code.

    XLA's code for a product depends on the layouts of its operands and result, which depend on surrounding code even
    through barriers: after a transpose, XLA:CPU skipped one of its rewrites of products of one row. A flat array has
    only one layout.

    Args:
        x: Left operand.
        w: Right operand.
        dimension_numbers: As in `lax.dot_general`.
        **options: Other arguments of `lax.dot_general`.
    """
    flat_x, flat_w = isolate(x.reshape(-1), w.reshape(-1))
    y = lax.dot_general(flat_x.reshape(x.shape), flat_w.reshape(w.shape), dimension_numbers, **options)
    return isolate(y.reshape(-1))[0].reshape(y.shape)


def in_one_loop(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Applies a function of a few integer operations elementwise, in a loop that compiles and runs fast.

    XLA:CPU emits a loop for each dimension. If the last one is short, LLVM unrolls it and vectorises the outer loop,
    which then loads single elements: it takes four times as long to compile and up to twice as long to run. A flat
    array has one loop. The barriers hide the original shape from the loop and keep the function from being fused.

    Args:
        function: An elementwise function of arrays of the same shape and scalars.
        *arrays: Arrays of the same shape, and scalars, which are not reshaped.
    """
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    dimensions = [n for n in shape if n != 1]
    if len(dimensions) < 2 or dimensions[-1] not in _UNROLLED:
        return function(*arrays)
    flat = (isolate(x.reshape(-1))[0] if x.ndim else x for x in arrays)
    return isolate(function(*flat))[0].reshape(shape)


def next_power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least `n`, 1 for `n` below 1."""
    return 1 << max(0, n - 1).bit_length()


def pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """Returns `x` with zero rows appended up to `rows`."""
    if x.shape[0] == rows:
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, rows - x.shape[0], 0)] + [(0, 0, 0)] * (x.ndim - 1))


def first_rows(x: jax.Array, rows: int) -> jax.Array:
    """Returns the first rows of `x`, without those that `pad_rows` appended."""
    return x if x.shape[0] == rows else lax.slice_in_dim(x, 0, rows)


def pad_columns(x: jax.Array, columns: int, value: float = 0.0) -> jax.Array:
    """Returns the (rows, C) array `x` with columns of `value` appended up to `columns`."""
    if x.shape[1] == columns:
        return x
    return lax.pad(x, jnp.asarray(value, x.dtype), [(0, 0, 0), (0, columns - x.shape[1], 0)])


def run_isolated(program: Program, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Runs `program` between two barriers, so that it compiles independently of surrounding code."""
    return isolate(*program(*isolate(*arrays)))


def map_row_tiles(
    program_for: Callable[[int], Program],
    tile_for: Callable[[int], int],
    rows: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jax.Array, ...]:
    """Runs fixed-shape programs over tiles of rows.

    Args:
        program_for: Returns the program for tiles of the given number of rows. It maps one array of that many rows
            for each element of `rows` to one for each element of `out`.
        tile_for: Returns the tile size for the given number of remaining rows; either at least that number, or a tile
            that may be repeated.
        rows: Arrays with the same leading dimension M >= 1.
        out: Shapes (without the row dimension) and dtypes of the results.

    Returns:
        One array of M rows for each element of `out`.
    """
    m = rows[0].shape[0]
    tile = tile_for(m)
    if m <= tile:
        padded = run_isolated(program_for(tile), *(pad_rows(r, tile) for r in rows))
        return tuple(first_rows(p, m) for p in padded)

    program = program_for(tile)
    results = tuple(jnp.zeros((m, *o.shape), o.dtype) for o in out)

    def body(i: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = i * tile
        tiles = run_isolated(program, *(lax.dynamic_slice_in_dim(r, start, tile, **FROM_ZERO) for r in rows))
        return tuple(
            lax.dynamic_update_slice_in_dim(r, t, start, 0, **FROM_ZERO) for r, t in zip(results, tiles, strict=True)
        )

    whole = m // tile
    results = lax.fori_loop(jnp.int32(0), jnp.int32(whole), body, results)
    rest = m - whole * tile
    if rest:
        tails = map_row_tiles(program_for, tile_for, [lax.slice_in_dim(r, whole * tile, m) for r in rows], out)
        results = tuple(
            lax.dynamic_update_slice_in_dim(r, t, whole * tile, 0, **FROM_ZERO)
            for r, t in zip(results, tails, strict=True)
        )
    return results


def fold_row_chunks(
    chunk_sum: Callable[..., jax.Array], arrays: Sequence[jax.Array], rows: int, total: jax.Array
) -> jax.Array:
    """Adds a value of every chunk of rows to `total` in ascending order; the last chunk is padded with zero rows.

    Args:
        chunk_sum: Maps arrays of `rows` rows to a value of the shape of `total`; only called with this shape.
        arrays: Arrays with the same leading dimension, 0 allowed.
        rows: Rows of a chunk.
        total: Initial value of the sum.
    """

    def program(total: jax.Array, *chunk: jax.Array) -> tuple[jax.Array]:
        (partial,) = isolate(chunk_sum(*chunk))
        return (total + partial,)

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        chunk = (lax.dynamic_slice_in_dim(a, i * rows, rows, **FROM_ZERO) for a in arrays)
        return run_isolated(program, total, *chunk)[0]

    m = arrays[0].shape[0]
    whole = m // rows
    if whole:
        total = lax.fori_loop(jnp.int32(0), jnp.int32(whole), body, total)
    if whole * rows < m:
        tails = (pad_rows(lax.slice_in_dim(a, whole * rows, m), rows) for a in arrays)
        (total,) = run_isolated(program, total, *tails)
    return total
