"""The gated delta rule of linear attention."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import describe, float_array
from bijax.core.derivative import custom_vjp
from bijax.core.forward_only import forward_only
from bijax.core.primitive import Arrays
from bijax.dispatch.delta_rule import CHUNK, delta_rule_extend_kernel, delta_rule_gradients_kernel, delta_rule_kernel
from bijax.dispatch.invalid_sequences import nan_if_invalid_kernel
from bijax.ops._engine_arguments import check_shape, narrowed
from bijax.ops._packed import find_packed
from bijax.ops._sequences import Names
from bijax.ops.delta_rule._arguments import (
    DeltaRuleState,
    DeltaRuleTokens,
    check_lengths,
    check_start,
    check_state,
    check_tokens,
    of_sequences,
)

_PACKED = Names("lengths", "cu_seq_lengths", "T")


def gated_delta_rule(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    *,
    initial_state: Any = None,
    scale: float | None = None,
    lengths: Any = None,
    cu_seq_lengths: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention by the gated delta rule, over whole sequences.

    For each value head, with a state S of D x V that starts at `initial_state`, token t computes

        S = exp(g_t) S;  S = S + k_t (beta_t (v_t - k_t S));  y_t = scale q_t S

    It is computed in chunks of 64 tokens in the order of `pallas_kernels.contract.DeltaRuleContract`. Products read the
    dtype of the values and add in float32; the state is float32. The relative error for bfloat16 is about 3.2e-3, for
    float32 on a CPU 3e-7. `gated_delta_rule_extend` continues sequences with the same bits.

    Args:
        query: (B, T, J, D) float32, bfloat16 or float16, or packed, (T, J, D). Usually normalised, see `l2_norm`.
        key: Of the shape and dtype of `query`. Normalise it: keys of length above 1 may grow without limit.
        value: (B, T, H, V) of the same dtype, H a multiple of J. Value head h has the key head h // (H / J).
        g: (B, T, H), logarithms of the decays, usually at most 0; numbers below -104, -inf included, count as -104.
        beta: (B, T, H), usually in [0, 1].
        initial_state: (B, H, D, V) float32; zeros by default.
        scale: Factor of the outputs; D**-0.5 by default.
        lengths: (B,) ints, the tokens of each sequence; T by default. Not with packed sequences.
        cu_seq_lengths: (B + 1,) ints, for packed sequences: cumulative token counts, from 0.

    Returns:
        The outputs, of the shape and dtype of `value`, zeros after the end of a sequence; and the states after the last
        tokens, (B, H, D, V) float32. nan for sequences with traced lengths that are out of range. A key, g (other than
        -inf) or beta that is not finite makes a head nan from its token on, a value its column of the head, a query its
        own token.

    Raises:
        TypeError: If a dtype is unsupported or does not fit the others.
        ValueError: If shapes do not fit, H is not a multiple of J, or known lengths are out of range.

    Guarantee: row-invariant: an output depends on its sequence's tokens up to its own alone, not on the length of the
    sequence, the other sequences or packing. The gradients of a sequence do not depend on the others.

    Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", https://arxiv.org/abs/2412.06464.

    Example:
        >>> q = k = jnp.array([[1.0, 0.0], [1.0, 0.0]]).reshape(1, 2, 1, 2)
        >>> v = jnp.array([3.0, 5.0]).reshape(1, 2, 1, 1)
        >>> g, beta = jnp.zeros((1, 2, 1)), jnp.ones((1, 2, 1))
        >>> y, state = gated_delta_rule(q, k, v, g, beta, scale=1.0)
        >>> y.ravel().tolist(), state.ravel().tolist()
        ([3.0, 5.0], [5.0, 0.0])
    """
    op = "bijax.gated_delta_rule"
    sizes: dict[str, int] = {}
    arrays = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    tokens = check_tokens(op, arrays, scale, ("B", "T") if cu_seq_lengths is None else ("T",), sizes)
    if cu_seq_lengths is None:
        return _padded(op, tokens, initial_state, check_lengths(op, lengths, sizes), sizes)
    if lengths is not None:
        raise ValueError(f"{op}: lengths goes with padded sequences, got both; pass one of them.")
    packed = find_packed(op, "query", sizes["T"], cu_seq_lengths, None, _PACKED)
    padded = DeltaRuleTokens(**{name: packed.pad(getattr(tokens, name)) for name in arrays}, scale=tokens.scale)
    sizes |= {"B": padded.query.shape[0], "T": padded.query.shape[1]}
    y, last = _padded(op, padded, initial_state, packed.lengths, sizes)
    return packed.unpad(y), last


