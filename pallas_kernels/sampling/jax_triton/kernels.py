"""Bodies of the Triton kernels that draw tokens: scale, noise and first maximum in one pass over the logits.

A program searches a part of a row in steps of 4 * 128 columns, for which Philox gives four words to each of 128 lanes.
After the first step, scores are computed only in steps in which one may exceed the maximum so far: later columns lose
ties. The logits of a step are loaded while the previous step is computed.
"""

import math
from typing import Final

import numpy as np
import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import fused, log2_approximate, product
from pallas_kernels.parts.jax_triton.philox import philox

_LANES: Final = tl.constexpr(128)
_STEP: Final = tl.constexpr(512)
_NO_TOKEN: Final = tl.constexpr(-1)
_COLDEST: Final = tl.constexpr(2.0**-64)
_MINUS_LN2: Final = tl.constexpr(float(-np.float32(math.log(2))))
_ONE_OF: Final = tl.constexpr(2.0**-32)
_LESS: Final = tl.constexpr(1 - 2.0**-9)
_ONE_BITS: Final = tl.constexpr(0x3F800000)
_MOST: Final = tl.constexpr(1 - 2.0**-24)
_NEAR: Final = tl.constexpr(1 / 8)
_SEVENTH: Final = tl.constexpr(float(np.float32(1 / 7)))
_SIXTH: Final = tl.constexpr(float(np.float32(1 / 6)))
_FIFTH: Final = tl.constexpr(float(np.float32(1 / 5)))
_THIRD: Final = tl.constexpr(float(np.float32(1 / 3)))


@triton.jit
def draw_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    largest_ptr,
    first_ptr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Writes the largest score of a part of a row, and its first column, or -1 if a score is nan."""
    block = tl.program_id(0)
    row = block // PARTS
    begin = block % PARTS * STEPS
    end = tl.minimum(begin + STEPS, (WIDTH + _STEP - 1) // _STEP)
    logits_ptr += row.to(tl.int64) * WIDTH
    # The first load is issued before any other memory access.
    a, b, c, d = _read(logits_ptr, begin, tl.minimum(end * _STEP, WIDTH))
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        scale = tl.div_rn(tl.full((), 1.0, tl.float32), tl.maximum(temperature, _COLDEST))
        low, high = tl.load(seeds_ptr + 2 * row), tl.load(seeds_ptr + 2 * row + 1)
        position = tl.load(positions_ptr + row)
        noise = (scale, low, high, position)
        best, place = _search(logits_ptr, (a, b, c, d), begin, end, noise, WIDTH, True)
    else:
        best, place = _search(logits_ptr, (a, b, c, d), begin, end, (), WIDTH, False)
    tl.store(largest_ptr + block, best)
    tl.store(first_ptr + block, place)


@triton.jit
def merge_kernel(largest_ptr, first_ptr, tokens_ptr, WIDTH: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    """Writes the token of a row: the first column of the largest score of its parts; -1 if there is none."""
    row = tl.program_id(0)
    part = tl.arange(0, SLOTS)
    best = tl.load(largest_ptr + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    places = tl.load(first_ptr + row * PARTS + part, mask=part < PARTS, other=WIDTH)
    top = tl.max(best, axis=0)
    found = tl.min(tl.where(best == top, places, WIDTH), axis=0)
    known = (top > float("-inf")) & (tl.min(places, axis=0) != _NO_TOKEN)
    tl.store(tokens_ptr + row, tl.where(known, found, _NO_TOKEN))


@triton.jit
def _read(logits_ptr, step, limit):
    """Returns the logits of the four words' columns of a step; -inf from the column `limit` on."""
    column = tl.arange(0, _LANES) + step * _STEP
    a = tl.load(logits_ptr + column, mask=column < limit, other=float("-inf"))
    b = tl.load(logits_ptr + column + _LANES, mask=column + _LANES < limit, other=float("-inf"))
    c = tl.load(logits_ptr + column + 2 * _LANES, mask=column + 2 * _LANES < limit, other=float("-inf"))
    d = tl.load(logits_ptr + column + 3 * _LANES, mask=column + 3 * _LANES < limit, other=float("-inf"))
    return a, b, c, d


