"""Memory layouts on the CPU.

XLA:CPU gives a transposed array the layout of the array that it is made of, wherever it can. Where that meets a barrier
or the end of a program, it copies the array twice: once as it is, and once into the layout that is wanted, one element
at a time. A layout that is asked for right behind the transpose makes one pass of the two, by blocks.
"""

from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import batching, mlir
from jax.interpreters.mlir import ir

Value = Any

# Under its prefix `bijax.invariant` knows the primitives that it leaves as they are.
_row_major_p: Final = Primitive("bijax_row_major")

LAYOUT: Final = "LayoutConstraint"
"""The call that XLA replaces by the layout, or by a copy into it."""

_VERSION: Final = 1
"""Of the interface of custom calls: what JAX gives the calls that XLA replaces."""


def row_major(x: jax.Array) -> jax.Array:
    """Returns the array, which on a CPU lies in memory row by row from here on. Other platforms choose a layout.

    Example:
        >>> row_major(jax.numpy.ones((2, 3)).T).shape
        (3, 2)
    """
    if x.ndim < 2:
        return x
    return _row_major_p.bind(x)


def emit_row_major(value: Value) -> Value:
    """Returns the value with that layout in a program that is being lowered for a CPU."""
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
    # `jax.export` takes calls alone of which JAX promises that later versions know them.
    exported = ctx.module_context.lowering_parameters.for_export
    return [x if exported else emit_row_major(x)]


_row_major_p.def_impl(lambda x: x)
_row_major_p.def_abstract_eval(lambda x: x)
batching.defvectorized(_row_major_p)
mlir.register_lowering(_row_major_p, lambda _, x: [x])
mlir.register_lowering(_row_major_p, _lower_for_cpu, platform="cpu")
