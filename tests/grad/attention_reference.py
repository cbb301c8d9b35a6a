"""Attention spelled out, in the precision of its arguments: what kernels are compared with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def reference(q: Any, k: Any, v: Any, visible: Any, scale: float) -> tuple[Any, Any]:
    """Softmax attention of one sequence, (T, N, H) to (S, K, H), in the precision of its arguments; visible (T, S)."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.where(visible[:, None], jnp.einsum("tnh,snh->tns", q, k) * scale, -jnp.inf)
    some = visible.any(axis=1)[:, None]
    lse = jax.scipy.special.logsumexp(jnp.where(some[..., None], scores, 0), axis=-1)
    weights = jnp.where(visible[:, None], jnp.exp(scores - lse[..., None]), 0)
    return jnp.einsum("tns,snh->tnh", weights, v), jnp.where(some, lse, -jnp.inf)


def visible_keys(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    offset: int = 0,
    query_length: int | None = None,
    key_length: int | None = None,
) -> np.ndarray:
    """Which keys each query sees, spelled out."""
    t, s = offset + np.arange(queries)[:, None], np.arange(keys)[None]
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= s <= t
    if window is not None:
        seen &= (t <= s + window[0]) & (t >= s - window[1])
    seen[slice(query_length, None) if query_length is not None else slice(0, 0)] = False
    seen[:, slice(key_length, None) if key_length is not None else slice(0, 0)] = False
    return seen
