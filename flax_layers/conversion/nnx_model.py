"""Conversion of nnx models, in place."""

from collections.abc import Sequence
from typing import Any, Final

from flax import nnx

from ..models.layers import MoE, QuantLinear, QuantMoE
from ..nnx import DROP_INS
from ..nnx._drop_in import computing_methods, is_invariant_layer
from .decide import Decider, called_functions
from .quantize import QUANTIZED, become, quantized_layers
from .report import Conversion, Decision, summarize
from .rules import Rules, parse

_NEUTRAL: Final = frozenset((nnx.List, nnx.Dict, nnx.Sequential, QuantLinear, QuantMoE))


def convert_nnx(model: Any, rules: Rules, quantize: str | None, calibration: Sequence[Any] | None) -> None:
    """Gives the modules of a model their new types; all references to them see it."""
    decisions = _decide(model, rules, quantize)
    linear = [(d.path, module) for module, d in decisions if d.after is QuantLinear]
    if calibration is not None and not linear:
        raise ValueError("convert: calibration belongs to linear layers that are quantised, got a model without any.")
    layers = quantized_layers(linear, None if calibration is None else lambda: model(*calibration))
    for (_, module), layer in zip(linear, layers, strict=True):
        become(module, layer)
    for module, decision in decisions:
        if decision.after is QuantMoE and type(module) is MoE:
            become(module, QuantMoE(module))
        elif decision.after and type(module) is not decision.after:
            # Not through the module, which would take it for an attribute of its state.
            object.__setattr__(module, "__class__", decision.after)


def report_nnx(model: nnx.Module, rules: Rules, quantize: str | None) -> Conversion:
    """Returns what `convert_nnx` does."""
    return summarize([decision for _, decision in _decide(model, rules, quantize)], ())


def _decide(model: nnx.Module, rules: Rules, quantize: str | None) -> list[tuple[Any, Decision]]:
    checked = parse(rules, nnx.Module)
    drop_ins = {**DROP_INS, **QUANTIZED} if quantize else DROP_INS
    decide = Decider(checked, drop_ins, _NEUTRAL, is_invariant_layer, lambda t: bool(computing_methods(t)))
    modules = sorted(nnx.iter_modules(model), key=lambda found: [str(part) for part in found[0]])
    decisions = [
        (module, decide("/".join(map(str, path)), type(module), _functions(module))) for path, module in modules
    ]
    summarize([decision for _, decision in decisions], checked)  # raises before anything is changed
    return decisions


def _functions(module: Any) -> str:
    return called_functions(module.layers, nnx.Module) if type(module) is nnx.Sequential else ""
