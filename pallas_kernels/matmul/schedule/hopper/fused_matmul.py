"""Hopper schedules of fused matmuls: with a residual, gated pairs, or split K.

They are the candidates of `pallas_kernels.matmul.schedule.hopper.matmul` with the additional resources of a block.
"""

from dataclasses import replace
from typing import Any, Final, NamedTuple

from pallas_kernels.matmul.schedule.hopper.matmul import candidates, matmul_schedule
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, MatmulSchedule

_FEWEST_STAGES: Final = 3
_ALL_BLOCKS: Final = 64  # more than a tile has
_THREADS: Final = 128
_REGISTERS: Final = 128  # of a thread, for the sums of a tree; with 192 they spill
_PARTIAL_BYTES: Final = 256 * 2**20
_ROWS_STEP: Final = 256  # rows of the largest tiles


class SplitKSchedule(NamedTuple):
    """Schedule of a split-K matmul.

    Attributes:
        parts: Parts of K that separate blocks sum, each a subtree of K splits; a second kernel adds the rest of the
            tree. 1 if a block sums all K splits.
        tiles: The blocks.
    """

    parts: int
    tiles: MatmulSchedule


def for_residual(schedule: MatmulSchedule) -> MatmulSchedule:
    """Returns the schedule with a buffer for every block of the result, into which a residual is fetched."""
    return replace(schedule, out_buffers=_ALL_BLOCKS)


def residual_schedule(
    m: int, k: int, n: int, *, stack: int = 1, transpose_w: bool = False, itemsize: int = 2, out_itemsize: int = 2
) -> MatmulSchedule:
    """Returns the schedule of a matmul with a residual: the matmul's schedule, with fewer stages if necessary.

    Arguments as for `matmul_schedule`; the residual has the result's dtype.
    """
    sizes: dict[str, Any] = {"stack": stack, "itemsize": itemsize, "out_itemsize": out_itemsize}
    ranked = candidates(m, k, n, transpose_w=transpose_w, **sizes).values()
    for schedule in (matmul_schedule(m, k, n, transpose_w=transpose_w, **sizes), *ranked):
        schedule = for_residual(schedule)
        stage = (schedule.block_rows + schedule.block_columns) * schedule.k_step * itemsize
        missing = schedule.shared_bytes(itemsize, out_itemsize) - SHARED_BYTES
        stages = schedule.stages - max(0, -(-missing // stage))
        if stages >= _FEWEST_STAGES:
            return replace(schedule, stages=stages)
    raise ValueError(f"no schedule fits with a residual, got {(m, k, n)=}, {itemsize=}, {out_itemsize=}.")


def gated_schedule(
    m: int, k: int, n: int, *, transpose_w: bool = False, itemsize: int = 2, out_itemsize: int = 2
) -> MatmulSchedule:
    """Returns the schedule of a pair of products of the same rows.

    Arguments as for `matmul_schedule`; N is the columns of each of the two weights.
    """
    ranked = candidates(m, k, n, transpose_w=transpose_w, itemsize=itemsize, out_itemsize=out_itemsize, gated=True)
    return next(iter(ranked.values()))


def split_k_schedules(
    m: int,
    k: int,
    n: int,
    *,
    splits: int,
    length: int,
    transpose_w: bool = False,
    itemsize: int = 2,
    out_itemsize: int = 2,
) -> tuple[SplitKSchedule, ...]:
    """Returns the schedules of a split-K matmul, the preferred one first.

    K splits in separate blocks fill multiprocessors that few tiles would leave idle, and were faster wherever both were
    measured, up to 4096 rows (benchmarks/NOTES.md), but their partial sums take memory: `rows_at_once` limits it. A
    block that sums all splits takes none, but holds log2(splits) + 1 tiles of sums, so its tiles are smaller.

    Args:
        m: Rows of the activations, at least 1.
        k: Length of the contracted dimension, at least 1.
        n: Columns of the weights, at least 1.
        splits: Number of K splits, at least 2.
        length: Elements per K split, a multiple of 64.
        transpose_w: Whether the weights are stored as (N, K).
        itemsize: Bytes of an operand's element.
        out_itemsize: Bytes of a result's element.
    """
    common: dict[str, Any] = {"transpose_w": transpose_w, "itemsize": itemsize}
    parts = candidates(m, length, n, stack=splits, out_itemsize=4, **common).values()
    whole = candidates(m, k, n, out_itemsize=out_itemsize, **common).values()
    alive = (splits - 1).bit_length() + 1
    across = [SplitKSchedule(splits, s) for s in parts if length % s.k_step == 0]
    inside = [
        SplitKSchedule(1, s)
        for s in whole
        if length % s.k_step == 0 and alive * s.tile_rows * s.tile_columns <= _REGISTERS * _THREADS
    ]
    return (*across, *inside)


def rows_at_once(m: int, n: int, *, splits: int) -> int:
    """Returns how many rows a split-K matmul multiplies in one launch, so that its partial sums take little memory.

    Args:
        m: Rows of the activations.
        n: Columns of the weights, at least 1.
        splits: Number of K splits.

    Example:
        >>> rows_at_once(8192, 4096, splits=8), rows_at_once(300, 4096, splits=8)
        (2048, 300)
    """
    rows = max(1, _PARTIAL_BYTES // (splits * n * 4 * _ROWS_STEP)) * _ROWS_STEP
    return min(m, rows)
