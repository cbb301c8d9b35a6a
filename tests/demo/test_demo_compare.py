"""Texts compared: bits, distances, and texts that part."""

import numpy as np
import pytest

from bijax.demo.compare import Text, compare, figures
from tests.demo.demo_fakes import shift


def text(tokens, logprobs=None):
    logprobs = [-float(t) for t in tokens] if logprobs is None else logprobs
    return Text(np.array(tokens, int), np.array(logprobs, np.float32))


def test_the_same_text():
    found = compare(0, text([3, 4, 5]), text([3, 4, 5]))
    assert found.distances.tolist() == [0, 0, 0]
    assert not found.differing.any()
    assert found.parted == 0


def test_one_bit_is_found():
    alone = text([3, 4, 5])
    found = compare(0, alone, Text(alone.tokens, shift(alone.logprobs, [0, 1, 300])))
    assert found.distances.tolist() == [0, 2**-21, 300 * 2**-21]
    assert found.differing.tolist() == [False, True, True]


def test_the_sign_of_zero_is_a_bit():
    found = compare(0, text([3], [0.0]), text([3], [-0.0]))
    assert found.differing.tolist() == [True]
    assert found.distances.tolist() == [0]
    assert not figures([found]).identical


@pytest.mark.parametrize(
    ("alone", "other", "common", "parted"),
    [
        ([3, 4, 5], [3, 9, 5], 1, 2),
        ([3, 4, 5], [9, 4, 5], 0, 3),
        ([3, 4, 5], [3, 4], 2, 1),
        ([3, 4], [3, 4, 5, 6], 2, 2),
        ([3, 4], [3, 9, 5, 6], 1, 3),
        ([], [3], 0, 1),
        ([], [], 0, 0),
    ],
)
def test_texts_that_part(alone, other, common, parted):
    found = compare(0, text(alone), text(other))
    assert found.common == found.differing.size == common
    assert found.parted == parted
    assert figures([found]).texts_differing == (parted > 0)


def test_nothing_is_compared_after_the_parting():
    # The same token again, with another past.
    found = compare(0, text([3, 4, 5]), text([3, 9, 5], [-3, -1, -77]))
    assert found.differing.tolist() == [False]
    assert found.parted == 2


def test_figures_add_up():
    alone = [text([3, 4]), text([5, 6])]
    moved = Text(alone[0].tokens, shift(alone[0].logprobs, [0, 7]))
    comparisons = [
        compare(0, alone[0], moved),
        compare(1, alone[1], alone[1]),
        compare(1, alone[1], text([5, 8])),
        compare(1, alone[1], text([5, 8])),
    ]
    found = figures(comparisons)
    assert (found.texts, found.texts_differing) == (4, 2)
    assert (found.tokens, found.tokens_differing, found.tokens_parted) == (2 + 2 + 1 + 1, 1, 2)
    assert found.largest_difference == 7 * 2**-21
    assert not found.identical


def test_nothing_compared_proves_nothing():
    assert not figures([compare(0, text([]), text([]))]).identical
    assert not figures([]).identical
    assert figures([compare(0, text([3]), text([3]))]).identical
