"""Tools: what the chat template is shown, calls in answers and streams, and calls that a request forces."""

import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bijax.server.tools import Tool, call_grammar, split_calls, sure_text
from bijax.serving.grammar import Grammars
from flax_layers.checkpoint.chat_template import ChatTemplate
from tests.serving.fake_engine import END, VOCABULARY, ByteTokenizer, FakeEngine
from tests.serving.live import live

TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
    "({{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}{% endfor %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "time"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "Hi"}]


class Tokenizer(ByteTokenizer):
    chat_template = TEMPLATE

    def encode_chat(self, messages, *, add_generation_prompt, tools=None):
        return self.encode(ChatTemplate(TEMPLATE, {}).render(messages, tools=tools))


class Says(FakeEngine):
    """Says one thing, byte by byte."""

    def __init__(self, text):
        super().__init__()
        self.text = text.encode()

    def _step(self, prompt, output, params, request_id):
        tokens = self.text[: len(output.tokens) + 3]
        done = len(tokens) == len(self.text)
        text = tokens.decode(errors="ignore")
        return type(output)(output.index, tuple(tokens), text, (), "stop" if done else None)


def says(text):
    async def opened():
        return Says(text)

    return live(open_engine=opened, tokenizer=Tokenizer())


@pytest.mark.parametrize(
    ("text", "content", "cities"),
    [
        (CALL, None, ["Rome"]),
        ("Let me see.\n" + CALL, "Let me see.", ["Rome"]),
        (f"{CALL}\n{CALL.replace('Rome', 'Oslo')}", None, ["Rome", "Oslo"]),
        ("1 < 2 and <tool>", "1 < 2 and <tool>", []),
        ("<tool_call>{no JSON}</tool_call> é", "<tool_call>{no JSON}</tool_call> é", []),
    ],
)
def test_calls_in_answers_and_streams(text, content, cities):
    with says(text) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        requested = {"model": "fake", "messages": MESSAGES, "tools": TOOLS}
        [choice] = client.chat.completions.create(**requested).choices
        calls = choice.message.tool_calls or []
        assert choice.message.content == content
        assert [json.loads(call.function.arguments)["city"] for call in calls] == cities
        assert choice.finish_reason == ("tool_calls" if cities else "stop")
        assert len({call.id for call in calls}) == len(calls)
        with client.chat.completions.stream(**requested) as stream:
            [streamed] = stream.get_final_completion().choices
        assert (streamed.message.content or None) == content
        names = [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or []]
        assert names == [(call.function.name, call.function.arguments) for call in calls]
        assert streamed.finish_reason == choice.finish_reason


def test_what_the_template_is_shown():
    with says("ok") as server:
        called = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ]
        for choice, shown in (("auto", "[weather][time]<tool_call>"), ("none", "")):
            body = {"messages": messages, "tools": TOOLS, "tool_choice": choice}
            assert server.post("/v1/chat/completions", body).status == 200
            prompt = bytes(server.engine.requests[-1].prompt).decode()
            assert prompt == f"{shown}<user>Hi<assistant>(weather Rome)<tool>sunny"


def test_calls_that_a_request_forces():
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    with says("ok") as server:
        for choice in ("required", {"type": "function", "function": {"name": "time"}}):
            body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
            assert server.post("/v1/chat/completions", body).status == 200
            assert server.engine.requests[-1].params.grammar.kind == "lark"
        wrong = {"type": "function", "function": {"name": "date"}}
        reply = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": wrong})
        assert (reply.status, reply.error) == (400, "tool_choice: must name one of weather, time, got 'date'")
        both = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "regex": "a"}
        assert "give one of regex, tool_choice" in server.post("/v1/chat/completions", both).error
    pytest.importorskip("llguidance", reason="the optional package llguidance computes the masks")
    matcher = Grammars(ByteTokenizer(), VOCABULARY, [END]).matcher(call_grammar(tools, "required"))
    assert all(matcher.append(byte) for byte in CALL.encode())
    assert matcher.finished
    matcher.start_over(b'<tool_call>\n{"name": "weather", "arguments": {"city": ')
    assert not matcher.mask()[ord("1")]


@given(st.text('<>tool_ca/{}"\n é', max_size=40))
def test_what_a_stream_shows_early_is_the_beginning_of_the_answer(text):
    whole, _ = split_calls(text + CALL, "id")
    for end in range(len(text)):
        assert whole.startswith(sure_text(text[:end]))
