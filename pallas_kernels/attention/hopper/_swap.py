"""Which calls a schedule with keys as wgmma's rows serves."""

from typing import Any, Final

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.hopper.columns import CHAINS, COLUMNS
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.hopper.tile import ROWS

_OF_BYTES: Final = 128  # widest heads of 8 bits: a row lies in one swizzled tile


def check_swap(body: Any, call: AttentionCall) -> None:
    """Checks a schedule's `swap` and `workers`.

    Args:
        body: The kernel's program, a `decode.Body`.
        call: The call.

    Raises:
        UnsupportedError: If the schedule does not fit the call.
    """
    setup, rows, stored = body.setup, body.rows, call.key.dtype
    if body.schedule.workers > 1 and not (body.schedule.swap and stored.itemsize == 1):
        raise UnsupportedError(
            "attention on a Hopper GPU: expected several walkers with swap and a cache of 8 bits alone, got"
            f" {body.schedule} and a cache of {stored}."
        )
    if not body.schedule.swap:
        return
    widths, order = (setup.size, setup.value_size), (setup.contract.key_block, setup.contract.sum_chains)
    plain = setup.scoring.bend is None and not call.changes_scores
    if (
        body.schedule.whole
        or rows > COLUMNS
        or any(width % ROWS for width in widths)
        or (stored.itemsize == 1 and max(widths) > _OF_BYTES)
        or order != (2 * ROWS, CHAINS)
        or not plain
    ):
        raise UnsupportedError(
            f"attention on a Hopper GPU: expected, for a schedule with swap and splits, at most {COLUMNS} rows of heads"
            f" that are multiples of {ROWS} wide (up to {_OF_BYTES} with 8 bits), blocks of {2 * ROWS} keys, {CHAINS}"
            f" chains, and nothing that bends the scores or is added to them; got {body.schedule}, {rows} rows, widths"
            f" {widths} of {stored}, {setup.contract}, {setup.scoring}, optional arrays"
            f" {list(call.present)}. Take a schedule without swap."
        )
