"""Causal depthwise convolution over tokens, as linear attention applies it to queries, keys and values."""

from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp

from bijax.core.checks import describe, float_array
from bijax.core.derivative import custom_vjp
from bijax.core.forward_only import forward_only
from bijax.core.primitive import Arrays, Kernel
from bijax.dispatch.causal_conv import causal_conv_extend_kernel, causal_conv_kernel
from bijax.ops._engine_arguments import check_known, check_shape, narrowed
from bijax.ops.delta_rule._arguments import of_sequences
from bijax.ops.elementwise.call import elementwise
from pallas_kernels.causal_conv.heads import Heads
from pallas_kernels.causal_conv.portable import convolve, program

Activation = Literal["silu"] | None


def causal_conv1d(
    x: Any, weight: Any, bias: Any = None, *, activation: Activation = None, before: Any = None
) -> jax.Array:
    """Sums each channel over a window of tokens that ends at the token: y_t = activation(sum_j w_j x_(t - W + 1 + j)).

    Computed in float32, with the products added from the oldest token on, and rounded once.

    Args:
        x: (B, T, C) float32, bfloat16 or float16.
        weight: (C, W) of any of these dtypes; the last column belongs to the token itself.
        bias: (C,) of any of these dtypes, or None.
        activation: "silu", or None.
        before: (B, W - 1, C) of the dtype of `x`, the tokens before the first one; zeros by default.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: If a dtype is unsupported, or `before` has another one than `x`.
        ValueError: If shapes do not fit, or the activation is unknown.

    Guarantee: row-invariant: a token depends on the W tokens up to it alone. The gradients of `x` and `before` too;
    those of `weight` and `bias` are split-invariant for cuts of the sequences and tokens, taken as rows, at multiples
    of 128.

    Source: Gu and Dao, "Mamba", https://arxiv.org/abs/2312.00752, and its package causal-conv1d
    (https://github.com/Dao-AILab/causal-conv1d).

    Example:
        >>> x = jnp.array([1.0, 2.0, 4.0]).reshape(1, 3, 1)
        >>> causal_conv1d(x, jnp.array([[10.0, 1.0]])).ravel().tolist()
        [1.0, 12.0, 24.0]
    """
    op = "bijax.causal_conv1d"
    x, weight, bias, sizes = _checked(op, x, weight, bias, activation)
    if before is not None:
        before = float_array(op, "before", before)
        check_shape(op, "before", before, ("B", sizes["W"] - 1, "C"), sizes)
        if before.dtype != x.dtype:
            raise TypeError(f"{op}: before must have the dtype of x, {x.dtype}, got {describe(before)}.")
    return convolved(before, x, weight, bias, activation)


def causal_conv1d_extend(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    state: Any,
    start: Any,
    lengths: Any = None,
    slots: Any = None,
    activation: Activation = None,
) -> tuple[jax.Array, jax.Array]:
    """Continues `causal_conv1d` at any position, and keeps the last tokens of each sequence.

    The state holds the token of position p at p mod S. So the last tokens can be written again (drafts that were
    wrong), as long as the W - 1 tokens before them are still there: S must be at least W - 1 plus the tokens that may
    be replaced.

    Args:
        x: (B, T, C) float32, bfloat16 or float16, the tokens from `start` on.
        weight: (C, W), as in `causal_conv1d`.
        bias: (C,), or None.
        state: (B, S, C) of the dtype of `x`, the last tokens of each sequence, S at least W - 1. What it holds of
            positions before 0 is not read.
        start: (B,) ints, the position of each sequence's first token, at least 0.
        lengths: (B,) ints, how many of the T tokens each sequence has; T by default.
        slots: (B,) ints, for a server: the inputs of sequence b are in row `slots[b]` of `state`, see
            `gated_delta_rule_extend`. By default they are in row b.
        activation: "silu", or None.

    Returns:
        The outputs, of the shape and dtype of `x`, zeros after the length; and the new state. For a sequence with a
        traced number out of range the outputs are nan and the state is unchanged.

    Raises:
        TypeError: If a dtype is unsupported, or that of `state` is not that of `x`.
        ValueError: If shapes do not fit, the activation is unknown, or known numbers are out of range.
        UnsupportedError: In differentiation; `causal_conv1d` has gradients.

    Guarantee: row-invariant: a token has the bits that it has in `causal_conv1d` of its whole sequence.

    Example:
        >>> x, weight = jnp.array([1.0, 2.0, 4.0]).reshape(1, 3, 1), jnp.array([[10.0, 1.0]])
        >>> y, state = causal_conv1d_extend(x[:, :2], weight, state=jnp.zeros((1, 2, 1)), start=[0])
        >>> y.ravel().tolist(), causal_conv1d_extend(x[:, 2:], weight, state=state, start=[2])[0].ravel().tolist()
        ([1.0, 12.0], [24.0])
    """
    op = "bijax.causal_conv1d_extend"
    x, weight, bias, sizes = _checked(op, x, weight, bias, activation)
    y, new = extended(op, Convolution(x, weight, bias, activation), state, (start, lengths, slots), sizes)
    return y, new


