"""Lowers programs whose operations should be made invariant.

Just before JAX lowers them, the equations that need another lowering are replaced by equations of our own primitives,
whose rules are here. All others are left to JAX, and so is every program without a request.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
from jax.extend.core import Literal, Primitive
from jax.interpreters import mlir

from bijax.core.partitioning import is_partitioned, refused
from bijax.core.primitive import BEFORE_LOWERING, LOWERED_IN
from bijax.core.tag import KERNEL, TAG
from bijax.hlo._frames import user_line
from bijax.lax.product_of_parts import product_of_parts
from bijax.transform.cpu.constants import with_hidden_constants
from bijax.transform.cpu.in_place import IN_PLACE, with_update_before
from bijax.transform.cpu.scaled import with_product
from bijax.transform.cpu.settled import SETTLED, settled, with_settled_reshapes
from bijax.transform.errors import NotInvariantError
from bijax.transform.fusion import PRODUCT, ROW_PROGRAM, run_row_program, with_row_programs
from bijax.transform.hook import _jax_private, callbacks, compiled, entered
from bijax.transform.hook._jax_private import Context, Rule
from bijax.transform.hook.crossing import with_barriers
from bijax.transform.hook.cut_rows import with_rows_left
from bijax.transform.hook.einsum_paths import without_batch
from bijax.transform.hook.own_programs import OWN_PROGRAMS
from bijax.transform.hook.state import INVARIANT, OFF, current, of_equation, requested
from bijax.transform.hook.whole_values import has_typed_values, with_whole_values
from bijax.transform.rules._elementwise import ELEMENTWISE, hold
from bijax.transform.rules._kept import COUNTER, ORDER_FREE
from bijax.transform.rules._ordered import COLLECTIVES, with_plain_addition
from bijax.transform.rules._refused import may_be_allowed
from bijax.transform.rules.call import Call, is_explicit, traced
from bijax.transform.rules.names import rule_name
from bijax.transform.rules.regions import with_plain_region
from bijax.transform.rules.registry import PLATFORMS, Kind, is_known, is_program, rules_of, verdict
from bijax.transform.rules.results import ARRANGEMENT, with_arrangements
from pallas_kernels.errors import UnsupportedError

_PACKAGE: Final = str(Path(__file__).parents[2])


def install() -> None:
    """Makes JAX's lowering respect requests; cheap if it already does.

    Raises:
        UnsupportedError: If this version of JAX is not supported.
    """
    _jax_private.install(entered.noting(_lower), without_batch)


def _lower(ctx: Any, jaxpr: Any, lower: Callable[[Any], Any]) -> Any:
    """Lowers a program; `_jax_private.install` wraps JAX's function with it."""
    request = current()
    if request.enabled:
        compiled.note(ctx.module)
    if tuple(ctx.platforms) == ("cuda",) and getattr(ctx.axis_context, "num_devices", 0) in (None, 1):
        jaxpr = with_row_programs(jaxpr, _may_join)
    is_meant = functools.partial(_is_invariant, request.enabled)
    if is_partitioned(ctx):
        jaxpr = with_rows_left(ctx, jaxpr, is_meant)
        jaxpr = with_whole_values(jaxpr, is_meant, refused(ctx))
    elif has_typed_values(jaxpr):
        jaxpr = with_whole_values(jaxpr, is_meant)
    if "cpu" in ctx.platforms:
        jaxpr = with_hidden_constants(jaxpr, is_meant)
    equations = [_requested(ctx, eqn, request.enabled) for eqn in jaxpr.eqns]
    equations = with_arrangements(jaxpr, equations)
    if tuple(ctx.platforms) == ("cpu",):
        equations = with_settled_reshapes(equations, jaxpr.eqns, lambda aval: not is_explicit(aval))
    equations = with_barriers(jaxpr, equations, is_meant, request.enabled)
    if len(equations) != len(jaxpr.eqns) or any(map(operator.is_not, equations, jaxpr.eqns)):
        jaxpr = jaxpr.replace(eqns=equations)
    try:
        return lower(jaxpr)
    except NotInvariantError as error:
        # JAX traces a jitted function once for all its callers, so an equation inside has no caller.
        error.line = error.line or _line()
        raise


def _is_invariant(enabled: bool, eqn: Any) -> bool:
    """Returns whether an equation should be made invariant; `enabled` is the default without a tag."""
    metadata = eqn.ctx.xla_metadata
    tag = metadata.get(TAG) if metadata else None
    return bool(tag == INVARIANT or (tag is None and enabled))


def _may_join(eqn: Any) -> bool:
    """Returns whether an equation may become part of a row program."""
    request = of_equation(eqn.ctx.xla_metadata)
    if not (request.enabled and request.fuse_rows) or eqn.effects or eqn.ctx.compute_type is not None:
        return False
    return not any(is_explicit(v.aval) for v in (*eqn.invars, *eqn.outvars))


