"""The accumulator dtype of sums and products."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.errors import UnsupportedError

_ACCUMULATORS = {"float32": "float32", "bfloat16": "float32", "float16": "float32", "float64": "float64"}


def accumulator(op: str, dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which operands of `dtype` are added or multiplied: float32, or float64 for float64.

    Args:
        op: Name of the operation, for the message.
        dtype: Dtype of the operands.

    Raises:
        UnsupportedError: If no order of additions is defined for this dtype.

    Example:
        >>> accumulator("reduce_sum", jnp.bfloat16).name
        'float32'
    """
    name = jnp.dtype(dtype).name
    if name not in _ACCUMULATORS:
        raise UnsupportedError(
            f"{op}: a batch-invariant order is defined for {', '.join(_ACCUMULATORS)}, got {name};"
            " convert the operands to one of these, or exclude the operation from the invariant part of the program."
        )
    return np.dtype(_ACCUMULATORS[name])
