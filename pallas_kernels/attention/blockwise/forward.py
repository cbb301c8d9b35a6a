"""The forward pass: tiles of queries loop over the blocks of keys that they see."""

import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.blockwise.keys import FetchBlock
from pallas_kernels.attention.blockwise.scores import NOTHING, ScoreArrays, block_scores, seen_keys
from pallas_kernels.attention.call import AttentionOptions
from pallas_kernels.attention.mask_bounds import MaskBounds
from pallas_kernels.attention.programs import WIDTHS, WITH_VALUES, lane_tree, larger, seen_product, stacked
from pallas_kernels.attention.schedule.cpu import Tile
from pallas_kernels.contract import AttentionContract
from pallas_kernels.parts.xla.lanes import log, run_flat
from pallas_kernels.parts.xla.tiles import FROM_ZERO, isolate
from pallas_kernels.parts.xla.where import where

_FEWEST_ROWS = 2  # a dot with a single row is another operation to XLA

_FEWER_WIDTHS: Final = (8, 1)
"""Of trees of maxima, and of sums of at most `_SHORT` lanes, on a CPU, which has the contracts with fused products. One
kernel less takes less time to compile, and no more to run. It was not measured on GPUs."""

_SHORT: Final = 64


class State(NamedTuple):
    """The online softmax of R rows: one row for each query and each query head of a group.

    Attributes:
        maximum: (b, K, R) largest score so far, -inf at the start.
        total: (b, K, R) sum of exp(score - maximum).
        values: (b, K, R, V) values weighted by the same exponentials.
    """

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


def initial_state(sequences: int, heads: int, rows: int, size: int) -> State:
    """Returns the state before any key."""
    shape = (sequences, heads, rows)
    return State(
        jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, size), jnp.float32)
    )


def tile_rows(queries: int, group: int) -> int:
    """Returns the rows of a program for so many queries with `group` query heads to a key head."""
    return max(_FEWEST_ROWS, queries * group)


