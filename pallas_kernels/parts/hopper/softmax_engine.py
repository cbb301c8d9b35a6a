"""Row kernels that need the maximum of a row and the sum of its exponentials, on a Hopper GPU.

The 128 threads of a warpgroup are the lanes of `OnlineRowContract`; a warpgroup processes one segment at a time.
`schedule.hopper.softmax` chooses between four kernels:
- warps, for short rows: a warp, or a few threads of it, read a row once and hold it in registers, four or eight
  neighbouring lanes of a strip a thread;
- registers, for a moderate number of rows that are not long: one warpgroup per segment reads it once and holds it in
  registers;
- ring, for many rows: pieces of rows are prefetched into a circular buffer in shared memory, and the warpgroups of a
  block take them round-robin. A first pass computes the statistics, a second pass writes results. The second pass
  starts with the pieces still in shared memory and continues in reverse order with the rest, which is likely in the L2
  cache: a row that fits in the buffer is read once; of a longer row, only the rest is read a second time;
- split, for few long rows, which would leave most of the GPU idle: one block per segment. A first kernel writes the
  statistics of each lane; a second kernel merges them in every block and writes a segment's results.

How to write a kernel on it (`pallas_kernels/softmax/hopper.py` holds more):

    def finish(row, m, s):                     # scalars, held by every thread
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
from pallas_kernels.parts.hopper.softmax_forms import registers, split, warps
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
        finish: Maps the row, its maximum m and the sum s of exp(x - m) to scalars for `step`, and writes the row's
            scalar results. If the maximum is not finite, s is the sum of exp(x).
        x: (M, C), C at least 1.
        step: Maps the row, float32 columns of it and the scalars of `finish` to one array for each result; None if
            there are no full-width results.
        results: Dtypes of the (M, C) results of `step`.
        contract: Order of the sum, `online_row_contract(C)`.
        given: (M, 1) arrays, scalars of each row.
        numbers: How many (M, 1) float32 results `finish` puts.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.
        schedule: How to feed the rows; chosen from the shape by default. It does not affect the bits.

    Returns:
        The results, then the numbers.

    Raises:
        UnsupportedError: If the contract is not supported.
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
    form = {"ring": ring, "registers": registers, "split": split, "warps": warps}[schedule.form]
    return form(run, x, given)
