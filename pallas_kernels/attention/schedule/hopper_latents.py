"""Schedules of latent attention on a Hopper GPU, as data; the bits do not depend on them."""

from dataclasses import dataclass
from typing import Any, Final

from pallas_kernels.attention.schedule.hopper import takes_scores
from pallas_kernels.schedule.hopper.tiles import SMS

LATENT_SIZES: Final = (576, 512)
"""Columns of a latent, and those of them that are its value, with a kernel of their own."""

_ARRAYS: Final = frozenset(("page_table", "common_prefix"))
_ROWS: Final = 64  # of a tile
_BUSY: Final = 0.9  # of the blocks, over the rounds of whole items
_WHOLE_SPLITS: Final = 8  # more would leave a long sequence to a few blocks
_MANY_ROUNDS: Final = 4  # of whole tiles, of which some may then be longer than others
_FEW_TILES: Final = 4  # of a sequence; with more, latents come from the L2 cache
_SPLIT_BYTES: Final = 256 << 20  # most bytes of partial results of splits
_NARROW: Final = 16  # rows of a tile of spread attention
_SPREAD: Final = 32  # most splits of all such tiles: more keep the multiprocessors busy with whole splits
_FEW_SPLITS: Final = 16  # of all such tiles: with more, scores that are read less often matter more than short chains


@dataclass(frozen=True)
class LatentSchedule:
    """Tiles of 64 rows of latent attention, each with one split of the keys or with all of them.

    Attributes:
        whole: Whether an item has all keys of a tile, so that there are no splits to merge.
        stages: Stages of keys.
        blocks: Most blocks.
        ahead: Whether the scores of a block are started before the left half of the values of the block before it are
            there, whose right half then waits until the scores are.
        registers: Registers of a thread that computes and of one that copies.
        spread: 64 or 128 if kernels of their own compute the scores, a thread block for each block of keys, and the
            values of splits, a thread block for each so many columns; the other attributes are of no use then. Else 0.
    """

    whole: bool = False
    stages: int = 2
    blocks: int = SMS
    ahead: bool = False
    registers: tuple[int, int] = (240, 24)
    spread: int = 0


def takes_latents(call: Any) -> bool:
    """Returns whether the kernel of latents takes a call; neither the batch nor the size of the cache decides it."""
    options, dtype = call.options, call.query.dtype
    return (
        call.value is None
        and (call.query.shape[3], call.value_size) == LATENT_SIZES
        and call.key.shape[2] == 1
        and call.key.dtype == dtype
        and dtype.name in ("bfloat16", "float16")
        and options.window is None
        and options.soft_cap is None
        and takes_scores(options.scale, None)
        and _ARRAYS.issuperset(call.present)
    )


def latent_schedule(batch: int, rows: int, splits: int) -> LatentSchedule:
    """Returns the schedule of latent attention.

    Args:
        batch: Sequences.
        rows: Rows of each: queries times heads.
        splits: Splits of the keys.

    Example:
        >>> latent_schedule(8, 128, 8)
        LatentSchedule(whole=False, stages=2, blocks=132, ahead=False, registers=(240, 24), spread=0)
        >>> latent_schedule(1, 2048 * 16, 2).ahead
        True
        >>> latent_schedule(1, 16, 4).spread, latent_schedule(8, 16, 4).spread
        (64, 128)
    """
    narrow_splits = batch * -(-rows // _NARROW) * splits
    if narrow_splits <= _SPREAD:
        return LatentSchedule(spread=64 if narrow_splits <= _FEW_SPLITS else 128)
    of_sequence = -(-rows // _ROWS)
    tiles, scratch = batch * of_sequence, 4 * batch * rows * splits * LATENT_SIZES[1]
    rounds = -(-tiles // SMS)
    fill = tiles >= _BUSY * rounds * SMS and (splits <= _WHOLE_SPLITS or rounds > _MANY_ROUNDS)
    whole = splits == 1 or fill or scratch > _SPLIT_BYTES
    return LatentSchedule(whole=whole, ahead=of_sequence > _FEW_TILES)
