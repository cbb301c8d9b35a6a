"""Where the weights of a checkpoint go in linear attention, and in attention with an output gate."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .layers import Attention, GatedDeltaNet
from .layers.rotary import rotary_order


def read_delta_net(
    layer: GatedDeltaNet, weights: Mapping[str, np.ndarray], prefix: str
) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields all parameters of a layer with their values.

    Args:
        layer: The layer; its parameters may be abstract (`nnx.eval_shape`).
        weights: Weights under Hugging Face names, with a product for each of qkv, z, b and a.
        prefix: What the names start with, `model.layers.0.linear_attn`.

    Raises:
        KeyError: If a weight is missing.
    """

    def kernel(*names: str) -> np.ndarray:
        return np.concatenate([weights[f"{prefix}.{name}.weight"] for name in names]).T

    yield layer.qkvz.kernel, kernel("in_proj_qkv", "in_proj_z")
    yield layer.ba.kernel, kernel("in_proj_b", "in_proj_a")
    yield layer.conv, weights[f"{prefix}.conv1d.weight"][:, 0]
    yield layer.a_log, weights[f"{prefix}.A_log"]
    yield layer.dt_bias, weights[f"{prefix}.dt_bias"]
    yield layer.norm_scale, weights[f"{prefix}.norm.weight"]
    yield layer.out.kernel, kernel("out_proj")


def read_gated_attention(
    layer: Attention, weights: Mapping[str, np.ndarray], prefix: str, *, rotary_dim: int
) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields all parameters of a layer, with the columns of queries and keys in the order of `RotaryEmbedding`.

    Args:
        layer: The layer, with an output gate and norms of queries and keys; its parameters may be abstract.
        weights: Weights under Hugging Face names. `q_proj` has the query and then the gate of each head.
        prefix: What the names start with, `model.layers.0.self_attn`.
        rotary_dim: Columns at the beginning of a head that turn.

    Raises:
        KeyError: If a weight is missing.
    """
    order = rotary_order(layer.head_dim, rotary_dim)

    def heads(name: str, parts: int = 1) -> list[np.ndarray]:
        """Returns the parts of each head of a product, (heads, head_dim, features) each."""
        stored = weights[f"{prefix}.{name}_proj.weight"]
        return np.split(stored.reshape(-1, parts * layer.head_dim, stored.shape[1]), parts, axis=1)

    def kernel(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts]).T

    (query, gate), (key,), (value,) = heads("q", 2), heads("k"), heads("v")
    yield layer.qkv.kernel, kernel(query[:, order], key[:, order], value)
    yield layer.gate.kernel, kernel(gate)
    yield layer.out.kernel, weights[f"{prefix}.o_proj.weight"].T
    yield layer.query_norm.scale, weights[f"{prefix}.q_norm.weight"][order]
    yield layer.key_norm.scale, weights[f"{prefix}.k_norm.weight"][order]
