"""Which modules of a model are converted, and to what."""

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

type Selector = type | str | re.Pattern[str]
type Action = bool | type
type Rules = Mapping[Selector, Action] | Iterable[tuple[Selector, Action]] | None


@dataclasses.dataclass(frozen=True)
class Rule:
    """The decision for the modules that a selector chooses.

    Attributes:
        selector: A type (with its subclasses), a glob or a compiled regular expression over the whole path.
        action: True to convert, False to leave, or the class to convert to.
    """

    selector: Selector
    action: Action

    def chooses(self, path: str, module_type: type) -> bool:
        """Returns whether the rule is about the module of a type at a path."""
        if isinstance(self.selector, type):
            return issubclass(module_type, self.selector)
        if isinstance(self.selector, str):
            return fnmatch.fnmatchcase(path, self.selector)
        return self.selector.fullmatch(path) is not None

    def __str__(self) -> str:
        selector = self.selector.__name__ if isinstance(self.selector, type) else repr(self.selector)
        return f"{selector}: {self.action.__name__ if isinstance(self.action, type) else self.action}"


def parse(rules: Rules, module_base: type) -> tuple[Rule, ...]:
    """Returns checked rules.

    Args:
        rules: As `convert` takes them.
        module_base: The class of all modules, `flax.nnx.Module` or `flax.linen.Module`.

    Raises:
        TypeError: If they are not rules.

    Example:
        >>> [str(rule) for rule in parse({"decoder/*": False, object: True}, object)]
        ["'decoder/*': False", 'object: True']
    """
    if rules is None:
        return ()
    if isinstance(rules, (str, bytes)) or not isinstance(rules, Iterable):
        raise TypeError(f"convert: rules must be a mapping or a sequence of pairs, got {rules!r}.")
    pairs: list[Any] = list(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"convert: a rule must be a pair (selector, action), got {pair!r}.")
        selector, action = pair
        if not isinstance(selector, (type, str, re.Pattern)):
            raise TypeError(
                f"convert: a rule must start with a type, a glob over the path such as 'blocks/*/mlp', or a compiled"
                f" regular expression, got {selector!r}."
            )
        if not isinstance(action, bool) and not (isinstance(action, type) and issubclass(action, module_base)):
            raise TypeError(
                f"convert: a rule must end with True (convert), False (leave) or a subclass of"
                f" {module_base.__module__}.{module_base.__qualname__}, got {action!r} for {selector!r}."
            )
    return tuple(Rule(selector, action) for selector, action in pairs)


def first_rule(rules: tuple[Rule, ...], path: str, module_type: type) -> Rule | None:
    """Returns the rule that decides about a module, or None."""
    return next((rule for rule in rules if rule.chooses(path, module_type)), None)
