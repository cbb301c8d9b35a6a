"""OpenAI's endpoints, with OpenAI's own client."""

import json

import openai
import pytest

from tests.serving.fake_engine import ByteTokenizer, logprob
from tests.serving.live import live

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
PROMPT = list(b"<system>Be brief.<user>Hi<assistant>")


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=20) as made:
        yield made


def text_of(tokens):
    return ByteTokenizer().decode(tokens)


def test_models(client):
    [model] = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == ("fake", "bijax", 4096)


def test_a_conversation(client, server):
    reply = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=8, temperature=0)
    [choice] = reply.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    same = server.generate(input_ids=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 8})
    assert choice.message.content == same["text"]
    assert reply.object == "chat.completion"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (36, 8, 44)
    assert choice.logprobs is None


def test_the_parameters_reach_the_engine(client, server):
    client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=3, temperature=0.5, top_p=0.9, seed=-5, n=2, stop="zz",
        frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={"97": -100}, user="me",
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "min_tokens": 2,
                    "stop_token_ids": [5], "allowed_token_ids": [97], "priority": 1},
    )  # fmt: skip
    request = server.engine.requests[-1]
    wanted = {
        "max_new_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": -5, "n": 2, "stop": ("zz",),
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {97: -100.0}, "top_k": 3, "min_p": 0.1,
        "repetition_penalty": 1.2, "ignore_eos": True, "min_new_tokens": 2, "stop_token_ids": (5,),
        "allowed_token_ids": (97,), "logprobs": False,
    }  # fmt: skip
    assert {name: getattr(request.params, name) for name in wanted} == wanted
    assert list(request.prompt) == PROMPT


def test_logprobs_of_a_conversation(client):
    reply = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=40, temperature=0, logprobs=True, top_logprobs=2
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == 40
    assert content[0].logprob == logprob(PROMPT, 0)
    assert [entry.logprob for entry in content[0].top_logprobs] == [logprob(PROMPT, 0, rank) for rank in range(2)]
    assert [entry.token for entry in content[0].top_logprobs] == ["a", "b"]
    tokens = [byte for entry in content for byte in entry.bytes]
    assert text_of(tokens) == reply.choices[0].message.content
    assert r"bytes:\xa9" in {entry.token for entry in content}  # half of a character has bytes, and no text


