"""Fields of requests: neutral ones are taken, others are refused by their names, and so is what cannot be answered."""

import dataclasses
import inspect

import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from bijax.server.generate_request import GenerateBody, GenerateSampling
from bijax.server.neutral import is_neutral
from bijax.server.openai_request import ChatBody, CompletionBody
from bijax.serving import SamplingParams
from tests.serving.fake_engine import END, VOCABULARY
from tests.serving.live import live

GENERATE = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
COMPLETION = {"prompt": "a", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
PATHS = {"/generate": GENERATE, "/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


def sent(path, more):
    """A request with more fields; for /generate they are sampling parameters."""
    body = PATHS[path]
    return body | {"sampling_params": body["sampling_params"] | more} if path == "/generate" else body | more


def answer(reply):
    """What does not change from call to call."""
    found = reply.json
    return found["choices"] if "choices" in found else (found["text"], found["output_ids"])


# What SGLang's bench_serving and GenerateReqInput, OpenAI's client and vLLM's protocol send by default.
NEUTRAL = [
    ("/generate", {"deterministic": True}),
    ("/generate", {"lora_path": None, "return_logprob": False, "return_routed_experts": False}),
    ("/generate", {"image_data": None, "session_params": None, "custom_logit_processor": None, "priority": None}),
    ("/generate", {"lora_path": [None], "image_data": [], "token_ids_logprob": [], "modalities": ["text"]}),
    ("/generate", {"log_metrics": True, "return_hidden_states": False, "background": False, "stream": None}),
    ("/generate", {"a_field_of_next_year": None}),
    ("/generate", {"sampling_params": GENERATE["sampling_params"] | {
        "regex": None, "json_schema": None, "ebnf": None, "skip_special_tokens": True, "no_stop_trim": False,
        "spaces_between_special_tokens": True, "stop_regex": [], "custom_params": {}, "n": None, "stop": None}}),
    ("/v1/completions", {"suffix": None, "best_of": 1, "response_format": {"type": "text"}, "user": "me"}),
    ("/v1/completions", {"suffix": "", "logit_bias": None, "use_beam_search": False, "length_penalty": 1}),
    ("/v1/completions", {"add_special_tokens": True, "bad_words": [], "cache_salt": None, "lora_path": None}),
    ("/v1/completions", {"stream_options": None, "skip_special_tokens": True, "truncate_prompt_tokens": None}),
    ("/v1/chat/completions", {"tools": None, "tool_choice": "none", "parallel_tool_calls": True, "store": False}),
    ("/v1/chat/completions", {"tools": [], "tool_choice": "auto", "metadata": {"run": "7"}, "service_tier": "auto"}),
    ("/v1/chat/completions", {"store": True, "service_tier": "flex"}),
    ("/v1/chat/completions", {"modalities": ["text"], "verbosity": "medium", "reasoning_effort": None, "audio": None}),
    ("/v1/chat/completions", {"prompt_cache_key": "k", "safety_identifier": "s", "chat_template_kwargs": {}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "name": None, "refusal": None,
                                            "tool_calls": [], "function_call": None, "annotations": []}]}),
]  # fmt: skip


@pytest.mark.tier("fault")
@pytest.mark.parametrize(("path", "more"), NEUTRAL, ids=range(len(NEUTRAL)))
def test_neutral_fields_change_nothing(server, path, more):
    reply = server.post(path, PATHS[path] | more)
    assert reply.status == 200, reply.error
    assert answer(reply) == answer(server.post(path, PATHS[path]))


def test_an_answer_can_be_sent_back(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        message = client.chat.completions.create(model="fake", **CHAT).choices[0].message
        messages = [*CHAT["messages"], message.model_dump(), message]
        assert client.chat.completions.create(model="fake", messages=messages, max_tokens=1).choices


def test_the_members_of_a_stream_s_options(server):
    options = {"include_usage": None, "include_obfuscation": False, "continuous_usage_stats": False}
    assert server.post("/v1/completions", COMPLETION | {"stream": True, "stream_options": options}).status == 200


REFUSED = [
    ("/generate", {"image_data": "x"}, "image_data", 'not served here; leave it out, got "x"'),
    ("/generate", {"image_data": ["x", None]}, "image_data", "not served here"),
    ("/generate", {"deterministic": False}, "deterministic", "not served here; leave it out, or send true, got false"),
    ("/generate", {"return_hidden_states": True}, "return_hidden_states", "leave it out, or send false, got true"),
    ("/generate", {"temperature": 0.5}, "temperature", "did you mean sampling_params.temperature?"),
    ("/generate", {"return_logprobs": True}, "return_logprobs", "did you mean return_logprob?"),
    ("/generate", {"sampling_params": {"seed": 1}}, "sampling_params.seed", "did you mean sampling_seed?"),
    ("/generate", {"sampling_params": {"structural_tag": "a"}}, "sampling_params.structural_tag", "not served here"),
    ("/v1/completions", {"best_of": 2}, "best_of", "leave it out, or send 1, got 2"),
    ("/v1/completions", {"best_of": True}, "best_of", "got true"),
    ("/v1/completions", {"max_new_tokens": 2}, "max_new_tokens", "did you mean max_tokens?"),
    ("/v1/completions", {"response_format": {"type": "json_schema"}}, "response_format", "json_schema belongs to"),
    ("/v1/completions", {"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', 'json_object'"),
    ("/v1/completions", {"regex": "a", "guided_choice": ["a"]}, "guided_choice", "give one of regex, guided_choice"),
    ("/v1/completions", {"guided_json": "{"}, "guided_json", "must be a JSON schema"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "has no tools in"),
    ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice", "needs tools, got none"),
    ("/v1/chat/completions", {"user": 5}, "user", "send a value of the type string, got 5"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}]},
     "messages.0.tool_calls.0.function", "required, but missing"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "contents": "a"}]}, "messages.0.contents",
     "did you mean content?"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "field", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_change_the_answer_is_refused(server, path, more, field, message):
    reply = server.post(path, PATHS[path] | more)
    assert reply.status == 400
    assert reply.json["error"]["param"] == field
    assert reply.error.startswith(f"{field}: ")
    assert message in reply.error


