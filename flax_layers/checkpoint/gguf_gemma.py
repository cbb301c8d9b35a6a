"""Gemma 3 in a GGUF file: what it has beyond a Llama."""

import math
from typing import Any, Final

from .errors import CheckpointError
from .gguf_file import GGUFFile

USED_KEYS: Final = frozenset({
    "attention.sliding_window", "attention.sliding_window_pattern", "final_logit_softcapping", "rope.freq_base_swa",
})  # fmt: skip

BLOCK_NAMES: Final = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Tensors of a block that are not named as a Llama's, with their names in Hugging Face folders."""

PUBLISHED: Final = {(18, 640): 256, (26, 1152): 256, (34, 2560): 256, (48, 3840): 256, (62, 5376): 168}
"""By number of layers and width the scale of the queries of Gemma 3 270M, 1B, 4B, 12B and 27B."""

_PATTERN: Final = 6
_WINDOW_THETA: Final = 10000.0


def gemma_fields(file: GGUFFile, *, layers: int, hidden_size: int) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` that a Gemma 3 has and a Llama does not.

    The format does not state the scale of the queries, nor, in older files, which layers have a window and the base of
    their rotary frequencies. They are known for the sizes that Google has published, whose fine-tuned versions keep
    them: every sixth layer sees all tokens, and the base of the others is 10000. Other sizes are refused.

    Args:
        file: The file.
        layers: Number of blocks.
        hidden_size: Width of the residual stream.

    Raises:
        CheckpointError: If the model has another size than those published, or a key another type or meaning.
    """
    if (layers, hidden_size) not in PUBLISHED:
        raise CheckpointError(
            f"{file.path}: a Gemma 3 must have one of the published sizes, (layers, width) {list(PUBLISHED)}, got"
            f" {(layers, hidden_size)}: GGUF files do not state the scale of the queries; use a Hugging Face folder"
        )
    window = file.get("gemma3.attention.sliding_window", int)
    pattern = file.get("gemma3.attention.sliding_window_pattern", int, _PATTERN)
    if window < 1 or pattern < 1:
        raise CheckpointError(
            f"{file.path}: 'gemma3.attention.sliding_window' and its pattern must be positive, got {window} and"
            f" {pattern}"
        )
    cap = file.find("gemma3.final_logit_softcapping", float)
    return {
        "qk_norm": True,
        "windows": (window,) * (pattern - 1) + (None,),
        "window_rope_theta": file.get("gemma3.rope.freq_base_swa", float, _WINDOW_THETA),
        "activation": "gelu_tanh",
        "norm_offset": 1.0,
        "output_norms": True,
        "embedding_scale": math.sqrt(hidden_size),
        "attention_scale": PUBLISHED[layers, hidden_size] ** -0.5,
        "logits_soft_cap": cap or None,
    }
