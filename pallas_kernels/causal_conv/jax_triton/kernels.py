"""Bodies of the Triton kernels of the causal convolution: a program has some tokens of a sequence, and 128 channels.

Its channels are four blocks of 32. Every product and sum is rounded, in the order of the portable program: the launch
does not let the compiler fuse them. Heads of queries and keys have 128 channels, so a program has all that their norm
adds.
"""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import in_float32, xla_silu
from pallas_kernels.parts.jax_triton.quarters import sum_of_quarters
from pallas_kernels.parts.jax_triton.rows import quotient, reciprocal


@triton.jit
def whole_kernel(x_ptr, weight_ptr, bias_ptr, before_ptr, tokens, y_ptr, form: tl.constexpr):
    """Convolves sequences; the tokens before the first one are zeros or those of `before`."""
    TAPS: tl.constexpr = form.taps
    sequence = tl.program_id(2).to(tl.int64)
    _convolve((x_ptr, weight_ptr, bias_ptr, before_ptr), sequence, sequence, TAPS - 1, tokens, tokens, y_ptr, form)


@triton.jit
def whole_heads_kernel(
    x_ptr, weight_ptr, bias_ptr, before_ptr, tokens, query_ptr, key_ptr, value_ptr, form: tl.constexpr
):
    """Convolves sequences and divides the heads of queries and keys by their lengths."""
    TAPS: tl.constexpr = form.taps
    sequence = tl.program_id(2).to(tl.int64)
    results = (query_ptr, key_ptr, value_ptr)
    _convolve((x_ptr, weight_ptr, bias_ptr, before_ptr), sequence, sequence, TAPS - 1, tokens, tokens, results, form)


@triton.jit
def extend_kernel(
    x_ptr, weight_ptr, bias_ptr, given_ptr, first_ptr, count_ptr, slot_ptr, tokens, y_ptr, state_ptr, form: tl.constexpr
):
    """Continues sequences after the tokens that the state holds, and stores their last tokens in it, in place."""
    arrays = (x_ptr, weight_ptr, bias_ptr, state_ptr)
    _extend(arrays, (first_ptr, count_ptr, slot_ptr), tokens, y_ptr, form)


@triton.jit
def extend_heads_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    given_ptr,
    first_ptr,
    count_ptr,
    slot_ptr,
    tokens,
    query_ptr,
    key_ptr,
    value_ptr,
    state_ptr,
    form: tl.constexpr,
):
    """Does what `extend_kernel` does, and divides the heads of queries and keys by their lengths."""
    arrays = (x_ptr, weight_ptr, bias_ptr, state_ptr)
    _extend(arrays, (first_ptr, count_ptr, slot_ptr), tokens, (query_ptr, key_ptr, value_ptr), form)


@triton.jit
def _extend(arrays, places, tokens, results, form: tl.constexpr):
    KEPT: tl.constexpr = form.kept
    LAST: tl.constexpr = form.last
    SOURCE: tl.constexpr = form.source
    CHANNELS: tl.constexpr = form.channels
    sequence = tl.program_id(2).to(tl.int64)
    first = tl.load(places[0] + sequence)
    count = tl.load(places[1] + sequence)
    slot = sequence
    if form.slots:
        slot = tl.load(places[2] + sequence).to(tl.int64)
    _convolve(arrays, sequence, slot, first, count, tokens, results, form)
    if tl.program_id(1) == 0:
        # Only this program reads these channels of the state, and all of its threads have read them.
        tl.debug_barrier()
        column = (tl.program_id(0) * 128 + tl.arange(0, 128))[None, :]
        stored = (tl.maximum(count - KEPT, 0) + tl.arange(0, LAST))[:, None]
        there = (stored < count) & (column < CHANNELS)
        x = tl.load(arrays[0] + (sequence * tokens + stored) * SOURCE + column, mask=there)
        tl.store(arrays[3] + (slot * KEPT + (first + stored) % KEPT) * CHANNELS + column, x, mask=there)


