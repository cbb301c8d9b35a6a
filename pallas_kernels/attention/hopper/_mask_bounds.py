"""Which keys a tile of queries sees, from positions: ranges of blocks, and masks of scores."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionOptions

_UNLIMITED: Final = (1 << 30) - 2  # positions are at most one more


class Blocks(NamedTuple):
    """Ranges of key blocks of a tile.

    Attributes:
        first: First block that any query sees.
        last: End of the blocks that any query sees, at least first + 1.
        whole_first: First block that every query sees as a whole.
        whole_last: End of those blocks; may lie before their first.
        start: First key that any query sees.
        end: End of the keys that any query sees; may lie before the first.
    """

    first: Any
    last: Any
    whole_first: Any
    whole_last: Any
    start: Any
    end: Any

    def in_part(self, block: Any) -> Any:
        """Returns whether there may be queries that do not see all of a block."""
        return (block < self.whole_first) | (block >= self.whole_last)


@dataclass(frozen=True)
class MaskBounds:
    """How far a query sees from its own position.

    Attributes:
        before: Keys before it; None for no limit.
        after: Keys after it. There is always a limit: without one Mosaic does not find the layouts of the mask.
        masked: Whether there is a mask besides, which may hide any key.
    """

    before: int | None
    after: int
    masked: bool = False

    @classmethod
    def of(cls, options: AttentionOptions, *, masked: bool = False) -> "MaskBounds":
        """Returns the limits of a causal mask and a window together."""
        before, after = options.window or (_UNLIMITED, _UNLIMITED)
        after = min(after, 0) if options.causal else after
        return cls(before if before < _UNLIMITED else None, min(after, _UNLIMITED), masked)

    def reach(self, queries: int, keys: int) -> int:
        """Returns how many keys of a sequence so many queries see at most."""
        return keys if self.before is None else min(keys, self.before + queries + self.after)

    def blocks(self, first: Any, last: Any, keys: Any, block: int) -> Blocks:
        """Returns the blocks of queries at the positions first ... last, in a sequence of so many keys."""
        zero = jnp.int32(0)
        end = jnp.minimum(keys, last + (self.after + 1))
        whole_end = jnp.minimum(keys, first + (self.after + 1))
        start = zero if self.before is None else jnp.maximum(first - self.before, 0)
        whole_start = zero if self.before is None else jnp.maximum(last - self.before, 0)
        begin = lax.div(start, block)
        stop = jnp.maximum(lax.div(end + (block - 1), block), begin + 1)
        whole_first, whole_last = lax.div(whole_start + (block - 1), block), lax.div(jnp.maximum(whole_end, 0), block)
        return Blocks(begin, stop, stop if self.masked else whole_first, whole_last, start, end)

    def range(self, positions: jax.Array, length: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the first key and the end of the keys that queries see; the end may lie before the first.

        Args:
            positions: Positions of queries, int32.
            length: Keys of the sequence, int32.
        """
        first = positions * 0 if self.before is None else positions - self.before
        return first, jnp.minimum(positions + (self.after + 1), length)
