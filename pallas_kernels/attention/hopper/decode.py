"""Attention of a few queries: the heads that share a key head packed into a tile of 64 rows.

A row takes the steps of the kernel for many queries. An item is a tile with all of its keys, as there; or with one
split of them, so that a few sequences keep all blocks busy, and `merge` does with the splits what that kernel does in
one block. Items are bound by memory: a warpgroup computes, another copies, blocks loop over the items. With
`schedule.swap` a tile has at most 8 rows, which are wgmma's columns. `_decode_launch` has the launches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import OF_HEADS, AttentionCall
from pallas_kernels.attention.hopper import _decode_launch
from pallas_kernels.attention.hopper._byte_key_loop import LeftRing
from pallas_kernels.attention.hopper._byte_ring import ByteRing
from pallas_kernels.attention.hopper._decode_results import Results, store_columns, store_rows
from pallas_kernels.attention.hopper._item_rows import ItemRows
from pallas_kernels.attention.hopper._items import Item, Items
from pallas_kernels.attention.hopper._merge_loop import padded_splits
from pallas_kernels.attention.hopper._ring import Ring
from pallas_kernels.attention.hopper._scratch import Scratch
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.hopper._swap import check_swap
from pallas_kernels.attention.hopper.merge import merge
from pallas_kernels.parts.hopper.stages import await_free, drain


@dataclass(frozen=True)
class Body(Items):
    """The kernel's program."""

    def produce(
        self,
        worker: Any,
        refs: AttentionCall,
        scratch: Any,
        fill: Callable[[Item, Any], None],
        ring: Ring | ByteRing | LeftRing,
    ) -> None:
        """Fetches the rows and the blocks of all items of a worker.

        Args:
            worker: Its number in its block of the grid.
            refs: The arrays of the call, with the rows that `packed` returns as queries.
            scratch: Where the rows go.
            fill: Fills a ring with the blocks of an item from a position on.
            ring: The ring.
        """
        first, worker = 2 * worker, self.number(worker)
        lengths = Lengths(refs.limits)

        def fetch(index: Any, carry: Any) -> Any:
            position, done = carry
            item = self.item(lengths, worker, index)
            some = item.blocks.last > item.blocks.first

            @pl.when(some)
            def _() -> None:
                slot = first + lax.rem(done, 2)
                await_free(done, 2, scratch.queries_free.at[slot])
                self.copy_rows(refs.query, item, scratch.queries.at[slot], scratch.queries_full.at[slot])

            fill(item, position)
            return position + jnp.maximum(item.blocks.last - item.blocks.first, 0), done + jnp.where(some, 1, 0)

        position, done = lax.fori_loop(0, self.count(worker), fetch, (jnp.int32(0), jnp.int32(0)))
        ring.drain(position)
        drain((scratch.queries_free,), 2, done, lambda index: first + lax.rem(index, 2))

    def widen(self, values: bool, refs: AttentionCall, stored: ByteRing, ring: Ring) -> None:
        """Makes keys, or values, of the bytes of all items of this block of the grid.

        Args:
            values: Whether values.
            refs: The arrays of the call.
            stored: The bytes.
            ring: Where keys and values go.
        """
        worker, lengths = self.number(0), Lengths(refs.limits)
        make, free = (stored.widen_values, ring.values_free) if values else (stored.widen_keys, ring.keys_free)

        def one(index: Any, position: Any) -> Any:
            item = self.item(lengths, worker, index)
            make(item.blocks, position, ring)
            return position + jnp.maximum(item.blocks.last - item.blocks.first, 0)

        filled = lax.fori_loop(0, self.count(worker), one, jnp.int32(0))
        drain((free,), ring.stages, filled)

    def compute(
        self, worker: Any, refs: AttentionCall, results: Results, scratch: Scratch, ring: Ring | LeftRing
    ) -> None:
        """Computes all items of a worker, given by its number in its block of the grid."""
        first, worker = 2 * worker, self.number(worker)
        lengths = Lengths(refs.limits)

        def one(index: Any, carry: Any) -> Any:
            position, done = carry
            item = self.item(lengths, worker, index)
            some = item.blocks.last > item.blocks.first

            @pl.when(some)
            def _() -> None:
                self.one_item(
                    ItemRows(self.setup, refs, item, first + lax.rem(done, 2), position), results, scratch, ring
                )

            return position + jnp.maximum(item.blocks.last - item.blocks.first, 0), done + jnp.where(some, 1, 0)

        lax.fori_loop(0, self.count(worker), one, (jnp.int32(0), jnp.int32(0)))

    def one_item(self, rows: ItemRows, results: Results, scratch: Scratch, ring: Any) -> None:
        """Loops over the keys of a tile of rows and stores what they give."""
        place = self.place(rows.item)
        target = results.of(place, rows.item.split, self.schedule.whole)
        queries = scratch.queries.at[rows.slot]
        plgpu.barrier_wait(scratch.queries_full.at[rows.slot])

        def after_scores() -> None:
            plgpu.barrier_arrive(scratch.queries_free.at[rows.slot])

        if scratch.shared is not None:
            columns, stats = rows.walk_as_columns(queries, ring, scratch.shared, after_scores)
            of_bytes = isinstance(ring, LeftRing)
            store_columns(target.values, target.numbers, place, columns, stats, self.rows, rows.interpret, of_bytes)
            return
        values, stats = rows.key_loop(queries, ring, scratch.spilled, after_scores)
        numbers: tuple[jax.Array, ...] = stats
        if self.schedule.whole:
            values, lse = rows.results(values, stats, results.values.dtype)
            numbers = (lse,)
        store_rows(target.values, target.numbers, place, values, numbers, self.counts, rows.interpret)


