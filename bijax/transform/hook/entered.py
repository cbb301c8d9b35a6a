"""Primitives that no table has, whose lowering is JAX code (`mlir.lower_fun`), as other libraries register them.

Their rules run as JAX would run them, with the request in force: every program that a rule traces comes to our lowering
and is made invariant there. What a rule emits by itself is not seen by it, so the instructions are counted: those that
no program emitted must be among `_HARMLESS`, or the primitive is refused. How a rule came to its JAX code does not
matter, so partial functions, wrappers and rules that call `lower_fun` inside are entered alike.
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
"""Instructions that a rule may emit by itself: they move or make up values."""


@dataclasses.dataclass
class _Rule:
    """A rule that is running.

    Attributes:
        module: The module that it lowers into.
        block: The block that its instructions go to.
        first: The number of instructions in the block before it.
        emitted: Numbers of the instructions in the block that programs emitted.
        programs: The programs that it traced; nothing is made of them. None if they are lowered.
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
    """What this thread does: the rule that runs, unless a program of it is lowered, and whether programs are listed."""

    rule: _Rule | None = None
    listed: "list[Programs] | None" = None


_running = _Running()


@dataclasses.dataclass(frozen=True)
class Programs:
    """What the rule of a primitive consists of.

    Attributes:
        jaxprs: The programs that it traces.
        by_itself: Names of the instructions that it emits by itself, but for harmless ones.
    """

    jaxprs: tuple[Any, ...]
    by_itself: tuple[str, ...]


def noting(hook: Hook) -> Hook:
    """Returns a function for `_jax_private.install` that notes which instructions the programs of a rule emit."""

    def noted(ctx: Any, jaxpr: Any, lower: Callable[[Any], Any]) -> Any:
        rule = _running.rule
        # A rule may compute constants, with programs and modules of their own.
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
        rule: The rule that JAX has for the primitive.
        request: The request.
        ctx: Context of the rule.
        operands: Operands of the primitive.
        parameters: Its parameters.

    Returns:
        What the rule returns, and the names of the instructions that it emitted by itself, but for harmless ones. If
        there are any, nothing is known of the results.
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
    """Returns what the rule of an equation consists of, without lowering its programs; None if it cannot be entered.

    Args:
        eqn: An equation whose primitive is in no table.
        platform: The platform.
    """

    def alone(*arrays: Any) -> Any:
        return eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))

    for prepare in BEFORE_LOWERING:
        prepare()
    operands = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    listed: list[Programs] = []
    # Refused for what it emits by itself, or without a rule for the platform.
    with contextlib.suppress(NotImplementedError), requested(Request(True)), _set(listed=listed):
        jax.jit(alone).trace(*operands).lower(lowering_platforms=(platform,))
    return listed[0] if listed else None


def why_not(by_itself: Sequence[str]) -> str:
    """Returns why a primitive is refused of which no table has anything.

    Args:
        by_itself: Names of the instructions that its rule emits by itself.
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
    """Returns a program with the variables of another whose results are zeros."""
    results = [v.aval for v in jaxpr.outvars]
    zeros = jax.make_jaxpr(lambda: [jax.lax.full(a.shape, 0, a.dtype) for a in results])().jaxpr
    return jaxpr.replace(eqns=zeros.eqns, outvars=zeros.outvars)
