"""The experts of tokens on NVIDIA GPUs from Ampere on."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import (
    PTX_FUNCTIONS,
    ElementwiseContract,
    OnlineRowContract,
    RowContract,
    honour,
    online_row_contract,
    row_contract,
)
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.parts.xla.tiles import next_power_of_two
from pallas_kernels.routing.jax_triton.kernels import select_experts_kernel
from pallas_kernels.schedule.jax_triton.routing import topk_tile
from pallas_kernels.target import Target

_WIDEST: Final = 1023  # one group of lanes
_MOST: Final = 64


def _serves(logits: Any, *, number: int, experts: int, **_: Any) -> bool:
    return (
        logits.shape[0] > 0
        and 0 < number <= min(_MOST, experts)
        and experts <= _WIDEST
        and logits.size < 1 << 31
        and logits.dtype == jnp.float32
    )


@served_if(_serves, f"at least one row of float32, of at most {_WIDEST} columns, and at most {_MOST} of them")
@in_32_bits
def select_experts(
    logits: jax.Array,
    *,
    number: int,
    experts: int,
    contract: OnlineRowContract | RowContract,
    sums: RowContract,
    target: Target,
    functions: ElementwiseContract = PTX_FUNCTIONS,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the largest probabilities of rows, by softmax.

    The bits are those of the kernel of softmax with this contract, `topk.portable.largest` of its result, and
    `rows.portable.sum_axis` of the numbers.

    Args:
        logits: (T, E or more) float32.
        number: How many.
        experts: E; further columns are not read.
        contract: Order of the sum of the exponentials.
        sums: Order of the sum of the largest probabilities.
        target: The GPU.
        functions: How exponentials are computed.

    Returns:
        Indices (T, number) int32, largest probability first, ties in index order; the probabilities (T, number), and
        their sum (T, 1), in float32.

    Guarantee: row-invariant.
    """
    rows, stride = logits.shape
    online = isinstance(contract, OnlineRowContract)
    honour("select_experts", contract, online_row_contract(experts) if online else row_contract())
    honour("select_experts", sums, row_contract())
    honour("select_experts", functions, PTX_FUNCTIONS)
    tile = topk_tile(experts)
    of_each = jax.ShapeDtypeStruct((rows, number), jnp.float32)
    places, numbers, totals = launch(
        select_experts_kernel,
        logits,
        target=target,
        out=[jax.ShapeDtypeStruct(of_each.shape, jnp.int32), of_each, jax.ShapeDtypeStruct((rows, 1), jnp.float32)],
        grid=(rows,),
        warps=tile.warps,
        stages=1,
        fuses=False,
        constants={
            "WIDTH": experts,
            "STRIDE": stride,
            "COLUMNS": tile.columns,
            "PARTS": tile.parts,
            "NUMBER": number,
            "SLOTS": next_power_of_two(number),
            "ONLINE": online,
        },
    )
    return places, numbers, totals
