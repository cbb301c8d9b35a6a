"""Heads for multi-token prediction in numpy, float64, from the fields and the weights of a folder.

They are written from the formula of DeepSeek-V3's report and from the names of the weights, and share no code with the
readers or the models.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.layers import reference_deepseek, reference_hybrid

Fields = Mapping[str, Any]
Weights = Mapping[str, np.ndarray]


def hybrid_logits(weights: Weights, fields: Fields, ids: list[int]) -> np.ndarray:
    """Returns the (tokens - 1, vocab_size) logits of the tokens after the next, of Qwen3-Next or Qwen3.5."""
    text = fields.get("text_config", fields)
    prefix = "model.language_model" if "text_config" in fields else "model"
    wide = {name: weight.astype(np.float64) for name, weight in weights.items()}
    norm = reference_hybrid.norm_of(wide, text)
    embedded = norm(wide[f"{prefix}.embed_tokens.weight"][ids[1:]], "mtp.pre_fc_norm_embedding")
    hidden = norm(reference_hybrid.states(weights, fields, ids)[:-1], "mtp.pre_fc_norm_hidden")
    x = np.concatenate([embedded, hidden], axis=1) @ wide["mtp.fc.weight"].T
    block = "mtp.layers.0"
    x = x + reference_hybrid.attention(norm(x, f"{block}.input_layernorm"), wide, f"{block}.self_attn", text, norm)
    y = norm(x, f"{block}.post_attention_layernorm")
    mlp = reference_hybrid.experts if "num_experts" in text else reference_hybrid.mlp
    return np.asarray(norm(x + mlp(y, wide, f"{block}.mlp", text), "mtp.norm") @ wide["lm_head.weight"].T)


def deepseek_logits(weights: Weights, fields: Fields, ids: list[int]) -> np.ndarray:
    """Returns the same of DeepSeek-V3, whose head is the layer after the last one."""
    wide = {name: weight.astype(np.float64) for name, weight in weights.items()}
    block = f"model.layers.{fields['num_hidden_layers']}"

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return reference_deepseek.norm(x, wide[f"{block}.{name}.weight"], fields["rms_norm_eps"])

    embedded = norm(wide["model.embed_tokens.weight"][ids[1:]], "enorm")
    hidden = norm(reference_deepseek.states(weights, fields, ids)[:-1], "hnorm")
    x = np.concatenate([embedded, hidden], axis=1) @ wide[f"{block}.eh_proj.weight"].T
    x = x + reference_deepseek.attention(norm(x, "input_layernorm"), wide, f"{block}.self_attn", fields)
    y = norm(x, "post_attention_layernorm")
    x = x + np.stack([reference_deepseek.experts(row, wide, f"{block}.mlp", fields) for row in y])
    return np.asarray(norm(x, "shared_head.norm") @ wide["lm_head.weight"].T)
