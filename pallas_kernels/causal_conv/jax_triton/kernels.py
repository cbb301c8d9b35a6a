"""Bodies of the Triton kernels of the causal convolution: a program has some tokens of a sequence, and 128 channels.

Its channels are blocks of 32, 64 or all 128. Every product and sum is rounded, in the order of the portable program:
the launch does not let the compiler fuse them. Heads of queries and keys have 128 channels, so a program has all that
their norm adds.
"""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import in_float32, xla_silu
from pallas_kernels.parts.jax_triton.quarters import sum_of_blocks
from pallas_kernels.parts.jax_triton.rows import reciprocal


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

    Programs between the first and the last one of a sequence read no token before it and none that is missing: they
    have code without masks.
    """
    ROWS: tl.constexpr = form.rows
    PHASES: tl.constexpr = form.phases
    start = tl.program_id(1) * (ROWS * PHASES)
    limits = (first, count, tokens)
    if form.apart:
        if (start == 0) | (start + ROWS * PHASES > tl.minimum(count, tokens)):
            _convolve_tile(arrays, sequence, slot, limits, start, results, False, form)
        else:
            _convolve_tile(arrays, sequence, slot, limits, start, results, True, form)
    else:
        _convolve_tile(arrays, sequence, slot, limits, start, results, False, form)


@triton.jit
def _convolve_tile(arrays, sequence, slot, limits, start, results, INSIDE: tl.constexpr, form: tl.constexpr):
    """Computes the tokens from `start` on; with `INSIDE` all that it reads and writes is in the arrays.

    A row has `PHASES` tokens, of which each thread has all: a token that it has read serves every window that holds it.
    """
    ROWS: tl.constexpr = form.rows
    PHASES: tl.constexpr = form.phases
    KEYS: tl.constexpr = form.keys
    WIDTH: tl.constexpr = form.width
    first, count, tokens = limits
    unit = tl.program_id(0)
    token = (start + tl.arange(0, ROWS) * PHASES)[:, None]
    if INSIDE:
        token = token.to(tl.int64)
        rows = _rows_inside(arrays, sequence, token, tokens, form)
    else:
        rows = _rows_of(arrays, sequence, slot, first, token, tokens, form)
    blocks = ()
    for i in tl.static_range(128 // WIDTH):
        blocks = blocks + (_block(arrays, rows, unit * 128 + i * WIDTH, INSIDE, form),)
    if KEYS > 0:
        if unit < 2 * KEYS:
            for phase in tl.static_range(PHASES):
                y = _of_length_1(_of_phase(blocks, phase, form), form)
                _write_token(results, sequence, token + phase, limits, unit, y, INSIDE, form)
        else:
            for phase in tl.static_range(PHASES):
                y = _of_phase(blocks, phase, form)
                _write_token(results, sequence, token + phase, limits, unit, y, INSIDE, form)
    else:
        for phase in tl.static_range(PHASES):
            y = _of_phase(blocks, phase, form)
            _write_token(results, sequence, token + phase, limits, unit, y, INSIDE, form)
    if not INSIDE and start + ROWS * PHASES > count:
        fill = tl.full((ROWS, WIDTH), 0.0, arrays[0].dtype.element_ty)
        fill = tl.where(count < 0, fill + float("nan"), fill)
        after = tl.maximum(count, 0)
        for phase in tl.static_range(PHASES):
            at = token + phase
            there = (at >= after) & (at < tokens)
            for i in tl.static_range(128 // WIDTH):
                _write(results, sequence * tokens + at, there, unit, i * WIDTH, fill, False, form)


@triton.jit
def _of_phase(blocks, phase: tl.constexpr, form: tl.constexpr):
    """Returns what the blocks have of a phase."""
    y = ()
    for i in tl.static_range(128 // form.width):
        y = y + (blocks[i][phase],)
    return y


@triton.jit
def _rows_inside(arrays, sequence, token, tokens, form: tl.constexpr):
    """Returns what `_rows_of` does, at constant distances, where all rows exist."""
    BEFORE: tl.constexpr = form.taps - 1
    SOURCE: tl.constexpr = form.source
    first = arrays[0] + (sequence * tokens + token - BEFORE) * SOURCE
    exists = token >= 0
    rows = ()
    for i in tl.static_range(form.phases + BEFORE):
        rows = rows + ((first + i * SOURCE, exists),)
    return rows


@triton.jit
def _rows_of(arrays, sequence, slot, first, token, tokens, form: tl.constexpr):
    """Returns pointers (R, 1) to rows of tokens and which of them exist: those before the first phase, then each phase.

    Args:
        arrays: Pointers to the tokens, the weight, the bias, and the tokens before.
        sequence: Number of the sequence.
        slot: Where the tokens before are.
        first: Position of the first token.
        token: (R, 1), that of the first phase.
        tokens: Tokens of a sequence in the array.
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
        exists = place < tokens
        if i < BEFORE:
            exists = (place >= 0) & (place < tokens)
        if KEPT > 0 and i < BEFORE:
            position = first + place
            kept = arrays[3] + (slot * KEPT + tl.maximum(position, 0) % KEPT) * CHANNELS
            pointers = tl.where(place >= 0, pointers, kept)
            exists = (place < tokens) & ((place >= 0) | (position >= 0))
        rows = rows + ((pointers, exists),)
    return rows


