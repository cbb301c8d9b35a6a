"""The items of decode: tiles of rows, packed from queries and heads, each with one split or all of its keys."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._decode_results import Place
from pallas_kernels.attention.hopper._mask_bounds import Blocks
from pallas_kernels.attention.hopper._merge_loop import MERGED_ROWS
from pallas_kernels.attention.hopper._setup import Lengths, Setup
from pallas_kernels.attention.hopper.columns import COLUMNS
from pallas_kernels.attention.schedule.hopper import DecodeSchedule
from pallas_kernels.parts.hopper.tile import ROWS

_ROWS: Final = 8  # TMA reads tiles of so many rows


class Item(NamedTuple):
    """One tile of rows, with one split or all of its keys.

    Attributes:
        sequence: Index of the sequence.
        head: Index of the key head.
        tile: Index of the tile among those of the key head.
        split: Index of the split, 0 with all keys.
        blocks: The blocks that the tile's queries see of the split, none if the last is not above the first; of all
            keys, at least one.
    """

    sequence: Any
    head: Any
    tile: Any
    split: Any
    blocks: Blocks


@dataclass(frozen=True)
class Items:
    """The items of a launch: how many there are, where their rows lie, and which blocks of keys they have."""

    setup: Setup
    schedule: DecodeSchedule

    def inside(self, refs: AttentionCall) -> Self:
        """Returns the same with what a kernel reads from memory first."""
        return self

    @property
    def rows(self) -> int:
        """Rows of a key head."""
        return self.setup.queries * self.setup.group

    @property
    def room(self) -> tuple[int, int]:
        """Sequences, and rows of each, that arrays of what items give have room for."""
        rows = self.heads * self.rows
        return self.setup.batch, rows if self.schedule.whole else -(-rows // MERGED_ROWS) * MERGED_ROWS

    @property
    def merged(self) -> tuple[int, int]:
        """The same for the arrays of results."""
        return self.room

    @property
    def counts(self) -> set[int]:
        """How many rows of a tile may be written."""
        return {min(ROWS, self.rows), self.rows % ROWS or ROWS}

    def place(self, item: Item) -> Place:
        """Returns where the rows of an item lie in what items give."""
        first = item.tile * ROWS
        return Place(item.sequence, item.head * self.rows + first, self.rows - first)

    def of_result(self, sequence: Any, row: Any) -> tuple[Any, Any]:
        """Returns the sequence and the row of what items give for a row of the result."""
        return sequence, row

    def packed(self, query: jax.Array) -> tuple[jax.Array, ...]:
        """Returns queries (B, T, N, H) as the rows of key heads, (B * K, T * group, H)."""
        setup = self.setup
        shape = (setup.batch, setup.queries, self.heads, setup.group, setup.size)
        packed = jnp.moveaxis(query.reshape(shape), 1, 2).reshape(setup.batch * self.heads, -1, setup.size)
        rows = packed.shape[1]
        return (jnp.pad(packed, ((0, 0), (0, -rows % _ROWS), (0, 0))) if rows > _ROWS else packed,)

    def copy_rows(self, packed: Any, item: Item, target: Any, barrier: Any) -> None:
        """Starts the copy of the rows of an item from packed queries into shared memory (64 or 8, H)."""
        window = packed[0].at[item.sequence * self.heads + item.head, pl.ds(item.tile * ROWS, self.loaded)]
        plgpu.copy_gmem_to_smem(window, target.at[pl.ds(0, self.loaded)], barrier)

    @property
    def tiles(self) -> int:
        """Tiles of a key head."""
        return -(-self.rows // ROWS)

    @property
    def heads(self) -> int:
        """Key heads."""
        return self.setup.heads // self.setup.group

    @property
    def splits(self) -> int:
        """Splits of a cache."""
        return -(-self.setup.capacity // self.setup.contract.split)

    @property
    def items(self) -> int:
        """Items of all blocks."""
        return self.setup.batch * (1 if self.schedule.whole else self.splits) * self.tiles * self.heads

    @property
    def spills(self) -> bool:
        """Whether an item has more than one split."""
        return self.schedule.whole and self.splits > 1

    @property
    def grid(self) -> int:
        """Blocks of the grid."""
        return min(self.schedule.blocks, self.items)

    @property
    def workers(self) -> int:
        """Walkers of all blocks of the grid."""
        return self.grid * self.schedule.workers

    def number(self, worker: Any) -> Any:
        """Returns the number, among all workers, of one of this block of the grid: a few items go to many blocks."""
        return lax.axis_index("block") + worker * self.grid

    @property
    def tile_rows(self) -> int:
        """Rows of a tile in shared memory."""
        return COLUMNS if self.schedule.swap else ROWS

    @property
    def loaded(self) -> int:
        """Rows of a tile that are copied; the others are never read by what is stored."""
        return min(ROWS, -(-self.rows // _ROWS) * _ROWS)

    def count(self, worker: Any) -> Any:
        """Returns the number of items of a worker."""
        return lax.div(self.items - 1 - worker + self.workers, self.workers)

    def item(self, lengths: Lengths, worker: Any, index: Any) -> Item:
        """Returns an item of a worker: neighbours share a split, so that a cache is read in the order of its bytes."""
        number = index * self.workers + worker
        head, number = lax.rem(number, self.heads), lax.div(number, self.heads)
        tile, number = lax.rem(number, self.tiles), lax.div(number, self.tiles)
        splits = 1 if self.schedule.whole else self.splits
        split, sequence = lax.rem(number, splits), lax.div(number, splits)
        return Item(sequence, head, tile, split, self.blocks(lengths, sequence, tile, split))

    def blocks(self, lengths: Lengths, sequence: Any, tile: Any, split: Any) -> Blocks:
        """Returns the blocks of an item."""
        seen = self.seen(lengths.offsets[sequence], lengths.keys[sequence])
        there = lengths.queries[sequence] * self.setup.group > tile * ROWS
        if self.schedule.whole:
            # One block of a tile without queries is walked, for the zeros that are its result.
            return seen._replace(last=jnp.where(there, seen.last, seen.first + 1))
        length = self.setup.contract.split // self.setup.contract.key_block
        start, end = jnp.maximum(split * length, seen.first), jnp.minimum((split + 1) * length, seen.last)
        end = jnp.where(there, end, start)
        return seen._replace(first=start, last=end)

    def seen(self, offset: Any, keys: Any) -> Blocks:
        """Returns the blocks that the queries of a sequence see, the same for all of its tiles."""
        return self.setup.mask_bounds.blocks(
            offset, offset + (self.setup.queries - 1), keys, self.setup.contract.key_block
        )

    def splits_seen(self, offset: Any, queries: Any, keys: Any) -> tuple[Any, Any]:
        """Returns the first and the end of the splits of a sequence that are computed."""
        seen, length = self.seen(offset, keys), self.setup.contract.split // self.setup.contract.key_block
        begin, end = lax.div(seen.first, length), lax.div(seen.last + (length - 1), length)
        return begin, jnp.where(queries > 0, jnp.minimum(end, self.splits), begin)

    def unpacked(self, x: jax.Array) -> jax.Array:
        """Returns results (B, rows of all key heads, ...) as (B, T, N, ...)."""
        setup = self.setup
        x = x[:, : self.heads * self.rows].reshape(setup.batch, self.heads, self.rows, *x.shape[2:])
        x = x[:, :, : setup.queries * setup.group]
        x = x.reshape(setup.batch, self.heads, setup.queries, setup.group, *x.shape[3:])
        return jnp.moveaxis(x, 1, 2).reshape(setup.batch, setup.queries, setup.heads, *x.shape[4:])

    def of_rows(self, numbers: jax.Array, rows: int) -> jax.Array:
        """Returns numbers of heads (B or 1, N) for rows of key heads, (B or 1, R): `rows` of each, then zeros."""
        sequences, setup = numbers.shape[0], self.setup
        found = jnp.broadcast_to(
            numbers.reshape(sequences, self.heads, 1, setup.group), (sequences, self.heads, setup.queries, setup.group)
        ).reshape(sequences, self.heads, -1)
        return jnp.pad(found, ((0, 0), (0, 0), (0, rows - found.shape[2]))).reshape(sequences, -1)

    def of_tiles(self, numbers: jax.Array | None) -> jax.Array | None:
        """Returns numbers of heads (B or 1, N) for the rows of tiles, (B or 1, heads, rows)."""
        if numbers is None:
            return None
        return self.of_rows(numbers, self.tiles * ROWS).reshape(-1, self.heads, self.tiles * ROWS)
