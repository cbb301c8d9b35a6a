"""Programs with their arguments, and products whose sum is cut into leaves in several ways."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import SplitWgmmaContract, WgmmaContract, add_as_tree
from pallas_kernels.matmul.hopper.launch import matmul

PRODUCTS: Final = (
    *((m, 8192, 2048, 8) for m in (8, 64, 2048, 8192)),
    *((m, 2048, 2048, 8) for m in (8, 2048)),
    *((m, 14336, 4096, 8) for m in (8, 2048)),
    *((m, 4096, 2048, 4) for m in (8, 2048)),
)
"""Rows, K, columns, leaves."""
ROWS_AT_ONCE: Final = (512, 1024)


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
    """Returns the programs of products in leaves."""

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
        return total

    def together(leaves: int, rows: int, x: jax.Array, w: jax.Array) -> jax.Array:
        one = functools.partial(matmul, contract=SplitWgmmaContract(leaves), out_dtype=jnp.float32)
        return jnp.concatenate([one(x[i : i + rows], w) for i in range(0, x.shape[0], rows)])

    def forms(m: int, leaves: int) -> dict[str, Callable[..., Any]]:
        found: dict[str, Callable[..., Any]] = {
            "ours": lambda x, w: matmul(x, w, contract=SplitWgmmaContract(leaves), out_dtype=jnp.float32),
            "xla": lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32),
            "chain": lambda x, w: matmul(x, w, contract=WgmmaContract(), out_dtype=jnp.float32),
            "separate": functools.partial(separate, leaves),
        }
        return found | {f"rows_{r}": functools.partial(together, leaves, r) for r in ROWS_AT_ONCE if m > r}

    return {
        f"{m}x{k}x{n} in {leaves}": {name: Step(f, (), operands(m, k, n)) for name, f in forms(m, leaves).items()}
        for m, k, n, leaves in PRODUCTS
    }
