"""One block of a model, and the layers before the first and after the last block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._signature import ConstructorSignature
from ..ops import Ops
from .layers import (
    MLP,
    Attention,
    DeltaNetSlots,
    DeltaNetState,
    Embed,
    GatedDeltaNet,
    LatentAttention,
    LayerCache,
    Linear,
    MoE,
    RMSNorm,
    RotaryEmbedding,
)
from .layers.unrounded import Unrounded, apply_unrounded, rounded

if TYPE_CHECKING:
    # Reading checkpoints needs packages that the model does not.
    from ..checkpoint import LlamaConfig

type Rotary = tuple[jax.Array, jax.Array]

type Stream = tuple[jax.Array, jax.Array | Unrounded | None]
"""The residual stream, whose last addition is left to the next norm; None where there is nothing to add."""


type Kept = LayerCache | DeltaNetState | DeltaNetSlots
"""What a layer keeps of the tokens of sequences."""


class Block(nnx.Module):
    """One block: attention and MLP (or experts), each after a norm and added to the residual stream.

    Attention is linear, a `GatedDeltaNet`, in the layers for which the config says so.

    Args:
        config: The model's numbers.
        layer: Which block it is.
        dtype: Dtype of the computation.
        param_dtype: Dtype of the parameters.
        ops: The operations to compute with.
        rngs: Keys; `rngs.params()` is drawn from.
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self, config: LlamaConfig, layer: int, *, dtype: Any, param_dtype: Any, ops: Ops, rngs: nnx.Rngs
    ) -> None:
        common: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ops": ops, "rngs": rngs}

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, scale_offset=config.norm_offset, **common)

        self.attention_norm = norm()
        self.attention = _attention(config, layer, common)
        self.mlp_norm = norm()
        self.attention_output_norm: Any = norm() if config.output_norms else nnx.data(None)
        self.mlp_output_norm: Any = norm() if config.output_norms else nnx.data(None)
        self.rows: Any = None  # how rows are cut over devices, a `parallel_rows.RowCut`
        self.mlp: MLP | MoE
        if config.experts is None or not config.has_experts(layer):
            self.mlp = MLP(
                config.hidden_size,
                config.intermediate_size,
                activation=config.activation,
                use_bias=config.mlp_bias,
                **common,
            )
        else:
            self.mlp = MoE(
                config.hidden_size,
                config.experts.intermediate_size,
                routing=config.experts.routing,
                shared_features=config.experts.shared_size,
                shared_gate=config.experts.shared_gate,
                **common,
            )

    def __call__(self, x: jax.Array, rotary: Rotary) -> jax.Array:
        """Maps x (B, T, hidden_size) to the same shape; see `Attention`."""
        normed = self.attention_norm(x)
        if isinstance(self.attention, GatedDeltaNet):
            return added(self.after_attention(x, self.attention(normed)))
        return added(self.after_attention(x, self.attention(normed, rotary)))

    def extend(
        self,
        stream: Stream,
        rotary: Rotary,
        cache: Kept,
        *,
        start: jax.Array,
        lengths: jax.Array,
        slots: jax.Array | None = None,
    ) -> tuple[Stream, Kept]:
        """Appends the tokens of a stream (B, T, hidden_size) to the sequences in a cache; see `Attention.extend`.

        `slots` (B,) says where the states are, if these are in slots.
        """
        x, normed = normalized(self.attention_norm, stream)
        places = {"start": start, "lengths": lengths}
        y: jax.Array | Unrounded
        if isinstance(self.attention, GatedDeltaNet):
            if isinstance(cache, DeltaNetSlots) and slots is not None:
                y, kept = self.attention.extend_slots(normed, cache, slots, **places)
                return self.after_attention(x, y), kept
            if not isinstance(cache, DeltaNetState):
                raise TypeError(f"Block: a layer of linear attention keeps a state, got a {type(cache).__name__}.")
            y, state = self.attention.extend(normed, cache, **places)
            return self.after_attention(x, y), state
        if not isinstance(cache, LayerCache):
            raise TypeError(f"Block: a layer of attention keeps keys and values, got a {type(cache).__name__}.")
        if self.rows is not None and self.rows.serves(self, x):
            x, held = self.rows.extend(self, x, normed, rotary, cache, **places)
            return (x, None), held
        y, held = self.attention.extend(normed, rotary, cache, **places)
        return self.after_attention(x, y), held

    def after_attention(
        self, x: jax.Array, y: jax.Array | Unrounded, mlp: Callable[[jax.Array], jax.Array] | None = None
    ) -> Stream:
        """Returns the stream x with the output y of attention added, and the output of the MLP or of `mlp`."""
        x, normed = self.add_attention(x, y)
        y = apply_unrounded(self.mlp, normed) if mlp is None else mlp(normed)
        return x, y if self.mlp_output_norm is None else self.mlp_output_norm(rounded(y, x.dtype))

    def add_attention(self, x: jax.Array, y: jax.Array | Unrounded) -> tuple[jax.Array, jax.Array]:
        """Returns the stream x with the output y of attention added, and the norm before the MLP of it."""
        y = y if self.attention_output_norm is None else self.attention_output_norm(rounded(y, x.dtype))
        return self.mlp_norm.add(x, y)


