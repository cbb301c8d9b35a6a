"""Hostile inputs of convolutions and gated norms."""

from typing import Final

import jax
import jax.numpy as jnp

KINDS: Final = ("normal", "wide", "tiny", "huge", "line", "special")


def numbers(shape: tuple[int, ...], dtype: str, seed: int, kind: str) -> jax.Array:
    """Returns normal numbers: over 120 binades, tiny, huge, on a line, or with zeros, infinities and nan among them."""
    first, second, third = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(first, shape)
    low, high = {"wide": (-60, 60), "tiny": (-145, -100), "huge": (0, 127)}.get(kind, (0, 1))
    x = x * jnp.exp2(jax.random.randint(second, shape, low, high).astype(jnp.float32))
    if kind == "line":
        x = jnp.broadcast_to(jnp.linspace(-100, 100, shape[-1]), shape)
    if kind == "special":
        part = jax.random.uniform(third, shape)
        some = jnp.select([part < 0.01, part < 0.02, part < 0.03], [jnp.nan, jnp.inf, -jnp.inf], -0.0)
        x = jnp.where(part < 0.2, some, x)
    return x.astype(dtype)
