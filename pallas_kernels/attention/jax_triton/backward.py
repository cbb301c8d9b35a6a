"""The backward kernels: rows loop over the keys that they see, keys over the rows that see them.

Weights are recomputed. Blocks are first added as if all queries, keys and cotangents were finite; if a sum is then not
finite, all are added once more with care.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import is_finite, power_of_two, product
from pallas_kernels.attention.jax_triton._pieces import (
    all_finite,
    dot,
    dot_of_heads,
    kept,
    keys_of_all,
    limbs,
    limbs_of_all,
    limbs_unless,
    not_finite,
    piece_count,
    starts_of_keys,
    starts_of_rows,
    starts_of_values,
    write,
    zeros,
)
from pallas_kernels.attention.jax_triton._scores import LOG2E, along, scores
from pallas_kernels.attention.jax_triton._tile import Arrays, Keys, Rows, blocks_seen, keys_at, rows_at, rows_of


class Results(NamedTuple):
    """Pointers to the results of the forward pass, and to the gradient of its outputs.

    Attributes:
        cotangent: (B, T, N, V).
        lse: (B, T, N) float32, the log-sum-exp.
        delta: (B, T, N) float32, the sum of cotangent * result.
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
    lse = tl.load(starts_of_rows(results.lse, rows, arrays.queries, 1, form))
    lse = tl.where(lse == float("-inf"), 0.0, product(lse, LOG2E))
    return Row(
        limbs_of_all(starts_of_rows(arrays.query, rows, arrays.queries, form.size, form), form.size, form),
        limbs_of_all(
            starts_of_rows(results.cotangent, rows, arrays.queries, form.value_size, form), form.value_size, form
        ),
        lse,
        tl.load(starts_of_rows(results.delta, rows, arrays.queries, 1, form)),
    )


@triton.jit
def weights_and_slopes(
    arrays: Arrays, rows: Rows, row: Row, keys: Keys, total, inner, BY_KEYS: tl.constexpr, form: tl.constexpr
):
    """Returns the weights of rows and keys, and the gradients of their scores with and before the soft cap.

    Args:
        arrays: The arrays.
        rows: R rows.
        row: What is known about them.
        keys: n keys.
        total: (R, n), the products of queries and keys.
        inner: (R, n), the products of cotangents and values.
        BY_KEYS: Whether the first axis of all tensors is that of the keys.
        form: The constants.

    Returns:
        Weights, gradients of the bias, gradients of the products without their scale, and which keys the rows see.
    """
    found, seen, bent = scores(arrays, rows, keys, total, False, BY_KEYS, form)
    weights = tl.where(seen, power_of_two(found - along(row.lse, BY_KEYS)), 0.0)
    slopes = tl.where(seen, product(weights, inner - along(row.delta, BY_KEYS)), 0.0)
    before = slopes
    if form.cap is not None:
        before = tl.where(seen, product(slopes, 1.0 - product(bent, bent)), 0.0)
    return weights, slopes, before, seen


@triton.jit
def add_keys(
    arrays: Arrays, rows: Rows, row: Row, sums, block, ROWS: tl.constexpr, CAREFUL: tl.constexpr, form: tl.constexpr
):
    """Adds a block of keys to the gradients of queries."""
    KEYS: tl.constexpr = form.row_block
    COUNT: tl.constexpr = piece_count(form.size, form.widest_piece)
    keys = keys_at(arrays, rows.sequence, block * KEYS, KEYS, form)
    starts = starts_of_keys(arrays.key, keys, rows.head, form.size, form)
    values = starts_of_values(arrays.value, keys, rows.head, form)
    total = dot_of_heads(row.query, keys_of_all(starts, form.size, form), ROWS, KEYS, False, form)
    inner = dot_of_heads(row.cotangent, keys_of_all(values, form.value_size, form), ROWS, KEYS, False, form)
    _, _, slopes, _ = weights_and_slopes(arrays, rows, row, keys, total, inner, False, form)
    bad = tl.zeros((KEYS,), tl.int1)
    if CAREFUL:
        bad = not_finite(starts, KEYS, form.size, form)
    left = limbs(slopes, form)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (dot(sums[i], left, limbs_unless(starts, bad, form.size, i, CAREFUL, form), form),)
    return found


