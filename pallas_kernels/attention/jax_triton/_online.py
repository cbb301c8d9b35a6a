"""The online softmax: what rows know after some keys, within a split and over several."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import (
    opaque_float,
    power_of_two,
    product,
    product_and_sum,
)
from pallas_kernels.attention.jax_triton._held import held_places, load_held, store_held
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
from pallas_kernels.attention.jax_triton._tile import (
    LEAST,
    Arrays,
    Blocks,
    Bounds,
    Rows,
    blocks_of_split,
    keys_at,
)
from pallas_kernels.parts.jax_triton.arithmetic import half_sums

COLUMNS = tl.constexpr(8)  # of the sums of weights in a split
LEAST_ROWS = tl.constexpr(16)  # of a product on tensor cores


class State(NamedTuple):
    """What rows know after some keys.

    Attributes:
        maximum: (R,) float32, the maximum of the scores.
        sums: (R,) float32, the sum of the weights; within a split (R, COLUMNS), the sums by columns.
        weighted: (H, width) float32 of each piece, the sums of weights times values. If H is larger than R, the rows
            are there repeatedly.
    """

    maximum: Any
    sums: Any
    weighted: Any


@triton.constexpr_function
def height_of(rows: int) -> int:
    """Returns the number of rows of products for a number of rows."""
    return max(rows, LEAST_ROWS.value)


@triton.jit
def repeated(x, ROWS: tl.constexpr, HEIGHT: tl.constexpr):
    """Returns rows (ROWS, n) as often as there are in `HEIGHT`: (HEIGHT, n)."""
    if HEIGHT == ROWS:
        return x
    else:
        WIDTH: tl.constexpr = x.shape[1]
        return tl.reshape(tl.broadcast_to(x[None, :, :], (HEIGHT // ROWS, ROWS, WIDTH)), (HEIGHT, WIDTH))


@triton.jit
def repeated_all(xs, ROWS: tl.constexpr, HEIGHT: tl.constexpr):
    """Returns the rows of each tensor repeatedly."""
    COUNT: tl.constexpr = len(xs)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (repeated(xs[i], ROWS, HEIGHT),)
    return found


@triton.jit
def nothing(ROWS: tl.constexpr, HEIGHT: tl.constexpr, form: tl.constexpr):
    """Returns the state before any key, with `HEIGHT` rows of sums of values."""
    return State(
        tl.full((ROWS,), LEAST, tl.float32), tl.zeros((ROWS,), tl.float32), zeros(HEIGHT, form.value_size, form)
    )


@triton.jit
def start(ROWS: tl.constexpr, HEIGHT: tl.constexpr, form: tl.constexpr):
    """Returns the state before the keys of a split."""
    state = nothing(ROWS, HEIGHT, form)
    return State(state.maximum, tl.zeros((ROWS, COLUMNS), tl.float32), state.weighted)


@triton.jit
def finished(state: State, ROWS: tl.constexpr):
    """Returns the state after a split with the sums (R,)."""
    return State(state.maximum, tl.reshape(half_sums(state.sums, ROWS, COLUMNS, 1), (ROWS,)), state.weighted)


@triton.jit
def merged(state: State, other: State, ROWS: tl.constexpr, HEIGHT: tl.constexpr):
    """Returns the state after the splits of `state` and that of `other`, which follows them, from sums (R,)."""
    COUNT: tl.constexpr = len(state.weighted)
    highest = tl.maximum(state.maximum, other.maximum)
    left, right = power_of_two(state.maximum - highest), power_of_two(other.maximum - highest)
    sums = product_and_sum(state.sums, left, product(other.sums, right))
    left, right = repeated(left[:, None], ROWS, HEIGHT), repeated(right[:, None], ROWS, HEIGHT)
    values = ()
    for i in tl.static_range(COUNT):
        added = product(other.weighted[i], right)
        values = values + (product_and_sum(state.weighted[i], left, added),)
    return State(highest, sums, values)


@triton.jit
def add_blocks(
    arrays: Arrays, rows: Rows, bounds: Bounds, known, blocks: Blocks, held, loop: tl.constexpr, form: tl.constexpr
):
    """Returns the states after a range of key blocks: after the splits before the last one, and after the last one.

    Args:
        arrays: The arrays.
        rows: The rows.
        bounds: The keys that they see.
        known: The limbs of each piece of their queries; or pointers (R, 1) to their scores, by the position of the key.
            Fewer than `LEAST_ROWS` rows have the latter.
        blocks: The range.
        held: Pointer to where the sums of values after the splits before are set aside; None to keep them in registers.
        loop: How it is gone through.
        form: The constants.
    """
    KEYS: tl.constexpr = form.key_block
    BLOCKS: tl.constexpr = form.split // form.key_block
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    ROWS: tl.constexpr = loop.rows
    CAREFUL: tl.constexpr = loop.careful
    LATENT: tl.constexpr = form.latent and not (loop.careful or loop.scored)
    HEIGHT: tl.constexpr = height_of(ROWS)
    begin, whole, end = blocks
    before, state = nothing(ROWS, HEIGHT, form), start(ROWS, HEIGHT, form)
    if held is not None:
        before = State(before.maximum, before.sums, ())
        first_split, places = begin // BLOCKS, held_places(held, ROWS, form)
    for block in tl.range(begin, end, num_stages=loop.stages):
        keys = keys_at(arrays, rows.sequence, block * KEYS, KEYS, form.whole_blocks, form)
        if loop.scored:
            found = tl.load(known + keys.position[None, :])
            if CAREFUL:
                seen = which_seen(arrays, rows, bounds, keys, False, form)
        else:
            key = keys_of_all(heads_of_keys(arrays.key, keys, rows.head, form.size, form), form.size, form)
            if loop.together and not LATENT:
                read = keys_of_all(heads_of_values(arrays.value, keys, rows.head, form), form.value_size, form)
            total = dot_of_heads(known, key, ROWS, KEYS, False, form)
            if loop.splits:  # noqa: SIM102 - known when the kernel is compiled
                if (block % BLOCKS == 0) & (block > begin):
                    if held is not None:
                        earlier = load_held(places, block // BLOCKS > first_split + 1)
                        before = State(before.maximum, before.sums, earlier)
                        before = merged(before, finished(state, ROWS), ROWS, HEIGHT)
                        store_held(places, before.weighted)
                        before = State(before.maximum, before.sums, ())
                    else:
                        before = merged(before, finished(state, ROWS), ROWS, HEIGHT)
                    state = start(ROWS, HEIGHT, form)
                    # This keeps the branch after the product: only there the previous block's need not be waited for
                    # earlier.
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
        of_values = repeated(decay, ROWS, HEIGHT)
        value = heads_of_values(arrays.value, keys, rows.head, form)
        bad = tl.zeros((KEYS,), tl.int1)
        if CAREFUL:
            bad = not_finite(value, KEYS, form.value_size, form)
            weights = tl.where(seen & bad[None, :], float("nan"), weights)
        sums = product_and_sum(state.sums, decay, half_sums(weights, ROWS, KEYS, COLUMNS))
        weight = repeated_all(limbs(weights, form), ROWS, HEIGHT)
        values = ()
        for i in tl.static_range(COUNT):
            if LATENT:
                piece = key[i]  # each piece of the keys is read once
            elif loop.together:
                piece = read[i]
            else:
                piece = limbs_unless(value, bad, form.value_size, i, CAREFUL, form)
            values = values + (dot(product(state.weighted[i], of_values), weight, piece, form),)
        state = State(highest, sums, values)
    if held is not None:
        earlier = load_held(places, (end - 1) // BLOCKS > first_split)
        before = State(before.maximum, before.sums, earlier)
    return before, finished(state, ROWS)


@triton.jit
def add_splits(
    arrays: Arrays, rows: Rows, bounds: Bounds, query, blocks: Blocks, held, loop: tl.constexpr, form: tl.constexpr
):
    """Returns the state after a range of key blocks; arguments as for `add_blocks`, with queries."""
    ROWS: tl.constexpr = loop.rows
    HEIGHT: tl.constexpr = height_of(ROWS)
    if loop.splits and loop.by_splits:
        BLOCKS: tl.constexpr = form.split // form.key_block
        OF_SPLIT: tl.constexpr = loop.of_split
        state = nothing(ROWS, HEIGHT, form)
        for split in tl.range(blocks.begin // BLOCKS, (blocks.end + (BLOCKS - 1)) // BLOCKS, num_stages=1):
            own = blocks_of_split(blocks, split, form)
            _, found = add_blocks(arrays, rows, bounds, query, own, None, OF_SPLIT, form)
            state = merged(state, found, ROWS, HEIGHT)
    else:
        before, last_split = add_blocks(arrays, rows, bounds, query, blocks, held, loop, form)
        if loop.splits:
            state = merged(before, last_split, ROWS, HEIGHT)
        else:
            state = last_split  # a merge with no split before changes the sign of zeros at most
    return state


@triton.jit
def attend(
    arrays: Arrays, rows: Rows, bounds: Bounds, query, blocks: Blocks, held, loop: tl.constexpr, form: tl.constexpr
):
    """Returns the state after a range of key blocks; arguments as for `add_splits`.

    Keys are first added as if all values were finite. If a sum is then not finite, they are added once more with care.
    """
    state = add_splits(arrays, rows, bounds, query, blocks, held, loop, form)
    if not all_finite(state.weighted):
        WITH_CARE: tl.constexpr = loop.with_care
        state = add_splits(arrays, rows, bounds, query, blocks, held, WITH_CARE, form)
    return state
