"""A Llama forward pass in numpy, float64, as plain as it can be written."""

from collections.abc import Mapping

import numpy as np

from flax_layers.checkpoint import LlamaConfig
from tests.layers import reference_experts


def logits(weights: Mapping[str, np.ndarray], config: LlamaConfig, ids: list[int]) -> np.ndarray:
    """Returns the (tokens, vocab_size) logits of one sequence."""
    embedding = weights["model.embed_tokens.weight"].astype(np.float64)
    x = embedding[ids]
    group = config.num_heads // config.num_kv_heads
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for layer in range(config.num_layers):

        def weight(name: str, layer: int = layer) -> np.ndarray:
            return weights[f"model.layers.{layer}.{name}.weight"].astype(np.float64)

        y = _rms_norm(x, weight("input_layernorm"), config.rms_norm_eps)
        query, key, value = (
            (y @ weight(f"self_attn.{name}_proj").T).reshape(len(ids), -1, config.head_dim) for name in "qkv"
        )
        if config.qk_norm:
            query = _rms_norm(query, weight("self_attn.q_norm"), config.rms_norm_eps)
            key = _rms_norm(key, weight("self_attn.k_norm"), config.rms_norm_eps)
        query, key = _rotate(query, config.rope_theta), _rotate(key, config.rope_theta)
        key, value = key.repeat(group, axis=1), value.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(config.head_dim) + future
        attention = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attention /= attention.sum(axis=-1, keepdims=True)
        y = np.einsum("hqk,khd->qhd", attention, value).reshape(len(ids), -1)
        x = x + y @ weight("self_attn.o_proj").T
        y = _rms_norm(x, weight("post_attention_layernorm"), config.rms_norm_eps)
        if config.experts is not None:
            x = x + reference_experts.experts(y, weights, f"model.layers.{layer}.mlp", config.experts)
            continue
        gate = y @ weight("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
    x = _rms_norm(x, weights["model.norm.weight"].astype(np.float64), config.rms_norm_eps)
    head = embedding if config.tie_word_embeddings else weights["lm_head.weight"].astype(np.float64)
    return x @ head.T


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )
