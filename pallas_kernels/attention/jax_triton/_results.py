"""The end of the forward pass: sinks, and what is written."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import log2, power_of_two, product, quotient
from pallas_kernels.attention.jax_triton._form import LN2 as _LN2
from pallas_kernels.attention.jax_triton._online import State
from pallas_kernels.attention.jax_triton._pieces import heads_of_rows, piece_start, piece_width, rounded, write
from pallas_kernels.attention.jax_triton._scores import LOG2E, of_heads
from pallas_kernels.attention.jax_triton._tile import Arrays, Limits, Rows

LN2 = tl.constexpr(_LN2)


class Outputs(NamedTuple):
    """Pointers to what is written.

    Attributes:
        out: (B, T, N, V).
        lse: (B, T, N) float32.
    """

    out: Any
    lse: Any


@triton.jit
def add_sink(arrays: Arrays, rows: Rows, state: State, form: tl.constexpr):
    """Returns a state after a sink, a key without a value."""
    COUNT: tl.constexpr = len(state.weighted)
    sink = product(tl.load(of_heads(arrays.optional.sinks, rows, form.sinks, form)).to(tl.float32), LOG2E)
    highest = tl.maximum(state.maximum, sink)
    decay = power_of_two(state.maximum - highest)
    sums = product(state.sums, decay) + power_of_two(sink - highest)
    values = ()
    for i in tl.static_range(COUNT):
        values = values + (product(state.weighted[i], decay[:, None]),)
    return State(highest, sums, values)


@triton.jit
def write_results(
    arrays: Arrays,
    rows: Rows,
    limits: Limits,
    state: State,
    outputs: Outputs,
    part,
    PARTS: tl.constexpr,
    form: tl.constexpr,
):
    """Writes the results and the log-sum-exp of rows.

    Args:
        arrays: The arrays.
        rows: The rows.
        limits: The limits of their sequence.
        state: What the rows know after all keys.
        outputs: Where they go; the first part writes the log-sum-exp.
        part: Which part of the columns of a head the state has.
        PARTS: Number of the parts, each as wide as the values of the form.
        form: The constants.
    """
    WIDTH: tl.constexpr = form.value_size * PARTS
    COUNT: tl.constexpr = len(state.weighted)
    empty, valid = state.sums == 0, limits.count >= 0
    state = State(state.maximum, tl.where(empty, 1.0, state.sums), state.weighted)
    if form.sinks is not None:
        state = add_sink(arrays, rows, state, form)
    results, inverse = (), quotient(1.0, state.sums)
    for i in tl.static_range(COUNT):
        result = product(state.weighted[i], inverse[:, None])
        if form.value_scale is not None:
            scales = arrays.optional.value_scale + (rows.head * WIDTH + part * form.value_size)
            if form.value_scale:
                scales += rows.sequence * (form.heads * WIDTH)
            scales += piece_start(form.value_size, form.widest_piece, i)
            scale = tl.load(scales + tl.arange(0, piece_width(form.value_size, form.widest_piece, i)))
            result = product(rounded(result, form).to(tl.float32), scale[None, :])
        results = results + (tl.where(valid, result, float("nan")),)
    heads = heads_of_rows(outputs.out + part * form.value_size, rows, WIDTH)
    write(heads, rows.exists, results, form.value_size, None, form)
    if part == 0:
        found = tl.where(empty, float("-inf"), product(state.maximum + log2(state.sums), LN2))
        found = tl.where(valid, found, float("nan"))
        tl.store(outputs.lse + rows.entry + rows.following, found, mask=rows.exists)
