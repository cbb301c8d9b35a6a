"""What becomes of every primitive of JAX in a program that is made invariant.

Three tables: primitives that are kept as they are (with the evidence), primitives that are replaced, and primitives
that only hold other programs, into which the transform goes. A primitive in none of them is entered if its lowering is
JAX code (`_entered.py`), and refused otherwise; `_refused.py` has those of JAX that are refused, with the reasons.
"""

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.transform._refused import CUDNN_ATTENTION, HOLDING, REFUSED, cudnn_variant


class Kind(enum.Enum):
    """What is done with a primitive."""

    KEEP = "keep"
    REPLACE = "replace"
    RECURSE = "recurse"
    ENTER = "enter"
    REFUSE = "refuse"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is done with an operation, and why that is right.

    Attributes:
        kind: What is done.
        evidence: Why the result does not depend on the batch, or why it would.
        allowed: Whether it would be refused, for what its lowering holds beside JAX code, had the caller not let it
            pass.
    """

    kind: Kind
    evidence: str
    allowed: bool = False


MOVES: Final = "it moves or makes up values without computing"
EXACT: Final = "each element is a correctly rounded function of its own operands, so no order and no shape shows"
INTEGER: Final = "integer arithmetic is exact in any order"
ORDER_FREE: Final = "the result does not depend on the order in which values are met (tests/transform/test_keep.py)"
COUNTER: Final = "integer hashes of a key and a counter that follows the flat position (threefry, partitionable)"
EFFECT: Final = "it computes nothing"
HELD: Final = (
    "a fence behind it keeps XLA:GPU from contracting it, from dropping its rounding and from a second code generator"
    " (tests/gpu/test_programs_gpu.py)"
)
ENTERED: Final = "its lowering is JAX code, which is made invariant"
OWN_CONTRACT: Final = "a kernel whose blocks and order its author fixed; it is lowered as it is written"


def _each(evidence: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), evidence)


KEEP: Final[dict[str, str]] = {
    **_each(
        EXACT,
        "abs and bitcast_convert_type ceil clz complex conj eq eq_to floor from_edtype ge gt imag is_finite le le_to lt"
        " lt_to mulhi ne neg nextafter not or population_count real reduce_precision round select_n shift_left"
        " shift_right_arithmetic shift_right_logical sign to_edtype xor",
    ),
    **_each(
        MOVES,
        "all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_start all_to_all"
        " all_to_all_done all_to_all_start axis_index broadcast_in_dim broadcast_to concatenate copy copy_p"
        " device_put dim_as_value dimension_size dynamic_slice dynamic_update_slice empty empty2 gather iota"
        " layout_constraint lu_pivots_to_permutation name optimization_barrier pad pbroadcast pbroadcast_dynamic pin"
        " platform_index"
        " ppermute ppermute_done ppermute_start preduced pvary ragged_all_to_all reduced_vary_cast"
        " reduced_vary_cast_p relayout reshape reshard rev sharding_constraint slice split squeeze stack stage"
        " stop_gradient tie tile transpose unpin unstack vary_unreduced_cast vary_unreduced_cast_p"
        " with_memory_space_constraint xla_metadata_value",
    ),
    **_each(
        ORDER_FREE,
        "argmax argmin pmax pmin reduce_and reduce_or reduce_xor top_k",
    ),
    **_each(
        COUNTER,
        "iota_2x32_shape philox2x32 philox4x32 random_bits random_clone random_fold_in random_seed random_split"
        " random_unwrap random_wrap threefry2x32 threefry4x32",
    ),
    **_each(
        EFFECT,
        "after_all check create_token dce_sink debug_callback debug_print inspect_sharding shape_assertion unreachable",
    ),
    "io_callback without results": EFFECT,
    "random_bits of one number": COUNTER,
    "random_split in two": COUNTER,
    "pallas_call": OWN_CONTRACT,
}

FENCED: Final = {
    "mul": "a product is hidden from the sum that follows: LLVM would contract the two by the shape of the loop",
    "square": "as a product",
    "integer_pow": "as a product",
    "div": "the denominator is hidden, or XLA would multiply by the reciprocal of a broadcast value; and the quotient"
    " from a division that follows, or XLA would make one of the two",
    "one_minus_square": "as a product and a difference",
}
"""Element-wise primitives around which XLA:CPU's rewrites are stopped."""

