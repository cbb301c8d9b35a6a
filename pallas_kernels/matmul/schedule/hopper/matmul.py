"""Hopper schedules of the matmul: candidates, an estimate of their time, and a table of tuned shapes.

A schedule does not affect the bits, so it may depend on the number of rows. A tuned shape has its schedule in
`matmul.json` (written by `benchmarks/tune_matmul_gpu.py`); every other shape gets the candidate with the lowest
estimated time.
"""

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from pallas_kernels.matmul.schedule.hopper.estimate import Problem, estimate_ns
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS, MatmulSchedule

_RESERVED_BYTES: Final = 1024  # of each block's shared memory, by the system
_MOST_STAGES: Final = 12
_FEWEST_STAGES: Final = 3
_FEWEST_ROWS: Final = 8
_MOST_WIDTHS: Final = 2  # widths ranked per candidate

_MANY_TILES: Final = 8 * SMS  # operands no longer fit into the L2 cache

_COLUMNS: Final = (8, 16, 32, 64, 88, 96, 112, 128, 144, 152, 160, 176, 192, 224, 256)
_WIDE_COLUMNS: Final = 192  # of 128 rows per warpgroup, whose sums fill 192 registers
_NAME: Final = re.compile(r"(weights|rows) (\d+)x(\d+) k(\d+)(?: warpgroups(\d))?( in turn)?(?: blocks(\d))?")


class _Shape(NamedTuple):
    """A block's shape without its stages: see `MatmulSchedule`; `turns` means split "tiles"."""

    swap: bool
    tile_rows: int
    tile_columns: int
    k_step: int
    warpgroups: int = 1
    turns: bool = False
    blocks_per_sm: int = 1

    @property
    def name(self) -> str:
        """Name in the table: wgmma's rows, the tile, then the differences from the defaults."""
        text = f"{'weights' if self.swap else 'rows'} {self.tile_rows}x{self.tile_columns} k{self.k_step}"
        text += f" warpgroups{self.warpgroups}" if self.warpgroups > 1 else ""
        text += " in turn" if self.turns else ""
        return text + (f" blocks{self.blocks_per_sm}" if self.blocks_per_sm > 1 else "")


_WIDE_GRADIENT: Final = _Shape(False, 64, 256, 64, 2)
_SQUARE_GRADIENT: Final = _Shape(False, 128, 128, 64, 2)


