"""The comparison of what row programs copy with what XLA makes of it, and its control."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.core.architecture import cuda_device
from bijax.transform.fusion import _probe
from pallas_kernels.row_program import hopper

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_probe, "_known", {})
    jax.clear_caches()
    yield
    jax.clear_caches()


def program() -> jax.stages.Compiled:
    softmax = bijax.invariant(lambda x: jax.nn.softmax(x, -1))
    return jax.jit(softmax).lower(jnp.ones((8, 1024))).compile()


def test_the_functions_are_those_of_this_jaxlib() -> None:
    device = cuda_device()
    assert device is not None
    pieces, copied = _probe.both(device)
    for name, a, b in zip(_probe.FUNCTIONS, pieces, copied, strict=True):
        differ = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
        assert not differ.any(), (name, int(differ.sum()))
    assert "rows_max" in str(program().as_text()) or "bijax_row_program" in str(program().as_text())


@pytest.mark.parametrize("function", _probe.FUNCTIONS)
def test_another_function_is_found(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {
        "exp": "{ .reg .f32 t; mul.rn.f32 t, $1, 0f3FB8AA3B; ex2.approx.f32 $0, t; }",
        "div": "div.rn.f32 $0, $1, $2;",
        "rsqrt": "{ .reg .f32 t; sqrt.rn.f32 t, $1; rcp.rn.f32 $0, t; }",
    }
    monkeypatch.setitem(hopper._PTX, function, other[function])  # type: ignore[misc]
    with pytest.raises(bijax.UnsupportedError, match=rf"{function}: [1-9]\d*"):
        program()
