"""Memory layouts on the CPU.

XLA:CPU gives a transposed array the layout of its operand where possible. At a barrier or at the end of a program it
then copies the array twice: once in the same layout, and once into the required layout, element by element. A layout
constraint directly after the transpose replaces both copies by one blocked pass.
"""

from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import batching, mlir
from jax.interpreters.mlir import ir

Value = Any

# `bijax.invariant` leaves primitives with this prefix unchanged.
_row_major_p: Final = Primitive("bijax_row_major")

LAYOUT: Final = "LayoutConstraint"
"""The custom call that XLA replaces by the layout, or by a copy into it."""

_VERSION: Final = 1
"""API version of custom calls that XLA replaces, as JAX uses."""


def row_major(x: jax.Array) -> jax.Array:
    """Returns the array, constrained to a row-major layout on a CPU. Other platforms choose the layout.

    Example:
        >>> row_major(jax.numpy.ones((2, 3)).T).shape
        (3, 2)
    """
    if x.ndim < 2:
        return x
    return _row_major_p.bind(x)


def emit_row_major(value: Value) -> Value:
    """Emits the layout constraint while lowering for a CPU."""
    rank = ir.RankedTensorType(value.type).rank
    last_first = np.arange(rank)[::-1].copy()
    layouts = ir.ArrayAttr.get([ir.DenseIntElementsAttr.get(last_first, type=ir.IndexType.get())])
    call = hlo.CustomCallOp(
        [value.type],
        [value],
        call_target_name=ir.StringAttr.get(LAYOUT),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _VERSION),
        operand_layouts=layouts,
        result_layouts=layouts,
    )
    return call.results[0]


def _lower_for_cpu(ctx: mlir.LoweringRuleContext, x: Value) -> list[Value]:
    # `jax.export` only accepts custom calls with a compatibility guarantee.
    exported = ctx.module_context.lowering_parameters.for_export
    return [x if exported else emit_row_major(x)]


_row_major_p.def_impl(lambda x: x)
_row_major_p.def_abstract_eval(lambda x: x)
batching.defvectorized(_row_major_p)
mlir.register_lowering(_row_major_p, lambda _, x: [x])
mlir.register_lowering(_row_major_p, _lower_for_cpu, platform="cpu")
