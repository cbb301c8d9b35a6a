"""The experts of one layer of a Hugging Face folder, regardless of the rest of the model."""

import dataclasses
import os
from pathlib import Path

from .errors import CheckpointError
from .experts import ExpertsConfig, expert_shapes, hf_experts
from .hf_fields import read_json
from .hf_weights import open_tensors
from .weights import Weights


@dataclasses.dataclass(frozen=True)
class ExpertBlock:
    """The experts of one layer on disk.

    Attributes:
        hidden_size: Width of the residual stream.
        config: The numbers of the experts.
        prefix: What the names of the weights start with.
        weights: The weights under Hugging Face names, float32, read at each access.
    """

    hidden_size: int
    config: ExpertsConfig
    prefix: str
    weights: Weights


def load_expert_block(path: str | os.PathLike[str], layer: int) -> ExpertBlock:
    """Opens the experts of one layer of a DeepSeek-V2, DeepSeek-V3 or Qwen3-MoE checkpoint.

    Args:
        path: A folder with `config.json` and safetensors. Of the model's other parts nothing is read but the names.
        layer: Number of a layer that has experts.

    Returns:
        The block, for `flax_layers.models.experts_from_checkpoint`.

    Raises:
        FileNotFoundError: If a file is missing.
        CheckpointError: If a file is damaged, the model type or its routing is not supported, or the layer has other
            weights.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give a folder with config.json and safetensors")
    fields = read_json(folder / "config.json")
    config, width = hf_experts(fields, folder / "config.json"), fields.get("hidden_size")
    if not isinstance(width, int) or width < 1:
        raise CheckpointError(f"{folder}: hidden_size must be a positive integer, got {width!r}")
    found, read = open_tensors(folder)
    prefix = f"model.layers.{layer}.mlp"
    expected = dict(expert_shapes(prefix, width, config))
    held = {name: shape for name, shape in found.items() if name.startswith(f"{prefix}.")}
    if held != expected:
        wrong = sorted(n for n in {*held, *expected} if held.get(n) != expected.get(n))
        raise CheckpointError(
            f"{folder}: layer {layer} must have the weights of {config.routing.num_experts} experts, but"
            f" {wrong[0]} and {len(wrong) - 1} more differ: expected {expected.get(wrong[0])}, got"
            f" {held.get(wrong[0])}; is it a layer with experts?"
        )
    return ExpertBlock(width, config, prefix, Weights(expected, read))
