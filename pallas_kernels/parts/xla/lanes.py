"""Row-invariant building blocks: ordered reductions and aligned element-wise code.

XLA:CPU's own reductions depend on the shape, so rows are reduced by explicit additions. An addition, multiplication,
division, square root or maximum is correctly rounded and has the same bits however it is compiled, as long as no
product and sum meet (they would be contracted to a fused multiply-add); callers use `product` before a sum, since
`isolate` alone does not separate the two in a small loop. Everything else (exp, log, tanh, ...) compiles to vector code
and a scalar remainder that differ, so it only runs on whole vectors: arrays whose last dimension is 128. XLA
parallelises over the leading dimensions.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.contract import LANES, RowContract
from pallas_kernels.parts.xla.opaque import apart_from_sums
from pallas_kernels.parts.xla.tiles import (
    FROM_ZERO,
    Program,
    first_rows,
    isolate,
    map_row_tiles,
    next_power_of_two,
    pad_rows,
)
from pallas_kernels.schedule.cpu.rows import rows_at_once, vector_rows

Arrays = tuple[jax.Array, ...]

VECTOR: Final = 128
"""Last dimension of element-wise programs: a multiple of every processor's vector, unrolled or not."""

STATISTIC: Final = jax.ShapeDtypeStruct((1,), jnp.float32)
"""Shape of one row of an (M, 1) result, for `map_rows`."""

_UNROLL: Final = 16
_VECTOR_LANES: Final = 8

_MORE_LANES: Final = 16
"""Lanes of a group that remain after a CPU's first pass when that pass also computes the array: with more slices to
combine, XLA would materialise the array first."""

_WORTH_FUSING: Final = 2**16
"""Minimum size for which a CPU computes an array in the pass that combines it. For smaller arrays XLA would
parallelise that pass over threads, which takes longer."""

_FEW: Final = 2**18
"""Maximum size for which a GPU computes the rest of the tree in one pass, with strided access."""

_LINE_LANES: Final = 32
"""Lanes of a group that remain after the first pass over many elements: one GPU cache line, so that neighbouring
threads read neighbouring columns, one at a time if the operand is computed in the same pass."""

_CACHED: Final = 2**23
"""Maximum size that fits in a GPU's cache: the rest of the tree then takes one pass."""

_MANY_BLOCKS: Final = 4
"""Minimum number of blocks that a GPU adds in a separate pass, which leaves the lanes of one block."""

Combine = Callable[[jax.Array, jax.Array], jax.Array]


def map_rows(program: Program, rows: Sequence[jax.Array], out: Sequence[jax.ShapeDtypeStruct]) -> Arrays:
    """Runs a program over rows; the schedule chooses the tile size.

    Args:
        program: Maps arrays of T rows to one array of T rows for each element of `out`, with bits that do not depend
            on T. It is not called where `rows[0]` is empty.
        rows: Arrays with the same leading dimension M; the first one is (M, C).
        out: Shapes (without the row dimension) and dtypes of the results.
    """
    m, c = rows[0].shape
    if 0 in (m, c):
        return tuple(jnp.zeros((m, *o.shape), o.dtype) for o in out)
    return map_row_tiles(lambda _: program, lambda left: rows_at_once(left, c), rows, out)


