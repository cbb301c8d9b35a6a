"""Body of the Triton kernel that continues sequences by at most 8 tokens, in the order of `MmaDeltaRuleContract`.

A program has some columns of a value head. Tokens are rows of tiles of 16: their keys from row 0 on, their queries from
row 8 on. Of the open chunk it reads keys, residuals, T and G, and adds rows to them. The state changes where a token is
the first one of a chunk.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from pallas_kernels.delta_rule.jax_triton.kernels import finite, gate, residual_of
from pallas_kernels.parts.jax_triton.arithmetic import power_of_two

_INF = tl.constexpr(float("inf"))
_C = tl.constexpr(64)
_FEW = tl.constexpr(8)


@triton.jit
def decode_kernel(
    q, k, v, g, beta, state_, residual_, kept_key, kept_inverse, kept_decay, edge, start, lengths,
    o, state, residual, new_key, new_inverse, new_decay, new_edge,
    N: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes the next N tokens of each sequence, or fewer.

    A program takes one piece of the columns after another.
    """
    PARTS: tl.constexpr = form.value_size // (COLUMNS * PIECES)
    DTYPE: tl.constexpr = k.dtype.element_ty
    pair, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    count, at_edge = tl.load(lengths + batch), tl.load(edge + batch)
    here = tl.load(start + batch) - at_edge
    first = part * COLUMNS * PIECES
    stays = tl.where(count == 0, _C, tl.where(here + count > _C, 0, here))
    _write_nothing(o, batch, head, first + tl.arange(0, COLUMNS * PIECES), count, N, form)
    _write_kept(kept_key, kept_inverse, kept_decay, new_key, new_inverse, new_decay, pair, part, stays, PARTS, form)
    tl.store(new_edge + batch, at_edge + tl.where(count > 0, (here + count - 1) // _C * _C, 0))
    if count > 0:
        wide, row = tl.arange(0, form.key_size), tl.arange(0, 64)
        size: tl.constexpr = form.key_size * form.value_size
        crosses = here == _C
        here = tl.where(crosses, 0, here)
        # Of the tokens, how many are in the chunk of the first one.
        near = tl.minimum(count, _C - here) if N > 1 else count
        kept, ends = here, near == count
        rows = _rows(
            q, k, g, beta, kept_key, kept_inverse, kept_decay, new_key, new_inverse, new_decay,
            pair, part, 0, near, here, kept, ends, N, form,
        )  # fmt: skip
        for piece in tl.range(PIECES, num_stages=1):
            column = first + piece * COLUMNS + tl.arange(0, COLUMNS)
            matrix = state + pair.to(tl.int64) * size + wide[None, :] * form.value_size + column[:, None]
            s = tl.load(matrix)
            if crosses:
                keys = _kept_keys(kept_key, pair, _C, form)
                t = _kept_inverse(kept_inverse, pair, _C).to(DTYPE)
                r = _kept_residual(residual, pair, column, _C, form)
                s = _crossed(s, keys, t, r, tl.load(kept_decay + pair * _C + row))
                tl.store(matrix, s)
            r = _columns(v, o, residual, s, rows, pair, column, 0, near, here, kept, ends, N, SCALE, form)
            if N > 1:  # noqa: SIM102 (a constant)
                if near < count:
                    tl.store(matrix, _crossed(s, rows.keys, rows.t, r, rows.logs))
        if N > 1:  # noqa: SIM102 (a constant)
            if near < count:
                tl.debug_barrier()
                rows = _rows(
                    q, k, g, beta, kept_key, kept_inverse, kept_decay, new_key, new_inverse, new_decay,
                    pair, part, near, count - near, 0, 0, True, N, form,
                )  # fmt: skip
                for piece in tl.range(PIECES, num_stages=1):
                    column = first + piece * COLUMNS + tl.arange(0, COLUMNS)
                    matrix = state + pair.to(tl.int64) * size + wide[None, :] * form.value_size + column[:, None]
                    _columns(
                        v, o, residual, tl.load(matrix), rows, pair, column, near, count - near, 0, 0, True,
                        N, SCALE, form,
                    )  # fmt: skip


@triton.jit
def _write_nothing(o, batch, head, column, count, N: tl.constexpr, form: tl.constexpr):
    """Writes zeros for the tokens from `count` on."""
    row = tl.arange(0, 8)
    place = ((batch * N + row) * form.value_heads + head)[:, None] * form.value_size + column[None, :]
    nothing = tl.zeros([8, column.shape[0]], o.dtype.element_ty)
    tl.store(o + place, nothing, mask=((row >= count) & (row < N))[:, None])


@triton.jit
def _kept_keys(kept_key, pair, here, form: tl.constexpr):
    row, wide = tl.arange(0, 64), tl.arange(0, form.key_size)
    head = (pair // form.value_heads).to(tl.int64) * form.key_heads + pair % form.value_heads // form.group
    place = (head * _C + row)[:, None] * form.key_size + wide[None, :]
    return tl.load(kept_key + place, mask=(row < here)[:, None], other=0.0)


@triton.jit
def _kept_inverse(kept_inverse, pair, here):
    row = tl.arange(0, 64)
    place = (pair.to(tl.int64) * _C + row)[:, None] * _C + row[None, :]
    return tl.load(kept_inverse + place, mask=(row < here)[:, None] & (row[None, :] <= row[:, None]), other=0.0)


@triton.jit
def _kept_residual(residual, pair, column, here, form: tl.constexpr):
    row = tl.arange(0, 64)
    place = (pair.to(tl.int64) * _C + row)[:, None] * form.value_size + column[None, :]
    return tl.load(residual + place, mask=(row < here)[:, None], other=0.0)


@triton.jit
def _write_kept(
    kept_key, kept_inverse, kept_decay, new_key, new_inverse, new_decay, pair, part, kept,
    PARTS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Copies the rows that stay: each program of a head some of them.

    They are not written in place: programs of other columns may read them later.
    """
    row, wide = tl.arange(0, 64), tl.arange(0, form.key_size)
    head = pair % form.value_heads
    line = pair.to(tl.int64) * _C + row
    mine = (row < kept) & (row % PARTS == part)
    tl.store(new_decay + line, tl.load(kept_decay + line, mask=mine, other=0.0), mask=mine)
    square = line[:, None] * _C + row[None, :]
    lower = mine[:, None] & (row[None, :] <= row[:, None])
    tl.store(new_inverse + square, tl.load(kept_inverse + square, mask=lower, other=0.0), mask=mine[:, None])
    mine = (row < kept) & (row % (PARTS * form.group) == head % form.group * PARTS + part)
    first = (pair // form.value_heads).to(tl.int64) * form.key_heads + head // form.group
    place = (first * _C + row)[:, None] * form.key_size + wide[None, :]
    tl.store(new_key + place, tl.load(kept_key + place, mask=mine[:, None], other=0.0), mask=mine[:, None])


@triton.jit
def _crossed(s, keys, t, r, of_rows):
    """Returns the state (columns, D) after a whole chunk; a column is nan from the first nan of its residuals on."""
    row = tl.arange(0, 64)
    newest = tl.sum(tl.where(row == _C - 1, of_rows, 0.0), 0)
    broken = tl.max(tl.where(r != r, 1, 0), 0) > 0
    clean = tl.where(r != r, 0.0, r.to(tl.float32)).to(r.dtype)
    u = (tl.dot(tl.trans(clean), tl.trans(t)) * power_of_two(newest - of_rows)[None, :]).to(r.dtype)
    s = tl.dot(u, keys, s * power_of_two(newest))
    return tl.where(broken[:, None], float("nan"), s)


@triton.jit
def _row_of(x, index, row):
    """Returns a row of a float32 tile: a sum of it and of zeros."""
    return tl.sum(tl.where(index[:, None] == row, x, 0.0), 0)


class Rows(NamedTuple):
    """What the tokens of a chunk have without the state: tiles of 16 rows, see above, and those of the whole chunk.

    Attributes:
        pair: (16, D) keys and queries.
        p: (16, 64) P.
        factor: (16,) beta, nan for a row that makes its head nan.
        grown: (16,) E(G).
        keys: (64, D).
        t: (64, 64) T.
        logs: (64,) G.
    """

    pair: tl.tensor
    p: tl.tensor
    factor: tl.tensor
    grown: tl.tensor
    keys: tl.tensor
    t: tl.tensor
    logs: tl.tensor


@triton.jit
def _rows(
    q, k, g, beta, kept_key, kept_inverse, kept_decay, new_key, new_inverse, new_decay,
    pair, part, done, count, here, kept, ends, N: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes `count` tokens from token `done` on, rows `here` and on of a chunk of which `kept` rows are stored.

    If the chunk is the last one (`ends`), what is kept of them is written.
    """
    DTYPE: tl.constexpr = k.dtype.element_ty
    two, row, wide = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, form.key_size)
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    group = head // form.group
    mine = two % _FEW
    is_key, valid = two < _FEW, mine < count
    token = batch * N + done + mine
    of_token = (token * form.key_heads + group)[:, None] * form.key_size + wide[None, :]
    of_pair = tl.where(is_key[:, None], k + of_token, q + of_token)
    pair_of = tl.load(of_pair, mask=valid[:, None], other=0.0)
    # The keys of the chunk: those that are stored, and those of the tokens.
    stored = kept_key + ((batch * form.key_heads + group) * _C + row)[:, None] * form.key_size + wide[None, :]
    fresh = k + ((batch * N + done + row - here) * form.key_heads + group)[:, None] * form.key_size + wide[None, :]
    keys = tl.load(tl.where((row < here)[:, None], stored, fresh), mask=(row < here + count)[:, None], other=0.0)
    logs = tl.load(kept_decay + pair * _C + row, mask=row < kept, other=0.0)
    now = tl.load(kept_decay + pair * _C + here - 1, mask=kept > 0, other=0.0)
    later = tl.zeros([16], tl.float32)
    for i in tl.static_range(N):
        there = (i < done + count) & (i >= done)
        step = tl.load(g + (batch * N + i) * form.value_heads + head, mask=there, other=0.0)
        now = tl.where(there, now + gate(step, form), now)
        logs = tl.where(there & (row == here + i - done), now, logs)
        later = tl.where(there & (mine == i - done), now, later)
    near = tl.dot(pair_of, tl.trans(keys))
    at = here + mine
    square = tl.sum(tl.where(row[None, :] == at[:, None], near, 0.0), 1)
    step = tl.load(g + token * form.value_heads + head, mask=valid, other=0.0)
    factor = tl.load(beta + token * form.value_heads + head, mask=valid, other=0.0)
    fine = (square < _INF) & (step < _INF) & finite(factor)
    factor = tl.where(fine, factor, 0.0)
    seen = valid[:, None] & (row[None, :] <= at[:, None])
    age = power_of_two(tl.where(seen, later[:, None] - logs[None, :], 0.0))
    below = (valid & is_key)[:, None] & (row[None, :] < at[:, None]) & finite(near)
    a = (-tl.where(below, factor[:, None] * (near * age), 0.0)).to(DTYPE)
    visible = tl.where(seen & (two >= _FEW)[:, None], near * age, 0.0).to(DTYPE)
    # Rows of T, one after another. What programs of several columns or heads share, one of them writes.
    of_head = tl.where((part == 0) & ends, count, 0)
    t = _kept_inverse(kept_inverse, pair, kept).to(DTYPE)
    unit = tl.where((valid & is_key)[:, None] & (row[None, :] == at[:, None]), 1.0, 0.0)
    lost = tl.zeros([16], tl.int32)
    for i in tl.static_range(N):
        raw = tl.dot(a, t, unit).to(DTYPE)
        lost = tl.where(two == i, tl.max(tl.where(finite(raw), 0, 1), 1), lost)
        one = _row_of(tl.where(finite(raw), raw.to(tl.float32), 0.0), two, i)
        t = tl.where((row == here + i)[:, None] & (count > i), one[None, :].to(DTYPE), t)
        of_row = new_inverse + (pair.to(tl.int64) * _C + here + i) * _C + row
        tl.store(of_row, one, mask=row < tl.where(of_head > i, _C, 0))
    p = (tl.dot(visible, t) + 0.0).to(DTYPE)
    tl.store(new_decay + pair.to(tl.int64) * _C + at, later, mask=is_key & (mine < of_head))
    place = new_key + ((batch * form.key_heads + group) * _C + at)[:, None] * form.key_size + wide[None, :]
    of_keys = tl.where(head % form.group == 0, of_head, 0)
    # A key without a finite length is 0 for other rows; what is wrong with a gate concerns one head alone.
    stored_key = tl.where((square < _INF)[:, None], pair_of, 0.0).to(DTYPE)
    tl.store(place, stored_key, mask=(is_key & (mine < of_keys))[:, None])
    return Rows(pair_of, p, tl.where(fine & (lost == 0), factor, float("nan")), power_of_two(later), keys, t, logs)


@triton.jit
def _columns(
    v, o, residual, s, rows: Rows, pair, column, done, count, here, kept, ends,
    N: tl.constexpr, SCALE: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Writes outputs and residuals of some columns, whose state is `s`; returns the residuals of the chunk."""
    DTYPE: tl.constexpr = v.dtype.element_ty
    two, row = tl.arange(0, 16), tl.arange(0, 64)
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    mine = two % _FEW
    is_key, valid, at = two < _FEW, mine < count, here + mine
    both = tl.dot(rows.pair, tl.trans(s.to(DTYPE)))
    token = batch * N + done + mine
    of_value = (token * form.value_heads + head)[:, None] * form.value_size + column[None, :]
    value = tl.load(v + of_value, mask=(valid & is_key)[:, None], other=0.0)
    grown = rows.grown[:, None]
    fresh = residual_of(rows.factor[:, None], grown, both, value)
    r = _kept_residual(residual, pair, column, kept, form)
    for i in tl.static_range(N):
        one = _row_of(fresh.to(tl.float32), two, i)
        r = tl.where((row == here + i)[:, None] & (count > i), one[None, :].to(DTYPE), r)
    clean = r
    if N > 1:
        # Outputs are nan where a row up to theirs is nan; with one token, that is every row.
        seen = tl.where(valid[:, None] & (row[None, :] <= at[:, None]), 1.0, 0.0)
        after = tl.dot(seen.to(DTYPE), tl.where(r != r, 1.0, 0.0).to(DTYPE)) > 0.0
        clean = tl.where(r != r, 0.0, r.to(tl.float32)).to(DTYPE)
    y = tl.dot(rows.p, clean, grown * both) * SCALE + 0.0
    if N > 1:
        y = tl.where(after, float("nan"), y)
    tl.store(o + of_value, y.to(DTYPE), mask=(valid & (two >= _FEW))[:, None])
    stored = residual + (pair.to(tl.int64) * _C + at)[:, None] * form.value_size + column[None, :]
    tl.store(stored, fresh, mask=(is_key & (mine < tl.where(ends, count, 0)))[:, None])
    return r
