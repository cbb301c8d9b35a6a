"""Attention with options on a GPU: one set of bits in batches, chunks, decode and pages."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.eight_bits import composed
from tests.goldens import cases

pytestmark = pytest.mark.gpu

LENGTH: Final = 704
HEADS: Final = 8
KEY_HEADS: Final = 2
TOKENS: Final = (0, 1, 63, 64, 65, 500, 699)


def array(seed: int, *shape: int, dtype: Any = "bfloat16") -> jax.Array:
    return jnp.asarray(cases.array(seed, shape, jnp.dtype(dtype)))


SLOPES, SINKS = jnp.abs(array(5, HEADS, dtype="float32")) / 8, array(6, HEADS, dtype="float32")

KINDS: Final[dict[str, dict[str, Any]]] = {
    "cap, sinks, slopes": {"logits_soft_cap": 5.0, "sinks": SINKS, "alibi_slopes": SLOPES},
    "cap, sinks, slopes, heads of 64": {"logits_soft_cap": 5.0, "sinks": SINKS, "alibi_slopes": SLOPES, "size": 64},
    "slopes, float16, heads of 256": {"alibi_slopes": SLOPES, "size": 256, "dtype": "float16"},
    "values of another width": {"value_size": 128, "size": 192},
    "int8": {"stored": "int8"},
    "float8_e4m3fn": {"stored": "float8_e4m3fn"},
    "float8_e4m3fn, heads of 96": {"stored": "float8_e4m3fn", "size": 96, "sinks": SINKS},
    "int8, heads of 192": {"stored": "int8", "size": 192},
    "int8, heads of 256, cap, slopes": {"stored": "int8", "size": 256, "logits_soft_cap": 5.0, "alibi_slopes": SLOPES},
    "float8_e4m3fn, values of another width": {"stored": "float8_e4m3fn", "size": 192, "value_size": 128},
    "int8, heads of 80, by Triton": {"stored": "int8", "size": 80},
    "float32": {"dtype": "float32", "logits_soft_cap": 5.0, "sinks": SINKS, "alibi_slopes": SLOPES},
}


def given(name: str) -> tuple[list[jax.Array], dict[str, Any]]:
    """Returns queries, keys and values of two sequences, and the options of their calls."""
    options = dict(KINDS[name])
    dtype, size = options.pop("dtype", "bfloat16"), options.pop("size", 128)
    value_size, stored = options.pop("value_size", size), options.pop("stored", None)
    shapes = ((HEADS, size), (KEY_HEADS, size), (KEY_HEADS, value_size))
    q, k, v = (array(i, 2, LENGTH, *s, dtype=dtype) for i, s in enumerate(shapes))
    if stored:
        k, v = ((40 * x).astype(stored) for x in (k, v))
        shapes = ((KEY_HEADS, size), (KEY_HEADS, value_size)) if stored == "int8" else ((KEY_HEADS,),) * 2
        scales = (jnp.abs(array(i, *shape, dtype="float32")) / 20 for i, shape in zip((7, 8), shapes, strict=True))
        options |= dict(zip(("key_scale", "value_scale"), scales, strict=True))
    return [q, k, v], options


@pytest.mark.parametrize("name", KINDS)
def test_prefill_chunks_decode_and_pages(name: str) -> None:
    (q, k, v), options = given(name)
    attend = functools.partial(bijax.dot_product_attention, is_causal=True, return_residual=True, **options)
    whole = jax.jit(attend)(q, k, v)
    assert_bits_equal(jax.jit(attend)(q[1:], k[1:], v[1:]), tuple(x[1:] for x in whole))
    at = jax.jit(attend)
    for chunk in (1, 7, 64):
        for start in TOKENS:
            if start + chunk > LENGTH:
                continue
            part = at(q[:, start : start + chunk], k, v, query_offset=np.full(2, start))
            assert_bits_equal(part, tuple(x[:, start : start + chunk] for x in whole), err_msg=f"{chunk} at {start}")
    paged = jax.jit(functools.partial(bijax.paged_attention, return_residual=True, **options))
    for page in (16, 22):  # the second size is one that no block is copied from
        entries = LENGTH // page
        table = np.random.default_rng(0).permutation(2 * entries).reshape(2, entries)
        shapes = [(x, (page, *x.shape[2:])) for x in (k, v)]
        pages = [
            jnp.zeros((2 * entries, *shape), x.dtype).at[table].set(x.reshape(2, entries, *shape))
            for x, shape in shapes
        ]
        found = paged(q[:, 690:], *pages, table, np.full(2, LENGTH))
        assert_bits_equal(found, tuple(x[:, 690:] for x in whole), err_msg=f"pages of {page}")


PAIRS: Final[dict[str, dict[str, Any]]] = {
    "bias": {"bias": (2, HEADS, LENGTH, LENGTH)},
    "bias of all heads, float32": {"bias": (2, 1, LENGTH, LENGTH), "bias_dtype": "float32", "size": 64},
    "bias of keys": {"bias": (1, HEADS, 1, LENGTH), "dtype": "float16"},
    "bias of queries, wide heads": {"bias": (1, 1, LENGTH, 1), "size": 256},
    "mask": {"mask": (2, HEADS, LENGTH, LENGTH), "size": 64},
    "mask of keys": {"mask": (2, 1, 1, LENGTH)},
    "bias, mask, cap, sinks, slopes": {
        "bias": (1, HEADS, LENGTH, LENGTH),
        "mask": (2, 1, LENGTH, LENGTH),
        **{"logits_soft_cap": 5.0, "sinks": SINKS, "alibi_slopes": SLOPES},
    },
    "mask, values of another width": {"mask": (1, 1, LENGTH, LENGTH), "size": 192, "value_size": 128},
    "bias, int8": {"bias": (1, 1, LENGTH, LENGTH), "stored": "int8"},
}


@pytest.mark.parametrize("name", PAIRS)
def test_bias_and_mask_in_chunks_decode_and_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of which a mask leaves no key, and a bias of -inf, are among them."""
    shapes = dict(PAIRS[name])
    bias_shape, mask_shape = shapes.pop("bias", None), shapes.pop("mask", None)
    bias_dtype = shapes.pop("bias_dtype", "bfloat16")
    monkeypatch.setitem(KINDS, name, shapes)
    (q, k, v), options = given(name)
    pairs: dict[str, jax.Array] = {}
    if bias_shape:
        bias = array(9, *bias_shape, dtype=bias_dtype)
        pairs["bias"] = jnp.where(array(11, *bias_shape) > 2, -jnp.inf, bias).astype(bias_dtype)
    if mask_shape:
        mask = array(12, *mask_shape) > -0.5
        pairs["mask"] = mask.at[..., 5:8, :].set(False) if mask_shape[2] > 1 else mask
    for x in pairs.values():
        assert x.any()

    def rows(at: slice) -> dict[str, jax.Array]:
        return {name: x if x.shape[2] == 1 else x[:, :, at] for name, x in pairs.items()}

    def alone(x: jax.Array) -> jax.Array:
        return x if x.shape[0] == 1 else x[1:]

    attend = jax.jit(functools.partial(bijax.dot_product_attention, is_causal=True, return_residual=True, **options))
    whole = attend(q, k, v, **pairs)
    assert np.isfinite(np.asarray(whole[0], np.float32)).any()
    assert_bits_equal(attend(*map(alone, (q, k, v)), **jax.tree.map(alone, pairs)), tuple(x[1:] for x in whole))
    for chunk in (1, 7, 64):
        for start in TOKENS:
            at = slice(start, start + chunk)
            if at.stop > LENGTH:
                continue
            part = attend(q[:, at], k, v, **rows(at), query_offset=np.full(2, start))
            assert_bits_equal(part, tuple(x[:, at] for x in whole), err_msg=f"{chunk} at {start}")
    entries = LENGTH // 16
    table = np.random.default_rng(0).permutation(2 * entries).reshape(2, entries)
    pages = [
        jnp.zeros((2 * entries, 16, *x.shape[2:]), x.dtype).at[table].set(x.reshape(2, entries, 16, *x.shape[2:]))
        for x in (k, v)
    ]
    paged = jax.jit(functools.partial(bijax.paged_attention, return_residual=True, **options))
    found = paged(q[:, 690:], *pages, table, np.full(2, LENGTH), **rows(slice(690, LENGTH)))
    assert_bits_equal(found, tuple(x[:, 690:] for x in whole), err_msg="pages")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_8_bits_have_the_bits_of_their_contract(stored: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "here", {"stored": stored, "dtype": dtype})
    (q, k, v), options = given("here")
    attend = bijax.dot_product_attention
    found = jax.jit(functools.partial(attend, **options))(q, k, v)
    assert_bits_equal(found, composed(jax.jit(attend), q, (k, v), options.values()))


