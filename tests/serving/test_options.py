"""Options and sampling parameters: where they come from, and what is refused."""

import argparse
import dataclasses
from typing import Any

import pytest

from bijax.parallel import Overlap
from bijax.serving import Engine, EngineOptions, SamplingParams
from bijax.serving.toy import ToyModel


def flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    EngineOptions.add_flags(parser)
    return parser.parse_args(given)


def test_a_flag_counts_before_the_environment_and_that_before_the_default() -> None:
    environ = {"BIJAX_PAGE_SIZE": "8", "BIJAX_PREFIX_CACHE": "off", "BIJAX_DEFAULT_SEED": "42"}
    found = EngineOptions.from_flags(flags("--page-size", "4"), environ=environ)
    assert (found.page_size, found.prefix_cache, found.default_seed) == (4, False, 42)
    assert found.num_pages == EngineOptions().num_pages
    assert EngineOptions.from_flags(flags("--prefix-cache"), environ=environ).prefix_cache
    assert EngineOptions.read(environ=environ, page_size=2).page_size == 2


WITH_TWO = {"enable_two_batch_overlap": "1", "moe_a2a_backend": "all_to_all"}
NEEDED = {
    "enable_two_batch_overlap": WITH_TWO,
    "enable_single_batch_overlap": {"moe_a2a_backend": "all_to_all"},
    "moe_a2a_backend": WITH_TWO,
    "tbo_token_distribution_threshold": WITH_TWO,
    "speculative_algorithm": {"speculative_tokens": "7"},
}
"""Options that others need."""


def test_every_option_has_a_flag_and_a_variable() -> None:
    parsed = flags()
    for option in dataclasses.fields(EngineOptions):
        assert getattr(parsed, option.name) is None
        kind = option.metadata["kind"]
        number = max(7, option.metadata["least"] or 0)
        choices = option.metadata["choices"] or ("",)
        values = {bool: ("1", True), float: ("0.5", 0.5), int: (str(number), number), str: (choices[-1],) * 2}
        text, value = values[kind]
        environ = {"BIJAX_" + name.upper(): text for name, text in NEEDED.get(option.name, {}).items()}
        environ["BIJAX_" + option.name.upper()] = text
        assert getattr(EngineOptions.read(environ=environ), option.name) == value


def test_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIJAX_PAGE_SIZE", "2")
    assert EngineOptions().page_size == 16
    assert EngineOptions.read().page_size == 2