def _attention(config: LlamaConfig, layer: int, common: dict[str, Any]) -> Attention | GatedDeltaNet | LatentAttention:
    """Returns the attention of a layer; `common` are the keywords that all layers have."""
    if config.linear is not None and config.is_linear(layer):
        return GatedDeltaNet(
            config.hidden_size,
            num_key_heads=config.linear.num_key_heads,
            num_value_heads=config.linear.num_value_heads,
            key_dim=config.linear.key_dim,
            value_dim=config.linear.value_dim,
            conv_width=config.linear.conv_width,
            epsilon=config.rms_norm_eps,
            **common,
        )
    if config.latent is not None:
        return LatentAttention(
            config.hidden_size,
            num_heads=config.num_heads,
            rank=config.latent.rank,
            nope_head_dim=config.latent.nope_head_dim,
            rope_head_dim=config.latent.rope_head_dim,
            value_head_dim=config.latent.value_head_dim,
            query_rank=config.latent.query_rank,
            scale=config.attention_scale,
            **common,
        )
    return Attention(
        config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qk_norm=config.rms_norm_eps if config.qk_norm else None,
        qk_norm_offset=config.norm_offset,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        window=config.window(layer),
        output_gate=config.output_gate,
        **common,
    )


def added(stream: Stream) -> jax.Array:
    """Returns the residual stream as one array."""
    x, y = stream
    return x if y is None else x + rounded(y, x.dtype)


def normalized(norm: RMSNorm, stream: Stream) -> tuple[jax.Array, jax.Array]:
    """Returns the residual stream as one array, and a norm of it."""
    x, y = stream
    return (x, norm(x)) if y is None else norm.add(x, y)


def start_tokens(
    embed: Embed,
    rotaries: Sequence[RotaryEmbedding],
    tokens: jax.Array,
    *,
    start: jax.Array,
    lengths: jax.Array,
    capacity: int,
) -> tuple[jax.Array, tuple[Rotary, ...]]:
    """Returns the residual stream of new tokens (B, T) before the first block, and their angles by each embedding.

    Tokens that find no room get nan angles, so that they cannot be mistaken for others.
    """
    positions = start_positions(rotaries[0], tokens.shape[1], start=start, lengths=lengths, capacity=capacity)
    return embed(tokens), tuple(rotary(positions) for rotary in rotaries)


def start_positions(
    rotary: RotaryEmbedding, length: int, *, start: jax.Array, lengths: jax.Array, capacity: int
) -> jax.Array:
    """Returns the positions (B, length) of new tokens, outside of the embedding's for those that find no room."""
    positions = start[:, None] + jnp.arange(length, dtype=start.dtype)
    room = (positions < capacity) & ((lengths >= 0) & (lengths <= length))[:, None]
    return jnp.where(room, positions, rotary.max_positions)


def project(norm: RMSNorm, projection: Embed | Linear, stream: Stream, soft_cap: float | None) -> jax.Array:
    """Maps the residual stream (..., hidden_size) after the last block to float32 logits (..., vocab_size)."""
    _, x = normalized(norm, stream)
    if isinstance(projection, Embed):
        logits = projection.attend(x, preferred_element_type=jnp.float32)
    else:
        logits = projection(x)
    return logits if soft_cap is None else norm.ops.soft_cap(logits, soft_cap)


def check_room(held: jax.Array, lengths: jax.Array, length: int, capacity: int) -> None:
    """Checks, unless they are traced, that sequences which hold `held` (B,) tokens can take `lengths` (B,) more.

    Raises:
        TypeError: If the lengths are not integers.
        ValueError: If their shape is wrong, they are out of range, or a sequence has no room.
    """
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"lengths must be integers, got {lengths.dtype.name}{lengths.shape}.")
    if lengths.shape != held.shape:
        raise ValueError(f"lengths must have the shape {held.shape}, one for each sequence, got {lengths.shape}.")
    if isinstance(lengths, jax.core.Tracer) or isinstance(held, jax.core.Tracer):
        return
    new, total = np.asarray(lengths), np.asarray(held) + np.asarray(lengths)
    if ((new < 0) | (new > length)).any():
        raise ValueError(f"lengths must be from 0 to {length}, the number of tokens given, got {new.tolist()}.")
    if (total > capacity).any():
        full = int(np.argmax(total > capacity))
        raise ValueError(
            f"the cache holds {capacity} tokens a sequence, but sequence {full} would have {total[full]}"
            f" ({total[full] - new[full]} and {new[full]} new ones); make the cache larger."
        )
