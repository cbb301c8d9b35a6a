"""Checks of attention's options: soft cap, sinks, slopes, and the scales of quantised caches."""

import math
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.core.checks import describe, float_array
from bijax.core.explicit_axes import gathered

QUANTISED: Final = ("int8", "float8_e4m3fn")
"""Dtypes of caches that need scales."""


def soft_cap(op: str, given: Any) -> float | None:
    """Returns the bound of the scores.

    Raises:
        TypeError: If it is neither None nor a known number.
        ValueError: If it is not positive and finite.
    """
    if given is None:
        return None
    if isinstance(given, jax.core.Tracer):
        raise TypeError(f"{op}: logits_soft_cap must be a Python number, got a traced value.")
    try:
        cap = float(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: logits_soft_cap must be a number or None, got {given!r}.") from error
    if not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"{op}: logits_soft_cap must be positive and finite, got {cap}; None stands for no cap.")
    return cap


def of_heads(op: str, name: str, given: Any, heads: int) -> jax.Array | None:
    """Returns numbers of the query heads as (1, N), or None.

    Raises:
        TypeError: If they are not an array of a supported floating type.
        ValueError: If their shape is not (N,).
    """
    if given is None:
        return None
    array = float_array(op, name, given)
    if array.shape != (heads,):
        raise ValueError(f"{op}: {name} must have the shape ({heads},) of the query heads, got {describe(array)}.")
    return array[None]


def keys_and_values(
    op: str, query: jax.Array, names: tuple[str, str], given: tuple[Any, Any], scales: tuple[Any, Any]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array | None, jax.Array | None]]:
    """Returns keys and values, and their scales (1, K, width of a head or 1) if they are quantised.

    Args:
        op: Name of the operation.
        query: The queries.
        names: Names of keys and values.
        given: The keys and values passed.
        scales: Scales, (K,) or (K, width of a head); their names are "key_scale" and "value_scale".

    Raises:
        TypeError: If dtypes are unsupported or differ.
        ValueError: If scales are missing, not needed, or have another shape.
    """
    arrays, factors = [], []
    for name, array, scale, scale_name in zip(names, given, scales, ("key_scale", "value_scale"), strict=True):
        found = stored_array(op, query, name, array, scale_name)
        arrays.append(found)
        factors.append(_factors(op, name, found, scale_name, scale))
    key, value = arrays
    if key.dtype != value.dtype:
        raise TypeError(
            f"{op}: {names[0]} and {names[1]} must share one dtype, got {describe(key)}, {describe(value)}."
        )
    return (key, value), (factors[0], factors[1])


def stored_array(op: str, query: jax.Array, name: str, given: Any, scale_name: str) -> jax.Array:
    """Returns an array that a cache may hold: of the dtype of the queries, or quantised.

    Args:
        op: Name of the operation.
        query: The queries.
        name: Name of the array.
        given: The array passed.
        scale_name: Name of its scales.

    Raises:
        TypeError: If its dtype is unsupported, or another than that of the queries.
    """
    if str(getattr(given, "dtype", "")) in QUANTISED:
        return gathered(jnp.asarray(given))
    found = float_array(op, name, given)
    if found.dtype != query.dtype:
        raise TypeError(
            f"{op}: the arguments must share one dtype, got query {describe(query)} and {name} {describe(found)};"
            f" convert them to a common one first. Only {' and '.join(QUANTISED)} may differ, with {scale_name}."
        )
    return found


def check_scale(op: str, name: str, array: jax.Array, scale_name: str, scale: Any) -> None:
    """Checks that there are scales of an array exactly if it is quantised.

    Raises:
        ValueError: If not.
    """
    if (scale is None) == (str(array.dtype) in QUANTISED):
        raise ValueError(
            f"{op}: {scale_name} is needed for {name} of {' or '.join(QUANTISED)} and belongs to no other, got"
            f" {'none' if scale is None else 'one'} with {name} {describe(array)}."
        )


def column_scales(op: str, name: str, scale: Any, columns: int) -> jax.Array:
    """Returns scales of latents, () or (columns,).

    Args:
        op: Name of the operation.
        name: Name of the array that they belong to.
        scale: The scales passed, whose name is "latent_scale".
        columns: Columns of the array.

    Raises:
        TypeError: If they have no floating dtype.
        ValueError: If they have another shape.
    """
    scales = float_array(op, "latent_scale", scale)
    if scales.shape not in ((), (columns,)):
        raise ValueError(
            f"{op}: latent_scale must have the shape (), or ({columns},) of the columns of {name}, got"
            f" {describe(scales)}."
        )
    return scales


def _factors(op: str, name: str, array: jax.Array, scale_name: str, scale: Any) -> jax.Array | None:
    check_scale(op, name, array, scale_name, scale)
    if scale is None:
        return None
    factors = float_array(op, scale_name, scale)
    heads = array.shape[-2:] if array.ndim >= 2 else ()
    if factors.shape not in (heads[:1], heads):
        raise ValueError(
            f"{op}: {scale_name} must have the shape ({heads[0]},) of the heads of {name}, or {heads} of heads and"
            f" channels, got {describe(factors)}."
            if heads
            else f"{op}: {name} must have heads and channels, got {describe(array)}."
        )
    return factors[None, :, None] if factors.ndim == 1 else factors[None]
