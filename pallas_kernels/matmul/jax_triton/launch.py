"""Matmul on NVIDIA GPUs from Ampere on, by Triton kernels whose tiles depend on the shape, but not their bits.

16-bit operands, and float32 operands in TF32, are summed on tensor cores, in one chain over K. Other float32 operands,
and float64, are summed by fused multiply-adds, in blocks of the contract.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import (
    PTX_FUNCTIONS,
    ChunkContract,
    ElementwiseContract,
    MatmulContract,
    MmaChunkContract,
    MmaContract,
    MmaTf32Contract,
    SplitMmaContract,
    SplitWgmmaContract,
    Tf32Contract,
    WgmmaChunkContract,
    WgmmaContract,
    honour,
)
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.activations import activate
from pallas_kernels.matmul.jax_triton.checks import check_epilogue, check_gradient, check_product
from pallas_kernels.matmul.jax_triton.run import Additions, Sizes, in_chains, in_splits_at_once, on_tensor_cores
from pallas_kernels.matmul.schedule.jax_triton import SplitTile, Tile, split_tile
from pallas_kernels.target import Target

_OP: Final = "pallas_kernels.matmul.jax_triton.launch.matmul"
_GATED_OP: Final = "pallas_kernels.matmul.jax_triton.launch.gated_matmul"
_GRADIENT_OP: Final = "pallas_kernels.matmul.jax_triton.launch.weight_gradient"
ProductContract = (
    MmaContract
    | WgmmaContract
    | SplitMmaContract
    | SplitWgmmaContract
    | MmaTf32Contract
    | Tf32Contract
    | MatmulContract
)
GradientContract = MmaChunkContract | WgmmaChunkContract | ChunkContract


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: ProductContract,
    target: Target,
    transpose_w: bool = False,
    bias: jax.Array | None = None,
    activation: str | None = None,
    functions: ElementwiseContract = PTX_FUNCTIONS,
    residual: jax.Array | None = None,
    out_dtype: Any = "float32",
    tile: Tile | SplitTile | None = None,
) -> jax.Array:
    """Multiplies rows by weights, or every matrix of a stack by its own weights in one launch.

    The result is activation(x @ w + bias) + residual, each step in float32 and rounded once at the end. The product has
    the same bits as without the other terms. Nothing is copied or padded.

    Args:
        x: (M, K) or (..., M, K), of a dtype that the contract sums. Any sizes, 0 included.
        w: (K, N) or (..., K, N), or (N, K), (..., N, K) with `transpose_w`; the leading dimensions equal those of `x`,
            unless `x` is (M, K) and shared by all entries.
        contract: Order of the sum over K; with splits of K, at most 4.
        target: The GPU that the program is lowered for.
        transpose_w: Whether `w` is stored as (N, K).
        bias: (N,), added to the sum in float32 (float64 under a contract of that dtype).
        activation: "gelu" (tanh form), "silu", "relu" or None; None under a `MatmulContract`.
        functions: How the activation is computed.
        residual: (M, N) or (..., M, N) of `out_dtype`, added after the activation; None under a `MatmulContract`.
        out_dtype: Dtype of the result.
        tile: Chosen from the shape by default. The bits do not depend on it.

    Returns:
        (M, N) or (..., M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; the bits depend on K, the row (with its residual), the weights and the bias alone, and are
    the same in a stack as in a single product.

    Source: fixed tiles without split-K, as in "Defeating Nondeterminism in LLM Inference"
    (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/).
    """
    honour(_OP, functions, PTX_FUNCTIONS)
    out_dtype = jnp.dtype(out_dtype)
    check_product(_OP, x, w, contract, transpose_w)
    (m, k), n, lead = x.shape[-2:], w.shape[-2 if transpose_w else -1], w.shape[:-2]
    check_epilogue(_OP, contract, (*lead, m, n), bias, activation, residual, out_dtype)
    if 0 in (*lead, m, k, n):
        return _without_products((*lead, m, n), bias, activation, residual, out_dtype)
    sizes = _sizes_of_product(x, w, transpose_w)
    out = jax.ShapeDtypeStruct((sizes.entries, m, n), out_dtype)
    if isinstance(contract, MatmulContract):
        block, dtype = contract.k_block, contract.dtype
        y = in_chains(x, w, sizes, out, target, tile, block=block, dtype=dtype, from_zero=False, bias=bias)
        return y.reshape(*lead, m, n)
    added = Additions(bias=bias, activation=activation, residual=residual)
    if isinstance(contract, SplitMmaContract | SplitWgmmaContract) and contract.split_length(k) < k:
        y = _in_splits(x, w, sizes, out, contract, added, target, tile)
    else:
        y = on_tensor_cores(x, w, sizes, out, target, tile, added)
    return y.reshape(*lead, m, n)


def gated_matmul(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    contract: MmaContract | WgmmaContract,
    target: Target,
    activation: str | None = "silu",
    functions: ElementwiseContract = PTX_FUNCTIONS,
    transpose_w: bool = False,
    out_dtype: Any = None,
    tile: Tile | None = None,
) -> jax.Array:
    """Returns activation(x @ w_gate) * (x @ w_up) in one launch, in float32 and rounded once.

    Args:
        x: (M, K), bfloat16 or float16. Any sizes, 0 included.
        w_gate: (K, N) of the same dtype, or (N, K) with `transpose_w`.
        w_up: The same.
        contract: Order of both sums over K.
        target: The GPU that the program is lowered for.
        activation: As for `matmul`.
        functions: How the activation is computed.
        transpose_w: Whether the weights are stored as (N, K).
        out_dtype: Dtype of the result; that of `x` by default.
        tile: Chosen from the shape by default. The bits do not depend on it.

    Returns:
        (M, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: row-invariant; both products have the bits that `matmul` gives them in float32.
    """
    honour(_GATED_OP, functions, PTX_FUNCTIONS)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if not isinstance(contract, MmaContract | WgmmaContract) or x.ndim != 2 or w_gate.shape != w_up.shape:
        raise UnsupportedError(
            f"{_GATED_OP}: expected one matrix of rows, two weights of one shape and an MmaContract or WgmmaContract,"
            f" got x {x.dtype}{list(x.shape)}, w_gate {list(w_gate.shape)}, w_up {list(w_up.shape)}, {contract!r}; call"
            " it for each product of a stack, and `matmul` twice for another contract."
        )
    for w in (w_gate, w_up):
        check_product(_GATED_OP, x, w, contract, transpose_w)
    (m, k), n = x.shape, w_gate.shape[-2 if transpose_w else -1]
    check_epilogue(_GATED_OP, contract, (m, n), None, activation, None, out_dtype)
    if 0 in (m, k, n):
        zero = jnp.zeros((m, n), jnp.float32)
        return (activate(zero, activation) * zero).astype(out_dtype)
    out = jax.ShapeDtypeStruct((1, m, n), out_dtype)
    sizes = _sizes_of_product(x, w_gate, transpose_w)
    return on_tensor_cores(x, w_gate, sizes, out, target, tile, Additions(up=w_up, activation=activation))[0]


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: GradientContract,
    target: Target,
    accumulate: jax.Array | None = None,
    out_dtype: Any = "float32",
    tile: Tile | None = None,
) -> jax.Array:
    """Sums the outer products of rows: the gradient of `w` in `x @ w`, for every entry of a stack in one launch.

    Args:
        x: (M, K) or (..., M, K). Any sizes, 0 included.
        g: (M, N) or (..., M, N) of the same dtype, the cotangent of the product. One of the two may have no leading
            dimensions and is then shared by every entry.
        contract: Order of the sum over the rows.
        target: The GPU that the program is lowered for.
        accumulate: (K, N) or (..., K, N) float32, a previous sum, whose chain continues.
        out_dtype: Dtype of the result, to which the float32 sum is rounded once.
        tile: Chosen from the shape by default. The bits do not depend on it.

    Returns:
        (K, N) or (..., K, N) of `out_dtype`.

    Raises:
        UnsupportedError: If this backend cannot honour the contract for these operands.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows. An element's bits depend on its column
    of `x` and its column of `g` alone.
    """
    out_dtype = jnp.dtype(out_dtype)
    check_gradient(_GRADIENT_OP, x, g, accumulate, contract)
    (m, k), n, lead = x.shape[-2:], g.shape[-1], x.shape[:-2] or g.shape[:-2]
    if 0 in (*lead, m, k, n):
        zero = jnp.zeros((), jnp.float32) if accumulate is None else accumulate
        return jnp.broadcast_to(zero.astype(out_dtype), (*lead, k, n))
    entries = math.prod(lead)
    sizes = Sizes(entries, k, m, n, (1, k), (n, 1), (x.ndim == 2, g.ndim == 2))
    out = jax.ShapeDtypeStruct((entries, k, n), out_dtype)
    if isinstance(contract, ChunkContract):
        options: dict[str, Any] = {"block": contract.rows, "dtype": "float32", "from_zero": True}
        y = in_chains(x, g, sizes, out, target, tile, **options, total=accumulate)
    else:
        y = on_tensor_cores(x, g, sizes, out, target, tile, Additions(total=accumulate))
    return y.reshape(*lead, k, n)


def _in_splits(
    x: jax.Array,
    w: jax.Array,
    sizes: Sizes,
    out: jax.ShapeDtypeStruct,
    contract: SplitMmaContract | SplitWgmmaContract,
    added: Additions,
    target: Target,
    tile: Tile | SplitTile | None,
) -> jax.Array:
    """Runs one kernel for all splits: for few rows by different warps, otherwise one after the other."""
    length = contract.split_length(sizes.depth)
    splits = -(-sizes.depth // length)
    if tile is None:
        options: dict[str, Any] = {"shared_memory": target.shared_memory, "features": target.features}
        tile = split_tile(sizes.rows, sizes.columns, splits, length, **options)
    added = replace(added, splits=splits, split_length=length)
    if isinstance(tile, SplitTile):
        if tile.warps != splits or length % tile.depth:
            raise UnsupportedError(
                f"{_OP}: expected a tile with a warp for each of {splits} parts of K and a depth that divides their"
                f" {length} elements, got {tile}."
            )
        return in_splits_at_once(x, w, sizes, out, target, tile, added)
    return on_tensor_cores(x, w, sizes, out, target, tile, added)


def _sizes_of_product(x: jax.Array, w: jax.Array, transpose_w: bool) -> Sizes:
    (m, k), n = x.shape[-2:], w.shape[-2 if transpose_w else -1]
    storage = (1, k) if transpose_w else (n, 1)
    return Sizes(math.prod(w.shape[:-2]), m, k, n, (k, 1), storage, (x.ndim == 2, w.ndim == 2))


def _without_products(
    shape: Sequence[int], bias: Any, activation: str | None, residual: Any, out_dtype: Any
) -> jax.Array:
    """Returns the result of empty sums."""
    value = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    value = jnp.broadcast_to(activate(value, activation), tuple(shape))
    return (value if residual is None else value + residual.astype(jnp.float32)).astype(out_dtype)
