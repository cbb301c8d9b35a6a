"""Greedy generation."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ._batch import as_arrays, bucket
from ._layered import LayeredModel
from .layers import KVCache
from .llama import Llama


@dataclass(frozen=True)
class Generation:
    """The result of `generate`.

    Attributes:
        tokens: For each prompt the new tokens (int32), the one that ended it included.
        logprobs: For each prompt the log-probability (float32) of each new token.
    """

    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    prefill_chunk: int | None = None,
    cache: Literal["contiguous", "paged"] = "contiguous",
    page_size: int = 16,
    on_token: Callable[[int], None] | None = None,
) -> Generation:
    """Continues prompts with the most probable tokens, all prompts as one batch.

    Args:
        model: The model.
        prompts: At least one token id each.
        max_new_tokens: New tokens of each prompt, at most.
        eos_token_ids: Tokens that end a continuation.
        prefill_chunk: Prompt tokens per prefill call; None for all of them.
        cache: Whether keys and values are contiguous per sequence, or in pages scattered over one pool.
        page_size: Tokens of a page.
        on_token: Called after each step with the number of tokens that it added, over all prompts.

    Returns:
        Tokens and log-probabilities, in the order of the prompts.

    Raises:
        TypeError: If a token id is not an integer.
        ValueError: If a prompt is empty, a token id is out of range, a number is not positive, the cache's name is
            unknown, or a sequence would be longer than `config.max_position_embeddings`.

    Guarantee: row-invariant with `INVARIANT`: tokens and log-probabilities of a prompt do not depend on the other
    prompts, on `prefill_chunk`, `cache` or `page_size`.

    Example:
        >>> from flax import nnx
        >>> from flax_layers import PLAIN
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> config = LlamaConfig.tiny()
        >>> model = Llama(config, ops=PLAIN, rngs=nnx.Rngs(0))
        >>> generation = generate(model, [[1, 5, 9], [1]], max_new_tokens=4)
        >>> [tokens.shape for tokens in generation.tokens]
        [(4,), (4,)]
    """
    arrays = as_arrays("generate", model, prompts, max_new_tokens)
    for name, number in (
        ("max_new_tokens", max_new_tokens),
        ("page_size", page_size),
        ("prefill_chunk", prefill_chunk),
    ):
        if number is not None and number < 1:
            raise ValueError(f"generate: {name} must be at least 1, got {number}.")
    if cache not in ("contiguous", "paged"):
        raise ValueError(f"generate: cache must be 'contiguous' or 'paged', got {cache!r}.")
    if not arrays:
        return Generation([], [])

    lengths = np.array([len(prompt) for prompt in arrays], np.int32)
    capacity = bucket(int(lengths.max()) + max_new_tokens)
    layers = LayeredModel(model, _empty_cache(model, len(arrays), capacity, page_size if cache == "paged" else None))
    hidden = _prefill(layers, arrays, lengths, prefill_chunk or bucket(int(lengths.max())))
    tokens: list[list[int]] = [[] for _ in arrays]
    logprobs: list[list[np.float32]] = [[] for _ in arrays]
    going = np.ones(len(arrays), bool)
    for step in range(max_new_tokens):
        token, logprob = layers.choose(hidden)
        for row in np.flatnonzero(going):
            tokens[row].append(int(token[row]))
            logprobs[row].append(logprob[row])
        if on_token is not None:
            on_token(int(going.sum()))
        going &= ~np.isin(token, list(eos_token_ids))
        if step + 1 == max_new_tokens or not going.any():
            break
        # A sequence that has ended runs on in its row of the batch; there is room for it.
        hidden = layers.extend(token[:, None], lengths + np.int32(step), np.ones_like(lengths))[:, 0]
    return Generation([np.array(row, np.int32) for row in tokens], [np.array(row, np.float32) for row in logprobs])


def _prefill(layers: LayeredModel, prompts: list[np.ndarray], lengths: np.ndarray, chunk: int) -> jax.Array:
    """Fills the cache; returns the residual stream (B, hidden_size) at each prompt's last token."""
    ends: list[np.ndarray] = [np.zeros(0)] * len(prompts)
    for start in range(0, int(lengths.max()), chunk):
        new = np.clip(lengths - start, 0, chunk).astype(np.int32)
        tokens = np.zeros((len(prompts), chunk), np.int32)
        for index, prompt in enumerate(prompts):
            tokens[index, : new[index]] = prompt[start : start + new[index]]
        x = np.asarray(layers.extend(tokens, np.full_like(lengths, start), new))
        for row in np.flatnonzero((lengths > start) & (lengths <= start + chunk)):
            ends[row] = x[row, new[row] - 1]
    return jnp.asarray(np.stack(ends))


def _empty_cache(model: Llama, batch: int, capacity: int, page_size: int | None) -> KVCache:
    if page_size is None:
        return model.cache(batch=batch, capacity=capacity)
    pages = -(-capacity // page_size)
    # Handed out in a shuffled order, as in a server that has been running for a while.
    page_table = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages)
    return model.paged_cache(page_table, num_pages=batch * pages, page_size=page_size)
