"""Which weights a model has, and a mapping that reads them one at a time."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from .config import LlamaConfig
from .errors import CheckpointError
from .experts import expert_shapes
from .latent import latent_shapes
from .linear_attention import linear_attention_shapes

type Shape = tuple[int, ...]

SHOWN = 4

_MLP_NORMS = {
    False: ("post_attention_layernorm",),
    True: ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
"""Hugging Face's names of the norms around the MLP. The first is the norm of attention's output if there is one."""


class Weights(Mapping[str, np.ndarray]):
    """The weights of a model under their Hugging Face names, read from the file at each access.

    A weight is a float32 array of shape (out, in), or (size,) for a norm, newly made at each access and owned by the
    caller. Nothing is cached: looping over the mapping holds one weight in memory at a time. f16 and bf16 are widened,
    which is exact; quantised weights are dequantised. The file must stay in place while the mapping is in use.

    Attributes:
        shapes: Shape of every weight, known without reading it.

    Raises:
        KeyError: On access to a name that the model does not have.

    Example:
        >>> import numpy as np
        >>> weights = Weights({"model.norm.weight": (3,)}, lambda name: np.ones(3, np.float32))
        >>> weights.shapes
        {'model.norm.weight': (3,)}
        >>> weights["model.norm.weight"]
        array([1., 1., 1.], dtype=float32)
    """

    def __init__(self, shapes: dict[str, Shape], read: Callable[[str], np.ndarray]) -> None:
        self.shapes = shapes
        self._read = read

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        # Mapping's own test would read the weight.
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def expected_shapes(config: LlamaConfig) -> Iterator[tuple[str, Shape]]:
    """Yields the Hugging Face name and the shape of every weight of the model, in the model's order.

    Example:
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> config = LlamaConfig.tiny()
        >>> dict(expected_shapes(config))["model.layers.0.self_attn.k_proj.weight"]
        (4, 8)
    """
    width = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, width)
    # A generator, because a damaged file may claim billions of layers.
    for layer in range(config.num_layers):
        yield from block_shapes(f"model.layers.{layer}", config, layer)
    yield "model.norm.weight", (width,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, width)


def block_shapes(block: str, config: LlamaConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    """Yields the name and the shape of every weight of a layer whose names start with `block`."""
    width, inner = config.hidden_size, config.intermediate_size
    yield f"{block}.input_layernorm.weight", (width,)
    if config.latent is not None:
        yield from latent_shapes(f"{block}.self_attn", width, config.num_heads, config.latent)
    elif config.linear is not None and config.is_linear(layer):
        yield from linear_attention_shapes(f"{block}.linear_attn", width, config.linear)
    else:
        yield from _attention_shapes(f"{block}.self_attn", config)
    for name in _MLP_NORMS[config.output_norms]:
        yield f"{block}.{name}.weight", (width,)
    if config.experts is not None and config.has_experts(layer):
        yield from expert_shapes(f"{block}.mlp", width, config.experts)
        return
    yield from _linear(f"{block}.mlp.gate_proj", (inner, width), config.mlp_bias)
    yield from _linear(f"{block}.mlp.up_proj", (inner, width), config.mlp_bias)
    yield from _linear(f"{block}.mlp.down_proj", (width, inner), config.mlp_bias)


def _attention_shapes(prefix: str, config: LlamaConfig) -> Iterator[tuple[str, Shape]]:
    width = config.hidden_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # With an output gate each head has its query first and its gate then.
    for name, rows in (("q", query * (1 + config.output_gate)), ("k", key), ("v", key)):
        yield from _linear(f"{prefix}.{name}_proj", (rows, width), config.qkv_bias)
    yield from _linear(f"{prefix}.o_proj", (width, query), config.output_bias)
    if config.qk_norm:
        yield f"{prefix}.q_norm.weight", (config.head_dim,)
        yield f"{prefix}.k_norm.weight", (config.head_dim,)


def _linear(name: str, shape: Shape, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if bias:
        yield f"{name}.bias", shape[:1]


def check_shape(name: str, expected: Shape, found: Shape) -> None:
    """Checks the shape of a tensor.

    Raises:
        CheckpointError: If it is not the expected one.
    """
    if found != expected:
        raise CheckpointError(
            f"{name} must have shape {expected} according to the configuration, got {found}; configuration and weights"
            " do not belong together, or one of them is damaged"
        )


def match_shapes(found: Mapping[str, Shape], config: LlamaConfig, source: Path) -> dict[str, Shape]:
    """Checks the tensors of a file against the configuration; returns them in the model's order.

    Raises:
        CheckpointError: If a tensor is missing, has another shape, or is one that the model would not use.
    """
    shapes: dict[str, Shape] = {}
    missing: list[str] = []
    for name, shape in expected_shapes(config):
        if name not in found:
            missing.append(name)
            if len(missing) == SHOWN:
                break
        else:
            check_shape(f"{source}: {name}", shape, found[name])
            shapes[name] = shape
    if missing:
        raise CheckpointError(
            f"{source}: weights are missing for a model of {config.num_layers} layers with "
            f"tie_word_embeddings={config.tie_word_embeddings}, the first of them {', '.join(missing)}; the"
            f" checkpoint holds {len(found)} tensors: get the complete one"
        )
    surplus = sorted(set(found) - set(shapes))
    if surplus:
        more = f" and {len(surplus) - SHOWN} more" if len(surplus) > SHOWN else ""
        raise CheckpointError(
            f"{source}: holds tensors that a model of its configuration does not use: "
            f"{', '.join(surplus[:SHOWN])}{more}; configuration and weights do not belong together"
        )
    return shapes
