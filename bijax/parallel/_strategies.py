"""The operations of a layer in stages, for each family of models."""

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal

YIELD: Final = "yield"
"""Between two operations: the stage ends here."""

_ATTENTION: Final = ("comm_prepare_attn", "attn_prepare", "attn_core", "comm_prepare_mlp")
_ATTENTION_APART: Final = (*_ATTENTION[:2], YIELD, *_ATTENTION[2:])
_GATE: Final = ("gate", "select_experts")
_TO_EXPERTS: Final = ("dispatch_b", "experts", "combine_a")
_END: Final = ("output", "comm_postprocess")


@dataclasses.dataclass(frozen=True)
class OverlapStrategy:
    """How a layer is cut into stages, and how the stages of two batches take turns.

    Args:
        operations: Names of operations in their order, with `YIELD` between stages. `dispatch_a` and `combine_a` start
            what `dispatch_b` and `combine_b` wait for.
        delta_stages: Stages that the first batch is ahead of the second.
        ordered: Whether the turns are data, as for `run_overlapped`.

    Raises:
        ValueError: If a stage has no operation, or an operation is there twice.

    Example:
        >>> OverlapStrategy(("attn_core", YIELD, "mlp")).stages
        (('attn_core',), ('mlp',))
    """

    operations: tuple[str, ...]
    delta_stages: int = 0
    ordered: bool = True

    def __post_init__(self) -> None:
        names = [name for name in self.operations if name != YIELD]
        if len(set(names)) < len(names):
            raise ValueError(f"OverlapStrategy: operations must be different ones, got {self.operations}.")
        if not all(self.stages):
            raise ValueError(f"OverlapStrategy: each stage must have an operation, got {self.operations}.")

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The operations of each stage."""
        found: list[list[str]] = [[]]
        for name in self.operations:
            if name == YIELD:
                found.append([])
            else:
                found[-1].append(name)
        return tuple(tuple(stage) for stage in found)


_PREFILL: Final = {
    "deepseek": ("shared_experts", "combine_b", *_END),
    "qwen3_moe": ("combine_b", *_END),
    "mimo": ("combine_b", *_END),
}
_DECODE: Final = {
    "deepseek": ("dispatch_a", "shared_experts"),
    "qwen3_moe": ("dispatch_a",),
    "mimo": ("dispatch_a",),
}


def overlap_strategy(
    family: str, mode: Literal["prefill", "decode"], *, has_experts: bool = True, batches: int = 2
) -> OverlapStrategy:
    """Returns the strategy of a layer.

    With two batches, prefill has three stages in which both batches are level, and its turns are data; decoding has six
    with the first batch two ahead, and XLA is free to choose the order. With one batch the shared experts are computed
    while rows travel to the experts, and the down product's first half of rows travels back while the second is
    computed.

    Args:
        family: "deepseek" for layers with shared experts, "qwen3_moe" and "mimo" for those without.
        mode: Prompts or parts of them, or decoding.
        has_experts: Whether the layer has experts, or an MLP.
        batches: 2 for two batch overlap, 1 for single batch overlap.

    Raises:
        ValueError: If there is no such family or mode, or `batches` is another number.

    Source: the strategies of SGLang (https://github.com/sgl-project/sglang).

    Example:
        >>> overlap_strategy("qwen3_moe", "prefill").stages[1]
        ('dispatch_b', 'experts', 'combine_a')
        >>> overlap_strategy("deepseek", "decode").delta_stages
        2
    """
    _one_of("family", family, tuple(_PREFILL))
    _one_of("mode", mode, ("prefill", "decode"))
    if batches not in (1, 2):
        raise ValueError(f"overlap_strategy: batches must be 1 or 2, got {batches}.")
    delta_stages, ordered = (2, False) if mode == "decode" and batches == 2 else (0, True)
    if batches == 1:
        operations = _single(family) if has_experts else (*_ATTENTION, "mlp", "comm_postprocess")
    elif not has_experts:
        attention = _ATTENTION_APART if mode == "decode" else _ATTENTION
        operations = (*attention, "mlp", "comm_postprocess")
    elif mode == "prefill":
        operations = (*_ATTENTION, *_GATE, "dispatch_a", YIELD, *_TO_EXPERTS, YIELD, *_PREFILL[family])
    else:
        operations = (
            *_ATTENTION_APART, *_GATE, YIELD, *_DECODE[family], YIELD, *_TO_EXPERTS, YIELD, "combine_b", YIELD, *_END,
        )  # fmt: skip
    return OverlapStrategy(operations, delta_stages, ordered)


def _single(family: str) -> tuple[str, ...]:
    """Returns the operations of a layer with experts for one batch."""
    shared = ("shared_experts", YIELD) if family == "deepseek" else ()
    return (
        *_ATTENTION, *_GATE, "dispatch_a", YIELD, *shared, "dispatch_b", "experts_up", "down_first_part", YIELD,
        "down_second_part", YIELD, "combine_parts", *_END,
    )  # fmt: skip


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"overlap_strategy: {name} must be one of {', '.join(known)}, got {value!r}.")
