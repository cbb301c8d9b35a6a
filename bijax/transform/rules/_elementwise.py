"""Rules for element-wise primitives, whose code in XLA depends on shapes and neighbours."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.tag import kernel_code
from bijax.lax.extremes import clamp, cummax, cummin, maximum, minimum
from bijax.lax.flat import on_vectors
from bijax.transform.cpu import fences
from bijax.transform.gpu import fences as gpu_fences
from bijax.transform.hook._jax_private import Context
from bijax.transform.hook._jax_private import Rule as Stock
from bijax.transform.rules._kept import EXACT, INTEGER, ORDER_FREE, has_subnormal_zeros
from bijax.transform.rules.call import Call, traced
from bijax.transform.rules.registry import FLOATS, Dtypes, Kind, Rule, is_exact, is_in_floats, is_real, register
from bijax.transform.rules.uses import fixed
from bijax.transform.rules.values import repeated
from pallas_kernels.contract import XLA_FUNCTIONS
from pallas_kernels.parts.xla.opaque import apart_from_sums

HELD: Final = (
    "a fence after it keeps XLA:GPU from contracting it, from dropping its rounding and from using another code"
    " generator"
)

FENCED: Final = {
    "mul": "the product is hidden from a following sum: LLVM would contract the two depending on the shape of the loop",
    "square": "treated as a product",
    "integer_pow": "treated as a product",
    "div": "the denominator is hidden, because XLA would multiply by the reciprocal of a broadcast value; so is the"
    " quotient, because XLA would merge it with a following division",
    "one_minus_square": "treated as a product and a difference",
    "sqrt": "hidden from a following product: XLA would make its argument of the square of a root",
}
"""Primitives around which XLA:CPU's rewrites are stopped."""

_VECTORS: Final = (
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2"
    " expm1 igamma igamma_grad_a igammac lgamma log log1p log2 logistic polygamma polynomial pow"
    " rsqrt sin sinh tan tanh zeta"
)
VECTORS: Final = frozenset(_VECTORS.split())
"""Primitives that XLA:CPU computes by polynomials or iterations."""

ON_VECTORS: Final = "computed on whole vectors: XLA:CPU compiles the vector loop and its remainder differently"

ROUNDED: Final = frozenset(["add", "add_any", "convert_element_type", "rem", "sub"])
"""Primitives that XLA:CPU computes exactly in any context but in 16 bits, and XLA:GPU does not."""

ELEMENTWISE: Final = frozenset({*FENCED, *VECTORS, *ROUNDED})
"""Primitives that get fences in a program for a GPU, in the code of kernels too."""

ROUNDING: Final = "hidden: XLA:CPU would leave out the rounding to 16 bits where a conversion to float32 follows"

WIDENED: Final = "hidden from the conversion back: XLA would remove both, and subnormal numbers would stay"

NARROWED: Final = (
    "subnormal numbers are flushed to zero first: one instruction for the conversion does so, other code does not"
)

TESTED: Final = (
    "subnormal numbers are flushed to zero first: where LLVM sees how a number is made, it compares its bits with zero"
)

TWICE_ROUNDED: Final = "rounded to float32 first, as XLA:CPU does at run time: at compile time it rounds constants once"

CHOOSING: Final[dict[str, Callable[..., jax.Array]]] = {
    "clamp": clamp,
    "cummax": cummax,
    "cummin": cummin,
    "max": maximum,
    "min": minimum,
}
"""Primitives that choose the larger or smaller of two floating numbers, with their replacements on the CPU."""

CHOSEN: Final = "compared as integers in a total order: XLA:CPU keeps subnormal numbers in some forms of a loop only"


def hold(name: str, stock: Stock, ctx: Context, *operands: Any, **parameters: Any) -> Sequence[Any]:
    """Lowers an element-wise primitive for a GPU.

    Args:
        name: Name of the primitive.
        stock: JAX's own rule.
        ctx: Context of the rule.
        *operands: The operands.
        **parameters: Parameters of the primitive.
    """
    if name in _SPELT_OUT:
        return traced(_SPELT_OUT[name], ctx, operands, parameters)
    # A rule that traces a program is fenced inside too, as kernel code.
    with kernel_code():
        return gpu_fences.fenced(name, stock, ctx, operands, parameters)


def has_an_order(dtypes: Dtypes) -> bool:
    """Returns whether the values are floating numbers with an order as integers."""
    return any(jnp.issubdtype(d, jnp.floating) and jnp.dtype(d).name in FLOATS for d in dtypes)


def _held(call: Call) -> Sequence[Any]:
    return hold(call.name, call.stock, call.ctx, *call.operands, **call.parameters)


def _product(call: Call) -> Sequence[Any]:
    (product,) = call.stock(call.ctx, *call.operands, **call.parameters)
    return [fences.fence_product(product)]


def _quotient(call: Call) -> Sequence[Any]:
    (out,) = call.ctx.avals_out
    numerator, denominator = (repeated(x, out.shape) for x in call.operands)
    hidden = fences.hide(denominator)
    (quotient,) = call.stock(call.ctx.replace(avals_in=[out, out]), numerator, hidden, **call.parameters)
    return [fences.hide(quotient)]


