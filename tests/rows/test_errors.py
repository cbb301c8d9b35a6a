"""Row operations and element-wise functions: sizes at the edge, and bad input."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from tests.arrays import on_device, ones, zeros

X, W = ones((2, 3, 4)), ones(4)
LABELS = zeros((2, 3), jnp.int32)
ROW_OPS = (bijax.softmax, bijax.log_softmax, bijax.rms_norm, bijax.layer_norm)
REDUCTIONS = (bijax.sum, bijax.mean, bijax.var, bijax.std, bijax.logsumexp)


@pytest.mark.tier("full", fast=("(5, 0)", "(0, 0)"))
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (0, 0), (2, 0, 3), (1,), (1, 1)])
def test_edge_sizes(shape: tuple[int, ...]) -> None:
    x = jnp.ones(shape)
    square = bijax.elementwise(lambda x: (x * x, x > 0))
    for op in (*ROW_OPS, lambda x: square(x)[0]):
        y, pull = jax.vjp(op, x)
        assert y.shape == pull(y)[0].shape == shape
    for op in REDUCTIONS:
        y, pull = jax.vjp(op, x)
        assert pull(y)[0].shape == shape
    loss, pull = jax.vjp(lambda x: bijax.softmax_cross_entropy(x, jnp.full(shape[:-1], -1), ignore_index=-1), x)
    assert loss.shape == shape[:-1]
    assert not np.asarray(loss).any()
    assert pull(loss)[0].shape == shape


def test_what_nothing_adds_up_to() -> None:
    nothing = jnp.ones((2, 0))
    assert bijax.sum(nothing, 1).tolist() == [0.0, 0.0]
    assert np.isnan(bijax.mean(nothing, 1)).all()
    assert np.isnan(bijax.var(nothing, 1)).all()
    assert np.isnan(bijax.std(jnp.ones((2, 3)), 1, ddof=3)).all()
    assert bijax.var(jnp.ones((2, 3)), ()).tolist() == [[0.0] * 3] * 2
    assert bijax.head_rms_norm(jnp.ones((2, 3, 4)), head_offset=3).tolist() == jnp.ones((2, 3, 4)).tolist()
    assert bijax.head_rms_norm(jnp.ones((0, 3, 4)), jnp.ones((3, 4))).shape == (0, 3, 4)
    assert bijax.logsumexp(nothing).tolist() == [-np.inf, -np.inf]
    assert bijax.sum(nothing, 0).shape == (0,)
    x = jnp.asarray(-0.0)
    assert np.signbit(bijax.sum(x)), "no axes give the argument back"
    for zero in (-jnp.zeros(3), -jnp.zeros(128), -jnp.zeros((2, 300))):
        assert not np.signbit(bijax.sum(zero)), "a sum of zeros is +0, as in jnp"
        assert not np.signbit(bijax.mean(zero, 0)).any()


def test_a_vmap_over_nothing() -> None:
    assert jax.vmap(bijax.softmax)(jnp.ones((0, 3, 4))).shape == (0, 3, 4)
    assert jax.vmap(bijax.sum)(jnp.ones((0, 3, 4))).shape == (0,)
    assert jax.vmap(bijax.elementwise(jnp.exp))(jnp.ones((0, 3, 4))).shape == (0, 3, 4)


def test_labels_out_of_range_under_jit_give_nan_in_their_rows() -> None:
    labels = jnp.asarray([0, 4, -1, 3])
    logits = jnp.ones((4, 4))

    def loss(x: jax.Array, labels: jax.Array) -> jax.Array:
        return bijax.softmax_cross_entropy(x, labels)

    y = jax.jit(loss)(logits, labels)
    assert np.isnan(y).tolist() == [False, True, True, False]
    dx = jax.jit(jax.grad(lambda x: loss(x, labels).sum()))
    with pytest.raises(ValueError, match=r"labels must be in \[0, 4\).*got 4 at \(1,\) and 2 such labels"):
        dx(logits)
    traced = jax.jit(jax.grad(lambda x, labels: loss(x, labels).sum()))(logits, labels)
    assert np.isnan(np.asarray(traced)).all(1).tolist() == [False, True, True, False]


@pytest.mark.tier("full", fast=("int16", "uint32", "uint64"))
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_labels_of_any_integer_dtype(dtype: str) -> None:
    logits = on_device(np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32))
    expected = bijax.softmax_cross_entropy(logits, jnp.asarray([0, 5, 100]))
    with jax.enable_x64(dtype.endswith("64")):
        loss = bijax.softmax_cross_entropy(logits, jnp.asarray([0, 5, 100], dtype), ignore_index=-100)
        assert (loss == expected).all()


def test_labels_are_not_cut_to_32_bits() -> None:
    with pytest.raises(ValueError, match=r"got 4294967296 at \(1,\)"):
        bijax.softmax_cross_entropy(jnp.ones((2, 3)), np.asarray([0, 2**32]))
    with jax.enable_x64(True):
        y = jax.jit(bijax.softmax_cross_entropy)(jnp.ones((2, 3), jnp.float32), np.asarray([0, 2**32]))
    assert np.isnan(y).tolist() == [False, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bijax.sum(jnp.ones(3, jnp.int32)), r"bijax\.sum: x must have .*got int32\[3\].*astype"),
        (lambda: bijax.mean("text"), r"bijax\.mean: x must be an array"),
        (lambda: bijax.softmax(jnp.ones(3, bool)), r"bijax\.softmax: x must have"),
        (lambda: bijax.sum(X, 1.0), r"bijax\.sum: an axis must be an integer, got 1\.0 of type float"),
        (lambda: bijax.sum(X, (0, "1")), r"bijax\.sum: an axis must be an integer"),
        (lambda: bijax.softmax_cross_entropy(X, LABELS * 1.0), r"labels must be integers, got float32\[2,3\]"),
        (lambda: bijax.rms_norm(X, W.astype(int)), r"bijax\.rms_norm: weight must have"),
        (
            lambda: bijax.rms_norm(X, residual=X.astype(jnp.bfloat16)),
            r"must share one dtype, got x float32.*residual bfloat16",
        ),
        (lambda: bijax.head_rms_norm(X, head_offset=1.0), r"head_offset must be an integer, got 1\.0 of type float"),
        (lambda: bijax.head_rms_norm(X, W.astype(int)), r"bijax\.head_rms_norm: weight must have"),
        (lambda: bijax.var(X, ddof=0.5), r"bijax\.var: ddof must be an integer, got 0\.5 of type float"),
        (lambda: bijax.layer_norm(X, W, [1, 2, 3, 4]), r"bijax\.layer_norm: bias must have"),
        (lambda: bijax.elementwise(jnp.abs)(jnp.ones(3, complex)), r"arguments must be .*got complex64\(3,\)"),
        (lambda: bijax.elementwise(jnp.abs)("text"), r"arguments must be arrays or numbers, got str"),
        (lambda: bijax.elementwise(jnp.abs)(jax.random.key(0)), r"arguments must be .*got key"),
    ],
)
def test_wrong_types(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bijax.sum(X, 3), r"axis must be in \[-3, 3\) for an array of 3 dimensions, got 3"),
        (lambda: bijax.mean(X, (1, -2)), r"named twice in \(1, -2\)"),
        (lambda: bijax.softmax(jnp.float32(1)), r"axis must be in \[0, 0\)"),
        (lambda: bijax.logsumexp(X, -4), "axis must be in"),
        (lambda: bijax.rms_norm(X, jnp.ones(3)), r"weight must have the shape \(4,\).*got weight float32\[3\]"),
        (lambda: bijax.rms_norm(X, jnp.ones((1, 4))), r"weight must have the shape \(4,\)"),
        (lambda: bijax.rms_norm(X, residual=X[0]), r"residual must have the shape of x"),
        (lambda: bijax.rms_norm(jnp.float32(1)), r"x must have at least 1 dimension, got float32\[\]"),
        (lambda: bijax.rms_norm(X, eps=-1e-6), r"eps must be a finite number of at least 0, got -1e-06"),
        (lambda: bijax.rms_norm(X, weight_offset=1.0), r"weight_offset=1\.0 is added to weight, but got no weight"),
        (lambda: bijax.rms_norm(X, W, weight_offset=float("inf")), r"weight_offset must be a finite number, got inf"),
        (lambda: bijax.head_rms_norm(W), r"at least 2 dimensions .*got float32\[4\]"),
        (
            lambda: bijax.head_rms_norm(X, head_offset=2, head_num=2),
            r"heads must lie in \[0, 3\), got head_offset=2 and head_num=2 for x float32\[2,3,4\]",
        ),
        (lambda: bijax.head_rms_norm(X, head_offset=-1), r"got head_offset=-1"),
        (lambda: bijax.head_rms_norm(X, jnp.ones((2, 4))), r"shape \(4,\) of a head or \(3, 4\) of the heads"),
        (lambda: bijax.std(X, ddof=-1), r"bijax\.std: ddof must be at least 0, got -1"),
        (lambda: bijax.var(X, (0, 0)), r"named twice"),
        (lambda: bijax.layer_norm(X, eps=float("nan")), r"eps must be a finite number"),
        (lambda: bijax.layer_norm(X, W, jnp.ones(5)), r"bias must have the shape \(4,\)"),
        (lambda: bijax.softmax_cross_entropy(X, LABELS[0]), r"got logits float32\[2,3,4\] and labels int32\[3\]"),
        (lambda: bijax.softmax_cross_entropy(jnp.float32(1), LABELS[0, 0]), r"labels must have the shape"),
        (lambda: bijax.softmax_cross_entropy(X, LABELS + 4), r"got 4 at \(0, 0\) and 6 such labels in int32\[2,3\]"),
        (lambda: bijax.softmax_cross_entropy(X, LABELS - 1, ignore_index=-2), r"or ignore_index=-2; got -1"),
        (lambda: bijax.softmax_cross_entropy(X, LABELS, z_loss=-0.1), r"z_loss must be a finite number"),
        (lambda: bijax.elementwise(jnp.add)(X, jnp.ones(3)), r"broadcast.*got float32\[2,3,4\] and float32\[3\]"),
        (lambda: bijax.elementwise(lambda: 1)(), r"at least one array, got none"),
    ],
)
def test_wrong_values(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("f", "primitive"),
    [
        (lambda x: x - x.mean(), "reduce_sum"),
        (lambda x: jnp.cumsum(x, 0), "cumsum"),
        (lambda x: jax.lax.dot(x, x), "dot_general"),
        (lambda x: jnp.sort(x), "sort"),
        (lambda x: x[::-1], "rev"),
        (lambda x: x.T, "transpose"),
        (lambda x: jnp.take(x, x[0].astype(int), 0), "slice"),
        (lambda x: jnp.roll(x, 1), "reshape"),
        (lambda x: x.reshape(9), "reshape"),
        (lambda x: x + jnp.arange(3.0), "iota"),
        (lambda x: jax.nn.softmax(x), "reduce_max"),
        (lambda x: x * jax.random.normal(jax.random.key(0), x.shape), "random_seed"),
        (lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * x, x), "scan"),
        (lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x), "cond"),
        (lambda x: jax.jit(jax.checkpoint(lambda x: x.max() + x))(x), "reduce_max"),
    ],
)
def test_functions_that_are_not_elementwise(f: Callable[..., Any], primitive: str) -> None:
    with pytest.raises(ValueError, match=f"must be element-wise, but it calls the primitive '{primitive}'"):
        bijax.elementwise(f)(jnp.ones((3, 3)))


def test_a_reduction_of_a_number_is_found_too() -> None:
    with pytest.raises(ValueError, match="reduce_sum"):
        bijax.elementwise(lambda x: x - x.mean())(1.0)


def test_functions_that_change_the_shape() -> None:
    with pytest.raises(ValueError, match=r"must have the shape \(3,\).*got float32\[\]"):
        bijax.elementwise(lambda x: 1.0)(jnp.ones(3))


def test_closures() -> None:
    number, array = jnp.float32(2), jnp.ones(3)
    assert bijax.elementwise(lambda x: x * number + np.float32(1))(array).tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(ValueError, match=r"must not close over arrays, got float32\[3\]; pass it as an argument"):
        bijax.elementwise(lambda x: x * array)(array)
    with pytest.raises(ValueError, match="traced"):
        jax.jit(lambda t: bijax.elementwise(lambda x: x * t)(array))(2.0)
    with pytest.raises(ValueError, match="traced"):
        jax.grad(lambda t: bijax.elementwise(lambda x: x * t)(array).sum())(2.0)


def test_numbers_keep_the_dtype_of_arrays() -> None:
    half = jnp.ones(3, jnp.bfloat16)
    f = bijax.elementwise(lambda x, t: x / t)
    assert f(half, 2.0).dtype == jnp.bfloat16
    with jax.enable_x64(True):
        assert f(half, 2.0).dtype == jnp.bfloat16
        with pytest.raises(TypeError, match="got float64"):
            f(np.ones(3), 2.0)
