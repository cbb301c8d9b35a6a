"""The registry of rules: by primitive and platform, the treatment of an operation, the reason, and its lowering."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax.numpy as jnp

from bijax.core.contracts import Use

if TYPE_CHECKING:
    from bijax.transform.rules.call import Call
    from bijax.transform.rules.equations import Equation

Dtypes = tuple[Any, ...]

PLATFORMS: Final = ("cpu", "cuda")
"""Platforms with replacements."""

FLOATS: Final = ("float32", "bfloat16", "float16", "float64")
"""Floating dtypes that the library's operations support."""

KERNELS_OF_BIJAX: Final = "bijax_"
"""Prefix of the names of the library's primitives."""


class Kind(enum.Enum):
    """The treatment of a primitive."""

    KEEP = "keep"
    REPLACE = "replace"
    RECURSE = "recurse"
    ENTER = "enter"
    REFUSE = "refuse"


@dataclasses.dataclass(frozen=True)
class Rule:
    """The treatment of an operation.

    The most specific matching rule applies: first rules with a condition on the dtypes, then, within both groups, rules
    for one platform. Two equally specific rules must not match together.

    Attributes:
        kind: The treatment.
        evidence: Why the result does not depend on the batch, or why it would.
        lower: Lowers a call of the primitive; None for JAX's own rule.
        uses: Yields the contracts of an operation on a platform; None if it needs none.
        platform: Its platform, one of `PLATFORMS`; None for all.
        dtypes: Whether it applies to operands and results of these dtypes; None for all.
        unless: Why the rule does not apply although it matches, "" where it applies; None if it always does.
        symbolic: Whether it supports unknown shapes.
        permitted: The treatment instead of a refusal if the caller allows the primitive.
        looks_back: Whether it inspects the producers of its operands, so that equal calls may be lowered differently.
    """

    kind: Kind
    evidence: str
    lower: "Callable[[Call], Sequence[Any]] | None" = None
    uses: "Callable[[Equation, str], Iterator[Use]] | None" = None
    platform: str | None = None
    dtypes: Callable[[Dtypes], bool] | None = None
    unless: Callable[[Dtypes], str] | None = None
    symbolic: bool = False
    permitted: Kind = Kind.KEEP
    looks_back: bool = False

    @property
    def specificity(self) -> tuple[bool, bool]:
        """Its rank among the rules of its primitive."""
        return self.dtypes is not None, self.platform is not None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The treatment of an operation, and why that is right.

    Attributes:
        kind: The treatment.
        evidence: Why the result does not depend on the batch, or why it would.
        allowed: Whether it would be refused, for the part of its lowering that is not JAX code, without the caller's
            `allow`.
        rule: The rule; None for a primitive without a rule that applies.
    """

    kind: Kind
    evidence: str
    allowed: bool = False
    rule: Rule | None = None


ENTERED: Final = "its lowering is JAX code, which is made invariant"

_RULES: dict[str, list[Rule]] = {}
_KERNEL: Final = Rule(Kind.KEEP, "a kernel of bijax")
_NO_COMPLEX: Final = (
    "no invariant form for complex numbers; write it with their real and imaginary parts, or with exp and log"
)


def register(names: str | Iterable[str], rule: Rule) -> None:
    """Adds a rule.

    Args:
        names: Names of the operations (`rules.names.rule_name`), separated by spaces if one string.
        rule: The rule.

    Raises:
        ValueError: If the platform is not one of `PLATFORMS`, or an operation already has a rule for the same case.
    """
    if rule.platform not in (None, *PLATFORMS):
        raise ValueError(f"expected a platform of {', '.join(PLATFORMS)} or None, got {rule.platform!r}.")
    for name in names.split() if isinstance(names, str) else names:
        rules = _RULES.setdefault(name, [])
        if any(r.platform == rule.platform and r.dtypes == rule.dtypes for r in rules):
            raise ValueError(f"expected one rule of {name} for {rule.platform or 'all platforms'}, got a second.")
        rules.append(rule)


def rules_of(name: str) -> tuple[Rule, ...]:
    """Returns all rules of an operation."""
    return tuple(_RULES.get(name, ()))


def named() -> frozenset[str]:
    """Returns the names of all operations that have rules."""
    return frozenset(_RULES)


def refused() -> dict[str, str]:
    """Returns the operations that are refused for all operands, with the reasons."""
    return {name: rules[0].evidence for name, rules in _RULES.items() if rules[0].kind is Kind.REFUSE}


def names_of(evidence: str) -> frozenset[str]:
    """Returns the names of operations with a rule that has this evidence."""
    return frozenset(name for name, rules in _RULES.items() for rule in rules if rule.evidence == evidence)


def is_known(name: str) -> bool:
    """Returns whether a primitive has a rule, or is a kernel of bijax."""
    return name in _RULES or name.startswith(KERNELS_OF_BIJAX)


def is_program(name: str) -> bool:
    """Returns whether a primitive only contains programs, which are made invariant."""
    return any(rule.kind is Kind.RECURSE for rule in _RULES.get(name, ()))


def find(name: str, dtypes: Dtypes, platform: str) -> Rule | None:
    """Returns the rule that applies to an operation, or None.

    Args:
        name: Name of the operation (`rules.names.rule_name`).
        dtypes: Dtypes of its operands and results that have a dtype.
        platform: The target platform; one that is not in `PLATFORMS` counts as a GPU.

    Raises:
        RuntimeError: If two equally specific rules match: a bug in the rules.
    """
    if name.startswith(KERNELS_OF_BIJAX):
        return _KERNEL
    own = "cpu" if platform == "cpu" else "cuda"
    matching = [
        rule
        for rule in _RULES.get(name, ())
        if rule.platform in (None, own) and (rule.dtypes is None or rule.dtypes(dtypes))
    ]
    if not matching:
        return None
    matching.sort(key=lambda rule: rule.specificity, reverse=True)
    if len(matching) > 1 and matching[0].specificity == matching[1].specificity:
        raise RuntimeError(f"two rules for {name} of {', '.join(map(str, dtypes))} on {platform}: a bug in bijax.")
    return matching[0]


def verdict(name: str, dtypes: Dtypes, platform: str, allowed: tuple[str, ...] = ()) -> Verdict:
    """Returns the treatment of an operation, whatever its parameters.

    Args:
        name: Name of the operation (`rules.names.rule_name`).
        dtypes: Dtypes of its operands and results that have a dtype.
        platform: The target platform, one of `PLATFORMS`.
        allowed: Names of primitives that the caller lets pass.
    """
    may_pass = name.partition(" ")[0] in allowed
    rule = find(name, dtypes, platform)
    if rule is None and not is_known(name):
        if may_pass:
            return Verdict(Kind.ENTER, "allowed by the caller; nothing is known of it", allowed=True)
        return Verdict(Kind.ENTER, ENTERED)
    if rule is None:
        refusal, permitted = _without_rule(dtypes), Kind.KEEP
    else:
        refusal = rule.evidence if rule.kind is Kind.REFUSE else rule.unless(dtypes) if rule.unless else ""
        permitted = rule.permitted
    if not refusal and rule is not None:
        return Verdict(rule.kind, rule.evidence, rule=rule)
    if may_pass:
        return Verdict(permitted, f"allowed by the caller; {refusal}", allowed=True)
    return Verdict(Kind.REFUSE, refusal, rule=rule)


def _without_rule(dtypes: Dtypes) -> str:
    """Returns why an operation with rules has none for these dtypes."""
    if is_complex(dtypes):
        return _NO_COMPLEX
    others = sorted({str(d) for d in dtypes if jnp.issubdtype(d, jnp.floating) and str(d) not in FLOATS})
    return f"no invariant form for {', '.join(others or sorted(set(map(str, dtypes))))}; convert to float32 before"


def is_complex(dtypes: Dtypes) -> bool:
    """Returns whether any of the dtypes is complex."""
    return any(jnp.issubdtype(d, jnp.complexfloating) for d in dtypes)


def is_exact(dtypes: Dtypes) -> bool:
    """Returns whether none of the dtypes is floating or complex."""
    return not any(jnp.issubdtype(d, jnp.inexact) for d in dtypes)


def is_real(dtypes: Dtypes) -> bool:
    """Returns whether any of the dtypes is floating, and none complex."""
    return not is_exact(dtypes) and not is_complex(dtypes)


def is_in_floats(dtypes: Dtypes) -> bool:
    """Returns whether any of the dtypes is floating, all such are in `FLOATS`, and none is complex."""
    return is_real(dtypes) and all(str(d) in FLOATS for d in dtypes if jnp.issubdtype(d, jnp.floating))