@pytest.mark.parametrize(("kind", "api"), [(CompletionBody, CompletionParams), (ChatBody, ChatParams)])
def test_every_field_of_openai_s_client_is_known(kind, api):
    known = {*kind.model_fields, *kind.neutral, "stream"}
    assert set(inspect.get_annotations(api)) <= known


@pytest.mark.parametrize("kind", [GenerateBody, GenerateSampling, CompletionBody, ChatBody])
def test_tables_hold_no_field_that_is_served(kind):
    assert not set(kind.neutral) & set(kind.model_fields)
    assert all(is_neutral(value, values) for values in kind.neutral.values() for value in ([], {}, None, [None]))


# The engine's name of each parameter, a wrong value, the name in the three requests.
WRONG = {
    "temperature": (-1.0, {}),
    "top_k": (-7, {}),
    "top_p": (2.0, {}),
    "min_p": (1.5, {}),
    "repetition_penalty": (-1.0, {}),
    "frequency_penalty": (3.0, {}),
    "presence_penalty": (-3.0, {}),
    "logit_bias": ({"99999999": 5}, {}),
    "allowed_token_ids": ([99999999], {}),
    "max_new_tokens": (-1, {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_tokens"}),
    "min_new_tokens": (3, {"/v1/completions": "min_tokens", "/v1/chat/completions": "min_tokens"}),
    "stop": ([""], {}),
    "stop_token_ids": ([99999999], {}),
    "ignore_eos": (1, {}),
    "skip_special_tokens": (1, {}),
    "n": (0, {}),
    "seed": (2**64, {"/generate": "sampling_seed"}),
}


@pytest.mark.tier("fault")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_field(server, path, name, stream):
    value, names = WRONG[name]
    field = names.get(path, name)
    reply = server.post(path, sent(path, {field: value}) | {"stream": stream})
    assert reply.status == 400
    shown = f"sampling_params.{field}" if path == "/generate" else field
    assert reply.json["error"]["param"] == shown
    assert reply.error.startswith(f"{shown}: ")
    assert "SamplingParams" not in reply.error


def test_every_sampling_parameter_has_a_wrong_value():
    # The other fields of the request; grammars and adapters have names of their own.
    others = {"logprobs", "top_logprobs", "prompt_logprobs", "logprob_start_len", "grammar", "embedding", "adapter"}
    assert set(WRONG) == {field.name for field in dataclasses.fields(SamplingParams)} - others


def test_an_error_in_a_list_of_parameters_names_its_place(server):
    sampling = [{"max_new_tokens": 1}, {"max_new_tokens": 1, "logit_bias": {"300": 1}}]
    reply = server.post("/generate", {"text": ["a", "b"], "sampling_params": sampling})
    assert (reply.status, reply.json["error"]["param"]) == (400, "sampling_params.1.logit_bias")


def test_limits_of_the_server_name_the_field():
    with live(max_prompts=4, max_output_tokens=8) as limited:
        for path in PATHS:
            inside, longest = ("sampling_params.", "max_new_tokens") if path == "/generate" else ("", "max_tokens")
            for name, value in (("n", 5), (longest, 9)):
                reply = limited.post(path, sent(path, {name: value}))
                assert (reply.status, reply.json["error"]["param"]) == (400, inside + name)
        reply = limited.post("/generate", {"text": ["a"] * 5})
        assert (reply.status, reply.json["error"]["param"]) == (400, "text")


@pytest.mark.tier("fault")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"allowed_token_ids": [END]}, "allowed_token_ids"),
        ({"allowed_token_ids": [END, 5, 6], "stop_token_ids": [6, 5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "ignore_eos": True}, "allowed_token_ids"),
        ({"stop_token_ids": list(range(END))}, "stop_token_ids"),
        ({"stop_token_ids": list(range(VOCABULARY)), "ignore_eos": True}, "stop_token_ids"),
    ],
    ids=range(5),
)
def test_a_request_that_no_token_can_answer_is_refused(server, path, more, field, stream):
    least = "min_new_tokens" if path == "/generate" else "min_tokens"
    reply = server.post(path, sent(path, more | {least: 1}) | {"stream": stream})
    assert reply.status == 400
    inside = "sampling_params." if path == "/generate" else ""
    assert reply.json["error"]["param"] == inside + field
    assert f"may come before {least}" in reply.error
    # Without a least length the first token ends the output, and one more token is a way out.
    assert server.post(path, sent(path, more)).status == 200
    possible = (
        {"allowed_token_ids": [*more["allowed_token_ids"], 9]}
        if field == "allowed_token_ids"
        else {"stop_token_ids": more["stop_token_ids"][:-1]}
    )
    assert server.post(path, sent(path, more | possible | {least: 1})).status == 200
