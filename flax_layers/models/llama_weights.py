"""Where the weights of a checkpoint go in a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .experts_weights import read_experts
from .hybrid_weights import read_delta_net, read_gated_attention
from .latent_weights import read_latent_attention
from .layers import Attention, GatedDeltaNet, LatentAttention, Linear, MoE

if TYPE_CHECKING:
    from ..checkpoint import LlamaConfig
    from .block import Block
    from .llama import Llama

type Place = tuple[nnx.Param[jax.Array], tuple[str, ...]]


def load_weights(model: Llama, weights: Mapping[str, np.ndarray]) -> None:
    """Sets all parameters of a model.

    Kernels are stored as (in, out), concatenated for products with the same input; a checkpoint has them separately, as
    (out, in).

    Args:
        model: The model; its parameters may be abstract (`nnx.eval_shape`).
        weights: Weights under Hugging Face names.

    Raises:
        ValueError: If a weight does not have the shape of its parameter.
        KeyError: If a weight is missing.
    """
    for parameter, value in read_weights(model, weights):
        parameter.set_value(jnp.asarray(value, parameter.dtype))


def read_weights(model: Llama, weights: Mapping[str, np.ndarray]) -> Iterator[tuple[nnx.Param[jax.Array], np.ndarray]]:
    """Yields all parameters with their values, read one after another.

    Args:
        model: As for `load_weights`.
        weights: The same.

    Raises:
        ValueError: As `load_weights`.
        KeyError: The same.
    """
    embedding, name = model.embed.embedding, "model.embed_tokens.weight"
    yield embedding, checked(embedding, weights[name], name)
    for index, block in enumerate(model.blocks):
        yield from read_block(block, model.config, weights, f"model.layers.{index}")
    yield from _read(model.norm.scale, weights, "model.norm.weight")
    if model.lm_head is not None:
        yield from _read(model.lm_head.kernel, weights, "lm_head.weight")


def read_block(
    block: Block, config: LlamaConfig, weights: Mapping[str, np.ndarray], prefix: str
) -> Iterator[tuple[nnx.Param[jax.Array], np.ndarray]]:
    """Yields all parameters of a block with their values, as `read_weights`.

    Args:
        block: The block.
        config: The numbers of its model.
        weights: Weights under Hugging Face names.
        prefix: What the names of the block's weights start with, `model.layers.0`.
    """
    for parameter, names in _places(block, prefix):
        yield from _read(parameter, weights, *names)
    for parameter, value in _others(block, config, weights, prefix):
        yield parameter, checked(parameter, value, f"the weights {prefix}.*")


def _read(parameter: Any, weights: Mapping[str, np.ndarray], *names: str) -> Iterator[tuple[Any, np.ndarray]]:
    value = np.concatenate([weights[name] for name in names])
    yield parameter, checked(parameter, value.T if value.ndim == 2 else value, " and ".join(names))


def checked(parameter: Any, value: np.ndarray, what: str) -> np.ndarray:
    """Returns the value of a parameter.

    Raises:
        ValueError: If it does not have the shape of the parameter; `what` says where it is from.
    """
    if value.shape != parameter.shape:
        raise ValueError(
            f"{what} must make a parameter of shape {parameter.shape}, got {value.shape}; configuration and weights do"
            " not belong together."
        )
    return value


def _others(
    block: Block, config: LlamaConfig, weights: Mapping[str, np.ndarray], prefix: str
) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields the parameters of a block's experts and of its latent, gated or linear attention, with their values."""
    attention = block.attention
    if isinstance(attention, LatentAttention):
        interleaved = config.latent is None or config.latent.interleaved
        yield from read_latent_attention(attention, weights, f"{prefix}.self_attn", interleaved=interleaved)
    elif isinstance(attention, GatedDeltaNet):
        yield from read_delta_net(attention, weights, f"{prefix}.linear_attn")
    elif attention.gate is not None:
        rotated = config.rotary_dim or config.head_dim
        yield from read_gated_attention(attention, weights, f"{prefix}.self_attn", rotary_dim=rotated)
    if isinstance(block.mlp, MoE):
        yield from read_experts(block.mlp, weights, f"{prefix}.mlp")


def _places(block: Block, name: str) -> Iterator[Place]:
    """Yields the parameters but those of experts and of latent, gated or linear attention, with their weights."""
    attention = block.attention
    yield block.attention_norm.scale, (f"{name}.input_layernorm.weight",)
    if isinstance(attention, Attention) and attention.gate is None:
        yield from _attention(attention, f"{name}.self_attn")
    if block.attention_output_norm is None:
        yield block.mlp_norm.scale, (f"{name}.post_attention_layernorm.weight",)
    else:
        yield block.attention_output_norm.scale, (f"{name}.post_attention_layernorm.weight",)
        yield block.mlp_norm.scale, (f"{name}.pre_feedforward_layernorm.weight",)
        yield block.mlp_output_norm.scale, (f"{name}.post_feedforward_layernorm.weight",)
    if not isinstance(block.mlp, MoE):
        yield from _linear(block.mlp.gate_up, f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        yield from _linear(block.mlp.down, f"{name}.mlp.down_proj")


def _attention(attention: Attention, name: str) -> Iterator[Place]:
    yield from _linear(attention.qkv, *(f"{name}.{part}_proj" for part in "qkv"))
    yield from _linear(attention.out, f"{name}.o_proj")
    if attention.query_norm is not None:
        yield attention.query_norm.scale, (f"{name}.q_norm.weight",)
        yield attention.key_norm.scale, (f"{name}.k_norm.weight",)


def _linear(layer: Linear, *names: str) -> Iterator[Place]:
    yield layer.kernel, tuple(f"{name}.weight" for name in names)
    if layer.bias is not None:
        yield layer.bias, tuple(f"{name}.bias" for name in names)
