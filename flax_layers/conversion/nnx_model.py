"""Conversion of nnx models, in place."""

from typing import Any, Final

from flax import nnx

from ..nnx import DROP_INS
from ..nnx._drop_in import computing_methods, is_invariant_layer
from .decide import Decider, called_functions
from .report import Conversion, Decision, summarize
from .rules import Rules, parse

_NEUTRAL: Final = frozenset((nnx.List, nnx.Dict, nnx.Sequential))


def convert_nnx(model: nnx.Module, rules: Rules) -> None:
    """Gives the modules of a model their new types; all references to them see it."""
    decisions = _decide(model, rules)
    for module, decision in decisions:
        if decision.after:
            # Not through the module, which would take it for an attribute of its state.
            object.__setattr__(module, "__class__", decision.after)


def report_nnx(model: nnx.Module, rules: Rules) -> Conversion:
    """Returns what `convert_nnx` does."""
    return summarize([decision for _, decision in _decide(model, rules)], ())


def _decide(model: nnx.Module, rules: Rules) -> list[tuple[Any, Decision]]:
    checked = parse(rules, nnx.Module)
    decide = Decider(checked, DROP_INS, _NEUTRAL, is_invariant_layer, lambda t: bool(computing_methods(t)))
    modules = sorted(nnx.iter_modules(model), key=lambda found: [str(part) for part in found[0]])
    decisions = [
        (module, decide("/".join(map(str, path)), type(module), _functions(module))) for path, module in modules
    ]
    summarize([decision for _, decision in decisions], checked)  # raises before anything is changed
    return decisions


def _functions(module: Any) -> str:
    return called_functions(module.layers, nnx.Module) if type(module) is nnx.Sequential else ""
