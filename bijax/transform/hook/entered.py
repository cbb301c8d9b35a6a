"""Primitives without a rule whose lowering is JAX code (`mlir.lower_fun`), as other libraries register them.

Their rules run as JAX would run them, with the request active: every program that a rule traces reaches our lowering
and is made invariant there. Instructions that a rule emits directly do not, so instructions are counted: those that
no program emitted must be among `_HARMLESS`, or the primitive is refused. How a rule reaches its JAX code does not
matter, so partial functions, wrappers and rules that call `lower_fun` inside are treated alike.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
from jax.interpreters.mlir import ir

from bijax.core.primitive import BEFORE_LOWERING
from bijax.transform.hook._jax_private import Context, Hook, Rule, with_caches_of
from bijax.transform.hook.compiled import inside_of
from bijax.transform.hook.state import Request, current, requested, untagged

_HARMLESS: Final = frozenset(
    "stablehlo." + name
    for name in ("broadcast_in_dim", "constant", "iota", "optimization_barrier", "reshape", "slice", "transpose")
)
"""Instructions that a rule may emit directly: they move or create values."""


@dataclasses.dataclass
class _Rule:
    """A rule that is running.

    Attributes:
        module: The module that it lowers into.
        block: The block of its instructions.
        first: The number of instructions in the block before the rule ran.
        emitted: Indices of the instructions in the block that programs emitted.
        programs: The programs that it traced; they are not lowered. None if they are lowered.
    """

    module: Any
    block: Any
    first: int
    emitted: set[int] = dataclasses.field(default_factory=set)
    programs: list[Any] | None = None

    def by_itself(self) -> list[str]:
        """Returns the names of the instructions that are neither harmless nor of a program."""
        operations = self.block.operations
        numbers = (i for i in range(self.first, len(operations)) if i not in self.emitted)
        names = {str(operations[i].operation.name) for i in numbers}
        return sorted(names - _HARMLESS)


class _Running(threading.local):
    """State of this thread: the running rule, unless its program is being lowered, and whether programs are listed."""

    rule: _Rule | None = None
    listed: "list[Programs] | None" = None


_running = _Running()


@dataclasses.dataclass(frozen=True)
class Programs:
    """The contents of a primitive's rule.

    Attributes:
        jaxprs: The programs that it traces.
        by_itself: Names of the instructions that it emits directly, except harmless ones.
    """

    jaxprs: tuple[Any, ...]
    by_itself: tuple[str, ...]


def noting(hook: Hook) -> Hook:
    """Returns a function for `_jax_private.install` that notes which instructions the programs of a rule emit."""

    def noted(ctx: Any, jaxpr: Any, lower: Callable[[Any], Any]) -> Any:
        rule = _running.rule
        # A rule may compute constants, with separate programs and modules.
        if rule is None or ctx.module is not rule.module or not current().enabled:
            return hook(ctx, jaxpr, lower)
        block = ir.InsertionPoint.current.block
        before = len(block.operations)
        with _set(rule=None):
            if rule.programs is None:
                lowered = hook(ctx, jaxpr, lower)
            else:
                rule.programs.append(jaxpr)
                lowered = lower(_without_equations(jaxpr))
        if block == rule.block:
            rule.emitted.update(range(before, len(block.operations)))
        return lowered

    return noted


def enter(
    rule: Rule, request: Request, ctx: Context, operands: Sequence[Any], parameters: dict[str, Any]
) -> tuple[Sequence[Any], tuple[str, ...]]:
    """Lowers a primitive by its rule, so that the programs in it are lowered as requested.

    Args:
        rule: JAX's rule for the primitive.
        request: The request.
        ctx: Context of the rule.
        operands: Operands of the primitive.
        parameters: Its parameters.

    Returns:
        What the rule returns, and the names of the instructions that it emitted directly, except harmless ones. If
        there are any, nothing is known about the results.
    """
    module = ctx.module_context
    inner = ctx.replace(module_context=module if request == current() else with_caches_of(request, module))
    block = ir.InsertionPoint.current.block
    is_listed = _running.listed is not None
    running = _Rule(module.module, block, len(block.operations), programs=[] if is_listed else None)
    # A program may be lowered after the block that allowed its 64 bits has ended.
    wide = any(str(getattr(a, "dtype", "")) in _WIDE for a in (*ctx.avals_in, *ctx.avals_out))
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True) if wide else contextlib.nullcontext())
        stack.enter_context(inside_of(request))
        stack.enter_context(untagged() if is_listed else contextlib.nullcontext())
        stack.enter_context(_set(rule=running))
        lowered = rule(inner, *operands, **parameters)
    if inner.tokens_out is not None:
        ctx.set_tokens_out(inner.tokens_out)
    by_itself = tuple(running.by_itself())
    if _running.listed is not None and running.programs is not None:
        _running.listed.append(Programs(tuple(running.programs), by_itself))
    return lowered, by_itself


_WIDE: Final = frozenset({"complex128", "float64", "int64", "uint64"})


def programs_of(eqn: Any, platform: str) -> Programs | None:
    """Returns the contents of an equation's rule, without lowering its programs; None if it cannot be entered.

    Args:
        eqn: An equation whose primitive has no rule here.
        platform: The platform.
    """

    def alone(*arrays: Any) -> Any:
        return eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))

    for prepare in BEFORE_LOWERING:
        prepare()
    operands = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    listed: list[Programs] = []
    # Refused for the instructions that it emits directly, or without a rule for the platform.
    with contextlib.suppress(NotImplementedError), requested(Request(True)), _set(listed=listed):
        jax.jit(alone).trace(*operands).lower(lowering_platforms=(platform,))
    return listed[0] if listed else None


def why_not(by_itself: Sequence[str]) -> str:
    """Returns why a primitive without a rule here is refused.

    Args:
        by_itself: Names of the instructions that its rule emits directly.
    """
    if not by_itself:
        return "no invariant form is known"
    return f"no invariant form is known, and its lowering is not JAX code alone: it emits {', '.join(by_itself)} itself"


@contextlib.contextmanager
def _set(**values: Any) -> Iterator[None]:
    outer = {name: getattr(_running, name) for name in values}
    vars(_running).update(values)
    try:
        yield
    finally:
        vars(_running).update(outer)


def _without_equations(jaxpr: Any) -> Any:
    """Returns a program with the variables of another and zeros as results."""
    results = [v.aval for v in jaxpr.outvars]
    zeros = jax.make_jaxpr(lambda: [jax.lax.full(a.shape, 0, a.dtype) for a in results])().jaxpr
    return jaxpr.replace(eqns=zeros.eqns, outvars=zeros.outvars)
