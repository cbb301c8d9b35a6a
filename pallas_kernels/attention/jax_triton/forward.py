"""The forward kernel: a program processes some rows of a sequence over all keys that they see."""

import triton
import triton.language as tl

from pallas_kernels.attention.jax_triton._online import attend
from pallas_kernels.attention.jax_triton._pieces import heads_of_rows, limbs_of_all
from pallas_kernels.attention.jax_triton._results import Outputs, write_results
from pallas_kernels.attention.jax_triton._tile import (
    Arrays,
    OptionalArrays,
    Sizes,
    blocks_seen,
    bounds_of,
    limits_of,
    rows_at,
)


@triton.jit
def forward_kernel(
    query, key, value, limits, page_table, alibi_slopes, sinks, value_scale, bias, mask,
    sequences, queries, capacity, entries, tiles, out, lse, held, loop: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Computes `loop.rows` rows of a sequence and a key head in each program.

    The arrays and sizes are those of `Arrays`; `tiles` counts the tiles of a sequence and a key head, of which those
    with the most keys run first. `out` is (B, T, N, V), `lse` (B, T, N) float32. `held`, for what rows know of the
    splits before, has `loop.rows` times V float32 for each program; None to keep it in registers.
    """
    optional = OptionalArrays(page_table, alibi_slopes, sinks, value_scale, bias, mask)
    arrays = Arrays(query, key, value, limits, optional, Sizes(sequences, queries, capacity, entries))
    ROWS: tl.constexpr = loop.rows
    index = tl.program_id(0)
    rest = index // form.heads
    sequence = (rest % sequences).to(tl.int64)
    tile = tiles - 1 - rest // sequences
    own = limits_of(arrays, sequence)
    rows = rows_at(arrays, own, sequence, index % form.heads, tile * ROWS, ROWS, False, form)
    bounds = bounds_of(own, rows, True, form)
    pieces = limbs_of_all(heads_of_rows(query, rows, form.size), form.size, form)
    blocks = blocks_seen(arrays, own, tile * ROWS, ROWS, form.key_block, form)
    if held is not None:
        held += index.to(tl.int64) * (ROWS * form.value_size)
    state = attend(arrays, rows, bounds, pieces, blocks, held, loop, form)
    write_results(arrays, rows, own, state, Outputs(out, lse), 0, 1, form)
