"""Log-probabilities of given texts."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ._batch import as_arrays, bucket
from ._layered import LayeredModel
from .block import project
from .layers import Embed, Linear, RMSNorm
from .llama import Llama


def score(model: Llama, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Computes the log-probability of each token but the first, conditioned on the tokens before it.

    Args:
        model: The model.
        sequences: At least one token id each; all are computed as one batch.

    Returns:
        For each sequence its log-probabilities (float32), one fewer than tokens. The exponential of their negative
        mean is the perplexity.

    Raises:
        TypeError: If a token id is not an integer.
        ValueError: If a sequence is empty or longer than `config.max_position_embeddings`, or a token id is out of
            range.

    Guarantee: row-invariant with `INVARIANT`: a sequence's result does not depend on the others, and equals that of
    `generate` for the same tokens.

    Example:
        >>> from flax import nnx
        >>> from flax_layers import PLAIN
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> config = LlamaConfig.tiny()
        >>> model = Llama(config, ops=PLAIN, rngs=nnx.Rngs(0))
        >>> [logprobs.shape for logprobs in score(model, [[1, 5, 9], [1]])]
        [(2,), (0,)]
    """
    arrays = as_arrays("score", model, sequences)
    if not arrays:
        return []
    lengths = np.array([len(row) for row in arrays], np.int32)
    length = bucket(int(lengths.max()))
    tokens = np.zeros((len(arrays), length), np.int32)
    for row, array in zip(tokens, arrays, strict=True):
        row[: len(array)] = array
    layers = LayeredModel(model, model.cache(batch=len(arrays), capacity=length))
    x = layers.extend(tokens, np.zeros_like(lengths), lengths)
    following = jnp.asarray(np.roll(tokens, -1, axis=1))
    found = np.asarray(_score(model.norm, model.projection, x, following, model.config.logits_soft_cap))
    return [row[: n - 1].copy() for row, n in zip(found, lengths, strict=True)]


@functools.partial(jax.jit, static_argnames="soft_cap")
def _score(
    norm: RMSNorm, projection: Embed | Linear, x: jax.Array, following: jax.Array, soft_cap: float | None
) -> jax.Array:
    logprobs = norm.ops.log_softmax(project(norm, projection, (x, None), soft_cap))
    return jnp.take_along_axis(logprobs, following[..., None], axis=-1)[..., 0]
