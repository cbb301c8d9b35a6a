"""Checks of a drop-in against its original, the same for linen and nnx."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report
from tests.arrays import on_device

SIZES = (5,)  # and 1, with which each is compared
KINDS = ("permuted", "nan")


def rows(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    """Normal numbers, not all of one magnitude."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * np.exp(rng.normal(size=shape)), dtype)


def tokens(*shape: int, below: int) -> jax.Array:
    return on_device(np.random.default_rng(0).integers(0, below, shape), jnp.int32)


def with_gradient(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that gives the output and the gradient of half its square, if the input is floating."""

    def both(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return call(x)
        y, pull = jax.vjp(call, x)
        return y, pull(y)[0]

    return both


def assert_invariant(
    call: Callable[[Any], Any], x: Any, sizes: Sequence[int] = SIZES, *, gradient: bool = True
) -> None:
    """Asserts that the rows of the output, and of the gradient, do not depend on their batch."""
    call = with_gradient(call) if gradient else call
    assert_batch_invariant(call, x, batch_sizes=sizes, neighbours=KINDS, modes=("jit",))


def is_invariant(call: Callable[[Any], Any], x: Any, *, gradient: bool = True) -> bool:
    call = with_gradient(call) if gradient else call
    return batch_variance_report(call, x, batch_sizes=SIZES, neighbours=("permuted",), modes=("jit",)).invariant


def assert_close_to(found: Any, original: Any, exact: Any) -> None:
    """Asserts that results are as near to the float64 results as those of the original, but for a few roundings."""
    assert jax.tree.structure(found) == jax.tree.structure(original)
    for ours, theirs, wide in zip(*map(jax.tree.leaves, (found, original, exact)), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        eps = float(jnp.finfo(theirs.dtype).eps)
        ours, theirs, wide = (np.asarray(a, np.float64) for a in (ours, theirs, wide))
        bound = 3 * np.abs(theirs - wide).max() + 8 * eps * np.abs(wide).max()
        error = np.abs(ours - wide).max()
        assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"


def widened(tree: Any) -> Any:
    """Floating arrays in float64; to be called with x64 enabled."""
    return jax.tree.map(
        lambda a: jnp.asarray(np.asarray(a, np.float64)) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_bits_equal(a, b)
