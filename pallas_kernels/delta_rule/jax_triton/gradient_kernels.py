"""Bodies of the Triton kernels for gradients, in the order of `MmaDeltaRuleGradientContract`.

`walk_kernel` carries the cotangent of a head's state from its last chunk to its first one. Its tiles are transposed
(columns first), so that each product is an operand of the next one in the registers that it is in. What needs a single
chunk is computed for all chunks at once: `inner_kernel` has a chunk of a value head, `outer_kernel` half of the rows of
a chunk for all value heads of a key head, and `gates_kernel` adds what a chunk's gates get.

Tiles have at most 32 rows, except for those of the walk, so that they are multiplied by mma.sync on every GPU: their
operands are computed, and for operands of wgmma that threads store, Triton 3.6 was seen to put the fence after the
barrier. Those of the walk are in registers or come from asynchronous copies. Float32 numbers are added by tensor cores
too, as two limbs: then the order does not depend on the layout of registers, and nothing is shuffled between threads.

More arrays than `kernels` has: after (B, H, N, D, V), cotangents of the states after the chunks, rounded; rest and
left (B, H, N, 64, V), dR and E(G_n - G) U, rounded; wide and aged (B, H, N, 64, 64), beta D dA and D dB, rounded;
lines of float32, (B, H, N, 5, 64) of the inner kernel: two parts of the gradients of beta, sums of rows and columns of
j, and x of the contract; (B, H, N, 64) of the outer one, y; held (B, H, N, V) float32, sums of ~X S over rows.
"""

import triton
import triton.language as tl

from pallas_kernels.delta_rule.jax_triton.kernels import residual_of
from pallas_kernels.parts.jax_triton.arithmetic import fused, half_sums, power_of_two

_C = tl.constexpr(64)
_HALF = tl.constexpr(32)


