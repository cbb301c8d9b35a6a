"""Lowering of programs whose operations are to be made invariant.

The equations that are to be lowered in another way are replaced, just before JAX lowers them, by equations of
primitives of our own, whose rules are here. All others are left to JAX, and so is every program in which nothing was
requested.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Literal, Primitive
from jax.extend.mlir import lower_with_sharding_in_types
from jax.interpreters import mlir

from bijax.core.lowered_forms import lower_once
from bijax.core.partitioning import is_partitioned, refused
from bijax.core.primitive import BEFORE_LOWERING, LOWERED_IN
from bijax.core.tag import KERNEL, TAG, kernel_code
from bijax.hlo._frames import user_line
from bijax.lax.dot_general import Arrangement
from bijax.lax.flat import on_vectors
from bijax.lax.product_of_parts import product_of_parts
from bijax.transform import _callbacks, _compiled, _entered, _fences, _fences_gpu, _jax_private
from bijax.transform._constants import with_hidden_constants
from bijax.transform._in_place import IN_PLACE, with_update_before
from bijax.transform._jax_private import Context, Rule
from bijax.transform._operands import look_through_transposes
from bijax.transform._regions import with_plain_region, without_region
from bijax.transform._replacements import COLLECTIVES, REPLACEMENTS, replacement
from bijax.transform._results import ARRANGEMENT, with_arrangements
from bijax.transform._row_layout import run_row_program
from bijax.transform._row_products import PRODUCT
from bijax.transform._row_programs import ROW_PROGRAM, with_row_programs
from bijax.transform._scaled import with_product
from bijax.transform._settled import SETTLED, settled, with_settled_reshapes
from bijax.transform._state import INVARIANT, OFF, Request, current, of_equation, requested, tagged
from bijax.transform._tables import (
    ALONE,
    AS_MATRICES,
    COMPARED,
    COUNTER,
    FENCED,
    IN_REGIONS,
    KEEP,
    ORDER_FREE,
    PLATFORMS,
    RECURSE,
    ROUNDED,
    STABLE,
    TAKEN_OUT,
    VECTORS,
    Kind,
    may_be_allowed,
    narrows_to_bfloat16,
    table_name,
    verdict,
)
from bijax.transform._whole_values import with_whole_values
from bijax.transform.errors import NotInvariantError
from bijax.transform.expansions import Expansion, expansion_of
from bijax.transform.expansions._lapack import contract_of as lapack_contract_of
from bijax.transform.expansions._lapack import of_each_matrix
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.xla.join import of_matrices, would_be_nested
from pallas_kernels.parts.xla.own_settings import of_width, without_mesh

_PACKAGE: Final = str(Path(__file__).parents[1])
_HELD: Final = frozenset({*FENCED, *VECTORS, *ROUNDED})


def install() -> None:
    """Makes JAX's lowering look at requests; cheap when it does so already.

    Raises:
        UnsupportedError: If this version of JAX is not supported.
    """
    _jax_private.install(_entered.noting(_lower))


def _lower(ctx: Any, jaxpr: Any, lower: Callable[[Any], Any]) -> Any:
    """Lowers a program: what `_jax_private.install` puts in front of JAX's own function."""
    request = current()
    if request.enabled:
        _compiled.note(ctx.module)
    if tuple(ctx.platforms) == ("cuda",) and getattr(ctx.axis_context, "num_devices", 0) in (None, 1):
        jaxpr = with_row_programs(jaxpr, functools.partial(_may_join, request.enabled))
    is_meant = functools.partial(_is_invariant, request.enabled)
    if is_partitioned(ctx):
        jaxpr = with_whole_values(jaxpr, is_meant, refused(ctx))
    if "cpu" in ctx.platforms and any(is_meant(eqn) for eqn in jaxpr.eqns):
        jaxpr = with_hidden_constants(jaxpr, is_meant)
    equations = [_requested(ctx, eqn, request.enabled) for eqn in jaxpr.eqns]
    equations = with_arrangements(jaxpr, equations)
    if tuple(ctx.platforms) == ("cpu",):
        equations = with_settled_reshapes(equations, jaxpr.eqns, lambda aval: not _is_explicit(aval))
    if any(new is not old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        jaxpr = jaxpr.replace(eqns=equations)
    try:
        return lower(jaxpr)
    except NotInvariantError as error:
        # JAX traces a jitted function once for all its callers, so an equation inside does not know them.
        error.line = error.line or _line()
        raise


def _is_invariant(enabled: bool, eqn: Any) -> bool:
    """Returns whether an equation is to be made invariant; `enabled` says whether it is if it carries no tag."""
    metadata = eqn.ctx.xla_metadata
    tag = metadata.get(TAG) if metadata else None
    return bool(tag == INVARIANT or (tag is None and enabled))


def _may_join(enabled: bool, eqn: Any) -> bool:
    """Returns whether an equation may become part of a row program."""
    if not _is_invariant(enabled, eqn) or eqn.effects or eqn.ctx.compute_type is not None:
        return False
    return not any(_is_explicit(v.aval) for v in (*eqn.invars, *eqn.outvars))


def _row_program(ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    return _traced(run_row_program, ctx, operands, parameters, multiple_results=True)


mlir.register_lowering(ROW_PROGRAM, _row_program)


def _product_of_parts(ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    return _traced(product_of_parts, ctx, operands, parameters)


mlir.register_lowering(PRODUCT, _product_of_parts)


def _settled(ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    return _traced(settled, ctx, operands, parameters)


mlir.register_lowering(SETTLED, _settled)


def _requested(ctx: Any, eqn: Any, enabled: bool) -> Any:
    """Returns an equation as it is to be lowered.

    Args:
        ctx: Context of the module.
        eqn: The equation.
        enabled: Whether it is to be made invariant if it carries no tag.
    """
    metadata = eqn.ctx.xla_metadata
    tag = metadata.get(TAG) if metadata else None
    name = eqn.primitive.name
    if tag == INVARIANT or (tag is None and enabled):
        wanted = name == "cond" or (name in RECURSE if tag and name in RECURSE else _concerns(name))
    else:
        # The order of a kernel's operations is fixed by its contract; what XLA:GPU makes of each one is not.
        wanted = tag == KERNEL and name in _HELD and "cuda" in ctx.platforms
    if not wanted:
        return eqn
    if kept := _operand_that_is_chosen(eqn):
        return eqn.replace(primitive=jax.lax.copy_p, invars=[kept], params={})
    if tuple(ctx.platforms) == ("cpu",) and not _is_explicit(eqn.outvars[0].aval):
        eqn = with_product(eqn)
    inline = _jax_private.rules_of(ctx, eqn.primitive, eqn.ctx)[2]
    return eqn.replace(primitive=_counterpart(eqn.primitive, inline))


def _operand_that_is_chosen(eqn: Any) -> Any:
    """Returns the operand that a maximum with -inf, or a minimum with +inf, comes to; None for other equations.

    Softmax and log-softmax of `jax.nn` have such a maximum, which XLA would compute anew for each difference from it.
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
    """Returns whether an operation under a request is ever lowered otherwise than by its own rule."""
    if name in AS_MATRICES or name in IN_PLACE or (name in KEEP and KEEP[name] in (ORDER_FREE, COUNTER)):
        return True
    dtypes = (np.dtype(np.float32), np.dtype(np.complex64))
    kinds = {verdict(name, (d,), p).kind for d in dtypes for p in PLATFORMS}
    return bool(kinds & {Kind.REPLACE, Kind.ENTER, Kind.REFUSE})


@functools.cache
def _counterpart(primitive: Primitive, inline: bool) -> Primitive:
    """Returns the primitive of ours, of the same name, that is lowered in the place of one under a request."""
    counterpart = Primitive(primitive.name)
    counterpart.multiple_results = primitive.multiple_results
    rule = _with_program if primitive.name in RECURSE else _by_request
    # A rule that JAX caches is given the parameters of a function in place of the operands; it would not see that one
    # is a transpose, what an update is made of, or that a number was computed.
    sees_operands = primitive.name in ("dot_general", "convert_element_type") or primitive.name in IN_PLACE
    cacheable = _jax_private.is_cached(primitive) and not sees_operands
    mlir.register_lowering(counterpart, functools.partial(rule, primitive), inline=inline, cacheable=cacheable)
    return counterpart


def _with_program(primitive: Primitive, ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    """Lowers a primitive that holds a program, so that the request reaches the program."""
    request, module = of_equation(ctx.jaxpr_eqn_ctx.xla_metadata), ctx.module_context
    specific, default, _ = _jax_private.rules_of(module, primitive, ctx.jaxpr_eqn_ctx)
    if request != current():
        module = _jax_private.with_caches_of(request, module)
    inner = ctx.replace(module_context=module)
    # A program that was traced elsewhere has equations without the tag.
    with _compiled.inside_of(request), _callbacks.branches(primitive.name, parameters):
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
    rules: dict[str, Rule] = {}
    for platform in platforms:
        stock = specific.get(platform, default) or functools.partial(_without_rule, primitive, platform)
        if request.enabled:
            rules[platform] = _rule_for(primitive, stock, default or stock, platform, request, arrangement)
        else:  # the code of a kernel
            rules[platform] = functools.partial(_held, primitive.name, stock) if platform == "cuda" else stock
    if len(rules) == 1:
        return rules[platforms[0]](ctx, *operands, **parameters)
    return _jax_private.lower_per_platform(ctx, primitive.name, rules, None, *operands, **parameters)


def _without_rule(primitive: Primitive, platform: str, *_: Any, **__: Any) -> Sequence[Any]:
    raise NotImplementedError(
        f"JAX has no lowering rule for the primitive {primitive.name} on the platform {platform}."
    )


def _rule_for(
    primitive: Primitive,
    stock: Rule,
    general: Rule,
    platform: str,
    request: Request,
    arrangement: Arrangement | None,
) -> Rule:
    """Returns the rule that lowers a primitive for one platform as requested.

    Args:
        primitive: The primitive.
        stock: The rule that JAX has for the platform.
        general: The rule that JAX has for all platforms, or else `stock`.
        platform: The platform.
        request: The request.
        arrangement: How the factors of a product are stored.
    """

    def rule(ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
        dtypes = tuple(a.dtype for a in (*ctx.avals_in, *ctx.avals_out) if hasattr(a, "dtype"))
        name = table_name(primitive.name, parameters, ctx.avals_in)
        decided = verdict(name, dtypes, platform, request.allowed)
        if name == _callbacks.RAISING and _callbacks.in_branch() and not decided.allowed:
            guarded = _callbacks.only_raising(parameters, _describe(name, ctx), _line() or _library_line())
            return stock(ctx, *operands, **guarded)
        if decided.kind is Kind.REFUSE:
            raise _refusal(primitive.name, ctx, decided.evidence)
        if name in IN_PLACE and platform == "cpu":
            operands = tuple(with_update_before(name, operands))
        if name in AS_MATRICES and platform == "cpu" and would_be_nested(ctx, parameters["dimension"]):
            return _traced(of_matrices, ctx, operands, parameters)
        if decided.kind is Kind.ENTER:
            # A platform's own rule is there to call a library; that for all platforms is JAX code more often.
            found = stock if decided.allowed else general
            lowered, by_itself = _entered.enter(found, request, ctx, operands, with_plain_region(name, parameters))
            if by_itself and not decided.allowed:
                raise _refusal(primitive.name, ctx, _entered.why_not(by_itself))
            return lowered
        if decided.kind is not Kind.REPLACE:
            # Some stock rules trace programs of their own, which the evidence covers.
            with kernel_code():
                return stock(ctx, *operands, **with_plain_region(name, parameters))
        if platform not in PLATFORMS:
            raise UnsupportedError(
                f"bijax.invariant: expected a program for {' or '.join(PLATFORMS)}, got {primitive.name} for"
                f" {platform}; there are no kernels for that platform."
            )
        if name in ALONE:
            with kernel_code():
                moved = stock(ctx, *operands, **parameters)
            return _fences.alone(moved) if math.prod(parameters["slice_sizes"]) == 1 else moved
        _check_shapes(primitive.name, ctx)
        if platform == "cpu" and lapack_contract_of(name, ctx.avals_in, parameters):
            return _traced(of_each_matrix(primitive), ctx, operands, parameters, primitive.multiple_results)
        if expansion := expansion_of(name, dtypes, platform):
            return _expanded(expansion, request, ctx, operands, parameters, primitive.multiple_results)
        if name in STABLE:
            with kernel_code():
                return stock(ctx, *operands, **{**parameters, "is_stable": True})
        if name in TAKEN_OUT:
            function, parameters = without_region(name, REPLACEMENTS[name], parameters, request)
            return _traced(function, ctx, operands, parameters, multiple_results=primitive.multiple_results)
        if platform != "cpu" and primitive.name in _HELD:
            return _held(primitive.name, stock, ctx, *operands, **parameters)
        if primitive.name in COMPARED:
            return stock(ctx, *(_fences.without_subnormal_numbers(x) for x in operands), **parameters)
        if primitive.name in FENCED or primitive.name in ROUNDED:
            return _fenced(primitive.name, stock, ctx, operands, parameters)
        if primitive is jax.lax.dot_general_p:
            options = {ARRANGEMENT: arrangement, "on_gpu": platform != "cpu"}
            ctx, values, parameters = look_through_transposes(ctx, operands, parameters)
            return _traced(_dot, ctx, values, {**parameters, **options})
        return _replaced(primitive, platform, ctx, operands, parameters)

    return rule


def _expanded(
    expansion: Expansion,
    request: Request,
    ctx: Context,
    operands: Sequence[Any],
    parameters: dict[str, Any],
    multiple_results: bool,
) -> Sequence[Any]:
    """Lowers a primitive as the operations of which it is made up, under the same request."""
    fixed = {"out_sharding": None} if "out_sharding" in parameters else {}

    def run(*arrays: jax.Array, **others: Any) -> Any:
        with tagged(request):
            return expansion(*arrays, **others, **fixed)

    return _traced(run, ctx, operands, parameters, multiple_results=multiple_results)


def _held(name: str, stock: Rule, ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    """Lowers an element-wise primitive for a GPU."""
    if name in _SPELT_OUT:
        return _traced(_SPELT_OUT[name], ctx, operands, parameters)
    # A rule that traces a program of its own is fenced inside too, as the code of a kernel.
    with kernel_code():
        return _fences_gpu.fenced(name, stock, ctx, operands, parameters)


def _fenced(name: str, stock: Rule, ctx: Context, operands: Sequence[Any], parameters: dict[str, Any]) -> Sequence[Any]:
    if name == "div":
        (out,) = ctx.avals_out
        numerator, denominator = (_fences.repeated(x, out.shape) for x in operands)
        hidden = _fences.hide(denominator)
        (quotient,) = stock(ctx.replace(avals_in=[out, out]), numerator, hidden, **parameters)
        return [_fences.hide(quotient)]
    if name == "one_minus_square":
        return _traced(_one_minus_square, ctx, operands, parameters)
    if name == "convert_element_type" and narrows_to_bfloat16((ctx.avals_in[0].dtype, ctx.avals_out[0].dtype)):
        return stock(ctx, _fences.without_subnormal_numbers(operands[0]), **parameters)
    (product,) = stock(ctx, *operands, **parameters)
    return [_fences.fence_product(product)]


def _replaced(
    primitive: Primitive, platform: str, ctx: Context, operands: Sequence[Any], parameters: dict[str, Any]
) -> Sequence[Any]:
    if primitive.name in COLLECTIVES:
        with kernel_code():
            lowered: Sequence[Any] = mlir.lower_fun(REPLACEMENTS[primitive.name], multiple_results=False)(
                ctx, *operands, **parameters
            )
        return lowered
    # The name of a scatter says what its program does; its form would be kept for this one program.
    parameters = {k: v for k, v in parameters.items() if k not in IN_REGIONS.get(primitive.name, ())}
    on_whole_vectors = primitive.name in VECTORS
    function = functools.partial(on_vectors, primitive) if on_whole_vectors else replacement(primitive.name, platform)
    return _traced(function, ctx, operands, parameters, multiple_results=primitive.multiple_results)


@functools.partial(
    jax.jit,
    static_argnames=("dimension_numbers", "precision", "preferred_element_type", "as_columns", ARRANGEMENT, "on_gpu"),
)
def _dot(lhs: jax.Array, rhs: jax.Array, **parameters: Any) -> jax.Array:
    """The product as a function of its own, which JAX lowers once for equal products."""
    product: jax.Array = REPLACEMENTS["dot_general"](lhs, rhs, **parameters)
    return product


def _traced(
    function: Callable[..., Any],
    ctx: Context,
    operands: Sequence[Any],
    parameters: dict[str, Any],
    multiple_results: bool = False,
) -> Sequence[Any]:
    """Lowers a function of arrays in the place of a primitive."""
    # Shardings and the axes of manual meshes are properties of the primitive's values, not of the tiles inside.
    plain = [jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    explicit = any(_is_explicit(a) for a in (*ctx.avals_in, *ctx.avals_out))
    parameters = {name: value for name, value in parameters.items() if name != "out_sharding"}
    # A program may be lowered after the block that allowed its 64 bits has ended.
    with of_width((*plain, *ctx.avals_out)), kernel_code(), without_mesh():
        lowered = lower_once(function, multiple_results=multiple_results)(
            ctx.replace(avals_in=plain), *operands, **parameters
        )
    if not explicit:
        return lowered
    return [lower_with_sharding_in_types(ctx, v, a) for v, a in zip(lowered, ctx.avals_out, strict=True)]


def _one_minus_square(x: jax.Array, **_: Any) -> jax.Array:
    (square,) = jax.lax.optimization_barrier((x * x,))
    difference: jax.Array = 1 - square
    return difference


def _log2(x: jax.Array, **_: Any) -> jax.Array:
    wide = x.astype(jax.numpy.promote_types(x.dtype, np.float32))
    quotient: jax.Array = jax.lax.log(wide) / wide.dtype.type(np.log(2))
    return quotient.astype(x.dtype)


_SPELT_OUT: Final[dict[str, Callable[..., jax.Array]]] = {"log2": _log2, "one_minus_square": lambda x, **_: 1 - x * x}
"""What the rules of these emit at once, as operations that get fences of their own."""


def _is_explicit(aval: Any) -> bool:
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and not mesh.are_all_axes_auto and not mesh._any_axis_manual


def _check_shapes(name: str, ctx: Context) -> None:
    for aval in ctx.avals_in:
        if not all(isinstance(n, int) for n in aval.shape):
            reason = "tiles are laid out at lowering and need concrete shapes; export one program for each shape"
            raise _refusal(name, ctx, reason)


def _describe(name: str, ctx: Context) -> str:
    return f"{name}({', '.join(str(a) for a in ctx.avals_in)})"


def _refusal(name: str, ctx: Context, reason: str) -> NotInvariantError:
    return NotInvariantError(name, _describe(name, ctx), reason, _line(), _library_line(), may_be_allowed(name))


def _line() -> str:
    """Returns the line of the user's program that an equation comes from; nothing if it is not known."""
    return user_line(_jax_private.user_stack())


def _library_line() -> str:
    """Returns the line of another library that an equation comes from; nothing if it comes from the user's program."""
    stack = [(file, line) for file, line in _jax_private.user_stack() if not file.startswith(_PACKAGE)]
    return f"{stack[0][0]}:{stack[0][1]}" if stack and not user_line(stack[:1]) else ""


BEFORE_LOWERING.append(install)
LOWERED_IN.append(functools.partial(requested, OFF))
