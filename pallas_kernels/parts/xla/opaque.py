"""A zero of which no compiler can know that it is zero.

A constant behind an optimization barrier is not enough: XLA:CPU makes one LLVM function of a small loop (its body and
all), in which constants are constants again. So the zero is made of the number of the replica, which the program is
told when it runs.
"""

import itertools
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

# Under its prefix `bijax.invariant` knows the primitives that it leaves as they are.
_opaque_zero_p: Final = Primitive("bijax_opaque_zero")


def opaque_zero() -> jax.Array:
    """Returns a zero that no rewrite can fold away, uint32 without axes.

    Example:
        >>> opaque_zero()
        Array(0, dtype=uint32)
    """
    return _opaque_zero_p.bind()


def apart_from_sums(product: jax.Array) -> jax.Array:
    """Returns a float32 product that no compiler contracts with a sum: its bits pass through an unknown zero."""
    bits = lax.bitcast_convert_type(product, jnp.uint32) | opaque_zero()
    return lax.bitcast_convert_type(bits, jnp.float32)


def emit_opaque_zero() -> Value:
    """Returns that zero in a program that is being lowered, an unsigned integer of 32 bits."""
    return _at_the_beginning()[1]


def emit_opaque_number() -> Value:
    """Returns a number below 2**31 of which no compiler knows more, as an unsigned integer of 32 bits."""
    return _at_the_beginning()[0]


def _at_the_beginning() -> tuple[Value, Value]:
    """Returns the number of the replica and the zero made of it, which stand once in a block, as its first operations.

    The barrier is behind the number and not behind the zero, which would be a kernel of its own there.
    """
    block = ir.InsertionPoint.current.block
    first = list(itertools.islice(block.operations, len(_ZERO)))
    if tuple(op.operation.name for op in first) == _ZERO:
        return first[1].results[0], first[-1].results[0]
    with ir.InsertionPoint.at_block_begin(block):
        number = hlo.OptimizationBarrierOp([hlo.replica_id()]).results[0]
        # There are far fewer than 2**24 replicas. Of a single bit LLVM would try both values, and compute with either.
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