class Convolution(NamedTuple):
    """A convolution whose arrays have been checked.

    Attributes:
        x: (B, T, C or more).
        weight: (C, W).
        bias: (C,) or None.
        activation: As for `causal_conv1d`.
        heads: The heads of the channels, or None for one result.
    """

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    activation: Activation
    heads: Heads | None = None

    def run(self, kernel: Kernel, others: dict[str, jax.Array | None]) -> Arrays:
        """Calls a primitive with the other arrays that there are."""
        given = {name: a for name, a in (others | {"bias": self.bias}).items() if a is not None}
        options: dict[str, Any] = {"names": tuple(given), "activation": self.activation, "heads": self.heads}
        return kernel(self.x, self.weight, *given.values(), **options)


def extended(op: str, call: Convolution, state: Any, places: tuple[Any, Any, Any], sizes: dict[str, int]) -> Arrays:
    """Returns the results of `causal_conv1d_extend`, or those of its heads, and the new state.

    Args:
        op: Name of the operation, for messages.
        call: The convolution of the new tokens.
        state: As for `causal_conv1d_extend`.
        places: `start`, `lengths` and `slots`, as for `causal_conv1d_extend`.
        sizes: B, T, C and W.
    """
    start, lengths, slots = places
    x = call.x
    state = float_array(op, "state", state)
    check_shape(op, "state", state, ("B" if slots is None else "slots", "S", "C"), sizes)
    if state.dtype != x.dtype:
        raise TypeError(f"{op}: state must have the dtype of x, {x.dtype}, got {describe(state)}.")
    before, total, kept = sizes["W"] - 1, sizes["T"], sizes["S"]
    if kept < max(before, 1):
        raise ValueError(
            f"{op}: state must hold at least {max(before, 1)} tokens of a sequence, got {describe(state)}."
        )
    start = of_sequences(op, "start", start, sizes)
    if lengths is None:
        lengths = jnp.full(sizes["B"], sizes["T"], jnp.int32)
    lengths = of_sequences(op, "lengths", lengths, sizes)
    check_known(op, "start", start, 0, 2**31 - 1 - total, "positions")
    check_known(op, "lengths", lengths, 0, total, "the tokens of a sequence")
    first, count = narrowed(start, 0, 2**31 - 1 - total), narrowed(lengths, 0, total)
    valid = (first >= 0) & (count >= 0)
    slot = None
    if slots is not None:
        slot = narrowed(of_sequences(op, "slots", slots, sizes), 0, sizes["slots"] - 1)
        slot, count = jnp.maximum(slot, 0), jnp.where(slot >= 0, count, 0)
    # A negative count says that the results are nan.
    known = {"first": jnp.maximum(first, 0), "count": jnp.where(valid, count, -1), "slot": slot}

    def compute(x: jax.Array, state: jax.Array) -> Arrays:
        return call._replace(x=x).run(causal_conv_extend_kernel, {**known, "state": state})

    results: Arrays = forward_only(op, compute, x, state)
    return results


def _checked(
    op: str, x: Any, weight: Any, bias: Any, activation: Activation
) -> tuple[jax.Array, jax.Array, jax.Array | None, dict[str, int]]:
    sizes: dict[str, int] = {}
    x, weight = float_array(op, "x", x), float_array(op, "weight", weight)
    check_shape(op, "x", x, ("B", "T", "C"), sizes)
    check_shape(op, "weight", weight, ("C", "W"), sizes)
    if not sizes["W"]:
        raise ValueError(f"{op}: weight must have at least 1 column, got {describe(weight)}.")
    if bias is not None:
        bias = float_array(op, "bias", bias)
        check_shape(op, "bias", bias, ("C",), sizes)
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: activation must be 'silu' or None, got {activation!r}.")
    return x, weight, bias, sizes


@custom_vjp(nondiff_argnums=(4,))
def convolved(
    before: jax.Array | None, x: jax.Array, weight: jax.Array, bias: jax.Array | None, activation: Activation
) -> jax.Array:
    """Returns the convolution of the first channels of x (B, T, C or more)."""
    return Convolution(x, weight, bias, activation).run(causal_conv_kernel, {"before": before})[0]


def _forward(*arguments: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return convolved(*arguments), arguments[:4]


def _backward(activation: Activation, saved: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    before, x, weight, bias = saved
    given = {name: a for name, a in (("before", before), ("bias", bias)) if a is not None}

    def again(given: dict[str, jax.Array], x: jax.Array, weight: jax.Array) -> jax.Array:
        sums = _SUMS[activation, bias is not None]
        return convolve(given.get("before"), x[..., : len(weight)], weight, given.get("bias"), sums)

    of_given, of_x, of_weight = jax.vjp(again, given, x, weight)[1](g)
    return of_given.get("before"), of_x, of_weight, of_given.get("bias")


convolved.defvjp(_forward, _backward)

_ACTIVATIONS: tuple[Activation, ...] = (None, "silu")
_SUMS: Final = {(a, biased): elementwise(program(a, biased)) for a in _ACTIVATIONS for biased in (False, True)}
"""Differentiable forms of the sums."""
