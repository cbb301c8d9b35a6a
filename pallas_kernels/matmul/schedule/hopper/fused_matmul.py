"""Hopper schedules of fused matmuls: with a residual, gated pairs, or split K.

They are the candidates of `pallas_kernels.matmul.schedule.hopper.matmul` with the additional resources of a block.
"""

from dataclasses import replace
from typing import Any, Final, NamedTuple

from pallas_kernels.matmul.schedule.hopper.estimate import Problem, estimate_ns
from pallas_kernels.matmul.schedule.hopper.leaf_levels import leaf_levels, shared_bytes
from pallas_kernels.matmul.schedule.hopper.matmul import candidates, matmul_schedule, named_schedule
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS, MatmulSchedule

_FEWEST_STAGES: Final = 3
_ALL_BLOCKS: Final = 64  # more than a tile has
_STEP_COLUMNS: Final = 64  # of a residual in a step: a swizzled row
_FLOAT32: Final = 4  # bytes
_THREADS: Final = 128
_SUM_REGISTERS: Final = 192  # of a thread, for tiles of sums

# What was measured on an H100 (benchmarks/notes/several-gpus.md).
_MEASURED_SPLITS: Final = (2, 4, 8)
_PARTS: Final = (1, 2, 4)
_PAIRS: Final = 4  # parts of two K splits, the fastest for 33 to 64 rows
_FEW_ROWS: Final = 64
_SEVERAL: Final = tuple(f"rows 64x{columns} k64 warpgroups2" for columns in (64, 128))
_SHORT_TILES: Final = 0.85  # time of blocks of 64 columns, of which the estimate is too high
_CYCLES_PER_NS: Final = 1.75
_PAIR_CYCLES: Final = 500  # from the last product of a pair of K splits to the first of the next
_SHARED_CYCLES: Final = 0.06  # an element of a block's tile that waits in shared memory
_WAITING_CYCLES: Final = 0.3  # the same in GPU memory, and ...
_WAITING_SLOWDOWN: Final = 1.12  # ... of blocks with several tiles
_FINISH_NS: Final = 1500  # the kernel that adds partial sums, and ...
_FINISH_BYTES_PER_NS: Final = 3300  # ... the bytes that it moves
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


def residual_steps(s: MatmulSchedule, m: int, k: int, n: int, same: bool) -> int:
    """Returns how many steps of a tile bring the residual after those that bring the operands.

    A step brings what a step of the activations would, a swizzled row of the residual for each row of the tile. 0 if it
    is fetched into the buffers of the result, which costs stages: where tiles end inside of the result, `same` is
    false, or the schedule is none of those with which the bits were compared on a GPU.

    Args:
        s: Schedule.
        m: Rows of the result.
        k: Length of the contracted dimension.
        n: Columns of the result.
        same: Whether operands and residual are matrices of bfloat16, the weights (K, N).
    """
    whole = m % s.block_m == k % s.k_step == n % s.block_n == 0
    compared = (s.swap, s.split, s.warpgroups, s.block_columns, s.k_step) == (False, "rows", 2, 128, _STEP_COLUMNS)
    return s.block_columns // _STEP_COLUMNS if whole and compared and same else 0


def for_residual(schedule: MatmulSchedule, m: int, k: int, n: int, same: bool) -> MatmulSchedule:
    """Returns the schedule with a buffer for every block of the result if a residual is fetched into them.

    Arguments as for `residual_steps`.
    """
    return schedule if residual_steps(schedule, m, k, n, same) else with_buffers(schedule)


def with_buffers(schedule: MatmulSchedule) -> MatmulSchedule:
    """Returns the schedule with a buffer for every block of the result."""
    return replace(schedule, out_buffers=_ALL_BLOCKS)


def residual_schedule(
    m: int,
    k: int,
    n: int,
    *,
    stack: int = 1,
    transpose_w: bool = False,
    itemsize: int = 2,
    out_itemsize: int = 2,
    same: bool = True,
) -> MatmulSchedule:
    """Returns the schedule of a matmul with a residual: the matmul's schedule, with fewer stages if necessary.

    Arguments as for `matmul_schedule` and `residual_steps`; the residual has the result's dtype.
    """
    sizes: dict[str, Any] = {"stack": stack, "itemsize": itemsize, "out_itemsize": out_itemsize}
    ranked = candidates(m, k, n, transpose_w=transpose_w, **sizes).values()
    for schedule in (matmul_schedule(m, k, n, transpose_w=transpose_w, **sizes), *ranked):
        fitted = _fewer_stages(for_residual(schedule, m, k, n, same), itemsize, out_itemsize)
        if fitted is not None:
            return fitted
    raise ValueError(f"no schedule fits with a residual, got {(m, k, n)=}, {itemsize=}, {out_itemsize=}.")


