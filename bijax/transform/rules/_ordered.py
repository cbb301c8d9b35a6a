"""Rules for primitives that combine elements: they are replaced by library functions with a fixed order."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from bijax.core.tag import kernel_code
from bijax.lax.collectives import psum, reduce_scatter, why_refused
from bijax.lax.conv import conv_general_dilated
from bijax.lax.cumulative import cumlogsumexp, cumprod, cumsum
from bijax.lax.dot_general import dot_general
from bijax.lax.ragged_dot import ragged_dot_general
from bijax.lax.reduce import reduce_max, reduce_min, reduce_prod, reduce_sum
from bijax.lax.reduce_program import reduce, reduce_window
from bijax.lax.scatter import scatter_add, scatter_mul, scatter_sub
from bijax.lax.scatter_apply import scatter_apply
from bijax.lax.scatter_chosen import scatter, scatter_max, scatter_min
from bijax.lax.windows import (
    reduce_window_max,
    reduce_window_min,
    reduce_window_sum,
    select_and_gather_add,
    select_and_scatter_add,
)
from bijax.ops.attention.cudnn import cudnn_attention, cudnn_attention_gradients
from bijax.transform.errors import NotInvariantError
from bijax.transform.hook.state import OFF, tagged
from bijax.transform.rules._elementwise import has_an_order
from bijax.transform.rules._kept import INTEGER, ORDER_FREE
from bijax.transform.rules._refused import may_be_allowed
from bijax.transform.rules.call import Call, traced
from bijax.transform.rules.operands import look_through_transposes
from bijax.transform.rules.regions import TAKEN_OUT, without_programs, without_region
from bijax.transform.rules.registry import (
    FLOATS,
    Dtypes,
    Kind,
    Rule,
    is_complex,
    is_exact,
    is_in_floats,
    is_real,
    register,
)
from bijax.transform.rules.results import ARRANGEMENT
from bijax.transform.rules.uses import by_tracing, fixed
from pallas_kernels.contract import FoldContract, PairContract, TreeContract
from pallas_kernels.parts.xla.opaque import apart_in_loops
from pallas_kernels.parts.xla.total_order import has_order

Replacement = Callable[..., Any]

_SUM: Final = "a fixed tree of additions"
_COMPARED: Final = "a comparison tree that XLA cannot fuse into a library call"
_PREFIX: Final = "blocks of fixed length with a chain of carries: an element depends only on its prefix"
_CUDNN: Final = "cuDNN's attention: blocks of keys at absolute positions (bijax.dot_product_attention)"
_DEVICES: Final = "the terms of the devices are added as a fixed binary tree"
_EXTREME: Final = "compared as integers in a total order, which includes signed zeros and NaNs"

ORDERED: Final[dict[str, tuple[Replacement, str]]] = {
    "ragged_dot_general": (
        ragged_dot_general,
        "products of a row are added in the order of a contract, for any groups",
    ),
    "conv_general_dilated": (conv_general_dilated, "a convolution is a sum of invariant products"),
    "reduce_sum": (reduce_sum, _SUM),
    "reduce_prod": (reduce_prod, "a fixed tree of products"),
    "reduce_max": (reduce_max, _COMPARED),
    "reduce_min": (reduce_min, _COMPARED),
    "reduce_window_sum": (reduce_window_sum, "the elements of a window are added in ascending order"),
    "reduce_window_max": (reduce_window_max, "the elements of a window are compared in ascending order"),
    "reduce_window_min": (reduce_window_min, "the elements of a window are compared in ascending order"),
    "select_and_scatter_add": (
        select_and_scatter_add,
        "contributions to an element are added in the order of the windows",
    ),
    "select_and_gather_add": (
        select_and_gather_add,
        "the selected element of a window is found by comparisons alone",
    ),
    "cumsum": (cumsum, _PREFIX),
    "cumprod": (cumprod, _PREFIX),
    "cumlogsumexp": (cumlogsumexp, _PREFIX),
    "scatter-add": (scatter_add, "updates of one element are added in the order of their indices"),
    "scatter-sub": (scatter_sub, "updates of one element are subtracted in the order of their indices"),
    "scatter-mul": (scatter_mul, "updates of one element are multiplied in the order of their indices"),
    "dot_product_attention_fwd": (cudnn_attention, _CUDNN),
    "dot_product_attention_fwd_wrapper": (cudnn_attention, _CUDNN),
    "dot_product_attention_bwd": (cudnn_attention_gradients, _CUDNN),
    "dot_product_attention_bwd_wrapper": (cudnn_attention_gradients, _CUDNN),
}
"""Primitives that combine elements, with the replacement, which takes operands and parameters, and the evidence."""

COLLECTIVES: Final[dict[str, Replacement]] = {"psum": psum, "psum_invariant": psum, "reduce_scatter": reduce_scatter}
"""Sums over devices."""

RACING: Final[dict[str, tuple[Replacement, str]]] = {
    "scatter": (scatter, "where updates collide, the last one wins; XLA:GPU writes them all at once"),
    "scatter-max": (scatter_max, _EXTREME),
    "scatter-min": (scatter_min, _EXTREME),
}
"""Primitives whose updates XLA:CPU applies one after another, and XLA:GPU all at once, or depending on the shape."""

PRODUCTS: Final = "dot_general"

_ON_GPU: Final = {
    name: functools.partial(ORDERED[name][0], on_gpu=True)
    for name in ("reduce_max", "reduce_min", "reduce_prod", "reduce_sum")
}
"""Those with another implementation for GPUs, with the same bits."""

_EXTREMES: Final = frozenset({"reduce_max", "reduce_min"})
"""Those that support every floating dtype with an order."""

_WITH_PROGRAMS: Final[dict[str, Replacement]] = {
    "scatter_apply": scatter_apply,
    "reduce": reduce,
    "reduce_window": reduce_window,
}
"""Replacements for the operations of `TAKEN_OUT`; each takes the function as the argument `program`."""


def _apart(function: Replacement) -> Replacement:
    """Returns a function whose product at the end no sum after it is contracted with in a loop on a CPU."""

    @functools.wraps(function)
    def product(*operands: jax.Array, **parameters: Any) -> jax.Array:
        return apart_in_loops([function(*operands, **parameters)])[0]

    return product


_ON_CPU: Final = {name: _apart(ORDERED[name][0]) for name in ("cumprod", "reduce_prod", "scatter-mul")}
"""Those that end with a product."""


def replacement(name: str, platform: str) -> Replacement:
    """Returns the function that replaces a primitive of `ORDERED` or `RACING` on a platform."""
    function = {**ORDERED, **RACING}[name][0]
    return (_ON_CPU if platform == "cpu" else _ON_GPU).get(name, function)


def _replaced(call: Call) -> Sequence[Any]:
    # The name of a scatter defines its program; otherwise the lowered module would be cached for this one program.
    parameters = without_programs(call.name, call.parameters)
    several = call.primitive.multiple_results
    return traced(replacement(call.name, call.platform), call.ctx, call.operands, parameters, several)


def _devices(call: Call) -> int:
    """Returns the number of devices that a collective adds over."""
    if groups := call.parameters.get("axis_index_groups"):
        return len(groups[0])
    named = call.parameters["axis_name"] if "axis_name" in call.parameters else call.parameters["axes"]
    axes = named if isinstance(named, tuple) else (named,)
    return math.prod(jax.lax.axis_size(axis) for axis in axes if not isinstance(axis, int))


def _over_devices(call: Call) -> Sequence[Any]:
    # It communicates with other devices, and so must see the axes.
    if why := why_refused(_devices(call)):
        operands = ", ".join(map(str, call.ctx.avals_in))
        raise NotInvariantError(call.name, f"{call.name}({operands})", why, may_be_allowed=may_be_allowed(call.name))
    with kernel_code():
        rule = mlir.lower_fun(COLLECTIVES[call.name], multiple_results=False)
        lowered: Sequence[Any] = rule(call.ctx, *call.operands, **call.parameters)
    return lowered


def with_plain_addition(
    stock: Callable[..., Sequence[Any]], ctx: Any, *operands: Any, **parameters: Any
) -> Sequence[Any]:
    """Lowers a sum over devices by JAX's rule; its addition must stay one, for which XLA calls a library."""
    with tagged(OFF):
        return stock(ctx, *operands, **parameters)


