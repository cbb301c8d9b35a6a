"""Where the weights of a checkpoint go in linear attention, and in attention with an output gate."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .layers import Attention, GatedDeltaNet
from .layers.rotary import rotary_order


def load_delta_net(layer: GatedDeltaNet, weights: Mapping[str, np.ndarray], prefix: str) -> None:
    """Sets all parameters of a layer.

    Args:
        layer: The layer; its parameters may be abstract (`nnx.eval_shape`).
        weights: Weights under Hugging Face names, with a product for each of qkv, z, b and a.
        prefix: What the names start with, `model.layers.0.linear_attn`.

    Raises:
        KeyError: If a weight is missing.
        ValueError: If a weight does not have the shape of its parameter.
    """

    def kernel(*names: str) -> np.ndarray:
        return np.concatenate([weights[f"{prefix}.{name}.weight"] for name in names]).T

    _set(layer.qkvz.kernel, kernel("in_proj_qkv", "in_proj_z"), prefix)
    _set(layer.ba.kernel, kernel("in_proj_b", "in_proj_a"), prefix)
    _set(layer.conv, weights[f"{prefix}.conv1d.weight"][:, 0], prefix)
    _set(layer.a_log, weights[f"{prefix}.A_log"], prefix)
    _set(layer.dt_bias, weights[f"{prefix}.dt_bias"], prefix)
    _set(layer.norm_scale, weights[f"{prefix}.norm.weight"], prefix)
    _set(layer.out.kernel, kernel("out_proj"), prefix)


def load_gated_attention(layer: Attention, weights: Mapping[str, np.ndarray], prefix: str, *, rotary_dim: int) -> None:
    """Sets all parameters of a layer, with the columns of queries and keys in the order of `RotaryEmbedding`.

    Args:
        layer: The layer, with an output gate and norms of queries and keys; its parameters may be abstract.
        weights: Weights under Hugging Face names. `q_proj` has the query and then the gate of each head.
        prefix: What the names start with, `model.layers.0.self_attn`.
        rotary_dim: Columns at the beginning of a head that turn.

    Raises:
        KeyError: If a weight is missing.
        ValueError: If a weight does not have the shape of its parameter.
    """
    order = rotary_order(layer.head_dim, rotary_dim)

    def heads(name: str, parts: int = 1) -> list[np.ndarray]:
        """Returns the parts of each head of a product, (heads, head_dim, features) each."""
        stored = weights[f"{prefix}.{name}_proj.weight"]
        return np.split(stored.reshape(-1, parts * layer.head_dim, stored.shape[1]), parts, axis=1)

    def kernel(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts]).T

    (query, gate), (key,), (value,) = heads("q", 2), heads("k"), heads("v")
    _set(layer.qkv.kernel, kernel(query[:, order], key[:, order], value), prefix)
    _set(layer.gate.kernel, kernel(gate), prefix)
    _set(layer.out.kernel, weights[f"{prefix}.o_proj.weight"].T, prefix)
    _set(layer.query_norm.scale, weights[f"{prefix}.q_norm.weight"][order], prefix)
    _set(layer.key_norm.scale, weights[f"{prefix}.k_norm.weight"][order], prefix)


def _set(parameter: Any, value: np.ndarray, prefix: str) -> None:
    if value.shape != parameter.shape:
        raise ValueError(
            f"the weights {prefix}.* must make a parameter of shape {parameter.shape}, got {value.shape}; configuration"
            " and weights do not belong together."
        )
    parameter.set_value(jnp.asarray(value, parameter.dtype))
