"""Checks of the arguments of products in Triton kernels."""

from typing import Any, Final

import jax.numpy as jnp

from pallas_kernels.contract import (
    ChunkContract,
    MatmulContract,
    MmaChunkContract,
    MmaContract,
    MmaTf32Contract,
    SplitMmaContract,
    SplitWgmmaContract,
    Tf32Contract,
    WgmmaChunkContract,
    WgmmaContract,
)
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.activations import ACTIVATIONS

_16_BITS: Final = ("bfloat16", "float16")
_ON_TENSOR_CORES: Final = {
    MmaContract: _16_BITS,
    WgmmaContract: _16_BITS,
    SplitMmaContract: _16_BITS,
    SplitWgmmaContract: _16_BITS,
    MmaChunkContract: _16_BITS,
    WgmmaChunkContract: _16_BITS,
    MmaTf32Contract: ("float32",),
    Tf32Contract: ("float32",),
}
"""The dtypes of the operands under each contract of a chain on tensor cores. On Hopper mma.sync and wgmma give the same
bits, so the registry chooses wgmma's contracts there."""


def check_product(op: str, x: Any, w: Any, contract: Any, transpose_w: bool) -> None:
    """Checks the operands of a product, and whether the contract sums their dtype.

    Raises:
        UnsupportedError: If they do not fit.
    """
    came = f"got x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}, {transpose_w=}, {contract!r}"
    fits = x.ndim >= 2 and w.ndim >= 2 and x.shape[:-2] in ((), w.shape[:-2])
    if not fits or x.shape[-1] != w.shape[-1 if transpose_w else -2]:
        expected = "x (..., M, K) and w (..., N, K)" if transpose_w else "x (..., M, K) and w (..., K, N)"
        raise UnsupportedError(f"{op}: expected {expected} with equal leading dimensions, or none of x, {came}.")
    if x.dtype != w.dtype or x.dtype.name not in _dtypes(op, contract, MatmulContract):
        raise UnsupportedError(f"{op}: expected operands of one dtype that the contract sums, {came}; cast them.")


def check_gradient(op: str, x: Any, g: Any, accumulate: Any, contract: Any) -> None:
    """Checks the operands of a gradient of weights, and whether the contract sums their dtype.

    Raises:
        UnsupportedError: If they do not fit.
    """
    came = f"got x {x.dtype}{list(x.shape)}, g {g.dtype}{list(g.shape)}, {contract!r}"
    stacks = {a.shape[:-2] for a in (x, g)} - {()}
    if x.ndim < 2 or g.ndim < 2 or x.shape[-2] != g.shape[-2] or len(stacks) > 1:
        raise UnsupportedError(
            f"{op}: expected x (..., M, K) and g (..., M, N) with as many rows and equal leading dimensions,"
            f" or none in one of them, {came}."
        )
    if x.dtype != g.dtype or x.dtype.name not in _dtypes(op, contract, ChunkContract):
        raise UnsupportedError(
            f"{op}: expected operands of one dtype that the contract sums, {came}; cast them, or multiply x"
            " transposed by g with `matmul` for float64."
        )
    shape = (*(x.shape[:-2] or g.shape[:-2]), x.shape[-1], g.shape[-1])
    if accumulate is not None and (accumulate.shape != shape or accumulate.dtype != jnp.float32):
        raise UnsupportedError(
            f"{op}: expected accumulate float32{list(shape)}, got {accumulate.dtype}"
            f"{list(accumulate.shape)}, {came}; pass the float32 result of the previous call."
        )


def _dtypes(op: str, contract: Any, chain: type) -> tuple[str, ...]:
    """Returns the dtypes of the operands that are summed under a contract."""
    if isinstance(contract, chain):
        wide = getattr(contract, "dtype", "float32") == "float64"
        return ("float64",) if wide else ("float32", *_16_BITS)
    of_gradients = isinstance(contract, MmaChunkContract | WgmmaChunkContract)
    found = _ON_TENSOR_CORES.get(type(contract))
    if found is None or of_gradients != (chain is ChunkContract):
        raise UnsupportedError(
            f"{op}: expected a {chain.__name__} or a chain on tensor cores, the orders that this backend sums in, got"
            f" {contract!r}; ask the backend of that contract instead."
        )
    return found


def check_epilogue(
    op: str, contract: Any, shape: tuple[int, ...], bias: Any, activation: str | None, residual: Any, out_dtype: Any
) -> None:
    """Checks what follows a product.

    Raises:
        UnsupportedError: If it does not fit the result, or the contract does not have it.
    """
    if bias is not None and bias.shape != shape[-1:]:
        raise UnsupportedError(f"{op}: expected a bias {list(shape[-1:])}, got {bias.dtype}{list(bias.shape)}.")
    if activation is not None and activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"{op}: expected an activation among {', '.join(ACTIVATIONS)} or None, got {activation!r}; apply another"
            " one to the product."
        )
    if isinstance(contract, MatmulContract) and (activation is not None or residual is not None):
        raise UnsupportedError(
            f"{op}: expected neither activation nor residual under {contract!r}, got {activation=} and"
            f" residual {None if residual is None else residual.shape}; apply them to the product."
        )
    if residual is not None and (residual.shape != shape or residual.dtype != out_dtype):
        raise UnsupportedError(
            f"{op}: expected a residual {list(shape)} of the result's dtype {out_dtype.name}, got"
            f" {residual.dtype}{list(residual.shape)}; cast it, or ask for its dtype with out_dtype."
        )
