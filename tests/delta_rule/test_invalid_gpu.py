"""Invalid sequences become nan in place, on a GPU, as by XLA's choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.core.architecture import target_for
from bijax.testing import assert_bits_equal
from tests.jax_triton.packages import skip_without_jax_triton

pytestmark = pytest.mark.gpu
skip_without_jax_triton()
from pallas_kernels.delta_rule.jax_triton.invalid import nan_if_invalid  # noqa: E402


@pytest.mark.parametrize(("shape", "dtype"), [((4, 2048, 32, 128), "bfloat16"), ((3, 5, 2, 64), "float32")])
def test_invalid_sequences(shape: tuple[int, ...], dtype: str) -> None:
    y = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    in_place = jax.jit(lambda y, invalid: nan_if_invalid(y, invalid, target=target_for("cuda"))[0])
    for invalid in ([True, False, True, False], [False] * 4, [True] * 4):
        given = jnp.asarray(np.array(invalid[: shape[0]]))
        assert_bits_equal(
            in_place(y, given), jax.jit(lambda y, i: jnp.where(i[:, None, None, None], jnp.nan, y))(y, given)
        )
