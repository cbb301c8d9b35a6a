"""Schedules of the attention kernels written in Triton, by the width of a head. None changes a bit."""

import math
from dataclasses import dataclass, replace
from typing import Final

from pallas_kernels.target import HOPPER_MULTIPROCESSORS


@dataclass(frozen=True)
class Tile:
    """What one program takes.

    Attributes:
        rows: Rows of the program; keys, for the gradients of keys and values.
        warps: Its warps.
        stages: Blocks of keys or of rows that are read ahead.
        apart: Whether each split of the keys has a program of its own, which a second kernel needs; forward pass only.
        columns: Columns of the values of a program, if `apart`: the scores of each block of keys have a program of
            their own then, in one more kernel. 0 for programs that compute their scores and have all columns.
        together: Whether the values of a block are awaited with its keys; only in programs of all splits.
        loops: Whether each split has a loop of its own, before which its first blocks are read; only in such programs.
            Otherwise there is one loop with a branch that merges two splits, and what the rows know of those before
            takes registers in all of its steps.
        held: Whether the branch keeps that in an array instead; only in programs of all splits without `loops`.
    """

    rows: int
    warps: int
    stages: int
    apart: bool = False
    columns: int = 0
    together: bool = False
    loops: bool = False
    held: bool = False


@dataclass(frozen=True)
class BackwardTiles:
    """The tiles of the backward pass.

    Attributes:
        queries: Of the gradient of queries.
        keys: Of the gradients of keys and values.
    """

    queries: Tile
    keys: Tile

    @property
    def scores(self) -> Tile:
        """Of the gradient of the scores, which are stored through shared memory: with three stages it would not fit."""
        return replace(self.queries, stages=min(self.queries.stages, 2))


FEW_ROWS: Final = 16
"""Rows of a program where a sequence and a key head have no more: in decode."""

_FULL: Final = 96
"""Programs that use a whole GPU; with fewer, each split of the keys has programs of its own."""

_FEW_PROGRAMS: Final = {2: 32, 4: 64}
"""Programs of a key head and a split each with which, in decode, blocks and columns have programs of their own; by the
bytes of an element."""

_FEW_PROGRAMS_OF_8_BITS: Final = 128
"""The same where keys and values have 8 bits, whose conversion is most of the work."""

_COLUMNS_OF_MERGE: Final = 64
"""Columns of the values of a program that merges splits; half of them for few rows."""


_FEW_BLOCKS: Final = 8
"""Blocks of keys that one program processes in the time that three kernels need to start."""

_SCRATCH_BYTES: Final = 64 << 20
"""The most that is written for splits that are merged later."""

_ROWS_BELOW_TCGEN05: Final = 32
_NARROW: Final = 64
_WIDE: Final = 128
_WIDER: Final = 192
_WIDEST: Final = 256
_LATENTS: Final = 512  # heads that are wider

