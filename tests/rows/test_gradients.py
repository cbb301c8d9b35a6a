"""Row operations and element-wise functions against float64: values and gradients, and what has none."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device
from tests.tiers import full_only

Function = Callable[..., Any]
C = 300


def rms_norm(x: Any, w: Any, residual: Any) -> Any:
    h = x + residual
    return h / jnp.sqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6) * w, h


def head_rms_norm(x: Any, w: Any) -> Any:
    return jnp.concatenate([x[:, :1], rms_norm(x[:, 1:3], w, 0)[0], x[:, 3:]], axis=1)


def layer_norm(x: Any, w: Any, b: Any) -> Any:
    d = x - jnp.mean(x, axis=-1, keepdims=True)
    return d / jnp.sqrt(jnp.mean(d * d, axis=-1, keepdims=True) + 1e-5) * w + b


def cross_entropy(x: Any) -> Any:
    lse = jax.nn.logsumexp(x, axis=-1)
    return lse - jnp.take_along_axis(x, jnp.asarray(LABELS)[:, None], axis=1)[:, 0] + 0.1 * lse**2


LABELS = np.random.default_rng(0).integers(0, C, 20)

# Name: ours, the same in plain JAX (for float64), shapes of the arguments.
CASES: dict[str, tuple[Function, Function, tuple[tuple[int, ...], ...]]] = {
    "sum": (bijax.sum, jnp.sum, ((20, C),)),
    "sum over two axes": (lambda x: bijax.sum(x, (0, 2)), lambda x: jnp.sum(x, (0, 2)), ((4, 5, C),)),
    "mean": (lambda x: bijax.mean(x, 0), lambda x: jnp.mean(x, 0), ((20, C),)),
    "softmax": (bijax.softmax, jax.nn.softmax, ((20, C),)),
    "softmax over all": (lambda x: bijax.softmax(x, None), lambda x: jax.nn.softmax(x, (0, 1)), ((2, C),)),
    "log_softmax": (lambda x: bijax.log_softmax(x, 0), lambda x: jax.nn.log_softmax(x, 0), ((C, 20),)),
    "logsumexp": (bijax.logsumexp, lambda x: jax.nn.logsumexp(x, -1), ((20, C),)),
    "cross entropy": (lambda x: bijax.softmax_cross_entropy(x, LABELS, z_loss=0.1), cross_entropy, ((20, C),)),
    "rms_norm": (lambda x, w: bijax.rms_norm(x, w), lambda x, w: rms_norm(x, w, 0)[0], ((20, C), (C,))),
    "rms_norm without weight": (lambda x: bijax.rms_norm(x), lambda x: rms_norm(x, 1, 0)[0], ((20, C),)),
    "rms_norm with residual": (
        lambda x, w, r: bijax.rms_norm(x, w, residual=r),
        rms_norm,
        ((20, C), (C,), (20, C)),
    ),
    "rms_norm with offset": (
        lambda x, w: bijax.rms_norm(x, w, weight_offset=1.0),
        lambda x, w: rms_norm(x, 1 + w, 0)[0],
        ((20, C), (C,)),
    ),
    "head_rms_norm": (
        lambda x, w: bijax.head_rms_norm(x, w, head_offset=1, head_num=2, weight_offset=0.5),
        lambda x, w: head_rms_norm(x, w + 0.5),
        ((7, 4, C), (2, C)),
    ),
    "head_rms_norm with one weight": (
        lambda x, w: bijax.head_rms_norm(x, w, head_offset=1, head_num=2),
        head_rms_norm,
        ((7, 4, C), (C,)),
    ),
    "var": (lambda x: bijax.var(x, (0, 2)), lambda x: jnp.var(x, (0, 2)), ((4, 5, C),)),
    "std": (lambda x: bijax.std(x, 0, ddof=1), lambda x: jnp.std(x, 0, ddof=1), ((C, 20),)),
    "layer_norm": (bijax.layer_norm, layer_norm, ((20, C), (C,), (C,))),
    "layer_norm without weight": (bijax.layer_norm, lambda x: layer_norm(x, 1, 0), ((20, C),)),
    "elementwise": (
        bijax.elementwise(lambda x, w, b: jax.nn.silu(x) * w + b),
        lambda x, w, b: jax.nn.silu(x) * w + b,
        ((20, C), (C,), ()),
    ),
}

# Largest error over largest value. float32: some roundings of 6e-8 along a chain; the others: a rounding of 4e-3 or
# 5e-4 of the result, and in a gradient that of a saved result too.
BOUNDS = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}


@pytest.mark.tier("full", fast=("sum over two axes-bfloat16", "log_softmax-float32"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_float64(name: str, dtype: str) -> None:
    ours, plain, shapes = CASES[name]
    rng = np.random.default_rng(1)
    arguments = [on_device(rng.standard_normal(shape) * 3, dtype) for shape in shapes]

    def both(f: Function, cotangents: Any, arguments: Any) -> Any:
        y, pull = jax.vjp(f, *arguments)
        g = [jnp.asarray(c, leaf.dtype) for c, leaf in zip(cotangents, jax.tree.leaves(y), strict=True)]
        return y, pull(jax.tree.unflatten(jax.tree.structure(y), g))

    results = jax.tree.leaves(jax.eval_shape(ours, *arguments))
    cotangents = [np.asarray(rng.standard_normal(r.shape), np.float32).astype(r.dtype) for r in results]
    found = jax.jit(lambda *a: both(ours, cotangents, a))(*arguments)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in arguments]
        expected = both(plain, [np.asarray(c, np.float64) for c in cotangents], wide)
    for y, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert y.dtype == (jnp.float32 if name == "cross entropy" and y.ndim == 1 else dtype)
        error = np.abs(np.asarray(y, np.float64) - np.asarray(right)).max()
        assert error <= BOUNDS[dtype] * np.abs(np.asarray(right)).max(), error


def test_long_rows_keep_their_digits() -> None:
    """Lanes and a tree: the error of a sum grows with the number of blocks, not of elements."""
    x = np.random.default_rng(2).random((2, 200_000)).astype(np.float32)
    right = x.astype(np.float64).sum(1)
    assert (np.abs(np.asarray(bijax.sum(x, 1), np.float64) - right) <= 2e-6 * right).all()
    # A variance of 1 with a mean of 1000.
    shifted = np.random.default_rng(3).standard_normal((4, 4000)) + 1000
    y = bijax.layer_norm(shifted.astype(np.float32), eps=0.0)
    exact = shifted.astype(np.float32).astype(np.float64)
    d = exact - exact.mean(1, keepdims=True)
    np.testing.assert_allclose(y, d / d.std(1, keepdims=True), atol=1e-4)


def test_weights_may_be_wider_than_rows() -> None:
    x = on_device(np.random.default_rng(4).standard_normal((3, 40)), jnp.bfloat16)
    w = jnp.linspace(1.0, 2.0, 40)
    y, pull = jax.vjp(bijax.rms_norm, x, w)
    dx, dw = pull(y)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


def test_rows_that_are_left_out_have_no_gradient() -> None:
    logits = on_device(np.random.default_rng(5).standard_normal((5, 7)).astype(np.float32)).at[1].set(jnp.nan)
    labels = jnp.asarray([3, -100, 0, -100, 6])

    def loss(x: jax.Array) -> jax.Array:
        return bijax.softmax_cross_entropy(x, labels, ignore_index=-100, z_loss=0.1)

    y, pull = jax.vjp(loss, logits)
    (dx,) = pull(jnp.ones(5))
    assert np.asarray(y == 0).tolist() == [False, True, False, True, False]
    assert np.asarray((dx == 0).all(1)).tolist() == [False, True, False, True, False]
    assert np.isfinite(np.asarray(dx)).all()


@pytest.mark.parametrize("every", [False, full_only(True)], ids=["of a sum", "of a mean, and the third"])
def test_the_second_derivative_of_what_has_one(every: bool) -> None:
    x = on_device(np.random.default_rng(6).standard_normal(30).astype(np.float32))
    gelu = bijax.elementwise(jax.nn.gelu)

    def twice(f: Function, total: Function) -> Any:
        return jax.jit(jax.grad(lambda x: total(jax.grad(lambda x: total(f(x) ** 2))(x) ** 2)))(x)

    np.testing.assert_allclose(twice(gelu, bijax.sum), twice(jax.nn.gelu, jnp.sum), rtol=1e-4, atol=1e-5)
    if not every:
        return
    np.testing.assert_allclose(twice(gelu, bijax.mean), twice(jax.nn.gelu, jnp.mean), rtol=1e-4, atol=1e-6)
    third = jax.grad(jax.grad(jax.grad(gelu)))(0.3)
    np.testing.assert_allclose(third, jax.grad(jax.grad(jax.grad(jax.nn.gelu)))(0.3), rtol=1e-4)


@pytest.mark.tier("full", fast=("sum", "head_rms_norm with one weight", "layer_norm", "elementwise"))
@pytest.mark.parametrize("name", CASES)
def test_forward_mode_says_that_it_is_not_supported(name: str) -> None:
    ours, _, shapes = CASES[name]
    arguments = tuple(jnp.ones(shape) for shape in shapes)
    with pytest.raises((TypeError, bijax.UnsupportedError), match=r"no forward mode|no derivative"):
        jax.jvp(ours, arguments, arguments)


@pytest.mark.parametrize(
    "f",
    [
        bijax.softmax,
        bijax.log_softmax,
        bijax.logsumexp,
        bijax.rms_norm,
        bijax.head_rms_norm,
        bijax.layer_norm,
        bijax.var,
        bijax.std,
    ],
)
def test_a_second_derivative_says_that_it_is_not_supported(f: Function) -> None:
    with pytest.raises(bijax.UnsupportedError, match="differentiating twice"):
        jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(jnp.ones((2, 3)))


@pytest.mark.tier("full")
def test_values_that_are_not_finite_mean_what_they_mean_in_jax() -> None:
    inf, nan = jnp.inf, jnp.nan
    rows = [[1.0, 2.0], [-inf, -inf], [inf, 1.0], [-inf, 1.0], [inf, -inf], [inf, inf], [nan, 1.0], [1.0, nan]]
    x = jnp.asarray(rows)
    for ours, plain in (
        (bijax.sum, jnp.sum),
        (bijax.softmax, jax.nn.softmax),
        (bijax.log_softmax, jax.nn.log_softmax),
        (bijax.logsumexp, jax.nn.logsumexp),
        (bijax.var, jnp.var),
        (bijax.std, jnp.std),
    ):

        @functools.partial(jax.jit, static_argnums=1)
        def run(x: jax.Array, f: Function) -> Any:
            y, pull = jax.vjp(lambda x: f(x, axis=-1), x)
            return y, pull(jnp.ones_like(y))[0]

        (y, found), (expected, right) = run(x, ours), run(x, plain)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        np.testing.assert_allclose(found, right, atol=1e-6, err_msg=ours.__name__)


def test_heads_that_are_not_named_stay_as_they_are() -> None:
    x = on_device(np.random.default_rng(7).standard_normal((3, 4, 5)).astype(np.float32))
    x = x.at[0, 0, :3].set(jnp.asarray([-0.0, jnp.nan, jnp.inf])).at[2, 3].set(-0.0)
    g = x[::-1, ::-1]
    y, pull = jax.vjp(lambda x: bijax.head_rms_norm(x, head_offset=1, head_num=2), x)
    for found, right in ((y, x), (pull(g)[0], g)):
        assert_bits_equal(found[:, (0, 3)], right[:, (0, 3)])
        assert np.isfinite(np.asarray(found[:, 1:3])).all()


@pytest.mark.tier("full")
def test_each_head_has_the_bits_of_its_own_norm() -> None:
    rng = np.random.default_rng(8)
    x, g = (on_device(rng.standard_normal((6, 3, 70)), jnp.bfloat16) for _ in range(2))
    w = on_device(rng.standard_normal((3, 70)).astype(np.float32))
    y, pull = jax.vjp(lambda x, w: bijax.head_rms_norm(x, w), x, w)
    dx, dw = pull(g)
    for i in range(3):
        one, pull_one = jax.vjp(lambda x, w: bijax.rms_norm(x, w, weight_offset=0.0), x[:, i], w[i])
        assert_bits_equal((y[:, i], (dx[:, i], dw[i])), (one, pull_one(g[:, i])))


def test_a_variance_keeps_its_digits_beside_a_large_mean() -> None:
    x = (np.random.default_rng(9).standard_normal((3, 4000)) + 1000).astype(np.float32)
    np.testing.assert_allclose(bijax.var(x, 1), x.astype(np.float64).var(1), rtol=1e-5)
    assert bijax.var(jnp.full((2, 300), 0.1), 1).tolist() == [0.0, 0.0]
