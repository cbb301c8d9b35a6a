"""Bodies of the Triton kernels that continue sequences by at most 8 tokens, in the order of `MmaDeltaRuleContract`.

For many heads three kernels divide the work of `decode_kernel`: one that only reads states needs few registers. Tokens
are rows of tiles of 16: their keys from row 0 on, their queries from row 8 on. Of the open chunk keys, residuals, T and
G are read, and rows are added to them. The state changes where a token is the first one of a chunk.

With SLOTS what is kept of a sequence is in the slot that `slots` says, and T without its zeros, see
`pallas_kernels.delta_rule.slots`; a state at the edge 0 is zero, and is not read.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from pallas_kernels.delta_rule.jax_triton.kernels import finite, gate, residual_of
from pallas_kernels.parts.jax_triton.arithmetic import power_of_two

_INF = tl.constexpr(float("inf"))
_C = tl.constexpr(64)
_FEW = tl.constexpr(8)
_TRIANGLE = tl.constexpr(64 * 65 // 2)


@triton.jit
def decode_kernel(
    q, k, v, g, beta, state_, residual_, key_, inverse_, decay_, edge, start, lengths, slots,
    o, state, residual, key, inverse, decay, new_edge,
    N: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """Computes the next N tokens of each sequence, or fewer; what is kept is written in place.

    A program takes one piece of the columns after another. Where a token is in the next chunk, rows are written that
    other programs would read, so a single program computes all heads with the same keys, and all their columns.
    """
    PARTS: tl.constexpr = form.value_size // (COLUMNS * PIECES)
    pair, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    count, at_edge = tl.load(lengths + batch), tl.load(edge + batch)
    here = tl.load(start + batch) - at_edge
    tl.store(new_edge + batch, _edge_after(at_edge, here, count))
    if SLOTS:
        shift = tl.load(slots + batch) - batch
        state, residual = _of_slot(state, shift, _wide(form)), _of_slot(residual, shift, _residuals(form))
        key, inverse, decay = _of_slot_rows(key, inverse, decay, shift, form)
    if here + count > _C:
        if (head % form.group == 0) & (part == 0) & (count > 0):
            for shared in range(form.group):
                _over_edge(
                    (q, k, v, g, beta, o), (state, residual, key, inverse, decay), (decay, 0), (pair + shared, 0),
                    (here, count, at_edge > 0), PIECES=form.value_size // COLUMNS, SHARED=False,
                    N=N, SCALE=SCALE, COLUMNS=COLUMNS, SLOTS=SLOTS, form=form,
                )  # fmt: skip
    elif count > 0:
        last = head % form.group == form.group - 1
        writes, span = (part == 0, (part == 0) & last), (0, count, here, here)
        # What the first piece reads is asked for before the rows are computed, that of the next one before this one.
        column = part * PIECES * COLUMNS + tl.arange(0, COLUMNS)
        s = _state(_matrix(state, pair, column, form), at_edge > 0, SLOTS, form)
        value, old = _read_columns(v, residual, pair, column, span, N, form)
        rows = _rows((q, k, g, beta), (key, inverse, decay), pair, span, writes, True, N=N, SLOTS=SLOTS, form=form)
        of_rows = (rows.p, rows.factor, rows.grown)
        for piece in tl.static_range(PIECES):
            now, value_now, old_now = s, value, old
            if piece + 1 < PIECES:
                following = column + (piece + 1) * COLUMNS
                s = _state(_matrix(state, pair, following, form), at_edge > 0, SLOTS, form)
                value, old = _read_columns(v, residual, pair, following, span, N, form)
            read = (_products(rows.pair, now), value_now, old_now)
            of_piece = column + piece * COLUMNS
            _columns((o, residual), read, of_rows, pair, of_piece, span, True, N=N, SCALE=SCALE, form=form)
    column = part * COLUMNS * PIECES + tl.arange(0, COLUMNS * PIECES)
    _write_nothing(o, batch, head, column, count, N, form)


@triton.jit
def rows_kernel(
    q, k, g, beta, key_, inverse_, decay_, edge, start, lengths, slots, sequences,
    key, inverse, decay, new_edge, weights, factors, turns, N: tl.constexpr, SLOTS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes what tokens have without the state: adds to the kept rows, and writes P, beta and exp(G) of the tokens.

    `columns_kernel` computes the rest, and `edges_kernel` sequences of which a token is in the next chunk.
    """
    pair = tl.program_id(0)
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    count, at_edge = tl.load(lengths + batch), tl.load(edge + batch)
    here = tl.load(start + batch) - at_edge
    tl.store(new_edge + batch, _edge_after(at_edge, here, count))
    tl.store(turns + pair, 0)
    tl.store(turns + sequences * form.value_heads + batch * form.key_heads + head // form.group, 0)
    if SLOTS:
        key, inverse, decay = _of_slot_rows(key, inverse, decay, tl.load(slots + batch) - batch, form)
    if (count > 0) & (here + count <= _C):
        last = head % form.group == form.group - 1
        span, writes = (0, count, here, here), (True, last)
        rows = _rows((q, k, g, beta), (key, inverse, decay), pair, span, writes, False, N=N, SLOTS=SLOTS, form=form)
        two, row = tl.arange(0, 16), tl.arange(0, 64)
        of_row = pair.to(tl.int64) * N + two % _FEW
        of_query = (two >= _FEW) & (two % _FEW < count)
        tl.store(weights + of_row[:, None] * _C + row[None, :], rows.p, mask=of_query[:, None])
        of_key = (two < _FEW) & (two % _FEW < count)
        tl.store(factors + of_row * 2, rows.factor, mask=of_key)
        tl.store(factors + of_row * 2 + 1, rows.grown, mask=of_key)


@triton.jit
def edges_kernel(
    q, k, v, g, beta, edge, start, lengths, slots, o_, state_, residual_, key_, inverse_, decay_, turns_, sequences,
    o, state, residual, key, inverse, decay, turns,
    N: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, MOST: tl.constexpr,
    SLOTS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes sequences of which a token is in the next chunk: a program some columns of a head of every LANES-th one.

    A program has at most MOST sequences.
    """
    PARTS: tl.constexpr = form.value_size // COLUMNS
    lane, of_lane = tl.program_id(0) // (form.value_heads * PARTS), tl.program_id(0) % (form.value_heads * PARTS)
    index = tl.arange(0, MOST)
    there = lane + index * LANES < sequences
    counts = tl.load(lengths + lane + index * LANES, mask=there, other=0)
    ends = counts + tl.load(start + lane + index * LANES, mask=there, other=0)
    due = (counts > 0) & (ends - tl.load(edge + lane + index * LANES, mask=there, other=0) > _C)
    for _ in range(tl.sum(due.to(tl.int32), 0)):
        at = tl.min(tl.where(due, index, MOST), 0)
        due = due & (index != at)
        batch = lane + at * LANES
        count, at_edge = tl.load(lengths + batch), tl.load(edge + batch)
        here = tl.load(start + batch) - at_edge
        own_state, own_residual, own_key, own_inverse, own_decay = state, residual, key, inverse, decay
        if SLOTS:
            shift = (tl.load(slots + batch) - batch).to(tl.int64)
            own_state, own_residual = _of_slot(state, shift, _wide(form)), _of_slot(residual, shift, _residuals(form))
            own_key, own_inverse, own_decay = _of_slot_rows(key, inverse, decay, shift, form)
        place = (batch * form.value_heads + of_lane // PARTS, of_lane % PARTS)
        _over_edge(
            (q, k, v, g, beta, o), (own_state, own_residual, own_key, own_inverse, own_decay), (turns, sequences),
            place, (here, count, at_edge > 0), PIECES=1, SHARED=True, N=N, SCALE=SCALE, COLUMNS=COLUMNS, SLOTS=SLOTS,
            form=form,
        )  # fmt: skip


@triton.jit
def _edge_after(edge, here, count):
    return edge + tl.where(count > 0, (here + count - 1) // _C * _C, 0)


@triton.jit
def columns_kernel(
    q, k, v, edge, start, lengths, slots, weights, factors, state_, residual_, o, state, residual,
    N: tl.constexpr, SCALE: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes some columns of the tokens of a head, whose P, beta and exp(G) `rows_kernel` has written."""
    PARTS: tl.constexpr = form.value_size // COLUMNS
    pair, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    if SLOTS:
        shift = tl.load(slots + batch) - batch
        state, residual = _of_slot(state, shift, _wide(form)), _of_slot(residual, shift, _residuals(form))
    count, at_edge = tl.load(lengths + batch), tl.load(edge + batch)
    s = _state(_matrix(state, pair, column, form), at_edge > 0, SLOTS, form)
    two, row = tl.arange(0, 16), tl.arange(0, 64)
    of_row = pair.to(tl.int64) * N + two % _FEW
    here = tl.load(start + batch) - at_edge
    valid = two % _FEW < count
    pair_of = _keys_and_queries(q, k, batch, head // form.group, 0, count, N, form)
    p = tl.load(weights + of_row[:, None] * _C + row[None, :], mask=(valid & (two >= _FEW))[:, None], other=0.0)
    factor = tl.load(factors + of_row * 2, mask=valid, other=0.0)
    grown = tl.load(factors + of_row * 2 + 1, mask=valid, other=0.0)
    if (count > 0) & (here + count <= _C):
        both, span = _products(pair_of, s), (0, count, here, here)
        value, old = _read_columns(v, residual, pair, column, span, N, form)
        read = (both, value, old)
        of_rows = (p, factor, grown)
        _columns((o, residual), read, of_rows, pair, column, span, True, N=N, SCALE=SCALE, form=form)
    _write_nothing(o, batch, head, column, count, N, form)


@triton.jit
def _matrix(state, pair, column, form: tl.constexpr):
    """Returns the addresses of some columns of a state, (columns, D)."""
    size: tl.constexpr = form.key_size * form.value_size
    wide = tl.arange(0, form.key_size)
    return state + pair.to(tl.int64) * size + wide[None, :] * form.value_size + column[:, None]


@triton.jit
def _wide(form: tl.constexpr):
    """Returns the elements of a sequence's states."""
    return form.value_heads * form.key_size * form.value_size


@triton.jit
def _residuals(form: tl.constexpr):
    return form.value_heads * _C * form.value_size


@triton.jit
def _of_slot(array, shift, size: tl.constexpr):
    """Returns where an array would begin if the slot of a sequence were that of its number; `shift` is int64."""
    return array + shift * size


@triton.jit
def _of_slot_rows(key, inverse, decay, shift, form: tl.constexpr):
    key = _of_slot(key, shift, form.key_heads * _C * form.key_size)
    return key, _of_slot(inverse, shift, form.value_heads * _TRIANGLE), _of_slot(decay, shift, form.value_heads * _C)


@triton.jit
def _state(matrix, known, SLOTS: tl.constexpr, form: tl.constexpr):
    """Returns a state (columns, D); in slots zeros if none is `known`."""
    if SLOTS:
        read = tl.arange(0, form.key_size) < tl.where(known, form.key_size, 0)
        s = tl.load(matrix, mask=read[None, :], other=0.0)
    else:
        s = tl.load(matrix)
    return s


@triton.jit
def _over_edge(
    arrays, kept, shared, place, span, PIECES: tl.constexpr, SHARED: tl.constexpr, N: tl.constexpr,
    SCALE: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes the tokens of some columns of a head, of which at least one token is in the next chunk.

    The first rows of a chunk are written over. With `SHARED` other programs read them too, as they have other columns
    or heads with the same keys, and the last one that has read them writes: `turns` counts.
    """
    q, k, v, g, beta, o = arrays
    state, residual, key, inverse, decay = kept
    turns, sequences = shared
    pair, part = place
    here, count, known = span
    of_tokens, of_chunk, of_columns = (q, k, g, beta), (key, inverse, decay), (o, residual)
    DTYPE: tl.constexpr = k.dtype.element_ty
    head = pair % form.value_heads
    # Of the tokens, how many are in the chunk of the first one.
    near = _C - here
    if N > 1:  # noqa: SIM102 (a constant)
        if near > 0:
            first = (0, near, here, here)
            rows = _rows(of_tokens, of_chunk, pair, first, (False, False), False, N=N, SLOTS=SLOTS, form=form)
            for piece in tl.range(PIECES, num_stages=1):
                column = (part * PIECES + piece) * COLUMNS + tl.arange(0, COLUMNS)
                matrix = _matrix(state, pair, column, form)
                s = _state(matrix, known, SLOTS, form)
                of_rows, both = (rows.p, rows.factor, rows.grown), _products(rows.pair, s)
                value, old = _read_columns(v, residual, pair, column, first, N, form)
                read = (both, value, old)
                r = _columns(of_columns, read, of_rows, pair, column, first, False, N=N, SCALE=SCALE, form=form)
                tl.store(matrix, _crossed(s, rows.keys, rows.t, r, rows.logs))
    if near == 0:
        keys, t = _kept_keys(key, pair, _C, form), _kept_inverse(inverse, pair, _C, SLOTS).to(DTYPE)
        logs = tl.load(decay + pair * _C + tl.arange(0, 64))
        for piece in tl.range(PIECES, num_stages=1):
            column = (part * PIECES + piece) * COLUMNS + tl.arange(0, COLUMNS)
            matrix = _matrix(state, pair, column, form)
            r = _kept_residual(residual, pair, column, _C, form)
            tl.store(matrix, _crossed(_state(matrix, known, SLOTS, form), keys, t, r, logs))
    # Next, rows are written that were read, and the state is read that was written.
    tl.debug_barrier()
    writes, writes_keys = True, head % form.group == form.group - 1
    if SHARED:
        PARTS: tl.constexpr = form.value_size // (COLUMNS * PIECES)
        of_keys = sequences * form.value_heads + pair // form.value_heads * form.key_heads + head // form.group
        writes = tl.atomic_add(turns + pair, 1) == PARTS - 1
        writes_keys = tl.atomic_add(turns + of_keys, 1) == PARTS * form.group - 1
    second = (near, count - near, 0, 0)
    rows = _rows(of_tokens, of_chunk, pair, second, (writes, writes_keys), False, N=N, SLOTS=SLOTS, form=form)
    for piece in tl.range(PIECES, num_stages=1):
        column = (part * PIECES + piece) * COLUMNS + tl.arange(0, COLUMNS)
        s = tl.load(_matrix(state, pair, column, form))
        of_rows, both = (rows.p, rows.factor, rows.grown), _products(rows.pair, s)
        value, old = _read_columns(v, residual, pair, column, second, N, form)
        read = (both, value, old)
        _columns(of_columns, read, of_rows, pair, column, second, True, N=N, SCALE=SCALE, form=form)


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
def _kept_inverse(kept_inverse, pair, here, SLOTS: tl.constexpr):
    row = tl.arange(0, 64)
    if SLOTS:
        place = pair.to(tl.int64) * _TRIANGLE + triangle_place(row[:, None], row[None, :])
        lower = row[None, :] <= row[:, None]
    else:
        place = (pair.to(tl.int64) * _C + row)[:, None] * _C + row[None, :]
        # Whole blocks of 16 columns, so that a load is 16 bytes wide; T is lower triangular.
        lower = row[None, :] // 16 * 16 <= row[:, None]
    return tl.load(kept_inverse + place, mask=(row < here)[:, None] & lower, other=0.0)


@triton.jit
def triangle_place(row, column):
    """Returns the place of an element on or below the diagonal; see `pallas_kernels.delta_rule.slots.packed`."""
    return tl.where(row < 32, (31 - row) * 65 + 64 - column, (row - 32) * 65 + column)


@triton.jit
def _kept_residual(residual, pair, column, here, form: tl.constexpr):
    row = tl.arange(0, 64)
    place = (pair.to(tl.int64) * _C + row)[:, None] * form.value_size + column[None, :]
    return tl.load(residual + place, mask=(row < here)[:, None], other=0.0)


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
    of_tokens, of_chunk, pair, span, stores, AHEAD: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """Computes `count` tokens from token `done` on, rows `here` and on of a chunk of which `kept` rows are stored.

    Adds their T and G to what is kept (`writes`), and their keys (`writes_keys`). `AHEAD` is a schedule: all loads come
    before the first product, whose exchange between warps is a barrier that loads do not pass. It takes registers, so
    fewer programs are on a multiprocessor.
    """
    q, k, g, beta = of_tokens
    kept_key, kept_inverse, kept_decay = of_chunk
    done, count, here, kept = span
    writes, writes_keys = stores
    DTYPE: tl.constexpr = k.dtype.element_ty
    two, row, wide = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, form.key_size)
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    group = head // form.group
    mine = two % _FEW
    is_key, valid = two < _FEW, mine < count
    token = batch * N + done + mine
    pair_of = _keys_and_queries(q, k, batch, group, done, count, N, form)
    # The keys of the chunk: those that are stored, and those of the tokens.
    stored = kept_key + ((batch * form.key_heads + group) * _C + row)[:, None] * form.key_size + wide[None, :]
    fresh = k + ((batch * N + done + row - here) * form.key_heads + group)[:, None] * form.key_size + wide[None, :]
    keys = tl.load(tl.where((row < here)[:, None], stored, fresh), mask=(row < here + count)[:, None], other=0.0)
    if AHEAD:
        t = _kept_inverse(kept_inverse, pair, kept, SLOTS).to(DTYPE)
        own = tl.load(g + token * form.value_heads + head, mask=valid, other=0.0)
        factor = tl.load(beta + token * form.value_heads + head, mask=valid, other=0.0)
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
    if not AHEAD:
        own = tl.load(g + token * form.value_heads + head, mask=valid, other=0.0)
        factor = tl.load(beta + token * form.value_heads + head, mask=valid, other=0.0)
    fine = (square < _INF) & (own < _INF) & finite(factor)
    factor = tl.where(fine, factor, 0.0)
    seen = valid[:, None] & (row[None, :] <= at[:, None])
    age = power_of_two(tl.where(seen, later[:, None] - logs[None, :], 0.0))
    below = (valid & is_key)[:, None] & (row[None, :] < at[:, None]) & finite(near)
    a = (-tl.where(below, factor[:, None] * (near * age), 0.0)).to(DTYPE)
    visible = tl.where(seen & (two >= _FEW)[:, None], near * age, 0.0).to(DTYPE)
    # Rows of T, one after another.
    of_head = tl.where(writes, count, 0)
    if not AHEAD:
        t = _kept_inverse(kept_inverse, pair, kept, SLOTS).to(DTYPE)
    unit = tl.where((valid & is_key)[:, None] & (row[None, :] == at[:, None]), 1.0, 0.0)
    lost = tl.zeros([16], tl.int32)
    for i in tl.static_range(N):
        raw = tl.dot(a, t, unit).to(DTYPE)
        lost = tl.where(two == i, tl.max(tl.where(finite(raw), 0, 1), 1), lost)
        one = _row_of(tl.where(finite(raw), raw.to(tl.float32), 0.0), two, i)
        t = tl.where((row == here + i)[:, None] & (count > i), one[None, :].to(DTYPE), t)
        if SLOTS:
            of_row = kept_inverse + pair.to(tl.int64) * _TRIANGLE + triangle_place(here + i, row)
            tl.store(of_row, one, mask=row < tl.where(of_head > i, here + i + 1, 0))
        else:
            of_row = kept_inverse + (pair.to(tl.int64) * _C + here + i) * _C + row
            tl.store(of_row, one, mask=row < tl.where(of_head > i, _C, 0))
    p = (tl.dot(visible, t) + 0.0).to(DTYPE)
    tl.store(kept_decay + pair.to(tl.int64) * _C + at, later, mask=is_key & (mine < of_head))
    place = kept_key + ((batch * form.key_heads + group) * _C + at)[:, None] * form.key_size + wide[None, :]
    of_keys = tl.where(writes_keys, count, 0)
    # A key without a finite length is 0 for other rows; what is wrong with a gate concerns one head alone.
    stored_key = tl.where((square < _INF)[:, None], pair_of, 0.0).to(DTYPE)
    tl.store(place, stored_key, mask=(is_key & (mine < of_keys))[:, None])
    return Rows(pair_of, p, tl.where(fine & (lost == 0), factor, float("nan")), power_of_two(later), keys, t, logs)


@triton.jit
def _keys_and_queries(q, k, batch, group, done, count, N: tl.constexpr, form: tl.constexpr):
    """Returns the tokens from `done` on, (16, D): keys, and queries from row 8 on."""
    two, wide = tl.arange(0, 16), tl.arange(0, form.key_size)
    token = batch * N + done + two % _FEW
    of_token = (token * form.key_heads + group)[:, None] * form.key_size + wide[None, :]
    of_pair = tl.where((two < _FEW)[:, None], k + of_token, q + of_token)
    return tl.load(of_pair, mask=(two % _FEW < count)[:, None], other=0.0)


@triton.jit
def _read_columns(v, residual, pair, column, span, N: tl.constexpr, form: tl.constexpr):
    """Returns some columns of the tokens' values, (16, columns), and of the residuals that are kept."""
    done, count, _, kept = span
    two = tl.arange(0, 16)
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    token = batch * N + done + two % _FEW
    of_value = (token * form.value_heads + head)[:, None] * form.value_size + column[None, :]
    value = tl.load(v + of_value, mask=((two < _FEW) & (two % _FEW < count))[:, None], other=0.0)
    return value, _kept_residual(residual, pair, column, kept, form)


@triton.jit
def _products(tokens, s):
    """Returns keys and queries (16, D) times a state (columns, D)."""
    return tl.dot(tokens, tl.trans(s.to(tokens.dtype)))


@triton.jit
def _columns(
    arrays, read, of_rows, pair, column, span, ends, N: tl.constexpr, SCALE: tl.constexpr, form: tl.constexpr
):  # fmt: skip
    """Writes outputs and residuals of some columns; returns the residuals of the chunk.

    Args:
        arrays: Pointers to outputs and residuals.
        read: Keys and queries times the state, values, and the residuals that are kept.
        of_rows: P, beta and E(G) of the tokens, see `Rows`.
        pair: Number of the sequence and head.
        column: The columns.
        span: See `_rows`.
        ends: Whether residuals are stored.
        N: Tokens of a sequence in the arrays.
        SCALE: Factor of the outputs.
        form: Sizes.
    """
    o, residual = arrays
    both, value, r = read
    p, factor, grown = of_rows
    done, count, here, _ = span
    DTYPE: tl.constexpr = value.dtype
    two, row = tl.arange(0, 16), tl.arange(0, 64)
    batch, head = (pair // form.value_heads).to(tl.int64), pair % form.value_heads
    mine = two % _FEW
    is_key, valid, at = two < _FEW, mine < count, here + mine
    token = batch * N + done + mine
    of_value = (token * form.value_heads + head)[:, None] * form.value_size + column[None, :]
    grown = grown[:, None]
    fresh = residual_of(factor[:, None], grown, both, value)
    for i in tl.static_range(N):
        one = _row_of(fresh.to(tl.float32), two, i)
        r = tl.where((row == here + i)[:, None] & (count > i), one[None, :].to(DTYPE), r)
    clean = r
    if N > 1:
        # Outputs are nan where a row up to theirs is nan; with one token, that is every row.
        seen = tl.where(valid[:, None] & (row[None, :] <= at[:, None]), 1.0, 0.0)
        after = tl.dot(seen.to(DTYPE), tl.where(r != r, 1.0, 0.0).to(DTYPE)) > 0.0
        clean = tl.where(r != r, 0.0, r.to(tl.float32)).to(DTYPE)
    y = tl.dot(p, clean, grown * both) * SCALE + 0.0
    if N > 1:
        y = tl.where(after, float("nan"), y)
    tl.store(o + of_value, y.to(DTYPE), mask=(valid & (two >= _FEW))[:, None])
    stored = residual + (pair.to(tl.int64) * _C + at)[:, None] * form.value_size + column[None, :]
    tl.store(stored, fresh, mask=(is_key & (mine < tl.where(ends, count, 0)))[:, None])
    return r
