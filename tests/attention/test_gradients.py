"""Attention and its gradients against float64, and against jax.nn where both mean the same."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from tests.arrays import on_device
from tests.attention.reference import reference, visible_keys

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def arrays(queries: int, keys: int, dtype: str) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = [
        (2, queries, HEADS, SIZE),
        (2, keys, KEY_HEADS, SIZE),
        (2, keys, KEY_HEADS, SIZE),
        (2, queries, HEADS, SIZE),
    ]
    return tuple(on_device(rng.standard_normal(s), dtype) for s in shapes)


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (30, 5), "query_length": 140},
    "chunk": {"causal": True, "window": (70, 70), "offset": 140, "query_length": 9, "key_length": 149},
}


@pytest.mark.tier("full", fast=("window-float32",))
@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in CASES), ("window", "bfloat16")])
def test_float64(name: str, dtype: str) -> None:
    case = CASES[name]
    queries = 13 if name == "chunk" else 150
    q, k, v, ct = arrays(queries, 150, dtype)
    given = {"query_offset": "offset", "query_seq_lengths": "query_length", "key_value_seq_lengths": "key_length"}
    numbers = {name: jnp.full(2, case[short], jnp.int32) for name, short in given.items() if short in case}

    @jax.jit
    def ours(q: jax.Array, k: jax.Array, v: jax.Array, ct: jax.Array) -> Any:
        attend = functools.partial(
            bijax.dot_product_attention,
            is_causal=case.get("causal", False),
            local_window_size=case.get("window"),
            return_residual=True,
            **numbers,
        )
        out, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
        return (out, lse), pull(ct)

    (out, lse), gradients = ours(q, k, v, ct)
    with jax.enable_x64(True):
        visible = jnp.asarray(visible_keys(queries, 150, **case))
        attend = jax.vmap(functools.partial(reference, visible=visible, scale=1 / np.sqrt(SIZE)))
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v)]

        @jax.jit
        def exact(ct: jax.Array, *arrays: jax.Array) -> Any:
            (out, lse), pull = jax.vjp(attend, *arrays)
            return out, lse, pull((ct, jnp.zeros_like(lse)))

        expected, expected_lse, expected_gradients = exact(jnp.asarray(np.asarray(ct, np.float64)), *wide)
    assert out.dtype == q.dtype
    assert lse.dtype == jnp.float32
    # float32: a few hundred roundings of 6e-8 relative to the largest value. bfloat16: one rounding of 4e-3, and in
    # the gradients that of the saved output.
    bound = 3e-6 if dtype == "float32" else 6e-3
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=3e-6, atol=3e-6)
    for found, right in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert found.dtype == q.dtype
        error = np.abs(np.asarray(found, np.float64) - np.asarray(right)).max()
        assert error <= bound * np.abs(right).max(), error


LENGTHS = {"query_seq_lengths": np.array([40, 11], np.int32), "key_value_seq_lengths": np.array([150, 60], np.int32)}
OPTIONS: list[dict[str, Any]] = [
    {"local_window_size": 30, "scale": 0.3, **LENGTHS},
    {"local_window_size": (3, 90), "is_causal": True},
]


@pytest.mark.tier("full")
@pytest.mark.parametrize("options", OPTIONS, ids=["30, scale, lengths", "(3, 90), causal"])
def test_the_meaning_is_that_of_jax_nn(options: dict[str, Any]) -> None:
    q, k, v, _ = arrays(40, 150, "float32")
    attends = (bijax.dot_product_attention, jax.nn.dot_product_attention)
    found, expected = (jax.jit(functools.partial(attend, **options))(q, k, v) for attend in attends)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.tier("full")
def test_no_gradient_flows_through_the_residual() -> None:
    q, k, v, _ = arrays(5, 150, "float32")
    gradient = jax.grad(lambda q: bijax.dot_product_attention(q, k, v, return_residual=True)[1].sum())(q)
    assert not np.asarray(gradient).any()


@pytest.mark.tier("full")
def test_a_query_that_sees_nothing_has_no_gradient() -> None:
    q, k, v, ct = arrays(5, 150, "float32")
    n = np.array([0, 150])
    out, pull = jax.vjp(lambda *x: bijax.dot_product_attention(*x, key_value_seq_lengths=n), q, k, v)
    for x in (out, *pull(ct)):
        assert not np.asarray(x[0]).any()
        assert np.asarray(x[1]).any()
        assert np.isfinite(np.asarray(x)).all()
