"""DeepSeek-V2 and V3 in numpy, float64, from the fields of a `config.json`: keys and values expanded for each head.

It is written from the papers and from what the fields mean, and shares no code with the readers or the models.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Fields = Mapping[str, Any]
Weights = Mapping[str, np.ndarray]


def logits(weights: Weights, fields: Fields, ids: list[int]) -> np.ndarray:
    """Returns the (tokens, vocab_size) logits of one sequence."""
    return states(weights, fields, ids) @ weights["lm_head.weight"].astype(np.float64).T


def states(weights: Weights, fields: Fields, ids: list[int]) -> np.ndarray:
    """Returns what the last norm returns, (tokens, hidden_size)."""
    eps = fields["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"].astype(np.float64)[ids]
    for layer in range(fields["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        y = norm(x, weights[f"{block}.input_layernorm.weight"], eps)
        x = x + attention(y, weights, f"{block}.self_attn", fields)
        y = norm(x, weights[f"{block}.post_attention_layernorm.weight"], eps)
        if layer < fields["first_k_dense_replace"]:
            x = x + mlp(y, weights, f"{block}.mlp")
        else:
            x = x + np.stack([experts(row, weights, f"{block}.mlp", fields) for row in y])
    return norm(x, weights["model.norm.weight"], eps)


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight.astype(np.float64)


def linear(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].astype(np.float64).T


def attention(x: np.ndarray, weights: Weights, name: str, fields: Fields) -> np.ndarray:
    length, heads = len(x), fields["num_attention_heads"]
    nope, rotated, rank = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"], fields["kv_lora_rank"]
    if fields["q_lora_rank"] is None:
        query = linear(x, weights, f"{name}.q_proj")
    else:
        low = norm(linear(x, weights, f"{name}.q_a_proj"), weights[f"{name}.q_a_layernorm.weight"], 1e-6)
        query = linear(low, weights, f"{name}.q_b_proj")
    query = query.reshape(length, heads, nope + rotated)
    down = linear(x, weights, f"{name}.kv_a_proj_with_mqa")
    latent = norm(down[:, :rank], weights[f"{name}.kv_a_layernorm.weight"], 1e-6)
    up = linear(latent, weights, f"{name}.kv_b_proj").reshape(length, heads, -1)
    shared = np.repeat(turn(down[:, None, rank:], fields), heads, axis=1)
    key = np.concatenate([up[..., :nope], shared], axis=-1)
    query = np.concatenate([query[..., :nope], turn(query[..., nope:], fields)], axis=-1)
    scores = np.einsum("qhd,khd->hqk", query, key) * scale(fields)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", shares / shares.sum(axis=-1, keepdims=True), up[..., nope:])
    return linear(mixed.reshape(length, -1), weights, f"{name}.o_proj")


def growth(factor: float, strength: float) -> float:
    return 0.1 * strength * math.log(factor) + 1 if factor > 1 else 1.0


def scale(fields: Fields) -> float:
    rope = fields.get("rope_scaling") or {}
    found = (fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]) ** -0.5
    return float(found * growth(rope.get("factor", 1), rope.get("mscale_all_dim", 0)) ** 2)


def turn(x: np.ndarray, fields: Fields) -> np.ndarray:
    """Turns the pairs of x (T, heads, width): neighbours, or the two halves if the rows are not interleaved."""
    length, heads, width = x.shape
    rope, base = fields.get("rope_scaling") or {}, fields["rope_theta"]
    frequency, magnitude = base ** (-np.arange(0, width, 2) / width), 1.0
    if rope:
        old, factor = rope["original_max_position_embeddings"], rope["factor"]

        def edge(turns: float) -> float:
            return width / 2 * math.log(old / (2 * math.pi * turns)) / math.log(base)

        low, high = max(math.floor(edge(rope["beta_fast"])), 0), min(math.ceil(edge(rope["beta_slow"])), width - 1)
        ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
        frequency = frequency / factor * ramp + frequency * (1 - ramp)
        magnitude = growth(factor, rope["mscale"]) / growth(factor, rope["mscale_all_dim"])
    turned = magnitude * np.exp(1j * np.arange(length)[:, None, None] * frequency)
    if fields.get("rope_interleave", True):
        pairs = x.reshape(length, heads, width // 2, 2)
        found = (pairs[..., 0] + 1j * pairs[..., 1]) * turned
        return np.stack([found.real, found.imag], axis=-1).reshape(x.shape)
    found = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turned
    return np.concatenate([found.real, found.imag], axis=-1)


def mlp(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    gate = linear(x, weights, f"{name}.gate_proj")
    return linear(gate / (1 + np.exp(-gate)) * linear(x, weights, f"{name}.up_proj"), weights, f"{name}.down_proj")


def experts(x: np.ndarray, weights: Weights, name: str, fields: Fields) -> np.ndarray:
    """What the experts make of one token (width,)."""
    count, third = fields["n_routed_experts"], fields["model_type"] != "deepseek_v2"
    products = linear(x, weights, f"{name}.gate")
    scores = 1 / (1 + np.exp(-products)) if third else np.exp(products) / np.exp(products).sum()
    choice = scores + weights[f"{name}.gate.e_score_correction_bias"] if third else scores
    if fields["topk_method"] != "greedy":
        groups = np.sort(choice.reshape(fields["n_group"], -1), axis=1)
        worth = groups[:, -2:].sum(axis=1) if third else groups[:, -1]
        best = np.argsort(-worth)[: fields["topk_group"]]
        size = count // fields["n_group"]
        choice = np.where(np.isin(np.arange(count) // size, best), choice, -np.inf)
    chosen = np.argsort(-choice)[: fields["num_experts_per_tok"]]
    factors = scores[chosen]
    if fields["norm_topk_prob"]:
        factors = factors / factors.sum()
    factors = factors * fields["routed_scaling_factor"]
    found = sum(f * mlp(x, weights, f"{name}.experts.{e}") for f, e in zip(factors, chosen, strict=True))
    return np.asarray(found + mlp(x, weights, f"{name}.shared_experts"))