@triton.jit
def _convolve(arrays, sequence, slot, first, count, tokens, results, form: tl.constexpr):
    """Computes the tokens of this program: zeros from `count` on, nan if that is negative.

    A row has `PHASES` tokens, of which each thread has all: a token that it has read serves every window that holds it.
    """
    ROWS: tl.constexpr = form.rows
    PHASES: tl.constexpr = form.phases
    KEYS: tl.constexpr = form.keys
    unit = tl.program_id(0)
    start = tl.program_id(1) * (ROWS * PHASES)
    token = (start + tl.arange(0, ROWS) * PHASES)[:, None]
    channel = unit * 128 + tl.arange(0, 32)
    rows = _rows_of(arrays, sequence, slot, first, token, tokens, channel[None, :], form)
    a = _block(arrays, rows, channel, 0, form)
    b = _block(arrays, rows, channel, 32, form)
    c = _block(arrays, rows, channel, 64, form)
    d = _block(arrays, rows, channel, 96, form)
    if KEYS > 0:
        if unit < 2 * KEYS:
            for phase in tl.static_range(PHASES):
                y = _of_length_1((a[phase], b[phase], c[phase], d[phase]), form)
                _write_token(results, sequence, token + phase, count, tokens, unit, y, form)
        else:
            for phase in tl.static_range(PHASES):
                y = (a[phase], b[phase], c[phase], d[phase])
                _write_token(results, sequence, token + phase, count, tokens, unit, y, form)
    else:
        for phase in tl.static_range(PHASES):
            y = (a[phase], b[phase], c[phase], d[phase])
            _write_token(results, sequence, token + phase, count, tokens, unit, y, form)
    if start + ROWS * PHASES > count:
        fill = tl.full((ROWS, 32), 0.0, arrays[0].dtype.element_ty)
        fill = tl.where(count < 0, fill + float("nan"), fill)
        after = tl.maximum(count, 0)
        for phase in tl.static_range(PHASES):
            at = token + phase
            there = (at >= after) & (at < tokens)
            _write(results, sequence * tokens + at, there, unit, (fill, fill, fill, fill), form)


@triton.jit
def _rows_of(arrays, sequence, slot, first, token, tokens, channel, form: tl.constexpr):
    """Returns pointers (R, 32) to tokens, and which rows exist: those before the first phase, then each phase.

    Args:
        arrays: Pointers to the tokens, the weight, the bias, and the tokens before.
        sequence: Number of the sequence.
        slot: Where the tokens before are.
        first: Position of the first token.
        token: (R, 1), that of the first phase.
        tokens: Tokens of a sequence in the array.
        channel: (1, 32), those of the first block; others are at a constant distance.
        form: See `ConvForm`.
    """
    BEFORE: tl.constexpr = form.taps - 1
    PHASES: tl.constexpr = form.phases
    KEPT: tl.constexpr = form.kept
    SOURCE: tl.constexpr = form.source
    CHANNELS: tl.constexpr = form.channels
    rows = ()
    for i in tl.static_range(PHASES + BEFORE):
        place = token + (i - BEFORE)
        pointers = arrays[0] + (sequence * tokens + place) * SOURCE
        exists = (place >= 0) & (place < tokens)
        if KEPT > 0 and i < BEFORE:
            position = first + place
            kept = arrays[3] + (slot * KEPT + tl.maximum(position, 0) % KEPT) * CHANNELS
            pointers = tl.where(place >= 0, pointers, kept)
            exists = (place < tokens) & ((place >= 0) | (position >= 0))
        rows = rows + ((pointers + channel, exists),)
    return rows


