"""SGLang's /generate: replies, log-probabilities, streams."""

import numpy as np
import pytest

from tests.serving.fake_engine import LONGEST, logprob, sample
from tests.serving.live import live

PROMPT = "Tell me about Richard Feynman: "
TOKENS = list(PROMPT.encode())
GREEDY = {"temperature": 0, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


def expected(prompt, count, seed=0):
    history = list(prompt)
    for _ in range(count):
        history.append(sample(history, seed))
    return history[len(prompt) :]


def test_a_text(server):
    reply = server.generate(text=PROMPT, sampling_params=GREEDY)
    assert reply["output_ids"] == expected(TOKENS, 5)
    assert reply["text"] == bytes(reply["output_ids"]).decode(errors="replace")
    info = reply["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": 5}
    assert (info["prompt_tokens"], info["completion_tokens"], info["weight_version"]) == (31, 5, "default")
    assert "output_token_logprobs" not in info


def test_token_ids_and_lists(server):
    one = server.generate(text=PROMPT, sampling_params=GREEDY)
    assert server.generate(input_ids=TOKENS, sampling_params=GREEDY)["text"] == one["text"]
    replies = server.generate(input_ids=[TOKENS, TOKENS[:3]], sampling_params=GREEDY)
    assert [reply["output_ids"] for reply in replies] == [expected(TOKENS, 5), expected(TOKENS[:3], 5)]
    assert isinstance(server.generate(text=[PROMPT], sampling_params=GREEDY), list)


def test_each_prompt_has_its_own_parameters(server):
    replies = server.generate(
        text=["a", "b"],
        sampling_params=[GREEDY, GREEDY | {"max_new_tokens": 2}],
        rid=["first", "second"],
        return_logprob=[True, False],
        top_logprobs_num=[2, 0],
    )
    assert [reply["meta_info"]["completion_tokens"] for reply in replies] == [5, 2]
    assert [reply["meta_info"]["id"] for reply in replies] == ["first", "second"]
    assert [len(reply["meta_info"].get("output_top_logprobs", ())) for reply in replies] == [5, 0]


def test_samples_of_one_prompt_are_a_list(server):
    replies = server.generate(text="a", sampling_params={"n": 3, "sampling_seed": 7, "max_new_tokens": 4})
    assert [reply["output_ids"] for reply in replies] == [expected(b"a", 4, 7 + index) for index in range(3)]


def test_the_parameters_reach_the_engine(server):
    sampling = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.5,
        "presence_penalty": 0.25, "logit_bias": {"97": -1.5}, "allowed_token_ids": [97, 98], "stop": "zz",
        "stop_token_ids": [3], "ignore_eos": True, "n": 1, "max_new_tokens": 3, "min_new_tokens": 1,
        "sampling_seed": 2**64 - 1,
    }  # fmt: skip
    server.generate(text="a", sampling_params=sampling, priority=3)
    request = server.engine.requests[-1]
    renamed = sampling | {"seed": sampling["sampling_seed"], "stop": ("zz",), "stop_token_ids": (3,),
                          "allowed_token_ids": (97, 98), "logit_bias": {97: -1.5}}  # fmt: skip
    del renamed["sampling_seed"]
    assert {name: getattr(request.params, name) for name in renamed} == renamed
    assert request.priority == 3
    server.generate(text="a", sampling_params={"top_k": -1, "stop": None, "sampling_seed": None, "max_new_tokens": 1})
    assert server.engine.requests[-1].params.top_k is None
    assert server.engine.requests[-1].params.seed is None


