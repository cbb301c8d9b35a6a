"""A small random Llama model, and the ways of computing its log-probabilities."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_layers import INVARIANT, KVCache, Llama, Ops
from flax_layers.checkpoint import Checkpoint, LlamaConfig, Weights
from flax_layers.checkpoint.weights import expected_shapes

CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=192,
    intermediate_size=320,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_ids=(2,),
)

LENGTHS = (150, 37, 5, 129)
"""Sequences that end inside, before, after a block of 128 keys."""


LENGTH = 160
"""To which sequences are padded. Every other shape costs the compilation of a model."""


@functools.cache
def weights(config: LlamaConfig = CONFIG) -> Weights:
    """Random weights under Hugging Face names."""
    rng = np.random.default_rng(0)
    shapes = dict(expected_shapes(config))
    values = {
        name: (1 + rng.standard_normal(shape) / 8 if len(shape) == 1 else rng.standard_normal(shape) / shape[1] ** 0.5)
        for name, shape in shapes.items()
    }
    return Weights(shapes, lambda name: values[name].astype(np.float32))


@functools.cache
def model(ops: Ops = INVARIANT, config: LlamaConfig = CONFIG, **options: Any) -> Llama:
    checkpoint = Checkpoint(config, weights(config), tokenizer=None)  # type: ignore[arg-type]
    return Llama.from_checkpoint(checkpoint, ops=ops, **options)


SHALLOW = dataclasses.replace(CONFIG, num_layers=1)
"""One block, for what takes long to compile."""


@functools.cache
def sequences() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.integers(0, CONFIG.vocab_size, length).astype(np.int32) for length in LENGTHS)


def padded(rows: tuple[np.ndarray, ...], length: int) -> np.ndarray:
    tokens = np.full((len(rows), length), 7, np.int32)
    for row, sequence in enumerate(rows):
        tokens[row, : min(length, len(sequence))] = sequence[:length]
    return tokens


def score(ops: Ops, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the log-probability (B, T) of the target after each token."""
    return jnp.take_along_axis(ops.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


def targets(tokens: Any) -> Any:
    """Returns the token after each."""
    return (jnp if isinstance(tokens, jax.Array) else np).roll(tokens, -1, axis=1)


@jax.jit
def full(model: Llama, tokens: jax.Array, following: jax.Array) -> jax.Array:
    """The training-style forward pass."""
    return score(model.norm.ops, model(tokens), following)


@jax.jit
def step(
    model: Llama, tokens: jax.Array, following: jax.Array, lengths: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    logits, cache = model.extend(tokens, cache, lengths=lengths)
    return score(model.norm.ops, logits, following), cache


Make = Callable[[Llama, int], KVCache]


def contiguous(model: Llama, batch: int) -> KVCache:
    return model.cache(batch=batch, capacity=192)


def paged(model: Llama, batch: int) -> KVCache:
    table = np.random.default_rng(1).permutation(batch * 12).reshape(batch, 12)
    return model.paged_cache(table, num_pages=batch * 12, page_size=16)


def in_chunks(model: Llama, rows: tuple[np.ndarray, ...], chunk: int, make: Make = contiguous) -> list[np.ndarray]:
    """Log-probabilities of each sequence but for its last token, from chunks against a cache."""
    length = max(len(row) for row in rows)
    length = -(-length // chunk) * chunk
    tokens = padded(rows, length)
    following = targets(tokens)
    cache = make(model, len(rows))
    parts = []
    for start in range(0, length, chunk):
        new = np.array([np.clip(len(row) - start, 0, chunk) for row in rows], np.int32)
        part, cache = step(model, tokens[:, start : start + chunk], following[:, start : start + chunk], new, cache)
        parts.append(np.asarray(part))
    assert cache.lengths.tolist() == [len(row) for row in rows]
    return trimmed(np.concatenate(parts, axis=1), rows)


def in_full(model: Llama, rows: tuple[np.ndarray, ...], length: int = LENGTH) -> list[np.ndarray]:
    """Log-probabilities of each sequence but for its last token, from the training-style forward pass."""
    tokens = padded(rows, length)
    return trimmed(np.asarray(full(model, tokens, targets(tokens))), rows)


def trimmed(scores: np.ndarray, rows: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    return [scores[index, : len(row) - 1] for index, row in enumerate(rows)]
