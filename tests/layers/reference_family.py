"""A forward pass of the Llama family in numpy, float64, from the fields of a `config.json` and nothing else.

It is written from the papers and from what the fields mean, and shares no code with the readers or the models.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Fields = Mapping[str, Any]


def logits(weights: Mapping[str, np.ndarray], fields: Fields, ids: list[int]) -> np.ndarray:
    """Returns the (tokens, vocab_size) logits of one sequence."""
    gemma = fields["model_type"].startswith("gemma")
    eps, heads = fields["rms_norm_eps"], fields["num_attention_heads"]
    width = fields.get("head_dim") or fields["hidden_size"] // heads
    scale = (fields["query_pre_attn_scalar"] if gemma else width) ** -0.5
    table = weights["model.embed_tokens.weight"].astype(np.float64)
    x = table[ids] * (math.sqrt(fields["hidden_size"]) if gemma else 1)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        weight = weights[f"{name}.weight"].astype(np.float64)
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * (1 + weight if gemma else weight)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        bias = weights.get(f"{name}.bias", np.zeros(1))
        return x @ weights[f"{name}.weight"].astype(np.float64).T + bias

    for layer in range(fields["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        y = norm(x, f"{block}.input_layernorm")
        query, key, value = (linear(y, f"{block}.self_attn.{name}_proj").reshape(len(ids), -1, width) for name in "qkv")
        if f"{block}.self_attn.q_norm.weight" in weights:
            query, key = norm(query, f"{block}.self_attn.q_norm"), norm(key, f"{block}.self_attn.k_norm")
        cos, sin = angles(fields, layer, len(ids), width)
        query, key = turn(query, cos, sin), turn(key, cos, sin)
        key, value = (a.repeat(heads // a.shape[1], axis=1) for a in (key, value))
        distance = np.arange(len(ids))[:, None] - np.arange(len(ids))
        seen = (distance >= 0) & (distance < window(fields, layer))
        scores = np.einsum("qhd,khd->hqk", query, key) * scale
        scores = np.where(seen, capped(scores, fields.get("attn_logit_softcapping")), -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        y = np.einsum("hqk,khd->qhd", shares / shares.sum(axis=-1, keepdims=True), value)
        y = linear(y.reshape(len(ids), -1), f"{block}.self_attn.o_proj")
        x = x + (norm(y, f"{block}.post_attention_layernorm") if gemma else y)
        y = norm(x, f"{block}.{'pre_feedforward' if gemma else 'post_attention'}_layernorm")
        gate = linear(y, f"{block}.mlp.gate_proj")
        gate = gelu(gate) if gemma else gate / (1 + np.exp(-gate))
        y = linear(gate * linear(y, f"{block}.mlp.up_proj"), f"{block}.mlp.down_proj")
        x = x + (norm(y, f"{block}.post_feedforward_layernorm") if gemma else y)
    x = norm(x, "model.norm")
    head = table if fields["tie_word_embeddings"] else weights["lm_head.weight"].astype(np.float64)
    return capped(x @ head.T, fields.get("final_logit_softcapping"))


def capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def window(fields: Fields, layer: int) -> float:
    """Returns how many tokens a token of a layer sees, itself included."""
    size = fields.get("sliding_window")
    has_window = {
        "mistral": size is not None,
        "qwen2": fields.get("use_sliding_window", False) and layer >= fields.get("max_window_layers", 0),
        "gemma2": layer % 2 == 0,
        "gemma3_text": (layer + 1) % fields.get("sliding_window_pattern", 6) != 0,
    }
    return size if has_window.get(fields["model_type"], False) else math.inf


def angles(fields: Fields, layer: int, length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines (length, 1, width / 2)."""
    theta, scaling = fields["rope_theta"], fields.get("rope_scaling") or {}
    if fields["model_type"] == "gemma3_text" and window(fields, layer) < math.inf:
        theta, scaling = fields.get("rope_local_base_freq", 10000.0), {}  # the default of the format
    frequency = 1 / theta ** (np.arange(0, width, 2) / width)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor, magnitude = scaling.get("factor"), 1.0
    if kind == "linear":
        frequency = frequency / factor
    if kind == "llama3":
        old = scaling["original_max_position_embeddings"]
        wavelength = 2 * math.pi / frequency
        blend = (old / wavelength - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        blended = (1 - blend) * frequency / factor + blend * frequency
        slow = wavelength > old / scaling["low_freq_factor"]
        fast = wavelength < old / scaling["high_freq_factor"]
        frequency = np.where(slow, frequency / factor, np.where(fast, frequency, blended))
    if kind == "yarn":
        old = scaling["original_max_position_embeddings"]

        def edge(turns: float) -> float:  # the real index i of the frequency theta**(-2i/width) with so many turns
            return width / 2 * math.log(old / (2 * math.pi * turns)) / math.log(theta)

        low, high = max(math.floor(edge(32)), 0), min(math.ceil(edge(1)), width - 1)
        ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
        frequency = frequency / factor * ramp + frequency * (1 - ramp)
        magnitude = 0.1 * math.log(factor) + 1
    angle = np.arange(length)[:, None, None] * frequency
    return magnitude * np.cos(angle), magnitude * np.sin(angle)
