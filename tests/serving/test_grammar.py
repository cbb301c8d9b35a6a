"""Outputs that follow a grammar: masks against a matcher written here, and bits among other requests."""

import dataclasses
import json
import re
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bijax.serving import Engine, EngineOptions, Grammar, RequestOutput, SamplingParams
from bijax.serving import grammar as grammars_module
from bijax.serving.grammar import Grammars
from tests.serving.bigrams import Bigrams
from tests.serving.fake_engine import END, VOCABULARY, ByteTokenizer
from tests.serving.traffic import bits

pytest.importorskip("llguidance", reason="the optional package llguidance computes the masks")

GRAMMARS = Grammars(ByteTokenizer(), VOCABULARY, [END])
PROMPT = tuple(b"abcabcabcabc")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["abcabcabc", "b"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[Grammar, str]] = {
    "schema": (Grammar.json(SCHEMA), r'\{"name": "(abcabcabc|b)", "age": [0-9]{1,2}\}'),
    "regex": (Grammar("regex", "(abc){2,6}x"), "(abc){2,6}x"),
    "ebnf": (Grammar("ebnf", 'root ::= ("abc" | "z")+ "."'), r"(abc|z)+\."),
    "choice": (Grammar.choice(["abcabcabc", "a+b?", "é"]), r"abcabcabc|a\+b\?|é"),
}


def engine(**options: Any) -> Engine:
    small = {"page_size": 4, "num_pages": 40, "max_running": 2, "max_prefill_tokens": 16, "max_length": 80}
    return Engine(Bigrams(), tokenizer=ByteTokenizer(), eos_token_ids=[END], options=EngineOptions(**(small | options)))


def requests() -> list[SamplingParams]:
    params = SamplingParams(max_new_tokens=40, logprobs=True, top_logprobs=2, seed=3)
    return [
        *(dataclasses.replace(params, grammar=grammar, seed=i) for i, (grammar, _) in enumerate(CASES.values())),
        dataclasses.replace(params, max_new_tokens=12),
        dataclasses.replace(params, grammar=CASES["regex"][0], temperature=0.0, frequency_penalty=0.5),
    ]


@pytest.fixture(scope="module")
def alone() -> list[RequestOutput]:
    served = engine(dispatch_ahead=False, prefix_cache=False)
    return [served.generate([PROMPT], params)[0] for params in requests()]


def test_outputs_follow_their_grammars(alone: list[RequestOutput]) -> None:
    for (_, pattern), output in zip(CASES.values(), alone, strict=False):
        [completion] = output.completions
        assert completion.text is not None
        if completion.finish_reason == "stop":
            assert re.fullmatch(pattern, completion.text), completion.text
        assert completion.finish_reason in ("stop", "length")
    assert sum(output.completions[0].finish_reason == "stop" for output in alone) >= 3


@pytest.mark.tier("full", fast=("ahead",))
@pytest.mark.parametrize(
    "way", [{}, {"speculative_tokens": 3}, {"num_pages": 16}], ids=["ahead", "drafts", "pages run out"]
)
def test_bits_do_not_depend_on_the_grammars_of_others(alone: list[RequestOutput], way: dict[str, int]) -> None:
    """Together, with steps dispatched ahead, with drafts, and with pages that run out."""
    served = engine(**way)
    together = served.generate([PROMPT] * len(alone), requests())
    assert [bits(output) for output in together] == [bits(output) for output in alone]
    free = [dataclasses.replace(params, grammar=None) for params in requests()]
    assert [bits(output) for output in served.generate([PROMPT] * len(free), free)][:4] != [bits(o) for o in alone][:4]
    if "speculative_tokens" in way:
        assert served.stats().accepted_tokens > 0
    if "num_pages" in way:
        assert served.stats().preemptions > 0


