"""Matmul against float64: values, first and second derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax

# Unit roundoff of the dtype; a float32 sum of K terms in blocks stays far below K roundoffs.
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def data(m: int, k: int, n: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m + k + n)
    return tuple(rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n), (n,), (m, n)))  # type: ignore[return-value]


def close(actual: jax.Array, expected: np.ndarray, scale: np.ndarray, terms: int, roundoff: float) -> None:
    error = np.abs(np.asarray(actual, np.float64) - expected)
    bound = roundoff * np.abs(expected) + (terms + 4) * 2.0**-24 * scale
    assert (error <= bound).all(), f"error up to {(error / bound).max():.2f} of the bound"


@pytest.mark.tier("full", fast=("9-1100-33-float16-True",))
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize(("m", "k", "n"), [(3, 17, 9), (130, 333, 40), (9, 1100, 33)])
def test_values_and_gradients(m: int, k: int, n: int, dtype: str, transpose: bool) -> None:
    x, w, bias, g = data(m, k, n, dtype)

    def f(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return bijax.matmul(x, w, bias=bias, transpose_w=transpose)

    y, pull = jax.vjp(f, jnp.asarray(x), jnp.asarray(w.T if transpose else w), jnp.asarray(bias))
    dx, dw, db = pull(jnp.asarray(g))
    xd, wd, bd, gd = (a.astype(np.float64) for a in (x, w, bias, g))
    u = ROUNDOFF[dtype]
    close(y, xd @ wd + bd, abs(xd) @ abs(wd) + abs(bd), k, u)
    close(dx, gd @ wd.T, abs(gd) @ abs(wd).T, n, u)
    close(dw.T if transpose else dw, xd.T @ gd, abs(xd).T @ abs(gd), m, u)
    close(db, gd.sum(0), abs(gd).sum(0), m, u)


@pytest.mark.tier("full")
def test_second_derivative() -> None:
    x, w, _, _ = (jnp.asarray(a) for a in data(5, 7, 3, "float32"))

    def double(f):
        inner = jax.grad(lambda x, w: (f(x, w) ** 3).sum(), argnums=(0, 1))
        return jax.grad(lambda x, w: sum((g**2).sum() for g in inner(x, w)), argnums=(0, 1))

    with jax.enable_x64(True):
        expected = double(jnp.dot)(x.astype(jnp.float64), w.astype(jnp.float64))
    for actual, reference in zip(double(bijax.matmul)(x, w), expected, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=2e-4, atol=1e-3)


def test_remat_and_scan_give_the_same_gradient() -> None:
    x, w, _, _ = (jnp.asarray(a) for a in data(6, 40, 40, "float32"))

    def deep(w: jax.Array, step) -> jax.Array:
        return jax.lax.scan(lambda h, _: (step(h, w), None), x, None, length=3)[0].sum()

    plain = jax.grad(deep)(w, lambda h, w: bijax.matmul(h, w))
    again = jax.jit(jax.grad(deep), static_argnums=1)(w, jax.checkpoint(lambda h, w: bijax.matmul(h, w)))
    assert (np.asarray(plain).view(np.uint32) == np.asarray(again).view(np.uint32)).all()
