"""Soft cap, sinks, slopes, values of another width, gradients of biases: what they mean, and bits in any batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.jax_triton.packages import HAS_JAX_TRITON
from tests.tiers import full_only

BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 2, 8, 140, 4, 2, 8, 4
OFFSET = KEYS - QUERIES


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


Q, CT = random(0, BATCH, QUERIES, HEADS, SIZE), random(3, BATCH, QUERIES, HEADS, VALUE_SIZE)
K, V = random(1, BATCH, KEYS, KEY_HEADS, SIZE), random(2, BATCH, KEYS, KEY_HEADS, VALUE_SIZE)
SINKS, SLOPES = 4 * random(5, HEADS), np.abs(random(6, HEADS)) / 8
MASK = random(9, BATCH, 1, 1, KEYS) > -1
OPTIONS: dict[str, Any] = {"logits_soft_cap": 2.5, "alibi_slopes": SLOPES, "scale": 0.7, "is_causal": True}


def run(q: Any, k: Any, v: Any, ct: Any, mask: Any, bias: Any = None, offset: Any = OFFSET) -> tuple[jax.Array, ...]:
    """The output, its log-sum-exp and the gradients of queries, keys, values, sinks and the bias."""
    given = () if bias is None else (bias,)

    def attend(q: Any, k: Any, v: Any, sinks: Any, *bias: Any) -> tuple[jax.Array, jax.Array]:
        more = {"sinks": sinks, "mask": mask, "query_offset": offset, "return_residual": True}
        return bijax.dot_product_attention(q, k, v, *bias, **OPTIONS, **more)

    out, pull, lse = jax.vjp(attend, q, k, v, SINKS, *given, has_aux=True)
    return (out, lse, *pull(ct))


compiled = jax.jit(run)


@jax.jit
def results(q: Any, k: Any, v: Any, mask: Any, bias: Any, offset: Any = OFFSET) -> tuple[jax.Array, jax.Array]:
    """The output and its log-sum-exp alone."""
    more = {"sinks": SINKS, "mask": mask, "query_offset": offset, "return_residual": True}
    return bijax.dot_product_attention(q, k, v, bias, **OPTIONS, **more)


def reference(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> tuple[Any, Any]:
    """In the precision of its arguments, spelled out."""
    k, v = (jnp.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (k, v))
    distance = jnp.arange(KEYS) - (OFFSET + jnp.arange(QUERIES))[:, None]
    scores = 2.5 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) * 0.7 / 2.5) + bias
    scores = jnp.where(MASK & (distance <= 0), scores + SLOPES.astype(q.dtype)[:, None, None] * distance, -jnp.inf)
    column = jnp.broadcast_to(sinks[:, None, None], (BATCH, HEADS, QUERIES, 1))
    scores = jnp.concatenate([scores, column], axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1)[..., :-1], v)
    return out, jnp.moveaxis(jax.nn.logsumexp(scores, axis=-1), 1, 2)


# That of `make test` has the program of the next test.
@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "shape",
    [
        (BATCH, 1, QUERIES, KEYS),
        *map(full_only, [(1, HEADS, QUERIES, KEYS), (BATCH, 1, 1, KEYS), (1, HEADS, 1, 1), (QUERIES, KEYS)]),
    ],
)
def test_float64(shape: tuple[int, ...]) -> None:
    """Forward and all gradients; that of a bias adds up what it was broadcast over."""
    bias = random(7, *shape)
    found = compiled(Q, K, V, CT, MASK, bias)
    assert found[-1].shape == shape
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (Q, K, V, SINKS, bias, CT)]

        @jax.jit
        def exact(*arrays: jax.Array) -> Any:
            out, pull, lse = jax.vjp(reference, *arrays[:5], has_aux=True)
            return (out, lse, *pull(arrays[5]))

        expected = [np.asarray(x) for x in exact(*wide)]
        wide[4] = jnp.broadcast_to(wide[4], (BATCH, HEADS, QUERIES, KEYS))
        terms = np.abs(exact(*wide)[-1])
    sizes = [np.abs(right).max() for right in expected]
    # The terms of a bias's gradient cancel: each of them has the error of its own size.
    whole = (1,) * (4 - len(shape)) + shape
    sizes[-1] = terms.sum(tuple(i for i, n in enumerate(whole) if n == 1), keepdims=True).max()
    for ours, right, size in zip(found, expected, sizes, strict=True):
        assert np.abs(np.asarray(ours) - right).max() <= 5e-6 * size


@pytest.mark.parametrize("gradients", [False, full_only(True)], ids=["results", "gradients"])
def test_a_sequence_alone_and_each_query_alone(gradients: bool) -> None:
    bias = random(8, BATCH, 1, QUERIES, KEYS)
    if not gradients:  # of one query of one sequence
        one = results(Q[1:, 5:6], K[1:], V[1:], MASK[1:], bias[1:, :, 5:6], OFFSET + 5)
        assert_bits_equal(one, tuple(x[1:, 5:6] for x in results(Q, K, V, MASK, bias)))
        return
    whole = compiled(Q, K, V, CT, MASK, bias)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks", "dbias")
    alone = compiled(*(x[1:] for x in (Q, K, V, CT, MASK, bias)))
    for name, ours, right in zip(names, alone, whole, strict=True):
        if name != "dsinks":  # a sum over the batch
            assert_bits_equal(ours, right[1:])
    one = jax.jit(functools.partial(run, offset=OFFSET + 5))(Q[:, 5:6], K, V, CT[:, 5:6], MASK, bias[:, :, 5:6])
    assert_bits_equal(one[:3], tuple(x[:, 5:6] for x in whole[:3]))
    assert_bits_equal(one[-1], whole[-1][:, :, 5:6])


@pytest.mark.parametrize("gradients", [False, full_only(True)], ids=["results", "gradients"])
def test_what_is_masked_leaves_no_trace(gradients: bool) -> None:
    bias = random(8, BATCH, 1, QUERIES, KEYS)
    hidden = np.flatnonzero(~MASK[0, 0, 0])[[0, -1]]
    assert hidden[1] > 128  # in both blocks
    k, v = K.copy(), V.copy()
    k[0, hidden[0]], v[0, hidden[1]], v[0, hidden[0]] = np.nan, np.inf, -np.inf
    if gradients:
        whole, found = (compiled(Q, *x, CT, MASK, bias)[:3] for x in ((K, V), (k, v)))
    else:
        whole, found = (results(Q, *x, MASK, bias) for x in ((K, V), (k, v)))
    assert_bits_equal(found, whole)


@pytest.mark.tier("full")
def test_pages_and_longer_caches() -> None:
    """With everything at once; the arrays hold nan beyond the keys."""
    options = {**OPTIONS, "sinks": SINKS, "return_residual": True}
    bias, mask = random(13, 1, QUERIES, 160), random(14, BATCH, 1, 1, 160) > -1
    attend = functools.partial(bijax.dot_product_attention, query_offset=OFFSET, **options)
    expected = jax.jit(attend)(Q, K, V, bias[..., :KEYS], mask[..., :KEYS])
    k, v = (np.pad(x, [(0, 0), (0, 20), (0, 0), (0, 0)], constant_values=np.nan) for x in (K, V))
    longer = jax.jit(functools.partial(attend, key_value_seq_lengths=np.full(BATCH, KEYS)))
    assert_bits_equal(longer(Q, k, v, bias, mask), expected)
    table = np.random.default_rng(0).permutation(2 * 16).reshape(2, 16)
    pages = [np.zeros((32, 10, *x.shape[2:]), np.float32) for x in (k, v)]
    for page, x in zip(pages, (k, v), strict=True):
        page[table] = x.reshape(2, 16, 10, *x.shape[2:])
    paged = jax.jit(functools.partial(bijax.paged_attention, page_table=table, lengths=KEYS, **options))
    assert_bits_equal(paged(Q, *pages, bias=bias, mask=mask), expected)


@pytest.mark.tier("full")
def test_vmap_keeps_the_bits_of_gradients() -> None:
    """A bias that the mapped axis does not carry has a gradient for each entry."""
    bias = random(9, 1, HEADS, QUERIES, KEYS)

    def single(q: Any, k: Any, v: Any, ct: Any) -> Any:
        return run(q[None], k[None], v[None], ct[None], None, bias)

    found = jax.jit(jax.vmap(single))(Q, K, V, CT)
    for i in range(BATCH):
        assert_bits_equal(tuple(x[i] for x in found), compiled(*(x[i : i + 1] for x in (Q, K, V, CT)), None, bias))


@pytest.mark.tier("full")
def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = Q[:1], K[:1], V[:1]
    # A soft cap, as in the other tests, so that the same tiles are compared.
    attend = jax.jit(functools.partial(bijax.dot_product_attention, return_residual=True, logits_soft_cap=2.5))
    none = np.full(HEADS, -np.inf, np.float32)
    assert_bits_equal(attend(q, k, v, sinks=none, key_value_seq_lengths=np.array([KEYS])), attend(q, k, v))
    out, lse = attend(q, k, v, sinks=SINKS, key_value_seq_lengths=np.array([0]))
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()


@pytest.mark.tier("full")
def test_the_control_differs() -> None:
    """The gradient of a bias by plain JAX, of one query alone and among others."""

    def gradient(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return jax.grad(lambda b: jax.nn.dot_product_attention(q, k, v, b).sum())(bias)

    q, v, bias = random(10, 1, 64, HEADS, SIZE), random(11, 1, KEYS, KEY_HEADS, SIZE), random(12, 1, HEADS, 64, KEYS)
    whole = np.asarray(jax.jit(gradient)(q, K[:1], v, bias))
    differing = 0
    for size in (1, 3, 7):
        part = np.asarray(jax.jit(gradient)(q[:, :size], K[:1], v, bias[:, :, :size]))
        differing += int((whole[:, :, :size] != part).sum())
    assert differing


def test_what_the_kernels_of_hopper_do_not_serve_has_a_contract_of_its_own() -> None:
    heads = jnp.ones(HEADS)
    q, k, v = (jnp.ones((1, 8, n, 64), jnp.bfloat16) for n in (HEADS, KEY_HEADS, KEY_HEADS))
    eight = {"key": k.astype(jnp.int8), "value": v.astype(jnp.int8), "key_scale": heads[:2], "value_scale": heads[:2]}
    of_heads: tuple[dict[str, Any], ...] = ({"logits_soft_cap": 3.0}, {"sinks": heads}, {"alibi_slopes": heads})
    pairs: tuple[dict[str, Any], ...] = ({"bias": heads[:, None, None]}, {"mask": heads[:, None, None] > 0})
    others: tuple[dict[str, Any], ...] = ({"value": v[..., :32]},)
    hopper = "attention/v1/f32-wgmma16-keys128-split1024"
    anywhere = "attention/v3/f32-mma16" if HAS_JAX_TRITON else "attention/v1/f32-rounded-keys128-online"
    call = functools.partial(bijax.contracts, platform="cuda", architecture="sm_90")
    for change, expected in (*((c, hopper) for c in ({}, *of_heads, *pairs, eight)), *((c, anywhere) for c in others)):
        given = {"query": q, "key": k, "value": v, **change}
        ids = [i for i in call(lambda given=given: bijax.dot_product_attention(**given)).ids if "attention" in i]
        assert len(ids) == 1
        assert ids[0].startswith(expected), change
