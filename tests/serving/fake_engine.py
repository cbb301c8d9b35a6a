"""A model of bytes and an engine without a model: it samples by hashing what came before."""

import asyncio
import hashlib
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from bijax.serving import Completion, EngineError, EngineStats, QueueFullError, RequestOutput, TokenLogprob

END, VOCABULARY, LONGEST = 256, 257, 4096


class ByteTokenizer:
    """Tokens are bytes, and one that ends the text."""

    eos_token_ids = special_token_ids = (END,)

    def encode(self, text):
        if "\0" in text:
            raise ValueError("the vocabulary has no token for '\\x00'")
        return list(text.encode())

    def decode(self, ids):
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def encode_chat(self, messages, *, add_generation_prompt):
        if messages[0]["role"] == "assistant":
            raise ValueError("a conversation must not begin with the assistant")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")

    def token_bytes(self, token_id):
        return b"" if token_id == END else bytes([token_id])


def logprob(history, seed, rank=0):
    """A float32 below 0 that depends on all tokens before."""
    digest = hashlib.sha256(repr((tuple(history), seed, rank)).encode()).digest()
    return float(np.float32(math.log((int.from_bytes(digest[:4]) + 1) / 2**33)))


def sample(history, seed):
    digest = hashlib.sha256(repr((tuple(history), seed)).encode()).digest()
    return b"abcdefghijklmnopqrstuvwxyz .,\n\xc3\xa9"[int.from_bytes(digest[4:6]) % 32]


class FakeEngine:
    """Steps on the event loop, a token of each sequence in `step_s` seconds."""

    def __init__(self, *, step_s=0.0, max_running=8, max_waiting=64, fail_after=None):
        self.step_s, self.max_running, self.max_waiting = step_s, max_running, max_waiting
        self.fail_after = fail_after
        self.running = self.waiting = 0
        self.places = asyncio.Semaphore(max_running)
        self.going = asyncio.Event()
        self.going.set()
        self.aborted, self.flushed, self.closed, self.version = set(), 0, False, "default"
        self.finished, self.most_waiting, self.generated = Counter(), 0, 0
        self.requests = []
        self.seed = 0  # of requests that name none
        self.error = None

    async def stream(self, prompt_tokens, params, *, request_id, priority=0):
        self.requests.append(SimpleNamespace(prompt=prompt_tokens, params=params, id=request_id, priority=priority))
        params.check_tokens(VOCABULARY, (END,))
        if len(prompt_tokens) > LONGEST:
            raise ValueError("the prompt is too long")
        if self.waiting >= self.max_waiting:
            raise QueueFullError(f"{self.waiting} requests wait, at most {self.max_waiting} may")
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await self.places.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            async for output in self._steps(tuple(prompt_tokens), params, request_id):
                yield output
        finally:
            self.running -= 1
            self.places.release()

    async def _steps(self, prompt, params, request_id):
        outputs = [Completion(index, (), "") for index in range(params.n)]
        start = params.logprob_start_len
        prompt_logprobs = None
        if params.prompt_logprobs:
            entries = [TokenLogprob(logprob(prompt[:i], 0), prompt[i], self._top(prompt[:i], params))
                       for i in range(len(prompt))]  # fmt: skip
            prompt_logprobs = (None, *entries[1:])[start:] if start == 0 else tuple(entries[start:])
        while any(output.finish_reason is None for output in outputs):
            await asyncio.sleep(self.step_s)
            await self.going.wait()
            outputs = [self._step(prompt, output, params, request_id) for output in outputs]
            first = self.seed if params.seed is None else params.seed
            outputs = [replace(output, seed=first + output.index) for output in outputs]
            finished = all(output.finish_reason for output in outputs)
            if finished:
                self.finished.update(output.finish_reason for output in outputs)
            yield RequestOutput(
                request_id, prompt, tuple(outputs), finished, prompt_logprobs, weight_version=self.version
            )

    def _step(self, prompt, output, params, request_id):
        if output.finish_reason is not None:
            return output
        if request_id in self.aborted:
            return Completion(output.index, output.tokens, output.text, output.logprobs, "abort")
        if self.fail_after is not None and len(output.tokens) >= self.fail_after:
            self.error = MemoryError("out of memory")
            raise EngineError("the engine has stopped: out of memory")
        if not params.max_new_tokens:
            return Completion(output.index, (), "", (), "length")
        seed = 0 if params.temperature == 0 else (params.seed or 0) + output.index
        history = prompt + output.tokens
        token = sample(history, seed)
        self.generated += 1
        tokens = (*output.tokens, token)
        logprobs = output.logprobs
        if params.logprobs:
            logprobs = (*logprobs, TokenLogprob(logprob(history, seed), token, self._top(history, params)))
        text = ByteTokenizer().decode(tokens)
        reason, stopped_by = ("length", None) if len(tokens) >= params.max_new_tokens else (None, None)
        for stop in params.stop:
            if stop in text:
                text, reason, stopped_by = text[: text.index(stop)], "stop", stop
        if reason is None and text.endswith("\ufffd"):
            text = text[:-1]
        return Completion(output.index, tokens, text, logprobs, reason, stopped_by)

    def _top(self, history, params):
        return tuple((logprob(history, 0, rank), 97 + rank) for rank in range(params.top_logprobs))

    async def abort(self, request_id):
        self.aborted.add(request_id)
        return True

    async def pause(self):
        self.going.clear()

    async def resume(self):
        self.going.set()

    async def flush_cache(self):
        self.flushed += 1

    async def update_weights(self, weights, version):
        self.version = version

    async def close(self):
        self.closed = True

    def stats(self):
        return EngineStats(
            num_running=self.running, num_waiting=self.waiting, kv_cache_usage=self.running / self.max_running,
            prefix_queries=10, prefix_hits=5, preemptions=0, compilations=0, prompt_tokens=0,
            generated_tokens=self.generated, finished=dict(self.finished), weight_version=self.version,
        )  # fmt: skip
