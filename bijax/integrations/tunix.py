"""Reinforcement learning with tunix, where trainer and sampler compute the same bits.

Needs `google-tunix` (extra `tunix`) and Flax.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl import common
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

import bijax
from bijax.serving import Engine, EngineOptions, SamplingParams
from flax_layers import Llama, ServedLlama


class TunixLlama(nnx.Module):
    """A Llama model as tunix calls models.

    Args:
        llama: The model, which is trained.

    Guarantee: as `Llama`: the logits of a token depend on the tokens up to it in its own sequence, wherever the
    sequence lies between its padding.
    """

    def __init__(self, llama: Llama) -> None:
        self.llama = llama
        self.config = llama.config

    def __call__(
        self, input_tokens: jax.Array, positions: jax.Array, cache: Any, attention_mask: jax.Array
    ) -> tuple[jax.Array, None]:
        """Computes whole sequences.

        Args:
            input_tokens: (B, T) integers; each sequence is padded at both ends.
            positions: Not used: the first token of a sequence has position 0.
            cache: None.
            attention_mask: (B, T, T) bool, whose diagonal tells tokens from padding.

        Returns:
            (B, T, vocab_size) float32 logits, and None.

        Raises:
            ValueError: If there is a cache.
        """
        if cache is not None:
            raise ValueError("TunixLlama: expected no cache, since EngineRollout samples; got one.")
        place = jnp.arange(input_tokens.shape[1])
        first = jnp.argmax(jnp.diagonal(attention_mask, axis1=1, axis2=2), axis=1)[:, None]
        # Sequences are moved to the left, where the model has their first token, and their logits back.
        tokens = jnp.take_along_axis(input_tokens, (place + first) % place.size, axis=1)
        logits = self.llama(tokens)
        return jnp.take_along_axis(logits, ((place - first) % place.size)[..., None], axis=1), None


class EngineRollout(BaseRollout):  # type: ignore[misc]  # tunix has no annotations
    """Samples with `bijax.serving.Engine`; the rollout engine of a `tunix.rl.rl_cluster.ClusterConfig`.

    tunix makes it: give `rollout_engine=EngineRollout`, or `functools.partial(EngineRollout, options=...)`. Every
    sample has its own seed, derived from `RolloutConfig.seed`, the number of the call and its place in it.

    Args:
        rollout_actor: The trained model, a `TunixLlama`. Its weights are copied.
        tokenizer: tunix's `TokenizerAdapter`.
        rollout_config: Tells the longest sequence.
        mesh: Not used: the engine runs where the weights are.
        options: The engine's; `max_length` is taken from `rollout_config` by default.

    Raises:
        TypeError: If the model is not a `TunixLlama`.

    Guarantee: `RolloutOutput.logprobs` has the bits that the trainer computes for the same tokens with the same
    weights, inside `shared_logprobs` and at temperature 1 in the trainer. They are computed from the model's own
    logits, before temperature and filters.

    Source: the rollouts of tunix (https://github.com/google/tunix).
    """

    def __init__(
        self,
        rollout_actor: TunixLlama,
        tokenizer: Any,
        rollout_config: RolloutConfig,
        mesh: Any = None,
        options: EngineOptions | None = None,
    ) -> None:
        if not isinstance(rollout_actor, TunixLlama):
            raise TypeError(f"EngineRollout: the model must be a TunixLlama, got {type(rollout_actor).__name__}.")
        self._tokenizer = tokenizer
        graph, state = nnx.split(rollout_actor)
        # tunix sends weights only to a model that does not share them.
        self._model: TunixLlama = nnx.merge(graph, jax.tree.map(jnp.copy, state))
        self._calls = 0
        options = EngineOptions() if options is None else options
        if options.max_length is None:
            longest = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
            options = dataclasses.replace(options, max_length=longest)
        self._engine = Engine(ServedLlama(self._model.llama), options=options)

    def generate(self, prompts: Sequence[str], rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        """Samples an output for each prompt. It ends before an end-of-text token, as in tunix."""
        encoded = [self._encode(prompt, rollout_config.max_prompt_length) for prompt in prompts]
        ends = tuple(rollout_config.eos_tokens or [self.eos_id()])
        seeds = self._seeds(rollout_config.seed, len(prompts))
        params = [
            SamplingParams(
                max_new_tokens=rollout_config.max_tokens_to_generate,
                temperature=float(rollout_config.temperature),
                top_p=1.0 if rollout_config.top_p is None else float(rollout_config.top_p),
                top_k=rollout_config.top_k if (rollout_config.top_k or -1) > 0 else None,
                seed=seed,
                stop_token_ids=ends,
                logprobs=True,
            )
            for seed in seeds
        ]
        completions = [output.completions[0] for output in self._engine.generate(encoded, params)]
        kept = [len(c.tokens) - (c.finish_reason == "stop") for c in completions]
        padded = np.full((len(prompts), rollout_config.max_prompt_length), self.pad_id(), np.int32)
        for row, tokens in zip(padded, encoded, strict=True):
            row[len(row) - len(tokens) :] = tokens
        sampled = [np.array(c.tokens[:n], np.int32) for c, n in zip(completions, kept, strict=True)]
        logprobs = [
            np.array([p.logprob for p in c.logprobs[:n]], np.float32) for c, n in zip(completions, kept, strict=True)
        ]
        return RolloutOutput(
            text=[self._tokenizer.decode(row.tolist()) for row in sampled],
            logits=None,
            tokens=sampled,
            left_padded_prompt_tokens=padded,
            logprobs=logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Returns the log-probabilities (B, N) of the given tokens, as tunix's trainer computes them."""
        graph, state = nnx.split(self._model)
        return common.compute_per_token_logps(
            graph, state, prompt_tokens, completion_tokens, pad_id=self.pad_id(), eos_id=self.eos_id()
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes the trainer's weights, all or some of them; the prefix cache is emptied."""
        nnx.update(self._model, params)
        self._engine.update_weights(self._model.llama)

    def pad_id(self) -> int:
        """Returns the token of padding."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Returns the token that ends a text."""
        return int(self._tokenizer.eos_id())

    def model(self) -> TunixLlama:
        """Returns the model with the weights that are sampled with."""
        return self._model

    def _encode(self, prompt: str, longest: int) -> list[int]:
        start = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        tokens: list[int] = list(self._tokenizer.dedup_bos_ids(start + list(self._tokenizer.encode(prompt))))
        if len(tokens) > longest:
            raise ValueError(
                f"EngineRollout: a prompt must have at most max_prompt_length={longest} tokens, got {len(tokens)}."
            )
        return [int(token) for token in tokens]

    def _seeds(self, given: Any, number: int) -> list[int]:
        """Returns a seed for each sample of a call."""
        words = [] if given is None else np.asarray(_key_data(given)).reshape(-1).astype(np.uint32).tolist()
        self._calls += 1
        made = np.random.SeedSequence([self._calls, *words]).generate_state(number, np.uint64)
        return [int(seed) for seed in made]


def _key_data(seed: Any) -> Any:
    is_key = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(seed) if is_key else seed


@contextlib.contextmanager
def shared_logprobs() -> Iterator[None]:
    """Lets tunix compute log-probabilities as the engine does, by `bijax.log_softmax`, while the block runs.

    tunix's trainer takes `logit - logsumexp`, which rounds in other places. It is its function
    `tunix.rl.common.selective_log_softmax` that is replaced, for the whole process, and put back at the end. Programs
    that JAX has traced stay as they are, so enter it before the first step.

    Example:
        >>> from tunix.rl import common  # doctest: +SKIP
        >>> with shared_logprobs():  # doctest: +SKIP
        ...     learner.train(dataset)
    """
    stock = common.selective_log_softmax
    common.selective_log_softmax = selective_log_softmax
    try:
        yield
    finally:
        common.selective_log_softmax = stock


def selective_log_softmax(logits: jax.Array, input_ids: jax.Array) -> jax.Array:
    """Returns the log-probabilities (...) of tokens (...) among logits (..., V), as the engine computes them.

    Guarantee: row-invariant, with the bits of `bijax.log_softmax`.
    """
    logprobs = bijax.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(logprobs, input_ids[..., None], axis=-1)[..., 0]
