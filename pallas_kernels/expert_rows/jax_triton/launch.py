"""The layout of expert rows on NVIDIA GPUs: for few rows, one Triton kernel compares each row with all others."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, honour
from pallas_kernels.expert_rows.jax_triton.kernels import count_kernel, place_kernel, sort_kernel, spread_kernel
from pallas_kernels.expert_rows.jax_triton.sum_kernel import add_found_kernel, add_searched_kernel
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.parts.xla.last_and_first import last_and_first_rows
from pallas_kernels.parts.xla.tiles import next_power_of_two
from pallas_kernels.schedule.jax_triton.routing import (
    COPIED,
    MOST_PAIRS,
    MOST_PLACED,
    PAIR_TILE,
    SEARCHED,
    copies_rows,
    copy_warps,
    piece_columns,
    pieces_at_once,
    sum_tile,
)
from pallas_kernels.target import Target

Arrays = tuple[jax.Array, ...]

_FEW: Final = f"at least one row, and at most {MOST_PAIRS} pairs of them"
_MOST_EXPERTS: Final = 1024
_MOST_SPREAD: Final = 1024  # each of which is compared with all others
_MOST_TOKENS: Final = 65535  # of a grid
_MOST_ADDED: Final = 64
_ADDED: Final = {"float32", "bfloat16", "float16"}


def _serves_sort(number: Any, *, first: int, end: int, allocated: int, **_: Any) -> bool:
    longest, experts = max(number.size, allocated), end - first
    few = max(longest, experts) * number.size <= MOST_PAIRS
    return bool(min(number.size, allocated, experts) > 0 and few and longest * (experts + 1) < 1 << 30)


@served_if(_serves_sort, _FEW)
@in_32_bits
def sort_by_expert(number: jax.Array, *, first: int, end: int, allocated: int, target: Target, topk: int = 1) -> Arrays:
    """Equal to `portable.sort_by_expert`."""
    given, experts = number.size, end - first
    offset, expert, count, fit, place, row, token = _launch(
        sort_kernel,
        number,
        blocks=_blocks(max(given, allocated)) + _blocks(experts),
        sizes=[allocated, allocated, experts, 1, given, given, allocated],
        target=target,
        constants={
            "GIVEN": given,
            "ALLOCATED": allocated,
            "FIRST": first,
            "END": end,
            "TOPK": topk,
            "CHUNK": PAIR_TILE.chunk,
        },
    )
    return offset, expert, count, fit[0] != 0, place, row, token


def _serves_spread(x: Any, number: Any, *, experts: int, topk: int, **_: Any) -> bool:
    given, columns = number.size, x.shape[1]
    return bool(
        0 < given <= _MOST_SPREAD
        and given == x.shape[0] * topk
        and 0 < experts <= _MOST_EXPERTS
        and x.dtype.name in COPIED
        and copies_rows(columns, x.dtype.itemsize)
    )


@served_if(_serves_spread, f"1 to {_MOST_SPREAD} places, 1 to {_MOST_EXPERTS} experts, and rows of whole pieces")
@in_32_bits
def spread_to_experts(x: jax.Array, number: jax.Array, *, experts: int, topk: int, target: Target) -> Arrays:
    """Equal to `portable.spread_to_experts`: each place finds its row by itself, and copies its token there."""
    given, (_, columns) = number.size, x.shape
    ints = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (experts, given))
    out, count, row = launch(
        spread_kernel,
        x,
        number,
        target=target,
        out=[jax.ShapeDtypeStruct((given, columns), x.dtype), *ints],
        grid=(given + _blocks(experts),),
        warps=copy_warps(columns, x.dtype.itemsize),
        stages=1,
        fuses=False,
        constants={
            "GIVEN": given,
            "EXPERTS": experts,
            "TOPK": topk,
            "COLUMNS": columns,
            "PIECE": piece_columns(columns, x.dtype.itemsize),
            "GROUP": pieces_at_once(columns, x.dtype.itemsize),
            "ITEMS": PAIR_TILE.items,
            "CHUNK": PAIR_TILE.chunk,
        },
    )
    return out, count, row


def _serves_counts(count: Any, *, rows: int, **_: Any) -> bool:
    return bool(0 < count.size <= _MOST_EXPERTS and rows > 0 and count.size * (rows + 1) < 1 << 31)


@served_if(_serves_counts, f"at least one row and 1 to {_MOST_EXPERTS} experts")
@in_32_bits
def rows_by_count(count: jax.Array, *, rows: int, target: Target) -> Arrays:
    """Equal to `portable.rows_by_count`."""
    constants = {"ROWS": rows, "EXPERTS": count.size, "SLOTS": next_power_of_two(count.size)}
    expert, fit = _launch(
        count_kernel, count, blocks=_blocks(rows), sizes=[rows, 1], target=target, constants=constants
    )
    return expert, fit[0] != 0


def _serves_places(offset: Any, *, places: int, **_: Any) -> bool:
    return bool(min(offset.size, places) > 0 and offset.size * places <= MOST_PLACED)


@served_if(_serves_places, f"at least one row, and at most {MOST_PLACED} pairs of them")
@in_32_bits
def rows_of_tokens(offset: jax.Array, *, places: int, target: Target) -> jax.Array:
    """Equal to `portable.rows_of_tokens`."""
    (row,) = _launch(
        place_kernel,
        offset,
        blocks=_blocks(places),
        sizes=[places],
        target=target,
        constants={"GIVEN": offset.size, "PLACES": places, "CHUNK": PAIR_TILE.chunk},
    )
    return row


def _serves_sums(rows: Any, offset: Any, row: Any, weights: Any, *, dtype: str, **_: Any) -> bool:
    tokens, topk = weights.shape
    return bool(
        min(rows.size, offset.size, tokens, topk) > 0
        and rows.shape[0] == offset.size
        and tokens <= _MOST_TOKENS
        and topk <= _MOST_ADDED
        and {x.dtype.name for x in (rows, weights)} | {dtype} <= _ADDED
    )


@served_if(
    _serves_sums, f"float32, bfloat16 or float16, 1 to {_MOST_TOKENS} tokens of 1 to {_MOST_ADDED} places, and rows"
)
@in_32_bits
def add_expert_rows(
    rows: jax.Array,
    offset: jax.Array,
    row: jax.Array,
    weights: jax.Array,
    *,
    dtype: str,
    target: Target,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> jax.Array:
    """Bit-identical to `portable.add_expert_rows`; it finds the rows by itself, in the offsets.

    Guarantee: row-invariant, a row being a token.
    """
    honour("add_expert_rows", functions, XLA_FUNCTIONS)
    del row
    (tokens, topk), columns = weights.shape, rows.shape[1]
    places, tile = tokens * topk, sum_tile(offset.size)
    options: dict[str, Any] = {
        "target": target,
        "out": [jax.ShapeDtypeStruct((tokens, columns), dtype)],
        "grid": (-(-columns // tile.piece), tokens),
        "warps": tile.warps,
        "stages": 1,
        "fuses": False,
    }
    constants = {"PLACES": places, "TOPK": topk, "COLUMNS": columns, "PIECE": tile.piece}
    if offset.size <= SEARCHED:
        constants |= {"GIVEN": offset.size, "SLOTS": next_power_of_two(topk)}
        constants |= {"CHUNK": next_power_of_two(min(offset.size, tile.chunk))}
        (y,) = launch(add_searched_kernel, rows, offset, weights, **options, constants=constants)
    else:
        found = last_and_first_rows(offset, places=places)
        (y,) = launch(add_found_kernel, rows, found, weights, **options, constants=constants)
    return y


def _blocks(items: int) -> int:
    return -(-items // PAIR_TILE.items)


def _launch(
    kernel: Any,
    array: jax.Array,
    *,
    blocks: int,
    sizes: list[int],
    target: Target,
    constants: dict[str, int],
) -> Arrays:
    return launch(
        kernel,
        array,
        target=target,
        out=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes],
        grid=(blocks,),
        warps=PAIR_TILE.warps,
        stages=1,
        fuses=False,
        constants=constants | {"ITEMS": PAIR_TILE.items},
    )
