"""The backward kernels: rows loop over the keys that they see, keys over the rows that see them.

Weights are recomputed. Blocks are first added as if all queries, keys and cotangents were finite; if a sum is then not
finite, all are added once more with care.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import is_finite, power_of_two, product, product_and_sum
from pallas_kernels.attention.jax_triton._pieces import (
    Heads,
    all_finite,
    dot,
    dot_of_heads,
    heads_of_keys,
    heads_of_rows,
    heads_of_values,
    keys_of_all,
    limbs,
    limbs_of_all,
    limbs_unless,
    not_finite,
    piece_count,
    write,
    zeros,
)
from pallas_kernels.attention.jax_triton._scores import along, scores, which_seen
from pallas_kernels.attention.jax_triton._tile import (
    Arrays,
    Blocks,
    Bounds,
    Keys,
    Limits,
    OptionalArrays,
    Rows,
    Sizes,
    blocks_seen,
    bounds_of,
    keys_at,
    limits_of,
    rows_at,
)


class Results(NamedTuple):
    """Pointers to the results of the forward pass, and to the gradient of its outputs.

    Attributes:
        cotangent: (B, T, N, V).
        lse: (B, K, T * N / K) float32, the log-sum-exp in units of ln(2), 0 for rows that see nothing.
        delta: (B, K, T * N / K) float32, the sum of cotangent * result.
    """

    cotangent: Any
    lse: Any
    delta: Any


class Row(NamedTuple):
    """What the backward pass knows about rows.

    Attributes:
        query: The limbs of each piece of the queries.
        cotangent: The same of the cotangents.
        lse: (R,) float32, the log-sum-exp in units of ln(2), 0 for rows that see nothing.
        delta: (R,) float32.
    """

    query: Any
    cotangent: Any
    lse: Any
    delta: Any


@triton.jit
def read_rows(arrays: Arrays, results: Results, rows: Rows, form: tl.constexpr):
    """Reads what the backward pass knows about rows."""
    return Row(
        limbs_of_all(heads_of_rows(arrays.query, rows, form.size), form.size, form),
        limbs_of_all(heads_of_rows(results.cotangent, rows, form.value_size), form.value_size, form),
        tl.load(results.lse + rows.line + rows.in_line),
        tl.load(results.delta + rows.line + rows.in_line),
    )


@triton.jit
def weights_of(row: Row, found, BY_KEYS: tl.constexpr, form: tl.constexpr):
    """Returns the weights of rows and keys from their scores, -inf for keys that are not seen."""
    return power_of_two(product_and_sum(found, form.exponent_factor, -along(row.lse, BY_KEYS)))


@triton.jit
def slopes_of(row: Row, weights, inner, bent, BY_KEYS: tl.constexpr, form: tl.constexpr):
    """Returns the gradients of the scores with and before the soft cap, the latter without their scale.

    Args:
        row: What is known about the rows.
        weights: The weights of rows and keys.
        inner: The products of cotangents and values.
        bent: The hyperbolic tangents of the soft cap.
        BY_KEYS: Whether the first axis of all tensors is that of the keys.
        form: The constants.
    """
    slopes = product(weights, inner - along(row.delta, BY_KEYS))
    before = slopes
    if form.cap is not None:
        before = product(slopes, 1.0 - product(bent, bent))
    return slopes, before


@triton.jit
def add_keys(
    arrays: Arrays,
    rows: Rows,
    bounds: Bounds,
    row: Row,
    blocks: Blocks,
    loop: tl.constexpr,
    form: tl.constexpr,
):
    """Returns the gradients of queries over a range of key blocks."""
    ROWS: tl.constexpr = loop.rows
    CAREFUL: tl.constexpr = loop.careful
    KEYS: tl.constexpr = form.row_block
    COUNT: tl.constexpr = piece_count(form.size, form.widest_piece)
    sums = zeros(ROWS, form.size, form)
    for block in tl.range(blocks.begin, blocks.end, num_stages=loop.stages):
        keys = keys_at(arrays, rows.sequence, block * KEYS, KEYS, form.whole_blocks, form)
        heads = heads_of_keys(arrays.key, keys, rows.head, form.size, form)
        values = heads_of_values(arrays.value, keys, rows.head, form)
        total = dot_of_heads(row.query, keys_of_all(heads, form.size, form), ROWS, KEYS, False, form)
        inner = dot_of_heads(row.cotangent, keys_of_all(values, form.value_size, form), ROWS, KEYS, False, form)
        found, bent = scores(arrays, rows, keys, total, False, form)
        if CAREFUL or form.hides:
            seen = which_seen(arrays, rows, bounds, keys, False, form)
            found = tl.where(seen, found, float("-inf"))
        elif block >= blocks.whole:
            found = tl.where(which_seen(arrays, rows, bounds, keys, False, form), found, float("-inf"))
        _, slopes = slopes_of(row, weights_of(row, found, False, form), inner, bent, False, form)
        bad = tl.zeros((KEYS,), tl.int1)
        if CAREFUL:
            slopes = tl.where(seen, slopes, 0.0)
            bad = not_finite(heads, KEYS, form.size, form)
        left = limbs(slopes, form)
        added = ()
        for i in tl.static_range(COUNT):
            added = added + (dot(sums[i], left, limbs_unless(heads, bad, form.size, i, CAREFUL, form), form),)
        sums = added
    return sums


@triton.jit
def query_kernel(
    query, key, value, limits, page_table, alibi_slopes, sinks, value_scale, bias, mask,
    sequences, queries, capacity, entries, cotangent, lse, delta, tiles, gradient, loop: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of the queries, (B, T, N, H), of `loop.rows` rows in each program.

    The arrays and sizes are those of `Arrays` and `Results`; `tiles` counts the tiles of a sequence and a key head, of
    which those with the most keys run first.
    """
    optional = OptionalArrays(page_table, alibi_slopes, sinks, value_scale, bias, mask)
    arrays = Arrays(query, key, value, limits, optional, Sizes(sequences, queries, capacity, entries))
    results = Results(cotangent, lse, delta)
    ROWS: tl.constexpr = loop.rows
    index = tl.program_id(0)
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    tile = tiles - 1 - rest // sequences
    own = limits_of(arrays, sequence)
    rows = rows_at(arrays, own, sequence, index % form.heads, tile * ROWS, ROWS, False, form)
    bounds = bounds_of(own, rows, True, form)
    row = read_rows(arrays, results, rows, form)
    blocks = blocks_seen(arrays, own, tile * ROWS, ROWS, form.row_block, form)
    sums = add_keys(arrays, rows, bounds, row, blocks, loop, form)
    if not all_finite(sums):
        WITH_CARE: tl.constexpr = loop.with_care
        sums = add_keys(arrays, rows, bounds, row, blocks, WITH_CARE, form)
    write(heads_of_rows(gradient, rows, form.size), rows.exists, sums, form.size, form.scale, form)


