"""Sequences of token ids as a batch."""

from collections.abc import Sequence

import numpy as np

from .layers.embed import check_token_ids
from .llama import Llama

_SMALLEST_BUCKET = 64


def bucket(tokens: int) -> int:
    """Rounds up to one of a few sizes, since each size costs a compilation."""
    return max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def as_arrays(op: str, model: Llama, prompts: Sequence[Sequence[int]], max_new_tokens: int = 0) -> list[np.ndarray]:
    """Returns the prompts as arrays of int32, checked."""
    arrays = [np.asarray(prompt) for prompt in prompts]
    longest = model.config.max_position_embeddings
    for index, prompt in enumerate(arrays):
        if prompt.ndim != 1 or not len(prompt):
            raise ValueError(
                f"{op}: a prompt must be a sequence of at least one token id, got an array of shape {prompt.shape}"
                f" for prompt {index}."
            )
        check_token_ids(prompt, model.config.vocab_size)
        if len(prompt) + max_new_tokens > longest:
            raise ValueError(
                f"{op}: prompt and new tokens together must be at most {longest} tokens (max_position_embeddings),"
                f" got {len(prompt)} for prompt {index} and {max_new_tokens=}; shorten one of them."
            )
    return [prompt.astype(np.int32) for prompt in arrays]
