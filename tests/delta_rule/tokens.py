"""Tokens of the gated delta rule, of hostile kinds, and the rule itself in float64."""

from typing import Any, Final

import jax.numpy as jnp
import numpy as np

KINDS: Final = ("normal", "ramp", "range", "zeros", "subnormal", "repeated", "lasting", "wiped", "broken")
SIZES: Final = (2, 4, 16, 8)
"""Key heads, value heads, and the sizes of keys and values."""


def tokens(kind: str, length: int, sizes: tuple[int, int, int, int] = SIZES, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns query, key, value, g and beta of one sequence, in float32; keys have length 1, except of a broken one."""
    (j, h, d, v), rng = sizes, np.random.default_rng([seed, KINDS.index(kind)])
    query, key = rng.standard_normal((2, length, j, d))
    value = rng.standard_normal((length, h, v))
    g = -np.exp(rng.normal(-3, 1.5, (length, h)))
    beta = 1 / (1 + np.exp(-rng.normal(0, 1.5, (length, h))))
    if kind == "ramp":
        value = np.linspace(-100, 100, value.size).reshape(value.shape)
    elif kind == "range":
        value, g = value * 10 ** rng.uniform(-30, 30, value.shape), g * 10 ** rng.uniform(-6, 4, g.shape)
    elif kind == "zeros":
        key[rng.random(key.shape[:2]) < 0.3] = 0
        query[rng.random(query.shape[:2]) < 0.2] = -0.0
        value[rng.random(value.shape) < 0.3] = -0.0
        beta[rng.random(beta.shape) < 0.3] = 0
    elif kind == "subnormal":
        value = value * 1e-39
    elif kind == "repeated":  # a value replaces the one that was stored under the same key
        few = rng.standard_normal((3, d))
        key, query = few[rng.integers(0, 3, key.shape[:2])], few[rng.integers(0, 3, query.shape[:2])]
        beta = np.ones_like(beta)
    elif kind == "lasting":
        g = np.where(rng.random(g.shape) < 0.5, 0.0, -1e-7)
    elif kind == "wiped":
        g = np.where(rng.random(g.shape) < 0.2, np.where(rng.random(g.shape) < 0.5, -1e30, -np.inf), g)
    query, key = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (query, key))
    if kind == "broken":
        query, key, beta = query * 3, key * 1.4, beta * 2
        for name, at in (("v", 0.5), ("V", 0.66), ("k", 0.75), ("q", 0.33), ("g", 0.8), ("b", 0.85)):
            i = int(at * length)
            if i < length:
                _break(name, i, query, key, value, g, beta)
    found = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    with np.errstate(over="ignore"):
        return {name: x.astype(np.float32) for name, x in found.items()}


def _break(name: str, i: int, query: Any, key: Any, value: Any, g: Any, beta: Any) -> None:
    if name == "v":
        value[i, -1, 0] = np.inf
    elif name == "V":
        value[i, 0] = 3e38
    elif name == "k":
        key[i, -1, 1] = np.nan
    elif name == "q":
        query[i, 0, 0] = np.nan
    elif name == "g":
        g[i, 0] = np.nan
    else:
        beta[i, -1] = -np.inf


def batch(kinds: Any, length: int, dtype: str, sizes: tuple[int, int, int, int] = SIZES) -> dict[str, Any]:
    """Returns tokens (B, T, ...), a sequence of each kind; q, k and v in `dtype`."""
    each = [tokens(kind, length, sizes, seed) for seed, kind in enumerate(kinds)]
    stacked = {name: np.stack([one[name] for one in each]) for name in each[0]}
    with np.errstate(over="ignore"):
        return {n: x.astype("float32" if n in ("g", "beta") else jnp.dtype(dtype)) for n, x in stacked.items()}


def recurrence(x: dict[str, Any], state: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the outputs and the last states of sequences (B, T, ...), in float64."""
    query, key, value, g, beta = (np.asarray(jnp.asarray(x[n], "float32"), np.float64) for n in x)
    (b, t, h, v), d = value.shape, key.shape[-1]
    group = h // key.shape[2]
    key, query = key.repeat(group, 2), query.repeat(group, 2)
    s = np.zeros((b, h, d, v)) if state is None else np.array(state, np.float64)
    y = np.zeros(value.shape)
    for i in range(t):
        s = s * np.exp(g[:, i])[..., None, None]
        told = np.einsum("bhd,bhdv->bhv", key[:, i], s)
        s = s + np.einsum("bhd,bhv->bhdv", key[:, i], beta[:, i, :, None] * (value[:, i] - told))
        y[:, i] = np.einsum("bhd,bhdv->bhv", query[:, i], s) * d**-0.5
    return y, s
