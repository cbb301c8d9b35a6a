"""Structured outputs over HTTP: the names of SGLang, OpenAI and vLLM, and an engine that follows them."""

import json

import openai
import pydantic
import pytest

from bijax.serving import Grammar
from tests.serving.engine_server import serve
from tests.serving.live import live

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "fields", "grammar"),
    [
        ("/generate", {"regex": "a|b"}, Grammar("regex", "a|b")),
        ("/generate", {"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ("/generate", {"json_schema": json.dumps(SCHEMA)}, Grammar.json(SCHEMA)),
        ("/v1/completions", {"regex": "a|b"}, Grammar("regex", "a|b")),
        ("/v1/completions", {"guided_choice": ["a", "b."]}, Grammar("regex", r"a|b\.")),
        ("/v1/completions", {"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ("/v1/chat/completions", {"guided_json": SCHEMA}, Grammar.json(SCHEMA)),
        ("/v1/chat/completions", {"structured_outputs": {"json": SCHEMA}}, Grammar.json(SCHEMA)),
        ("/v1/chat/completions", {"structured_outputs": {"choice": ["a"]}}, Grammar("regex", "a")),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, Grammar.json()),
        ("/v1/chat/completions", {"response_format": {"type": "text"}, "regex": None}, None),
        (
            "/v1/chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar.json(SCHEMA),
        ),
    ],
)
def test_all_names_reach_the_engine(server, path, fields, grammar):
    body = {"text": "a", "sampling_params": {"max_new_tokens": 2} | fields} if path == "/generate" else fields
    body = {"prompt": "a", "max_tokens": 2} | body if path == "/v1/completions" else body
    reply = server.post(path, CHAT | body if "chat" in path else body)
    assert reply.status == 200, reply.body
    assert server.engine.requests[-1].params.grammar == grammar


@pytest.mark.tier("full")  # test_grammar.py has the engine in `make test`
def test_an_engine_follows_them():
    pytest.importorskip("llguidance", reason="the optional package llguidance computes the masks")

    class Answer(pydantic.BaseModel):
        ok: bool

    with serve() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        requested = {"model": "fake", "messages": CHAT["messages"], "max_tokens": 30}
        parsed = client.chat.completions.parse(**requested, response_format=Answer)
        assert isinstance(parsed.choices[0].message.parsed.ok, bool)
        assert parsed.choices[0].finish_reason == "stop"
        with client.chat.completions.stream(**requested, response_format=Answer) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed.ok, bool)
        items = server.generate(text=["a", "b"], sampling_params={"max_new_tokens": 9, "regex": "(ab){1,3}x"})
        assert all(item["text"].strip("abx") == "" and item["text"].endswith("x") for item in items)
        for fields, field in (({"regex": "(a"}, "regex"), ({"guided_regex": "(a"}, "guided_regex")):
            reply = server.post("/v1/chat/completions", CHAT | fields)
            assert (reply.status, reply.json["error"]["param"]) == (400, field)
            assert f"{field}: must be a valid regex" in reply.error
