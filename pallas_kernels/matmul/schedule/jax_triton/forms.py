"""Tiles of gradients of weights, of 8-bit operands and of split K."""

from dataclasses import replace
from typing import Any, Final

from pallas_kernels.matmul.schedule.jax_triton.product import (
    HEIGHTS,
    SMALL,
    Candidate,
    dividing,
    fastest,
    height_of,
    tensor_core_tile,
)
from pallas_kernels.matmul.schedule.jax_triton.tile import SplitTile, Tile

GRADIENT: Final = Tile(128, 128, 32, 8, 4)
"""For gradients of groups that wgmma sums, but the largest."""

FLOAT8: Final = Candidate(Tile(128, 128, 64, 8, 3), 1.0)
"""For many rows of float8, in addition to those for fewer: two accumulators have to stay in registers."""

SPLIT: Final = SplitTile(16, 16, 128, 4, 4)
"""For few rows and split K."""

_SHORT_GRADIENT: Final = 128
_MOST_ROWS_OF_COLUMNS: Final = 64


def group_gradient_tile(
    k: int, n: int, *, depth: int, shared_memory: int, features: frozenset[str], stack: int = 1
) -> Tile:
    """Returns the tile of gradients of the weights of groups, from 16-bit rows.

    It is that of a product, except on GPUs with wgmma for tiles of 128 columns and for short sums: these read 32 rows
    at once, which is faster there.

    Args:
        k: Rows of the gradient.
        n: Columns of the gradient.
        depth: Mean length of the sums.
        shared_memory: Bytes of shared memory of a program.
        features: The GPU's instruction families.
        stack: Number of groups.

    Example:
        >>> hopper = {"shared_memory": 232448, "features": frozenset({"mma", "wgmma"}), "stack": 64}
        >>> group_gradient_tile(2048, 768, depth=1024, **hopper).columns
        256
        >>> group_gradient_tile(2048, 768, depth=64, **hopper)
        Tile(rows=128, columns=128, depth=32, warps=8, stages=4, group=8)
    """
    options: Any = {"itemsize": 2, "shared_memory": shared_memory, "features": features, "stack": stack}
    tile = tensor_core_tile(k, n, depth=depth, **options)
    of_128 = tile.rows == HEIGHTS[-1] and "wgmma" in features
    if of_128 and (tile.columns == 128 or depth <= _SHORT_GRADIENT):
        return GRADIENT.fitted(2, shared_memory)
    return tile


def float8_tile(m: int, n: int, block: int, *, shared_memory: int, features: frozenset[str], stack: int = 1) -> Tile:
    """Returns the tile of a product of float8 operands, whose depth is a block of the sum.

    Tiles of fewer than 64 rows are multiplied by another instruction than others where the GPU has wgmma, which would
    change bits: there, all tiles have at least 64 rows.

    Args:
        m: Number of rows.
        n: Number of columns.
        block: Elements of a block of the sum.
        shared_memory: Bytes of shared memory of a program.
        features: The GPU's instruction families.
        stack: Entries of a stack.

    Example:
        >>> float8_tile(3, 4096, 128, shared_memory=232448, features=frozenset({"mma", "wgmma"})).rows
        64
    """
    height = max(height_of(m, features), 64 if "wgmma" in features else 0)
    among = [c for c in (FLOAT8, *SMALL) if min(height, 64) <= c.tile.rows <= height]
    tile = replace(fastest(among, m, n, stack, features), depth=block)
    while tile.shared_bytes(1) > shared_memory and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def reads_columns(rows: int) -> bool:
    """Returns whether to read (K, N) weights of int8 in place; otherwise their transpose is copied.

    The tensor core reads integers along K, so the kernel rearranges each tile: for few rows faster than a copy.

    Example:
        >>> reads_columns(8), reads_columns(4096)
        (True, False)
    """
    return rows <= _MOST_ROWS_OF_COLUMNS


def split_tile(
    m: int, n: int, splits: int, length: int, *, shared_memory: int, features: frozenset[str]
) -> Tile | SplitTile:
    """Returns the tile of a product of 16-bit operands with split K.

    With few rows the parts of K are summed at the same time, which reads the weights faster; with many, one after the
    other, where a part has the speed of a product.

    Args:
        m: Number of rows.
        n: Number of columns.
        splits: Parts of K.
        length: Elements of a part.
        shared_memory: Bytes of shared memory of a program.
        features: The GPU's instruction families.

    Example:
        >>> ampere = {"shared_memory": 166912, "features": frozenset({"mma"})}
        >>> split_tile(8, 1280, 4, 2048, **ampere)
        SplitTile(rows=16, columns=16, depth=128, warps=4, stages=4, group=8)
        >>> split_tile(1024, 1280, 4, 2048, **ampere)
        Tile(rows=64, columns=64, depth=64, warps=4, stages=4, group=8)
    """
    if m <= SPLIT.rows and splits in (2, 4):
        return replace(dividing(SPLIT, length), warps=splits).fitted(2, shared_memory)
    options: Any = {"depth": length, "itemsize": 2, "shared_memory": shared_memory, "features": features}
    return tensor_core_tile(m, n, **options, products=2)  # two or three sums have to stay in registers
