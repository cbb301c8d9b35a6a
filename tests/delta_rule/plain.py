"""The two usual forms of the gated delta rule in plain JAX, for controls.

Models run the chunked one in prefill and the recurrent one in decoding, and their bits differ.
"""

from typing import Any

import jax
import jax.numpy as jnp


def recurrent(query: Any, key: Any, value: Any, g: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
    """Token by token, in the dtype of the state."""
    group, scale = value.shape[2] // key.shape[2], key.shape[-1] ** -0.5

    def step(s: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = x
        s = s * jnp.exp(g)[..., None, None]
        u = beta[..., None] * (v - jnp.einsum("bhd,bhdv->bhv", k, s))
        s = s + k[..., None] * u[:, :, None]
        return s, jnp.einsum("bhd,bhdv->bhv", q, s) * scale

    q, k = (jnp.repeat(x, group, 2) for x in (query, key))
    along = tuple(jnp.moveaxis(x.astype(state.dtype), 1, 0) for x in (q, k, value, g, beta))
    state, y = jax.lax.scan(step, state, along)
    return jnp.moveaxis(y, 0, 1).astype(value.dtype), state


def chunked(query: Any, key: Any, value: Any, g: Any, beta: Any, state: Any, size: int = 64) -> Any:
    """In chunks, with the inverse applied to values and keys (the WY form)."""
    b, t, h, v = value.shape
    group, scale, pad = h // key.shape[2], key.shape[-1] ** -0.5, -t % size

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, -1, size, *x.shape[2:]), (1, 3), (0, 2))

    def step(s: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = x
        total = jnp.cumsum(g, -1)
        age = jnp.tril(jnp.exp(jnp.tril(total[..., None] - total[..., None, :])))
        a = jnp.tril(beta[..., None] * (k @ k.mT) * age, -1)
        inverse = jnp.linalg.inv(jnp.eye(size) + a)
        w = inverse @ (beta[..., None] * jnp.exp(total)[..., None] * k)
        u = inverse @ (beta[..., None] * v) - w @ s
        y = scale * ((q * jnp.exp(total)[..., None]) @ s + jnp.tril((q @ k.mT) * age) @ u)
        last = total[..., -1:]
        return s * jnp.exp(last)[..., None] + (k * jnp.exp(last - total)[..., None]).mT @ u, y

    q, k = (jnp.repeat(x, group, 2) for x in (query, key))
    state, y = jax.lax.scan(step, state, tuple(cut(x) for x in (q, k, value, g, beta)))
    return jnp.moveaxis(y, (0, 2), (1, 3)).reshape(b, -1, h, v)[:, :t].astype(value.dtype), state