@functools.partial(
    jax.jit,
    static_argnames=("dimension_numbers", "precision", "preferred_element_type", "as_columns", ARRANGEMENT, "on_gpu"),
)
def _dot(lhs: jax.Array, rhs: jax.Array, **parameters: Any) -> jax.Array:
    """The product as a function of its own, which JAX lowers once for equal products."""
    return dot_general(lhs, rhs, **parameters)


def _product(call: Call) -> Sequence[Any]:
    options = {ARRANGEMENT: call.arrangement, "on_gpu": call.platform != "cpu"}
    ctx, values, parameters = look_through_transposes(call.ctx, call.operands, call.parameters)
    return traced(_dot, ctx, values, {**parameters, **options})


def _taken_out(call: Call) -> Sequence[Any]:
    function, parameters = without_region(call.name, _WITH_PROGRAMS[call.name], call.parameters, call.request)
    return traced(function, call.ctx, call.operands, parameters, call.primitive.multiple_results)


def _stable(call: Call) -> Sequence[Any]:
    return call.as_it_is(is_stable=True)


def _all_in_floats(dtypes: Dtypes) -> bool:
    return is_real(dtypes) and all(str(d) in FLOATS for d in dtypes)


def _has_no_order(dtypes: Dtypes) -> bool:
    return not has_an_order(dtypes)


