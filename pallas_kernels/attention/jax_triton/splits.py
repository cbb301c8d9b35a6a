"""Kernels for few rows: each split of keys has a program of its own, and a second kernel merges the splits."""

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._online import State, attend, merged, nothing
from pallas_kernels.attention.jax_triton._pieces import Heads, heads_of_rows, limbs_of_all, piece_count, places
from pallas_kernels.attention.jax_triton._results import write_results
from pallas_kernels.attention.jax_triton._tile import Arrays, Rows, blocks_seen, bounds_of, limits_of, rows_at


@triton.jit
def line_of_split(arrays: Arrays, rows: Rows, split, form: tl.constexpr):
    """Returns where the numbers of a sequence and a key head start in (splits, B, K, T * N / K), as int64."""
    return ((rows.sequence + split * arrays.sequences) * form.heads + rows.head) * (arrays.queries * form.group)


@triton.jit
def heads_of_split(weighted, arrays: Arrays, rows: Rows, split, form: tl.constexpr):
    """Returns the heads of rows in (splits, B, K, T * N / K, V)."""
    line = line_of_split(arrays, rows, split, form)
    return Heads(weighted + line * form.value_size, rows.in_line * form.value_size)


@triton.jit
def split_kernel(
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
    splits,
    maximum,
    sums,
    weighted,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    form: tl.constexpr,
):
    """Computes the state of `ROWS` rows of a sequence and a key head after the keys of a split in each program.

    The arrays and sizes are those of `Arrays`; `tiles` counts the tiles of a sequence and a key head, `splits` the
    splits of the capacity. `maximum` and `sums` are (splits, B, K, T * N / K) float32, `weighted` has V elements for
    each. Splits of which no row of a tile sees a key are not written.
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
    BLOCKS: tl.constexpr = form.split // form.key_block
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    index = tl.program_id(0)
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    split = rest // sequences % splits
    tile = rest // sequences // splits
    own = limits_of(arrays, sequence)
    rows = rows_at(arrays, own, sequence, index % form.heads, tile * ROWS, ROWS, False, form)
    bounds = bounds_of(own, rows, True, form)
    begin, whole, end = blocks_seen(bounds, form.key_block)
    begin, end = tl.maximum(begin, split * BLOCKS), tl.minimum(end, (split + 1) * BLOCKS)
    if begin < end:
        pieces = limbs_of_all(heads_of_rows(query, rows, form.size), form.size, form)
        state = attend(arrays, rows, bounds, pieces, begin, whole, end, ROWS, STAGES, form)
        place = line_of_split(arrays, rows, split, form) + rows.in_line
        tl.store(maximum + place, state.maximum, mask=rows.exists)
        tl.store(sums + place, state.sums, mask=rows.exists)
        heads = heads_of_split(weighted, arrays, rows, split, form)
        for i in tl.static_range(COUNT):
            tl.store(places(heads, form.value_size, i, form), state.weighted[i], mask=rows.exists[:, None])


@triton.jit
def merge_kernel(
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
    maximum,
    sums,
    weighted,
    out,
    lse,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    form: tl.constexpr,
):
    """Merges the splits of `ROWS` rows of a sequence and a key head in ascending order in each program.

    The arrays and sizes are those of `Arrays`; `tiles` counts the tiles of a sequence and a key head. `maximum`, `sums`
    and `weighted` are those of `split_kernel`, the results those of `forward_kernel`.
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
    BLOCKS: tl.constexpr = form.split // form.key_block
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    index = tl.program_id(0)
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    own = limits_of(arrays, sequence)
    rows = rows_at(arrays, own, sequence, index % form.heads, rest // sequences * ROWS, ROWS, False, form)
    begin, _, end = blocks_seen(bounds_of(own, rows, True, form), form.key_block)
    state = nothing(ROWS, form)
    for split in tl.range(begin // BLOCKS, (end + (BLOCKS - 1)) // BLOCKS, num_stages=STAGES):
        place = line_of_split(arrays, rows, split, form) + rows.in_line
        heads = heads_of_split(weighted, arrays, rows, split, form)
        values = ()
        for i in tl.static_range(COUNT):
            values = values + (tl.load(places(heads, form.value_size, i, form)),)
        state = merged(state, State(tl.load(maximum + place), tl.load(sums + place), values))
    write_results(arrays, rows, own, state, out, lse, form)