VECTORS: Final = _each(
    "computed on whole vectors: XLA:CPU compiles the vector loop and its remainder differently",
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2"
    " expm1 igamma igamma_grad_a igammac lgamma log log1p log2 logistic polygamma polynomial pow"
    " rsqrt sin sinh tan tanh zeta",
)
"""Element-wise primitives that XLA:CPU computes by polynomials or iterations."""

ROUNDED: Final = frozenset(["add", "add_any", "convert_element_type", "rem", "sqrt", "sub"])
"""Element-wise primitives that XLA:CPU computes exactly wherever they stand, and XLA:GPU does not."""

COMPARED: Final = _each(
    "subnormal numbers are made zeros before: in some forms of a loop XLA:CPU compares them as zeros, in others not",
    "eq ge gt le lt ne",
)
"""Comparisons, which on the CPU see what arithmetic would make of floating numbers."""

WIDENED: Final = "hidden from the conversion back: without the two a subnormal number would not become zero"

NARROWED: Final = (
    "subnormal numbers are made zeros before: one instruction for it takes them for zeros, other code does not"
)

ALONE: Final = {
    "gather": "exact; one of single elements gets a loop of its own, since XLA:CPU of jaxlib 0.12 makes wrong code of"
    " one that shares a loop with its indices moved by one"
}
"""Primitives that move values, kept apart on the CPU."""

AS_MATRICES: Final = frozenset(["concatenate"])
"""Primitives that are kept, but reshaped on the CPU: what stands before the axis becomes rows, since XLA:CPU writes a
nest of loops otherwise, which compiles for long."""

STABLE: Final = {"sort": "equal keys stay in their order, whether the program asked for it or not"}
"""Primitives whose choice among equal values is fixed by a parameter."""

CHOOSING: Final = _each(
    "compared as integers of a total order: XLA:CPU keeps subnormal numbers in some forms of a loop and not in others",
    "clamp cummax cummin max min",
)
"""Primitives that choose the larger or smaller of two floating numbers, replaced on the CPU."""

RACING: Final = {
    "scatter": "where updates meet, the last one wins; XLA:GPU writes all at once",
    "scatter-max": "compared as integers of a total order, in which one zero is larger and one nan wins",
    "scatter-min": "compared as integers of a total order, in which one zero is larger and one nan wins",
}
"""Primitives whose updates XLA:CPU carries out one after the other, and XLA:GPU all at once, or by the shape."""

ORDERED: Final = {
    "dot_general": "products are added in the order of a contract (bijax.matmul)",
    "ragged_dot_general": "a row's products are added in the order of a contract, whatever the groups",
    "conv_general_dilated": "a convolution is a sum of invariant products",
    "reduce_sum": "a fixed tree of additions",
    "reduce_prod": "a fixed tree of products",
    "reduce_max": "a tree of comparisons that no library call can swallow with its neighbours",
    "reduce_min": "a tree of comparisons that no library call can swallow with its neighbours",
    "reduce_window_sum": "the elements of a window are added upwards",
    "reduce_window_max": "the elements of a window are compared upwards",
    "reduce_window_min": "the elements of a window are compared upwards",
    "select_and_scatter_add": "contributions to an element are added in the order of the windows",
    "select_and_gather_add": "the selected element of a window is found by comparisons alone",
    "cumsum": "blocks of fixed length and a chain of carries: an element depends on its prefix alone",
    "cumprod": "blocks of fixed length and a chain of carries: an element depends on its prefix alone",
    "cumlogsumexp": "blocks of fixed length and a chain of carries: an element depends on its prefix alone",
    "scatter-add": "updates of one element are added in the order of their indices",
    "scatter-sub": "updates of one element are subtracted in the order of their indices",
    "scatter-mul": "updates of one element are multiplied in the order of their indices",
    "psum": "the shards are added in the order of the devices",
    "psum_invariant": "the shards are added in the order of the devices",
    "reduce_scatter": "the shards are added in the order of the devices",
    **dict.fromkeys(
        CUDNN_ATTENTION, "cuDNN's attention: blocks of keys at absolute positions (bijax.dot_product_attention)"
    ),
}
"""Primitives that combine elements, replaced on every platform."""