TWO: dict[str, Any] = {"enable_two_batch_overlap": True, "moe_a2a_backend": "all_to_all"}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
        ({"page_size": 4.0}, TypeError, r"page_size must be an integer, got 4\.0"),
        ({"speculative_tokens": 8}, ValueError, "speculative_tokens must be from 0 to 7, got 8"),
        ({"prefix_cache": 1}, TypeError, "prefix_cache must be True or False, got 1"),
        ({"default_seed": 2**64}, ValueError, "default_seed must be from 0"),
        ({"environ": {"BIJAX_PAGE_SIZE": "x"}}, ValueError, "BIJAX_PAGE_SIZE must be an integer, got 'x'"),
        ({"environ": {"BIJAX_PREFIX_CACHE": "2"}}, ValueError, "BIJAX_PREFIX_CACHE must be one of 1, true"),
        ({"pages": 3}, TypeError, "pages"),
        ({**TWO, "enable_single_batch_overlap": True}, ValueError, "enable_two_batch_overlap must be False with"),
        ({"enable_two_batch_overlap": True}, ValueError, "be all_to_all with enable_two_batch_overlap, got 'none'"),
        ({"enable_single_batch_overlap": True}, ValueError, "be all_to_all with enable_single_batch_overlap, got"),
        ({"moe_a2a_backend": "all_to_all"}, ValueError, "be none without overlap, got 'all_to_all'"),
        ({"moe_a2a_backend": "deepep"}, ValueError, "one of none, all_to_all, got 'deepep'"),
        ({**TWO, "speculative_tokens": 2}, ValueError, "must be 0 with enable_two_batch_overlap, got 2"),
        ({**TWO, "enable_deterministic_inference": False}, ValueError, "must be False without enable_deterministic"),
        (
            {**TWO, "tbo_token_distribution_threshold": 0.6},
            ValueError,
            r"must be from 0\.0 to 0\.5, got 0\.6",
        ),
        ({**TWO, "tbo_token_distribution_threshold": float("nan")}, ValueError, r"from 0\.0 to 0\.5, got nan"),
        ({"tbo_token_distribution_threshold": 0.3}, ValueError, r"must be 0\.48 without enable_two_batch_overlap"),
    ],
)
def test_bad_options(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineOptions.read(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"temperature": -1}, ValueError, "temperature must be at least 0, got -1"),
        ({"temperature": float("nan")}, ValueError, "temperature must be at least 0, got nan"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, got '1'"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_p": 0}, ValueError, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, ValueError, "top_p must be above 0"),
        ({"min_p": -0.1}, ValueError, "min_p must be from 0 to 1"),
        ({"repetition_penalty": -1.0}, ValueError, "repetition_penalty must be above 0"),
        ({"repetition_penalty": 1e-40}, ValueError, "repetition_penalty must be above 0 .* as a float32"),
        ({"temperature": 10**400}, ValueError, "temperature must be at least 0, got an integer too large for a float"),
        ({"frequency_penalty": 2.5}, ValueError, "frequency_penalty must be from -2 to 2"),
        ({"presence_penalty": -3}, ValueError, "presence_penalty must be from -2 to 2"),
        ({"logit_bias": {1: 101}}, ValueError, "logit_bias must be from -100 to 100, got 101 for token 1"),
        ({"logit_bias": {-1: 1}}, ValueError, "logit_bias must not be negative, got -1"),
        ({"logit_bias": [1]}, TypeError, "logit_bias must map tokens to numbers"),
        ({"allowed_token_ids": ()}, ValueError, "allowed_token_ids must name at least one token"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be at least 0"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens must be an integer, got True"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, ValueError, "min_new_tokens must be at most max_new_tokens"),
        ({"stop": ""}, ValueError, "stop must hold strings of at least one character"),
        ({"stop": [1]}, TypeError, "stop must be a string or several"),
        ({"stop_token_ids": "12"}, TypeError, "stop_token_ids must be a sequence of integers"),
        ({"n": 0}, ValueError, "n must be at least 1"),
        ({"seed": 2**64}, ValueError, "seed must be from -9223372036854775808 to 18446744073709551615"),
        ({"seed": 1.5}, TypeError, r"seed must be an integer, got 1\.5"),
        ({"top_logprobs": 21}, ValueError, "top_logprobs must be from 0 to 20"),
        ({"logprobs": 1}, TypeError, "logprobs must be True or False"),
    ],
)
def test_bad_sampling_params(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**given)


def test_sampling_params_are_values() -> None:
    assert SamplingParams(stop="x") == SamplingParams(stop=("x",))
    assert hash(SamplingParams(logit_bias={3: 1})) == hash(SamplingParams(logit_bias={3: 1}))


def test_overlap_that_options_ask_for() -> None:
    assert EngineOptions().overlap() is None
    assert EngineOptions(**TWO, tbo_token_distribution_threshold=0.25).overlap() == Overlap("two_batch", 0.25)
    single = EngineOptions(enable_single_batch_overlap=True, moe_a2a_backend="all_to_all", speculative_tokens=2)
    assert single.overlap() == Overlap("single_batch")


def test_a_model_without_experts_on_several_devices_has_no_overlap() -> None:
    with pytest.raises(ValueError, match=r"experts are on several devices, got a ToyModel with experts on 1; pass"):
        Engine(ToyModel.random(seed=0), options=EngineOptions(**TWO))
