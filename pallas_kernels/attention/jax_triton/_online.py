"""The online softmax: what rows know after some keys, within a split and over several."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import (
    half_sums,
    opaque_float,
    power_of_two,
    product,
    product_and_sum,
)
from pallas_kernels.attention.jax_triton._pieces import (
    all_finite,
    dot,
    dot_of_heads,
    heads_of_keys,
    heads_of_values,
    keys_of_all,
    limbs,
    limbs_unless,
    not_finite,
    piece_count,
    zeros,
)
from pallas_kernels.attention.jax_triton._scores import scores, which_seen
from pallas_kernels.attention.jax_triton._tile import LEAST, Arrays, Bounds, Rows, keys_at

COLUMNS = tl.constexpr(8)  # of the sums of weights in a split


class State(NamedTuple):
    """What rows know after some keys.

    Attributes:
        maximum: (R,) float32, the maximum of the scores.
        sums: (R,) float32, the sum of the weights; within a split (R, COLUMNS), the sums by columns.
        weighted: (R, width) float32 of each piece, the sums of weights times values.
    """

    maximum: Any
    sums: Any
    weighted: Any


@triton.jit
def nothing(ROWS: tl.constexpr, form: tl.constexpr):
    """Returns the state before any key."""
    return State(tl.full((ROWS,), LEAST, tl.float32), tl.zeros((ROWS,), tl.float32), zeros(ROWS, form.value_size, form))


@triton.jit
def start(ROWS: tl.constexpr, form: tl.constexpr):
    """Returns the state before the keys of a split."""
    state = nothing(ROWS, form)
    return State(state.maximum, tl.zeros((ROWS, COLUMNS), tl.float32), state.weighted)


@triton.jit
def finished(state: State, ROWS: tl.constexpr):
    """Returns the state after a split with the sums (R,)."""
    return State(state.maximum, tl.reshape(half_sums(state.sums, ROWS, COLUMNS, 1), (ROWS,)), state.weighted)


@triton.jit
def merged(state: State, other: State):
    """Returns the state after the splits of `state` and that of `other`, which follows them, from sums (R,)."""
    COUNT: tl.constexpr = len(state.weighted)
    highest = tl.maximum(state.maximum, other.maximum)
    left, right = power_of_two(state.maximum - highest), power_of_two(other.maximum - highest)
    sums = product_and_sum(state.sums, left, product(other.sums, right))
    values = ()
    for i in tl.static_range(COUNT):
        added = product(other.weighted[i], right[:, None])
        values = values + (product_and_sum(state.weighted[i], left[:, None], added),)
    return State(highest, sums, values)


@triton.jit
def add_blocks(
    arrays: Arrays,
    rows: Rows,
    bounds: Bounds,
    query,
    begin,
    whole,
    end,
    ROWS: tl.constexpr,
    CAREFUL: tl.constexpr,
    STAGES: tl.constexpr,
    form: tl.constexpr,
):
    """Returns the state after a range of key blocks.

    Args:
        arrays: The arrays.
        rows: The rows.
        bounds: The keys that they see.
        query: The limbs of each piece of their queries.
        begin: Index of the first block.
        whole: Index after the last block of the range at `begin` of which the rows see every key, but for a mask.
        end: Index after the last block.
        ROWS: Number of the rows.
        CAREFUL: Whether a value that is not finite makes only those rows nan that see it. Otherwise all values are
            taken to be finite.
        STAGES: Blocks that are read ahead.
        form: The constants.
    """
    KEYS: tl.constexpr = form.key_block
    BLOCKS: tl.constexpr = form.split // form.key_block
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    before, state = nothing(ROWS, form), start(ROWS, form)
    for block in tl.range(begin, end, num_stages=STAGES):
        keys = keys_at(arrays, rows.sequence, block * KEYS, KEYS, form.whole_blocks, form)
        key = keys_of_all(heads_of_keys(arrays.key, keys, rows.head, form.size, form), form.size, form)
        total = dot_of_heads(query, key, ROWS, KEYS, False, form)
        if (block % BLOCKS == 0) & (block > begin):
            before, state = merged(before, finished(state, ROWS)), start(ROWS, form)
            # This keeps the branch after the product: only there the previous block's need not be waited for earlier.
            total = opaque_float(total)
        found, _ = scores(arrays, rows, keys, total, False, form)
        if CAREFUL or form.hides:
            seen = which_seen(arrays, rows, bounds, keys, False, form)
            found = tl.where(seen, found, float("-inf"))
        elif block >= whole:
            found = tl.where(which_seen(arrays, rows, bounds, keys, False, form), found, float("-inf"))
        highest = tl.maximum(state.maximum, product(tl.max(found, 1), form.exponent_factor))
        weights = power_of_two(product_and_sum(found, form.exponent_factor, -highest[:, None]))
        decay = power_of_two(state.maximum - highest)[:, None]
        value = heads_of_values(arrays.value, keys, rows.head, form)
        bad = tl.zeros((KEYS,), tl.int1)
        if CAREFUL:
            bad = not_finite(value, KEYS, form.value_size, form)
            weights = tl.where(seen & bad[None, :], float("nan"), weights)
        sums = product_and_sum(state.sums, decay, half_sums(weights, ROWS, KEYS, COLUMNS))
        weight = limbs(weights, form)
        values = ()
        for i in tl.static_range(COUNT):
            piece = limbs_unless(value, bad, form.value_size, i, CAREFUL, form)
            values = values + (dot(product(state.weighted[i], decay), weight, piece, form),)
        state = State(highest, sums, values)
    return merged(before, finished(state, ROWS))


@triton.jit
def attend(
    arrays: Arrays,
    rows: Rows,
    bounds: Bounds,
    query,
    begin,
    whole,
    end,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    form: tl.constexpr,
):
    """Returns the state after a range of key blocks; arguments as for `add_blocks`.

    Keys are first added as if all values were finite. If a sum is then not finite, they are added once more with care.
    """
    state = add_blocks(arrays, rows, bounds, query, begin, whole, end, ROWS, False, STAGES, form)
    if not all_finite(state.weighted):
        state = add_blocks(arrays, rows, bounds, query, begin, whole, end, ROWS, True, 1, form)
    return state