@pytest.mark.parametrize("size", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_8_bits_of_several_splits(stored: str, size: int) -> None:
    """A few rows have their keys as rows of the products; a prefill does not."""
    length, starts = 1301, np.array([0, 126, 127, 1022, 1023, 1024, 1299])
    q, *caches = (array(i, 1, length, n, size) for i, n in enumerate((HEADS, KEY_HEADS, KEY_HEADS)))
    factors = [jnp.abs(array(i, KEY_HEADS, size, dtype="float32")) / 20 for i in (7, 8)]
    k, v = ((40 * x).astype(stored) for x in caches)
    attend = functools.partial(bijax.dot_product_attention, is_causal=True, return_residual=True)
    expected = composed(jax.jit(attend), q, (k, v), factors)
    bytewise = jax.jit(functools.partial(attend, key_scale=factors[0], value_scale=factors[1]))
    for count in (1, 2):
        queries = jnp.concatenate([q[:, t : t + count] for t in starts])
        many = [jnp.broadcast_to(x, (len(starts), *x.shape[1:])) for x in (k, v)]
        found = bytewise(queries, *many, query_offset=starts, key_value_seq_lengths=starts + count)
        assert_bits_equal(found, tuple(jnp.concatenate([x[:, t : t + count] for t in starts]) for x in expected))


@pytest.mark.parametrize("kind", ["cancelling", "small", "not finite"])
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_8_bits_of_hostile_numbers(stored: str, kind: str) -> None:
    """Keys as rows of the products add the 16 products of a step in another order than a prefill."""
    length, rng = 1301, np.random.default_rng(0)
    q, *caches = (np.array(array(i, 1, length, n, 128)) for i, n in enumerate((HEADS, KEY_HEADS, KEY_HEADS)))
    factors = [np.abs(np.asarray(array(i, KEY_HEADS, 128, dtype="float32"))) / 20 for i in (7, 8)]
    k, v = (np.asarray((40 * jnp.asarray(x)).astype(stored)).copy() for x in caches)
    if kind == "cancelling":
        factors = [x * np.exp2(rng.integers(-12, 9, x.shape)).astype(np.float32) for x in factors]
        k[..., 1::2], q[..., 1::2] = -k[..., ::2], q[..., ::2]
        factors[0][:, 1::2] = factors[0][:, ::2] * (1 + 2.0**-7)
    elif kind == "small":
        q, factors[0] = (q.astype(np.float32) * 2.0**-60).astype(q.dtype), factors[0] * 2.0**-66
    else:
        factors[1][1, 5] = np.inf
        if stored != "int8":
            v[0, 1200, 0, 3] = v[0, 40, 1, 7] = np.nan
    attend = functools.partial(bijax.dot_product_attention, is_causal=True, return_residual=True)
    expected = composed(jax.jit(attend), q, (k, v), factors)
    bytewise = jax.jit(functools.partial(attend, key_scale=factors[0], value_scale=factors[1]))
    starts = np.tile([0, 30, 40, 1023, 1199, 1200, 1300], 5)  # items for more than one worker of some blocks
    many = [np.broadcast_to(x, (len(starts), *x.shape[1:])) for x in (k, v)]
    found = bytewise(q[0, starts][:, None], *many, query_offset=starts, key_value_seq_lengths=starts + 1)
    assert_bits_equal(found, tuple(x[0, starts][:, None] for x in expected))
    assert np.isfinite(np.asarray(found[0], np.float32)).all() == (kind != "not finite")


def test_against_float64() -> None:
    (q, k, v), options = given("cap, sinks, slopes")
    bias, ct = array(9, 1, HEADS, 1, LENGTH, dtype="float32"), array(10, *q.shape, dtype="float32")

    def ours(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        return bijax.dot_product_attention(q, k, v, bias, is_causal=True, **{**options, "sinks": sinks})

    def reference(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        k, v = (jnp.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (k, v))
        distance = jnp.arange(LENGTH) - jnp.arange(LENGTH)[:, None]
        scores = 5 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[3]) / 5) + bias
        scores = jnp.where(distance <= 0, scores + SLOPES[:, None, None] * distance, -jnp.inf)
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights[..., :-1], v)

    out, pull = jax.vjp(jax.jit(ours), q, k, v, SINKS, bias)
    found = (out, *pull(ct.astype(out.dtype)))
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v, SINKS, bias)]
        right, pull = jax.vjp(reference, *wide)
        expected = (right, *pull(jnp.asarray(np.asarray(ct.astype(out.dtype), np.float64))))
    for x, y in zip(found, expected, strict=True):
        assert np.abs(np.asarray(x, np.float64) - np.asarray(y)).max() <= 0.02 * np.abs(np.asarray(y)).max()


