"""The decision about one module, the same for nnx and linen."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax

from .report import Decision
from .rules import Rule, first_rule


def called_functions(layers: Iterable[Any], module_base: type) -> str:
    """Returns the names of the functions among the layers of a Sequential, without those that are invariant anyway.

    Args:
        layers: Modules and functions.
        module_base: The class of all modules, `flax.nnx.Module` or `flax.linen.Module`.

    Example:
        >>> called_functions([jax.nn.relu, functools.partial(jax.nn.gelu, approximate=False), jax.nn.softmax], type)
        'gelu, softmax'
    """
    names = []
    for layer in layers:
        if isinstance(layer, module_base) or layer is jax.nn.relu:
            continue
        while isinstance(layer, functools.partial):
            layer = layer.func
        names.append(getattr(layer, "__name__", type(layer).__name__))
    return ", ".join(dict.fromkeys(names))


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

    def __call__(self, path: str, module_type: type, functions: str = "") -> Decision:
        """Returns the decision for the module of a type at a path.

        Args:
            path: Where the module is.
            module_type: Its type.
            functions: Names of functions that the module calls between its layers.

        Raises:
            TypeError: If a rule converts it to a class that is not derived from its type.
            ValueError: If a rule converts a layer that has no drop-in.
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
        reason = "" if after else self._reason(module_type)
        if rule is not None and reason and self._is_layer(module_type):
            raise ValueError(
                f"convert: the rule {rule} chooses {path or 'the model'}, a"
                f" {module_type.__module__}.{module_type.__qualname__}, which has no drop-in: {reason}; or leave it by"
                " a rule before this one, with False."
            )
        if functions and not reason:
            reason = f"calls {functions}; plain JAX code between layers is not converted"
        return Decision(path, module_type, after, reason, rule)

    def _is_layer(self, module_type: type) -> bool:
        """Returns whether a type is a layer of Flax or derived from one that has a drop-in."""
        return module_type.__module__.startswith("flax.") or any(b in self._drop_ins for b in module_type.__mro__)

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