# By the widest head and the bytes of an element: what fits into the shared memory of an RTX 40.
_MANY: Final = {
    _NARROW: {2: Tile(64, 4, 3), 4: Tile(64, 4, 1)},
    _WIDE: {2: Tile(64, 4, 2), 4: Tile(32, 4, 1)},
    _WIDEST: {2: Tile(32, 8, 1), 4: Tile(32, 8, 1)},
}
# With wgmma, on GPUs that have more shared memory. Measured on an H100: with heads of 128 and 64 rows in a program,
# what is read from the L2 cache is the limit; with heads of 64, a warp that has 32 rows reads half of that.
# With heads of 256, 64 rows and 8 warps, two groups of 4 warps share the rows and exchange their weights.
_MANY_OF_NARROW: Final = Tile(128, 4, 3, together=True, loops=True)
_MANY_OF_NARROW_WITH_OPTIONS: Final = Tile(64, 4, 3)  # biases and masks of 128 rows would spill registers
_MANY_BY_WGMMA: Final = {
    _NARROW: {2: _MANY_OF_NARROW, 4: Tile(64, 4, 1)},
    _WIDE: {2: Tile(128, 8, 3), 4: Tile(64, 4, 1)},
    _WIDER: {2: Tile(128, 8, 3, together=True, held=True), 4: Tile(32, 8, 1)},
    _WIDEST: {2: Tile(128, 8, 2, held=True), 4: Tile(32, 8, 1)},
}
_FEW: Final = {
    _NARROW: {2: Tile(FEW_ROWS, 2, 4), 4: Tile(FEW_ROWS, 4, 2)},
    _WIDE: {2: Tile(FEW_ROWS, 2, 3), 4: Tile(FEW_ROWS, 4, 1)},
    _WIDEST: {2: Tile(FEW_ROWS, 8, 1), 4: Tile(FEW_ROWS, 8, 1)},
}
_FEW_BY_WGMMA: Final = _FEW | {
    _WIDEST: {2: Tile(FEW_ROWS, 4, 3), 4: Tile(FEW_ROWS, 8, 1)},
}
# With programs for columns, by the bytes of an element; and for few programs that convert 8 bits.
_BY_COLUMNS: Final = {2: Tile(FEW_ROWS, 2, 8, True, 32), 4: Tile(FEW_ROWS, 4, 4, True, 32)}
_BY_COLUMNS_OF_8_BITS: Final = Tile(FEW_ROWS, 4, 3, True, 32)
_BACKWARD: Final = {
    _NARROW: {
        2: BackwardTiles(Tile(64, 4, 2), Tile(32, 4, 2)),
        4: BackwardTiles(Tile(64, 4, 1), Tile(32, 4, 1)),
    },
    _WIDE: {
        2: BackwardTiles(Tile(64, 8, 2), Tile(64, 8, 2)),
        4: BackwardTiles(Tile(32, 4, 1), Tile(32, 8, 1)),
    },
    _WIDEST: {
        2: BackwardTiles(Tile(64, 8, 1), Tile(64, 8, 1)),
        4: BackwardTiles(Tile(32, 8, 1), Tile(32, 8, 1)),
    },
}
# The same with wgmma, which needs 64 rows or keys.
_BACKWARD_BY_WGMMA: Final = _BACKWARD | {
    _NARROW: {
        2: BackwardTiles(Tile(128, 8, 3), Tile(64, 4, 2)),
        4: _BACKWARD[_NARROW][4],
    },
    _WIDE: {
        2: BackwardTiles(Tile(128, 8, 3), Tile(64, 4, 2)),
        4: _BACKWARD[_WIDE][4],
    },
}
_ANY_WIDTH: Final = Tile(FEW_ROWS, 4, 1)

_PROGRAMS_OF_LATENTS: Final = 2 * HOPPER_MULTIPROCESSORS
_SCRATCH_BYTES_OF_LATENTS: Final = 256 << 20
_ROWS_OF_LATENTS: Final = 64


