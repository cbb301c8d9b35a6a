"""Products of rows in bfloat16 limbs whose K comes in pieces, on a Hopper GPU: the chains wait in memory in between."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import PartsContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.hopper.epilogue import Epilogue
from pallas_kernels.matmul.hopper.operands import check_contract, check_device, pad, pad_weights, unpad
from pallas_kernels.matmul.hopper.parts import add_limbs
from pallas_kernels.matmul.hopper.ring import ring_matmul
from pallas_kernels.matmul.schedule.hopper.matmul import candidates
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

_OP: Final = "pallas_kernels.matmul.hopper.parts_in_turn.chains_of_parts"
_STEP: Final = 16  # elements of K that wgmma adds at a time
_ALIGN: Final = 8  # elements in the 16 bytes to which TMA aligns rows
_WEIGHT_COLUMNS: Final = 16  # columns of the narrowest swizzled tile of weights stored as (K, N)


def chains_of_parts(
    x: jax.Array,
    w: jax.Array,
    total: jax.Array,
    *,
    contract: PartsContract,
    transpose_w: bool = False,
    schedule: MatmulSchedule | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Continues the chains of `matmul_of_parts` over the next piece of K; `add_chains` adds those of a row's limbs.

    Args:
        x: (parts * M, K) bfloat16, the limbs of rows as `matmul_of_parts` takes them. K is a multiple of 16, except in
            the last piece.
        w: (K, N) bfloat16, or (N, K) with `transpose_w`: this piece of the weights.
        total: (parts * M, N) float32, the chains of the pieces before; zeros at the start.
        contract: Limbs, and the order of the sum.
        transpose_w: Whether `w` is stored as (N, K).
        schedule: Tiles, without `swap`; chosen from the shape by default. The bits do not depend on it.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run the kernel on a CPU. The interpreter adds
            `total` after the sum.

    Returns:
        (parts * M, N) float32.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant.
    """
    check_contract(_OP, contract, PartsContract)
    (m, k), n = x.shape, w.shape[0 if transpose_w else 1]
    if (w.shape, total.shape) != ((n, k) if transpose_w else (k, n), (m, n)) or total.dtype != jnp.float32:
        raise UnsupportedError(
            f"{_OP}: expected x (M, K), w (K, N), or (N, K) with transpose_w, and float32 sums (M, N), got x"
            f" {list(x.shape)}, w {list(w.shape)}, {transpose_w=}, total {total.dtype}{list(total.shape)}; call it for"
            " each matrix of a stack."
        )
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        raise UnsupportedError(f"{_OP}: expected bfloat16 limbs and weights, got {x.dtype} and {w.dtype}; cast w.")
    if not interpret:
        check_device(_OP)
    if 0 in (m, k, n):
        return total
    x, w = pad(x, -1, _STEP), pad_weights(w, transpose_w, _STEP, _ALIGN if transpose_w else _WEIGHT_COLUMNS)
    if schedule is None:
        ranked = candidates(m, k, n, transpose_w=transpose_w, out_itemsize=4).values()
        schedule = next(s for s in ranked if not s.swap)
    total = pad(pad(total, 0, schedule.block_m), 1, schedule.block_n)
    found = ring_matmul(
        x,
        w,
        Epilogue(),
        total=total,
        schedule=schedule,
        transpose_w=transpose_w,
        out_dtype=jnp.dtype(jnp.float32),
        interpret=interpret,
    )
    return unpad(found, m, n)


def add_chains(y: jax.Array, *, contract: PartsContract, out_dtype: Any) -> jax.Array:
    """Adds the chains of each row's limbs: (parts * M, N) float32 to (M, N) of `out_dtype`, M a multiple of 16.

    Guarantee: row-invariant, with the bits of `matmul_of_parts`.
    """
    check_contract(_OP, contract, PartsContract)
    return add_limbs(y, contract.parts, _STEP).astype(out_dtype)
