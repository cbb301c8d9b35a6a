"""The model types of Hugging Face folders: their additions to a plain Llama, and their unused fields."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from .errors import CheckpointError
from .experts import hf_experts
from .hf_fields import MOST_LISTED, flag, number, whole_number
from .latent import hf_deepseek
from .linear_attention import hf_linear_attention

type Fields = dict[str, Any]

# Fields that could change what a model computes, and the values with which they do not. The first group is read by the
# models of `transformers`; the second belongs to variants that are saved under the same model type.
_NEUTRAL_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "auto_map": (None, {}),
    "rope_local_base_freq": (None,),
    "sliding_window": (None,),
    "use_bidirectional_attention": (False, None),
    "rope_interleaved": (False, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "no_rope_layers": (None, []),
    "embedding_multiplier": (1.0, None),
    "attention_multiplier": (None,),
    "residual_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
    "logit_scale": (1.0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}

_DEFAULTS: Final[Fields] = {"tie_word_embeddings": False, "default_rope_theta": 10000.0}


@dataclasses.dataclass(frozen=True)
class HFModel:
    """A model type.

    Attributes:
        read: Returns the arguments of `LlamaConfig` that this type sets, from the fields and the path of the file.
        uses: Fields that the type reads, or states without using them, though a plain Llama must not have them.
        defaults: Values of fields that a file may leave out.
        head_dim: The field with the width that is rotated.
    """

    read: Callable[[Fields, Path], dict[str, Any]]
    uses: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=lambda: _DEFAULTS)
    head_dim: str = "head_dim"

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        """Returns the fields that must have one of these values, or be absent."""
        return {name: values for name, values in _NEUTRAL_VALUES.items() if name not in self.uses}


def _llama(fields: Fields, path: Path) -> dict[str, Any]:
    return {**_attention_bias(fields, path), "mlp_bias": flag(fields, "mlp_bias", path)}


def _mistral(fields: Fields, path: Path) -> dict[str, Any]:
    return {"windows": _windows(fields, path, lambda layer: True)}


def _qwen2(fields: Fields, path: Path) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _qwen_windows(fields, path)}


def _qwen3(fields: Fields, path: Path) -> dict[str, Any]:
    return {**_attention_bias(fields, path), "qk_norm": True, "windows": _qwen_windows(fields, path)}


def _qwen3_moe(fields: Fields, path: Path) -> dict[str, Any]:
    experts = hf_experts(fields, path)
    if flag(fields, "use_sliding_window", path):
        raise CheckpointError(f"{path}: use_sliding_window must be false or absent, got {fields['use_sliding_window']}")
    return {"qk_norm": True, "experts": experts}


def _hybrid(fields: Fields, path: Path) -> dict[str, Any]:
    """Qwen3-Next and the text models of Qwen3.5."""
    if fields["attn_output_gate"] is not True:
        raise CheckpointError(f"{path}: attn_output_gate must be true or absent, got {fields['attn_output_gate']!r}")
    head_dim = whole_number(fields, "head_dim", path, most=MOST_LISTED)
    rotated = number(fields["partial_rotary_factor"], "partial_rotary_factor", path) * head_dim
    if not rotated.is_integer():
        raise CheckpointError(
            f"{path}: partial_rotary_factor must give a whole number of columns, got"
            f" {fields['partial_rotary_factor']!r} for heads of {head_dim}"
        )
    experts = None if fields["model_type"] == "qwen3_5_text" else hf_experts(fields, path)
    return {
        "qk_norm": True,
        "norm_offset": 1.0,
        "output_gate": True,
        "rotary_dim": int(rotated),
        "linear": hf_linear_attention(fields, path),
        "experts": experts,
    }


def _gemma(fields: Fields, path: Path) -> dict[str, Any]:
    if fields["hidden_activation"] != "gelu_pytorch_tanh":
        raise CheckpointError(
            f"{path}: hidden_activation must be 'gelu_pytorch_tanh', got {fields['hidden_activation']!r}"
        )
    pattern = whole_number(fields, "sliding_window_pattern", path, most=MOST_LISTED)
    if pattern < 1:
        raise CheckpointError(f"{path}: sliding_window_pattern must be positive, got {pattern}")
    return {
        **_attention_bias(fields, path),
        "qk_norm": fields["model_type"] != "gemma2",
        "windows": _windows(fields, path, lambda layer: (layer + 1) % pattern != 0, pattern),
        "activation": "gelu_tanh",
        "norm_offset": 1.0,
        "output_norms": True,
        "embedding_scale": math.sqrt(whole_number(fields, "hidden_size", path)),
        "attention_scale": number(fields["query_pre_attn_scalar"], "query_pre_attn_scalar", path) ** -0.5,
        "attention_soft_cap": _cap(fields, "attn_logit_softcapping", path),
        "logits_soft_cap": _cap(fields, "final_logit_softcapping", path),
    }


def _cap(fields: Fields, name: str, path: Path) -> float | None:
    return None if fields.get(name) is None else number(fields[name], name, path)


def _attention_bias(fields: Fields, path: Path) -> dict[str, Any]:
    bias = flag(fields, "attention_bias", path)
    return {"qkv_bias": bias, "output_bias": bias}


def _qwen_windows(fields: Fields, path: Path) -> tuple[int | None, ...]:
    if not flag(fields, "use_sliding_window", path):
        # Files state a window even then.
        return (None,)
    first = whole_number(fields, "max_window_layers", path)
    return _windows(fields, path, lambda layer: layer >= first, None)


def _windows(
    fields: Fields, path: Path, has_window: Callable[[int], bool], period: int | None = 1
) -> tuple[int | None, ...]:
    """Returns the windows of layers, which the file lists, or else those that the type has them in.

    Args:
        fields: The fields.
        path: The file.
        has_window: Whether a layer has a window where the file has no list.
        period: Layers after which it begins again; None for never.
    """
    window = fields.get("sliding_window")
    listed = fields.get("layer_types")
    if listed is not None:
        kinds = ("sliding_attention", "full_attention")
        layers = whole_number(fields, "num_hidden_layers", path, most=MOST_LISTED)
        if not isinstance(listed, list) or len(listed) != layers or not all(kind in kinds for kind in listed):
            raise CheckpointError(
                f"{path}: layer_types must list one of {list(kinds)} for each of {layers} layers, got {listed!r}"
            )
        chosen = [kind == kinds[0] for kind in listed]
    elif window is None:
        return (None,)
    else:
        layers = whole_number(fields, "num_hidden_layers", path, most=MOST_LISTED) if period is None else period
        chosen = [has_window(layer) for layer in range(layers)]
    if not any(chosen):
        return (None,)
    window = whole_number(fields, "sliding_window", path)
    return tuple(window if here else None for here in chosen)


_GEMMA2_DEFAULTS: Final[Fields] = {
    **_DEFAULTS,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
}

_GEMMA3_DEFAULTS: Final[Fields] = {
    **_GEMMA2_DEFAULTS,
    "default_rope_theta": 1e6,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131072,
}

_GEMMA_FIELDS: Final = (
    "hidden_act",
    "hidden_activation",
    "attention_bias",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)

# Their files name the code of the same model in `auto_map`.
_DEEPSEEK: Final = HFModel(hf_deepseek, ("auto_map", "num_experts"), head_dim="qk_rope_head_dim")

_HYBRID_DEFAULTS: Final[Fields] = {
    **_DEFAULTS,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 32768,
}

_HYBRID_FIELDS: Final = ("partial_rotary_factor", "num_experts")

MODELS: Final[Mapping[str, HFModel]] = {
    "llama": HFModel(_llama, ("attention_bias", "mlp_bias")),
    "mistral": HFModel(_mistral, ("sliding_window",), {**_DEFAULTS, "sliding_window": 4096}),
    "qwen2": HFModel(_qwen2, ("sliding_window",)),
    "qwen3": HFModel(_qwen3, ("sliding_window", "attention_bias"), {**_DEFAULTS, "head_dim": 128}),
    "qwen3_moe": HFModel(_qwen3_moe, ("num_experts", "use_qk_norm", "sliding_window")),
    "qwen3_next": HFModel(_hybrid, _HYBRID_FIELDS, _HYBRID_DEFAULTS),
    "qwen3_5_text": HFModel(_hybrid, ("partial_rotary_factor",), _HYBRID_DEFAULTS),
    # No layer has an MLP, so files do not state its width.
    "qwen3_5_moe_text": HFModel(_hybrid, _HYBRID_FIELDS, {**_HYBRID_DEFAULTS, "intermediate_size": 1}),
    "gemma2": HFModel(_gemma, _GEMMA_FIELDS, _GEMMA2_DEFAULTS),
    "gemma3_text": HFModel(_gemma, (*_GEMMA_FIELDS, "rope_local_base_freq"), _GEMMA3_DEFAULTS),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}
"""The types that are read, by the names that `config.json` has for them."""
