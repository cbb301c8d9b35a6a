"""Rows in groups (experts) whose sizes only the GPU knows: a table of group and tile offsets, and its tile scheduler.

Every block builds its own table in shared memory from the sizes in GPU memory before its first tile, so that no other
kernel has to run first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, scf

from pallas_kernels.matmul.hopper.pipeline import Place
from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.tile import i32, thread_of_warpgroup

MOST_GROUPS: Final = 1024
"""Groups of a table at most: a thread of a warp makes up to 32 of its entries."""

_WARP: Final = 32


@dataclass(frozen=True)
class Table:
    """The ends of the groups, as shared memory (2, groups) int32.

    Row 0 has the end row of every group, row 1 the cumulative number of tiles. Sizes that are negative or add up to
    more than `rows` are invalid: all groups are then empty, and row 0 ends in -1. A table of 256 groups takes 2048
    bytes; a larger one would not fit with the largest schedules.

    Attributes:
        groups: Number of groups, at most `MOST_GROUPS`.
        rows: Total number of rows.
        tile: Rows of a tile; every group starts a new tile.
    """

    groups: int
    rows: int
    tile: int

    @property
    def each(self) -> int:
        """Entries computed by one thread of a warp."""
        return -(-self.groups // _WARP)

    @property
    def most_tiles(self) -> int:
        """Upper bound of the number of tiles: every group may end in a partial tile."""
        return min(self.rows, self.rows // self.tile + self.groups)

    def scratch(self) -> Any:
        """Returns the shared memory of the table."""
        return plgpu.SMEM((2, self.groups), jnp.int32)

    def fill(self, sizes: Any, table: Any, interpret: Any) -> None:
        """Builds the table; for one warpgroup.

        Args:
            sizes: (groups,) int32 in GPU memory.
            table: The table.
            interpret: Whether the kernel runs in the interpreter.
        """
        if interpret:
            self._fill_interpreted(sizes, table)
            return
        inline(plgpu.RefType(), plgpu.RefType())(self._fill)(sizes, table)

    def _fill_interpreted(self, sizes: Any, table: Any) -> None:
        given = sizes[...]
        given = jnp.where(given < 0, self.rows + 1, jnp.minimum(given, self.rows + 1))
        ends = jnp.cumsum(given, dtype=jnp.int32)
        fit = ends[-1] <= self.rows
        tiles = jnp.cumsum((given + self.tile - 1) // self.tile, dtype=jnp.int32)
        table[0, :] = jnp.where(fit, ends, jnp.zeros_like(ends).at[-1].set(-1))
        table[1, :] = jnp.where(fit, tiles, 0)

    def _fill(self, sizes: Any, table: Any) -> None:
        """The same by threads: each sums its own entries, and a warp scan sums the entries before them."""
        lane = arith.remui(thread_of_warpgroup(), i32(_WARP))
        cap, zero = i32(self.rows + 1), i32(0)
        entries = [arith.addi(arith.muli(lane, i32(self.each)), i32(j)) for j in range(self.each)]
        exist = [arith.cmpi(arith.CmpIPredicate.ult, entry, i32(self.groups)) for entry in entries]

        def size(entry: Any, exists: Any) -> Any:
            at = arith.index_cast(ir.IndexType.get(), arith.select(exists, entry, zero))
            # As an unsigned integer, a negative size is large.
            return arith.select(exists, arith.minui(memref.load(sizes, [at]), cap), zero)

        def capped(a: Any, b: Any) -> Any:
            return arith.minui(arith.addi(a, b), cap)

        found = [size(*entry) for entry in zip(entries, exist, strict=True)]
        starts, total = _exclusive_sums(found, capped, lane)
        fit = arith.cmpi(arith.CmpIPredicate.ule, total, i32(self.rows))
        rounded = [
            arith.select(fit, arith.divui(arith.addi(one, i32(self.tile - 1)), i32(self.tile)), zero) for one in found
        ]
        before, _ = _exclusive_sums(rounded, arith.addi, lane)
        # All four warps hold the same values; one of them writes.
        writes = arith.cmpi(arith.CmpIPredicate.ult, thread_of_warpgroup(), i32(_WARP))
        for j, (entry, exists) in enumerate(zip(entries, exist, strict=True)):
            branch = scf.IfOp(arith.andi(writes, exists))  # type: ignore[call-arg]
            with ir.InsertionPoint(branch.then_block):
                is_last = arith.cmpi(arith.CmpIPredicate.eq, entry, i32(self.groups - 1))
                end = arith.select(fit, arith.addi(starts[j], found[j]), arith.select(is_last, i32(-1), zero))
                at = arith.index_cast(ir.IndexType.get(), entry)
                for row, number in enumerate((end, arith.addi(before[j], rounded[j]))):
                    memref.store(number, table, [mgpu.c(row, ir.IndexType.get()), at])
                scf.yield_([])
        mgpu.utils.warpgroup_barrier()

    def find(self, table: Any, tile: Any) -> Any:
        """Returns the group of a tile: the number of groups that end at or before it."""
        group, half = jnp.int32(0), 1 << (self.groups.bit_length() - 1)
        while half:
            candidate = jnp.minimum(group + half, self.groups)
            group = jnp.where(table[1, candidate - 1] <= tile, candidate, group)
            half //= 2
        return jnp.minimum(group, self.groups - 1)

    def span(self, table: Any, row: int, group: Any) -> tuple[Any, Any]:
        """Returns the start and the length of a group according to a row of the table."""
        start = jnp.where(group > 0, table[row, jnp.maximum(group - 1, 0)], 0)
        return start, jnp.where(self.fit(table), table[row, group] - start, 0)

    def rows_in_groups(self, table: Any) -> Any:
        """Returns the number of rows in groups."""
        return jnp.maximum(table[0, self.groups - 1], 0)

    def fit(self, table: Any) -> Any:
        """Returns whether the sizes are valid."""
        return table[0, self.groups - 1] >= 0


def _exclusive_sums(numbers: list[Any], add: Callable[[Any, Any], Any], lane: Any) -> tuple[list[Any], Any]:
    """Returns the exclusive prefix sums, ascending over lanes and over the numbers of a lane, and the total."""
    mask, zero = i32(-1), i32(0)

    def from_below(number: Any, distance: int) -> Any:
        other = nvvm.shfl_sync(mask, number, i32(distance), zero, nvvm.ShflKind.up)
        exists = arith.cmpi(arith.CmpIPredicate.uge, lane, i32(distance))
        return arith.select(exists, other, zero)

    own = numbers[0]
    for number in numbers[1:]:
        own = add(own, number)
    for distance in (1, 2, 4, 8, 16):
        own = add(own, from_below(own, distance))
    total = nvvm.shfl_sync(mask, own, i32(_WARP - 1), i32(_WARP - 1), nvvm.ShflKind.idx)
    sums = [from_below(own, 1)]
    for number in numbers[:-1]:
        sums.append(add(sums[-1], number))
    return sums, total


@dataclass(frozen=True)
class GroupTileScheduler:
    """The tile scheduler over all groups: block i processes tiles i, i + blocks, i + 2 blocks, ...

    A tile has rows of one group only. The tiles of the rows without a group come last.

    Attributes:
        table: The group offsets.
        columns: Columns of the result.
        tile_columns: Columns of a tile.
        swap: Whether wgmma's columns are the rows of the groups, and its rows the columns of the result.
        band: Tiles along the rows processed before the next column.
        blocks: Number of blocks launched.
    """

    table: Table
    columns: int
    tile_columns: int
    swap: bool
    band: int
    blocks: int

    @property
    def column_tiles(self) -> int:
        """Tiles along the columns."""
        return -(-self.columns // self.tile_columns)

    @property
    def most_rounds(self) -> int:
        """Most tiles of groups of a block."""
        return -(-self.table.most_tiles * self.column_tiles // self.blocks)

    def of(self, table: Any) -> "TableTileScheduler":
        """Returns the scheduler for a table in shared memory."""
        return TableTileScheduler(self, table)


@dataclass(frozen=True)
class TableTileScheduler:
    """A tile scheduler over the groups of a table in shared memory.

    Attributes:
        scheduler: The static parameters.
        table: The table.
    """

    scheduler: GroupTileScheduler
    table: Any

    @property
    def fit(self) -> Any:
        """Whether the sizes of the groups are valid."""
        return self.scheduler.table.fit(self.table)

    def count(self, block: Any) -> Any:
        """Returns the number of group tiles of a block."""
        return self._turns(self._group_tiles, block)

    def turns(self, block: Any) -> Any:
        """Returns the number of tiles of a block, including tiles of rows without a group."""
        tile = self.scheduler.table.tile
        left = self.scheduler.table.rows - self.scheduler.table.rows_in_groups(self.table)
        return self._turns(self._group_tiles + lax.div(left + tile - 1, tile) * self.scheduler.column_tiles, block)

    def place(self, block: Any, tile: Any) -> Place:
        """Returns the position of a block's tile by its index; its `valid` rows belong to the group."""
        table, scheduler, columns = self.table, self.scheduler, self.scheduler.column_tiles
        index = block + tile * scheduler.blocks
        group = scheduler.table.find(table, lax.div(index, columns))
        (start, size), (before, row_tiles) = (scheduler.table.span(table, row, group) for row in range(2))
        inside = index - before * columns
        # Bands of rows, so that concurrent blocks share weights and rows in the L2 cache.
        band = lax.div(inside, scheduler.band * columns)
        inside = inside - band * (scheduler.band * columns)
        height = jnp.minimum(row_tiles - band * scheduler.band, scheduler.band)
        column = lax.div(inside, height)
        row = (band * scheduler.band + (inside - column * height)) * scheduler.table.tile
        return Place(None, group, *self._corner(start + row, column), size - row)

    def rest(self, block: Any, turn: Any) -> tuple[Any, Any]:
        """Returns wgmma's first row and column of a block's tile of rows without a group, which come last."""
        scheduler = self.scheduler
        index = block + turn * scheduler.blocks - self._group_tiles
        row_tile = lax.div(index, scheduler.column_tiles)
        row = scheduler.table.rows_in_groups(self.table) + row_tile * scheduler.table.tile
        return self._corner(row, index - row_tile * scheduler.column_tiles)

    @property
    def _group_tiles(self) -> Any:
        return self.table[1, self.scheduler.table.groups - 1] * self.scheduler.column_tiles

    def _turns(self, tiles: Any, block: Any) -> Any:
        return lax.div(tiles - block + self.scheduler.blocks - 1, self.scheduler.blocks)

    def _corner(self, row: Any, column_tile: Any) -> tuple[Any, Any]:
        column = column_tile * self.scheduler.tile_columns
        return (column, row) if self.scheduler.swap else (row, column)


def send_rows(pieces: list[tuple[Any, int, int]], out: Any, row: Any, column: Any, valid: Any) -> None:
    """Starts the copies of the first `valid` rows of a block from shared memory to (row, column) of `out`.

    A copy has a fixed number of rows, so a piece is stored in copies of 64, 32, 16, ..., 1 rows. A row of a piece has
    128 bytes, whose swizzle depends only on its address, so a copy may start at any row.

    Args:
        pieces: Blocks of plain rows (rows, columns), each with its first row and column in the block.
        out: Result in memory.
        row: First row of the block in `out`.
        column: First column.
        valid: Number of rows; may exceed the block or be negative.
    """
    for piece, i, j in pieces:
        rows, width = piece.shape
        have = jnp.clip(valid - i, 0, rows)
        for size in (1 << bit for bit in reversed(range(rows.bit_length()))):
            done = have & -(2 * size)  # rows of the larger copies
            part, window = piece.at[pl.ds(done, size)], out.at[pl.ds(row + i + done, size), pl.ds(column + j, width)]

            @pl.when((have & size) != 0)
            def _(part: Any = part, window: Any = window) -> None:
                plgpu.copy_smem_to_gmem(part, window, commit_group=False)
