"""The transform changes bits and nothing else: a wide choice of JAX's functions, with their gradients, against JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from tests.arrays import on_device

Function = Callable[[jax.Array], Any]

ELEMENTWISE: dict[str, Function] = {
    **{
        name: getattr(jnp, name)
        for name in (
            "sin cos tan sinh cosh tanh arctan arcsinh exp exp2 expm1 sign floor ceil round trunc square abs negative"
            " cbrt sinc deg2rad reciprocal positive conjugate real isfinite logical_not nan_to_num signbit rint"
        ).split()
    },
    **{
        name: getattr(jax.nn, name)
        for name in (
            "relu relu6 sigmoid softplus soft_sign silu mish log_sigmoid leaky_relu hard_sigmoid hard_silu hard_tanh"
            " elu celu selu gelu glu squareplus sparse_plus softmax log_softmax standardize"
        ).split()
    },
    "log": lambda x: jnp.log(jnp.abs(x) + 1),
    "log2": lambda x: jnp.log2(jnp.abs(x) + 1),
    "log10": lambda x: jnp.log10(jnp.abs(x) + 1),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 1),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 1),
    "arcsin": lambda x: jnp.arcsin(jnp.clip(x / 8, -0.9, 0.9)),
    "arccos": lambda x: jnp.arccos(jnp.clip(x / 8, -0.9, 0.9)),
    "arccosh": lambda x: jnp.arccosh(jnp.abs(x) + 1.5),
    "arctanh": lambda x: jnp.arctanh(jnp.clip(x / 8, -0.9, 0.9)),
    "arctan2": lambda x: jnp.arctan2(x, x[::-1] + 1),
    "hypot": lambda x: jnp.hypot(x, x[::-1]),
    "power": lambda x: jnp.power(jnp.abs(x) + 0.5, 1.3),
    "float_power": lambda x: jnp.abs(x) ** jnp.abs(x[:, :1]),
    "integer powers": lambda x: x**2 + x**-3 + x**7,
    "divide": lambda x: x / 3 + x / (1 + jnp.abs(x[:, :1])) + 2 / (4 + x * x),
    "mod": lambda x: jnp.mod(x, 1.7) + jnp.fmod(x, 1.3) + jnp.remainder(x, 0.9),
    "floor_divide": lambda x: x // 0.7,
    "logaddexp": lambda x: jnp.logaddexp(x, x[::-1]) + jnp.logaddexp2(x, 0.0),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "where": lambda x: jnp.where(x > 0, x * 2 + 1, x / 3),
    "erf": lambda x: lax.erf(x) + lax.erfc(x),
    "erf_inv": lambda x: lax.erf_inv(jnp.clip(x / 8, -0.9, 0.9)),
    "lgamma": lambda x: lax.lgamma(jnp.abs(x) + 1),
    "digamma": lambda x: lax.digamma(jnp.abs(x) + 1),
    "bessel": lambda x: jax.scipy.special.i0e(x) + jax.scipy.special.i1e(x),
    "igamma": lambda x: lax.igamma(jnp.abs(x) + 1, jnp.abs(x[::-1]) + 1),
    "xlogy": lambda x: jax.scipy.special.xlogy(jnp.abs(x), jnp.abs(x) + 1),
    "norm.cdf": jax.scipy.stats.norm.cdf,
    "norm.logpdf": jax.scipy.stats.norm.logpdf,
    "casts": lambda x: x.astype(jnp.int32).astype(x.dtype) + x.astype(jnp.bfloat16).astype(x.dtype),
    "integers": lambda x: (x.astype(jnp.int32) * 3 // 2 % 5) ** 2,
}
REDUCING: dict[str, Function] = {
    **{
        name: getattr(jnp, name)
        for name in (
            "sum prod mean var std max min ptp median cumsum cumprod argmax argmin any all nansum nanmean nanmax"
            " count_nonzero average amax sort argsort unique_counts"
        ).split()
        if name != "unique_counts"
    },
    "sum over rows": lambda x: x.sum(-1),
    "keepdims": lambda x: x - x.mean(-1, keepdims=True),
    "max over rows": lambda x: x.max(-1),
    "norm": jnp.linalg.norm,
    "row norms": lambda x: jnp.linalg.norm(x, axis=-1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "logcumsumexp": lambda x: lax.cumlogsumexp(x, 1),
    "cummax": lambda x: lax.cummax(x, 1) + lax.cummin(x, 0, reverse=True),
    "reverse cumsum": lambda x: lax.cumsum(x, 1, reverse=True),
    "dot": lambda x: x @ x.T,
    "matrix and vector": lambda x: x @ x[0] + x.T[: len(x)].sum(),
    "einsum": lambda x: jnp.einsum("ab,cb,dc->ad", x, x, x[:, : len(x)]),
    "outer": lambda x: jnp.outer(x[0], x[1]),
    "inner": lambda x: jnp.inner(x, x),
    "tensordot": lambda x: jnp.tensordot(x, x, 2),
    "vdot": lambda x: jnp.vdot(x, x),
    "convolve": lambda x: jnp.convolve(x[0], x[1][:5]),
    "correlate": lambda x: jnp.correlate(x[0], x[1][:5]),
    "interp": lambda x: jnp.interp(x, jnp.arange(4.0), jnp.arange(4.0) ** 2),
    "searchsorted": lambda x: jnp.searchsorted(jnp.sort(x[0]), x[1]),
    "take": lambda x: jnp.take(x, jnp.array([2, 0, 2]), 0) * 3,
    "scatter": lambda x: jnp.zeros((3, x.shape[1])).at[jnp.array([0, 2, 2, 1, 0, 2])].add(x[:6]),
    "scatter mul": lambda x: jnp.ones((3, x.shape[1])).at[jnp.array([2, 0])].multiply(x[:2], unique_indices=True),
    "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.arange(len(x)) % 3, 4),
    "bincount": lambda x: jnp.bincount(jnp.abs(x[0]).astype(jnp.int32), weights=x[0], length=5),
    "histogram": lambda x: jnp.histogram(x, bins=5)[0],
    "one_hot": lambda x: jax.nn.one_hot(jnp.abs(x).astype(jnp.int32), 4) @ jnp.ones((4, 3)),
    "top_k": lambda x: lax.top_k(x, 3)[0],
    "cross": lambda x: jnp.cross(x[:, :3], x[::-1, :3]),
    "trace": jnp.trace,
    "diff": jnp.diff,
    "gradient": lambda x: jnp.gradient(x)[0],
    "cov": jnp.cov,
    "polyval": lambda x: jnp.polyval(jnp.array([1.0, -2.0, 0.5]), x),
    "attention": lambda x: jax.nn.dot_product_attention(*(x[None, :, None, :8],) * 3),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "scan": lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c @ r), jnp.zeros(x.shape[1]), x),
    "while": lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] * 2)), (0, x)),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "map": lambda x: lax.map(lambda r: r / r.std(), x),
    "avg pool": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (2, 2), "VALID"),
    "max pool": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
    "conv": lambda x: lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
    "normal": lambda x: jax.random.normal(jax.random.key(0), x.shape) * x,
    "dropout mask": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x / 0.5, 0),
    "gumbel": lambda x: jax.random.gumbel(jax.random.key(1), x.shape) + x,
    "categorical": lambda x: jax.random.categorical(jax.random.key(2), x),
    "gamma": lambda x: jax.random.gamma(jax.random.key(3), jnp.abs(x) + 1),
    "permutation": lambda x: jax.random.permutation(jax.random.key(4), x),
}
FUNCTIONS = {**ELEMENTWISE, **REDUCING}
GROUP = 8
GROUPS = [list(FUNCTIONS)[i : i + GROUP] for i in range(0, len(FUNCTIONS), GROUP)]
NO_GRADIENT = {"gamma": "a draw is accepted or not by comparisons", "while": "JAX has no reverse mode for it"}


def rows() -> jax.Array:
    return on_device(np.random.default_rng(0).standard_normal((7, 12)) * 2, jnp.float32)


def results_and_gradient(name: str, x: jax.Array) -> Any:
    """The function's results, and the gradient of a number made of them where they have one."""
    results = FUNCTIONS[name](x)
    leaves = jax.tree.leaves(results)
    if name in NO_GRADIENT or not all(jnp.issubdtype(r.dtype, jnp.floating) for r in leaves):
        return results

    def loss(x: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.sin(r)) for r in jax.tree.leaves(FUNCTIONS[name](x)))

    return results, jax.grad(loss)(x)


@pytest.mark.tier("full", fast=("log1p-arctan2",))
@pytest.mark.parametrize("names", GROUPS, ids=["-".join((g[0], g[-1])).replace(" ", "_") for g in GROUPS])
def test_results_and_gradients_are_those_of_jax(names: list[str]) -> None:
    # Several functions in one program, which saves most of the time to compile.
    def program(x: jax.Array) -> dict[str, Any]:
        return {name: results_and_gradient(name, x) for name in names}

    actual, expected = jax.jit(bijax.invariant(program))(rows()), jax.jit(program)(rows())
    for name in names:
        for a, e in zip(jax.tree.leaves(actual[name]), jax.tree.leaves(expected[name]), strict=True):
            assert (a.shape, a.dtype) == (e.shape, e.dtype), name
            wide, wanted = np.asarray(a, np.float64), np.asarray(e, np.float64)
            largest = np.max(np.abs(wanted[np.isfinite(wanted)]), initial=1.0)
            np.testing.assert_allclose(wide, wanted, rtol=2e-4, atol=2e-5 * largest, equal_nan=True, err_msg=name)
