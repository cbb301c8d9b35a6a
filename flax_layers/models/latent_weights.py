"""Where the weights of a checkpoint go in latent attention."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .layers import LatentAttention


def load_latent_attention(
    attention: LatentAttention, weights: Mapping[str, np.ndarray], prefix: str, *, interleaved: bool
) -> None:
    """Sets all parameters of latent attention.

    Args:
        attention: The layer; its parameters may be abstract (`nnx.eval_shape`).
        weights: Weights under Hugging Face names, kernels as (out, in).
        prefix: What the names start with, `model.layers.0.self_attn`.
        interleaved: Whether rotated rows have the two channels of a pair side by side. They are put into the order that
            the layer rotates by, halves; scores do not depend on it, since queries and keys have one order.

    Raises:
        KeyError: If a weight is missing.
    """
    heads, nope, rotated = attention.num_heads, attention.nope_head_dim, attention.rope_head_dim
    order = np.arange(rotated).reshape(-1, 2).T.reshape(-1) if interleaved else np.arange(rotated)

    def weight(name: str) -> np.ndarray:
        return weights[f"{prefix}.{name}.weight"]

    name = "q_proj" if attention.query_down is None else "q_b_proj"
    query = weight(name).reshape(heads, nope + rotated, -1)
    query = np.concatenate([query[:, :nope], query[:, nope:][:, order]], axis=1)
    latent = weight("kv_a_proj_with_mqa")
    latent = np.concatenate([latent[: attention.rank], latent[attention.rank :][order]])
    up = weight("kv_b_proj").reshape(heads, nope + attention.value_head_dim, attention.rank)
    values: list[tuple[Any, np.ndarray]] = [
        (attention.query.kernel, query.reshape(heads * (nope + rotated), -1).T),
        (attention.latent.kernel, latent.T),
        (attention.latent_norm.scale, weight("kv_a_layernorm")),
        (attention.key_up, up[:, :nope]),
        (attention.value_up, up[:, nope:].transpose(0, 2, 1)),
        (attention.out.kernel, weight("o_proj").T),
    ]
    if attention.query_down is not None:
        values.append((attention.query_down.kernel, weight("q_a_proj").T))
        values.append((attention.query_norm.scale, weight("q_a_layernorm")))
    for parameter, value in values:
        parameter.set_value(jnp.asarray(value, parameter.dtype))
