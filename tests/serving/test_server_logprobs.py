"""Log-probabilities in OpenAI's replies: places in the text and names of tokens, over any Unicode and any cut."""

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from bijax.server.chat_reply import ChatStream, chat_reply
from bijax.server.completion_reply import CompletionReply
from bijax.server.openai_reply import ReplyHead
from bijax.server.prompts import Prompt
from bijax.server.text_offsets import TextOffsets
from bijax.server.token_text import TokenText
from flax_layers.checkpoint import Tokenizer
from tests.serving.live import live
from tests.serving.pieces import SPECIAL, Pieces, characters, cut, outputs, sampling

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
TEXTS = st.lists(
    st.sampled_from(
        ["a", " is", "é", "e\u0301", "日本", "한", "नी", "😀", "🫠", "👩\u200d👧", "\ufffd", "\\", "bytes:"]
    )
    | st.text(max_size=4),
    max_size=6,
).map(lambda parts: "".join(parts).encode(errors="surrogatepass"))
# Characters with their ends cut off, and bytes that begin none.
DATA = st.lists(
    TEXTS | st.sampled_from([b"\xf0\x9f", b"\x98", b"\xe6\x97", b"\xc3", b"\xff", SPECIAL]), max_size=4
).map(b"".join)
PLACES = st.lists(st.integers(0, 60), max_size=20)


@st.composite
def requests(draw):
    """A tokenizer, the tokens of a prompt and of an output, and how many tokens each event of a stream has."""
    parts = [cut(draw(DATA), draw(PLACES)) for _ in range(2)]
    tokenizer = Pieces([*parts[0], *parts[1]])  # the same piece may be several tokens
    begin = 2 + len(parts[0])
    prompt = [0, *range(2, begin)]
    tokens = list(range(begin, begin + len(parts[1])))
    for extra in draw(st.lists(st.sampled_from([0, 1, len(tokenizer.pieces)]), max_size=2)):
        tokens.insert(draw(st.integers(0, len(tokens))), extra)  # special, of no text, unknown to the tokenizer
    return tokenizer, prompt, tokens or [1], draw(st.lists(st.integers(1, 3), min_size=1))


def head(tokenizer):
    return ReplyHead("id", 0, "model", TokenText(tokenizer))


def events(steps, sizes):
    """Some of the steps, as a slow reader sees them; the last always."""
    steps, sizes = list(steps), itertools.cycle(sizes)
    seen = []
    while steps:
        size = next(sizes)
        seen.append(steps[:size][-1])
        steps = steps[size:]
    return seen


def completions(tokenizer, steps, params, sizes, *, echo):
    """The choice of the reply, and that which the events of a stream make together."""
    prompt = Prompt("", params, "prompt")
    steps = list(steps)
    [whole] = CompletionReply(head(tokenizer), [prompt], echo=echo).reply([steps[-1]])["choices"]
    stream = CompletionReply(head(tokenizer), [prompt], echo=echo)
    parts = [part for step in events(steps, sizes) for event in stream.events(0, step) for part in event["choices"]]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
    together = {name: [item for part in parts for item in part["logprobs"][name]] for name in LISTS}
    return whole, "".join(part["text"] for part in parts), together


def named_bytes(name):
    r"""The bytes that a name of the form "bytes:\xf0" stands for."""
    return name.removeprefix("bytes:").encode("ascii").decode("unicode_escape").encode("latin-1")


