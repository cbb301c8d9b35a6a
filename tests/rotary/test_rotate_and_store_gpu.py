"""Turning heads and storing keys and values in one kernel, on a GPU: the bits of the pieces, in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.core.architecture import target_for
from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT
from tests.jax_triton.packages import skip_without_jax_triton
from tests.layers.rotate_checks import assert_same
from tests.rotary.cases import case, in_groups

pytestmark = pytest.mark.gpu
skip_without_jax_triton()
from pallas_kernels.rotary.jax_triton.launch import rotate_and_store  # noqa: E402

kernel = functools.partial(rotate_and_store, target=target_for("cuda"))

SHAPES = (
    (1, 4, 2, 64),
    (5, 4, 2, 16),
    (7, 3, 1, 80),
    (300, 32, 8, 64),
    (33, 40, 8, 128),
    (9, 6, 6, 256),
    (6, 5, 1, 48),
)


def pieces(*arrays: jax.Array) -> Any:
    heads, cos, sin, rows, keys, values, *to_rotate = arrays
    rotated_heads = heads.shape[1] - keys.shape[1]
    queries = rotated_heads - keys.shape[1]
    source = to_rotate[0] if to_rotate else heads[:, :rotated_heads]
    both = INVARIANT.rotate(source[None], cos[None], sin[None])[0]
    at = jnp.where(rows < 0, keys.shape[0], rows)
    new = both[:, queries:], heads[:, rotated_heads:]
    return both[:, :queries], *(c.at[at].set(n, mode="drop") for c, n in zip((keys, values), new, strict=True))


@pytest.mark.parametrize("to_rotate", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_the_pieces(shape: tuple[int, int, int, int], dtype: str, to_rotate: bool) -> None:
    arrays = list(case(shape, dtype, to_rotate=to_rotate))
    hostile = jnp.array([jnp.inf, -jnp.inf, 0.0, -0.0, 6e4, 6e-8, 1e-40, jnp.nan], arrays[0].dtype)
    arrays[0] = arrays[0].at[-1, 0, :8].set(hostile)
    arrays[1] = arrays[1].at[0].set(jnp.nan)  # the angles of a token that finds no room
    found = jax.jit(kernel)(*arrays)
    assert_same(found, jax.jit(pieces)(*arrays))


@pytest.mark.parametrize("to_rotate", [False, True])
@pytest.mark.parametrize(("shape", "groups"), [((7, 6, 2, 80), 2), ((33, 32, 8, 128), 4), ((300, 16, 4, 64), 4)])
def test_heads_in_groups(shape: tuple[int, int, int, int], groups: int, to_rotate: bool) -> None:
    heads, *rest = case(shape, "bfloat16", to_rotate=to_rotate)
    found = jax.jit(functools.partial(kernel, groups=groups))(in_groups(heads, shape[2], groups), *rest)
    assert_same(found, jax.jit(pieces)(heads, *rest))


def test_products_are_rounded_apart() -> None:
    """The control: what a fused multiply-add gives is found to differ."""
    heads, cos, sin, *rest = case((300, 32, 8, 64), "float32")
    found = np.asarray(jax.jit(kernel)(heads, cos, sin, *rest)[0])
    x, y = np.split(np.asarray(heads)[:, :32], 2, axis=-1)
    c, s = np.asarray(cos)[:, None], np.asarray(sin)[:, None]
    assert_bits_equal(found, np.concatenate([x * c - y * s, y * c + x * s], axis=-1))
    fused = (x.astype(np.float64) * c - (y * s)).astype(np.float32)
    assert (fused != found[..., :32]).any()


def test_the_cache_is_written_in_place() -> None:
    *tokens, keys, values = case((6, 4, 2, 64), "bfloat16", stored=4096)
    batched = [x.reshape(2, 3, *x.shape[1:]) for x in tokens[:3]]
    caches = [x.reshape(2, 2048, *x.shape[1:]) for x in (keys, values)]
    write = jax.jit(INVARIANT.rotate_and_store, donate_argnums=(4, 5))
    compiled = write.lower(*batched, tokens[3], *caches).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == keys.nbytes + values.nbytes
    assert memory.temp_size_in_bytes < keys.nbytes
    expected = pieces(*tokens, keys, values)
    for found, right in zip(compiled(*batched, tokens[3], *caches), expected, strict=True):
        assert_bits_equal(found.reshape(right.shape), right)
