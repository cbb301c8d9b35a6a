"""Products of rows in groups (experts) by the Triton kernel of matmul, and the gradients of their weights.

Every program finds its group from the sizes in GPU memory, so that no other kernel has to run first.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import MmaChunkContract, MmaContract, WgmmaChunkContract, WgmmaContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.empty_groups import empty_sums
from pallas_kernels.matmul.jax_triton.run import Additions, Sizes, on_tensor_cores
from pallas_kernels.matmul.schedule.jax_triton import Tile
from pallas_kernels.parts.served import served_if
from pallas_kernels.target import Target

MOST_GROUPS: Final = 1024
"""Groups at most: each program reads all their sizes."""

_OP: Final = "pallas_kernels.matmul.jax_triton.groups.group_matmul"
_SUMS_OP: Final = "pallas_kernels.matmul.jax_triton.groups.group_weight_gradient"
_OPERANDS: Final = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def _serves(x: Any, w: Any, *_: Any, **__: Any) -> bool:
    return w.shape[0] <= MOST_GROUPS and x.dtype == w.dtype and x.dtype in _OPERANDS


@served_if(_serves, f"x and w of one dtype, bfloat16 or float16, and at most {MOST_GROUPS} groups")
def group_matmul(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    contract: MmaContract | WgmmaContract,
    target: Target,
    transpose_w: bool = False,
    out_dtype: Any = None,
    zero_unused: bool = True,
    tile: Tile | None = None,
) -> jax.Array:
    """Multiplies each row by the weights of its group. Nothing is copied or padded.

    Args:
        x: (M, K), bfloat16 or float16, sorted by group.
        w: (G, K, N) of the same dtype, or (G, N, K) with `transpose_w`; at most 1024 groups.
        sizes: (G,) int32, the number of rows of each group.
        contract: Order of the sum over K.
        target: The GPU that the program is lowered for.
        transpose_w: Whether the weights of a group are stored as (N, K).
        out_dtype: Dtype of the result; that of `x` by default. The float32 sum is rounded once.
        zero_unused: Not used: rows after the last group are always written.
        tile: Chosen from M, G and N by default. The bits do not depend on it.

    Returns:
        (M, N) of `out_dtype`. Rows after the last group are zeros. If sizes are negative or add up to more than M,
        the whole result is nan.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; a row has the bits that `pallas_kernels.matmul.jax_triton.launch.matmul` gives it with
    the weights of its group, wherever it stands and however many rows its group and the others have.
    """
    del zero_unused
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    came = f"got x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}, {transpose_w=}, {contract!r}"
    if not isinstance(contract, MmaContract | WgmmaContract):
        raise UnsupportedError(f"{_OP}: expected an MmaContract or a WgmmaContract, {came}.")
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[-1 if transpose_w else -2]:
        raise UnsupportedError(
            f"{_OP}: expected x (M, K) and w (G, K, N), or (G, N, K) with transpose_w, {came}; fold leading dimensions"
            " into the rows."
        )
    check_sizes(_OP, sizes, w.shape[0])
    (m, k), groups, n = x.shape, w.shape[0], w.shape[-2 if transpose_w else -1]
    if 0 in (m, k, groups, n):
        return empty_sums(sizes, m, (m, n), out_dtype)
    storage = (1, k) if transpose_w else (n, 1)
    layout = Sizes(groups, m, k, n, (k, 1), storage, (True, False), "rows")
    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    return on_tensor_cores(x, w, layout, out, target, tile, Additions(groups=sizes))


def _serves_sums(x: Any, g: Any, sizes: Any, **_: Any) -> bool:
    return sizes.shape[0] <= MOST_GROUPS and x.dtype == g.dtype and x.dtype in _OPERANDS


@served_if(_serves_sums, f"x and g of one dtype, bfloat16 or float16, and at most {MOST_GROUPS} groups")
def group_weight_gradient(
    x: jax.Array,
    g: jax.Array,
    sizes: jax.Array,
    *,
    contract: MmaChunkContract | WgmmaChunkContract,
    target: Target,
    out_dtype: Any = None,
    tile: Tile | None = None,
    pick: Any = None,
) -> jax.Array:
    """Sums the outer products of the rows of each group: the gradient of `w` in `group_matmul`. Nothing is copied.

    Args:
        x: (M, K), bfloat16 or float16, sorted by group.
        g: (M, N) of the same dtype, the cotangent of the product. Exchange the two for weights stored as (N, K).
        sizes: (G,) int32, the rows of each group; at most 1024 groups.
        contract: Order of the sum over the rows of a group.
        target: The GPU that the program is lowered for.
        out_dtype: float32 by default; the sum is rounded once.
        tile: Chosen from the shape by default. The bits do not depend on it.
        pick: Not used: other backends gather rows by it.

    Returns:
        (G, K, N) of `out_dtype`; zeros for a group without rows. If sizes are negative or add up to more than M,
        the whole result is nan.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: a group's sum depends on its own rows alone, in their order, and has the bits that
    `pallas_kernels.matmul.jax_triton.launch.weight_gradient` gives them.
    """
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    came = f"got x {x.dtype}{list(x.shape)}, g {g.dtype}{list(g.shape)}, {contract!r}"
    if not isinstance(contract, MmaChunkContract | WgmmaChunkContract):
        raise UnsupportedError(f"{_SUMS_OP}: expected an MmaChunkContract or a WgmmaChunkContract, {came}.")
    if x.ndim != 2 or g.ndim != 2 or x.shape[0] != g.shape[0]:
        raise UnsupportedError(f"{_SUMS_OP}: expected x (M, K) and g (M, N) with as many rows, {came}.")
    check_sizes(_SUMS_OP, sizes)
    (m, k), n, groups = x.shape, g.shape[1], sizes.shape[0]
    if 0 in (m, k, n, groups):
        return empty_sums(sizes, m, (groups, k, n), out_dtype)
    layout = Sizes(groups, k, m, n, (1, k), (n, 1), (True, True), "depth")
    out = jax.ShapeDtypeStruct((groups, k, n), out_dtype)
    return on_tensor_cores(x, g, layout, out, target, tile, Additions(groups=sizes))


def check_sizes(op: str, sizes: Any, groups: int | None = None) -> None:
    """Checks the sizes of groups.

    Raises:
        UnsupportedError: If they are not int32, or not one for each group.
    """
    if sizes.ndim != 1 or sizes.dtype != jnp.int32 or groups not in (None, sizes.shape[0]):
        raise UnsupportedError(
            f"{op}: expected sizes int32[{'G' if groups is None else groups}], one for each group, got"
            f" {sizes.dtype}{list(sizes.shape)}; cast them."
        )