def to_rows(x: jax.Array, heads: int) -> jax.Array:
    """Brings queries (b, t, N, ...) into the rows (b, K, R, ...) of their key heads, query by query."""
    b, t, n = x.shape[:3]
    width = n // heads * math.prod(x.shape[3:])
    rows = jnp.moveaxis(x.reshape(b, t, heads, width), 2, 1)
    # As a matrix, whose long rows XLA:CPU copies in one loop: a third of the time to compile loops over heads.
    (rows,) = isolate(rows.reshape(b * heads * t, width))
    rows = rows.reshape(b, heads, t * (n // heads), *x.shape[3:])
    missing = tile_rows(t, n // heads) - rows.shape[2]
    if missing:
        rows = jnp.pad(rows, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (rows.ndim - 3))
    return rows


def from_rows(x: jax.Array, queries: int, group: int) -> jax.Array:
    """Undoes `to_rows`."""
    b, heads = x.shape[:2]
    x = x[:, :, : queries * group].reshape(b, heads, queries, group, *x.shape[3:])
    return jnp.moveaxis(x, 1, 2).reshape(b, queries, heads * group, *x.shape[4:])


def mask_bounds_of_rows(queries: MaskBounds, group: int) -> MaskBounds:
    """Returns the intervals (b, R) of the rows of queries (b, t)."""
    missing = tile_rows(queries.first.shape[1], group) - queries.first.shape[1] * group
    first, last = (jnp.pad(jnp.repeat(x, group, axis=1), [(0, 0), (0, missing)]) for x in queries)
    return MaskBounds(first, last)


def block_step(
    state: State | None,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    rows: MaskBounds,
    start: jax.Array,
    *,
    factor: jax.Array,
    arrays: ScoreArrays,
    soft_cap: float | None,
    fused: bool,
    tile: Tile,
) -> State:
    """Takes one block of keys into the state. This is the program whose bits the contract states.

    Args:
        state: Of R rows; None before any key, for which nothing is rescaled: the sums of the block are the state.
        query: (b, K, R, H) float32.
        keys: (b, n, K, H) float32, the first n keys of a block.
        values: (b, n, K, V) float32.
        rows: (b, R), what each row sees.
        start: Absolute position of the block, int32; a constant without a state, so that no kernel reads it.
        factor: Of the products of queries and keys, float32.
        arrays: Of the rows and keys, (b, K, R, n).
        soft_cap: That of the call.
        fused: As in the contract.
        tile: Of the program.
    """
    if state is None:
        query, keys, values, factor = isolate(query, keys, values, factor)
    else:
        query, keys, values, start, factor = isolate(query, keys, values, start, factor)
    # In memory, since the branch for values that are not finite takes it: so it has a kernel that all layers share.
    (seen,) = isolate(seen_keys(rows, start, keys.shape[1], arrays.mask))
    how = {"fused": fused, "crossed": tile.crossed}
    scores = block_scores(query, keys, seen, start, factor, arrays, soft_cap, **how).masked
    # A nan among the scores may get lost here; it comes back with its own weight.
    maximum = lane_tree(scores, larger, _FEWER_WIDTHS if fused else WIDTHS, isolated=False)
    if state is not None:
        maximum = larger(state.maximum, maximum)
    # A row whose scores are all -inf so far has no largest one to subtract.
    (shift,) = isolate(where(lax.eq(maximum, np.float32(-np.inf)), 0.0, maximum))
    weights = softmax_weights(scores, shift, seen)
    decay = None if state is None else run_flat(lambda x: (jnp.exp(x),), state.maximum - shift)[0]
    short = fused and keys.shape[1] <= _SHORT
    block_total = lane_tree(weights, lax.add, _FEWER_WIDTHS if short else WIDTHS)
    block_values = seen_product(weights, seen, values, WITH_VALUES, finite=tile.finite, **how)
    changed = rows.in_block(start, keys.shape[1])[:, None, :]
    if state is None or decay is None:
        # Neither sum can be -0, which adding the zero of the initial state would make +0.
        sequences, heads, of_rows = maximum.shape
        old = initial_state(sequences, heads, of_rows, values.shape[3])
        new = State(maximum, block_total, block_values)
    else:
        # After a barrier the product is rounded before the sum, wherever the element stands in a vector.
        total, kept = isolate(state.total * decay, state.values * decay[..., None])
        new, old = State(maximum, total + block_total, kept + block_values), state
    chosen = (_where_rows(changed, n, o) for n, o in zip(new, old, strict=True))
    # What follows a single block does not have to wait for the state in memory: choices are exact in any kernel.
    return State(*chosen) if state is None else State(*isolate(*chosen))


def softmax_weights(scores: jax.Array, shift: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns exp(score - shift) of scores (b, K, R, n) and shifts (b, K, R), zero where a key is not seen."""
    return isolate(where(seen, lax.exp(lax.sub(scores, shift[..., None])), 0.0))[0]


def _where_rows(condition: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    return where(condition.reshape(*condition.shape, *[1] * (new.ndim - 3)), new, old)


def with_sinks(state: State, sinks: jax.Array) -> State:
    """Takes a score (b, K, R) into the sum of each row that belongs to no key."""
    maximum = larger(state.maximum, sinks)
    (shift,) = isolate(where(lax.eq(maximum, np.float32(-np.inf)), 0.0, maximum))
    decay, weight = run_flat(lambda x, y: (jnp.exp(x), jnp.exp(y)), state.maximum - shift, sinks - shift)
    total, values = isolate(state.total * decay, state.values * decay[..., None])
    return State(*isolate(maximum, total + weight, values))


def finish(state: State, rows: MaskBounds, sinks: jax.Array | None, *, masked: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs (b, K, R, V) and the log-sum-exp (b, K, R) of the scores.

    A row that sees no key gives zeros and -inf; so does, with a bias or a mask, one without a weight above 0.

    Args:
        state: After the last key.
        rows: (b, R), what each row sees.
        sinks: (b, K, R) scores that belong to no key, or None.
        masked: Whether there is a bias or a mask.
    """
    some = lax.gt(rows.last, rows.first)[:, None, :]
    if masked:
        some = some & (state.total != 0)
    if sinks is not None:
        state = with_sinks(state, sinks)
    # XLA turns a division by a broadcast into a product with the reciprocal where it sees one.
    (total,) = isolate(jnp.broadcast_to(state.total[..., None], state.values.shape))
    out = where(some[..., None], lax.div(state.values, total), 0.0)
    lse = where(some, lax.add(state.maximum, log(state.total)), -np.inf)
    return one_nan(out), one_nan(lse)


def one_nan(x: jax.Array) -> jax.Array:
    """Returns `x` with one bit pattern for nan: which operand's nan goes on is left to the compiler."""
    return where(lax.ne(x, x), np.nan, x)


def attend(
    query: jax.Array,
    fetch_keys: FetchBlock,
    fetch_values: FetchBlock | None,
    what: MaskBounds,
    arrays: ScoreArrays = NOTHING,
    sinks: jax.Array | None = None,
    *,
    heads: int,
    value_size: int,
    tile: Tile,
    contract: AttentionContract,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """Runs the program over tiles of sequences and queries.

    Args:
        query: (B, T, N, H), B and T at least those of the tile.
        fetch_keys: Reads a block of keys.
        fetch_values: Reads a block of values; None if these are the first columns of the keys.
        what: (B, T), what each query sees.
        arrays: Bias, mask and slopes, their queries and keys padded as those of the tiles are.
        sinks: (B or 1, N), the scores that belong to no key.
        heads: Number K of key heads.
        value_size: Width V of a head of the values.
        tile: Sequences and queries of a program.
        contract: Order of the sums.
        options: Of the call; `what` has the mask.

    Returns:
        (B, T, N, V) of the query's dtype and (B, T, N) float32.
    """
    batch, length, query_heads, _ = query.shape
    group = query_heads // heads
    key_block = contract.key_block
    # The last tile of a kind overlaps the one before it; it computes the same bits again.
    steps = (-(-batch // tile.sequences), -(-length // tile.queries))
    (factor,) = isolate(jnp.float32(options.factor))
    zero = jnp.int32(0)

    def sinks_of_rows(first: jax.Array) -> jax.Array | None:
        if sinks is None:
            return None
        own = (
            sinks
            if sinks.shape[0] == 1
            else lax.dynamic_slice_in_dim(sinks, first, tile.sequences, axis=0, **FROM_ZERO)
        )
        every = jnp.broadcast_to(own[:, None], (tile.sequences, tile.queries, query_heads))
        return to_rows(every.astype(jnp.float32), heads)

    def run(first: jax.Array, begin: jax.Array) -> tuple[jax.Array, jax.Array]:
        def part(x: jax.Array) -> jax.Array:
            x = lax.dynamic_slice_in_dim(x, first, tile.sequences, axis=0, **FROM_ZERO)
            return lax.dynamic_slice_in_dim(x, begin, tile.queries, axis=1, **FROM_ZERO)

        q = to_rows(part(query).astype(jnp.float32), heads)
        queries = MaskBounds(part(what.first), part(what.last))
        (bounds,) = isolate(stacked(*mask_bounds_of_rows(queries, group)))  # one kernel, not one each
        rows = MaskBounds(bounds[0], bounds[1])

        def step(block: jax.Array, state: State | None) -> State:
            k = fetch_keys(first, block)
            v = k[..., :value_size] if fetch_values is None else fetch_values(first, block)
            start = jnp.int32(0) if tile.one_block else block * key_block
            given = arrays.block(first, begin, start, tile).by_rows(heads, tile, query_heads, q.shape[2])
            fixed: dict[str, Any] = {"soft_cap": options.soft_cap, "fused": contract.fused, "tile": tile}
            return block_step(state, q, k, v, rows, start, factor=factor, arrays=given, **fixed)

        # A block that a row does not see leaves its state as it is, so one block needs no loop.
        if tile.one_block:
            state = step(zero, None)
        else:
            start = initial_state(tile.sequences, heads, q.shape[2], value_size)
            state = lax.fori_loop(*queries.blocks(key_block), step, start)
        out, lse = finish(state, rows, sinks_of_rows(first), masked=arrays.given)
        out, lse = isolate(out.astype(query.dtype), lse)
        return from_rows(out, tile.queries, group), from_rows(lse, tile.queries, group)

    if steps == (1, 1):
        return run(zero, zero)

    def body(i: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # Not `//` and `%`, which mind signs: `i` has none.
        first = jnp.minimum(lax.div(i, jnp.int32(steps[1])) * tile.sequences, batch - tile.sequences)
        begin = jnp.minimum(lax.rem(i, jnp.int32(steps[1])) * tile.queries, length - tile.queries)
        out, lse = run(first, begin)
        return (
            lax.dynamic_update_slice(results[0], out, (first, begin, zero, zero), **FROM_ZERO),
            lax.dynamic_update_slice(results[1], lse, (first, begin, zero), **FROM_ZERO),
        )

    zeros = (jnp.zeros((*query.shape[:3], value_size), query.dtype), jnp.zeros(query.shape[:3], jnp.float32))
    return lax.fori_loop(zero, jnp.int32(steps[0] * steps[1]), body, zeros)