def test_gradients_in_batches_and_again() -> None:
    """Those of queries, keys, values and a bias of the sequence alone; that of a shared bias again and again."""
    (q, k, v), options = given("cap, sinks, slopes")
    ct, bias = array(10, *q.shape), array(9, 2, 1, LENGTH, LENGTH)

    @jax.jit
    def gradients(q: Any, k: Any, v: Any, bias: Any, ct: Any) -> Any:
        _, pull = jax.vjp(lambda *a: bijax.dot_product_attention(*a, is_causal=True, **options), q, k, v, bias)
        return pull(ct)

    whole = gradients(q, k, v, bias, ct)
    assert_bits_equal(gradients(*(x[1:] for x in (q, k, v, bias, ct))), tuple(x[1:] for x in whole))
    shared = gradients(q, k, v, bias[:1], ct)
    for _ in range(3):
        assert_bits_equal(gradients(q, k, v, bias[:1], ct), shared)


def test_packed_sequences() -> None:
    """By the kernels for Hopper."""
    sums = np.array([0, 300, 301, 690], np.int32)
    q, k, v, ct = (array(i, LENGTH, n, 128) for i, n in enumerate((HEADS, KEY_HEADS, KEY_HEADS, HEADS)))

    def run(q: Any, k: Any, v: Any, ct: Any, **options: Any) -> Any:
        attend = functools.partial(bijax.dot_product_attention, is_causal=True, **options)
        out, pull = jax.vjp(attend, q, k, v)
        return (out, *pull(ct))

    packed = jax.jit(functools.partial(run, max_query_seq_length=400))
    found = packed(q, k, v, ct, cu_query_seq_lengths=sums)
    for i in range(3):
        own = slice(*sums[i : i + 2])
        assert_bits_equal(jax.jit(run)(*(x[own] for x in (q, k, v, ct))), tuple(x[own] for x in found))


def test_cudnn_is_replaced() -> None:
    q, k, v = (array(i, 2, 512, n, 64) for i, n in enumerate((HEADS, KEY_HEADS, KEY_HEADS)))
    bias = array(9, 1, HEADS, 512, 512)
    theirs = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")

    def gradients(attend: Any, *arrays: Any, **options: Any) -> Any:
        return jax.grad(lambda *a: attend(*a, **options).astype(jnp.float32).sum(), range(len(arrays)))(*arrays)

    for arrays, options in (((q, k, v), {"is_causal": True, "local_window_size": (100, 0)}), ((q, k, v, bias), {})):
        call = functools.partial(gradients, theirs, **options)
        found = jax.jit(bijax.invariant(call))(*arrays)
        expected = jax.jit(functools.partial(gradients, bijax.dot_product_attention, **options))(*arrays)
        assert_bits_equal(found, expected)
        assert "__cudnn" not in jax.jit(bijax.invariant(call)).lower(*arrays).compile().as_text()
