"""Hopper schedules of matmul: how tiles are shaped and fed; `matmul` chooses among them.

A schedule does not affect the bits: every accumulator is one chain over K, see `pallas_kernels.matmul.hopper.ring`.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

from pallas_kernels.target import HOPPER_MULTIPROCESSORS

SMS: Final = HOPPER_MULTIPROCESSORS
"""Streaming multiprocessors of an H100 SXM or H200. On GPUs with fewer, the grids run in more waves."""

SHARED_BYTES: Final = 227 * 1024
"""Maximum shared memory of a block; the multiprocessor reserves 1 KiB more for each block."""

_BARRIER_BYTES: Final = 3 * 1024  # barriers and alignment
_OUT_ROWS: Final = 64
_ROW_BYTES: Final = 128


@dataclass(frozen=True)
class MatmulSchedule:
    """How the blocks of a matmul are shaped and fed.

    wgmma's rows are the rows of the activations, or with `swap` (transposed MMA) the columns of the weights.

    Attributes:
        swap: Whether the weights are wgmma's rows.
        tile_rows: Rows of one warpgroup, a multiple of 64.
        tile_columns: Columns of one warpgroup, a multiple of 8 up to 256.
        k_step: Elements of K in a stage, a multiple of the 128 bytes of a swizzled row: of 64 for 2-byte operands, of
            32 for 4-byte ones.
        stages: Stages in shared memory, at least 2.
        warpgroups: Computing warpgroups of a block, 1 to 3.
        split: Whether the warpgroups of a block are arranged along its rows; with "tiles" they alternate between whole
            tiles, so that one writes its result while another multiplies.
        blocks: Maximum number of persistent blocks that the tile scheduler uses; 0 launches one block per tile.
        group: Tiles along the rows that the tile scheduler visits before the next column.
        out_buffers: Blocks of the result that a warpgroup can have in flight to memory, at least 1 and at most as many
            as it has: 64 rows of 128 bytes, or with `swap` 64 rows of `tile_rows` elements.
    """

    swap: bool
    tile_rows: int
    tile_columns: int
    k_step: int
    stages: int
    warpgroups: int = 1
    split: Literal["rows", "tiles"] = "rows"
    blocks: int = 0
    group: int = 8
    out_buffers: int = 2

    def __post_init__(self) -> None:
        def fail(what: str) -> None:
            raise ValueError(f"{what}, got {self}.")

        if self.tile_rows < 64 or self.tile_rows % 64:
            fail("tile_rows must be a positive multiple of 64")
        if not 8 <= self.tile_columns <= 256 or self.tile_columns % 8:
            fail("tile_columns must be a multiple of 8 from 8 to 256")
        if self.k_step < 32 or self.k_step % 32:
            fail("k_step must be a positive multiple of 32")
        if self.stages < 2:
            fail("stages must be at least 2")
        if not 1 <= self.warpgroups <= 3 or self.split not in ("rows", "tiles"):
            fail("warpgroups must be 1, 2 or 3 and split 'rows' or 'tiles'")
        if self.blocks < 0 or self.group < 1:
            fail("blocks must not be negative and group must be positive")
        if self.out_buffers < 1:
            fail("out_buffers must be positive")

    @property
    def block_rows(self) -> int:
        """Rows of a block's tile."""
        return self.tile_rows * (self.warpgroups if self.split == "rows" else 1)

    @property
    def block_columns(self) -> int:
        """Columns of a block's tile."""
        return self.tile_columns

    @property
    def block_m(self) -> int:
        """Rows of the result in a block's tile."""
        return self.block_columns if self.swap else self.block_rows

    @property
    def block_n(self) -> int:
        """Columns of the result in a block's tile."""
        return self.block_rows if self.swap else self.block_columns

    def tiles(self, m: int, n: int) -> int:
        """Returns the number of tiles of an (M, N) result."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def out_blocks(self, out_itemsize: int) -> tuple[int, int, int]:
        """Returns how a warpgroup's part of the result is stored: rows and columns of a block, and number of buffers.

        Args:
            out_itemsize: Bytes of a result's element.
        """
        if self.swap:
            # Long rows are efficient for memory, so all columns are stored together.
            rows, columns = max(r for r in range(8, _OUT_ROWS + 1, 8) if self.tile_columns % r == 0), self.tile_rows
            buffers = self.out_buffers * (_OUT_ROWS // rows)
        else:
            widest = _ROW_BYTES // out_itemsize
            rows, columns = _OUT_ROWS, math.gcd(self.tile_columns, widest)
            buffers = self.out_buffers * (widest // columns)
        return rows, columns, min(buffers, self.tile_rows * self.tile_columns // (rows * columns))

    def shared_bytes(self, itemsize: int, out_itemsize: int) -> int:
        """Returns the shared memory of a block.

        Args:
            itemsize: Bytes of an operand's element.
            out_itemsize: Bytes of a result's element.
        """
        return self.buffer_bytes(itemsize, out_itemsize) + _BARRIER_BYTES

    def buffer_bytes(self, itemsize: int, out_itemsize: int) -> int:
        """Returns the shared memory of the stages and of the blocks of the result."""
        stage = (self.block_rows + self.block_columns) * self.k_step * itemsize
        out = math.prod(self.out_blocks(out_itemsize)) * out_itemsize
        return self.stages * stage + self.warpgroups * out
