"""A product's `precision` as one word."""

import functools
from typing import Any

import jax
from jax import lax

_STRICTNESS = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)


def precision_name(precision: Any) -> str:
    """Returns 'default', 'high' or 'highest', or the name of a `jax.lax.DotAlgorithmPreset` in lower case.

    Args:
        precision: Anything that `jax.lax.dot_general` takes. None is JAX's own setting
            (`jax.default_matmul_precision`), and of two different ones the stricter is used. A `DotAlgorithm` that
            is not a preset counts as 'highest'.

    Raises:
        TypeError, ValueError: If `jax.lax.dot_general` refuses it.

    Example:
        >>> precision_name(None), precision_name("float32"), precision_name(lax.DotAlgorithmPreset.TF32_TF32_F32)
        ('default', 'highest', 'tf32_tf32_f32')
    """
    # JAX accepts a list as a pair.
    return _name(
        tuple(precision) if isinstance(precision, list) else precision, jax.config.jax_default_matmul_precision
    )


@functools.cache
def _name(precision: Any, _default: str | None) -> str:
    one = jax.ShapeDtypeStruct((1, 1), "float32")
    traced = jax.make_jaxpr(lambda a: lax.dot(a, a, precision=precision))(one).eqns[0].params["precision"]
    if isinstance(traced, lax.DotAlgorithmPreset):
        return str(traced.name.lower())
    if isinstance(traced, lax.DotAlgorithm):
        return "highest"
    return max(traced or _STRICTNESS[:1], key=_STRICTNESS.index).name.lower()