def _shape(name: str) -> _Shape | None:
    """Returns the shape of a name, or None if invalid."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    side, rows, columns, k_step, warpgroups, turns, blocks = found.groups()
    return _Shape(
        side == "weights",
        int(rows),
        int(columns),
        int(k_step),
        int(warpgroups or 1),
        turns is not None,
        int(blocks or 1),
    )


def _shapes(m: int, transpose_w: bool) -> Iterator[_Shape]:
    """Yields the shapes to try for `m` rows."""
    most = max(_FEWEST_ROWS, 1 << (m - 1).bit_length())
    for columns in _COLUMNS:
        if columns > most:
            break
        if columns <= 64:
            yield from (_Shape(True, 64, columns, k_step) for k_step in (256, 192, 128, 64))
            yield from (_Shape(True, 64, columns, k_step, 2) for k_step in (192, 128, 64))
            yield from (_Shape(True, 64, columns, k_step, 1, False, 2) for k_step in (192, 128, 64))
            if columns <= 16:
                yield _Shape(True, 128, columns, 192)
        else:
            yield from (_Shape(True, 64, columns, k_step) for k_step in (128, 64))
            yield _Shape(True, 64, columns, 64, 2)
            if 128 <= columns <= _WIDE_COLUMNS:
                yield _Shape(True, 128, columns, 64, 2)
    for columns in (64, 128, 192, 256):
        # Activations as the rows: at least 64, and whole 128-byte rows of (K, N) weights.
        yield from (_Shape(False, 64, columns, k_step) for k_step in (128, 64))
        if most > 64:
            yield _Shape(False, 64, columns, 64, 2)
        if most > 128:
            yield from (_Shape(False, 128, columns, 64, 2, turns) for turns in (False, True) if columns in (128, 192))
    if transpose_w and m <= 64:
        yield from (_Shape(False, 64, columns, k_step) for columns in (16, 32) for k_step in (256, 128))


def _gated_shapes(m: int) -> Iterator[_Shape]:
    """Yields the shapes to try for `m` rows of a pair of products; a warpgroup has columns of both weights."""
    if m > 64:
        yield from (_Shape(False, 64, columns, 64, 2) for columns in (128, 256))
        yield from (_Shape(False, 64, columns, 128) for columns in (64, 128))
        yield _Shape(False, 64, 64, 128, 2)
    if m <= 256:
        columns = min(128, max(_FEWEST_ROWS, 1 << (m - 1).bit_length()))
        for k_step in (128, 64):
            yield _Shape(True, 128, columns, k_step)
            yield _Shape(True, 128, columns, k_step, 1, False, 2)


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
    problem = Problem(stack, m, k, n, transpose_w, itemsize, out_itemsize)
    rows = max(_FEWEST_ROWS, 1 << (m - 1).bit_length())
    name = _table().get((k, n, transpose_w), {}).get(rows) if stack == 1 else None
    shape = None if name is None else _shape(name)
    tuned = None if shape is None else _fill(shape, problem)
    return tuned or next(iter(_ranked(problem).values()))


def named_schedule(name: str, problem: Problem) -> MatmulSchedule | None:
    """Returns the schedule of a shape with a name as in the table, or None if fewer than 3 stages fit."""
    shape = _shape(name)
    if shape is None:
        raise ValueError(f"expected the name of a shape such as 'rows 64x128 k64 warpgroups2', got {name!r}.")
    return _fill(shape, problem)


def gradient_schedule(
    m: int, k: int, n: int, *, stack: int = 1, itemsize: int = 2, out_itemsize: int = 2
) -> MatmulSchedule:
    """Returns the schedule of the gradient of weights (K, N), a sum over M rows; both operands are read by columns.

    Two warpgroups with 64 rows of 256 columns are 1 to 2 % faster than with 128 rows of 128 where the result has fewer
    than some 1000 tiles, and as much slower where it has more (`benchmarks/notes/matmul-hopper.md`).

    Example:
        >>> gradient_schedule(8192, 4096, 4096).tile_columns, gradient_schedule(8192, 4096, 14336).tile_columns
        (256, 128)
    """
    problem = Problem(stack, k, m, n, False, itemsize, out_itemsize)
    ranked = {name: schedule for name, schedule in _ranked(problem).items() if not schedule.swap}
    first = next(iter(ranked))
    wide = ranked.get(_WIDE_GRADIENT.name)
    if wide is not None and first == _SQUARE_GRADIENT.name and problem.tiles(wide) <= _MANY_TILES:
        return wide
    return ranked[first]


@functools.cache
def _table() -> dict[tuple[int, int, bool], dict[int, str]]:
    """Reads the tuned shapes: (K, N, transpose_w) to rows (a power of two) to the name of the best candidate."""
    text = Path(__file__).with_suffix(".json").read_text()
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
    """Returns the schedules worth trying for a shape by name, the one with the lowest estimated time first.

    Arguments as for `matmul_schedule`; `gated` says that a block combines the products of two weights.
    """
    return dict(_ranked(Problem(stack, m, k, 2 * n if gated else n, transpose_w, itemsize, out_itemsize), gated))


@functools.lru_cache(maxsize=4096)
def _ranked(problem: Problem, gated: bool = False) -> dict[str, MatmulSchedule]:
    found = []
    for shape in _gated_shapes(problem.m) if gated else _shapes(problem.m, problem.transpose_w):
        schedule = _fill(shape, problem)
        if schedule is None:
            continue
        if gated:
            schedule = replace(schedule, group=8)  # bands of 16 tiles took 1350 us instead of 1220
        found.append((estimate_ns(schedule, shape.blocks_per_sm, problem), shape, schedule))
    found.sort(key=lambda entry: entry[0])
    # Similar widths have similar estimates: the best few per candidate suffice.
    ranked: dict[str, MatmulSchedule] = {}
    kept: dict[_Shape, int] = {}
    for _, shape, schedule in found:
        form = shape._replace(tile_columns=0, blocks_per_sm=1)
        kept[form] = kept.get(form, 0) + 1
        if kept[form] <= _MOST_WIDTHS:
            ranked[shape.name] = schedule
    return ranked


def _fill(shape: _Shape, problem: Problem) -> MatmulSchedule | None:
    """Returns the schedule of a shape with as many stages as fit, or None if fewer than 3 fit."""
    swap, rows, columns, k_step, warpgroups, turns, _ = shape
    base = MatmulSchedule(swap, rows, columns, k_step, 2, warpgroups, "tiles" if turns else "rows")
    budget = (SHARED_BYTES + _RESERVED_BYTES) // shape.blocks_per_sm - _RESERVED_BYTES
    stage = (base.block_rows + base.block_columns) * base.k_step * problem.itemsize
    for buffers in (2, 1):
        base = replace(base, out_buffers=buffers)
        stages = min(_MOST_STAGES, 2 + (budget - base.shared_bytes(problem.itemsize, problem.out_itemsize)) // stage)
        if stages >= _FEWEST_STAGES:
            break
    else:
        return None
    tiles, resident = problem.tiles(base), SMS * shape.blocks_per_sm
    # The tiles of a wave should cover roughly a square of the result.
    group = 16 if tiles > _MANY_TILES and base.block_rows <= 128 else 8
    if shape.turns:
        # Each block has at least two tiles, one per warpgroup.
        return replace(base, stages=stages, group=group, blocks=min(resident, -(-tiles // shape.warpgroups)))
    return replace(base, stages=stages, group=group, blocks=resident if tiles > resident else 0)
