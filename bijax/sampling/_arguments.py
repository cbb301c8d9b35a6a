"""Reading the arguments of `sample`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import as_array, describe, float_array, integer_array
from bijax.sampling._filters import Filters
from bijax.sampling._penalties import Penalties

OP = "bijax.sampling.sample"
_RANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "temperature": (lambda x: x >= 0, "at least 0"),
    "top_k": (lambda x: x >= 0, "at least 0"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "above 0 and at most 1"),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "from 0 to 1"),
    "repetition_penalty": (lambda x: x > 0, "above 0"),
    "frequency_penalty": (np.isfinite, "finite"),
    "presence_penalty": (np.isfinite, "finite"),
    "positions": (lambda x: x >= 0, "at least 0"),
}
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_KINDS: dict[str, tuple[Any, ...]] = {
    "bool": (jnp.bool_,),
    "integer": (jnp.integer,),
    "number": (jnp.integer, jnp.floating),
}


class Request(NamedTuple):
    """The arguments of `sample` as arrays of fixed dtypes, numbers as (R,)."""

    logits: jax.Array
    seeds: jax.Array
    positions: jax.Array
    temperature: jax.Array
    filters: Filters
    penalties: Penalties | None
    bias: jax.Array | None
    allowed: jax.Array | None


def read_request(
    logits: Any,
    *,
    seeds: Any,
    positions: Any,
    temperature: Any,
    filters: dict[str, Any],
    penalties: dict[str, Any],
    prompt_mask: Any,
    output_counts: Any,
    logit_bias: Any,
    allowed: Any,
    num_top: int,
) -> Request:
    """Checks and converts what `sample` is called with.

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If a shape does not fit, a known value is out of range, or something is missing.
    """
    x = float_array(OP, "logits", logits)
    if x.ndim != 2 or x.shape[1] < 1:
        raise ValueError(f"{OP}: logits must have the shape (rows, vocabulary), got {describe(x)}.")
    if isinstance(num_top, bool) or not isinstance(num_top, int) or not 0 <= num_top <= x.shape[1]:
        raise ValueError(f"{OP}: num_top must be an integer from 0 to {x.shape[1]}, the vocabulary, got {num_top!r}.")
    rows = x.shape[0]
    cuts = {
        name: None if value is None else _numbers(name, value, rows, jnp.int32 if name == "top_k" else jnp.float32)
        for name, value in filters.items()
    }
    given = {name: value for name, value in penalties.items() if value is not None}
    found = None
    if given:
        if output_counts is None:
            raise ValueError(f"{OP}: {', '.join(given)} needs output_counts, the tokens of the output, got none.")
        if "repetition_penalty" in given and prompt_mask is None:
            raise ValueError(f"{OP}: repetition_penalty needs prompt_mask, the tokens of the prompt, got none.")
        neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
        repetition, frequency, presence = (_numbers(n, given.get(n, neutral[n]), rows, jnp.float32) for n in neutral)
        mask = np.zeros((1, 1), bool) if prompt_mask is None else _table("prompt_mask", prompt_mask, x, "bool")
        counts = _table("output_counts", output_counts, x, "integer")
        in_prompt = jnp.broadcast_to(mask, x.shape)
        found = Penalties(repetition, frequency, presence, in_prompt, counts.astype(jnp.int32))
    return Request(
        x.astype(jnp.float32),
        _seeds(seeds, rows),
        _numbers("positions", positions, rows, jnp.int32).astype(jnp.uint32),
        _numbers("temperature", temperature, rows, jnp.float32),
        Filters(**cuts),
        found,
        None if logit_bias is None else _table("logit_bias", logit_bias, x, "number").astype(jnp.float32),
        None if allowed is None else _table("allowed", allowed, x, "bool"),
    )


def _numbers(name: str, value: Any, rows: int, dtype: Any) -> jax.Array:
    integral = jnp.issubdtype(dtype, jnp.integer)
    array = as_array(OP, name, value, "integers" if integral else "numbers")
    if not jnp.issubdtype(array.dtype, jnp.integer) and (integral or not jnp.issubdtype(array.dtype, jnp.floating)):
        raise TypeError(f"{OP}: {name} must hold {'integers' if integral else 'numbers'}, got {describe(array)}.")
    if array.shape not in ((), (rows,)):
        raise ValueError(f"{OP}: {name} must be one number or have the shape ({rows},), got {describe(array)}.")
    holds, wanted = _RANGES[name]
    if not isinstance(array, jax.core.Tracer):
        known = np.asarray(array, np.float64)
        bad = ~np.asarray(holds(known) & ~np.isnan(known))
        if bad.any():
            raise ValueError(f"{OP}: {name} must be {wanted}, got {known[bad].ravel()[0]:g}.")
    return jnp.broadcast_to(jnp.asarray(array, dtype), (rows,))


def _seeds(seeds: Any, rows: int) -> jax.Array:
    array = integer_array(OP, "seeds", seeds, on_host=False)
    if array.shape == (rows, 2) and array.dtype == jnp.uint32:
        return jnp.asarray(array)
    if array.shape != (rows,):
        raise ValueError(
            f"{OP}: seeds must have the shape ({rows},), or ({rows}, 2) and uint32 (see seed_words), got"
            f" {describe(array)}."
        )
    if not isinstance(array, jax.core.Tracer):
        known = np.asarray(array)
        if ((known < -(2**31)) | (known >= 2**32)).any():
            raise ValueError(f"{OP}: seeds must have 32 bits; give larger ones as seed_words(seeds).")
        array = known.astype(np.int64) & 0xFFFFFFFF
    low = jnp.asarray(array.astype(jnp.uint32))
    return jnp.stack([jnp.zeros_like(low), low], axis=1)


def _table(name: str, value: Any, x: jax.Array, kind: str) -> jax.Array:
    array = jnp.asarray(as_array(OP, name, value, kind))
    if not any(jnp.issubdtype(array.dtype, k) for k in _KINDS[kind]):
        raise TypeError(f"{OP}: {name} must be an array of dtype {kind}, got {describe(array)}.")
    if array.shape != x.shape:
        raise ValueError(f"{OP}: {name} must have the shape {x.shape} of logits, got {describe(array)}.")
    return array
