"""Where the weights of a checkpoint go in a Llama model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .experts_weights import load_experts
from .layers import MoE

if TYPE_CHECKING:
    from .llama import Llama


def load_weights(model: Llama, weights: Mapping[str, np.ndarray]) -> None:
    """Sets all parameters of a model.

    Kernels are stored as (in, out), those of products with the same input side by side; a checkpoint has them apart,
    as (out, in).

    Args:
        model: The model; its parameters may be abstract (`nnx.eval_shape`).
        weights: Weights under Hugging Face names.

    Raises:
        ValueError: If a weight does not have the shape of its parameter.
        KeyError: If a weight is missing.
    """
    for parameter, names in _places(model):
        read = [weights[name] for name in names]
        value = read[0] if read[0].ndim == 1 or parameter is model.embed.embedding else np.concatenate(read).T
        if value.shape != parameter.shape:
            raise ValueError(
                f"{' and '.join(names)} must make a parameter of shape {parameter.shape}, got {value.shape};"
                " configuration and weights do not belong together."
            )
        parameter.set_value(jnp.asarray(value, parameter.dtype))
    for index, block in enumerate(model.blocks):
        if isinstance(block.mlp, MoE):
            load_experts(block.mlp, weights, f"model.layers.{index}.mlp")


def _places(model: Llama) -> Iterator[tuple[nnx.Param[jax.Array], tuple[str, ...]]]:
    """Yields every parameter but those of experts with the weights that it is made of."""
    yield model.embed.embedding, ("model.embed_tokens.weight",)
    for index, block in enumerate(model.blocks):
        name = f"model.layers.{index}"
        yield block.attention_norm.scale, (f"{name}.input_layernorm.weight",)
        yield block.attention.qkv.kernel, tuple(f"{name}.self_attn.{part}_proj.weight" for part in "qkv")
        yield block.attention.out.kernel, (f"{name}.self_attn.o_proj.weight",)
        if block.attention.query_norm is not None:
            yield block.attention.query_norm.scale, (f"{name}.self_attn.q_norm.weight",)
            yield block.attention.key_norm.scale, (f"{name}.self_attn.k_norm.weight",)
        yield block.mlp_norm.scale, (f"{name}.post_attention_layernorm.weight",)
        if isinstance(block.mlp, MoE):
            continue
        yield block.mlp.gate_up.kernel, (f"{name}.mlp.gate_proj.weight", f"{name}.mlp.up_proj.weight")
        yield block.mlp.down.kernel, (f"{name}.mlp.down_proj.weight",)
    yield model.norm.scale, ("model.norm.weight",)
    if model.lm_head is not None:
        yield model.lm_head.kernel, ("lm_head.weight",)
