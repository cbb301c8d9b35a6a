"""Hopper schedules of the TF32 matmul.

A step of wgmma takes 32 bytes of K of either operand for any dtype, so float32 rows of K elements cost the same as
bfloat16 rows of 2 K elements: (N, K) weights use the schedules of `pallas_kernels.matmul.schedule.hopper.matmul`. (K,
N) weights are read into registers, transposed inside the kernel, or by a copy. The bits do not depend on it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from pallas_kernels.matmul.schedule.hopper.estimate import Problem, estimate_ns
from pallas_kernels.matmul.schedule.hopper.matmul import candidates
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, SMS, MatmulSchedule

_SQUARE: Final = 32
_NARROW: Final = (8, 16)  # columns of weights that are transposed into memory of their own
_THREADS: Final = 128
_MOST_TRANSPOSED: Final = 64  # elements that a thread holds while it transposes
_MOST_STAGES: Final = 12
_FEWEST_STAGES: Final = 3

# Hardware parameters of the estimate, fitted to measured times (benchmarks/NOTES.md).
_CYCLES_PER_NS: Final = 1.75
_BYTES_PER_NS: Final = 4200
_COPY_BYTES_PER_NS: Final = 3800  # a transposing copy, bytes read and written
_SHARED_BYTES_PER_CYCLE: Final = 120
_TRANSPOSE_CYCLES: Final = 450  # of a transposing warpgroup's stage, besides its reads and writes
_NARROW_CYCLES: Final = (208, 27)  # of a stage of narrow transposed weights, and for 8 elements of K
_REGISTERS_CYCLES: Final = (360, 25)  # the same with few columns and rows from registers, ...
_MORE_WARPGROUPS_CYCLES: Final = 115  # ... for each further warpgroup, ...
_PRODUCT_CYCLES_PER_COLUMN: Final = 0.5  # ... or of 8 elements of K, for each column of every warpgroup, ...
_EXPOSED_CYCLES: Final = {True: 20, False: 200}  # ... and what is not hidden, for long instructions and for short ones
_LONG_COLUMNS: Final = 192
_ISSUE_CYCLES: Final = 240  # two copies
_START_CYCLES: Final = 3000
_TILE_CYCLES: Final = 600


@dataclass(frozen=True)
class Tf32Schedule:
    """Tiles and stages of a TF32 matmul.

    Attributes:
        tiles: Tiles and stages.
        transposers: Warpgroups of a block, 1 or 2, that transpose (K, N) weights inside the kernel; 0 for a copy before
            it. Ignored for (N, K) weights.
        from_registers: Whether (K, N) weights are read into registers as wgmma's rows instead of being transposed.
    """

    tiles: MatmulSchedule
    transposers: int = 0
    from_registers: bool = False

    def __post_init__(self) -> None:
        t = self.tiles
        if not (self.transposers or self.from_registers):
            return
        if t.split != "rows":
            raise ValueError(f"(K, N) weights must be read with split='rows', got {t}.")
        if self.from_registers:
            if self.transposers or not t.swap or t.tile_rows != 64:
                raise ValueError(f"rows from registers must have swap, tile_rows=64 and no transposers, got {self}.")
            return
        if not (1 <= self.transposers <= 2 and self.transposers + t.warpgroups <= 3):
            raise ValueError(f"1 or 2 transposers must be with no more than 2 or 1 computing warpgroups, got {self}.")
        if self.transposers + t.warpgroups == 3 and t.tile_rows * t.tile_columns > 64 * 128:
            # With the copying warpgroup, a thread starts with 128 registers.
            raise ValueError(f"three transposing and computing warpgroups take tiles of at most 64 by 128, got {t}.")
        if t.stages % self.transposers:
            raise ValueError(f"stages must be a multiple of the transposing warpgroups, got {self}.")
        transposed_w = t.block_n * t.k_step
        if self.narrow and not t.swap:
            return
        if t.block_n % _SQUARE or transposed_w % (2 * _SQUARE**2) or transposed_w > _MOST_TRANSPOSED * _THREADS:
            raise ValueError(
                f"a stage of transposed weights must be whole squares of {_SQUARE}, an even number of them, at most"
                f" {_MOST_TRANSPOSED * _THREADS} elements, got k_step {t.k_step} and {t.block_n} columns."
            )

    @property
    def narrow(self) -> bool:
        """Whether tiles of weights are narrower than a swizzled row, and are transposed into memory of their own."""
        return self.transposers > 0 and self.tiles.block_n in _NARROW

    def shared_bytes(self, out_itemsize: int) -> int:
        """Returns the shared memory of a block."""
        t = self.tiles
        return t.shared_bytes(4, out_itemsize) + (t.stages * t.block_n * t.k_step * 4 if self.narrow else 0)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        t = self.tiles
        return (t.block_rows + t.block_columns + (t.block_n if self.narrow else 0)) * t.k_step * 4


def tf32_schedule(
    m: int, k: int, n: int, *, stack: int = 1, transpose_w: bool = False, out_itemsize: int = 4
) -> Tf32Schedule:
    """Returns the schedule of a shape: the candidate estimated fastest.

    Arguments as for `matmul_schedule`.

    Example:
        >>> tf32_schedule(8, 4096, 1024).transposers, tf32_schedule(8, 4096, 4096).from_registers
        (1, True)
    """
    return next(tf32_candidates(m, k, n, stack=stack, transpose_w=transpose_w, out_itemsize=out_itemsize))


def tf32_candidates(
    m: int, k: int, n: int, *, stack: int = 1, transpose_w: bool = False, out_itemsize: int = 4
) -> Iterator[Tf32Schedule]:
    """Yields the schedules worth trying for a shape, the one with the lowest estimated time first.

    Arguments as for `matmul_schedule`.
    """
    problem = Problem(stack, m, 2 * k, n, True, 2, out_itemsize)
    found = []
    for tiles in candidates(m, 2 * k, n, stack=stack, transpose_w=True, out_itemsize=out_itemsize).values():
        time = estimate_ns(tiles, SHARED_BYTES // tiles.shared_bytes(2, out_itemsize), problem)
        if not transpose_w:
            time += stack * 2 * k * n * 4 / _COPY_BYTES_PER_NS
        found.append((time, Tf32Schedule(replace(tiles, k_step=tiles.k_step // 2))))
    if not transpose_w:
        found += [(_estimate_ns(s, m, k, n, stack), s) for s in _on_the_way(m, n, stack, out_itemsize)]
    # The tile's aspect ratio does not affect the estimate: of 64 by 256 and 128 by 128 only the first was measured.
    yield from (schedule for _, schedule in sorted(found, key=lambda entry: (entry[0], entry[1].tiles.tile_rows)))


def _shapes(m: int, out_itemsize: int) -> Iterator[tuple[bool, int, int, int, int]]:
    """Yields (weights are wgmma's rows, columns of a tile, step of K, computing and transposing warpgroups).

    Without transposing warpgroups the weights are read into registers.
    """
    most = max(8, 1 << (m - 1).bit_length())
    if m <= 32:
        yield (True, most, 128, 1, 0)
    if m <= 128:
        if m <= 64:
            # Rows of a stored tile have at least 32 bytes.
            yield from ((False, columns, 128, 1, 1) for columns in _NARROW if columns * out_itemsize >= 32)
        yield (False, 32, 128, 1, 1) if m <= 32 else (False, 32, 64, 1, 2) if m <= 64 else (False, 32, 64, 2, 1)
        yield from ((True, most, 64, 1, 0), (True, most, 64, 2, 0))
        return
    yield from ((True, 128, 64, 1, 0), (True, 128, 64, 2, 0), (True, 256, 32, 2, 0), (True, 256, 32, 1, 1))


def _on_the_way(m: int, n: int, stack: int, out_itemsize: int) -> Iterator[Tf32Schedule]:
    """Yields schedules that read (K, N) weights as they are."""
    for swap, columns, k_step, warpgroups, transposers in _shapes(m, out_itemsize):
        tiles = MatmulSchedule(swap, 64, columns, k_step, 2, warpgroups, out_buffers=1)
        several = max(1, transposers)
        fewest = Tf32Schedule(replace(tiles, stages=2), transposers, not transposers)
        spare = SHARED_BYTES - fewest.shared_bytes(out_itemsize)
        stages = min(_MOST_STAGES, 2 + spare // fewest.stage_bytes) // several * several
        if stages < _FEWEST_STAGES:
            continue
        blocks = SMS if stack * tiles.tiles(m, n) > SMS else 0
        yield Tf32Schedule(replace(tiles, stages=stages, blocks=blocks), transposers, not transposers)


def _estimate_ns(s: Tf32Schedule, m: int, k: int, n: int, stack: int) -> float:
    """Returns a rough time with (K, N) weights that are not copied first, over all waves."""
    t = s.tiles
    if s.from_registers:
        chain = _REGISTERS_CYCLES[0] + t.k_step / 8 * _REGISTERS_CYCLES[1]
        products = t.k_step / 8 * t.tile_columns * t.warpgroups * _PRODUCT_CYCLES_PER_COLUMN
        exposed = _EXPOSED_CYCLES[t.tile_columns >= _LONG_COLUMNS]
        step = max(chain + (t.warpgroups - 1) * _MORE_WARPGROUPS_CYCLES, products + exposed)
    else:
        moved = 2 * t.block_n * t.k_step * 4
        loaded = (t.block_n + min(t.block_m, -(-m // 8) * 8)) * t.k_step * 4
        # Every 64 rows of wgmma read all columns of their warpgroup.
        multiplied = t.warpgroups * (t.tile_rows + t.tile_rows // 64 * t.tile_columns) * t.k_step * 4
        step = max(
            (loaded + multiplied + moved) / _SHARED_BYTES_PER_CYCLE,
            (_TRANSPOSE_CYCLES + moved / _SHARED_BYTES_PER_CYCLE) / s.transposers,
            _NARROW_CYCLES[0] + t.k_step / 8 * _NARROW_CYCLES[1] if s.narrow else _ISSUE_CYCLES,
        )
    waves = -(-stack * t.tiles(m, n) // SMS)
    computing = (_START_CYCLES + waves * (-(-k // t.k_step) * step + _TILE_CYCLES)) / _CYCLES_PER_NS
    memory = stack * (k * n + m * k + m * n) * 4 / _BYTES_PER_NS + _START_CYCLES / _CYCLES_PER_NS
    return max(computing, memory) + 0.02 * computing