def _fewer_stages(schedule: MatmulSchedule, itemsize: int, out_itemsize: int) -> MatmulSchedule | None:
    """Returns the schedule with fewer stages if necessary; None if too few are left."""
    missing = schedule.shared_bytes(itemsize, out_itemsize) - SHARED_BYTES
    stages = schedule.stages - max(0, -(-missing // _stage_bytes(schedule, itemsize)))
    return replace(schedule, stages=stages) if stages >= _FEWEST_STAGES else None


def _with_sums(schedule: MatmulSchedule, chains: int, problem: Problem) -> MatmulSchedule:
    """Returns the schedule with room for sums that wait in shared memory, with fewer stages if that is enough."""
    missing = shared_bytes(schedule, chains, problem.itemsize, problem.out_itemsize) - SHARED_BYTES
    stages = schedule.stages - max(0, -(-missing // _stage_bytes(schedule, problem.itemsize)))
    return replace(schedule, stages=stages) if stages >= _FEWEST_STAGES else schedule


def _stage_bytes(s: MatmulSchedule, itemsize: int) -> int:
    return (s.block_rows + s.block_columns) * s.k_step * itemsize


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
    """Returns the schedules of a split-K matmul, the preferred one first.

    K splits in separate blocks fill multiprocessors that few tiles would leave idle, but their partial sums are written
    to memory and read again. A block that sums several of them has smaller tiles. Of 2, 4 and 8 K splits of more than
    64 rows the schedule with the lowest estimate comes first, as it was measured.

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
    shape = m, k, n, transpose_w, itemsize
    of_split = Problem(splits, m, length, *shape[2:], _FLOAT32)
    apart = [(_several_ns(s, 1, of_split, out_itemsize), SplitKSchedule(splits, s)) for s in _tiles(of_split)]
    several = []
    for parts in (p for p in _PARTS if p == 1 or (p < splits and splits % p == 0)):
        problem = Problem(parts, m, splits // parts * length, *shape[2:], out_itemsize if parts == 1 else _FLOAT32)
        for s in _tiles(problem, _SEVERAL if m > _FEW_ROWS or parts == 1 else ()):
            if residual and parts == 1:
                fitted = _fewer_stages(with_buffers(s), itemsize, out_itemsize)
            else:
                fitted = _with_sums(s, splits // parts, problem)
            if fitted is not None and 2 * s.tile_rows * s.tile_columns <= _SUM_REGISTERS * _THREADS:
                time = _several_ns(fitted, splits // parts, problem, out_itemsize)
                several.append((time, SplitKSchedule(parts, fitted)))
    several.sort(key=lambda entry: entry[0])
    if splits not in _MEASURED_SPLITS:
        ranked = [*apart, *several]
    elif m > _FEW_ROWS:
        ranked = sorted([*apart, *several], key=lambda entry: entry[0])
    else:
        pairs = [entry for entry in several if entry[1].parts == _PAIRS]
        ranked = [*(pairs if splits == 2 * _PAIRS and m > _FEW_ROWS // 2 else []), *apart, *several]
    unique = dict.fromkeys(s for _, s in ranked)
    return tuple(s for s in unique if length % s.tiles.k_step == 0)


def _tiles(problem: Problem, names: tuple[str, ...] = ()) -> list[MatmulSchedule]:
    """Returns the tiles with these names, or the candidates of a problem."""
    if names:
        return [s for name in names if (s := named_schedule(name, problem)) is not None]
    stack, m, k, n, transpose_w, itemsize, size = problem
    found = candidates(m, k, n, stack=stack, transpose_w=transpose_w, itemsize=itemsize, out_itemsize=size)
    return list(found.values())


def _several_ns(s: MatmulSchedule, chains: int, problem: Problem, out_itemsize: int) -> float:
    """Returns a rough time of blocks that sum several chains each, and of the kernel that adds their sums."""
    tile = s.tile_rows * s.tile_columns
    waits = leaf_levels(chains, tile, s.warpgroups).in_memory
    shared = shared_bytes(s, chains, problem.itemsize, problem.out_itemsize) <= SHARED_BYTES
    waves = -(-problem.tiles(s) // SMS)
    waiting = _SHARED_CYCLES if shared else _WAITING_CYCLES
    cycles = chains / 2 * _PAIR_CYCLES + waits * waiting * s.warpgroups * tile
    time = estimate_ns(s, 1, problem) * (_WAITING_SLOWDOWN if waits and waves > 1 and not shared else 1)
    time += waves * cycles / _CYCLES_PER_NS
    if chains > 1 and s.tile_columns <= 64:
        time *= _SHORT_TILES
    if problem.stack > 1:
        time += _FINISH_NS + (_FLOAT32 * problem.stack + out_itemsize) * problem.m * problem.n / _FINISH_BYTES_PER_NS
    return time


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
