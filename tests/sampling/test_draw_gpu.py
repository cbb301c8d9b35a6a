"""Drawing tokens on a GPU."""

import jax
import numpy as np
import pytest

from bijax.core.architecture import target_for
from bijax.sampling._arithmetic import Arithmetic
from bijax.sampling._draw import draw
from pallas_kernels.sampling.schedule.jax_triton import DrawTile
from tests.sampling.draw_cases import given, wrong

pytestmark = pytest.mark.gpu
pytest.importorskip("jax_triton")
from pallas_kernels.sampling.jax_triton import launch  # noqa: E402


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


@pytest.mark.parametrize("peak", [0.0, 12.0])
def test_what_is_skipped_moves_no_token(peak: float) -> None:
    """With one step in a block of threads nothing is skipped."""
    logits, temperature, seeds, positions = given(64, 128256)
    logits[np.arange(64), np.arange(64) * 2000] += np.float32(peak)
    arguments = logits, temperature, seeds, positions
    looked_at, *others = (
        np.asarray(jax.jit(lambda *arrays, t=tile: launch.draw(*arrays, tile=t, target=target_for("cuda")))(*arguments))
        for tile in (DrawTile(1), DrawTile(8), DrawTile(256), None)
    )
    assert all((tokens == looked_at).all() for tokens in others)