def _padded(
    op: str, tokens: DeltaRuleTokens, initial_state: Any, lengths: Any, sizes: dict[str, int]
) -> tuple[jax.Array, jax.Array]:
    if initial_state is None:
        state = jnp.zeros((sizes["B"], sizes["H"], sizes["D"], sizes["V"]), jnp.float32)
    else:
        state = float_array(op, "initial_state", initial_state)
        check_shape(op, "initial_state", state, ("B", "H", "D", "V"), sizes)
        if state.dtype != jnp.float32:
            raise TypeError(f"{op}: initial_state must be float32, got {describe(state)}.")
    counted, invalid = _counted(lengths, sizes["T"])
    if 0 in tokens.value.shape or sizes["D"] == 0:
        y, last = jnp.zeros_like(tokens.value), state
    else:
        y, last = _delta_rule(*tokens.arrays, state, counted, tokens.scale)
    at = invalid[:, None, None, None]
    return jnp.where(at, jnp.nan, y), jnp.where(at, jnp.nan, last)


def gated_delta_rule_extend(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    *,
    state: DeltaRuleState,
    start: Any = None,
    scale: float | None = None,
    lengths: Any = None,
    slots: Any = None,
) -> tuple[jax.Array, DeltaRuleState]:
    """Continues sequences by the gated delta rule: a token, a few with drafts, or a part of a prompt at any position.

    The state moves on to the next multiple of 64 when a token after it comes, not before. So the last tokens can be
    replaced: with `start` before `state.length`, the tokens from there on are written again, back to `state.edge`.
    Drafts that are to be replaced must therefore not extend beyond the next multiple of 64. Up to 8 tokens are computed
    as rows of their own, more in chunks.

    Args:
        query: (B, T, J, D), as in `gated_delta_rule`, like the next four.
        key: (B, T, J, D).
        value: (B, T, H, V).
        g: (B, T, H).
        beta: (B, T, H).
        state: What is kept of the sequences, see `DeltaRuleState.zeros` and `DeltaRuleState.at_edge`. Donate it to
            write in place.
        start: (B,) ints, the position of each sequence's first new token; `state.length` by default.
        scale: Factor of the outputs; D**-0.5 by default.
        lengths: (B,) ints, how many of the T tokens each sequence has; T by default.
        slots: (B,) ints, for a server. The arrays of `state` then have S rows, called slots, and sequence b continues
            the one in slot `slots[b]`; the other slots do not change. `state.inverse` is (S, H, 32, 65), without its
            zeros (`pallas_kernels.delta_rule.slots.packed`). A sequence whose `start` is 0 begins with a state of
            zeros, whatever its slot holds. No two sequences may share a slot. A slot out of range is not written, and
            the outputs of its sequence are undefined. By default sequence b is in row b.

    Returns:
        The outputs, of the shape and dtype of `value`, zeros after the length; and the new state. For a sequence with a
        traced `start` or length that is out of range the outputs are nan and the state is unchanged.

    Raises:
        TypeError: If a dtype is unsupported or does not fit the others, or `state` is not a `DeltaRuleState`.
        ValueError: If shapes do not fit, H is not a multiple of J, or a known `start` is not in [`state.edge`,
            `state.length`] or a known length not in [0, T].
        UnsupportedError: In differentiation; `gated_delta_rule` has gradients.

    Guarantee: row-invariant: a token has the bits that it has in `gated_delta_rule` over its whole sequence, however
    the sequence is divided into calls, from a snapshot, and after drafts that were replaced.

    Example:
        >>> state = DeltaRuleState.zeros(1, key_heads=1, value_heads=1, key_size=2, value_size=1)
        >>> k, g, beta = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2), jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))
        >>> y, state = gated_delta_rule_extend(k, k, jnp.full((1, 1, 1, 1), 3.0), g, beta, state=state, scale=1.0)
        >>> y.ravel().tolist(), state.length.tolist()
        ([3.0], [1])
    """
    op = "bijax.gated_delta_rule_extend"
    sizes: dict[str, int] = {}
    arrays = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    tokens = check_tokens(op, arrays, scale, ("B", "T"), sizes)
    if slots is not None:
        kept = check_state(op, state, sizes, tokens.value.dtype, slots=True)
        return _extend_slots(op, tokens, kept, start, lengths, slots, sizes)
    kept = check_state(op, state, sizes, tokens.value.dtype)
    first = check_start(op, start, kept, sizes)
    counted, invalid = _counted(check_lengths(op, lengths, sizes), sizes["T"])
    if start is not None:
        invalid = invalid | (first < kept.edge) | (first > kept.length)
    counted = jnp.where(invalid, 0, counted)
    if 0 in tokens.value.shape or sizes["D"] == 0:
        return tokens.value, kept

    def compute(*arrays: jax.Array) -> Arrays:
        return delta_rule_extend_kernel(*arrays, scale=tokens.scale)

    fields = (kept.state, kept.key, kept.residual, kept.inverse, kept.decay, kept.edge)
    y, after, keys, residual, inverse, decay, edge = forward_only(op, compute, *tokens.arrays, *fields, first, counted)
    length = jnp.where(invalid, kept.length, first + counted)
    new = DeltaRuleState(after, keys, residual, inverse, decay, edge, length)
    return nan_if_invalid_kernel(y, invalid)[0], new