def attention_tile(
    size: int,
    item_bytes: int,
    rows: int,
    features: frozenset[str],
    *,
    heads: int,
    splits: int,
    blocks: int,
    stored_in_8_bits: bool = False,
    plain: bool = True,
    latent: bool = False,
) -> Tile:
    """Returns the tile of the forward kernel.

    Args:
        size: Width of a head, or of the values if it is larger.
        item_bytes: Bytes of an element of the queries, 2 or 4.
        rows: Rows of a sequence and a key head.
        features: The instruction families of the GPU.
        heads: Key heads of all sequences.
        splits: Splits of the keys.
        blocks: Blocks of the keys.
        stored_in_8_bits: Whether keys and values have 8 bits.
        plain: Whether scores are products alone, without a cap, a bias, slopes or a mask.
        latent: Whether the values are columns of the keys, read with them.

    Example:
        >>> attention_tile(128, 2, 8192, frozenset({"mma"}), heads=8, splits=4, blocks=64)
        Tile(rows=64, warps=4, stages=2, apart=False, columns=0, together=False, loops=False, held=False)
        >>> attention_tile(128, 2, 4, frozenset({"mma"}), heads=8, splits=8, blocks=128)
        Tile(rows=16, warps=2, stages=3, apart=True, columns=0, together=False, loops=False, held=False)
        >>> attention_tile(128, 2, 4, frozenset({"mma"}), heads=8, splits=2, blocks=32)
        Tile(rows=16, warps=2, stages=8, apart=True, columns=32, together=False, loops=False, held=False)
    """
    if latent and size > _LATENTS and item_bytes == 2:
        stages = 2 if "wgmma" in features or not stored_in_8_bits else 1
        return _latent_tile(size, rows, features, heads=heads, splits=splits, stages=stages)
    if rows > FEW_ROWS:
        tiles = _MANY_BY_WGMMA if "wgmma" in features else _MANY
    else:
        few = _FEW_PROGRAMS_OF_8_BITS if stored_in_8_bits else _FEW_PROGRAMS[item_bytes]
        if size <= _WIDEST and heads * splits <= few and blocks > _FEW_BLOCKS:
            converts = stored_in_8_bits and heads * splits <= _FEW_PROGRAMS_OF_8_BITS // 2
            return _BY_COLUMNS_OF_8_BITS if converts else _BY_COLUMNS[item_bytes]
        tiles = _FEW_BY_WGMMA if "wgmma" in features else _FEW
    chosen = next((by_bytes[item_bytes] for widest, by_bytes in tiles.items() if size <= widest), _ANY_WIDTH)
    tile = _of_one_family(chosen, features)
    programs = heads * -(-rows // tile.rows)
    scratch = 4 * size * heads * rows * splits
    apart = splits > 1 and programs < _FULL and scratch <= _SCRATCH_BYTES
    if not plain and tile == _MANY_OF_NARROW:
        tile = _MANY_OF_NARROW_WITH_OPTIONS
    if stored_in_8_bits:
        # Values that are converted early would take registers.
        tile = replace(tile, together=False, loops=False, held=False)
    if stored_in_8_bits and rows <= FEW_ROWS and programs * (splits if apart else 1) <= HOPPER_MULTIPROCESSORS:
        tile = replace(tile, warps=max(tile.warps, 4))  # a multiprocessor has no other warps that convert
    return replace(tile, apart=apart)


def _latent_tile(size: int, rows: int, features: frozenset[str], *, heads: int, splits: int, stages: int) -> Tile:
    """Returns the tile for latents of 576 elements of 16 bits, measured on an H100.

    What the rows know of the splits before does not fit into registers, so splits have programs of their own as long as
    memory for them suffices.
    """
    tile = Tile(FEW_ROWS, 4, stages)
    if rows > FEW_ROWS and "wgmma" in features:
        fill = heads * -(-rows // _ROWS_OF_LATENTS) * splits > HOPPER_MULTIPROCESSORS
        tile = Tile(_ROWS_OF_LATENTS, 8, 1, held=True) if fill else Tile(_ROWS_OF_LATENTS // 2, 8, stages)
    programs, scratch = heads * -(-rows // tile.rows), 4 * size * heads * rows * splits
    apart = splits > 1 and programs < _PROGRAMS_OF_LATENTS and scratch <= _SCRATCH_BYTES_OF_LATENTS
    return replace(tile, apart=apart)


def merge_tile(rows: int, value_size: int) -> Tile:
    """Returns the tile of the kernel that merges splits, with the columns of a program.

    Args:
        rows: Rows of a sequence and a key head.
        value_size: Width of a head of the values, a multiple of 16.

    Example:
        >>> merge_tile(4, 128)
        Tile(rows=4, warps=1, stages=8, apart=False, columns=32, together=False, loops=False, held=False)
        >>> merge_tile(256, 256)
        Tile(rows=16, warps=4, stages=8, apart=False, columns=64, together=False, loops=False, held=False)
    """
    few = min(FEW_ROWS, 1 << (rows - 1).bit_length())
    columns = math.gcd(value_size, _COLUMNS_OF_MERGE if few == FEW_ROWS else _COLUMNS_OF_MERGE // 2)
    return Tile(few, 4 if few == FEW_ROWS else 1, 8, columns=columns)


def backward_tiles(size: int, item_bytes: int, features: frozenset[str]) -> BackwardTiles:
    """Returns the tiles of the backward kernels.

    Args:
        size: Width of a head, or of the values if it is larger.
        item_bytes: Bytes of an element of the queries, 2 or 4.
        features: The instruction families of the GPU.

    Example:
        >>> backward_tiles(64, 2, frozenset({"mma"})).keys
        Tile(rows=32, warps=4, stages=2, apart=False, columns=0, together=False, loops=False, held=False)
    """
    tiles = _BACKWARD_BY_WGMMA if "wgmma" in features else _BACKWARD
    chosen = next((by_bytes[item_bytes] for widest, by_bytes in tiles.items() if size <= widest), None)
    if chosen is None:
        chosen = BackwardTiles(_ANY_WIDTH, _ANY_WIDTH)
    return BackwardTiles(_of_one_family(chosen.queries, features), _of_one_family(chosen.keys, features))


def _of_one_family(tile: Tile, features: frozenset[str]) -> Tile:
    """Returns the tile with as few rows as keep Triton from tcgen05: smaller products, as in decode, use mma.sync."""
    return replace(tile, rows=min(tile.rows, _ROWS_BELOW_TCGEN05)) if "tcgen05" in features else tile
