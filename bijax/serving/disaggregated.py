"""Prompts are computed on some devices, and tokens generated on others: pages are handed from engine to engine."""

from collections.abc import Sequence
from typing import Any

import jax

from bijax.serving.engine import Engine
from bijax.serving.fingerprint import fingerprint
from bijax.serving.model import adapter_names, state_interval
from bijax.serving.outputs import RequestOutput
from bijax.serving.params import SamplingParams
from bijax.serving.requests import find_adapter, params_of
from bijax.serving.tokens import read_prompt


class DisaggregatedEngine:
    """Two engines with one model: the first computes prompts, the second generates from their pages.

    The full pages of a prompt go from the first engine's prefix cache into the second's, which computes the rest of
    the prompt. The engines may have different numbers of devices: the heads of a page are divided among them again.

    Args:
        prefill: Computes prompts.
        decode: Generates.

    Raises:
        TypeError: If one is not an `Engine`.
        ValueError: If they are one engine, or differ in contracts, in the pages of their caches, in the version of
            their weights, in the names of their adapters, or in `enable_deterministic_inference` or
            `speculative_algorithm`, or one has no prefix cache or a model that keeps states.

    Guarantee: as `Engine`: tokens and the bits of log-probabilities are those of one engine that does both.

    Source: Y. Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model
    Serving", 2024 (https://arxiv.org/abs/2401.09670).

    Example:
        >>> from bijax.serving.options import EngineOptions
        >>> from bijax.serving.toy import ToyModel
        >>> model, options = ToyModel.random(seed=0), EngineOptions(page_size=4, num_pages=32, max_running=1)
        >>> both = DisaggregatedEngine(prefill=Engine(model, options=options), decode=Engine(model, options=options))
        >>> [output] = both.generate([[1, 2, 3, 4, 5]], SamplingParams(max_new_tokens=2, seed=0))
        >>> len(output.completions[0].tokens), output.cached_tokens
        (2, 4)
    """

    def __init__(self, *, prefill: Engine, decode: Engine) -> None:
        for name, engine in (("prefill", prefill), ("decode", decode)):
            if not isinstance(engine, Engine):
                raise TypeError(f"DisaggregatedEngine: {name} must be an Engine, got {type(engine).__name__}.")
        _check(prefill, decode)
        self.prefill, self.decode = prefill, decode

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Serves prompts and returns their outputs, in their order; see `Engine.generate`.

        Args:
            prompts: Tokens of each prompt.
            params: For all, or for each.
        """
        each = params_of(prompts, params)
        # `decode` raises for entries that are not SamplingParams.
        adapters = [getattr(given, "adapter", None) for given in each]
        self.prefill.generate(prompts, [SamplingParams(max_new_tokens=0, adapter=name) for name in adapters])
        for prompt, name in zip(prompts, adapters, strict=True):
            self.hand_over(prompt, name)
        return self.decode.generate(prompts, each)

    def hand_over(self, prompt_tokens: Sequence[int], adapter: str | None = None) -> int:
        """Copies the computed full pages of a prompt into the cache of the second engine.

        Args:
            prompt_tokens: The prompt.
            adapter: Name of the LoRA adapter that it was computed with; None for the model itself.

        Returns:
            The number of its tokens whose pages the second engine has now. It has fewer than the first one if there is
            no room, and computes the others itself.

        Raises:
            TypeError: If the prompt is not a sequence of integers.
            ValueError: If it is empty or a token is outside the vocabulary, there is no such adapter, or the engines
                have other weights now.
        """
        _check_versions(self.prefill, self.decode)
        _, tokens = read_prompt(prompt_tokens, self.prefill.vocab_size)
        here, there = (find_adapter(adapter, adapter_names(e.model)) for e in (self.prefill, self.decode))
        with self.prefill.recoverable(), self.decode.recoverable():
            first, second = self.prefill.scheduler, self.decode.scheduler
            pages, known = first.match(tokens, here), second.match(tokens, there)
            taken = second.take(len(pages) - len(known))
            if taken:
                missing = pages[len(known) : len(known) + len(taken)]
                self.decode.programs.write_pages(taken, self.prefill.programs.read_pages(missing))
            second.insert(tokens, [*known, *taken], there)
            first.release(pages)
            second.release([*known, *taken])
        return (len(known) + len(taken)) * self.prefill.options.page_size

    def update_weights(self, weights: Any, version: str | None = None) -> None:
        """Replaces the weights of both engines, or of neither if one refuses; see `Engine.update_weights`."""
        models = [engine.model.with_weights(weights) for engine in (self.prefill, self.decode)]
        self.prefill.take_model(models[0], version)
        self.decode.take_model(models[1], self.prefill.weight_version)


def _check(prefill: Engine, decode: Engine) -> None:
    op = "DisaggregatedEngine"
    if prefill is decode:
        raise ValueError(f"{op}: prefill and decode must be two engines, got one.")
    for name in ("page_size", "enable_deterministic_inference", "speculative_algorithm"):
        values = [getattr(engine.options, name) for engine in (prefill, decode)]
        if values[0] != values[1]:
            raise ValueError(f"{op}: the engines must have the same {name}, got {values[0]} and {values[1]}.")
    for role, engine in (("prefill", prefill), ("decode", decode)):
        if not engine.options.prefix_cache:
            raise ValueError(f"{op}: pages go from prefix cache to prefix cache; {role} has prefix_cache=False.")
        if state_interval(engine.model) is not None:
            raise ValueError(
                f"{op}: {role} must have a model that keeps pages alone, got {type(engine.model).__name__}."
            )
    size = prefill.options.page_size
    shapes = [_page(engine.model, size) for engine in (prefill, decode)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{op}: the engines must have pages of the same shapes, got {shapes[0]} and {shapes[1]}.")
    adapters = [sorted(adapter_names(engine.model)) for engine in (prefill, decode)]
    if adapters[0] != adapters[1]:
        raise ValueError(
            f"{op}: the engines must have the same adapters, got {_listed(adapters[0])} and {_listed(adapters[1])};"
            " load them into both."
        )
    names = [fingerprint(engine.model, page_size=size) for engine in (prefill, decode)]
    if prefill.options.enable_deterministic_inference and names[0] != names[1]:
        raise ValueError(
            f"{op}: the engines must compute under the same contracts, got the fingerprints {names[0]} and {names[1]};"
            " cut both models with the same leaves, also one on a single device."
        )
    _check_versions(prefill, decode)


def _check_versions(prefill: Engine, decode: Engine) -> None:
    versions = prefill.weight_version, decode.weight_version
    if versions[0] != versions[1]:
        raise ValueError(
            f"DisaggregatedEngine: the engines must have the same weights, got the versions {versions[0]!r} and"
            f" {versions[1]!r}; use update_weights of this object."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _page(model: Any, page_size: int) -> list[tuple[tuple[int, ...], str]]:
    """Returns the shapes and dtypes of what a page is made of."""
    page = jax.eval_shape(lambda: model.init_pages(1, page_size))
    return [(tuple(a.shape), a.dtype.name) for a in jax.tree.leaves(page)]
