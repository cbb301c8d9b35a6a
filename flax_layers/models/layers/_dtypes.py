"""The dtype in which a layer computes."""

from typing import Any

import jax
import jax.numpy as jnp


def dtype_of(dtype: Any, x: jax.Array, param_dtype: Any) -> Any:
    """Returns `dtype`, or the common one of x and parameters if that is None.

    Example:
        >>> dtype_of(None, jnp.ones(2, jnp.bfloat16), jnp.float32)
        dtype('float32')
    """
    return jnp.result_type(x, param_dtype) if dtype is None else jnp.dtype(dtype)


def check_float(op: str, name: str, dtype: Any) -> None:
    """Checks that models can compute in a dtype.

    Args:
        op: Name of the model's class, for the error.
        name: Name of the argument.
        dtype: A dtype, or its name.

    Raises:
        TypeError: If it is not a floating dtype of 16 bits or more.

    Example:
        >>> check_float("Llama", "dtype", "int8")
        Traceback (most recent call last):
            ...
        TypeError: Llama: dtype must be float32, bfloat16 or float16, got int8; quantise a model ...
    """
    found = jnp.dtype(dtype)
    if not jnp.issubdtype(found, jnp.floating) or found.itemsize == 1:
        raise TypeError(
            f"{op}: {name} must be float32, bfloat16 or float16, got {found.name}; quantise a model with"
            " flax_layers.convert."
        )


def promote(dtype: Any, *arrays: jax.Array | None) -> tuple[Any, ...]:
    """Returns the arrays in `dtype`, or in their common dtype if that is None; None stays None.

    Example:
        >>> [a.dtype.name for a in promote(None, jnp.ones(2, jnp.bfloat16), jnp.ones(2))]
        ['float32', 'float32']
    """
    common = jnp.result_type(*(a for a in arrays if a is not None)) if dtype is None else jnp.dtype(dtype)
    return tuple(None if a is None else a.astype(common) for a in arrays)
