"""Causal convolution by shifted rows and element-wise code, on any platform."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, honour
from pallas_kernels.parts.served import served_if
from pallas_kernels.parts.xla.lanes import run_flat

Arrays = tuple[jax.Array, ...]
_NEEDS: Final = "one result for all channels"
Sums = Callable[..., jax.Array]
"""Takes the tokens of each tap (B, T, C), the columns of the weight (C,), and possibly a bias (C,). Returns the
activation of the sum of products in float32."""


def _one_result(*_: Any, heads: Any = None, **__: Any) -> bool:
    return heads is None


@served_if(_one_result, _NEEDS)
def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None = None,
    before: jax.Array | None = None,
    activation: str | None,
    heads: None = None,
    functions: ElementwiseContract = XLA_FUNCTIONS,
    on_gpu: bool = False,
) -> Arrays:
    """Convolves the first channels of tokens.

    Args:
        x: (B, T, C or more) float32, bfloat16 or float16.
        weight: (C, W), the last column belongs to the token itself.
        bias: (C,) or None.
        before: (B, W - 1, C) of the dtype of `x`, the tokens before the first one; zeros by default.
        activation: "silu" or None.
        heads: Kernels for heads are others.
        functions: How silu is computed.
        on_gpu: Whether the platform is a GPU.

    Returns:
        (B, T, C) of the dtype of `x`.

    Guarantee: row-invariant.
    """
    honour("causal_conv", functions, XLA_FUNCTIONS)
    return (convolve(before, x[..., : weight.shape[0]], weight, bias, _sums(activation, on_gpu)),)


@served_if(_one_result, _NEEDS)
def causal_conv_extend(
    x: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None = None,
    state: jax.Array,
    first: jax.Array,
    count: jax.Array,
    slot: jax.Array | None = None,
    activation: str | None,
    heads: None = None,
    functions: ElementwiseContract = XLA_FUNCTIONS,
    on_gpu: bool = False,
) -> Arrays:
    """Convolves the first channels of tokens of sequences whose last tokens are in `state`, and stores the last ones.

    Args:
        x: As for `causal_conv`.
        weight: As for `causal_conv`.
        bias: As for `causal_conv`.
        state: (N, S, C) of the dtype of `x`: the token of position p is at p mod S.
        first: (B,) int32, the position of each sequence's first token, at least 0.
        count: (B,) int32, how many of the T tokens a sequence has; the results of one with a negative number are nan.
        slot: (B,) int32, where the tokens of a sequence are in `state`; by default those of sequence b are at b.
        activation: As for `causal_conv`.
        heads: As for `causal_conv`.
        functions: As for `causal_conv`.
        on_gpu: As for `causal_conv`.

    Returns:
        (B, T, C), zeros after the count; and the new state.

    Guarantee: row-invariant.
    """
    honour("causal_conv_extend", functions, XLA_FUNCTIONS)
    x = x[..., : weight.shape[0]]
    before, total, kept = weight.shape[1] - 1, x.shape[1], state.shape[1]
    known = jnp.maximum(count, 0)
    slot = jnp.arange(x.shape[0], dtype=jnp.int32) if slot is None else slot
    earlier = first[:, None] - before + jnp.arange(before, dtype=jnp.int32)[None]
    old = state.at[slot[:, None], jnp.maximum(earlier, 0) % kept].get(mode="clip")
    # Whoever writes there does so after they were read: else XLA would copy the state first.
    old, state = jax.lax.optimization_barrier((old, state))
    y = _continued(jnp.where((earlier >= 0)[..., None], old, 0), x, weight, bias, _sums(activation, on_gpu))
    # Of many tokens only the last ones are stored.
    last = min(total, kept)
    stored = jnp.maximum(known[:, None] - last, 0) + jnp.arange(last, dtype=jnp.int32)[None]
    tokens = x if last == total else jnp.take_along_axis(x, stored[..., None], 1, mode="clip")
    at = jnp.where(stored < known[:, None], (first[:, None] + stored) % kept, kept)
    new = state.at[slot[:, None], at].set(tokens, mode="drop")
    y = jnp.where((jnp.arange(total, dtype=jnp.int32)[None] < known[:, None])[..., None], y, 0)
    return jnp.where((count >= 0)[:, None, None], y, jnp.nan), new


def causal_conv_on_gpu(*arrays: jax.Array, functions: ElementwiseContract = XLA_FUNCTIONS, **options: Any) -> Arrays:
    """`causal_conv` whose element-wise code is fenced in its lowering."""
    return causal_conv(*arrays, **options, functions=functions, on_gpu=True)


def causal_conv_extend_on_gpu(
    *arrays: jax.Array, functions: ElementwiseContract = XLA_FUNCTIONS, **options: Any
) -> Arrays:
    """`causal_conv_extend` whose element-wise code is fenced in its lowering."""
    return causal_conv_extend(*arrays, **options, functions=functions, on_gpu=True)


causal_conv_on_gpu.serves = causal_conv_extend_on_gpu.serves = _one_result  # type: ignore[attr-defined]


def convolve(
    before: jax.Array | None, x: jax.Array, weight: jax.Array, bias: jax.Array | None, sums: Sums
) -> jax.Array:
    """Convolves x (B, T, C) with weight (C, W), after `before` (B, W - 1, C) or zeros."""
    size = weight.shape[1]
    return _of_taps([_shifted(before, x, size - 1 - j) for j in range(size)], weight, bias, sums)


def _continued(before: jax.Array, x: jax.Array, weight: jax.Array, bias: jax.Array | None, sums: Sums) -> jax.Array:
    """Equal to `convolve`, and faster on GPUs: only the first W - 1 tokens select between `before` and `x`."""
    total, first = x.shape[1], weight.shape[1] - 1
    if total <= first:
        return convolve(before, x, weight, bias, sums)
    head = convolve(before, x[:, :first], weight, bias, sums)
    windows = [jax.lax.slice_in_dim(x, j, j + total - first, axis=1) for j in range(first + 1)]
    rest = _padded(_of_taps(windows, weight, bias, sums), first, 0)
    return jnp.where((jnp.arange(total) < first)[:, None], _padded(head, 0, total - first), rest)


def _of_taps(taps: list[jax.Array], weight: jax.Array, bias: jax.Array | None, sums: Sums) -> jax.Array:
    """Returns the activation of the sum of arrays (B, T, C) times the columns of weight."""
    columns = [weight[:, j] for j in range(weight.shape[1])]
    return sums(*taps, *columns, *(() if bias is None else (bias,))).astype(taps[0].dtype)


def _shifted(before: jax.Array | None, x: jax.Array, by: int) -> jax.Array:
    """Returns the tokens that are `by` before those of x.

    They are padded rows, not slices of a concatenation, which XLA would write to memory: on a GPU that took twice as
    long as the convolution.
    """
    total = x.shape[1]
    missing = min(by, total)
    later = _padded(x[:, : total - missing], missing, 0)
    if before is None or not by:
        return later
    first = before.shape[1] - by
    earlier = _padded(before[:, first : first + missing], 0, total - missing)
    return jnp.where((jnp.arange(total) < missing)[:, None], earlier, later)


def _padded(x: jax.Array, low: int, high: int) -> jax.Array:
    return jax.lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (low, high, 0), (0, 0, 0)))


def program(activation: str | None, biased: bool) -> Callable[..., jax.Array]:
    """Returns the element-wise program: products added from the oldest token on, and the activation, in float32."""

    def sums(*arrays: jax.Array) -> jax.Array:
        size = len(arrays) // 2
        wide = [a.astype(jnp.float32) for a in arrays]
        total = wide[0] * wide[size]
        for x, w in zip(wide[1:size], wide[size + 1 : 2 * size], strict=True):
            total = total + x * w
        if biased:
            total = total + wide[-1]
        return jax.nn.silu(total) if activation == "silu" else total

    return sums


def _sums(activation: str | None, on_gpu: bool) -> Sums:
    def sums(*arrays: jax.Array) -> jax.Array:
        of_rows = _PROGRAMS[activation, len(arrays) % 2 == 1]
        alike = jnp.broadcast_arrays(*arrays)
        if not alike[0].size:
            return jnp.zeros(alike[0].shape, jnp.float32)
        # On a GPU fences in the lowering of the program keep its bits in any fusion.
        (y,) = of_rows(*alike) if on_gpu else run_flat(of_rows, *alike)
        return y

    return sums


def _as_tuple(sums: Callable[..., jax.Array]) -> Callable[..., Arrays]:
    return lambda *arrays: (sums(*arrays),)


_PROGRAMS: Final = {(a, biased): _as_tuple(program(a, biased)) for a in (None, "silu") for biased in (False, True)}
