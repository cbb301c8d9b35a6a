"""Schedules of the Triton matmul: tiles by the shape and by what a thread block of the GPU can hold.

A schedule does not affect the bits, so it may depend on the number of rows. All tiles were compared with each other on
a Hopper GPU (`tests/matmul/test_jax_triton_gpu.py`); for the others the tests check their machine code.
"""

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class Tile:
    """The tile of the result that a program computes.

    Attributes:
        rows: Rows of the tile.
        columns: Columns of the tile.
        depth: Elements of the sum that are read at once.
        warps: Warps of a program.
        stages: Tiles of the operands that are read ahead.
        group: Rows of tiles that consecutive programs share.

    Example:
        >>> Tile(64, 64, 32, 4, 3).shared_bytes(itemsize=2)
        24576
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "depth"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two and at least 16, got {size}.")

    def shared_bytes(self, itemsize: int, products: int = 1) -> int:
        """Returns the bytes of shared memory for the operands of one or two products of the same rows."""
        return (self.rows + products * self.columns) * self.depth * itemsize * self.stages

    def fitted(self, itemsize: int, shared_memory: int, products: int = 1) -> "Tile":
        """Returns the tile with as many stages, or else as much depth, as shared memory holds.

        Raises:
            ValueError: If shared memory is too small for the tile with the least depth.
        """
        tile = self
        while tile.shared_bytes(itemsize, products) > shared_memory:
            if tile.stages > 2:
                tile = replace(tile, stages=tile.stages - 1)
            elif tile.depth > 16:
                tile = replace(tile, depth=tile.depth // 2, stages=self.stages)
            else:
                raise ValueError(f"expected a tile that fits into {shared_memory} bytes of shared memory, got {self}.")
        return tile


@dataclass(frozen=True)
class Candidate:
    """A tile with its speed.

    Attributes:
        tile: The tile.
        speed: Products per time, relative to the fastest tile, on a GPU that is full of such tiles. Estimated from
            times of bfloat16 products on an H100; tiles of 32 rows, and those for other GPUs, were not timed.
    """

    tile: Tile
    speed: float


WIDE: Final = (Candidate(Tile(128, 256, 64, 8, 3, 16), 1.0), Candidate(Tile(128, 128, 64, 8, 4), 0.89))
"""For many rows where the tensor core reads its operands from shared memory (wgmma)."""

LARGE: Final = (Candidate(Tile(128, 128, 32, 4, 4), 1.0), Candidate(Tile(128, 64, 64, 4, 4), 0.8))
"""For many rows elsewhere."""

GATED: Final = (Candidate(Tile(128, 64, 64, 8, 3), 1.0), Candidate(Tile(64, 64, 64, 4, 4), 0.8))
"""For many rows and two products of them: two accumulators have to stay in registers."""

SMALL: Final = (
    Candidate(Tile(64, 128, 64, 4, 4), 0.8),
    Candidate(Tile(64, 64, 128, 4, 4), 0.65),
    Candidate(Tile(64, 32, 128, 4, 4), 0.45),
    Candidate(Tile(64, 16, 128, 4, 5), 0.28),
    Candidate(Tile(32, 128, 64, 4, 4), 0.8),
    Candidate(Tile(32, 64, 128, 4, 4), 0.7),
    Candidate(Tile(32, 32, 128, 4, 5), 0.5),
    Candidate(Tile(32, 16, 128, 4, 5), 0.26),
    Candidate(Tile(16, 128, 64, 4, 4), 0.8),
    Candidate(Tile(16, 64, 128, 4, 4), 0.7),
    Candidate(Tile(16, 32, 256, 4, 4), 0.5),
    Candidate(Tile(16, 16, 256, 2, 4), 0.26),
)
"""For fewer rows, or fewer columns."""

CHAIN: Final = (Tile(64, 64, 16, 4, 3), Tile(16, 64, 16, 4, 3))
"""For chains of fused multiply-adds. Every tile reads 16 elements at once, to which a block of the sum is padded."""

_MULTIPROCESSORS: Final = {True: 132, False: 108}
"""Of a GPU with wgmma (H100, H200), and of others (A100)."""

_HEIGHTS: Final = (16, 32, 64, 128)
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

    It is the tile with the highest speed times the share of the multiprocessors' time that its programs fill, among
    those with the rows of the call, or 64 or 128 rows if it has more.

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
    height = next(rows for rows in _HEIGHTS if rows >= min(m, 32 if "tcgen05" in features else _HEIGHTS[-1]))
    multiprocessors = _MULTIPROCESSORS["wgmma" in features]

    def speed(candidate: Candidate) -> float:
        tile = candidate.tile
        programs = stack * -(-m // tile.rows) * -(-n // tile.columns)
        return candidate.speed * programs / (-(-programs // multiprocessors) * multiprocessors)

    chosen = max((c for c in candidates(features, products) if min(height, 64) <= c.tile.rows <= height), key=speed)
    return _dividing(chosen.tile, depth).fitted(itemsize, shared_memory, products)


def candidates(features: frozenset[str], products: int = 1) -> tuple[Candidate, ...]:
    """Returns the candidates for one or two products on a GPU."""
    if products > 1:
        return (*GATED, *(c for c in SMALL if c.tile.rows * c.tile.columns <= 64 * 32))
    return (*(WIDE if "wgmma" in features else LARGE), *SMALL)


def _dividing(tile: Tile, depth: int) -> Tile:
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
