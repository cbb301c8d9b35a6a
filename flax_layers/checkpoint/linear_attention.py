"""The numbers of linear attention, and its part of a Hugging Face folder."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .errors import CheckpointError
from .hf_fields import MOST_LISTED, whole_number

LINEAR: Final = "linear_attention"
FULL: Final = "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig:
    """Everything about a model's layers of gated delta rule but their weights.

    Attributes:
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values; a multiple of `num_key_heads`.
        key_dim: Width of a query and a key head.
        value_dim: Width of a value head.
        conv_width: Tokens that the convolution sees.
        layers: For each layer whether it has linear attention; over again from the first where there are more layers.

    Raises:
        CheckpointError: If a number is not a positive integer, the heads do not fit, or `layers` has no layer of either
            kind.

    Example:
        >>> config = LinearAttentionConfig(
        ...     num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, layers=(True, True, True, False))
        >>> config.channels
        8192
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    layers: tuple[bool, ...]

    def __post_init__(self) -> None:
        numbers = (self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim, self.conv_width)
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
            raise CheckpointError(f"the numbers of linear attention must be positive integers, got {self}")
        if self.num_value_heads % self.num_key_heads:
            raise CheckpointError(
                f"num_value_heads must be a multiple of num_key_heads, got num_value_heads={self.num_value_heads} and"
                f" num_key_heads={self.num_key_heads}"
            )
        if set(self.layers) != {True, False}:
            raise CheckpointError(
                f"a model with linear attention must have layers of it and of full attention, got layers={self.layers}"
            )

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


def linear_attention_shapes(
    prefix: str, width: int, config: LinearAttentionConfig
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the Hugging Face name and the shape of every weight of a layer, in Qwen3.5's layout.

    Example:
        >>> config = LinearAttentionConfig(
        ...     num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=4, layers=(True, False))
        >>> dict(linear_attention_shapes("linear_attn", 8, config))["linear_attn.in_proj_qkv.weight"]
        (16, 8)
    """
    heads, values = config.num_value_heads, config.num_value_heads * config.value_dim
    yield f"{prefix}.in_proj_qkv.weight", (config.channels, width)
    yield f"{prefix}.in_proj_z.weight", (values, width)
    yield f"{prefix}.in_proj_b.weight", (heads, width)
    yield f"{prefix}.in_proj_a.weight", (heads, width)
    yield f"{prefix}.conv1d.weight", (config.channels, 1, config.conv_width)
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.norm.weight", (config.value_dim,)
    yield f"{prefix}.out_proj.weight", (width, values)


def hf_linear_attention(fields: dict[str, Any], path: Path) -> LinearAttentionConfig:
    """Reads the numbers of linear attention from the fields of a `config.json`.

    Raises:
        CheckpointError: If a field is missing, damaged or unsupported.
    """
    return LinearAttentionConfig(
        num_key_heads=whole_number(fields, "linear_num_key_heads", path),
        num_value_heads=whole_number(fields, "linear_num_value_heads", path),
        key_dim=whole_number(fields, "linear_key_head_dim", path),
        value_dim=whole_number(fields, "linear_value_head_dim", path),
        conv_width=whole_number(fields, "linear_conv_kernel_dim", path),
        layers=_layers(fields, path),
    )


def _layers(fields: dict[str, Any], path: Path) -> tuple[bool, ...]:
    number = whole_number(fields, "num_hidden_layers", path, most=MOST_LISTED)
    listed = fields.get("layer_types")
    if listed is None:
        interval = whole_number(fields, "full_attention_interval", path)
        if interval < 1:
            raise CheckpointError(f"{path}: full_attention_interval must be positive, got {interval}")
        return tuple((layer + 1) % interval != 0 for layer in range(number))
    if not isinstance(listed, list) or len(listed) != number or not all(kind in (LINEAR, FULL) for kind in listed):
        raise CheckpointError(
            f"{path}: layer_types must list {LINEAR!r} or {FULL!r} for each of {number} layers, got {listed!r}"
        )
    return tuple(kind == LINEAR for kind in listed)