TAKEN_OUT: Final = {
    "scatter_apply": "its function is taken out of XLA's scatter: gathered, applied as often as indices meet, written",
    "reduce": "its function is taken out of XLA's reduction, and applied by a fixed tree of neighbours",
    "reduce_window": "its function is taken out of XLA's reduction, and applied upwards in each window",
}
"""Operations that carry a program of the user's, which becomes a part of the program around."""

_LAPACK: Final = "LAPACK for small matrices on a CPU, one in each call; otherwise written out"
EXPANDED: Final = {
    **_each(
        f"{_LAPACK} with operations of one matrix, column by column and block by block, each of them invariant",
        "cholesky geqrf householder_product lu qr",
    ),
    "tridiagonal_solve": "written out row by row, each of them from the one before",
    **_each(f"{_LAPACK} as rotations of pairs of columns, in an order that the length fixes", "eigh svd"),
    "triangular_solve": "written out with operations of one matrix, column by column and block by block, each of them"
    " invariant",
    "fft": "written out as products with the matrices of short transforms, which the length fixes",
}
"""Operations that are written out as others of JAX, which are made invariant in their turn (`expansions`)."""

BY_PARTS: Final = "complex numbers: written out as operations on real and imaginary parts"
COMPLEX: Final = _each(
    BY_PARTS,
    "abs add add_any conv_general_dilated convert_element_type cos cosh cumprod cumsum div dot_general eq exp exp2"
    " expm1 integer_pow log log1p log2 logistic mul ne one_minus_square pow reduce_prod reduce_sum reduce_window_sum"
    " rsqrt scatter-add scatter-mul scatter-sub sign sin sinh sqrt square sub tan tanh",
)
"""Operations on complex numbers that are written out."""

CONVERTED: Final = "the operands are converted to float32 before, or to float64, and then multiplied as floats are"

IN_REGIONS: Final = {
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"), ("update_jaxpr",)),
    **dict.fromkeys(("scatter-sub", "scatter_apply"), ("update_jaxpr",)),
    **dict.fromkeys(("reduce", "reduce_window"), ("jaxpr",)),
    "select_and_scatter": ("select_jaxpr", "scatter_jaxpr"),
}
"""Parameters that hold programs which are lowered into a region of one instruction."""

RECURSE: Final = frozenset(
    _each(
        "",
        "call closed_call composite cond core_call custom_jvp_call custom_lin custom_linear_solve custom_vjp_call"
        " custom_vmap_call eval_jaxpr jit linear_call random_gamma regularized_incomplete_beta remat2 remat_opt"
        " run_state scan shard_map while xla_metadata_call",
    )
)
"""Primitives that hold programs."""

_NO_COMPLEX: Final = (
    "no invariant form for complex numbers; write it with their real and imaginary parts, or with exp and log"
)

_FLOATS: Final = ("float32", "bfloat16", "float16", "float64")

PLATFORMS: Final = ("cpu", "cuda")
"""Platforms for which there are replacements."""


@functools.cache
def named() -> frozenset[str]:
    """Returns the names of all operations that the tables have."""
    replaced = (FENCED, VECTORS, ROUNDED, COMPARED, ALONE, STABLE, CHOOSING, RACING, ORDERED)
    tables = (KEEP, *replaced, TAKEN_OUT, EXPANDED, RECURSE, REFUSED)
    return frozenset(name for table in tables for name in table)


def is_known(name: str) -> bool:
    """Returns whether a table has a primitive, or it is a kernel of bijax."""
    return name in named() or name.startswith("bijax_")