@triton.jit
def query_kernel(
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
    cotangent,
    lse,
    delta,
    tiles,
    gradient,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    form: tl.constexpr,
):
    """Computes the gradient of the queries, (B, T, N, H), of `ROWS` rows in each program.

    The arrays and sizes are those of `Arrays` and `Results`; `tiles` counts the tiles of a sequence and a key head, of
    which those with the most keys run first.
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
    results = Results(cotangent, lse, delta)
    index = tl.program_id(0)
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    tile = tiles - 1 - rest // sequences
    rows = rows_at(arrays, sequence, index % form.heads, tile * ROWS, ROWS, True, form)
    row = read_rows(arrays, results, rows, form)
    begin, _, end = blocks_seen(rows, form.row_block)
    sums = zeros(ROWS, form.size, form)
    for block in tl.range(begin, end, num_stages=STAGES):
        sums = add_keys(arrays, rows, row, sums, block, ROWS, False, form)
    fine = all_finite(sums)
    sums = kept(sums, fine)
    for block in tl.range(tl.where(fine, end, begin), end, num_stages=1):
        sums = add_keys(arrays, rows, row, sums, block, ROWS, True, form)
    starts = starts_of_rows(gradient, rows, queries, form.size, form)
    write(starts, rows.exists, sums, form.size, form.scale, form)


class Sums(NamedTuple):
    """Sums of the gradients of keys and of their values, pieces (n, width) float32 each."""

    of_keys: Any
    of_weights: Any


@triton.jit
def add_rows(
    arrays: Arrays,
    results: Results,
    sequence,
    head,
    keys: Keys,
    key,
    value,
    sums: Sums,
    block,
    KEYS: tl.constexpr,
    CAREFUL: tl.constexpr,
    form: tl.constexpr,
):
    """Adds a block of rows to the gradients of keys and values."""
    ROWS: tl.constexpr = form.row_block
    rows = rows_at(arrays, sequence, head, block * ROWS, ROWS, False, form)
    row = read_rows(arrays, results, rows, form)
    total = dot_of_heads(row.query, key, ROWS, KEYS, True, form)
    inner = dot_of_heads(row.cotangent, value, ROWS, KEYS, True, form)
    weights, _, slopes, seen = weights_and_slopes(arrays, rows, row, keys, total, inner, True, form)
    # A cotangent that is not finite reaches only the values that its row sees.
    weights = tl.where(seen & (is_finite(row.delta) == 0)[None, :], float("nan"), weights)
    queries = starts_of_rows(arrays.query, rows, arrays.queries, form.size, form)
    cotangents = starts_of_rows(results.cotangent, rows, arrays.queries, form.value_size, form)
    return Sums(
        add_products(sums.of_keys, slopes, queries, form.size, ROWS, CAREFUL, form),
        add_products(sums.of_weights, weights, cotangents, form.value_size, ROWS, CAREFUL, form),
    )


@triton.jit
def add_products(sums, left, starts, size: tl.constexpr, ROWS: tl.constexpr, CAREFUL: tl.constexpr, form: tl.constexpr):
    """Continues chains (n, width) over rows: products of (n, R) and the heads at pointers to their starts (R,)."""
    COUNT: tl.constexpr = piece_count(size, form.widest_piece)
    bad = tl.zeros((ROWS,), tl.int1)
    if CAREFUL:
        bad = not_finite(starts, ROWS, size, form)
    parts = limbs(left, form)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (dot(sums[i], parts, limbs_unless(starts, bad, size, i, CAREFUL, form), form),)
    return found


@triton.jit
def key_kernel(
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
    cotangent,
    lse,
    delta,
    first_query,
    end_query,
    tiles,
    of_key,
    of_value,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    form: tl.constexpr,
):
    """Computes the gradients of `KEYS` keys, (B, S, K, H), and of their values, (B, S, K, V), in each program.

    The arrays and sizes are those of `Arrays` and `Results`. `first_query` and `end_query`, (B, tiles) int32, are the
    range of queries that see any key of each of the `tiles`.
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
    results = Results(cotangent, lse, delta)
    index = tl.program_id(0)
    head = index % form.heads
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    tile = rest // sequences
    keys = keys_at(arrays, sequence, tile * KEYS, KEYS, form)
    key_limbs = keys_of_all(starts_of_keys(key, keys, head, form.size, form), form.size, form)
    value_limbs = keys_of_all(starts_of_values(value, keys, head, form), form.value_size, form)
    ROWS: tl.constexpr = form.row_block
    place = sequence * tiles + tile
    begin = tl.load(first_query + place) * form.group // ROWS
    end = (tl.load(end_query + place) * form.group + (ROWS - 1)) // ROWS
    sums = Sums(zeros(KEYS, form.size, form), zeros(KEYS, form.value_size, form))
    for block in tl.range(begin, end, num_stages=STAGES):
        sums = add_rows(arrays, results, sequence, head, keys, key_limbs, value_limbs, sums, block, KEYS, False, form)
    fine = all_finite(sums.of_keys) & all_finite(sums.of_weights)
    sums = Sums(kept(sums.of_keys, fine), kept(sums.of_weights, fine))
    for block in tl.range(tl.where(fine, end, begin), end, num_stages=1):
        sums = add_rows(arrays, results, sequence, head, keys, key_limbs, value_limbs, sums, block, KEYS, True, form)
    exists = keys.position < capacity
    write(starts_of_keys(of_key, keys, head, form.size, form), exists, sums.of_keys, form.size, form.scale, form)
    starts = starts_of_keys(of_value, keys, head, form.value_size, form)
    write(starts, exists, sums.of_weights, form.value_size, None, form)