@triton.jit
def _block(arrays, rows, channel, OFFSET: tl.constexpr, form: tl.constexpr):
    """Returns for each phase the activation of the sums of 32 channels (R, 32), rounded to the dtype of the tokens.

    Args:
        arrays: As for `_rows_of`.
        rows: What `_rows_of` returns.
        channel: (32,), the channels of the first block.
        OFFSET: How far this block is from that one.
        form: See `ConvForm`.
    """
    TAPS: tl.constexpr = form.taps
    PHASES: tl.constexpr = form.phases
    CHANNELS: tl.constexpr = form.channels
    if form.turned:
        # Each tap has its weights side by side, as the threads have the channels.
        w0 = _vector(arrays[1], channel, OFFSET, form)
        w1 = _vector(arrays[1] + CHANNELS, channel, OFFSET, form)
        w2 = _vector(arrays[1] + 2 * CHANNELS, channel, OFFSET, form)
        w3 = _vector(arrays[1] + 3 * CHANNELS, channel, OFFSET, form)
    else:
        each = (channel[:, None] + OFFSET) * TAPS + tl.arange(0, TAPS)[None, :]
        weights = tl.load(arrays[1] + each, mask=each < CHANNELS * TAPS, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(weights, (32, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        w0 = w0[None, :]
        w1 = w1[None, :]
        w2 = w2[None, :]
        w3 = w3[None, :]
    read = ()
    for i in tl.static_range(PHASES + TAPS - 1):
        there = rows[i][1]
        if form.ragged:
            there = there & (channel[None, :] < CHANNELS - OFFSET)
        read = read + (in_float32(tl.load(rows[i][0] + OFFSET, mask=there, other=0.0)),)
    results = ()
    for phase in tl.static_range(PHASES):
        total = read[phase] * w0
        total = total + read[phase + 1] * w1
        total = total + read[phase + 2] * w2
        total = total + read[phase + 3] * w3
        if form.biased:
            total = total + _vector(arrays[2], channel, OFFSET, form)
        if form.silu:
            total = xla_silu(total)
        results = results + (total.to(arrays[0].dtype.element_ty),)
    return results


@triton.jit
def _vector(pointer, channel, OFFSET: tl.constexpr, form: tl.constexpr):
    """Returns float32 numbers (1, 32) of the channels of a block, 0 where there is none."""
    CHANNELS: tl.constexpr = form.channels
    pointers = (pointer + channel)[None, :] + OFFSET
    if form.ragged:
        x = tl.load(pointers, mask=channel[None, :] < CHANNELS - OFFSET, other=0.0)
    else:
        x = tl.load(pointers)
    return x.to(tl.float32)


@triton.jit
def _of_length_1(y, form: tl.constexpr):
    """Divides heads, four blocks (R, 32), by their lengths."""
    ROWS: tl.constexpr = form.rows
    dtype: tl.constexpr = y[0].dtype
    a = in_float32(y[0])
    b = in_float32(y[1])
    c = in_float32(y[2])
    d = in_float32(y[3])
    total = sum_of_quarters(a * a, b * b, c * c, d * d, ROWS)
    factor = reciprocal(tl.sqrt_rn(quotient(total, 128) + form.eps))
    return (
        ((a * factor) * form.scale).to(dtype),
        ((b * factor) * form.scale).to(dtype),
        ((c * factor) * form.scale).to(dtype),
        ((d * factor) * form.scale).to(dtype),
    )


@triton.jit
def _write_token(results, sequence, token, count, tokens, unit, y, form: tl.constexpr):
    """Writes the channels of tokens before `count`."""
    _write(results, sequence * tokens + token, token < tl.minimum(count, tokens), unit, y, form)


@triton.jit
def _write(results, at, there, unit, y, form: tl.constexpr):
    """Writes the channels of tokens: to the one result, or to that of three which has the heads of these channels."""
    KEYS: tl.constexpr = form.keys
    VALUES: tl.constexpr = form.values
    CHANNELS: tl.constexpr = form.channels
    channel = tl.arange(0, 32)[None, :]
    if KEYS > 0:
        if unit < KEYS:
            _write_blocks(results[0] + (at * KEYS + unit) * 128 + channel, there, y)
        elif unit < 2 * KEYS:
            _write_blocks(results[1] + (at * KEYS + (unit - KEYS)) * 128 + channel, there, y)
        else:
            _write_blocks(results[2] + (at * VALUES + (unit - 2 * KEYS)) * 128 + channel, there, y)
    else:
        channel = unit * 128 + channel
        pointers = results + at * CHANNELS + channel
        if form.ragged:
            tl.store(pointers, y[0], mask=there & (channel < CHANNELS))
            tl.store(pointers + 32, y[1], mask=there & (channel < CHANNELS - 32))
            tl.store(pointers + 64, y[2], mask=there & (channel < CHANNELS - 64))
            tl.store(pointers + 96, y[3], mask=there & (channel < CHANNELS - 96))
        else:
            _write_blocks(pointers, there, y)


@triton.jit
def _write_blocks(pointers, there, y):
    tl.store(pointers, y[0], mask=there)
    tl.store(pointers + 32, y[1], mask=there)
    tl.store(pointers + 64, y[2], mask=there)
    tl.store(pointers + 96, y[3], mask=there)
