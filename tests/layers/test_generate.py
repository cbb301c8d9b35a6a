"""Greedy generation: what it returns, and that its bits do not mind how it is done."""

from typing import Any

import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from flax_layers import PLAIN, Generation, Llama, generate
from tests.layers import reference_llama
from tests.layers import small_llama as small
from tests.tiers import full_only

PROMPTS = [list(map(int, row)) for row in (small.sequences()[0][:50], small.sequences()[3][:46])]


def model() -> Llama:
    """One block: every chunk of another length costs the compilation of a model."""
    return small.model(config=small.SHALLOW)


def run(prompts: list[list[int]], **options: Any) -> Generation:
    return generate(model(), prompts, **{"max_new_tokens": 20, **options})


@pytest.fixture(scope="module")
def alone() -> list[Generation]:
    """Token by token, so that one program serves prompts and decoding."""
    return [run([prompt], prefill_chunk=1) for prompt in PROMPTS]


@pytest.mark.tier("full", fast=("chunks of 7",))
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk": 1}, {"prefill_chunk": 7}, {"cache": "paged", "prefill_chunk": 7, "page_size": 5}],
    ids=["whole", "token by token", "chunks of 7", "paged"],
)
def test_alone_and_in_company(alone: list[Generation], options: dict[str, Any]) -> None:
    together = run(PROMPTS, **options)
    assert_bits_equal(together.tokens, [one.tokens[0] for one in alone])
    assert_bits_equal(together.logprobs, [one.logprobs[0] for one in alone])


def test_the_same_bits_as_one_program_for_the_whole_model(alone: list[Generation]) -> None:
    """The full forward pass over prompt and continuation, in one jit, finds the same log-probabilities."""
    for prompt, one in zip(PROMPTS, alone, strict=True):
        sequence = np.array([*prompt, *one.tokens[0]], np.int32)
        (scores,) = small.in_full(model(), (sequence,))
        assert_bits_equal(scores[len(prompt) - 1 :], one.logprobs[0])


@pytest.mark.tier("full")
def test_plain_jax_differs() -> None:
    """The control; test_llama.py has one of the model that always runs. Texts may still agree; the bits do not."""
    plain = small.model(PLAIN)
    expected = generate(plain, PROMPTS[:1], max_new_tokens=20)
    others = [generate(plain, PROMPTS, max_new_tokens=20, prefill_chunk=chunk) for chunk in (None, 1)]
    assert any((other.logprobs[0].view(np.uint32) != expected.logprobs[0].view(np.uint32)).any() for other in others)


@pytest.mark.tier("full")
def test_end_of_sequence(alone: list[Generation]) -> None:
    """A sequence ends with its end token; the others go on, and nothing of theirs changes."""
    first, second = (one.tokens[0].tolist() for one in alone)
    eos = next(token for i, token in enumerate(second) if i >= 4 and token not in second[:i] + first[:i])
    calls: list[int] = []
    found = run(PROMPTS, eos_token_ids={eos}, on_token=calls.append)
    for tokens, logprobs, one in zip(found.tokens, found.logprobs, alone, strict=True):
        whole = one.tokens[0].tolist()
        length = whole.index(eos) + 1 if eos in whole else len(whole)
        assert_bits_equal(tokens, one.tokens[0][:length])
        assert_bits_equal(logprobs, one.logprobs[0][:length])
    assert sum(calls) == sum(len(tokens) for tokens in found.tokens)
    assert calls[0] == len(PROMPTS)
    assert all(tokens.dtype == np.int32 for tokens in found.tokens)
    assert all(logprobs.dtype == np.float32 for logprobs in found.logprobs)


def test_no_prompts() -> None:
    assert run([]) == Generation([], [])


@pytest.mark.parametrize("fits", [False, full_only(True)], ids=["one more", "both"])
def test_a_prompt_may_fill_the_model(fits: bool) -> None:
    longest = small.CONFIG.max_position_embeddings
    prompt = (PROMPTS[0] * 6)[: longest - 1]
    if fits:
        assert len(run([prompt], max_new_tokens=1, prefill_chunk=1).tokens[0]) == 1
    with pytest.raises(ValueError, match=r"at most 256 tokens .* got 255 for prompt 0 and max_new_tokens=2"):
        run([prompt], max_new_tokens=2)


def test_errors() -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        run(PROMPTS, max_new_tokens=0)
    with pytest.raises(ValueError, match="prefill_chunk must be at least 1, got 0"):
        run(PROMPTS, prefill_chunk=0)
    with pytest.raises(ValueError, match="page_size must be at least 1, got -1"):
        run(PROMPTS, page_size=-1)
    with pytest.raises(ValueError, match="'contiguous' or 'paged', got 'ring'"):
        run(PROMPTS, cache="ring")
    with pytest.raises(ValueError, match=r"at least one token id, got an array of shape \(0,\) for prompt 1"):
        run([[1], []])
    with pytest.raises(ValueError, match="from 0 to 319, got 320"):
        run([[1, 320]])
    with pytest.raises(TypeError, match="integers, got float"):
        run([[1.5]])  # type: ignore[list-item]


def test_greedy(alone: list[Generation]) -> None:
    """Each token is the most probable one after those before it, and its log-probability is that one's."""
    for prompt, one in zip(PROMPTS, alone, strict=True):
        sequence = [*prompt, *map(int, one.tokens[0])]
        logits = reference_llama.logits(small.weights(small.SHALLOW), small.SHALLOW, sequence)[len(prompt) - 1 : -1]
        assert_bits_equal(one.tokens[0], np.argmax(logits, axis=-1).astype(np.int32))
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(one.logprobs[0], logprobs.max(axis=-1), rtol=0, atol=1e-5)
