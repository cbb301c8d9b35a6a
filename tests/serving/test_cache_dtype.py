"""Caches of 8 bits in the engine: prefill, chunks, decoding, drafts and a warm cache give the same bits."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from bijax.serving import Engine, EngineOptions, ModelOptions, RequestOutput, SamplingParams
from bijax.serving.load import load_model
from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT
from flax_layers.checkpoint import Checkpoint, load_checkpoint
from flax_layers.checkpoint.weights import Weights
from flax_layers.models import Llama, ServedLlama
from tests.layers import checkpoint_files as files
from tests.serving.traffic import bits

STORED = {"int8": "int8", "fp8_e4m3": "float8_e4m3fn"}
PROMPT = tuple(range(5, 25))
SMALL: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_running": 2, "max_prefill_tokens": 16}
PARAMS: dict[str, Any] = {"seed": 3, "max_new_tokens": 4, "logprobs": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    weights = {n: w / (w.shape[-1] ** 0.5 if w.ndim > 1 else 1) for n, w in files.random_weights().items()}
    return load_checkpoint(files.write_folder(tmp_path_factory.mktemp("model"), weights=weights))


@pytest.fixture(scope="module")
def engines(checkpoint: Checkpoint) -> Any:
    @functools.cache
    def served(dtype: str) -> ServedLlama:
        return load_model(checkpoint, ModelOptions(kv_cache_dtype=dtype))

    @functools.cache
    def engine(dtype: str, *, one_program: bool = False, **options: Any) -> Engine:
        model = served(dtype)
        if one_program:
            model = ServedLlama(model.model, one_program=True, cache_dtype=model._cache)
        return Engine(model, eos_token_ids=[1], options=EngineOptions(**SMALL | options))

    return engine


def run(engine: Engine, prompts: Any = (PROMPT,), **more: Any) -> list[RequestOutput]:
    return engine.generate(prompts, SamplingParams(**PARAMS | more))


def logprobs(output: RequestOutput) -> np.ndarray:
    return np.array([p.logprob for p in output.completions[0].logprobs], np.float32)


@pytest.mark.tier("full")  # a model with such a cache compiles for 15 seconds
@pytest.mark.parametrize("dtype", STORED)
def test_decoding_is_prefill(engines: Any, dtype: str) -> None:
    """Tokens that were decoded get the same log-probabilities as a prompt, in chunks and from a warm cache."""
    engine = engines(dtype)
    [output] = run(engine)
    tokens = output.completions[0].tokens
    [whole] = run(engine, [PROMPT + tokens], max_new_tokens=0, prompt_logprobs=True, logprob_start_len=len(PROMPT))
    scored = np.array([p.logprob for p in whole.prompt_logprobs or () if p is not None], np.float32)
    assert_bits_equal(scored, logprobs(output))
    assert whole.cached_tokens > 0
    [warm] = run(engine)
    assert warm.cached_tokens >= 16
    assert bits(warm) == bits(output)


@pytest.mark.tier("full")
@pytest.mark.parametrize("one_program", [False, True], ids=["a program a layer", "one program"])
@pytest.mark.parametrize("dtype", STORED)
def test_bits_do_not_depend_on_others(engines: Any, dtype: str, one_program: bool) -> None:
    more = {"prompt_logprobs": True, "max_new_tokens": 8, "n": 2}
    [alone] = run(engines(dtype), **more)
    prompts = [PROMPT, *(PROMPT[:n] for n in (1, 10, 4, 9, 8, 3, 17, 2))]
    for options in ({}, {"speculative_tokens": 3}, {"max_prefill_tokens": 64, "page_size": 8}):
        engine = engines(dtype, one_program=one_program, max_running=16, **options)
        assert bits(run(engine, prompts, **more)[0]) == bits(alone)
        engine.flush_cache()
        assert bits(run(engine, prompts[::-1], **more)[-1]) == bits(alone)


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", STORED)
def test_plain_jax_differs(engines: Any, dtype: str) -> None:
    """The control: JAX's own operations over the same cache."""
    plain = engines(dtype, enable_deterministic_inference=False, max_running=8, max_prefill_tokens=64)
    differing = 0  # which batches and prompts differ depends on the processor and on JAX's version
    for prompt in (PROMPT, PROMPT[:7]):
        [alone] = run(plain, [prompt], prompt_logprobs=True)
        plain.flush_cache()
        for count in (1, 2, 3, 5, 7):
            others = [PROMPT[: 20 - n] for n in range(1, count + 1)]
            differing += bits(run(plain, [prompt, *others], prompt_logprobs=True)[0]) != bits(alone)
            plain.flush_cache()
    assert differing, "plain JAX gives the request the same bits in every batch: the comparison proves nothing"
    np.testing.assert_allclose(logprobs(run(plain)[0]), logprobs(run(engines(dtype))[0]), rtol=0, atol=0.2)


