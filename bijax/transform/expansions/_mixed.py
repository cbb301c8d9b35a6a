"""Products of integers, or of 8-bit floats, with a floating-point result."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

FLOATS: Final = ("float32", "bfloat16", "float16", "float64")
"""Dtypes that products support."""


def dot_general(lhs: jax.Array, rhs: jax.Array, *, preferred_element_type: Any = None, **parameters: Any) -> jax.Array:
    """Multiplies as `jax.lax.dot_general`, with operands converted to float32, or float64 if one is."""
    result = (
        _result_dtype(lhs.dtype, rhs.dtype) if preferred_element_type is None else jnp.dtype(preferred_element_type)
    )
    wide = any(d == jnp.float64 for d in (lhs.dtype, rhs.dtype, result))
    dtype = jnp.dtype(jnp.float64 if wide else jnp.float32)
    lhs, rhs = (x if x.dtype.name in FLOATS else x.astype(dtype) for x in (lhs, rhs))
    inner = result if result.name in FLOATS else dtype
    product: jax.Array = lax.dot_general_p.bind(lhs, rhs, preferred_element_type=inner, **parameters)
    return product.astype(result)


def _result_dtype(lhs: Any, rhs: Any) -> Any:
    """Returns the dtype of a product of two dtypes; unlike sums, products also take floats of 8 bits with others."""
    no_dimensions = (((), ()), ((), ()))
    shapes = (jax.ShapeDtypeStruct((), dtype) for dtype in (lhs, rhs))
    return jax.eval_shape(lambda x, y: lax.dot_general(x, y, no_dimensions), *shapes).dtype
