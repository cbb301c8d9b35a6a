"""Launches of Triton kernels with one row in each program, in the order of `RowContract`."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import row_contract
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.jax_triton.rows import sizes, warps
from pallas_kernels.target import Target

MOST_COLUMNS: Final = 131_072
DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})
NEEDS: Final = "rows of up to 131072 columns of float32, bfloat16 or float16"


def rows_served(x: jax.Array, *arrays: jax.Array | None) -> bool:
    """Returns whether kernels serve rows (M, C), and further arrays of these dtypes."""
    return x.shape[1] <= MOST_COLUMNS and {a.dtype.name for a in (x, *arrays) if a is not None} <= DTYPES


def launch_rows(
    kernel: Any,
    rows: jax.Array,
    others: Sequence[jax.Array | None],
    out: Sequence[jax.ShapeDtypeStruct],
    target: Target,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Launches a kernel; without elements the results are zeros.

    Args:
        kernel: A function under `triton.jit`, with the constants of `rows.sizes`.
        rows: (M, C) or (M, C, 1), its first array.
        others: The arrays after it; None for an absent one, which is not read.
        out: Shapes and dtypes of the results.
        target: The GPU that the program is lowered for.
        **options: Further constants of the kernel.
    """
    m, columns = rows.shape[:2]
    if 0 in (m, columns):
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    contract = row_contract()
    return launch(
        kernel,
        rows,
        *(rows if a is None else a for a in others),
        target=target,
        out=out,
        grid=(m,),
        warps=warps(columns, contract),
        stages=1,
        fuses=False,
        constants=sizes(columns, contract) | options,
    )


def like(rows: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(rows.shape, rows.dtype)


def number_of_each(rows: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a float32 number for each row."""
    return jax.ShapeDtypeStruct((rows.shape[0], 1), jnp.float32)