def decode(call: AttentionCall, body: Body) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel and, unless its items have all keys, the merge of its splits.

    Args:
        call: The call as `_score_operands.prepared` returns it, S of a contiguous cache a multiple of 8. Its
            `common_prefix` is the number of splits that are shared, for a `Cascade`, and None for others.
        body: The kernel's program.

    Returns:
        The outputs (B, T, N, V), and the log-sum-exp (B, T, N), float32.

    Raises:
        UnsupportedError: If the schedule does not fit the call.
    """
    s, setup, dtype = body.schedule, body.setup, call.query.dtype
    check_swap(body, call)
    fp8 = call.key.dtype == jnp.float8_e4m3fn
    if fp8:
        key, value = (lax.bitcast_convert_type(x, jnp.int8) for x in (call.key, call.values))
        call = replace(call, key=key, value=value)
    sinks = call.sinks
    call = call if s.whole else replace(call, sinks=None)
    of_heads: dict[str, Any] = {name: body.of_tiles(getattr(call, name)) for name in OF_HEADS}
    call = replace(call, **of_heads)
    sequences, padded = body.room
    if s.whole:
        outputs = [
            jax.ShapeDtypeStruct((sequences, padded, setup.value_size), dtype),
            jax.ShapeDtypeStruct((sequences, padded), jnp.float32),
        ]
    else:
        outputs = [
            jax.ShapeDtypeStruct((sequences, body.splits, padded, setup.value_size), jnp.float32),
            jax.ShapeDtypeStruct((sequences, 2, padded, padded_splits(body.splits)), jnp.float32),
        ]
    run = _decode_launch.run_bytes if s.swap and call.key.dtype == jnp.int8 else _decode_launch.run
    packed: Any = body.packed(call.query)
    out, lse = run(replace(call, query=packed), body=body, fp8=fp8, outputs=outputs)
    if not s.whole:
        if sinks is not None:
            of_rows = body.of_rows(sinks, body.rows)
            sinks = jnp.pad(of_rows, ((0, 0), (0, body.merged[1] - of_rows.shape[1])))
        out, lse = merge(
            out,
            lse,
            replace(call, sinks=sinks),
            setup=setup,
            rows=body.rows,
            dtype=dtype,
            splits_of=body.splits_seen,
            room=body.merged,
            place_of=body.of_result,
        )
    return body.unpacked(out), body.unpacked(lse)
