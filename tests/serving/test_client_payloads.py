"""Requests as LangChain's ChatOpenAI and LlamaIndex's OpenAILike send them, written down from their sources."""

import pytest

from bijax.serving import Grammar
from tests.serving.live import live

SCHEMA = {
    "title": "Joke",
    "description": "A joke.",
    "type": "object",
    "properties": {
        "setup": {"title": "Setup", "type": "string"},
        "rating": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["setup", "rating"],
    "additionalProperties": False,
}  # fmt: skip

LANGCHAIN = {
    "invoke": {"messages": [{"content": "Be brief.", "role": "system"}, {"content": "Hi", "role": "user"}],
               "model": "fake", "max_completion_tokens": 3, "stream": False},
    "every option": {"messages": [{"content": "Hi", "role": "user"}], "model": "fake", "stream": False, "n": 1,
                     "temperature": 0.2, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.0, "presence_penalty": 0.0,
                     "logprobs": True, "top_logprobs": 2, "logit_bias": {}, "max_completion_tokens": 3,
                     "stop": ["\n\n"], "user": "me", "metadata": {}, "store": False, "service_tier": "auto",
                     "reasoning_effort": None, "parallel_tool_calls": None, "verbosity": None},
    "with_structured_output": {
        "messages": [{"content": "Hi", "role": "user"}], "model": "fake", "max_completion_tokens": 3,
        "response_format": {"type": "json_schema", "json_schema": {
            "schema": SCHEMA, "name": "Joke", "strict": True, "description": "A joke."}}},
    "with_structured_output, json_mode": {
        "messages": [{"content": "Hi", "role": "user"}], "model": "fake", "max_completion_tokens": 3,
        "response_format": {"type": "json_object"}},
    "stream": {"messages": [{"content": "Hi", "role": "user"}], "model": "fake", "stream": True,
               "max_completion_tokens": 3, "stream_options": {"include_usage": True}},
    "a conversation": {"messages": [
        {"content": "Hi", "role": "user"},
        {"content": "Well.", "role": "assistant", "refusal": None},
        {"content": [{"type": "text", "text": "And?"}], "role": "user"}], "model": "fake", "max_completion_tokens": 3},
}  # fmt: skip

LLAMA_INDEX = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "model": "fake", "stream": False,
                             "temperature": 0.1, "max_tokens": 3, "logprobs": None},
    "/v1/completions": {"model": "fake", "prompt": "Hi", "stream": False, "temperature": 0.1, "max_tokens": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


@pytest.mark.parametrize("name", LANGCHAIN)
def test_langchain(server, name):
    reply = server.post("/v1/chat/completions", LANGCHAIN[name])
    assert reply.status == 200, reply.body
    if name == "stream":
        assert reply.events[-1]["usage"]["completion_tokens"] == 3
    grammar = server.engine.requests[-1].params.grammar
    wanted = {"with_structured_output": Grammar.json(SCHEMA), "with_structured_output, json_mode": Grammar.json()}
    assert grammar == wanted.get(name)


@pytest.mark.parametrize("path", LLAMA_INDEX)
@pytest.mark.parametrize("stream", [False, True])
def test_llama_index(server, path, stream):
    reply = server.post(path, LLAMA_INDEX[path] | {"stream": stream})
    assert reply.status == 200, reply.body
    assert len(reply.events if stream else reply.json["choices"]) >= 1