class Sums(NamedTuple):
    """Sums of the gradients of keys and of their values, pieces (n, width) float32 each."""

    of_keys: Any
    of_values: Any


class Columns(NamedTuple):
    """Keys of a sequence and a key head.

    Attributes:
        sequence: Their sequence, int64.
        head: Their key head, int32.
        keys: Their places.
        key: The limbs of each piece of the keys.
        value: The same of their values.
    """

    sequence: Any
    head: Any
    keys: Keys
    key: Any
    value: Any


class Range(NamedTuple):
    """Blocks of rows that see any key of a tile, and in `whole_begin` to `whole_end` those whose rows see all."""

    begin: Any
    whole_begin: Any
    whole_end: Any
    end: Any


@triton.jit
def add_rows(
    arrays: Arrays,
    results: Results,
    limits: Limits,
    columns: Columns,
    blocks: Range,
    loop: tl.constexpr,
    form: tl.constexpr,
):
    """Returns the gradients of keys and values over a range of blocks of rows."""
    ROWS: tl.constexpr = form.row_block
    KEYS: tl.constexpr = loop.rows
    CAREFUL: tl.constexpr = loop.careful
    sequence, head, keys, key, value = columns
    sums = Sums(zeros(KEYS, form.size, form), zeros(KEYS, form.value_size, form))
    for block in tl.range(blocks.begin, blocks.end, num_stages=loop.stages):
        rows = rows_at(arrays, limits, sequence, head, block * ROWS, ROWS, form.whole_rows, form)
        row = read_rows(arrays, results, rows, form)
        total = dot_of_heads(row.query, key, ROWS, KEYS, True, form)
        found, bent = scores(arrays, rows, keys, total, True, form)
        if CAREFUL or form.hides:
            seen = which_seen(arrays, rows, bounds_of(limits, rows, rows.exists, form), keys, True, form)
            found = tl.where(seen, found, float("-inf"))
        elif (block < blocks.whole_begin) | (block >= blocks.whole_end):
            # Made anew, so that other blocks do without what bounds are computed from.
            here = rows_at(arrays, limits, sequence, head, block * ROWS, ROWS, form.whole_rows, form)
            bounds = bounds_of(limits, here, here.exists, form)
            found = tl.where(which_seen(arrays, here, bounds, keys, True, form), found, float("-inf"))
        weights = weights_of(row, found, True, form)
        left = weights
        if CAREFUL:
            # A cotangent that is not finite reaches only the values that its row sees.
            left = tl.where(seen & (is_finite(row.delta) == 0)[None, :], float("nan"), weights)
        heads = heads_of_rows(results.cotangent, rows, form.value_size)
        of_values = add_products(sums.of_values, left, heads, form.value_size, ROWS, CAREFUL, form)
        inner = dot_of_heads(row.cotangent, value, ROWS, KEYS, True, form)
        _, slopes = slopes_of(row, weights, inner, bent, True, form)
        if CAREFUL:
            slopes = tl.where(seen, slopes, 0.0)
        heads = heads_of_rows(arrays.query, rows, form.size)
        sums = Sums(add_products(sums.of_keys, slopes, heads, form.size, ROWS, CAREFUL, form), of_values)
    return sums


