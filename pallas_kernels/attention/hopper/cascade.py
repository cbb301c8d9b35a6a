"""Decode of sequences whose caches begin with the same pages: a shared split is read once for all rows.

Splits restart at absolute positions, so a row's result for a split does not depend on other rows. The rows of all
sequences are concatenated in one array per key head. A tile of a shared split takes 64 of them, a tile of any other
split the rows of its sequence, and `merge` finds the splits of a row in the usual place.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._decode_results import Place
from pallas_kernels.attention.hopper._items import Item
from pallas_kernels.attention.hopper._mask_bounds import Blocks
from pallas_kernels.attention.hopper._merge_loop import MERGED_ROWS
from pallas_kernels.attention.hopper._setup import Lengths, Setup
from pallas_kernels.attention.hopper.decode import Body
from pallas_kernels.parts.hopper.tile import ROWS


@dataclass(frozen=True)
class Cascade(Body):
    """The kernel's program if the first splits may be shared by all sequences.

    Attributes:
        shared: Number of shared splits, known inside the kernel.
    """

    shared: Any = 0

    def inside(self, refs: AttentionCall) -> Self:
        """Returns the program with the number of shared splits."""
        shared: Any = refs.common_prefix
        return replace(self, shared=shared[0])

    @property
    def rows(self) -> int:
        """Rows of a sequence per key head, rounded up since `merge` takes four together."""
        return -(-super().rows // MERGED_ROWS) * MERGED_ROWS

    @property
    def all_rows(self) -> int:
        """Rows of all sequences of a key head."""
        return self.setup.batch * self.rows

    @property
    def room(self) -> tuple[int, int]:
        """Arrays of partial results have one sequence."""
        return 1, self.heads * self.all_rows

    @property
    def merged(self) -> tuple[int, int]:
        """Arrays of results have all sequences."""
        return self.setup.batch, self.heads * self.rows

    @property
    def counts(self) -> set[int]:
        """Number of rows of a tile that may be written."""
        return super().counts | {min(ROWS, self.all_rows), self.all_rows % ROWS or ROWS}

    @property
    def shared_tiles(self) -> int:
        """Tiles of the rows of all sequences."""
        return -(-self.all_rows // ROWS)

    def count(self, block: Any) -> Any:
        """Returns the number of items of a block."""
        own = self.setup.batch * self.tiles * (self.splits - self.shared)
        items = self.heads * (self.shared * self.shared_tiles + own)
        return lax.div(items - 1 - block + self.grid, self.grid)

    def item(self, lengths: Lengths, block: Any, index: Any) -> Item:
        """Returns an item of a block: every second block begins with shared splits, the others end with them.

        Shared splits are compute-bound, others memory-bound; this keeps the memory busy all the time.
        """
        index = jnp.where(lax.rem(block, 2) == 0, index, self.count(block) - 1 - index)
        number = index * self.grid + block
        before = self.heads * self.shared * self.shared_tiles
        is_shared = number < before
        number = jnp.where(is_shared, number, number - before)
        head, number = lax.rem(number, self.heads), lax.div(number, self.heads)
        tiles = jnp.where(is_shared, self.shared_tiles, self.tiles)
        tile, number = lax.rem(number, tiles), lax.div(number, tiles)
        left = jnp.maximum(self.splits - self.shared, 1)
        sequence = jnp.where(is_shared, 0, lax.div(number, left))
        split = jnp.where(is_shared, number, self.shared + lax.rem(number, left))
        block = self.setup.contract.key_block
        length = self.setup.contract.split // block
        first, last = split * length, (split + 1) * length
        whole = Blocks(first, last, first, last, first * block, last * block)
        own = self.blocks(lengths, sequence, tile, split)
        blocks = (jnp.where(is_shared, x, y) for x, y in zip(whole, own, strict=True))
        return Item(sequence, head, tile, split, Blocks(*blocks))

    def place(self, item: Item) -> Place:
        """Returns the position of an item's rows in the partial results."""
        first, is_shared = item.tile * ROWS, item.split < self.shared
        row = item.head * self.all_rows + first + jnp.where(is_shared, 0, item.sequence * self.rows)
        return Place(0, row, jnp.where(is_shared, self.all_rows, self.rows) - first)

    def of_result(self, sequence: Any, row: Any) -> tuple[Any, Any]:
        """Returns the sequence and the row in the partial results for a row of the result."""
        head, row = lax.div(row, self.rows), lax.rem(row, self.rows)
        return 0, head * self.all_rows + sequence * self.rows + row

    def packed(self, query: jax.Array) -> tuple[jax.Array, ...]:
        """Returns queries (B, T, N, H) as the rows of key heads, and concatenated over sequences, (K, rows, H)."""
        setup = self.setup
        shape = (setup.batch, setup.queries, self.heads, setup.group, setup.size)
        rows = jnp.moveaxis(query.reshape(shape), 2, 0).reshape(self.heads, setup.batch, -1, setup.size)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, self.rows - rows.shape[2]), (0, 0)))
        together = rows.reshape(self.heads, -1, setup.size)
        return *super().packed(query), jnp.pad(together, ((0, 0), (0, -self.all_rows % ROWS), (0, 0)))

    def copy_rows(self, packed: Any, item: Item, target: Any, barrier: Any) -> None:
        """Starts the copy of the rows of an item from packed queries into shared memory (64, H)."""
        own, together = packed
        is_shared = item.split < self.shared

        @pl.when(is_shared)
        def _() -> None:
            plgpu.copy_gmem_to_smem(together.at[item.head, pl.ds(item.tile * ROWS, ROWS)], target, barrier)

        @pl.when(jnp.logical_not(is_shared))
        def _() -> None:
            super(Cascade, self).copy_rows((own,), item, target, barrier)


def shared_splits(common_prefix: jax.Array, lengths: Lengths, setup: Setup, page: int | None) -> jax.Array:
    """Returns how many splits all sequences share, (1,) int32.

    Args:
        common_prefix: (1,) int32, leading keys that are the same for all sequences.
        lengths: Limits of each sequence.
        setup: The static parameters of the launch.
        page: Keys of a page (only whole pages are shared); None for a contiguous cache.
    """
    offsets, queries, keys = (lengths.numbers[:, i] for i in range(3))
    seen = jnp.minimum(keys, offsets + (setup.mask_bounds.after + 1))  # seen by all queries of a sequence
    common = lax.div(common_prefix, page or 1) * (page or 1)
    # The minimum comes last: on a GPU, scalar code after it would take a separate kernel.
    shared = lax.div(jnp.clip(jnp.minimum(common, seen), 0, setup.capacity), setup.contract.split)
    return jnp.min(jnp.where(queries > 0, shared, setup.capacity // setup.contract.split), keepdims=True)
