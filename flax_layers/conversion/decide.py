"""The decision about one module, the same for nnx and linen."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from .report import Decision
from .rules import Rule, first_rule


class Decider:
    """Decides about modules.

    Args:
        rules: Checked rules.
        drop_ins: The drop-in of each original.
        neutral: Types of Flax that compute nothing themselves, or nothing that depends on the batch's shape.
        is_invariant: Whether a type is invariant already.
        computes: Whether the methods of a type may compute.
    """

    def __init__(
        self,
        rules: tuple[Rule, ...],
        drop_ins: Mapping[Any, type],
        neutral: Collection[type],
        is_invariant: Callable[[type], bool],
        computes: Callable[[type], bool],
    ) -> None:
        self.rules = rules
        self._drop_ins = drop_ins
        self._neutral = neutral
        self._is_invariant = is_invariant
        self._computes = computes

    def __call__(self, path: str, module_type: type) -> Decision:
        """Returns what is done with the module of a type at a path.

        Raises:
            TypeError: If a rule converts it to a class that is not derived from its type.
        """
        rule = first_rule(self.rules, path, module_type)
        if rule is not None and rule.action is False:
            return Decision(path, module_type, rule=rule)
        if rule is not None and isinstance(rule.action, type):
            if module_type is rule.action:
                return Decision(path, module_type, rule=rule)
            if not issubclass(rule.action, module_type):
                raise TypeError(
                    f"convert: the rule {rule} chooses {path or 'the model'}, a"
                    f" {module_type.__module__}.{module_type.__qualname__}, from which"
                    f" {rule.action.__module__}.{rule.action.__qualname__} is not derived; convert to a subclass of the"
                    " module's own type."
                )
            return Decision(path, module_type, after=rule.action, rule=rule)
        after = self._drop_ins.get(module_type)
        return Decision(path, module_type, after, "" if after else self._reason(module_type), rule)

    def _reason(self, module_type: type) -> str:
        """Returns why a type has no drop-in, or "" if it needs none."""
        if module_type in self._neutral or self._is_invariant(module_type):
            return ""
        original = next((base for base in module_type.__mro__ if base in self._drop_ins), None)
        if original:
            own = " that overrides __call__" if module_type.__call__ is not original.__call__ else ""
            return (
                f"a subclass of {original.__name__}{own}; derive an invariant class from it with invariant_layer and"
                " convert to that by a rule"
            )
        if module_type.__module__.startswith("flax."):
            return "a layer without a drop-in"
        if not self._computes(module_type):
            return ""
        return "its own methods run as they are; only the layers inside it are converted"