def test_logprobs_keep_their_bits(server):
    info = server.generate(
        text=PROMPT, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
    )["meta_info"]
    output = expected(TOKENS, 5)
    assert info["input_token_logprobs"][0] == [None, TOKENS[0], None]
    got = info["input_token_logprobs"] + info["output_token_logprobs"]
    history = TOKENS + output
    assert [entry[1] for entry in got] == history
    bits = np.array([entry[0] for entry in got[1:]], np.float32).view(np.uint32)
    wanted = np.array([logprob(history[:i], 0) for i in range(1, len(history))], np.float32).view(np.uint32)
    assert bits.tolist() == wanted.tolist()
    assert info["input_top_logprobs"][0] is None
    assert info["output_top_logprobs"][0] == [[logprob(TOKENS, 0, rank), 97 + rank, None] for rank in range(2)]


def test_logprobs_of_a_part_of_the_prompt_with_texts(server):
    info = server.generate(
        text="héllo", sampling_params=GREEDY, return_logprob=True, logprob_start_len=3, return_text_in_logprobs=True
    )["meta_info"]
    tokens = list("héllo".encode())
    assert info["input_token_logprobs"] == [
        [None, tokens[3], "l"], [logprob(tokens[:4], 0), tokens[4], "l"], [logprob(tokens[:5], 0), tokens[5], "o"]
    ]  # fmt: skip
    assert all(isinstance(entry[2], str) for entry in info["output_token_logprobs"])
    only = server.generate(text="a", sampling_params=GREEDY, return_logprob=True)["meta_info"]
    assert only["input_token_logprobs"] == []


