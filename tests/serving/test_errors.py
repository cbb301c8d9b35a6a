"""What the engine refuses."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bijax.serving import AsyncEngine, Engine, EngineOptions, QueueFullError, SamplingParams
from tests.serving.traffic import LONGEST, Letters, all_pages_are_back, engine, model


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ((), {}, ValueError, "at least one token"),
        ("abc", {}, TypeError, "encode it first"),
        (jnp.ones(3, int), {}, TypeError, r"got ArrayImpl; convert it with \.tolist\(\)"),
        ([1.5], {}, TypeError, r"must be integers, got 1\.5"),
        ([True], {}, TypeError, "must be integers, got True"),
        ([160], {}, ValueError, "from 0 to 159, got 160"),
        ([-1], {}, ValueError, "from 0 to 159, got -1"),
        (np.zeros(LONGEST, int), {}, ValueError, f"at most {LONGEST - 1} tokens, which model and cache have room for"),
        ([1], {"logit_bias": {160: 1.0}}, ValueError, "logit_bias must name tokens from 0 to 159, got 160"),
        ([1], {"allowed_token_ids": [500]}, ValueError, "allowed_token_ids must name tokens from 0 to 159"),
        ([1], {"stop_token_ids": [160]}, ValueError, "stop_token_ids must name tokens from 0 to 159"),
    ],
)
def test_bad_requests(prompt: Any, params: dict[str, Any], error: type[Exception], message: str) -> None:
    served = engine()
    with pytest.raises(error, match=message):
        served.add(prompt, SamplingParams(**params))
    assert not served.has_work


def test_bad_arguments() -> None:
    served = engine()
    with pytest.raises(TypeError, match="priority must be an integer, got 'high'"):
        served.add([1], priority="high")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="params must be SamplingParams, got dict"):
        served.add([1], {"n": 1})  # type: ignore[arg-type]
    served.add([1], request_id="a")
    with pytest.raises(ValueError, match="request_id 'a' is that of a request that is not finished"):
        served.add([1], request_id="a")
    with pytest.raises(ValueError, match="params for each of the 2 prompts, got 1"):
        served.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(TypeError, match="prompts must be a sequence of prompts, got int"):
        served.generate(3)  # type: ignore[arg-type]
    served.pause()
    with pytest.raises(ValueError, match="paused"):
        served.generate([[1]])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": jnp.tanh}, r"model must be a bijax\.serving\.Model, .* got PjitFunction, which has no vocab_size"),
        ({"eos_token_ids": 3}, "eos_token_ids must be a collection of integers, got 3"),
        ({"options": {"num_pages": 4}}, "options must be EngineOptions, got dict"),
    ],
)
def test_engines_of_something_else(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Engine(**({"model": model()} | wrong))


def test_async_engines_of_something_else() -> None:
    with pytest.raises(TypeError, match="engine must be an Engine, got NoneType"):
        AsyncEngine(None)  # type: ignore[arg-type]


def test_stop_strings_need_a_tokenizer() -> None:
    served = Engine(model(), options=EngineOptions(num_pages=4))
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        served.add([1], SamplingParams(stop="x"))
    assert Letters().decode([0]) == "an"


def test_a_request_for_which_no_token_may_be_sampled() -> None:
    served = Engine(model(), eos_token_ids=[2, 3], options=EngineOptions(num_pages=4))
    only_ends = {"allowed_token_ids": [2, 3], "min_new_tokens": 1}
    with pytest.raises(ValueError, match="allowed_token_ids must name a token that may come before min_new_tokens"):
        served.add([1], SamplingParams(**only_ends))
    assert served.add([1], SamplingParams(**only_ends | {"min_new_tokens": 0}))
    assert served.add([1], SamplingParams(**only_ends, ignore_eos=True))


def test_special_tokens_need_a_tokenizer_that_knows_them() -> None:
    served = Engine(model(), tokenizer=Letters(), options=EngineOptions(num_pages=4))
    with pytest.raises(ValueError, match="skip_special_tokens must be False with a tokenizer that has no special_"):
        served.add([1], SamplingParams(skip_special_tokens=True))


def test_a_request_ends_where_the_cache_has_no_room() -> None:
    """Not the model's longest sequence, which is longer here."""
    served = engine(num_pages=4)
    [output] = served.generate([[1, 2, 3]], SamplingParams(max_new_tokens=40, ignore_eos=True))
    [completion] = output.completions
    assert (len(completion.tokens), completion.finish_reason) == (13, "length")
    assert all_pages_are_back(served)


def test_the_queue_is_bounded() -> None:
    served = engine(max_waiting=3)
    served.add([1], SamplingParams(n=2))
    with pytest.raises(QueueFullError, match="2 sequences wait, and 2 more would be above max_waiting=3"):
        served.add([1], SamplingParams(n=2))
    served.add([1])
    assert served.stats().num_waiting == 3


def test_abort_of_one_that_waits() -> None:
    served = engine()
    name = served.add([1])
    output = served.abort(name)
    assert output is not None
    assert (output.finished, output.completions[0].finish_reason) == (True, "abort")
    assert served.abort(name) is None
    assert served.step() == []
    assert served.stats().finished == {"abort": 1}
