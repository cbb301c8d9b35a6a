"""Reductions of rows in Triton kernels, in the order of `RowContract`: one row per program.

A row is read in blocks of the contract's lanes. Each lane adds its columns in order; then neighbouring lanes are added
by the contract's two trees. Every step of a tree adds two numbers, so the order in which Triton reduces an axis of two
elements does not matter.
"""

from typing import Any, Final

import triton
import triton.language as tl

from pallas_kernels.contract import RowContract

_LANES_OF_A_WARP: Final = 256
_MOST_WARPS: Final = 16


def sizes(columns: int, contract: RowContract) -> dict[str, Any]:
    """Returns the constants of a kernel for rows of some columns: COLUMNS, LANES and BLOCKS."""
    lanes = contract.lanes(columns)
    return {"COLUMNS": columns, "LANES": lanes, "BLOCKS": -(-columns // lanes)}


def warps(columns: int, contract: RowContract) -> int:
    """Returns the warps of a program.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> [warps(columns, row_contract()) for columns in (77, 1024, 128256)]
        [1, 4, 16]
    """
    return min(_MOST_WARPS, max(1, contract.lanes(columns) // _LANES_OF_A_WARP))


@triton.jit
def places(row, block, COLUMNS: tl.constexpr, LANES: tl.constexpr):
    """Returns the columns of a block, and their offsets in an array of rows."""
    columns = block * LANES + tl.arange(0, LANES)
    return columns, row.to(tl.int64) * COLUMNS + columns


@triton.jit
def add_lanes(lanes, LANES: tl.constexpr):
    """Adds the lanes: groups of 128 neighbours by a halving tree, then the groups by another."""
    GROUPS: tl.constexpr = LANES // 128
    x = tl.reshape(lanes, (GROUPS, 128))
    x = tl.sum(tl.reshape(x, (GROUPS, 2, 64)), axis=1)
    x = tl.sum(tl.reshape(x, (GROUPS, 2, 32)), axis=1)
    x = tl.sum(tl.reshape(x, (GROUPS, 2, 16)), axis=1)
    x = tl.sum(tl.reshape(x, (GROUPS, 2, 8)), axis=1)
    x = tl.sum(tl.reshape(x, (GROUPS, 2, 4)), axis=1)
    x = tl.sum(tl.reshape(x, (GROUPS, 2, 2)), axis=1)
    x = tl.sum(tl.reshape(x, (GROUPS, 2)), axis=1)
    if GROUPS >= 64:
        x = _halved(x, 64)
    if GROUPS >= 32:
        x = _halved(x, 32)
    if GROUPS >= 16:
        x = _halved(x, 16)
    if GROUPS >= 8:
        x = _halved(x, 8)
    if GROUPS >= 4:
        x = _halved(x, 4)
    return tl.sum(x, axis=0)  # of one or two


@triton.jit
def mean_of(lanes, COLUMNS: tl.constexpr, LANES: tl.constexpr):
    """Returns the sum of the lanes divided by the number of columns, rounded correctly."""
    return tl.div_rn(add_lanes(lanes, LANES), tl.full((), COLUMNS, tl.float32))


@triton.jit
def _halved(x, SIZE: tl.constexpr):
    return tl.sum(tl.reshape(x, (2, SIZE // 2)), axis=0)
