"""Gated RMSNorm of rows of 128 columns on NVIDIA GPUs from Ampere on, in one kernel."""

from dataclasses import dataclass
from typing import Any, Final

import jax

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, RowContract, honour, row_contract
from pallas_kernels.gated_norm.jax_triton.kernels import gated_rms_norm_kernel
from pallas_kernels.gated_norm.schedule.jax_triton import GatedSchedule, gated_schedule
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.target import Target

_WIDTH: Final = 128
_DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True)
class GateForm:
    """What the kernel knows when it is compiled.

    Attributes:
        heads: Rows that a row of gates belongs to.
        source: Columns of a row of the array of gates.
        column: Where its gates begin.
        eps: Added to the mean square.
        weighted: Whether there is a weight.
        rows: Rows of a program.
    """

    heads: int
    source: int
    column: int
    eps: float
    weighted: bool
    rows: int


def _serves(*, x: Any, gate: Any, weight: Any = None, contract: RowContract, **_: Any) -> bool:
    known = {a.dtype.name for a in (x, gate, weight) if a is not None} <= _DTYPES
    return bool(known and x.size and x.shape[1] == _WIDTH and contract == row_contract())


@served_if(_serves, f"rows of {_WIDTH} columns of float32, bfloat16 or float16")
@in_32_bits
def gated_rms_norm(
    *,
    x: jax.Array,
    gate: jax.Array,
    weight: jax.Array | None = None,
    column: int,
    eps: float,
    contract: RowContract,
    functions: ElementwiseContract,
    target: Target,
    schedule: GatedSchedule | None = None,
) -> tuple[jax.Array]:
    """Bit-identical to `rms_norm` in float32 and an element-wise product with silu of the gates.

    Guarantee: row-invariant.
    """
    honour("gated_rms_norm", functions, XLA_FUNCTIONS)
    count = x.shape[0]
    schedule = schedule or gated_schedule()
    heads, source = count // gate.shape[0], gate.shape[1]
    form = GateForm(heads, source, column, eps, weight is not None, schedule.rows)
    (y,) = launch(
        gated_rms_norm_kernel,
        *(x, gate, x if weight is None else weight, count),
        target=target,
        out=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=(-(-count // schedule.rows),),
        warps=schedule.warps,
        stages=1,
        fuses=False,
        constants={"form": form},
    )
    return (y,)