@triton.jit
def _search(logits_ptr, logits, begin, end, noise, WIDTH: tl.constexpr, NOISY: tl.constexpr):
    """Returns the largest score of the steps and its first column, given the logits of the first step."""
    a, b, c, d = logits
    if NOISY:
        scale, low, high, position = noise
    best = tl.full((), float("-inf"), tl.float32)
    place = tl.full((), WIDTH, tl.int32)
    limit = tl.minimum(end * _STEP, WIDTH)
    for step in range(begin, end):
        following_a, following_b, following_c, following_d = _read(logits_ptr, step + 1, limit)
        if NOISY:
            counter = (tl.arange(0, _LANES) + step * _LANES).to(tl.uint32)
            word_a, word_b, word_c, word_d = philox(low, high, counter, position)
            a, b, c, d = product(a, scale), product(b, scale), product(c, scale), product(d, scale)
        looked_at = best == float("-inf")
        if not looked_at:
            if NOISY:
                bound = _larger(
                    _larger(_bound(a, word_a), _bound(b, word_b)), _larger(_bound(c, word_c), _bound(d, word_d))
                )
            else:
                bound = _larger(_larger(a, b), _larger(c, d))
            # Not for nan. A warp computes an integer maximum in one instruction, a float maximum in ten.
            nothing = (bound <= best) & (bound < float("inf"))
            looked_at = tl.max(tl.where(nothing, 0, 1), axis=0) > 0
        if looked_at:
            if NOISY:
                a, b = _add_noise(a, word_a), _add_noise(b, word_b)
                c, d = _add_noise(c, word_c), _add_noise(d, word_d)
            top = tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), axis=0)
            column = tl.arange(0, _LANES) + step * _STEP
            first = tl.minimum(
                tl.minimum(_place(a, top, column, WIDTH), _place(b, top, column + _LANES, WIDTH)),
                tl.minimum(_place(c, top, column + 2 * _LANES, WIDTH), _place(d, top, column + 3 * _LANES, WIDTH)),
            )
            first = tl.min(first, axis=0)
            is_nan = tl.minimum(first, place) == _NO_TOKEN
            place = tl.where(is_nan, _NO_TOKEN, tl.where(top > best, first, place))
            best = tl.maximum(best, top)
        a, b, c, d = following_a, following_b, following_c, following_d
    return best, place


@triton.jit
def _place(score, top, column, WIDTH: tl.constexpr):
    """Returns the columns of the largest score; -1 for nan and WIDTH for other scores."""
    return tl.where(score == top, column, tl.where(score == score, WIDTH, _NO_TOKEN))


@triton.jit
def _larger(x, y):
    """Returns the maximum; nan if either is nan."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _bound(score, word):
    """Returns a cheap upper bound of `_add_noise`: an exponential variable is at least its uniform variable.

    The uniform variable is truncated to 23 bits, which are the fraction of a number from 1 to 2, and reduced by more
    than the total error of the logarithms. The last instruction is the same, and its rounding is monotonic.
    """
    above_one = ((word >> 9) | _ONE_BITS).to(tl.float32, bitcast=True)
    return fused(log2_approximate(fused(above_one, _LESS, -_LESS)), _MINUS_LN2, score)


@triton.jit
def _add_noise(score, word):
    """Subtracts the logarithm of an exponential variable; see `GumbelContract`."""
    number = word.to(tl.float32)
    # Multiplying by a power of two is exact: only the conversion and the last difference are rounded.
    v = tl.minimum((number + 0.5) * _ONE_OF, _MOST)
    series = fused(v, _SEVENTH, _SIXTH)
    series = fused(series, v, _FIFTH)
    series = fused(series, v, 0.25)
    series = fused(series, v, _THIRD)
    series = fused(series, v, 0.5)
    series = fused(series, v, 1.0)
    exponential = tl.where(v < _NEAR, series * v, log2_approximate(1.0 - v) * _MINUS_LN2)
    return fused(log2_approximate(exponential), _MINUS_LN2, score)
