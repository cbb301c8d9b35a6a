"""16-bit weights on a CPU, widened a panel of columns at a time, give the bits of weights that are widened at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.matmul.cpu import launch, narrow_weights
from tests.arrays import on_device
from tests.tiers import full_only

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the programs of this file are XLA:CPU's")

SIZE_OF_A_CORE = 1 << 13
"""Small panels: 64 columns of 576 elements on two cores, where there are 150 columns."""


@pytest.fixture(autouse=True)
def two_small_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_weights, "_ELEMENTS_OF_A_CORE", SIZE_OF_A_CORE)
    monkeypatch.setattr(narrow_weights.os, "cpu_count", lambda: 2)


@pytest.mark.parametrize("dtype", ["bfloat16", full_only("float16")])
@pytest.mark.parametrize("transpose_w", [False, True], ids=["columns", "rows"])
def test_panels_have_the_bits_of_whole_weights(dtype: str, transpose_w: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    k, n, rng = 576, 150, np.random.default_rng(0)
    assert narrow_weights.panel_width(k, n) == 64
    shape = (n, k) if transpose_w else (k, n)
    w = on_device(rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape)), dtype)
    x = on_device(rng.standard_normal((3, k)), dtype)
    panels = []

    def counted(*arguments: object, **options: object) -> jax.Array:
        panels.append(arguments)
        return narrow_weights.widened_in_panels(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "widened_in_panels", counted)

    @jax.jit
    def products(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
            return bijax.matmul(x, w, transpose_w=transpose_w, preferred_element_type=jnp.float32)

        whole = multiply(x.astype(jnp.float32), w.astype(jnp.float32))
        dots = (jnp.dot(rows, w.T if transpose_w else w, preferred_element_type=jnp.float32) for rows in (x, x[:1]))
        return multiply(x, w), multiply(x[:1], w), whole, *dots

    panelled, alone, whole, *dots = products(x, w)
    assert len(panels) == 2
    assert_bits_equal(panelled, whole)
    assert_bits_equal(alone, whole[:1])
    # The control: XLA's own product has another order, of these rows or, on processors where it has not, of one alone.
    assert any((np.asarray(dot).view(np.uint32) != np.asarray(whole)[: len(dot)].view(np.uint32)).any() for dot in dots)


@pytest.mark.parametrize(
    ("k", "n", "width"), [(576, 150, 64), (64, 64, 64), (64, 300, 192), (1 << 20, 70, 64), (3, 5, 5)]
)
def test_panels_are_about_equal(k: int, n: int, width: int) -> None:
    assert narrow_weights.panel_width(k, n) == width