def run_flat(program: Program, *arrays: jax.Array) -> Arrays:
    """Runs an element-wise program on whole vectors.

    Args:
        program: An elementwise function of arrays of the same shape, with results of that shape.
        *arrays: Arrays of one shape; at least one element.
    """
    shape = arrays[0].shape
    size = math.prod(shape)
    steps = len(jax.make_jaxpr(program)(*(jax.ShapeDtypeStruct((1, VECTOR), a.dtype) for a in arrays)).eqns)
    rows = vector_rows(-(-size // VECTOR), len(arrays), steps)

    def flat(x: jax.Array) -> jax.Array:
        padded = pad_rows(x.reshape(size), rows * VECTOR)
        return padded.reshape(rows, VECTOR)

    results = isolate(*program(*isolate(*(flat(x) for x in arrays))))
    return tuple(first_rows(r.reshape(rows * VECTOR), size).reshape(shape) for r in results)


def apart(x: jax.Array) -> jax.Array:
    """Returns an array to be summed along its rows: materialised first, or fused into the first pass if that is faster.

    Args:
        x: Array computed by sums, or by values that cannot be contracted with sums, as `apart_from_sums` returns.
    """
    return x if x.size >= _WORTH_FUSING else isolate(x)[0]


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns a float32 product, rounded before any sum that follows."""
    # A barrier alone does not keep them apart in a loop that XLA:CPU compiles to one function (`parts.xla.opaque`).
    return apart(apart_from_sums(x * y))


def divide(total: jax.Array, count: int) -> jax.Array:
    """Returns the float32 `total` divided by a count, rounded correctly."""
    # XLA would rewrite a division by a constant or a broadcast value as a product with the reciprocal.
    total, divisor = isolate(total, jnp.full(total.shape, count, jnp.float32))
    return total / divisor


def reciprocal_root(total: jax.Array, columns: int, eps: float) -> jax.Array:
    """Returns 1 / sqrt(total / columns + eps) of float32 numbers, each step rounded correctly."""
    # The root is isolated; otherwise XLA would use an rsqrt, which is not correctly rounded.
    (root,) = isolate(jnp.sqrt(divide(total, columns) + jnp.float32(eps)))
    return isolate(1 / root)[0]


def exp_minus(x: jax.Array, *shifts: jax.Array) -> jax.Array:
    """Returns exp(x - shift - ...) in float32 for x (T, C) and each shift (T, 1), subtracted in order."""
    z = x.astype(jnp.float32)
    if z.shape[1] % VECTOR:
        for shift in shifts:
            z = z - shift
        return run_flat(lambda z: (jnp.exp(z),), z)[0]
    z = z.reshape(z.shape[0], -1, VECTOR)
    for shift in shifts:
        z = z - shift[:, None]
    return isolate(jnp.exp(z))[0].reshape(x.shape)


def log(x: jax.Array) -> jax.Array:
    """Returns the natural logarithm of a float32 array of any shape."""
    return run_flat(lambda z: (jnp.log(z),), x)[0]


def add_lanes(x: jax.Array, contract: RowContract) -> jax.Array:
    """Adds along axis 1 in the order of the contract: (T, C) to (T, 1), or (A, C, B) to (A, 1, B), in float32."""
    return fold_lanes(lax.add, x, 0, contract)


def add_rows(chunk: jax.Array) -> jax.Array:
    """Adds the rows of (T, ...) float32 by a halving tree (row i plus row i + T/2, and so on); T is a power of two."""
    while chunk.shape[0] > 1:
        half = chunk.shape[0] // 2
        (chunk,) = isolate(chunk[:half] + chunk[half:])
    return chunk[0]


def max_lanes(x: jax.Array, contract: RowContract) -> jax.Array:
    """Returns the maximum along axis 1, (T, C) to (T, 1) in float32; any number or nan if the row holds a nan."""
    # lax.max would propagate nans at three times the instructions; users of the maximum encounter the nan anyway.
    return fold_lanes(lambda a, b: lax.select(a > b, a, b), x, -jnp.inf, contract)


def fold_lanes(
    combine: Combine,
    x: jax.Array,
    pad: float,
    contract: RowContract,
    dtype: DTypeLike = jnp.float32,
    axis: int = 1,
    fused: bool = False,
) -> jax.Array:
    """Combines along an axis in the order of the contract: (T, C) to (T, 1), or (A, C, B) to (A, 1, B).

    Args:
        combine: Combines two arrays of one shape, element by element, by one correctly rounded or exact operation.
        x: Array with at least one column.
        pad: Padding of the last block, a neutral element of `combine`.
        contract: Order of the combinations.
        dtype: Accumulator dtype.
        axis: Which axis, non-negative.
        fused: Whether the first pass may also compute the array, and the last pass may be fused with its consumers. On
            a GPU it does not affect the bits.
    """
    columns = x.shape[axis]
    # For a row shorter than one block, lanes that hold only padding may be left out.
    lanes = min(contract.lanes(columns), next_power_of_two(columns))
    whole = columns // lanes

    def block(i: jax.Array | int) -> jax.Array:
        if isinstance(i, int):
            return lax.slice_in_dim(x, i * lanes, (i + 1) * lanes, axis=axis).astype(dtype)
        return lax.dynamic_slice_in_dim(x, i * lanes, lanes, axis=axis, **FROM_ZERO).astype(dtype)

    def chain(total: jax.Array, start: jax.Array | int, blocks: int) -> jax.Array:
        for i in range(blocks):
            total = combine(total, block(start + i))
        return total

    if whole:
        total = chain(block(0), 1, min(whole, _UNROLL) - 1)
        groups = whole // _UNROLL
        if groups > 1:
            total = lax.fori_loop(
                jnp.int32(1), jnp.int32(groups), lambda i, total: isolate(chain(total, i * _UNROLL, _UNROLL))[0], total
            )
        if groups:
            total = chain(total, groups * _UNROLL, whole % _UNROLL)
    if columns > whole * lanes:
        width = [(0, 0, 0)] * x.ndim
        width[axis] = (0, (whole + 1) * lanes - columns, 0)
        tail = lax.slice_in_dim(x, whole * lanes, columns, axis=axis).astype(dtype)
        tail = lax.pad(tail, jnp.asarray(pad, dtype), width)
        total = combine(total, tail) if whole else tail
    if fused:
        return _fold_in_passes(combine, total, axis, lanes, -(-columns // lanes), x.size)
    if columns != lanes:  # something is combined before
        (total,) = isolate(total)
    if lanes <= LANES:
        return isolate(_halve(combine, total, axis, 1))[0]
    groups, before, rest = lanes // LANES, x.shape[:axis], x.shape[axis + 1 :]
    left = _MORE_LANES if x.size >= _WORTH_FUSING else _VECTOR_LANES
    # Several short programs, with whole vectors as long as possible: a program of a thousand terms compiles slowly.
    (total,) = isolate(_halve(combine, total.reshape(*before, groups, LANES, *rest), axis + 1, left))
    (total,) = isolate(_halve(combine, total, axis + 1, 1))
    return _fold_groups(combine, total.reshape(*before, groups, *rest), axis, fused=False)


def _fold_in_passes(combine: Combine, total: jax.Array, axis: int, lanes: int, blocks: int, size: int) -> jax.Array:
    """Combines the lanes on a GPU: the passes differ, the order does not.

    Args:
        combine: As in `fold_lanes`.
        total: The lanes, possibly not materialised yet.
        axis: Their axis.
        lanes: Their number.
        blocks: Blocks of lanes that were combined.
        size: Elements that were combined.
    """
    before, rest = total.shape[:axis], total.shape[axis + 1 :]
    many = size > _FEW
    if many and blocks >= _MANY_BLOCKS:
        (total,) = isolate(total)
    groups, group = max(1, lanes // LANES), min(lanes, LANES)
    total = total.reshape(*before, groups, group, *rest)
    if many and math.prod(rest) < _LINE_LANES:
        (total,) = isolate(_halve(combine, total, axis + 1, _LINE_LANES))
        if total.size > _CACHED:
            (total,) = isolate(_halve(combine, total, axis + 1, _VECTOR_LANES))
    elif groups > 1 or many:
        (total,) = isolate(_halve(combine, total, axis + 1, _VECTOR_LANES))
    few = total.size <= _FEW
    total = _halve(combine, total, axis + 1, 1)
    total = total if few else isolate(total)[0]
    return _fold_groups(combine, total.reshape(*before, groups, *rest), axis, fused=True)


def _fold_groups(combine: Combine, total: jax.Array, axis: int, *, fused: bool) -> jax.Array:
    groups = total.shape[axis]
    while groups > 1:
        groups = max(1, groups // _UNROLL)
        total = _halve(combine, total, axis, groups)
        total = total if fused and groups == 1 else isolate(total)[0]
    return total


def _halve(combine: Combine, x: jax.Array, axis: int, length: int) -> jax.Array:
    """Combines the upper half of an axis with the lower one until `length` elements are left."""
    half = x.shape[axis]
    while half > length:
        half //= 2
        low, high = (lax.slice_in_dim(x, i * half, (i + 1) * half, axis=axis) for i in (0, 1))
        x = combine(low, high)
    return x
