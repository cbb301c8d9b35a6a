"""Hopper schedules of fused matmuls: with a residual, gated pairs, or split K.

They are the candidates of `pallas_kernels.matmul.schedule.hopper.matmul` with the additional resources of a block.
"""

from dataclasses import replace
from typing import Any, Final, NamedTuple

from pallas_kernels.matmul.schedule.hopper.estimate import BYTES_PER_NS, Problem, estimate_ns
from pallas_kernels.matmul.schedule.hopper.matmul import blocks_per_sm, candidates, matmul_schedule, named_schedule
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS, MatmulSchedule

_FEWEST_STAGES: Final = 3
_ALL_BLOCKS: Final = 64  # more than a tile has
_FEW_ROWS: Final = 64  # up to which only blocks with a K split each were measured
_SEVERAL: Final = tuple(f"rows 64x{columns} k64 warpgroups2" for columns in (64, 128, 192))
"""Tiles of blocks that sum several K splits: two tiles of sums fit into the registers."""

# Costs of several K splits in a block.
_THREADS: Final = 128
_SUM_REGISTERS: Final = 192
_CYCLES_PER_NS: Final = 1.75
_DRAIN_CYCLES: Final = 150  # from the last product of a pair of K splits to the first of the next
_WAITING_CYCLES: Final = 0.18  # an element that is written to the workspace and read again
_FINISH_NS: Final = 1500  # the kernel that adds partial sums, besides its bytes
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
        fitted = _with_residual(schedule, itemsize, out_itemsize)
        if fitted is not None:
            return fitted
    raise ValueError(f"no schedule fits with a residual, got {(m, k, n)=}, {itemsize=}, {out_itemsize=}.")


def _with_residual(schedule: MatmulSchedule, itemsize: int, out_itemsize: int) -> MatmulSchedule | None:
    """Returns the schedule with buffers for a residual, with fewer stages if necessary; None if too few are left."""
    schedule = for_residual(schedule)
    stage = (schedule.block_rows + schedule.block_columns) * schedule.k_step * itemsize
    missing = schedule.shared_bytes(itemsize, out_itemsize) - SHARED_BYTES
    stages = schedule.stages - max(0, -(-missing // stage))
    return replace(schedule, stages=stages) if stages >= _FEWEST_STAGES else None


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
    residual: bool = False,
) -> tuple[SplitKSchedule, ...]:
    """Returns the schedules of a split-K matmul, the one with the lowest estimated time first.

    K splits in separate blocks fill multiprocessors that few tiles would leave idle, but their partial sums are written
    to memory and read again. A block that sums several holds two tiles of sums at least, so its tiles are smaller.

    Args:
        m: Rows of the activations, at least 1.
        k: Length of the contracted dimension, at least 1.
        n: Columns of the weights, at least 1.
        splits: Number of K splits, at least 2.
        length: Elements per K split, a multiple of 64.
        transpose_w: Whether the weights are stored as (N, K).
        itemsize: Bytes of an operand's element.
        out_itemsize: Bytes of a result's element.
        residual: Whether a residual is added, whose blocks need shared memory of a block that sums all K splits.
    """
    found = []
    cuts = (p for p in range(1, splits) if m > _FEW_ROWS and splits % p == 0 and p & (p - 1) == 0)
    for parts in (*cuts, splits):
        chains = splits // parts
        of_part = m, min(k, chains * length), n
        options: dict[str, Any] = {"transpose_w": transpose_w, "itemsize": itemsize}
        options |= {"stack": parts, "out_itemsize": out_itemsize if parts == 1 else 4}
        problem = Problem(parts, *of_part, transpose_w, itemsize, options["out_itemsize"])
        tiles: dict[str, MatmulSchedule | None] = {**candidates(*of_part, **options)}
        if chains > 1:
            tiles = {name: s for name, s in tiles.items() if s is not None and _sums(s) > 1}
            tiles |= {name: named_schedule(name, problem) for name in _SEVERAL if m > 64}
        for name, tile in tiles.items():
            if tile is None or length % tile.k_step:
                continue
            s = _with_residual(tile, itemsize, out_itemsize) if residual and parts == 1 else tile
            if s is None:
                continue
            time = estimate_ns(s, blocks_per_sm(name), problem) + _several_ns(s, chains, problem)
            if parts > 1:
                time += _FINISH_NS + (4 * parts + out_itemsize) * m * n / BYTES_PER_NS
            found.append((time, SplitKSchedule(parts, s)))
    found.sort(key=lambda entry: entry[0])
    return tuple(schedule for _, schedule in found)


def _sums(s: MatmulSchedule) -> int:
    """Returns how many tiles of sums the registers hold."""
    return _SUM_REGISTERS * _THREADS // (s.tile_rows * s.tile_columns)


def _several_ns(s: MatmulSchedule, chains: int, problem: Problem) -> float:
    """Returns the time that a block takes for several chains, besides that of one as long."""
    if chains == 1:
        return 0.0
    groups = chains // min(2, _sums(s))
    moves = sum(
        groups >> level for level in range(max(1, _sums(s) - 1), groups.bit_length())
    )  # sums that wait in memory
    cycles = _DRAIN_CYCLES * chains / 2 + _WAITING_CYCLES * moves * s.tile_rows * s.tile_columns
    return -(-problem.tiles(s) // SMS) * cycles / _CYCLES_PER_NS


def rows_at_once(m: int, n: int, *, parts: int) -> int:
    """Returns how many rows a split-K matmul multiplies in one launch, so that its partial sums take little memory.

    Args:
        m: Rows of the activations.
        n: Columns of the weights, at least 1.
        parts: Parts of K that separate blocks sum.

    Example:
        >>> rows_at_once(8192, 4096, parts=8), rows_at_once(300, 4096, parts=8)
        (2048, 300)
    """
    rows = max(1, _PARTIAL_BYTES // (parts * n * 4 * _ROWS_STEP)) * _ROWS_STEP
    return min(m, rows)
