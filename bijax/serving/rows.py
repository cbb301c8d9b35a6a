"""The sampling parameters of rows of logits, apart from seeds and temperatures, which the device has."""

from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """The sampling parameters of rows of logits; (R,) each except the last three.

    Attributes:
        seeds: (R, 2) uint32.
        positions: int32.
        temperature: float32.
        top_k: int32.
        top_p: float32.
        min_p: float32.
        unread: bool, whether `extras.output_counts` lacks the last token, which the device keeps.
        restricted: Whether any row has a filter or extras.
        need_logprobs: Whether any row's log-probabilities are wanted.
        extras: What penalties, biases and bans need; None where no row has any.
    """

    seeds: np.ndarray
    positions: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    unread: np.ndarray
    restricted: bool = False
    need_logprobs: bool = False
    extras: "Extras | None" = None


class Extras(NamedTuple):
    """Arrays (R, V) and (R,) for `sample`."""

    repetition_penalty: np.ndarray
    frequency_penalty: np.ndarray
    presence_penalty: np.ndarray
    prompt_mask: np.ndarray
    output_counts: np.ndarray
    logit_bias: np.ndarray
    allowed: np.ndarray


def empty_rows(rows: int) -> Rows:
    """Returns parameters for padding rows."""
    # Separate arrays: the caller writes into them.
    return Rows(
        seeds=np.zeros((rows, 2), np.uint32),
        positions=np.zeros(rows, np.int32),
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        unread=np.zeros(rows, bool),
    )


def empty_extras(rows: int, vocab_size: int) -> Extras:
    """Returns extras that change nothing."""
    shape = (rows, vocab_size)
    return Extras(
        np.ones(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(shape, bool),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        np.ones(shape, bool),
    )
