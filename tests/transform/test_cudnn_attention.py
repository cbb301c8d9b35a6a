"""JAX's attention by cuDNN under `bijax.invariant`: the primitives as JAX binds them, on a machine without a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device
from tests.tiers import full_only, tiered

B, T, S, N, K, H = 2, 8, 100, 4, 2, 8
LENGTHS = (jnp.array([8, 5], jnp.int32), jnp.array([100, 31], jnp.int32))


@pytest.fixture(autouse=True)
def _as_if_there_was_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets JAX bind its primitives; they are never lowered to cuDNN here."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91500)


def random(seed: int, *shape: int) -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16))


Q, CT = (random(seed, B, T, N, H) for seed in (0, 3))
KEY, VALUE = (random(seed, B, S, K, H) for seed in (1, 2))
BIAS = random(4, 1, N, T, S)
LIMITS = {"query_seq_lengths": LENGTHS[0], "key_value_seq_lengths": LENGTHS[1]}

CASES: dict[str, dict[str, Any]] = {
    "window": {"local_window_size": (3, 0), "scale": 0.2},
    "lengths": {**LIMITS, "is_causal": True},
    "bias": {"bias": BIAS},
    "lengths and bias": {**LIMITS, "is_causal": True, "bias": BIAS},
    "mask": {"mask": jnp.arange(S)[None, None, None] + jnp.zeros((B, N, T, 1), int) < 33},
}


def results(attend: Any, *arrays: jax.Array, **options: Any) -> Any:
    """The outputs, and the gradients of queries, keys, values and the bias."""
    names = [name for name in ("bias",) if name in options]

    def run(q: Any, k: Any, v: Any, *biases: Any) -> Any:
        return attend(q, k, v, **{**options, **dict(zip(names, biases, strict=True))})

    out, pull = jax.vjp(run, *arrays[:3], *(options[name] for name in names))
    return (out, *pull(arrays[3]))


@pytest.mark.parametrize("compiled", [False, full_only(True)], ids=["lowered", "compiled"])
@pytest.mark.parametrize("name", tiered(CASES, fast=["lengths and bias"]))
def test_it_has_the_bits_of_the_library(name: str, compiled: bool) -> None:
    """Forward and backward; `jax.nn` with cuDNN and ours mean the same windows, lengths and biases."""
    options = CASES[name]
    theirs = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    if not compiled:
        program = jax.jit(bijax.invariant(functools.partial(results, theirs, **options)))
        assert "cudnn" not in program.lower(Q, KEY, VALUE, CT).as_text()
        return
    found = jax.jit(bijax.invariant(functools.partial(results, theirs, **options)))(Q, KEY, VALUE, CT)
    if name == "mask":  # JAX makes a bias of it, and does not ask for its gradient
        options = {"bias": jnp.where(options["mask"], 0, jnp.finfo(jnp.float32).min).astype(jnp.bfloat16)}
        expected = jax.jit(functools.partial(results, bijax.dot_product_attention, **options))(Q, KEY, VALUE, CT)[:4]
    else:
        expected = jax.jit(functools.partial(results, bijax.dot_product_attention, **options))(Q, KEY, VALUE, CT)
    assert_bits_equal(found, expected)


def test_against_jax() -> None:
    """`jax.nn` by XLA is the reference of what the arguments mean."""
    options = {**CASES["lengths"], **CASES["window"], **CASES["bias"]}
    theirs = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    found = jax.jit(bijax.invariant(functools.partial(theirs, **options)))(Q, KEY, VALUE)
    options["bias"] = options["bias"].astype(jnp.float32)
    plain = jax.jit(functools.partial(jax.nn.dot_product_attention, **options))
    expected = plain(*(x.astype(jnp.float32) for x in (Q, KEY, VALUE)))
    seen = np.arange(T) < np.asarray(LENGTHS[0])[:, None]
    np.testing.assert_allclose(np.asarray(found, np.float32)[seen], np.asarray(expected)[seen], atol=2e-2)


@pytest.mark.tier("full")
def test_the_log_sum_exp_vmap_and_a_sequence_alone() -> None:
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", return_residual=True)
    run = jax.jit(bijax.invariant(functools.partial(attend, is_causal=True)))
    out, lse = run(Q, KEY, VALUE)
    expected = bijax.dot_product_attention(Q, KEY, VALUE, is_causal=True, return_residual=True)
    assert_bits_equal((out, lse), (expected[0], expected[1].astype(jnp.bfloat16)))
    assert_bits_equal(run(Q[:1], KEY[:1], VALUE[:1]), (out[:1], lse[:1]))
    one = jax.jit(jax.vmap(bijax.invariant(lambda q, k, v: attend(q, k, v, is_causal=True)[0])))
    assert_bits_equal(one(Q[:, None], KEY[:, None], VALUE[:, None])[:, 0], out)


@pytest.mark.tier("full")
@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
def test_pages_and_layouts(layout: str) -> None:
    page, order = 10, np.random.default_rng(0).permutation(B * S // 10)
    table = order.reshape(B, S // page)
    pages = [
        jnp.zeros((B * S // page, page, K, H), x.dtype).at[table].set(x.reshape(B, -1, page, K, H))
        for x in (KEY, VALUE)
    ]
    arrays = [jnp.swapaxes(x, 1, 2) if layout == "BNTH" else x for x in (Q, *pages)]
    tables = jnp.asarray(table, jnp.int32)[:, None, :, None]
    attend = functools.partial(cudnn.paged_attention, mask_type=cudnn.MaskType.PADDING, qkv_layout=layout, scale=0.25)
    found = jax.jit(bijax.invariant(lambda *a: attend(*a, *LENGTHS, tables, tables)))(*arrays)
    expected = bijax.paged_attention(
        Q, *pages, table, LENGTHS[1], is_causal=False, scale=0.25, query_seq_lengths=LENGTHS[0], query_offset=0
    )
    assert_bits_equal(jnp.swapaxes(found, 1, 2) if layout == "BNTH" else found, expected)


def test_what_is_not_served_says_what_to_use() -> None:
    attend = functools.partial(cudnn.dot_product_attention, Q, KEY, VALUE)
    ones = jnp.ones((B, 2), jnp.int32)
    offsets = jnp.array([[0, 1, 2]] * B, jnp.int32)
    for options, instead in (
        ({"dropout_rate": 0.1}, "apply the dropout after attention"),
        ({"mask_type": cudnn.MaskType.ALIBI}, "alibi_slopes"),
        ({"q_seqlen": ones, "kv_seqlen": ones, "q_offsets": offsets, "kv_offsets": offsets}, "cu_query_seq_lengths"),
        ({"score_mod": jnp.tanh}, "logits_soft_cap"),
    ):
        if "score_mod" in options and "score_mod" not in cudnn.dot_product_attention.__kwdefaults__:
            continue  # this version of JAX has none
        call = bijax.invariant(functools.partial(attend, **options))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cudnn, "check_compute_capability", lambda _: True)
            with pytest.raises(bijax.NotInvariantError, match=instead):
                jax.jit(call).lower()
            (found,) = bijax.audit(call).variant
        assert instead in found.evidence
