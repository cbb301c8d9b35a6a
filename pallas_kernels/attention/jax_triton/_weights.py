"""The weights of a split's keys from scores that are known, computed before any product with the values."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import power_of_two, product, product_and_sum
from pallas_kernels.attention.jax_triton._online import COLUMNS, State, finished, merged, nothing, start
from pallas_kernels.attention.jax_triton._pieces import (
    dot,
    heads_of_values,
    limbs,
    limbs_unless,
    piece_count,
    rounded,
)
from pallas_kernels.attention.jax_triton._tile import LEAST, Arrays, Blocks, Rows, keys_at
from pallas_kernels.parts.jax_triton.arithmetic import half_sums

ROWS_AT_ONCE = tl.constexpr(4)  # as many as fit into registers with all keys of a split


class Weights(NamedTuple):
    """Pointers to what a program knows of the keys of its split.

    Attributes:
        exact: (rows, span), the weights in the dtype of the queries.
        maxima: (rows, blocks) float32, the maxima after each block.
        columns: (rows, blocks, COLUMNS) float32, the sums of each block's weights by columns.
    """

    exact: Any
    maxima: Any
    columns: Any


class Lines(NamedTuple):
    """Where the numbers of rows are in `Weights`.

    Attributes:
        of_rows: (R,) integers, the index of each row.
        of_products: (H,) integers, the same for the rows of the products with the values.
    """

    of_rows: Any
    of_products: Any


@triton.jit
def larger(a, b):
    """Returns the larger number."""
    return tl.maximum(a, b)


@triton.jit
def write_weights(weights: Weights, place, exists, scored, split, blocks: Blocks, form: tl.constexpr):
    """Writes the weights of rows for some blocks of a split, and zeros for its other blocks.

    Args:
        weights: Where they go.
        place: (R,) integers, the index of each row there.
        exists: (R,) bool; other rows are not written.
        scored: Pointers (R, 1) to the scores of the rows, by the position of the key.
        split: Index of the split.
        blocks: The blocks.
        form: The constants.
    """
    ROWS: tl.constexpr = place.shape[0]
    KEYS: tl.constexpr = form.key_block
    SPAN: tl.constexpr = form.span
    BLOCKS: tl.constexpr = SPAN // KEYS
    position = split * form.split + tl.arange(0, SPAN)
    within = (position >= blocks.begin * KEYS) & (position < blocks.end * KEYS)
    found = tl.load(scored + position[None, :], mask=within[None, :], other=float("-inf"))
    found = tl.reshape(found, (ROWS, BLOCKS, KEYS))
    highest = tl.maximum(product(tl.max(found, 2), form.exponent_factor), LEAST)
    highest = tl.associative_scan(highest, 1, larger)
    exact = power_of_two(product_and_sum(found, form.exponent_factor, -highest[:, :, None]))
    columns = half_sums(tl.reshape(exact, (ROWS * BLOCKS, KEYS)), ROWS * BLOCKS, KEYS, COLUMNS)
    of_blocks = place[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    tl.store(weights.maxima + of_blocks, highest, mask=exists[:, None])
    of_columns = of_blocks[:, :, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    columns = tl.reshape(columns, (ROWS, BLOCKS, COLUMNS))
    tl.store(weights.columns + of_columns, columns, mask=exists[:, None, None])
    of_keys = place[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    tl.store(weights.exact + of_keys, rounded(tl.reshape(exact, (ROWS, SPAN)), form), mask=exists[:, None])


@triton.jit
def add_weighted_blocks(
    arrays: Arrays,
    rows: Rows,
    weights: Weights,
    lines: Lines,
    split,
    blocks: Blocks,
    loop: tl.constexpr,
    form: tl.constexpr,
):
    """Returns the state after a range of key blocks of a split, as if all values were finite.

    Args:
        arrays: The arrays.
        rows: The rows.
        weights: What `write_weights` has written.
        lines: Where.
        split: Index of the split.
        blocks: The range.
        loop: How it is gone through.
        form: The constants.
    """
    place, repeatedly = lines
    ROWS: tl.constexpr = place.shape[0]
    HEIGHT: tl.constexpr = repeatedly.shape[0]
    KEYS: tl.constexpr = form.key_block
    BLOCKS: tl.constexpr = form.span // form.key_block
    COUNT: tl.constexpr = piece_count(form.value_size, form.widest_piece)
    state = start(ROWS, HEIGHT, form)
    sums, summed, below, before = state.sums, state.weighted, state.maximum, tl.full((HEIGHT,), LEAST, tl.float32)
    for block in tl.range(blocks.begin, blocks.end, num_stages=loop.stages):
        keys = keys_at(arrays, rows.sequence, block * KEYS, KEYS, form.whole_blocks, form)
        index = block - split * (form.split // KEYS)
        of_block = place * BLOCKS + index
        highest = tl.load(weights.maxima + of_block)
        columns = tl.load(weights.columns + (of_block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]))
        sums = product_and_sum(sums, power_of_two(below - highest)[:, None], columns)
        after = tl.load(weights.maxima + (repeatedly * BLOCKS + index))
        decay = power_of_two(before - after)[:, None]
        of_keys = repeatedly * form.span + index * KEYS
        weight = limbs(tl.load(weights.exact + (of_keys[:, None] + tl.arange(0, KEYS)[None, :])), form)
        value = heads_of_values(arrays.value, keys, rows.head, form)
        bad = tl.zeros((KEYS,), tl.int1)
        values = ()
        for i in tl.static_range(COUNT):
            piece = limbs_unless(value, bad, form.value_size, i, False, form)
            values = values + (dot(product(summed[i], decay), weight, piece, form),)
        summed, below, before = values, highest, after
    maximum = tl.load(weights.maxima + (place * BLOCKS + (blocks.end - 1 - split * (form.split // KEYS))))
    state = finished(State(maximum, sums, summed), ROWS)
    return merged(nothing(ROWS, HEIGHT, form), state, ROWS, HEIGHT)