@triton.jit
def walk_kernel(
    q, k, cotangent, inverse, weights, logs, betas, state_cotangent, lengths, tokens, chunks, dv, first, after, rest,
    SCALE: tl.constexpr, COLUMNS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of values and of the first state for some columns of a head, and what others read."""
    DTYPE: tl.constexpr = k.dtype.element_ty
    SLICES: tl.constexpr = form.value_size // COLUMNS
    pair = (tl.program_id(0) // SLICES).to(tl.int64)
    batch, head = pair // form.value_heads, pair % form.value_heads
    count = tl.load(lengths + batch)
    row, wide = tl.arange(0, 64), tl.arange(0, form.key_size)
    column = (tl.program_id(0) % SLICES) * COLUMNS + tl.arange(0, COLUMNS)
    D: tl.constexpr = form.key_size
    V: tl.constexpr = form.value_size
    KEYS: tl.constexpr = form.key_heads * D
    VALUES: tl.constexpr = form.value_heads * V
    matrix = wide[None, :] * V + column[:, None]
    of_key = (batch * tokens * form.key_heads + head // form.group) * D
    of_value = (batch * tokens * form.value_heads + head) * V
    q, k, cotangent, dv = q + of_key, k + of_key, cotangent + of_value, dv + of_value
    of_pair = pair * chunks
    inverse, weights = inverse + of_pair * (_C * _C), weights + of_pair * (_C * _C)
    logs, betas = logs + of_pair * _C, betas + of_pair * _C
    after, rest = after + of_pair * (D * V), rest + of_pair * (_C * V)
    square, of_rest = row[:, None] * _C + row[None, :], row[None, :] * V + column[:, None]
    whole = (count + _C - 1) // _C
    s = tl.load(state_cotangent + pair * (D * V) + matrix)
    of_column = row[None, :] * VALUES + column[:, None]
    for i in range(whole):
        chunk = whole - 1 - i
        at = chunk * _C + row
        there, place = at < count, chunk.to(tl.int64)
        of_keys, of_values = place * (_C * KEYS), place * (_C * VALUES)
        keys = tl.load(k + of_keys + row[:, None] * KEYS + wide[None, :], mask=there[:, None], other=0.0)
        queries = tl.load(q + of_keys + row[:, None] * KEYS + wide[None, :], mask=there[:, None], other=0.0)
        e = tl.load(cotangent + of_values + of_column, mask=there[None, :], other=0.0)
        g, factor = tl.load(logs + at), tl.load(betas + at)
        newest = tl.load(logs + chunk * _C + _C - 1)
        t = tl.load(inverse + place * (_C * _C) + square)
        p = tl.load(weights + place * (_C * _C) + square)
        narrow = s.to(DTYPE)
        tl.store(after + place * (D * V) + matrix, narrow)
        grown = power_of_two(g)
        later = (tl.dot(narrow, tl.trans(keys)) * power_of_two(newest - g)[None, :]).to(DTYPE)
        dr = tl.dot(later, tl.trans(t), tl.dot(e, tl.trans(p)) * SCALE)
        tl.store(dv + of_values + of_column, (factor[None, :] * dr).to(DTYPE), mask=there[None, :])
        r = dr.to(DTYPE)
        tl.store(rest + place * (_C * V) + of_rest, r)
        gone, taken = _to_state(e, r, grown[None, :], factor[None, :], SCALE)
        s = tl.dot(gone, queries, s * power_of_two(newest))
        s = tl.dot(taken, keys, s)
    tl.store(first + pair * (D * V) + matrix, s)
    for i in range(chunks - count // _C):
        chunk = count // _C + i
        at = chunk * _C + row
        nothing = tl.zeros([COLUMNS, 64], DTYPE)
        after_end = ((at >= count) & (at < tokens))[None, :]
        tl.store(dv + chunk.to(tl.int64) * (_C * VALUES) + of_column, nothing, mask=after_end)


@triton.jit
def _to_state(e, r, grown, factor, SCALE: tl.constexpr):
    """Returns what outputs and residuals give the cotangent of the state before their chunk, rounded."""
    gone = ((SCALE * grown) * e.to(tl.float32)).to(r.dtype)
    return gone, (-(factor * grown) * r.to(tl.float32)).to(r.dtype)


@triton.jit
def _limbs(x):
    """Returns x rounded to bfloat16, and the rest likewise."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _add_rows(x, sums, ROWS: tl.constexpr):
    """Adds the rows of (ROWS, N) to sums (16, N) of both limbs; all rows of the sums are equal."""
    high, low = _limbs(x)
    ones = tl.full([16, ROWS], 1.0, tl.bfloat16)
    return tl.dot(ones, high, sums[0]), tl.dot(ones, low, sums[1])


@triton.jit
def _sums_of_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns sums (ROWS, 16) over the columns of (ROWS, COLUMNS); all columns are equal."""
    high, low = _limbs(x)
    ones = tl.full([COLUMNS, 16], 1.0, tl.bfloat16)
    return tl.dot(high, ones) + tl.dot(low, ones)


@triton.jit
def _store_first(place, x, AXIS: tl.constexpr):
    """Stores the first row (AXIS 0) or column of x; `place` are the pointers, (N,)."""
    equal = tl.arange(0, 16)
    if AXIS == 0:
        tl.store(place[None, :] + equal[:, None] * 0, x, mask=(equal == 0)[:, None])
    else:
        tl.store(place[:, None] + equal[None, :] * 0, x, mask=(equal == 0)[None, :])


@triton.jit
def inner_kernel(
    q, k, v, cotangent, inverse, logs, betas, edges, rest, lengths, tokens, chunks, left, wide, aged, lines,
    SCALE: tl.constexpr, COLUMNS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes what the rows of a chunk of a value head have between them."""
    DTYPE: tl.constexpr = k.dtype.element_ty
    V: tl.constexpr = form.value_size
    D: tl.constexpr = form.key_size
    KEYS: tl.constexpr = form.key_heads * D
    VALUES: tl.constexpr = form.value_heads * V
    pair, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = pair // form.value_heads, pair % form.value_heads
    count = tl.load(lengths + batch) - chunk * _C
    if count > 0:
        row, half, of_width = tl.arange(0, 64), tl.arange(0, 32), tl.arange(0, D)
        token, place = batch * tokens + chunk * _C, pair * chunks + chunk
        line, of_rows, there = place * _C, place * (_C * V), row < count
        of_key, of_value = (token * form.key_heads + head // form.group) * D, (token * form.value_heads + head) * V
        q, k, v, cotangent = q + of_key, k + of_key, v + of_value, cotangent + of_value
        rest, left = rest + of_rows, left + of_rows
        wide, aged, inverse = wide + line * _C, aged + line * _C, inverse + line * _C
        logs, betas, lines = logs + line, betas + line, lines + line * 5
        state = edges + ((batch * chunks + chunk) * form.value_heads + head) * (D * V)
        of_all = row[:, None] * KEYS + of_width[None, :]
        keys = tl.load(k + of_all, mask=there[:, None], other=0.0)
        queries = tl.load(q + of_all, mask=there[:, None], other=0.0)
        t = tl.load(inverse + row[:, None] * _C + row[None, :])
        g, factor, newest = tl.load(logs + row), tl.load(betas + row), tl.load(logs + _C - 1)
        grown, later = power_of_two(g)[None, :], power_of_two(newest - g)[None, :]
        upper_da, lower_da = tl.zeros([32, 64], tl.float32), tl.zeros([32, 64], tl.float32)
        upper_db, lower_db = tl.zeros([32, 64], tl.float32), tl.zeros([32, 64], tl.float32)
        fresh_high, fresh_low = tl.zeros([16, 64], tl.float32), tl.zeros([16, 64], tl.float32)
        state_high, state_low = tl.zeros([16, 64], tl.float32), tl.zeros([16, 64], tl.float32)
        for first in range(0, V, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            s = tl.load(state + of_width[None, :] * V + column[:, None]).to(DTYPE)
            value = tl.load(v + row[None, :] * VALUES + column[:, None], mask=there[None, :], other=0.0)
            dr = tl.load(rest + row[None, :] * V + column[:, None]).to(tl.float32)
            e = tl.load(cotangent + row[None, :] * VALUES + column[:, None], mask=there[None, :], other=0.0)
            told, asked = tl.dot(s, tl.trans(keys)), tl.dot(s, tl.trans(queries))
            r = residual_of(factor[None, :], grown, told, value)
            u = tl.dot(r, t)
            tl.store(left + row[None, :] * V + column[:, None], (u * later).to(DTYPE))
            narrow = u.to(DTYPE)
            of_fresh = dr * fused(-grown, told, value.to(tl.float32))
            fresh_high, fresh_low = _add_rows(of_fresh, (fresh_high, fresh_low), COLUMNS)
            of_state = grown * (SCALE * (e.to(tl.float32) * asked) - factor[None, :] * (dr * told))
            state_high, state_low = _add_rows(of_state, (state_high, state_low), COLUMNS)
            upper_dr, upper_e = _rows_of_half(rest, cotangent, count, column, 0, V, VALUES)
            lower_dr, lower_e = _rows_of_half(rest, cotangent, count, column, 1, V, VALUES)
            upper_da, lower_da = tl.dot(upper_dr, narrow, upper_da), tl.dot(lower_dr, narrow, lower_da)
            upper_db, lower_db = tl.dot(upper_e, narrow, upper_db), tl.dot(lower_e, narrow, lower_db)
        columns = (tl.zeros([16, 64], tl.float32), tl.zeros([16, 64], tl.float32))
        # Both halves are read before the first one is used: the GPU waits once.
        upper, lower = half[:, None] * KEYS + of_width[None, :], (half + _HALF)[:, None] * KEYS + of_width[None, :]
        above, below = (half < count)[:, None], (half + _HALF < count)[:, None]
        key_halves = (tl.load(k + upper, mask=above, other=0.0), tl.load(k + lower, mask=below, other=0.0))
        query_halves = (tl.load(q + upper, mask=above, other=0.0), tl.load(q + lower, mask=below, other=0.0))
        for b in tl.static_range(2):
            at = half + b * _HALF
            key, query = key_halves[b], query_halves[b]
            gs, factors = tl.load(logs + at)[:, None], tl.load(betas + at)[:, None]
            seen, strictly = at[:, None] >= row[None, :], at[:, None] > row[None, :]
            age = power_of_two(tl.where(seen, gs - g[None, :], 0.0))
            near = tl.where(strictly, tl.dot(key, tl.trans(keys)) * age, 0.0)
            far = tl.where(seen, tl.dot(query, tl.trans(keys)) * age, 0.0)
            if b == 0:
                da, db = upper_da, upper_db
            else:
                da, db = lower_da, lower_db
            da, db = tl.where(strictly, -da, 0.0), tl.where(seen, db * SCALE, 0.0)
            of_block = at[:, None] * _C + row[None, :]
            tl.store(wide + of_block, (factors * da * age).to(DTYPE))
            tl.store(aged + of_block, (db * age).to(DTYPE))
            both = da * (factors * near) + db * far
            _store_first(lines + at, _sums_of_columns(da * near, 32, 64), 1)
            _store_first(lines + 2 * _C + at, _sums_of_columns(both, 32, 64), 1)
            columns = _add_rows(both, columns, 32)
        _store_first(lines + _C + row, fresh_high + fresh_low, 0)
        _store_first(lines + 3 * _C + row, columns[0] + columns[1], 0)
        _store_first(lines + 4 * _C + row, state_high + state_low, 0)


@triton.jit
def _rows_of_half(rest, cotangent, count, column, PART: tl.constexpr, V: tl.constexpr, VALUES: tl.constexpr):
    """Returns dR and the cotangents of the outputs, (32, COLUMNS) each, of half of the rows of a chunk."""
    row = tl.arange(0, 32) + PART * _HALF
    of_value = row[:, None] * VALUES + column[None, :]
    dr = tl.load(rest + row[:, None] * V + column[None, :])
    return dr, tl.load(cotangent + of_value, mask=(row < count)[:, None], other=0.0)


@triton.jit
def outer_kernel(
    q, k, cotangent, logs, betas, edges, after, rest, left, wide, aged, lengths, tokens, chunks,
    dq, dk, lines, held, SCALE: tl.constexpr, COLUMNS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of queries and keys for half of the rows of a chunk, over the value heads in order."""
    DTYPE: tl.constexpr = k.dtype.element_ty
    D: tl.constexpr = form.key_size
    V: tl.constexpr = form.value_size
    KEYS: tl.constexpr = form.key_heads * D
    VALUES: tl.constexpr = form.value_heads * V
    part, owner, chunk = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64), tl.program_id(1)
    batch, key_head = owner // form.key_heads, owner % form.key_heads
    count = tl.load(lengths + batch) - chunk * _C
    row, of_width = tl.arange(0, 64), tl.arange(0, D)
    at = tl.arange(0, 32) + part * _HALF
    token = batch * tokens + chunk * _C
    of_key = (token * form.key_heads + key_head) * D
    of_half = at[:, None] * KEYS + of_width[None, :]
    total_q, total_k = tl.zeros([32, D], tl.float32), tl.zeros([32, D], tl.float32)
    if count > 0:
        q, k = q + of_key, k + of_key
        of_all = row[:, None] * KEYS + of_width[None, :]
        present, there = (row < count)[:, None], (at < count)[:, None]
        keys = tl.load(k + of_all, mask=present, other=0.0)
        queries = tl.load(q + of_all, mask=present, other=0.0)
        key = tl.load(k + of_half, mask=there, other=0.0)
        over, under = at[:, None] * _C + row[None, :], row[None, :] * _C + at[:, None]
        below, above = row[None, :] < (part + 1) * _HALF, row[None, :] >= part * _HALF
        for i in tl.range(form.group, num_stages=1):
            head = key_head * form.group + i
            place = (batch * form.value_heads + head) * chunks + chunk
            line, of_rows = place * _C, place * (_C * V)
            g, factor = tl.load(logs + line + at)[:, None], tl.load(betas + line + at)[:, None]
            # Read before the loop, used after it.
            aged_rows = tl.load(aged + line * _C + over, mask=below, other=0.0)
            wide_rows = tl.load(wide + line * _C + over, mask=below, other=0.0)
            wide_columns = tl.load(wide + line * _C + under, mask=above, other=0.0)
            aged_columns = tl.load(aged + line * _C + under, mask=above, other=0.0)
            grown = power_of_two(g)
            states = edges + ((batch * chunks + chunk) * form.value_heads + head) * (D * V)
            cotangents, given = after + place * (D * V), cotangent + (token * form.value_heads + head) * V
            onward = tl.zeros([32, D], tl.float32)
            for first in range(0, V, COLUMNS):
                column = first + tl.arange(0, COLUMNS)[None, :]
                state = tl.load(states + of_width[:, None] * V + column)
                x = tl.load(cotangents + of_width[:, None] * V + column)
                e = tl.load(given + at[:, None] * VALUES + column, mask=there, other=0.0)
                r = tl.load(rest + of_rows + at[:, None] * V + column)
                u = tl.load(left + of_rows + at[:, None] * V + column)
                gone, taken = _to_state(e, r, grown, factor, SCALE)
                narrow = tl.trans(state.to(DTYPE))
                total_q = tl.dot(gone, narrow, total_q)
                total_k = tl.dot(taken, narrow, total_k)
                onward = tl.dot(u, tl.trans(x), onward)
                if part == 0:
                    nothing = tl.zeros([16, COLUMNS], tl.float32)
                    high, low = _add_rows(state * x.to(tl.float32), (nothing, nothing), D)
                    _store_first(held + place * V + first + tl.arange(0, COLUMNS), high + low, 0)
            _store_first(lines + line + at, _sums_of_columns(key * onward, 32, D), 1)
            total_q = tl.dot(aged_rows, keys, total_q)
            total_k = tl.dot(wide_rows, keys, total_k + onward)
            total_k = tl.dot(wide_columns, keys, total_k)
            total_k = tl.dot(aged_columns, queries, total_k)
        total_q, total_k = tl.where(there, total_q, 0.0), tl.where(there, total_k, 0.0)
    written = (chunk * _C + at < tokens)[:, None]
    tl.store(dq + of_key + of_half, total_q.to(DTYPE), mask=written)
    tl.store(dk + of_key + of_half, total_k.to(DTYPE), mask=written)


@triton.jit
def gates_kernel(g, logs, inner, outer, held, lengths, tokens, chunks, dg, dbeta, form: tl.constexpr):
    """Computes the gradients of the gates and of beta in a chunk.

    Those of gates are the sums of what G gets at a row and those after it.
    """
    pair, chunk, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, 64)
    batch, head = pair // form.value_heads, pair % form.value_heads
    count, at = tl.load(lengths + batch), chunk * _C + row
    place = (batch * tokens + at) * form.value_heads + head
    found, found_beta = tl.zeros([64, 1], tl.float32), tl.zeros([64], tl.float32)
    if chunk * _C < count:
        line = (pair * chunks + chunk) * _C
        of_inner, of_outer = inner + line * 5 + row, outer + line + row
        fading = tl.load(of_outer)
        change = (tl.load(of_inner + 2 * _C) - tl.load(of_inner + 3 * _C)) + (tl.load(of_inner + 4 * _C) - fading)
        fading = half_sums(fading[None, :], 1, 64, 1)
        V: tl.constexpr = form.value_size
        remains = half_sums(tl.load(held + (pair * chunks + chunk) * V + tl.arange(0, V))[None, :], 1, V, 1)
        last = power_of_two(tl.load(logs + line + _C - 1)) * remains
        change = tl.where(row[None, :] == _C - 1, change[None, :] + (last + fading), change[None, :])
        found = half_sums(tl.where(row[None, :] >= row[:, None], change, 0.0), 64, 64, 1)
        given = tl.load(g + place, mask=at < count, other=0.0)[:, None]
        found = tl.where((at < count)[:, None] & ~(given < form.least), found, 0.0)
        found_beta = tl.load(of_inner + _C) + tl.load(of_inner)
        found_beta = tl.where(at < count, found_beta, 0.0)
    tl.store(dg + place[:, None], found, mask=(at < tokens)[:, None])
    tl.store(dbeta + place, found_beta, mask=at < tokens)