def _stands_for(function: Callable[..., Any], ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    return traced(function, ctx, operands, parameters, multiple_results=function is run_row_program)


for _primitive, _function in ((ROW_PROGRAM, run_row_program), (PRODUCT, product_of_parts), (SETTLED, settled)):
    mlir.register_lowering(_primitive, functools.partial(_stands_for, _function))


def _requested(ctx: Any, eqn: Any, enabled: bool) -> Any:
    """Returns an equation for lowering.

    Args:
        ctx: Context of the module.
        eqn: The equation.
        enabled: Whether to make it invariant if it carries no tag.
    """
    metadata = eqn.ctx.xla_metadata
    tag = metadata.get(TAG) if metadata else None
    name = eqn.primitive.name
    if tag == INVARIANT or (tag is None and enabled):
        wanted = name == "cond" or name in OWN_PROGRAMS or (bool(tag) and is_program(name)) or _concerns(name)
    else:
        # The order of a kernel's operations is fixed by its contract; how XLA:GPU compiles each one is not.
        wanted = tag == KERNEL and (name in ELEMENTWISE or name in COLLECTIVES) and "cuda" in ctx.platforms
    if not wanted:
        return eqn
    if kept := _operand_that_is_chosen(eqn):
        return eqn.replace(primitive=jax.lax.copy_p, invars=[kept], params={})
    # A callback may have no results.
    if tuple(ctx.platforms) == ("cpu",) and eqn.outvars and not is_explicit(eqn.outvars[0].aval):
        eqn = with_product(eqn)
    inline = _jax_private.rules_of(ctx, eqn.primitive, eqn.ctx)[2]
    return eqn.replace(primitive=_counterpart(eqn.primitive, inline))


def _operand_that_is_chosen(eqn: Any) -> Any:
    """Returns the operand that a maximum with -inf, or a minimum with +inf, equals; None for other equations.

    Softmax and log-softmax of `jax.nn` have such a maximum, which XLA would recompute for each difference from it.
    """
    if eqn.primitive.name not in ("max", "min"):
        return None
    loses = -math.inf if eqn.primitive.name == "max" else math.inf
    x, y = eqn.invars
    for operand, other in ((x, y), (y, x)):
        if isinstance(other, Literal) and other.val == loses and operand.aval == eqn.outvars[0].aval:
            return operand
    return None


@functools.cache
def _concerns(name: str) -> bool:
    """Returns whether an operation under a request is ever lowered by another rule than its own."""
    if not is_known(name) or name in IN_PLACE:
        return True
    # JAX's rules for operations without an order may trace programs.
    return any(
        rule.kind in (Kind.REPLACE, Kind.REFUSE) or rule.lower or rule.evidence in (ORDER_FREE, COUNTER)
        for rule in rules_of(name)
    )


@functools.cache
def _counterpart(primitive: Primitive, inline: bool) -> Primitive:
    """Returns our primitive, of the same name, that is lowered instead of one under a request."""
    counterpart = Primitive(primitive.name)
    counterpart.multiple_results = primitive.multiple_results
    lower = _with_program if is_program(primitive.name) else _by_request
    # A rule that JAX caches receives the parameters of a function instead of the operands; it would not see that one
    # is a transpose, how an update is computed, or that a number was computed.
    looks_back = primitive.name in IN_PLACE or any(rule.looks_back for rule in rules_of(primitive.name))
    cacheable = _jax_private.is_cached(primitive) and not looks_back
    mlir.register_lowering(counterpart, functools.partial(lower, primitive), inline=inline, cacheable=cacheable)
    return counterpart


def _with_program(primitive: Primitive, ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    """Lowers a primitive that holds a program, so that the request reaches the program."""
    request, module = of_equation(ctx.jaxpr_eqn_ctx.xla_metadata), ctx.module_context
    specific, default, _ = _jax_private.rules_of(module, primitive, ctx.jaxpr_eqn_ctx)
    default = OWN_PROGRAMS.get(primitive.name, default)
    if request != current():
        module = _jax_private.with_caches_of(request, module)
    inner = ctx.replace(module_context=module)
    # A program traced elsewhere has equations without the tag.
    with compiled.inside_of(request), callbacks.branches(primitive.name, parameters):
        if specific or default is None:
            return _jax_private.lower_per_platform(inner, primitive.name, specific, default, *operands, **parameters)
        lowered = default(inner, *operands, **parameters)
    if inner.tokens_out is not None:
        ctx.set_tokens_out(inner.tokens_out)
    return lowered


def _by_request(primitive: Primitive, ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    """Lowers any other primitive."""
    arrangement = parameters.pop(ARRANGEMENT, None)
    equation = ctx.jaxpr_eqn_ctx
    request = of_equation(equation.xla_metadata)
    specific, default, _ = _jax_private.rules_of(ctx.module_context, primitive, equation)
    on_host = equation.compute_type == "device_host"
    platforms = ("cpu",) if on_host else tuple(ctx.platforms or ctx.module_context.platforms)
    name = rule_name(primitive.name, parameters, ctx.avals_in)
    rules: dict[str, Rule] = {}
    for platform in platforms:
        stock = specific.get(platform, default) or functools.partial(_without_rule, primitive, platform)
        if request.enabled:
            settings = {"platform": platform, "request": request, "stock": stock, "general": default or stock}
            make = functools.partial(Call, primitive, name, **settings, arrangement=arrangement)
            rules[platform] = functools.partial(_lower_made, make)
        elif platform != "cuda":  # the code of a kernel
            rules[platform] = stock
        elif name in COLLECTIVES:
            rules[platform] = functools.partial(with_plain_addition, stock)
        else:
            rules[platform] = functools.partial(hold, primitive.name, stock)
    if len(rules) == 1:
        return rules[platforms[0]](ctx, *operands, **parameters)
    return _jax_private.lower_per_platform(ctx, primitive.name, rules, None, *operands, **parameters)


def _without_rule(primitive: Primitive, platform: str, *_: Any, **__: Any) -> Sequence[Any]:
    raise NotImplementedError(
        f"JAX has no lowering rule for the primitive {primitive.name} on the platform {platform}."
    )


def _lower_made(make: Callable[..., Call], ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    return _lower_call(make(ctx=ctx, operands=operands, parameters=parameters))


def _lower_call(call: Call) -> Sequence[Any]:
    """Lowers a call of a primitive by the rule that applies to it (`bijax.transform.rules`)."""
    found = verdict(call.name, call.dtypes, call.platform, call.request.allowed)
    if call.name == callbacks.RAISING and callbacks.in_branch() and not found.allowed:
        line = _line() or _library_line()
        guarded = callbacks.only_raising(call.parameters, _describe(call.name, call.ctx), line)
        return call.stock(call.ctx, *call.operands, **guarded)
    if found.kind is Kind.REFUSE:
        raise _refusal(call, found.evidence)
    if call.platform == "cpu" and call.name in IN_PLACE:
        call = dataclasses.replace(call, operands=with_update_before(call.name, call.operands))
    if found.kind is Kind.ENTER:
        return _entering(call, found.allowed)
    if found.kind is Kind.REPLACE and call.platform not in PLATFORMS:
        raise UnsupportedError(
            f"bijax.invariant: expected a program for {' or '.join(PLATFORMS)}, got {call.primitive.name} for"
            f" {call.platform}; there are no kernels for that platform."
        )
    if found.rule is None or found.rule.lower is None:
        # Some stock rules trace programs, which the evidence covers.
        return call.as_it_is(**with_plain_region(call.name, call.parameters))
    if found.kind is Kind.REPLACE and not found.rule.symbolic:
        _check_shapes(call)
    return found.rule.lower(call)


def _entering(call: Call, allowed: bool) -> Sequence[Any]:
    """Lowers a call by JAX's own rule, whose programs are made invariant."""
    # A platform's rule usually calls a library; the rule for all platforms is more often JAX code.
    rule = call.stock if allowed else call.general
    parameters = with_plain_region(call.name, call.parameters)
    lowered, by_itself = entered.enter(rule, call.request, call.ctx, call.operands, parameters)
    if by_itself and not allowed:
        raise _refusal(call, entered.why_not(by_itself))
    return lowered


def _check_shapes(call: Call) -> None:
    for aval in call.ctx.avals_in:
        if not all(isinstance(n, int) for n in aval.shape):
            reason = "its tiles are laid out when it is lowered, which needs the sizes of all axes"
            advice = (
                "Symbolic sizes (jax.export.symbolic_shape) cannot be exported: export one program for each batch size,"
                " which has the same bits in every row, and choose by the size."
            )
            raise _refusal(call, reason, advice)


def _describe(name: str, ctx: Context) -> str:
    return f"{name}({', '.join(str(a) for a in ctx.avals_in)})"


def _refusal(call: Call, reason: str, advice: str = "") -> NotInvariantError:
    name = call.primitive.name
    may = not advice and may_be_allowed(name)
    return NotInvariantError(name, _describe(name, call.ctx), reason, _line(), _library_line(), may, advice)


def _line() -> str:
    """Returns the line of the user's program of an equation; empty if unknown."""
    return user_line(_jax_private.user_stack())


def _library_line() -> str:
    """Returns the line of another library of an equation; empty if it comes from the user's program."""
    stack = [(file, line) for file, line in _jax_private.user_stack() if not file.startswith(_PACKAGE)]
    return f"{stack[0][0]}:{stack[0][1]}" if stack and not user_line(stack[:1]) else ""


BEFORE_LOWERING.append(install)
LOWERED_IN.append(functools.partial(requested, OFF))
