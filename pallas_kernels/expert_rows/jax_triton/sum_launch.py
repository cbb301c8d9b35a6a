"""The weighted sum of the rows of each token's experts on NVIDIA GPUs from Ampere on, in one kernel."""

from typing import Any, Final

import jax

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, honour
from pallas_kernels.expert_rows.jax_triton.sum_kernel import sum_kernel
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.schedule.jax_triton.routing import copies_rows, copy_warps, piece_columns
from pallas_kernels.target import Target

_DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})
_MOST_TERMS: Final = 16
"""Rows of a token that a thread holds at once."""

_MOST_PIECES: Final = 65535


def _serves(rows: Any, row: Any, weights: Any, *, dtype: str, **_: Any) -> bool:
    (number, columns), (tokens, topk) = rows.shape, row.shape
    if not {rows.dtype.name, weights.dtype.name, dtype} <= _DTYPES or 0 in (number, columns, tokens):
        return False
    piece = piece_columns(columns, rows.dtype.itemsize)
    fits = copies_rows(columns, rows.dtype.itemsize) and columns // piece <= _MOST_PIECES
    return 0 < topk <= _MOST_TERMS and fits


@served_if(_serves, f"1 to {_MOST_TERMS} rows of a token, whose columns a power of two of at least 32 divides")
@in_32_bits
def add_expert_rows(
    rows: jax.Array, row: jax.Array, weights: jax.Array, *, dtype: str, functions: ElementwiseContract, target: Target
) -> tuple[jax.Array]:
    """Bit-identical to products and sums by element-wise programs, see `bijax.dispatch.expert_sums`.

    Guarantee: row-invariant.
    """
    honour("add_expert_rows", functions, XLA_FUNCTIONS)
    (tokens, topk), columns, itemsize = row.shape, rows.shape[1], rows.dtype.itemsize
    piece = piece_columns(columns, itemsize)
    (out,) = launch(
        sum_kernel,
        *(rows, row, weights),
        target=target,
        out=[jax.ShapeDtypeStruct((tokens, columns), dtype)],
        grid=(tokens, columns // piece),
        warps=copy_warps(columns, itemsize),
        stages=1,
        fuses=False,
        constants={"TOPK": topk, "COLUMNS": columns, "PIECE": piece},
    )
    return (out,)
