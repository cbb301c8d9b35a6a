"""Turning heads and storing keys and values in one operation: the bits and gradients of its pieces."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.ops.rotary.heads import rotate_and_store, rotate_heads, store_rows
from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Ops
from tests.arrays import on_device
from tests.layers.rotate_checks import assert_same
from tests.rotary.cases import case, in_groups
from tests.tiers import full_only

HEADS, KEYS, WIDTH = 4, 2, 8


def arrays(dtype: str, cache_dtype: str | None = None) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Two sequences of three tokens, a cache of three pages, and what is rotated instead of the heads."""
    *given, to_rotate = case((6, HEADS, KEYS, WIDTH), dtype, to_rotate=True, stored=9)
    of_tokens = [x.reshape(2, 3, *x.shape[1:]) for x in (*given[:3], to_rotate)]
    caches = [x.reshape(3, 3, *x.shape[1:]).astype(cache_dtype or dtype) for x in given[4:]]
    rows = jnp.where(given[3] < 0, 9, given[3])
    return (*of_tokens[:3], rows, *caches), of_tokens[3]


def pieces(ops: Ops, heads: Any, cos: Any, sin: Any, rows: Any, keys: Any, values: Any, to_rotate: Any = None) -> Any:
    both = ops.rotate(heads[:, :, : HEADS + KEYS] if to_rotate is None else to_rotate, cos, sin)
    stored = store_rows(keys, rows, both[:, :, HEADS:]), store_rows(values, rows, heads[:, :, HEADS + KEYS :])
    return both[:, :, :HEADS], *stored


@pytest.mark.parametrize("ops", [INVARIANT, PLAIN])
@pytest.mark.parametrize(("dtype", "cache"), [("float32", None), full_only("bfloat16", None), ("bfloat16", "float32")])
def test_the_bits_of_the_pieces(ops: Ops, dtype: str, cache: str | None) -> None:
    given, to_rotate = arrays(dtype, cache)

    @jax.jit
    def both(*given: jax.Array) -> Any:
        return [(ops.rotate_and_store(*given, to_rotate=t), pieces(ops, *given, t)) for t in (None, to_rotate)]

    for found, expected in both(*given):
        assert_same(found, expected)
        assert found[1].dtype == (cache or dtype)


@pytest.mark.parametrize("ops", [INVARIANT, PLAIN])
@pytest.mark.parametrize("cache", [None, "float32"])
def test_heads_in_groups(ops: Ops, cache: str | None) -> None:
    """As a product has them whose columns are cut over devices; the control reads them as if they were not."""
    (heads, *rest), to_rotate = arrays("bfloat16", cache)
    grouped = in_groups(heads, KEYS, 2)
    for t in (None, to_rotate):
        expected = ops.rotate_and_store(heads, *rest, to_rotate=t)
        assert_same(ops.rotate_and_store(grouped, *rest, to_rotate=t, groups=2), expected)
        assert (ops.rotate_and_store(grouped, *rest, to_rotate=t)[2] != expected[2]).any()


def test_rows_that_are_none_leave_the_cache_as_it_is() -> None:
    given, _ = arrays("bfloat16")
    _, keys, values = INVARIANT.rotate_and_store(*given[:3], jnp.array([-1, 9, 10, -9, 99, 12]), *given[4:])
    assert_same((keys, values), given[4:])


@pytest.mark.tier("full")
def test_gradients() -> None:
    given, to_rotate = arrays("float32")
    rest = [x.astype(jnp.float32) for x in (*given[:3], *given[4:], to_rotate)]

    def of_groups(heads: jax.Array, *others: jax.Array, to_rotate: jax.Array) -> Any:
        return INVARIANT.rotate_and_store(in_groups(heads, KEYS, 2), *others, to_rotate=to_rotate, groups=2)

    def in_pieces(*given: jax.Array, to_rotate: jax.Array) -> Any:
        return pieces(INVARIANT, *given, to_rotate)

    @jax.jit
    def both(*rest: jax.Array) -> Any:
        found = []
        for function in (INVARIANT.rotate_and_store, of_groups, in_pieces):
            y, pull = jax.vjp(lambda *a, f=function: f(*a[:3], given[3], *a[3:5], to_rotate=a[5]), *rest)
            found.append(pull(jax.tree.map(jnp.cos, y)))
        return found

    found, grouped, expected = both(*rest)
    assert_same(found, expected)
    assert_same(grouped, expected)
    assert all(bool((x != 0).any()) for x in found)


def test_under_vmap() -> None:
    """Mapped tokens get parts of a cache of their own, be the cache mapped or not."""
    given, _ = arrays("bfloat16")
    other = (jnp.roll(given[0], 1, 1), *given[1:3], jnp.roll(given[3], 1))

    @jax.jit
    def both() -> Any:
        mapped = [jnp.stack(pair) for pair in zip(given[:4], other, strict=True)]
        heads = in_groups(mapped[0], KEYS, 2)
        of_groups = functools.partial(INVARIANT.rotate_and_store, groups=2)
        found = jax.vmap(of_groups, (0, 0, 0, 0, None, None))(heads, *mapped[1:], *given[4:])
        each = [pieces(INVARIANT, *tokens[:4], *given[4:]) for tokens in (given, other)]
        return found, jax.tree.map(lambda *x: jnp.stack(x), *each)

    assert_same(*both())


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    *tokens, keys, values = arrays("float32")[0]
    whole = jax.jit(INVARIANT.rotate_and_store)(*tokens, keys, values)
    one = jax.jit(INVARIANT.rotate_and_store)
    for b, t in ((0, 2), (1, 1)):
        query, *caches = one(*(x[b : b + 1, t : t + 1] for x in tokens[:3]), tokens[3][3 * b + t, None], keys, values)
        assert_bits_equal(query[0, 0], whole[0][b, t])
        row = divmod(int(tokens[3][3 * b + t]), 3)
        assert_same([x[row] for x in caches], [x[row] for x in whole[1:]])


def test_its_contract() -> None:
    given, _ = arrays("bfloat16")
    found = bijax.contracts(INVARIANT.rotate_and_store, *given)
    assert "elementwise/v1/f32-xla" in str(found)
    x, cos, sin = given[:3]
    assert_bits_equal(rotate_heads(x, cos, sin)[1], rotate_heads(x[1], cos[1], sin[1]))


def test_tables_of_another_dtype_are_widened() -> None:
    rng = np.random.default_rng(0)
    x, cos, sin = (on_device(rng.standard_normal(shape), jnp.float32) for shape in ((2, 3, 2, 8), *[(2, 3, 4)] * 2))
    narrow = [table.astype(jnp.bfloat16) for table in (cos, sin)]
    assert_bits_equal(rotate_heads(x, *narrow), rotate_heads(x, *(table.astype(jnp.float32) for table in narrow)))


def test_rows_of_64_bits() -> None:
    heads, tables = jnp.ones((1, 1, 3, 2), jnp.float32), [jnp.ones((1, 1, 1), jnp.float32)] * 2
    caches = [jnp.zeros((1, 2, 1, 2), jnp.float32)] * 2
    expected = rotate_and_store(heads, *tables, jnp.array([1], jnp.int32), *caches)
    with jax.enable_x64(True):
        assert_bits_equal(rotate_and_store(heads, *tables, jnp.array([1], jnp.int64), *caches), expected)
