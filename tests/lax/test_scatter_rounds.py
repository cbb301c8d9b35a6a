"""Scatters that take all targets at once, as on a GPU: the bits of one update after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bijax.testing import assert_bits_equal
from pallas_kernels.contract import FoldContract, chunk_contract
from pallas_kernels.embedding import portable as embedding
from pallas_kernels.embedding import rounds as embedding_rounds
from pallas_kernels.parts.xla import rounds
from pallas_kernels.scatter.portable import scatter_windows
from pallas_kernels.scatter.rounds import scatter_rounds
from tests.arrays import on_device
from tests.tiers import full_only

SHAPES = {
    "rows": ((50, 6), (1, 6)),
    "elements": ((20, 9), (1, 1)),
    "middle": ((4, 5, 6), (4, 1, 6)),
    "one target": ((3, 4), (3, 4)),
}
"""Arrays and windows."""

LOADS: dict[str, Callable[..., Any]] = {
    "even": lambda rng, size, m: rng.integers(0, size, m),
    "uneven": lambda rng, size, m: np.minimum(rng.zipf(1.5, m) - 1, size - 1),
    "all at one": lambda rng, size, m: np.full(m, size - 1),
}


def both(m: int, name: str, load: str, dtype: str, combine: Any) -> tuple[jax.Array, jax.Array]:
    """Returns a scatter in rounds and one update after the other."""
    rng = np.random.default_rng(m)
    shape, window = SHAPES[name]
    columns = [
        LOADS[load](rng, size, m) if n < size else np.zeros(m, int) for n, size in zip(window, shape, strict=True)
    ]
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)
    updates = rng.standard_normal((m, *window)) * 10.0 ** rng.integers(-3, 3, (m, *window))
    arguments = (
        jnp.asarray(x).astype(dtype),
        on_device(np.stack(columns, -1), jnp.int32),
        on_device(rng.random(m) < 0.9),
        jnp.asarray(updates).astype(dtype),
    )
    contract = FoldContract("scatter")
    first, second = (
        jax.jit(lambda *a, scatter=scatter: scatter(*a, combine=combine, contract=contract))(*arguments)
        for scatter in (scatter_rounds, scatter_windows)
    )
    return first, second


@pytest.mark.tier("full", fast=("65-bfloat16-sub-rows-even", "65-float16-mul-rows-even"))
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("dtype", "combine"), [("float32", lax.add), ("bfloat16", lax.sub), ("float16", lax.mul)])
@pytest.mark.parametrize("m", [65, 1, 300])
def test_bits_of_one_after_the_other(m: int, name: str, load: str, dtype: str, combine: Any) -> None:
    assert_bits_equal(*both(m, name, load, dtype, combine))


@pytest.mark.parametrize("step", [1, 2**9])
def test_many_steps(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets of several blocks, of which some have more updates than a step takes."""
    monkeypatch.setattr(rounds, "STEP", step)
    monkeypatch.setattr(rounds, "AT_ONCE", 3)
    assert_bits_equal(*both(300, "elements", "uneven", "float32", lax.add))


def test_names_that_do_not_fit_in_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets of a large array are sorted by the axes one after the other."""
    monkeypatch.setattr(rounds, "_LARGEST", 100)
    assert_bits_equal(*both(65, "elements", "even", "float32", lax.add))


@pytest.mark.tier("full")
@pytest.mark.parametrize("m", [full_only(5), 300])
def test_gradients_of_an_embedding(m: int) -> None:
    rng = np.random.default_rng(m)
    tokens = jnp.asarray(np.minimum(rng.zipf(1.3, m) - 2, 52), jnp.int32)  # -1, 51 and 52 are outside
    g = on_device(rng.standard_normal((m, 7)), jnp.bfloat16)
    for total in (jnp.zeros((50, 7), jnp.bfloat16), on_device(rng.standard_normal((50, 7)), jnp.float32)):
        one, other = (
            jax.jit(lambda *a, f=f: f.table_gradient(*a, contract=chunk_contract()))(tokens, g, total)
            for f in (embedding_rounds, embedding)
        )
        assert_bits_equal(one, other)