def check_names(tokenizer, tokens, logprobs):
    """Each token has its own log-probability among the best, and no other is lost to it."""
    for token, name, value, best in zip(
        tokens, logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        data = b"" if token >= len(tokenizer.pieces) else tokenizer.token_bytes(token)
        if name != data.decode(errors="replace"):
            assert named_bytes(name) == data
        if best is not None:
            assert best[name] == value


@pytest.mark.tier("fault")
@settings(max_examples=150, deadline=None)
@given(requests(), st.integers(0, 5), st.booleans())
def test_completions_of_any_unicode(request_, top, skip):
    tokenizer, prompt, tokens, sizes = request_
    params = sampling(top=top, skip_special_tokens=skip)
    plain, text, together = completions(
        tokenizer, outputs(tokenizer, prompt, tokens, params, stops_with="length"), params, sizes, echo=False
    )
    assert (text, together) == (plain["text"], {name: plain["logprobs"][name] for name in LISTS})
    check_names(tokenizer, tokens, plain["logprobs"])
    shown = [b"" if t >= len(tokenizer.pieces) or (skip and t == 0) else tokenizer.token_bytes(t) for t in tokens]
    assert plain["text"] == b"".join(shown).decode(errors="replace")
    places = characters(b"".join(shown))
    begins = [0, *itertools.accumulate(map(len, shown))]
    offsets = plain["logprobs"]["text_offset"]
    for begin, data, offset in zip(begins, shown, offsets, strict=False):
        assert offset == places[begin] if data else 0 <= offset <= len(plain["text"])
    assert offsets == sorted(offsets)
    # Distinct tokens are distinct entries, and the token itself is one of them.
    for step, best in zip(tokens, plain["logprobs"]["top_logprobs"], strict=True):
        assert len(best) in ((top, top + 1) if top < len(tokenizer.pieces) + 1 else (len(tokenizer.pieces) + 1,)), step

    echoed, text, together = completions(
        tokenizer, outputs(tokenizer, prompt, tokens, params, echo=True, stops_with="length"), params, sizes, echo=True
    )
    assert (text, together) == (echoed["text"], {name: echoed["logprobs"][name] for name in LISTS})
    before = tokenizer.decode(prompt)
    assert echoed["text"] == before + plain["text"]
    check_names(tokenizer, [*prompt, *tokens], echoed["logprobs"])
    for name in LISTS[:3]:
        assert echoed["logprobs"][name][len(prompt) :] == plain["logprobs"][name]
    assert echoed["logprobs"]["text_offset"][len(prompt) :] == [len(before) + offset for offset in offsets]
    places = characters(b"".join(map(tokenizer.token_bytes, prompt)))
    begins = itertools.accumulate(map(len, map(tokenizer.token_bytes, prompt)), initial=0)
    assert echoed["logprobs"]["text_offset"][: len(prompt)] == [places[b] for b, _ in zip(begins, prompt, strict=False)]


@settings(max_examples=100, deadline=None)
@given(requests(), st.text(min_size=1, max_size=3), st.integers(0, 30), st.integers(1, 4))
def test_a_stop_string_ends_the_places_with_the_text(request_, stop, begin, length):
    tokenizer, prompt, tokens, sizes = request_
    text = tokenizer.decode([token for token in tokens if token < len(tokenizer.pieces)])
    params = sampling(stop=(stop, text[begin : begin + length] or "x"))
    whole, text, together = completions(
        tokenizer, outputs(tokenizer, prompt, tokens, params, stops_with="length"), params, sizes, echo=False
    )
    assert (text, together) == (whole["text"], {name: whole["logprobs"][name] for name in LISTS})
    assert all(0 <= offset <= len(text) for offset in together["text_offset"])


@settings(max_examples=50, deadline=None)
@given(requests(), st.integers(0, 5))
def test_conversations_of_any_unicode(request_, top):
    tokenizer, prompt, tokens, sizes = request_
    params, requested = sampling(top=top), Prompt((), sampling(top=top), "messages")
    steps = list(outputs(tokenizer, prompt, tokens, params, stops_with="length"))
    [whole] = chat_reply(head(tokenizer), requested, steps[-1])["choices"]
    stream = ChatStream(head(tokenizer), requested)
    parts = [part for step in events(steps, sizes) for event in stream.events(0, step) for part in event["choices"]]
    assert "".join(part["delta"].get("content", "") for part in parts) == whole["message"]["content"]
    content = whole["logprobs"]["content"]
    assert [item for part in parts if part["logprobs"] for item in part["logprobs"]["content"]] == content
    data = b"".join(bytes(item["bytes"]) for item in content)
    assert data.decode(errors="replace") == whole["message"]["content"]
    for item, entry in zip(content, steps[-1].completions[0].logprobs, strict=True):
        assert item["logprob"] == entry.logprob
        assert [best["logprob"] for best in item["top_logprobs"]] == [logprob for logprob, _ in entry.top]
        for one in (item, *item["top_logprobs"]):
            name, written = one["token"], bytes(one["bytes"])
            assert name.encode() == written or named_bytes(name) == written


@pytest.mark.tier("fault")
def test_tokens_of_the_same_text_have_entries_of_their_own():
    """The token at hand has the text, then the most probable one; others are named by their number, as vLLM's are."""
    tokenizer = Pieces([b"x", b"x", b"y", b"x", b"\xf0\x9f", b"\xf0\x9f"])
    steps = list(outputs(tokenizer, [2], [3, 4, 6], sampling(top=9), stops_with="length"))
    choice, _, _ = completions(tokenizer, steps, sampling(top=9), [1], echo=False)
    best = choice["logprobs"]["top_logprobs"]
    assert all(len(entries) == 9 for entries in best)
    values = [{token: value for value, token in entry.top} for entry in steps[-1].completions[0].logprobs]
    assert best[0]["x"] == values[0][3]
    assert (best[0]["token_id:2"], best[0]["token_id:5"]) == (values[0][2], values[0][5])
    assert best[2][r"bytes:\xf0\x9f"] == values[2][6]
    first = max((value, -token) for token, value in values[1].items() if token in (2, 3, 5))
    assert best[1]["x"] == first[0]


def test_places_where_a_tokenizer_is_not_one_of_bytes():
    """Tokens with a mark for the space, which the first of a text loses, and bytes that are spelt out."""
    written = ["<unk>", "▁Hello", "▁is", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "!", "is"]
    vocabulary = {token: index for index, token in enumerate(written)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = TokenText(Tokenizer(backend, chat_template=None, special_tokens={}, eos_token_ids=()))
    given = [1, 2, 3, 4, 5, 6, 7, 8, 2]
    text = tokens.decode(given)
    assert text == "Hello is😀!is is"
    offsets = TextOffsets(tokens)
    places = [offsets.add(token) for token in given]
    assert places == [0, 5, 8, 8, 8, 8, 9, 10, 12]
    assert [tokens.name(token) for token in given] == [
        " Hello", " is", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80", "!", "is", " is"
    ]  # fmt: skip


def test_without_a_tokenizer_all_tokens_stand_at_the_beginning_of_no_text():
    offsets = TextOffsets(TokenText(None))
    assert [offsets.add(token) for token in (5, 300)] == [0, 0]


@pytest.mark.tier("fault")
@pytest.mark.parametrize("prompt", ["😀 is", "naïve 日本 😀 is", [240, 159, 152, 97, 255, 254, 256, 104]])
def test_a_reply_of_the_server(prompt):
    with live() as server:
        body = {"prompt": prompt, "echo": True, "max_tokens": 12, "logprobs": 3, "temperature": 0}
        [whole] = server.post("/v1/completions", body).json["choices"]
        parts = [
            part
            for event in server.post("/v1/completions", body | {"stream": True}).events
            for part in event["choices"]
        ]
    logprobs = whole["logprobs"]
    assert {name: [item for part in parts for item in part["logprobs"][name]] for name in LISTS} == logprobs
    for name, value, best, offset in zip(*(logprobs[name] for name in LISTS), strict=True):
        assert name.startswith("bytes:") or whole["text"][offset:].startswith(name)
        assert best is None or best[name] == value
    assert max(logprobs["text_offset"]) <= len(whole["text"])