@pytest.mark.tier("full")
def test_log_probabilities_are_close_to_those_of_a_wide_cache(engines: Any) -> None:
    def scored(dtype: str) -> np.ndarray:
        [output] = run(engines(dtype), max_new_tokens=0, prompt_logprobs=True)
        return np.array([p.logprob for p in output.prompt_logprobs or () if p is not None])

    wide = scored("auto")
    errors = {dtype: np.abs(scored(dtype) - wide).max() for dtype in STORED}
    assert 0 < errors["int8"] < 0.05
    assert 0 < errors["fp8_e4m3"] < 0.3


@pytest.mark.tier("full", fast=("fp8_e4m3",))
@pytest.mark.parametrize("dtype", STORED)
def test_the_cache_is_a_quarter(checkpoint: Checkpoint, dtype: str) -> None:
    def arrays(dtype: str) -> list[Any]:
        served = load_model(checkpoint, ModelOptions(kv_cache_dtype=dtype))
        return jax.tree.leaves(jax.eval_shape(lambda: served.init_pages(8, 4)))

    def size(dtype: str) -> int:
        return sum(a.size * a.dtype.itemsize for a in arrays(dtype))

    assert 4 * size(dtype) == size("auto")
    assert {a.dtype.name for a in arrays(dtype)} == {STORED[dtype]}


@pytest.mark.tier("full")
def test_the_scales_belong_to_the_weights(engines: Any, checkpoint: Checkpoint) -> None:
    served = engines("int8")._model
    halved = Weights(checkpoint.weights.shapes, lambda name: checkpoint.weights[name] * np.float32(0.5))
    other = served.with_weights(Llama.from_checkpoint(dataclasses.replace(checkpoint, weights=halved)))
    assert not np.array_equal(other._cache.scales[1][0], served._cache.scales[1][0])
    again = other.with_weights(Llama.from_checkpoint(checkpoint))
    assert_bits_equal(again._cache.scales[1][0], served._cache.scales[1][0])
    assert_bits_equal(served.plain()._cache.scales[1][0], served._cache.scales[1][0])


def test_numbers_that_8_bits_cannot_hold_make_nan() -> None:
    """Not a zero or the largest number: the query of such a token is nan, that of the others is not."""
    heads = np.ones((1, 3, 4, 8), np.float32)
    heads[0, 1, 2, 0] = np.inf  # of the keys
    heads[0, 2, 3, 0] = np.nan  # of the values
    angles = np.ones((1, 3, 4), np.float32), np.zeros((1, 3, 4), np.float32)
    cache = np.zeros((1, 4, 1, 8), np.int8)
    scales = np.full(1, 0.5, np.float32), np.full(1, 0.5, np.float32)
    store = jax.jit(INVARIANT.rotate_and_store)
    query, keys, values = store(heads, *angles, np.arange(3), cache, cache, scales=scales)
    assert np.isnan(query[0]).all(axis=(1, 2)).tolist() == [False, True, True]
    assert np.asarray(keys)[0, :, 0, 1].tolist() == [2, 2, 2, 0]
    assert np.asarray(values)[0, 2, 0].tolist() == [0, *[2] * 7]


def test_the_option_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, int8, fp8_e4m3, got 'fp8_e5m2'"):
        ModelOptions(kv_cache_dtype="fp8_e5m2")
