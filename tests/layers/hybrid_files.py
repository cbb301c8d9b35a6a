"""Tiny random checkpoints of Qwen3-Next and Qwen3.5, as their folders store them."""

from typing import Any, Final

import numpy as np

from tests.layers import checkpoint_files as files

KINDS: Final = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
LAYERS, WIDTH, INNER = 2, 24, 20
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 4
EXPERTS = 4


def text_fields(kind: str) -> dict[str, Any]:
    """The fields of the text model, as files of each kind state them."""
    fields: dict[str, Any] = {
        **{name: value for name, value in files.hf_fields().items() if name not in ("rope_theta", "rope_scaling")},
        "num_hidden_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
    }
    experts = {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 8, "mlp_only_layers": [],
    }  # fmt: skip
    if kind == "qwen3_next":
        more = {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_scaling": None, "decoder_sparse_step": 1}
        return {**fields, **experts, **more, "norm_topk_prob": True, "model_type": kind}
    fields["layer_types"] = ["linear_attention", "full_attention"]
    fields["attn_output_gate"] = True
    fields["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    }  # fmt: skip
    if kind == "qwen3_5":
        return {**fields, "intermediate_size": INNER, "model_type": "qwen3_5_text"}
    del fields["intermediate_size"]
    return {**fields, **experts, "model_type": "qwen3_5_moe_text"}


def fields(kind: str) -> dict[str, Any]:
    """The fields of `config.json`."""
    text = text_fields(kind)
    if kind == "qwen3_next":
        return text
    return {"model_type": kind, "text_config": text, "vision_config": {"depth": 1}, "tie_word_embeddings": False}


def weights(kind: str) -> dict[str, np.ndarray]:
    """Weights in the names and the layout of the folder."""
    prefix = "model" if kind == "qwen3_next" else "model.language_model"
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.embed_tokens.weight": (files.VOCAB, WIDTH)}
    keys, values = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    channels = 2 * keys + values
    products = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": VALUE_HEADS, "in_proj_a": VALUE_HEADS}
    if kind == "qwen3_next":
        products = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * VALUE_HEADS}
    for layer in range(LAYERS):
        block = f"{prefix}.layers.{layer}"
        shapes |= {f"{block}.{n}_layernorm.weight": (WIDTH,) for n in ("input", "post_attention")}
        if layer % 2 == 0:
            linear = f"{block}.linear_attn"
            shapes |= {f"{linear}.{name}.weight": (rows, WIDTH) for name, rows in products.items()}
            shapes |= {f"{linear}.conv1d.weight": (channels, 1, 4), f"{linear}.out_proj.weight": (WIDTH, values)}
            shapes |= {f"{linear}.{name}": (VALUE_HEADS,) for name in ("A_log", "dt_bias")}
            shapes[f"{linear}.norm.weight"] = (VALUE_DIM,)
        else:
            rows = {"q": 2 * HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
            shapes |= {f"{block}.self_attn.{n}_proj.weight": (r, WIDTH) for n, r in rows.items()}
            shapes[f"{block}.self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD_DIM)
            shapes |= {f"{block}.self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
        shapes |= _mlp_shapes(kind, f"{block}.mlp")
    shapes |= {f"{prefix}.norm.weight": (WIDTH,), "lm_head.weight": (files.VOCAB, WIDTH)}
    if kind != "qwen3_next":  # parts that the text model does not have
        shapes |= {"model.visual.blocks.0.attn.qkv.weight": (6, 2), "mtp.fc.weight": (WIDTH, 2 * WIDTH)}
    rng = np.random.default_rng(KINDS.index(kind))
    return {name: _draw(rng, name, shape) for name, shape in shapes.items()}


def _mlp_shapes(kind: str, mlp: str) -> dict[str, tuple[int, ...]]:
    def one(name: str, inner: int) -> dict[str, tuple[int, ...]]:
        wide = {f"{name}.{part}_proj.weight": (inner, WIDTH) for part in ("gate", "up")}
        return {**wide, f"{name}.down_proj.weight": (WIDTH, inner)}

    if kind == "qwen3_5":
        return one(mlp, INNER)
    shapes = {f"{mlp}.gate.weight": (EXPERTS, WIDTH), f"{mlp}.shared_expert_gate.weight": (1, WIDTH)}
    shapes |= one(f"{mlp}.shared_expert", 8)
    if kind == "qwen3_5_moe":  # stacked
        return {
            **shapes,
            f"{mlp}.experts.gate_up_proj": (EXPERTS, 24, WIDTH),
            f"{mlp}.experts.down_proj": (EXPERTS, WIDTH, 12),
        }
    for expert in range(EXPERTS):
        shapes |= one(f"{mlp}.experts.{expert}", 12)
    return shapes


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    drawn = rng.standard_normal(shape)
    if len(shape) == 1:
        drawn = drawn / 8 + name.endswith("linear_attn.norm.weight")
    elif "embed_tokens" not in name:
        drawn = drawn / shape[-1] ** 0.5
    return drawn.astype(np.float32)
