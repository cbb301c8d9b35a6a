"""What a server tells about itself: models, versions, fingerprint, tokens, and the description of its endpoints."""

import re

import pytest

from bijax.server.options import ServerOptions
from bijax.server.routes import ENDPOINTS
from bijax.serving import EngineOptions, ModelOptions
from bijax.serving.fingerprint import fingerprint
from bijax.serving.toy import ToyModel
from tests.serving.live import live


@pytest.fixture(scope="module")
def server():
    with live(engine_options=EngineOptions(num_pages=3), allowed_origins="https://a.example, https://b.example") as one:
        one.service.model_options = ModelOptions(dtype="bfloat16")
        one.service.fingerprint = "0123abcd"
        yield one


def test_models(server):
    [card] = server.get("/v1/models").json["data"]
    assert server.get("/v1/models/fake").json == card
    assert (card["id"], card["root"]) == ("fake", "/models/fake")
    reply = server.get("/v1/models/owner/other")
    assert reply.status == 404
    assert reply.error == "model: no such model: 'owner/other'; this server has 'fake'"


@pytest.mark.parametrize("prefix", ["/", "/get_"])
def test_infos_under_their_old_and_new_names(server, prefix):
    model = server.get(f"{prefix}model_info").json
    assert model["system_fingerprint"] == "fp_0123abcd-default"
    info = server.get(f"{prefix}server_info").json
    assert model.items() <= info.items()
    assert (info["engine"]["num_pages"], info["model"]["dtype"]) == (3, "bfloat16")
    assert info["version"] == server.get("/version").json["version"]


def test_the_fingerprint_is_in_openai_s_replies_and_follows_the_weights():
    with live(load_weights=lambda path: path) as other:
        body = {"prompt": "a", "max_tokens": 1}
        assert other.post("/v1/completions", body).json["system_fingerprint"] is None
        other.service.fingerprint = "77"
        assert other.post("/v1/completions", body).json["system_fingerprint"] == "fp_77-default"
        other.post("/update_weights_from_disk", {"model_path": "/new", "weight_version": "step-9"})
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert other.post("/v1/chat/completions", chat).json["system_fingerprint"] == "fp_77-step-9"
        events = other.post("/v1/completions", body | {"stream": True}).events
        assert {event["system_fingerprint"] for event in events} == {"fp_77-step-9"}


def test_the_fingerprint_is_that_of_the_contracts():
    narrow, wide = (ToyModel.random(seed=0, width=width, vocab_size=8) for width in (32, 64))
    assert fingerprint(narrow, page_size=8) == fingerprint(ToyModel.random(seed=1, width=32), page_size=16)
    assert re.fullmatch("[0-9a-f]{32}", fingerprint(wide, page_size=8))


def test_tokens_there_and_back(server):
    one = server.post("/tokenize", {"model": "fake", "prompt": "aé", "add_special_tokens": True}).json
    assert one == {"tokens": [97, 195, 169], "count": 3, "max_model_len": 4096}
    many = server.post("/tokenize", {"prompt": ["a", "bc"]}).json
    assert (many["tokens"], many["count"]) == ([[97], [98, 99]], [1, 2])
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json
    assert bytes(chat["tokens"]) == b"<user>a<assistant>"
    assert server.post("/detokenize", {"tokens": one["tokens"]}).json == {"text": "aé", "prompt": "aé"}
    assert server.post("/detokenize", {"tokens": many["tokens"]}).json["text"] == ["a", "bc"]
    assert server.post("/detokenize", {"tokens": []}).json["text"] == ""


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "prompt: give either a prompt or messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "\0"}, "prompt: the vocabulary has no token"),
        ("/tokenize", {"prompt": ["a", "\0"]}, "prompt.1: the vocabulary has no token"),
        ("/tokenize", {"text": "a"}, "text: unknown field; known here: add_generation_prompt, messages, model, prompt"),
        ("/detokenize", {}, "tokens: required, but missing"),
        ("/detokenize", {"tokens": [300]}, "tokens: "),
    ],
)
def test_tokens_that_are_none(server, path, body, message):
    reply = server.post(path, body)
    assert reply.status == 400
    assert reply.error.startswith(message)


def test_the_description_has_every_endpoint_and_field(server):
    document = server.get("/openapi.json").json
    page = server.get("/docs").body.decode()
    assert document["openapi"] == "3.1.0"
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace(":path}", "}")
        for method in endpoint.methods:
            assert document["paths"][path][method.lower()]["summary"]
        assert f"<code>{path}</code>" in page
        for name in {} if endpoint.body is None else endpoint.body.model_fields:
            assert f"<code>{name}</code>" in page
    assert not re.search(r"(src|href)=.https?:", page)  # it loads nothing from elsewhere


def test_pages_of_allowed_origins_may_call(server):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, allowed in (("https://a.example", True), ("https://c.example", False)):
        reply = server.request("OPTIONS", "/generate", headers={"Origin": origin} | asked)
        assert (reply.headers["access-control-allow-origin"] == origin) == allowed
        reply = server.get("/v1/models", headers={"Origin": origin})
        assert (reply.headers["access-control-allow-origin"] == origin) == allowed
    assert ServerOptions().allowed_origins is None


def test_pages_need_no_key():
    with live(api_key="key") as other:
        assert [other.get(path).status for path in ("/docs", "/openapi.json", "/ping", "/v1/models")] == [200] * 3 + [
            401
        ]


def test_replies_and_streams_tell_the_seed_of_each_output():
    with live() as other:
        other.service.generation().engine.seed = 41
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "n": 2}
        completion = {"prompt": "a", "max_tokens": 2, "n": 2}
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
            assert [choice["seed"] for choice in other.post(path, body).json["choices"]] == [41, 42]
            events = other.post(path, body | {"stream": True}).events
            ends = {c["index"]: c["seed"] for e in events for c in e["choices"] if c["finish_reason"] is not None}
            assert ends == {0: 41, 1: 42}
        assert other.post("/v1/responses", {"input": "a", "max_output_tokens": 1}).json["seed"] == 41
        replies = other.generate(text="a", sampling_params={"n": 2, "max_new_tokens": 1})
        assert [reply["meta_info"]["sampling_seed"] for reply in replies] == [41, 42]
