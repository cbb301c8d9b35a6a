"""Rough times of Hopper schedules, to rank them."""

from typing import Final, NamedTuple

from pallas_kernels.schedule.hopper.tiles import SMS, MatmulSchedule

BYTES_PER_NS: Final = 4370
"""Bytes that the memory moves."""

# Fitted to the times of 740 schedules of 140 shapes on an H200: average error 5 % (benchmarks/NOTES.md).
_CYCLES_PER_NS: Final = 1.75
_MULTIPLY_PER_CYCLE: Final = 2025  # of the 2048 of one multiprocessor
_MULTIPLY_CYCLES: Final = 55  # of a stage besides its products
_CHAIN_CYCLES: Final = 19.7  # one dependent wgmma of 16 elements of K, ...
_CHAIN_CYCLES_PER_COLUMN: Final = 0.183  # ... plus this per column
_INGEST_BYTES_PER_CYCLE: Final = 123  # of one multiprocessor
_CACHE_BYTES_PER_CYCLE: Final = 7824  # of all of them together
_LATENCY_CYCLES: Final = 1594  # from the start of a copy to its arrival
_ISSUE_CYCLES: Final = 233  # two copies
_STAGE_CYCLES: Final = 87  # of a stage whose products are not the limit
_TURNS: Final = 4  # tiles from which alternating warpgroups overlap: one waits, another multiplies
_TURNS_MULTIPLY_CYCLES: Final = 46
_TURNS_STAGE_CYCLES: Final = 60
_LONG_STAGE: Final = 1.2  # a stage of 512 bytes of K or more takes longer by this factor
_START_CYCLES: Final = 3326
_TILE_CYCLES: Final = 328
_WRITE_CYCLES: Final = 0.0436  # for each element of a tile, of 2 bytes
_TRANSPOSED_WRITE_CYCLES: Final = 0.0782  # the same with `swap`

_FEWEST_ROWS: Final = 8


class Problem(NamedTuple):
    """A problem shape: see `pallas_kernels.matmul.schedule.hopper.matmul.candidates`."""

    stack: int
    m: int
    k: int
    n: int
    transpose_w: bool
    itemsize: int
    out_itemsize: int

    def tiles(self, schedule: MatmulSchedule) -> int:
        """Returns the number of tiles."""
        return self.stack * schedule.tiles(self.m, self.n)


def estimate_ns(s: MatmulSchedule, blocks: int, problem: Problem) -> float:
    """Returns a rough time: the slowest pipeline part of every stage, over all waves.

    Args:
        s: Schedule.
        blocks: Blocks resident on a multiprocessor.
        problem: Shape.
    """
    stack, m, k, n, _, itemsize, out_itemsize = problem
    tiles = problem.tiles(s)
    running = min(tiles, SMS * blocks)
    sharing = -(-running // SMS)  # blocks that compete for one multiprocessor
    size = (s.block_n + min(s.block_m, -(-m // _FEWEST_ROWS) * _FEWEST_ROWS)) * s.k_step * itemsize
    arrival = size * max(sharing / _INGEST_BYTES_PER_CYCLE, running / _CACHE_BYTES_PER_CYCLE)
    waiting = max(
        s.k_step / 16 * (_CHAIN_CYCLES + _CHAIN_CYCLES_PER_COLUMN * s.tile_columns),
        arrival,
        (_LATENCY_CYCLES + arrival) / (s.stages - 1),
        _ISSUE_CYCLES,
    )
    products = s.block_rows * s.block_columns * s.k_step / _MULTIPLY_PER_CYCLE * sharing
    waves, steps = -(-tiles // (SMS * blocks)), -(-k // s.k_step)
    beside, late = _MULTIPLY_CYCLES, _STAGE_CYCLES
    if s.split == "tiles" and waves >= _TURNS:
        beside, late = _TURNS_MULTIPLY_CYCLES, _TURNS_STAGE_CYCLES
    stage = max(products + beside, waiting + late)
    if s.k_step * itemsize >= 512:
        stage *= _LONG_STAGE
    element = (_TRANSPOSED_WRITE_CYCLES if s.swap else _WRITE_CYCLES) * out_itemsize / 2
    write = _TILE_CYCLES + s.block_rows * s.block_columns * element
    writes = 1 if s.split == "tiles" else waves  # writes not hidden by another warpgroup's products
    computing = (_START_CYCLES + waves * steps * stage + writes * write) / _CYCLES_PER_NS
    moved = stack * ((m * k + k * n) * itemsize + m * n * out_itemsize)
    memory = moved / BYTES_PER_NS + _START_CYCLES / _CYCLES_PER_NS
    # If memory bandwidth is the limit, the candidate with less computing time is preferred.
    return max(computing, memory) + 0.02 * computing
