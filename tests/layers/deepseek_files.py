"""Writes tiny random checkpoints of DeepSeek-V2, DeepSeek-V3 and Kimi-K2."""

from pathlib import Path
from typing import Any

import numpy as np

from flax_layers.checkpoint.hf_config import hf_config
from flax_layers.checkpoint.weights import expected_shapes
from tests.layers import checkpoint_files as files

YARN = {
    "type": "yarn", "factor": 4.0, "beta_fast": 4, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 16,
}  # fmt: skip
V2: dict[str, Any] = {
    **files.hf_fields(),
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "head_dim": None, "num_key_value_heads": 4,
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 16, "routed_scaling_factor": 2.0, "norm_topk_prob": False,
    "topk_method": "greedy", "scoring_func": "softmax", "n_group": 1, "topk_group": 1, "rope_scaling": YARN,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
}  # fmt: skip
V3 = {
    **V2,
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 20,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 4, "topk_group": 2,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "V2-Lite": V2,
    "V2": {**V2, "q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "V3": V3,
    "V3, halves, no YaRN": {**V3, "rope_interleave": False, "rope_scaling": None},
    "Kimi-K2": {**V3, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
}


def write_model(path: Path, fields: dict[str, Any]) -> Path:
    """Writes a folder, with a weight of a layer for drafts if the configuration has one."""
    files.write_folder(path, fields)
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(shape) / (8 if len(shape) == 1 else shape[1] ** 0.5) + name.endswith("norm.weight")
        for name, shape in expected_shapes(hf_config(path))
    }
    if fields.get("num_nextn_predict_layers"):
        weights[f"model.layers.{fields['num_hidden_layers']}.eh_proj.weight"] = rng.standard_normal((3, 6))
    return files.write_folder(path, fields, {n: w.astype(np.float32) for n, w in weights.items()})
