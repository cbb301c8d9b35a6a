"""`bijax.matmul` with an activation, a residual or a split of K, and `bijax.gated_matmul`: bits and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import add_as_tree, split_length
from tests.arrays import on_device

M, K, N = 11, 333, 40
X, W, UP, BIAS, R = (
    on_device(np.random.default_rng(i).standard_normal(shape), jnp.float32)
    for i, shape in enumerate(((M, K), (K, N), (K, N), (N,), (M, N)))
)

Form = Callable[..., jax.Array]

# Functions of (x, residual, weights, weights, bias), and the same in plain JAX.
FORMS: dict[str, tuple[Form, Form]] = {
    "gelu": (
        lambda x, r, w, up, b: bijax.matmul(x, w, bias=b, activation="gelu"),
        lambda x, r, w, up, b: jax.nn.gelu(x @ w + b),
    ),
    "silu, residual": (
        lambda x, r, w, up, b: bijax.matmul(x, w, activation="silu", residual=r),
        lambda x, r, w, up, b: jax.nn.silu(x @ w) + r,
    ),
    "relu, residual, split": (
        lambda x, r, w, up, b: bijax.matmul(x, w, bias=b, activation="relu", residual=r, split_k=4),
        lambda x, r, w, up, b: jax.nn.relu(x @ w + b) + r,
    ),
    "gated": (
        lambda x, r, w, up, b: bijax.gated_matmul(x, w, up),
        lambda x, r, w, up, b: jax.nn.silu(x @ w) * (x @ up),
    ),
}


@pytest.mark.tier("full", fast=("gelu-float32", "silu, residual-bfloat16"))
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gelu", "float32"), ("silu, residual", "bfloat16"), ("relu, residual, split", "float32"), ("gated", "bfloat16")],
)
def test_a_row_alone_has_its_bits_in_the_batch(name: str, dtype: str) -> None:
    form = FORMS[name][0]
    x, r, w, up, b = (a.astype(dtype) for a in (X, R, W, UP, BIAS))
    whole = form(x, r, w, up, b)
    assert_bits_equal(form(x[4:5], r[4:5], w, up, b), whole[4:5])


@pytest.mark.tier("full", fast=("gated",))
@pytest.mark.parametrize("name", ["gelu", "relu, residual, split", "gated"])
def test_gradients(name: str) -> None:
    ours, plain = FORMS[name]
    g = on_device(np.random.default_rng(9).standard_normal((M, N)), jnp.float32)
    arguments = X, R, W, UP, BIAS
    y, pull = jax.vjp(ours, *arguments)
    expected, pull_expected = jax.vjp(plain, *(a.astype(jnp.float32) for a in arguments))
    for a, e in zip((y, *pull(g)), (expected, *pull_expected(g)), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=2e-3)
    if name == "gated":  # the gradient of a row is the row's own
        (row,) = jax.vjp(lambda x: ours(x, R[:1], W, UP, BIAS), X[:1])[1](g[:1])
        assert_bits_equal(row, pull(g)[0][:1])


def test_what_follows_the_product_is_what_stands_alone() -> None:
    """On a CPU every form is the product in float32 and an element-wise program, so the bits are known."""
    z, up = (bijax.matmul(X, w) for w in (W, UP))
    silu = bijax.elementwise(jax.nn.silu)(z)
    assert_bits_equal(bijax.matmul(X, W, activation="silu"), silu)
    assert_bits_equal(bijax.matmul(X, W, residual=R), z + R)
    swiglu = bijax.elementwise(lambda gate, up: jax.nn.silu(gate) * up)
    assert_bits_equal(bijax.gated_matmul(X, W, UP), swiglu(z, up))


@pytest.mark.tier("full")
def test_a_split_is_the_tree_of_its_shards() -> None:
    splits = 8  # of which a K of 333 fills 6
    length = split_length(K, splits)
    parts = [slice(start, start + length) for start in range(0, K, length)]
    total = add_as_tree(lambda i: bijax.matmul(X[:, parts[i]], W[parts[i]]), len(parts))
    assert_bits_equal(bijax.matmul(X, W, split_k=splits), total)
    assert_bits_equal(bijax.matmul(X, W, bias=BIAS, split_k=splits), total + BIAS)
    stack = bijax.matmul(jnp.stack([X, 2 * X]), jnp.stack([W, W]), split_k=splits)
    assert_bits_equal(stack[0], total)


def test_stacks_and_vmap_give_the_bits_of_single_products() -> None:
    form: Any = lambda x, r: bijax.matmul(x, W, activation="silu", residual=r)  # noqa: E731
    whole = form(X[:10], R[:10])
    assert_bits_equal(jax.vmap(form)(X[:10].reshape(2, 5, K), R[:10].reshape(2, 5, N)).reshape(10, N), whole)
    stacked = bijax.matmul(jnp.stack([X, X]), jnp.stack([W, UP]), activation="silu", residual=jnp.stack([R, R]))
    assert_bits_equal(stacked[0, :10], whole)
    assert_bits_equal(bijax.gated_matmul(X[None, None], W, UP)[0, 0], bijax.gated_matmul(X, W, UP))


@pytest.mark.parametrize(
    ("x", "w", "shape"), [((0, 6), (6, 3), (0, 3)), ((4, 0), (0, 3), (4, 3)), ((6,), (6, 3), (3,))]
)
def test_edge_sizes(x: tuple[int, ...], w: tuple[int, ...], shape: tuple[int, ...]) -> None:
    ones = jnp.ones(shape)
    y = bijax.matmul(jnp.ones(x), jnp.ones(w), activation="relu", residual=ones, split_k=2)
    assert_bits_equal(y, ones + x[-1])
    assert_bits_equal(bijax.gated_matmul(jnp.ones(x), jnp.ones(w), jnp.ones(w), activation=None), ones * x[-1] ** 2)


BAD: list[tuple[type[Exception], str, Any]] = [
    (ValueError, "activation must be one of gelu, silu, relu", lambda: bijax.matmul(X, W, activation="mish")),
    (ValueError, r"shape of the result, \(11, 40\)", lambda: bijax.matmul(X, W, residual=R[:3])),
    (TypeError, "residual must have the dtype", lambda: bijax.matmul(X, W, residual=R.astype(jnp.bfloat16))),
    (ValueError, "split_k must be a power of two", lambda: bijax.matmul(X, W, split_k=3)),
    (ValueError, "split_k.*'many'", lambda: bijax.matmul(X, W, split_k="many")),
    (ValueError, "two matrices of one shape", lambda: bijax.gated_matmul(X, W, UP.T)),
    (TypeError, "share one dtype", lambda: bijax.gated_matmul(X, W, UP.astype(jnp.bfloat16))),
]


@pytest.mark.parametrize(("error", "message", "call"), BAD, ids=[m[:24] for _, m, _ in BAD])
def test_bad_input(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        call()
