"""Rules for primitives that are left unchanged, with the evidence."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.transform.cpu import fences
from bijax.transform.rules.call import Call
from bijax.transform.rules.registry import Dtypes, Kind, Rule, is_complex, register
from pallas_kernels.parts.xla.join import of_matrices, would_be_nested

MOVES: Final = "moves or creates values; no arithmetic"
EXACT: Final = "each element is a correctly rounded function of its own operands, so neither order nor shape matters"
INTEGER: Final = "integer arithmetic is exact in any order"
ORDER_FREE: Final = "the result does not depend on the order of evaluation"
COUNTER: Final = "integer hash of the key and the flat position of the element (threefry, partitionable)"
EFFECT: Final = "computes no values"
OWN_CONTRACT: Final = "a kernel whose author fixed its blocks and its order; lowered as it is written"
COMPARED: Final = (
    "subnormal numbers are flushed to zero first: XLA:CPU compares them as zeros in some forms of a loop only"
)
NEGATED: Final = (
    "exact: the sign bit is flipped; LLVM may negate bfloat16 numbers in float32 and convert them back, which flushes"
    " subnormal numbers in whole vectors and not in the remainder of a loop"
)
APART: Final = (
    "exact; a gather of single elements gets a loop of its own, because XLA:CPU of jaxlib 0.12 generates wrong code if"
    " it shares a loop with indices shifted by one"
)

KEEP: Final[dict[str, str]] = {
    EXACT: "abs and bitcast_convert_type ceil clz complex conj eq eq_to floor from_edtype ge gt imag is_finite le le_to"
    " lt lt_to mulhi ne neg nextafter not or population_count real reduce_precision round select_n shift_left"
    " shift_right_arithmetic shift_right_logical sign to_edtype xor",
    MOVES: "all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_start all_to_all"
    " all_to_all_done all_to_all_start axis_index broadcast_in_dim broadcast_to copy copy_p"
    " device_put dim_as_value dimension_size dynamic_slice dynamic_update_slice empty empty2 gather iota"
    " layout_constraint lu_pivots_to_permutation name optimization_barrier pad pbroadcast pbroadcast_dynamic pin"
    " platform_index"
    " ppermute ppermute_done ppermute_start preduced pvary ragged_all_to_all reduced_vary_cast"
    " reduced_vary_cast_p relayout reshape reshard rev sharding_constraint slice split squeeze stack stage"
    " stop_gradient tie tile transpose unpin unstack vary_unreduced_cast vary_unreduced_cast_p"
    " with_memory_space_constraint xla_metadata_value",
    # tests/transform/test_keep.py
    ORDER_FREE: "argmax argmin pmax pmin reduce_and reduce_or reduce_xor top_k",
    EFFECT: "after_all check create_token dce_sink debug_callback debug_print inspect_sharding shape_assertion"
    " unreachable",
    OWN_CONTRACT: "bijax_triton_launch pallas_call triton_kernel_call",
}
"""Primitives by the evidence."""

COUNTERS: Final = (
    "iota_2x32_shape philox2x32 philox4x32 random_bits random_clone random_fold_in random_seed random_split"
    " random_unwrap random_wrap threefry2x32 threefry4x32"
)
"""Primitives of random numbers and keys."""

COMPARISONS: Final = "eq ge gt le lt ne"
"""Comparisons, which on the CPU compare floating numbers as arithmetic sees them."""


def has_subnormal_zeros(dtypes: Dtypes) -> bool:
    """Returns whether the values are floating numbers whose subnormal values XLA:CPU treats as zeros."""
    return not is_complex(dtypes) and any(str(d) in ("bfloat16", "float32", "float64") for d in dtypes)


def _compared(call: Call) -> Sequence[Any]:
    return call.stock(call.ctx, *map(fences.without_subnormal_numbers, call.operands), **call.parameters)


def _is_bfloat16(dtypes: Dtypes) -> bool:
    return all(str(d) == "bfloat16" for d in dtypes)


def _negated(call: Call) -> Sequence[Any]:
    def flipped(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
        return jax.lax.bitcast_convert_type(bits ^ jnp.uint16(0x8000), x.dtype)

    return call.traced(flipped)


def _apart(call: Call) -> Sequence[Any]:
    moved = call.as_it_is()
    is_single = all(n == 1 for n in call.parameters["slice_sizes"])
    return fences.alone(moved) if is_single else moved


def _as_matrices(call: Call) -> Sequence[Any]:
    """Lowers a concatenation of arrays as one of matrices, with the dimensions before the axis as rows.

    XLA:CPU would emit a loop nest, which is slow to compile.
    """
    is_nested = would_be_nested(call.ctx, call.parameters["dimension"])
    return call.traced(of_matrices) if is_nested else call.as_it_is()


def _follows_the_key_alone(dtypes: Dtypes) -> str:
    """Returns why a generator's numbers depend on more than key and position; empty if they do not."""
    kinds = {str(d) for d in dtypes if jnp.issubdtype(d, jax.dtypes.prng_key)}
    if kinds - {"key<fry>"}:
        return f"only keys of threefry2x32 give numbers that do not depend on the batch, got {', '.join(sorted(kinds))}"
    return ""


def _follows_no_shape(dtypes: Dtypes) -> str:
    """Returns why a generator's numbers depend on more than key and position, counting the array's shape."""
    if (why := _follows_the_key_alone(dtypes)) or jax.config.jax_threefry_partitionable:
        return why
    return (
        "with jax_threefry_partitionable off, the numbers depend on the shape of the whole array; turn it on, or"
        " draw every number with a key of its own (jax.random.fold_in)"
    )


for _evidence, _names in KEEP.items():
    register(_names, Rule(Kind.KEEP, _evidence))
for _name in (*COUNTERS.split(), "random_bits of one number", "random_split in two"):
    _why_not = _follows_no_shape if _name in ("random_bits", "random_split") else _follows_the_key_alone
    register([_name], Rule(Kind.KEEP, COUNTER, unless=_why_not))
register(["io_callback without results"], Rule(Kind.KEEP, EFFECT))
register(COMPARISONS, Rule(Kind.REPLACE, COMPARED, lower=_compared, platform="cpu", dtypes=has_subnormal_zeros))
register("neg", Rule(Kind.REPLACE, NEGATED, lower=_negated, platform="cpu", dtypes=_is_bfloat16, symbolic=True))
register("gather", Rule(Kind.REPLACE, APART, lower=_apart, platform="cpu", symbolic=True))
register("concatenate", Rule(Kind.KEEP, MOVES))
register("concatenate", Rule(Kind.KEEP, MOVES, lower=_as_matrices, platform="cpu"))
