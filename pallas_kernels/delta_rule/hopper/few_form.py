"""What the kernel for at most 8 tokens on Hopper depends on, and the arrays that it reads and writes."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

CHUNK: Final = 64
LANES: Final = 32
STEPS: Final = 4
"""Products of a chain over the rows of a chunk."""
WARPS: Final = 4
"""Warps of a block."""
TILES: Final = 2
"""Tiles of 8 rows of the chunk, or of 8 columns of T, of a warp."""
_WIDEST: Final = 4  # tiles of a warp whose part of the state does not fit into its registers


@dataclass(frozen=True)
class Form:
    """What the machine code depends on.

    Attributes:
        tokens: Tokens of a sequence in the arrays.
        key_heads: J.
        value_heads: H.
        tiles: Tiles of 8 columns of a warp: 1, 2 or 4.
        in_slots: Whether what is kept is in slots.
        scale: Factor of the outputs.
        least: Smallest gate.
        size: Columns of keys and of values.
    """

    tokens: int
    key_heads: int
    value_heads: int
    tiles: int
    in_slots: bool
    scale: float
    least: float
    size: int = 128

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return 8 * self.tiles * WARPS

    @property
    def held(self) -> bool:
        """Whether a lane has its part of the state in registers. Otherwise the state is copied to shared memory."""
        return self.tiles < _WIDEST

    @property
    def parts(self) -> int:
        """Blocks of a head."""
        return self.size // self.columns

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def pitch(self) -> int:
        """Words of a row of the state in shared memory; rows that a warp reads at once have no bank in common."""
        return self.columns + 4

    @property
    def exchanged(self) -> int:
        """Where in shared memory warps exchange words."""
        return self.size * self.pitch

    @property
    def words(self) -> int:
        """Words of shared memory."""
        return self.pairs + self.size // 16 * 4 * LANES

    @property
    def pairs(self) -> int:
        """Where in shared memory the operands of keys and queries are."""
        return self.exchanged + 8 * STEPS * LANES


class Arrays(NamedTuple):
    """Arrays in GPU memory; shapes as for `portable.gated_delta_rule_extend`."""

    query: Any
    key: Any
    value: Any
    g: Any
    beta: Any
    edge: Any
    start: Any
    lengths: Any
    slots: Any
    state: Any
    kept_key: Any
    residual: Any
    inverse: Any
    decay: Any
    out: Any
    new_edge: Any
