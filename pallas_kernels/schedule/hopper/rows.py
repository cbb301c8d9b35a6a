"""Schedules of the row kernels on a Hopper GPU: how rows are fed to the warpgroups. They do not affect the bits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from pallas_kernels.schedule.hopper.ahead import rows_ahead
from pallas_kernels.schedule.hopper.tiles import SMS

GROUP: Final = 128
MOST_TEAM: Final = 8
WARPS: Final = 4
"""Warps of a warpgroup."""
WARP: Final = 32
"""Threads of a warp."""
WARP_VECTOR: Final = 4
"""Neighbouring columns that a thread holds where each warp has a row of its own."""
COPY_BYTES: Final = 128
"""Copies into shared memory are multiples of this size: every thread of a warpgroup announces its share."""

_WARPGROUPS: Final = 16  # of a multiprocessor
TEAMS: Final = (1, 2, 4)  # with eight warpgroups a thread has at most 64 registers, too few to hold much of a row
HELD_COLUMNS: Final = 64  # columns of all arrays that a thread may hold
HELD: Final = 32  # registers per thread for its columns, if more warpgroups are available
_HELD_FEW: Final = 16  # if every row has a multiprocessor
_HELD_CLUSTER: Final = 128  # if a few rows share the whole GPU
_HELD_PARTS: Final = 64  # if very few rows share the whole GPU
_HELD_PRELOADED: Final = 48  # registers per thread for its columns of rows and vectors
_RING_ROWS: Final = 2
MOST_LANES: Final = 8192
_CLUSTER_TEAM: Final = 4
_FEW_CLUSTERS: Final = 32
_FEW_ROWS: Final = 8
_FEW_WAVES: Final = 4
_SHORT: Final = 256  # columns
_LONG: Final = 768
_ROWS_FOR_TWO: Final = {True: 64 * SMS, False: 8 * SMS}  # so that no warp is idle, for short rows and for long ones
_SHARED_COLUMNS: Final = 8192  # of a row that waits in shared memory if there are few waves of rows
_SHARED_PASSES: Final = {2: 3, 4: 2}  # of such a row, for each size of an element; measured
_SPREAD_STRIPS: Final = 4  # of a thread
_PARTS_OF_FEW: Final = (2, 8, 4)  # warpgroups, blocks and columns a thread of two arrays of very few long rows
_PARTS_OF_LONG: Final = (2, 8, 4)  # the same for rows that are read in both passes
_LONG_UNROLL: Final = 4
_HELD_LONG: Final = 65_536  # columns of float32; between the measured 32000 and 128256
_LANES_OF_SUM: Final = 2048  # of a warpgroup: 16 columns a thread
_SHORTEST: Final = {2: 192, 4: 128}  # columns, for each size of an element; measured
_ROWS_FOR_PARTS: Final = 512  # of these columns; measured
_ROWS_FOR_FEW_THREADS: Final = 8192


@dataclass(frozen=True)
class RowSchedule:
    """How rows are fed to a row program.

    Attributes:
        team: Warpgroups of a block, which share a row: 1, 2, 4 or 8.
        blocks: Blocks of one team (clusters of such blocks, if a cluster shares a row) on the whole GPU.
        stage: Columns of one stage of the circular buffer: the whole row, or a multiple of the row's lanes.
        stages: Stages of the circular buffer; 0 to read directly from memory (and its caches).
        hold: Keep the row in registers from the first pass to the last.
        preload: Keep the vectors in registers, for all rows of a block.
        unroll: Blocks of lanes that one step of a loop handles.
        cluster: Blocks that share a row; more than one only if `stages` is 0.
        rows_per_warp: Rows that each warp of a block processes by itself, with the loads of all of them in flight; 0 if
            a team shares a row. Only for rows of 128 lanes that are held, one warpgroup a block, and `stages` of 0.
        threads: With `rows_per_warp`, threads that have a row: those of a warp, or fewer, so that a warp has several
            times as many rows. Their strips are at the greatest distances, so that a thread adds the first levels of
            the tree by itself.
        vector: Neighbouring columns that a thread holds; 0 for `row_vector`. With fewer, more warpgroups can share a
            row.
        spread: Give a thread columns of one group of 128 lanes, so that it adds most of them by itself. Only for sums,
            and a block or a cluster of one block a row.
        ahead: Each block (or cluster) asks the L2 cache to fetch the row of the block that comes so many places after
            it; 0 for none. Only for a block (or cluster) a row.
    """

    team: int
    blocks: int
    stage: int = 0
    stages: int = 0
    hold: bool = False
    preload: bool = False
    unroll: int = 2
    cluster: int = 1
    rows_per_warp: int = 0
    threads: int = WARP
    vector: int = 0
    spread: bool = False
    ahead: int = 0

    @property
    def rows_per_block(self) -> int:
        """Rows that a block (or cluster) has at once."""
        return max(1, WARPS * self.rows_per_warp * (WARP // self.threads))

    @property
    def members(self) -> int:
        """Warpgroups that share a row."""
        return self.team * self.cluster

    def strips(self, lanes: int, vector: int) -> int:
        """Returns how many strips of a block of `lanes` lanes each warpgroup has, with `vector` columns a thread."""
        return lanes // (self.members * GROUP * vector)


def row_vector(lanes: int, itemsizes: Sequence[int]) -> int:
    """Returns how many neighbouring columns a thread holds: 16 bytes of the widest array, one for short rows.

    Example:
        >>> row_vector(4096, (2, 2)), row_vector(4096, (2, 4)), row_vector(128, (2, 2))
        (8, 4, 1)
    """
    return 1 if lanes == GROUP else 4 if max(itemsizes) > 2 else 8


class _Program(NamedTuple):
    """What a schedule is chosen by; see `row_schedule`."""

    rows: int
    columns: int
    lanes: int
    itemsizes: tuple[int, ...]
    result_sizes: tuple[int, ...]
    vectors: int
    passes: int
    picked: bool
    plain: bool
    sums: int

    @property
    def is_one_sum(self) -> bool:
        """Whether it only adds rows, so short that few strips hold them."""
        reads_once = self.passes == 1 and len(self.itemsizes) == 1 and not self.result_sizes
        return self.rows > SMS and reads_once and self.columns <= self.lanes + GROUP


def row_schedule(
    rows: int,
    columns: int,
    lanes: int,
    itemsizes: Sequence[int],
    result_sizes: Sequence[int] = (),
    vectors: int = 0,
    passes: int = 2,
    *,
    picked: bool = False,
    plain: bool = False,
    sums: int = 0,
) -> RowSchedule:
    """Returns the schedule for `rows` rows of `columns` columns.

    Args:
        rows: Number of rows, at least 1.
        columns: Columns of a row.
        lanes: Lanes of the row's contract.
        itemsizes: Bytes of an element of each array that is read row by row.
        result_sizes: Bytes of an element of each full-width result.
        vectors: How many vectors the rows share.
        passes: Number of passes of the program over a row.
        picked: Whether any array is `Picked`: then vectors are not preloaded, and `stages` is 0.
        plain: Whether passes read the arrays as they are, so that it costs little to read them again.
        sums: How many sums over a row the program takes; 0 if it also takes a maximum.

    Example:
        >>> row_schedule(8, 4096, 4096, (2,), (2,), 1)
        RowSchedule(team=1, blocks=8, stage=0, stages=0, hold=True, preload=True, unroll=2, cluster=1, ...)
        >>> row_schedule(40960, 128, 128, (2,), (2,), 1).rows_per_warp
        2
        >>> row_schedule(40960, 128, 128, (2,), (2,), 1, sums=1).threads
        4
        >>> found = row_schedule(4096, 8192, 8192, (2,), (2,), 2, 3, plain=True, sums=2)
        >>> found.spread, found.ahead
        (True, 264)
    """
    sizes, results = tuple(itemsizes), tuple(result_sizes)
    program = _Program(
        *(rows, columns, lanes, sizes, results), vectors=vectors, passes=passes, picked=picked, plain=plain, sums=sums
    )
    found = _without_prefetch(program)
    if not sums or not vectors or not result_sizes or picked or found.blocks != rows:
        return found  # only norms were measured
    # Measured: long float32 rows that are held in registers are read more slowly with it.
    near = max(sizes) > 2 and found.hold and columns > MOST_LANES
    return found if near else replace(found, ahead=rows_ahead(rows, columns, sizes))


def _without_prefetch(p: _Program) -> RowSchedule:
    """Returns the schedule for rows that are read when they are needed."""
    found = _neighbouring(p)
    held = found.hold or (found.stages == 1 and found.stage == p.columns)
    strips = found.strips(p.lanes, row_vector(p.lanes, (*p.itemsizes, *p.result_sizes)))
    if not p.sums or not held or found.cluster > 1 or found.rows_per_warp or strips < 2:
        return found
    # A thread of many spread strips reads and writes parts of 32 bytes; two sums pay for larger parts.
    few, shared = p.rows <= SMS and len(p.itemsizes) == 1, not found.hold
    if not p.picked and p.is_one_sum:
        team = min(TEAMS[-1], max(1, p.lanes // _LANES_OF_SUM))
        return RowSchedule(team, p.rows, hold=True, spread=True)
    return replace(found, spread=few or shared or (p.sums > 1 and strips <= _SPREAD_STRIPS))


def _neighbouring(p: _Program) -> RowSchedule:
    """Returns the schedule for strips of neighbouring columns."""
    rows, columns, lanes, itemsizes, result_sizes, vectors, passes, picked, plain, sums = p
    if picked:
        found = _neighbouring(p._replace(picked=False, plain=False, sums=0))
        return replace(found, blocks=rows if found.stages else found.blocks, stage=0, stages=0, preload=False)
    widest = max(*itemsizes, *result_sizes, 0)
    one_by_one = sums and sums == passes - bool(result_sizes) and (vectors or not result_sizes)
    if lanes == GROUP and columns <= _SHORTEST.get(widest, 0) and one_by_one and rows >= _ROWS_FOR_PARTS:
        many = columns == GROUP and rows >= _ROWS_FOR_FEW_THREADS and len(result_sizes) > 0
        threads = 4 if widest == 2 and many else 8
        found = RowSchedule(1, 1, hold=True, preload=True, rows_per_warp=1, threads=threads, vector=16 // widest)
        return replace(found, blocks=-(-rows // found.rows_per_block))
    if lanes == GROUP and (each := _rows_per_warp(rows, columns, itemsizes)):
        return RowSchedule(1, -(-rows // (WARPS * each)), hold=True, preload=True, rows_per_warp=each)
    wide = sum(itemsizes)
    members = max(1, lanes // (GROUP * row_vector(lanes, (*itemsizes, *result_sizes))))
    held = columns * len(itemsizes) / GROUP  # columns per thread with a single warpgroup
    registers = columns * wide / (4 * GROUP)  # and their registers
    preloaded = registers + vectors * columns / (2 * GROUP)
    if rows <= SMS:
        # Every row has a multiprocessor. Fewer warpgroups make the exchange cheaper.
        for team in TEAMS:
            # Measured: it pays for programs that write as much as they read, not for gradients and sums.
            holds = len(result_sizes) >= len(itemsizes) and preloaded / team <= _HELD_PRELOADED
            few = registers / team <= _HELD_FEW or holds
            if team <= members and few:
                return RowSchedule(team, rows, hold=True, preload=preloaded / team <= _HELD_PRELOADED)
        most = min(MOST_TEAM, members)
        if members <= _CLUSTER_TEAM or (held / most <= HELD and not (members > most and rows <= _FEW_CLUSTERS)):
            return RowSchedule(most, rows, hold=True)
        group, parts, vector = _PARTS_OF_FEW
        two = tuple(itemsizes) == (2, 2) and lanes == MOST_LANES
        if rows <= _FEW_ROWS and two and registers / (group * parts) <= _HELD_PARTS:
            return RowSchedule(group, rows, hold=True, cluster=parts, vector=vector)
        cluster = max(2, members // (_CLUSTER_TEAM if rows > _FEW_ROWS and passes > 1 else _CLUSTER_TEAM // 2))
        hold = registers / members <= (HELD if rows > _FEW_CLUSTERS and passes > 1 else _HELD_CLUSTER)
        return RowSchedule(members // cluster, rows, hold=hold, cluster=cluster)
    teams = [t for t in TEAMS if t <= members and max(held, registers) / t <= HELD_COLUMNS]
    team = next((t for t in teams if registers / t <= HELD), teams[0] if teams else 0)
    if not team:
        # Spread over the caches of several multiprocessors, where later passes find the row.
        cluster = max(1, members // _CLUSTER_TEAM)
        hold = registers / members <= (HELD if passes > 1 else _HELD_CLUSTER)
        longest = columns > _HELD_LONG and len(itemsizes) == 1 and sums
        if passes == 2 and lanes == MOST_LANES and (longest if max(itemsizes) > 2 else not hold):
            group, parts, vector = _PARTS_OF_LONG
            return RowSchedule(group, rows, cluster=parts, vector=vector, unroll=_LONG_UNROLL)
        return RowSchedule(members // cluster, rows, hold=hold, cluster=cluster)
    if team == 1 and members > 1 and len(itemsizes) == 1 and _HELD_FEW < held <= HELD and rows <= _FEW_WAVES * SMS:
        team = 2  # all rows are in flight at once, also with two warpgroups each
    elif team == 2 and members > 2 and len(itemsizes) == 1 and passes > 2 and rows <= _FEW_WAVES * SMS:
        team = 4
    copied = all(columns * size % COPY_BYTES == 0 for size in itemsizes)
    few = columns == _SHARED_COLUMNS and (rows <= _FEW_WAVES * SMS or passes > 2)
    if plain and copied and few and len(itemsizes) == 1 and _SHARED_PASSES.get(itemsizes[0]) == passes:
        # In shared memory the rows of all blocks are in flight at once, for which registers have no room.
        return RowSchedule(1, rows, columns, 1)
    if lanes > GROUP or rows <= SMS * _WARPGROUPS or not copied:
        # One block per row: multiprocessors start the next block while others wait for memory.
        return RowSchedule(team, rows, hold=True)
    each = _WARPGROUPS // 2 if result_sizes else _WARPGROUPS
    return RowSchedule(team, SMS * each, columns, _RING_ROWS, hold=True, preload=preloaded <= _HELD_PRELOADED)


def _rows_per_warp(rows: int, columns: int, itemsizes: Sequence[int]) -> int:
    """Returns how many rows of 128 lanes a warp processes at once; 0 if a warpgroup should share each row.

    Two of the short rows are in flight at once, since one does not hide the latency of memory; and two of the longest,
    which take so many registers that the blocks with one row each would be a wave and the beginning of another.
    """
    registers = columns * sum(itemsizes) / GROUP
    if registers > HELD_COLUMNS or (rows <= SMS and columns > _SHORT):
        return 0
    two = not _SHORT < columns <= _LONG and rows > _ROWS_FOR_TWO[columns <= _SHORT]
    return 2 if two and 2 * registers <= HELD_COLUMNS else 1
