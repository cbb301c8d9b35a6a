"""Products under `bijax.invariant` on a GPU: the same bits in whichever order the result is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtypes", [("bfloat16",) * 3, ("float16",) * 3, ("bfloat16",) * 2 + ("float32",), None])
@pytest.mark.parametrize("left_by_rows", [False, True])
@pytest.mark.parametrize("right_by_rows", [False, True])
def test_order_of_the_result_moves_no_bit(
    left_by_rows: bool, right_by_rows: bool, dtypes: tuple[str, str, str] | None
) -> None:
    kinds = dtypes or ("float32", "bfloat16", "float32")
    draw = np.random.default_rng(0)
    # Cancelling sums: another order of the products would show.
    left, right = (draw.standard_normal((3, n, 200)) * 2.0 ** draw.integers(-8, 8, (3, n, 200)) for n in (88, 160))
    a = jnp.asarray(left if left_by_rows else left.swapaxes(1, 2), kinds[0])
    b = jnp.asarray(right if right_by_rows else right.swapaxes(1, 2), kinds[1])
    numbers = (((2 if left_by_rows else 1,), (2 if right_by_rows else 1,)), ((0,), (0,)))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, numbers, preferred_element_type=jnp.dtype(kinds[2]))

    whole = jax.jit(bijax.invariant(product))(a, b)
    transposed_w = jax.jit(bijax.invariant(lambda a, b: product(a, b).transpose(0, 2, 1)))(a, b)
    assert_bits_equal(transposed_w, whole.swapaxes(1, 2))
    for rows in (1, 40):  # few rows are computed as they come
        few = a[:, :rows] if left_by_rows else a[:, :, :rows]
        assert_bits_equal(jax.jit(bijax.invariant(product))(few, b), whole[:, :rows])
