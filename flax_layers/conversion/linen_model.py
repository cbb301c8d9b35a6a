"""Conversion of linen models: an equivalent model whose inner methods are intercepted."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
from flax import linen
from flax.core import Scope

from bijax.core.contexts import linen_conversion

from ..linen import DROP_INS, MoE
from ..linen._drop_in import invariant_method, is_invariant_layer
from .decide import Decider, called_functions
from .quantize_linen import LINEN_QUANTIZED, QUANTIZED_TYPES
from .report import Conversion, Decision, summarize
from .rules import Rule, Rules, parse

type Plan = tuple[tuple[Rule, ...], str | None]

_NEUTRAL: Final = frozenset((linen.Sequential, linen.BatchApply, MoE, *QUANTIZED_TYPES))
_ORIGINAL: Final = "_converted_from"
_ENTRIES: Final = ("apply", "lazy_init")


def convert_linen(model: linen.Module, rules: Rules, quantize: str | None) -> linen.Module:
    """Returns a model of a subclass of the model's type, with the same fields."""
    if model.scope is not None or model.parent is not None:
        raise ValueError(
            f"convert: expected a model that is not bound to variables or to a parent, got {type(model).__name__}"
            f" {model.name or ''}; convert the whole model, before `bind` and outside of other modules, or use the"
            " layers of flax_layers.linen inside them."
        )
    return _rebuild(_original(type(model)), (parse(rules, linen.Module), quantize), _fields(model))


def report_linen(
    model: linen.Module,
    rules: Rules,
    quantize: str | None,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    rngs: Any,
) -> Conversion:
    """Returns the decisions that a model converted by `convert_linen` makes when initialized with some inputs."""
    checked = parse(rules, linen.Module)
    model = _original(type(model))(parent=None, **_fields(model))
    decisions: list[Decision] = []
    leaves, tree = jax.tree.flatten((tuple(inputs), dict(options)))
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]

    def initialize(shapes: list[Any]) -> Any:
        for i, leaf in zip(traced, shapes, strict=True):
            leaves[i] = leaf
        args, kwargs = jax.tree.unflatten(tree, leaves)
        with _intercepting((checked, quantize), (), decisions):
            return model.init(rngs, *args, **kwargs)

    jax.eval_shape(initialize, [leaves[i] for i in traced])
    return summarize(decisions, checked)


def _fields(module: linen.Module) -> dict[str, Any]:
    return {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.name != "parent" and f.init}


def _original(cls: type) -> Any:
    """Returns the class that a converted class was made from, or the class itself."""
    return getattr(cls, _ORIGINAL, cls)


@functools.lru_cache(maxsize=256)  # equal models have equal types, and JAX's caches find them
def _converted_class(original: Any, plan: Plan) -> Any:
    """Returns a subclass whose methods intercept the methods of inner modules."""

    def intercepted(method: Callable[..., Any]) -> Callable[..., Any]:
        @linen.nowrap
        @functools.wraps(method)
        def run(self: linen.Module, *args: Any, **kwargs: Any) -> Any:
            with _intercepting(plan, self.path if self.scope is not None else ()):
                return method(self, *args, **kwargs)

        return run

    @linen.nowrap
    def init_with_output(self: linen.Module, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        decisions: list[Decision] = []
        with _intercepting(plan, (), decisions):
            result = original.init_with_output(self, rngs, *args, **kwargs)
        if kwargs.get("method") is None:
            summarize(decisions, plan[0])
        return result

    def reduce(self: linen.Module) -> Any:
        return _rebuild, (original, plan, _fields(self))

    methods = {name: intercepted(getattr(original, name)) for name in (*_ENTRIES, *_methods(original))}
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    namespace = {**names, **methods, "init_with_output": init_with_output, "__reduce__": reduce}
    converted = type(original)(original.__name__, (original,), namespace)
    setattr(converted, _ORIGINAL, original)
    return converted


def _rebuild(original: Any, plan: Plan, fields: dict[str, Any]) -> linen.Module:
    return _converted_class(original, plan)(parent=None, **fields)


def _methods(cls: type[linen.Module]) -> list[str]:
    """Returns the names of a class's methods, except those that all linen modules have."""
    base = {*dir(linen.Module), "setup", *(f.name for f in dataclasses.fields(cls))}
    return [
        name
        for name in dir(cls)
        if name not in base
        and (name == "__call__" or not name.startswith("__"))
        and inspect.isfunction(member := inspect.getattr_static(cls, name))
        and not hasattr(member, "nowrap")
    ]


@contextlib.contextmanager
def _intercepting(plan: Plan, root: tuple[str, ...], decisions: list[Decision] | None = None) -> Iterator[None]:
    """Converts the modules whose methods are called inside, as the rules say.

    Args:
        plan: Checked rules, and whether linear layers are quantised.
        root: Path of the model.
        decisions: Receives the decisions.
    """
    if linen_conversion.value == plan and decisions is None:
        yield
        return
    rules, quantize = plan
    drop_ins = {**DROP_INS, **LINEN_QUANTIZED} if quantize else DROP_INS
    decide = Decider(rules, drop_ins, _NEUTRAL, is_invariant_layer, lambda t: bool(_methods(t)))

    def intercept(
        next_method: Callable[..., Any], args: Any, kwargs: Any, context: linen.module.InterceptorContext
    ) -> Any:
        module = context.module
        # Flax validates `setup` with a scope of another type, and runs lifted methods in modules of the plain class.
        if context.method_name == "setup" or type(module.scope) is not Scope:
            return next_method(*args, **kwargs)
        original = _original(type(module))
        functions = called_functions(module.layers, linen.Module) if original is linen.Sequential else ""
        decision = decide("/".join(module.path[len(root) :]), original, functions)
        if decisions is not None:
            decisions.append(decision)
        if decision.after is None:
            return next_method(*args, **kwargs)
        quantized = quantize is not None and decision.after in QUANTIZED_TYPES
        if not quantized and (decision.rule is None or decision.rule.action is True):
            with invariant_method(module):
                return next_method(*args, **kwargs)
        # It takes the place of the module in the tree of variables; the names that the module reserved are free again.
        replacement = decision.after(parent=module.scope.rewound(), **_fields(module))
        return getattr(replacement, context.method_name)(*args, **kwargs)

    with linen_conversion(plan), linen.intercept_methods(intercept):
        yield
