"""Hopper schedules of matmul: which tiles multiply a shape fast.

A schedule moves no bit (every accumulator is one chain over K, see `pallas_kernels.matmul.mosaic_gpu_ring`), so it may
follow the number of rows. A shape that was tuned has its schedule in `hopper_matmul.json` (written by
`benchmarks/tune_matmul_gpu.py`); every other shape gets the candidate with the lowest estimated time.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

SMS: Final = 132
"""Streaming multiprocessors of an H100 SXM or H200. On a part with fewer the grids still fit, in more waves."""

SHARED_BYTES: Final = 227 * 1024
"""Shared memory of one block."""

_RESERVED_BYTES: Final = 1024  # of each block, by the system
_BARRIER_BYTES: Final = 3 * 1024  # barriers and alignment
_OUT_ROWS: Final = 64
_ROW_BYTES: Final = 128
_MOST_STAGES: Final = 12

# What the estimate knows of the chip.
_CYCLES_PER_NS: Final = 1.75
_BYTES_PER_NS: Final = 4200
_MULTIPLY_PER_CYCLE: Final = 1800  # of the 2048 of one multiprocessor
_CHAIN_CYCLES: Final = 22  # one dependent wgmma of 16 elements of K
_INGEST_BYTES_PER_CYCLE: Final = 75
_ISSUE_CYCLES: Final = 240  # two copies
_START_CYCLES: Final = 3000
_TILE_CYCLES: Final = 600

_FEWEST_ROWS: Final = 8


@dataclass(frozen=True)
class MatmulSchedule:
    """How the blocks of a matmul are cut and fed.

    wgmma multiplies rows by columns: the rows are those of the activations, or with `swap` the columns of the weights.

    Attributes:
        swap: Whether the weights are wgmma's rows.
        tile_rows: Rows of one warpgroup, a multiple of 64.
        tile_columns: Columns of one warpgroup, a multiple of 8 up to 256.
        k_step: Elements of K in a stage, a multiple of the 128 bytes of a swizzled row: of 64 for 2-byte operands, of
            32 for 4-byte ones.
        stages: Stages in shared memory, at least 2.
        warpgroups: Computing warpgroups of a block, 1 to 3.
        split: Along what the warpgroups of a block stand side by side; with "tiles" they take whole tiles in turn, so
            that one writes its result while another multiplies.
        cluster_rows: Blocks along the rows that share a tile of columns (multicast), 1 or 2.
        cluster_columns: Blocks along the columns that share a tile of rows, 1 or 2; not both.
        clusters: Clusters that are launched and walk the tiles; 0 launches one for each.
        group: Tiles along the rows that are walked before the next column.
        out_buffers: Blocks of the result, of 64 rows by 128 bytes or 64 rows by the warpgroup's columns, that it can
            have on their way to memory.
        warp_producers: Whether one warp copies the rows and another the columns, instead of a warpgroup both: a copy
            then costs 64 arrivals in place of 128, and the two go side by side.
    """

    swap: bool
    tile_rows: int
    tile_columns: int
    k_step: int
    stages: int
    warpgroups: int = 1
    split: Literal["rows", "columns", "tiles"] = "rows"
    cluster_rows: int = 1
    cluster_columns: int = 1
    clusters: int = 0
    group: int = 8
    out_buffers: int = 2
    warp_producers: bool = False

    def __post_init__(self) -> None:
        def fail(what: str) -> None:
            raise ValueError(f"{what}, got {self}.")

        if self.tile_rows < 64 or self.tile_rows % 64:
            fail("tile_rows must be a positive multiple of 64")
        if not 8 <= self.tile_columns <= 256 or self.tile_columns % 8:
            fail("tile_columns must be a multiple of 8 from 8 to 256")
        if self.k_step < 32 or self.k_step % 32:
            fail("k_step must be a positive multiple of 32")
        if self.stages < 2:
            fail("stages must be at least 2")
        if not 1 <= self.warpgroups <= 3 or self.split not in ("rows", "columns", "tiles"):
            fail("warpgroups must be 1, 2 or 3 and split 'rows', 'columns' or 'tiles'")
        if {self.cluster_rows, self.cluster_columns} not in ({1}, {1, 2}):
            fail("one of cluster_rows and cluster_columns may be 2, the other must be 1")
        if self.clusters < 0 or self.group < 1 or self.out_buffers < 1:
            fail("clusters must not be negative, group and out_buffers must be positive")

    @property
    def block_rows(self) -> int:
        """Rows of a block's tile."""
        return self.tile_rows * (self.warpgroups if self.split == "rows" else 1)

    @property
    def block_columns(self) -> int:
        """Columns of a block's tile."""
        return self.tile_columns * (self.warpgroups if self.split == "columns" else 1)

    @property
    def block_m(self) -> int:
        """Rows of the result in a block's tile."""
        return self.block_columns if self.swap else self.block_rows

    @property
    def block_n(self) -> int:
        """Columns of the result in a block's tile."""
        return self.block_rows if self.swap else self.block_columns

    def out_blocks(self, out_itemsize: int) -> tuple[int, int, int]:
        """Returns how a warpgroup's part of the result leaves: the rows and columns of a block, and buffers for blocks.

        Args:
            out_itemsize: Bytes of a result's element.
        """
        if self.swap:
            # Long rows are what the memory likes, so all columns leave together.
            rows, columns = max(r for r in range(8, _OUT_ROWS + 1, 8) if self.tile_columns % r == 0), self.tile_rows
            buffers = self.out_buffers * (_OUT_ROWS // rows)
        else:
            widest = _ROW_BYTES // out_itemsize
            rows, columns = _OUT_ROWS, math.gcd(self.tile_columns, widest)
            buffers = self.out_buffers * (widest // columns)
        return rows, columns, min(buffers, self.tile_rows * self.tile_columns // (rows * columns))

    def shared_bytes(self, itemsize: int, out_itemsize: int) -> int:
        """Returns the shared memory of a block.

        Args:
            itemsize: Bytes of an operand's element.
            out_itemsize: Bytes of a result's element.
        """
        stage = (self.block_rows + self.block_columns) * self.k_step * itemsize
        out = math.prod(self.out_blocks(out_itemsize)) * out_itemsize
        return self.stages * stage + self.warpgroups * out + _BARRIER_BYTES


class _Problem(NamedTuple):
    """What is to be multiplied: see `candidates`."""

    stack: int
    m: int
    k: int
    n: int
    transpose_w: bool
    itemsize: int
    out_itemsize: int

    def tiles(self, schedule: MatmulSchedule) -> int:
        """Returns the number of blocks' tiles."""
        return self.stack * -(-self.m // schedule.block_m) * -(-self.n // schedule.block_n)


class _Shape(NamedTuple):
    """A block's shape before stages are counted: see `MatmulSchedule`."""

    swap: bool
    tile_rows: int
    tile_columns: int
    k_step: int
    warpgroups: int
    blocks_per_sm: int = 1

    @property
    def name(self) -> str:
        """Name in the table: who is wgmma's rows, the tile, then what differs from the plainest form."""
        text = f"{'weights' if self.swap else 'rows'} {self.tile_rows}x{self.tile_columns} k{self.k_step}"
        text += f" warpgroups{self.warpgroups}" if self.warpgroups > 1 else ""
        return text + (f" blocks{self.blocks_per_sm}" if self.blocks_per_sm > 1 else "")


_WIDE: Final = (
    _Shape(False, 64, 256, 64, 2),
    _Shape(False, 64, 192, 64, 2),
    _Shape(False, 64, 128, 64, 2),
    _Shape(False, 64, 64, 128, 2),
    _Shape(False, 64, 128, 128, 1),
    _Shape(False, 64, 64, 128, 1),
    _Shape(True, 64, 256, 64, 2),
    _Shape(True, 64, 128, 64, 2),
    _Shape(True, 64, 128, 128, 1),
    _Shape(True, 64, 64, 128, 1),
)


def _gated_shapes(m: int) -> Iterator[_Shape]:
    """Yields the shapes that are tried for `m` rows of a pair of products: a warpgroup has columns of both weights."""
    if m > 64:
        yield from (shape for shape in _WIDE if not shape.swap)
    if m <= 256:
        columns = max(_FEWEST_ROWS, 1 << (m - 1).bit_length())
        for k_step in (128, 64):
            yield _Shape(True, 128, min(columns, 128), k_step, 1)
            yield _Shape(True, 128, min(columns, 128), k_step, 1, 2)


def _shapes(m: int, transpose_w: bool) -> Iterator[_Shape]:
    """Yields the shapes that are tried for `m` rows."""
    if m > 64:
        yield from _WIDE
    if m > 256:
        return
    columns = max(_FEWEST_ROWS, 1 << (m - 1).bit_length())
    for k_step in (256, 128, 64):
        yield _Shape(True, 64, columns, k_step, 1)
        yield _Shape(True, 64, columns, k_step, 1, 2)
        yield _Shape(True, 64, columns, k_step, 2)
    if m <= 64:
        # More blocks than 64 columns of the weights each would give. Rows of (K, N) weights shorter than 64 bytes
        # are slow to copy.
        for width in (16, 32) if transpose_w else (32,):
            yield _Shape(False, 64, width, 256, 1)
            yield _Shape(False, 64, width, 128, 1)


def matmul_schedule(
    m: int, k: int, n: int, *, stack: int = 1, transpose_w: bool = False, itemsize: int = 2, out_itemsize: int = 2
) -> MatmulSchedule:
    """Returns the schedule of a shape: the tuned one if there is one, else the candidate estimated fastest.

    Args:
        m: Rows of the activations, at least 1.
        k: Length of the contracted dimension, at least 1.
        n: Columns of the weights, at least 1.
        stack: Products of this shape in one launch.
        transpose_w: Whether the weights are stored as (N, K).
        itemsize: Bytes of an operand's element.
        out_itemsize: Bytes of a result's element.

    Example:
        >>> matmul_schedule(8, 4096, 4096).swap, matmul_schedule(8192, 4096, 4096).swap
        (True, False)
    """
    ranked = candidates(m, k, n, stack=stack, transpose_w=transpose_w, itemsize=itemsize, out_itemsize=out_itemsize)
    rows = max(_FEWEST_ROWS, 1 << (m - 1).bit_length())
    tuned = _table().get((k, n, transpose_w), {}).get(rows) if stack == 1 else None
    return ranked[tuned] if tuned in ranked else next(iter(ranked.values()))


@functools.cache
def _table() -> dict[tuple[int, int, bool], dict[int, str]]:
    """Reads the tuned shapes: (K, N, transpose_w) to rows (a power of two) to the name of the best candidate."""
    text = Path(__file__).with_name("hopper_matmul.json").read_text()
    return {
        (entry["k"], entry["n"], entry["transpose_w"]): {int(rows): name for rows, name in entry["rows"].items()}
        for entry in json.loads(text)["shapes"]
    }


def candidates(
    m: int,
    k: int,
    n: int,
    *,
    stack: int = 1,
    transpose_w: bool = False,
    itemsize: int = 2,
    out_itemsize: int = 2,
    gated: bool = False,
) -> dict[str, MatmulSchedule]:
    """Returns the schedules that are worth trying for a shape by name, the one with the lowest estimated time first.

    Args:
        m: Rows of the activations.
        k: Length of the contracted dimension.
        n: Columns of the weights.
        stack: Products of this shape in one launch.
        transpose_w: Whether the weights are stored as (N, K).
        itemsize: Bytes of an operand's element.
        out_itemsize: Bytes of a result's element.
        gated: Whether there are two weights, whose products a block makes one result of.
    """
    problem = _Problem(stack, m, k, 2 * n if gated else n, transpose_w, itemsize, out_itemsize)
    found = []
    for shape in _gated_shapes(m) if gated else _shapes(m, transpose_w):
        schedule = _fill(shape, problem)
        if schedule is not None:
            found.append((_estimate_ns(schedule, shape.blocks_per_sm, problem), shape.name, schedule))
    return {name: schedule for _, name, schedule in sorted(found, key=lambda entry: entry[0])}


def _fill(shape: _Shape, problem: _Problem) -> MatmulSchedule | None:
    """Returns the schedule of a shape with as many stages as fit, or None if fewer than 3 do."""
    base = MatmulSchedule(shape.swap, shape.tile_rows, shape.tile_columns, shape.k_step, 2, shape.warpgroups)
    budget = (SHARED_BYTES + _RESERVED_BYTES) // shape.blocks_per_sm - _RESERVED_BYTES
    two = base.shared_bytes(problem.itemsize, problem.out_itemsize)
    stage = (base.block_rows + base.block_columns) * base.k_step * problem.itemsize
    stages = min(_MOST_STAGES, 2 + (budget - two) // stage)
    if stages < 3:
        return None
    tiles = problem.tiles(base)
    resident = SMS * shape.blocks_per_sm
    return replace(base, stages=stages, clusters=resident if tiles > resident else 0)


def _estimate_ns(s: MatmulSchedule, blocks: int, problem: _Problem) -> float:
    """Returns a rough time: the slowest of the pipeline's parts for every stage, in as many waves as there are.

    The constants were measured on an H200 (benchmarks/NOTES.md).
    """
    stack, m, k, n, transpose_w, itemsize, out_itemsize = problem
    steps = -(-k // s.k_step)
    tiles = problem.tiles(s)
    sharing = min(blocks, -(-tiles // SMS))  # blocks that compete for one multiprocessor
    loaded = s.block_n + min(s.block_m, -(-m // _FEWEST_ROWS) * _FEWEST_ROWS)
    narrow_weights = 1.5 if not transpose_w and s.block_n < 64 else 1.0
    stage = max(
        s.block_rows * s.block_columns * s.k_step / _MULTIPLY_PER_CYCLE * sharing,
        s.k_step / 16 * _CHAIN_CYCLES,
        loaded * s.k_step * itemsize / _INGEST_BYTES_PER_CYCLE * narrow_weights * sharing,
        _ISSUE_CYCLES,
    )
    waves = -(-tiles // (SMS * blocks))
    computing = (_START_CYCLES + waves * (steps * stage + _TILE_CYCLES)) / _CYCLES_PER_NS
    moved = stack * ((m * k + k * n) * itemsize + m * n * out_itemsize)
    memory = moved / _BYTES_PER_NS + _START_CYCLES / _CYCLES_PER_NS
    # Where the memory is the limit, the form that leaves it most of the time is preferred.
    return max(computing, memory) + 0.02 * computing * narrow_weights**4
