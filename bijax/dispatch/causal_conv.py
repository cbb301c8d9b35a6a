"""The causal convolution as primitives, with the norms of heads: in one kernel where there is one.

That kernel has the bits of the kernels that it stands for, which serve where there is none.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.core.primitive import Arrays, Kernel, define_kernel, fold_some
from bijax.dispatch.kernels import run_if_served, run_kernel
from pallas_kernels.causal_conv.heads import Heads
from pallas_kernels.registry import find
from pallas_kernels.target import Target

_SHARED: Final = ("weight", "bias")
"""Arrays that all sequences share."""


def _define(operation: str, state: bool) -> Kernel:
    """Makes a primitive of arrays with their names in `names`; results are those of all heads, then the state."""

    def backend(target: Target, *arrays: jax.Array, names: tuple[str, ...], heads: Heads | None, **form: Any) -> Arrays:
        x, weight, *others = arrays
        named: dict[str, Any] = dict(zip(names, others, strict=True)) | form
        if heads is None:
            return tuple(run_kernel(operation, target, None, x, weight, **named, heads=None, like=shapes))
        rows = jax.ShapeDtypeStruct((0, heads.width), x.dtype)
        contract = find("rms_norm", target, heads.width, x=rows, **heads.of_norm).contracts["contract"]
        found = run_if_served(operation, target, contract, x, weight, **named, heads=heads, like=shapes)
        if found is not None:
            return tuple(found)
        y, *rest = run_kernel(operation, target, None, x, weight, **named, heads=None, like=shapes)
        return *_normed(target, y, heads), *rest

    def shapes(x: jax.Array, weight: jax.Array, *, heads: Heads | None, **named: Any) -> Arrays:
        tokens = x.shape[:2]
        if heads is None:
            results: Arrays = (jnp.zeros((*tokens, weight.shape[0]), x.dtype),)
        else:
            of_keys = jnp.zeros((*tokens, heads.keys, heads.width), x.dtype)
            results = of_keys, of_keys, jnp.zeros((*tokens, heads.values, heads.value_width), x.dtype)
        return (*results, named["state"]) if state else results

    def of_arrays(*arrays: jax.Array, names: tuple[str, ...], **form: Any) -> Arrays:
        x, weight, *others = arrays
        named: dict[str, Any] = dict(zip(names, others, strict=True)) | form
        return shapes(x, weight, **named)

    def fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
        shared = [name in _SHARED for name in ("x", "weight", *parameters["names"])]
        return None if state else fold_some(kernel, size, arrays, axes, shared, parameters)

    kernel = define_kernel(operation, backend, fold, of_arrays)
    return kernel


def _normed(target: Target, y: jax.Array, heads: Heads) -> Arrays:
    """Returns queries and keys of length 1, and values, (B, T, heads, width) each."""
    *keys, values = heads.split(y)

    def normed(x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, heads.width)
        found = run_kernel("rms_norm", target, heads.width, like=_norm_shapes, x=rows, **heads.of_norm)
        return jnp.asarray(found[0]).reshape(x.shape)

    return *map(normed, keys), values


def _norm_shapes(*, x: jax.Array, **_: Any) -> Arrays:
    return x, jnp.zeros((x.shape[0], 1), jnp.float32)


causal_conv_kernel: Final = _define("causal_conv", state=False)
"""(B, T, C or more) and (C, W), those of `bias` and `before` that `names` has, `activation` and `heads`: (B, T, C), or
queries, keys and values with `heads`. See `causal_conv.portable.causal_conv`."""

causal_conv_extend_kernel: Final = _define("causal_conv_extend", state=True)
"""The same with `state`, `first`, `count` and `slot`, and the new state; see `causal_conv.portable`."""
