"""A mixture of experts in numpy, float64, token by token."""

from collections.abc import Mapping

import numpy as np

from flax_layers.checkpoint import ExpertsConfig
from flax_layers.routing import Routing


def route(logits: np.ndarray, bias: np.ndarray | None, routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """Returns the experts (T, topk) and their weights."""
    selected, weights = [], []
    size = routing.num_experts // routing.num_groups
    for row in np.asarray(logits, np.float64):
        scores = np.exp(row - row.max()) if routing.scoring == "softmax" else 1 / (1 + np.exp(-row))
        scores = scores / scores.sum() if routing.scoring == "softmax" else scores
        choice = scores if bias is None else scores + bias
        terms = 1 if routing.group_score == "largest" else 2
        worth = [sum(sorted(choice[g * size : (g + 1) * size])[-terms:]) for g in range(routing.num_groups)]
        groups = sorted(range(routing.num_groups), key=lambda g: (-worth[g], g))[: routing.topk_groups]
        allowed = [e for e in range(routing.num_experts) if e // size in groups]
        chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: routing.topk]
        weight = scores[chosen]
        selected.append(chosen)
        weights.append((weight / weight.sum() if routing.normalise else weight) * routing.scale)
    return np.array(selected), np.array(weights)


def experts(x: np.ndarray, weights: Mapping[str, np.ndarray], prefix: str, config: ExpertsConfig) -> np.ndarray:
    """Returns what a layer with weights under Hugging Face names makes of tokens (T, width)."""

    def weight(name: str) -> np.ndarray:
        return weights[f"{prefix}.{name}"].astype(np.float64)

    def mlp(name: str, row: np.ndarray) -> np.ndarray:
        gate = weight(f"{name}.gate_proj.weight") @ row
        return weight(f"{name}.down_proj.weight") @ (
            gate / (1 + np.exp(-gate)) * (weight(f"{name}.up_proj.weight") @ row)
        )

    bias = weight("gate.e_score_correction_bias") if config.routing.use_bias else None
    selected, factors = route(x @ weight("gate.weight").T, bias, config.routing)
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        for expert, factor in zip(selected[token], factors[token], strict=True):
            out[token] += factor * mlp(f"experts.{expert}", row)
        if config.shared_size:
            out[token] += mlp("shared_experts", row)
    return out
