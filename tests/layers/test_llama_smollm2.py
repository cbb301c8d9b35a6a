"""The real model: its numbers against float64, and its answer; tests/transform has the real weights in `make test`."""

import numpy as np
import pytest
from flax import nnx

from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Llama, Ops, generate
from flax_layers.checkpoint import Checkpoint, load_checkpoint, smollm2_path
from flax_layers.models._layered import LayeredModel
from tests.layers import reference_llama

QUESTIONS = ("What is the capital of France?", "Count to five.")


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(smollm2_path())


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Llama:
    return Llama.from_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> np.ndarray:
    return reference_llama.logits(checkpoint.weights, checkpoint.config, ask(checkpoint, QUESTIONS[0]))


def ask(checkpoint: Checkpoint, question: str) -> list[int]:
    return checkpoint.tokenizer.encode_chat([{"role": "user", "content": question}], add_generation_prompt=True)


@pytest.mark.tier("full")
@pytest.mark.parametrize("ops", [INVARIANT, PLAIN])
def test_logits_against_float64(checkpoint: Checkpoint, model: Llama, expected: np.ndarray, ops: Ops) -> None:
    model = nnx.with_attributes(model, ops=ops)
    ids = ask(checkpoint, QUESTIONS[0])
    layers = LayeredModel(model, model.cache(batch=1, capacity=64))
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(ids)] = ids
    x = layers.extend(tokens, np.zeros(1, np.int32), np.array([len(ids)], np.int32))
    logits = np.asarray(model.logits(x[0, : len(ids)]))
    assert np.abs(expected).max() > 20
    assert np.abs(logits - expected).max() < 2e-4


@pytest.mark.tier("full")
def test_answer_alone_and_in_company(checkpoint: Checkpoint, model: Llama) -> None:
    prompts = [ask(checkpoint, question) for question in QUESTIONS]
    eos = checkpoint.tokenizer.eos_token_ids
    one = generate(model, prompts[:1], max_new_tokens=12, eos_token_ids=eos)
    assert checkpoint.tokenizer.decode(one.tokens[0]) == "The capital of France is Paris.<|im_end|>"
    two = generate(model, prompts, max_new_tokens=12, eos_token_ids=eos, cache="paged")
    assert_bits_equal(two.tokens[0], one.tokens[0])
    assert_bits_equal(two.logprobs[0], one.logprobs[0])