@triton.jit
def add_products(
    sums, left, heads: Heads, size: tl.constexpr, ROWS: tl.constexpr, CAREFUL: tl.constexpr, form: tl.constexpr
):
    """Continues chains (n, width) over rows: products of (n, R) and R heads."""
    COUNT: tl.constexpr = piece_count(size, form.widest_piece)
    bad = tl.zeros((ROWS,), tl.int1)
    if CAREFUL:
        bad = not_finite(heads, ROWS, size, form)
    parts = limbs(left, form)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (dot(sums[i], parts, limbs_unless(heads, bad, size, i, CAREFUL, form), form),)
    return found


@triton.jit
def key_kernel(
    query, key, value, limits, page_table, alibi_slopes, sinks, value_scale, bias, mask,
    sequences, queries, capacity, entries, cotangent, lse, delta, ranges, tiles, of_key, of_value, loop: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of `loop.rows` keys, (B, S, K, H), and of their values, (B, S, K, V), in each program.

    The arrays and sizes are those of `Arrays` and `Results`. `ranges` (B, tiles, 4) int32 holds for each of the `tiles`
    the first query that sees any of its keys, the first that sees all, the end of those, and the end of those that see
    any.
    """
    optional = OptionalArrays(page_table, alibi_slopes, sinks, value_scale, bias, mask)
    arrays = Arrays(query, key, value, limits, optional, Sizes(sequences, queries, capacity, entries))
    results = Results(cotangent, lse, delta)
    index = tl.program_id(0)
    head = index % form.heads
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    tile = rest // sequences
    own = limits_of(arrays, sequence)
    KEYS: tl.constexpr = loop.rows
    keys = keys_at(arrays, sequence, tile * KEYS, KEYS, False, form)
    key_limbs = keys_of_all(heads_of_keys(key, keys, head, form.size, form), form.size, form)
    value_limbs = keys_of_all(heads_of_values(value, keys, head, form), form.value_size, form)
    columns = Columns(sequence, head, keys, key_limbs, value_limbs)
    ROWS: tl.constexpr = form.row_block
    place = ranges + (sequence * tiles + tile) * 4
    blocks = Range(
        tl.load(place) * form.group // ROWS,
        (tl.load(place + 1) * form.group + (ROWS - 1)) // ROWS,
        tl.load(place + 2) * form.group // ROWS,
        (tl.load(place + 3) * form.group + (ROWS - 1)) // ROWS,
    )
    sums = add_rows(arrays, results, own, columns, blocks, loop, form)
    if not (all_finite(sums.of_keys) & all_finite(sums.of_values)):
        WITH_CARE: tl.constexpr = loop.with_care
        sums = add_rows(arrays, results, own, columns, blocks, WITH_CARE, form)
    exists = keys.position < capacity
    write(heads_of_keys(of_key, keys, head, form.size, form), exists, sums.of_keys, form.size, form.scale, form)
    heads = heads_of_keys(of_value, keys, head, form.value_size, form)
    write(heads, exists, sums.of_values, form.value_size, None, form)


@triton.jit
def score_kernel(
    query, key, value, limits, page_table, alibi_slopes, sinks, value_scale, bias, mask,
    sequences, queries, capacity, entries, cotangent, lse, delta, tiles, gradient, loop: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of the bias of the scores, (B, N, T, S) float32, of `loop.rows` queries of a head.

    The arrays and sizes are those of `Arrays` and `Results`; `tiles` counts the tiles of a sequence and a query head.
    """
    optional = OptionalArrays(page_table, alibi_slopes, sinks, value_scale, bias, mask)
    arrays = Arrays(query, key, value, limits, optional, Sizes(sequences, queries, capacity, entries))
    results = Results(cotangent, lse, delta)
    ROWS: tl.constexpr = loop.rows
    KEYS: tl.constexpr = form.row_block
    index = tl.program_id(0)
    place = index % tiles * ROWS + tl.arange(0, ROWS)
    query_head = index // tiles % form.query_heads
    sequence = (index // tiles // form.query_heads).to(tl.int64)
    held = tl.minimum(place, queries - 1)
    head = query_head // form.group
    own = limits_of(arrays, sequence)
    entry = sequence * queries * form.query_heads + query_head
    rows = Rows(
        sequence=sequence,
        head=head,
        query=held,
        query_head=tl.zeros_like(held) + query_head,
        position=own.offset + held,
        exists=place < queries,
        entry=entry,
        following=held.to(tl.int64) * form.query_heads,
        line=(sequence * form.heads + head) * queries * form.group + query_head % form.group,
        in_line=held * form.group,
    )
    bounds = bounds_of(own, rows, rows.exists, form)
    row = read_rows(arrays, results, rows, form)
    starts = gradient + ((sequence * form.query_heads + query_head) * queries + held) * capacity
    for block in tl.range(0, (capacity + (KEYS - 1)) // KEYS, num_stages=loop.stages):
        keys = keys_at(arrays, sequence, block * KEYS, KEYS, form.whole_blocks, form)
        of_keys = heads_of_keys(key, keys, rows.head, form.size, form)
        of_values = heads_of_values(value, keys, rows.head, form)
        total = dot_of_heads(row.query, keys_of_all(of_keys, form.size, form), ROWS, KEYS, False, form)
        inner = dot_of_heads(row.cotangent, keys_of_all(of_values, form.value_size, form), ROWS, KEYS, False, form)
        found, bent = scores(arrays, rows, keys, total, False, form)
        seen = which_seen(arrays, rows, bounds, keys, False, form)
        weights = weights_of(row, tl.where(seen, found, float("-inf")), False, form)
        slopes, _ = slopes_of(row, weights, inner, bent, False, form)
        inside = rows.exists[:, None] & (keys.position < capacity)[None, :]
        tl.store(starts[:, None] + keys.position[None, :], tl.where(seen & (slopes != 0), slopes, 0.0), mask=inside)