def _one_minus_square(call: Call) -> Sequence[Any]:
    return call.traced(_one_minus_fenced_square)


def _one_minus_fenced_square(x: jax.Array, **_: Any) -> jax.Array:
    (square,) = jax.lax.optimization_barrier((x * x,))
    return 1 - square


def _vectors(call: Call) -> Sequence[Any]:
    return call.traced(functools.partial(on_vectors, call.primitive))


def _flushed(call: Call) -> Sequence[Any]:
    return call.stock(call.ctx, fences.without_subnormal_numbers(call.operands[0]), **call.parameters)


def _twice_rounded(call: Call) -> Sequence[Any]:
    return call.traced(_through_float32)


def _through_float32(x: jax.Array, *, new_dtype: Any, **_: Any) -> jax.Array:
    return apart_from_sums(x.astype(jnp.float32)).astype(new_dtype)


def _log2(x: jax.Array, **_: Any) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, np.float32))
    quotient: jax.Array = jax.lax.log(wide) / wide.dtype.type(np.log(2))
    return quotient.astype(x.dtype)


_SPELT_OUT: Final[dict[str, Callable[..., jax.Array]]] = {"log2": _log2, "one_minus_square": lambda x, **_: 1 - x * x}
"""Operations that these rules emit at once, each of which is fenced separately."""


def _rounds_to_16_bits(dtypes: Dtypes) -> bool:
    """Returns whether a result is a floating number of 16 bits."""
    return str(dtypes[-1]) in ("bfloat16", "float16")


def _widens_to_float64(dtypes: Dtypes) -> bool:
    """Returns whether a conversion widens shorter floating numbers to float64."""
    # The others lose no bit that an instruction would flush to zero, or are irreversible.
    operand, result = dtypes[0], dtypes[-1]
    return bool(result == jnp.float64 and jnp.issubdtype(operand, jnp.floating) and operand != jnp.float64)


def _narrows_to_bfloat16(dtypes: Dtypes) -> bool:
    """Returns whether a conversion narrows numbers that may be subnormal to bfloat16."""
    return str(dtypes[-1]) == "bfloat16" and str(dtypes[0]) in ("float32", "float64")


def _tests_for_zero(dtypes: Dtypes) -> bool:
    """Returns whether a conversion compares floating numbers that may be subnormal with zero."""
    return str(dtypes[-1]) == "bool" and has_subnormal_zeros(dtypes[:1])


def _narrows_integers(dtypes: Dtypes) -> bool:
    """Returns whether a conversion rounds integers that float32 may not hold to bfloat16."""
    return str(dtypes[-1]) == "bfloat16" and is_exact(dtypes[:1]) and dtypes[0].itemsize > 2


_FUNCTION: Final = fixed(XLA_FUNCTIONS)

for _name, _why in FENCED.items():
    _lower = {"div": _quotient, "one_minus_square": _one_minus_square}.get(_name, _product)
    register(_name, Rule(Kind.KEEP, INTEGER, dtypes=is_exact))
    register(_name, Rule(Kind.REPLACE, _why, lower=_lower, platform="cpu", dtypes=is_real))
    register(_name, Rule(Kind.REPLACE, HELD, lower=_held, platform="cuda", dtypes=is_real))
register(VECTORS, Rule(Kind.KEEP, INTEGER, dtypes=is_exact))
register(VECTORS, Rule(Kind.REPLACE, ON_VECTORS, lower=_vectors, uses=_FUNCTION, platform="cpu", dtypes=is_in_floats))
register(VECTORS, Rule(Kind.REPLACE, HELD, lower=_held, uses=_FUNCTION, platform="cuda", dtypes=is_real))
register(ROUNDED, Rule(Kind.KEEP, EXACT))
register(ROUNDED, Rule(Kind.REPLACE, HELD, lower=_held, platform="cuda", dtypes=is_real))
_CONVERSION: Final = "convert_element_type"
register(
    ROUNDED - {_CONVERSION},
    Rule(Kind.REPLACE, ROUNDING, lower=_product, platform="cpu", dtypes=_rounds_to_16_bits),
)
register(_CONVERSION, Rule(Kind.REPLACE, WIDENED, lower=_product, platform="cpu", dtypes=_widens_to_float64))
register(
    _CONVERSION,
    Rule(Kind.REPLACE, NARROWED, lower=_flushed, platform="cpu", dtypes=_narrows_to_bfloat16, looks_back=True),
)
register(
    _CONVERSION,
    Rule(Kind.REPLACE, TESTED, lower=_flushed, platform="cpu", dtypes=_tests_for_zero, looks_back=True),
)
register(
    _CONVERSION,
    Rule(Kind.REPLACE, TWICE_ROUNDED, lower=_twice_rounded, platform="cpu", dtypes=_narrows_integers, symbolic=True),
)
for _name, _function in CHOOSING.items():
    register(_name, Rule(Kind.KEEP, ORDER_FREE if _name.startswith("cum") else EXACT))
    _chosen = functools.partial(Call.traced, function=_function)
    register(_name, Rule(Kind.REPLACE, CHOSEN, lower=_chosen, platform="cpu", dtypes=has_an_order))
