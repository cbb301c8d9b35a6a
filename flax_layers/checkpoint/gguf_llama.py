"""A model of the Llama family in a GGUF file: its configuration and its weights."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from .config import LlamaConfig, default_head_dim
from .errors import CheckpointError
from .gguf_file import GGUFFile
from .gguf_gemma import BLOCK_NAMES as _GEMMA_BLOCK_NAMES
from .gguf_gemma import USED_KEYS as _GEMMA_KEYS
from .gguf_gemma import gemma_fields
from .rope import RopeScaling
from .weights import Shape, Weights, match_shapes

_ROPE_DIVISORS = "rope_freqs.weight"

# Metadata keys that are read, after the architecture's prefix.
_USED_KEYS = frozenset({
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
})  # fmt: skip

# Values under which a feature that these models do not have changes nothing.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "embedding_scale": (1.0,),
    "rope.scaling.finetuned": (False,),
    "tensor_data_layout": ("Meta AI original pth",),
}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """An architecture.

    Attributes:
        neighbours: Whether the two channels of a rotary pair are next to each other.
        qk_norm: As in `LlamaConfig`.
        qkv_bias: As in `LlamaConfig`.
        used_keys: Metadata that it has beyond a Llama's.
        block_names: Tensors of a block that have other names than a Llama's.
        norm_offset: What the file adds to the weights of norms.
    """

    neighbours: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    used_keys: frozenset[str] = frozenset()
    block_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0


_ARCHITECTURES: Final[dict[str, _Architecture]] = {
    "llama": _Architecture(neighbours=True),
    "qwen2": _Architecture(qkv_bias=True),
    "qwen3": _Architecture(qk_norm=True),
    "gemma3": _Architecture(used_keys=_GEMMA_KEYS, block_names=_GEMMA_BLOCK_NAMES, norm_offset=1.0),
}


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """Reads the configuration of a Llama, Qwen2, Qwen3 or Gemma 3 model from the metadata.

    The format's own defaults fill in optional keys: the number of query heads for key/value heads, heads of hidden_size
    / num_heads, a rope base of 10000, a vocabulary of the length of the token list. Every other key of the
    architecture's family must be known here, because an unknown one may change the numbers. Rotary frequencies may be
    scaled linearly or, as in Llama 3.1, by one divisor per frequency in the tensor `rope_freqs`.

    Raises:
        CheckpointError: If the architecture is not supported, or if a key is missing, unknown or asks for a feature
            that the model does not have (YaRN, experts, a sliding window, partial rotation).
    """
    name = file.get("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: expected one of the architectures {list(_ARCHITECTURES)}, got {name!r}; "
            "use a checkpoint of a supported model, or a Hugging Face folder of it"
        )
    architecture = _ARCHITECTURES[name]
    kind = file.get("general.type", str, "model")
    if kind != "model":
        raise CheckpointError(
            f"{file.path}: expected a whole model, got general.type {kind!r}; merge it into its base model"
        )
    for key, value in file.metadata.items():
        family, _, rest = key.partition(".")
        known = rest in _USED_KEYS or rest in architecture.used_keys
        if family == name and not known and value not in _NEUTRAL_VALUES.get(rest, ()):
            raise CheckpointError(
                f"{file.path}: the metadata {key!r} = {value!r} asks for something that this kind of model does not "
                "have; use a checkpoint without it"
            )
    hidden_size = file.get(f"{name}.embedding_length", int)
    num_heads = file.get(f"{name}.attention.head_count", int)
    head_dim = file.find(f"{name}.attention.key_length", int)
    if head_dim is None:
        head_dim = default_head_dim(hidden_size, num_heads)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if file.get(key, int, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {key!r} must equal the head size {head_dim}, got {file.metadata[key]}; "
                "partial rotation and value heads of another size are not supported"
            )
    layers = file.get(f"{name}.block_count", int)
    more: dict[str, Any] = {"qk_norm": architecture.qk_norm, "qkv_bias": architecture.qkv_bias}
    if name == "gemma3":
        more |= gemma_fields(file, layers=layers, hidden_size=hidden_size)
    # The ends of a text, of a turn and of a message: some models have several.
    end_ids = [file.find(f"tokenizer.ggml.{end}_token_id", int) for end in ("eos", "eot", "eom")]
    return LlamaConfig(
        vocab_size=file.get(f"{name}.vocab_size", int, len(file.find("tokenizer.ggml.tokens", list) or ()) or None),
        hidden_size=hidden_size,
        intermediate_size=file.get(f"{name}.feed_forward_length", int),
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=file.get(f"{name}.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        rope_theta=_from_float32(file.get(f"{name}.rope.freq_base", float, 10000.0)),
        rms_norm_eps=_from_float32(file.get(f"{name}.attention.layer_norm_rms_epsilon", float)),
        tie_word_embeddings="output.weight" not in file.tensors,
        max_position_embeddings=file.get(f"{name}.context_length", int),
        bos_token_id=file.find("tokenizer.ggml.bos_token_id", int),
        eos_token_ids=tuple(dict.fromkeys(end_id for end_id in end_ids if end_id is not None)),
        **more,
        rope_scaling=_rope_scaling(file, name, head_dim),
    )


def _rope_scaling(file: GGUFFile, name: str, head_dim: int) -> RopeScaling | None:
    kind = file.get(f"{name}.rope.scaling.type", str, "none")
    factor = file.get(f"{name}.rope.scaling.factor", float, file.get(f"{name}.rope.scale_linear", float, 1.0))
    if kind not in ("none", "linear"):
        raise CheckpointError(
            f"{file.path}: '{name}.rope.scaling.type' must be 'none' or 'linear', got {kind!r}; use a Hugging Face"
            " folder of the model"
        )
    if kind == "none" and factor != 1.0:
        raise CheckpointError(f"{file.path}: rotary frequencies that are scaled by {factor} must name their type")
    divisors = (factor,) * (head_dim // 2)
    if _ROPE_DIVISORS in file.tensors:
        if kind != "none":
            raise CheckpointError(f"{file.path}: scales rotary frequencies twice, by {_ROPE_DIVISORS} and by a factor")
        divisors = tuple(map(float, file.tensors[_ROPE_DIVISORS].to_float32().ravel()))
    return None if divisors == (1.0,) * (head_dim // 2) else RopeScaling(divisors)


def gguf_weights(file: GGUFFile, config: LlamaConfig) -> Weights:
    """Maps the tensors of a model to their Hugging Face names, shapes and row order.

    Raises:
        CheckpointError: If tensors are missing, surplus or of the wrong shape.
    """
    architecture = _ARCHITECTURES[file.get("general.architecture", str)]
    names = {**_BLOCK_NAMES, **architecture.block_names}
    gguf_names = {_huggingface_name(name, names): name for name in file.tensors if name != _ROPE_DIVISORS}
    found: dict[str, Shape] = {name: file.tensors[gguf_name].shape for name, gguf_name in gguf_names.items()}

    def read(name: str) -> np.ndarray:
        weight = file.tensors[gguf_names[name]].to_float32()
        if architecture.norm_offset and weight.ndim == 1 and name.endswith("norm.weight"):
            # The file has w + 1 in float32, from which w in 16 bits comes back exactly.
            return weight - np.float32(architecture.norm_offset)
        if architecture.neighbours and ".q_proj." in name:
            return halves_from_pairs(weight, config.num_heads)
        if architecture.neighbours and ".k_proj." in name:
            return halves_from_pairs(weight, config.num_kv_heads)
        return weight

    return Weights(match_shapes(found, config, file.path), read)


def halves_from_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of a query or key projection from GGUF's rotary layout to Hugging Face's.

    Rotary embedding rotates head_dim / 2 channel pairs. GGUF files of the `llama` architecture keep the two channels
    of a pair next to each other (0 with 1, 2 with 3, ...), Hugging Face keeps them half a head apart (0 with head_dim /
    2, ...). The two models are the same; only the rows of the projections differ.

    Args:
        weight: Shape (num_heads * head_dim, in).
        num_heads: Heads among the rows.

    Returns:
        An array of the same shape and dtype: within each head first the first channels of all pairs, then the second.

    Example:
        >>> import numpy as np
        >>> halves_from_pairs(np.arange(8).reshape(8, 1), num_heads=1)[:, 0].tolist()
        [0, 2, 4, 6, 1, 3, 5, 7]
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _huggingface_name(name: str, block_names: Mapping[str, str]) -> str:
    match = _BLOCK_NAME.fullmatch(name)
    if match and match[2] in block_names:
        return f"model.layers.{match[1]}.{block_names[match[2]]}.{match[3]}"
    # An unknown tensor keeps a name that no weight has, so that the check for surplus tensors finds it.
    return _TOP_NAMES.get(name, f"{name} (GGUF)")


def _from_float32(value: float) -> float:
    # GGUF stores these as float32. The shortest decimal with the same float32 is what the model's author wrote (1e-05,
    # not 9.999999747378752e-06), so both formats give equal configurations and the float32 in the model is unchanged.
    return float(str(np.float32(value)))
