"""What the kernels of the forward pass know before they run, and how they find the numbers of a sequence."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.hopper._keys import KeySource
from pallas_kernels.attention.hopper._mask_bounds import MaskBounds
from pallas_kernels.attention.hopper._scores import Scoring
from pallas_kernels.contract import SplitAttentionContract

FAST: Final = plgpu.CompilerParams(
    approx_math=True,
    reduction_scratch_bytes=0,  # no reduction crosses warps
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
)
"""How the kernels are compiled."""


@dataclass(frozen=True)
class Setup:
    """The static parameters of a launch.

    Attributes:
        contract: Order of the sums.
        scoring: From products to scores.
        mask_bounds: The mask bounds.
        source: Where keys come from.
        batch: Sequences.
        queries: Queries of each, padded to a multiple of 8.
        heads: Query heads.
        group: Query heads per key head.
        size: Width of a head.
        value_size: The same for the values.
        capacity: Most keys of a sequence.
        unit: Unit of 8-bit keys and values, as `EightBitContract` says; 1 for others.
        interpret: False, or parameters of Mosaic's interpreter.
    """

    contract: SplitAttentionContract
    scoring: Scoring
    mask_bounds: MaskBounds
    source: KeySource
    batch: int
    queries: int
    heads: int
    group: int
    size: int
    value_size: int
    capacity: int
    unit: float
    interpret: Any

    def leads_outside(self, table: Any, sequence: Any, keys: Any) -> jax.Array | None:
        """Returns whether the page table of a sequence leads outside of the cache; None without pages."""
        return None if table is None else self.source.leads_outside(table, sequence, keys, bool(self.interpret))


class Lengths(NamedTuple):
    """Numbers of each sequence: position of the first query, queries, keys.

    They lie in one array, since an array of equal numbers, as those of one kind often are, is filled by a kernel. Where
    the queries are negative, what the caller gave was out of range, and all results of the sequence are nan.

    Attributes:
        numbers: (B, 3) int32, an array or a reference.
    """

    numbers: Any

    @classmethod
    def within(cls, limits: Any, queries: int, keys: int) -> "Lengths":
        """Returns the numbers (B, 3) of sequences, of no more queries and keys than there are."""
        most = np.array([[np.iinfo(np.int32).max, queries, keys]], np.int32)
        return cls(jnp.minimum(jnp.asarray(limits, jnp.int32), most))

    @property
    def offsets(self) -> "_Column":
        """Position of the first query of each sequence."""
        return _Column(self.numbers, 0)

    @property
    def queries(self) -> "_Column":
        """Queries of each sequence."""
        return _Column(self.numbers, 1)

    @property
    def keys(self) -> "_Column":
        """Keys of each sequence."""
        return _Column(self.numbers, 2)


class _Column(NamedTuple):
    """A number of each sequence."""

    numbers: Any
    place: int

    def __getitem__(self, sequence: Any) -> Any:
        return self.numbers[sequence, self.place]
