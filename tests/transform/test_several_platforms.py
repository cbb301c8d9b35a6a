"""Programs that are exported for several platforms have the bits of a CPU on a CPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import bijax
from bijax.testing import assert_bits_equal

W = jax.random.normal(jax.random.key(0), (12, 12)) / 3
X = np.random.default_rng(1).standard_normal((9, 12)).astype(np.float32)

PROGRAMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    # Their constants are hidden, or may be: a small number, and numbers of a wide range.
    "small": lambda x: x + jnp.full_like(x, 1e-39),
    "random": lambda x: x * jax.random.normal(jax.random.key(0), x.shape[1:]),
    "gradient": jax.grad(lambda x: (jax.nn.log_softmax(jnp.tanh(x @ W)) ** 2).sum()),
    "softmax": lambda x: jnp.exp(x - x.max(-1, keepdims=True)) / 3,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bits_on_a_cpu(name: str) -> None:
    function = jax.jit(bijax.invariant(PROGRAMS[name]))
    whole = function(X)
    kernels = [export.DisabledSafetyCheck.custom_call(name) for name in ("triton_kernel_call", "mosaic_gpu_v2")]
    for rows in (1, 9):
        with bijax.lowering_for("sm_90"):
            made = export.export(function, platforms=("cpu", "cuda"), disabled_checks=kernels)
            exported = made(jax.ShapeDtypeStruct((rows, 12), jnp.float32))
        assert exported.platforms == ("cpu", "cuda")
        assert_bits_equal(exported.call(X[:rows]), whole[:rows])


def test_control() -> None:
    """The plain program of one row, exported in the same way, has other bits than in the batch."""
    plain = jax.jit(PROGRAMS["gradient"])
    exported = export.export(plain, platforms=("cpu", "cuda"))(jax.ShapeDtypeStruct((1, 12), jnp.float32))
    with pytest.raises(AssertionError):
        assert_bits_equal([exported.call(row[None])[0] for row in X], list(plain(X)))
