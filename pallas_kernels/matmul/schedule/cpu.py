"""CPU schedules of matmul: the program for each tile size, as data.

Every step of a ladder names a candidate program (`pallas_kernels.matmul.cpu.forms`) and its rows. All candidates of a
ladder follow the same contract; `pallas_kernels.matmul.cpu.launch` still compares each with the reference, bit for bit,
before using it on a machine, since the libraries that XLA's dot calls depend on the processor and the jaxlib version.
"""

from collections.abc import Callable
from typing import Final, NamedTuple


class Step(NamedTuple):
    """One schedule: a candidate program of the matmul and the rows of its tile."""

    form: str
    rows: int


_TILES: Final = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_GEMV: Final = Step("gemv", 1)
_LONG_BLOCK: Final = 512
_MOST_ALIKE: Final = 128
_MOST_TURNED: Final = 64


def _ladder(forms_for: Callable[[int], tuple[str, ...]], tiles: tuple[int, ...] = _TILES) -> tuple[Step, ...]:
    return tuple(Step(form, rows) for rows in tiles for form in forms_for(rows))


# For one tile the faster candidate comes first; the next is for shapes where the first splits K differently.
_LONG: Final = (_GEMV, *_ladder(lambda rows: ("whole", "stacked"), _TILES[1:]))
_SHORT: Final = (
    _GEMV,
    Step("each", 2),
    *_ladder(lambda rows: ("columns", "stacked", "panels") if rows <= 32 else ("stacked", "columns")),
)
_TRANSPOSED: Final = _ladder(lambda rows: ("whole", "panels", "stacked"))
_TURNED: Final = (
    Step("whole", _TILES[0]),
    Step("turned", 1),
    *_ladder(
        lambda rows: (
            ("whole", "turned", "panels", "stacked") if rows <= _MOST_TURNED else ("whole", "panels", "stacked")
        )
    ),
)
# (N, K) weights in the order of (K, N) weights, whose short blocks no library uses by default.
_SHORT_TRANSPOSED: Final = _ladder(lambda rows: ("panels", "stacked"))


def matmul_ladder(k: int, k_block: int, *, transpose_w: bool) -> tuple[Step, ...]:
    """Returns the steps for a matmul with rows of `k` elements, by ascending tile.

    Args:
        k: Length of the contracted dimension.
        k_block: Block of K in the contract.
        transpose_w: True when the weights are stored as (N, K).
    """
    if transpose_w:
        if k_block < min(k, _LONG_BLOCK):
            return _SHORT_TRANSPOSED
        # Rows that map to the same cache sets evict each other while they are transposed.
        return _TURNED if k & -k <= _MOST_ALIKE else _TRANSPOSED
    return _LONG if k_block == _LONG_BLOCK else _SHORT


def steps_by_preference(ladder: tuple[Step, ...], rows: int) -> tuple[Step, ...]:
    """Returns the steps in the order in which to try them for `rows` rows.

    The smallest tile that holds all rows comes first, then larger ones, then smaller ones from the largest down.
    """
    return tuple(s for s in ladder if s.rows >= rows) + tuple(s for s in reversed(ladder) if s.rows < rows)


class StackStep(NamedTuple):
    """One schedule of a stack of products: a candidate program, and the rows and columns of each padded product.

    The candidate "crossed" computes one product of the rows of several entries and all their columns.
    """

    form: str
    rows: int
    columns: int


_FEW_ROWS: Final = 32
_LONGEST_CHAIN: Final = 32
_MOST_IN_CHAINS: Final = 1 << 12
_MOST_BYTES: Final = 1 << 28
_MOST_PARTIAL_BYTES: Final = 1 << 23
_MOST_PRODUCTS: Final = 1 << 33
_MOST_PADDED_ENTRIES: Final = 256
_CROSSED: Final = 16
_FEWEST_CROSSED: Final = 4


def stack_steps(m: int, k: int, n: int, k_block: int, *, transpose_x: bool, transpose_w: bool) -> list[StackStep]:
    """Returns the steps for a stack of products in the order in which to try them.

    Args:
        m: Rows of each product.
        k: Length of the contracted dimension.
        n: Columns of each product.
        k_block: Block of K in the contract.
        transpose_x: True when the rows are stored as (K, M).
        transpose_w: True when the weights are stored as (N, K).
    """
    others = _dot_steps(m, k, n, k_block, transpose_x=transpose_x, transpose_w=transpose_w)
    if k > min(k_block, _LONGEST_CHAIN) or m * k * n > _MOST_IN_CHAINS:
        return others
    chain = StackStep("chain", m, n)  # no library call per entry
    return [*others, chain] if m == 1 and n >= 8 and not transpose_w else [chain, *others]


def _dot_steps(m: int, k: int, n: int, k_block: int, *, transpose_x: bool, transpose_w: bool) -> list[StackStep]:
    full = _up_to(n, 64)  # with full tiles the library runs blocks of 512 as one chain
    vectors = max(n, 8) if n % 8 != 1 else _up_to(n, 8)  # XLA compiles a single column as another operation
    if transpose_w and k_block == _LONG_BLOCK:
        rows = max(m, 2)
        steps = [StackStep("whole", rows, columns) for columns in ((n, full) if n > 32 else (full,))]
        if m == 1 and n <= 8:  # inner products: as few columns as possible
            steps.insert(0, StackStep("rows", 1, 8))
        if m == n == 1:
            steps.insert(0, StackStep("crossed", _CROSSED, _CROSSED))
        return list(dict.fromkeys(steps))
    if m == 1:
        return [StackStep("rows", 1, vectors)]
    forms = ("columns", "rows") if m <= _FEW_ROWS and not transpose_x else ("rows", "columns")
    steps = [StackStep(form, m, columns) for columns in (vectors, full) for form in forms]
    if k > k_block == _LONG_BLOCK:
        steps = [StackStep("whole", max(m, 4), columns) for columns in (vectors, full)] + steps
    return list(dict.fromkeys(steps))


def _up_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def stack_entries(step: StackStep, entries: int, k: int, k_block: int) -> int:
    """Returns how many entries of a stack one program of the step takes, or 0.

    A single entry may be too large for it, or all entries too few. Large programs make the comparison with the
    reference expensive; large partial sums do not fit in the cache.

    Args:
        step: The step.
        entries: Entries of the stack.
        k: Length of the contracted dimension.
        k_block: Block of K in the contract.
    """
    _, m, n = step
    if step.form == "crossed":
        if entries < _FEWEST_CROSSED:
            return 0
        m = n = 1
    blocks = 1 if step.form in ("whole", "chain", "crossed") else -(-k // k_block)
    each = min(_MOST_BYTES // (4 * (m * k + k * n + m * n)), _MOST_PRODUCTS // (m * k * n))
    if m == 1 and n == 8 and step.form != "chain":
        each = min(each, _MOST_PADDED_ENTRIES)
    if blocks > 1:
        each = min(each, _MOST_PARTIAL_BYTES // (4 * blocks * m * n))
    # Programs of equal size need the fewest compilations.
    return min(entries, -(-entries // -(-entries // each))) if each else 0