def _extend_slots(
    op: str, tokens: DeltaRuleTokens, kept: DeltaRuleState, start: Any, lengths: Any, slots: Any, sizes: dict[str, int]
) -> tuple[jax.Array, DeltaRuleState]:
    """Continues the sequences that are in `slots`."""
    slots, number = jnp.asarray(of_sequences(op, "slots", slots, sizes)), sizes["S"]
    if 0 in tokens.value.shape or sizes["D"] == 0 or number == 0:
        return jnp.zeros_like(tokens.value), kept
    places = narrowed(slots, 0, number - 1)
    own = jnp.maximum(places, 0)
    edge, length = (jnp.take(a, own, axis=0, mode="clip") for a in (kept.edge, kept.length))
    first = length if start is None else jnp.asarray(of_sequences(op, "start", start, sizes)).astype(jnp.int32)
    begins = first == 0
    edge, length = jnp.where(begins, 0, edge), jnp.where(begins, 0, length)
    counted, invalid = _counted(check_lengths(op, lengths, sizes), sizes["T"])
    invalid = invalid | (first < edge) | (first > length)
    counted = jnp.where(invalid | (places < 0), 0, counted)

    def compute(*arrays: jax.Array) -> Arrays:
        return delta_rule_extend_kernel(*arrays, scale=tokens.scale)

    fields = (kept.state, kept.key, kept.residual, kept.inverse, kept.decay)
    found = forward_only(op, compute, *tokens.arrays, *fields, edge, first, counted, own)
    y, state, key, residual, inverse, decay, _ = found
    end = first + counted
    at = jnp.where(counted > 0, own, number)
    edges = kept.edge.at[at].set((end - 1) // CHUNK * CHUNK, mode="drop")
    lengths = kept.length.at[at].set(end, mode="drop")
    after = DeltaRuleState(state, key, residual, inverse, decay, edges, lengths)
    return nan_if_invalid_kernel(y, invalid)[0], after


def _counted(lengths: Any, most: int) -> tuple[jax.Array, jax.Array]:
    """Returns lengths in int32, 0 for those out of [0, most], and which these are."""
    numbers = narrowed(lengths, 0, most)
    return jnp.maximum(numbers, 0), numbers < 0


@custom_vjp(nondiff_argnums=(7,))
def _delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    lengths: jax.Array,
    scale: float,
) -> Arrays:
    return delta_rule_kernel(query, key, value, g, beta, state, lengths, scale=scale, keep_edges=False)


def _forward(*arguments: Any) -> tuple[Arrays, Arrays]:
    *arrays, scale = arguments
    y, last, edges = delta_rule_kernel(*arrays, scale=scale, keep_edges=True)
    return (y, last), (*arrays[:5], edges, arrays[6])


def _backward(scale: float, saved: Arrays, cotangents: Arrays) -> tuple[Any, ...]:
    found = delta_rule_gradients_kernel(*saved, *cotangents, scale=scale)
    return *found, np.zeros(saved[6].shape, jax.dtypes.float0)


_delta_rule.defvjp(_forward, _backward)
