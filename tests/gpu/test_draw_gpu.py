"""Drawing tokens on a GPU."""

import jax
import numpy as np
import pytest

from bijax.sampling._arithmetic import Arithmetic
from bijax.sampling._draw import draw
from tests.sampling.test_draw import given, wrong

pytestmark = pytest.mark.gpu


def test_rows_get_the_tokens_of_float64_in_any_batch() -> None:
    arguments = given(64, 128256)
    run = jax.jit(lambda *arrays: draw(*arrays, Arithmetic()))
    tokens = np.asarray(run(*arguments))
    assert wrong(tokens, arguments) == []
    order = np.random.default_rng(0).permutation(64)
    for size in (1, 7, 33):
        for start in range(0, 64 - size, 9):
            rows = order[start : start + size]
            assert (np.asarray(run(*(a[rows] for a in arguments))) == tokens[rows]).all()
