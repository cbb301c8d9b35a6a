"""Launches of Triton kernels over rows, in the order of `RowContract`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import row_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.jax_triton.softmax import exponential_sums_kernel, maximum_kernel
from pallas_kernels.schedule.jax_triton.rows import RowSchedule, row_schedule, schedule_of_parts
from pallas_kernels.target import Target

DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})
NEEDS: Final = "rows of float32, bfloat16 or float16"


@dataclass(frozen=True)
class RowForm:
    """What a kernel knows of its rows when it is compiled.

    Attributes:
        columns: Columns of a row.
        lanes: Columns of a block that a program has.
        blocks: Blocks of a row, a multiple of those of a piece; the last ones may have no columns.
        piece: Blocks that are read at once.
        rows: Rows of a program.
        held: Whether the blocks are kept in registers; then a row has one piece, and loops over pieces are unrolled.
        preload: Whether vectors that all rows share are read before a row is added.
        parts: Programs that share a row, each with some of the lanes of all blocks.
    """

    columns: int
    lanes: int
    blocks: int
    piece: int
    rows: int
    held: bool
    preload: bool
    parts: int = 1

    @property
    def stride(self) -> int:
        """Columns of a block."""
        return self.lanes * self.parts


def rows_served(x: jax.Array, *arrays: jax.Array | None) -> bool:
    """Returns whether kernels serve rows (M, C), and other arrays of these dtypes."""
    return x.ndim == 2 and {a.dtype.name for a in (x, *arrays) if a is not None} <= DTYPES


def launch_rows(
    kernel: Any,
    rows: jax.Array,
    others: Sequence[jax.Array | int | None],
    out: Sequence[jax.ShapeDtypeStruct],
    target: Target,
    schedule: RowSchedule | None = None,
    *,
    shape: tuple[int, int] | None = None,
    reads: Sequence[int] | None = None,
    sums: int = 1,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Launches a kernel; without elements the results are zeros.

    The kernel's parameters are the arrays and sizes, the number of rows, the results, the options and `form`, a
    `RowForm`.

    Args:
        kernel: A function under `triton.jit`.
        rows: Its first array, (M, C).
        others: The arrays and sizes after it; None for an absent array, which is not read.
        out: Shapes and dtypes of the results.
        target: The GPU that the program is lowered for.
        schedule: How rows are distributed; chosen from the shapes by default. It does not affect the bits.
        shape: Rows and columns of the results, if they are not those of `rows`.
        reads: Bytes of an element of each array that is read row by row; by default, arrays of the shape of `rows`.
        sums: Sums of a row of which each needs the one before.
        **options: Further constants of the kernel.

    Raises:
        UnsupportedError: If several programs are to share a row.
    """
    m, columns = shape or rows.shape
    if 0 in (m, columns):
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    lanes = row_contract().lanes(columns)
    if schedule is None:
        whole = (a for a in (rows, *others) if not isinstance(a, int | None) and a.shape == rows.shape)
        sizes = reads or [a.dtype.itemsize for a in whole]
        schedule = row_schedule(m, columns, lanes, sizes, writes=any(o.shape[1] > 1 for o in out), sums=sums)
    if schedule.parts > 1:
        raise UnsupportedError(
            f"{kernel.fn.__name__}: expected a schedule in which a program has whole rows, got {schedule}."
        )
    return _launch(kernel, rows, others, out, target, schedule, (m, columns), options)


def launch_parts(
    kernel: Any,
    rows: jax.Array,
    others: Sequence[jax.Array | None],
    out: Sequence[jax.ShapeDtypeStruct],
    target: Target,
    schedule: RowSchedule,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Launches a kernel whose programs have parts of rows; parameters as for `launch_rows`."""
    return _launch(kernel, rows, others, out, target, schedule, rows.shape, options)


def _launch(
    kernel: Any,
    rows: jax.Array,
    others: Sequence[jax.Array | int | None],
    out: Sequence[jax.ShapeDtypeStruct],
    target: Target,
    schedule: RowSchedule,
    shape: tuple[int, ...],
    options: dict[str, Any],
) -> tuple[jax.Array, ...]:
    m, columns = shape
    lanes = row_contract().lanes(columns)
    blocks, lanes = -(-columns // lanes), lanes // schedule.parts
    piece = blocks if schedule.held else min(schedule.ahead, blocks)
    form = RowForm(
        columns,
        lanes,
        -(-blocks // piece) * piece,
        piece,
        schedule.rows,
        schedule.held,
        schedule.preload,
        schedule.parts,
    )
    return launch(
        kernel,
        rows,
        *(rows if a is None else a for a in others),
        # A size is part of the machine code in parts; kernels with one row for each program do not read it.
        m if schedule.rows > 1 else 1,
        target=target,
        out=out,
        grid=(-(-m // schedule.rows), schedule.parts),
        warps=schedule.warps,
        stages=1,
        fuses=False,
        constants={**options, "form": form},
    )


def schedule_if_parts(rows: jax.Array, schedule: RowSchedule | None) -> RowSchedule | None:
    """Returns the schedule in which several programs share a row: the given one or a chosen one; None for another."""
    m, columns = rows.shape
    if schedule is None and m and columns:
        schedule = schedule_of_parts(m, columns, row_contract().lanes(columns))
    return schedule if schedule is not None and schedule.parts > 1 else None


def groups_of_each(rows: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the sums of each row's groups of 128 lanes."""
    return jax.ShapeDtypeStruct((rows.shape[0], row_contract().lanes(rows.shape[1]) // 128), jnp.float32)


def maxima_and_sums(x: jax.Array, target: Target, schedule: RowSchedule) -> tuple[jax.Array, ...]:
    """Returns the maxima of the parts of rows, and the sums of exponentials of their groups of lanes."""
    of_parts = jax.ShapeDtypeStruct((x.shape[0], schedule.parts), jnp.float32)
    (maxima,) = launch_parts(maximum_kernel, x, [], [of_parts], target, schedule)
    out, exact = [groups_of_each(x)], x.dtype == jnp.float32
    (sums,) = launch_parts(exponential_sums_kernel, x, [maxima], out, target, schedule, EXACT=exact)
    return maxima, sums


def like(rows: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(rows.shape, rows.dtype)


def number_of_each(rows: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a float32 number for each row."""
    return jax.ShapeDtypeStruct((rows.shape[0], 1), jnp.float32)
