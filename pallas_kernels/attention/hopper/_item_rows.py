"""The rows of an item of decode, inside the kernel: what they read, and their loop over the keys."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._byte_key_loop import ByteKeyLoop, LeftRing
from pallas_kernels.attention.hopper._factors import factors_of, scale_rows, scaled_rows
from pallas_kernels.attention.hopper._items import Item
from pallas_kernels.attention.hopper._key_loop import KeyLoop
from pallas_kernels.attention.hopper._online import Stats, of_queries, result
from pallas_kernels.attention.hopper._ring import Ring
from pallas_kernels.attention.hopper._score_operands import ScoreOperands, TileRows
from pallas_kernels.attention.hopper._setup import Lengths, Setup
from pallas_kernels.attention.hopper._swapped_key_loop import SwappedKeyLoop
from pallas_kernels.attention.hopper.bytes_left import scale_queries
from pallas_kernels.attention.hopper.columns import COLUMN, COLUMNS
from pallas_kernels.parts.hopper.products import WIDEST
from pallas_kernels.parts.hopper.tile import ROW, ROWS, Arithmetic

_WIDEST_OF_FOUR: Final = 128  # columns of an instruction; where there are four warpgroups, ptxas takes no wider ones


@dataclass(frozen=True)
class ItemRows:
    """The rows of an item, inside the kernel.

    Attributes:
        setup: The static parameters of the launch.
        refs: The arrays of the call.
        item: The item.
        slot: Where its queries lie.
        position: Pipeline position of its first block.
    """

    setup: Setup
    refs: AttentionCall
    item: Item
    slot: Any
    position: Any

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs in Mosaic's interpreter."""
        return bool(self.setup.interpret)

    @property
    def lengths(self) -> Lengths:
        """Limits of each sequence."""
        return Lengths(self.refs.limits)

    @property
    def keys(self) -> Any:
        """Keys of the sequence."""
        return self.lengths.keys[self.item.sequence]

    def query(self, row: jax.Array) -> jax.Array:
        """Returns the query to which a row of the tile belongs."""
        return lax.div(self.item.tile * ROWS + row, jnp.full_like(row, self.setup.group))

    def queries_of_rows(self) -> jax.Array:
        """Returns the query of each row, (64,) int32."""
        return self.query(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW))

    def heads_of_rows(self) -> jax.Array:
        """Returns the query head of each row, (64,) int32."""
        row = self.item.tile * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        return self.item.head * self.setup.group + lax.rem(row, jnp.full_like(row, self.setup.group))

    def positions(self, count: int, layout: Any) -> jax.Array:
        """Returns the positions of the queries of the first rows, (count,) int32."""
        rows = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)
        return self.lengths.offsets[self.item.sequence] + self.query(rows)

    def of_rows(self, numbers: Any) -> jax.Array | None:
        """Returns numbers (B or 1, heads, rows) of each row, (64,), or None."""
        if numbers is None:
            return None
        item = self.item
        sequence, rows = item.sequence if numbers.shape[0] > 1 else 0, pl.ds(item.tile * ROWS, ROWS)
        return plgpu.load(numbers.at[sequence, item.head, rows], layout=ROW, optimized=False)

    def factors(self, of_all: Any) -> Any:
        """Returns the factors of the key head's columns, in GPU memory."""
        return factors_of(of_all, self.item.sequence, self.item.head)

    def walk_as_columns(
        self, queries: Any, ring: Any, shared: Any, after_scores: Callable[[], None]
    ) -> tuple[tuple[jax.Array, ...], Stats]:
        """Loops over the keys with the rows as wgmma's columns."""
        form: Callable[..., SwappedKeyLoop] = SwappedKeyLoop
        if isinstance(ring, LeftRing):
            scale_queries(queries, self.factors(self.refs.key_scale), self.setup.unit, self.interpret)
            form = ByteKeyLoop
        return form(
            factor=self.setup.scoring.factor,
            mask_bounds=self.setup.mask_bounds,
            positions=lambda: self.positions(COLUMNS, COLUMN),
            length=self.keys,
            blocks=self.item.blocks,
            queries=queries,
            ring=ring,
            position=self.position,
            shared=shared,
            after_scores=after_scores,
            interpret=self.interpret,
        ).run()

    def key_loop(
        self, queries: Any, ring: Ring, spilled: Any, after_scores: Callable[[], None]
    ) -> tuple[jax.Array, Stats]:
        """Loops over the keys with the rows as wgmma's rows."""
        refs, setup = self.refs, self.setup
        if refs.key_scale is not None:
            scale_rows(queries, self.factors(refs.key_scale), setup.unit, self.interpret)
        rows = TileRows(self.item.sequence, self.heads_of_rows, self.queries_of_rows, self.of_rows, self.interpret)
        return KeyLoop(
            contract=setup.contract,
            scoring=setup.scoring,
            mask_bounds=setup.mask_bounds,
            positions=lambda: self.positions(ROWS, ROW),
            operands=ScoreOperands.of(refs, rows),
            length=self.keys,
            blocks=self.item.blocks,
            queries=queries,
            ring=ring,
            position=self.position,
            spilled=spilled,
            after_scores=after_scores,
            interpret=self.interpret,
            widest=WIDEST if refs.key_scale is None else _WIDEST_OF_FOUR,
        ).run()

    def results(self, values: jax.Array, stats: Stats, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the outputs of the rows and their log-sum-exp, of values and stats of all keys."""
        refs, sequence = self.refs, self.item.sequence
        queries = self.queries_of_rows()
        wrong = self.setup.leads_outside(refs.page_table, sequence, self.keys)
        stats = of_queries(stats, queries, self.lengths.queries[sequence], wrong)
        values, lse = result(values, stats, self.of_rows(refs.sinks), Arithmetic(interpret=self.interpret))
        if refs.value_scale is None:
            return values.astype(dtype), lse
        return scaled_rows(values, self.factors(refs.value_scale), self.setup.unit, dtype, self.interpret), lse
