"""Qwen3-Next and the text model of Qwen3.5 in numpy, float64, from the fields and the weights of a folder.

It is written from the formulas of the layers, and shares no code with the readers or the models.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def logits(weights: Weights, fields: Mapping[str, Any], ids: list[int]) -> np.ndarray:
    """Returns the (tokens, vocab_size) logits of one sequence."""
    return states(weights, fields, ids) @ weights["lm_head.weight"].astype(np.float64).T


def norm_of(weights: Weights, fields: Mapping[str, Any]) -> Any:
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + fields["rms_norm_eps"]) * (1 + weights[f"{name}.weight"])

    return norm


def states(weights: Weights, fields: Mapping[str, Any], ids: list[int]) -> np.ndarray:
    """Returns what the last norm returns, (tokens, hidden_size)."""
    nested = "text_config" in fields
    text = fields["text_config"] if nested else fields
    prefix = "model.language_model" if nested else "model"
    wide = {name: weight.astype(np.float64) for name, weight in weights.items()}
    norm = norm_of(wide, text)
    x = wide[f"{prefix}.embed_tokens.weight"][ids]
    for layer in range(text["num_hidden_layers"]):
        block = f"{prefix}.layers.{layer}"
        y = norm(x, f"{block}.input_layernorm")
        kinds = text.get("layer_types")
        full = (layer + 1) % text["full_attention_interval"] == 0
        full = full if kinds is None else kinds[layer] == "full_attention"
        if full:
            x = x + attention(y, wide, f"{block}.self_attn", text, norm)
        else:
            x = x + delta_net(y, wide, f"{block}.linear_attn", text)
        y = norm(x, f"{block}.post_attention_layernorm")
        x = x + (experts if "num_experts" in text else mlp)(y, wide, f"{block}.mlp", text)
    return np.asarray(norm(x, f"{prefix}.norm"))


def delta_net(x: np.ndarray, weights: Weights, name: str, fields: Mapping[str, Any]) -> np.ndarray:
    keys, heads = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    d, v = fields["linear_key_head_dim"], fields["linear_value_head_dim"]
    length, group = len(x), heads // keys
    if f"{name}.in_proj_qkvz.weight" in weights:  # by key heads
        by_head = (x @ weights[f"{name}.in_proj_qkvz.weight"].T).reshape(length, keys, -1)
        q, k, value, z = np.split(by_head, [d, 2 * d, 2 * d + group * v], axis=2)
        mixed = np.concatenate([part.reshape(length, -1) for part in (q, k, value)], axis=1)
        b, a = np.split((x @ weights[f"{name}.in_proj_ba.weight"].T).reshape(length, keys, -1), 2, axis=2)
        z, b, a = z.reshape(length, heads, v), b.reshape(length, heads), a.reshape(length, heads)
    else:
        mixed, z, b, a = (x @ weights[f"{name}.in_proj_{part}.weight"].T for part in ("qkv", "z", "b", "a"))
        z = z.reshape(length, heads, v)
    kernel = weights[f"{name}.conv1d.weight"][:, 0]
    padded = np.concatenate([np.zeros((kernel.shape[1] - 1, mixed.shape[1])), mixed])
    mixed = silu(sum(padded[i : i + length] * kernel[:, i] for i in range(kernel.shape[1])))
    q, k, value = np.split(mixed, [keys * d, 2 * keys * d], axis=1)
    q, k = (part.reshape(length, keys, d) for part in (q, k))
    q, k = (part / np.sqrt((part**2).sum(axis=-1, keepdims=True) + 1e-6) for part in (q, k))
    q, k, value = q.repeat(group, axis=1) * d**-0.5, k.repeat(group, axis=1), value.reshape(length, heads, v)
    decay = np.exp(-np.exp(weights[f"{name}.A_log"]) * np.log1p(np.exp(a + weights[f"{name}.dt_bias"])))
    state, y = np.zeros((heads, d, v)), np.zeros((length, heads, v))
    for t in range(length):
        state = decay[t][:, None, None] * state
        told = np.einsum("hd,hdv->hv", k[t], state)
        state = state + np.einsum("hd,hv->hdv", k[t], sigmoid(b[t])[:, None] * (value[t] - told))
        y[t] = np.einsum("hd,hdv->hv", q[t], state)
    y = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + fields["rms_norm_eps"])
    y = y * weights[f"{name}.norm.weight"] * silu(z)
    return y.reshape(length, -1) @ weights[f"{name}.out_proj.weight"].T


def attention(x: np.ndarray, weights: Weights, name: str, fields: Mapping[str, Any], norm: Any) -> np.ndarray:
    heads, width, length = fields["num_attention_heads"], fields["head_dim"], len(x)
    rope = fields.get("rope_parameters") or fields
    turned = int(width * rope["partial_rotary_factor"])
    query, key, value = (x @ weights[f"{name}.{part}_proj.weight"].T for part in "qkv")
    query, gate = np.split(query.reshape(length, heads, 2 * width), 2, axis=2)
    key, value = (part.reshape(length, -1, width) for part in (key, value))
    query, key = norm(query, f"{name}.q_norm"), norm(key, f"{name}.k_norm")
    angle = np.arange(length)[:, None, None] / rope["rope_theta"] ** (np.arange(0, turned, 2) / turned)

    def turn(part: np.ndarray) -> np.ndarray:
        first, second, rest = np.split(part, [turned // 2, turned], axis=2)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=2)

    query, key = turn(query), turn(key)
    key, value = (part.repeat(heads // part.shape[1], axis=1) for part in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) * width**-0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y = np.einsum("hqk,khd->qhd", shares / shares.sum(axis=-1, keepdims=True), value) * sigmoid(gate)
    return y.reshape(length, -1) @ weights[f"{name}.o_proj.weight"].T


def mlp(x: np.ndarray, weights: Weights, name: str, fields: Mapping[str, Any]) -> np.ndarray:
    gate, up = (x @ weights[f"{name}.{part}_proj.weight"].T for part in ("gate", "up"))
    return (silu(gate) * up) @ weights[f"{name}.down_proj.weight"].T


def experts(x: np.ndarray, weights: Weights, name: str, fields: Mapping[str, Any]) -> np.ndarray:
    scores = x @ weights[f"{name}.gate.weight"].T
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y = sigmoid(x @ weights[f"{name}.shared_expert_gate.weight"].T) * mlp(x, weights, f"{name}.shared_expert", fields)
    for token, row in enumerate(scores):
        chosen = np.argsort(-row, kind="stable")[: fields["num_experts_per_tok"]]
        for expert in chosen:
            y[token] += row[expert] / row[chosen].sum() * one_expert(x[token], weights, f"{name}.experts", expert)
    return y


def one_expert(x: np.ndarray, weights: Weights, name: str, expert: int) -> np.ndarray:
    if f"{name}.gate_up_proj" in weights:
        gate, up = np.split(weights[f"{name}.gate_up_proj"][expert] @ x, 2)
        return weights[f"{name}.down_proj"][expert] @ (silu(gate) * up)
    return mlp(x, weights, f"{name}.{expert}", {})
