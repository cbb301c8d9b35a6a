"""The layout of expert rows on an NVIDIA GPU: for few rows, one kernel compares each row with all others."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.no_row import NO_ROW, WRONG
from pallas_kernels.parts.pallas_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.schedule.pallas_triton.routing import MOST_PAIRS, PAIR_TILE

Arrays = tuple[jax.Array, ...]

_FEW: Final = f"at least one row, and at most {MOST_PAIRS} pairs of them"
_MOST_EXPERTS: Final = 1024


def _serves_sort(number: Any, *, first: int, end: int, allocated: int, **_: Any) -> bool:
    longest, experts = max(number.size, allocated), end - first
    few = max(longest, experts) * number.size <= MOST_PAIRS
    return bool(min(number.size, allocated, experts) > 0 and few and longest * (experts + 1) < 1 << 30)


@served_if(_serves_sort, _FEW)
@in_32_bits
def sort_by_expert(number: jax.Array, *, first: int, end: int, allocated: int, interpret: bool = False) -> Arrays:
    """Equal to `portable.sort_by_expert`; `interpret` runs the kernel on a CPU.

    Example:
        >>> offset, expert, count, fit, place = sort_by_expert(
        ...     jnp.array([1, 0, 2, 1]), first=1, end=3, allocated=4, interpret=True
        ... )
        >>> offset.tolist(), expert.tolist(), count.tolist(), bool(fit), place.tolist()
        ([0, 3, 2, -1], [0, 0, 1, 2], [2, 1], True, [0, 3, 2, 1])
    """
    given, experts, tile = number.size, end - first, PAIR_TILE
    longest = max(given, allocated)
    of_places, of_experts = pl.cdiv(longest, tile.items), pl.cdiv(experts, tile.items)

    def local(numbers: Any, place: jax.Array) -> jax.Array:
        there = place < given
        read = plt.load(numbers.at[jnp.where(there, place, 0)], mask=there, other=end)
        return jnp.where((read >= first) & (read < end), read - first, experts)

    def kernel(numbers: Any, offset: Any, expert: Any, count: Any, fit: Any, places: Any) -> None:
        block = pl.program_id(0)

        @pl.when(block < of_places)
        def _() -> None:
            place = _items(block)
            mine = local(numbers, place)
            key = mine * longest + place  # ties are broken by place

            def add(other: jax.Array, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                theirs = local(numbers, other)
                # Padding sorts last.
                before = (theirs * longest + other)[None, :] < key[:, None]
                used = jnp.where(theirs < experts, 1, 0)
                return totals[0] + _count(before, 1), totals[1] + jnp.sum(used)

            row, used = _over(given, add, (jnp.zeros((tile.items,), jnp.int32), jnp.int32(0)))
            # Padding was not counted.
            row = jnp.where(place < given, row, place)
            there = (place < longest) & (row < allocated)
            plt.store(offset.at[row], jnp.where(mine < experts, place, NO_ROW), mask=there)
            plt.store(expert.at[row], mine, mask=there)
            plt.store(places.at[row], place, mask=place < given)

            @pl.when(block == 0)
            def _() -> None:
                fit[0] = jnp.where(used <= allocated, 1, 0)

        @pl.when(block >= of_places)
        def _() -> None:
            mine = _items(block - of_places)
            total = _over(
                given,
                lambda other, total: total + _count(local(numbers, other)[None, :] == mine[:, None], 1),
                jnp.zeros((tile.items,), jnp.int32),
            )
            plt.store(count.at[mine], total, mask=mine < experts)

    offset, expert, count, fit, places = _launch(
        kernel, number, of_places + of_experts, [allocated, allocated, experts, 1, given], interpret
    )
    return offset, expert, count, fit[0] != 0, places


def _serves_counts(count: Any, *, rows: int, **_: Any) -> bool:
    return bool(0 < count.size <= _MOST_EXPERTS and rows > 0 and count.size * (rows + 1) < 1 << 31)


@served_if(_serves_counts, f"at least one row and 1 to {_MOST_EXPERTS} experts")
@in_32_bits
def rows_by_count(count: jax.Array, *, rows: int, interpret: bool = False) -> Arrays:
    """Equal to `portable.rows_by_count`; `interpret` runs the kernel on a CPU.

    Example:
        >>> expert, fit = rows_by_count(jnp.array([1, 0, 2]), rows=4, interpret=True)
        >>> expert.tolist(), bool(fit)
        ([0, 2, 2, 3], True)
    """
    experts = count.size

    def kernel(counts: Any, expert: Any, fit: Any) -> None:
        block = pl.program_id(0)
        number = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(experts),), 0)
        there = number < experts
        read = plt.load(counts.at[jnp.where(there, number, 0)], mask=there, other=0)
        ends = jnp.cumsum(jnp.where((read >= 0) & (read <= rows), read, rows + 1))
        fits = jnp.max(ends) <= rows
        row = _items(block)
        passed = there[None, :] & (jnp.where(fits, ends, 0)[None, :] <= row[:, None])
        plt.store(expert.at[row], _count(passed, 1), mask=row < rows)

        @pl.when(block == 0)
        def _() -> None:
            fit[0] = jnp.where(fits, 1, 0)

    expert, fit = _launch(kernel, count, pl.cdiv(rows, PAIR_TILE.items), [rows, 1], interpret)
    return expert, fit[0] != 0


def _serves_places(offset: Any, *, places: int, **_: Any) -> bool:
    return bool(min(offset.size, places) > 0 and offset.size * places <= MOST_PAIRS)


@served_if(_serves_places, _FEW)
@in_32_bits
def rows_of_tokens(offset: jax.Array, *, places: int, interpret: bool = False) -> jax.Array:
    """Equal to `portable.rows_of_tokens`; `interpret` runs the kernel on a CPU.

    Example:
        >>> rows_of_tokens(jnp.array([2, -1, 0, 2]), places=3, interpret=True).tolist()
        [2, -1, -2]
    """
    given = offset.size

    def kernel(offsets: Any, rows: Any) -> None:
        place = _items(pl.program_id(0))

        def add(other: jax.Array, totals: Arrays) -> Arrays:
            there = other < given
            read = plt.load(offsets.at[jnp.where(there, other, 0)], mask=there, other=NO_ROW)
            mine = read[None, :] == place[:, None]
            largest = jnp.max(jnp.where(mine, other[None, :], NO_ROW), axis=1)
            behind = jnp.sum(jnp.where(read >= places, 1, 0))
            return jnp.maximum(totals[0], largest), totals[1] + _count(mine, 1), totals[2] + behind

        nothing = jnp.zeros((PAIR_TILE.items,), jnp.int32)
        start: Arrays = (nothing + NO_ROW, nothing, jnp.int32(0))
        row, number, behind = _over(given, add, start)
        found = jnp.where((number > 1) | (behind > 0), WRONG, row)
        plt.store(rows.at[place], found, mask=place < places)

    (row,) = _launch(kernel, offset, pl.cdiv(places, PAIR_TILE.items), [places], interpret)
    return row


def _items(block: Any) -> jax.Array:
    """Returns the indices of a block's items."""
    return block * PAIR_TILE.items + lax.broadcasted_iota(jnp.int32, (PAIR_TILE.items,), 0)


def _count(where: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(jnp.where(where, 1, 0), axis=axis)


def _over[T](number: int, add: Callable[[jax.Array, T], T], start: T) -> T:
    """Folds over `number` items, a chunk at a time; the last chunk may extend past the end."""
    chunk = lax.broadcasted_iota(jnp.int32, (PAIR_TILE.chunk,), 0)
    return lax.fori_loop(
        0, pl.cdiv(number, PAIR_TILE.chunk), lambda i, total: add(i * PAIR_TILE.chunk + chunk, total), start
    )


def _launch(kernel: Callable[..., None], array: jax.Array, blocks: int, sizes: list[int], interpret: bool) -> Arrays:
    return launch(
        kernel,
        array,
        blocks=blocks,
        out=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes],
        warps=PAIR_TILE.warps,
        stages=1,
        interpret=interpret,
    )
