"""Sums of rows on NVIDIA GPUs from Ampere on, by a Triton kernel with the bits of `portable`."""

import jax

from pallas_kernels.contract import RowContract, honour, row_contract
from pallas_kernels.parts.jax_triton.row_launch import DTYPES, MOST_COLUMNS, launch_rows, number_of_each
from pallas_kernels.parts.served import served_if
from pallas_kernels.rows.jax_triton.kernels import sum_kernel
from pallas_kernels.target import Target


@served_if(
    lambda x, **_: x.shape[2] == 1 and 0 < x.shape[1] <= MOST_COLUMNS and x.shape[0] > 0 and x.dtype.name in DTYPES,
    "(A, R, 1) of float32, bfloat16 or float16, with up to 131072 columns R and no empty dimension",
)
def sum_axis(x: jax.Array, *, contract: RowContract, target: Target, mean: bool = False) -> jax.Array:
    """Bit-identical to `portable.sum_axis`.

    Guarantee: row-invariant.
    """
    honour("sum_axis", contract, row_contract())
    (total,) = launch_rows(sum_kernel, x, [], [number_of_each(x)], target, DIVIDED=mean)
    return total
