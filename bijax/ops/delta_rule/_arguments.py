"""Checks of what the gated delta rule takes, and the state that its continuation keeps."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bijax.core.checks import describe, float_array, float_dtype, integer, integer_array, real, same_dtype
from bijax.core.explicit_axes import gathered_once
from bijax.dispatch.delta_rule import CHUNK
from bijax.ops._engine_arguments import check_known, check_shape, is_known


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaRuleState:
    """What `bijax.gated_delta_rule_extend` keeps of B sequences.

    A *snapshot* of a sequence is `state` and `edge` alone: `DeltaRuleState.at_edge` continues from it, with the bits of
    a sequence that was computed from its beginning. The other arrays hold the tokens after `edge`, at most 64.

    Attributes:
        state: (B, H, D, V) float32, the state before the position `edge`.
        key: (B, J, 64, D) keys of the tokens from `edge` on.
        residual: (B, H, 64, V), their values less the state's prediction.
        inverse: (B, H, 64, 64) float32, their rows of the inverse of I + A (see the contract).
        decay: (B, H, 64) float32, the sums of their gates since `edge`.
        edge: (B,) int32, a multiple of 64.
        length: (B,) int32, the tokens of each sequence, from `edge` to `edge` + 64.

    Example:
        >>> kept = DeltaRuleState.zeros(2, key_heads=1, value_heads=2, key_size=8, value_size=4)
        >>> kept.state.shape, kept.length.tolist()
        ((2, 2, 8, 4), [0, 0])
        >>> DeltaRuleState.at_edge(kept.state, [128, 64], key_heads=1).length.tolist()
        [128, 64]
    """

    state: jax.Array
    key: jax.Array
    residual: jax.Array
    inverse: jax.Array
    decay: jax.Array
    edge: jax.Array
    length: jax.Array

    @classmethod
    def zeros(
        cls, batch: int, *, key_heads: int, value_heads: int, key_size: int, value_size: int, dtype: Any = "float32"
    ) -> "DeltaRuleState":
        """Returns the state of sequences without tokens.

        Args:
            batch: Number of sequences B.
            key_heads: J.
            value_heads: H, a multiple of `key_heads`.
            key_size: D.
            value_size: V.
            dtype: Dtype of keys and values.

        Raises:
            TypeError: If a size is not an integer, or the dtype is unsupported.
            ValueError: If a size is negative, or `value_heads` is not a multiple of `key_heads`.
        """
        op = "bijax.DeltaRuleState.zeros"
        sizes = {"batch": batch, "value_heads": value_heads, "key_size": key_size, "value_size": value_size}
        for name, size in sizes.items():
            if integer(op, name, size) < 0:
                raise ValueError(f"{op}: {name} must be at least 0, got {size}.")
        state = jnp.zeros((batch, value_heads, key_size, value_size), jnp.float32)
        return cls.at_edge(state, jnp.zeros(batch, jnp.int32), key_heads=key_heads, dtype=dtype)

    @classmethod
    def at_edge(cls, state: Any, edge: Any, *, key_heads: int, dtype: Any = "float32") -> "DeltaRuleState":
        """Returns the state of sequences of which a snapshot is known.

        Args:
            state: (B, H, D, V) float32.
            edge: (B,) ints, the tokens of each sequence: multiples of 64.
            key_heads: J; H is a multiple of it.
            dtype: Dtype of keys and values.

        Raises:
            TypeError: If `state` is not float32, `edge` does not hold integers, or `dtype` is unsupported.
            ValueError: If shapes do not fit, `value_heads` is not a multiple of `key_heads`, or a known edge is not a
                multiple of 64.
        """
        op = "bijax.DeltaRuleState.at_edge"
        state, dtype = float_array(op, "state", state), float_dtype(op, "dtype", dtype)
        if state.dtype != jnp.float32:
            raise TypeError(f"{op}: state must be float32, got {describe(state)}; a snapshot must not be rounded.")
        check_shape(op, "state", state, ("B", "H", "D", "V"), {})
        b, h, d, v = state.shape
        check_heads(op, integer(op, "key_heads", key_heads), h)
        edge = integer_array(op, "edge", edge)
        check_shape(op, "edge", edge, ("B",), {"B": b})
        if is_known(edge) and ((edge % CHUNK != 0) | (edge < 0)).any():
            raise ValueError(f"{op}: edge must hold multiples of {CHUNK}, at least 0, got {edge.tolist()}.")
        at = jnp.asarray(edge).astype(jnp.int32)
        return cls(
            state,
            jnp.zeros((b, key_heads, CHUNK, d), dtype),
            jnp.zeros((b, h, CHUNK, v), dtype),
            jnp.zeros((b, h, CHUNK, CHUNK), jnp.float32),
            jnp.zeros((b, h, CHUNK), jnp.float32),
            at,
            jnp.array(at, copy=True),  # an array of its own, so that a state can be donated
        )


class DeltaRuleTokens(NamedTuple):
    """Checked arguments: `query`, `key`, `value`, `g` and `beta`, the last two in float32, and the scale."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    g: jax.Array
    beta: jax.Array
    scale: float

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The five arrays."""
        return self.query, self.key, self.value, self.g, self.beta


def check_heads(op: str, key_heads: int, value_heads: int) -> None:
    """Checks the numbers of heads.

    Raises:
        ValueError: If the number of value heads is not a multiple of that of key heads.
    """
    if key_heads < 1 or value_heads % key_heads:
        raise ValueError(
            f"{op}: the number of value heads must be a multiple of the number of key heads, got {value_heads} value"
            f" heads and {key_heads} key heads."
        )


def check_tokens(
    op: str, arrays: dict[str, Any], scale: float | None, lead: tuple[str, ...], sizes: dict[str, int]
) -> DeltaRuleTokens:
    """Checks tokens, and learns their sizes.

    Args:
        op: Name of the operation.
        arrays: query, key, value, g and beta, by name.
        scale: Factor of the outputs, or None for the default.
        lead: Names of the dimensions before the heads.
        sizes: Sizes by name, see `check_shape`.

    Raises:
        TypeError: If an array has an unsupported dtype, or another one than the others.
        ValueError: If shapes do not fit.
    """
    whole = zip(arrays, gathered_once(*arrays.values()), strict=True)
    found = {name: float_array(op, name, x) for name, x in whole}
    same_dtype(op, query=found["query"], key=found["key"], value=found["value"])
    check_shape(op, "query", found["query"], (*lead, "J", "D"), sizes)
    check_shape(op, "key", found["key"], (*lead, "J", "D"), sizes)
    check_shape(op, "value", found["value"], (*lead, "H", "V"), sizes)
    for name in ("g", "beta"):
        check_shape(op, name, found[name], (*lead, "H"), sizes)
        found[name] = found[name].astype(jnp.float32)
    check_heads(op, sizes["J"], sizes["H"])
    factor = sizes["D"] ** -0.5 if scale is None else real(op, "scale", scale)
    return DeltaRuleTokens(**found, scale=factor)


def check_state(op: str, state: Any, sizes: dict[str, int], dtype: Any, *, slots: bool = False) -> DeltaRuleState:
    """Checks a state for tokens of these sizes; with `slots` it is one of S sequences, whose `inverse` is packed.

    Raises:
        TypeError: If it is not a `DeltaRuleState`, or one of its arrays has another dtype.
        ValueError: If the shape of one of its arrays does not fit.
    """
    if not isinstance(state, DeltaRuleState):
        raise TypeError(f"{op}: state must be a bijax.DeltaRuleState, got {type(state).__name__}.")
    b = "S" if slots else "B"
    shapes: dict[str, tuple[int | str, ...]] = {
        "state": (b, "H", "D", "V"),
        "key": (b, "J", CHUNK, "D"),
        "residual": (b, "H", CHUNK, "V"),
        "inverse": (b, "H", CHUNK // 2, CHUNK + 1) if slots else (b, "H", CHUNK, CHUNK),
        "decay": (b, "H", CHUNK),
        "edge": (b,),
        "length": (b,),
    }
    dtypes = {"key": dtype, "residual": dtype, "edge": jnp.dtype("int32"), "length": jnp.dtype("int32")}
    for field in dataclasses.fields(DeltaRuleState):
        array = getattr(state, field.name)
        check_shape(op, f"state.{field.name}", array, shapes[field.name], sizes)
        expected = dtypes.get(field.name, jnp.dtype("float32"))
        if array.dtype != expected:
            raise TypeError(
                f"{op}: state.{field.name} must be {expected} for tokens of {jnp.dtype(dtype)}, got {describe(array)};"
                " create the state with the dtype of the tokens."
            )
    return state


def check_start(op: str, start: Any, state: DeltaRuleState, sizes: dict[str, int]) -> jax.Array:
    """Returns the position of each sequence's first token, (B,) int32.

    Raises:
        TypeError: If it does not hold integers.
        ValueError: If its shape does not fit, or a known position is before `state.edge` or after `state.length`.
    """
    if start is None:
        return state.length
    start = of_sequences(op, "start", start, sizes)
    if is_known(start, state.edge, state.length):
        wrong = (start < state.edge) | (start > state.length)
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"{op}: start must be in [state.edge, state.length], [{state.edge[at]}, {state.length[at]}] for"
                f" sequence {at}, got {start[at]}. Tokens before state.edge cannot be written again: drafts must end at"
                f" multiples of {CHUNK}, or the sequence starts again from a snapshot."
            )
    return jnp.asarray(start).astype(jnp.int32)


def of_sequences(op: str, name: str, numbers: Any, sizes: dict[str, int]) -> Any:
    """Returns an integer for each sequence, (B,).

    Raises:
        TypeError: If they are not integers.
        ValueError: If their shape does not fit.
    """
    found = integer_array(op, name, numbers)
    check_shape(op, name, found, ("B",), sizes)
    return found


def check_lengths(op: str, lengths: Any, sizes: dict[str, int]) -> Any:
    """Returns the tokens of each sequence, T by default.

    Raises:
        TypeError: If they are not integers.
        ValueError: If their shape does not fit, or a known one is not in [0, T].
    """
    if lengths is None:
        return jnp.full(sizes["B"], sizes["T"], jnp.int32)
    lengths = of_sequences(op, "lengths", lengths, sizes)
    check_known(op, "lengths", lengths, 0, sizes["T"], "the tokens of a sequence")
    return lengths
