"""Sums of rows on NVIDIA GPUs from Ampere on, by a Triton kernel with the bits of `portable`."""

import jax
import jax.numpy as jnp

from pallas_kernels.contract import RowContract, honour, row_contract
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.jax_triton.rows import sizes, warps
from pallas_kernels.parts.served import served_if
from pallas_kernels.rows.jax_triton.kernels import sum_kernel
from pallas_kernels.target import Target

_MOST_COLUMNS = 131_072


@served_if(
    lambda x, **_: (
        x.shape[2] == 1
        and 0 < x.shape[1] <= _MOST_COLUMNS
        and x.shape[0] > 0
        and x.dtype.name in ("float32", "bfloat16", "float16")
    ),
    "(A, R, 1) of float32, bfloat16 or float16, with up to 131072 columns R and no empty dimension",
)
def sum_axis(x: jax.Array, *, contract: RowContract, target: Target, mean: bool = False) -> jax.Array:
    """Bit-identical to `portable.sum_axis`.

    Guarantee: row-invariant.
    """
    honour("sum_axis", contract, row_contract())
    rows, columns, _ = x.shape
    (total,) = launch(
        sum_kernel,
        x,
        target=target,
        out=[jax.ShapeDtypeStruct((rows, 1), jnp.float32)],
        grid=(rows,),
        warps=warps(columns, contract),
        stages=1,
        fuses=False,
        constants=sizes(columns, contract) | {"DIVIDED": mean},
    )
    return total
