"""The numbers of latent attention (DeepSeek-V2, DeepSeek-V3, Kimi-K2), and its part of a Hugging Face folder."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .experts import hf_experts
from .hf_fields import flag, number, whole_number

type Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Everything about the latent attention of a model but its weights.

    Attributes:
        rank: Width of the latent from which keys and values follow.
        nope_head_dim: Width of the part of a query that is not rotated.
        rope_head_dim: Width of the part of a query that is rotated, and of the rotated key that all heads share.
        value_head_dim: Width of a head of the values.
        query_rank: Width of the latent that queries are made of; None if they are made of the input.
        interleaved: Whether the rotated rows of the weights have the two channels of a pair side by side.

    Raises:
        CheckpointError: If a width is not positive, or the rotated one is odd.

    Example:
        >>> config = LatentConfig(rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128, query_rank=1536)
        >>> config.width
        576
    """

    rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    query_rank: int | None = None
    interleaved: bool = True

    def __post_init__(self) -> None:
        sizes = (self.rank, self.nope_head_dim, self.rope_head_dim, self.value_head_dim, self.query_rank or 1)
        if min(sizes) < 1 or self.rope_head_dim % 2 or self.query_rank == 0:
            raise CheckpointError(
                f"the widths of latent attention must be positive, and the rotated one even, got {self}; the"
                " configuration is damaged"
            )

    @property
    def width(self) -> int:
        """Numbers that the cache holds of a token and layer."""
        return self.rank + self.rope_head_dim


def latent_shapes(block: str, width: int, heads: int, config: LatentConfig) -> Iterator[tuple[str, Shape]]:
    """Yields the Hugging Face name and the shape of every weight of a layer's attention.

    Example:
        >>> config = LatentConfig(rank=16, nope_head_dim=8, rope_head_dim=4, value_head_dim=6)
        >>> dict(latent_shapes("self_attn", 32, 2, config))["self_attn.kv_b_proj.weight"]
        (28, 16)
    """
    queries = heads * (config.nope_head_dim + config.rope_head_dim)
    if config.query_rank is None:
        yield f"{block}.q_proj.weight", (queries, width)
    else:
        yield f"{block}.q_a_proj.weight", (config.query_rank, width)
        yield f"{block}.q_a_layernorm.weight", (config.query_rank,)
        yield f"{block}.q_b_proj.weight", (queries, config.query_rank)
    yield f"{block}.kv_a_proj_with_mqa.weight", (config.width, width)
    yield f"{block}.kv_a_layernorm.weight", (config.rank,)
    yield f"{block}.kv_b_proj.weight", (heads * (config.nope_head_dim + config.value_head_dim), config.rank)
    yield f"{block}.o_proj.weight", (width, heads * config.value_head_dim)


def hf_deepseek(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the arguments of `LlamaConfig` that DeepSeek's model types set, from the fields of a `config.json`.

    Raises:
        CheckpointError: If a field is missing, damaged or unsupported.
    """

    def size(name: str) -> int:
        return whole_number(fields, name, path)

    latent = LatentConfig(
        rank=size("kv_lora_rank"),
        nope_head_dim=size("qk_nope_head_dim"),
        rope_head_dim=size("qk_rope_head_dim"),
        value_head_dim=size("v_head_dim"),
        query_rank=None if fields.get("q_lora_rank") is None else size("q_lora_rank"),
        interleaved=fields.get("rope_interleave") is None or flag(fields, "rope_interleave", path),
    )
    if fields.get("moe_layer_freq", 1) != 1:
        raise CheckpointError(f"{path}: moe_layer_freq must be 1, got {fields['moe_layer_freq']!r}")
    has_experts = fields.get("n_routed_experts") is not None
    dense = whole_number(fields, "first_k_dense_replace", path, 0)
    layers = size("num_hidden_layers")
    growth = _growth(fields, path)
    if not 0 <= dense <= layers:
        raise CheckpointError(f"{path}: first_k_dense_replace must be from 0 to {layers} layers, got {dense}")
    return {
        "latent": latent,
        "experts": hf_experts(fields, path) if has_experts and dense < layers else None,
        "dense_layers": dense,
        "draft_layers": whole_number(fields, "num_nextn_predict_layers", path, 0),
        "attention_scale": (latent.nope_head_dim + latent.rope_head_dim) ** -0.5 * growth * growth,
    }


def _growth(fields: dict[str, Any], path: Path) -> float:
    """Returns what YaRN multiplies queries and keys by, both, so that attention stays as sharp at longer lengths."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
            continue
        strength = number(rope.get("mscale_all_dim") or 0.0, f"{name}.mscale_all_dim", path)
        factor = number(rope.get("factor", 1.0), f"{name}.factor", path)
        return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1
    return 1.0
