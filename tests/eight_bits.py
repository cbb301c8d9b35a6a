"""Attention to keys and values of 8 bits, composed of attention to 16 or 32 bits as `EightBitContract` says."""

from collections.abc import Callable
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

UNITS: Final = {"int8": 2.0**-6, "float8_e4m3fn": 2.0**-8}


def composed(attend: Callable[..., Any], query: Any, caches: Any, factors: Any, *, heads: bool = True) -> Any:
    """Returns what attention to caches gives, by attention to numbers of the queries' dtype.

    Args:
        attend: Maps queries (B, T, N, H), keys and values to the results, alone or with the log-sum-exp after.
        query: Queries.
        caches: Keys and values of 8 bits.
        factors: Their factors, (B or 1, K, H or 1), or (K,) or (K, H) with `heads`.
        heads: Whether factors have no axis of sequences.
    """
    query, caches = np.asarray(query), [np.asarray(x) for x in caches]
    unit = np.float32(UNITS[caches[0].dtype.name])
    keys, values = ((x.astype(np.float32) * unit).astype(query.dtype) for x in caches)
    of_keys, of_values = ((_whole(f, heads) / unit).astype(np.float32) for f in factors)
    found = attend(jnp.asarray(times(query, of_keys)), jnp.asarray(keys), jnp.asarray(values))
    out, *rest = found if isinstance(found, tuple) else (found,)
    out = times(np.asarray(out), of_values)
    return (out, *rest) if rest else out


def _whole(factors: Any, heads: bool) -> np.ndarray:
    factors = np.asarray(factors, np.float32)
    if not heads:
        return factors
    return factors[None] if factors.ndim == 2 else factors[None, :, None]


def times(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Returns (B, T, N, H) times factors (B or 1, K, H or 1), in float32 and rounded."""
    grouped = x.reshape(*x.shape[:2], factors.shape[1], -1, x.shape[3]).astype(np.float32)
    with np.errstate(all="ignore"):  # infinite factors
        return (grouped * factors[:, None, :, None]).astype(x.dtype).reshape(x.shape)
