"""Bodies of the Triton kernels for whole sequences and parts of prompts, in the order of `MmaDeltaRuleContract`.

`chunk_kernel` computes what the rows of a chunk have between them, one warp for each chunk and value head.
`scan_kernel` carries the state of a head from chunk to chunk. Tiles are transposed (columns first): a product is then
an operand of the next one in the registers that it is in, and warps exchange little. Where a sequence is continued,
rows stand from the edge of its state on: first those that are kept, then the tokens.

Arrays: inverse and weights (B, H, N, 64, 64), T and P of the contract with the column first; logs and betas
(B, H, N, 64) float32, G and beta, which is nan for a row that makes its head nan.
"""

import triton
import triton.language as tl

from pallas_kernels.parts.jax_triton.arithmetic import fused, power_of_two, product

_LOG2E = tl.constexpr(1.4426950408889634)
_INF = tl.constexpr(float("inf"))
_C = tl.constexpr(64)
_BLOCK = tl.constexpr(16)
_BLOCKS = tl.constexpr(4)


@triton.jit
def chunk_kernel(q, k, g, beta, lengths, tokens, chunks, inverse, weights, logs, betas, form: tl.constexpr):
    """Computes T and P of a chunk of whole sequences."""
    count = tl.load(lengths + tl.program_id(0) // form.value_heads)
    if tl.program_id(1) * _C < count:
        out = (inverse, weights, logs, betas)
        _chunk((q, k, g, beta), (q, q, q), (0, count), (tokens, chunks), out, (q, q, q), False, form)


@triton.jit
def extend_chunk_kernel(
    q, k, g, beta, kept_key, kept_inverse, kept_decay, edge, start, lengths, tokens, chunks,
    inverse, weights, logs, betas, new_key, new_inverse, new_decay, new_edge, form: tl.constexpr,
):  # fmt: skip
    """Computes T and P of a chunk of sequences that are continued, and what is kept of the last chunk."""
    batch, chunk = tl.program_id(0) // form.value_heads, tl.program_id(1)
    count, at_edge = tl.load(lengths + batch), tl.load(edge + batch)
    before = tl.load(start + batch) - at_edge
    kept, new = (kept_key, kept_inverse, kept_decay), (new_key, new_inverse, new_decay)
    if count == 0:
        if chunk == 0:
            _copy_kept(kept, new, 0, _C, form)
            tl.store(new_edge + batch, at_edge)
    elif chunk * _C < before + count:
        out = (inverse, weights, logs, betas)
        _chunk((q, k, g, beta), kept, (before, count), (tokens, chunks), out, new, True, form)
        if chunk == 0:
            tl.store(new_edge + batch, at_edge + (before + count - 1) // _C * _C)


@triton.jit
def _copy_kept(kept, new, first, end, form: tl.constexpr):
    """Copies the kept rows from `first` to `end` of a chunk."""
    key, inverse, decay = kept
    new_key, new_inverse, new_decay = new
    pair, row = tl.program_id(0).to(tl.int64), tl.arange(0, 64)
    batch, head = pair // form.value_heads, pair % form.value_heads
    there = (row >= first) & (row < end)
    line = pair * _C + row
    tl.store(new_decay + line, tl.load(decay + line, mask=there, other=0.0), mask=there)
    square = line[:, None] * _C + row[None, :]
    tl.store(new_inverse + square, tl.load(inverse + square, mask=there[:, None], other=0.0), mask=there[:, None])
    if head % form.group == 0:
        wide = tl.arange(0, form.key_size)
        at = ((batch * form.key_heads + head // form.group) * _C + row)[:, None] * form.key_size + wide[None, :]
        tl.store(new_key + at, tl.load(key + at, mask=there[:, None], other=0.0), mask=there[:, None])


@triton.jit
def gate(step, form: tl.constexpr):
    """Returns what a gate adds to G: nothing if it is nan or infinite and positive."""
    return tl.where(step < _INF, product(tl.maximum(step, form.least), _LOG2E), 0.0)


@triton.jit
def _sums_of_gates(g, kept_decay, base, pair, first, rows, EXTEND: tl.constexpr, form: tl.constexpr):
    """Returns G of the rows of a chunk in blocks of 16, one addition for each row."""
    before, count = rows
    row, now, sums = tl.arange(0, 16), 0.0, ()
    for b in tl.static_range(_BLOCKS):
        piece = tl.zeros([16], tl.float32)
        for i in tl.static_range(_BLOCK):
            at = first + b * _BLOCK + i - before
            step = tl.load(g + base + at * form.value_heads, mask=(at >= 0) & (at < count), other=0.0)
            now = now + gate(step, form)
            if EXTEND:
                is_kept = at < 0
                now = tl.where(is_kept, tl.load(kept_decay + pair * _C + b * _BLOCK + i, mask=is_kept, other=0.0), now)
            piece = tl.where(row == i, now, piece)
        sums = sums + (piece,)
    return sums


@triton.jit
def _block_of(x, kept, bases, first, rows, EXTEND: tl.constexpr, form: tl.constexpr):
    """Returns 16 rows of keys or queries (16, D), zeros where there is no token. With EXTEND, kept rows come first."""
    base, kept_base = bases
    before, count = rows
    row, wide = tl.arange(0, 16), tl.arange(0, form.key_size)
    at = first + row - before
    stride: tl.constexpr = form.key_heads * form.key_size
    pointers = x + base + at[:, None] * stride + wide[None, :]
    there = at < count
    if EXTEND:
        stored = kept + kept_base + (first + row)[:, None] * form.key_size + wide[None, :]
        pointers = tl.where((at < 0)[:, None], stored, pointers)
    else:
        there &= at >= 0
    return tl.load(pointers, mask=there[:, None], other=0.0)


@triton.jit
def finite(x):
    """Returns whether numbers are neither nan nor infinite."""
    return tl.abs(x.to(tl.float32)) < _INF


@triton.jit
def _solve(start, a, DTYPE: tl.constexpr):
    """Returns 16 rows of T, (64, 16) with the column first, and which of them are not finite.

    Row t is the sum of what came before the block and of products with the rows before it in the block. All rows are
    computed at once, 16 times: a row is right as soon as all rows before it are, and does not change after that.
    """
    t = start.to(DTYPE)
    for _ in range(15):
        t = tl.dot(t, a, start).to(DTYPE)
    lost = tl.zeros([16], tl.int32)
    if tl.max(tl.max(tl.where(finite(t), 0, 1), 1), 0) > 0:
        # Not a number times zero: rows reach those before them unless they are replaced each time.
        raw = start.to(DTYPE)
        for _ in range(15):
            raw = tl.dot(tl.where(finite(raw), raw, 0.0).to(DTYPE), a, start).to(DTYPE)
        lost = tl.max(tl.where(finite(raw), 0, 1), 0)
        t = tl.where(finite(raw), raw, 0.0).to(DTYPE)
    return t, lost


@triton.jit
def _chunk(arrays, kept, rows, sizes, out, new, EXTEND: tl.constexpr, form: tl.constexpr):
    """Computes T and P of a chunk; `rows` are those before the tokens and the number of tokens."""
    q, k, g, beta = arrays
    kept_key, kept_inverse, kept_decay = kept
    before, count = rows
    tokens, chunks = sizes
    inverse, weights, logs, betas = out
    new_key, new_inverse, new_decay = new
    DTYPE: tl.constexpr = k.dtype.element_ty
    chunk, pair = tl.program_id(1), tl.program_id(0)
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    group = head // form.group
    first, row, column = chunk * _C, tl.arange(0, 16), tl.arange(0, 64)
    base = (batch * tokens * form.key_heads + group) * form.key_size
    kept_base = (batch * form.key_heads + group) * _C * form.key_size
    of_head = batch * tokens * form.value_heads + head
    line = (pair.to(tl.int64) * chunks + chunk) * _C
    sums = _sums_of_gates(g, kept_decay, of_head, pair, first, rows, EXTEND, form)
    keys, lines = (), ()
    for b in tl.static_range(_BLOCKS):
        above = first + b * _BLOCK
        of_block = _block_of(k, kept_key, (base, kept_base), above, rows, EXTEND, form)
        # Queries of kept rows are not known: their outputs are not computed again.
        of_query = _block_of(q, q, (base, base), above, rows, False, form)
        keys = keys + (of_block,)
        at = above + row - before
        there = (at >= 0) & (at < count)
        factor = tl.load(beta + of_head + at * form.value_heads, mask=there, other=0.0)
        step = tl.load(g + of_head + at * form.value_heads, mask=there, other=0.0)
        near = tl.dot(of_block, tl.trans(of_block))
        square = tl.sum(tl.where(row[:, None] == row[None, :], near, 0.0), 1)
        fine = (square < _INF) & (step < _INF) & finite(factor)
        factor = tl.where(fine, factor, 0.0)
        start = tl.where(column[:, None] == row[None, :] + b * _BLOCK, 1.0, 0.0)
        if EXTEND:
            is_kept = (at < 0)[None, :] & (column[:, None] <= row[None, :] + b * _BLOCK)
            stored = kept_inverse + pair.to(tl.int64) * _C * _C + (row + b * _BLOCK)[None, :] * _C + column[:, None]
            start = tl.where((at < 0)[None, :], tl.load(stored, mask=is_kept, other=0.0), start)
        seen = row[:, None] >= row[None, :]
        age = power_of_two(tl.where(seen, sums[b][:, None] - sums[b][None, :], 0.0))
        below = (row[:, None] > row[None, :]) & finite(near)
        inner = tl.where(below, factor[:, None] * (near * age), 0.0)
        far = tl.dot(of_query, tl.trans(of_block))
        visible = (tl.where(seen, far * age, 0.0).to(DTYPE),)
        for j in tl.static_range(_BLOCKS):
            if j < b:
                near = tl.dot(of_block, tl.trans(keys[j]))
                age = power_of_two(sums[b][:, None] - sums[j][None, :])
                outer = tl.where(finite(near), factor[:, None] * (near * age), 0.0)
                start = tl.dot(lines[j], tl.trans((-outer).to(DTYPE)), start)
                far = tl.dot(of_query, tl.trans(keys[j]))
                visible = visible + ((far * age).to(DTYPE),)
        solved, lost = _solve(start, tl.trans((-inner).to(DTYPE)), DTYPE)
        lines = lines + (solved,)
        p = tl.zeros([64, 16], tl.float32)
        for j in tl.static_range(_BLOCKS):
            if j < b:
                p = tl.dot(lines[j], tl.trans(visible[j + 1]), p)
        p = tl.dot(solved, tl.trans(visible[0]), p)
        place = line * _C + column[:, None] * _C + (row + b * _BLOCK)[None, :]
        tl.store(inverse + place, solved)
        tl.store(weights + place, (p + 0.0).to(DTYPE))
        tl.store(logs + line + b * _BLOCK + row, sums[b])
        tl.store(betas + line + b * _BLOCK + row, tl.where(fine & (lost == 0), factor, float("nan")))
        if EXTEND:  # noqa: SIM102 (a constant)
            if chunk == (before + count - 1) // _C:
                said = pair.to(tl.int64) * _C + b * _BLOCK + row
                computed = above + row < before + count
                tl.store(new_decay + said, sums[b], mask=computed)
                rows_of_t = new_inverse + said[None, :] * _C + column[:, None]
                tl.store(rows_of_t, solved.to(tl.float32) + 0.0, mask=computed[None, :])
                if head % form.group == 0:
                    wide = tl.arange(0, form.key_size)
                    of_new = new_key + kept_base + (row + b * _BLOCK)[:, None] * form.key_size + wide[None, :]
                    tl.store(
                        of_new, tl.where((square < _INF)[:, None], of_block, 0.0).to(DTYPE), mask=computed[:, None]
                    )


@triton.jit
def residual_of(factor, grown, told, value):
    """Returns r of the contract: nan where it is not finite."""
    r = (factor * fused(-grown, told, value.to(tl.float32))).to(value.dtype)
    return tl.where(finite(r), r.to(tl.float32), float("nan")).to(value.dtype)


@triton.jit
def _crossed(state, keys, t, r, g, newest):
    """Returns the state (columns, D) after a chunk."""
    u = (tl.dot(r, t) * power_of_two(newest - g)[None, :]).to(r.dtype)
    return tl.dot(u, keys, state * power_of_two(newest))


@triton.jit
def _lost(r):
    """Returns r with zeros for nan, which rows have nan in them or before them, and which columns have any."""
    row = tl.arange(0, 64)
    broken = tl.where(r != r, 1.0, 0.0).to(r.dtype)
    earlier = tl.where(row[:, None] <= row[None, :], 1.0, 0.0).to(r.dtype)
    after = tl.dot(broken, earlier) > 0.0
    return tl.where(r != r, 0.0, r.to(tl.float32)).to(r.dtype), after, tl.max(tl.where(r != r, 1, 0), 1) > 0


@triton.jit
def scan_kernel(
    q, k, v, inverse, weights, logs, betas, state, lengths, tokens, chunks, o, last, edges, flags,
    SCALE: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes outputs and states of whole sequences."""
    pair = tl.program_id(0) // (form.value_size // COLUMNS)
    count = tl.load(lengths + pair // form.value_heads)
    rows, sizes, out = (inverse, weights, logs, betas), (0, count, tokens, chunks), (o, last, q, edges, flags)
    walk((q, k, v), rows, (q, state, q), sizes, out, SCALE, COLUMNS, form, CAREFUL=False, EXTEND=False, EDGES=EDGES)


@triton.jit
def careful_scan_kernel(
    q, k, v, inverse, weights, logs, betas, state, lengths, flags, o_, last_, edges_, tokens, chunks, o, last, edges,
    SCALE: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr, FLAGGED: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes again what `scan_kernel` has flagged, so that nan does not reach the rows before it.

    A flag is for `FLAGGED` columns. Operands are changed here after they were read, so these tiles are narrow ones,
    which are multiplied by mma.sync. For operands of wgmma that threads store, Triton 3.6 was seen to put the fence
    after the barrier; those of `scan_kernel` are in registers or come from asynchronous copies.
    """
    if tl.load(flags + tl.program_id(0) * COLUMNS // FLAGGED) != 0:
        pair = tl.program_id(0) // (form.value_size // COLUMNS)
        count = tl.load(lengths + pair // form.value_heads)
        rows, sizes, out = (inverse, weights, logs, betas), (0, count, tokens, chunks), (o, last, q, edges, q)
        walk((q, k, v), rows, (q, state, q), sizes, out, SCALE, COLUMNS, form, CAREFUL=True, EXTEND=False, EDGES=EDGES)


@triton.jit
def extend_scan_kernel(
    q, k, v, inverse, weights, logs, betas, kept_key, state, residual, edge, start, lengths, tokens, chunks,
    o, new_state, new_residual, flags, SCALE: tl.constexpr, COLUMNS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes outputs and states of sequences that are continued; `new_state` is `state`, the residuals likewise."""
    batch = tl.program_id(0) // (form.value_size // COLUMNS) // form.value_heads
    count, before = tl.load(lengths + batch), tl.load(start + batch) - tl.load(edge + batch)
    rows, sizes = (inverse, weights, logs, betas), (before, count, tokens, chunks)
    kept, out = (kept_key, new_state, new_residual), (o, new_state, new_residual, q, flags)
    walk((q, k, v), rows, kept, sizes, out, SCALE, COLUMNS, form, CAREFUL=False, EXTEND=True, EDGES=False)


@triton.jit
def careful_extend_scan_kernel(
    q, k, v, inverse, weights, logs, betas, kept_key, edge, start, lengths, flags, o_, state, residual, tokens, chunks,
    o, new_state, new_residual,
    SCALE: tl.constexpr, COLUMNS: tl.constexpr, FLAGGED: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """As `careful_scan_kernel`; a flagged sequence has its state and residuals from before the call."""
    if tl.load(flags + tl.program_id(0) * COLUMNS // FLAGGED) != 0:
        batch = tl.program_id(0) // (form.value_size // COLUMNS) // form.value_heads
        count, before = tl.load(lengths + batch), tl.load(start + batch) - tl.load(edge + batch)
        rows, sizes = (inverse, weights, logs, betas), (before, count, tokens, chunks)
        kept, out = (kept_key, new_state, new_residual), (o, new_state, new_residual, q, q)
        walk((q, k, v), rows, kept, sizes, out, SCALE, COLUMNS, form, CAREFUL=True, EXTEND=True, EDGES=False)


@triton.jit
def walk(
    arrays, rows, kept, sizes, out, SCALE: tl.constexpr, COLUMNS: tl.constexpr, form: tl.constexpr,
    CAREFUL: tl.constexpr, EXTEND: tl.constexpr, EDGES: tl.constexpr, known=None,
):  # fmt: skip
    """Computes some columns of a head; `sizes` are the rows before the tokens, the tokens, their array's and chunks.

    With `known`, a state that is not known is zero.
    """
    q, k, v = arrays
    inverse, weights, logs, betas = rows
    kept_key, state, residual = kept
    before, count, tokens, chunks = sizes
    o, last, new_residual, edges, flags = out
    DTYPE: tl.constexpr = k.dtype.element_ty
    SLICES: tl.constexpr = form.value_size // COLUMNS
    pair = tl.program_id(0) // SLICES
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    group = head // form.group
    row, wide = tl.arange(0, 64), tl.arange(0, form.key_size)
    column = (tl.program_id(0) % SLICES) * COLUMNS + tl.arange(0, COLUMNS)
    size: tl.constexpr = form.key_size * form.value_size
    matrix = wide[None, :] * form.value_size + column[:, None]
    s = tl.load(state + pair.to(tl.int64) * size + matrix)
    if known is not None:
        s = tl.where(known, s, 0.0)
    base = (batch * tokens * form.key_heads + group) * form.key_size
    kept_base = (batch * form.key_heads + group) * _C * form.key_size
    values = (batch * tokens * form.value_heads + head) * form.value_size
    line = pair.to(tl.int64) * chunks * _C
    place = row[:, None] * _C + row[None, :]
    of_residual = pair.to(tl.int64) * _C * form.value_size + row[None, :] * form.value_size + column[:, None]
    whole = (before + count + _C - 1) // _C
    if EXTEND:
        whole = tl.where(count > 0, whole, 0)
    bad = 0
    for chunk in range(whole):
        at = chunk * _C + row - before
        there = at < count
        of_key = k + base + at[:, None] * (form.key_heads * form.key_size) + wide[None, :]
        of_value = v + values + at[None, :] * (form.value_heads * form.value_size) + column[:, None]
        fresh = there & (at >= 0)
        if EXTEND:
            stored = kept_key + kept_base + row[:, None] * form.key_size + wide[None, :]
            of_key = tl.where((at < 0)[:, None], stored, of_key)
        keys = tl.load(of_key, mask=there[:, None], other=0.0)
        of_query = q + base + at[:, None] * (form.key_heads * form.key_size) + wide[None, :]
        queries = tl.load(of_query, mask=fresh[:, None], other=0.0)
        value = tl.load(of_value, mask=fresh[None, :], other=0.0)
        g, factor = tl.load(logs + line + chunk * _C + row), tl.load(betas + line + chunk * _C + row)
        newest = tl.load(logs + line + chunk * _C + _C - 1)
        t = tl.load(inverse + (line + chunk * _C) * _C + place)
        p = tl.load(weights + (line + chunk * _C) * _C + place)
        if EDGES:
            tl.store(edges + ((batch * chunks + chunk) * form.value_heads + head) * size + matrix, s)
        if CAREFUL:
            keys = tl.where((factor == factor)[:, None], keys, 0.0).to(DTYPE)
        narrow = s.to(DTYPE)
        told = tl.dot(narrow, tl.trans(keys))
        asked = tl.dot(narrow, tl.trans(queries))
        grown = power_of_two(g)[None, :]
        r = residual_of(factor[None, :], grown, told, value)
        if EXTEND:
            r = tl.where((at < 0)[None, :], tl.load(residual + of_residual, mask=(at < 0)[None, :], other=0.0), r)
        finished = r
        if CAREFUL:
            r, after, any_lost = _lost(r)
        y = tl.dot(r, p, grown * asked) * SCALE + 0.0
        if CAREFUL:
            y = tl.where(after, float("nan"), y)
        results = o + values + at[None, :] * (form.value_heads * form.value_size) + column[:, None]
        y = tl.where(there[None, :], y, 0.0)
        tl.store(results, y.to(DTYPE), mask=((at >= 0) & (at < tokens))[None, :])
        moves = True
        if EXTEND:
            moves = chunk < whole - 1
            if chunk == whole - 1:
                bad = tl.max(tl.max(tl.where(r != r, 1, 0), 1), 0)
                bad = tl.maximum(bad, tl.max(tl.max(tl.where(s != s, 1, 0), 1), 0))
                if CAREFUL or bad == 0:
                    tl.store(new_residual + of_residual, finished, mask=there[None, :])
        if moves:
            s = _crossed(s, keys, t, r, g, newest)
            if CAREFUL:
                s = tl.where(any_lost[:, None], float("nan"), s)
    if not EXTEND:
        bad = tl.max(tl.max(tl.where(s != s, 1, 0), 1), 0)
    for chunk in range(whole, (before + tokens + _C - 1) // _C):
        at = chunk * _C + row - before
        results = o + values + at[None, :] * (form.value_heads * form.value_size) + column[:, None]
        nothing = tl.zeros([COLUMNS, 64], DTYPE)
        if EDGES:
            of_edge = edges + ((batch * chunks + chunk) * form.value_heads + head) * size + matrix
            tl.store(of_edge, tl.zeros_like(s))
        tl.store(results, nothing, mask=((at >= 0) & (at < tokens))[None, :])
    if not CAREFUL:
        tl.store(flags + tl.program_id(0), bad)
    if EXTEND:
        if (CAREFUL or bad == 0) & (whole > 1):
            tl.store(last + pair.to(tl.int64) * size + matrix, s)
    else:
        tl.store(last + pair.to(tl.int64) * size + matrix, s)
