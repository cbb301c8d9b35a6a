"""Rotary embedding: the numbers of the oracle, and the same bits packed, padded, alone and in batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report
from tests.arrays import on_device
from tests.operators import oracles
from tests.operators.lowering import assert_fenced_on_cuda
from tests.tiers import full_only

Q, KV, D, DIM, POSITIONS = 3, 1, 10, 6, 20
H = Q + 2 * KV
HEADS = {"q_head_num": Q, "kv_head_num": KV}


def normal(seed: int, *shape: int, dtype: Any = "float32") -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def tables(dtype: str = "bfloat16") -> tuple[jax.Array, jax.Array]:
    return normal(1, POSITIONS, DIM, dtype=dtype), normal(2, POSITIONS, DIM, dtype=dtype)


def rotated(x: jax.Array, sin: jax.Array, cos: jax.Array, **known: Any) -> jax.Array:
    """Returns the result of one program, in which lengths and positions are known."""
    return jax.jit(lambda x: bijax.rotary_embedding(x, sin, cos, **known))(x)


@pytest.mark.tier("full", fast=("[3, 0, 4]-bfloat16-False-0",))
@pytest.mark.parametrize(
    ("dtype", "interleaved", "offset"), [("bfloat16", False, 0), ("bfloat16", True, 4), ("float32", False, 3)]
)
@pytest.mark.parametrize("lengths", [[3, 0, 4], [1], []], ids=str)
def test_the_numbers_of_the_oracle(dtype: str, interleaved: bool, offset: int, lengths: list[int]) -> None:
    sin, cos = tables()
    batch, most = len(lengths), max(lengths, default=0)
    starts = [(5 * b) % 13 for b in range(batch)]
    kind = {**HEADS, "rope_offset": offset, "interleaved": interleaved, "position_ids": starts}
    padded = normal(3, batch, most + 1, H, D, dtype=dtype)
    y = rotated(padded, sin, cos, q_lens=lengths, max_q_len=most, **kind)
    expected = oracles.rotary(padded, sin, cos, KV, starts, lengths, offset, interleaved)
    assert_bits_equal(y, expected)

    rows = [padded[b, :n] for b, n in enumerate(lengths)]
    packed = jnp.concatenate([*rows, normal(4, 2, H, D, dtype=dtype)])
    wanted = np.concatenate([*(expected[b, :n] for b, n in enumerate(lengths)), packed[-2:]])
    sums = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    assert_bits_equal(rotated(packed, sin, cos, q_lens=lengths, **kind), wanted)
    assert_bits_equal(rotated(packed, sin, cos, accum_q_len=sums, **kind), wanted)
    del kind["position_ids"]
    traced = jax.jit(
        lambda x, p, q, a: bijax.rotary_embedding(x, sin, cos, position_ids=p, q_lens=q, accum_q_len=a, **kind)
    )
    assert_bits_equal(traced(packed, np.int32(starts), np.int32(lengths), sums), wanted, err_msg="traced")
    assert_bits_equal(traced(padded, np.int32(starts), np.int32(lengths), None), expected, err_msg="traced")


def test_positions_start_at_0_by_default() -> None:
    x, (sin, cos) = normal(0, 2, 3, H, D), tables()
    assert_bits_equal(rotated(x, sin, cos, **HEADS), oracles.rotary(x, sin, cos, KV, [0, 0], [3, 3]))


@pytest.mark.tier("full")
def test_what_is_traced_and_out_of_range_is_nan() -> None:
    x, (sin, cos) = normal(0, 3, 2, H, D), tables()
    call = jax.jit(lambda x, p, q: bijax.rotary_embedding(x, sin, cos, position_ids=p, q_lens=q, **HEADS))
    y = np.asarray(call(x, np.int32([POSITIONS - 1, -1, 0]), np.int32([2, 2, 3])))
    bad = np.isnan(y[:, :, : Q + KV, :DIM]).all((2, 3))
    assert bad.tolist() == [[False, True], [True, True], [True, True]]
    assert_bits_equal(y[:, :, Q + KV :], x[:, :, Q + KV :])
    assert_bits_equal(y[..., DIM:], x[..., DIM:])
    packed = x.reshape(6, H, D)
    call = jax.jit(lambda x, q, a: bijax.rotary_embedding(x, sin, cos, q_lens=q, accum_q_len=a, **HEADS))
    for lengths, sums in (([5, 2], None), ([2**30] * 8, None), ([2, 1], [0, 2, 4]), ([-1, 3], None)):
        y = call(packed, np.int32(lengths), None if sums is None else np.int32(sums))
        assert np.isnan(y[:, : Q + KV, :DIM]).all()


@pytest.mark.parametrize("every", [False, full_only(True)], ids=["batches", "and transformations"])
def test_rows_keep_their_bits(every: bool) -> None:
    x, (sin, cos) = normal(0, 9, H, D), tables("float32")
    starts = np.arange(9, dtype=np.int32)

    def decode(x: jax.Array, p: jax.Array) -> Any:
        def rotate(x: jax.Array) -> jax.Array:
            return bijax.rotary_embedding(x[:, None], sin, cos, position_ids=p, **HEADS)

        y, pull = jax.vjp(rotate, x)
        return y, pull(y)

    assert_batch_invariant(decode, x, starts, batch_sizes=(1, 9), neighbours=("given", "nan"), modes=("jit",))
    y = decode(x, starts)[0]
    whole = rotated(x, sin, cos, q_lens=[9], **HEADS)
    assert_bits_equal(whole, y[:, 0], err_msg="prefill and decode")
    if not every:
        return
    one = jax.vmap(lambda x, p: bijax.rotary_embedding(x[None], sin, cos, position_ids=p[None], q_lens=[1], **HEADS))
    assert_bits_equal(jax.jit(one)(x, starts), y, err_msg="vmap")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        strict = jax.jit(lambda x: bijax.rotary_embedding(x, sin, cos, q_lens=np.int64([4, 5]), **HEADS))(x)
        assert_bits_equal(strict[:4], whole[:4])
    invariant = bijax.invariant(lambda x: bijax.rotary_embedding(x, sin, cos, q_lens=[9], **HEADS))
    assert_bits_equal(jax.jit(invariant)(x), whole, err_msg="under the transform")


def test_control_plain_jax_differs() -> None:
    """The same harness on the projection and the rotation in plain JAX."""
    w, sin, cos = normal(3, 333, 140), normal(1, 70), normal(2, 70)

    def plain(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x @ w, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    options: dict[str, Any] = {"batch_sizes": (1, 2, 33), "neighbours": ("given",), "modes": ("jit",)}
    assert batch_variance_report(plain, normal(0, 33, 333), **options).differing_elements


@pytest.mark.parametrize("interleaved", [full_only(False), True])
def test_the_gradient_is_the_rotation_back(interleaved: bool) -> None:
    x, g, (sin, cos) = normal(0, 1, 3, H, D), normal(5, 1, 3, H, D), tables("float32")
    kind = {**HEADS, "rope_offset": 2, "interleaved": interleaved, "q_lens": [2]}
    _, pull = jax.vjp(lambda x: bijax.rotary_embedding(x, sin, cos, **kind), x)
    (dx,) = pull(g)
    with jax.enable_x64(True):
        basis = np.eye(x.size).reshape(-1, *x.shape)
        linear = np.stack([oracles.rotary(e.astype(np.float32), sin, cos, KV, [0], [2], 2, interleaved) for e in basis])
        exact = np.tensordot(linear.astype(np.float64), np.asarray(g, np.float64), x.ndim).reshape(x.shape)
    assert np.abs(dx - exact).max() <= 1e-6


def test_what_is_lowered_for_cuda_is_fenced() -> None:
    def call(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
        return bijax.rotary_embedding(x, sin, cos, **HEADS)

    table = ((POSITIONS, DIM), jnp.bfloat16)
    assert_fenced_on_cuda(call, ((2, 3, H, D), jnp.bfloat16), table, table)


X, (SIN, COS) = jnp.ones((4, H, D)), tables()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"packed tokens need q_lens or accum_q_len, got neither for qkv of 4 tokens"),
        ({"q_lens": [3, 2]}, r"q_lens must add up to at most the 4 tokens of qkv, got 5"),
        ({"q_lens": [5]}, r"q_lens must be in \[0, 4\].*got 5 at \(0,\)"),
        ({"q_lens": [2], "max_q_len": 1}, r"q_lens must be in \[0, 1\].*or max_q_len\), got 2"),
        ({"q_lens": [2], "max_q_len": -1}, r"max_q_len must be at least 0, got -1"),
        ({"q_lens": [[2]]}, r"q_lens must have the shape \(sequences,\), got int64\[1,1\]"),
        ({"q_lens": [2, 1], "accum_q_len": [0, 2]}, r"accum_q_len must have the shape \(3,\), got"),
        (
            {"q_lens": [2, 1], "accum_q_len": [0, 1, 3]},
            r"the running sums of the lengths, \[0, 2, 3\], got \[0, 1, 3\]",
        ),
        ({"accum_q_len": [0, 3, 1]}, r"the differences of accum_q_len must be in \[0, 4\].*got -2 at \(1,\)"),
        ({"accum_q_len": []}, r"accum_q_len must start with 0"),
        ({"q_lens": [2], "position_ids": [19]}, r"position_ids \+ q_lens must be in \[0, 20\].*got 21 at \(0,\)"),
        ({"q_lens": [2], "position_ids": [-1]}, r"position_ids must be in \[0, 20\]"),
        ({"q_lens": [2], "position_ids": [1, 2]}, r"position_ids must have the shape \(1,\), got int64\[2\]"),
        ({"q_lens": [2], "rope_offset": 5}, r"lie in a head, got rope_offset=5, sin bfloat16\[20,6\] and qkv"),
        ({"q_lens": [2], "cos": COS[:3]}, r"cos must have the shape \(positions, rope_dim\) with positions=20"),
        ({"q_lens": [2], "q_head_num": 4}, r"q_head_num \+ 2 \* kv_head_num heads, got 4 \+ 2 \* 1 and qkv"),
        ({"qkv": X[None], "accum_q_len": [0, 1]}, r"accum_q_len belongs to packed tokens"),
        ({"qkv": X[0]}, r"qkv must have the dimensions \(B, L, H, D\) or \(T, H, D\), got float32\[5,10\]"),
    ],
)
def test_wrong_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"bijax\.rotary_embedding: .*" + message):
        bijax.rotary_embedding(**{"qkv": X, "sin": SIN, "cos": COS, **HEADS, **arguments})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bijax.rotary_embedding(X, SIN, COS, q_lens=[1.0], **HEADS), r"q_lens must hold integers, got float64"),
        (lambda: bijax.rotary_embedding(X, SIN.astype(int), COS, q_lens=[1], **HEADS), r"sin must have one of"),
        (lambda: bijax.rotary_embedding(X, SIN, COS, q_head_num=3.0, kv_head_num=1), r"q_head_num must be an integer"),
    ],
)
def test_wrong_types(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
