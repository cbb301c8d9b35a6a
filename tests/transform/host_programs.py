"""Programs of a process in which bijax is a guest, and JAX's tables of lowering rules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas  # noqa: F401  registers rules of its own, which are compared too

import bijax
from tests.arrays import on_device

X = on_device(np.random.default_rng(0).standard_normal((8, 12)), jnp.float32)

W = on_device(np.random.default_rng(1).standard_normal((12, 5)), jnp.float32)

PLAIN: dict[str, Callable[[jax.Array], Any]] = {
    "products": lambda x: (x @ W, (x @ W) @ W.T, jnp.einsum("ij,kj->ik", x, x), x @ W),
    "element-wise": lambda x: jnp.exp(jnp.tanh(x) / (1 + x * x)),
    "sums": lambda x: (x.sum(1), jax.nn.softmax(x), jnp.cumsum(x, 0)),
    "loops": lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.sin(c) * 2, x),
    "branches": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: x * 2, x),
    "scatter": lambda x: x.at[jnp.array([0, 0, 3])].add(1.0),
    "gradients": jax.grad(lambda x: (jax.nn.relu(x @ W) ** 2).sum()),
    "random numbers": lambda x: jax.random.normal(jax.random.key(0), x.shape) + x,
    "factorisation": lambda x: jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(8)),
}


def texts(debug_info: bool = False) -> dict[str, str]:
    """The lowered text of every plain program; with `debug_info` the lines of all callers are in it."""
    found = {}
    for name, fn in PLAIN.items():
        for platform in ("cpu", "cuda"):
            lowered = jax.jit(lambda x, fn=fn: fn(x)).trace(X).lower(lowering_platforms=(platform,))
            found[f"{name} for {platform}"] = lowered.as_text(debug_info=debug_info)
    return found


def tables() -> Any:
    """JAX's tables of lowering rules, as they are now."""
    from jax._src.interpreters import mlir as private

    specific = {p: dict(rules) for p, rules in private._platform_specific_lowerings.items()}
    return dict(private._lowerings), specific, set(private._uncacheable_primitives)


def use_everything() -> None:
    def network(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.tanh(x @ W) / 3)

    jax.block_until_ready(bijax.invariant(network)(X))
    with bijax.set_batch_invariant_mode(), bijax.lowering_for("sm_90"):
        jax.jit(jax.grad(lambda x: network(x).sum())).trace(X).lower(lowering_platforms=("cuda",))
