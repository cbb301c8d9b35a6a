"""Hopper schedules of fused matmuls: with a residual, gated pairs, or split K.

They are the candidates of `pallas_kernels.matmul.schedule.hopper.matmul` with the additional resources of a block.
"""

from dataclasses import replace
from typing import Any, Final, NamedTuple

from pallas_kernels.matmul.schedule.hopper.estimate import Problem, estimate_ns
from pallas_kernels.matmul.schedule.hopper.leaf_levels import leaf_levels, shared_bytes
from pallas_kernels.matmul.schedule.hopper.matmul import blocks_per_sm, candidates, matmul_schedule, named_schedule
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS, MatmulSchedule

_FEWEST_STAGES: Final = 3
_ALL_BLOCKS: Final = 64  # more than a tile has
_FLOAT32: Final = 4  # bytes
_FEWEST_ROWS: Final = 8  # up to which a block for each K split is as fast as any other
_FEW_ROWS: Final = 64  # up to which blocks for pairs of many K splits were faster, and no others
_MANY_SPLITS: Final = 8
_SEVERAL: Final = tuple(f"rows 64x{columns} k64 warpgroups2" for columns in (64, 128, 192))
"""Tiles of blocks that sum several K splits of many rows: two tiles of sums fit into the registers."""

# Costs of several K splits, fitted to times of an H100 (benchmarks/notes/several-gpus.md).
_CYCLES_PER_NS: Final = 1.75
_DRAIN_CYCLES: Final = 150  # from the last product of a pair of K splits to the first of the next ...
_ADD_CYCLES: Final = 0.043  # ... and for each element of a warpgroup's tile
_SHARED_CYCLES: Final = 0.06  # an element of a block that waits in shared memory
_MEMORY_CYCLES: Final = 0.5  # the same in GPU memory
_FINISH_NS: Final = 1500  # the kernel that adds partial sums ...
_FINISH_BYTES_PER_NS: Final = 3300  # ... and its bytes
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
    missing = schedule.shared_bytes(itemsize, out_itemsize) - SHARED_BYTES
    stages = schedule.stages - max(0, -(-missing // _stage_bytes(schedule, itemsize)))
    return replace(schedule, stages=stages) if stages >= _FEWEST_STAGES else None


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
    for parts in _cuts(m, splits):
        chains = splits // parts
        size = out_itemsize if parts == 1 else _FLOAT32
        problem = Problem(parts, m, min(k, chains * length), n, transpose_w, itemsize, size)
        for name, tiles in _tiles(problem, chains).items():
            s = _fitted(tiles, chains, problem, residual and parts == 1)
            if s is None or length % s.k_step:
                continue
            time = estimate_ns(s, blocks_per_sm(name), problem) + _chains_ns(s, chains, problem)
            if parts > 1:
                time += _FINISH_NS + (_FLOAT32 * parts + out_itemsize) * m * n / _FINISH_BYTES_PER_NS
            found.append((time, SplitKSchedule(parts, s)))
    found.sort(key=lambda entry: entry[0])
    return tuple(schedule for _, schedule in found)


def _cuts(m: int, splits: int) -> tuple[int, ...]:
    """Returns into how many parts K may be cut for separate blocks."""
    if m <= _FEW_ROWS:
        return (splits // 2, splits) if splits == _MANY_SPLITS and m > _FEWEST_ROWS else (splits,)
    return (*(p for p in range(1, splits) if splits % p == 0 and p & (p - 1) == 0), splits)


def _tiles(problem: Problem, chains: int) -> dict[str, MatmulSchedule]:
    """Returns the tiles to try for blocks that sum a number of chains, by name."""
    stack, m, k, n, transpose_w, itemsize, size = problem
    if chains > 1 and m > _FEW_ROWS:
        named = {name: named_schedule(name, problem) for name in _SEVERAL}
        return {name: s for name, s in named.items() if s is not None}
    found = candidates(m, k, n, stack=stack, transpose_w=transpose_w, itemsize=itemsize, out_itemsize=size)
    return {
        name: s
        for name, s in found.items()
        if leaf_levels(chains, s.tile_rows * s.tile_columns, s.warpgroups).in_memory == 0
    }


def _fitted(s: MatmulSchedule, chains: int, problem: Problem, residual: bool) -> MatmulSchedule | None:
    """Returns the schedule with room for a residual or for sums that wait, with fewer stages; None if too few fit."""
    if residual:
        return _with_residual(s, problem.itemsize, problem.out_itemsize)
    if chains & (chains - 1):
        return s
    missing = shared_bytes(s, chains, problem.itemsize, problem.out_itemsize) - SHARED_BYTES
    stages = s.stages - max(0, -(-missing // _stage_bytes(s, problem.itemsize)))
    return replace(s, stages=stages) if stages >= _FEWEST_STAGES else s


def _chains_ns(s: MatmulSchedule, chains: int, problem: Problem) -> float:
    """Returns the time that a block takes for several chains, besides that of one as long."""
    tile = s.tile_rows * s.tile_columns
    together, in_registers, in_memory = leaf_levels(chains, tile, s.warpgroups)
    groups = chains // together
    moves = sum(groups >> level for level in range(in_registers + 1, in_registers + in_memory + 1))
    shared = shared_bytes(s, chains, problem.itemsize, problem.out_itemsize) <= SHARED_BYTES
    moved = _SHARED_CYCLES if shared else _MEMORY_CYCLES
    cycles = (groups - 1) * (_DRAIN_CYCLES + _ADD_CYCLES * tile) + moves * moved * s.warpgroups * tile
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
