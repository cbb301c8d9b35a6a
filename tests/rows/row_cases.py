"""The row operations and their plain counterparts, for the sweeps; each with its gradient of the rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from bijax.testing import hostile_rows

RowOp = Callable[[jax.Array, jax.Array], Any]


def labels_of(x: jax.Array) -> jax.Array:
    """A label that belongs to the row alone."""
    return jnp.nan_to_num(jnp.abs(x[..., 0]) * 16, nan=0, posinf=0).astype(jnp.int32) % x.shape[-1]


def plain_rms_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w


def plain_layer_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    d = x - jnp.mean(x, axis=-1, keepdims=True)
    return d * jax.lax.rsqrt(jnp.mean(d * d, axis=-1, keepdims=True) + 1e-5) * w + w


def plain_cross_entropy(x: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(x, axis=-1) - jnp.take_along_axis(x, labels[..., None], axis=-1)[..., 0]


def last_head(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The last of three equal heads, of which the second and the third are normalised, each with its own weight."""
    heads = jnp.stack([x, x, x], axis=-2)
    return bijax.head_rms_norm(heads, weight, head_offset=1, weight_offset=1.0)[..., 2, :]


OURS: dict[str, RowOp] = {
    "sum": lambda x, w: bijax.sum(x, -1),
    "mean": lambda x, w: bijax.mean(x, -1),
    "softmax": lambda x, w: bijax.softmax(x),
    "log_softmax": lambda x, w: bijax.log_softmax(x),
    "logsumexp": lambda x, w: bijax.logsumexp(x),
    "softmax_cross_entropy": lambda x, w: bijax.softmax_cross_entropy(x, labels_of(x), z_loss=1e-3),
    "rms_norm": lambda x, w: bijax.rms_norm(x, w),
    "rms_norm_residual": lambda x, w: bijax.rms_norm(x, w, residual=x),
    "head_rms_norm": lambda x, w: last_head(x, jnp.stack([w, w + 1])),
    "layer_norm": lambda x, w: bijax.layer_norm(x, w, w),
    "var": lambda x, w: bijax.var(x, -1),
    "std": lambda x, w: bijax.std(x, -1, ddof=1),
}

PLAIN: dict[str, RowOp] = {
    "sum": lambda x, w: jnp.sum(x, axis=-1),
    "mean": lambda x, w: jnp.mean(x, axis=-1),
    "softmax": lambda x, w: jax.nn.softmax(x),
    "log_softmax": lambda x, w: jax.nn.log_softmax(x),
    "logsumexp": lambda x, w: jax.nn.logsumexp(x, axis=-1),
    "softmax_cross_entropy": lambda x, w: plain_cross_entropy(x, labels_of(x)),
    "rms_norm": plain_rms_norm,
    "layer_norm": plain_layer_norm,
}


def with_gradient(op: RowOp) -> Callable[[jax.Array, jax.Array, jax.Array], Any]:
    """Returns a function of x, a cotangent of the same shape, and the weights: the result and the gradient of x."""

    def both(x: jax.Array, g: jax.Array, w: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x: op(x, w), x)
        cotangent = jax.tree.map(lambda y: (g if y.ndim == x.ndim else g[..., 0]).astype(y.dtype), y)
        return y, pull(cotangent)[0]

    return both


def hostile_batch(columns: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rows of every hostile kind, a cotangent for each, and weights in float32."""
    x = np.concatenate(list(hostile_rows(0, (4, columns), dtype).values()))
    g = hostile_rows(1, x.shape, dtype)
    cotangent = np.where(np.arange(len(x))[:, None] % 3 == 0, g["wide"], g["normal"])
    w = np.random.default_rng(2).standard_normal(columns).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(cotangent), jnp.asarray(w)


def all_ops(x: jax.Array, g: jax.Array, w: jax.Array) -> dict[str, Any]:
    """Returns the result and the gradient of every operation, in one program."""
    return {name: with_gradient(op)(x, g, w) for name, op in OURS.items()}
