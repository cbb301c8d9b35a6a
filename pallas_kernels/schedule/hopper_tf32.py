"""Hopper schedules of the TF32 matmul: which tiles multiply a shape fast.

A step of wgmma takes 32 bytes of K of either operand whatever their dtype, so float32 rows of K elements cost what
bfloat16 rows of 2 K elements do, and the schedules of `pallas_kernels.schedule.hopper` are taken over.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from pallas_kernels.schedule.hopper import SHARED_BYTES, SMS, MatmulSchedule
from pallas_kernels.schedule.hopper_matmul import candidates

_K_STEP: Final = 64
_MOST_STAGES: Final = 8
_TURNED_BYTES: Final = 2 * 64 * _K_STEP * 4  # of one warpgroup
_MOST_TURNED_ROWS: Final = 128
_CYCLES_PER_NS: Final = 1.75
_BYTES_PER_NS: Final = 4200
_TURN_CYCLES: Final = 350  # a warpgroup turns a tile of 64 by 64
_INGEST_BYTES_PER_CYCLE: Final = 60
_START_CYCLES: Final = 3000


@dataclass(frozen=True)
class Tf32Schedule:
    """How the blocks of a TF32 matmul are cut and fed.

    Attributes:
        tiles: Tiles and stages.
        turned: Whether (K, N) weights are turned inside of the kernel, tile by tile; otherwise by a copy in front of
            it. Without a meaning for (N, K) weights.
    """

    tiles: MatmulSchedule
    turned: bool = False

    def __post_init__(self) -> None:
        t = self.tiles
        if self.turned and (not t.swap or t.tile_rows != 64 or t.k_step != _K_STEP or t.split != "rows"):
            raise ValueError(f"turned tiles must have swap, tile_rows=64, k_step={_K_STEP} and split='rows', got {t}.")
        if self.turned and (t.cluster_rows != 1 or t.cluster_columns != 1):
            raise ValueError(f"turned tiles must have no clusters, got {t}.")

    def shared_bytes(self, out_itemsize: int) -> int:
        """Returns the shared memory of a block."""
        turned = self.tiles.warpgroups * _TURNED_BYTES if self.turned else 0
        return self.tiles.shared_bytes(4, out_itemsize) + turned


def tf32_schedule(
    m: int, k: int, n: int, *, stack: int = 1, transpose_w: bool = False, out_itemsize: int = 4
) -> Tf32Schedule:
    """Returns the schedule of a shape: the candidate estimated fastest.

    Args:
        m: Rows of the activations, at least 1.
        k: Length of the contracted dimension, at least 1.
        n: Columns of the weights, at least 1.
        stack: Products of this shape in one launch.
        transpose_w: Whether the weights are stored as (N, K).
        out_itemsize: Bytes of a result's element.

    Example:
        >>> tf32_schedule(8, 4096, 4096).turned, tf32_schedule(4096, 4096, 4096).turned
        (True, False)
    """
    return next(tf32_candidates(m, k, n, stack=stack, transpose_w=transpose_w, out_itemsize=out_itemsize))


def tf32_candidates(
    m: int, k: int, n: int, *, stack: int = 1, transpose_w: bool = False, out_itemsize: int = 4
) -> Iterator[Tf32Schedule]:
    """Yields the schedules that are worth trying for a shape, those that turn (K, N) weights for few rows first.

    Args:
        m: Rows of the activations.
        k: Length of the contracted dimension.
        n: Columns of the weights.
        stack: Products of this shape in one launch.
        transpose_w: Whether the weights are stored as (N, K).
        out_itemsize: Bytes of a result's element.
    """
    if not transpose_w and m <= _MOST_TURNED_ROWS:
        turned = _turned(m, n, stack, out_itemsize)
        yield from sorted(turned, key=lambda schedule: _estimate_ns(schedule.tiles, m, k, n, stack))
    found = candidates(m, 2 * k, n, stack=stack, transpose_w=True, out_itemsize=out_itemsize).values()
    for tiles in found:
        yield Tf32Schedule(replace(tiles, k_step=tiles.k_step // 2))


def _turned(m: int, n: int, stack: int, out_itemsize: int) -> Iterator[Tf32Schedule]:
    columns = max(8, 1 << (m - 1).bit_length())
    for warpgroups in (1, 2, 3):
        base = MatmulSchedule(True, 64, columns, _K_STEP, 2, warpgroups)
        spare = SHARED_BYTES - Tf32Schedule(base, True).shared_bytes(out_itemsize)
        stages = 2 + spare // ((base.block_rows + columns) * _K_STEP * 4)
        if stages < 2:
            continue
        tiles = _tiles(base, m, n, stack)
        schedule = replace(base, stages=min(_MOST_STAGES, stages), clusters=SMS if tiles > SMS else 0)
        yield Tf32Schedule(schedule, True)


def _tiles(t: MatmulSchedule, m: int, n: int, stack: int) -> int:
    return stack * -(-m // t.block_m) * -(-n // t.block_n)


def _estimate_ns(t: MatmulSchedule, m: int, k: int, n: int, stack: int) -> float:
    """Returns a rough time of turning tiles: the slowest part for every stage, in as many waves as there are."""
    step = max(_TURN_CYCLES, (t.block_rows + t.tile_columns) * _K_STEP * 4 / _INGEST_BYTES_PER_CYCLE)
    waves = -(-_tiles(t, m, n, stack) // SMS)
    computing = (_START_CYCLES + waves * -(-k // _K_STEP) * step) / _CYCLES_PER_NS
    memory = stack * (k * n + m * k + m * n) * 4 / _BYTES_PER_NS + _START_CYCLES / _CYCLES_PER_NS
    return max(computing, memory) + 0.02 * computing
