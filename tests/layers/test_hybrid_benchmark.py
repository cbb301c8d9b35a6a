"""The steps of `bench_hybrid_gpu` compute the same model: bijax's, and the one in plain JAX."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import hybrid_steps
from benchmarks.model_steps import Arrays, Cell, call
from benchmarks.recurrent_ops import RecurrentOps, chunked, recurrent
from flax_layers import INVARIANT, Llama
from flax_layers.checkpoint import ExpertsConfig, LinearAttentionConfig
from flax_layers.routing import Routing

SMALL = replace(
    hybrid_steps.config(2, 256),
    vocab_size=64,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rotary_dim=4,
    experts=ExpertsConfig(intermediate_size=8, shared_size=8, shared_gate=True, routing=Routing(num_experts=4, topk=2)),
    linear=LinearAttentionConfig(num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=8, layers=(True, False)),
)


def models(cell: Cell) -> tuple[Llama, Llama]:
    own, plain = (hybrid_steps.model(SMALL, cell, ops) for ops in (INVARIANT, RecurrentOps()))
    return own, plain


@pytest.mark.tier("full", fast=("prefill",))
@pytest.mark.parametrize("kind", ["decode", "prefill", "train"])
def test_a_step_returns_what_the_next_one_takes(kind: str) -> None:
    cell = Cell(kind, 2, 70)
    for model in models(cell):
        held = hybrid_steps.arrays(model, cell)
        program = jax.jit(hybrid_steps.step(model, cell))
        before = jax.tree.map(lambda a: (a.shape, a.dtype), held.changed)
        for _ in range(2):
            assert np.isfinite(np.asarray(call(program, held), np.float32)).all()
        assert jax.tree.map(lambda a: (a.shape, a.dtype), held.changed) == before


@pytest.mark.tier("full")
def test_both_models_compute_the_same() -> None:
    own, plain = (Llama(SMALL, ops=ops, rngs=nnx.Rngs(0)) for ops in (INVARIANT, RecurrentOps()))
    tokens = jnp.arange(2 * 70).reshape(2, 70) * 7 % 64
    run = jax.jit(lambda model, tokens: model(tokens))
    whole = run(plain, tokens)
    np.testing.assert_allclose(run(own, tokens), whole, rtol=1e-3, atol=1e-3)
    extend = jax.jit(lambda model, tokens, cache: model.extend(tokens, cache))
    _, cache = extend(plain, tokens[:, :69], plain.cache(batch=2, capacity=70))
    np.testing.assert_allclose(extend(plain, tokens[:, 69:], cache)[0][:, 0], whole[:, 69], rtol=1e-3, atol=1e-3)


def test_the_plain_recurrence_is_its_chunks() -> None:
    keys, (b, t, j, h, d) = jax.random.split(jax.random.key(0), 6), (2, 130, 1, 2, 8)
    shapes = ((b, t, j, d), (b, t, j, d), (b, t, h, d), (b, t, h), (b, t, h), (b, h, d, d))
    q, k, v, g, beta, state = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    arguments = (q, k, v, -jnp.abs(g) / 4, jax.nn.sigmoid(beta), state)
    for ours, other in zip(chunked(*arguments), recurrent(*arguments), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-5)


@pytest.mark.tier("full")
def test_a_decoding_step_goes_on_at_the_same_place() -> None:
    cell = Cell("decode", 64, 256)
    model, _ = models(cell)
    held: Arrays = hybrid_steps.arrays(model, cell)

    def edges(stored: Any) -> np.ndarray:
        return np.asarray(stored[0].rule.edge)

    before, start = edges(held.changed[0]), np.asarray(held.kept[0])
    assert (start - before == 64).sum() == 1  # goes over an edge
    assert ((start > before) & (start - before <= 64)).all()
    call(jax.jit(hybrid_steps.step(model, cell)), held)
    np.testing.assert_array_equal(edges(held.changed[0]), before)
