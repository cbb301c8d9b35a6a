"""Programs with their arguments, and products whose sum is cut into leaves in several ways."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import SplitWgmmaContract, WgmmaContract, add_as_tree
from pallas_kernels.matmul.hopper.launch import matmul

PRODUCTS: Final = (
    *((m, 8192, 2048, 8) for m in (8, 64, 512, 2048, 8192)),
    *((m, 2048, 2048, 8) for m in (8, 2048)),
    *((m, 14336, 4096, 8) for m in (8, 512, 2048, 8192)),
    *((m, 4096, 4096, 8) for m in (8, 2048)),
    *((m, 4096, 2048, 4) for m in (8, 2048)),
)
"""Rows, K, columns, leaves."""


class Step:
    """A program with its arguments; those that it is given away it returns.

    Args:
        function: Takes the arguments, and returns a result and then what replaces the first ones.
        changed: The arguments that are given away.
        kept: The others.
    """

    def __init__(self, function: Callable[..., Any], changed: tuple[Any, ...], kept: tuple[Any, ...]) -> None:
        self.changed, self.kept = changed, kept
        self._lower = functools.partial(
            jax.jit(function, donate_argnums=tuple(range(len(changed)))).lower, *changed, *kept
        )
        self._run: Any = None

    def lower(self) -> Any:
        return self._lower()

    def compile(self) -> "Step":
        self._run = self._lower().compile()
        return self

    def __call__(self) -> Any:
        found = self._run(*self.changed, *self.kept)
        if self.changed:
            found, *changed = found
            self.changed = tuple(changed)
        return found


def products() -> dict[str, dict[str, Step]]:
    """Returns the programs of products in leaves on a device that has all of them, which rounds their sum."""

    @functools.cache
    def operands(m: int, k: int, n: int) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0))
        return jax.random.normal(keys[0], (m, k), jnp.bfloat16), jax.random.normal(keys[1], (k, n), jnp.bfloat16)

    def separate(leaves: int, x: jax.Array, w: jax.Array) -> jax.Array:
        length = x.shape[1] // leaves
        chain = functools.partial(matmul, contract=WgmmaContract(), out_dtype=jnp.float32)
        total: jax.Array = add_as_tree(
            lambda i: chain(x[:, i * length : (i + 1) * length], w[i * length : (i + 1) * length]), leaves
        )
        return total.astype(x.dtype)

    def forms(leaves: int) -> dict[str, Callable[..., Any]]:
        return {
            "ours": lambda x, w: matmul(x, w, contract=SplitWgmmaContract(leaves)),
            "xla": jnp.matmul,
            "chain": lambda x, w: matmul(x, w, contract=WgmmaContract()),
            "separate": functools.partial(separate, leaves),
        }

    return {
        f"{m}x{k}x{n} in {leaves}": {name: Step(f, (), operands(m, k, n)) for name, f in forms(leaves).items()}
        for m, k, n, leaves in PRODUCTS
    }
