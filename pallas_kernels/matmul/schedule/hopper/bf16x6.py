"""Hopper schedules of the matmul with float32 accuracy: the fastest tiles for a shape, chosen by an estimate.

A schedule changes no bit (see `pallas_kernels.matmul.hopper.bf16x6_ring`), so it may depend on the number of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS, MatmulSchedule

_BLOCK: Final = 64
_BARRIER_BYTES: Final = 3 * 1024
_MOST_STAGES: Final = 8
_SUM_REGISTERS: Final = {1: 128, 2: 128, 3: 64}  # by number of computing warpgroups

# Hardware parameters of the estimate.
_CYCLES_PER_NS: Final = 1.75
_BYTES_PER_NS: Final = 4200
_MULTIPLY_PER_CYCLE: Final = 1900
_PRODUCT_STEPS: Final = 24  # wgmma instructions of a block
_CHAIN_CYCLES: Final = 22
_SPLIT_CYCLES: Final = 700  # a warpgroup reads and splits a block, waits for its products, adds them
_INGEST_BYTES_PER_CYCLE: Final = 60
_START_CYCLES: Final = 3000
_TILE_CYCLES: Final = 600
_SUM_NS: Final = 1500  # the kernel that adds the K splits


@dataclass(frozen=True)
class SplitSchedule:
    """Tiles and stages of a matmul with operands split into limbs.

    Attributes:
        tiles: Tiles, stages and warpgroups; the weights are wgmma's rows (`swap`), 64 per warpgroup; `k_step` is 64.
        parted: Whether each K split is a separate tile, whose sum the caller adds.
    """

    tiles: MatmulSchedule
    parted: bool = False

    def __post_init__(self) -> None:
        t = self.tiles
        if not t.swap or t.tile_rows != 64 or t.k_step != _BLOCK or t.split != "rows":
            raise ValueError(f"tiles must have swap, tile_rows=64, k_step={_BLOCK} and split='rows', got {t}.")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        t = self.tiles
        return t.stages * _stage_bytes(t) + t.block_rows * t.tile_columns * 4 + _BARRIER_BYTES


def split_schedule(m: int, k: int, n: int, splits: int, *, stack: int = 1) -> SplitSchedule:
    """Returns the schedule of a shape: the candidate with the lowest estimated time.

    Args:
        m: Rows of the activations, at least 1.
        k: Length of the contracted dimension, at least 1.
        n: Columns of the weights, at least 1.
        splits: Number of K splits.
        stack: Products of this shape in one launch.

    Example:
        >>> split_schedule(8, 4096, 1024, 16).parted, split_schedule(4096, 4096, 4096, 16).parted
        (True, False)
    """
    return min(split_candidates(m, n, splits, stack=stack), key=lambda s: _estimate_ns(s, m, k, n, splits, stack))


def split_candidates(m: int, n: int, splits: int, *, stack: int = 1) -> Iterator[SplitSchedule]:
    """Yields the schedules worth trying for a shape.

    Args:
        m: Rows of the activations.
        n: Columns of the weights.
        splits: Number of K splits.
        stack: Products of this shape in one launch.
    """
    smallest = max(8, 1 << (m - 1).bit_length())
    for columns in (8, 16, 32, 64, 128):
        if columns > smallest or columns < min(smallest, 64):
            continue
        for warpgroups in (1, 2, 3):
            for parted in (False, True) if splits > 1 else (False,):
                # An accumulator, the sum of a K split and the total, in `columns / 2` registers each.
                sums = 2 if parted or splits == 1 else 3
                if sums * columns // 2 > _SUM_REGISTERS[warpgroups]:
                    continue
                base = MatmulSchedule(True, 64, columns, _BLOCK, 2, warpgroups)
                spare = SHARED_BYTES - SplitSchedule(base).shared_bytes
                if spare < 0:
                    continue
                stages = min(_MOST_STAGES, 2 + spare // _stage_bytes(base))
                blocks = SMS if _tiles(base, parted, m, n, splits, stack) > SMS else 0
                yield SplitSchedule(replace(base, stages=stages, blocks=blocks), parted)


def _stage_bytes(t: MatmulSchedule) -> int:
    return _BLOCK * (t.block_rows * 4 + t.tile_columns * 6)


def _tiles(t: MatmulSchedule, parted: bool, m: int, n: int, splits: int, stack: int) -> int:
    return stack * (splits if parted else 1) * t.tiles(m, n)


def _estimate_ns(s: SplitSchedule, m: int, k: int, n: int, splits: int, stack: int) -> float:
    """Returns a rough time: the slowest pipeline part of every block, over all waves."""
    t = s.tiles
    blocks = -(-k // (_BLOCK * (splits if s.parted else 1)))
    multiply = 64 * t.tile_columns * 6 * _BLOCK / _MULTIPLY_PER_CYCLE
    block = max(
        multiply * t.warpgroups,
        _SPLIT_CYCLES + max(multiply, _PRODUCT_STEPS * _CHAIN_CYCLES),
        _stage_bytes(t) / _INGEST_BYTES_PER_CYCLE,
    )
    waves = -(-_tiles(t, s.parted, m, n, splits, stack) // SMS)
    computing = (_START_CYCLES + waves * (blocks * block + _TILE_CYCLES)) / _CYCLES_PER_NS
    sums = stack * splits * m * n * 4 * 2 / _BYTES_PER_NS + _SUM_NS if s.parted else 0.0
    memory = stack * (k * n * 4 + m * k * 6 + m * n * 4) / _BYTES_PER_NS + _START_CYCLES / _CYCLES_PER_NS
    return max(computing, memory) + 0.02 * computing + sums