def may_be_allowed(name: str) -> bool:
    """Returns whether it can be right to let a primitive pass that was refused.

    What is made invariant for other operands would then follow the batch, and so would all of a program that is held.
    """
    return name not in HOLDING and (name in REFUSED or not is_known(name))


def table_name(name: str, parameters: Mapping[str, Any], operands: Sequence[Any] = ()) -> str:
    """Returns under which name the tables have an operation.

    It is that of its primitive, but for `scatter_apply`, for callbacks without results, for numbers and keys whose
    count no batch changes, and for calls of cuDNN's attention that are not replaced.

    Args:
        name: Name of the primitive.
        parameters: Its parameters.
        operands: Abstract values of its operands.
    """
    if name == "scatter" and parameters.get("update_jaxpr") is not None:
        return "scatter_apply"
    if name == "io_callback" and not parameters.get("result_avals", (name,)):
        return "io_callback without results"
    if name == "random_bits" and parameters.get("shape") == ():
        return "random_bits of one number"
    if name == "random_split" and parameters.get("shape") == (2,):
        return "random_split in two"
    variant = cudnn_variant(parameters, operands) if name in CUDNN_ATTENTION else ""
    return f"{name} {variant}" if variant else name


def verdict(name: str, dtypes: tuple[Any, ...], platform: str, allowed: tuple[str, ...] = ()) -> Verdict:
    """Returns what is done with a primitive.

    Args:
        name: Name of the primitive, or what `table_name` says.
        dtypes: Dtypes of its operands and results that have one.
        platform: Platform that is lowered for, one of `PLATFORMS`.
        allowed: Names that the caller lets pass.
    """
    if name in RECURSE:
        return Verdict(Kind.RECURSE, "its programs are made invariant")
    if name.startswith("bijax_"):
        return Verdict(Kind.KEEP, "a kernel of bijax")
    if KEEP.get(name) == COUNTER and (why := _follows_the_shape(name, dtypes)):
        return _refused_or_allowed(name, why, allowed)
    if name in EXPANDED:
        return Verdict(Kind.REPLACE, EXPANDED[name])
    is_complex = any(jnp.issubdtype(d, jnp.complexfloating) for d in dtypes)
    if is_complex and name in COMPLEX and not (platform == "cpu" and name in ROUNDED):
        return Verdict(Kind.REPLACE, COMPLEX[name])
    if name in ROUNDED:
        if platform != "cpu" and any(jnp.issubdtype(d, jnp.floating) for d in dtypes):
            return Verdict(Kind.REPLACE, HELD)
        if platform == "cpu" and name == "convert_element_type" and _widens_to_float64(dtypes):
            return Verdict(Kind.REPLACE, WIDENED)
        if platform == "cpu" and name == "convert_element_type" and narrows_to_bfloat16(dtypes):
            return Verdict(Kind.REPLACE, NARROWED)
        return Verdict(Kind.KEEP, EXACT)
    if name in COMPARED and platform == "cpu" and _has_subnormal_zeros(dtypes):
        return Verdict(Kind.REPLACE, COMPARED[name])
    if name in ALONE and platform == "cpu":
        return Verdict(Kind.REPLACE, ALONE[name])
    if name in KEEP:
        return Verdict(Kind.KEEP, KEEP[name])
    computed = name in FENCED or name in VECTORS or name in ORDERED
    if computed and not any(jnp.issubdtype(d, jnp.inexact) for d in dtypes):
        return Verdict(Kind.KEEP, INTEGER)
    if computed and is_complex:
        return _refused_or_allowed(name, _NO_COMPLEX, allowed)
    if name == "dot_general" and any(str(d) not in _FLOATS for d in dtypes):
        return Verdict(Kind.REPLACE, CONVERTED)
    if name in FENCED or name in VECTORS:
        return Verdict(Kind.REPLACE, HELD if platform != "cpu" else FENCED.get(name) or VECTORS[name])
    if name in CHOOSING and platform == "cpu" and _has_an_order(dtypes):
        return Verdict(Kind.REPLACE, CHOOSING[name])
    if name in RACING:
        if platform == "cpu" and (name == "scatter" or not _has_an_order(dtypes)):
            return Verdict(Kind.KEEP, ORDER_FREE)
        if name != "scatter" and not any(jnp.issubdtype(d, jnp.inexact) for d in dtypes):
            return Verdict(Kind.KEEP, INTEGER)
        return Verdict(Kind.REPLACE, RACING[name])
    if name in CHOOSING:
        return Verdict(Kind.KEEP, ORDER_FREE if name.startswith("cum") else EXACT)
    if name in STABLE or name in TAKEN_OUT:
        return Verdict(Kind.REPLACE, STABLE.get(name) or TAKEN_OUT[name])
    if name in ORDERED:
        if missing := _without_kernel(name, dtypes):
            return _refused_or_allowed(name, missing, allowed)
        return Verdict(Kind.REPLACE, ORDERED[name])
    if name.partition(" ")[0] in allowed:
        return Verdict(
            Kind.ENTER, f"allowed by the caller; {REFUSED.get(name, 'nothing is known of it')}", allowed=True
        )
    if name in REFUSED:
        return Verdict(Kind.REFUSE, REFUSED[name])
    return Verdict(Kind.ENTER, ENTERED)


