"""Schedules of the Triton matmul: tiles by the shape and by what a thread block of the GPU can hold.

A schedule does not affect the bits, so it may depend on the number of rows. All tiles were compared with each other on
a Hopper GPU (`tests/matmul/test_jax_triton_gpu.py`); for the others the tests check their machine code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self


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

    def fitted(self, itemsize: int, shared_memory: int, products: int = 1) -> Self:
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
class SplitTile(Tile):
    """A tile of a product with split K whose warps sum the parts of K at the same time, one warp each.

    Attributes:
        rows: Rows of the tile.
        columns: Columns of the tile.
        depth: Elements of each part that are read at once.
        warps: Parts of K, which is the number of warps.
        stages: Tiles of the operands that are read ahead.
        group: Rows of tiles that consecutive programs share.

    Example:
        >>> SplitTile(16, 32, 64, 4, 3).shared_bytes(itemsize=2)
        73728
    """

    def shared_bytes(self, itemsize: int, products: int = 1) -> int:
        """Returns the bytes of shared memory for the operands of all parts."""
        return self.warps * super().shared_bytes(itemsize, products)


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

GRADIENT: Final = Tile(128, 128, 32, 8, 4)
"""For gradients of weights that wgmma sums, but the largest."""

FLOAT8: Final = Candidate(Tile(128, 128, 64, 8, 3), 1.0)
"""For many rows of float8, beside those for fewer: two accumulators have to stay in registers."""

SPLIT: Final = SplitTile(16, 16, 128, 4, 4)
"""For few rows and split K."""

CHAIN: Final = (Tile(64, 64, 16, 4, 3), Tile(16, 64, 16, 4, 3))
"""For chains of fused multiply-adds. Every tile reads 16 elements at once, to which a block of the sum is padded."""

_MULTIPROCESSORS: Final = {True: 132, False: 108}
"""Of a GPU with wgmma (H100, H200), and of others (A100)."""

_HEIGHTS: Final = (16, 32, 64, 128)
_FEW_ROWS: Final = 64
_SHORT_DEPTH: Final = 1024
_SHORT_GRADIENT: Final = 128
_LEAST_DEPTH: Final = 32
_MOST_ROWS_OF_COLUMNS: Final = 64
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

    It is chosen by `_fastest` among those with the rows of the call, or 64 or 128 rows if it has more.

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
    height = _height(m, features)
    found = candidates(features, products)
    if products == 1 and "wgmma" in features:
        found = (*WIDE, *MIDDLE) if m > _FEW_ROWS else SMALL
    among = [c for c in found if min(height, 64) <= c.tile.rows <= height]
    tile = _fastest(among, m, n, stack, features)
    if itemsize == 1:
        tile = replace(tile, depth=2 * tile.depth)
    if m > _FEW_ROWS and 0 < depth <= _SHORT_DEPTH:  # a program more at a time is worth more than a stage
        tile = replace(tile, stages=min(tile.stages, 3))
    return _dividing(tile, depth).fitted(itemsize, shared_memory, products)


def _height(m: int, features: frozenset[str]) -> int:
    """Returns the most rows of a tile for this number of rows."""
    return next(rows for rows in _HEIGHTS if rows >= min(m, 32 if "tcgen05" in features else _HEIGHTS[-1]))


def _fastest(among: Sequence[Candidate], m: int, n: int, stack: int, features: frozenset[str]) -> Tile:
    """Returns the tile with the highest speed times the share of the multiprocessors' time that its programs fill."""
    multiprocessors = _MULTIPROCESSORS["wgmma" in features]

    def speed(candidate: Candidate) -> float:
        tile = candidate.tile
        programs = stack * -(-m // tile.rows) * -(-n // tile.columns)
        if candidate.alone and programs > multiprocessors:
            return 0.0
        return candidate.speed * programs / (-(-programs // multiprocessors) * multiprocessors)

    return max(among, key=speed).tile


def gradient_tile(k: int, n: int, *, depth: int, shared_memory: int, features: frozenset[str], stack: int = 1) -> Tile:
    """Returns the tile of a gradient of weights from 16-bit rows.

    It is that of a product, except on GPUs with wgmma for tiles of 128 columns, which read 32 rows at once (for 64,
    Triton's compiler waits for every single product), and which also serve short sums.

    Args:
        k: Rows of the gradient.
        n: Columns of the gradient.
        depth: Length of the sums; with groups, the mean.
        shared_memory: Bytes of shared memory of a program.
        features: The GPU's instruction families.
        stack: Entries of a stack.

    Example:
        >>> hopper = {"shared_memory": 232448, "features": frozenset({"mma", "wgmma"})}
        >>> gradient_tile(8192, 8192, depth=4096, **hopper).columns, gradient_tile(2048, 768, depth=64, **hopper).depth
        (256, 32)
    """
    options: Any = {"itemsize": 2, "shared_memory": shared_memory, "features": features, "stack": stack}
    tile = tensor_core_tile(k, n, depth=depth, **options)
    of_128 = tile.rows == _HEIGHTS[-1] and "wgmma" in features
    if of_128 and (tile.columns == 128 or depth <= _SHORT_GRADIENT):
        return GRADIENT.fitted(2, shared_memory)
    return tile


def float8_tile(m: int, n: int, block: int, *, shared_memory: int, features: frozenset[str], stack: int = 1) -> Tile:
    """Returns the tile of a product of float8 operands, whose depth is a block of the sum.

    Tiles of fewer than 64 rows are multiplied by another instruction than others where the GPU has wgmma, which would
    change bits: there, all tiles have at least 64 rows.

    Args:
        m: Number of rows.
        n: Number of columns.
        block: Elements of a block of the sum.
        shared_memory: Bytes of shared memory of a program.
        features: The GPU's instruction families.
        stack: Entries of a stack.

    Example:
        >>> float8_tile(3, 4096, 128, shared_memory=232448, features=frozenset({"mma", "float8", "wgmma"})).rows
        64
    """
    height = max(_height(m, features), 64 if "wgmma" in features else 0)
    among = [c for c in (FLOAT8, *SMALL) if min(height, 64) <= c.tile.rows <= height]
    tile = replace(_fastest(among, m, n, stack, features), depth=block)
    while tile.shared_bytes(1) > shared_memory and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def reads_columns(rows: int) -> bool:
    """Returns whether to read (K, N) weights of int8 in place; otherwise their transpose is copied.

    The tensor core reads integers along K, so the kernel rearranges each tile: for few rows faster than a copy.

    Example:
        >>> reads_columns(8), reads_columns(4096)
        (True, False)
    """
    return rows <= _MOST_ROWS_OF_COLUMNS


def split_tile(
    m: int, n: int, splits: int, length: int, *, shared_memory: int, features: frozenset[str]
) -> Tile | SplitTile:
    """Returns the tile of a product of 16-bit operands with split K.

    With few rows the parts of K are summed at the same time, which reads the weights faster; with many, one after the
    other, where a part has the speed of a product.

    Args:
        m: Number of rows.
        n: Number of columns.
        splits: Parts of K.
        length: Elements of a part.
        shared_memory: Bytes of shared memory of a program.
        features: The GPU's instruction families.

    Example:
        >>> ampere = {"shared_memory": 166912, "features": frozenset({"mma"})}
        >>> split_tile(8, 1280, 4, 2048, **ampere)
        SplitTile(rows=16, columns=16, depth=128, warps=4, stages=4, group=8)
        >>> split_tile(1024, 1280, 4, 2048, **ampere).rows
        128
    """
    if m <= SPLIT.rows and splits in (2, 4):
        return replace(_dividing(SPLIT, length), warps=splits).fitted(2, shared_memory)
    options: Any = {"depth": length, "itemsize": 2, "shared_memory": shared_memory, "features": features}
    return tensor_core_tile(m, n, **options, products=2)  # two or three sums have to stay in registers


def candidates(features: frozenset[str], products: int = 1) -> tuple[Candidate, ...]:
    """Returns the candidates for one or two products on a GPU."""
    if products > 1:
        return (*GATED, *(c for c in SMALL if c.tile.rows * c.tile.columns <= 64 * 32))
    return (*WIDE, *MIDDLE, *SMALL) if "wgmma" in features else (*LARGE, *SMALL)


def _dividing[T: Tile](tile: T, depth: int) -> T:
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