def test_several_outputs_have_states_of_their_own() -> None:
    params = SamplingParams(max_new_tokens=30, grammar=CASES["regex"][0], n=3, seed=1)
    served = engine()
    [output] = served.generate([PROMPT], params)
    for index, completion in enumerate(output.completions):
        [one] = served.generate([PROMPT], dataclasses.replace(params, n=1, seed=1 + index))
        assert one.completions[0].tokens == completion.tokens


def test_an_interrupted_engine_continues_in_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    params = requests()[0]
    served = engine()
    wanted = served.generate([PROMPT], params)[0].completions[0].tokens
    name = served.add(PROMPT, params)
    for _ in range(6):
        served.step()
    monkeypatch.setattr(served, "_take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _ = [served.step() for _ in range(9)]
    monkeypatch.undo()
    found = None
    while found is None:
        found = next((o for o in served.step() if o.finished and o.request_id == name), None)
    assert found.completions[0].tokens == wanted


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text("ab+.é", max_size=4), min_size=1, max_size=5, unique=True), st.data())
def test_masks_are_those_of_a_choice(texts: list[str], data: st.DataObject) -> None:
    """Byte by byte, against the texts themselves; drafts leave the state as it was."""
    texts = [text for text in texts if text] or ["a"]
    wanted = [text.encode() for text in texts]
    matcher = GRAMMARS.matcher(Grammar.choice(texts))
    done = b""
    while not matcher.finished:
        following = {text[len(done)] for text in wanted if text.startswith(done) and len(text) > len(done)}
        following |= {END} if done in wanted else set()
        assert set(np.flatnonzero(matcher.mask())) == following
        token = data.draw(st.sampled_from(sorted(following)))
        if token == END:
            break
        after = matcher.mask([token])
        assert set(np.flatnonzero(matcher.mask())) == following
        assert matcher.allowed([token]) == 1
        assert matcher.append(token)
        done += bytes([token])
        assert matcher.finished or (after == matcher.mask()).all()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "(a"), "grammar must be a valid regex: .*unclosed group"),
        (Grammar("ebnf", "start: nothing"), "grammar must be a valid ebnf: .*unknown name"),
        (Grammar("json_schema", '{"type": "nothing"}'), "grammar must be a valid json_schema"),
        (Grammar("json_schema", "{"), "grammar must be a valid json_schema"),
    ],
)
def test_bad_grammars(grammar: Grammar, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)SamplingParams: {message}"):
        GRAMMARS.matcher(grammar)


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    original = grammars_module._compiled
    monkeypatch.setattr(grammars_module, "_compiled", lambda grammar: compiled.append(grammar) or original(grammar))
    grammars, choice = Grammars(ByteTokenizer(), VOCABULARY, [END]), Grammar.choice(["ab", "cd"])
    first, second = grammars.matcher(choice), grammars.matcher(Grammar.choice(["ab", "cd"]))
    assert compiled == [choice]
    assert first.append(ord("a"))
    assert not first.append(ord("d"))
    assert second.append(ord("c"))
    assert grammars.matcher(choice).append(ord("a"))
    for _ in range(2):  # an error is raised each time
        with pytest.raises(ValueError, match="grammar must be a valid regex"):
            grammars.matcher(Grammar("regex", "("))


def test_what_grammars_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="min_new_tokens must be 0 with a grammar"):
        SamplingParams(grammar=Grammar.json(), min_new_tokens=1)
    with pytest.raises(TypeError, match="grammar must be a Grammar, got 'a'"):
        SamplingParams(grammar="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs an engine with a tokenizer"):
        Grammars(None, VOCABULARY, [END]).matcher(Grammar.json())
    monkeypatch.setattr(grammars_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package llguidance.* run `pip install llguidance`"):
        GRAMMARS.matcher(Grammar.json())


def test_json_is_written_as_python_writes_it() -> None:
    value = {"name": "b", "age": 7}
    matcher = GRAMMARS.matcher(Grammar.json(SCHEMA))
    assert all(matcher.append(byte) for byte in json.dumps(value).encode())
    assert matcher.finished
    assert "llguidance" in sys.modules
