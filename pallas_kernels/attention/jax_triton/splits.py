"""Kernels for few rows: each split of keys has programs of its own, and a last kernel merges the splits."""

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._online import State, add_blocks, attend, height_of, merged, nothing
from pallas_kernels.attention.jax_triton._pieces import (
    Heads,
    all_finite,
    dot_of_heads,
    heads_of_keys,
    heads_of_rows,
    keys_of_all,
    limbs_of_all,
    piece_count,
    places,
)
from pallas_kernels.attention.jax_triton._results import Outputs, write_results
from pallas_kernels.attention.jax_triton._scores import scores, which_seen
from pallas_kernels.attention.jax_triton._tile import (
    Arrays,
    OptionalArrays,
    Rows,
    Sizes,
    blocks_of_split,
    blocks_seen,
    bounds_of,
    keys_at,
    limits_of,
    rows_at,
)
from pallas_kernels.attention.jax_triton._weights import (
    ROWS_AT_ONCE,
    Lines,
    Weights,
    add_weighted_blocks,
    write_weights,
)


@triton.jit
def line_of_split(arrays: Arrays, rows: Rows, split, form: tl.constexpr):
    """Returns where the numbers of a sequence and a key head start in (splits, B, K, T * N / K), as int64."""
    return ((rows.sequence + split * arrays.sizes.sequences) * form.heads + rows.head) * (
        arrays.sizes.queries * form.group
    )


@triton.jit
def heads_of_split(weighted, arrays: Arrays, rows: Rows, split, WIDTH: tl.constexpr, form: tl.constexpr):
    """Returns the heads of rows in (splits, B, K, T * N / K, WIDTH)."""
    line = line_of_split(arrays, rows, split, form)
    return Heads(weighted + line * WIDTH, rows.in_line * WIDTH)


@triton.jit
def lines_of_scores(array, rows: Rows, blocks, form: tl.constexpr):
    """Returns pointers (R, 1) to the scores of rows in (B, K, T * N / K, blocks * key_block)."""
    return array + ((rows.line + rows.in_line) * (blocks * form.key_block))[:, None]


