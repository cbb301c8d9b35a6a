"""An operand of wgmma in shared memory: how it is copied there and how wgmma reads it."""

import math
from dataclasses import dataclass
from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

SWIZZLE_BYTES: Final = 128
"""Bytes of a shared memory row that wgmma reads without bank conflicts."""

ROWS: Final = 8
"""Rows of one swizzled core matrix."""


@dataclass(frozen=True)
class Operand:
    """One operand as wgmma sees it: `size` rows (or columns) of `k` elements.

    Attributes:
        size: Rows or columns of the whole operand.
        k: Length of the contracted dimension.
        k_major: Whether K is the contiguous dimension in memory.
        tile: Rows or columns of a block's tile in each source.
        loaded: How many of them are copied; the others never affect stored elements.
        swizzle: Elements of a swizzled row.
        k_step: Elements of K in a stage.
        sources: Operands of this shape, 1 or 2, each with its own accumulator.
        anywhere: Whether tiles may start at any row, not only at multiples of 8.
    """

    size: int
    k: int
    k_major: bool
    tile: int
    loaded: int
    swizzle: int
    k_step: int
    sources: int = 1
    anywhere: bool = False

    @property
    def ragged(self) -> bool:
        """Whether the copied rows do not divide into the whole (8, swizzle) tiles that wgmma reads.

        Fewer than 8 rows are one tile. An operand stored with K first divides: its K is a multiple of 8, its swizzle
        divides its size.
        """
        edges = (self.size % ROWS != 0 and self.size > ROWS) or self.k % self.swizzle != 0
        return self.k_major and (self.anywhere or edges)

    @property
    def pieces(self) -> int:
        """Copies per stage and source.

        A ragged operand is copied in pieces one swizzled row wide: such a piece is plain rows in memory order, for
        which TMA handles any edge.
        """
        return self.k_step // self.swizzle if self.ragged else 1

    @property
    def arrivals(self) -> int:
        """Copies per stage."""
        return self.pieces * self.sources

    @property
    def tiles(self) -> int:
        """Tiles of the whole operand."""
        return -(-self.size // self.tile)

    def shape(self, stages: int) -> tuple[int, ...]:
        """Returns the shape of the stages in shared memory."""
        if not self.k_major:
            return (stages, self.sources, self.k_step, self.tile)
        return (stages, self.sources * self.pieces, self.tile, self.k_step // self.pieces)

    def scratch(self, stages: int, dtype: Any, alias: bool) -> Any:
        """Returns shared memory of the stages; with `alias` also viewed as plain rows, for copies in pieces."""
        transforms = tile_transforms(self.swizzle, dtype)
        tiled = plgpu.SMEM(self.shape(stages), dtype, transforms=transforms)
        if not alias:
            return tiled
        return plgpu.RefUnion(tiled, plgpu.SMEM(self.shape(stages), dtype, transforms=transforms[1:]))

    def copy(self, sources: Any, target: Any, start: Any, k: Any, slot: Any, barrier: Any) -> None:
        """Starts the copies of one stage: rows (or columns) from `start` on, K from `k` on."""
        size = pl.ds(start, self.loaded)
        for index, source in enumerate(sources):
            for piece in range(self.pieces):
                place = target.at[slot, index * self.pieces + piece]
                if self.k_major:
                    width = self.k_step // self.pieces
                    window = source.at[size, pl.ds(k + piece * width, width)]
                    place = place.at[pl.ds(0, self.loaded)]
                else:
                    window = source.at[pl.ds(k, self.k_step), size]
                plgpu.copy_gmem_to_smem(window, place, barrier)

    def read(self, ref: Any, slot: Any, source: int, piece: int, pieces: int, part: Any) -> Any:
        """Returns the rows or columns `part` of piece `piece` of `pieces` of a stage, as (part, K).

        A side with one source uses it for both sources of the other side.
        """
        first = source % self.sources * self.pieces
        width = self.k_step // pieces
        window: Any = slice(None)
        if self.pieces == pieces:
            ref = ref.at[slot, first + piece]
        else:
            ref, window = ref.at[slot, first], pl.ds(piece * width, width)
        if self.k_major:
            return ref.at[part, window]
        return ref.at[window, part].transpose((1, 0))


def loaded_rows(size: int, tile: int) -> int:
    """Returns how many rows of a tile are copied from `size` rows: whole core matrices, up to the tile."""
    return min(tile, -(-size // ROWS) * ROWS)


def whole_swizzle(dtype: Any, *lengths: int) -> int:
    """Returns the elements of the widest swizzled row that divides the lengths along it."""
    return math.gcd(SWIZZLE_BYTES // jnp.dtype(dtype).itemsize, *lengths)


def in_stack(ref: Any, place: Any) -> Any:
    """Returns the entry of a stack, or the matrix shared by every entry."""
    return ref if len(ref.shape) == 2 else ref.at[place]


def tile_transforms(swizzle: int, dtype: Any) -> tuple[Any, Any]:
    """Returns the tiling and the swizzle of rows of `swizzle` elements in shared memory."""
    tiling: Any = plgpu.TilingTransform  # typed as abstract classes in JAX 0.12
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((ROWS, swizzle)), swizzling(swizzle * jnp.dtype(dtype).itemsize)
