"""The optional arrays that change scores, from the call to the rows of a tile: slopes of heads, a bias, a mask."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper._scores import in_bits
from pallas_kernels.attention.hopper.band import WORD
from pallas_kernels.attention.hopper.placed import packed_bits, rows_at, words_at


def prepared(call: AttentionCall, block: int) -> AttentionCall:
    """Returns a call with scores and slopes in units of ln(2), and bias and mask (in bits) for whole blocks of keys."""
    ready: dict[str, Callable[[jax.Array], jax.Array]] = {
        "alibi_slopes": in_bits,
        "sinks": in_bits,
        "bias": lambda bias: _with_whole_blocks(bias, block),
        "mask": lambda mask: _bits_of_mask(mask, block),
    }
    made: dict[str, Any] = {name: f(getattr(call, name)) for name, f in ready.items() if name in call.present}
    return replace(call, **made)


@dataclass(frozen=True)
class TileRows:
    """The rows of a tile, 64 of one sequence.

    Attributes:
        sequence: Index of the sequence.
        heads: Returns the query head of each row, (64,) int32, or () if all have one.
        queries: Returns the query of each row, (64,) int32.
        numbers: Returns what an array of `OF_HEADS` holds for each row, (64,); None for None.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """

    sequence: Any
    heads: Callable[[], jax.Array]
    queries: Callable[[], jax.Array]
    numbers: Callable[[Any], jax.Array | None]
    interpret: bool


@dataclass(frozen=True)
class ScoreOperands:
    """What the rows of a tile add to their scores, and the mask.

    Attributes:
        slope: (64,) float32, times log2(e); None without slopes.
        bias: (N or 1, T or 1, keys or 1) in GPU memory, of the sequence; None without one.
        mask: (N or 1, T or 1, keys / 32 or 1) int32, bits as `packed_bits` makes them; None without one.
        rows: The rows.
    """

    slope: jax.Array | None
    bias: Any
    mask: Any
    rows: TileRows

    @classmethod
    def of(cls, refs: AttentionCall, rows: TileRows) -> "ScoreOperands":
        """Returns those of the rows of a tile, of a call of references to what `prepared` returned."""
        given: tuple[Any, Any] = refs.bias, refs.mask
        bias, mask = (None if x is None else x.at[rows.sequence if x.shape[0] > 1 else 0] for x in given)
        return cls(rows.numbers(refs.alibi_slopes), bias, mask, rows)

    @property
    def is_added(self) -> bool:
        """Whether anything is added to scores."""
        return self.slope is not None or self.bias is not None

    def biases(self, start: Any, count: int) -> jax.Array | None:
        """Returns the biases of the keys start ... start + count, (64, count); None without any."""
        if self.bias is None:
            return None
        return rows_at(
            self.bias, self._places(self.bias), self._within(start, count, self.bias), count, self.rows.interpret
        )

    def words(self, start: Any, count: int) -> tuple[jax.Array, ...]:
        """Returns the bits of the mask for the keys start ... start + count, (64,) for each 32; none without a mask."""
        if self.mask is None:
            return ()
        start, count = start // WORD, count // WORD
        return words_at(
            self.mask, self._places(self.mask), self._within(start, count, self.mask), count, self.rows.interpret
        )

    def _places(self, ref: Any) -> jax.Array:
        """Returns the row of each row of the tile, or the only one; a row that is no query has that of the last one."""
        heads, queries = ref.shape[:2]
        if heads == queries == 1:
            return jnp.int32(0)
        if queries == 1:
            return self.rows.heads()
        place = jnp.minimum(self.rows.queries(), queries - 1)
        return self.rows.heads() * queries + place if heads > 1 else place

    @staticmethod
    def _within(start: Any, count: int, ref: Any) -> Any:
        """Returns a start that leaves room: the block of a query that sees no key may lie after the end."""
        return jnp.minimum(start, max(ref.shape[2] - count, 0))


def _bits_of_mask(mask: jax.Array, block: int) -> jax.Array:
    """Returns a mask (B or 1, N or 1, T or 1, S or 1) of booleans as bits for whole blocks of keys."""
    if mask.shape[3] == 1:
        return jnp.where(mask, jnp.int32(-1), jnp.int32(0))
    return packed_bits(_with_whole_blocks(mask, block))


def _with_whole_blocks(x: jax.Array, block: int) -> jax.Array:
    """Returns an array (B or 1, N or 1, T or 1, S or 1) with zeros up to a whole block of keys."""
    if x.shape[3] == 1:
        return x
    return jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % block)])
