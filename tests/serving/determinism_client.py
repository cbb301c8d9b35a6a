"""A client that asks a server the same in many ways, as SGLang's script does, and counts different answers.

It knows `/generate` and `/flush_cache` alone. `python -m tests.serving.determinism_client --url URL --mode prefix`
runs it against any server. Its modes are those of SGLang's script: single (one prompt in batches of 1 to N), mixed
(three prompts in random numbers), prefix (texts that begin alike), radix (cold and warm prefix cache), p_vs_d (the
log-probabilities of a text that was sampled, and of the same text as a prompt).
"""

import argparse
import json
import random
import sys
import urllib.request

SHORT = "Tell me about Richard Feynman: "
NUMBERS = "Generate 1000 random numbers. Go directly into it, start with a number."
SENTENCE = "The lighthouse on the northern cape was built in 1871 from granite that had to be shipped across the bay. "
LONG = "".join(f"{number}. {SENTENCE}" for number in range(60))


class Client:
    """Sends prompts; an answer is the text with the bits of its log-probabilities."""

    def __init__(self, url, *, max_new_tokens, temperature=0.0, prefixes=(1, 511, 2048, 4097), seed=0):
        self.url, self.prefixes = url, prefixes
        self.sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens, "sampling_seed": 42}
        self.random = random.Random(seed)

    def post(self, path, body=None):
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.loads(reply.read())

    def send(self, prompts, key="text", **more):
        body = {key: prompts, "sampling_params": self.sampling, "return_logprob": True, "stream": False} | more
        items = self.post("/generate", body)
        assert len(items) == len(prompts)
        return items

    def answers(self, prompts, **more):
        return [answer(item) for item in self.send(prompts, **more)]

    def flush(self):
        self.post("/flush_cache?timeout=60")


def answer(item):
    logprobs = item["meta_info"]["output_token_logprobs"]
    return item["text"], tuple(item["output_ids"]), tuple(entry[0].hex() for entry in logprobs)


def single(client, trials):
    yield "Prompt", [client.answers([SHORT] * size)[0] for size in range(1, trials + 1)]


def mixed(client, trials):
    found = {prompt: [] for prompt in (SHORT, NUMBERS, LONG[: client.prefixes[-1]])}
    for size in range(1, trials + 1):
        prompts = [client.random.choice(list(found)) for _ in range(size)]
        for prompt, got in zip(prompts, client.answers(prompts), strict=True):
            found[prompt].append(got)
    for name, got in zip(("Prompt 1", "Prompt 2", "Long prompt"), found.values(), strict=True):
        yield name, got


def prefix(client, trials):
    found = {length: [] for length in client.prefixes}
    for size in range(1, trials + 1):
        client.flush()
        lengths = [client.random.choice(client.prefixes) for _ in range(size)]
        for length, got in zip(lengths, client.answers([LONG[:length] for length in lengths]), strict=True):
            found[length].append(got)
    for length, got in found.items():
        yield f"Prompt with prefix length {length}", got


def radix(client, trials):
    for trial in range(trials):
        client.flush()
        prompt = LONG[trial * 7 :][: client.prefixes[-1]]
        [cold] = client.send([prompt])
        [warm] = client.send([prompt])
        assert cold["meta_info"]["cached_tokens"] == 0
        assert warm["meta_info"]["cached_tokens"] > 0
        yield f"Trial {trial}", [answer(cold), answer(warm)]


def p_vs_d(client, trials):
    for trial in range(trials):
        client.flush()
        prompts = [SHORT, NUMBERS, LONG[trial * 11 :][: client.random.choice(client.prefixes)]]
        sampled = [scores(item) for item in client.send(prompts, logprob_start_len=0)]
        client.flush()
        texts = [[token for _, token, _ in entries] for entries in sampled]
        once = client.sampling | {"max_new_tokens": 1}
        again = client.send(texts, "input_ids", logprob_start_len=0, sampling_params=once)
        for index, (entries, item) in enumerate(zip(sampled, again, strict=True)):
            yield f"Trial {trial}, prompt {index}", [bits(entries), bits(item["meta_info"]["input_token_logprobs"])]


def scores(item):
    info = item["meta_info"]
    return info["input_token_logprobs"] + info["output_token_logprobs"]


def bits(entries):
    return tuple((None if logprob is None else logprob.hex(), token) for logprob, token, _ in entries)


MODES = {"single": single, "mixed": mixed, "prefix": prefix, "radix": radix, "p_vs_d": p_vs_d}


def run(client, mode, trials, write=print):
    """Prints a line for each prompt; returns the numbers of different answers."""
    uniques = []
    for name, answers in MODES[mode](client, trials):
        uniques.append(len(set(answers)))
        write(f"{name}: total samples: {len(answers)}, Unique samples: {uniques[-1]}")
    return uniques


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--mode", choices=MODES, default="single")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    client = Client(given.url, max_new_tokens=given.max_new_tokens, temperature=given.temperature)
    return int(max(run(client, given.mode, given.trials)) > 1)


if __name__ == "__main__":
    sys.exit(main())
