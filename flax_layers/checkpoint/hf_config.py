"""The configuration of a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

from .config import LlamaConfig, default_head_dim
from .errors import CheckpointError
from .experts import hf_experts

_MODEL_TYPES = ("llama", "qwen3_moe")

# Fields under which the model would compute something else, and the values under which it does not. The first group is
# what the Llama model of `transformers` reads; the second belongs to relatives that are saved under the same model
# type.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "auto_map": (None, {}),
    "rope_interleaved": (False, None),
    "sliding_window": (None,),
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

# What a Qwen3-MoE has, or states without using it.
_QWEN3_MOE = ("num_experts", "use_qk_norm", "sliding_window")

_DEFAULT_ROPE_THETA = 10000.0


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If it is not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got {error}; the file is damaged: get it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}; the file is damaged")
    return value


def hf_config(folder: Path) -> LlamaConfig:
    """Reads `config.json` and, for the tokens that end generation, `generation_config.json` if it is there.

    The defaults of the format fill what old files leave out: as many key/value heads as heads, a rope base of 10000, an
    epsilon of 1e-6, untied embeddings, 2048 positions. Fields that do not touch the numbers (names, versions, dropout)
    are not read.

    Raises:
        FileNotFoundError: If there is no `config.json`.
        CheckpointError: If the model is no Llama or Qwen3-MoE, if a field is missing or damaged, or if one asks for a
            feature that the model does not have: scaled rotary frequencies, biases, another activation, quantised
            weights, own code.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json; give a GGUF file or a folder with config.json and safetensors"
        )
    fields = read_json(path)
    if fields.get("model_type") not in _MODEL_TYPES:
        raise CheckpointError(
            f"{path}: expected one of the model types {list(_MODEL_TYPES)}, got {fields.get('model_type')!r}; "
            "use a checkpoint of a supported model"
        )
    experts = None if fields["model_type"] == "llama" else hf_experts(fields, path)
    if experts is not None and fields.get("use_sliding_window", False):
        raise CheckpointError(f"{path}: use_sliding_window must be false or absent, got {fields['use_sliding_window']}")
    for name, neutral in _NEUTRAL_VALUES.items():
        if experts is not None and name in _QWEN3_MOE:
            continue
        if name in fields and fields[name] not in neutral:
            raise CheckpointError(
                f"{path}: {name} must be {' or '.join(map(repr, neutral))} or absent, got {fields[name]!r}; a plain "
                "Llama model does not have that feature: use a checkpoint without it"
            )
    hidden_size = _integer(fields, "hidden_size", path)
    num_heads = _integer(fields, "num_attention_heads", path)
    return LlamaConfig(
        vocab_size=_integer(fields, "vocab_size", path),
        hidden_size=hidden_size,
        intermediate_size=_integer(fields, "intermediate_size", path),
        num_layers=_integer(fields, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=_integer(fields, "num_key_value_heads", path, num_heads),
        head_dim=(
            default_head_dim(hidden_size, num_heads)
            if fields.get("head_dim") is None
            else _integer(fields, "head_dim", path)
        ),
        rope_theta=_rope_theta(fields, path),
        rms_norm_eps=_number(fields.get("rms_norm_eps", 1e-6), "rms_norm_eps", path),
        tie_word_embeddings=fields.get("tie_word_embeddings", False),
        max_position_embeddings=_integer(fields, "max_position_embeddings", path, 2048),
        bos_token_id=_first(_token_ids(fields, "bos_token_id", path)),
        eos_token_ids=_eos_token_ids(folder, fields),
        qk_norm=experts is not None,
        experts=experts,
    )


def _integer(fields: dict[str, Any], name: str, path: Path, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{path}: {name} must be an integer, got {value!r}; the file is damaged or incomplete")
    return value


def _number(value: object, name: str, path: Path) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise CheckpointError(f"{path}: {name} must be a number, got {value!r}; the file is damaged")
    return float(value)


def _rope_theta(fields: dict[str, Any], path: Path) -> float:
    # Old files have `rope_theta` and `rope_scaling` side by side, newer ones keep both in `rope_parameters`.
    thetas = [] if fields.get("rope_theta") is None else [_number(fields["rope_theta"], "rope_theta", path)]
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        if kind != "default" or set(rope) - {"rope_type", "type", "rope_theta"}:
            raise CheckpointError(
                f"{path}: {name} must be absent or of the type 'default', got {rope!r}; scaled rotary frequencies are "
                "not supported: use a checkpoint without them"
            )
        if "rope_theta" in rope:
            thetas.append(_number(rope["rope_theta"], f"{name}.rope_theta", path))
    if len(set(thetas)) > 1:
        raise CheckpointError(f"{path}: states the rope base more than once, got {thetas}; leave one of them")
    return thetas[0] if thetas else _DEFAULT_ROPE_THETA


def _eos_token_ids(folder: Path, fields: dict[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if path.is_file():
        generation = read_json(path)
        if "eos_token_id" in generation:
            return _token_ids(generation, "eos_token_id", path)
    return _token_ids(fields, "eos_token_id", folder / "config.json")


def _token_ids(fields: dict[str, Any], name: str, path: Path) -> tuple[int, ...]:
    value = fields.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in values):
        raise CheckpointError(
            f"{path}: {name} must be a token id or a list of them, got {value!r}; the file is damaged"
        )
    return tuple(dict.fromkeys(values))


def _first(token_ids: tuple[int, ...]) -> int | None:
    return token_ids[0] if token_ids else None
