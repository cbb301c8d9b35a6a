"""SGLang's frontend language (`sglang.lang`, tried with 0.5.23) against this server: the client as it is installed."""

import importlib.util
import sys
import types

import pytest

from bijax.serving import Grammar
from tests.serving.fake_engine import ByteTokenizer, logprob
from tests.serving.live import live


@pytest.fixture(scope="module")
def sgl():
    """The language alone. The package itself imports torch, which only SGLang's own server needs."""
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip("the package sglang is not installed (pip install --no-deps sglang)")
    bare = types.ModuleType("sglang")
    bare.__path__ = list(found.submodule_search_locations)
    before = dict(sys.modules)
    sys.modules["sglang"] = bare
    try:
        from sglang.lang import api
        from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
    except ImportError as error:
        pytest.skip(f"a package that sglang.lang imports is missing: {error}")
    else:
        yield types.SimpleNamespace(api=api, endpoint=RuntimeEndpoint)
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] == "sglang":
                del sys.modules[name]


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


def test_programs_of_the_frontend_language(sgl, server):
    @sgl.api.function
    def program(s):
        s += "Question: a or b?\n"
        s += "Answer: " + sgl.api.gen("answer", max_tokens=6, temperature=0, return_logprob=True)
        forks = s.fork(2)
        for index, fork in enumerate(forks):
            fork += f"{index}: " + sgl.api.gen("more", max_tokens=3, temperature=0, stop="\n")
        s += "Number: " + sgl.api.gen("number", max_tokens=4, dtype=int, temperature=0)
        s += "Choice: " + sgl.api.select("choice", choices=["yes", "no way"])
        s += "".join(fork["more"] for fork in forks)

    backend = sgl.endpoint(server.url)
    state = program.run(backend=backend)
    prompt = "Question: a or b?\nAnswer: "
    same = server.generate(text=prompt, sampling_params={"temperature": 0, "max_new_tokens": 6})
    assert state["answer"] == same["text"]
    assert len(state.get_meta_info("answer")["output_token_logprobs"]) == 6
    regexes = [r.params.grammar for r in server.engine.requests if r.params.grammar is not None]
    assert regexes == [Grammar("regex", r"[-+]?[0-9]+[ \n]*")]
    before = state.text().partition("Choice: ")[0] + "Choice: "
    scores = {}
    for choice in ("yes", "no way"):
        tokens = tuple((before + choice).encode())
        start = len(before.encode())
        scores[choice] = sum(logprob(tokens[:i], 0) for i in range(start, len(tokens))) / len(choice)
    assert state["choice"] == max(scores, key=scores.get)
    assert backend.get_server_info()["max_model_len"] == 4096
    backend.flush_cache()
    assert server.engine.flushed == 1


def test_streams_and_batches_of_the_frontend_language(sgl, server):
    @sgl.api.function
    def program(s, name):
        s += f"Hi {name}. " + sgl.api.gen("answer", max_tokens=8, temperature=0)

    backend = sgl.endpoint(server.url)
    states = program.run_batch([{"name": name} for name in "abc"], backend=backend)
    streamed = program.run(name="a", backend=backend, stream=True)
    text = "".join(streamed.text_iter())
    assert text == states[0].text()
    assert states[1]["answer"] == ByteTokenizer().decode(states[1]["answer"].encode())
