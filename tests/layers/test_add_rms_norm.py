"""The sum and its norm in one operation: the bits and gradients of the two apart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.parallel import tree_sum
from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Ops
from flax_layers.models.block import added
from flax_layers.models.layers import RMSNorm
from flax_layers.models.layers.unrounded import Unrounded
from tests.arrays import on_device
from tests.tiers import full_only


def rows(seed: int, *shape: int) -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("dtypes", ["bfloat16 bfloat16", *map(full_only, ("float32 float32", "bfloat16 float32"))])
@pytest.mark.parametrize("ops", [INVARIANT, full_only(PLAIN)])
def test_results_and_gradients(ops: Ops, dtypes: str) -> None:
    """Of rows in the dtype of the norm, and of rows that the norm widens, whose sum is not."""
    of_rows, of_scale = dtypes.split()
    x, y, g_sum, g = (rows(seed, 2, 3, 96).astype(of_rows) for seed in range(4))
    norm = RMSNorm(96, scale_offset=1.0, param_dtype=jnp.dtype(of_scale), ops=ops, rngs=nnx.Rngs(0))
    graph, state = nnx.split(norm)
    state = jax.tree.map(lambda scale: scale + rows(5, 96).astype(scale.dtype), state)

    def fused(x: jax.Array, y: jax.Array, state: Any) -> Any:
        return nnx.merge(graph, state).add(x, y)

    def apart(x: jax.Array, y: jax.Array, state: Any) -> Any:
        h = x + y
        return h, nnx.merge(graph, state)(h)

    @jax.jit
    def both(*arrays: Any) -> Any:
        found = []
        for function in (fused, apart):
            out, pull = jax.vjp(function, *arrays)
            found.append((out, pull((g_sum, g.astype(out[1].dtype)))))
        return found

    found, expected = both(x, y, state)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_bits_equal(a, b)
    assert found[0][0].dtype == of_rows
    assert found[0][1].dtype == of_scale


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_unrounded_sum_is_rounded_first(dtype: str) -> None:
    """A sum of several devices; the control adds it without rounding it first."""
    x, total, g_sum, g = (rows(seed, 3, 96) * 3 for seed in range(4))
    x = x.astype(dtype)
    norm = RMSNorm(96, param_dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))

    @jax.jit
    def both(x: jax.Array, total: jax.Array) -> Any:
        found, pull = jax.vjp(lambda x, total: norm.add(x, Unrounded(total)), x, total)
        expected, pull_expected = jax.vjp(norm.add, x, tree_sum(total[None], dtype=dtype))
        of_out = g_sum.astype(dtype), g.astype(found[1].dtype)
        return (found, pull(of_out)), (expected, pull_expected(of_out)), added((x, Unrounded(total)))

    found, expected, alone = both(x, total)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_bits_equal(a, b.astype(a.dtype))
    assert found[1][1].dtype == jnp.float32
    assert_bits_equal(alone, found[0][0])
    once = (np.asarray(x, np.float32) + np.asarray(total)).astype(x.dtype)
    assert (np.asarray(once) != np.asarray(found[0][0])).any()
