"""Hopper schedules of the TF32 matmul: which tiles multiply a shape fast.

A step of wgmma takes 32 bytes of K of either operand whatever their dtype, so float32 rows of K elements cost what
bfloat16 rows of 2 K elements do, and the shapes of `pallas_kernels.schedule.hopper` are taken over for (N, K) weights.
(K, N) weights are turned by a kernel of its own, or by a copy. No schedule moves a bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from pallas_kernels.schedule.hopper import SHARED_BYTES, SMS, MatmulSchedule, candidates

STORED_ROWS: Final = 32
"""Rows of the result that a turning kernel's warpgroup with `swap` hands to memory at a time."""

STORE_BUFFERS: Final = 2
"""How many such parts can be on their way."""

_SQUARE: Final = 32
_THREADS: Final = 128
_MOST_TURNED: Final = 64  # elements that a thread holds while it turns
_BARRIER_BYTES: Final = 3 * 1024
_MOST_STAGES: Final = 12

# What the estimate knows of the chip.
_CYCLES_PER_NS: Final = 1.75
_BYTES_PER_NS: Final = 4200
_COPY_BYTES_PER_NS: Final = 4000  # a transposing copy, of what it reads and writes
_MULTIPLY_PER_CYCLE: Final = 920
_CHAIN_CYCLES: Final = 22  # one dependent wgmma of 8 elements of K
_SHARED_BYTES_PER_CYCLE: Final = 120
_INGEST_BYTES_PER_CYCLE: Final = 75
_TURN_CYCLES: Final = 250  # of a turning warpgroup's stage, beside what it reads and writes
_AWAIT_CYCLES: Final = 100
_ISSUE_CYCLES: Final = 240  # two copies
_START_CYCLES: Final = 3000
_TILE_CYCLES: Final = 600