@triton.jit
def score_kernel(
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
    cotangent,
    lse,
    delta,
    tiles,
    gradient,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    form: tl.constexpr,
):
    """Computes the gradients of the bias of the scores, (B, N, T, S) float32, of `ROWS` queries of a head.

    The arrays and sizes are those of `Arrays` and `Results`; `tiles` counts the tiles of a sequence and a query head.
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
    results = Results(cotangent, lse, delta)
    KEYS: tl.constexpr = form.row_block
    index = tl.program_id(0)
    place = index % tiles * ROWS + tl.arange(0, ROWS)
    query_head = index // tiles % form.query_heads
    sequence = (index // tiles // form.query_heads).to(tl.int64)
    exists = place < queries
    held = tl.minimum(place, queries - 1)
    heads = tl.zeros_like(held) + query_head
    rows = rows_of(arrays, sequence, query_head // form.group, held, heads, exists, exists, form)
    row = read_rows(arrays, results, rows, form)
    starts = gradient + ((sequence * form.query_heads + query_head) * queries + held) * capacity
    for block in tl.range(0, (capacity + (KEYS - 1)) // KEYS, num_stages=STAGES):
        keys = keys_at(arrays, sequence, block * KEYS, KEYS, form)
        of_keys = starts_of_keys(key, keys, rows.head, form.size, form)
        of_values = starts_of_values(value, keys, rows.head, form)
        total = dot_of_heads(row.query, keys_of_all(of_keys, form.size, form), ROWS, KEYS, False, form)
        inner = dot_of_heads(row.cotangent, keys_of_all(of_values, form.value_size, form), ROWS, KEYS, False, form)
        _, slopes, _, _ = weights_and_slopes(arrays, rows, row, keys, total, inner, False, form)
        inside = exists[:, None] & (keys.position < capacity)[None, :]
        tl.store(starts[:, None] + keys.position[None, :], tl.where(slopes == 0, 0.0, slopes), mask=inside)
