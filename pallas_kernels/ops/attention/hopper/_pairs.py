"""What a call gives for pairs of a query and a key: a bias, which is added to their score, and a mask."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.call import AttentionCall
from pallas_kernels.parts.hopper.band import WORD
from pallas_kernels.parts.hopper.placed import packed_bits, rows_at, words_at


@dataclass(frozen=True)
class Pairs:
    """The bias and the mask of the rows of a tile.

    Attributes:
        bias: (N or 1, T or 1, keys or 1) in GPU memory, of the sequence; None without one.
        mask: (N or 1, T or 1, keys / 32 or 1) int32, bits as `packed_bits` makes them; None without one.
        heads: Returns the query head of each row, (64,) int32, or () if all have one.
        queries: Returns the query of each row, (64,) int32.
        interpret: Whether Mosaic's interpreter runs the kernel.
    """

    bias: Any
    mask: Any
    heads: Callable[[], jax.Array]
    queries: Callable[[], jax.Array]
    interpret: bool

    @classmethod
    def of(
        cls,
        refs: AttentionCall,
        sequence: Any,
        heads: Callable[[], jax.Array],
        queries: Callable[[], jax.Array],
        interpret: bool,
    ) -> "Pairs | None":
        """Returns those of a sequence; None if there are none.

        Args:
            refs: A call of references, with the bias and the mask as `_operands.prepared` makes them.
            sequence: Index of the sequence.
            heads: As the attribute.
            queries: As the attribute.
            interpret: As the attribute.
        """
        given: tuple[Any, Any] = refs.bias, refs.mask
        if all(x is None for x in given):
            return None
        bias, mask = (None if x is None else x.at[sequence if x.shape[0] > 1 else 0] for x in given)
        return cls(bias, mask, heads, queries, interpret)

    def biases(self, start: Any, count: int) -> jax.Array | None:
        """Returns the biases of the keys start ... start + count, (64, count); None without any."""
        if self.bias is None:
            return None
        return rows_at(self.bias, self._places(self.bias), self._within(start, count, self.bias), count, self.interpret)

    def words(self, start: Any, count: int) -> tuple[jax.Array, ...]:
        """Returns the bits of the mask for the keys start ... start + count, (64,) for each 32; none without a mask."""
        if self.mask is None:
            return ()
        start, count = start // WORD, count // WORD
        return words_at(
            self.mask, self._places(self.mask), self._within(start, count, self.mask), count, self.interpret
        )

    def _places(self, ref: Any) -> jax.Array:
        """Returns the row of each row of the tile, or the only one; a row that is no query has that of the last one."""
        heads, queries = ref.shape[:2]
        if heads == queries == 1:
            return jnp.int32(0)
        if queries == 1:
            return self.heads()
        place = jnp.minimum(self.queries(), queries - 1)
        return self.heads() * queries + place if heads > 1 else place

    @staticmethod
    def _within(start: Any, count: int, ref: Any) -> Any:
        """Returns a start that leaves room: the block of a query that sees no key may lie behind the end."""
        return jnp.minimum(start, max(ref.shape[2] - count, 0))


def bits_of_mask(mask: jax.Array, block: int) -> jax.Array:
    """Returns a mask (B or 1, N or 1, T or 1, S or 1) of booleans as bits for whole blocks of keys."""
    if mask.shape[3] == 1:
        return jnp.where(mask, jnp.int32(-1), jnp.int32(0))
    return packed_bits(with_whole_blocks(mask, block))


def with_whole_blocks(x: jax.Array, block: int) -> jax.Array:
    """Returns an array (B or 1, N or 1, T or 1, S or 1) with zeros up to a whole block of keys."""
    if x.shape[3] == 1:
        return x
    return jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % block)])
