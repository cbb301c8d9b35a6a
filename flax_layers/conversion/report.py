"""The decisions of a conversion for each module."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Final

from .rules import Rule

_PUBLIC: Final = ("flax_layers.nnx", "flax_layers.linen")


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision for one module.

    Attributes:
        path: Where the module is, names joined by "/"; empty for the model itself.
        before: Its type.
        after: The type that it gets; None if it keeps its own.
        reason: Why it keeps its own; empty if it does not, or if there is nothing in it to convert.
        rule: The rule that decided, or None.
    """

    path: str
    before: type
    after: type | None = None
    reason: str = ""
    rule: Rule | None = None


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The decisions of a conversion for a model.

    Attributes:
        replaced: The modules that are converted, with the types that they get.
        left: The modules that a rule leaves as they are.
        uncovered: The modules that compute something that stays as it is, and why. `bijax.invariant` around the
            model's function covers them.

    Example:
        >>> from flax import nnx
        >>> from flax_layers import conversion_report
        >>> print(conversion_report(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)))
        replaced: 1 module
          layers/0: Linear -> flax_layers.nnx.Linear
    """

    replaced: tuple[Decision, ...]
    left: tuple[Decision, ...]
    uncovered: tuple[Decision, ...]

    def __str__(self) -> str:
        replaced = [f"{_place(d)}: {d.before.__name__} -> {_name(d.after)}" for d in self.replaced if d.after]
        left = [f"{_place(d)}: {d.before.__name__}, by the rule {d.rule}" for d in self.left]
        uncovered = [f"{_place(d)}: {d.before.__name__}, {d.reason}" for d in self.uncovered]
        sections = {"replaced": replaced, "left": left, "not covered": uncovered}
        return "\n".join(
            line
            for title, lines in sections.items()
            if lines or title == "replaced"
            for line in (f"{title}: {len(lines)} module{'s' * (len(lines) != 1)}", *(f"  {line}" for line in lines))
        )


def summarize(decisions: Sequence[Decision], rules: tuple[Rule, ...]) -> Conversion:
    """Returns the report of decisions about all modules of a model.

    Raises:
        ValueError: If a rule matched none of them, or should convert but converts nothing.
    """
    for rule in rules:
        decided = [decision for decision in decisions if decision.rule == rule]
        if not decided:
            places = [f"{_place(d)} ({d.before.__name__})" for d in decisions]
            shown = ", ".join(places[:10]) + (f" and {len(places) - 10} more" if len(places) > 10 else "")
            raise ValueError(
                f"convert: the rule {rule} decides about no module: it chooses none, or rules before it choose the same"
                f" ones. The modules are {shown}."
            )
        if rule.action is True and all(d.reason for d in decided):
            raise ValueError(
                f"convert: the rule {rule} converts nothing: it decides about {_place(decided[0])}, a"
                f" {decided[0].before.__name__}, {decided[0].reason}; choose layers, or convert it to a class that"
                " invariant_layer made."
            )
    unique = tuple(dict.fromkeys(decisions))
    return Conversion(
        replaced=tuple(d for d in unique if d.after),
        left=tuple(d for d in unique if not d.after and d.rule and d.rule.action is False),
        uncovered=tuple(d for d in unique if d.reason),
    )


def _place(decision: Decision) -> str:
    return decision.path or "(the model)"


def _name(cls: type) -> str:
    name = cls.__qualname__
    public = [package for package in _PUBLIC if getattr(sys.modules.get(package), name, None) is cls]
    return f"{public[0] if public else cls.__module__}.{name}"
