"""The forward kernel: a program processes some rows of a sequence over all keys that they see."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import log2, power_of_two, product, quotient
from pallas_kernels.attention.jax_triton._form import LN2 as _LN2
from pallas_kernels.attention.jax_triton._pieces import (
    all_finite,
    dot,
    dot_of_heads,
    kept,
    keys_of_all,
    limbs,
    limbs_of_all,
    limbs_unless,
    multiply,
    not_finite,
    piece_count,
    piece_start,
    piece_width,
    rounded,
    starts_of_keys,
    starts_of_rows,
    starts_of_values,
    three_limbs,
    write,
    zeros,
)
from pallas_kernels.attention.jax_triton._scores import LOG2E, of_heads, scores
from pallas_kernels.attention.jax_triton._tile import LEAST, Arrays, Rows, blocks_seen, keys_at, rows_at

LN2 = tl.constexpr(_LN2)
SUMS = tl.constexpr(16)  # columns of a sum of rows that the tensor core adds


class State(NamedTuple):
    """What rows know after some blocks of keys.

    Attributes:
        maximum: (R,) float32, the maximum of the scores.
        sums: (R, SUMS) float32, the sum of the weights in every column.
        weighted: (R, width) float32 of each piece, the sums of weights times values.
    """

    maximum: Any
    sums: Any
    weighted: Any


@triton.jit
def start(ROWS: tl.constexpr, form: tl.constexpr):
    """Returns the state before any key."""
    maximum = tl.full((ROWS,), LEAST, tl.float32)
    return State(maximum, tl.zeros((ROWS, SUMS), tl.float32), zeros(ROWS, form.value_size, form))


@triton.jit
def add_rows(sums, x, KEYS: tl.constexpr):
    """Continues row sums (R, SUMS), whose columns are all equal, over (R, KEYS).

    The tensor core adds them, times 1, in an order independent of the layout of registers.
    """
    ones = tl.full((KEYS, SUMS), 1.0, tl.bfloat16)
    high, middle, low = three_limbs(x)
    return multiply(multiply(multiply(sums, low, ones), middle, ones), high, ones)


@triton.jit
def add_block(
    arrays: Arrays, rows: Rows, query, state: State, block, ROWS: tl.constexpr, WHOLE: tl.constexpr, form: tl.constexpr
):
    """Adds a block of keys.

    Args:
        arrays: The arrays.
        rows: The rows.
        query: The limbs of each piece of their queries.
        state: The state before the block.
        block: Index of the block.
        ROWS: Number of the rows.
        WHOLE: Whether every row sees every key of the block, but for a mask, and all values are taken to be finite.
            Otherwise a value that is not finite makes only those rows nan that see it.
        form: The constants.
    """
    KEYS: tl.constexpr = form.key_block
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    keys = keys_at(arrays, rows.sequence, block * KEYS, KEYS, form)
    key = keys_of_all(starts_of_keys(arrays.key, keys, rows.head, form.size, form), form.size, form)
    total = dot_of_heads(query, key, ROWS, KEYS, False, form)
    found, seen, _ = scores(arrays, rows, keys, total, WHOLE, False, form)
    highest = tl.maximum(state.maximum, tl.max(found, 1))
    weights = power_of_two(found - highest[:, None])
    decay = power_of_two(state.maximum - highest)[:, None]
    value = starts_of_values(arrays.value, keys, rows.head, form)
    bad = tl.zeros((KEYS,), tl.int1)
    if not WHOLE:
        bad = not_finite(value, KEYS, form.value_size, form)
        weights = tl.where(seen & bad[None, :], float("nan"), weights)
    sums = add_rows(product(state.sums, decay), weights, KEYS)
    weight = limbs(weights, form)
    values = ()
    for i in tl.static_range(COUNT):
        piece = limbs_unless(value, bad, form.value_size, i, not WHOLE, form)
        values = values + (dot(product(state.weighted[i], decay), weight, piece, form),)
    return State(highest, sums, values)


@triton.jit
def add_blocks(
    arrays: Arrays,
    rows: Rows,
    query,
    state: State,
    begin,
    end,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    form: tl.constexpr,
):
    """Adds a range of key blocks in ascending order."""
    for block in tl.range(begin, end, num_stages=STAGES):
        state = add_block(arrays, rows, query, state, block, ROWS, WHOLE, form)
    return state


@triton.jit
def attend(arrays: Arrays, rows: Rows, query, ROWS: tl.constexpr, STAGES: tl.constexpr, form: tl.constexpr):
    """Returns the state of rows after all blocks that they see.

    Blocks that all rows see are first added as if all values were finite. If a sum is then not finite, they are added
    once more with care, as the others are.
    """
    begin, whole, end = blocks_seen(rows, form.key_block)
    state = start(ROWS, form)
    state = add_blocks(arrays, rows, query, state, begin, whole, ROWS, True, STAGES, form)
    fine = all_finite(state.weighted)
    maximum, sums = tl.where(fine, state.maximum, LEAST), tl.where(fine, state.sums, 0.0)
    state = State(maximum, sums, kept(state.weighted, fine))
    return add_blocks(arrays, rows, query, state, tl.where(fine, whole, begin), end, ROWS, False, STAGES, form)


@triton.jit
def add_sink(arrays: Arrays, rows: Rows, state: State, form: tl.constexpr):
    """Returns a state, with its sums (R,), after a sink, a key without a value."""
    COUNT: tl.constexpr = len(state.weighted)
    sink = product(tl.load(of_heads(arrays.sinks, rows, form.sinks, form)).to(tl.float32), LOG2E)
    highest = tl.maximum(state.maximum, sink)
    decay = power_of_two(state.maximum - highest)
    sums = product(state.sums, decay) + power_of_two(sink - highest)
    values = ()
    for i in tl.static_range(COUNT):
        values = values + (product(state.weighted[i], decay[:, None]),)
    return State(highest, sums, values)


@triton.jit
def write_results(arrays: Arrays, rows: Rows, state: State, out, lse, form: tl.constexpr):
    """Writes the results and the log-sum-exp of rows, from a state with sums (R,)."""
    COUNT: tl.constexpr = len(state.weighted)
    nothing = state.sums == 0
    state = State(state.maximum, tl.where(nothing, 1.0, state.sums), state.weighted)
    if form.sinks is not None:
        state = add_sink(arrays, rows, state, form)
    results = ()
    for i in tl.static_range(COUNT):
        result = quotient(state.weighted[i], state.sums[:, None])
        if form.value_scale is not None:
            scales = arrays.value_scale + rows.head * form.value_size
            if form.value_scale:
                scales += rows.sequence * (form.heads * form.value_size)
            scales += piece_start(form.value_size, form.widest_piece, i)
            scale = tl.load(scales + tl.arange(0, piece_width(form.value_size, form.widest_piece, i)))
            result = product(rounded(result, form).to(tl.float32), scale[None, :])
        results = results + (tl.where(rows.valid, result, float("nan")),)
    starts = starts_of_rows(out, rows, arrays.queries, form.value_size, form)
    write(starts, rows.exists, results, form.value_size, None, form)
    found = tl.where(nothing, float("-inf"), product(state.maximum + log2(state.sums), LN2))
    tl.store(
        starts_of_rows(lse, rows, arrays.queries, 1, form), tl.where(rows.valid, found, float("nan")), mask=rows.exists
    )


@triton.jit
def forward_kernel(
    query,
    key,
    value,
    limits,
    page_table,
    alibi_slopes,
    sinks,
    value_scale,
    bias,
    mask,
    sequences,
    queries,
    capacity,
    entries,
    tiles,
    out,
    lse,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    form: tl.constexpr,
):
    """Computes `ROWS` rows of a sequence and a key head in each program.

    The arrays and sizes are those of `Arrays`; `tiles` counts the tiles of a sequence and a key head, of which those
    with the most keys run first. `out` is (B, T, N, V), `lse` (B, T, N) float32.
    """
    arrays = Arrays(
        query,
        key,
        value,
        limits,
        page_table,
        alibi_slopes,
        sinks,
        value_scale,
        bias,
        mask,
        sequences,
        queries,
        capacity,
        entries,
    )
    index = tl.program_id(0)
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    tile = tiles - 1 - rest // sequences
    rows = rows_at(arrays, sequence, index % form.heads, tile * ROWS, ROWS, True, form)
    pieces = limbs_of_all(starts_of_rows(query, rows, queries, form.size, form), form.size, form)
    state = attend(arrays, rows, pieces, ROWS, STAGES, form)
    write_results(arrays, rows, State(state.maximum, tl.max(state.sums, 1), state.weighted), out, lse, form)
