"""A zero that no compiler can prove to be zero.

A constant after an optimization barrier is not enough: XLA:CPU compiles a small loop, body included, to one LLVM
function, in which the constant is visible again. So the zero is computed from the replica id, which is only known at
run time.
"""

import itertools
from collections.abc import Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

Value = Any

_ZERO: Final = tuple(
    f"stablehlo.{name}" for name in ("replica_id", "optimization_barrier", "constant", "shift_right_logical")
)

_BITS: Final = {"float32": jnp.uint32, "float64": jnp.uint64}
"""Types of products that could be contracted with sums, and of their bits."""

_UNROLLED: Final = 2**12
"""More elements than LLVM unrolls a loop over; where it does not, products go through memory."""


# `bijax.invariant` leaves primitives with this prefix unchanged.
_opaque_zero_p: Final = Primitive("bijax_opaque_zero")


def opaque_zero() -> jax.Array:
    """Returns a uint32 scalar zero that no rewrite can fold away.

    Example:
        >>> opaque_zero()
        Array(0, dtype=uint32)
    """
    return _opaque_zero_p.bind()


def apart_from_sums(product: jax.Array) -> jax.Array:
    """Returns a product that no compiler contracts with a sum: its bits pass through an unknown zero.

    Args:
        product: float32 or float64.
    """
    integer = _BITS[product.dtype.name]
    bits = lax.bitcast_convert_type(product, integer) | opaque_zero().astype(integer)
    return lax.bitcast_convert_type(bits, product.dtype)


def apart_in_loops(results: Iterable[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the results of a kernel, products among them hidden where a loop around the kernel could be one function.

    In such a loop LLVM contracts a product at the end of a kernel and a sum after it, across the barrier between them,
    if it unrolls both.

    Args:
        results: Arrays of any dtypes; those of 16 bits were rounded, which nothing is contracted with.
    """
    return tuple(apart_from_sums(x) if x.dtype.name in _BITS and x.size <= _UNROLLED else x for x in results)


def emit_opaque_zero() -> Value:
    """Emits the zero during lowering, as a uint32 scalar."""
    return _at_the_beginning()[1]


def emit_opaque_number() -> Value:
    """Emits a number that compilers only know to be below 2**31, as a uint32 scalar."""
    return _at_the_beginning()[0]


def _at_the_beginning() -> tuple[Value, Value]:
    """Returns the replica id and the zero computed from it, emitted once per block as its first operations.

    The barrier follows the id, not the zero, which would otherwise become a separate kernel.
    """
    block = ir.InsertionPoint.current.block
    first = list(itertools.islice(block.operations, len(_ZERO)))
    if tuple(op.operation.name for op in first) == _ZERO:
        return first[1].results[0], first[-1].results[0]
    with ir.InsertionPoint.at_block_begin(block):
        number = hlo.OptimizationBarrierOp([hlo.replica_id()]).results[0]
        # There are far fewer than 2**24 replicas. For a single bit, LLVM would specialise the code for both values.
        return number, hlo.shift_right_logical(number, mlir.ir_constant(np.uint32(24)))


_compiled: Final = jax.jit(opaque_zero)


def _evaluate() -> jax.Array:
    # Compiled under jax.disable_jit too: there is no other way to run it.
    with jax.disable_jit(False):
        zero: jax.Array = _compiled()
    return zero


def _abstract() -> jax.core.ShapedArray:
    return jax.core.ShapedArray((), np.dtype(np.uint32))


def _lower(_: Any) -> list[Value]:
    return [emit_opaque_zero()]


_opaque_zero_p.def_impl(_evaluate)
_opaque_zero_p.def_abstract_eval(_abstract)
mlir.register_lowering(_opaque_zero_p, _lower)
