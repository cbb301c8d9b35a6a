"""Bodies of the Triton kernels for gradients, in the order of `MmaDeltaRuleGradientContract`.

`walk_kernel` carries the cotangent of a head's state from its last chunk to its first one. Its tiles are transposed
(columns first), so that each product is an operand of the next one in the registers that it is in. What needs a single
chunk is computed for all chunks at once: `inner_kernel` has a chunk of a value head, `outer_kernel` half of the rows of
a chunk for all value heads of a key head, and `gates_kernel` adds what a chunk's gates get.

Tiles have 32 rows, except for those of the walk, so that they are multiplied by mma.sync on every GPU: their operands
are computed, and for operands of wgmma that threads store, Triton 3.6 was seen to put the fence after the barrier.

Arrays, beside those of `kernels`: after (B, H, N, D, V), cotangents of the states after the chunks, rounded; rest and
left (B, H, N, 64, V), dR and E(G_n - G) U, rounded; wide and aged (B, H, N, 64, 64), beta D dA and D dB, rounded;
within, across and leaving (B, H, N, 64) float32, what G gets; held (B, H, N) float32.
"""

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._arithmetic import half_sums
from pallas_kernels.delta_rule.jax_triton.kernels import residual_of
from pallas_kernels.parts.jax_triton.arithmetic import fused, power_of_two

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
    size: tl.constexpr = form.key_size * form.value_size
    matrix = wide[None, :] * form.value_size + column[:, None]
    base = (batch * tokens * form.key_heads + head // form.group) * form.key_size
    values = (batch * tokens * form.value_heads + head) * form.value_size
    place = row[:, None] * _C + row[None, :]
    of_rest = row[None, :] * form.value_size + column[:, None]
    whole = (count + _C - 1) // _C
    s = tl.load(state_cotangent + pair * size + matrix)
    for i in range(whole):
        chunk = whole - 1 - i
        at = chunk * _C + row
        there, line = at < count, (pair * chunks + chunk) * _C
        of_key = base + at[:, None] * (form.key_heads * form.key_size) + wide[None, :]
        keys = tl.load(k + of_key, mask=there[:, None], other=0.0)
        queries = tl.load(q + of_key, mask=there[:, None], other=0.0)
        of_value = values + at[None, :] * (form.value_heads * form.value_size) + column[:, None]
        e = tl.load(cotangent + of_value, mask=there[None, :], other=0.0)
        g, factor = tl.load(logs + line + row), tl.load(betas + line + row)
        newest = tl.load(logs + line + _C - 1)
        t, p = tl.load(inverse + line * _C + place), tl.load(weights + line * _C + place)
        narrow = s.to(DTYPE)
        tl.store(after + (pair * chunks + chunk) * size + matrix, narrow)
        grown = power_of_two(g)
        later = (tl.dot(narrow, tl.trans(keys)) * power_of_two(newest - g)[None, :]).to(DTYPE)
        dr = tl.dot(later, tl.trans(t), tl.dot(e, tl.trans(p)) * SCALE)
        tl.store(dv + of_value, (factor[None, :] * dr).to(DTYPE), mask=there[None, :])
        r = dr.to(DTYPE)
        tl.store(rest + line * form.value_size + of_rest, r)
        gone, taken = _to_state(e, r, grown[None, :], factor[None, :], SCALE)
        s = tl.dot(gone, queries, s * power_of_two(newest))
        s = tl.dot(taken, keys, s)
    tl.store(first + pair * size + matrix, s)
    for chunk in range(whole, chunks):
        at = chunk * _C + row
        of_value = values + at[None, :] * (form.value_heads * form.value_size) + column[:, None]
        tl.store(dv + of_value, tl.zeros([COLUMNS, 64], DTYPE), mask=(at < tokens)[None, :])
    if count > 0:
        # Rows after the end of a sequence in its last chunk.
        at = (whole - 1) * _C + row
        of_value = values + at[None, :] * (form.value_heads * form.value_size) + column[:, None]
        nothing = tl.zeros([COLUMNS, 64], DTYPE)
        tl.store(dv + of_value, nothing, mask=((at >= count) & (at < tokens))[None, :])


@triton.jit
def _to_state(e, r, grown, factor, SCALE: tl.constexpr):
    """Returns what outputs and residuals give the cotangent of the state before their chunk, rounded."""
    gone = ((SCALE * grown) * e.to(tl.float32)).to(r.dtype)
    return gone, (-(factor * grown) * r.to(tl.float32)).to(r.dtype)


@triton.jit
def inner_kernel(
    q, k, v, cotangent, inverse, logs, betas, edges, rest, lengths, tokens, chunks, left, wide, aged, within, dbeta,
    SCALE: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes what the rows of a chunk of a value head have between them, and the gradients of beta."""
    DTYPE: tl.constexpr = k.dtype.element_ty
    pair, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = pair // form.value_heads, pair % form.value_heads
    count, row = tl.load(lengths + batch), tl.arange(0, 32)
    of_beta = batch * tokens * form.value_heads + head
    if chunk * _C >= count:
        for b in tl.static_range(2):
            at = chunk * _C + b * _HALF + row
            tl.store(dbeta + of_beta + at * form.value_heads, tl.zeros([32], tl.float32), mask=at < tokens)
    else:
        wide_of, of = tl.arange(0, form.key_size), tl.arange(0, form.value_size)
        line = (pair * chunks + chunk) * _C
        base = (batch * tokens * form.key_heads + head // form.group) * form.key_size
        size: tl.constexpr = form.key_size * form.value_size
        state = edges + ((batch * chunks + chunk) * form.value_heads + head) * size
        s = tl.load(state + wide_of[:, None] * form.value_size + of[None, :]).to(DTYPE)
        newest = tl.load(logs + line + _C - 1)
        ks, rs, us, gs, sums, columns = (), (), (), (), (), ()
        for b in tl.static_range(2):
            at = chunk * _C + b * _HALF + row
            there, rows = at < count, line + row + b * _HALF
            of_key = base + at[:, None] * (form.key_heads * form.key_size) + wide_of[None, :]
            of_value = (of_beta + at[:, None] * form.value_heads) * form.value_size + of[None, :]
            key = tl.load(k + of_key, mask=there[:, None], other=0.0)
            query = tl.load(q + of_key, mask=there[:, None], other=0.0)
            value = tl.load(v + of_value, mask=there[:, None], other=0.0)
            e = tl.load(cotangent + of_value, mask=there[:, None], other=0.0)
            dr = tl.load(rest + rows[:, None] * form.value_size + of[None, :])
            g, factor = tl.load(logs + rows), tl.load(betas + rows)
            told, grown = tl.dot(key, s), power_of_two(g)[:, None]
            fresh = fused(-grown, told, value.to(tl.float32))
            dbetas = half_sums(dr.to(tl.float32) * fresh, 32, form.value_size, 1)
            ks, gs = ks + (key,), gs + (g,)
            rs = rs + (residual_of(factor[:, None], grown, told, value),)
            u = tl.zeros([32, form.value_size], tl.float32)
            for j in tl.static_range(b + 1):
                of_block = (line + row + j * _HALF)[None, :] * _C + (row + b * _HALF)[:, None]
                u = tl.dot(tl.load(inverse + of_block), rs[j], u)
            us = us + (u.to(DTYPE),)
            fading = (u * power_of_two(newest - g)[:, None]).to(DTYPE)
            tl.store(left + rows[:, None] * form.value_size + of[None, :], fading)
            total = tl.zeros([32, 1], tl.float32)
            for j in tl.static_range(b + 1):
                earlier = row[:, None] + (b - j) * _HALF >= row[None, :]
                strictly = row[:, None] + (b - j) * _HALF > row[None, :]
                age = power_of_two(tl.where(earlier, g[:, None] - gs[j][None, :], 0.0))
                near = tl.where(strictly, tl.dot(key, tl.trans(ks[j])) * age, 0.0)
                far = tl.where(earlier, tl.dot(query, tl.trans(ks[j])) * age, 0.0)
                da = tl.where(strictly, -tl.dot(dr, tl.trans(us[j])), 0.0)
                db = tl.where(earlier, tl.dot(e, tl.trans(us[j])) * SCALE, 0.0)
                of_block = rows[:, None] * _C + (row + j * _HALF)[None, :]
                tl.store(wide + of_block, (factor[:, None] * da * age).to(DTYPE))
                tl.store(aged + of_block, (db * age).to(DTYPE))
                dbetas = dbetas + half_sums(da * near, 32, 32, 1)
                both = da * (factor[:, None] * near) + db * far
                total = total + half_sums(both, 32, 32, 1)
                if j == b:
                    columns = columns + (half_sums(tl.trans(both), 32, 32, 1),)
                else:
                    columns = (columns[0] + half_sums(tl.trans(both), 32, 32, 1),)
            sums = sums + (total,)
            dbetas = tl.where(there[:, None], dbetas, 0.0)
            tl.store(dbeta + of_beta + at[:, None] * form.value_heads, dbetas, mask=(at < tokens)[:, None])
        for b in tl.static_range(2):
            tl.store(within + (line + row + b * _HALF)[:, None], sums[b] - columns[b])


@triton.jit
def outer_kernel(
    q, k, cotangent, logs, betas, edges, after, rest, left, wide, aged, lengths, tokens, chunks,
    dq, dk, across, leaving, held, SCALE: tl.constexpr, COLUMNS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of queries and keys for half of the rows of a chunk, over the value heads in order."""
    DTYPE: tl.constexpr = k.dtype.element_ty
    part, owner, chunk = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64), tl.program_id(1)
    batch, key_head = owner // form.key_heads, owner % form.key_heads
    count, half, row = tl.load(lengths + batch), tl.arange(0, 32), tl.arange(0, 64)
    of_width, size = tl.arange(0, form.key_size), form.key_size * form.value_size
    base = (batch * tokens * form.key_heads + key_head) * form.key_size
    place = half + part * _HALF
    at = chunk * _C + place
    of_half = base + at[:, None] * (form.key_heads * form.key_size) + of_width[None, :]
    total_q = tl.zeros([32, form.key_size], tl.float32)
    total_k = tl.zeros([32, form.key_size], tl.float32)
    if chunk * _C < count:
        of_all = base + (chunk * _C + row)[:, None] * (form.key_heads * form.key_size) + of_width[None, :]
        present = (chunk * _C + row < count)[:, None]
        there = (at < count)[:, None]
        for i in tl.range(form.group, num_stages=1):
            head = key_head * form.group + i
            pair = batch * form.value_heads + head
            line = (pair * chunks + chunk) * _C
            g, factor = tl.load(logs + line + place)[:, None], tl.load(betas + line + place)[:, None]
            grown = power_of_two(g)
            states = edges + ((batch * chunks + chunk) * form.value_heads + head) * size
            cotangents = after + (pair * chunks + chunk) * size
            of_value = ((batch * tokens + at[:, None]) * form.value_heads + head) * form.value_size
            of_row = (line + place)[:, None] * form.value_size
            from_q = tl.zeros([32, form.key_size], tl.float32)
            from_k = tl.zeros([32, form.key_size], tl.float32)
            onward = tl.zeros([32, form.key_size], tl.float32)
            both = tl.zeros([1, COLUMNS], tl.float32)
            for first in range(0, form.value_size, COLUMNS):
                column = first + tl.arange(0, COLUMNS)[None, :]
                matrix = of_width[:, None] * form.value_size + column
                state, x = tl.load(states + matrix), tl.load(cotangents + matrix)
                e = tl.load(cotangent + of_value + column, mask=there, other=0.0)
                r, u = tl.load(rest + of_row + column), tl.load(left + of_row + column)
                gone, taken = _to_state(e, r, grown, factor, SCALE)
                narrow = tl.trans(state.to(DTYPE))
                from_q = tl.dot(gone, narrow, from_q)
                from_k = tl.dot(taken, narrow, from_k)
                onward = tl.dot(u, tl.trans(x), onward)
                if part == 0:
                    both += _sums_over_rows(state * x.to(tl.float32), form.key_size, COLUMNS)
            if part == 0:
                tl.store(held + pair * chunks + chunk + tl.zeros([1, 1], tl.int32), half_sums(both, 1, COLUMNS, 1))
            query = tl.load(q + of_half, mask=there, other=0.0)
            key = tl.load(k + of_half, mask=there, other=0.0)
            fading = half_sums(key * onward, 32, form.key_size, 1)
            change = half_sums(query * from_q, 32, form.key_size, 1)
            change = change + half_sums(key * from_k, 32, form.key_size, 1) - fading
            tl.store(leaving + (line + place)[:, None], fading)
            tl.store(across + (line + place)[:, None], change)
            keys, queries = tl.load(k + of_all, mask=present, other=0.0), tl.load(q + of_all, mask=present, other=0.0)
            over = (line + place)[:, None] * _C + row[None, :]
            below = row[None, :] < (part + 1) * _HALF
            total_q += tl.dot(tl.load(aged + over, mask=below, other=0.0), keys, from_q)
            d = tl.dot(tl.load(wide + over, mask=below, other=0.0), keys, from_k + onward)
            under = (line + row)[None, :] * _C + place[:, None]
            above = row[None, :] >= part * _HALF
            d = tl.dot(tl.load(wide + under, mask=above, other=0.0), keys, d)
            total_k += tl.dot(tl.load(aged + under, mask=above, other=0.0), queries, d)
        total_q, total_k = tl.where(there, total_q, 0.0), tl.where(there, total_k, 0.0)
    tl.store(dq + of_half, total_q.to(DTYPE), mask=(at < tokens)[:, None])
    tl.store(dk + of_half, total_k.to(DTYPE), mask=(at < tokens)[:, None])


@triton.jit
def _sums_over_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns sums (1, COLUMNS) of (ROWS, COLUMNS): the upper half is added to the lower half until one row is left."""
    if ROWS > 1:
        return _sums_over_rows(tl.sum(tl.reshape(x, (2, ROWS // 2, COLUMNS)), 0), ROWS // 2, COLUMNS)
    else:
        return x


@triton.jit
def gates_kernel(g, logs, within, across, leaving, held, lengths, tokens, chunks, dg, form: tl.constexpr):
    """Computes the gradients of the gates of a chunk: the sums of what G gets at a row and those after it."""
    pair, chunk, row = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, 64)
    batch, head = pair // form.value_heads, pair % form.value_heads
    count, at = tl.load(lengths + batch), chunk * _C + row
    place = ((batch * tokens + at) * form.value_heads + head)[:, None]
    found = tl.zeros([64, 1], tl.float32)
    if chunk * _C < count:
        line = (pair * chunks + chunk) * _C
        change = tl.load(within + line + row) + tl.load(across + line + row)
        last = power_of_two(tl.load(logs + line + _C - 1)) * tl.load(held + pair * chunks + chunk)
        last += tl.sum(half_sums(tl.load(leaving + line + row)[None, :], 1, 64, 1))
        change = change + tl.where(row == _C - 1, last, 0.0)
        found = half_sums(tl.where(row[None, :] >= row[:, None], change[None, :], 0.0), 64, 64, 1)
        given = tl.load(g + place, mask=(at < count)[:, None], other=0.0)
        found = tl.where((at < count)[:, None] & ~(given < form.least), found, 0.0)
    tl.store(dg + place, found, mask=(at < tokens)[:, None])