def _has_total_order(dtypes: Dtypes) -> bool:
    return is_real(dtypes) and all(has_order(jnp.dtype(d)) for d in dtypes if jnp.issubdtype(d, jnp.floating))


def _in_floats_or_complex(dtypes: Dtypes) -> bool:
    return is_in_floats(dtypes) or is_complex(dtypes)


def _is_inexact(dtypes: Dtypes) -> bool:
    return not is_exact(dtypes)


register([*ORDERED, *COLLECTIVES, PRODUCTS], Rule(Kind.KEEP, INTEGER, dtypes=is_exact))
register(
    PRODUCTS,
    Rule(
        Kind.REPLACE,
        "products are added in the order of a contract (bijax.matmul)",
        lower=_product,
        uses=by_tracing(lambda _: dot_general),
        dtypes=_all_in_floats,
        looks_back=True,
    ),
)
for _name, (_, _why) in ORDERED.items():
    _dtypes = _has_total_order if _name in _EXTREMES else is_in_floats
    _uses = by_tracing(functools.partial(replacement, _name))
    register(_name, Rule(Kind.REPLACE, _why, lower=_replaced, uses=_uses, dtypes=_dtypes))
register(
    COLLECTIVES,
    Rule(Kind.REPLACE, _DEVICES, lower=_over_devices, uses=fixed(TreeContract()), dtypes=_in_floats_or_complex),
)
for _name, (_, _why) in RACING.items():
    _uses = by_tracing(functools.partial(replacement, _name))
    _rule = functools.partial(Rule, Kind.REPLACE, _why, lower=_replaced, uses=_uses)
    if _name == "scatter":
        register(_name, Rule(Kind.KEEP, ORDER_FREE, platform="cpu"))
        register(_name, _rule(platform="cuda"))
    else:
        register(_name, Rule(Kind.KEEP, ORDER_FREE, platform="cpu", dtypes=_has_no_order))
        register(_name, _rule(platform="cpu", dtypes=has_an_order))
        register(_name, Rule(Kind.KEEP, INTEGER, platform="cuda", dtypes=is_exact))
        register(_name, _rule(platform="cuda", dtypes=_is_inexact))
_OF_REGIONS: Final = {"reduce": fixed(PairContract()), "reduce_window": fixed(FoldContract("window"))}
for _name, _why in TAKEN_OUT.items():
    register(_name, Rule(Kind.REPLACE, _why, lower=_taken_out, uses=_OF_REGIONS.get(_name)))
register("sort", Rule(Kind.REPLACE, "a stable sort, whether the program requests one or not", lower=_stable))