@dataclass(frozen=True)
class Tf32Schedule:
    """How the blocks of a TF32 matmul are cut and fed.

    Attributes:
        tiles: Tiles and stages.
        turners: Warpgroups of a block, 1 or 2, that turn (K, N) weights inside of the kernel; 0 for a copy in front of
            it. Without a meaning for (N, K) weights.
        from_registers: Whether (K, N) weights are read into registers, as wgmma's rows, in place of being turned.
    """

    tiles: MatmulSchedule
    turners: int = 0
    from_registers: bool = False

    def __post_init__(self) -> None:
        t = self.tiles
        if self.from_registers:
            if self.turners or not t.swap or t.tile_rows != 64 or t.split != "rows":
                raise ValueError(
                    f"rows from registers must have swap, tile_rows=64, split='rows', no turners, got {self}."
                )
            if t.cluster_rows != 1 or t.cluster_columns != 1:
                raise ValueError(f"rows from registers must have no clusters, got {t}.")
        if not 0 <= self.turners <= 2:
            raise ValueError(f"turners must be 0, 1 or 2, got {self}.")
        if not self.turners:
            return
        if t.cluster_rows != 1 or t.cluster_columns != 1 or t.split != "rows" or t.warpgroups > 2:
            raise ValueError(f"turned tiles must have no clusters, split='rows', at most 2 warpgroups, got {t}.")
        if t.stages % self.turners:
            raise ValueError(f"stages must be a multiple of the turning warpgroups, got {self}.")
        turned = t.block_n * t.k_step
        if t.block_n % _SQUARE or turned % (2 * _SQUARE**2) or turned > _MOST_TURNED * _THREADS:
            raise ValueError(
                f"a stage of turned weights must be whole squares of {_SQUARE}, an even number of them, at most"
                f" {_MOST_TURNED * _THREADS} elements, got k_step {t.k_step} and {t.block_n} columns."
            )
        if self.turners + t.warpgroups == 4 and t.tile_rows * t.tile_columns > 64 * 128:
            raise ValueError(f"five warpgroups must have tiles of at most 64 by 128, got {t}.")

    def shared_bytes(self, out_itemsize: int) -> int:
        """Returns the shared memory of a block."""
        t = self.tiles
        if not (self.turners or self.from_registers) or not t.swap:
            return t.shared_bytes(4, out_itemsize)
        out = t.warpgroups * STORE_BUFFERS * min(STORED_ROWS, t.tile_columns) * t.tile_rows * out_itemsize
        return t.stages * _stage_bytes(t) + out + _BARRIER_BYTES


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
        >>> tf32_schedule(8, 4096, 4096).from_registers, tf32_schedule(8, 4096, 4096, transpose_w=True).from_registers
        (True, False)
    """
    return next(tf32_candidates(m, k, n, stack=stack, transpose_w=transpose_w, out_itemsize=out_itemsize))


def tf32_candidates(
    m: int, k: int, n: int, *, stack: int = 1, transpose_w: bool = False, out_itemsize: int = 4
) -> Iterator[Tf32Schedule]:
    """Yields the schedules that are worth trying for a shape, the one with the lowest estimated time first.

    Args:
        m: Rows of the activations.
        k: Length of the contracted dimension.
        n: Columns of the weights.
        stack: Products of this shape in one launch.
        transpose_w: Whether the weights are stored as (N, K).
        out_itemsize: Bytes of a result's element.
    """
    tiles = candidates(m, 2 * k, n, stack=stack, transpose_w=True, out_itemsize=out_itemsize).values()
    found = [Tf32Schedule(replace(t, k_step=t.k_step // 2)) for t in tiles]
    if not transpose_w:
        found += _on_the_way(m, n, stack, out_itemsize)
    yield from sorted(found, key=lambda schedule: _estimate_ns(schedule, m, k, n, stack, transpose_w))


def _shapes(m: int) -> Iterator[tuple[bool, int, int, int, int]]:
    """Yields (weights are wgmma's rows, columns of a tile, step of K, computing and turning warpgroups).

    Without turning ones the weights are read into registers.
    """
    columns = max(8, 1 << (m - 1).bit_length())
    if m <= 128:
        yield from ((True, columns, k_step, 1, 0) for k_step in (64, 128))
        yield from ((True, columns, 64, warpgroups, 0) for warpgroups in (2, 3))
        computing = 1 if m <= 64 else 2
        yield from ((False, 32, 64, computing, 1), (False, 32, 128, computing, 1))
        if m <= 64:
            yield (False, 32, 64, 1, 2)
        yield (True, columns, 64, 2, 1)
        return
    yield from ((True, 128, 64, 1, 0), (True, 128, 64, 2, 0), (True, 128, 32, 3, 0))
    yield from ((True, 256, 32, 1, 0), (True, 256, 32, 2, 0), (True, 192, 32, 2, 0))
    yield from ((True, 128, 64, 1, 1), (True, 256, 32, 1, 1), (True, 256, 32, 2, 1))


def _on_the_way(m: int, n: int, stack: int, out_itemsize: int) -> Iterator[Tf32Schedule]:
    """Yields schedules that bring (K, N) weights into wgmma's order on their way through the kernel."""
    for swap, columns, k_step, warpgroups, turners in _shapes(m):
        tiles = MatmulSchedule(swap, 64, columns, k_step, 2, warpgroups)
        spare = SHARED_BYTES - Tf32Schedule(tiles, turners, not turners).shared_bytes(out_itemsize)
        several = max(1, turners)
        stages = min(_MOST_STAGES, 2 + spare // _stage_bytes(tiles)) // several * several
        if stages < 3:
            continue
        clusters = SMS if _tiles(tiles, m, n, stack) > SMS else 0
        yield Tf32Schedule(replace(tiles, stages=stages, clusters=clusters), turners, not turners)


def _stage_bytes(t: MatmulSchedule) -> int:
    return (t.block_rows + t.block_columns) * t.k_step * 4


def _tiles(t: MatmulSchedule, m: int, n: int, stack: int) -> int:
    return stack * -(-m // t.block_m) * -(-n // t.block_n)


def _estimate_ns(s: Tf32Schedule, m: int, k: int, n: int, stack: int, transpose_w: bool) -> float:
    """Returns a rough time: the slowest of the pipeline's parts for every stage, in as many waves as there are.

    The constants were measured on an H200 (benchmarks/NOTES.md).
    """
    t = s.tiles
    weights = t.block_n * t.k_step * 4
    moved = 2 * weights if s.turners else weights if s.from_registers else 0
    loaded = (t.block_n + min(t.block_m, -(-m // 8) * 8)) * t.k_step * 4
    # Every 64 rows of wgmma read all columns of their warpgroup.
    read_rows = 0 if s.from_registers else t.tile_rows
    multiplied = t.warpgroups * (read_rows + t.tile_rows // 64 * t.tile_columns) * t.k_step * 4
    step = max(
        t.block_rows * t.block_columns * t.k_step / _MULTIPLY_PER_CYCLE,
        (loaded + multiplied + moved) / _SHARED_BYTES_PER_CYCLE,
        t.k_step / 8 * _CHAIN_CYCLES,
        loaded / _INGEST_BYTES_PER_CYCLE,
        (_TURN_CYCLES + moved / _SHARED_BYTES_PER_CYCLE) / s.turners if s.turners else 0.0,
        _ISSUE_CYCLES,
    )
    if s.from_registers:  # the products of a stage are awaited before those of the next are issued
        step += _AWAIT_CYCLES / t.warpgroups
    waves = -(-_tiles(t, m, n, stack) // SMS)
    computing = (_START_CYCLES + waves * (-(-k // t.k_step) * step + _TILE_CYCLES)) / _CYCLES_PER_NS
    memory = stack * (k * n + m * k + m * n) * 4 / _BYTES_PER_NS + _START_CYCLES / _CYCLES_PER_NS
    copy = 0.0 if s.turners or s.from_registers or transpose_w else stack * 2 * k * n * 4 / _COPY_BYTES_PER_NS
    return max(computing, memory) + 0.02 * computing + copy
