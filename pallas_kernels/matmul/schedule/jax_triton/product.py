"""Tiles of products by the shape and by what a thread block of the GPU can hold.

All tiles were compared with each other on a Hopper GPU (`tests/matmul/test_jax_triton_gpu.py`); for other GPUs the
tests check their machine code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from pallas_kernels.matmul.schedule.jax_triton.tile import Tile
from pallas_kernels.target import HOPPER_MULTIPROCESSORS


@dataclass(frozen=True)
class Candidate:
    """A tile with its speed.

    Attributes:
        tile: The tile.
        speed: Products per time, relative to the fastest tile, on a GPU that is full of such tiles. Estimated from
            times of bfloat16 products on an H100; those for other GPUs were not timed.
        alone: Whether it is for at most one program on each multiprocessor.
    """

    tile: Tile
    speed: float
    alone: bool = False


WIDE: Final = (Candidate(Tile(128, 256, 64, 8, 3, 16), 1.0), Candidate(Tile(128, 128, 64, 8, 4), 0.85))
"""For many rows where the tensor core reads its operands from shared memory (wgmma)."""

LARGE: Final = (Candidate(Tile(128, 128, 32, 4, 4), 1.0), Candidate(Tile(128, 64, 64, 4, 4), 0.8))
"""For many rows elsewhere."""

GATED: Final = (Candidate(Tile(128, 64, 64, 8, 3), 1.0), Candidate(Tile(64, 64, 64, 4, 4), 0.8))
"""For many rows and two products of them: two accumulators have to stay in registers."""

MIDDLE: Final = (
    Candidate(Tile(64, 128, 64, 4, 4), 0.6),
    Candidate(Tile(64, 64, 64, 4, 6), 0.62),
    Candidate(Tile(64, 32, 128, 4, 4), 0.45),
    Candidate(Tile(64, 32, 128, 4, 6), 0.5, alone=True),
    Candidate(Tile(64, 16, 128, 4, 5), 0.28),
)
"""For more than 64 rows that do not fill the GPU with tiles of `WIDE`."""

SMALL: Final = (
    Candidate(Tile(64, 128, 64, 4, 4), 0.8),
    Candidate(Tile(64, 64, 128, 4, 4), 0.65),
    Candidate(Tile(64, 32, 128, 4, 4), 0.45),
    Candidate(Tile(64, 16, 128, 4, 5), 0.28),
    Candidate(Tile(32, 128, 64, 4, 4), 0.8),
    Candidate(Tile(32, 64, 128, 4, 4), 0.7),
    Candidate(Tile(32, 32, 128, 4, 5), 0.5),
    Candidate(Tile(32, 16, 256, 4, 4), 0.26),
    Candidate(Tile(16, 128, 64, 4, 4), 0.8),
    Candidate(Tile(16, 64, 128, 4, 4), 0.7),
    Candidate(Tile(16, 32, 256, 4, 4), 0.5),
    Candidate(Tile(16, 16, 256, 2, 4), 0.26),
)
"""For up to 64 rows, or where the tensor core reads its operands from registers also for more."""

ALONE: Final = (
    Candidate(Tile(64, 128, 64, 4, 6), 0.7, alone=True),
    Candidate(Tile(16, 16, 512, 2, 4), 0.27, alone=True),
)
"""For a single product of 16 bits with wgmma: few programs, which read far ahead."""

CHAIN: Final = (Tile(64, 64, 16, 4, 3), Tile(16, 64, 16, 4, 3))
"""For chains of fused multiply-adds. Every tile reads 16 elements at once, to which a block of the sum is padded."""

_MULTIPROCESSORS: Final = {True: HOPPER_MULTIPROCESSORS, False: 108}
"""Of a GPU with wgmma (H100, H200), and of others (A100)."""

HEIGHTS: Final = (16, 32, 64, 128)
_FEW_ROWS: Final = 64
_SHORT_DEPTH: Final = 1024
_LARGE_ELEMENTS: Final = 128 * 128
_LEAST_DEPTH: Final = 32
_MOST_STAGES: Final = 6


def tensor_core_tile(
    m: int,
    n: int,
    *,
    depth: int,
    itemsize: int,
    shared_memory: int,
    features: frozenset[str],
    stack: int = 1,
    products: int = 1,
) -> Tile:
    """Returns the tile of a product on tensor cores.

    It is chosen by `fastest` among those with the rows of the call, or 64 or 128 rows if it has more.

    Args:
        m: Number of rows.
        n: Number of columns.
        depth: Length of the sum.
        itemsize: Bytes of an element of the operands.
        shared_memory: Bytes of shared memory of a program, see `Target.shared_memory`.
        features: The GPU's instruction families, see `Target.features`. Where tiles of 64 and more rows are summed by
            another instruction than others ("tcgen05"), a tile has up to 32 rows.
        stack: Entries of a stack.
        products: Products of the same rows by different weights.

    Example:
        >>> ampere = {"itemsize": 2, "shared_memory": 166912, "features": frozenset({"mma"})}
        >>> tensor_core_tile(1, 4096, depth=4096, **ampere)
        Tile(rows=16, columns=64, depth=128, warps=4, stages=4, group=8)
        >>> tensor_core_tile(8192, 8192, depth=576, **ampere)
        Tile(rows=128, columns=128, depth=32, warps=4, stages=4, group=8)
    """
    height = height_of(m, features)
    found = candidates(features, products)
    if products == 1 and "wgmma" in features:
        found = (*WIDE, *MIDDLE) if m > _FEW_ROWS else SMALL
        if stack == 1 and itemsize == 2 and depth > _SHORT_DEPTH:
            found = (*found, *ALONE)
    among = [c for c in found if min(height, 64) <= c.tile.rows <= height]
    tile = fastest(among, m, n, stack, features)
    if itemsize == 1:  # epilogues with scales need more registers
        warps = 8 if tile.rows * tile.columns >= _LARGE_ELEMENTS else tile.warps
        tile = replace(tile, depth=2 * tile.depth, warps=warps)
    if (
        "wgmma" in features and m > _FEW_ROWS and 0 < depth <= _SHORT_DEPTH
    ):  # a program more at a time is worth more than a stage
        tile = replace(tile, stages=min(tile.stages, 3))
    return dividing(tile, depth).fitted(itemsize, shared_memory, products)


def height_of(m: int, features: frozenset[str]) -> int:
    """Returns the most rows of a tile for this number of rows."""
    return next(rows for rows in HEIGHTS if rows >= min(m, 32 if "tcgen05" in features else HEIGHTS[-1]))


def fastest(among: Sequence[Candidate], m: int, n: int, stack: int, features: frozenset[str]) -> Tile:
    """Returns the tile with the highest speed times the share of the multiprocessors' time that its programs fill."""
    multiprocessors = _MULTIPROCESSORS["wgmma" in features]

    def speed(candidate: Candidate) -> float:
        tile = candidate.tile
        programs = stack * -(-m // tile.rows) * -(-n // tile.columns)
        if candidate.alone and programs > multiprocessors:
            return 0.0
        return candidate.speed * programs / (-(-programs // multiprocessors) * multiprocessors)

    return max(among, key=speed).tile


def candidates(features: frozenset[str], products: int = 1) -> tuple[Candidate, ...]:
    """Returns the candidates for one or two products on a GPU."""
    if products > 1:
        return (*GATED, *(c for c in SMALL if c.tile.rows * c.tile.columns <= 64 * 32))
    return (*WIDE, *MIDDLE, *SMALL, *ALONE) if "wgmma" in features else (*LARGE, *SMALL)


def dividing[T: Tile](tile: T, depth: int) -> T:
    """Returns the tile with a depth that divides the sum, if there is one: its loads then need no mask."""
    found = tile
    while depth % found.depth and found.depth > _LEAST_DEPTH:
        found = replace(found, depth=found.depth // 2, stages=min(_MOST_STAGES, 2 * found.stages))
    return found if depth % found.depth == 0 else tile


def chain_tile(m: int) -> Tile:
    """Returns the tile of a product by fused multiply-adds.

    Example:
        >>> chain_tile(1).rows, chain_tile(100).rows
        (16, 64)
    """
    return CHAIN[1] if m <= CHAIN[1].rows else CHAIN[0]