def test_no_new_tokens_gives_the_prompt_alone(server):
    reply = server.generate(text="abc", sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert reply["output_ids"] == []
    assert len(reply["meta_info"]["input_token_logprobs"]) == 3


def test_a_stop_string(server):
    text = server.generate(text="abc", sampling_params={"temperature": 0, "max_new_tokens": 30})["text"]
    stop = text[10:12]
    reply = server.generate(
        text="abc", sampling_params={"temperature": 0, "max_new_tokens": 30, "stop": ["\x01", stop]}
    )
    assert reply["text"] == text[: text.index(stop)]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize("prompt", [{"text": PROMPT}, {"text": ["a", PROMPT]}])
def test_a_stream_is_cumulative(server, prompt):
    body = prompt | {"sampling_params": GREEDY | {"n": 2, "sampling_seed": 1}, "return_logprob": True}
    whole = server.generate(**body)
    reply = server.post("/generate", body | {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    last = {}
    for event in reply.events:
        before = last.get(event["index"], {"text": "", "output_ids": []})
        assert event["text"].startswith(before["text"])
        assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last[event["index"]] = event
    for index, item in enumerate(whole):
        assert last[index]["text"] == item["text"]
        assert last[index]["meta_info"]["output_token_logprobs"] == item["meta_info"]["output_token_logprobs"]
        assert last[index]["meta_info"]["finish_reason"] == item["meta_info"]["finish_reason"]


def test_the_first_event_comes_before_the_end():
    with live({"step_s": 0.02}) as server:
        reply = server.post("/generate", {"text": "a", "sampling_params": GREEDY, "stream": True})
        assert len(reply.events) == 5


BAD = [
    (b"", "text: give one prompt"),
    (b"{", "JSON"),
    (b"[]", "must be a JSON object"),
    (b'"a"', "must be a JSON object"),
    (b'{"text": "\xff"}', "JSON"),
    (b"[" * 100000, "recursion"),
    (b'{"text": "a", "sampling_params": {"top_p": NaN}}', "sampling_params.top_p: must be a finite number"),
    ({"text": "a", "txet": "b"}, "txet: unknown field; known here: input_ids, logprob_start_len"),
    ({"text": "a", "input_ids": [1]}, "text: give one prompt or several, either"),
    ({"text": []}, "text: give one prompt"),
    ({"text": [""]}, "text.0: the prompt has no tokens"),
    ({"text": ["a", 1]}, "text.1: must be a valid string, got 1"),
    ({"text": "a\0"}, "text: the vocabulary has no token for"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [1, "2"]}, 'input_ids.1: must be a valid integer, got "2"'),
    ({"input_ids": [1, 257]}, "input_ids: token ids must be from 0 to 256, got 257"),
    ({"input_ids": [[1], [-1]]}, "input_ids.1: token ids must be from 0 to 256, got -1"),
    ({"text": "a" * (LONGEST + 1)}, f"text: the prompt has {LONGEST + 1} tokens, at most {LONGEST} are taken"),
    ({"text": "a", "sampling_params": {"top_p": 0}}, "sampling_params.top_p: must be above 0 and at most 1, got 0.0"),
    ({"text": "a", "sampling_params": {"top_p": 1.1}}, "sampling_params.top_p: "),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature: "),
    ({"text": "a", "sampling_params": {"temperature": "hot"}}, 'sampling_params.temperature: must be a valid number'),
    ({"text": "a", "sampling_params": {"repetition_penalty": -1}}, "sampling_params.repetition_penalty: "),
    ({"text": "a", "sampling_params": {"frequency_penalty": -2.5}}, "sampling_params.frequency_penalty: "),
    ({"text": "a", "sampling_params": {"sampling_seed": 2**64}}, "sampling_params.sampling_seed: must be from"),
    ({"text": "a", "sampling_params": {"sampling_seed": 1.5}}, "sampling_params.sampling_seed: must be a valid int"),
    ({"text": "a", "sampling_params": {"seed": 1}}, "sampling_params.seed: unknown field"),
    ({"text": "a", "sampling_params": {"max_new_tokens": True}}, "sampling_params.max_new_tokens: must be a valid int"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 1, "min_new_tokens": 2}}, "sampling_params.min_new_tokens: "),
    ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop: "),
    ({"text": "a", "sampling_params": {"stop": 1}}, "sampling_params.stop: must be a string or a list of strings"),
    ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias: must have token ids"),
    ({"text": "a", "sampling_params": {"logit_bias": {"1": 101}}}, "sampling_params.logit_bias: "),
    ({"text": "a", "sampling_params": {"allowed_token_ids": []}}, "sampling_params.allowed_token_ids: "),
    ({"text": ["a"], "sampling_params": [GREEDY, {}]}, "sampling_params: a list must have an entry for each"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid: a list must have an entry for each of the 2 prompts, got 1"),
    ({"text": "a", "logprob_start_len": -2}, "logprob_start_len: "),
    ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num: "),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num: must be from 0 to 20"),
    ({"text": "a", "sampling_params": {"n": 1000}}, "sampling_params.n: the request asks for 1000 outputs"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_with_the_name_of_the_field(server, body, message):
    reply = server.request("POST", "/generate", body)
    assert reply.status == 400
    assert message in reply.error
    assert len(reply.error) < 600
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_tokens_that_only_the_engine_checks(server):
    reply = server.post("/generate", {"text": "a", "sampling_params": {"stop_token_ids": [300]}})
    assert reply.status == 400
    assert "stop_token_ids" in reply.error


def test_unknown_tokens_are_refused_or_replaced(server):
    """A client that draws token ids at random, as SGLang's script does."""
    wild = [*TOKENS, 257, 49829]
    reply = server.post("/generate", {"input_ids": wild, "sampling_params": GREEDY})
    assert (reply.status, "token ids must be from 0 to 256, got 257" in reply.error) == (400, True)
    with live(unknown_token_id=7) as other:
        body = {"sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0}
        replaced = other.generate(input_ids=wild, **body)
        assert replaced["output_ids"] == expected([*TOKENS, 7, 7], 5)
        assert [entry[1] for entry in replaced["meta_info"]["input_token_logprobs"]] == [*TOKENS, 7, 7]
        assert other.post("/generate", {"input_ids": [-1]}).status == 400
    with (
        pytest.raises(ValueError, match="unknown_token_id must be from 0 to 256 with this model, got 300"),
        live(unknown_token_id=300),
    ):
        pass
