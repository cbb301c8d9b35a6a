"""Launches of Triton kernels that add rows of a batch, in the order of `ChunkContract`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import ROW_CHUNK, ChunkContract
from pallas_kernels.parts.jax_triton.chunks import add_chunks_kernel
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.schedule.jax_triton.batch_sum import ChunkSchedule, chunk_schedule
from pallas_kernels.target import Target

_PARTS: Final = 8
_ADDED_STRIP: Final = 64  # columns of a program that adds the sums of chunks


@dataclass(frozen=True)
class ChunkForm:
    """What a kernel knows of its rows when it is compiled.

    Attributes:
        columns: Columns of a row.
        strip: Columns of a program.
        leaves: Rows of each of the eight parts of a chunk that may exist: 1, 2, 4, 8 or 16.
        single: Whether there is one chunk only.
        has_start: Whether a sum is continued.
    """

    columns: int
    strip: int
    leaves: int
    single: bool
    has_start: bool


def chunks_served(contract: ChunkContract) -> bool:
    """Returns whether the kernels serve a contract."""
    return contract.rows == ROW_CHUNK


def sum_chunks(
    kernel: Any,
    rows: jax.Array,
    others: Sequence[jax.Array | None],
    start: jax.Array | None,
    target: Target,
    schedule: ChunkSchedule | None = None,
    **options: Any,
) -> jax.Array:
    """Adds what a kernel computes of each row.

    The kernel's parameters are the arrays, what the sum begins with, the number of rows, the sums, the options and
    `form`, a `ChunkForm`.

    Args:
        kernel: A function under `triton.jit`.
        rows: Its first array, (M, C).
        others: The arrays after it; None for an absent one, which is not read.
        start: (C,) float32, the initial value of the sum; zeros by default.
        target: The GPU that the program is lowered for.
        schedule: How the work is partitioned; chosen from the shapes by default. It does not affect the bits.
        **options: Further constants of the kernel.

    Returns:
        (C,) float32.
    """
    m, columns = rows.shape
    if 0 in (m, columns):
        return jnp.zeros(columns, jnp.float32) if start is None else start
    if schedule is None:
        schedule = chunk_schedule(
            m, columns, max(a.dtype.itemsize for a in (rows, *others) if a is not None and a.shape == rows.shape)
        )
    chunks = -(-m // ROW_CHUNK)
    leaves = 1 << (-(-min(m, ROW_CHUNK) // _PARTS) - 1).bit_length()
    form = ChunkForm(columns, schedule.strip, leaves, chunks == 1, start is not None)
    begin = rows if start is None else start
    (sums,) = launch(
        kernel,
        rows,
        *(rows if a is None else a for a in others),
        begin,
        m,
        target=target,
        out=[jax.ShapeDtypeStruct((chunks, columns), jnp.float32)],
        grid=(chunks, -(-columns // form.strip)),
        warps=schedule.warps,
        stages=1,
        fuses=False,
        constants={**options, "form": form},
    )
    if form.single:
        return sums.reshape(columns)
    (total,) = launch(
        add_chunks_kernel,
        sums,
        begin,
        chunks,
        target=target,
        out=[jax.ShapeDtypeStruct((columns,), jnp.float32)],
        grid=(1, -(-columns // _ADDED_STRIP)),
        warps=1,
        stages=1,
        fuses=False,
        constants={"form": replace(form, strip=_ADDED_STRIP)},
    )
    return total