@triton.jit
def _block(arrays, rows, column, INSIDE: tl.constexpr, form: tl.constexpr):
    """Returns for each phase the activation of the sums of a block (R, W), rounded to the dtype of the tokens."""
    TAPS: tl.constexpr = form.taps
    WIDTH: tl.constexpr = form.width
    PHASES: tl.constexpr = form.phases
    CHANNELS: tl.constexpr = form.channels
    columns = column + tl.arange(0, WIDTH)
    inside = columns < CHANNELS
    if form.turned:
        # Each tap has its weights side by side, as the threads have the channels.
        w0 = _weights(arrays[1], columns, form)
        w1 = _weights(arrays[1] + CHANNELS, columns, form)
        w2 = _weights(arrays[1] + 2 * CHANNELS, columns, form)
        w3 = _weights(arrays[1] + 3 * CHANNELS, columns, form)
    else:
        each = columns[:, None] * TAPS + tl.arange(0, TAPS)[None, :]
        weights = tl.load(arrays[1] + each, mask=inside[:, None], other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(weights, (WIDTH, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        w0 = w0[None, :]
        w1 = w1[None, :]
        w2 = w2[None, :]
        w3 = w3[None, :]
    columns = columns[None, :]
    inside = inside[None, :]
    read = ()
    for i in tl.static_range(PHASES + TAPS - 1):
        if INSIDE and CHANNELS % 128 == 0:
            x = tl.load(rows[i][0] + columns)
        else:
            x = tl.load(rows[i][0] + columns, mask=rows[i][1] & inside, other=0.0)
        read = read + (in_float32(x),)
    results = ()
    for phase in tl.static_range(PHASES):
        total = read[phase] * w0
        total = total + read[phase + 1] * w1
        total = total + read[phase + 2] * w2
        total = total + read[phase + 3] * w3
        if form.biased:
            total = total + tl.load(arrays[2] + columns, mask=inside, other=0.0).to(tl.float32)
        if form.silu:
            total = xla_silu(total)
        results = results + (total.to(arrays[0].dtype.element_ty),)
    return results


@triton.jit
def _weights(pointers, columns, form: tl.constexpr):
    """Returns the weights of a tap, (1, W), or (R, W) if a thread would else have to ask another one."""
    ROWS: tl.constexpr = form.rows
    CHANNELS: tl.constexpr = form.channels
    wide = columns[None, :]
    if form.rows_of_weights:
        wide = wide + tl.zeros((ROWS, 1), tl.int32)
    if CHANNELS % 128 == 0:
        w = tl.load(pointers + wide)
    else:
        w = tl.load(pointers + wide, mask=wide < CHANNELS, other=0.0)
    return in_float32(w)


@triton.jit
def _of_length_1(y, form: tl.constexpr):
    """Divides heads, blocks (R, W), by their lengths."""
    ROWS: tl.constexpr = form.rows
    WIDTH: tl.constexpr = form.width
    dtype: tl.constexpr = y[0].dtype
    squares = ()
    for i in tl.static_range(128 // WIDTH):
        wide = in_float32(y[i])
        squares = squares + (wide * wide,)
    total = sum_of_blocks(squares, ROWS, WIDTH)
    # The product by a power of two is the quotient by 128, correctly rounded too.
    factor = reciprocal(tl.sqrt_rn(total * 0.0078125 + form.eps))
    normed = ()
    for i in tl.static_range(128 // WIDTH):
        normed = normed + (((in_float32(y[i]) * factor) * form.scale).to(dtype),)
    return normed


@triton.jit
def _write_token(results, sequence, token, limits, unit, y, INSIDE: tl.constexpr, form: tl.constexpr):
    """Writes the channels of tokens before their count."""
    _, count, tokens = limits
    at = sequence * tokens + token
    there = token < tl.minimum(count, tokens)
    for i in tl.static_range(128 // form.width):
        _write(results, at, there, unit, i * form.width, y[i], INSIDE, form)


@triton.jit
def _write(results, at, there, unit, column: tl.constexpr, y, INSIDE: tl.constexpr, form: tl.constexpr):
    """Writes a block of tokens: to the one result, or to that of three which has the heads of these channels."""
    KEYS: tl.constexpr = form.keys
    VALUES: tl.constexpr = form.values
    CHANNELS: tl.constexpr = form.channels
    columns = (column + tl.arange(0, form.width))[None, :]
    if KEYS > 0:
        if unit < KEYS:
            _store(results[0] + (at * KEYS + unit) * 128 + columns, y, there, INSIDE)
        elif unit < 2 * KEYS:
            _store(results[1] + (at * KEYS + (unit - KEYS)) * 128 + columns, y, there, INSIDE)
        else:
            _store(results[2] + (at * VALUES + (unit - 2 * KEYS)) * 128 + columns, y, there, INSIDE)
    else:
        columns = unit * 128 + columns
        _store(results + at * CHANNELS + columns, y, there & (columns < CHANNELS), INSIDE and CHANNELS % 128 == 0)


@triton.jit
def _store(pointers, y, there, ALL: tl.constexpr):
    if ALL:
        tl.store(pointers, y)
    else:
        tl.store(pointers, y, mask=there)
