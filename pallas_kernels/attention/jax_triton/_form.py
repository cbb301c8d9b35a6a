"""What is fixed about a launch: everything that the machine code of a kernel depends on."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.mask_bounds import POSITION_LIMIT
from pallas_kernels.contract import MmaAttentionContract, eight_bit_contract

LOG2E: Final = float(np.float32(np.log2(np.e)))
LN2: Final = float(np.float32(np.log(2)))

_WIDTH: Final = 16  # the narrowest piece of a head
_WIDEST_PIECE: Final = 128

Axes = tuple[bool, bool, bool, bool]


@dataclass(frozen=True)
class Form:
    """The constants of a kernel, apart from its schedule.

    Attributes:
        dtype: Name of the dtype of the queries and of the products.
        size: Width H of a head, a multiple of 16.
        value_size: Width V of a head of the values, a multiple of 16.
        value_stride: Elements from the values of a head to those of the next one: V, or H if they are columns of the
            keys.
        latent: Whether the pieces of the values are the first ones of the keys.
        heads: Key heads K.
        group: Query heads per key head.
        key_block: Keys of a block of the contract.
        split: Keys of a split of the contract, a multiple of `key_block`.
        row_block: Rows of a block of the contract's backward pass.
        factor: Factor of the query-key products, in units of ln(2); with a soft cap, in units of the cap.
        cap: The soft cap, in units of ln(2); None without one.
        scale: Scale of the scores, a factor of the gradients.
        causal: Whether a query sees only positions up to its own.
        before: Keys before its position that a query sees; None for no limit on either side.
        after: Keys after its position that it sees, with `before`.
        whole_blocks: Whether all blocks of keys are within the capacity.
        whole_rows: Whether all blocks of rows are within the rows of a sequence and a key head.
        page: Keys of a page; None for contiguous keys.
        stored: Dtype of 8-bit keys and values, "int8" or "float8_e4m3fn"; None for those of `dtype`.
        bias: Which axes of the bias are longer than 1; None without one.
        mask: The same for the mask.
        slopes: Whether each sequence has slopes of its own; None without any.
        sinks: The same for the sinks.
        value_scale: The same for the scales of the values.
    """

    dtype: str
    size: int
    value_size: int
    value_stride: int
    latent: bool
    heads: int
    group: int
    key_block: int
    split: int
    row_block: int
    factor: float
    cap: float | None
    scale: float
    causal: bool
    before: int | None
    after: int | None
    whole_blocks: bool
    whole_rows: bool
    page: int | None
    stored: str | None
    bias: Axes | None
    mask: Axes | None
    slopes: bool | None
    sinks: bool | None
    value_scale: bool | None

    @property
    def query_heads(self) -> int:
        """Query heads N."""
        return self.heads * self.group

    @property
    def widest_piece(self) -> int:
        """The widest piece of a head that is multiplied at once."""
        return 64 if self.dtype == "float32" else _WIDEST_PIECE

    @property
    def span(self) -> int:
        """The power of two that a split fits into: Triton's tensors have such sizes."""
        return 1 << (self.split - 1).bit_length()

    @property
    def unit(self) -> float:
        """The value that 1 represents in 8-bit keys and values."""
        return 1.0 if self.stored is None else eight_bit_contract(self.stored).unit

    @property
    def exponent_factor(self) -> float:
        """Factor of the scores in the exponents: that of the products if nothing is added to them, 1 otherwise."""
        plain = self.cap is None and self.bias is None and self.slopes is None
        return self.factor if plain and self.factor > 0 else 1.0

    @property
    def hides(self) -> bool:
        """Whether some keys within the mask bounds of a query may be hidden from it."""
        return self.mask is not None


@dataclass(frozen=True)
class Loop:
    """What is fixed about how a program goes through blocks of keys or of rows.

    Attributes:
        rows: Rows of the program; keys, if it goes through rows.
        stages: Blocks that are read ahead.
        splits: Whether the blocks may be of several splits of the keys.
        by_splits: Whether each split has a loop of its own, if they are. In one loop over all blocks, where a branch
            merges two splits, what the rows know of the splits before takes registers in all steps; but blocks of the
            next split are read ahead.
        together: Whether a block's values are awaited with its keys, before the scores.
        scored: Whether the scores are known.
        careful: Whether a number that is not finite makes only those sums nan that it belongs to. Otherwise all are
            taken to be finite.
    """

    rows: int
    stages: int
    splits: bool = False
    by_splits: bool = False
    together: bool = False
    scored: bool = False
    careful: bool = False

    @property
    def with_care(self) -> "Loop":
        """The same once more, after a sum was not finite."""
        return replace(self, stages=1, together=False, careful=True)

    @property
    def of_scores(self) -> "Loop":
        """The same with scores that are known."""
        return replace(self, scored=True)

    @property
    def of_split(self) -> "Loop":
        """The same for blocks of a single split."""
        return replace(self, splits=False)


def form_of(call: AttentionCall, contract: MmaAttentionContract) -> Form:
    """Returns what is fixed about the launches of a call.

    Args:
        call: The call, its heads as wide as whole pieces.
        contract: Its contract.
    """
    options, heads = call.options, call.key.shape[2]
    window = (None, None) if options.window is None else tuple(min(w, POSITION_LIMIT) for w in options.window)
    cap, value_size = options.soft_cap, whole_pieces(call.value_size)
    return Form(
        dtype=call.query.dtype.name,
        size=call.query.shape[3],
        value_size=value_size,
        value_stride=call.query.shape[3] if call.value is None else value_size,
        latent=call.value is None and value_size % _WIDEST_PIECE == 0,
        heads=heads,
        group=call.query.shape[2] // heads,
        key_block=contract.key_block,
        split=contract.split,
        row_block=contract.row_block,
        factor=_rounded(options.scale * LOG2E if cap is None else options.factor),
        cap=None if cap is None else _rounded(cap * LOG2E),
        scale=_rounded(options.scale),
        causal=options.causal,
        before=window[0],
        after=window[1],
        whole_blocks=call.capacity % max(contract.key_block, contract.row_block) == 0,
        whole_rows=call.query.shape[1] * (call.query.shape[2] // heads) % contract.row_block == 0,
        page=None if call.page_table is None else call.key.shape[1],
        stored=None if call.key_scale is None else call.key.dtype.name,
        bias=_axes(call.bias),
        mask=_axes(call.mask),
        slopes=_of_sequences(call.alibi_slopes),
        sinks=_of_sequences(call.sinks),
        value_scale=_of_sequences(call.value_scale),
    )


def whole_pieces(size: int) -> int:
    """Returns the width of a head of whole pieces."""
    return -(-size // _WIDTH) * _WIDTH


def _rounded(x: float) -> float:
    return float(np.float32(x))


def _axes(x: object) -> Axes | None:
    if x is None:
        return None
    b, n, t, s = (size > 1 for size in x.shape)  # type: ignore[attr-defined]
    return b, n, t, s


def _of_sequences(x: object) -> bool | None:
    return None if x is None else x.shape[0] > 1  # type: ignore[attr-defined]
