"""How a warp merges the splits of its row: their factors side by side, then their values in ascending order."""

from dataclasses import dataclass
from typing import Any, Final, Self

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels.attention.hopper._online import Factors, Stats, factors_of_split
from pallas_kernels.contract import LEAST
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, number_of, with_element, with_number
from pallas_kernels.parts.hopper.tile import Arithmetic, across, i32, thread_of_warpgroup

MERGED_ROWS: Final = 4
"""Rows of a block."""

WIDEST: Final = 256
"""Most columns of a block: TMA copies no more at once."""

WARP: Final = 32
_MOST: Final = 128  # splits whose factors are found side by side
TOGETHER: Final = 16
"""Splits whose values are copied together."""

_COPIED_BYTES: Final = 192 * 1024  # at once


def padded_splits(splits: int) -> int:
    """Returns for how many splits there must be room for maxima and totals."""
    width = _side_by_side(splits)
    return -(-splits // width) * width


def _side_by_side(splits: int) -> int:
    return next((width for width in (WARP, 2 * WARP) if splits <= width), _MOST)


def _layout(columns: int) -> Any:
    """Returns the layout of (4, columns) in which a warp has a row, and a lane neighbouring columns of it."""
    width = next(width for width in (128, 64, 32) if columns % width == 0)
    tiling = fragmented_array.Tiling(((MERGED_ROWS, width), (width // WARP,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


@dataclass(frozen=True)
class Form:
    """What is fixed about a merge.

    Attributes:
        splits: Splits that there is room for.
        size: Width of a head of the values.
        interpret: Whether the kernel runs in Mosaic's interpreter.
        most: Most splits whose values are copied together, a power of two.
    """

    splits: int
    size: int
    interpret: bool
    most: int = TOGETHER

    @property
    def layout(self) -> Any:
        """Layout of a tile (4, H)."""
        return _layout(self.size)

    @property
    def rows(self) -> Any:
        """Layout of a number for each row."""
        return self.layout.reduce(1)

    @property
    def width(self) -> int:
        """Splits whose factors are found side by side."""
        return _side_by_side(self.splits)

    @property
    def together(self) -> int:
        """Splits whose values are copied together."""
        return min(self.most, self.splits)

    @property
    def stages(self) -> int:
        """Copies that shared memory has room for."""
        room = _COPIED_BYTES // (4 * self.together * MERGED_ROWS * self.size)
        return min(-(-self.splits // self.together), room)

    def scratch(self) -> list[Any]:
        """Returns the types of the stages and of their barriers."""
        return [
            plgpu.SMEM((self.stages, self.together, MERGED_ROWS, self.size), jnp.float32),
            plgpu.Barrier(num_barriers=self.stages),
        ]

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """Returns a tile, or a number for each row."""
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), self.layout if len(shape) == 2 else self.rows)


@dataclass(frozen=True)
class MergeLoop:
    """The loop of a block over the splits of its rows, in groups that are copied together.

    Attributes:
        form: The static parameters.
        values: Reference of the values.
        stats: Reference of maxima and totals.
        sequence: Index of their sequence.
        part: Indices of the rows.
        begin: The first split that was computed.
        stop: The end of them.
        origin: The split at which the first group starts.
        groups: Number of groups.
        copied: The stages.
        arrived: Their barriers.
    """

    form: Form
    values: Any
    stats: Any
    sequence: Any
    part: Any
    begin: Any
    stop: Any
    origin: Any
    groups: Any
    copied: Any
    arrived: Any

    @classmethod
    def of(cls, form: Form, values: Any, stats: Any, rows: tuple[Any, Any], span: tuple[Any, Any], memory: Any) -> Self:
        """Returns the loop for rows (sequence, part) over a span of splits (first, end)."""
        (begin, stop), together = span, form.together
        origin = lax.div(begin, form.width) * form.width
        groups = jnp.where(stop > begin, lax.div(stop - origin + (together - 1), together), 0)
        (sequence, part), (copied, arrived) = rows, memory
        return cls(
            form=form,
            values=values,
            stats=stats,
            sequence=sequence,
            part=part,
            begin=begin,
            stop=stop,
            origin=origin,
            groups=groups,
            copied=copied,
            arrived=arrived,
        )

    def begin_copies(self) -> None:
        """Starts the first copies, which `run` waits for."""
        pl.loop(0, self.form.stages)(self._copy)

    def run(self) -> tuple[Stats, jax.Array]:
        """Returns the stats of all splits, and their values (4, H)."""
        form, width = self.form, self.form.width
        start = form.full((MERGED_ROWS,), LEAST), form.full((MERGED_ROWS,), 0), form.full((MERGED_ROWS, form.size), 0)
        rounds = jnp.where(self.stop > self.begin, lax.div(self.stop - self.origin + (width - 1), width), 0)
        maximum, sums, total = lax.fori_loop(0, rounds, self._side_by_side, start)
        return Stats(maximum, sums), total

    def _start_of(self, number: Any) -> Any:
        """Returns where the copy of a group starts: the last one ends with the last split there is."""
        return jnp.minimum(self.origin + number * self.form.together, self.form.splits - self.form.together)

    def _copy(self, number: Any) -> None:
        """Starts to copy a group, if there is one of that number."""

        @pl.when(number < self.groups)
        def _() -> None:
            slot = lax.rem(number, self.form.stages)
            window = self.values.at[self.sequence, pl.ds(self._start_of(number), self.form.together), self.part]
            plgpu.copy_gmem_to_smem(window, self.copied.at[slot], self.arrived.at[slot])

    def _side_by_side(self, i: Any, carry: Any) -> Any:
        """Takes the splits whose factors are found side by side."""
        maximum, sums, total = carry
        form = self.form
        first = self.origin + i * form.width
        maximum, factors = self._find_factors(first, maximum)
        math = Arithmetic(form.layout, form.interpret)

        def several(k: Any, carry: Any) -> Any:
            """Takes the splits that were copied together; those outside change nothing."""
            sums, total = carry
            there = self._take(i * (form.width // form.together) + k, first + k * form.together)
            for j, found in enumerate(there):
                split = first + k * form.together + j
                kept, taken, totals = (_picked(x, sums, k, form.together, j, form.interpret) for x in factors)
                inside = jnp.full((MERGED_ROWS,), (split >= self.begin) & (split < self.stop))
                found = jnp.where(across(inside, form.size), found, 0.0)
                sums = math.fused(sums, kept, totals)
                total = math.fused(total, across(kept, form.size), math.product(found, across(taken, form.size)))
            return sums, total

        left = jnp.minimum(self.stop - first, form.width)
        groups = lax.div(left + (form.together - 1), form.together)
        sums, total = lax.fori_loop(0, groups, several, (sums, total))
        return maximum, sums, total

    def _find_factors(self, first: Any, maximum: jax.Array) -> tuple[jax.Array, Factors]:
        """Returns the maximum with the splits from one on, and their factors."""
        form, layout = self.form, _layout(self.form.width)
        split = first + plgpu.broadcasted_iota(jnp.int32, (MERGED_ROWS, form.width), 1, layout=layout)
        inside = (split >= self.begin) & (split < self.stop)
        maxima, totals = (
            plgpu.load(
                self.stats.at[self.sequence, i, self.part, pl.ds(first, form.width)], layout=layout, optimized=False
            )
            for i in range(2)
        )
        here = Stats(jnp.where(inside, maxima, LEAST), jnp.where(inside, totals, 0.0))
        before = _largest_before(here.maximum, maximum, form.width, form.interpret)
        _, factors = factors_of_split(before, here, Arithmetic(layout, form.interpret))
        return jnp.maximum(maximum, plgpu.layout_cast(here.maximum.max(axis=1), form.rows)), factors

    def _take(self, number: Any, first: Any) -> list[jax.Array]:
        """Returns the values of a group that starts with split `first`, and starts the copy that takes its place."""
        form = self.form
        slot, shift = lax.rem(number, form.stages), first - self._start_of(number)
        plgpu.barrier_wait(self.arrived.at[slot])
        places = [jnp.minimum(shift + j, form.together - 1) for j in range(form.together)]
        there = [plgpu.load(self.copied.at[slot, place], layout=form.layout, optimized=False) for place in places]

        @pl.when(number + form.stages < self.groups)
        def _() -> None:
            plgpu.commit_smem()  # every warp has read what is copied over
            self._copy(number + form.stages)

        return there


def _largest_before(maxima: jax.Array, start: jax.Array, width: int, interpret: bool) -> jax.Array:
    """Returns the largest number to the left of each column, `start` (4,) among them, of (4, width)."""
    if interpret:
        left = jnp.concatenate([start[:, None], maxima[:, :-1]], axis=1)
        return lax.cummax(left, axis=1)
    layout, row = _layout(width), _layout(width).reduce(1)
    result = held((MERGED_ROWS, width), layout)

    @inline(layout, row, result=result)
    def scan(maxima: Any, start: Any) -> Any:
        registers = maxima.registers.copy()
        (register,) = registers.flat
        own = [element(register, i) for i in range(width // WARP)]
        largest = own[0]
        for number in own[1:]:
            largest = arith.maximumf(largest, number)
        for distance in (1, 2, 4, 8, 16):  # a lane without one so far to its left has its own number again
            largest = arith.maximumf(largest, _from_left(largest, distance))
        lane = arith.remui(thread_of_warpgroup(), i32(WARP))
        first = arith.cmpi(arith.CmpIPredicate.eq, lane, i32(0))
        begin = number_of(start.registers.flat[0])
        before = arith.select(first, begin, arith.maximumf(begin, _from_left(largest, 1)))
        for i, number in enumerate(own):
            register = with_element(register, i, before)
            before = arith.maximumf(before, number)
        registers.flat[0] = register
        return fragmented(registers, maxima.layout)

    return scan(maxima, plgpu.layout_cast(start, row))


def _picked(tile: jax.Array, like: jax.Array, group: Any, together: int, index: int, interpret: bool) -> jax.Array:
    """Returns a column of (4, width), the one at `index` of a group of so many, with the layout of `like` (4,)."""
    width = tile.shape[1]
    if interpret:
        return lax.dynamic_slice_in_dim(tile, group * together + index, 1, axis=1)[:, 0]
    layout, row = _layout(width), _layout(like.shape[0] * WARP).reduce(1)
    result = held((MERGED_ROWS,), row)
    neighbours = width // WARP

    @inline(layout, row, plgpu.Layout.WG_SPLAT(()), result=result)
    def pick(tile: Any, like: Any, group: Any) -> Any:
        number = mgpu.utils.bitcast(element(tile.registers.flat[0], index % neighbours), i32(0).type)
        lane = arith.addi(arith.muli(group.registers.item(), i32(together // neighbours)), i32(index // neighbours))
        found = nvvm.shfl_sync(i32(-1), number, lane, i32(WARP - 1), nvvm.ShflKind.idx)
        registers = like.registers.copy()
        number = mgpu.utils.bitcast(found, ir.F32Type.get())
        registers.flat[0] = with_number(registers.flat[0], number)
        return fragmented(registers, like.layout)

    return pick(tile, like, jnp.asarray(group, jnp.int32))


def _from_left(number: Any, distance: int) -> Any:
    """Returns the float32 number of the lane so far to the left, the lane's own one where there is none."""
    bits = mgpu.utils.bitcast(number, i32(0).type)
    return mgpu.utils.bitcast(nvvm.shfl_sync(i32(-1), bits, i32(distance), i32(0), nvvm.ShflKind.up), number.type)
