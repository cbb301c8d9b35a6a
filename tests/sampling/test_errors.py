"""Bad arguments of `sample` and its helpers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bijax.sampling import multinomial_with_seed, sample, seed_words

LOGITS = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"logits": np.zeros((2, 4), int)}, TypeError, "logits must have one of the dtypes"),
        ({"logits": np.zeros(4, np.float32)}, ValueError, r"logits must have the shape \(rows, vocabulary\)"),
        ({"seeds": [1.5, 2]}, TypeError, "seeds must hold integers"),
        ({"seeds": [1]}, ValueError, r"seeds must have the shape \(2,\)"),
        ({"seeds": [1, 2**40]}, ValueError, "seed_words"),
        ({"positions": [-1, 0]}, ValueError, "positions must be at least 0, got -1"),
        ({"temperature": -0.5}, ValueError, "temperature must be at least 0, got -0.5"),
        ({"temperature": np.nan}, ValueError, "temperature must be at least 0, got nan"),
        ({"top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": [0.5] * 3}, ValueError, r"top_p must be one number or have the shape \(2,\)"),
        ({"top_k": 1.0}, TypeError, "top_k must hold integers"),
        ({"min_p": 2}, ValueError, "min_p must be from 0 to 1, got 2"),
        ({"presence_penalty": 1.0}, ValueError, "presence_penalty needs output_counts"),
        ({"repetition_penalty": 2.0, "output_counts": LOGITS.astype(int)}, ValueError, "needs prompt_mask"),
        ({"repetition_penalty": -1.0, "output_counts": LOGITS.astype(int)}, ValueError, "prompt_mask|above 0"),
        ({"allowed": LOGITS}, TypeError, "allowed must be an array of dtype bool"),
        ({"allowed": np.ones((2, 3), bool)}, ValueError, r"allowed must have the shape \(2, 4\)"),
        ({"need_logprobs": "no"}, TypeError, "need_logprobs must be an array of bool, got str"),
        ({"need_logprobs": [True, False]}, TypeError, r"need_logprobs must be one bool, got bool\[2\]"),
        ({"num_top": 9}, ValueError, "num_top must be an integer from 0 to 4"),
    ],
)
def test_sample(options: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"logits": LOGITS, "seeds": [1, 2], "positions": [0, 0]} | options
    with pytest.raises(error, match=message):
        sample(**given)


def test_seed_words() -> None:
    with pytest.raises(ValueError, match=r"from -2\*\*63 to 2\*\*64 - 1, got 18446744073709551616"):
        seed_words([2**64])
    with pytest.raises(TypeError, match="expected a sequence of integers, got NoneType"):
        seed_words(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be an integer, got 1\.0"):
        seed_words([1.0])  # type: ignore[list-item]


def test_multinomial_with_seed() -> None:
    with pytest.raises(TypeError, match="seed must hold integers"):
        multinomial_with_seed(LOGITS, [1.0, 2.0], [0, 0])
    with pytest.raises(ValueError, match=r"positions must have the shape \(2,\)"):
        multinomial_with_seed(LOGITS, [1, 2], jnp.zeros(3, int))
