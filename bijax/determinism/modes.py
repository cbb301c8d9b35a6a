"""The ways in which other requests, cache and engine vary while one request stays the same."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bijax.serving import Completion, EngineOptions, RequestOutput, SamplingParams

_PREFIXES = (1, 511, 2048, 4097)
"""Tokens of the prefixes of SGLang's script; those that a model has no room for are shortened."""


class Served(Protocol):
    """The system under test: an engine, or a server."""

    @property
    def options(self) -> EngineOptions:
        """Of the engine."""

    @property
    def max_request_tokens(self) -> int:
        """Longest sequence."""

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
        """Serves prompts together, and returns their outputs in their order."""

    def flush_cache(self) -> None:
        """Empties the prefix cache."""


class OpenEngine(Protocol):
    """Makes an engine."""

    def __call__(
        self,
        *,
        num_pages: int | None = None,
        speculative_tokens: int | None = None,
        prefix_cache: bool | None = None,
        reload: bool = False,
    ) -> Served:
        """Returns a new engine, with the given options; with `reload` the model is read again."""


@dataclass
class Samples:
    """The result of one request.

    Attributes:
        name: What the request is called in the table.
        completions: One for each time.
    """

    name: str
    completions: list[Completion] = field(default_factory=list)

    @property
    def unique_texts(self) -> int:
        """Number of different outputs, as tokens."""
        return len({c.tokens for c in self.completions})

    @property
    def unique_bits(self) -> int:
        """Number of different outputs, as tokens and the bits of their log-probabilities."""
        return len({(c.tokens, _bits(c)) for c in self.completions})


@dataclass(frozen=True)
class Run:
    """The inputs of a mode.

    Attributes:
        open_engine: Makes engines.
        prompt: Makes a prompt of a given number of tokens; longer ones start with the shorter ones.
        params: Of every request.
        trials: Number of rounds.
        on_progress: Called with the number of rounds that are done.
    """

    open_engine: OpenEngine
    prompt: Callable[[int], list[int]]
    params: SamplingParams
    trials: int
    on_progress: Callable[[int], None]

    def rounds(self) -> Iterator[tuple[int, np.random.Generator]]:
        """Yields the number of each round, from 1 on, and what makes its choices."""
        for trial in range(1, self.trials + 1):
            yield trial, np.random.default_rng(trial)
            self.on_progress(trial)


def single(run: Run) -> list[Samples]:
    """One prompt, in batches of 1, 2, 3, ... of itself."""
    engine, samples = run.open_engine(), Samples("prompt")
    for trial, _ in run.rounds():
        size = 1 + (trial - 1) % engine.options.max_running
        _keep(engine.generate([run.prompt(12)] * size, run.params), [samples] * size)
    return [samples]


def mixed(run: Run) -> list[Samples]:
    """Two short prompts and a long one, in batches of all kinds."""
    engine = run.open_engine()
    long = _room(engine, run.params) * 3 // 4
    kinds = {"prompt 1": run.prompt(9), "prompt 2": run.prompt(40), "long prompt": run.prompt(long)}
    return _mixtures(run, engine, kinds)


def prefix(run: Run) -> list[Samples]:
    """Prompts with a common prefix, in batches of all kinds."""
    engine = run.open_engine()
    most = _room(engine, run.params) - 8
    lengths = sorted({min(n, most * (i + 1) // len(_PREFIXES)) for i, n in enumerate(_PREFIXES)})
    return _mixtures(run, engine, {f"prefix of {n}": [*run.prompt(n), *run.prompt(8)[4:]] for n in lengths})


def radix(run: Run) -> list[Samples]:
    """A prompt with an empty cache, with its own pages in the cache, and with a part of them."""
    engine, samples = run.open_engine(), Samples("prompt")
    prompt = run.prompt(_room(engine, run.params) // 2)
    for _, rng in run.rounds():
        engine.flush_cache()
        part = prompt[: int(rng.integers(1, len(prompt)))]
        _keep(engine.generate([part], SamplingParams(max_new_tokens=0)), [])
        for _ in range(2):
            _keep(engine.generate([prompt], run.params), [samples])
    return [samples]


def chunk(run: Run) -> list[Samples]:
    """A prompt that is cut into chunks, elsewhere each time, by others that share the budget of a step."""
    engine, samples = run.open_engine(), Samples("prompt")
    prompt = run.prompt(_room(engine, run.params) // 2)
    for trial, rng in run.rounds():
        engine.flush_cache()
        others = rng.integers(1, engine.options.max_prefill_tokens, trial % 4)
        prompts = [run.prompt(min(int(n), len(prompt)))[::-1] for n in others]
        outputs = engine.generate([*prompts, prompt], run.params)
        _keep(outputs[-1:], [samples])
    return [samples]


def preempt(run: Run) -> list[Samples]:
    """Requests in a cache that is too small for them, so that some are computed again."""
    probe = run.open_engine(num_pages=1)
    size, together = probe.options.page_size, min(4, probe.options.max_running)
    prompt = run.prompt(2 * size)
    pages = -(-(len(prompt) + run.params.max_new_tokens) // size)
    # Without a prefix cache, in which the pages that one lost would be found again.
    engine = run.open_engine(num_pages=max(pages, together * pages * 2 // 3), prefix_cache=False)
    samples = Samples("prompt")
    for trial, _ in run.rounds():
        number = 1 + trial % together
        _keep(engine.generate([prompt] * number, run.params), [samples] * number)
    return [samples]


def speculative(run: Run) -> list[Samples]:
    """A prompt with drafts to look up, without speculation and with up to seven drafts."""
    samples = Samples("prompt")
    engines = [run.open_engine(speculative_tokens=n) for n in (0, 3, 7)]
    prompt = run.prompt(12) * 3
    for trial, _ in run.rounds():
        _keep(engines[trial % len(engines)].generate([prompt], run.params), [samples])
    return [samples]


def restart(run: Run) -> list[Samples]:
    """A prompt in a new engine each time, with weights that are read again."""
    samples = Samples("prompt")
    for _ in run.rounds():
        _keep(run.open_engine(reload=True).generate([run.prompt(24)], run.params), [samples])
    return [samples]


MODES: dict[str, Callable[[Run], list[Samples]]] = {
    "single": single,
    "mixed": mixed,
    "prefix": prefix,
    "radix": radix,
    "chunk": chunk,
    "preempt": preempt,
    "speculative": speculative,
    "restart": restart,
}

REMOTE_MODES = ("single", "mixed", "prefix", "radix", "chunk")
"""Those that change nothing about the engine itself, and so can be run against a server."""


def _mixtures(run: Run, engine: Served, kinds: dict[str, list[int]]) -> list[Samples]:
    samples = {name: Samples(name) for name in kinds}
    for trial, rng in run.rounds():
        size = 1 + (trial - 1) % engine.options.max_running
        names = rng.choice(list(kinds), size).tolist() if trial > 1 else list(kinds)
        _keep(engine.generate([kinds[n] for n in names], run.params), [samples[n] for n in names])
    return list(samples.values())


def _keep(outputs: Sequence[RequestOutput], samples: Sequence[Samples]) -> None:
    for output, kept in zip(outputs, samples, strict=False):
        kept.completions.append(output.completions[0])


def _room(engine: Served, params: SamplingParams) -> int:
    """Returns the length of the longest prompt that leaves room for every requested token."""
    return engine.max_request_tokens - params.max_new_tokens


def _bits(completion: Completion) -> bytes:
    return np.array([p.logprob for p in completion.logprobs], np.float32).tobytes()
