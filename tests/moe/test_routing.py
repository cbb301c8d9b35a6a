"""Routing: which experts, in which order, and their weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.ops.moe.select_experts import select_experts
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report
from tests.arrays import on_device
from tests.operators import oracles
from tests.operators.lowering import assert_fenced_on_cuda
from tests.tiers import full_only


def normal(seed: int, *shape: int, dtype: Any = "float32") -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


@pytest.mark.tier("full", fast=("(2, 3, 7)-1-bfloat16", "(2, 4)-0-bfloat16"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "topk"), [((5, 64), 8), ((1, 3), 3), ((0, 4), 2), ((2, 3, 7), 1), ((2, 4), 0)])
def test_the_experts_of_the_oracle(dtype: str, shape: tuple[int, ...], topk: int) -> None:
    scores = normal(0, *shape, dtype=dtype)
    selected, weights = jax.jit(bijax.moe_softmax_topk, static_argnums=1)(scores, topk)
    expected, exact = oracles.topk(scores, topk)
    assert_bits_equal(selected, expected)
    assert weights.dtype == dtype
    assert np.abs(np.asarray(weights, np.float64) - exact).max(initial=0) <= (1e-6 if dtype == "float32" else 2.0**-9)
    wide = bijax.moe_softmax_topk(scores, topk, preferred_element_type=jnp.float32)[1]
    assert np.abs(np.asarray(wide, np.float64) - exact).max(initial=0) <= 1e-6


def test_ties_and_special_scores() -> None:
    scores = jnp.array(
        [
            [1.0, 2.0, 2.0, 1.0, 2.0],
            [-0.0, 0.0, -0.0, 0.0, -1.0],
            [-jnp.inf, 0.0, -jnp.inf, -1e-40, 1e-40],
            [1.0, jnp.nan, jnp.inf, -jnp.nan, 0.0],
            [jnp.inf, 1.0, 1.0, 2.0, jnp.inf],
        ]
    )
    selected, weights = bijax.moe_softmax_topk(scores, 3)
    assert selected.tolist() == [[1, 2, 4], [0, 1, 2], [4, 1, 3], [1, 3, 2], [0, 4, 3]]
    assert np.isnan(weights).all(1).tolist() == [False, False, False, True, True]
    assert not np.isnan(weights[:3]).any()
    assert bijax.moe_softmax_topk(scores[2:3], 5)[1][0, 3:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("every", [False, full_only(True)], ids=["batches", "and transformations"])
def test_tokens_keep_their_bits(every: bool) -> None:
    x, w = normal(0, 17, 333), normal(1, 333, 16)

    def route(x: jax.Array) -> Any:
        scores = bijax.moe_gating_gemm(x, w)
        return scores, *bijax.moe_softmax_topk(scores, 4)

    assert_batch_invariant(route, x, batch_sizes=(1, 17), neighbours=("given", "nan"), modes=("jit",))
    y = route(x)
    assert_bits_equal(y[0], bijax.matmul(x, w))
    if not every:
        return
    assert_bits_equal(jax.tree.map(lambda a: a[:, 0], jax.vmap(route)(x[:, None])), y, err_msg="vmap")
    assert_bits_equal(jax.jit(bijax.invariant(route))(x), y, err_msg="under the transform")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_bits_equal(jax.jit(route)(x), y, err_msg="x64 and strict promotion")


def test_control_plain_jax_differs() -> None:
    w = normal(1, 333, 140)

    def plain(x: jax.Array) -> Any:
        weights, selected = jax.lax.top_k(jax.nn.softmax(x @ w), 4)
        return selected, weights / weights.sum(-1, keepdims=True)

    options: dict[str, Any] = {"batch_sizes": (1, 2, 33), "neighbours": ("given",), "modes": ("jit",)}
    assert batch_variance_report(plain, normal(0, 33, 333), **options).differing_elements


def test_gradients() -> None:
    scores, g = normal(0, 3, 6), normal(1, 3, 2)

    def plain(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jax.lax.top_k(x, 2)[0])

    expected = jax.vjp(plain, scores)[1](g)[0]
    found = jax.vjp(lambda x: bijax.moe_softmax_topk(x, 2)[1], scores)[1](g)[0]
    assert np.abs(found - expected).max() <= 1e-6


def test_what_is_lowered_for_cuda_is_fenced() -> None:
    assert_fenced_on_cuda(lambda x: bijax.moe_softmax_topk(x, 4), ((3, 16), jnp.bfloat16))


X, W = jnp.ones((2, 4)), jnp.ones((4, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bijax.moe_gating_gemm(X, W.T), ValueError, r"shapes \(\.\.\., C\) and \(C, E\), got float32\[2,4\]"),
        (
            lambda: bijax.moe_gating_gemm(X, W.astype(jnp.bfloat16)),
            TypeError,
            r"must share one dtype, got hidden_states",
        ),
        (lambda: bijax.moe_gating_gemm(X.astype(int), W), TypeError, r"hidden_states must have one of the dtypes"),
        (
            lambda: bijax.moe_softmax_topk(X, 5),
            ValueError,
            r"topk must be in \[0, E\].*got topk=5 and .*float32\[2,4\]",
        ),
        (lambda: bijax.moe_softmax_topk(X, 1.0), TypeError, r"topk must be an integer, got 1\.0"),
        (lambda: bijax.moe_softmax_topk(X.astype(int), 1), TypeError, r"hidden_states must have one of the dtypes"),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_selection_has_the_bits_of_its_pieces() -> None:
    logits, g = normal(2, 33, 60), normal(3, 33, 5)

    def pieces(x: jax.Array) -> Any:
        y = bijax.softmax(x)
        selected = bijax.moe_softmax_topk(jax.lax.stop_gradient(y), 5)[0]
        chosen = jnp.take_along_axis(y, selected, axis=-1)
        return chosen, bijax.sum(chosen, axis=-1)[:, None], selected

    def joined(x: jax.Array) -> Any:
        selected, chosen, total = select_experts(x, 5)
        return chosen, total, selected

    def both(route: Any) -> Any:
        def run(x: jax.Array) -> Any:
            results, pull, selected = jax.vjp(lambda x: (lambda *r: (r[:2], r[2]))(*route(x)), x, has_aux=True)
            return *results, selected, *pull((g, results[1]))

        return jax.jit(run)(logits), jax.jit(route)(logits)

    assert_bits_equal(both(joined), both(pieces))
    plain = jax.nn.softmax(logits)
    assert (jnp.take_along_axis(plain, joined(logits)[2], axis=-1) != joined(logits)[0]).any()
