"""CPU schedules of matmul: which program runs tiles of how many rows, as data.

Every step of a ladder names a form (`pallas_kernels.matmul.cpu`) and its rows. All forms of a ladder mean the same
contract; `pallas_kernels.matmul.cpu` still compares each one with the reference, bit for bit, before it is used on a
machine, since the engines behind XLA's dot change with the processor and the jaxlib version.
"""

from collections.abc import Callable
from typing import Final, NamedTuple


class Step(NamedTuple):
    """One schedule: a form of the matmul program and the rows of its tile."""

    form: str
    rows: int


_TILES: Final = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_GEMV: Final = Step("gemv", 1)


def _ladder(forms_for: Callable[[int], tuple[str, ...]], tiles: tuple[int, ...] = _TILES) -> tuple[Step, ...]:
    return tuple(Step(form, rows) for rows in tiles for form in forms_for(rows))


# For one tile the faster form stands first; the next is there for shapes at which the first cuts K differently.
_LONG: Final = (_GEMV, *_ladder(lambda rows: ("whole", "stacked"), _TILES[1:]))
_SHORT: Final = (_GEMV, *_ladder(lambda rows: ("columns", "stacked") if rows <= 32 else ("stacked", "columns")))
_TRANSPOSED: Final = _ladder(lambda rows: ("whole", "stacked"))


def matmul_ladder(k: int, k_block: int, *, transpose_w: bool) -> tuple[Step, ...]:
    """Returns the steps for a matmul with rows of `k` elements, by ascending tile.

    Args:
        k: Length of the contracted dimension.
        k_block: Block of K in the contract.
        transpose_w: True when the weights are stored as (N, K).
    """
    if transpose_w:
        return _TRANSPOSED
    return _LONG if k_block == 512 else _SHORT


def steps_by_preference(ladder: tuple[Step, ...], rows: int) -> tuple[Step, ...]:
    """Returns the steps in the order in which to try them for `rows` rows.

    The smallest tile that holds all rows comes first, then larger ones, then smaller ones from the largest down.
    """
    return tuple(s for s in ladder if s.rows >= rows) + tuple(s for s in reversed(ladder) if s.rows < rows)
