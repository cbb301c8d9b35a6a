"""Queries, keys and values of linear attention: the causal convolution of its inputs, queries and keys of length 1."""

from typing import Any

import jax

from bijax.core.checks import describe, float_array
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays
from bijax.dispatch.causal_conv import causal_conv_kernel
from bijax.ops._engine_arguments import check_shape
from bijax.ops.delta_rule.causal_conv import Convolution, convolved, extended
from bijax.ops.norm.gated import l2_norm
from pallas_kernels.causal_conv.heads import Heads

Three = tuple[jax.Array, jax.Array, jax.Array]


def conv_heads(x: Any, weight: Any, heads: Heads) -> Three:
    """Returns the heads of silu of the causal convolution of the first channels of tokens.

    Equal to `bijax.causal_conv1d` of these channels, and `bijax.l2_norm` of the heads of queries and keys.

    Args:
        x: (B, T, C or more) float32, bfloat16 or float16; columns after the channels are not read.
        weight: (C, W), as for `bijax.causal_conv1d`.
        heads: How the channels are divided.

    Returns:
        Queries and keys (B, T, J, D), and values (B, T, H, V).

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If shapes do not fit.

    Guarantee: row-invariant; the gradients as those of the two operations.
    """
    x, weight, _ = _checked(x, weight, heads)
    query, key, value = _conv_heads(x, weight, heads)
    return query, key, value


def conv_heads_extend(
    x: Any, weight: Any, heads: Heads, *, state: Any, start: Any, lengths: Any = None, slots: Any = None
) -> tuple[Three, jax.Array]:
    """Continues `conv_heads` as `bijax.causal_conv1d_extend` continues the convolution.

    Returns:
        The heads, and the new state.

    Raises:
        TypeError: As `bijax.causal_conv1d_extend`.
        ValueError: As `bijax.causal_conv1d_extend`.
        UnsupportedError: In differentiation.

    Guarantee: row-invariant: a token has the bits that it has in `conv_heads` of its whole sequence.
    """
    x, weight, sizes = _checked(x, weight, heads)
    call = Convolution(x, weight, None, "silu", heads)
    query, key, value, new = extended("bijax.causal_conv1d_extend", call, state, (start, lengths, slots), sizes)
    return (query, key, value), new


def _checked(x: Any, weight: Any, heads: Heads) -> tuple[jax.Array, jax.Array, dict[str, int]]:
    op = "bijax.causal_conv1d"
    sizes = {"C": heads.channels}
    x, weight = float_array(op, "x", x), float_array(op, "weight", weight)
    check_shape(op, "x", x, ("B", "T", "columns"), sizes)
    check_shape(op, "weight", weight, ("C", "W"), sizes)
    if not sizes["W"]:
        raise ValueError(f"{op}: weight must have at least 1 column, got {describe(weight)}.")
    if sizes["columns"] < sizes["C"]:
        raise ValueError(f"{op}: x must have at least {sizes['C']} columns for its heads, got {describe(x)}.")
    return x, weight, sizes


@custom_vjp(nondiff_argnums=(2,))
def _conv_heads(x: jax.Array, weight: jax.Array, heads: Heads) -> Arrays:
    return Convolution(x, weight, None, "silu", heads).run(causal_conv_kernel, {})


def _forward(x: jax.Array, weight: jax.Array, heads: Heads) -> tuple[Arrays, Any]:
    """Keeps what the two operations keep for their gradients; their results have the same bits."""

    def apart(x: jax.Array, weight: jax.Array) -> Arrays:
        query, key, value = heads.split(convolved(None, x, weight, None, "silu"))
        return l2_norm(query, eps=heads.eps), l2_norm(key, eps=heads.eps), value

    return jax.vjp(apart, x, weight)


def _backward(_: Heads, pull: Any, g: Arrays) -> Any:
    return pull(g)


_conv_heads.defvjp(_forward, _backward)