def _without_kernel(name: str, dtypes: tuple[Any, ...]) -> str:
    """Returns why there is no kernel for these dtypes; nothing if there is one."""
    others = sorted({str(d) for d in dtypes if jnp.issubdtype(d, jnp.floating) and str(d) not in _FLOATS})
    if others and name not in ("reduce_max", "reduce_min"):
        return f"no invariant form for {', '.join(others)}; convert to float32 before"
    return ""


def _widens_to_float64(dtypes: tuple[Any, ...]) -> bool:
    """Returns whether a conversion makes float64 of shorter floating numbers."""
    # The others lose no bit that an instruction would make zero, or cannot be taken back.
    operand, result = dtypes[0], dtypes[-1]
    return bool(result == jnp.float64 and jnp.issubdtype(operand, jnp.floating) and operand != jnp.float64)


def narrows_to_bfloat16(dtypes: tuple[Any, ...]) -> bool:
    """Returns whether a conversion makes bfloat16 of numbers that may be subnormal."""
    return str(dtypes[-1]) == "bfloat16" and str(dtypes[0]) in ("float32", "float64")


def _has_subnormal_zeros(dtypes: tuple[Any, ...]) -> bool:
    """Returns whether the values are floating numbers whose subnormal ones XLA:CPU computes as zeros."""
    return any(jnp.dtype(d).name in ("bfloat16", "float32", "float64") for d in dtypes)


def _has_an_order(dtypes: tuple[Any, ...]) -> bool:
    """Returns whether the values are floating numbers for which there is an order of integers."""
    return any(jnp.issubdtype(d, jnp.floating) and jnp.dtype(d).name in _FLOATS for d in dtypes)


def _follows_the_shape(name: str, dtypes: tuple[Any, ...]) -> str:
    """Returns why a generator's numbers depend on more than key and position; nothing if they do not."""
    kinds = {str(d) for d in dtypes if jnp.issubdtype(d, jax.dtypes.prng_key)}
    if kinds - {"key<fry>"}:
        return f"only keys of threefry2x32 give numbers that do not depend on the batch, got {', '.join(sorted(kinds))}"
    if name in ("random_bits", "random_split") and not jax.config.jax_threefry_partitionable:
        return (
            "with jax_threefry_partitionable off, the numbers depend on the shape of the whole array; turn it on, or"
            " draw every number with a key of its own (jax.random.fold_in)"
        )
    return ""


def _refused_or_allowed(name: str, why: str, allowed: tuple[str, ...]) -> Verdict:
    if name.partition(" ")[0] in allowed:
        return Verdict(Kind.KEEP, f"allowed by the caller; {why}", allowed=True)
    return Verdict(Kind.REFUSE, why)
