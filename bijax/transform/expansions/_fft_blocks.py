"""Fourier transforms on a CPU: calls of XLA's library, each with the same number of transforms along one axis."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from bijax.transform.expansions._stacks import one_by_one
from pallas_kernels.contract import FftContract, fft_contract
from pallas_kernels.parts.xla.tiles import map_row_tiles


def contract_of(name: str, operands: Sequence[Any], parameters: Mapping[str, Any]) -> FftContract | None:
    """Returns the contract under which the library computes an operation on a CPU; None if it does not.

    Args:
        name: Name of the primitive.
        operands: Abstract values of its operands.
        parameters: Its parameters.
    """
    if name != "fft" or len(parameters["fft_lengths"]) > 1 or math.prod(operands[0].shape) == 0:
        return None
    return fft_contract(int(parameters["fft_lengths"][0]))


def is_along_each_axis(operands: Sequence[Any], fft_lengths: Sequence[int]) -> bool:
    """Returns whether a transform is computed along one axis after another, because the library computes some of them.

    Args:
        operands: Abstract value of its operand.
        fft_lengths: Lengths of the transformed axes.
    """
    return len(fft_lengths) > 1 and math.prod(operands[0].shape) > 0 and any(map(fft_contract, fft_lengths))


def along_each_axis(x: jax.Array, *, fft_type: Any, fft_lengths: Sequence[int]) -> jax.Array:
    """Transforms several last axes, as `jax.lax.fft` does, by transforms along one axis."""
    *outer, last = fft_lengths
    if fft_type == lax.FftType.RFFT:
        x = lax.fft(x, fft_type, (last,))
    inverse = fft_type in (lax.FftType.IFFT, lax.FftType.IRFFT)
    inner = lax.FftType.IFFT if inverse else lax.FftType.FFT
    for axis, length in zip(range(-1 - len(outer), -1), outer, strict=True):
        x = jnp.moveaxis(lax.fft(jnp.moveaxis(x, axis, -1), inner, (length,)), -1, axis)
    return x if fft_type == lax.FftType.RFFT else lax.fft(x, fft_type, (last,))


def calls(contract: FftContract, primitive: Primitive) -> Callable[..., jax.Array]:
    """Returns a function that transforms the last axis in calls of a fixed number of transforms.

    It must be lowered by JAX's own rules.
    """

    def run(x: jax.Array, **parameters: Any) -> jax.Array:
        transform = functools.partial(primitive.bind, **parameters)
        rows = x.reshape(-1, x.shape[-1])
        if contract.transforms == 1:
            results = one_by_one(transform, rows)
        else:
            block = contract.transforms
            one = jax.eval_shape(transform, jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype))
            (results,) = map_row_tiles(lambda _: lambda x: (transform(x),), lambda _: block, [rows], [one])
        return results.reshape(*x.shape[:-1], results.shape[-1])

    return run