@triton.jit
def score_kernel(
    query, key, value, limits, page_table, alibi_slopes, sinks, value_scale, bias, mask,
    sequences, queries, capacity, entries, tiles, blocks, out, loop: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes the scores of `loop.rows` rows of a sequence and a key head with the keys of a block in each program.

    The arrays and sizes are those of `Arrays`; `tiles` counts the tiles of a sequence and a key head, `blocks` the
    blocks of the capacity. `out` is (B, K, T * N / K, blocks * key_block) float32, -inf where a key is not seen. Blocks
    of which no row of a tile sees a key are not written.
    """
    optional = OptionalArrays(page_table, alibi_slopes, sinks, value_scale, bias, mask)
    arrays = Arrays(query, key, value, limits, optional, Sizes(sequences, queries, capacity, entries))
    ROWS: tl.constexpr = loop.rows
    KEYS: tl.constexpr = form.key_block
    index = tl.program_id(0)
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    block = rest // sequences % blocks
    tile = rest // sequences // blocks
    own = limits_of(arrays, sequence)
    rows = rows_at(arrays, own, sequence, index % form.heads, tile * ROWS, ROWS, False, form)
    bounds = bounds_of(own, rows, True, form)
    seen = blocks_seen(arrays, own, tile * ROWS, ROWS, KEYS, form)
    if (seen.begin <= block) & (block < seen.end):
        keys = keys_at(arrays, sequence, block * KEYS, KEYS, form.whole_blocks, form)
        pieces = limbs_of_all(heads_of_rows(query, rows, form.size), form.size, form)
        of_keys = keys_of_all(heads_of_keys(key, keys, rows.head, form.size, form), form.size, form)
        found, _ = scores(arrays, rows, keys, dot_of_heads(pieces, of_keys, ROWS, KEYS, False, form), False, form)
        found = tl.where(which_seen(arrays, rows, bounds, keys, False, form), found, float("-inf"))
        lines = lines_of_scores(out, rows, blocks, form)
        tl.store(lines + keys.position[None, :], found, mask=rows.exists[:, None])


@triton.jit
def split_kernel(
    query, key, value, limits, page_table, alibi_slopes, sinks, value_scale, bias, mask,
    sequences, queries, capacity, entries, tiles, splits, maximum, sums, weighted, loop: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """Computes the state of `loop.rows` rows of a sequence and a key head after the keys of a split in each program.

    The arrays and sizes are those of `Arrays`; `tiles` counts the tiles of a sequence and a key head, `splits` the
    splits of the capacity. `maximum` and `sums` are (splits, B, K, T * N / K) float32, `weighted` has the columns of
    the values for each. Splits of which no row of a tile sees a key are not written.
    """
    optional = OptionalArrays(page_table, alibi_slopes, sinks, value_scale, bias, mask)
    arrays = Arrays(query, key, value, limits, optional, Sizes(sequences, queries, capacity, entries))
    ROWS: tl.constexpr = loop.rows
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    index = tl.program_id(0)
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    split = rest // sequences % splits
    tile = rest // sequences // splits
    own = limits_of(arrays, sequence)
    rows = rows_at(arrays, own, sequence, index % form.heads, tile * ROWS, ROWS, False, form)
    bounds = bounds_of(own, rows, True, form)
    blocks = blocks_of_split(blocks_seen(arrays, own, tile * ROWS, ROWS, form.key_block, form), split, form)
    if blocks.begin < blocks.end:
        pieces = limbs_of_all(heads_of_rows(query, rows, form.size), form.size, form)
        state = attend(arrays, rows, bounds, pieces, blocks, None, loop, form)
        place = line_of_split(arrays, rows, split, form) + rows.in_line
        tl.store(maximum + place, state.maximum, mask=rows.exists)
        tl.store(sums + place, state.sums, mask=rows.exists)
        heads = heads_of_split(weighted, arrays, rows, split, form.value_size, form)
        for i in tl.static_range(COUNT):
            tl.store(places(heads, form.value_size, i, form), state.weighted[i], mask=rows.exists[:, None])


@triton.jit
def column_kernel(
    query, key, value, limits, page_table, alibi_slopes, sinks, value_scale, bias, mask,
    sequences, queries, capacity, entries, tiles, splits, blocks, scored, maximum, sums, weighted, exact, maxima,
    columns, loop: tl.constexpr, PARTS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes some columns of the state of `loop.rows` rows of a sequence and a key head after a split.

    The arrays and sizes are those of `Arrays`; `tiles` counts the tiles of a sequence and a key head, `splits` the
    splits of the capacity, `blocks` its blocks. `scored` is the result of `score_kernel`. Each program has one of
    `PARTS` parts of the values' columns, whose width is that of the form. `maximum` is (splits, B, K, T * N / K)
    float32, `sums` has these for each part, `weighted` the columns of all parts for each. A row that sees a value that
    is not finite has a sum that is nan in the parts of the value. Splits of which no row of a tile sees a key are not
    written. `exact`, `maxima` and `columns` are the `Weights` of each split and part.
    """
    optional = OptionalArrays(page_table, alibi_slopes, sinks, value_scale, bias, mask)
    value += tl.program_id(1) * form.value_size
    arrays = Arrays(query, key, value, limits, optional, Sizes(sequences, queries, capacity, entries))
    ROWS: tl.constexpr = loop.rows
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    WIDTH: tl.constexpr = form.value_size * PARTS
    HEIGHT: tl.constexpr = height_of(ROWS)
    AT_ONCE: tl.constexpr = min(ROWS, ROWS_AT_ONCE)
    index, part = tl.program_id(0), tl.program_id(1)
    rest, head = index // form.heads, index % form.heads
    sequence = (rest % sequences).to(tl.int64)
    split = rest // sequences % splits
    first = rest // sequences // splits * ROWS
    own = limits_of(arrays, sequence)
    rows = rows_at(arrays, own, sequence, head, first, ROWS, False, form)
    summed = rows_at(arrays, own, sequence, head, first, HEIGHT, False, form)
    bounds = bounds_of(own, rows, True, form)
    of_split = blocks_of_split(blocks_seen(arrays, own, first, ROWS, form.key_block, form), split, form)
    if of_split.begin < of_split.end:
        weights = Weights(exact, maxima, columns)
        line = line_of_split(arrays, rows, split * PARTS + part, form)
        for following in tl.static_range(0, ROWS, AT_ONCE):
            some = rows_at(arrays, own, sequence, head, first + following, AT_ONCE, False, form)
            found = lines_of_scores(scored, some, blocks, form)
            write_weights(weights, line + some.in_line, some.exists, found, split, of_split, form)
        tl.debug_barrier()
        of_rows = line + rows.in_line
        lines = Lines(of_rows, line + summed.in_line)
        state = add_weighted_blocks(arrays, rows, weights, lines, split, of_split, loop, form)
        if not all_finite(state.weighted):
            known = lines_of_scores(scored, rows, blocks, form)
            WITH_CARE: tl.constexpr = loop.of_scores.with_care
            before, last = add_blocks(arrays, rows, bounds, known, of_split, None, WITH_CARE, form)
            state = merged(before, last, ROWS, HEIGHT)
        if part == 0:
            place = line_of_split(arrays, rows, split, form) + rows.in_line
            tl.store(maximum + place, state.maximum, mask=rows.exists)
        tl.store(sums + of_rows, state.sums, mask=rows.exists)
        exists = summed.exists & (tl.arange(0, HEIGHT) < ROWS)
        heads = heads_of_split(weighted + part * form.value_size, arrays, summed, split, WIDTH, form)
        for i in tl.static_range(COUNT):
            tl.store(places(heads, form.value_size, i, form), state.weighted[i], mask=exists[:, None])


@triton.jit
def merge_kernel(
    query, key, value, limits, page_table, alibi_slopes, sinks, value_scale, bias, mask,
    sequences, queries, capacity, entries, tiles, maximum, sums, weighted, out, lse, loop: tl.constexpr,
    PARTS: tl.constexpr, SLICES: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Merges the splits of `loop.rows` rows of a sequence and a key head in ascending order in each program.

    The arrays and sizes are those of `Arrays`; `tiles` counts the tiles of a sequence and a key head. `maximum`, `sums`
    and `weighted` are those of `column_kernel`, or with one part those of `split_kernel`, the results those of
    `forward_kernel`. Each program has one of `SLICES` slices of the values' columns, whose width is that of the form.
    """
    optional = OptionalArrays(page_table, alibi_slopes, sinks, value_scale, bias, mask)
    arrays = Arrays(query, key, value, limits, optional, Sizes(sequences, queries, capacity, entries))
    ROWS: tl.constexpr = loop.rows
    BLOCKS: tl.constexpr = form.split // form.key_block
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    WIDTH: tl.constexpr = form.value_size * SLICES
    index, columns = tl.program_id(0), tl.program_id(1)
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    own = limits_of(arrays, sequence)
    rows = rows_at(arrays, own, sequence, index % form.heads, rest // sequences * ROWS, ROWS, False, form)
    blocks = blocks_seen(arrays, own, rest // sequences * ROWS, ROWS, form.key_block, form)
    state = nothing(ROWS, ROWS, form)
    for split in tl.range(blocks.begin // BLOCKS, (blocks.end + (BLOCKS - 1)) // BLOCKS, num_stages=loop.stages):
        total = tl.load(sums + line_of_split(arrays, rows, split * PARTS, form) + rows.in_line)
        for part in tl.static_range(1, PARTS):
            other = tl.load(sums + line_of_split(arrays, rows, split * PARTS + part, form) + rows.in_line)
            total = tl.where(other != other, other, total)
        heads = heads_of_split(weighted + columns * form.value_size, arrays, rows, split, WIDTH, form)
        values = ()
        for i in tl.static_range(COUNT):
            values = values + (tl.load(places(heads, form.value_size, i, form)),)
        place = line_of_split(arrays, rows, split, form) + rows.in_line
        state = merged(state, State(tl.load(maximum + place), total, values), ROWS, ROWS)
    write_results(arrays, rows, own, state, Outputs(out, lse), columns, SLICES, form)
