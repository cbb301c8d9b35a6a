"""Schedules of attention on a Hopper GPU, as data; the bits do not depend on them."""

from dataclasses import dataclass
from typing import Final

from pallas_kernels.attention.schedule.gradient_order import GradientOrder
from pallas_kernels.schedule.hopper.tiles import SMS

SWAPPED_ROWS: Final = 8
"""Most rows of a tile for which keys are wgmma's rows."""

WIDEST_SPILLED: Final = 128
"""Widest heads for whose values shared memory has room in addition to the stages while other splits are computed."""

_SCALES: Final = (2.0**-100, 2.0**100)
_HIGHEST_CAP: Final = 1024.0
_PREFILL_STAGES: Final = {(64, 64): 4, (96, 96): 3, (128, 128): 2, (192, 128): 2, (192, 192): 3, (256, 256): 2}
_DECODE_STAGES: Final = {(64, 64): 6, (96, 96): 4, (128, 128): 3, (192, 128): 4, (192, 192): 3, (256, 256): 2}
_WHOLE_STAGES: Final = {(64, 64): 4, (96, 96): 3, (128, 128): 2}  # in addition to spilled splits
_WHOLE_SPLITS: Final = 8  # more would leave a long sequence to a few blocks
_BUSY: Final = 0.9  # of the blocks, over the rounds of whole items
_BYTE_STAGES: Final = {
    (64, 64): (4, 4),
    (96, 96): (2, 4),
    (128, 128): (2, 2),
    (192, 128): (2, 4),
    (192, 192): (2, 3),
    (256, 256): (1, 3),
}
_LEFT_STAGES: Final = {(64, 64): (4, 3), (128, 128): (2, 2)}  # for one worker, and per worker for two
_LEFT_REGISTERS: Final = (216, 40, 0)
_SWAPPED_STAGES: Final = {(64, 64): (3, 6), (128, 128): (2, 2)}  # of contiguous keys, and of pages
_FULL_GROUP: Final = 16
_UNIT: Final = 64  # queries of a warpgroup
_IDLE: Final = 0.05  # of the units of a key head at most, where tiles have three
_LONG: Final = 16384
_DECODE_QUERIES: Final = 16  # up to here always packed tiles
_SPLIT_BYTES: Final = 256 << 20  # most bytes of partial results of splits, with more queries
# Estimates in steps, of 64 rows over 128 keys by packed tiles: 1 µs.
_STEP_KEYS: Final = 128
_PREFILL_STEP: Final = {2: 1.4, 3: 1.7}  # of a tile, by number of warpgroups
_WIDENING: Final = 2.0  # factor of a step with 8-bit keys
_PACKING_STEPS: Final = 3.0  # queries and results are transposed
_MERGE_STEPS: Final = 3.0
_STEP_BYTES: Final = 3_000_000  # read or written in GPU memory


def takes_scores(scale: float, soft_cap: float | None) -> bool:
    """Returns whether the kernels take a scale and a soft cap.

    The scale must be positive, neither tiny nor huge. The error of their tangent is 2**-22 of the soft cap.
    """
    if soft_cap is not None and (soft_cap > _HIGHEST_CAP or not takes_scores(scale / soft_cap, None)):
        return False
    return _SCALES[0] <= scale <= _SCALES[1]


@dataclass(frozen=True)
class PrefillSchedule:
    """Tiles of 64 queries of a head per computing warpgroup, processed by persistent blocks.

    Attributes:
        warpgroups: Computing warpgroups, up to 3.
        stages: Stages of keys and of values.
        blocks: Most blocks.
        heads: Query heads whose tiles are scheduled together, the longest tiles of a group first; 0 for all.
        packed: Whether the warpgroups of a tile take queries of all heads that share keys, else of one head.
        registers: Registers of a thread that computes and of one that copies.
    """

    warpgroups: int = 2
    stages: int = 2
    blocks: int = SMS
    heads: int = 0
    packed: bool = False
    registers: tuple[int, int] = (240, 24)


@dataclass(frozen=True)
class DecodeSchedule:
    """Tiles of 64 rows, packed from queries and heads, each with one split of the keys or with all of them.

    Attributes:
        stages: Stages of keys and of values.
        blocks: Most blocks.
        whole: Whether an item has all keys of a tile, so that there are no splits to merge.
        byte_stages: Stages of the bytes of an 8-bit cache.
        registers: Registers of a thread that computes, of one that copies and of one that widens bytes to 16 bits; used
            only with an 8-bit cache, and with `swap` only for several workers.
        swap: Whether keys are wgmma's rows and the rows of a tile, at most 8, its columns. Items then have one split.
        workers: Pairs of warpgroups in a block that copy and compute items of their own: with `swap` and an 8-bit
            cache, which then has no 16-bit stages. Each pair has `byte_stages`.
    """

    stages: int = 3
    blocks: int = SMS
    whole: bool = False
    byte_stages: int = 2
    registers: tuple[int, int, int] = (232, 40, 120)
    swap: bool = False
    workers: int = 1


