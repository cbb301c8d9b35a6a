"""Lowering rules that look at the request before they lower.

The rules are wrapped once, when something is first made invariant. Where nothing was requested the stock rule runs,
with the same result as before. JAX has a public way to register a rule and none to read the registered one, so two of
its private tables are read here and nowhere else.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jax
import numpy as np
from jax._src import source_info_util  # private: the line of the user's program
from jax._src.interpreters import mlir as tables  # private: the rules that are wrapped
from jax.extend.core import Primitive
from jax.extend.mlir import lower_with_sharding_in_types
from jax.interpreters import mlir

from bijax.hlo._frames import user_line
from bijax.ops._flat import on_vectors
from bijax.ops._primitive import BEFORE_LOWERING
from bijax.ops._tag import kernel_code
from bijax.transform import _compiled, _fences, _fences_gpu
from bijax.transform._operands import look_through_transposes
from bijax.transform._regions import with_plain_region, without_region
from bijax.transform._replacements import COLLECTIVES, REPLACEMENTS
from bijax.transform._state import Request, is_kernel_code, of_equation
from bijax.transform._tables import (
    COUNTER,
    FENCED,
    KEEP,
    ORDER_FREE,
    PLATFORMS,
    RECURSE,
    ROUNDED,
    STABLE,
    TAKEN_OUT,
    VECTORS,
    Kind,
    table_name,
    verdict,
)
from bijax.transform.errors import NotInvariantError
from pallas_kernels.errors import UnsupportedError

Context = Any  # mlir.LoweringRuleContext, whose values are typed too abstractly for arrays
Rule = Callable[..., Sequence[Any]]

_MARK: Final = "_bijax_stock_rule"
_PACKAGE: Final = str(Path(__file__).parents[1])
_HELD: Final = frozenset({*FENCED, *VECTORS, *ROUNDED})
_lock = threading.Lock()
_rules_seen = 0


def install() -> None:
    """Wraps every lowering rule that is registered and not yet wrapped; cheap when there is no new one."""
    global _rules_seen
    with _lock:
        tables_by_platform = tables._platform_specific_lowerings
        # To look at each would cost every call of an invariant function 0.2 ms.
        rules_now = len(tables._lowerings) + sum(map(len, tables_by_platform.values()))
        if rules_now == _rules_seen:
            return
        _compiled.install()
        _install_dot_general()
        for platform, rules in [(None, tables._lowerings), *tables_by_platform.items()]:
            for primitive, entry in list(rules.items()):
                if hasattr(entry.rule, _MARK):
                    continue
                wrap = _locating if primitive.name in RECURSE else _wrap if _concerns(primitive.name) else None
                if wrap:
                    rule = wrap(primitive, entry.rule)
                    setattr(rule, _MARK, True)
                    mlir.register_lowering(primitive, rule, platform=platform, inline=entry.inline)
        _rules_seen = len(tables._lowerings) + sum(map(len, tables_by_platform.values()))


def _install_dot_general() -> None:
    """Makes one rule of those of `dot_general`, which is given the operands themselves.

    A rule that JAX caches is given the parameters of a function in place of the operands; it would not see that one is
    a transpose. JAX runs rules that it does not cache in another way, which does not take several for one primitive.
    """
    primitive = jax.lax.dot_general_p
    stock = tables._lowerings[primitive].rule
    if hasattr(stock, _MARK):
        return
    by_platform = tables._platform_specific_lowerings
    specific = {p: rules.pop(primitive).rule for p, rules in by_platform.items() if primitive in rules}
    rule = _wrap(primitive, stock, specific)
    setattr(rule, _MARK, True)
    mlir.register_lowering(primitive, rule, cacheable=False)


def _concerns(name: str) -> bool:
    """Returns whether the rule of a primitive ever does anything else than the stock rule."""
    if name in KEEP and KEEP[name] in (ORDER_FREE, COUNTER):
        return True
    dtypes = (np.dtype(np.float32), np.dtype(np.complex64))
    kinds = {verdict(name, (d,), p).kind for d in dtypes for p in PLATFORMS}
    return bool(kinds & {Kind.REPLACE, Kind.REFUSE})


def _locating(_: Primitive, stock: Rule) -> Rule:
    """Wraps the rule of a primitive that holds a program: the request reaches the program, errors get its line."""

    @functools.wraps(stock)
    def rule(ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
        request = _request(ctx)
        _compiled.note(ctx.module_context.module)
        try:
            # A program that was traced elsewhere has equations without the tag.
            with _compiled.inside_of(request) if request.enabled else contextlib.nullcontext():
                return stock(ctx, *operands, **parameters)
        except NotInvariantError as error:
            # JAX traces a jitted function once for all its callers, so an equation inside does not know them.
            error.line = error.line or _line()
            raise

    return rule


def _wrap(primitive: Primitive, stock: Rule, specific: Mapping[str, Rule] = MappingProxyType({})) -> Rule:
    """Wraps the rule of a primitive.

    Args:
        primitive: The primitive.
        stock: The rule where nothing is requested.
        specific: Rules that take its place for some platforms.
    """

    @functools.wraps(stock)
    def rule(ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
        request = _request(ctx)
        _compiled.note(ctx.module_context.module)
        platforms = tuple(ctx.platforms or ctx.module_context.platforms)
        rules = {p: specific.get(p, stock) for p in platforms}
        if request.enabled:
            install()  # a primitive may have been registered since the mode was enabled
            rules = {p: _rule_for(primitive, rules[p], p, request) for p in platforms}
        elif primitive.name in _HELD and "cuda" in platforms and is_kernel_code(_metadata(ctx)):
            # The order of a kernel's operations is fixed by its contract; what XLA:GPU makes of each one is not.
            rules["cuda"] = functools.partial(_held, primitive.name, rules["cuda"])
        if len(set(rules.values())) == 1:
            return rules[platforms[0]](ctx, *operands, **parameters)
        ctx = ctx.replace(avals_out=list(ctx.avals_out))
        return tables.lower_per_platform(ctx, primitive.name, rules, None, set(), *operands, **parameters)

    return rule


def _request(ctx: Context) -> Request:
    """Returns the request that holds for the equation of a rule's context."""
    return of_equation(_metadata(ctx))


