"""A hybrid in the engine: one answer whatever is cached, kept, drafted, preempted or restarted; trainer and sampler."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bijax
from bijax.cli import main
from bijax.determinism.command import MODES
from bijax.serving import Completion, Engine, EngineOptions, SamplingParams
from bijax.serving.fingerprint import fingerprint
from bijax.serving.toy_hybrid import random_model, toy_hybrid
from bijax.testing import assert_bits_equal
from flax_layers import Llama, ServedLlama

SMALL = (
    "--model toy-hybrid --max-running 2 --max-prefill-tokens 16 --num-pages 60 --page-size 4 --max-new-tokens 12"
).split()
OPTIONS: dict[str, Any] = {
    "page_size": 16, "num_pages": 40, "max_running": 2, "max_prefill_tokens": 64, "snapshot_interval": 64,
}  # fmt: skip


@pytest.mark.tier("full")
@pytest.mark.parametrize("mode", MODES)
def test_one_answer_each(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test-deterministic", "--mode", mode, "--trials", "4", *SMALL]) == 0
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert rows
    for _, _, total, unique, bits in rows:
        assert int(total) >= 4 or mode in ("mixed", "prefix")
        assert unique.strip() == bits.strip() == "1"


@pytest.mark.tier("full")
def test_plain_operations_give_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test-deterministic", "--mode", "chunk", "--trials", "4", "--plain", *SMALL]) == 1
    assert "plain JAX" in capsys.readouterr().out


@functools.cache
def model() -> ServedLlama:
    return toy_hybrid(seed=1)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(7).integers(0, 160, length).tolist()


PARAMS = SamplingParams(max_new_tokens=30, seed=3, logprobs=True)


def bits(completion: Completion) -> tuple[tuple[int, ...], bytes]:
    return completion.tokens, np.array([p.logprob for p in completion.logprobs], np.float32).tobytes()


@functools.cache
def expected(length: int) -> tuple[tuple[int, ...], bytes]:
    engine = Engine(model(), options=EngineOptions(**{**OPTIONS, "prefix_cache": False, "state_snapshots": 0}))
    (output,) = engine.generate([prompt(length)], PARAMS)
    return bits(output.completions[0])


@pytest.mark.tier("full")
@pytest.mark.parametrize("changed", [{}, {"state_snapshots": 1}, {"state_snapshots": 0}, {"page_size": 64}], ids=str)
def test_from_snapshots(changed: dict[str, Any]) -> None:
    """A warm prefix, longer and shorter than before, and a conversation that goes on; which states are kept is free."""
    engine = Engine(model(), options=EngineOptions(**{**OPTIONS, **changed}))
    stats = engine.stats()
    assert stats.state_bytes > stats.snapshot_bytes > 0
    for length in (140, 140, 80, 141):
        (output,) = engine.generate([prompt(length)], PARAMS)
        assert bits(output.completions[0]) == expected(length)
    hits = engine.stats().prefix_hits
    assert hits > 0 if changed.get("state_snapshots") != 0 else hits == 0
    # The output of the last one and a new turn.
    turn = [*prompt(141), *expected(141)[0], 5]
    (output,) = engine.generate([turn], PARAMS)
    alone = Engine(model(), options=EngineOptions(**{**OPTIONS, "prefix_cache": False}))
    (again,) = alone.generate([turn], PARAMS)
    assert bits(output.completions[0]) == bits(again.completions[0])
    assert engine.stats().snapshots_used <= engine.stats().num_snapshots


@pytest.mark.tier("full")
def test_outputs_of_one_prompt_and_drafts() -> None:
    """Several outputs of one prompt share its state; drafts change nothing and are accepted across edges."""
    engine = Engine(model(), options=EngineOptions(**OPTIONS))
    (together,) = engine.generate([prompt(100)], SamplingParams(max_new_tokens=6, seed=9, logprobs=True, n=3))
    for completion in together.completions:
        alone = SamplingParams(max_new_tokens=6, seed=completion.seed, logprobs=True)
        (output,) = engine.generate([prompt(100)], alone)
        assert bits(output.completions[0]) == bits(completion)
    greedy = SamplingParams(max_new_tokens=90, temperature=0, logprobs=True)
    found = set()
    for drafts in (0, 7):
        drafting = Engine(model(), options=EngineOptions(**{**OPTIONS, "speculative_tokens": drafts}))
        (output,) = drafting.generate([prompt(9) * 3], greedy)
        found.add(bits(output.completions[0]))
    assert len(found) == 1
    assert drafting.stats().accepted_tokens > 0


@pytest.mark.tier("full")
def test_new_weights_compute_states_again() -> None:
    engine = Engine(model(), options=EngineOptions(**OPTIONS))
    engine.generate([prompt(140)], PARAMS)
    other = random_model(seed=2)
    engine.update_weights(other)
    (output,) = engine.generate([prompt(140)], PARAMS)
    (fresh,) = Engine(ServedLlama(other), options=EngineOptions(**OPTIONS)).generate([prompt(140)], PARAMS)
    assert bits(output.completions[0]) == bits(fresh.completions[0])
    assert bits(fresh.completions[0]) != expected(140)


@pytest.mark.tier("full")
def test_one_program() -> None:
    """As on a GPU, where the engine makes one program of a step."""
    engine = Engine(ServedLlama(random_model(seed=1), one_program=True), options=EngineOptions(**OPTIONS))
    for _ in range(2):
        (output,) = engine.generate([prompt(140)], PARAMS)
        assert bits(output.completions[0]) == expected(140)


@pytest.mark.tier("full")
def test_trainer_and_sampler() -> None:
    """Across an edge, under gradients; and gradients do not depend on the micro-batches."""
    trained = random_model(seed=1)
    tokens, logprobs = expected(50)
    whole = np.array([*prompt(50), *tokens], np.int32)
    graph, weights, rest = nnx.split(trained, nnx.Param, ...)

    def logprobs_of(weights: Any, tokens: jax.Array) -> jax.Array:
        found: Llama = nnx.merge(graph, weights, rest)
        scores = bijax.log_softmax(found(tokens)[:, :-1])
        return jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]

    @jax.jit
    def run(weights: Any, tokens: jax.Array) -> Any:
        def loss(weights: Any) -> tuple[jax.Array, jax.Array]:
            scores = logprobs_of(weights, tokens)
            return scores.sum(), scores

        return jax.value_and_grad(loss, has_aux=True)(weights)

    (_, scores), gradients = run(weights, whole[None])
    assert_bits_equal(np.asarray(scores)[0, -30:], np.frombuffer(logprobs, np.float32))
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))


@pytest.mark.tier("full")
def test_accumulated_gradients() -> None:
    graph, weights, rest = nnx.split(random_model(seed=1), nnx.Param, ...)
    batch = np.random.default_rng(3).integers(0, 160, (4, 66)).astype(np.int32)

    def loss(weights: Any, tokens: jax.Array) -> jax.Array:
        scores = bijax.log_softmax(nnx.merge(graph, weights, rest)(tokens)[:, :-1])
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()

    accumulate = bijax.accumulate_gradients(loss, unit=1)
    add, found = jax.jit(accumulate.add), []
    for size in (4, 2):
        total = accumulate.start(weights, batch)
        for start in range(0, 4, size):
            total = add(total, weights, batch[start : start + size])
        found.append(total.value_and_grad())
    assert_bits_equal(*found)


@pytest.mark.tier("full")
def test_fingerprint() -> None:
    """A server with a hybrid has one, which names the order of the rule."""
    assert fingerprint(model(), page_size=16) == fingerprint(toy_hybrid(seed=5), page_size=16)
    assert fingerprint(model(), page_size=16) != fingerprint(model().plain(), page_size=16)


def test_bad_options() -> None:
    for changed, message in (
        ({"page_size": 24}, "page_size must divide 64 or be a multiple of it"),
        ({"page_size": 128, "snapshot_interval": 64}, "snapshot_interval must be a multiple of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model(), options=EngineOptions(**{**OPTIONS, **changed}))
    with pytest.raises(ValueError, match="state_snapshots must be at least 0"):
        EngineOptions(state_snapshots=-1)
