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
from pallas_kernels.attention.jax_triton._tile import LEAST, Arrays, Bounds, Rows, keys_at
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
    arrays: Arrays,
    rows: Rows,
    bounds: Bounds,
    query,
    scored,
    begin,
    whole,
    end,
    ROWS: tl.constexpr,
    CAREFUL: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    SPLITS: tl.constexpr,
    held,
    form: tl.constexpr,
):
    """Returns the states after a range of key blocks: after the splits before the last one, and after the last one.

    Args:
        arrays: The arrays.
        rows: The rows.
        bounds: The keys that they see.
        query: The limbs of each piece of their queries; unused if there are scores.
        scored: Pointers (R, 1) to the scores of the rows, by the position of the key; None to compute them.
        begin: Index of the first block.
        whole: Index after the last block of the range at `begin` of which the rows see every key, but for a mask.
        end: Index after the last block.
        ROWS: Number of the rows; if there are fewer than `LEAST_ROWS`, `scored` is given.
        CAREFUL: Whether a value that is not finite makes only those rows nan that see it. Otherwise all values are
            taken to be finite.
        STAGES: Blocks that are read ahead.
        TOGETHER: Whether a block's values are awaited with its keys, before the scores.
        SPLITS: Whether the range may be of several splits.
        held: Pointer to where the sums of values after the splits before are set aside; None to keep them in registers.
        form: The constants.
    """
    KEYS: tl.constexpr = form.key_block
    BLOCKS: tl.constexpr = form.split // form.key_block
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    HEIGHT: tl.constexpr = height_of(ROWS)
    before, state = nothing(ROWS, HEIGHT, form), start(ROWS, HEIGHT, form)
    if held is not None:
        before = State(before.maximum, before.sums, ())
        first_split, places = begin // BLOCKS, held_places(held, ROWS, form)
    for block in tl.range(begin, end, num_stages=STAGES):
        keys = keys_at(arrays, rows.sequence, block * KEYS, KEYS, form.whole_blocks, form)
        if scored is not None:
            found = tl.load(scored + keys.position[None, :])
            if CAREFUL:
                seen = which_seen(arrays, rows, bounds, keys, False, form)
        else:
            key = keys_of_all(heads_of_keys(arrays.key, keys, rows.head, form.size, form), form.size, form)
            if TOGETHER:
                read = keys_of_all(heads_of_values(arrays.value, keys, rows.head, form), form.value_size, form)
            total = dot_of_heads(query, key, ROWS, KEYS, False, form)
            if SPLITS:  # noqa: SIM102 - known when the kernel is compiled
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
            if TOGETHER:
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
    TOGETHER: tl.constexpr,
    SPLITS: tl.constexpr,
    LOOPS: tl.constexpr,
    held,
    form: tl.constexpr,
):
    """Returns the state after a range of key blocks; arguments as for `add_blocks`, without scores.

    With `LOOPS` each split has a loop of its own. In one loop over all blocks, where a branch merges two splits, what
    the rows know of the splits before takes registers in all steps; but blocks of the next split are read ahead.
    """
    HEIGHT: tl.constexpr = height_of(ROWS)
    if SPLITS and LOOPS:
        BLOCKS: tl.constexpr = form.split // form.key_block
        state = nothing(ROWS, HEIGHT, form)
        for split in tl.range(begin // BLOCKS, (end + (BLOCKS - 1)) // BLOCKS, num_stages=1):
            first, last = tl.maximum(begin, split * BLOCKS), tl.minimum(end, (split + 1) * BLOCKS)
            _, found = add_blocks(
                arrays,
                rows,
                bounds,
                query,
                None,
                first,
                whole,
                last,
                ROWS,
                CAREFUL,
                STAGES,
                TOGETHER,
                False,
                None,
                form,
            )
            state = merged(state, found, ROWS, HEIGHT)
    else:
        before, last_split = add_blocks(
            arrays, rows, bounds, query, None, begin, whole, end, ROWS, CAREFUL, STAGES, TOGETHER, SPLITS, held, form
        )
        if SPLITS:
            state = merged(before, last_split, ROWS, HEIGHT)
        else:
            state = last_split  # a merge with no split before changes the sign of zeros at most
    return state


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
    TOGETHER: tl.constexpr,
    SPLITS: tl.constexpr,
    LOOPS: tl.constexpr,
    held,
    form: tl.constexpr,
):
    """Returns the state after a range of key blocks; arguments as for `add_splits`.

    Keys are first added as if all values were finite. If a sum is then not finite, they are added once more with care.
    """
    state = add_splits(
        arrays, rows, bounds, query, begin, whole, end, ROWS, False, STAGES, TOGETHER, SPLITS, LOOPS, held, form
    )
    if not all_finite(state.weighted):
        state = add_splits(
            arrays, rows, bounds, query, begin, whole, end, ROWS, True, 1, False, SPLITS, LOOPS, held, form
        )
    return state
