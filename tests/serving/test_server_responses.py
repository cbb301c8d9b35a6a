"""`/v1/responses`, with OpenAI's own client."""

import openai
import pydantic
import pytest

from bijax.serving import Grammar
from tests.serving.fake_engine import logprob
from tests.serving.live import live


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=20) as made:
        yield made


def test_a_response_is_the_chat_s_answer(client, server):
    asked = {"temperature": 0.5, "extra_body": {"seed": 7}}
    found = client.responses.create(
        model="fake", input="Hi", instructions="Be brief.", max_output_tokens=9, metadata={"a": "b"}, store=True,
        service_tier="flex", include=["message.output_text.logprobs"], top_logprobs=2, **asked,
    )  # fmt: skip
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(model="fake", messages=messages, max_tokens=9, **asked)
    assert found.output_text == chat.choices[0].message.content
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (chat.usage.prompt_tokens, 9)
    prompt = tuple(b"<system>Be brief.<user>Hi<assistant>")
    [part] = found.output[0].content
    assert part.logprobs[0].logprob == logprob(prompt, 7)
    assert len(part.logprobs[0].top_logprobs) == 2
    # A message can be sent back as it came.
    again = client.responses.create(
        model="fake", max_output_tokens=1,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, found.output[0].model_dump()],
    )  # fmt: skip
    assert bytes(server.engine.requests[-1].prompt).startswith(b"<user>Hi<assistant>" + found.output_text.encode())
    assert again.id.startswith("resp_")


def test_a_stream_ends_with_the_same_response(client):
    asked = {"model": "fake", "input": "Hi", "max_output_tokens": 30, "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    stop = whole.output_text[5]
    with client.responses.stream(**asked, extra_body={"stop": stop}) as stream:  # it accepts only completed responses
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == whole.output_text.partition(stop)[0]


def test_a_format_reaches_the_engine(client, server):
    class Answer(pydantic.BaseModel):
        ok: bool

    with pytest.raises(pydantic.ValidationError):  # the engine of these tests follows no grammar
        client.responses.parse(model="fake", input="Hi", text_format=Answer, max_output_tokens=3)
    grammar = server.engine.requests[-1].params.grammar
    assert grammar.kind == "json_schema"
    assert '"ok"' in grammar.source
    client.responses.create(model="fake", input="Hi", text={"format": {"type": "json_object"}}, max_output_tokens=3)
    assert server.engine.requests[-1].params.grammar == Grammar.json()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input: required, but missing"),
        ({"input": []}, "input: must have at least one message"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id: not served here"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools: not served here"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens: must be at least 0, got -1"),
        ({"input": "a", "n": 2}, "n: must be 1"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type: must be"),
        ({"input": "a", "max_tokens": 3}, "max_tokens: unknown field"),
        ({"input": "a", "model": "gpt-7"}, "no such model"),
    ],
)
def test_bad_input(server, body, message):
    reply = server.post("/v1/responses", body)
    assert reply.status == (404 if "model" in body else 400)
    assert message in reply.error
