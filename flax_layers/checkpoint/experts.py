"""The numbers of a mixture of experts, and its part of a Hugging Face folder."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..routing import Routing
from .errors import CheckpointError

_CORRECTION = "gate.e_score_correction_bias"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Everything about the experts of a model but their weights.

    Attributes:
        intermediate_size: Hidden width of an expert.
        shared_size: Total hidden width of the shared experts; 0 for none.
        shared_gate: Whether the shared expert's result is multiplied by the sigmoid of a gate.
        routing: How experts are selected.

    Raises:
        CheckpointError: If a width is not a positive integer, or there is a gate for no shared expert.

    Example:
        >>> ExpertsConfig(intermediate_size=768, routing=Routing(num_experts=128, topk=8)).shared_size
        0
    """

    intermediate_size: int
    shared_size: int = 0
    shared_gate: bool = False
    routing: Routing

    def __post_init__(self) -> None:
        if self.intermediate_size < 1 or self.shared_size < 0:
            raise CheckpointError(
                f"the widths of experts must be positive, got intermediate_size={self.intermediate_size} and"
                f" shared_size={self.shared_size}; the"
                " configuration is damaged"
            )
        if self.shared_gate and not self.shared_size:
            raise CheckpointError(
                f"a gate needs a shared expert, got shared_size={self.shared_size}; the configuration is damaged"
            )

    @property
    def shared_name(self) -> str:
        """Hugging Face's name of the shared experts."""
        return "shared_expert" if self.shared_gate else "shared_experts"


def expert_shapes(prefix: str, width: int, config: ExpertsConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the Hugging Face name and the shape of every weight of a layer's experts.

    Example:
        >>> config = ExpertsConfig(intermediate_size=6, routing=Routing(num_experts=2, topk=1))
        >>> dict(expert_shapes("mlp", 4, config))["mlp.experts.1.down_proj.weight"]
        (4, 6)
    """
    routing = config.routing
    yield f"{prefix}.gate.weight", (routing.num_experts, width)
    if routing.use_bias:
        yield f"{prefix}.{_CORRECTION}", (routing.num_experts,)
    widths = {f"{prefix}.experts.{i}": config.intermediate_size for i in range(routing.num_experts)}
    if config.shared_size:
        widths[f"{prefix}.{config.shared_name}"] = config.shared_size
    for name, inner in widths.items():
        yield f"{name}.gate_proj.weight", (inner, width)
        yield f"{name}.up_proj.weight", (inner, width)
        yield f"{name}.down_proj.weight", (width, inner)
    if config.shared_gate:
        yield f"{prefix}.shared_expert_gate.weight", (1, width)


def hf_experts(fields: dict[str, Any], path: Path) -> ExpertsConfig:
    """Reads the numbers of experts from the fields of a `config.json`.

    Raises:
        CheckpointError: If the model has no known experts, or a field is missing, damaged or unsupported.
    """
    readers = {
        "qwen3_moe": _qwen3,
        "qwen3_next": _qwen3_next,
        "qwen3_5_moe_text": _qwen3_next,
        "deepseek_v2": _deepseek_v2,
        "deepseek_v3": _deepseek_v3,
        "kimi_k2": _deepseek_v3,
    }
    kind = fields.get("model_type")
    if kind not in readers:
        raise CheckpointError(f"{path}: expected one of the model types {list(readers)}, got {kind!r}")
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{path}: hidden_act must be 'silu', got {fields['hidden_act']!r}")
    try:
        return readers[kind](fields)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path}: the numbers of the experts are damaged or not supported: {reason}") from error


def _qwen3(fields: dict[str, Any]) -> ExpertsConfig:
    if fields.get("decoder_sparse_step", 1) != 1 or fields.get("mlp_only_layers"):
        raise ValueError(
            "every layer must have experts (decoder_sparse_step 1, mlp_only_layers []), got"
            f" {fields.get('decoder_sparse_step')!r} and {fields.get('mlp_only_layers')!r}"
        )
    routing = Routing(
        num_experts=_integer(fields, "num_experts"),
        topk=_integer(fields, "num_experts_per_tok"),
        normalise=_flag(fields, "norm_topk_prob"),
    )
    return ExpertsConfig(intermediate_size=_integer(fields, "moe_intermediate_size"), routing=routing)


def _qwen3_next(fields: dict[str, Any]) -> ExpertsConfig:
    # Qwen3.5 always normalises; its files do not say so.
    normalise = fields["model_type"] != "qwen3_next" or _flag({"norm_topk_prob": True, **fields}, "norm_topk_prob")
    config = _qwen3({**fields, "norm_topk_prob": normalise})
    shared = _integer(fields, "shared_expert_intermediate_size")
    return dataclasses.replace(config, shared_size=shared, shared_gate=True)


def _deepseek_v2(fields: dict[str, Any]) -> ExpertsConfig:
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy") or fields.get("scoring_func", "softmax") != "softmax":
        raise ValueError(
            "topk_method must be 'greedy' or 'group_limited_greedy' and scoring_func 'softmax', got"
            f" {method!r} and {fields.get('scoring_func')!r}"
        )
    if _flag(fields, "norm_topk_prob"):
        # Implementations differ: with or without the scale.
        raise ValueError("norm_topk_prob must be false for deepseek_v2, got true")
    grouped = method == "group_limited_greedy"
    routing = Routing(
        num_experts=_integer(fields, "n_routed_experts"),
        topk=_integer(fields, "num_experts_per_tok"),
        normalise=False,
        scale=float(fields.get("routed_scaling_factor", 1.0)),
        num_groups=_integer(fields, "n_group") if grouped else 1,
        topk_groups=_integer(fields, "topk_group") if grouped else 1,
    )
    return _with_shared(fields, routing)


def _deepseek_v3(fields: dict[str, Any]) -> ExpertsConfig:
    scoring, method = fields.get("scoring_func", "sigmoid"), fields.get("topk_method", "noaux_tc")
    if (scoring, method) != ("sigmoid", "noaux_tc"):
        raise ValueError(
            f"scoring_func must be 'sigmoid' and topk_method 'noaux_tc' for deepseek_v3, got {scoring!r} and {method!r}"
        )
    routing = Routing(
        num_experts=_integer(fields, "n_routed_experts"),
        topk=_integer(fields, "num_experts_per_tok"),
        scoring="sigmoid",
        normalise=_flag(fields, "norm_topk_prob"),
        scale=float(fields.get("routed_scaling_factor", 1.0)),
        num_groups=_integer(fields, "n_group"),
        topk_groups=_integer(fields, "topk_group"),
        group_score="two largest",
        use_bias=True,
    )
    return _with_shared(fields, routing)


def _with_shared(fields: dict[str, Any], routing: Routing) -> ExpertsConfig:
    inner = _integer(fields, "moe_intermediate_size")
    shared = 0 if fields.get("n_shared_experts") is None else _integer(fields, "n_shared_experts")
    return ExpertsConfig(intermediate_size=inner, shared_size=shared * inner, routing=routing)


def _integer(fields: dict[str, Any], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}")
    return value
