"""Where the sums of a tree over chains of a tile wait in a block: in registers, or in memory."""

from typing import Final, NamedTuple

from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

_THREADS: Final = 128
_REGISTERS: Final = {1: 192, 2: 192, 3: 96}
"""Registers of a thread for sums, the accumulators included, by number of warpgroups that multiply."""
_BYTES: Final = 4


class LeafLevels(NamedTuple):
    """How many sums of a whole tree over chains wait, and where.

    Attributes:
        together: Chains that are summed together, each in its own accumulator: 1 or 2.
        in_registers: Levels of the tree whose sums wait in registers.
        in_memory: Levels above them, whose sums wait in memory.
    """

    together: int
    in_registers: int
    in_memory: int


def leaf_levels(chains: int, tile: int, warpgroups: int) -> LeafLevels:
    """Returns where sums wait.

    Args:
        chains: Number of chains, a power of two.
        tile: Elements of a warpgroup's tile.
        warpgroups: Number of warpgroups that multiply.

    Example:
        >>> leaf_levels(8, 64 * 128, 2), leaf_levels(8, 64 * 64, 2)
        (LeafLevels(together=2, in_registers=1, in_memory=1), LeafLevels(together=2, in_registers=2, in_memory=0))
    """
    tiles = _REGISTERS[warpgroups] * _THREADS // tile
    together = 2 if tiles > 1 and chains > 1 else 1
    levels = (chains // together).bit_length() - 1
    in_registers = min(max(0, tiles - 2), levels)
    return LeafLevels(together, in_registers, levels - in_registers)


def waiting_bytes(s: MatmulSchedule, chains: int) -> int:
    """Returns the memory of a block in which sums of a whole tree wait."""
    tile = s.tile_rows * s.tile_columns
    return leaf_levels(chains, tile, s.warpgroups).in_memory * s.warpgroups * tile * _BYTES


def shared_bytes(s: MatmulSchedule, chains: int, itemsize: int, out_itemsize: int) -> int:
    """Returns the shared memory of a block in which the sums that wait lie where the result is stored from."""
    stage = (s.block_rows + s.block_columns) * s.k_step * itemsize
    result = s.buffer_bytes(itemsize, out_itemsize) - s.stages * stage
    return s.shared_bytes(itemsize, out_itemsize) + max(0, waiting_bytes(s, chains) - result)
