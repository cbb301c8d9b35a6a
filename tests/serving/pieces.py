"""A tokenizer whose tokens are pieces of UTF-8 cut anywhere, outputs as an engine gives them, and where bytes stand."""

import codecs
import itertools

from bijax.serving import Completion, RequestOutput, SamplingParams, TokenLogprob
from bijax.serving.requests import special_token_ids
from bijax.serving.text import TextStream

SPECIAL = b"<|end|>"


class Pieces:
    """Tokens stand for the pieces given, different tokens for the same bytes among them, and one for nothing."""

    def __init__(self, pieces):
        self.pieces = [SPECIAL, b"", *pieces]
        self.special_token_ids = frozenset([0])

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id):
        if token_id >= len(self.pieces):
            raise ValueError("no such token")
        return self.pieces[token_id]

    def encode(self, text):
        raise NotImplementedError

    encode_chat = encode


def cut(data, places):
    """The data cut at some places."""
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


def characters(data):
    """The index of the character that holds each byte, U+FFFD counting as what stands for it."""
    spans = []

    def remember(error):
        spans.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("remember", remember)
    data.decode(errors="remember")
    found, place = [], 0
    for index in itertools.count():
        if place == len(data):
            return found
        wrong = next((end for begin, end in spans if begin == place), None)
        end = wrong or place + next(n for n in (1, 2, 3, 4) if _whole(data[place : place + n]))
        found += [index] * (end - place)
        place = end


def _whole(data):
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def logprob(token, seed):
    """A log-probability for each token, other ones at other places."""
    return -0.25 - ((token * 7919 + seed * 104729) % 1000) / 64


def entry(token, place, params, vocabulary):
    """What the engine says of a token: the most probable ones do not always hold it."""
    ranked = sorted((-logprob(other, place), other) for other in range(vocabulary))[: params.top_logprobs]
    return TokenLogprob(logprob(token, place), token, tuple((-value, other) for value, other in ranked))


def outputs(tokenizer, prompt, tokens, params, *, echo=False, stops_with=None):
    """All that a request has got after each token. A stop string ends it; else `stops_with` is the finish reason."""
    vocabulary = len(tokenizer.pieces) + 1
    left_out = special_token_ids(tokenizer) if params.skip_special_tokens else ()
    stream = TextStream(tokenizer, params.stop, left_out)
    scored = [None, *(entry(token, -place, params, vocabulary) for place, token in enumerate(prompt[1:], 1))]
    for count in range(1, len(tokens) + 1):
        before = len(stream)
        stream.add(tokens[count - 1])
        stop = stream.find_stop(len(stream) - before)
        reason = "stop" if stop is not None else stops_with if count == len(tokens) else None
        if reason is not None:
            stream.finish()
        text = stream.sure if reason is None else stream.whole
        logprobs = tuple(entry(token, place, params, vocabulary) for place, token in enumerate(tokens[:count]))
        completion = Completion(0, tuple(tokens[:count]), text, logprobs if params.logprobs else (), reason, stop)
        prompt_logprobs = tuple(scored) if echo and params.logprobs else None
        yield RequestOutput("r", tuple(prompt), (completion,), reason is not None, prompt_logprobs)
        if reason is not None:
            return


def sampling(stop=(), top=2, **more):
    return SamplingParams(stop=stop, logprobs=True, top_logprobs=top, prompt_logprobs=True, **more)