@dataclass(frozen=True)
class Problem:
    """The static properties of a call, without the lengths.

    Attributes:
        batch: Sequences.
        queries: Queries of each.
        key_heads: Key heads.
        group: Query heads per key head.
        size: Width of a head.
        value_size: The same for the values.
        capacity: Key capacity of a sequence.
        reach: Most keys that the queries of a sequence see, up to `capacity`; a window leaves fewer.
        split: Keys of a split.
        sees_all: Whether all queries see the same keys, with neither a causal mask nor a window.
        eight_bits: Whether keys and values have 8 bits.
        plain: Whether there is no soft cap, bias, slopes or mask.
        pairs: Whether a bias or a mask is read for each pair of a query and a key.
        shares: Whether sequences may share splits, of more than one.
        paged: Whether keys lie in pages.
    """

    batch: int
    queries: int
    key_heads: int
    group: int
    size: int
    value_size: int
    capacity: int
    reach: int
    split: int
    sees_all: bool
    eight_bits: bool = False
    plain: bool = True
    pairs: bool = False
    shares: bool = False
    paged: bool = False

    @property
    def splits(self) -> int:
        """Splits of a sequence, for the capacity of its cache."""
        return -(-self.capacity // self.split)

    @property
    def packed_tiles(self) -> int:
        """Tiles of all sequences and key heads, packed from queries and heads."""
        return self.batch * self.key_heads * -(-self.queries * self.group // _UNIT)

    @property
    def split_bytes(self) -> int:
        """Bytes of the values of all splits before the merge."""
        return 4 * self.batch * self.queries * self.key_heads * self.group * self.splits * self.value_size


def attention_schedule(problem: Problem) -> PrefillSchedule | DecodeSchedule:
    """Returns the schedule of a call: query tiles, or packed tiles whose splits are distributed over the blocks.

    A chunk of queries after a long cache has few tiles, each of which would loop over all keys.

    Args:
        problem: The call.
    """
    p = problem
    rows = p.queries * p.group if p.plain else SWAPPED_ROWS + 1
    packed = decode_schedule(
        p.size,
        p.value_size,
        tiles=p.packed_tiles,
        splits=p.splits,
        eight_bits=p.eight_bits,
        rows=rows,
        shares=p.shares,
        paged=p.paged,
    )
    if p.queries <= _DECODE_QUERIES:
        return packed
    tiles = prefill_schedule(p.size, p.queries, p.sees_all, p.value_size, p.group, p.pairs)
    fits = packed.whole or p.split_bytes <= _SPLIT_BYTES
    return packed if fits and _packed_steps(p, packed) < _prefill_steps(p, tiles) else tiles


def _prefill_steps(p: Problem, schedule: PrefillSchedule) -> float:
    """Returns an estimate of the time of tiles of queries, in steps."""
    heads, pieces = p.key_heads * p.group, -(-p.queries // _UNIT)
    sets, units = (p.key_heads, pieces * p.group) if schedule.packed else (heads, pieces)
    rounds = -(-p.batch * sets * -(-units // schedule.warpgroups) // SMS)
    keys = p.reach if p.sees_all else max(_UNIT, p.reach - p.queries // 2)
    steps = rounds * -(-keys // _STEP_KEYS) * _PREFILL_STEP[schedule.warpgroups]
    if p.eight_bits:  # the cache is read, and a 16-bit copy written
        steps += 3 * p.batch * p.capacity * p.key_heads * (p.size + p.value_size) / _STEP_BYTES
    return steps


def _packed_steps(p: Problem, schedule: DecodeSchedule) -> float:
    """Returns an estimate of the time of packed tiles, in steps."""
    step, rounds = _WIDENING if p.eight_bits else 1.0, -(-p.packed_tiles // SMS)
    if schedule.whole:
        return _PACKING_STEPS + rounds * -(-p.reach // _STEP_KEYS) * step
    splits, rest = divmod(p.reach, p.split)
    steps = -(-p.packed_tiles * splits // SMS) * (p.split // _STEP_KEYS) + rounds * -(-rest // _STEP_KEYS)
    return _PACKING_STEPS + steps * step + _MERGE_STEPS + 2 * p.split_bytes / _STEP_BYTES


def prefill_schedule(
    head_size: int, queries: int, sees_all: bool, value_size: int | None = None, group: int = 1, pairs: bool = False
) -> PrefillSchedule:
    """Returns the schedule of tiles of queries.

    Args:
        head_size: Width of a head.
        queries: Queries of a sequence.
        sees_all: Whether all tiles are of one length, with neither a causal mask nor a window.
        value_size: Width of a head of the values; defaults to the keys' width.
        group: Query heads per key head.
        pairs: Whether a bias or a mask is read for each pair of a query and a key: it would spill the registers of
            three warpgroups.
    """
    heads = _FULL_GROUP if sees_all else 0
    units = -(-queries // _UNIT) * group
    if head_size <= 64 and not pairs and -units % 3 <= _IDLE * units:
        # Narrow heads are limited by exponentials rather than the tensor core, and take fewer registers.
        stages = 4 if sees_all or queries >= _LONG else 3
        return PrefillSchedule(3, stages, heads=heads, packed=True, registers=(160, 32))
    pieces, warpgroups = -(-queries // _UNIT), PrefillSchedule.warpgroups
    return PrefillSchedule(
        stages=_PREFILL_STAGES[head_size, value_size or head_size],
        heads=heads,
        # Tiles of one head would leave warpgroups idle that other heads sharing the keys can use.
        packed=-pieces % warpgroups > _IDLE * pieces,
    )


def decode_schedule(
    head_size: int,
    value_size: int | None = None,
    *,
    tiles: int = 0,
    splits: int = 2,
    eight_bits: bool = False,
    rows: int = SWAPPED_ROWS + 1,
    shares: bool = False,
    paged: bool = False,
) -> DecodeSchedule:
    """Returns the schedule of packed tiles.

    Args:
        head_size: Width of a head.
        value_size: Width of a head of the values; defaults to the keys' width.
        tiles: Tiles of all sequences and key heads.
        splits: Splits of a sequence, for the capacity of its cache.
        eight_bits: Whether keys and values have 8 bits.
        rows: Rows of a key head, of plain scores: more than `SWAPPED_ROWS` with a soft cap or slopes.
        shares: Whether sequences may share splits, of more than one: items have one split then, and 64 rows.
        paged: Whether keys lie in pages, whose copies begin later.
    """
    widths = head_size, value_size or head_size
    swap = splits > 1 and rows <= SWAPPED_ROWS and widths in _SWAPPED_STAGES and not shares
    if eight_bits and swap:
        workers = 2 if tiles * splits > SMS else 1
        stages = _LEFT_STAGES[widths][workers - 1]
        return DecodeSchedule(byte_stages=stages, registers=_LEFT_REGISTERS, swap=True, workers=workers)
    if eight_bits:
        stages, byte_stages = _BYTE_STAGES[widths]
        return DecodeSchedule(stages, byte_stages=byte_stages, whole=splits == 1)
    if splits == 1:
        return DecodeSchedule(_DECODE_STAGES[widths], whole=True)
    rounds = -(-tiles // SMS)
    if not shares and widths in _WHOLE_STAGES and splits <= _WHOLE_SPLITS and tiles >= _BUSY * rounds * SMS > 0:
        return DecodeSchedule(_WHOLE_STAGES[widths], whole=True)
    if swap:
        return DecodeSchedule(_SWAPPED_STAGES[widths][paged], swap=True)
    return DecodeSchedule(_DECODE_STAGES[widths])


@dataclass(frozen=True)
class GradientSchedule:
    """Key blocks, processed by persistent blocks of the grid with two computing warpgroups.

    Blocks of 128 keys, 64 per warpgroup; for wide heads 64 keys, half of the columns per warpgroup.

    Attributes:
        rows: Queries of a tile.
        stages: Stages of queries and of their cotangents.
        cotangent_stages: Stages of cotangents for wide heads.
        blocks: Most blocks of the grid.
        heads: Key heads whose blocks of keys are taken together.
        to_and_fro: Whether every second round of items traverses the blocks of the grid backwards.
        lagging: Whether a step computes the gradient of the previous tile's queries, so that no warpgroup waits for the
            slopes of the other. Ignored for wide heads.
        buffers: Pieces of the gradient of queries for which each warpgroup has shared memory until they are added.
        order: The parts of items that each block of the grid takes, instead of whole items in their order.
        registers: Registers of a thread that computes and of one that copies.
    """

    rows: int = 64
    stages: int = 2
    cotangent_stages: int = 2
    blocks: int = SMS
    heads: int = 64
    to_and_fro: bool = True
    lagging: bool = False
    buffers: int = 1
    order: GradientOrder | None = None
    registers: tuple[int, int] = (232, 24)


_GRADIENT_ROWS: Final = {64: 128, 128: 64}
_TWO_STAGES: Final = 192  # widest values for which shared memory has room for two stages of cotangents
_COUPLED: Final = 64  # widest heads whose warpgroups wait for the slopes of the step: tiles of 128 queries cover it
_TWO_BUFFERS: Final = 128  # heads for which shared memory has room for them
_GRADIENT_HEADS: Final = {True: 8, False: 64}  # whether all queries see all keys


def gradient_schedule(
    head_size: int, sees_all: bool, value_size: int | None = None, blocks: int = SMS
) -> GradientSchedule:
    """Returns the schedule of the gradients.

    Args:
        head_size: Width of a head.
        sees_all: Whether all blocks of keys are seen by the same number of queries, with neither a causal mask nor a
            window.
        value_size: Width of a head of the values; defaults to the keys' width.
        blocks: Most blocks of the grid. They wait for one another, so all must run at once.
    """
    return GradientSchedule(
        _GRADIENT_ROWS.get(head_size, 64),
        cotangent_stages=1 if (value_size or head_size) > _TWO_STAGES else 2,
        blocks=blocks,
        heads=_GRADIENT_HEADS[sees_all],
        to_and_fro=not sees_all,
        lagging=head_size > _COUPLED,
        buffers=2 if head_size == _TWO_BUFFERS and not sees_all else 1,
    )
