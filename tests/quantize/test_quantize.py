"""Quantised rows and products: the numbers of the oracle, bit for bit, alone and in batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report, hostile_rows
from tests.arrays import on_device
from tests.operators import oracles
from tests.operators.lowering import assert_fenced_on_cuda
from tests.tiers import full_only

SIZES: dict[str, Any] = {"batch_sizes": (1, 17), "neighbours": ("given", "nan"), "modes": ("jit",)}


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def int8(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-128, 128, shape, np.int8)


@pytest.mark.tier("full", fast=("float32-None-(0, 5)", "float16-bfloat16-(7,)"))
@pytest.mark.parametrize(
    ("dtype", "smooth", "shape"),
    [
        ("float32", None, (0, 5)),
        ("float32", "float32", (2, 0)),
        ("bfloat16", "float32", (1, 1)),
        ("bfloat16", None, (3, 130)),
        ("bfloat16", "float32", (2, 3, 130)),
        ("float16", "bfloat16", (7,)),
    ],
)
def test_the_quantised_rows_of_the_oracle(dtype: str, smooth: str | None, shape: tuple[int, ...]) -> None:
    x = jnp.asarray(normal(1, *shape)).astype(dtype)
    s = None if smooth is None else on_device(np.exp(normal(2, shape[-1]))).astype(smooth)
    found = jax.jit(bijax.scale_dynamic_quant)(x, s)
    assert_bits_equal(found, oracles.quantize(x, s))
    assert_bits_equal(found, bijax.scale_dynamic_quant(x, s), err_msg="without jit")


@pytest.mark.tier("full", fast=("denormal", "huge", "inf", "normal", "wide", "zeros"))
@pytest.mark.parametrize("kind", sorted(hostile_rows(0, (1, 1), "float32")))
def test_hostile_rows(kind: str) -> None:
    x = on_device(hostile_rows(3, (40, 33), "float32")[kind])
    y, scale = bijax.scale_dynamic_quant(x, jnp.full(33, 1.5, jnp.float32))
    assert_bits_equal((y, scale), oracles.quantize(x, np.full(33, 1.5, np.float32)))
    assert np.asarray(y).min() >= -127


def test_ties_go_to_the_even_number() -> None:
    y, scale = bijax.scale_dynamic_quant(jnp.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]]))
    assert (y.tolist(), scale.tolist()) == ([[127, 0, 2, 2, 0, -2, -2]], [1.0])


def test_rows_that_int8_cannot_hold() -> None:
    x = jnp.array([[0.0, -0.0], [1.0, np.nan], [np.inf, 1.0], [1e-40, 0.0], [1.0, 2.0], [3e38, 1.0]])
    y, scale = bijax.scale_dynamic_quant(x, jnp.array([2.0, 1.0]))
    assert np.isnan(scale).tolist() == [False, True, True, False, False, True]
    assert y[:4].tolist() == [[0, 0]] * 4
    assert scale[0] == scale[3] == 2.0**-126
    z = bijax.quant_matmul(y, jnp.ones((2, 3), jnp.int8), scale, jnp.ones(3))
    assert np.isnan(z.astype(jnp.float32)).all(1).tolist() == [False, True, True, False, False, True]


@pytest.mark.tier("full")
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_and_quantisation_in_one(dtype: str, residual: bool) -> None:
    x, r = (jnp.asarray(normal(i, 5, 200)).astype(dtype) for i in (0, 1))
    w, s = jnp.asarray(normal(2, 200)), on_device(np.exp(normal(3, 200))).astype(jnp.bfloat16)
    call = jax.jit(lambda x, r: bijax.add_rms_norm_dynamic_quant(x, w, s, residual=r if residual else None, eps=1e-5))
    after, y, scale = call(x, r)
    h = (oracles.wide(x) + oracles.wide(r)).astype(x.dtype) if residual else np.asarray(x)
    assert_bits_equal(after, h)
    normed = bijax.rms_norm(jnp.asarray(h).astype(jnp.float32), w, eps=1e-5)
    assert_bits_equal((y, scale), oracles.quantize(normed, s))
    exact = oracles.rms_norm(h, w, 1e-5) * oracles.wide(s)
    error = np.abs(np.asarray(y) * np.asarray(scale, np.float64)[:, None] - exact)
    assert (error <= 0.5 * np.asarray(scale)[:, None] * (1 + 1e-4)).all()
    assert bijax.add_rms_norm_dynamic_quant(x)[1].shape == x.shape


@pytest.mark.tier("full", fast=("True-False-True-float32", "False-True-True-bfloat16"))
@pytest.mark.parametrize(
    ("transpose_a", "transpose_b", "bias", "dtype"),
    [
        (False, False, False, "bfloat16"),
        (True, False, True, "float32"),
        (False, True, True, "bfloat16"),
        (True, True, False, "float16"),
    ],
)
def test_the_products_of_the_oracle(transpose_a: bool, transpose_b: bool, bias: bool, dtype: str) -> None:
    for m in (0, 1, 33):
        x, w = int8(m, m, 70), int8(1, 70, 40)
        row, column = np.exp(normal(2, m)), np.exp(normal(3, 40)).astype(oracles.BF16)
        b = normal(4, 40).astype(oracles.BF16) if bias else None
        y = bijax.quant_matmul(
            jnp.asarray(x.T if transpose_a else x),
            jnp.asarray(w.T if transpose_b else w),
            jnp.asarray(row),
            jnp.asarray(column),
            bias=b,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            preferred_element_type=dtype,
        )
        expected = oracles.quantized_product(x, w, row, column, b, np.dtype(y.dtype))
        assert_bits_equal(y, expected)


def test_the_largest_sums_are_exact() -> None:
    x = jnp.full((1, 131071), -128, jnp.int8)
    y = bijax.quant_matmul(x, x.T, jnp.ones(1), jnp.ones(1), preferred_element_type=jnp.float32)
    assert y.item() == np.float32(131071 * 2**14)
    more = jnp.ones((1, 131072), jnp.int8)
    with pytest.raises(ValueError, match=r"at most 131071 products .*got 131072 in weight int8\[131072,1\]"):
        bijax.quant_matmul(more, more.T, jnp.ones(1), jnp.ones(1))


@pytest.mark.parametrize("every", [False, full_only(True)], ids=["batches", "and transformations"])
def test_rows_keep_their_bits(every: bool) -> None:
    x = on_device(hostile_rows(3, (17, 96), "float32")["wide"])
    w, s, q = jnp.asarray(normal(1, 96)), on_device(np.exp(normal(2, 96))), jnp.asarray(int8(3, 96, 50))
    c = on_device(np.exp(normal(4, 50)))

    def layer(x: jax.Array) -> Any:
        after, y, scale = bijax.add_rms_norm_dynamic_quant(x, w, s, residual=x * 2)
        z = bijax.quant_matmul(y, q, scale, c, bias=c, preferred_element_type=jnp.float32)
        return after, y, scale, z, bijax.scale_dynamic_quant(z)

    assert_batch_invariant(layer, x, **SIZES)
    y = layer(x)
    if not every:
        assert_bits_equal(jax.jit(bijax.invariant(layer))(x), y, err_msg="under the transform")
        return
    assert_bits_equal(jax.jit(jax.vmap(layer))(x[:, None])[3][:, 0], y[3], err_msg="vmap")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_bits_equal(jax.jit(lambda x: bijax.scale_dynamic_quant(x, s))(x), bijax.scale_dynamic_quant(x, s))
        strict = jax.jit(lambda y, r: bijax.quant_matmul(y, q, r, c, bias=c, preferred_element_type=jnp.float32))
        assert_bits_equal(strict(y[1], y[2]), y[3], err_msg="x64 and strict promotion")


def test_control_plain_jax_differs() -> None:
    w = jnp.asarray(normal(1, 333))

    def plain(x: jax.Array) -> Any:
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w
        scale = jnp.max(jnp.abs(h), -1, keepdims=True) / 127
        return jnp.round(h / scale).astype(jnp.int8), scale

    report = batch_variance_report(plain, jnp.asarray(normal(0, 33, 333)), batch_sizes=(1, 33), neighbours=("given",))
    assert report.differing_elements


def test_what_is_lowered_for_cuda_is_fenced() -> None:
    f32, i8 = jnp.float32, jnp.int8
    assert_fenced_on_cuda(bijax.scale_dynamic_quant, ((3, 40), f32), ((40,), f32))
    assert_fenced_on_cuda(bijax.add_rms_norm_dynamic_quant, ((3, 40), jnp.bfloat16), ((40,), f32))
    assert_fenced_on_cuda(bijax.quant_matmul, ((3, 40), i8), ((40, 8), i8), ((3,), f32), ((8,), f32))


X, Q, S = jnp.ones((2, 4)), jnp.ones((4, 3), jnp.int8), jnp.ones(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bijax.scale_dynamic_quant(X.astype(int)), r"hidden_states must have one of.*got int32\[2,4\]"),
        (lambda: bijax.scale_dynamic_quant(X, Q[0]), r"smooth_scale must have one of"),
        (lambda: bijax.add_rms_norm_dynamic_quant(X, residual=X.astype(jnp.bfloat16)), r"share one dtype, got hidden"),
        (
            lambda: bijax.quant_matmul(X, Q, S, S),
            r"must have the dtype int8 or float8_e4m3fn, got float32\[2,4\]",
        ),
        (
            lambda: bijax.quant_matmul(Q.T, None, S, S),
            r"weight must be an array of int8 or float8_e4m3fn, got NoneType",
        ),
        (lambda: bijax.quant_matmul(Q.T, Q, Q[0], S), r"per_token_scale must have one of the dtypes"),
        (lambda: bijax.quant_matmul(Q.T, Q, S, S, preferred_element_type="int8"), r"preferred_element_type must be"),
    ],
)
def test_wrong_types(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bijax.scale_dynamic_quant(X, S), r"smooth_scale must have the shape \(4,\).*got smooth_scale f"),
        (lambda: bijax.scale_dynamic_quant(1.0), r"at least 1 dimension, got float32\[\]"),
        (lambda: bijax.add_rms_norm_dynamic_quant(X, residual=X[0]), r"residual must have the shape of hidden_states"),
        (lambda: bijax.add_rms_norm_dynamic_quant(X, eps=-1.0), r"eps must be a finite number of at least 0"),
        (lambda: bijax.quant_matmul(Q, Q, S, S), r"weight must have the shape \(K, N\) with K=3, got int8\[4,3\]"),
        (lambda: bijax.quant_matmul(Q[0], Q, S, S), r"hidden_states must have the shape \(M, K\), got int8\[3\]"),
        (lambda: bijax.quant_matmul(Q.T, Q, X[0], S), r"per_token_scale must have the shape \(M,\) with M=3, got"),
        (lambda: bijax.quant_matmul(Q.T, Q, S, X[0]), r"weight_scale must have the shape \(N,\) with N=3, got"),
        (lambda: bijax.quant_matmul(Q.T, Q, S, S, bias=X), r"bias must have the shape \(N,\) with N=3, got"),
    ],
)
def test_wrong_values(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_differentiation_is_an_error() -> None:
    with pytest.raises(bijax.UnsupportedError, match=r"bijax\.scale_dynamic_quant has no gradient"):
        jax.grad(lambda x: bijax.scale_dynamic_quant(x)[1].sum())(X)
    with pytest.raises(bijax.UnsupportedError, match=r"bijax\.quant_matmul has no gradient"):
        jax.grad(lambda s: bijax.quant_matmul(Q.T, Q, s, S, preferred_element_type=jnp.float32).sum())(S)
