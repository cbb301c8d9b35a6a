"""Tiles of the Triton matmul."""

from dataclasses import dataclass, replace
from typing import Self


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
