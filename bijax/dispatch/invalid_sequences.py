"""Outputs of invalid sequences as one primitive: nan, without copying the others where a kernel works in place."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import as_tuple, run_if_served
from pallas_kernels.target import Target


def _backend(target: Target, y: jax.Array, invalid: jax.Array) -> Arrays:
    found = run_if_served("nan_if_invalid", target, None, y, invalid, like=_shape)
    return _filled(y, invalid) if found is None else as_tuple(found)


def _filled(y: jax.Array, invalid: jax.Array) -> Arrays:
    return (jnp.where(invalid.reshape(-1, *(1,) * (y.ndim - 1)), jnp.asarray(jnp.nan, y.dtype), y),)


def _shape(y: jax.Array, _: jax.Array) -> Arrays:
    return (y,)


def _fold(size: int, arrays: Arrays, axes: Sequence[int | None], _: dict[str, Any]) -> Arrays:
    return unfold_rows(size, nan_if_invalid_kernel(*fold_rows(size, arrays, axes)))


nan_if_invalid_kernel: Final = define_kernel("nan_if_invalid", _backend, _fold, _shape)
"""(B, ...) and (B,) bool: the first one, nan for sequences that are invalid."""
