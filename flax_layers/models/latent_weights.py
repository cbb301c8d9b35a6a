"""Where the weights of a checkpoint go in latent attention."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .layers import LatentAttention


def read_latent_attention(
    attention: LatentAttention, weights: Mapping[str, np.ndarray], prefix: str, *, interleaved: bool
) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields all parameters of latent attention with their values.

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
    yield attention.query.kernel, query.reshape(heads * (nope + rotated), -1).T
    yield attention.latent.kernel, latent.T
    yield attention.latent_norm.scale, weight("kv_a_layernorm")
    yield attention.key_up, up[:, :nope]
    yield attention.value_up, up[:, nope:].transpose(0, 2, 1)
    yield attention.out.kernel, weight("o_proj").T
    if attention.query_down is not None:
        yield attention.query_down.kernel, weight("q_a_proj").T
        yield attention.query_norm.scale, weight("q_a_layernorm")