def test_a_stream(client):
    arguments = {"model": "fake", "messages": MESSAGES, "max_tokens": 30, "seed": 3, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert [part.delta.role for part in mine[1:]] == [None] * (len(mine) - 1)
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        logprobs = [entry.logprob for part in mine if part.logprobs for entry in part.logprobs.content]
        assert logprobs == [entry.logprob for entry in choice.logprobs.content]
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


def test_a_stream_without_usage(client):
    chunks = list(client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_stop(client):
    arguments = {"model": "fake", "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    text = client.chat.completions.create(**arguments).choices[0].message.content
    choice = client.chat.completions.create(**arguments, stop=["\x01", text[7:9]]).choices[0]
    assert choice.message.content == text[: text.index(text[7:9])]
    assert choice.finish_reason == "stop"


def test_content_in_parts_and_developers(client):
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    arguments = {"model": "fake", "max_tokens": 5, "temperature": 0}
    got = client.chat.completions.create(messages=messages, **arguments)
    assert got.choices[0].message == client.chat.completions.create(messages=MESSAGES, **arguments).choices[0].message


def test_an_output_is_as_long_as_the_model_allows_where_nobody_says(client, server):
    stream = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
    next(iter(stream))
    assert server.engine.requests[-1].params.max_new_tokens == 4096
    stream.close()


@pytest.mark.parametrize("prompt", ["abc", ["abc", "d"], [97, 98, 99], [[97], [98, 99]]])
def test_completions(client, server, prompt):
    reply = client.completions.create(model="fake", prompt=prompt, seed=3, n=2)
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    tokens = [list(p.encode()) if isinstance(p, str) else p for p in prompts]
    same = server.generate(input_ids=tokens, sampling_params={"sampling_seed": 3, "n": 2, "max_new_tokens": 16})
    assert [choice.index for choice in reply.choices] == list(range(2 * len(prompts)))
    assert [choice.text for choice in reply.choices] == [item["text"] for item in same]
    assert reply.object == "text_completion"
    chunks = list(client.completions.create(model="fake", prompt=prompt, seed=3, n=2, stream=True))
    for choice in reply.choices:
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason


def test_logprobs_of_a_completion(client):
    arguments = {"model": "fake", "prompt": "abc", "max_tokens": 12, "temperature": 0, "logprobs": 2}
    [choice] = client.completions.create(**arguments).choices
    found = choice.logprobs
    assert found.token_logprobs[0] == logprob(b"abc", 0)
    best = {"a": logprob(b"abc", 0, 0), "b": logprob(b"abc", 0, 1), found.tokens[0]: found.token_logprobs[0]}
    assert found.top_logprobs[0] == best
    assert found.text_offset == [sum(map(len, found.tokens[:index])) for index in range(12)]
    [echoed] = client.completions.create(**arguments, echo=True).choices
    assert echoed.text == "abc" + choice.text
    assert echoed.logprobs.tokens == ["a", "b", "c", *found.tokens]
    assert echoed.logprobs.token_logprobs == [None, logprob(b"a", 0), logprob(b"ab", 0), *found.token_logprobs]
    assert echoed.logprobs.text_offset == [0, 1, 2, *(offset + 3 for offset in found.text_offset)]
    parts = [part for chunk in client.completions.create(**arguments, echo=True, stream=True) for part in chunk.choices]
    assert "".join(part.text for part in parts) == echoed.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in parts for x in getattr(part.logprobs, name)] == getattr(echoed.logprobs, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt-7"}, "no such model: 'gpt-7'; this server has 'fake'"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0: content: required, but missing"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages.0.role: must be 'system', "),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages: a conversation must not begin with"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type: must"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            'messages.0.content.0.type: must be "text", since images, audio and files are not read; got "image_url"',
        ),
        ({"messages": []}, "messages: must have at least 1 entry, got []"),
        ({"tools": [{"type": "function"}]}, "tools.0.function: required, but missing"),
        ({"response_format": {"type": "grammar"}}, "response_format.type: must be 'text', 'json_object' or"),
        ({"max_tokens": -1}, "max_tokens: must be at least 0, got -1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens: must be at least 0, got -1"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens: "),
        ({"top_logprobs": 2}, "top_logprobs: only allowed together with logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: must be from 0 to 20, got 21"),
        ({"stream_options": {}}, "stream_options: only allowed together with stream=true"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options.include: unknown field"),
        ({"seed": 2**64}, "seed: must be from"),
        ({"seed": "1"}, 'seed: must be a valid integer, got "1"'),
        ({"top_p": 0}, "top_p: must be above 0 and at most 1, got 0.0"),
        ({"presence_penalty": -2.1}, "presence_penalty: must be from -2 to 2, got -2.1"),
        ({"n": 0}, "n: must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_the_name_of_the_field(client, change, message):
    arguments = {"model": "fake", "messages": MESSAGES} | change
    stream = arguments.pop("stream", False)
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model=arguments.pop("model"), messages=arguments.pop("messages"), stream=stream, extra_body=arguments
        )
    assert caught.value.status_code == (404 if "model" in change else 400)
    assert message in caught.value.message
    assert caught.value.body["param"] == ("model" if "model" in change else message.partition(":")[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "prompt: must be a string, a list of strings, a list of token ids, or a list of such lists"),
        ({"prompt": [1, "a"]}, "prompt: must be a string"),
        ({"prompt": []}, "prompt: must be a string"),
        ({"prompt": [[]]}, "prompt: the prompt has no tokens"),
        ({"prompt": [257]}, "prompt: token ids must be from 0 to 256, got 257"),
        ({"prompt": "a", "logprobs": 21}, "logprobs: must be from 0 to 20, got 21"),
        ({"prompt": "a", "suffix": "b"}, "suffix: not served here"),
        ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens: must be at most max_tokens, got 3 and 2"),
        ({}, "prompt: required, but missing"),
    ],
)
def test_bad_completions_are_refused(server, change, message):
    reply = server.post("/v1/completions", change)
    assert reply.status == 400
    assert message in reply.error


def test_an_error_inside_a_stream():
    with live({"fail_after": 3}) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        received = []

        def read():
            for chunk in client.chat.completions.create(model="fake", messages=MESSAGES, stream=True):
                received.append(chunk.choices[0].delta.content)

        with pytest.raises(openai.APIError, match="the engine has stopped: out of memory"):
            read()
        assert len("".join(received)) == 3
        assert server.get("/health").status == 503
    with live({"fail_after": 3}) as server:
        reply = server.post("/generate", {"text": "a", "stream": True})
        assert reply.status == 200
        assert reply.events[-1]["error"]["message"] == "the engine has stopped: out of memory"


def test_json_is_valid_for_any_logprob():
    from bijax.server.connection import to_json
    from bijax.server.token_text import json_logprob

    values = [json_logprob(float(text)) for text in ("-inf", "nan", "-1.5")]
    assert json.loads(to_json(values)) == [-9999.0, None, -1.5]
