"""Stores into caches: what the oracle writes, nothing else, in place; what leads outside is refused or reported."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report
from tests.arrays import on_device, ones
from tests.operators import oracles
from tests.operators.lowering import assert_fenced_on_cuda
from tests.tiers import full_only

K, D, SIZE, BLOCKS = 2, 3, 4, 7
TABLE = np.array([[5, 1, 6], [0, 3, 2], [9, 4, -1]], np.int32)  # entries 9 and -1 lead outside


def normal(seed: int, *shape: int, dtype: Any = "bfloat16") -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def cache(seed: int, dtype: str, *lead: int) -> jax.Array:
    numbers = np.random.default_rng(seed).integers(-127, 128, (lead[0], K, lead[1], D))
    return jnp.asarray(numbers).astype(dtype)


def scales(dtype: str) -> dict[str, Any]:
    if dtype != "int8":
        return {}
    return {
        "key_scale": jnp.exp(normal(8, K, D, dtype="float32")) / 50,
        "value_scale": jnp.full((K, D), 0.02, jnp.float32),
    }


CASES: list[dict[str, Any]] = [
    {"ids": [1, 0], "past": [3, 0], "lengths": [2, 5]},
    {"ids": [2, 1], "past": [4, 0], "lengths": [4, 0]},
    {"ids": [0], "past": [11], "lengths": [1]},
    {"ids": [], "past": [], "lengths": []},
]


@pytest.mark.tier("full", fast=("int8-True-{'ids': [0], 'past': [11], 'lengths': [1]}",))
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "paged"), [("bfloat16", False), ("int8", True)])
def test_what_the_oracle_writes(case: dict[str, Any], dtype: str, paged: bool) -> None:
    ids, past, lengths = (np.asarray(case[n], np.int32) for n in ("ids", "past", "lengths"))
    table = TABLE if paged else np.arange(3)[:, None]
    k_cache, v_cache = (cache(i, dtype, *((BLOCKS, SIZE) if paged else (3, 3 * SIZE))) for i in (0, 1))
    key, value = (normal(i, len(ids), 6, K, D) for i in (2, 3))
    lead = (jnp.asarray(TABLE),) if paged else ()
    op: Any = bijax.store_paged_kv_cache if paged else bijax.store_kv_cache
    factors = scales(dtype)

    def traced(x: jax.Array, y: jax.Array, i: Any, p: Any, q: Any) -> Any:
        return op(x, y, *lead, k_cache, v_cache, kv_ids=i, kv_lens=p, q_lens=q, **factors)

    expected = tuple(
        oracles.store(c, r, table, ids, past, lengths, factors.get(s))
        for c, r, s in ((k_cache, key, "key_scale"), (v_cache, value, "value_scale"))
    )
    all_stored = np.ones(len(ids), bool)
    assert_bits_equal(jax.jit(traced)(key, value, ids, past, lengths), (*expected, all_stored), err_msg="traced")
    packed = [jnp.concatenate([*(x[b, :n] for b, n in enumerate(lengths)), normal(4, 2, K, D)]) for x in (key, value)]
    known = jax.jit(lambda x, y: traced(x, y, ids, past, lengths))
    assert_bits_equal(known(*packed), (*expected, all_stored), err_msg="packed")


@pytest.mark.tier("full")
def test_defaults() -> None:
    key, (k, v) = normal(0, 2, 3, K, D), (cache(i, "bfloat16", 3, 5) for i in (0, 1))
    expected = oracles.store(k, key, np.arange(3)[:, None], [0, 1], [0, 0], [3, 3])
    assert_bits_equal(bijax.store_kv_cache(key, key, k, v)[0], expected)
    sums = bijax.store_kv_cache(key.reshape(6, K, D), key.reshape(6, K, D), k, v, accum_q_len=[0, 3, 6])
    assert_bits_equal(sums[0], expected)


@pytest.mark.tier("full", fast=("True",))
@pytest.mark.parametrize("paged", [False, True])
def test_donated_caches_are_written_in_place(paged: bool) -> None:
    lead = (TABLE[:2],) if paged else ()
    op: Any = bijax.store_paged_kv_cache if paged else bijax.store_kv_cache

    def step(key: jax.Array, k_cache: jax.Array, v_cache: jax.Array, past: jax.Array) -> Any:
        return op(key, key, *lead, k_cache, v_cache, kv_lens=past)

    key, past = normal(0, 2, 1, K, D), jnp.array([3, 2])
    caches = [cache(i, "bfloat16", *((BLOCKS, SIZE) if paged else (2, 12))) for i in (0, 1)]
    for transform in (lambda f: f, bijax.invariant):
        compiled = jax.jit(transform(step), donate_argnums=(1, 2)).lower(key, *caches, past).compile()
        addresses = [c.unsafe_buffer_pointer() for c in caches]
        caches = list(compiled(key, *caches, past)[:2])
        assert [c.unsafe_buffer_pointer() for c in caches] == addresses
        assert compiled.memory_analysis().alias_size_in_bytes == sum(c.nbytes for c in caches)
        dims = ",".join(map(str, caches[0].shape))
        assert not [line for line in compiled.as_text().splitlines() if f"bf16[{dims}]" in line and " copy(" in line]


def test_what_is_traced_and_leads_outside_touches_nothing() -> None:
    k, v = (cache(i, "bfloat16", BLOCKS, SIZE) for i in (0, 1))
    key = normal(0, 4, 3, K, D)

    @jax.jit
    def store(ids: Any, past: Any, lengths: Any, table: Any) -> Any:
        return bijax.store_paged_kv_cache(key, key, table, k, v, kv_ids=ids, kv_lens=past, q_lens=lengths)

    def check(ids: list[int], past: list[int], lengths: list[int], good: list[int]) -> None:
        found = store(*(np.int32(n) for n in (ids, past, lengths)), TABLE)
        assert np.flatnonzero(found[2]).tolist() == good
        chosen = [[n[b] for b in good] for n in (ids, past, lengths)]
        assert_bits_equal(found[0], oracles.store(k, np.asarray(key)[np.array(good, int)], TABLE, *chosen))

    check([0, 1, 2, 3], [0, 0, 4, 0], [3, 3, 3, 1], [0, 1, 2])  # no such slot
    check([-1, 1, 2, 0], [0, 12, 3, 10], [1, 1, 2, 2], [3])  # no such slot, full, no such block
    check([0, 0, 0, 1], [0, 2, 4, -1], [3, 3, 3, 1], [])  # 0 and 1 meet in token 2, 1 and 2 in token 4; a past below 0
    check([0, 0, 1, 2], [0, 3, 0, 4], [3, 3, 4, 3], [0, 1, 3])  # side by side; longer than what is given
    check([2, 1, 1, 0], [2, 2, 4, 0], [3, 3, 1, 0], [3])  # a sequence that meets one that is taken out anyway


@pytest.mark.tier("full")
def test_what_int8_cannot_hold_is_reported() -> None:
    k, v = (cache(i, "int8", 3, 4) for i in (0, 1))
    key = normal(0, 3, 2, K, D, dtype="float32").at[1, 1, 0, 0].set(jnp.nan).at[2, 0, 0, 0].set(jnp.inf)
    value = key.at[0].set(1e30)
    factors = {"key_scale": jnp.ones((K, D)), "value_scale": jnp.ones((K, D))}
    found = bijax.store_kv_cache(key, value, k, v, **factors)
    assert found[2].tolist() == [True, False, False]
    assert (found[1][0, :, :2] == 127).all()
    assert_bits_equal([c[1:] for c in found[:2]], [k[1:], v[1:]])
    nothing = bijax.store_kv_cache(key, key, k, v, **{**factors, "key_scale": jnp.zeros((K, D))}, q_lens=[1, 1, 1])
    assert not nothing[2].any()


@pytest.mark.parametrize("every", [False, full_only(True)], ids=["batches", "and transformations"])
def test_tokens_keep_their_bits(every: bool) -> None:
    key, past = normal(0, 9, 2, K, D, dtype="float32"), np.arange(9, dtype=np.int32) % 3
    k = jnp.zeros((16, K, 8, D), jnp.int8)

    def store(key: jax.Array, past: jax.Array) -> Any:
        batch = key.shape[0]
        found = bijax.store_kv_cache(key, key * 3, k, k, kv_lens=past, **scales("int8"))
        return found[0][:batch], found[1][:batch], found[2]

    assert_batch_invariant(store, key, past, batch_sizes=(1, 9), neighbours=("given", "nan"), modes=("jit",))
    if not every:
        return
    y = store(key, past)
    alone = jax.vmap(lambda x, p: store(x[None], p[None]))(key, past)
    assert_bits_equal([a[:, 0] for a in alone], list(y), err_msg="vmap")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_bits_equal(jax.jit(store)(key, past.astype(np.int64)), y, err_msg="x64 and strict promotion")
    assert_bits_equal(jax.jit(bijax.invariant(store))(key, past), y, err_msg="under the transform")


def test_control_plain_jax_differs() -> None:
    """The same harness on a plain projection that is quantised into a cache."""
    w = normal(1, 333, 140, dtype="float32")

    def plain(x: jax.Array) -> jax.Array:
        rows = (x @ w).reshape(-1, K, 70)
        return jnp.zeros((64, K, 4, 70)).at[jnp.arange(x.shape[0]), :, 0].set(rows)[: x.shape[0]]

    options: dict[str, Any] = {"batch_sizes": (1, 2, 33), "neighbours": ("given",), "modes": ("jit",)}
    assert batch_variance_report(plain, normal(0, 33, 333, dtype="float32"), **options).differing_elements


def test_what_is_lowered_for_cuda_is_fenced() -> None:
    def call(key: jax.Array, k: jax.Array, v: jax.Array, past: jax.Array) -> Any:
        return bijax.store_kv_cache(key, key, k, v, kv_lens=past, **scales("int8"))

    store = ((3, K, 4, D), jnp.int8)
    assert_fenced_on_cuda(call, ((3, 1, K, D), jnp.bfloat16), store, store, ((3,), jnp.int32))


X, C = (on_device(np.ones(shape, np.float32)) for shape in ((2, 3, K, D), (2, K, 4, D)))
C8 = on_device(np.ones((2, K, 4, D), np.int8))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kv_ids": [0, 2]}, ValueError, r"kv_ids must be in \[0, 1\].*got 2 at \(1,\)"),
        ({"kv_ids": [0]}, ValueError, r"kv_ids must have the shape \(2,\), got int64\[1\]"),
        ({"kv_ids": [0, 0]}, ValueError, r"sequences 0 and 1 both write token 0 of block 0"),
        ({"kv_lens": [0, 2]}, ValueError, r"kv_lens \+ q_lens must be in \[0, 4\].*got 5 at \(1,\)"),
        ({"kv_lens": [0, -1]}, ValueError, r"kv_lens must be in \[0, 4\]"),
        ({"kv_lens": [0.0, 1.0]}, TypeError, r"kv_lens must hold integers"),
        ({"q_lens": [4, 1]}, ValueError, r"q_lens must be in \[0, 3\]"),
        ({"key": X[0]}, ValueError, r"packed tokens need q_lens or accum_q_len"),
        ({"key": X[..., 0]}, ValueError, r"key and value must have the dimensions \(B, L, 2, 3\) or \(T, 2, 3\)"),
        ({"value": X[:1]}, ValueError, r"got key float32\[2,3,2,3\] and value float32\[1,3,2,3\]"),
        ({"value": X.astype(jnp.float16)}, TypeError, r"must share one dtype, got key float32.*value float16"),
        ({"k_cache": C8}, TypeError, r"k_cache and v_cache must share one dtype"),
        ({"k_cache": C[0], "v_cache": C[0]}, ValueError, r"must have the dimensions \(slots, K, S, D\)"),
        (
            {"k_cache": C8, "v_cache": C8},
            ValueError,
            r"key_scale is needed for a cache of int8 or float8_e4m3fn, got none with",
        ),
        (
            {"key_scale": ones((K, D))},
            ValueError,
            r"key_scale belongs to a cache of int8 or float8_e4m3fn, got one with k_cache",
        ),
        ({"k_cache": None}, TypeError, r"k_cache must be an array of .*, got NoneType"),
        ({"k_cache": C.astype(int)}, TypeError, r"k_cache must be an array of .*, got int32\[2,2,4,3\]"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"key": X, "value": X, "k_cache": C, "v_cache": C, **arguments}
    if "key" in arguments:
        given["value"] = given["key"]
    with pytest.raises(error, match=r"bijax\.store_kv_cache: .*" + message):
        bijax.store_kv_cache(**given)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            [[0], [5]],
            r"block_table must hold blocks in \[0, 2\) wherever tokens are written, got 5 for slot 1, token 0",
        ),
        ([[0], [0]], r"sequences 0 and 1 both write token 0 of block 0"),
        ([0, 1], r"block_table must have the shape \(slots, blocks of a slot\), got int64\[2\]"),
    ],
)
def test_wrong_tables(table: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"bijax\.store_paged_kv_cache: .*" + message):
        bijax.store_paged_kv_cache(X, X, table, C, C)


def test_differentiation_is_an_error() -> None:
    with pytest.raises(bijax.UnsupportedError, match=r"bijax\.store_kv_cache has no gradient"):
        jax.grad(lambda x: bijax.store_kv_cache(x, x, C, C)[0].sum())(X)
