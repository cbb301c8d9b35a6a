"""Schedules of the row kernels on a Hopper GPU: how rows are fed to the warpgroups. None of them moves a bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SMS: Final = 132
SHARED_BYTES: Final = 232_448
"""Shared memory that one block may have; what a multiprocessor has besides goes to its blocks, 1 KiB each."""

GROUP: Final = 128
MOST_TEAM: Final = 8
COPY_BYTES: Final = 128
"""Of these a copy into the ring is a multiple: every thread of a warpgroup announces its share."""

_RESERVED: Final = 3_072  # per block: barriers and the lanes' exchange
_WARPGROUPS: Final = 16  # of a multiprocessor
_FEW_WARPGROUPS: Final = 8
_HELD: Final = 40  # registers of a thread that may hold its columns
_HELD_STREAMING: Final = 24
_HELD_CLUSTER: Final = 72  # where a block has four warpgroups at most
_CLUSTER_TEAM: Final = 4
_FEW_CLUSTERS: Final = 32
_FEW_ROWS: Final = 8
_STREAM: Final = 4
_ROWS_AHEAD: Final = 2
_MOST_ROWS: Final = 8


@dataclass(frozen=True)
class RowSchedule:
    """How rows are fed to a row program.

    Attributes:
        team: Warpgroups of a block, which share a row: 1, 2, 4 or 8.
        blocks: Blocks of one team (clusters of such blocks, if a cluster shares a row) on the whole GPU.
        stage: Columns of one stage of the ring: all of the row, or a multiple of the row's lanes.
        stages: Stages of the ring; 0 to read straight from memory (and its caches).
        hold: Keep the row in registers from the first pass to the last.
        preload: Keep the vectors in registers, for all rows of a block.
        unroll: Blocks of lanes that one step of a loop handles.
        cluster: Blocks that share a row; more than one only without a ring.
    """

    team: int
    blocks: int
    stage: int = 0
    stages: int = 0
    hold: bool = False
    preload: bool = False
    unroll: int = 2
    cluster: int = 1

    @property
    def members(self) -> int:
        """Warpgroups that share a row."""
        return self.team * self.cluster


def row_vector(lanes: int, itemsizes: Sequence[int]) -> int:
    """Returns how many neighbouring columns a thread holds: 16 bytes of the widest array, one in short rows.

    Example:
        >>> row_vector(4096, (2, 2)), row_vector(4096, (2, 4)), row_vector(128, (2, 2))
        (8, 4, 1)
    """
    return 1 if lanes == GROUP else 4 if max(itemsizes) > 2 else 8


def row_schedule(
    rows: int, columns: int, lanes: int, itemsizes: Sequence[int], result_sizes: Sequence[int] = (), vectors: int = 0
) -> RowSchedule:
    """Returns the schedule for `rows` rows of `columns` columns.

    Args:
        rows: Number of rows, at least 1.
        columns: Columns of a row.
        lanes: Lanes of the row's contract.
        itemsizes: Bytes of an element of each array that is read row by row.
        result_sizes: Bytes of an element of each result that is as wide as the row.
        vectors: How many vectors the rows share.

    Example:
        >>> row_schedule(8, 4096, 4096, (2,), (2,), 1)
        RowSchedule(team=4, blocks=8, stage=0, stages=0, hold=True, preload=True, unroll=2, cluster=1)
    """
    wide = sum(itemsizes)
    members = max(1, lanes // (GROUP * row_vector(lanes, (*itemsizes, *result_sizes))))
    most = min(MOST_TEAM, members)
    registers = columns * wide / (4 * GROUP)  # of one thread, to hold a row, were it alone
    vector_registers = vectors * columns / (2 * GROUP)
    clusters = registers / most > _HELD or (members > most and rows <= _FEW_CLUSTERS)
    if clusters and members > _CLUSTER_TEAM and registers / members <= _HELD_CLUSTER:
        cluster = max(2, members // (_CLUSTER_TEAM if rows > _FEW_ROWS else _CLUSTER_TEAM // 2))
        return RowSchedule(members // cluster, rows, hold=True, cluster=cluster)
    if registers / most > _HELD:
        # Read once per pass; later passes find most of the row in the second cache.
        return RowSchedule(
            most, min(rows, SMS * (_WARPGROUPS // most // 2)), unroll=max(1, _STREAM // (columns // lanes))
        )
    if rows <= SMS * max(1, _FEW_WARPGROUPS // most):
        return RowSchedule(most, rows, hold=True, preload=(registers + vector_registers) / most <= _HELD)
    team = next(t for t in (1, 2, 4, 8) if registers / t <= _HELD_STREAMING or t == most)
    preload = (registers + vector_registers) / team <= _HELD
    each = max(1, _WARPGROUPS // 2 // team) if lanes > GROUP else _WARPGROUPS
    row_bytes = columns * wide
    while each > 1 and _fitting(each, row_bytes) < _ROWS_AHEAD:
        each -= 1
    stages = min(_MOST_ROWS, _fitting(each, row_bytes))
    if not stages or any(columns * size % COPY_BYTES for size in itemsizes):
        return RowSchedule(team, SMS * each, hold=True, preload=preload)
    return RowSchedule(team, SMS * each, columns, stages, hold=True, preload=preload)


def _fitting(each: int, row_bytes: int) -> int:
    """Returns how many rows fit into the shared memory of each of several blocks of a multiprocessor."""
    shared = min(SHARED_BYTES, (SHARED_BYTES + 1_024) // each - 1_024) - _RESERVED
    return shared // row_bytes