def _metadata(ctx: Context) -> dict[str, str] | None:
    found: dict[str, str] | None = getattr(ctx.jaxpr_eqn_ctx, "xla_metadata", None)
    return found


def _rule_for(primitive: Primitive, stock: Rule, platform: str, request: Request) -> Rule:
    """Returns the rule that lowers a primitive for one platform as requested."""

    def rule(ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
        dtypes = tuple(a.dtype for a in (*ctx.avals_in, *ctx.avals_out) if hasattr(a, "dtype"))
        name = table_name(primitive.name, parameters)
        decided = verdict(name, dtypes, platform, request.allowed)
        if decided.kind is Kind.REFUSE:
            raise NotInvariantError(primitive.name, _describe(primitive.name, ctx), decided.evidence, _line())
        if decided.kind is not Kind.REPLACE:
            # Some stock rules trace programs of their own, which the evidence covers.
            with kernel_code():
                return stock(ctx, *operands, **with_plain_region(name, parameters))
        if platform not in PLATFORMS:
            raise UnsupportedError(
                f"bijax.invariant: expected a program for {' or '.join(PLATFORMS)}, got {primitive.name} for"
                f" {platform}; there are no kernels for that platform."
            )
        _check_shapes(primitive.name, ctx)
        if name in STABLE:
            with kernel_code():
                return stock(ctx, *operands, **{**parameters, "is_stable": True})
        if name in TAKEN_OUT:
            function, parameters = without_region(name, REPLACEMENTS[name], parameters, request)
            return _traced(function, ctx, operands, parameters, multiple_results=primitive.multiple_results)
        if platform != "cpu" and primitive.name in _HELD:
            return _held(primitive.name, stock, ctx, *operands, **parameters)
        if primitive.name in FENCED or primitive.name in ROUNDED:
            return _fenced(primitive.name, stock, ctx, operands, parameters)
        return _replaced(primitive, ctx, operands, parameters)

    return rule


def _held(name: str, stock: Rule, ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    """Lowers an element-wise primitive for a GPU."""
    if name in _SPELT_OUT:
        return _traced(_SPELT_OUT[name], ctx, operands, parameters)
    # A rule that traces a program of its own is fenced inside too, as the code of a kernel.
    with kernel_code():
        return _fences_gpu.fenced(name, stock, ctx, operands, parameters)


def _fenced(name: str, stock: Rule, ctx: Context, operands: Sequence[Any], parameters: dict[str, Any]) -> Sequence[Any]:
    if name == "div":
        numerator, denominator = operands
        if ctx.avals_in[0].shape == ctx.avals_in[1].shape:
            return stock(ctx, numerator, _fences.hide_denominator(numerator, denominator), **parameters)
        return _traced(_divide, ctx, operands, parameters)
    if name == "one_minus_square":
        return _traced(_one_minus_square, ctx, operands, parameters)
    (product,) = stock(ctx, *operands, **parameters)
    return [_fences.fence_product(product)]


def _replaced(primitive: Primitive, ctx: Context, operands: Sequence[Any], parameters: dict[str, Any]) -> Sequence[Any]:
    if primitive.name in COLLECTIVES:
        with kernel_code():
            lowered: Sequence[Any] = mlir.lower_fun(REPLACEMENTS[primitive.name], multiple_results=False)(
                ctx, *operands, **parameters
            )
        return lowered
    if primitive.name == "dot_general":
        return _traced(_dot, *look_through_transposes(ctx, operands, parameters))
    on_whole_vectors = primitive.name in VECTORS
    function = functools.partial(on_vectors, primitive) if on_whole_vectors else REPLACEMENTS[primitive.name]
    return _traced(function, ctx, operands, parameters, multiple_results=primitive.multiple_results)


@functools.partial(jax.jit, static_argnames=("dimension_numbers", "precision", "preferred_element_type", "as_columns"))
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
    wide = jax.enable_x64(True) if any(a.dtype.itemsize == 8 for a in plain) else contextlib.nullcontext()
    with wide, kernel_code(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        lowered: Sequence[Any] = mlir.lower_fun(function, multiple_results=multiple_results)(
            ctx.replace(avals_in=plain), *operands, **parameters
        )
    if not explicit:
        return lowered
    return [lower_with_sharding_in_types(ctx, v, a) for v, a in zip(lowered, ctx.avals_out, strict=True)]


def _divide(numerator: jax.Array, denominator: jax.Array, **_: Any) -> jax.Array:
    shape = jax.numpy.broadcast_shapes(numerator.shape, denominator.shape)
    (denominator,) = jax.lax.optimization_barrier((jax.numpy.broadcast_to(denominator, shape),))
    quotient: jax.Array = jax.lax.div(jax.numpy.broadcast_to(numerator, shape), denominator)
    return quotient


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
            raise NotInvariantError(name, _describe(name, ctx), reason, _line())


def _describe(name: str, ctx: Context) -> str:
    return f"{name}({', '.join(str(a) for a in ctx.avals_in)})"


def _line() -> str:
    """Returns the line of the user's program that an equation comes from."""
    traceback = source_info_util.current().traceback
    stack = [(f.file_name, f.start_line) for f in source_info_util.user_frames(traceback)]
    return user_line(stack) or next((f"{file}:{line}" for file, line in stack if not file.startswith(_PACKAGE)), "")


BEFORE_LOWERING.append(install)
