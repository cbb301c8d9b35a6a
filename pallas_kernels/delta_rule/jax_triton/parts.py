"""Body of the Triton kernel that finishes parts of prompts, whose chunks the kernels for Hopper have computed."""

import triton
import triton.language as tl

from pallas_kernels.delta_rule.jax_triton.decode import triangle_place
from pallas_kernels.delta_rule.jax_triton.kernels import walk

_C = tl.constexpr(64)
_TRIANGLE = tl.constexpr(64 * 65 // 2)


@triton.jit
def finish_parts_kernel(
    q, k, v, inverse, weights, logs, betas, first_keys, last_keys, edge, start, lengths, slots, flags,
    o_, state_, residual_, key_, kept_inverse_, decay_, tokens, chunks,
    o, state, residual, key, kept_inverse, decay, new_edge,
    SCALE: tl.constexpr, COLUMNS: tl.constexpr, FLAGGED: tl.constexpr, SLOTS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes again what has a flag, as `kernels.careful_scan_kernel`, and keeps rows of the last chunk.

    Nobody reads the rows that are kept until then any more: `first_keys` has the keys of the first chunk.
    """
    SLICES: tl.constexpr = form.value_size // COLUMNS
    pair = tl.program_id(0) // SLICES
    batch, head = pair // form.value_heads, pair % form.value_heads
    count, at_edge = tl.load(lengths + batch), tl.load(edge + batch)
    before, slot = tl.minimum(tl.maximum(tl.load(start + batch) - at_edge, 0), _C), batch.to(tl.int64)
    if SLOTS:
        slot = tl.load(slots + batch).to(tl.int64)
    last = tl.where(count > 0, (before + count - 1) // _C, 0)
    if tl.program_id(0) % (SLICES * form.value_heads) == 0:
        tl.store(new_edge + batch, at_edge + last * _C)
    if (count > 0) & (tl.program_id(0) % SLICES == 0):
        line = (pair.to(tl.int64) * chunks + last) * _C
        _keep(inverse, logs, last_keys, (key, kept_inverse, decay), line, (batch, slot, head), SLOTS, form)
    if tl.load(flags + tl.program_id(0) * COLUMNS // FLAGGED) != 0:
        away = (slot - batch) * form.value_heads
        state += away * form.key_size * form.value_size
        residual += away * _C * form.value_size
        rows, sizes, known = (inverse, weights, logs, betas), (before, count, tokens, chunks), None
        if SLOTS:
            known = at_edge > 0
        walk(
            (q, k, v), rows, (first_keys, state, residual), sizes, (o, state, residual, q, q), SCALE, COLUMNS, form,
            CAREFUL=True, EXTEND=True, EDGES=False, known=known,
        )  # fmt: skip


@triton.jit
def _keep(inverse, logs, last_keys, kept, line, place, SLOTS: tl.constexpr, form: tl.constexpr):
    """Keeps G, T and the keys of the chunk whose first row is `line` of all heads' rows."""
    key, kept_inverse, decay = kept
    batch, slot, head = place
    row, wide = tl.arange(0, 64), tl.arange(0, form.key_size)
    pair = slot * form.value_heads + head
    tl.store(decay + pair * _C + row, tl.load(logs + line + row))
    of_row, column = row[:, None], row[None, :]
    t = tl.load(inverse + line * _C + column * _C + of_row).to(tl.float32) + 0.0
    if SLOTS:
        tl.store(kept_inverse + pair * _TRIANGLE + triangle_place(of_row, column), t, mask=column <= of_row)
    else:
        tl.store(kept_inverse + pair * _C * _C + of_row * _C + column, t)
    if head % form.group == 0:
        group, size = head // form.group, _C * form.key_size
        of_key = of_row * form.key_size + wide[None, :]
        found = tl.load(last_keys + (batch.to(tl.int64) * form.key_heads + group) * size + of_key)
        tl.store(key + (slot * form.key_heads + group) * size + of_key, found)
