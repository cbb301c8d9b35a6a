"""Running a program of one fixed shape over the rows of an array, whatever their number.

XLA:CPU compiles element-wise code, reductions and dots differently for different shapes, and the differences reach
the bits (vector loop against scalar remainder, library call against own code). A program whose shape never changes
cannot differ, so a batch is cut into tiles of rows and the last tile is padded. The optimization barriers keep XLA
from fusing the program with what stands around it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

Program = Callable[..., tuple[jax.Array, ...]]
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]

_UNROLLED: Final = range(9, 28)
"""Lengths of an inner loop over a few integer operations that LLVM writes out."""


FROM_ZERO: Final[Any] = {"allow_negative_indices": False}
"""Options of dynamic slices: their places are not negative. JAX would count negative ones from the end, which XLA:CPU
compiles as kernels of their own, and runs in each turn of a loop."""


def isolate(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays behind a barrier that no fusion or rewrite crosses. Memory layouts do."""
    return tuple(lax.optimization_barrier(arrays))


def isolated_dot(x: jax.Array, w: jax.Array, dimension_numbers: DimensionNumbers, **options: Any) -> jax.Array:
    """Returns `lax.dot_general`, compiled as if it were alone.

    What XLA makes of a product follows the layouts of its operands and of its result, and those follow what stands
    around it, through any barrier: behind a transpose, XLA:CPU left out one of its rewrites of products of one row.
    A flat array has one layout only.

    Args:
        x: Left operand.
        w: Right operand.
        dimension_numbers: As in `lax.dot_general`.
        **options: Further arguments of `lax.dot_general`.
    """
    flat_x, flat_w = isolate(x.reshape(-1), w.reshape(-1))
    y = lax.dot_general(flat_x.reshape(x.shape), flat_w.reshape(w.shape), dimension_numbers, **options)
    return isolate(y.reshape(-1))[0].reshape(y.shape)


def in_one_loop(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Applies a function of a few integer operations to each element, in a loop that compiles and runs fast.

    XLA:CPU makes a loop for each dimension. Where the last one is short, LLVM writes it out and vectorises the loop
    around it, which loads single elements: that takes four times as long to compile, and up to twice as long to run.
    A flat array has one loop. The barriers keep its shape from the loop, and the function from its neighbours.

    Args:
        function: Maps arrays of one shape, and numbers, to an array of that shape, each element on its own.
        *arrays: Arrays of one shape, and numbers, which stay what they are.
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
    """Returns the first rows of `x`; what `pad_rows` appended is left out."""
    return x if x.shape[0] == rows else lax.slice_in_dim(x, 0, rows)


def pad_columns(x: jax.Array, columns: int, value: float = 0.0) -> jax.Array:
    """Returns the (rows, C) array `x` with columns of `value` appended up to `columns`."""
    if x.shape[1] == columns:
        return x
    return lax.pad(x, jnp.asarray(value, x.dtype), [(0, 0, 0), (0, columns - x.shape[1], 0)])


def run_isolated(program: Program, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Runs `program` between two barriers, so that it compiles as if it were alone."""
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
        tile_for: Returns the rows of the tile with which to run the given number of remaining rows; it must be at
            least that number or a tile that may be repeated.
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
    """Adds a value of every chunk of rows to `total`, chunks upwards; the last chunk is padded with zero rows.

    Args:
        chunk_sum: Maps arrays of `rows` rows to a value of the shape of `total`. It sees that one shape alone.
        arrays: Arrays with the same leading dimension, 0 allowed.
        rows: Rows of a chunk.
        total: Where the sum starts.
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
