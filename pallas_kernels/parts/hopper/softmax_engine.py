"""Row kernels that need the maximum of a row and the sum of its exponentials, on a Hopper GPU.

The 128 threads of a warpgroup are the lanes of `OnlineRowContract`; a warpgroup takes one segment of a row at a time.
`schedule.hopper.softmax` chooses between three forms:
- registers, for not too many short rows: a warpgroup for each segment, which reads it once, directly, and keeps it;
- ring, for many rows: pieces of rows are copied ahead into shared memory, and the warpgroups of a block take them in
  turns. A first pass takes the statistics, a second one writes results. The second pass begins with the pieces that are
  still in the ring, and goes on with the others from the nearest to the farthest, which the L2 cache is likely to hold:
  a row that fits into the ring is read once, of a longer one only the rest a second time;
- split, for few long rows, which would leave most of the GPU idle: a block for each segment. A first kernel writes the
  statistics, lane by lane, a second one merges them, in every block anew, and writes a segment's results.

How to write a kernel on it (`pallas_kernels/softmax/hopper.py` holds more):

    def finish(row, m, s):                     # numbers, held by every thread
        return m, row.quotient(1, s)

    def step(row, x, m, reciprocal):           # float32 columns
        return (row.product(row.exponential(x - m), reciprocal),)

    (y,) = run_online(finish, x, step, [x.dtype], contract=online_row_contract(x.shape[1]), interpret=False)
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import OnlineRowContract, honour, online_row_contract
from pallas_kernels.parts.hopper.pieces import Pieces
from pallas_kernels.parts.hopper.softmax_forms import registers, split
from pallas_kernels.parts.hopper.softmax_ring import ring
from pallas_kernels.parts.hopper.softmax_run import Arrays, Finish, Run, Step
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.schedule.hopper.softmax import OnlineSchedule, online_schedule, segments_of


@in_32_bits
def run_online(
    finish: Finish,
    x: jax.Array,
    step: Step | None = None,
    results: Sequence[Any] = (),
    *,
    contract: OnlineRowContract,
    given: Sequence[jax.Array] = (),
    numbers: int = 0,
    interpret: Any,
    schedule: OnlineSchedule | None = None,
) -> Arrays:
    """Runs a kernel on the statistics of rows, in the order of a contract.

    Args:
        finish: Maps the row, its maximum m and the sum s of exp(x - m) to numbers for `step`, and puts the row's
            numbers. Where the maximum is not finite s is the sum of exp(x).
        x: (M, C), C at least 1.
        step: Maps the row, float32 columns of it and the numbers of `finish` to one array for each result; None if
            nothing as wide as the row is to be written.
        results: Dtypes of the (M, C) results of `step`.
        contract: Order of the sum, `online_row_contract(C)`.
        given: (M, 1) arrays, numbers for each row.
        numbers: How many (M, 1) float32 results `finish` puts.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.
        schedule: How to feed the rows; chosen from the shape by default. No schedule changes a bit.

    Returns:
        The results, then the numbers.

    Raises:
        UnsupportedError: If the contract is another one.
    """
    m, c = x.shape
    honour("statistics of rows", contract, online_row_contract(c))
    out = [jax.ShapeDtypeStruct((m, c), d) for d in results] + [jax.ShapeDtypeStruct((m, 1), jnp.float32)] * numbers
    if m == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    if schedule is None:
        schedule = online_schedule(m, c, x.dtype.itemsize)
    run = Run(
        rows=m,
        columns=c,
        segments=Pieces.of(c, contract.segment, segments_of(c, contract.segment)),
        finish=finish,
        step=step,
        results=len(results),
        out=out,
        schedule=schedule,
        interpret=interpret,
    )
    form = {"ring": ring, "registers": registers, "split": split}[schedule.form]
    return form(run, x, given)
